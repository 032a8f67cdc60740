from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_kit import END_S

from user_sys.edge import driver_client


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private, short folder for local sockets and locks, for this test and the processes that it starts.

    It raises the deadlines of driver requests, so that a busy machine or disk causes no timeout.
    """
    for name in ("LATCH_DEADLINE_S", "PERIOD_DEADLINE_S"):
        monkeypatch.setattr(driver_client, name, END_S)
    folder = Path(tempfile.mkdtemp(prefix="us-", dir="/tmp"))
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
