"""Runs every benchmark, one after the other: ``python -m benchmarks [--quick] [NAME ...]``.

One that fails, or takes `SLACK` times as long as it should, does not stop the others. Output goes to the terminal and
to ``benchmarks/out/<result>.log``. A summary follows; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness import OUT, ROOT, Run

SLACK = 4.0
LEAST_S = 600.0  # that a benchmark is given, however short it should be: set-up takes its time on a busy machine
STOP_S = 10.0


@dataclass(frozen=True)
class Program:
    """One run of ``python -m benchmarks.<module> <arguments>``.

    Attributes:
        minutes: the time that it takes on a quiet machine of two cores.
        quick: arguments with which it takes a minute or two, to see whether it works; its results are reduced ones.
        environment: whose Python it needs.
    """

    module: str
    minutes: float
    arguments: str = ""
    quick: str = ""
    environment: str = ".venv"

    @property
    def result(self) -> str:
        """The name under which it writes its results."""
        return "-".join([self.module, *self.arguments.split()])


LEARNING_MINUTES = {
    "state": 30,
    "pixels": 30,
    "randomised": 130,
    "peg": 250,
    "recap": 75,
    "ppo": 20,
    "asynchrony": 75,
    "robots": 120,
    "hg-dagger": 50,
    "staying": 110,
}
VLA_MINUTES = {
    "start": 50,
    "language": 60,
    "online": 150,
    "alone": 330,
    "fifth": 80,
    "progress": 8,
    "paraphrases": 55,
}
PROGRAMS = (
    Program("store", 3),
    Program("replay", 6),
    Program("million", 8, quick="--steps 50000"),
    Program("tunnel", 4),
    Program("sites", 5),
    Program("fleet", 6, quick="--seconds 5"),
    Program("weights", 12, quick="--small --no-ray"),
    Program("hal", 10, quick="--rounds 20000"),
    Program("faults", 8, "ur", quick="--pairs 1"),
    Program("faults", 8, "lerobot", quick="--pairs 1", environment=".venv-lerobot"),
    Program("faults", 6, "ros2", quick="--pairs 1", environment=".venv-ros2"),
    Program("faults", 6, "franka", quick="--pairs 1", environment=".venv-franka"),
    Program("control", 23, quick="--seconds 10"),
    Program("estop", 8, quick="--presses 10 --leaves 2"),
    Program("console", 3, quick="--inputs 20 --pages 3"),
    Program("pushes", 8, quick="--seconds 50 --runs 1"),
    *(Program("learning", minutes, name, quick="--quick --seeds 0") for name, minutes in LEARNING_MINUTES.items()),
    Program("interventions", 10, quick="--quick"),
    *(Program("vla", minutes, name, quick="--quick --seeds 0") for name, minutes in VLA_MINUTES.items()),
    Program("delay", 40, quick="--tasks follow --episodes 2 --updates 50 --demonstrations 5 --seconds 5"),
    Program("two_sites", 8),
    Program("gpu_push", 3, quick="--smoke"),
    Program("gpu_learning", 3, quick="--smoke"),
    Program("gpu_vla", 4, quick="--smoke"),
)


def run(program: Program, quick: bool) -> str:
    """Runs it. Returns what became of it, in words."""
    python = ROOT / program.environment / "bin" / "python"
    if not python.exists():
        return f"not run: .ci/set-up --{program.environment.removeprefix('.venv-')}"
    arguments = f"{program.arguments} {program.quick if quick else ''}".split()
    command = [str(python), "-m", f"benchmarks.{program.module}", *arguments]
    limit_s = max(LEAST_S, SLACK * 60 * program.minutes)
    with (OUT / f"{program.result}.log").open("wb") as log:
        tee = subprocess.Popen(["tee", "/dev/stderr"], stdin=subprocess.PIPE, stdout=log)
        process = subprocess.Popen(command, cwd=ROOT, stdout=tee.stdin, stderr=tee.stdin, start_new_session=True)
        assert tee.stdin is not None
        tee.stdin.close()
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"FAILED: not over after {limit_s / 60:.0f} minutes"
        finally:
            _end(process)
            tee.wait()
    return "ok" if status == 0 else f"FAILED: exit status {status}, see benchmarks/out/{program.result}.log"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the processes of its session that still run: SIGTERM first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
        if number is signal.SIGTERM:
            time.sleep(0.5)  # for its children
    process.wait()


def _counts(result: str, since_s: float) -> str:
    path = OUT / f"{result}.json"
    if not path.exists() or path.stat().st_mtime < since_s:
        return ""
    found = msgspec.json.decode(path.read_bytes(), type=Run)
    if found.reduced:
        return "reduced: says nothing about goals"
    met = [row.met for row in found.rows if row.met is not None]
    return f"{sum(met)} met, {len(met) - sum(met)} missed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results to make, such as faults-ur; else all")
    parser.add_argument("--quick", action="store_true", help="reduced runs, only to see whether the programs work")
    options = parser.parse_args()
    known = [program.result for program in PROGRAMS]
    if unknown := set(options.names) - set(known):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    OUT.mkdir(exist_ok=True)
    table = Table("benchmark", "outcome", "minutes", "goals", title="benchmarks")
    failed = False
    for program in PROGRAMS:
        if not options.names or program.result in options.names:
            print(f"== {program.result}, about {program.minutes:g} minutes", flush=True)
            began, wall_s = time.monotonic(), time.time()
            outcome = run(program, options.quick)
            failed |= outcome.startswith("FAILED")
            minutes = f"{(time.monotonic() - began) / 60:.1f}"
            table.add_row(program.result, outcome, minutes, _counts(program.result, wall_s))
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
