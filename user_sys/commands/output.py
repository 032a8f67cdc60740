"""Terminal output of the commands: sizes, lines, JSON, progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

EXIT_DAMAGED = 1
SUCCESS = {"yes": True, "no": False, "unknown": None}  # values of --success
Advance = Callable[[int], object]


def size_text(n_bytes: float) -> str:
    """Three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def print_line(text: str) -> None:
    """Prints text on standard output without interpreting markup."""
    Console().print(text, soft_wrap=True, markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Prints one line of JSON for other programs."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


@contextmanager
def bytes_bar(what: str, total: int | None) -> Iterator[Advance]:
    """Shows a progress bar of bytes on standard error; the body calls the yielded function with each increment."""
    with _bar(what, total, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as advance:
        yield advance


@contextmanager
def count_bar(what: str, total: int | None) -> Iterator[Advance]:
    """As `bytes_bar`, for a count."""
    with _bar(what, total, TextColumn("{task.completed:.0f}"), TimeRemainingColumn()) as advance:
        yield advance


@contextmanager
def step_bar(what: str, steps: int) -> Iterator[Advance]:
    """As `bytes_bar`, for steps; the bar stays on the terminal afterwards."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda done: progress.advance(task, done)


@contextmanager
def _bar(what: str, total: int | None, *columns: ProgressColumn) -> Iterator[Advance]:
    text, console = TextColumn("{task.description}"), Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(text, BarColumn(), *columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
