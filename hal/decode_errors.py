"""The errors of decoding with msgspec. Separate from `hal.errors`, which must not import msgspec."""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""RecursionError: the bytes are nested without end."""
