"""A store of a million transitions with small images: appends, opening, checkpoints, throughput against cache ratio.

``python -m benchmarks.million [--steps N]``. The curve is drawn into the folder of the results.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import queue
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue as ProcessQueue
from multiprocessing.synchronize import Event as ProcessEvent
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from benchmarks.harness import OUT, Row, at_most, reached, report
from benchmarks.replay import BATCH, CHUNK_STEPS, EPISODE_STEPS, FLOATS, features, per_second, replaying, sampler
from benchmarks.store import chunk
from user_sys.episode import IMAGE_PREFIX, Chunk, frame_columns
from user_sys.replay.batches import ObservationFeatures
from user_sys.replay.buffer import TAG_BYTES
from user_sys.replay.selectors import PrioritizedSelector
from user_sys.store.store import StoreReader, StoreWriter

MILLION = 1_000_000
SIDE = 32  # of the frames
RATIOS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
POINT_S = 5.0
CHECKPOINTS = 40
HOLD_MS = 10.0
SAME = 0.9  # costs within a tenth count as equal: medians of 500 differ by so much from one run to the next
START_DEADLINE_S = 120.0


Event = threading.Event | ProcessEvent
Times = list[tuple[float, float]]
Results: TypeAlias = "queue.Queue[Times] | ProcessQueue[Times]"


class Cost(NamedTuple):
    """Of one episode: seconds until it was durable, and of the processor's time; of a raw append of its bytes likewise,
    next to it in time (0 if none was made)."""

    wall: float
    cpu: float
    raw_wall: float = 0.0
    raw_cpu: float = 0.0


def episodes() -> Iterator[list[bytes]]:
    """Without end: the chunks of one episode after the other. Their frames are drawn from a few, all unlike."""
    rng = np.random.default_rng(0)
    parts = [_part(first, rng) for first in range(0, EPISODE_STEPS, CHUNK_STEPS)]
    number = 0
    while True:
        yield [_named(part, f"ep-{number}").encode() for part in parts]
        number += 1


def _part(first: int, rng: np.random.Generator) -> Chunk:
    plain = chunk(0, CHUNK_STEPS, 0, [], index=first // CHUNK_STEPS, state=FLOATS // 2)
    frames = rng.integers(0, 255, (CHUNK_STEPS, SIDE, SIDE, 3), np.uint8)
    last = first + CHUNK_STEPS == EPISODE_STEPS
    end = msgspec.structs.replace(plain.header.end, steps=EPISODE_STEPS) if last and plain.header.end else None
    header = msgspec.structs.replace(plain.header, first_step=first, end=end)
    final = {**plain.final, f"{IMAGE_PREFIX}0": frames[-1]} if last else {}
    return Chunk(
        header, {**plain.columns, **frame_columns(f"{IMAGE_PREFIX}0", list(frames), range(len(frames)))}, final
    )


def _named(part: Chunk, episode: str) -> Chunk:
    return Chunk(msgspec.structs.replace(part.header, episode=episode), part.columns, part.final)


def write(path: Path, count: int) -> list[Cost]:
    """The cost of each of `count` acknowledged episodes; besides those that `appends` compares, a raw append
    and sync of the same bytes to a file of its own."""
    costs, source = [], episodes()
    compared = {*range(10, 10 + count // 20), *range(count - count // 20, count)}
    with StoreWriter.open(path) as writer, (path.parent / "raw").open("wb", buffering=0) as raw:
        for number in range(count):
            packets = next(source)

            def ours(packets: list[bytes] = packets) -> None:
                for packet in packets:
                    writer.append(packet)
                writer.sync()

            def bare(packets: list[bytes] = packets) -> None:
                for packet in packets:
                    raw.write(packet)
                os.fdatasync(raw.fileno())

            raw_cost = timed_both(bare) if number in compared else (0.0, 0.0)
            costs.append(Cost(*timed_both(ours), *raw_cost))
    return costs


def timed_both(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and of the thread's processor time."""
    start, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - start, time.thread_time() - cpu


def appends(costs: list[Cost]) -> list[Row]:
    """The episodes after the tenth against the last ones, a twentieth of all on either side.

    What counts is how many times a raw append each takes: the disk and the page cache change over the run for both.
    """
    some = len(costs) // 20
    early, late = costs[10 : 10 + some], costs[-some:]
    found = f"adding an episode, %s: the last of {len(costs):,} against those after the tenth"
    rows = []
    for what, ours, raw in (("durable", "wall", "raw_wall"), ("processor's time", "cpu", "raw_cpu")):
        first, last = (1e3 * statistics.median(getattr(cost, ours) for cost in part) for part in (early, late))
        rows.append(Row(4, found % what, "ms", last, first, first / last))
        first, last = (statistics.median(getattr(c, ours) / getattr(c, raw) for c in part) for part in (early, late))
        target = SAME if what == "durable" else None
        name = f"{found % what}, each next to a raw append"
        rows.append(Row(4, name, "times", last, first, first / last, target, reached(first / last, target)))
    return rows


def opening(path: Path, what: str) -> list[Row]:
    """The files are in the page cache, and then not."""

    def reader() -> None:
        with StoreReader.open(path) as opened:
            opened.refresh()

    def writer() -> None:
        StoreWriter.open(path).close()

    rows = []
    for who, action in (("a reader, index and all", reader), ("a writer", writer)):
        for cold in (False, True):
            seconds = statistics.median(_timed(action, path, cold) for _ in range(5))
            name = f"opening {what}: {who}{', nothing in the page cache' if cold else ''}"
            rows.append(at_most(4, name, "s", seconds, 1.0))
    return rows


def _timed(action: Callable[[], None], path: Path, cold: bool) -> float:
    if cold:
        for file in path.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def checkpoints(path: Path, folder: Path, wanted: ObservationFeatures, cache_bytes: int, what: str) -> list[Row]:
    """How long taking a prioritized sampler's state keeps its thread from sampling, and others from inserting.

    Others are a thread of the same process, and a process of its own, as a gateway is to a learner.
    """
    with replaying(path, wanted, cache_bytes) as replay:
        drawing = sampler(replay, PrioritizedSelector())
        batch = drawing.empty_batch()
        held = []
        for _ in range(CHECKPOINTS):
            drawing.feedback(drawing.sample(batch), batch.reward + 1)
            start = time.perf_counter()
            drawing.state_dict()
            held.append(time.perf_counter() - start)
        thread = longest_insert(folder / "thread", drawing.state_dict, apart=False)
        process = longest_insert(folder / "process", drawing.state_dict, apart=True)
    title = f"inserting an episode next to checkpoints without pause, {what}: the longest"
    return [
        _hold(f"sampling is held by a checkpoint, {what}: the longest of {len(held)}", max(held)),
        _hold(f"{title}, in the same process", thread),
        _hold(f"{title}, in another process as in a running system", process),
    ]


def longest_insert(folder: Path, checkpoint: Callable[[], object], *, apart: bool) -> float:
    """Seconds of the longest of the inserts that began while checkpoints were taken for a second without pause.

    They are made by a thread, or by a process if `apart`; both have one monotonic clock (Linux).
    """
    context = multiprocessing.get_context("spawn")
    begun, stop = (context.Event(), context.Event()) if apart else (threading.Event(), threading.Event())
    found = context.Queue() if apart else queue.Queue()
    kind = context.Process if apart else threading.Thread
    inserter = kind(target=insert, args=(folder, begun, stop, found))
    inserter.start()
    try:
        if not begun.wait(START_DEADLINE_S):
            raise TimeoutError(f"nothing was inserted within {START_DEADLINE_S:.0f} s")
        start = time.perf_counter()
        while (until := time.perf_counter()) < start + 1.0:
            checkpoint()
    finally:
        stop.set()
    times = found.get(timeout=START_DEADLINE_S)
    inserter.join()
    return max(took for at, took in times if start <= at < until)


def insert(folder: Path, begun: Event, stop: Event, found: Results) -> None:
    """Inserts episodes until `stop` is set; then returns when each insert began and its time without the sync."""
    times = []
    with StoreWriter.open(folder) as writer:
        for packets in episodes():
            start = time.perf_counter()
            for packet in packets:
                writer.append(packet)
            times.append((start, time.perf_counter() - start))
            writer.sync()
            begun.set()
            if stop.is_set():
                break
    found.put(times)


def _hold(name: str, seconds: float) -> Row:
    return at_most(4, name, "ms", 1e3 * seconds, HOLD_MS)


class Point(NamedTuple):
    """One cache size: the share of the store that it holds, transitions a second, and what memory it took and may."""

    ratio: float
    rate: float
    memory: int
    budget: int


def point(path: Path, wanted: ObservationFeatures, steps: int, ratio: float) -> Point:
    # A quarter of the budget goes to vectors: the budget is such that the frames' part holds the share asked for.
    budget = int(ratio * steps * 1.01 * (SIDE * SIDE * 3 + TAG_BYTES) / 0.75)
    gc.collect()  # the buffer of the point before
    before = resident_bytes()
    with replaying(path, wanted, budget) as replay:
        drawing = sampler(replay)
        batch = drawing.empty_batch()
        for _ in range(4 * (steps // CHUNK_STEPS) // BATCH):  # nearly every chunk was verified in full once, then
            drawing.sample(batch)
        rate = per_second(lambda: drawing.sample(batch), BATCH, POINT_S)
        return Point(
            ratio,
            rate,
            resident_bytes() - before - stated_bytes(replay.index.observation_count, steps),
            budget,
        )


def stated_bytes(observations: int, steps: int) -> int:
    """Memory besides the cache, by docs/replay.md: the index, places and checksums of frames, a filter's rows."""
    return 31 * steps + 84 * (steps // CHUNK_STEPS) + 16 * observations + 4 * steps


def resident_bytes() -> int:
    """Memory of this process that is its own (mapped files left out)."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None  # Linux has it
    return int(found[1]) * 1024


def curve(points: list[Point], steps: int) -> list[Row]:
    rows = []
    for ratio, rate, memory, budget in points:
        held = f"{ratio:.0%} of {steps:,} in the cache"
        rows.append(Row(1, f"sampling with {held}", "transitions/s", rate))
        rows.append(Row(1, f"memory with {held}; bound: its budget", "MB", memory / 1e6, budget / 1e6, budget / memory))
    return rows


def plot(points: list[Point], steps: int, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot([100 * point.ratio for point in points], [point.rate / 1e3 for point in points], marker="o")
    axes.set_xlabel("share of the store that fits in the cache, %")
    axes.set_ylabel("thousand transitions a second")
    axes.set_title(f"{steps:,} transitions, raw {SIDE}x{SIDE} frames, uniform batches of {BATCH}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=MILLION, help="transitions")
    steps = parser.parse_args().steps
    wanted, what = features(1, SIDE), f"{steps:,} transitions"
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as name:
        folder = Path(name)
        path = folder / "store"
        rows = [*appends(write(path, steps // EPISODE_STEPS)), *opening(path, what)]
        rows += checkpoints(path, folder, wanted, steps * 256, what)
        points = [point(path, wanted, steps, ratio) for ratio in RATIOS]
        rows += curve(points, steps)
    plot(points, steps, OUT / "replay.png")
    report("million", rows, reduced="" if steps >= MILLION else f"{steps:,} transitions of {MILLION:,}")


if __name__ == "__main__":
    main()
