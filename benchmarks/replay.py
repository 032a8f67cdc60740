"""The replay buffer against its bounds and peers: hot and cold sampling, priorities, sampling while robots write.

``python -m benchmarks.replay``. What happens as the store outgrows the cache is `benchmarks.million`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import simplejpeg

from benchmarks import peers
from benchmarks.harness import OUT, Row, against, compare, report
from benchmarks.store import chunk, pictures
from user_sys.codec import Array
from user_sys.episode import IMAGE_PREFIX, Chunk, frame_columns
from user_sys.replay.batches import BatchSpec, ObservationFeatures, ReadPlan
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.sampler import Sampler
from user_sys.replay.selectors import PrioritizedSelector, Selector, StepFilter, UniformSelector
from user_sys.store.store import StoreReader, StoreWriter

BATCH = 256
SIDE, FLOATS = 128, 32
ROWS = 8_000  # 400 MB of frames a camera: far beyond any processor's cache
CHUNK_STEPS, EPISODE_STEPS = 20, 100
RUN_S = 0.5
BOUND_THREADS = 16  # of the random read that cold raw sampling is compared with
FILL_ROWS = 4096
DONTNEED = 4  # of madvise
TORCHRL, REVERB = "TorchRL's memmap storage", "Reverb"
PEER_TARGETS = {TORCHRL: 3.5, REVERB: 2.0}


def per_second(step: Callable[[], object], count: int, run_s: float = RUN_S) -> float:
    """How many things a second `step` does, when one call does `count` of them."""
    start, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < run_s:
        step()
        calls += 1
    return calls * count / elapsed


def features(cameras: int, side: int = SIDE, floats: int = FLOATS // 2) -> ObservationFeatures:
    """Observation and next observation hold half the floats each."""
    shapes = {f"{IMAGE_PREFIX}{camera}": (side, side, 3) for camera in range(cameras)}
    return ObservationFeatures(vectors={"observation.state": floats}, action_size=4, cameras=shapes)


def raw_chunk(episode: int, first: int, steps: int, side: int, floats: int, last: bool) -> Chunk:
    """A chunk with one camera of uncompressed frames, all unlike."""
    plain = chunk(episode, steps, 0, [], index=first // steps, state=floats)
    rng = np.random.default_rng(episode * 1_000_003 + first)
    frames = rng.integers(0, 255, (steps, side, side, 3), np.uint8)
    header = type(plain.header)(
        **{
            name: getattr(plain.header, name)
            for name in plain.header.__struct_fields__
            if name not in ("first_step", "end")
        },
        first_step=first,
        end=plain.header.end if last else None,
    )
    final = {**plain.final, f"{IMAGE_PREFIX}0": frames[-1]} if last else {}
    return Chunk(
        header, {**plain.columns, **frame_columns(f"{IMAGE_PREFIX}0", list(frames), range(len(frames)))}, final
    )


def write_jpeg(path: Path, cameras: int, jpegs: list[bytes], rows: int) -> None:
    with StoreWriter.open(path) as writer:
        for episode in range(rows // EPISODE_STEPS):
            writer.append(chunk(episode, EPISODE_STEPS, cameras, jpegs, state=FLOATS // 2).encode())


def write_raw(path: Path, rows: int) -> None:
    with StoreWriter.open(path) as writer:
        for episode, first in itertools.product(range(rows // EPISODE_STEPS), range(0, EPISODE_STEPS, CHUNK_STEPS)):
            last = first + CHUNK_STEPS == EPISODE_STEPS
            writer.append(raw_chunk(episode, first, CHUNK_STEPS, SIDE, FLOATS // 2, last).encode())


@contextlib.contextmanager
def replaying(
    path: Path, wanted: ObservationFeatures, cache_bytes: int, cold_threads: int = 16
) -> Iterator[ReplayBuffer]:
    """A buffer over the store at `path` whose cache is as full as it gets."""
    with (
        StoreReader.open(path) as reader,
        ReplayBuffer(reader, wanted, cache_bytes=cache_bytes, cold_threads=cold_threads) as replay,
    ):
        replay.refresh()
        fill(replay)
        yield replay


def fill(replay: ReplayBuffer) -> None:
    """Reads each observation once."""
    for start in range(0, replay.index.observation_count, FILL_ROWS):
        numbers = np.arange(start, min(start + FILL_ROWS, replay.index.observation_count))
        replay.read([ReadPlan(numbers, replay.features.observations((len(numbers),), np.empty), {})])


def sampler(replay: ReplayBuffer, chooser: Selector | None = None, n: int = BATCH) -> Sampler:
    return Sampler(
        replay, UniformSelector() if chooser is None else chooser, BatchSpec(), n
    )  # a new one is empty, so false


def cache_for(rows: int, wanted: ObservationFeatures) -> int:
    """Bytes in which `rows` observations surely fit."""
    frames = sum(int(np.prod(shape)) for shape in wanted.cameras.values())
    return int(rows * (frames + 400) * 1.5)


class Take:
    """The bound of hot sampling: one take of as many bytes in packed rows."""

    def __init__(self, cameras: int) -> None:
        self._rows = ROWS // 2
        images = 2 * cameras * SIDE * SIDE * 3
        self._rng = np.random.default_rng(0)
        self._images = self._rng.integers(0, 255, (self._rows, images), np.uint8)
        self._floats = np.zeros((self._rows, FLOATS), np.float32)
        self._out = np.empty((BATCH, images), np.uint8), np.empty((BATCH, FLOATS), np.float32)

    def __call__(self) -> None:
        picks = self._rng.integers(0, self._rows, BATCH)
        np.take(self._images, picks, axis=0, out=self._out[0], mode="clip")
        np.take(self._floats, picks, axis=0, out=self._out[1], mode="clip")


def hot(
    folder: Path, jpegs: list[bytes], cameras: int, buffers: Mapping[str, Callable[[], float] | str], sitting: str = ""
) -> list[Row]:
    """The goal is for two images a transition, which one camera gives."""
    path, wanted = folder / f"hot-{cameras}{sitting}", features(cameras)
    write_jpeg(path, cameras, jpegs, ROWS)
    with replaying(path, wanted, cache_for(ROWS, wanted)) as replay:
        uniform, prioritized, bound = sampler(replay), sampler(replay, PrioritizedSelector()), Take(cameras)
        batch, other = uniform.empty_batch(), prioritized.empty_batch()
        filled = replay.report().misses
        what = f"{2 * cameras} images a transition ({cameras} now, {cameras} next){sitting}"
        stated = cameras == 1

        def plain() -> float:
            return per_second(lambda: uniform.sample(batch), BATCH)

        def learning() -> None:
            prioritized.feedback(prioritized.sample(other), other.reward + 1)

        row = compare(
            f"hot sampling, {what}",
            plain,
            lambda: per_second(bound, BATCH),
            goal=1,
            unit="transitions/s",
            target=0.9 if stated else None,
            peers=buffers,
        )
        fed = compare(
            f"prioritized, TD errors fed back, against uniform, {what}",
            lambda: per_second(learning, BATCH),
            plain,
            goal=1,
            unit="transitions/s",
            target=0.8 if stated else None,
        )
        if replay.report().misses > filled:
            raise AssertionError(f"hot sampling read cold: {replay.report()}")
    named = [against(row, name, target) for name, target in PEER_TARGETS.items() if name in buffers]
    return [row, *named, fed]


def hot_beside_peers(folder: Path, jpegs: list[bytes], sitting: str) -> list[Row]:
    """Peers hold fewer rows, as much as they need to be far beyond a processor's cache; LeRobot's are float32.

    It is done in two sittings, at the start and at the end, with peers started again: TorchRL's rate differs by more
    from one of its processes to the next than within one.
    """
    with contextlib.ExitStack() as stack:
        started = {
            TORCHRL: peers.start("torchrl_memmap", ROWS // 2, 1, folder),
            REVERB: peers.start("reverb_table", ROWS // 2, 1),
            "LeRobot's ReplayBuffer": peers.start("lerobot_buffer", ROWS // 2, 1),
        }
        buffers = {
            name: peer if isinstance(peer, str) else stack.enter_context(peer).round for name, peer in started.items()
        }
        return hot(folder, jpegs, 1, buffers, sitting)


def states_alone(folder: Path, jpegs: list[bytes]) -> Row:
    """The cost of a batch without its frames."""
    path, wanted = folder / "states", features(0)
    write_jpeg(path, 0, jpegs, ROWS)
    with replaying(path, wanted, cache_for(ROWS, wanted)) as replay:
        drawing = sampler(replay)
        batch = drawing.empty_batch()
        rate = statistics.median(per_second(lambda: drawing.sample(batch), 1) for _ in range(7))
    return Row(1, f"a batch of {BATCH} transitions of states alone", "us", 1e6 / rate)


NEW_TASK = "drop"  # of the data written meanwhile
CONTROL_HZ = 10  # of robots in real time


def while_writing(
    folder: Path, jpegs: list[bytes], where: StepFilter, what: str, target: float | None, robots: int = 0
) -> Row:
    """Sampling while another process commits chunks of two cameras, as fast as `commit` does for that many robots.

    Each time into a copy of the store that the idle half of the pair samples: what earlier rounds have written is in
    neither.
    """
    path, wanted = folder / f"writing-{what}-{robots}", features(2)
    write_jpeg(path, 2, jpegs, ROWS)
    cache_bytes, number = cache_for(2 * ROWS, wanted), itertools.count()

    def rate(replay: ReplayBuffer, drawing: Sampler) -> float:
        batch = drawing.empty_batch()

        def follow() -> None:
            drawing.sample(batch)
            replay.refresh()

        follow()
        return per_second(follow, BATCH)

    def busy() -> float:
        copy = folder / f"copy-{next(number)}"
        shutil.copytree(path, copy)
        with replaying(copy, wanted, cache_bytes) as replay, committing(copy, robots) as writer:
            drawing, chunks = sampler(replay, UniformSelector(where)), replay.index.chunks
            before = len(chunks)
            while len(chunks) < before + 8 and writer.poll() is None:
                replay.refresh()
                time.sleep(0.01)
            found = rate(replay, drawing)
        shutil.rmtree(copy)
        return found

    with replaying(path, wanted, cache_bytes) as replay:
        drawing = sampler(replay, UniformSelector(where))
        pace = f"as {robots} robots send them at {CONTROL_HZ} Hz" if robots else "at half the disk's rate"
        return compare(
            f"sampling {what} while frames of two cameras are written {pace}, and decoded, against idle",
            busy,
            lambda: rate(replay, drawing),
            goal=1,
            unit="transitions/s",
            target=target,
        )


@contextlib.contextmanager
def committing(path: Path, robots: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does `commit`."""
    command = [sys.executable, "-m", "benchmarks.replay", "--commit", str(path), "--robots", str(robots)]
    with subprocess.Popen(command) as writer:
        try:
            yield writer
        finally:  # else an error here would wait for a process that never ends
            writer.terminate()


def commit(path: Path, robots: int) -> None:
    """Commits chunks of 10 steps of two cameras, each acknowledged, until killed.

    As fast as so many robots in real time send them; for 0 robots at half the rate that the disk takes them.
    """
    plain = chunk(0, 10, 2, pictures(), state=FLOATS // 2)
    with StoreWriter.open(path) as writer:
        begun = time.perf_counter()
        for n in itertools.count(1):
            header = msgspec.structs.replace(plain.header, episode=f"new-{n}", task=NEW_TASK)
            packet = Chunk(header, plain.columns, plain.final).encode()
            start = time.perf_counter()
            writer.append(packet)
            writer.sync()
            now = time.perf_counter()
            due = begun + n * plain.header.steps / CONTROL_HZ / robots if robots else 2 * now - start
            time.sleep(max(0.0, due - now))


class ColdDisk:
    """Files out of the page cache, so that the next read is the disk's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self) -> None:
        """Drops the mapped pages of the folder's files, then its page cache, from memory."""
        pattern = re.compile(rf"([0-9a-f]+)-([0-9a-f]+) .* {re.escape(str(self._folder))}/\S+")
        for line in Path("/proc/self/maps").read_text().splitlines():
            if found := pattern.match(line):
                start, stop = int(found[1], 16), int(found[2], 16)
                self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), DONTNEED)
        for file in self._folder.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


class RandomRead:
    """The bound of cold raw sampling: threads that read as many frames from random places of a store's segments.

    Of all of them: a part that fits in fewer reads would be in the page cache again before they are done.
    """

    def __init__(self, path: Path, frames: int) -> None:
        files = sorted(path.rglob("*.seg"))
        self._fds = [os.open(file, os.O_RDONLY) for file in files]
        self._sizes = np.array([file.stat().st_size for file in files])
        self._frames, self._rng = frames, np.random.default_rng(1)
        self._out = np.empty((frames, SIDE * SIDE * 3), np.uint8)
        self._pool = ThreadPoolExecutor(BOUND_THREADS)

    def __call__(self) -> None:
        file = self._rng.choice(len(self._fds), self._frames, p=self._sizes / self._sizes.sum())
        places = self._rng.integers(0, np.maximum(self._sizes[file] - self._out.shape[1], 1)) & ~4095
        reads = list(zip((self._fds[which] for which in file), places.tolist(), self._out, strict=True))
        parts = [reads[n::BOUND_THREADS] for n in range(BOUND_THREADS)]
        list(self._pool.map(lambda part: [os.preadv(fd, [out], place) for fd, place, out in part], parts))

    def close(self) -> None:
        self._pool.shutdown()
        for fd in self._fds:
            os.close(fd)


def cold_raw(folder: Path) -> Row:
    """Both start from an empty page cache each time; the store's records were verified in full once before."""
    path, wanted = folder / "cold-raw", features(1)
    write_raw(path, ROWS)
    reading = RandomRead(path, 2 * BATCH)
    with replaying(path, wanted, CACHE_OF_VECTORS) as replay:
        drawing, drop = sampler(replay), ColdDisk(path)
        batch = drawing.empty_batch()
        for _ in range(4 * ROWS // BATCH):
            drawing.sample(batch)

        def timed(step: Callable[[], object]) -> float:
            drop()
            start = time.perf_counter()
            for _ in range(4):
                step()
            return 4 * BATCH / (time.perf_counter() - start)

        row = compare(
            "cold sampling, raw, against a 16-thread random read of as many bytes",
            lambda: timed(lambda: drawing.sample(batch)),
            lambda: timed(reading),
            goal=2,
            unit="transitions/s",
            target=0.8,
        )
    reading.close()
    return row


CACHE_OF_VECTORS = 8 << 20  # all vectors, next to no frames


def cold_jpeg(folder: Path, jpegs: list[bytes]) -> Row:
    path, wanted, threads = folder / "cold-jpeg", features(1), os.cpu_count() or 1
    write_jpeg(path, 1, jpegs, ROWS)
    out, rng = np.empty((2 * BATCH, SIDE, SIDE, 3), np.uint8), np.random.default_rng(2)
    with replaying(path, wanted, CACHE_OF_VECTORS, cold_threads=threads) as replay, ThreadPoolExecutor(threads) as pool:
        drawing = sampler(replay)
        batch = drawing.empty_batch()
        for _ in range(4 * ROWS // BATCH):
            drawing.sample(batch)

        def decode(places: Array) -> None:
            for place, pick in zip(places.tolist(), rng.integers(0, len(jpegs), len(places)).tolist(), strict=True):
                simplejpeg.decode_jpeg(jpegs[pick], buffer=out[place])

        parts = np.array_split(np.arange(len(out)), threads)
        return compare(
            f"cold sampling, JPEG, against the bare decoder in {threads} threads",
            lambda: per_second(lambda: drawing.sample(batch), BATCH),
            lambda: per_second(lambda: list(pool.map(decode, parts)), BATCH),
            goal=2,
            unit="transitions/s",
            target=0.9,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", type=Path, help=argparse.SUPPRESS)  # the process that writes
    parser.add_argument("--robots", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.commit:
        return commit(options.commit, options.robots)
    jpegs = pictures()
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as name:
        folder = Path(name)
        rows = [
            *hot_beside_peers(folder, jpegs, ", first sitting"),
            *hot(folder, jpegs, 2, {}),
            states_alone(folder, jpegs),
        ]
        rows += [
            while_writing(folder, jpegs, StepFilter(), "all experience", 0.7),
            while_writing(folder, jpegs, StepFilter(tasks=("lift",)), "what was there before", None),
            while_writing(folder, jpegs, StepFilter(), "all experience", None, robots=8),
            while_writing(folder, jpegs, StepFilter(), "all experience", None, robots=100),
            cold_raw(folder),
            cold_jpeg(folder, jpegs),
            *hot_beside_peers(folder, jpegs, ", second sitting"),
        ]
    report("replay", rows)


if __name__ == "__main__":
    main()
