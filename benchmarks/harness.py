"""Compares a candidate with its bound on a machine that is noisy and shared, and writes the results.

The two run interleaved in one process; the median of the pairs' ratios counts, and not the ratio of two medians,
because what disturbs a machine disturbs both halves of a pair alike.

`report` writes one run of a benchmark to ``benchmarks/out/<name>.json``: a `Run` with its rows. `benchmarks.page` keeps
such runs in ``benchmarks/results/`` and makes docs/benchmarks.md from them.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "out"
WIDTH = 150  # at least, also if the output is a file
LEAVE_S = 60.0  # from SIGTERM to the end of a process
WHOLE = 0.99  # the least share that counts as all of the work
MEASURED = ("hal", "robots", "sim", "user_sys", "configs", "benchmarks/*.py", "constraints.txt")
"""Paths that a figure depends on: an uncommitted change here is noted with the commit."""


class Row(msgspec.Struct, frozen=True):
    """One figure.

    Attributes:
        goal: number of the goal that the figure belongs to.
        ours, bound: medians, in `unit`; `ours` is None if it could not be measured, `bound` if there is nothing to
            compare with.
        peers: name to figure, in `unit`; to the reason, in words, for one that could not be measured.
        ratio: ours / bound if more is better; bound / ours if less is: 1 is as good as the bound, either way.
            None without a bound.
        ahead: peer to how many times as good as it we are, for those that were measured.
        target: what `ratio` should reach; None for a figure that is only reported.
        met: whether the goal is reached; None for a figure that is only reported, and in a reduced run.
        spread: the least and the greatest ratio of the pairs; `spreads`: those of each peer's.
        share: how much was done of the work that the goal states, such as 0.25 for a push in each fourth step; None for
            all of it. A goal is not met with less than `WHOLE`.
        note: a remark for the reader of the table.
    """

    goal: int
    name: str
    unit: str
    ours: float | None
    bound: float | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    peers: Mapping[str, float | str] = {}
    ahead: Mapping[str, float] = {}
    spread: tuple[float, float] | None = None
    spreads: Mapping[str, tuple[float, float]] = {}
    share: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.met and self.share is not None and self.share < WHOLE:
            raise ValueError(f"{self.name}: {self.share:g} of the stated work was done, so the goal is not met")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a benchmark, as it is written to JSON.

    Attributes:
        command: as it was started.
        date: of the end, UTC, ISO 8601.
        commit: of the code at the start; with ``-dirty`` if `MEASURED` held changes that are not committed.
        load: load average of the last minute at the start: how busy others kept the machine.
        reduced: the parts of the goals that were left out or cut short, in words; empty for a whole run. No row of a
            reduced run states whether a goal is met.
    """

    benchmark: str
    command: str
    date: str
    commit: str
    machine: str
    load: float
    reduced: str = ""
    rows: tuple[Row, ...]


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

    def ratios(rivals: list[float]) -> list[float]:
        return [a / b if more_is_better else b / a for a, b in zip(first, rivals, strict=True)]

    ratio = statistics.median(ratios(second))
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
        ahead={peer: statistics.median(ratios(figures)) for peer, figures in others.items()},
        spread=(min(ratios(second)), max(ratios(second))),
        spreads={peer: (min(ratios(figures)), max(ratios(figures))) for peer, figures in others.items()},
    )


def at_most(goal: int, name: str, unit: str, figure: float, bound: float, peers: Mapping[str, float | str] = {}) -> Row:
    """The row of a goal that is met if `figure` is at most `bound`."""
    return Row(goal, name, unit, figure, bound, bound / max(figure, 1e-9), 1.0, figure <= bound, peers)


def at_least(goal: int, name: str, share: float, target: float | None, note: str = "") -> Row:
    """The row of a goal that is met if `share`, of 1, is at least `target`; None for a share that is only reported."""
    return Row(goal, name, "share", share, 1.0, share, target, None if target is None else share >= target, note=note)


def against(row: Row, peer: str, target: float) -> Row:
    """The row of a goal that names a peer: that of `row`, with the peer in the bound's place."""
    name, figure, ratio = f"{row.name}, against {peer}", row.peers[peer], row.ahead.get(peer)
    if isinstance(figure, str) or ratio is None:
        return Row(row.goal, name, row.unit, row.ours, None, None, target, None, {peer: figure})
    met, spread = ratio >= target, row.spreads[peer]
    return Row(row.goal, name, row.unit, row.ours, figure, ratio, target, met, spread=spread)


def reached(ratio: float, target: float | None, share: float | None = None) -> bool | None:
    """Whether a goal is met: `ratio` is at its target, and all of the stated work was done. None without a target."""
    return None if target is None else ratio >= target and (share is None or share >= WHOLE)


@contextmanager
def running(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes its output to `log`; SIGTERM ends it."""
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(LEAVE_S)


def user_sys(*arguments: object) -> list[str]:
    """The command line of ``user-sys`` with these arguments, in this environment."""
    return [sys.executable, "-m", "user_sys.commands.main", *map(str, arguments)]


def machine() -> str:
    """The machine in words: processor, cores, memory, kernel; GPU, if this process has torch and a GPU."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch is not None and torch.cuda.is_available() else ""
    kernel = f"{platform.system()} {platform.release().split('-')[0]}"
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {kernel}{gpu}"


def commit() -> str:
    """The commit of the checkout, with ``-dirty`` after it if `MEASURED` was changed since; ``unknown`` without git."""
    head = _git("rev-parse", "--short=10", "HEAD")
    return head + "-dirty" * bool(_git("status", "--porcelain", "--", *MEASURED)) if head else "unknown"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


_START = commit(), os.getloadavg()[0]


def report(name: str, rows: Sequence[Row], *, reduced: str = "") -> Run:
    """Prints `rows` as a table and writes ``benchmarks/out/<name>.json``.

    Args:
        reduced: the parts that the options left out or cut short, such as ``60 s of 600``. With it no row
            states whether its goal is met.
    """
    commit_at_start, load = _START
    run = Run(
        benchmark=name,
        command=" ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=commit_at_start,
        machine=machine(),
        load=round(load, 2),
        reduced=reduced,
        rows=tuple(replace(row, met=None) if reduced else row for row in rows),
    )
    _print(run)
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(run, enc_hook=_plain), indent=1) + b"\n")
    return run


def _plain(figure: np.generic) -> float | bool:
    return figure.item()  # type: ignore[no-any-return]


def _print(run: Run) -> None:
    title = f"{run.benchmark}, reduced: {run.reduced}" if run.reduced else run.benchmark
    table = Table("goal", "figure", "unit", "ours", "bound", "ratio", "target", "met", "peers", title=title)
    for row in run.rows:
        table.add_row(
            str(row.goal),
            f"{row.name} ({row.note})" if row.note else row.name,
            row.unit,
            *(shown(figure) for figure in (row.ours, row.bound)),
            "" if row.ratio is None else f"{row.ratio:.3f}",
            "" if row.target is None else f"{row.target:.3g}",
            {None: "", True: "yes", False: "[red]no"}[row.met],
            ", ".join(f"{peer} {shown(figure)}" for peer, figure in row.peers.items()),
        )
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table)


def shown(figure: float | str | None) -> str:
    """A figure with four digits that count, or all before the point, in a table; a reason stays as it is."""
    if figure is None or isinstance(figure, str):
        return figure or ""
    return f"{figure:,.0f}" if abs(figure) >= 1e4 else f"{figure:,.4g}"
