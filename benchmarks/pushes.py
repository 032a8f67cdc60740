"""The demo's arm at 100 Hz in real time, with a push after every update and with none, in turn (goal 11).

``python -m benchmarks.pushes [--seconds 120] [--runs 3]``: whole runs through the command line, a simulated arm that
learns to lift. Pushes are on for `ON_S` and off for `OFF_S` in turn, in one run, since two runs differ by more than
pushes cost: their arms move otherwise, and the machine is not as fast in one minute as in another. Each time that they
are on, and the two that they are off before and after it, are a pair; of each the first `SETTLE_S` do not count, in
which a push's effects go on (`benchmarks.pushes_ends` has the learner do this). Of the pairs count:

- the learner's median step, with all that it does to publish;
- the mean step: every other one trains the actor too, so that the median lies between two sorts of them;
- the errors of the ends of control periods, p99, as recorded, and watchdog holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, reached, report
from benchmarks.holds import Holds, count_holds
from benchmarks.pushes_ends import ENDED, PUSHING, SECONDS, STEPS, VERSION
from hal.spec import Array
from user_sys.episode import EpisodeSource, decode_chunk
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "demo.yaml"
RATE_HZ = 100.0
RUNS, SECONDS_EACH = 3, 120.0
ON_S, OFF_S = 12.0, 4.0
FROM_S = 10.0  # of training, until the governor has found its share, and processes have imported all that they need
SETTLE_S = 1.0
LONGEST = 2.0  # a step counts in a mean as so many 90th percentiles at most: a checkpoint is no push's doing
ROBOT = "panda-0"
SETTINGS = {
    "robots.0.real_time": "true",
    "robots.0.options.rate_hz": str(RATE_HZ),
    "robots.0.options.step_max_m": "0.004",  # a tenth of the demo's, in a tenth of its control period
    "demonstrations.episodes": "0",  # the expert needs longer periods; the learned policy does not matter here
    "target.success": "0",
    "evaluation.episodes": "1",
    "evaluation.video_episodes": "0",
    "console.port": "0",
    "learner.publish.every_s": "0",
    "learner.publish.every_updates": "1",
}


@dataclass(frozen=True)
class Phase:
    """A time of one kind: the learner's steps, seconds, and the errors of control periods, ms."""

    steps_s: Array
    errors_ms: Array

    @property
    def step_ms(self) -> float:
        return 1e3 * float(np.median(self.steps_s))

    def mean_ms(self, most_s: float) -> float:
        return 1e3 * float(np.minimum(self.steps_s, most_s).mean())


@dataclass(frozen=True)
class Measured:
    """One run: pairs of phases with pushes and without, holds in each kind, and the governor's decisions."""

    pairs: list[tuple[Phase, Phase]]
    most_s: float
    holds: tuple[Holds, Holds]
    seconds: tuple[float, float]
    versions_per_update: float
    share: float
    idle_ms: float


def measure(runs: Path, name: str, seconds: float) -> Measured:
    """One run. Raises CalledProcessError when it fails, and TimeoutExpired after ten minutes more than it should."""
    settings = SETTINGS | {"learner.max_training_s": str(seconds)}
    options = [text for key, value in settings.items() for text in (f"--{key}", value)]
    phases = [str(each) for each in (ON_S, OFF_S, FROM_S)]
    train = ["train", str(CONFIG), "--name", name, "--runs", str(runs), *options]
    command = [sys.executable, "-m", "benchmarks.pushes_ends", *phases, *train]
    subprocess.run(command, check=True, timeout=600 + seconds, env={**os.environ, "PYTHONPATH": str(ROOT)})
    steps = np.load(runs / name / STEPS)
    spans = spans_of(steps)
    episodes = ends_s(runs / name / "store")
    pairs = paired(*spans, partial(phase_in, steps, episodes))
    lines = [json.loads(line) for line in (runs / name / "metrics" / "learner.jsonl").read_text().splitlines()]
    settled = [line for line in lines if line["training_s"] >= FROM_S and "governor/idle_ms" in line]
    pushed = [steps[(first <= steps[:, ENDED]) & (steps[:, ENDED] < last)] for first, last in spans[0]]
    log = runs / name / "logs" / f"{ROBOT}-driver.log"
    bounds = [(ends[0], last) for ends, last in episodes]
    on, off = (count_holds(log, bounds, within_any(each)) for each in spans)
    return Measured(
        pairs=pairs,
        most_s=LONGEST * float(np.quantile(steps[:, SECONDS], 0.9)),
        holds=(on, off),
        seconds=tuple(sum(last - first for first, last in each) for each in spans),  # type: ignore[arg-type]
        versions_per_update=sum(np.ptp(each[:, VERSION]) for each in pushed) / sum(map(len, pushed)),
        share=statistics.median(line["governor/share"] for line in settled),
        idle_ms=statistics.median(line["governor/idle_ms"] for line in settled),
    )


Span = tuple[float, float]


def spans_of(steps: Array) -> tuple[list[Span], list[Span]]:
    """Unix times from when to when pushes were on, and off, without what does not count; whole ones alone."""
    turns = np.flatnonzero(np.diff(steps[:, PUSHING])) + 1
    found: tuple[list[Span], list[Span]] = ([], [])
    for first, last in itertools.pairwise(turns):
        span = float(steps[first, ENDED]) + SETTLE_S, float(steps[last - 1, ENDED])
        found[0 if steps[first, PUSHING] else 1].append(span)
    return found


def within_any(spans: list[Span]) -> Callable[[float], bool]:
    return lambda at: any(first <= at < last for first, last in spans)


def paired(on: list[Span], off: list[Span], phase: Callable[[list[Span]], Phase]) -> list[tuple[Phase, Phase]]:
    """Compares each phase with pushes to the two phases without around it: steps become longer as a run goes on."""
    between = ((each, [span for span in off if abs(span[0] - each[0]) < ON_S + OFF_S + SETTLE_S]) for each in on)
    return [(phase([each]), phase(around)) for each, around in between if len(around) == 2]


def phase_in(steps: Array, episodes: list[tuple[Array, float]], spans: list[Span]) -> Phase:
    error = [np.abs(1e3 * np.diff(times) - 1e3 / RATE_HZ) for times, _ in episodes]
    errors, at = np.concatenate(error), np.concatenate([times[1:] for times, _ in episodes])
    return Phase(steps[_within(steps[:, ENDED], spans), SECONDS], errors[_within(at, spans)])


def _within(at: Array, spans: list[Span]) -> Array:
    return np.any([(first <= at) & (at < last) for first, last in spans], axis=0)


def ends_s(store: Path) -> list[tuple[Array, float]]:
    """Unix times of the ends of control periods in each of the policy's episodes, and of its last command."""
    found: dict[str, list[tuple[Array, Array]]] = {}
    with LogReader.open(store) as reader:
        for ref in reader.records():
            if ref.kind == CHUNK_KIND:
                chunk = decode_chunk(reader.read(ref))
                header = chunk.header
                if header.source is EpisodeSource.ONLINE:
                    times = (np.array(chunk.columns[f"t_{what}_ns"]) for what in ("capture", "command"))
                    capture, command = ((each + header.unix_offset_ns) / 1e9 for each in times)
                    found.setdefault(header.episode, []).append((capture, command))
    return [(np.concatenate([c for c, _ in parts]), float(parts[-1][1][-1])) for parts in found.values()]


def rows(runs: int, seconds: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="us-") as folder:
        found = [measure(Path(folder), f"run-{number}", seconds) for number in range(runs)]
    pairs = [(on, off, run.most_s) for run in found for on, off in run.pairs]
    step_ms = [[each.step_ms for each in pair[:2]] for pair in pairs]
    mean_ms = [[each.mean_ms(most_s) for each in (on, off)] for on, off, most_s in pairs]
    period_ms = [float(np.quantile(np.concatenate([pair[kind].errors_ms for pair in pairs]), 0.99)) for kind in (0, 1)]
    name, on = "demo at 100 Hz, a push after every update", f"{len(pairs)} pairs"
    share = statistics.median(run.versions_per_update for run in found)
    return [
        ratio_row(f"{name}, learner's median step, {on}; bound: without pushes", step_ms, 1 / 1.03, share),
        ratio_row(f"{name}, learner's mean step, {on}; bound: without pushes", mean_ms, None, share),
        Row(16, f"{name}, period error, p99; bound: without pushes", "ms", *period_ms, period_ms[1] / period_ms[0]),
        *(hold_row(f"{name}, watchdog holds a minute {where} episodes; bound: without pushes", found, where)
          for where in ("within", "between")),
        Row(11, f"{name}, share of updates with a push", "", share),
        Row(11, f"{name}, share left to pushes", "", statistics.median(run.share for run in found)),
        Row(11, f"{name}, step without a push, by the governor; bound: as measured", "ms",
            statistics.median(run.idle_ms for run in found), statistics.median(off for _, off in mean_ms), None),
    ]  # fmt: skip


def ratio_row(name: str, both_ms: list[list[float]], target: float | None, share: float) -> Row:
    ratios = [off / on for on, off in both_ms]
    ours, bound = (statistics.median(pair[kind] for pair in both_ms) for kind in (0, 1))
    ratio, spread = statistics.median(ratios), (min(ratios), max(ratios))
    return Row(11, name, "ms", ours, bound, ratio, target, reached(ratio, target, share), spread=spread, share=share)


def hold_row(name: str, found: list[Measured], where: str) -> Row:
    rates = [
        60 * sum(getattr(run.holds[kind], where) for run in found) / sum(run.seconds[kind] for run in found)
        for kind in (0, 1)
    ]
    return Row(16, name, "1/min", *rates, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS_EACH, help="of training in each run")
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    whole = args.runs >= RUNS and args.seconds >= SECONDS_EACH
    report("pushes", rows(args.runs, args.seconds), reduced="" if whole else f"{args.runs} runs of {args.seconds:g} s")


if __name__ == "__main__":
    main()
