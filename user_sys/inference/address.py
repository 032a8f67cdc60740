"""Where a run's policy process listens: a file in the run's folder, which it writes anew each time that it starts."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 256


def read_address(path: Path) -> str:
    """The endpoint; empty where nobody has written it yet, or the file cannot be read now."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""
