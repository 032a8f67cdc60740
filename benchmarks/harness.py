"""Compares a candidate with its bound on a machine that is noisy and shared.

The two run interleaved in one process; the median of the pairs' ratios counts, and not the ratio of two medians,
because what disturbs a machine disturbs both halves of a pair alike.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out"
WIDTH = 150  # at least, also where the output is a file


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        goal: number of the goal that the figure belongs to.
        ours, bound: medians, in `unit`; `bound` is None where there is nothing to compare with.
        peers: name to figure, in `unit`; to the reason, in words, for one that could not be measured.
        ratio: ours / bound where more is better; bound / ours where less is: 1 is as good as the bound, either way.
            None without a bound.
        ahead: peer to how many times as good as it we are, for those that were measured.
        target: what `ratio` should reach; None for a figure that is only reported.
    """

    goal: int
    name: str
    unit: str
    ours: float
    bound: float | None
    ratio: float | None
    target: float | None = None
    met: bool | None = None
    peers: Mapping[str, float | str] = field(default_factory=dict)
    ahead: Mapping[str, float] = field(default_factory=dict)


def compare(
    name: str,
    ours: Callable[[], float],
    bound: Callable[[], float],
    pairs: int = 7,
    *,
    goal: int = 0,
    unit: str = "",
    target: float | None = None,
    more_is_better: bool = True,
    peers: Mapping[str, Callable[[], float] | str] | None = None,
) -> Row:
    """Runs both `pairs` times in turn, after one run of each that does not count; each call returns a figure in `unit`.

    Which of a pair goes first alternates. Peers run once after each pair; one that cannot run is its reason, in words.
    """
    first: list[float] = []
    second: list[float] = []
    absent = {peer: why for peer, why in (peers or {}).items() if isinstance(why, str)}
    running = {peer: run for peer, run in (peers or {}).items() if not isinstance(run, str)}
    others: dict[str, list[float]] = {peer: [] for peer in running}
    for run in (ours, bound, *running.values()):
        run()
    for pair in range(max(pairs, 7)):
        for which in (0, 1) if pair % 2 else (1, 0):
            (second if which else first).append((bound if which else ours)())
        for peer, run in running.items():
            others[peer].append(run())

    def ahead(rivals: list[float]) -> float:
        return statistics.median(a / b if more_is_better else b / a for a, b in zip(first, rivals, strict=True))

    ratio = ahead(second)
    return Row(
        goal=goal,
        name=name,
        unit=unit,
        ours=statistics.median(first),
        bound=statistics.median(second),
        ratio=ratio,
        target=target,
        met=None if target is None else ratio >= target,
        peers={peer: statistics.median(figures) for peer, figures in others.items()} | absent,
        ahead={peer: ahead(figures) for peer, figures in others.items()},
    )


def against(row: Row, peer: str, target: float) -> Row:
    """The row of a goal that names a peer: that of `row`, with the peer in the bound's place."""
    name, figure, ratio = f"{row.name}, against {peer}", row.peers[peer], row.ahead.get(peer)
    if isinstance(figure, str) or ratio is None:
        return Row(row.goal, name, row.unit, row.ours, None, None, target, None, {peer: figure})
    return Row(row.goal, name, row.unit, row.ours, figure, ratio, target, ratio >= target)


def machine() -> str:
    """The machine in words: processor, cores, memory, kernel."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"


def report(name: str, rows: list[Row]) -> None:
    """Prints `rows` as a table and writes ``benchmarks/out/<name>.json``."""
    table = Table("goal", "figure", "unit", "ours", "bound", "ratio", "target", "met", "peers", title=name)
    for row in rows:
        table.add_row(
            str(row.goal),
            row.name,
            row.unit,
            f"{row.ours:,.4g}",
            "" if row.bound is None else f"{row.bound:,.4g}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            "" if row.target is None else f"{row.target:g}",
            {None: "", True: "yes", False: "[red]no"}[row.met],
            ", ".join(
                f"{peer} {figure if isinstance(figure, str) else f'{figure:,.4g}'}"
                for peer, figure in row.peers.items()
            ),
        )
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table)
    OUT.mkdir(exist_ok=True)
    stamp = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "machine": machine()}
    (OUT / f"{name}.json").write_text(json.dumps([asdict(row) | stamp for row in rows], indent=1) + "\n")


def _shown(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:,.4g}"
