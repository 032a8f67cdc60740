"""A progress bar over steps, for exports and imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int], object]  # told how many more steps are done


@contextmanager
def step_bar(what: str, steps: int) -> Iterator[Advance]:
    """Shows a bar on standard error while the body runs; where that is no terminal, nothing moves."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda done: progress.advance(task, done)
