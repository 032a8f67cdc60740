from __future__ import annotations

import os
from pathlib import Path

import pytest

from hal.durable import remove_durably, replace_durably


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []
    really = os.fsync

    def fsync(handle: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{handle}"))
        really(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_new_file_is_synced_with_each_created_folder(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "runs" / "edge" / "latch.json"
    replace_durably(path, b"pressed")
    assert path.read_bytes() == b"pressed" and [each.name for each in path.parent.iterdir()] == ["latch.json"]
    (content,) = [each for each in synced if Path(each).name.startswith(".latch.json.")]
    folders = [each for each in synced if each != content]
    assert set(folders) == {str(tmp_path), str(tmp_path / "runs"), str(path.parent)} and synced[-1] == str(path.parent)
    synced.clear()
    replace_durably(path, b"again")
    assert synced[1:] == [str(path.parent)]
    remove_durably(path)
    assert synced[2:] == [str(path.parent)] and not path.exists()
