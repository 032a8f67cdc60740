"""Keeps results in ``benchmarks/results/`` and makes docs/benchmarks.md from them.

``python -m benchmarks.page`` writes the page. ``python -m benchmarks.page --keep [NAME ...]`` first takes over
what ``benchmarks/out/`` has (of all benchmarks, or of those that are named), with their pictures. A run that was
reduced, or whose code was not committed, is refused.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import OUT, ROOT, Row, Run, shown

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
PICTURES = {"million": "replay.png", "two_sites": "two-sites.png", "weights": "weights-governor.png"}
KEPT = 3  # runs of each benchmark
IN_FULL = {"gpu_push"}  # benchmarks whose every row is shown, those without a target too

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
    1: "Hot sampling, priorities, sampling during ingest",
    2: "Cold sampling, checksums verified",
    3: "Durable ingest",
    4: "A store of 1,000,000 transitions",
    5: "Encrypted streams and round trips",
    6: "Robot to durable acknowledgement",
    7: "Control messages beside saturated bulk channels",
    8: "Two sites",
    9: "Full weight pushes and swaps",
    10: "Small weight changes",
    11: "What a push costs the learner and inference",
    12: "Learning the demo's task",
    13: "Asynchronous against synchronous training",
    14: "More robots in real time",
    15: "200 ms of inference delay",
    16: "Control at 100 Hz for ten minutes",
    17: "Killed processes",
    18: "Crash states of the store",
    19: "Learner restart",
    20: "Hostile frames and keys",
    21: "Hostile actions and the safe state",
    22: "Fine-tuning of vision-language-action policies",
    23: "Policies on a GPU",
    24: "Length of tests and set-up",
    25: "Size of the code",
    26: "100 robots on two cores",
}
UNMEASURED = {
    6: "memory and loss with a stalled learner",
    9: "control deadlines missed because of a swap",
    10: "10,000 versions with drops, reorders and restarts (`make test-slow` tests them)",
    12: "learning from pixels, and with randomised scenes",
}
"""Parts of a goal that no benchmark measures, though one measures the rest."""

OPENING = """# Benchmarks

Figures of the system, next to their bounds and peers. `make bench` runs every benchmark and prints a summary;
`python -m benchmarks.NAME` runs one. `make bench-keep` copies the results into `benchmarks/results/` and generates this
page from them; `make bench-docs` makes the page alone. The page is generated: change the programs, not the page.

- Candidate and bound run in turn in one process, at least seven pairs. *Ratio* is the median of the pairs' ratios, with
  the least and the greatest pair in brackets; 1 is as good as the bound. It need not be the quotient of the medians.
- *Benchmark* leads to the date and the commit of a figure, in the table below.
- *Target* is the ratio that the goal asks for. "At most N times as long" is a target of 1/N.
- *Met* counts only for a figure of the run that is named, in the configuration that ships, over the whole duration that
  the goal states. With several kept runs, *1 of 2* counts the runs that met the goal, and *runs* gives each ratio.
"""


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
        blocks.append(f"## {section}\n")
        for goal in goals:
            blocks += _goal(goal, runs)
    if others := [pair for pair in _rows(runs) if pair[1].goal == 0]:
        blocks += ["## Without a goal\n", _table(others, runs)]
    return "\n".join(blocks)


def _provenance(runs: dict[str, list[Run]]) -> Iterator[str]:
    yield "## Measured\n"
    if not runs:
        yield "No results are kept yet.\n"
        return
    lines = ["| benchmark | command | date | commit | load before | machine |", "|---|---|---|---|---:|---|"]
    lines += [
        f"| {run.benchmark} | `{run.command}` | {run.date[:16].replace('T', ' ')} | {run.commit} | {run.load:g} | "
        f"{run.machine} |"
        for each in runs.values()
        for run in each
    ]
    yield "\n".join(lines) + "\n"


def _goal(goal: int, runs: dict[str, list[Run]]) -> Iterator[str]:
    yield f"### {goal}. {GOALS[goal]}\n"
    found = [pair for pair in _rows(runs) if pair[1].goal == goal]
    if not found:
        yield "Not measured.\n"
        return
    if shown_rows := [(run, row) for run, row in found if run.benchmark in IN_FULL or row.met is not None]:
        yield _table(shown_rows, runs)
    if missed := [f"- Missed: {_name(row)}{_distance(row)}." for _, row in shown_rows if row.met is False]:
        yield "\n".join(missed) + "\n"
    if unmeasured := UNMEASURED.get(goal):
        yield f"Not measured: {unmeasured}.\n"
    if more := len(found) - len(shown_rows):
        files = sorted({run.benchmark for run, row in found if (run, row) not in shown_rows})
        where = ", ".join(f"[{name}.json](../benchmarks/results/{name}.json)" for name in files)
        yield f"{more} more figures without a target: {where}.\n"


def _rows(runs: dict[str, list[Run]]) -> list[tuple[Run, Row]]:
    """Of the newest run of each benchmark."""
    return [(each[-1], row) for each in runs.values() for row in each[-1].rows]


def _table(rows: Sequence[tuple[Run, Row]], runs: dict[str, list[Run]]) -> str:
    head = "| figure | unit | ours | bound | ratio | target | met | peers | benchmark |"
    lines = [head, "|---|---|---:|---:|---:|---:|---|---|---|"]
    for run, row in rows:
        same = [each for other in runs[run.benchmark] for each in other.rows if each.name == row.name]
        peers = ", ".join(f"{peer}: {shown(figure)}" for peer, figure in row.peers.items())
        figures = f"{shown(row.ours)} | {shown(row.bound)} | {_ratio(row, same)} | {_short(row.target)}"
        lines.append(f"| {_name(row)} | {row.unit} | {figures} | {_met(same)} | {peers} | {run.benchmark} |")
    return "\n".join(lines) + "\n"


def _name(row: Row) -> str:
    share = "" if row.share is None else f"share of the stated work: {row.share:.2g}"
    besides = "; ".join(text for text in (share, row.note) if text)
    return f"{row.name} ({besides})" if besides else row.name


def _ratio(row: Row, runs: Sequence[Row]) -> str:
    if row.ratio is None:
        return ""
    pairs = f" ({row.spread[0]:.2f} to {row.spread[1]:.2f})" if row.spread else ""
    earlier = ", ".join(_short(each.ratio) for each in runs)
    return f"{row.ratio:.2f}{pairs}" + (f"; runs: {earlier}" if len(runs) > 1 else "")


def _short(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3g}"


def _met(runs: Sequence[Row]) -> str:
    if runs[-1].met is None:
        return ""
    met = sum(bool(row.met) for row in runs)
    return ("met" if met else "**missed**") if met in (0, len(runs)) else f"{met} of {len(runs)}"


def _distance(row: Row) -> str:
    if row.share is not None and row.target and row.ratio and row.ratio >= row.target:
        return ": the work was done less often than the goal states"
    return f": {row.ratio / row.target:.0%} of the target" if row.ratio is not None and row.target else ""


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
