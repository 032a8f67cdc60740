"""Keeps results in ``benchmarks/results/`` and makes docs/benchmarks.md from them.

``python -m benchmarks.page`` writes the page. ``python -m benchmarks.page --keep [NAME ...]`` first takes over
what ``benchmarks/out/`` has (of all benchmarks, or of those that are named), with their pictures. A run that was
reduced, or whose code was not committed, is refused.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.__main__ import VLA_MINUTES
from benchmarks.harness import OUT, ROOT, WHOLE, Row, Run, shown

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
LEARNING_PLOTS = ("state", "pixels", "randomised", "peg", "recap", "ppo", "asynchrony", "robots")
VLA_PLOTS = ("vla-online", "vla-alone")
PICTURES = {
    "million": "replay.png",
    "two_sites": "two-sites.png",
    "weights": "weights-governor.png",
} | {name: f"{name}.png" for name in (*(f"learning-{part}" for part in LEARNING_PLOTS), *VLA_PLOTS)}
KEPT = 3  # runs of each benchmark
IN_FULL = {"gpu_push", "gpu_learning", "gpu_vla"}  # benchmarks whose every row is shown, those without a target too

SECTIONS = {
    "Experience store": range(1, 5),
    "Tunnel": range(5, 9),
    "Weights": range(9, 12),
    "Learning": range(12, 17),
    "Reliability and security": range(17, 22),
    "Vision-language-action policies": range(22, 24),
    "The repository": range(24, 27),
}
GOALS = {
    1: "Hot sampling",
    2: "Cold sampling",
    3: "Durable ingest",
    4: "A million transitions",
    5: "Encrypted streams",
    6: "Durable acknowledgement",
    7: "Control messages under load",
    8: "Two sites",
    9: "Full weight pushes",
    10: "Small weight changes",
    11: "Cost of a push",
    12: "Learning the demo",
    13: "Asynchronous training",
    14: "Real-time robots",
    15: "200 ms of inference delay",
    16: "Control at 100 Hz",
    17: "Killed processes",
    18: "Crash states of the store",
    19: "Learner restart",
    20: "Hostile peers",
    21: "Hostile actions",
    22: "Fine-tuning of VLAs",
    23: "Policies on a GPU",
    24: "Test time",
    25: "Code size",
    26: "100 robots",
}
UNMEASURED = {
    6: "memory and loss with a stalled learner",
    9: "control deadlines missed because of a swap",
    10: "10,000 versions with drops, reorders and restarts (`make test-slow` tests them)",
}
"""Parts of a goal that no benchmark measures, though one measures the rest."""
TESTED = {17: "chaos-store", 18: "chaos-store", 19: "test-slow", 20: "chaos-tunnel"}
"""Goals that a target of the Makefile tests, instead of a benchmark."""

OPENING = """# Benchmarks

Figures with their bounds, by goal. `make bench` measures all; `make bench-keep` takes results over into
`benchmarks/results/`, which also has peers, spreads and loads, and generates this page.

Ours and bound run in turn. *Ratio* is the median of the pairs' ratios, 1 as good as the bound; the goal asks for the
figure after *of*.
"""
FAULT = re.compile(r"(?P<driver>\w+ at [\d.]+ Hz): (?P<fault>.*?)(?: until (?P<end>.*), worst of \d+)?")
ARM, HOLDS = "the arm stands", "the driver holds or says so"
FAULTS = {
    "SIGSTOP of the policy's process": "policy stopped",
    "SIGKILL of the policy's process": "policy killed",
    "SIGSTOP of the driver process": "driver stopped",
    "SIGKILL of the driver process": "driver killed",
    "silence of the arm's cable": "cable silent",
    "frozen picture of a camera": "camera frozen",
}


class ResultError(Exception):
    """A result that cannot be kept or read; the message says why."""


def kept(folder: Path = RESULTS) -> dict[str, list[Run]]:
    """Benchmark to its kept runs, the newest last. Raises ResultError."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=list[Run])
        except msgspec.DecodeError as error:
            raise ResultError(f"{path} holds no results: {error}; run the benchmark and keep it again") from error
    return found


def keep(name: str, out: Path = OUT, results: Path = RESULTS, images: Path = IMAGES) -> None:
    """Appends the run in `out` to those in `results`, of which the newest `KEPT` stay. Raises ResultError."""
    source, target = out / f"{name}.json", results / f"{name}.json"
    if not source.exists():
        raise ResultError(f"{name}: {source} is not there; run python -m benchmarks.{name} first")
    run = msgspec.json.decode(source.read_bytes(), type=Run)
    if run.reduced:
        raise ResultError(f"{name}: the run was reduced ({run.reduced}); run it without options")
    if run.commit.endswith("-dirty"):
        raise ResultError(f"{name}: its code was not committed ({run.commit}); commit, and run it again")
    runs = kept(results).get(name, [])
    if run in runs:
        return
    results.mkdir(exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode([*runs, run][-KEPT:]), indent=1) + b"\n")
    if picture := PICTURES.get(name):
        shutil.copy(out / picture, images / picture)


def page(runs: dict[str, list[Run]]) -> str:
    """The text of docs/benchmarks.md."""
    blocks = [OPENING, *_provenance(runs)]
    for section, goals in SECTIONS.items():
        rows = [pair for pair in _rows(runs) if pair[1].goal in goals and _is_shown(*pair)]
        if rows:
            blocks += [f"## {section}\n", *_section(rows, runs)]
        if section == "Learning":
            blocks += _plots(runs)
        if section.startswith("Vision"):
            blocks += [f"![Success over training time: {n}](images/{PICTURES[n]})\n" for n in VLA_PLOTS if n in runs]
    measured = {row.goal for _, row in _rows(runs)}
    gaps = [f"{text} ({goal})" for goal, text in UNMEASURED.items() if goal in measured]
    parts = ", ".join(part for part in VLA_MINUTES if f"vla-{part}" not in runs)
    gaps += [f"{parts} of the fine-tuning (22)"] if parts and 22 in measured else []
    for goal, title in GOALS.items():
        if goal not in measured:
            tests = f", which `make {TESTED[goal]}` tests" if goal in TESTED else ""
            gaps.append(f"{title[:1].lower()}{title[1:]} ({goal}){tests}")
    return "\n".join([*blocks, "## Not measured\n", "; ".join(gaps) + ".\n"])


def _plots(runs: dict[str, list[Run]]) -> Iterator[str]:
    """The plots of success over training time, of the learning benchmarks that were kept."""
    for part in LEARNING_PLOTS:
        if (name := f"learning-{part}") in runs:
            yield f"![Success over training time: {part}](images/{PICTURES[name]})\n"


def _is_shown(run: Run, row: Row) -> bool:
    return run.benchmark in IN_FULL or row.met is not None


def _provenance(runs: dict[str, list[Run]]) -> Iterator[str]:
    if not runs:
        return
    newest = [each[-1] for each in runs.values()]
    at = "; ".join(f"{run.benchmark} {run.date[:10]} at {run.commit}" for run in newest)
    yield textwrap.fill(f"Measured: {at}.", 120) + "\n"
    yield "; ".join(f"Machine: {machine}" for machine in dict.fromkeys(run.machine for run in newest)) + ".\n"


def _section(rows: Sequence[tuple[Run, Row]], runs: dict[str, list[Run]]) -> Iterator[str]:
    """The table of a section's figures, one of faults with a row for each driver and rate, and the misses."""
    faults = [row for _, row in rows if row.goal == 21 and FAULT.fullmatch(row.name)]
    others = [pair for pair in rows if pair[1] not in faults]
    if others:
        lines = ["| goal: figure | ours | bound | ratio |", "|---|---:|---:|---|"]
        for (run, row), count in _tightest(others):
            same = [each for other in runs[run.benchmark] for each in other.rows if each.name == row.name]
            unit = f" {row.unit}" if row.unit else ""
            of = f", tightest of {count}" if count > 1 else ""
            figures = f"{shown(row.ours)}{unit} | {shown(row.bound)} | {_ratio(same)}"
            lines.append(f"| {row.goal}: {_name(row)}{of} | {figures} |")
        yield "\n".join(lines) + "\n"
    if faults:
        yield _fault_table(faults)
    if missed := [f"- Missed: {_name(row)}{_distance(row)}." for _, row in rows if row.met is False]:
        yield "\n".join(missed) + "\n"


def _tightest(rows: Sequence[tuple[Run, Row]]) -> Iterator[tuple[tuple[Run, Row], int]]:
    """For each beginning of names before a colon: the figure nearest to its target, or missed, and their count.

    In the section on learning, success and time are both shown, and all figures of the benchmarks in `IN_FULL`.
    """
    groups: dict[tuple[int, str], list[tuple[Run, Row]]] = {}
    for run, row in rows:
        is_whole = row.goal in SECTIONS["Learning"] or run.benchmark in IN_FULL
        title = row.name if is_whole else row.name.partition(":")[0]
        groups.setdefault((row.goal, title), []).append((run, row))
    for group in groups.values():
        yield min(group, key=lambda pair: (pair[1].met is not False, _reached(pair[1]))), len(group)


def _reached(row: Row) -> float:
    """The share of its target that a figure reaches."""
    return row.ratio / row.target if row.ratio is not None and row.target else 1.0


def _fault_table(rows: Sequence[Row]) -> str:
    """One row for each driver and rate; a cell has the worst case and its bound, of the driver and of the arm."""
    cells: dict[str, dict[str, dict[str | None, str]]] = {}
    for row in rows:
        if found := FAULT.fullmatch(row.name):
            figure = f"{row.ours:.0f}/{row.bound:.0f}" if row.ours is not None and row.bound is not None else "missed"
            by_end = cells.setdefault(found["driver"], {}).setdefault(FAULTS.get(found["fault"], ""), {})
            by_end[found["end"]] = figure if row.met else f"**{figure}**"
    lines = [
        "Goal 21, faults: worst of five cases and bound in ms, until the driver holds or reports it, until the arm",
        "stands.\n",
        f"| driver | {' | '.join(FAULTS.values())} |",
        "|---|" + "---|" * len(FAULTS),
    ]
    for driver, faults in cells.items():
        texts = [
            ", ".join(filter(None, (ends.get(HOLDS), ends.get(ARM))))
            for ends in (faults.get(n, {}) for n in FAULTS.values())
        ]
        lines.append(f"| {driver} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _rows(runs: dict[str, list[Run]]) -> list[tuple[Run, Row]]:
    """Of the newest run of each benchmark."""
    return [(each[-1], row) for each in runs.values() for row in each[-1].rows]


def _name(row: Row) -> str:
    share = "" if row.share is None or row.share >= WHOLE else f"share of the stated work: {row.share:.2g}"
    besides = "; ".join(text for text in (share, row.note) if text)
    name = row.name.partition("; bound:")[0]
    return f"{name} ({besides})" if besides else name


def _ratio(runs: Sequence[Row]) -> str:
    """The ratio of the newest run and its target; of several runs, how many met the goal."""
    row = runs[-1]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}" + (f" of {row.target:.3g}" if row.target else "")
    met = sum(bool(each.met) for each in runs)
    several = f"{met} of {len(runs)} runs" if len(runs) > 1 and met not in (0, len(runs)) else ""
    missed = "**missed**" if row.met is False else ""
    return ", ".join(filter(None, (ratio, missed, several)))


def _distance(row: Row) -> str:
    if row.share is not None and row.target and row.ratio and row.ratio >= row.target:
        return ": the work was done less often than the goal states"
    return f": {_reached(row):.0%} of the target" if row.ratio is not None and row.target else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs="*", metavar="NAME", help="take over these results; all without names")
    names = parser.parse_args().keep
    refused = []
    for name in sorted(path.stem for path in OUT.glob("*.json")) if names == [] else names or ():
        try:
            keep(name)
            print(f"kept {name}")
        except ResultError as error:
            refused.append(str(error))
    PAGE.write_text(page(kept()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    if refused:
        sys.exit("not kept:\n" + "\n".join(refused))


if __name__ == "__main__":
    main()
