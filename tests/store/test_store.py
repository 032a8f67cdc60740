"""The store: idempotent ingestion, episode summaries, and labels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from store_kit import chunk, stored

from user_sys.commands.main import main
from user_sys.commands.store_inspect import summarise_store
from user_sys.errors import StoreCorrupt, StoreError, WireError
from user_sys.store.labels import DeleteLabel, SuccessLabel
from user_sys.store.log_writer import LogWriter
from user_sys.store.record_format import segment_path
from user_sys.store.store import StoreReader, StoreWriter


def label(episode: str, success: bool, labeller: str = "ada") -> SuccessLabel:
    return SuccessLabel(episode=episode, success=success, labeller=labeller, at_unix_ns=1)


def test_repeated_chunk_is_ignored_after_restart(tmp_path: Path) -> None:
    packet = chunk("a").encode()
    with StoreWriter.open(tmp_path) as writer:
        assert writer.append(packet) and not writer.append(packet)
        assert writer.pending_bytes > 0
        writer.sync()
        assert writer.pending_bytes == 0
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        assert writer.chunks == 1 and writer.has("a", 0) and not writer.has("a", 1)
        assert not writer.append(packet)
        assert writer.append(chunk("a", 1).encode())
        writer.sync()
        reader.refresh()
        assert stored(reader) == [("a", 0), ("a", 1)]


@pytest.mark.parametrize("sealed", [False, True])
def test_episode_refuses_chunks_of_another_robot(tmp_path: Path, sealed: bool) -> None:
    def intrude(writer: StoreWriter) -> None:
        for index in (0, 1, 7):  # a stored one, the next one, one behind a gap
            with pytest.raises(WireError, match=r"the episode a belongs to panda-0; panda-1 cannot write to it"):
                writer.append(chunk("a", index, end=index == 1, robot="panda-1").encode())

    with StoreWriter.open(tmp_path) as writer:
        writer.append(chunk("a").encode())
        intrude(writer)
        if sealed:
            writer.rotate()
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        intrude(writer)
        assert writer.append(chunk("a", 1, end=True).encode())
        assert writer.append(chunk("b", robot="panda-1").encode())
        writer.sync()
        reader.refresh()
        assert stored(reader) == [("a", 0), ("a", 1), ("b", 0)]
        assert [(e.robot, e.complete) for e in reader.episodes()] == [("panda-0", True), ("panda-1", False)]


def test_chunk_round_trips(tmp_path: Path) -> None:
    sent = chunk("a", end=True)
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        writer.append(sent.encode())
        writer.sync()
        change = reader.refresh()
        assert (change.rows, change.chunks) == (range(4), range(1))
        got = reader.read(0)
        assert got.header == sent.header
        for name, column in sent.columns.items():
            np.testing.assert_array_equal(got.columns[name], column)
            assert not got.columns[name].flags.writeable
        assert not reader.refresh().chunks


@pytest.mark.parametrize("packet", [b"", b"USP2garbage", chunk("a").encode()[:-64]])
def test_invalid_packet_is_not_stored(tmp_path: Path, packet: bytes) -> None:
    with StoreWriter.open(tmp_path) as writer:
        with pytest.raises(WireError):
            writer.append(packet)
        assert writer.chunks == 0 and writer.pending_bytes == 0


def test_episode_summary_covers_all_chunks(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        for each in (chunk("a", 0), chunk("b", 0), chunk("a", 1, end=True)):
            writer.append(each.encode())
        writer.sync()
        reader.refresh()
        a, b = reader.episodes()
        assert (a.episode, a.steps, a.chunks, a.episode_return, a.intervention_steps) == ("a", 8, 2, 4.0, 4)
        assert a.complete and a.success is True and a.policy_versions == (3, 4)
        assert not b.complete and b.success is None and b.policy_versions == (3, 3)


def test_episode_with_a_gap_is_incomplete(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        writer.append(chunk("a", 0).encode())
        writer.append(chunk("a", 2, end=True).encode())
        writer.sync()
        reader.refresh()
        assert not reader.episodes()[0].complete
        writer.append(chunk("a", 1).encode())
        writer.sync()
        reader.refresh()
        assert reader.episodes()[0].complete


def test_newest_label_wins_and_is_durable(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path) as writer:
        writer.append_label(label("a", True))
        writer.append(chunk("a", end=True, success=None).encode())
        writer.append_label(label("a", False, "grace"))
    with StoreReader.open(tmp_path) as reader:
        reader.refresh()
        (episode,) = reader.episodes()
        assert episode.success is False and episode.labelled_by == "grace"
        end = reader.read(0).header.end
        assert end is not None and end.success is False and end.reward_source == "person"


def test_damaged_chunk_is_reported_and_can_be_resent(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path) as writer:
        for index in range(3):
            writer.append(chunk("a", index).encode())
    with StoreReader.open(tmp_path) as reader:
        reader.refresh()
        with segment_path(tmp_path, 0).open("r+b") as file:
            file.seek(reader.index.record_ref(1).offset + 200)
            file.write(b"\xff\x00\xff")
        with pytest.raises(StoreCorrupt):
            reader.read(1)
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        reader.refresh()
        assert stored(reader) == [("a", 0), ("a", 2)]
        assert len(reader.damaged) == 1
        assert not writer.append(chunk("a", 0).encode())
        assert writer.append(chunk("a", 1).encode())


def test_undecodable_record_is_damage_and_unknown_kinds_are_skipped(tmp_path: Path) -> None:
    with LogWriter.open(tmp_path) as log:
        log.append(1, b"no chunk")
        log.append(77, b"of a later program")
        log.append(1, chunk("a").encode())
    with StoreReader.open(tmp_path) as reader:
        assert len(reader.refresh().chunks) == 1 and len(reader.damaged) == 1


def test_reader_waits_for_store_creation(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        StoreReader.open(tmp_path / "store", wait_s=0.1)
    creator = threading.Timer(0.1, lambda: StoreWriter.open(tmp_path / "store").close())
    creator.start()
    StoreReader.open(tmp_path / "store", wait_s=20).close()
    creator.join(120)


def test_inspect_shows_totals_and_newest_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store"
    with StoreWriter.open(path) as writer:
        for number in range(5):
            writer.append(chunk(f"episode-{number}", end=True, success=number > 0).encode())
    assert main(["store", "inspect", str(path), "--last", "2"]) == 0
    text = capsys.readouterr().out
    assert "5 (4 succeeded, 1 failed, 5 complete)" in text and "20 (10 by a person)" in text
    assert "episode-4" in text and "episode-2" not in text
    assert main(["store", "inspect", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["episodes"] == 5 and printed["damaged"] == [] and printed["embodiments"] == {"e1": 5}
    assert main(["store", "inspect", str(path)]) == 0
    assert "episode-4" in capsys.readouterr().out


def test_inspect_marks_deleted_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter.open(tmp_path) as writer:
        writer.append(chunk("a", end=True).encode())
        writer.append_label(DeleteLabel(episode="a", labeller="ada", at_unix_ns=1))
    assert main(["store", "inspect", str(tmp_path)]) == 0
    assert "deleted" in capsys.readouterr().out and summarise_store(tmp_path).last[0].deleted


def test_inspect_lists_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter.open(tmp_path) as writer:
        for index in range(3):
            writer.append(chunk("a", index).encode())
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.seek(700)
        file.write(b"\xff" * 8)
    summary = summarise_store(tmp_path)
    assert len(summary.damaged) == 1 and summary.chunks == 2
    assert main(["store", "inspect", str(tmp_path)]) == 1
    assert "1 records" in capsys.readouterr().out


def test_inspect_without_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        summarise_store(tmp_path)
    assert "\n" not in str(caught.value)


MOUNTED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_kit import chunk
from user_sys.errors import StoreFull
from user_sys.store.store import StoreReader, StoreWriter
room = Path(sys.argv[1])
ballast = room / "ballast"
ballast.write_bytes(bytes(1_500_000))
acknowledged, index, full = 0, 0, 0
with StoreWriter.open(room / "store") as writer, StoreReader.open(room / "store") as reader:
    while index < 400:
        try:
            writer.append(chunk("a", index, steps=100).encode())
            index += 1
            writer.sync()
        except StoreFull:
            full += 1
            assert full < 3
            reader.refresh()
            assert len(reader.index.chunks) >= acknowledged and not reader.damaged
            ballast.unlink()
            continue
        acknowledged = index
assert full, "the disk never was full"
with StoreReader.open(room / "store") as reader:
    reader.refresh()
    assert reader.index.chunks.index.tolist() == list(range(400)) and not reader.damaged
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_disk_fills_up_and_is_freed(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
    code = ["-c", MOUNTED, str(tmp_path), str(Path(__file__).parent)]
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("may not mount here")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, *code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
