"""Messages about weights may be lost with a connection: neither gateway nor learner waits for ever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from user_sys.gateway.weights import WeightsDistributor
from user_sys.messages import (
    WeightsApplied,
    WeightsMessage,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsReceived,
)
from user_sys.tunnel.protocol import AnyMessage, Envelope, Payload
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.signing import new_signer
from user_sys.weights.version_store import VersionStore

DEADLINE_S = 120.0


class LossyLink:
    """Connects a distributor and a publisher; drops messages to the publisher of the types in `swallows`.

    Attributes:
        lost: the dropped messages.
    """

    def __init__(self, folder: Path) -> None:
        self.distributor = WeightsDistributor(VersionStore(folder), self._down)
        self.swallows: tuple[type, ...] = ()
        self.lost: list[AnyMessage] = []
        self._downward: queue.Queue[Envelope] = queue.Queue()

    def _down(self, name: str, message: AnyMessage, payload: Payload | None) -> bool:
        if name == "learner":
            if isinstance(message, self.swallows):
                self.lost.append(message)
            else:
                self._downward.put(Envelope(message, payload))
        return True

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        self.distributor.on_message("learner", message, payload)
        return True

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        try:
            return self._downward.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def connect_anew(self) -> None:
        self.swallows = ()
        self.distributor.on_peer_closed("learner")
        self.distributor.on_learner_opened("learner")


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[LossyLink]:
    made = LossyLink(tmp_path)
    made.distributor.start()
    made.distributor.on_learner_opened("learner")
    yield made
    made.distributor.close()
    assert made.distributor.failure is None


def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.005)


def test_confirmation_is_repeated_to_a_reconnected_learner(cable: LossyLink) -> None:
    with Publisher(cable, new_signer(), PublishConfig()) as publisher:
        cable.swallows = (WeightsReceived,)
        publisher.publish({"w": np.zeros(10, np.float32)}, 1, updates=1)
        until(lambda: cable.lost, "the distributor has it on disk")
        assert not publisher.wait_until_stored(0.0)
        cable.connect_anew()
        assert publisher.wait_until_stored(DEADLINE_S)


def test_progress_is_repeated_to_a_reconnected_learner(cable: LossyLink) -> None:
    """Otherwise a learner that waits for the robots waits for ever."""
    with Publisher(cable, new_signer(), PublishConfig(max_versions_ahead=1)) as publisher:
        for version in (1, 2, 3):
            publisher.publish({"w": np.full(10, version, np.float32)}, version, updates=version)
            assert publisher.wait_until_stored(DEADLINE_S)
        cable.distributor.on_message("panda-0", WeightsApplied(robot="panda-0", version=1, seconds=0.1), None)
        until(lambda: publisher.versions_ahead == 2, "the learner knows")
        cable.swallows = (WeightsProgress,)
        cable.distributor.on_message("panda-0", WeightsApplied(robot="panda-0", version=3, seconds=0.1), None)
        assert cable.lost == [WeightsProgress(oldest=3)] and publisher.versions_ahead == 2
        cable.connect_anew()
        until(lambda: publisher.versions_ahead == 0, "the learner may go on")


class DelayedLink:
    """A link that requests an offer, and delays the reply until a newer offer exists."""

    def __init__(self) -> None:
        self.offers: list[WeightsOffer] = []
        self.held, self.newer = threading.Event(), threading.Event()
        self._asks: queue.Queue[Envelope] = queue.Queue()

    def ask(self) -> None:
        self._asks.put(Envelope(WeightsOfferRequest()))

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        try:
            return self._asks.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        assert isinstance(message, WeightsOffer)
        if message.greeting:
            self.held.set()
            self.newer.wait(1.0)  # the other thread's chance to overtake
        self.offers.append(message)
        if self.held.is_set() and not message.greeting:
            self.newer.set()
        return True


def test_offers_never_go_back_to_an_older_version() -> None:
    link = DelayedLink()
    with Publisher(link, new_signer(), PublishConfig()) as publisher:
        publisher.publish({"w": np.zeros(10, np.float32)}, 1, updates=1)
        until(lambda: link.offers, "the first offer")
        link.ask()
        assert link.held.wait(DEADLINE_S)
        publisher.publish({"w": np.ones(10, np.float32)}, 2, updates=2)
        until(lambda: len(link.offers) == 3, "all offers")
    assert link.offers[0].manifests == link.offers[1].manifests != link.offers[2].manifests
