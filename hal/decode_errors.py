"""What msgspec raises. Apart from `hal.errors`, which the command line imports for its help: msgspec takes a while."""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What it raises at bytes that are not what they should be; the last at what is nested without end."""
