"""A hundred robots on one machine, and the memory of an edge (goal 26): ``python -m benchmarks.fleet``.

Each robot records two cameras at 10 Hz and delivers a chunk a second by a tunnel of its own. A gateway acknowledges the
chunk once it is on the disk. This process draws 50 batches of 256 a second from the growing store, as a learner does.
The robots share one process, ``python -m benchmarks.fleet --robots ...``; its share of the processor is reported,
because a fleet has computers of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import simplejpeg

from benchmarks.harness import ROOT, Row, at_most, reached, report, user_sys
from benchmarks.replay import features, sampler
from benchmarks.store import FLOATS, chunk
from benchmarks.tunnel import gateway_process
from user_sys.episode import Chunk, EpisodeEnd
from user_sys.messages import PROTOCOL_VERSION, Hello
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.sampler import Prefetcher
from user_sys.store.store import StoreReader
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.connection import PendingChunk
from user_sys.tunnel.keys import Keyring, load_keypair, new_keypair, save_keypair

ROBOTS, CONTROL_HZ, CHUNK_STEPS, EPISODE_CHUNKS = 100, 10, 10, 10
SIDES = (64, 128)  # of the pictures: those of configs/demo-pixels.yaml, and larger ones
BATCH, UPDATES_HZ = 256, 50
READY_S = 0.002  # a batch that is ready takes less: what is left is to draw the next one
WARM_S, SECONDS = 15.0, 60.0
ENOUGH = 0.99
EDGE_MB, EDGE_STEPS = 150.0, 50
DEADLINE_S = 120.0
EDGE_ROBOT = "robots: [{name: panda-0, driver: fake, task: reach, options: {cameras: [front, wrist]}}]\n"


class Robot:
    """A robot's outbox in memory: the tunnel's `ChunkSource` without a disk."""

    def __init__(self, name: str, jpegs: list[bytes]) -> None:
        self.name, self.acknowledged_s = name, list[float]()  # the second: from record to acknowledgement
        self._jpegs, self._numbers = jpegs, itertools.count()
        self._pending, self._recorded_at = deque[PendingChunk](), dict[int, float]()
        self._appended: Callable[[], None] | None = None

    def record(self) -> None:
        """Offers a chunk of one second."""
        number = next(self._numbers)
        episode, index = divmod(number, EPISODE_CHUNKS)
        plain = chunk(number, CHUNK_STEPS, 2, self._jpegs, index)
        last = index == EPISODE_CHUNKS - 1
        header = msgspec.structs.replace(
            plain.header,
            robot=self.name,
            episode=f"{self.name}-{episode}",
            first_step=index * CHUNK_STEPS,
            end=EpisodeEnd(steps=EPISODE_CHUNKS * CHUNK_STEPS, success=True) if last else None,
        )
        packet = bytes(Chunk(header, plain.columns, plain.final if last else {}).encode())
        self._recorded_at[number] = time.monotonic()
        self._pending.append(PendingChunk(number, packet))
        if self._appended is not None:
            self._appended()

    def __len__(self) -> int:
        return len(self._pending)

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        return (each for each in list(self._pending) if each.sequence > after_sequence)

    def acknowledge(self, sequence: int) -> None:
        while self._pending and self._pending[0].sequence <= sequence:
            number = self._pending.popleft().sequence
            self.acknowledged_s.append(time.monotonic() - self._recorded_at.pop(number))

    def set_aside(self, sequence: int, reason: str) -> None:
        raise AssertionError(f"{self.name}: chunk {sequence} refused: {reason}")

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        self._appended = on_append


def drive(run: Path, endpoint: str, gateway_key: str, side: int, seconds: float) -> None:
    """Records and delivers on time, then waits until all is acknowledged. Prints what it took."""
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 200, side)[:, None, None] * np.ones((1, side, 1))
    scenes = (ramp * rng.random(3) + rng.normal(20, 6, (side, side, 3)) for _ in range(32))
    jpegs = [simplejpeg.encode_jpeg(np.clip(scene, 0, 255).astype(np.uint8), quality=90) for scene in scenes]
    robots = [Robot(name, jpegs) for name in robot_names()]
    with contextlib.ExitStack() as stack:
        for robot in robots:
            hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name=robot.name)
            keys = load_keypair(run / "keys" / f"{robot.name}.key")
            client = stack.enter_context(TunnelClient(endpoint, keys, gateway_key, hello, outbox=robot))
            client.wait_open(DEADLINE_S)
        begun, cpu_s = time.monotonic(), time.process_time()
        period = CHUNK_STEPS / CONTROL_HZ / len(robots)
        print("recording", flush=True)
        for n in range(int(seconds / period)):
            time.sleep(max(0.0, begun + n * period - time.monotonic()))
            robots[n % len(robots)].record()
        took_s, cpu_s = time.monotonic() - begun, time.process_time() - cpu_s
        while any(map(len, robots)) and time.monotonic() < begun + took_s + DEADLINE_S:
            time.sleep(0.1)
    delays = [delay for robot in robots for delay in robot.acknowledged_s]
    found = {
        "acknowledged": len(delays) / int(seconds / period),
        "on_time": seconds / took_s,
        "p99_ms": float(np.quantile(delays, 0.99)) * 1e3,
        "cores": cpu_s / took_s,
    }
    print(json.dumps(found), flush=True)


def robot_names() -> list[str]:
    return [f"panda-{number}" for number in range(ROBOTS)]


def fleet_rows(side: int, seconds: float) -> Iterator[Row]:
    """The robots and the learner side by side, with pictures of `side` times `side`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        for name in robot_names()[1:]:  # the first is the gateway process's
            keys = new_keypair()
            save_keypair(keys, run / "keys", name)
            Keyring(run / "keys").allow(keys.public, name, "robot")
        rows = int(ROBOTS * CONTROL_HZ * (WARM_S + seconds + DEADLINE_S / 4))
        with gateway_process(run) as (address, _):
            command = [sys.executable, "-m", "benchmarks.fleet", "--robots", str(run), address.endpoint]
            command += [address.public_key, str(side), str(WARM_S + seconds + 5.0)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as robots:
                assert robots.stdout is not None
                try:
                    assert robots.stdout.readline() == "recording\n", "the robots did not connect"
                    took_s = draw(run / "store", side, rows, seconds)
                    found = json.loads(robots.stdout.readline())
                finally:
                    robots.terminate()
    rate, ready = len(took_s) / seconds, sum(each <= READY_S for each in took_s) / len(took_s)
    where, done = f"{ROBOTS} robots, two cameras of {side}x{side}", min(found["on_time"], found["acknowledged"])
    median, p99 = (1e3 * float(np.quantile(took_s, q)) for q in (0.5, 0.99))
    for name, unit, ours, bound, note in (
        (f"batches of {BATCH} drawn", "1/s", rate, UPDATES_HZ, ""),
        ("batches that were ready", "share", ready, 1.0, f"taken in {median:.2f} ms, p99 {p99:.2f} ms"),
    ):
        ratio = ours / bound
        met = reached(ratio, ENOUGH, done)
        yield Row(26, f"{name}, {where}", unit, ours, bound, ratio, ENOUGH, met, share=done, note=note)
    yield Row(26, f"record to durable acknowledgement, p99, {where}", "ms", found["p99_ms"])
    yield Row(26, f"the robots' process, {where}", "cores", found["cores"])


def draw(store: Path, side: int, rows: int, seconds: float) -> list[float]:
    """Seconds that it took to get each batch, drawn on time as far as it goes."""
    wanted, period = features(2, side, FLOATS), 1 / UPDATES_HZ
    cache_bytes = int(rows * (2 * side * side * 3 + 800) * 1.5)
    took_s = list[float]()
    with (
        StoreReader.open(store, wait_s=DEADLINE_S) as reader,
        ReplayBuffer(reader, wanted, cache_bytes=cache_bytes) as replay,
        Prefetcher(sampler(replay)) as batches,
    ):
        warm_until = time.monotonic() + WARM_S
        while time.monotonic() < warm_until:
            replay.refresh()
            if batches.sampler.is_ready:
                batches.next()
            time.sleep(period)
        begun = due = time.monotonic()
        while (now := time.monotonic()) < begun + seconds:
            due = max(due + period, now - period)
            time.sleep(max(0.0, due - now))
            replay.refresh()
            start = time.perf_counter()
            batches.next()
            took_s.append(time.perf_counter() - start)
    return took_s


def edge_row() -> Row:
    """The memory of an edge's processes while a robot with two cameras records: private, and its share of the rest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "robots.yaml").write_text(EDGE_ROBOT)
        with gateway_process(folder / "run") as (address, _):
            command = user_sys("edge", "robots.yaml", "--connect", address.endpoint, "--keys", "run/keys")
            with (folder / "log").open("wb") as log, subprocess.Popen(command, cwd=folder, stdout=log) as edge:
                try:
                    _until_recorded(folder / "run" / "store")
                    sizes = [proportional_bytes(pid) for pid in descendants(edge.pid)]
                finally:
                    edge.terminate()
    used = sum(sizes) / 1e6
    return at_most(26, f"memory of an edge with one robot, {len(sizes)} processes", "MB", used, EDGE_MB)


def descendants(pid: int) -> Iterator[int]:
    """A process, and those that it started, directly or not."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


def proportional_bytes(pid: int) -> int:
    """The memory of a process; what several share counts for each by its part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _until_recorded(store: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    with StoreReader.open(store, wait_s=DEADLINE_S) as reader:
        while time.monotonic() < deadline:
            reader.refresh()
            if len(reader.index.steps) >= EDGE_STEPS:
                return
            time.sleep(0.5)
    raise TimeoutError(f"the edge recorded no {EDGE_STEPS} steps within {DEADLINE_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--robots", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.robots:
        run, endpoint, key, side, seconds = options.robots
        drive(Path(run), endpoint, key, int(side), float(seconds))
        return
    rows = [row for side in SIDES for row in fleet_rows(side, options.seconds)]
    reduced = "" if options.seconds >= SECONDS else f"{options.seconds:g} s of {SECONDS:g}"
    report("fleet", [*rows, edge_row()], reduced=reduced)


if __name__ == "__main__":
    main()
