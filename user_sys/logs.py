"""How every process of a run logs: one line an event, to standard error, of which its supervisor keeps a file."""

from __future__ import annotations

import logging
from pathlib import Path

LAST_WORDS_BYTES = 4096
FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"


def configure_logging(verbose: bool = False) -> None:
    """Sets the root logger up once; later calls change its level only."""
    logging.basicConfig(format=FORMAT)
    logging.getLogger().setLevel(logging.DEBUG if verbose else logging.INFO)


def last_words(path: Path) -> str:
    """The message of the last line of a process's log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1].split(" ", 4)[-1] if lines else ""
