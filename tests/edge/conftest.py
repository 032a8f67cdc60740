from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private, short folder for local sockets and locks, for this test and the processes that it starts."""
    folder = Path(tempfile.mkdtemp(prefix="us-", dir="/tmp"))
    monkeypatch.setenv("USER_SYS_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
