"""How a program of ours ends: its exit status, and an end at once for when nothing else ends it."""

from __future__ import annotations

import enum
import os
import sys
import threading
from argparse import Namespace

EXIT_DEADLINE_S = 9.5
"""After the first signal, a program that drives robots is gone by then."""
_PRINT_TIMEOUT_S = 0.2


class ExitStatus(enum.IntEnum):
    """Of ``user-sys``. `NOT_REACHED` is for a run that ended in good order below its target."""

    REACHED = 0
    NOT_REACHED = 1
    FAILED = 2
    INTERRUPTED = 128 + 2  # as shells number an end by SIGINT


def exit_now(text: str, status: int = ExitStatus.INTERRUPTED) -> None:
    """Ends this process without clean-up; any thread may call it. A terminal that takes no more output delays it by
    `_PRINT_TIMEOUT_S` seconds."""
    telling = threading.Thread(target=_print_error, args=(text,), daemon=True)
    telling.start()
    telling.join(_PRINT_TIMEOUT_S)
    os._exit(status)


def _print_error(text: str) -> None:
    shown = "\x1b[?25h\n" if sys.__stderr__ is not None and sys.__stderr__.isatty() else ""  # the cursor was hidden
    os.write(2, f"{shown}user-sys: {text}\n".encode())


def abort_run(args: Namespace) -> None:
    """Ends this process at once, and with it what it has started: drivers stop their robots, all else is killed."""
    resume = getattr(args, "run_dir", None) or getattr(args, "resume", None)
    exit_now(
        "ended at once; what was not saved yet is lost"
        + (f"; go on with: user-sys {args.verb} --resume {resume}" if resume else ""),
        ExitStatus.INTERRUPTED,
    )
