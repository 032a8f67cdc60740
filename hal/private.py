"""What this program writes is for its user alone, unless one environment variable says otherwise."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hal.errors import HalError

UMASK = "USER_SYS_UMASK"
PRIVATE_UMASK = 0o077


def umask_of(environment: Mapping[str, str] = os.environ) -> int:
    """The umask for this program and the processes that it starts. Raises HalError: the variable is no octal umask."""
    text = environment.get(UMASK, "")
    if not text:
        return PRIVATE_UMASK
    if not re.fullmatch("[0-7]{1,4}", text):
        raise HalError(f"{UMASK}={text[:20]!r} is no umask: write an octal number, such as 027")
    return int(text, 8)
