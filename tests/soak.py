"""Runs eight robots for an hour while people help and processes die: ``python tests/soak.py`` (`--quick`: 3 minutes).

It fails if a recorded step is lost or repeated, if the status does not name a fault within 5 s, or if memory, open
files, threads or the p99 of control do not stay flat. The report goes to soak.md, or to the file of `--report`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from run_kit import Launch, user_sys
from wait_kit import until
from websockets.sync.client import connect

from user_sys.episode import Phase, decode_chunk
from user_sys.run.status import find_faults, read_status
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.store.verify import verify_log

ROBOTS, RATE_HZ = 8, 10
SAMPLE_S = 2.0
NAMED_S = 5.0
START_S = 300.0
KILLED = (  # module, and the process that the status names
    ("user_sys.edge.session", "-session"),
    ("user_sys.gateway", "gateway"),
    ("user_sys.edge.driver_server", "-driver"),
    ("user_sys.run.learner_process", "learner"),
)
CONFIG = """
demonstrations: {episodes: 2}
learner: {max_training_s: 100000, batch_size: 64, warmup_updates: 50, checkpoint_interval_s: 10}
logging: {wandb: {mode: disabled}}
console: {port: 0}
"""
# Growth from the middle third of a process's life to its last third: a share, and an amount in addition.
MEMORY, MEMORY_BYTES = 0.10, 30e6
HANDLES, P99_SHARE, P99_S = 8, 1.0, 0.05
_SAMPLE = re.compile(r"^user_sys_(process_\w+)\{process=\"([^\"]+)\"\} (\S+)$", re.MULTILINE)
_BUCKET = re.compile(
    r"^user_sys_capture_to_inference_seconds_bucket\{le=\"([^\"]+)\",robot=\"[^\"]+\"\} (\S+)$", re.MULTILINE
)


@dataclass
class Watch:
    """Samples of the metrics page: values by (metric, process), in order; counts of delays by bound."""

    port: int
    values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    delays: list[dict[float, float]] = field(default_factory=list)

    def sample(self) -> None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                page = answer.read().decode()
        except OSError:
            return
        for name, process, value in _SAMPLE.findall(page):
            self.values[(name, process)].append(float(value))
        totals: dict[float, float] = defaultdict(float)
        for bound, count in _BUCKET.findall(page):
            totals[float(bound)] += float(count)
        if totals:
            self.delays.append(totals)

    def p99_s(self, first: float, last: float) -> float:
        """The bound of the bucket with the 99th percentile, between two shares of the samples."""
        if len(self.delays) < 3:
            return 0.0
        before, after = (self.delays[int(share * (len(self.delays) - 1))] for share in (first, last))
        counts = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
        if counts.get(float("inf"), 0.0) <= 0:  # the gateway was restarted in between
            counts = after
        return next((bound for bound in sorted(counts) if counts[bound] >= 0.99 * counts[float("inf")]), 0.0)


def thirds(values: list[float]) -> tuple[float, float]:
    """Medians of the middle third and of the last."""
    third = max(1, len(values) // 3)
    return statistics.median(values[third : 2 * third] or values), statistics.median(values[-third:])


def help_robots(address: str, stop: threading.Event, done: Counter[str]) -> None:
    """Takes one robot after the other over, drives it for two seconds, and hands it back."""
    url = address.replace("http://", "ws://").replace("/?", "/ws?")
    while not stop.is_set():
        try:
            with connect(url, max_size=None) as socket:
                threading.Thread(target=lambda: [None for _ in socket], daemon=True).start()
                socket.send(json.dumps({"type": "hello", "operator": "soak"}))
                for number in range(10**6):
                    robot = f"arm-{number % ROBOTS}"
                    socket.send(json.dumps({"type": "order", "robot": robot, "order": "take-over"}))
                    for _ in range(50):
                        drive = {"type": "drive", "robot": robot, "move": [0.3, 0.0, 0.0], "gripper": 0.0}
                        socket.send(json.dumps(drive))
                        if stop.wait(0.04):
                            return
                    socket.send(json.dumps({"type": "order", "robot": robot, "order": "hand-back"}))
                    done[robot] += 1
                    if stop.wait(6.0):
                        return
        except Exception as error:  # the page may be busy; the next connection continues
            print(f"soak: the page closed: {error}", flush=True)
            stop.wait(2.0)


def kill_and_await_name(launch: Launch, run: Path, module: str, name: str, late: list[str]) -> None:
    pid = until(lambda: launch.pid_of(module), f"{module} runs", START_S)
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    try:
        until(lambda: any(name in fault.subject for fault in find_faults(read_status(run), run)), name, NAMED_S)
    except AssertionError:
        late.append(f"{name}: the status did not name it within {NAMED_S:g} s")
    print(f"soak: killed {module}; named after {time.monotonic() - killed_s:.1f} s", flush=True)


def lost_steps(run: Path) -> tuple[list[str], dict[str, int]]:
    """Problems of the store and the outboxes; and counts."""
    problems = [f"damage: {damage}" for damage in verify_log(run / "store")]
    keys, steps, helped = Counter[tuple[str, int]](), 0, set()
    with LogReader.open(run / "store") as reader:
        for ref in reader.records():
            if ref.kind == CHUNK_KIND:
                chunk = decode_chunk(bytes(reader.read(ref)))
                keys[(chunk.header.episode, chunk.header.index)] += 1
                steps += chunk.header.steps
                if (chunk.columns["phase"] == Phase.CORRECTION).any():
                    helped.add(chunk.header.episode)
    problems += [f"stored {count} times: {key}" for key, count in keys.items() if count > 1]
    problems += [f"{episode} lacks chunk {n - 1}" for episode, n in keys if n and (episode, n - 1) not in keys]
    problems += [f"not delivered: {file}" for file in run.glob("edge/*/outbox/*.chunk")]
    episodes = len({episode for episode, _ in keys})
    return problems, {"episodes": episodes, "chunks": len(keys), "steps": steps, "helped episodes": len(helped)}


def growth_problems(watch: Watch) -> list[str]:
    found = []
    for (name, process), values in sorted(watch.values.items()):
        middle, last = thirds(values)
        if name == "process_resident_bytes":
            allowed = middle * (1 + MEMORY) + MEMORY_BYTES
        elif name in ("process_open_files", "process_threads"):
            allowed = middle + HANDLES
        else:
            continue
        if last > allowed:
            found.append(f"{name} of {process} grew from {middle:,.0f} to {last:,.0f}")
    middle, last = watch.p99_s(0.33, 0.66), watch.p99_s(0.66, 1.0)
    if last > middle * (1 + P99_SHARE) + P99_S:
        found.append(f"the p99 from capture to action grew from {middle:g} to {last:g} s")
    return found


def report(seconds: float, watch: Watch, counts: dict[str, int], problems: list[str]) -> str:
    lines = [
        "# Soak test",
        "",
        f"`make soak`: {ROBOTS} robots at {RATE_HZ} Hz for {seconds / 60:.0f} minutes, {time.strftime('%Y-%m-%d')}, "
        f"{os.cpu_count()} processors.",
        "",
        f"Result: {'**failed**' if problems else 'passed'}.",
        *(f"- {problem}" for problem in problems),
        "",
        "| count | |",
        "|---|---:|",
        *(f"| {name} | {count:,} |" for name, count in counts.items()),
        f"| p99 from capture to action, s, middle and last third | {watch.p99_s(0.33, 0.66)}, {watch.p99_s(0.66, 1)} |",
        "",
        "The largest of equal processes, in the middle and in the last third:",
        "",
        "| process | memory, MB | open files | threads |",
        "|---|---:|---:|---:|",
    ]
    alike: dict[str, list[str]] = {}  # robots' processes differ by a number only
    for process in sorted({process for _, process in watch.values}):
        alike.setdefault(re.sub(r"\d+", "*", process), []).append(process)
    for name, processes in alike.items():
        cells = []
        for metric, unit in (("process_resident_bytes", 1e6), ("process_open_files", 1), ("process_threads", 1)):
            parts = [thirds(values) for each in processes if (values := watch.values.get((metric, each), []))]
            cells.append(" and ".join(f"{max(part) / unit:.0f}" for part in zip(*parts, strict=True)) or "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def soak(folder: Path, seconds: float, between_kills_s: float) -> tuple[Watch, dict[str, int], list[str]]:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    robots = "".join(
        f"  - {{name: arm-{n}, driver: fake, task: reach, real_time: true, options: {{rate_hz: {RATE_HZ}}}}}\n"
        for n in range(ROBOTS)
    )
    (folder / "soak.yaml").write_text(f"robots:\n{robots}{CONFIG}")
    run, watch, late = folder / "runs" / "soak", Watch(port), list[str]()
    stop, helped, kills = threading.Event(), Counter[str](), Counter[str]()
    with user_sys(folder, "train", "soak.yaml", "--name", "soak", f"--logging.prometheus_port={port}") as launch:
        pattern = re.compile(r"http://127\.0\.0\.1:\d+/\?token=[\w-]+")
        address = until(lambda: pattern.search(launch.out), "the page", START_S)[0]
        until(lambda: (run / "status.json").exists() and read_status(run).run.updates > 50, "it trains", START_S)
        person = threading.Thread(target=help_robots, args=(address, stop, helped))
        person.start()
        began_s = next_kill_s = time.monotonic()
        next_kill_s += between_kills_s
        while (now_s := time.monotonic()) < began_s + seconds and launch.process.poll() is None:
            watch.sample()
            if now_s >= next_kill_s and now_s < began_s + 0.6 * seconds:  # the last part shows that it is flat again
                module, name = KILLED[sum(kills.values()) % len(KILLED)]
                kill_and_await_name(launch, run, module, name, late)
                kills[name] += 1
                next_kill_s = time.monotonic() + between_kills_s
            time.sleep(SAMPLE_S)
        stop.set()
        person.join()
        view = read_status(run).run
        launch.interrupt()
        status = launch.wait()
        problems = late + ([] if status == 130 else [f"the run ended with status {status}: {launch.err[-500:]}"])
        launch.require_nothing_left()
    evaluation = subprocess.run(
        [sys.executable, "-m", "user_sys.commands.main", "evaluate", run, "--episodes", "5", "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    problems += [] if evaluation.returncode == 0 else [f"the evaluation failed: {evaluation.stderr[-300:]}"]
    lost, counts = lost_steps(run)
    counts |= {"updates": view.updates, "versions pushed": view.policy_version, "handed back": helped.total()}
    counts |= {"processes killed": kills.total(), "steps lost or repeated": len(lost)}
    problems += lost[:20] + growth_problems(watch) + ([] if helped else ["no person's control was recorded"])
    return watch, counts, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three minutes")
    parser.add_argument("--report", type=Path, default=Path("soak.md"))
    given = parser.parse_args()
    seconds = 180.0 if given.quick else 3600.0
    with tempfile.TemporaryDirectory(prefix="us-soak-") as folder:
        watch, counts, problems = soak(Path(folder), seconds, 20.0 if given.quick else 120.0)
    text = report(seconds, watch, counts, problems)
    given.report.write_text(text)
    print(text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
