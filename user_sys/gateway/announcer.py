"""Selects the weight version that robots should use, and offers it to them at the rate at which they receive it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from user_sys.errors import WireError
from user_sys.messages import (
    NO_VERSION,
    PatchInfo,
    PinnedVersion,
    Precision,
    SignedRecord,
    WeightsApplied,
    WeightsOffer,
    WeightsProgress,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.weights.distribution import OfferThrottle, PrefetchPlanner, StalenessHistogram, build_offer
from user_sys.weights.patches import VersionIndex
from user_sys.weights.signing import verifier_from_public_key
from user_sys.weights.version_store import VersionStore

logger = logging.getLogger(__name__)

SendMessage = Callable[[str, AnyMessage, Payload | None], bool]
"""Queues a message for the peer of this name; see `TunnelServer.send`."""
_NO_PIN = PinnedVersion(serial=-1, version=NO_VERSION, by="", reason="", given_unix_ns=0)


@dataclass
class _Subscriber:
    """A robot. `last_applied` is its last message that allows blocks to follow an offer without a request."""

    throttle: OfferThrottle = field(default_factory=OfferThrottle)
    last_applied: WeightsApplied | None = None


@dataclass(frozen=True)
class Announcement:
    """The offer of a version to all robots, and the blocks that follow it without a request."""

    offer: WeightsOffer
    prefetch: PrefetchPlanner


class Subscribers:
    """The robots of a learner. Each gets an offer as soon as its last one has arrived. One thread at a time calls it.

    Args:
        send_offer: sends an offer to a robot.
        send_blocks: answers a request that an offer has made for the robot.
    """

    def __init__(
        self,
        send_offer: Callable[[str, WeightsOffer], object],
        send_blocks: Callable[[str, WeightsRequest], object],
        clock: Callable[[], float],
    ) -> None:
        self._send_offer, self._send_blocks, self._clock = send_offer, send_blocks, clock
        self._robots: dict[str, _Subscriber] = {}

    def add(self, name: str, announcement: Announcement | None) -> None:
        """Adds a robot whose session has begun."""
        self._robots[name] = robot = _Subscriber()
        if announcement is not None:
            robot.throttle.on_offer_sent(self._clock())
            self._send_offer(name, replace(announcement.offer, greeting=True))

    def remove(self, name: str) -> None:
        self._robots.pop(name, None)

    def announce(self, announcement: Announcement) -> None:
        """Sends the offer to each robot whose throttle allows it; the others get it later."""
        for name, robot in self._robots.items():
            robot.throttle.is_pending = True
            if robot.throttle.is_due(self._clock()):
                self._notify(name, robot, announcement)

    def on_message(self, name: str, applied: WeightsApplied | None = None) -> None:
        """A robot has sent a message, so its last offer has arrived."""
        if (robot := self._robots.get(name)) is not None:
            robot.throttle.on_peer_message()
            robot.last_applied = applied or robot.last_applied

    def has_pending(self, name: str) -> bool:
        return name in self._robots and self._robots[name].throttle.is_pending

    def overdue_robots(self) -> list[str]:
        """The robots that are due an offer although they have sent no message."""
        return [name for name, robot in self._robots.items() if robot.throttle.is_due(self._clock())]

    def notify(self, name: str, announcement: Announcement) -> None:
        if (robot := self._robots.get(name)) is not None:
            self._notify(name, robot, announcement)

    def _notify(self, name: str, robot: _Subscriber, announcement: Announcement) -> None:
        requests = announcement.prefetch.requests(robot.last_applied) if robot.last_applied is not None else ()
        robot.last_applied = None
        robot.throttle.on_offer_sent(self._clock())
        self._send_offer(name, replace(announcement.offer, ahead=requests))
        for request in requests:
            self._send_blocks(name, request)


class RunPin:
    """The run whose versions are distributed, its signer, and the version that a person has pinned for it.

    Attributes:
        run: the id of the run; empty before the first version.
        signer: the learner's public key.
        signed, pinned: the newest pin, or None and `_NO_PIN`.
    """

    def __init__(self, store: VersionStore, run: bytes) -> None:
        self._store = store
        self._last_error = ""
        self._reported_missing: PinnedVersion | None = None
        self.run, self.signer = run, store.learner_public_key()
        self.signed, self.pinned = self._read()

    @property
    def version(self) -> int:
        """The pinned version of this run, or `NO_VERSION`."""
        return self.pinned.version if self.pinned.run == self.run else NO_VERSION

    def signed_for(self, version: int) -> SignedRecord | None:
        """The pin to send with an offer of `version`: one that names it, or that allows the newest again."""
        return self.signed if self.pinned.run == self.run and self.version in (NO_VERSION, version) else None

    def _read(self) -> tuple[SignedRecord | None, PinnedVersion]:
        """Reads the pin from the store. A pin that another key has signed is ignored: robots would refuse it."""
        try:
            signed = self._store.read_pin() if self.signer else None
            if signed is None:
                return None, _NO_PIN
            return signed, verifier_from_public_key(self.signer).verify(signed, PinnedVersion)
        except (OSError, WireError) as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.warning("weights.pin_unreadable: %s", error)
            return None, _NO_PIN

    def read_newer(self) -> tuple[SignedRecord | None, PinnedVersion] | None:
        """A pin that is newer than the current one, or None."""
        signed, pinned = self._read()
        if pinned.serial < 0 or (pinned.run == self.pinned.run and pinned.serial <= self.pinned.serial):
            return None
        logger.warning("weights.pinned version=%d by=%r: %s", pinned.version, pinned.by, pinned.reason)
        return signed, pinned

    def begin_run(self, run: bytes) -> None:
        """Switches to another run. Its pin may be in the store already; the pin of another run is removed."""
        self.run = run
        self.signed, self.pinned = self._read()
        if self.pinned.run == run:
            return
        self.signed, self.pinned = None, _NO_PIN
        try:
            self._store.clear_pin()
        except OSError as error:
            logger.error("weights.pin_not_removed: %s", error)

    def report_missing(self, versions: Sequence[int]) -> None:
        """Logs, once for each pin, that the pinned version is not in `versions`."""
        if self.version != NO_VERSION and self.version not in versions and self.pinned != self._reported_missing:
            self._reported_missing = self.pinned
            logger.warning("weights.pin_ignored version=%d: it is not stored; stored are %s", self.version, versions)


class Announcer:
    """Selects the version that robots should use, and offers it to them. One thread at a time calls it.

    Attributes:
        target: the version that robots should use; `NO_VERSION` before the first.
    """

    def __init__(
        self,
        index: VersionIndex,
        pin: RunPin,
        send: SendMessage,
        send_blocks: Callable[[str, WeightsRequest], object],
        clock: Callable[[], float],
    ) -> None:
        self.subscribers = Subscribers(lambda name, offer: send(name, offer, None), send_blocks, clock)
        self.staleness = StalenessHistogram()
        self._index, self._pin, self._clock = index, pin, clock
        self.target = self._select(index.complete_versions())
        self._announced: tuple[bytes, int, tuple[Precision, ...], int] = (pin.run, NO_VERSION, (), -1)

    def _select(self, versions: list[int]) -> int:
        """The pinned version if it is in `versions`, otherwise the newest."""
        pinned = self._pin.version
        return pinned if pinned in versions else max(versions, default=NO_VERSION)

    def announce(self) -> bool:
        """Offers the target version to all robots if it has changed. Returns whether it has changed."""
        versions = self._index.complete_versions()
        self._pin.report_missing(versions)
        self.target = self._select(versions)
        precisions = tuple(self._index.complete_precisions(self.target))
        state = self._pin.run, self.target, precisions, self._pin.pinned.serial
        if state == self._announced:
            return False
        self._announced = state
        self.staleness.set_newest(self.target, self._clock())
        if (announcement := self.announcement()) is not None:
            self.subscribers.announce(announcement)
        return True

    def announcement(self) -> Announcement | None:
        """The announcement of the target version; None before the first version."""
        if self.target == NO_VERSION:
            return None
        precisions = self._index.complete_precisions(self.target)
        offer = build_offer(
            [self._index.manifests[precision, self.target][1] for precision in precisions],
            self._index.patch_infos(),
            precisions,
            self.target,
            signer=self._pin.signer,
            pin=self._pin.signed_for(self.target),
        )
        return Announcement(offer, PrefetchPlanner(self._index, self.target))

    def notify(self, name: str) -> tuple[PatchInfo, ...]:
        """Offers the target version to a robot. Returns the patches that lead to it."""
        if (announcement := self.announcement()) is None:
            return ()
        self.subscribers.notify(name, announcement)
        return announcement.offer.parcels

    def notify_if_pending(self, name: str) -> None:
        if self.subscribers.has_pending(name):
            self.notify(name)

    def notify_overdue(self) -> None:
        names = self.subscribers.overdue_robots()
        if names and (announcement := self.announcement()) is not None:
            for name in names:
                self.subscribers.notify(name, announcement)

    def sampled_scalars(self) -> dict[str, float]:
        """Samples and returns the staleness metrics of all robots."""
        self.staleness.sample(self._clock())
        return self.staleness.scalars()

    def progress(self) -> WeightsProgress:
        pinned = self.target if self.target == self._pin.version else NO_VERSION
        return WeightsProgress(oldest=self.staleness.oldest_in_use, ordered=pinned)
