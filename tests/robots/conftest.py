from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def private_runtime(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each test has its own folder for device locks; a fleet has one anyway."""
    if request.node.get_closest_marker("fleet") is None:
        monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path_factory.mktemp("runtime")))
