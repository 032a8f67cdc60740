"""The gateway's part of the way of weights: on disk, after restarts, in order, and each robot at its own rate."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from user_sys.codec import Array
from user_sys.gateway.weights import (
    FLUSH_DEADLINE_S,
    FLUSH_DELAY_S,
    FLUSH_RETRY_S,
    MAX_INBOX,
    MAX_INBOX_BYTES,
    WeightsDistributor,
)
from user_sys.messages import (
    BLOB_BYTES,
    NO_VERSION,
    BlobPart,
    BlobWant,
    PinnedVersion,
    WeightsApplied,
    WeightsBlobs,
    WeightsGone,
    WeightsOffer,
    WeightsProgress,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Envelope, Payload
from user_sys.weights.catalog import MAX_GRANT_BYTES, UNANSWERED_TIMEOUT_S, BlobCache, version_id
from user_sys.weights.governor import GovernorConfig
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.signing import new_signer
from user_sys.weights.version_store import VersionStore


class Bench:
    """A learner and a distributor, one message after the other, and what the distributor sends to robots."""

    def __init__(self, folder: Path, kept: int = 3, cache_bytes: int = 1 << 30, *, is_relay: bool = False) -> None:
        self.folder, self.kept, self.now_s, self.cache_bytes, self.is_relay = folder, kept, 0.0, cache_bytes, is_relay
        self.signer = new_signer()
        self.sent = list[tuple[str, AnyMessage]]()
        self.lost: tuple[type[AnyMessage], ...] = ()  # of these kinds, none can be sent now
        self.restart_gateway()
        self.restart_learner()

    def restart_gateway(self) -> None:
        self.distributor = WeightsDistributor(
            VersionStore(self.folder),
            self._send,
            self.kept,
            lambda: self.now_s,
            BlobCache(self.cache_bytes),
            is_relay=self.is_relay,
        )

    def restart_learner(self, run: bytes = b"run", epoch: int = 1) -> None:
        config = PublishConfig(governor=GovernorConfig(enabled=False))
        self.publisher = Publisher(self, self.signer, config, run=run, epoch=epoch, clock=lambda: self.now_s)
        self.distributor.on_learner_opened("learner")
        self.work()

    def send_weights(self, message: AnyMessage, payload: Payload | None = None) -> bool:
        self.distributor.on_message("learner", message, payload)
        return True

    def receive_weights(self, timeout_s: float) -> None:
        return None

    def _send(self, name: str, message: AnyMessage, payload: Payload | None) -> bool:
        if isinstance(message, self.lost):
            return False
        self.sent.append((name, message))
        if name == "learner":
            self.publisher.on_message(Envelope(message, payload))
        return True

    def work(self, seconds: float = 0.0) -> None:
        """Handles all events; `seconds` pass afterwards."""
        self.publisher.step()
        self.distributor.step(0.0)
        while self.distributor.has_events:
            self.distributor.step(0.0)
        self.now_s += seconds
        self.distributor.step(0.0)
        while self.distributor.has_events:
            self.distributor.step(0.0)

    def publish(self, version: int, weights: dict[str, Array] | None = None, seconds: float = 1.0) -> None:
        found = weights if weights is not None else {"w": np.full(100, version, np.float32)}
        self.publisher.publish(found, version, version)
        assert self.publisher.encode_pending()
        self.work(seconds)

    def stored(self) -> list[int]:
        return VersionStore(self.folder).load().numbers()

    def offers(self, name: str) -> list[WeightsOffer]:
        return [message for who, message in self.sent if who == name and isinstance(message, WeightsOffer)]

    def offered(self, name: str) -> int:
        """The version of the newest offer to a robot."""
        self.work()
        id = version_id(self.offers(name)[-1].manifests[0])
        return self.distributor.catalog.versions[id].manifest.version

    def pin(self, version: int, serial: int, run: bytes = b"run") -> None:
        record = PinnedVersion(serial=serial, version=version, by="ada", reason="", given_unix_ns=0, run=run)
        VersionStore(self.folder).set_pin(self.signer.sign(record))
        self.distributor.poll_pin()
        self.work()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def of_kind(sent: Iterable[tuple[str, AnyMessage]], kind: type[AnyMessage]) -> list[AnyMessage]:
    return [message for _, message in sent if isinstance(message, kind)]


def test_version_is_offered_at_once_and_written_soon_after(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    bench.publish(1, seconds=0.0)
    assert bench.offered("one") == 1 and bench.stored() == []
    bench.work(FLUSH_DELAY_S)
    assert bench.stored() == [1] and bench.publisher.progress.stored_version == 1


def test_versions_without_a_pause_are_written_at_the_deadline(bench: Bench) -> None:
    for version in range(1, 40):
        bench.publish(version, seconds=FLUSH_DEADLINE_S / 20)
    assert bench.stored() and bench.publisher.progress.stored_version >= 19


def test_failed_write_is_logged_and_repeated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.distributor.on_robot_opened("one")
    with monkeypatch.context() as full:

        def fail(*_: object) -> None:
            raise OSError(errno.EROFS, "read-only file system")

        full.setattr("user_sys.weights.version_store.replace_all_durably", fail)
        bench.publish(1)
    assert bench.stored() == [] and caplog.text.count("weights.write_failed version=1") == 1
    assert bench.offered("one") == 1, "robots get it all the same"
    bench.work(FLUSH_RETRY_S)
    bench.work()
    assert bench.stored() == [1]


def test_restarted_gateway_offers_its_versions_without_the_learner(bench: Bench) -> None:
    bench.publish(1)
    bench.publish(2)
    bench.restart_gateway()
    bench.distributor.on_robot_opened("late")
    assert bench.offered("late") == 2 and bench.offers("late")[-1].greeting


def test_kept_versions_are_dense_at_the_newest(bench: Bench) -> None:
    for version in range(1, 40):
        bench.publish(version)
    kept = bench.stored()
    assert len(kept) == 3 and kept[-1] == 39 and kept[0] < 37
    assert len(bench.distributor.catalog.versions) <= 40, "in memory are only recent ones"


def test_versions_in_memory_are_written_and_stay_if_a_guard_orders_it(bench: Bench) -> None:
    for version in range(1, 41):
        bench.publish(version)
    wanted, gone = 20, 2
    assert not {wanted, gone} & {*bench.stored()}
    VersionStore(bench.folder).keep({wanted, bench.stored()[0], gone})
    kept = {wanted, bench.stored()[0]}
    for version in range(41, 100):
        bench.publish(version)
        assert kept < {*bench.stored()}
    assert gone not in bench.stored()


def test_pin_holds_over_later_versions_and_restarts(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    for version in (1, 2, 3):
        bench.publish(version)
    bench.pin(1, serial=5)
    assert bench.offered("one") == 1 and bench.offers("one")[-1].pin is not None
    assert bench.publisher.progress.pinned_version == 1
    for version in range(4, 20):
        bench.publish(version)
    assert bench.offered("one") == 1 and 1 in bench.stored()
    bench.restart_gateway()
    bench.distributor.on_robot_opened("one")
    assert bench.offered("one") == 1
    bench.pin(NO_VERSION, serial=6)
    assert bench.offered("one") == 19


def test_pin_by_another_key_and_of_a_missing_version_have_no_effect(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.distributor.on_robot_opened("one")
    for version in (1, 2):
        bench.publish(version)
    genuine, bench.signer = bench.signer, new_signer()
    bench.pin(1, serial=5)
    assert bench.offered("one") == 2 and caplog.text.count("weights.pin_unreadable") == 1
    bench.signer = genuine
    bench.pin(77, serial=6)
    for version in (3, 4):
        bench.publish(version)
    assert bench.offered("one") == 4 and caplog.text.count("weights.pin_ignored version=77") == 1


def test_another_run_replaces_the_versions_and_the_pin(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    for version in (1, 2, 3):
        bench.publish(version)
    bench.pin(2, serial=5)
    bench.restart_learner(run=b"next", epoch=2)
    bench.publish(1, {"w": np.full(100, 7, np.float32)})
    assert bench.offered("one") == 1 and bench.stored() == [1]
    assert VersionStore(bench.folder).read_pin() is None


def test_learner_that_lost_its_checkpoints_counts_again(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    for version in (1, 2, 3, 4):
        bench.publish(version)
    bench.restart_learner(epoch=2)
    bench.publish(3, {"w": np.full(100, 7, np.float32)})
    assert bench.offered("one") == 3 and bench.stored()[-1] == 3


def test_equal_blobs_are_fetched_once(bench: Bench) -> None:
    base = np.random.default_rng(0).normal(size=100_000)
    for version in range(1, 5):
        bench.publish(version, {"base": base, "w": np.full(3, version)})
    bench.restart_learner(run=b"next", epoch=2)
    bench.publish(1, {"base": base.copy(), "w": np.full(3, 1)})
    wanted = [want for message in of_kind(bench.sent, WeightsRequest) for want in message.wants]  # type: ignore[union-attr]
    large = bench.distributor.catalog.of_number(1)[0].entries[0].blobs[0]
    assert [want.digest for want in wanted].count(large) == 1


def request(
    bench: Bench, name: str, version: int, limit_bytes: int, wants: tuple[bytes, ...] = (), message_bytes: int = 1000
) -> list[AnyMessage]:
    """Requests `wants` or all of a version, and returns what comes."""
    (found,) = bench.distributor.catalog.of_number(version)
    digests = wants or tuple(digest for entry in found.entries for digest in entry.blobs)
    message = WeightsRequest(
        version=found.id,
        serial=1,
        limit_bytes=limit_bytes,
        message_bytes=message_bytes,
        wants=tuple(map(BlobWant, digests)),
    )
    before = len(bench.sent)
    bench.distributor.on_message(name, message, None)
    bench.work()
    return [sent for who, sent in bench.sent[before:] if who == name]


def test_robot_gets_as_much_as_it_has_granted(bench: Bench) -> None:
    for name in ("slow", "fast"):
        bench.distributor.on_robot_opened(name)
    bench.publish(1, {"w": np.random.default_rng(0).normal(size=1250)})
    few, all_of_it = request(bench, "slow", 1, 1000), request(bench, "fast", 1, 100_000)
    assert len(few) == 1 and len(all_of_it) == 10
    assert all(isinstance(message, WeightsBlobs) for message in (*few, *all_of_it))
    (found,) = bench.distributor.catalog.of_number(1)
    before = len(bench.sent)
    more = WeightsRequest(version=found.id, serial=1, limit_bytes=3000, message_bytes=1000)
    for _ in range(2):  # a repeated request grants nothing more
        bench.distributor.on_message("slow", more, None)
    bench.work()
    assert len(bench.sent) == before + 2


def test_request_without_a_limit_does_not_fill_the_memory(bench: Bench) -> None:
    bench.distributor.on_robot_opened("greedy")
    bench.publish(1, {"w": np.random.default_rng(0).normal(size=1 << 20)})
    (found,) = bench.distributor.catalog.of_number(1)
    wants = found.entries[0].blobs * 50
    sent = request(bench, "greedy", 1, 1 << 36, wants, 1 << 20)
    sizes = [part.size_bytes for message in sent if isinstance(message, WeightsBlobs) for part in message.parts]
    assert sum(sizes) <= MAX_GRANT_BYTES + (1 << 20)


def test_request_for_single_bytes_costs_few_messages(bench: Bench) -> None:
    bench.publish(1, {"w": np.random.default_rng(0).normal(size=1 << 14)})
    bench.distributor.on_robot_opened("greedy")
    bench.work()
    assert len(request(bench, "greedy", 1, 1 << 36, message_bytes=1)) < 300


def test_version_that_a_robot_fetches_stays(bench: Bench) -> None:
    bench.distributor.on_robot_opened("slow")
    for version in range(1, 6):
        bench.publish(version)
    (first,) = bench.distributor.catalog.of_number(5)
    request(bench, "slow", 5, 100)
    for version in range(6, 90):
        bench.publish(version)
    assert bench.distributor.has_version(first.id)
    for version in range(90, 250):
        bench.publish(version)
    assert not bench.distributor.has_version(first.id), "a robot that is silent for two minutes has given up"
    more = WeightsRequest(
        version=first.id, serial=2, limit_bytes=10_000, message_bytes=1000, wants=(BlobWant(first.entries[0].blobs[0]),)
    )
    before = len(bench.sent)
    bench.distributor.on_message("slow", more, None)
    bench.work()
    kinds = [type(message) for who, message in bench.sent[before:] if who == "slow"]
    assert kinds == [WeightsOffer, WeightsGone], "the newest version first, so that the robot switches at once"


def test_versions_beyond_the_bound_of_the_cache_are_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kept=8, cache_bytes=100_000)
    for version in range(1, 30):
        bench.publish(version, {"w": np.random.default_rng(version).normal(size=1000)})
    assert bench.distributor.version == 29
    assert bench.distributor.catalog.cache.size_bytes <= 100_000


def test_parts_of_an_abandoned_version_leave_room_for_later_ones(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, draws = 3, np.random.default_rng(0)
    bench.cache_bytes = 3 * blobs * BLOB_BYTES + (1 << 20)  # two versions, and room for the next one
    bench.restart_gateway()
    bench.restart_learner()
    new = lambda: {"w": draws.normal(size=blobs * BLOB_BYTES // 8)}  # noqa: E731
    for version in (1, 2, 3):
        bench.publish(version, new())
    left = blobs * BLOB_BYTES - 1
    send = bench.send_weights

    def cut(message: AnyMessage, payload: Payload | None = None) -> bool:
        nonlocal left
        left -= len(payload or b"")
        return left >= 0 and send(message, payload)

    with monkeypatch.context() as dying:
        dying.setattr(bench, "send_weights", cut)
        bench.publish(4, new())
    assert bench.distributor.version == 3 and left < BLOB_BYTES, "all but one part have arrived"
    bench.restart_learner(epoch=2)
    for version in (4, 5, 6):
        bench.publish(version, new())
    assert bench.distributor.version == 6


def test_pinned_version_stays_when_a_learner_counts_again_from_an_older_checkpoint(bench: Bench) -> None:
    bench.kept = 8
    bench.restart_gateway()
    bench.restart_learner()
    bench.distributor.on_robot_opened("one")
    for version in (1, 2, 3, 4):
        bench.publish(version)
    bench.pin(4, serial=5)
    assert bench.offered("one") == 4
    pinned = bench.offers("one")[-1].manifests
    bench.restart_learner(epoch=2)
    for version in (3, 4):
        bench.publish(version, {"w": np.full(100, version + 6, np.float32)})
        assert bench.publisher.progress.stored_version == version
        bench.distributor.on_robot_opened("one")
        assert bench.offered("one") == 4 and bench.offers("one")[-1].manifests == pinned
    bench.restart_gateway()
    bench.distributor.on_robot_opened("one")
    assert bench.offered("one") == 4 and bench.offers("one")[-1].manifests == pinned
    bench.pin(NO_VERSION, serial=6)
    assert bench.offered("one") == 4 and bench.offers("one")[-1].manifests != pinned, "that of the newer course"


def test_silent_robot_gets_few_offers_and_then_the_newest(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    for version in range(1, 11):
        bench.publish(version, seconds=0.01)
    assert len(bench.offers("one")) <= 2
    bench.distributor.on_message("one", WeightsApplied(robot="one", version=1, seconds=0.0), None)
    assert bench.offered("one") == 10


def test_learner_gets_the_oldest_version_in_use(bench: Bench) -> None:
    progress: Callable[[], AnyMessage] = lambda: of_kind(bench.sent, WeightsProgress)[-1]  # noqa: E731
    for name in ("one", "two"):
        bench.distributor.on_robot_opened(name)
    for version in (1, 2):
        bench.publish(version)
    for name, version in (("one", 1), ("two", 2)):
        bench.distributor.on_message(name, WeightsApplied(robot=name, version=version, seconds=0.0), None)
    bench.work()
    assert progress() == WeightsProgress(oldest=1)
    assert bench.distributor.scalars()["weights_version"] == 2
    bench.distributor.on_peer_closed("one")
    bench.work()
    assert progress() == WeightsProgress(oldest=2)
    bench.distributor.on_message("two", WeightsApplied(robot="two", version=NO_VERSION, seconds=0.0), None)
    bench.work()
    assert progress() == WeightsProgress(oldest=-1), "a robot without a version holds up no learner"


def test_stored_version_is_confirmed_again_to_a_learner_that_reconnects(bench: Bench) -> None:
    bench.publish(1)
    assert of_kind(bench.sent, WeightsReceived) == [WeightsReceived(version=1)]
    bench.distributor.on_peer_closed("learner")
    bench.distributor.on_learner_opened("learner")
    bench.work()
    bench.work()
    assert of_kind(bench.sent, WeightsReceived)[1:] == [WeightsReceived(version=1)]


def test_reports_that_cannot_be_sent_are_sent_again(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    bench.lost = (WeightsReceived, WeightsProgress)
    bench.publish(1)
    bench.distributor.on_message("one", WeightsApplied(robot="one", version=1, seconds=0.0), None)
    bench.work(FLUSH_DELAY_S)
    assert bench.stored() == [1] and bench.publisher.progress.stored_version == NO_VERSION
    bench.lost = ()
    bench.work()
    progress = bench.publisher.progress
    assert (progress.stored_version, progress.oldest_in_use) == (1, 1)
    sent = len(bench.sent)
    bench.work()
    assert len(bench.sent) == sent, "once each"


def test_flood_of_requests_displaces_no_offer_and_no_report(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    bench.publish(1)
    for serial in range(2 * MAX_INBOX):
        request = WeightsRequest(version=bytes(32), serial=serial, limit_bytes=1, message_bytes=1)
        bench.distributor.on_message("one", request, None)
    for version in (0, 1):
        bench.distributor.on_message("one", WeightsApplied(robot="one", version=version, seconds=0.0), None)
    bench.publish(2)
    assert bench.distributor.version == 2 and bench.publisher.progress.oldest_in_use == 1


def test_payloads_that_no_one_requested_do_not_fill_the_memory(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    part = BlobPart(bytes(32), b"", "raw", 1, 1 << 20, 0, 0, 1 << 20)
    for _ in range(100):
        bench.distributor.on_message("learner", WeightsBlobs(version=bytes(32), parts=(part,)), bytes(1 << 20))
    assert caplog.text.count("weights.inbox_full") == 100 - (MAX_INBOX_BYTES >> 20)
    bench.publish(1)
    assert bench.distributor.version == 1


def test_first_offer_of_a_session_is_a_greeting_also_if_it_is_late(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    bench.lost = (WeightsOffer,)
    bench.publish(1)
    bench.lost = ()
    bench.work(seconds=UNANSWERED_TIMEOUT_S)
    bench.publish(2)
    assert [(offer.greeting, len(offer.manifests)) for offer in bench.offers("one")] == [(True, 1), (False, 1)]


def test_robot_is_told_that_there_is_no_version(bench: Bench) -> None:
    bench.distributor.on_robot_opened("one")
    bench.work(seconds=10.0)
    assert bench.offers("one") == [WeightsOffer(manifests=(), signer=b"", greeting=True)]
    bench.publish(1)
    assert bench.offered("one") == 1 and len(bench.offers("one")) == 2


def test_relay_tells_robots_that_there_is_no_version_only_after_its_cloud_has(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_relay=True)
    bench.distributor.on_robot_opened("one")
    bench.work(seconds=10.0)
    assert not bench.offers("one")
    empty = WeightsOffer(manifests=(), signer=b"")
    bench.distributor.on_message("learner", empty, None)
    bench.work()
    assert bench.offers("one") == [replace(empty, greeting=True)]
    bench.publish(1)
    bench.distributor.on_message("learner", empty, None)
    bench.distributor.on_robot_opened("two")
    assert bench.offered("two") == 1, "it has a version itself"


def test_offer_without_one_version_is_refused_in_one_line(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.distributor.on_robot_opened("one")
    for version in (1, 2):
        bench.publish(version)
    (first, *_), (second, *_) = (offer.manifests for offer in bench.offers("one")[-2:])
    bench.distributor.on_message("learner", WeightsOffer(manifests=(first, second), signer=b""), None)
    bench.work()
    assert caplog.text.count("weights.refused peer=learner") == 1 and bench.distributor.version == 2
