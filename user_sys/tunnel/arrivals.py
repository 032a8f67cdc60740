"""Payloads that come in parts: put together in one buffer, and kept over a lost connection."""

from __future__ import annotations

from user_sys.errors import WireError
from user_sys.messages import TransferOffset, TransferPart, TransferStart
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.wire import AnyMessage, Envelope, Payload, announced


class Arrivals:
    """At most one payload of one peer. The buffer lives as long as this object, over sessions; a new one replaces it.

    Size and digest of a whole payload are for its reader to verify.
    """

    def __init__(self, limits: TunnelLimits) -> None:
        self._limits = limits
        self._message: AnyMessage | None = None
        self._key = ""
        self._buffer = bytearray()
        self._have = 0
        self.resumed_bytes = 0

    def start(self, start: TransferStart) -> TransferOffset | None:
        """A payload is announced. Returns the answer that its sender awaits, or None.

        Raises:
            WireError: it may not come in parts, or is too large.
        """
        message = announced(start, self._limits)
        if not (start.resume and self._message == message):
            self._message, self._key = message, start.key
            self._buffer, self._have = bytearray(start.size_bytes), 0
        self.resumed_bytes += self._have
        return TransferOffset(key=start.key, offset=self._have) if start.resume else None

    def part(self, part: TransferPart, payload: Payload) -> Envelope | None:
        """Takes a part; the whole once it is complete. One of another payload, or a repeated one, changes nothing.

        Raises:
            WireError: parts are missing before it, or it goes beyond the announced size.
        """
        if self._message is None or part.key != self._key or part.offset < self._have:
            return None
        end = part.offset + len(payload)
        if part.offset > self._have or end > len(self._buffer):
            raise WireError(f"bytes {part.offset} to {end} of a payload of which {self._have} are here")
        self._buffer[part.offset : end] = payload
        self._have = end
        if end < len(self._buffer):
            return None
        whole = Envelope(self._message, memoryview(self._buffer).toreadonly())
        self._message, self._key, self._buffer, self._have = None, "", bytearray(), 0
        return whole
