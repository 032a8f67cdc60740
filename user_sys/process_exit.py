"""How a program of ours ends: its exit status, and an immediate exit if nothing else ends it."""

from __future__ import annotations

import enum
import os
import sys
import threading
from argparse import Namespace

EXIT_DEADLINE_S = 9.5
"""A program that drives robots has ended by then after the first signal."""
_PRINT_TIMEOUT_S = 0.2


class ExitStatus(enum.IntEnum):
    """The exit status of ``user-sys``. `NOT_REACHED`: the run ended normally, below its target."""

    REACHED = 0
    NOT_REACHED = 1
    FAILED = 2
    INTERRUPTED = 128 + 2  # what shells report for an end by SIGINT


def exit_now(text: str, status: int = ExitStatus.INTERRUPTED) -> None:
    """Ends this process without clean-up; any thread may call it. A blocked terminal delays it by 0.2 s at most."""
    printing = threading.Thread(target=_print_error, args=(text,), daemon=True)
    printing.start()
    printing.join(_PRINT_TIMEOUT_S)
    os._exit(status)


def _print_error(text: str) -> None:
    show_cursor = "\x1b[?25h\n" if sys.__stderr__ is not None and sys.__stderr__.isatty() else ""
    os.write(2, f"{show_cursor}user-sys: {text}\n".encode())


def abort_run(args: Namespace) -> None:
    """Ends this process at once and with it its children: drivers stop their robots, the other processes are killed."""
    resume = getattr(args, "run_dir", None) or getattr(args, "resume", None)
    exit_now(
        "ended at once; unsaved progress is lost"
        + (f"; continue with: user-sys {args.verb} --resume {resume}" if resume else ""),
        ExitStatus.INTERRUPTED,
    )
