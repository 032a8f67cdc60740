"""Several learners in one run: each robot gets the weights of its embodiment's learner."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from hal.spec import ArraySpec, RobotSpec
from user_sys.gateway.weights import EMBODIMENT_FILE, WeightsRouter
from user_sys.messages import (
    BlobWant,
    WeightsApplied,
    WeightsBlobs,
    WeightsGone,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsProgress,
    WeightsRequest,
)
from user_sys.robot_records import LEARNER, RobotRecord, assign_learners, learner_folder
from user_sys.tunnel.protocol import AnyMessage, Envelope, Payload
from user_sys.tunnel.server import Peer
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.signing import new_signer

PANDA = RobotSpec(
    model="panda",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(name="action", labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),
)
ARM = msgspec.structs.replace(PANDA, model="so 101")
CARDS = [
    RobotRecord(robot=name, spec=spec, known_since_unix_ns=number)
    for number, (name, spec) in enumerate((("a", PANDA), ("b", ARM), ("c", PANDA)))
]
FIRST, SECOND = assign_learners(CARDS)


def robot(name: str, spec: RobotSpec | None, via: str = "") -> Peer:
    return Peer(name, "robot", f"key of {name}", "nowhere", b"1", spec=spec, via=via)


def learner(name: str, spec: RobotSpec) -> Peer:
    return Peer(name, "learner", f"key of {name}", "nowhere", b"1", spec=spec)


class RouterBench:
    """A router, the connected robots, and the messages to them."""

    def __init__(self, folder: Path, *robots: Peer) -> None:
        self.robots, self.sent, self.serial = list(robots), list[tuple[str, AnyMessage]](), 0
        self.router = WeightsRouter(folder, self.send, 4, lambda: self.robots)
        self.learner, self.publishers = "", dict[str, Publisher]()

    def send(self, name: str, message: AnyMessage, payload: Payload | None) -> bool:
        self.sent.append((name, message))
        if name in self.publishers:
            self.publishers[name].on_message(Envelope(message, payload))
        return True

    def send_weights(self, message: AnyMessage, payload: Payload | None = None) -> bool:
        """A message of the learner that publishes."""
        self.router.on_message(self.learner, message, payload)
        return True

    def receive_weights(self, timeout_s: float) -> None:
        return None

    def work(self) -> None:
        """Does the work of the distributors' threads, which do not run here."""
        for name in (FIRST, SECOND):
            with suppress(KeyError):
                distributor = self.router.distributor(name)
                while distributor.has_events:
                    distributor.step(0.0)

    def answered(self, name: str) -> bool:
        """Whether a distributor answers the robot's request, here with `WeightsGone`."""
        self.work()
        self.sent.clear()
        self.serial += 1
        wants = (BlobWant(b"x" * 32),)
        request = WeightsRequest(version=b"x" * 32, serial=self.serial, limit_bytes=1, message_bytes=1, wants=wants)
        self.router.on_message(name, request, None)
        self.work()
        return {who for who, _ in self.sent} == {name}


def test_each_embodiment_has_a_learner() -> None:
    assert FIRST == LEARNER and SECOND == f"learner-so-101-{ARM.fingerprint[:6]}"
    assert list(assign_learners(CARDS).values()) == [PANDA, ARM]
    assert assign_learners([]) == {}


def test_robot_gets_weights_of_its_embodiment_only(tmp_path: Path) -> None:
    a, b = robot("a", PANDA), robot("b", ARM)
    bench = RouterBench(tmp_path, a, b)
    bench.router.on_peer_opened(learner(FIRST, PANDA))
    for peer in (a, b):
        bench.router.on_peer_opened(peer)
    assert bench.answered("a") and not bench.answered("b")
    bench.router.on_peer_opened(learner(SECOND, ARM))
    assert bench.answered("b") and bench.answered("a")
    bench.router.on_peer_closed("b")
    assert not bench.answered("b")


def test_relay_is_told_of_a_learner_without_a_version_with_its_embodiment(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(Peer("lab", "relay", "key", "nowhere", b"1"))
    bench.router.on_peer_opened(learner(SECOND, ARM))
    bench.work()
    offers = [(said.learner, said.embodiment) for who, said in bench.sent if isinstance(said, WeightsOffer)]
    assert offers == [(FIRST, ""), (SECOND, ARM.embodiment)]


def test_relay_is_told_of_the_new_embodiment_of_a_learner(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(Peer("lab", "relay", "key", "nowhere", b"1"))
    for spec in (PANDA, PANDA, ARM):  # of several launches
        bench.router.on_peer_opened(learner(FIRST, spec))
        bench.work()
    offers = [said.embodiment for who, said in bench.sent if who == "lab" and isinstance(said, WeightsOffer)]
    assert offers[1:] == [PANDA.embodiment, ARM.embodiment]


def test_restarted_gateway_keeps_the_learners_embodiments(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(learner(FIRST, PANDA))
    bench.router.on_peer_opened(learner(SECOND, ARM))
    assert not (learner_folder(tmp_path, SECOND) / EMBODIMENT_FILE).exists(), "the tunnel's thread syncs no file"
    bench.work()
    nobody_acts = WeightsProgress(oldest=-1)
    assert bench.sent == [(name, said) for name in (FIRST, SECOND) for said in (WeightsOfferRequest(), nobody_acts)]
    assert (learner_folder(tmp_path, SECOND) / EMBODIMENT_FILE).read_text() == ARM.embodiment
    again = RouterBench(tmp_path)
    other = msgspec.structs.replace(PANDA, rate_hz=20.0)
    for peer in (robot("b", ARM), robot("x", other), robot("old", None)):
        again.router.on_peer_opened(peer)
    assert again.answered("b") and not again.answered("x") and again.answered("old")


def test_relayed_robot_gets_no_weights_from_the_cloud(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(robot("a", PANDA, via="bench"))
    assert not bench.answered("a")
    bench.router.on_peer_opened(Peer("bench", "relay", "key", "nowhere", b"1"))
    assert bench.answered("bench")


def test_relay_gets_named_offers_of_every_learner(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(Peer("bench", "relay", "key", "nowhere", b"1"))
    signer, offers = new_signer(), dict[str, WeightsOffer]()
    for number, (name, spec) in enumerate(((FIRST, PANDA), (SECOND, ARM)), 1):
        bench.router.on_peer_opened(learner(name, spec))
        bench.work()
        publisher = Publisher(bench, signer, PublishConfig())
        bench.learner, bench.publishers[name] = name, publisher
        publisher.on_message(Envelope(WeightsOfferRequest()))
        bench.sent.clear()
        publisher.publish({"w": np.full(3, number, np.float32)}, number, number)
        publisher.encode_pending()
        bench.work()
        (offers[name],) = (sent for who, sent in bench.sent if who == "bench" and isinstance(sent, WeightsOffer))
        bench.sent.clear()
        version = bench.router.distributor(name).catalog.of_number(number)[0]
        wants = tuple(BlobWant(digest) for digest in version.digests)
        request = WeightsRequest(version=version.id, serial=1, limit_bytes=9999, message_bytes=9999, wants=wants)
        bench.router.on_message("bench", request, None)
        bench.work()
        ((who, answer),) = bench.sent
        assert who == "bench" and isinstance(answer, WeightsBlobs) and answer.version == version.id
    gone = WeightsRequest(version=b"x" * 32, serial=999, limit_bytes=1, message_bytes=1, wants=(BlobWant(b"x" * 32),))
    bench.router.on_message("bench", gone, None)
    bench.work()
    assert bench.sent[1:] == [("bench", WeightsGone(version=b"x" * 32))]
    first = bench.router.distributor(FIRST).catalog.of_number(1)[0]
    wants = tuple(BlobWant(digest) for digest in first.digests)
    request = WeightsRequest(version=first.id, serial=2, limit_bytes=9999, message_bytes=9999, wants=wants)
    bench.router.on_message("bench", request, None)
    bench.work()
    assert len(bench.sent) == 3, "the serial numbers of one learner do not count for another"
    assert {name: (offer.learner, offer.embodiment) for name, offer in offers.items()} == {
        FIRST: (FIRST, PANDA.embodiment),
        SECOND: (SECOND, ARM.embodiment),
    }


def test_learner_progress_includes_relayed_robots(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(learner(FIRST, PANDA))
    bench.router.on_peer_opened(robot("a", PANDA, via="bench"))
    bench.work()
    bench.sent.clear()
    bench.router.on_message("a", WeightsApplied(robot="a", version=3, seconds=0.1), None)
    bench.work()
    assert bench.sent == [(FIRST, WeightsProgress(oldest=3))]
    bench.router.on_peer_closed("a")
    bench.work()
    assert bench.sent[1:] == [(FIRST, WeightsProgress(oldest=-1))]


def test_early_relayed_robot_delays_no_other_learner(tmp_path: Path) -> None:
    b = robot("b", ARM, via="bench")
    bench = RouterBench(tmp_path, b)
    bench.router.on_peer_opened(b)
    bench.router.on_peer_opened(learner(FIRST, PANDA))
    bench.work()
    bench.sent.clear()
    bench.router.on_message("b", WeightsApplied(robot="b", version=3, seconds=0.1), None)
    bench.work()
    assert bench.sent == [], "nobody learns for it yet"
    bench.router.on_peer_opened(learner(SECOND, ARM))
    bench.work()
    bench.sent.clear()
    bench.router.on_message("b", WeightsApplied(robot="b", version=3, seconds=0.1), None)
    bench.work()
    assert bench.sent == [(SECOND, WeightsProgress(oldest=3))]


def test_robot_is_reassigned_when_its_learner_connects(tmp_path: Path) -> None:
    b = robot("b", ARM)
    bench = RouterBench(tmp_path, b)
    bench.router.on_peer_opened(b)
    assert bench.answered("b"), "nobody knows yet for whom the first learner learns"
    bench.router.on_peer_opened(learner(FIRST, PANDA))
    assert not bench.answered("b")


def test_robot_whose_learner_has_not_connected_is_told_that_there_is_no_version(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(learner(FIRST, PANDA))
    bench.router.on_peer_opened(robot("b", ARM))
    bench.router.on_peer_opened(robot("c", ARM, via="lab"))
    bench.work()
    offers = [(who, said) for who, said in bench.sent if isinstance(said, WeightsOffer)]
    assert offers == [("b", WeightsOffer(manifests=(), signer=b"", greeting=True))]


def test_metrics_of_other_learners_have_a_prefix(tmp_path: Path) -> None:
    bench = RouterBench(tmp_path)
    bench.router.on_peer_opened(learner(SECOND, ARM))
    scalars = bench.router.scalars()
    assert {"weights_version", f"{SECOND}/weights_version"} <= set(scalars)
