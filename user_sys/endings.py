"""How a program of ours ends: its exit status, and an end at once for when nothing else ends it."""

from __future__ import annotations

import enum
import os
import sys
import threading
from argparse import Namespace

END_WITHIN_S = 9.5
"""After the first signal, a program that drives robots is gone by then."""
_SAY_S = 0.2


class ExitStatus(enum.IntEnum):
    """Of ``user-sys``. `NOT_REACHED` is for a run that ended in good order below its target."""

    REACHED = 0
    NOT_REACHED = 1
    FAILED = 2
    INTERRUPTED = 128 + 2  # as shells number an end by SIGINT


def end_at_once(text: str, status: int = ExitStatus.INTERRUPTED) -> None:
    """Ends this process without clean-up; any thread may call it. A terminal that takes no more output delays it by
    `_SAY_S` seconds."""
    telling = threading.Thread(target=_say, args=(text,), daemon=True)
    telling.start()
    telling.join(_SAY_S)
    os._exit(status)


def _say(text: str) -> None:
    shown = "\x1b[?25h\n" if sys.__stderr__ is not None and sys.__stderr__.isatty() else ""  # the cursor was hidden
    os.write(2, f"{shown}user-sys: {text}\n".encode())


def abandon_run(args: Namespace) -> None:
    """Ends this process at once, and with it what it has started: drivers stop their robots, all else is killed."""
    resume = getattr(args, "run_dir", None) or getattr(args, "resume", None)
    end_at_once(
        "ended at once; what was not saved yet is lost"
        + (f"; go on with: user-sys {args.verb} --resume {resume}" if resume else ""),
        ExitStatus.INTERRUPTED,
    )
