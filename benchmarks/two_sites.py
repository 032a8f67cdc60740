"""The demo over an emulated link that is cut for two minutes: does it reach its success, and is anything lost?

    python -m benchmarks.two_sites

Runs ``configs/two-sites.yaml`` through the whole system, watches the outbox from outside, and draws its fill and the
link's traffic over time into ``benchmarks/out/two-sites.png``. Lost are chunks that were seen in the outbox and are not
in the store at the end; twice are those that are there more than once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure

from benchmarks.harness import OUT, ROOT, Row, at_least, report, user_sys
from user_sys.config import load
from user_sys.episode import EpisodeSource, decode_chunk
from user_sys.run.config import RunConfig, RunFolder
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND

CONFIG = ROOT / "configs" / "two-sites.yaml"
PLOT = OUT / "two-sites.png"
RUN_DEADLINE_S = 1500.0
LOOK_EVERY_S = 0.5
WANTED = 0.95


class OutboxWatch:
    """Polls an outbox that another process writes, for its unacknowledged chunks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seen = set[tuple[str, int]]()  # episode and index of each chunk that it has seen there
        self.looks: list[tuple[float, int, int]] = []  # Unix time, chunks, bytes

    def look(self) -> None:
        if not self._path.exists():
            return
        names = [file.stem.split("_", 6) for file in self._path.iterdir() if file.suffix == ".chunk"]
        self.seen |= {(name[6], int(name[3])) for name in names}
        sizes = [int(name[1]) for name in names]
        self.looks.append((time.time(), len(sizes), sum(sizes)))


@dataclass(frozen=True)
class Outcome:
    """An ended run with its observations."""

    folder: RunFolder
    summary: dict[str, Any]
    watch: OutboxWatch
    robot: str


def rehearse(runs: Path, overrides: Sequence[str]) -> Outcome:
    """Raises CalledProcessError when the run fails, and TimeoutError after `RUN_DEADLINE_S`."""
    robot = load(RunConfig, CONFIG, overrides).robots[0].name
    folder = RunFolder(runs / "two-sites")
    command = user_sys("train", CONFIG, "--name", "two-sites", "--runs", runs)
    watch, deadline = OutboxWatch(folder.edge(robot) / "outbox"), time.monotonic() + RUN_DEADLINE_S
    with subprocess.Popen([*command, "--console.port", "0", *overrides]) as run:
        while run.poll() is None:
            watch.look()
            if time.monotonic() > deadline:
                run.terminate()
                raise TimeoutError(f"the run took more than {RUN_DEADLINE_S:g} s")
            time.sleep(LOOK_EVERY_S)
    watch.look()
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return Outcome(folder, json.loads((folder.path / "summary.json").read_text()), watch, robot)


def arrived(store: Path) -> Counter[tuple[str, int]]:
    """How often each chunk of the robot's own episodes is in the store."""
    with LogReader.open(store) as reader:
        headers = [decode_chunk(reader.read(ref)).header for ref in reader.records() if ref.kind == CHUNK_KIND]
    return Counter((header.episode, header.index) for header in headers if header.source is not EpisodeSource.DEMO)


def rows(outcome: Outcome) -> list[Row]:
    counts, watch, success = arrived(outcome.folder.store), outcome.watch, outcome.summary["success"]
    lost, twice = len(watch.seen - counts.keys()), counts.total() - len(counts)
    peak = max(size for _, _, size in watch.looks) / 1e6
    waiting = max(chunks for _, chunks, _ in watch.looks)
    return [
        at_least(0, "two sites: success over 100 episodes", success, WANTED),
        Row(0, "two sites: training time", "s", outcome.summary["training_s"]),
        Row(0, "two sites: chunks stored", "chunks", len(counts)),
        Row(0, "two sites: chunks lost", "chunks", lost, 0.0, None, None, lost == 0),
        Row(0, "two sites: chunks there twice", "chunks", twice, 0.0, None, None, twice == 0),
        Row(0, "two sites: outbox at its fullest", "chunks", waiting),
        Row(0, "two sites: outbox at its fullest", "MB", peak),
    ]


def draw(outcome: Outcome, path: Path) -> None:
    """Outbox and traffic over the seconds since the link's first connection, its cuts shaded."""
    counts = [json.loads(line) for line in _link_counts(outcome).read_text().splitlines()]
    connected = [line for line in counts if line["connections"]]
    start = connected[0]["time_unix_s"]
    events = msgspec.yaml.decode(outcome.folder.link(outcome.robot).read_bytes())["events"]
    figure = Figure(figsize=(9, 5), layout="constrained")
    outbox, traffic = figure.subplots(2, sharex=True)
    outbox.plot([t - start for t, _, _ in outcome.watch.looks], [size / 1e6 for _, _, size in outcome.watch.looks])
    outbox.set_ylabel("in the outbox, MB")
    times = [line["time_unix_s"] - start for line in connected]
    for way, label in (("up_bytes", "experience, up"), ("down_bytes", "weights, down")):
        carried = [line[way] * 8e-6 for line in connected]
        rates = [(b - a) / (v - u) for a, b, u, v in zip(carried, carried[4:], times, times[4:], strict=False)]
        traffic.plot(times[4:], rates, label=label)
    traffic.set(xlabel="seconds since the robot first connected", ylabel="over the link, Mbit/s")
    for axes in (outbox, traffic):
        axes.grid(alpha=0.3)
        for event in events:
            axes.axvspan(event["at_s"], event["at_s"] + event["for_s"], color="tab:red", alpha=0.12, label="link cut")
    traffic.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _link_counts(outcome: Outcome) -> Path:
    return outcome.folder.link(outcome.robot).with_suffix(".jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--runs", type=Path, help="keep the run's folder in here")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="user-sys-two-sites-") as temporary:
        outcome = rehearse(args.runs or Path(temporary), overrides)
        draw(outcome, args.plot)
        report("two_sites", rows(outcome), reduced=f"with {' '.join(overrides)}" if overrides else "")


if __name__ == "__main__":
    main()
