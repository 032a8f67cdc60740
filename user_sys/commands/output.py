"""How the verbs talk: sizes, shares, bars and a line at a time."""

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
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

EXIT_DAMAGED = 1
Advance = Callable[[int], object]


def size_text(n_bytes: float) -> str:
    """Three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def print_line(text: str) -> None:
    """Prints for a person, on standard output; names in it are not taken for markup."""
    Console().print(text, soft_wrap=True, markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Prints for a program: one line."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


@contextmanager
def bytes_bar(what: str, total: int | None) -> Iterator[Advance]:
    """Shows a bar of bytes and their speed on standard error while the body runs, which says how many more are done."""
    with _bar(what, total, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as advance:
        yield advance


@contextmanager
def count_bar(what: str, total: int | None) -> Iterator[Advance]:
    """As `bytes_bar`, for things that are counted."""
    with _bar(what, total, TextColumn("{task.completed:.0f}"), TimeRemainingColumn()) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int | None, *columns: ProgressColumn) -> Iterator[Advance]:
    text, console = TextColumn("{task.description}"), Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(text, BarColumn(), *columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
