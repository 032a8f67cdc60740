"""Weights on a robot's computer: a thread that receives them, and the last ones on disk for the next start."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from msgspec.structs import replace as with_fields

from user_sys.errors import TunnelError, WireError
from user_sys.messages import WeightsApplied, WeightsGone, WeightsGrains, WeightsOffer, WeightsRequest
from user_sys.tunnel.wire import Envelope
from user_sys.weights.catalogue import Catalogue
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.link import WeightsLink
from user_sys.weights.parcel import full_parcel, table_parcel
from user_sys.weights.receiver import Held, Receiver
from user_sys.weights.records import NO_VERSION, OTHER_RUN, Manifest
from user_sys.weights.shelf import Shelf, newest
from user_sys.weights.signing import LEARNER, PUBLIC_SUFFIX, Trust
from user_sys.weights.swap import PolicySwapper

KEEP_INTERVAL_S = 10.0
KEEP_SHARE = 0.05  # of the time, at most, goes into keeping versions
CLOSE_TIMEOUT_S = 10.0
BURST = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InletConfig:
    """How a robot takes new weights.

    Attributes:
        swap_at: they take over between two action chunks, or between two episodes.
        hold_behind: the robot holds while its weights are more than so many versions behind; 0 never holds.
        exact_only: takes no rounded form, even where the policy would act with one and the link is slow.
        governor: what receiving may cost the policy's inference.
    """

    swap_at: Literal["chunk", "episode"] = "chunk"
    hold_behind: int = 0
    exact_only: bool = False
    governor: GovernorConfig = field(default_factory=lambda: GovernorConfig(budget=0.05, quantile=0.99))


class WeightsInlet:
    """Receives from `start` to `close`, and loads into `swapper`.

    Args:
        keys: folder with the learner's public signing key, ``learner.verify``. Where it is missing, the key that the
            gateway names first is trusted, and kept there.
        folder: keeps a version every `KEEP_INTERVAL_S` or so, from which the next life starts while the link is down;
            None keeps nothing.
        greeted: called, by the thread that receives, when a session has begun, or it is known anew which run this is:
            its gateway does not know yet with which version the robot acts.

    Attributes:
        receiver: whose figures any thread may read.
    """

    def __init__(
        self,
        link: WeightsLink,
        swapper: PolicySwapper,
        config: InletConfig,
        keys: Path,
        folder: Path | None,
        governor: Governor,
        greeted: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises RunError: the learner's key is damaged, or not known and could not be kept."""
        self._link, self._swapper, self._governor, self._greeted = link, swapper, governor, greeted
        self._config = config
        self._shelf = None if folder is None else Shelf(folder)
        self._next_keep_s = time.monotonic() + KEEP_INTERVAL_S
        self._kept: Manifest | None = None
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        trust = Trust(keys / f"{LEARNER}{PUBLIC_SUFFIX}")
        trust.require_lasting()
        self.receiver = Receiver(
            trust,
            lambda manifest, arrays, heard_s: swapper.load(manifest.version, arrays, heard_s, manifest.run),
            lambda parcel, first, count: link.send_weights(WeightsRequest(parcel=parcel, first=first, count=count)),
            forms=("exact",) if config.exact_only else swapper.policy.forms,
            breathe=governor.breathe,
            limit=governor.link_limit,
        )

    def start(self) -> None:
        """Loads the version that an earlier life kept, where there is one, and begins to receive."""
        self._take_up()
        self._thread.start()

    def close(self) -> None:
        """Keeps the newest version and ends. Raises TunnelError when that takes longer than `CLOSE_TIMEOUT_S`."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the weights thread did not end within {CLOSE_TIMEOUT_S:.0f} s")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def raise_failure(self) -> None:
        """Raises what ended the thread before its time, if anything did."""
        if self._failure is not None:
            raise self._failure

    def too_old(self) -> bool:
        """Whether the acting policy is too far behind the newest that is known of; never before the first.

        Another run's weights are behind as soon as it is known that this run has any.
        """
        acting = self._swapper.version
        if self._config.hold_behind == 0 or acting == NO_VERSION:
            return False
        if acting == OTHER_RUN:
            return self.receiver.told
        return self._config.hold_behind < self.receiver.newest - acting

    def applied(self, robot: str) -> WeightsApplied:
        """What tells the gateway with which version `robot` acts, and how much of the next may come unasked."""
        told = WeightsApplied(robot=robot, version=self._swapper.version, seconds=self._swapper.applied_s)
        held = self.receiver.held
        if held is None or held.manifest.version != told.version:
            return told
        manifest = held.manifest
        return with_fields(told, form=manifest.form, digest=manifest.digest, ahead_bytes=self.receiver.room_bytes)

    def scalars(self) -> dict[str, float]:
        """For the metrics: the link, what was refused, the stages of the newest version, the governor's decisions."""
        receiver = self.receiver
        return {
            "weights/version": float(receiver.version),
            "weights/link_mb_per_s": receiver.link_bytes_per_s / 1e6,
            "weights/damaged": float(receiver.damaged),
            "weights/refused": float(receiver.refused),
            "weights/abandoned": float(receiver.abandoned),
            **{f"weights/{stage}_ms": 1e3 * seconds for stage, seconds in receiver.stages.items()},
            **self._governor.scalars(),
        }

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stopping.is_set():
                envelope = self._link.receive_weights(min(wait_s, 0.5))
                with self._governor.push() if self.receiver.busy else nullcontext():
                    self._take_all(envelope)
                    wait_s = self.receiver.step()
                if time.monotonic() >= self._next_keep_s:
                    self._keep()
            self._keep()
        except Exception as error:  # of any kind: whoever runs the session must hear of it, and asks
            _log.exception("weights.failed")
            self._failure = error

    def _take_all(self, envelope: Envelope | None) -> None:
        """Takes in what waits, and no more than `BURST` messages, before the next requests are made."""
        for _ in range(BURST):
            if envelope is None:
                return
            self._take(envelope)
            envelope = self._link.receive_weights(0.0)
        if envelope is not None:
            self._take(envelope)

    def _take(self, envelope: Envelope) -> None:
        match envelope.message:
            case WeightsOffer() as offer:
                self.receiver.offered(offer)
                if self._learn_of_run() or offer.greeting:
                    self._greeted()
            case WeightsGrains() | WeightsGone() as message:
                payload = None if envelope.payload is None else memoryview(envelope.payload)
                self.receiver.arrived(message, payload)

    def _learn_of_run(self) -> bool:
        """Has the swapper count what is of the run that was heard of; True where that is another one than before."""
        before, self._swapper.run = self._swapper.run, self.receiver.run
        return before != self.receiver.run

    def _take_up(self) -> None:
        if self._shelf is None:
            return
        try:
            catalogue = self._shelf.open()
            if (kept := newest(catalogue)) is None:
                return
            manifest, state = kept
            self.receiver.start_from(Held(manifest, catalogue.manifests[manifest.form, manifest.version][1], state))
            self._kept = manifest
        except (OSError, WireError) as error:  # the gateway has newer ones, and these are replaced
            _log.warning("weights.not_taken_up folder=%s: %s", self._shelf.folder, error)

    def _keep(self) -> None:
        held, started_s = self.receiver.held, time.monotonic()
        if self._shelf is None or held is None or held.manifest == self._kept:
            return
        with self._governor.push():  # to write it costs the policy's inference time as well
            self._write(self._shelf, held)
        taken_s = time.monotonic() - started_s
        self._next_keep_s = time.monotonic() + max(KEEP_INTERVAL_S, taken_s / KEEP_SHARE)

    def _write(self, shelf: Shelf, held: Held) -> None:
        version = held.manifest.version
        parcels = [full_parcel(held.state, version, self._governor.breathe)]
        if held.manifest.table_bytes:
            parcels.append(table_parcel(held.state, version))
        key = held.manifest.form, version
        try:
            kept = {parcel.info.id: parcel for parcel in parcels}
            shelf.keep(Catalogue({key: (held.manifest, held.signed)}, kept))
            self._kept = held.manifest
        except OSError as error:
            _log.warning("weights.not_kept version=%d: %s", version, error)
