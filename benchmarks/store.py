"""The experience store against its bounds and peers: durable ingest. ``python -m benchmarks.store``

`benchmarks.million` measures the cost of an opened store of a million steps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import simplejpeg

from benchmarks import peers
from benchmarks.harness import OUT, Row, against, compare, report
from user_sys.episode import (
    APPLIED_ACTION,
    IMAGE_PREFIX,
    Chunk,
    ChunkHeader,
    EpisodeEnd,
    EpisodeSource,
    frame_columns,
    parse_chunk,
)
from user_sys.store.log_writer import LogWriter
from user_sys.store.store import StoreWriter

OTHER_KIND = 100  # of records that are neither chunks nor labels
SIDE = 128
FLOATS = 32
GROUP = 32


def chunk(episode: int, steps: int, cameras: int, jpegs: list[bytes], index: int = 0, state: int = FLOATS) -> Chunk:
    """An episode in one chunk; frames are drawn in turn from `jpegs`."""
    columns: dict[str, np.ndarray] = {
        "observation.state": np.random.default_rng(episode).random((steps, state), np.float32),
        "action": np.zeros((steps, 4), np.float32),
        APPLIED_ACTION: np.zeros((steps, 4), np.float32),
        "reward": np.zeros(steps, np.float32),
        "terminated": np.zeros(steps, bool),
        "phase": np.zeros(steps, np.uint8),
        "policy_version": np.zeros(steps, np.int64),
    }
    for camera in range(cameras):
        frames = [jpegs[(episode * 31 + camera + step) % len(jpegs)] for step in range(steps)]
        columns |= frame_columns(f"{IMAGE_PREFIX}{camera}", frames, range(steps))
    header = ChunkHeader(
        episode=f"ep-{episode}",
        index=index,
        first_step=0,
        steps=steps,
        robot="panda-0",
        embodiment="e1",
        task="lift",
        sentence="lift",
        source=EpisodeSource.ONLINE,
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
        self.packets, self.folder, self._next = packets, folder, 0

    def fresh(self) -> Path:
        self._next += 1
        return self.folder / str(self._next)

    def groups(self, size: int) -> Iterator[list[bytes]]:
        return (self.packets[at : at + size] for at in range(0, len(self.packets), size))

    def ours(self, group: int) -> Iterator[float]:
        """Seconds from the first append of each group to its acknowledgement."""
        with StoreWriter.open(self.fresh()) as writer:
            for packets in self.groups(group):
                start = time.perf_counter()
                for packet in packets:
                    writer.append(packet)
                writer.sync()
                yield time.perf_counter() - start

    def ours_checked(self, group: int) -> Iterator[float]:
        """As `ours`, for chunks that were checked before: the gateway has done so when it hands them to the store."""
        with StoreWriter.open(self.fresh()) as writer:
            for packets in self.groups(group):
                checked = [(packet, parse_chunk(packet)) for packet in packets]
                start = time.perf_counter()
                for packet, opened in checked:
                    writer.append(packet, opened)
                writer.sync()
                yield time.perf_counter() - start

    def ours_as_log(self, group: int) -> Iterator[float]:
        """As `ours`, for records of another kind: the difference is the store's own work."""
        with LogWriter.open(self.fresh()) as writer:
            for packets in self.groups(group):
                start = time.perf_counter()
                for packet in packets:
                    writer.append_record(OTHER_KIND, packet)
                writer.sync()
                yield time.perf_counter() - start

    def raw(self, group: int) -> Iterator[float]:
        with appended(self.fresh()) as fd:
            for packets in self.groups(group):
                start = time.perf_counter()
                for packet in packets:
                    os.write(fd, packet)
                os.fdatasync(fd)
                yield time.perf_counter() - start

    def sqlite(self, journal: str, group: int) -> Iterator[float]:
        with contextlib.closing(sqlite3.connect(self.fresh(), isolation_level=None)) as connection:
            connection.execute(f"pragma journal_mode={journal}")
            connection.execute("pragma synchronous=full")
            connection.execute("create table chunks (id integer primary key, packet blob)")
            for packets in self.groups(group):
                start = time.perf_counter()
                connection.execute("begin")
                connection.executemany("insert into chunks (packet) values (?)", [(packet,) for packet in packets])
                connection.execute("commit")
                yield time.perf_counter() - start

    def rate(self, seconds: float) -> float:
        """MB/s."""
        return sum(map(len, self.packets)) / 1e6 / seconds


@contextlib.contextmanager
def appended(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        yield fd
    finally:
        os.close(fd)


ROLLBACK, WAL = "SQLite FULL, its rollback journal", "SQLite FULL, WAL"


def ingest(disk: Disk, group: int, what: str) -> list[Row]:
    """The row, and one for each way in which SQLite can be meant."""
    size = len(disk.packets[0])
    with contextlib.ExitStack() as stack:
        lmdb = peers.start("lmdb_writes", disk.folder, size, len(disk.packets), group)
        how = "each acknowledged" if group == 1 else f"{group} a commit"
        row = compare(
            f"durable ingest, {what}, {how}",
            lambda: disk.rate(sum(disk.ours(group))),
            lambda: disk.rate(sum(disk.raw(group))),
            pairs=11,
            goal=3,
            unit="MB/s",
            target=0.9,
            peers={
                ROLLBACK: lambda: disk.rate(sum(disk.sqlite("delete", group))),
                WAL: lambda: disk.rate(sum(disk.sqlite("wal", group))),
                "LMDB": lmdb if isinstance(lmdb, str) else stack.enter_context(lmdb).round,
            },
        )
    return [row, against(row, ROLLBACK, 3.0), against(row, WAL, 3.0)]


def parts_of(disk: Disk, what: str) -> list[Row]:
    """The cost of a group as the gateway commits it, and of the same group written to a bare log."""
    ways = {"checked before, as the gateway does": disk.ours_checked, "as a bare log": disk.ours_as_log}
    return [
        compare(
            f"durable ingest, {what}, {GROUP} a commit, {name}",
            lambda way=way: disk.rate(sum(way(GROUP))),  # type: ignore[misc]
            lambda: disk.rate(sum(disk.raw(GROUP))),
            pairs=15,
            goal=3,
            unit="MB/s",
        )
        for name, way in ways.items()
    ]


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
            rows += [*ingest(disk, 1, what), *ingest(disk, GROUP, what), *parts_of(disk, what)]
            rows.append(tail(disk, what))
            shutil.rmtree(room)
    report("store", rows)


if __name__ == "__main__":
    main()
