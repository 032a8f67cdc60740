"""New weights reach a running policy without ever disturbing its control."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from user_sys.errors import WireError
from user_sys.messages import WeightsManifest
from user_sys.policies.policy import Policy
from user_sys.weights.transfer import decode

NO_VERSION = -1
CLOSE_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ready:
    policy: Policy
    version: int
    offered_s: float


class PolicySwapper:
    """Loads weights into a second policy in a thread of its own; the control loop swaps by reference when it is safe.

    The control loop's thread calls `policy`, `version`, `applied_s` and `swap_if_ready`; any thread calls `offer`.
    The newest offer wins: an older one that has not been loaded yet is dropped, and a version that is not newer than
    the newest loaded one is ignored, so that versions only grow.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        """`make` gives a policy without weights; it is called here and then, off the control path, once a version."""
        self._make = make
        self._policy = make()
        self._version = NO_VERSION
        self._applied_s = 0.0
        self._offer: tuple[WeightsManifest, bytes, float] | None = None
        self._ready: _Ready | None = None
        self._loaded_version = NO_VERSION
        self._refused = 0
        self._closing = False
        self._changed = threading.Condition()
        self._handover = threading.Lock()  # held for two assignments at most
        self._thread = threading.Thread(target=self._load_offers, name="weights-loader", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> Policy:
        """The policy to act with until the next swap."""
        return self._policy

    @property
    def version(self) -> int:
        """The version of `policy`'s weights; -1 before the first."""
        return self._version

    @property
    def applied_s(self) -> float:
        """Seconds from the offer to the swap of the present version."""
        return self._applied_s

    @property
    def refused(self) -> int:
        """How many offers were damaged or foreign, and logged."""
        return self._refused

    def offer(self, manifest: WeightsManifest, payload: bytes) -> None:
        """Hands over a version to load; returns at once."""
        with self._changed:
            self._offer = (manifest, payload, time.monotonic())
            self._changed.notify_all()

    def swap_if_ready(self) -> int | None:
        """Swaps to the newest loaded version, if there is one, and returns it. Never waits: safe between two steps."""
        if self._ready is None:
            return None
        with self._handover:
            ready, self._ready = self._ready, None
        self._policy, self._version = ready.policy, ready.version
        self._applied_s = time.monotonic() - ready.offered_s
        return ready.version

    def close(self) -> None:
        """Ends the loading thread; calling it twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _load_offers(self) -> None:
        while (offer := self._next_offer()) is not None:
            manifest, payload, offered_s = offer
            try:
                self._load(manifest, payload, offered_s)
            except WireError as error:
                self._refused += 1
                _log.warning("weights.refused version=%d: %s", manifest.version, error)

    def _next_offer(self) -> tuple[WeightsManifest, bytes, float] | None:
        with self._changed:
            while self._offer is None and not self._closing:
                self._changed.wait(1.0)
            offer, self._offer = self._offer, None
            return None if self._closing else offer

    def _load(self, manifest: WeightsManifest, payload: bytes, offered_s: float) -> None:
        if manifest.version <= self._loaded_version:
            return
        policy = self._make()
        policy.load(decode(manifest, payload))
        with self._handover:
            self._ready = _Ready(policy, manifest.version, offered_s)
        self._loaded_version = manifest.version
