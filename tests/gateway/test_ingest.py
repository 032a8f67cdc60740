"""Ingestion of chunks up to the acknowledgement, and the size limit of the store."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from episode_kit import chunk_header
from wait_kit import until

from user_sys.episode import Chunk, EpisodeEnd, EpisodeSource
from user_sys.errors import StoreError
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.ingest import ChunkIngester, RetentionWorker, SendReply
from user_sys.messages import ChunkAck, ChunkOffer, ChunkRefusal
from user_sys.store.files import Files
from user_sys.store.labels import NoteLabel, queue_labels
from user_sys.store.maintenance import Retention, disk_bytes
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.verify import verify_log
from user_sys.tunnel.server import Peer

DEADLINE_S = 120.0
ROBOT = Peer("panda-0", "robot", "key", "nowhere", b"1")


def packet(number: int, source: EpisodeSource = EpisodeSource.ONLINE, robot: str = "panda-0") -> bytes:
    """An episode of one chunk."""
    header = chunk_header(
        f"{source}-{number:04d}",
        10,
        robot=robot,
        sentence="lift",
        source=source,
        started_unix_ns=number,
        end=EpisodeEnd(steps=10, success=number % 2 == 0),
    )
    return Chunk(header, {"observation.state": np.zeros((10, 100), np.float32)}, {}).encode()


@dataclass
class IngestBench:
    """An ingester, and its replies."""

    path: Path
    writer: StoreWriter
    committer: ChunkIngester = field(init=False)
    acknowledged: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    released: int = 0

    def __post_init__(self) -> None:
        answer: SendReply = self.answer
        self.committer = ChunkIngester(self.writer, answer, self.release, GatewayConfig(commit_bytes=20_000))

    def answer(self, peer: Peer, answer: ChunkAck | ChunkRefusal) -> None:
        assert peer is ROBOT
        (self.acknowledged if isinstance(answer, ChunkAck) else self.refused).append(answer.sequence)

    def release(self, peer: Peer, chunks: int, size_bytes: int) -> None:
        assert peer is ROBOT and size_bytes >= chunks > 0
        self.released += chunks

    def offer(self, sequence: int, raw: bytes) -> None:
        self.committer.put_chunk(ROBOT, ChunkOffer(sequence=sequence), raw)

    def deliver(self, first: int, count: int, source: EpisodeSource = EpisodeSource.ONLINE) -> None:
        """Sends chunks and waits until they are acknowledged."""
        for number in range(first, first + count):
            self.offer(number, packet(number, source))
        until(lambda: bool(self.acknowledged) and self.acknowledged[-1] == first + count - 1, "acknowledgements")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[IngestBench]:
    with StoreWriter.open(tmp_path / "store", segment_bytes=50_000) as writer:
        yield IngestBench(tmp_path / "store", writer)


def test_groups_are_acknowledged_in_order(bench: IngestBench) -> None:
    for number in range(50):
        bench.offer(number, packet(number, robot="rival" if number == 7 else "panda-0"))
    bench.offer(50, packet(3))
    file = queue_labels(bench.path, [NoteLabel(episode="online-0001", labeller="ada", at_unix_ns=1, note="well done")])
    bench.committer.start()
    until(lambda: not file.exists(), "the label is stored")
    bench.committer.close()
    assert bench.acknowledged == sorted(bench.acknowledged) and bench.acknowledged[-1] == 50
    assert bench.refused == [7] and bench.released == 51 and bench.committer.failure is None
    totals = bench.committer.totals
    assert (totals.chunks, totals.duplicates, totals.rejected) == (49, 1, 1) and bench.committer.queued_bytes == 0
    with StoreReader.open(bench.path) as reader:
        reader.refresh()
        assert len(reader.index.chunks) == 49 and len(reader.index.labels("online-0001")) == 1


def note(bench: IngestBench) -> Path:
    return queue_labels(bench.path, [NoteLabel(episode="online-0001", labeller="ada", at_unix_ns=1)])


def test_unreadable_label_file_is_logged_once_and_ingestion_goes_on(
    bench: IngestBench, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable = bench.path / "inbox" / f"{1:020d}-root.labels"
    unreadable.mkdir(parents=True)  # as root may read every file
    bench.committer.start()
    for _ in range(2):
        file = note(bench)
        until(lambda: not file.exists(), "the label is stored")  # noqa: B023
    bench.deliver(0, 3)
    bench.committer.close()
    assert bench.committer.failure is None and caplog.text.count("ingest.labels_damaged") == 1


def test_label_file_that_cannot_be_deleted_is_stored_once(
    bench: IngestBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("user_sys.gateway.ingest.remove_queued", refuse)
    note(bench)
    bench.committer.start()
    until(lambda: "ingest.labels_not_removed" in caplog.text, "the error")
    note(bench)
    until(lambda: caplog.text.count("ingest.labels_not_removed") == 2, "the second error")
    bench.deliver(0, 3)
    bench.committer.close()
    assert bench.committer.failure is None
    with StoreReader.open(bench.path) as reader:
        reader.refresh()
        assert len(reader.index.labels("online-0001")) == 2


def still_there(reader: StoreReader) -> bool:
    """Whether the store has a deleted or a new chunk."""
    rows, chunks = reader.refresh().rows, reader.index.chunks
    return bool(rows) or bool((~chunks.alive & ~chunks.gone).any())


class FailingSync(Files):
    """A disk whose syncs fail after a switch."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def fdatasync(self, fd: int) -> None:
        if self.broken.is_set():
            raise OSError(5, "Input/output error")
        super().fdatasync(fd)


def test_failed_sync_stops_acknowledgements(tmp_path: Path) -> None:
    disk = FailingSync()
    writer = StoreWriter.open(tmp_path, files=disk)
    bench = IngestBench(tmp_path, writer)
    bench.committer.start()
    bench.deliver(0, 3)
    disk.broken.set()
    for number in range(3, 40):
        bench.offer(number, packet(number))
    until(lambda: bench.committer.failure is not None, "the failure")
    bench.committer.close()
    assert isinstance(bench.committer.failure, StoreError) and bench.acknowledged[-1] == 2
    writer.close()


class NoRoomForFiles(Files):
    """A disk that is full for a while."""

    def __init__(self) -> None:
        self.full = threading.Event()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and self.full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(path, flags)


def test_chunks_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    disk = NoRoomForFiles()
    with StoreWriter.open(tmp_path, segment_bytes=len(packet(0)), files=disk) as writer:  # one chunk for each segment
        bench = IngestBench(tmp_path, writer)
        bench.committer.start()
        bench.deliver(0, 1)
        disk.full.set()
        bench.offer(1, packet(1))
        until(lambda: bench.committer.totals.disk_full, "the full disk is noticed")
        assert bench.acknowledged == [0]
        disk.full.clear()
        until(lambda: bench.acknowledged == [0, 1], "the chunk is acknowledged")
        bench.committer.close()
        assert bench.committer.failure is None


def test_retention_tries_again_after_an_unreadable_footer(
    bench: IngestBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.committer.start()
    bench.deliver(0, 60)
    hurt = sorted(bench.path.glob("*.seg"))[1]
    pread = Files.pread

    def read_unless_hurt(self: Files, fd: int, count: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == hurt.stat().st_ino and offset + count == hurt.stat().st_size:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(self, fd, count, offset)

    monkeypatch.setattr(Files, "pread", read_unless_hurt)
    with pytest.raises(StoreError, match=f"cannot read {hurt}: {os.strerror(errno.ESTALE)}"):
        verify_log(bench.path)
    keeper = RetentionWorker(bench.path, bench.writer, Retention(max_bytes=100_000), interval_s=0.01)
    keeper.start()
    until(lambda: "retention.failed" in caplog.text or keeper.failure, "a round fails")
    monkeypatch.setattr(Files, "pread", pread)
    until(lambda: disk_bytes(bench.path) <= 100_000, "a later round deletes")
    keeper.close()
    bench.committer.close()
    assert keeper.failure is None


def test_store_stays_within_its_limit_while_written(bench: IngestBench) -> None:
    bound = 400_000
    keeper = RetentionWorker(bench.path, bench.writer, Retention(max_bytes=bound), interval_s=0.01)
    bench.committer.start()
    bench.deliver(0, 10, EpisodeSource.DEMO)
    keeper.start()
    with StoreReader.open(bench.path) as learner:
        for first in range(10, 410, 20):
            bench.deliver(first, 20)
            learner.refresh()
            assert not learner.damaged
        until(lambda: disk_bytes(bench.path) <= bound, "the store shrinks")
        until(lambda: not still_there(learner), "the learner sees what is gone")
        for row in np.flatnonzero(learner.index.chunks.alive).tolist():
            learner.read(row)
    keeper.close()
    bench.committer.close()
    assert keeper.failure is None and keeper.totals.episodes_dropped > 200
    with StoreReader.open(bench.path) as reader:
        reader.refresh()
        alive = [episode for episode in reader.episodes() if not episode.deleted]
        assert sum(episode.source is EpisodeSource.DEMO for episode in alive) == 10
        outcomes = [episode.success for episode in alive if episode.source is EpisodeSource.ONLINE]
        assert 0.3 < outcomes.count(True) / len(outcomes) < 0.7
