"""A store to sample from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_kit import Store

from user_sys.store.store import StoreWriter


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with StoreWriter.open(tmp_path / "store") as writer:
        yield Store(tmp_path / "store", writer)
