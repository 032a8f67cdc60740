"""Terminal output of the commands: sizes, lines, JSON, progress bars."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.table import Table

EXIT_DAMAGED = 1
MAX_TABLE_CHARS = 1000
Advance = Callable[[int], object]


def size_text(n_bytes: float) -> str:
    """Three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 999.5:  # else it rounds to 1e+03
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def print_line(text: str, *, error: bool = False) -> None:
    """Prints text on standard output, or on standard error."""
    click.echo(text, err=error)


def print_json(value: Any) -> None:
    """Prints one line of JSON for other programs."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(table: Table, wrapped: Collection[str] = ()) -> None:
    """Prints a table that cuts no cell, and wraps only columns with these headers; a terminal wraps longer lines."""
    from rich.console import Console

    console = Console()
    options = console.options.update(max_width=MAX_TABLE_CHARS)
    for column in table.columns:
        if column.header not in wrapped:
            cells = (column.header, *column.cells)
            column.min_width = max(console.measure(cell, options=options).maximum for cell in cells)
    least = console.measure(table, options=options).minimum
    Console(width=max(console.width, least)).print(table, crop=False)


@contextmanager
def progress_bar(what: str, total: int | None, *, is_bytes: bool = False) -> Iterator[Advance]:
    """Shows a progress bar on a terminal's standard error; the body calls the yielded function with each increment."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    counts: ProgressColumn = DownloadColumn() if is_bytes else MofNCompleteColumn()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
