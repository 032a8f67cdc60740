"""Whose numbers versions have, and which of two runs is the later one, without a word of the clock where that jumps.

A *run* here is a numbering: a learner that begins without a checkpoint begins one, and one that goes on from a
checkpoint goes on with its numbers. Each start of a learner's envoy is a *life*. Lives that share a signing key are
counted in a file beside it, and begin at the time of day, so that a copy of the key elsewhere counts on from about
where the others are.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from hal.durable import replace_durably
from user_sys.weights.signing import LEARNER

RUN_BYTES = 16
NUMBERING = "numbering"
LIVES_SUFFIX = ".lives"
_log = logging.getLogger(__name__)


def numbering_of(checkpoints: Path) -> bytes:
    """Identifies the numbers of the versions that a learner publishes which has its checkpoints in that folder.

    Call it before the first checkpoint is written. Raises OSError: the folder cannot be written.
    """
    path = checkpoints / NUMBERING
    known = path.read_bytes() if path.exists() and any(checkpoints.glob("*.checkpoint")) else b""
    if len(known) == RUN_BYTES:
        return known
    fresh = secrets.token_bytes(RUN_BYTES)
    replace_durably(path, fresh)
    return fresh


def next_life(keys: Path, unix_s: Callable[[], float] = time.time) -> int:
    """A number greater than that of every life before whose key is in the folder `keys`.

    Where it cannot be kept the next one may be no greater, if the clock jumps back meanwhile; that is logged.
    """
    path = keys / f"{LEARNER}{LIVES_SUFFIX}"
    try:
        last = int(path.read_text())
    except FileNotFoundError:
        last = 0
    except (OSError, ValueError) as error:
        _log.warning("weights.lives_unreadable file=%s: %s", path, error)
        last = 0
    life = max(int(unix_s()), last + 1)
    try:
        replace_durably(path, f"{life}\n".encode())
    except OSError as error:
        _log.warning("weights.life_not_kept file=%s: %s; which of two runs is later hangs on the clock", path, error)
    return life
