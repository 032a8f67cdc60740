"""A store of an earlier program opens, is read, and takes new chunks; columns that programs add later."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from make_sample_store import CHUNKS, EPISODES
from store_kit import chunk, stored

from user_sys.codec import checksum
from user_sys.errors import StoreVersionMismatch
from user_sys.store.labels import DeleteLabel, UndoLabel, column_labels
from user_sys.store.maintenance import add_labels, compact_store
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.verify import verify_log

SAMPLE = Path(__file__).with_name("store-format-2.tar.gz")
KEPT = [*(f"e{n}" for n in range(1, EPISODES)), "later"]


def check(path: Path, episodes: list[str]) -> None:
    with StoreReader.open(path) as reader:
        reader.refresh()
        assert stored(reader) == [(name, index) for name in episodes for index in range(CHUNKS)]
        assert not reader.damaged and all(each.complete for each in reader.episodes())
        for row, (_, index) in enumerate(stored(reader)):
            assert (reader.read(row).columns["observation.state"] == index).all()
        known = {each.episode: each for each in reader.episodes()}
        assert known["e1"].success is False and known["e1"].labelled_by == "ada" and known["e3"].success
        first = int(reader.index.chunks.first_row[2])
        assert reader.index.steps.reward[first : first + 4].tolist() == [0.5, 0.5, 0.25, 0.5]


def test_store_of_format_2_opens_and_continues(tmp_path: Path) -> None:
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "store"
    check(path, KEPT)
    with StoreWriter.open(path) as writer:
        assert not writer.append(chunk("e5", 1, end=True).encode()), "it is stored already"
        assert not writer.append(chunk("e0", 0).encode()), "its episode is deleted"
        for index in range(CHUNKS):
            writer.append(chunk("new", index, end=index == CHUNKS - 1).encode())
    assert not verify_log(path)
    check(path, [*KEPT, "new"])
    add_labels(path, [DeleteLabel(episode="e6", labeller="ada", at_unix_ns=2)])
    assert not compact_store(path).damaged
    check(path, [name for name in [*KEPT, "new"] if name != "e6"])


@pytest.mark.parametrize(("version", "age"), [(1, "an older"), (3, "a newer")])
def test_store_of_another_format_is_refused_unchanged(version: int, age: str, tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path) as writer:
        writer.append(chunk("e0").encode())
    segment = tmp_path / "0000000000.seg"
    raw = bytearray(segment.read_bytes())
    raw[8:12] = version.to_bytes(4, "little")
    raw[60:64] = checksum(bytes(raw[:60])).to_bytes(4, "little")
    segment.write_bytes(raw)
    expected = f"format {version}, written by {age} program; this one reads format 2: open the store with the program"
    with pytest.raises(StoreVersionMismatch, match=expected):
        StoreReader.open(tmp_path).refresh()
    with pytest.raises(StoreVersionMismatch, match=expected):
        StoreWriter.open(tmp_path)
    assert segment.read_bytes() == raw


def test_column_labels_survive_sealing_compaction_and_undo(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreWriter.open(path, segment_bytes=6000) as writer:
        for episode in range(6):
            writer.append(chunk(f"e{episode}", end=True).encode())
            for label in column_labels(f"e{episode}", {"advantage": np.full(2, episode)}, "recap"):
                writer.append_label(label)
    wrong = column_labels("e2", {"advantage": [9.0, 9.0]}, "recap")[0]
    undo = UndoLabel(episode="e2", labeller="ada", at_unix_ns=2, undone_at_unix_ns=wrong.at_unix_ns)
    add_labels(path, [wrong, undo, DeleteLabel(episode="e0", labeller="ada", at_unix_ns=1)])
    compact_store(path)
    with StoreReader.open(path) as reader:
        reader.refresh()
        rows = reader.index.chunks.first_row[: len(reader.index.chunks)]
        found = reader.index.labelled_column("advantage", rows)
        assert found is not None and found.tolist() == [1, 2, 3, 4, 5] and not reader.damaged
    assert not verify_log(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"advantage": [0.0, float("nan")]}, "'advantage' of e1 is not finite at step 4"),
        ({"value": [1e300]}, "'value' of e1 is not finite at step 3"),
        ({"reward": [1.0]}, "'reward' is a column of the robot or has labels of its own"),
    ],
)
def test_invalid_columns_are_refused(columns: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        column_labels("e1", columns, "recap", first_step=3)  # type: ignore[arg-type]
