"""Whether another computer sees a folder of this one: a sign is laid beside it, and somebody over there reads it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

WITHIN_S = 120.0  # a process starts for it, on a computer that may be busy

Told = Callable[[float], str | None]
"""What a file says over there, empty where it is not there; None where no answer has come in so many seconds."""


class FolderLook:
    """It begins when it is made. One thread calls it; `close` takes the sign away."""

    def __init__(
        self, folder: Path, ask: Callable[[Path], Told], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
            folder: or, where that is not made yet, the nearest one above it that is.
            ask: has a file read over there, without waiting for it.
            clock: seconds that only grow.

        Raises:
            OSError: nothing can be written there.
        """
        self._clock, self._until_s = clock, clock() + WITHIN_S
        self._token = secrets.token_hex(16)
        self._sign = next(f for f in (folder, *folder.parents) if f.is_dir()) / f".seen-{self._token[:8]}"
        self._sign.write_text(self._token)
        try:
            self._told = ask(self._sign)
        except BaseException:
            self.close()
            raise

    def sees(self, wait_s: float) -> bool | None:
        """None where it is not known within `wait_s`; who has not answered `WITHIN_S` after the beginning does not."""
        left_s = self._until_s - self._clock()
        said = self._told(max(0.0, min(wait_s, left_s)))
        return None if said is None and self._clock() < self._until_s else said == self._token

    def close(self) -> None:
        self._sign.unlink(missing_ok=True)
