"""The store: idempotent ingestion, episode summaries, labels, and readers in other processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from store_kit import chunk, segment_path, stored

from user_sys.commands.main import main
from user_sys.errors import StoreCorrupt, StoreError, WireError
from user_sys.store.files import Files
from user_sys.store.labels import DeleteLabel, RewardLabel, UndoLabel
from user_sys.store.maintenance import reclaim_space
from user_sys.store.store import StoreReader, StoreWriter

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
EPISODES, CHUNKS, READERS = 60, 4, 3


def test_repeated_chunk_is_ignored_after_restart(tmp_path: Path) -> None:
    packet = chunk("a").encode()
    with StoreWriter.open(tmp_path) as writer:
        assert writer.append(packet) and not writer.append(packet)
        assert writer.pending_bytes > 0
        writer.sync()
        assert writer.pending_bytes == 0
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        assert writer.chunks == 1
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
        assert (a.episode, a.steps, a.chunks, a.episode_return, a.intervention_steps) == ("a", 8, 2, 4.0, 6)
        assert a.complete and a.success is True and a.policy_versions == (3, 4)
        assert not b.complete and b.success is None and b.policy_versions == (3, 3)


def test_only_episodes_that_have_changed_are_summarised_again(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        for change in (chunk("a"), chunk("b"), chunk("b", 1)):
            writer.append(change.encode())
            writer.sync()
            before = reader.episodes()
            reader.refresh()
        writer.append_label(DeleteLabel(episode="b", labeller="ann", at_unix_ns=1))
        writer.sync()
        between = reader.episodes()
        reader.refresh()
        after = reader.episodes()
    assert [(each.episode, each.chunks, each.deleted) for each in after] == [("a", 1, False), ("b", 2, True)]
    assert before[0] is between[0] is after[0], "its summary is that of the first call"
    assert [each[1].chunks for each in (before, between)] == [1, 2] and not between[1].deleted


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


def test_refresh_after_a_failed_one_misses_nothing(tmp_path: Path) -> None:
    class Failing(Files):
        calls, fail_at = 0, -1

        def _count(self) -> None:
            self.calls += 1
            if self.calls == self.fail_at:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def open(self, path: Path, flags: int) -> int:
            self._count()
            return super().open(path, flags)

        def pread(self, fd: int, count: int, offset: int) -> bytes:
            self._count()
            return super().pread(fd, count, offset)

    with StoreWriter.open(tmp_path, segment_bytes=4096) as writer:
        for index in range(8):
            writer.append(chunk("a", index, width=100).encode())
        writer.sync()
        whole = Failing()
        with StoreReader.open(tmp_path, files=whole) as reader:
            whole.calls = 0
            reader.refresh()
        for fail_at in range(1, whole.calls + 1):
            files = Failing()
            with StoreReader.open(tmp_path, files=files) as reader:
                files.calls, files.fail_at = 0, fail_at
                with contextlib.suppress(StoreError):
                    reader.refresh()
                reader.refresh()
                assert stored(reader) == [("a", index) for index in range(8)] and not reader.damaged, fail_at


@pytest.mark.parametrize("reopened", [False, True])
def test_chunk_after_a_reverted_deletion_is_stored(tmp_path: Path, reopened: bool) -> None:
    fields = {"episode": "a", "labeller": "ada"}
    with StoreWriter.open(tmp_path) as writer, StoreReader.open(tmp_path) as reader:
        writer.append(chunk("a", 0).encode())
        writer.append_label(DeleteLabel(at_unix_ns=5, **fields))
        writer.rotate()
        reader.refresh()
        assert not any(reclaim_space(writer, reader.index, min_dead_share=0.0))
    with StoreWriter.open(tmp_path) as writer:
        assert not writer.append(chunk("a", 0).encode())
        writer.append_label(UndoLabel(at_unix_ns=9, undone_at_unix_ns=5, **fields))
        if not reopened:
            assert writer.append(chunk("a", 1).encode()) and writer.deleted_episodes == 0
            return
    with StoreWriter.open(tmp_path) as writer:
        assert writer.append(chunk("a", 1).encode()) and writer.deleted_episodes == 0


def test_folder_that_cannot_be_listed_is_a_store_error(tmp_path: Path) -> None:
    StoreWriter.open(tmp_path).close()

    class Failing(Files):
        def __init__(self, calls: int) -> None:
            self.left = calls

        def listdir(self, path: Path) -> list[str]:
            self.left -= 1
            if not self.left:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().listdir(path)

    for kind, calls in ((StoreReader, 1), (StoreReader, 2), (StoreWriter, 1), (StoreWriter, 3)):
        with pytest.raises(StoreError, match=r"cannot (read|recover) .*Too many open files"):
            kind.open(tmp_path, files=Failing(calls))  # type: ignore[attr-defined]


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
    assert "5 (4 succeeded, 1 failed, 5 complete)" in text and "20 (15 by a person)" in text
    assert "episode-4" in text and "episode-2" not in text
    assert main(["store", "inspect", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["episodes"] == 5 and printed["damaged"] == [] and printed["embodiments"] == {"e1": 5}
    assert main(["store", "inspect", str(path)]) == 0
    assert "episode-4" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_disk_fills_up_and_is_freed(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
    code = ["-c", MOUNTED, str(tmp_path), str(Path(__file__).parent)]
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("may not mount here")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, *code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_reader_processes_never_fail_and_agree(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "follow_store.py")
    commands = [[sys.executable, script, str(tmp_path), str(seed)] for seed in range(READERS)]
    readers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        write(tmp_path)
        outputs = [reader.communicate(timeout=120) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    assert [reader.returncode for reader in readers] == [0] * READERS, outputs
    assert len({out for out, _ in outputs}) == 1
    alive = dict(word.split("=") for word in outputs[0][0].split())
    assert len(alive) == EPISODES // 3 + 1 and "e00" in alive and "e01" not in alive
    assert set(alive.values()) == {"16", "8"}  # as labelled; the last one as recorded


def write(path: Path) -> None:
    with StoreWriter.open(path, segment_bytes=30_000) as writer, StoreReader.open(path) as own:
        for episode in range(EPISODES):
            name = f"e{episode:02d}"
            for index in range(CHUNKS):
                writer.append(chunk(name, index, end=index == CHUNKS - 1, width=100).encode())
                writer.sync()
            writer.append_label(
                RewardLabel(episode=name, first_step=0, rewards=(1.0,) * 16, labeller="a", at_unix_ns=0)
            )
            if episode % 3:
                writer.append_label(DeleteLabel(episode=name, labeller="a", at_unix_ns=0))
            writer.sync()
            if episode % 10 == 9:
                own.refresh()
                assert not any(reclaim_space(writer, own.index, min_dead_share=0.0))
        for index in range(CHUNKS):
            writer.append(chunk("last", index, end=index == CHUNKS - 1).encode())
