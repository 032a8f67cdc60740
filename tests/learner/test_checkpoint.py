"""Checkpoints: whole or absent, newest readable wins, nothing blocks."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from user_sys.errors import RunError, WireError
from user_sys.learner.checkpoint import Checkpoint, CheckpointWriter, decode_checkpoint, latest, save, sole_writer


def example(updates: int) -> Checkpoint:
    rng = np.random.default_rng(updates)
    arrays = {"w": rng.standard_normal((3, 4)).astype(np.float32), "rng": rng.integers(0, 255, 9, np.uint8)}
    return Checkpoint(updates, {"training_s": 0.1 * updates, "version": updates, "sampler": "{}"}, arrays)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, example(7), keep=2)
    back = latest(tmp_path)
    assert back is not None and (back.updates, back.scalars) == (7, example(7).scalars)
    for name, value in example(7).arrays.items():
        np.testing.assert_array_equal(back.arrays[name], value)


def test_only_the_newest_are_kept_and_no_leavings(tmp_path: Path) -> None:
    for updates in (5, 900, 1000, 12000):
        save(tmp_path, example(updates), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000001000.checkpoint", "000000012000.checkpoint"]


def test_nothing_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_torn_or_damaged_checkpoint_is_ever_taken(draw: st.DataObject) -> None:
    raw = example(1).encode()
    cut = raw[: draw.draw(st.integers(0, len(raw) - 1))]
    flipped = bytearray(raw)
    flipped[draw.draw(st.integers(0, len(raw) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    for wrong in (cut, bytes(flipped)):
        with pytest.raises(WireError):
            decode_checkpoint(wrong)


@pytest.mark.parametrize("spoil", ["torn", "foreign", "version"])
def test_an_unusable_one_is_skipped_with_a_log_line(
    tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, example(1), keep=3)
    newer = save(tmp_path, example(2), keep=3)
    raw = newer.read_bytes()
    newer.write_bytes({"torn": raw[:-5], "foreign": b"PK" + raw, "version": raw[:4] + b"\x63\0\0\0" + raw[8:]}[spoil])
    with caplog.at_level(logging.WARNING):
        back = latest(tmp_path)
    assert back is not None and back.updates == 1
    assert newer.name in caplog.text


def test_the_writer_takes_one_at_a_time_and_reports_a_failure(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "good", keep=2)
    assert writer.write(example(1))
    writer.finish()
    assert (tmp_path / "good" / "000000000001.checkpoint").is_file()
    (tmp_path / "file").write_text("in the way")
    failing = CheckpointWriter(tmp_path / "file", keep=2)
    failing.write(example(1))
    with pytest.raises(RunError, match="cannot be written"):
        failing.finish()


def test_a_full_disk_leaves_the_former_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, example(1), keep=2)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        save(tmp_path, example(2), keep=2)
    monkeypatch.undo()
    back = latest(tmp_path)
    assert back is not None and back.updates == 1


def test_a_learner_that_was_replaced_and_is_alive_still_keeps_its_successor_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave, never, took_over = threading.Event(), threading.Event(), threading.Event()

    def succeed() -> None:
        with sole_writer(tmp_path / "checkpoints", never) as alone:
            assert alone
            took_over.set()

    with sole_writer(tmp_path / "checkpoints", never) as alone:
        assert alone
        leave.set()
        with sole_writer(tmp_path / "checkpoints", leave) as second:
            assert not second, "it was told to leave while it waited"
        successor = threading.Thread(target=succeed, daemon=True)
        successor.start()
        deadline = time.monotonic() + 120
        while "learner.waiting" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "learner.waiting another process has" in caplog.text and not took_over.is_set()
    assert took_over.wait(120)
    successor.join(120)
    assert latest(tmp_path / "checkpoints") is None, "the lock is no checkpoint"
