"""Checkpoints: whole or absent, newest readable wins, nothing blocks."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from user_sys.errors import DiskFull, RunError, WireError
from user_sys.learner import checkpoint
from user_sys.learner.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    exclusive_writer,
    load_latest_checkpoint,
    quarantine_checkpoints,
    read_checkpoint,
    save_checkpoint,
    scan_checkpoints,
)


def example(updates: int) -> Checkpoint:
    rng = np.random.default_rng(updates)
    arrays = {"w": rng.standard_normal((3, 4)).astype(np.float32), "rng": rng.integers(0, 255, 9, np.uint8)}
    return Checkpoint(updates, {"training_s": 0.1 * updates, "version": updates, "sampler": "{}"}, arrays)


def updates_of(folder: Path) -> list[int]:
    """Of the checkpoints in `folder`, newest first."""
    return [int(path.stem.split("-")[1]) for path in sorted(folder.glob("*.checkpoint"), reverse=True)]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for updates in (5, 900, 1000, 12000):
        save_checkpoint(tmp_path, example(updates), keep=2)
    assert updates_of(tmp_path) == [12000, 1000] and len(list(tmp_path.iterdir())) == 2


def test_checkpoint_of_the_same_update_replaces_the_former(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, example(5), keep=1)
    save_checkpoint(tmp_path, replace(example(5), scalars={"version": 9}), keep=1)
    back = load_latest_checkpoint(tmp_path)
    assert back is not None and back.scalars == {"version": 9} and updates_of(tmp_path) == [5]


def test_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert load_latest_checkpoint(tmp_path / "absent") is None


def test_large_checkpoint_of_several_files_loads_equal(tmp_path: Path) -> None:
    arrays = {f"w{n}": np.full(1000 * (n + 1), n, np.float32) for n in range(4)}
    path = save_checkpoint(tmp_path, Checkpoint(1, {}, arrays), keep=1, shard_bytes=9000)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(sizes) == 4 and max(sizes) < 17000, "an array is not split"
    back = load_latest_checkpoint(tmp_path)
    assert back is not None and back.arrays.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(back.arrays[name], value)


def test_unreadable_scalar_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, example(1), keep=1)
    with pytest.raises(RunError, match="could not be read back"):
        save_checkpoint(tmp_path, Checkpoint(2, {"loss": float("nan")}, {}), keep=1)
    assert updates_of(tmp_path) == [1] and len(list(tmp_path.iterdir())) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_torn_or_damaged_checkpoint_is_never_loaded(draw: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder), example(1), keep=1, shard_bytes=20)
        file = draw.draw(st.sampled_from(sorted(path.iterdir())))
        raw = file.read_bytes()
        at = draw.draw(st.integers(0, len(raw) - 1))
        wrong = raw[:at]
        if draw.draw(st.booleans()):
            wrong += bytes([raw[at] ^ 1 << draw.draw(st.integers(0, 7))]) + raw[at + 1 :]
        file.write_bytes(wrong)
        with pytest.raises(WireError):
            read_checkpoint(path)
        with pytest.raises(RunError, match=path.name):
            load_latest_checkpoint(Path(folder))


def spoil(path: Path, how: str) -> str:
    """What is then said of the checkpoint at `path`."""
    index, file = path / "index.json", next(path.glob("*.safetensors"))
    match how:
        case "torn":
            file.write_bytes(file.read_bytes()[:-5])
            return "bytes, expected"
        case "damaged":
            file.write_bytes(file.read_bytes()[:-1] + b"\xff")
            return "digest differs"
        case "incomplete":
            file.unlink()
            return "is missing"
        case _:
            index.write_bytes(index.read_bytes().replace(b'"format":3', b'"format":99'))
            return "format version is 99; this program reads 3"


SPOILT = ["torn", "damaged", "incomplete", "other version"]


@pytest.mark.parametrize("how", SPOILT)
def test_unreadable_checkpoint_is_named_and_an_older_one_loaded(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, example(1), keep=3)
    newer = save_checkpoint(tmp_path, example(2), keep=3)
    said = spoil(newer, how)
    with caplog.at_level(logging.WARNING):
        back = load_latest_checkpoint(tmp_path)
    assert back is not None and back.updates == 1
    assert newer.name in caplog.text and said in caplog.text
    assert list(scan_checkpoints(tmp_path).unreadable) == [newer]


@pytest.mark.parametrize("how", SPOILT)
def test_folder_of_unreadable_checkpoints_is_refused(tmp_path: Path, how: str) -> None:
    both = [save_checkpoint(tmp_path, example(updates), keep=3) for updates in (1, 2)]
    said = [spoil(path, how) for path in both][0]
    with pytest.raises(RunError, match="no checkpoint .* can be read.*--restart-if-unreadable") as caught:
        load_latest_checkpoint(tmp_path)
    assert all(path.name in str(caught.value) for path in both) and str(caught.value).count(said) == 2
    files = {path: sorted(path.rglob("*")) for path in both}
    aside = quarantine_checkpoints(tmp_path)
    assert load_latest_checkpoint(tmp_path) is None, "training begins again"
    assert {path.name for path in aside.iterdir()} == {path.name for path in files}, "nothing is deleted"
    save_checkpoint(tmp_path, example(1), keep=1)
    spoil(save_checkpoint(tmp_path, example(3), keep=1), how)
    assert quarantine_checkpoints(tmp_path) != aside


def test_pruning_keeps_the_newest_readable_checkpoints(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, example(1), keep=9)
    second = save_checkpoint(tmp_path, example(2), keep=9)
    damaged = save_checkpoint(tmp_path, example(9), keep=9)
    spoil(damaged, "damaged")
    save_checkpoint(tmp_path, example(3), keep=3)
    assert first.exists() and second.exists(), "three readable ones"
    newest = save_checkpoint(tmp_path, example(4), keep=1)
    back = load_latest_checkpoint(tmp_path)
    assert back is not None and back.updates == 4 and list(tmp_path.glob("*.checkpoint")) == [newest]


def test_partial_checkpoint_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, example(1), keep=2)
    shutil.copytree(path, tmp_path / "000001-000000000002.tmp")
    (tmp_path / "000001-000000000002.tmp" / "index.json").unlink()
    (tmp_path / "frozen-ab.tmp").write_text("frozen weights of a killed writer")
    back = load_latest_checkpoint(tmp_path)
    assert back is not None and back.updates == 1
    save_checkpoint(tmp_path, example(2), keep=1)
    assert len(list(tmp_path.iterdir())) == 1


def test_checkpoint_writer_reports_a_failure(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "good", keep=2)
    writer.write(example(1))
    writer.finish()
    assert updates_of(tmp_path / "good") == [1]
    (tmp_path / "file").write_text("in the way")
    failing = CheckpointWriter(tmp_path / "file", keep=2)
    failing.write(example(1))
    with pytest.raises(RunError, match="cannot be written"):
        failing.finish()


def test_large_checkpoint_has_the_time_of_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "WRITE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(checkpoint, "MIN_DISK_BYTES_PER_S", 1.0)
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.write(example(1))
    writer.finish()
    assert updates_of(tmp_path) == [1]
    monkeypatch.setattr(checkpoint, "MIN_DISK_BYTES_PER_S", 1e15)
    fsync, may_sync = os.fsync, threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: (may_sync.wait(60), fsync(fd)))
    writer.write(example(2))
    try:
        with pytest.raises(RunError, match="took longer than 0 s"):
            writer.finish()
    finally:
        may_sync.set()


def test_new_folder_of_checkpoints_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    folder = tmp_path / "run" / "checkpoints"
    save_checkpoint(folder, example(1), keep=2)
    assert synced.issuperset(map(str, (folder, folder.parent, tmp_path)))


def test_full_disk_keeps_the_former_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = save_checkpoint(tmp_path, example(1), keep=2)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"waiting for disk space in .*: needs \S+ MB, \S+ MB free"):
        save_checkpoint(tmp_path, example(2), keep=2)
    monkeypatch.undo()
    back = load_latest_checkpoint(tmp_path)
    assert back is not None and back.updates == 1 and list(tmp_path.iterdir()) == [former]


def test_successor_waits_for_a_living_learner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave, never, took_over = threading.Event(), threading.Event(), threading.Event()

    def succeed() -> None:
        with exclusive_writer(tmp_path / "checkpoints", never) as alone:
            assert alone
            took_over.set()

    with exclusive_writer(tmp_path / "checkpoints", never) as alone:
        assert alone
        leave.set()
        with exclusive_writer(tmp_path / "checkpoints", leave) as second:
            assert not second, "it was told to leave while it waited"
        successor = threading.Thread(target=succeed, daemon=True)
        successor.start()
        deadline = time.monotonic() + 120
        while "learner.waiting" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "learner.waiting another process holds" in caplog.text and not took_over.is_set()
    assert took_over.wait(120)
    successor.join(120)
    assert load_latest_checkpoint(tmp_path / "checkpoints") is None, "the lock is no checkpoint"
