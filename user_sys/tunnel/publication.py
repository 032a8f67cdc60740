"""The learner's newest weights on their way to the gateway."""

from __future__ import annotations

import threading

from user_sys.messages import WeightsManifest
from user_sys.tunnel.wire import Envelope


class Publication:
    """One version under way, at most one waiting, kept until the gateway says that it has it. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Envelope | None = None
        self._under_way: Envelope | None = None

    def offer(self, envelope: Envelope) -> None:
        with self._lock:
            self._newest = envelope

    def due(self, overtakable: bool) -> Envelope | None:
        """What to send now: nothing while a version is under way that a newer one may not overtake."""
        with self._lock:
            if self._newest is self._under_way or (self._under_way is not None and not overtakable):
                return None
            return self._newest

    def sent(self, envelope: Envelope) -> None:
        with self._lock:
            self._under_way = envelope

    def confirm(self, version: int) -> None:
        with self._lock:
            if self._under_way is not None and _version(self._under_way) == version:
                if self._newest is self._under_way:
                    self._newest = None
                self._under_way = None

    @property
    def settled(self) -> bool:
        """The gateway has all that was offered."""
        with self._lock:
            return self._newest is None and self._under_way is None

    def rewind(self) -> None:
        """The connection is gone; what was under way is offered again."""
        with self._lock:
            self._under_way = None


def _version(envelope: Envelope) -> int:
    return envelope.message.version if isinstance(envelope.message, WeightsManifest) else -1
