"""The demo's arm at 100 Hz in real time, with a push of weights after every update and hardly any (goals 11 and 16).

``python -m benchmarks.pushes [--seconds 60] [--pairs 4]``: whole runs through the command line, a simulated arm that
learns to lift. Runs with many pushes and with one every five seconds take turns, each first in every other pair: with
none at all the arm would never move otherwise than at first, and simulating it would cost the machine another time. Of
a run count, once the learner has trained for `SETTLE_S`:

- the learner's median step, with all that it does to publish, as its metrics have it;
- the time for each update, of every second, and the median of these: every other step trains the actor too, so that
  the median of the steps lies between two sorts of them;
- the medians of its governor's share, and of what that takes for a step without pushes;
- the errors of the ends of control periods, p99, as recorded, and watchdog holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, report
from benchmarks.holds import Holds, count_holds
from hal.spec import Array
from user_sys.episode import Source, decode_chunk
from user_sys.store.log import LogReader
from user_sys.store.store import CHUNK

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
RATE_HZ, TARGET_MS = 100.0, 1.0
SETTLE_S = 10.0
ROBOT = "panda-0"
SETTINGS = {
    "robots.0.real_time": "true",
    "robots.0.options.rate_hz": str(RATE_HZ),
    "robots.0.options.step_max_m": "0.004",  # a tenth of the demo's, in a tenth of its control period
    "demonstrations.episodes": "0",  # the expert needs longer periods, and what is learned does not matter here
    "target.success": "0",
    "evaluation.episodes": "1",
    "evaluation.video_episodes": "0",
    "console.port": "0",
}
PUSHING = {"learner.publish.every_s": "0", "learner.publish.every_updates": "1"}
QUIET = {"learner.publish.every_s": "5"}


@dataclass(frozen=True)
class Measured:
    """Medians and p99 of one run: `versions` were published while it lasted, the governor left them `share` and saw the
    step take `idle_ms` without them."""

    step_ms: float
    update_ms: float
    period_ms: float
    holds: Holds
    share: float
    idle_ms: float
    versions: float
    updates: float


def measure(runs: Path, name: str, seconds: float, pushing: bool) -> Measured:
    """One run. Raises CalledProcessError when it fails, and TimeoutExpired after ten minutes more than it should."""
    settings = SETTINGS | (PUSHING if pushing else QUIET) | {"learner.max_training_s": str(seconds)}
    options = [text for key, value in settings.items() for text in (f"--{key}", value)]
    command = [
        sys.executable,
        "-m",
        "user_sys.cli",
        "train",
        str(CONFIG),
        "--name",
        name,
        "--runs",
        str(runs),
        *options,
    ]
    subprocess.run(command, check=True, timeout=600 + seconds)
    lines = [json.loads(line) for line in (runs / name / "metrics" / "learner.jsonl").read_text().splitlines()]
    settled = [line for line in lines if line["training_s"] >= SETTLE_S and line["step_ms"] > 0]
    episodes = ends_s(runs / name / "store", settled[0]["time_unix_s"])
    errors = np.abs(1e3 * np.concatenate([np.diff(ends) for ends, _ in episodes]) - 1e3 / RATE_HZ)
    return Measured(
        step_ms=statistics.median(line["step_ms"] for line in settled),
        update_ms=statistics.median(1e3 / line["updates_per_s"] for line in settled if line["updates_per_s"] > 0),
        period_ms=float(np.quantile(errors, 0.99)),
        holds=count_holds(runs / name / "logs" / f"{ROBOT}-driver.log", [(ends[0], last) for ends, last in episodes]),
        share=statistics.median(line.get("governor/share", 1.0) for line in settled),
        idle_ms=statistics.median(line.get("governor/idle_ms", line["step_ms"]) for line in settled),
        versions=lines[-1]["versions_published"],
        updates=lines[-1]["count"],
    )


def ends_s(store: Path, since_unix_s: float) -> list[tuple[Array, float]]:
    """Unix times of the ends of control periods in each of the policy's episodes that began since then, and of the
    episode's last command."""
    found: dict[str, list[tuple[Array, Array]]] = {}
    with LogReader.open(store) as reader:
        for ref in reader.records():
            if ref.kind == CHUNK:
                chunk = decode_chunk(reader.read(ref))
                header = chunk.header
                if header.source is Source.ONLINE and header.started_unix_ns >= since_unix_s * 1e9:
                    times = (np.array(chunk.columns[f"t_{what}_ns"]) for what in ("capture", "command"))
                    capture, command = ((each + header.unix_offset_ns) / 1e9 for each in times)
                    found.setdefault(header.episode, []).append((capture, command))
    return [(np.concatenate([c for c, _ in parts]), float(parts[-1][1][-1])) for parts in found.values()]


def rows(pairs: int, seconds: float) -> list[Row]:
    found: dict[bool, list[Measured]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="us-") as runs:
        for pair in range(pairs):
            for pushing in (pair % 2 == 0, pair % 2 == 1):
                found[pushing].append(measure(Path(runs), f"p{pair}{'on' if pushing else 'off'}", seconds, pushing))
    on, off = found[True], found[False]
    both = list(zip(on, off, strict=True))
    step = statistics.median(quiet.step_ms / push.step_ms for push, quiet in both)
    update = statistics.median(quiet.update_ms / push.update_ms for push, quiet in both)
    step_ms = [statistics.median(run.step_ms for run in runs) for runs in (on, off)]
    update_ms = [statistics.median(run.update_ms for run in runs) for runs in (on, off)]
    period_ms = [statistics.median(run.period_ms for run in runs) for runs in (on, off)]
    within, between = (
        [sum(getattr(run.holds, where) for run in runs) for runs in (on, off)] for where in ("within", "between")
    )
    seen_ms = statistics.median(run.idle_ms for run in on)
    share = statistics.median(run.versions / run.updates for run in on)
    name, period, fine = "demo at 100 Hz", period_ms[1] / period_ms[0], period_ms[0] <= TARGET_MS
    return [
        Row(11, f"{name}, learner's median step; bound: few", "ms", *step_ms, step, 1 / 1.03, step >= 1 / 1.03),
        Row(11, f"{name}, time for each update; bound: few", "ms", *update_ms, update, 1 / 1.03),
        Row(16, f"{name}, period error, p99; bound: few", "ms", *period_ms, period, None, fine),
        Row(16, f"{name}, watchdog holds within episodes; bound: few", "", *within, None, None, within[0] == 0),
        Row(16, f"{name}, watchdog holds between episodes; bound: few", "", *between, None, None),
        Row(11, f"{name}, step without a push, by the governor; bound: few", "ms", seen_ms, update_ms[1], None),
        Row(11, f"{name}, share left to pushes", "", statistics.median(run.share for run in on), None, None),
        Row(11, f"{name}, versions for each update", "", share, None, None),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training in each run")
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    report("pushes", rows(args.pairs, args.seconds))


if __name__ == "__main__":
    main()
