"""The experience store against its bounds: durable ingest. ``python -m benchmarks.store``"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import simplejpeg

from benchmarks.harness import OUT, Row, compare, report
from user_sys.episode import APPLIED, IMAGES, Chunk, ChunkHeader, EpisodeEnd, Source, frame_columns
from user_sys.store.log import LogReader, LogWriter, segment_numbers
from user_sys.store.store import StoreWriter

SIDE = 128
FLOATS = 32
GROUP = 32


def chunk(episode: int, steps: int, cameras: int, jpegs: list[bytes], index: int = 0, state: int = FLOATS) -> Chunk:
    """An episode in one chunk; frames are drawn in turn from `jpegs`."""
    columns: dict[str, np.ndarray] = {
        "observation.state": np.random.default_rng(episode).random((steps, state), np.float32),
        "action": np.zeros((steps, 4), np.float32),
        APPLIED: np.zeros((steps, 4), np.float32),
        "reward": np.zeros(steps, np.float32),
        "terminated": np.zeros(steps, bool),
        "phase": np.zeros(steps, np.uint8),
        "policy_version": np.zeros(steps, np.int64),
    }
    for camera in range(cameras):
        frames = [jpegs[(episode * 31 + camera + step) % len(jpegs)] for step in range(steps)]
        columns |= frame_columns(f"{IMAGES}{camera}", frames)
    header = ChunkHeader(
        episode=f"ep-{episode}",
        index=index,
        first_step=0,
        steps=steps,
        robot="panda-0",
        embodiment="e1",
        task="lift",
        sentence="lift",
        source=Source.ONLINE,
        seed=0,
        started_unix_ns=1,
        end=EpisodeEnd(steps=steps, success=True),
    )
    return Chunk(header, columns, {"observation.state": np.zeros(state, np.float32)})


def pictures() -> list[bytes]:
    """JPEG files of smooth scenes with a little noise, about 5 kB each, as a camera's are."""
    rng, found = np.random.default_rng(0), []
    ramp = np.linspace(0, 200, SIDE)
    for _ in range(32):
        scene = ramp[:, None, None] * rng.random(3) + ramp[None, :, None] * rng.random(3) / 4
        noise = rng.normal(0, 6, (SIDE, SIDE, 3))
        found.append(simplejpeg.encode_jpeg(np.clip(scene + noise, 0, 255).astype(np.uint8), quality=90))
    return found


class Disk:
    """Ways to make the same packets durable, each in files of its own below `folder`."""

    def __init__(self, folder: Path, packets: list[bytes]) -> None:
        self.packets, self._folder, self._next = packets, folder, 0

    def fresh(self) -> Path:
        self._next += 1
        return self._folder / str(self._next)

    def ours(self, group: int) -> Iterator[float]:
        """Seconds from the first append of each group to its acknowledgement."""
        with StoreWriter.open(self.fresh()) as writer:
            for at in range(0, len(self.packets), group):
                start = time.perf_counter()
                for packet in self.packets[at : at + group]:
                    writer.append(packet)
                writer.sync()
                yield time.perf_counter() - start

    def log(self, group: int) -> Iterator[float]:
        """As `ours`, without the store's check that each packet is a valid chunk."""
        with LogWriter.open(self.fresh()) as writer:
            for at in range(0, len(self.packets), group):
                start = time.perf_counter()
                for packet in self.packets[at : at + group]:
                    writer.append(1, packet)
                writer.sync()
                yield time.perf_counter() - start

    def raw(self, group: int) -> Iterator[float]:
        fd = os.open(self.fresh(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for at in range(0, len(self.packets), group):
            start = time.perf_counter()
            for packet in self.packets[at : at + group]:
                os.write(fd, packet)
            os.fdatasync(fd)
            yield time.perf_counter() - start
        os.close(fd)

    def sqlite(self, group: int) -> Iterator[float]:
        with contextlib.closing(sqlite3.connect(self.fresh(), isolation_level=None)) as connection:
            connection.execute("pragma journal_mode=wal")
            connection.execute("pragma synchronous=full")
            connection.execute("create table chunks (id integer primary key, packet blob)")
            for at in range(0, len(self.packets), group):
                start = time.perf_counter()
                connection.execute("begin")
                connection.executemany(
                    "insert into chunks (packet) values (?)", [(p,) for p in self.packets[at : at + group]]
                )
                connection.execute("commit")
                yield time.perf_counter() - start

    def rate(self, times: Iterator[float]) -> float:
        return sum(map(len, self.packets)) / 1e6 / sum(times)


def ingest(disk: Disk, group: int, what: str) -> Row:
    how = "each acknowledged" if group == 1 else f"{group} a commit"
    return compare(
        f"durable ingest, {what}, {how}",
        lambda: disk.rate(disk.ours(group)),
        lambda: disk.rate(disk.raw(group)),
        pairs=11,
        goal=3,
        unit="MB/s",
        target=0.9,
        peers={
            "SQLite FULL": lambda: disk.rate(disk.sqlite(group)),
        },
    )


def log_alone(disk: Disk, group: int, what: str) -> Row:
    how = "each acknowledged" if group == 1 else f"{group} a commit"
    return compare(
        f"durable appends to the log alone, {what}, {how}",
        lambda: disk.rate(disk.log(group)),
        lambda: disk.rate(disk.raw(group)),
        pairs=21,
        goal=3,
        unit="MB/s",
        target=0.9,
    )


def opening(folder: Path) -> Row:
    """A log of sealed segments, opened with all its records known; the files are in the page cache."""
    records = 300_000
    with LogWriter.open(folder, segment_bytes=1 << 20) as writer:
        for number in range(records):
            writer.append(1, number.to_bytes(8, "little") * 64)

    def once() -> float:
        start = time.perf_counter()
        with LogReader.open(folder) as reader:
            assert sum(len(batch.records) for batch in reader.refresh()) == records
        return time.perf_counter() - start

    segments = len(segment_numbers(folder))
    seconds = statistics.median(once() for _ in range(7))
    name = f"opening a log of {records:,} records in {segments} segments, footers alone"
    return Row(goal=4, name=name, unit="s", ours=seconds, bound=None, ratio=None, met=seconds < 1.0)


def tail(disk: Disk, what: str) -> Row:
    return compare(
        f"p99 of the acknowledgement, {what}",
        lambda: float(np.percentile(list(disk.ours(1)), 99)) * 1e3,
        lambda: float(np.percentile(list(disk.raw(1)), 99)) * 1e3,
        goal=3,
        unit="ms",
        target=1 / 3,
        more_is_better=False,
    )


def main() -> None:
    jpegs = pictures()
    rows: list[Row] = []
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        for name, cameras, count in (("states", 0, 192), ("two cameras", 2, 192)):
            packets = [chunk(number, 10, cameras, jpegs).encode() for number in range(count)]
            what = f"{name} ({len(packets[0]) / 1e3:.0f} kB a chunk of 10 steps)"
            room = Path(folder) / name
            room.mkdir()
            disk = Disk(room, packets)
            rows += [ingest(disk, 1, what), ingest(disk, GROUP, what), tail(disk, what)]
            rows += [log_alone(disk, 1, what), log_alone(disk, GROUP, what)]
        rows.append(opening(Path(folder) / "opening"))
    report("store", rows)


if __name__ == "__main__":
    main()
