"""A robot that is many versions behind fetches the trained tensors, and not the frozen ones again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from user_sys.codec import Array
from user_sys.gateway.announcer import SendMessage
from user_sys.gateway.weights import MAX_VERSIONS_BEHIND, WeightsDistributor
from user_sys.messages import (
    Precision,
    PublisherEpoch,
    WeightsBlocks,
    WeightsGone,
    WeightsManifest,
    WeightsMessage,
    WeightsOffer,
    WeightsOfferRequest,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Envelope, Payload
from user_sys.weights.distribution import OFFER_PIN_S
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.receiver import UpdatePlanner
from user_sys.weights.signing import PUBLIC_SUFFIX, TrustedLearnerKey, ensure_signer
from user_sys.weights.state import build_tensor_set
from user_sys.weights.version_store import VersionStore, newest_version

BACKBONE_BYTES = 1 << 20
ADAPTER_BYTES = 4 << 10


class PatchSite:
    """A learner, a chain of distributors, and a robot that receives offers on request.

    Attributes:
        sent_bytes: to the robot.
    """

    def __init__(
        self,
        folder: Path,
        distributors: int = 1,
        tensors: int = 1,
        adapter_bytes: int = ADAPTER_BYTES,
        form: Precision = "exact",
    ) -> None:
        self.signer = ensure_signer(folder, "learner")
        self.tensors, self.sent_bytes, self.now_s = tensors, 0, 0.0
        self.form, self.adapter_bytes = form, adapter_bytes
        self.words: deque[tuple[int, str, AnyMessage, Payload | None]] = deque()
        self.offers: list[WeightsOffer] = []
        self.version = 0
        trust = TrustedLearnerKey(folder / f"learner{PUBLIC_SUFFIX}")
        self.receiver = UpdatePlanner(trust, self._load, self._ask, precisions=(form,), clock=lambda: self.now_s)
        stores = [VersionStore(folder / f"distributor-{n}") for n in range(distributors)]
        self.distributors = [
            WeightsDistributor(s, self._sender(n), 2, clock=lambda: self.now_s) for n, s in enumerate(stores)
        ]
        self.begin(seed=0)

    def begin(self, seed: int, life: int = 1, run: bytes = b"run") -> None:
        """Starts a learner with its own pretrained backbone."""
        values = np.random.default_rng(seed).normal(size=(self.tensors, BACKBONE_BYTES // 4 // self.tensors))
        self.backbone = {f"backbone.layers.{n:04d}.weight": row.astype(np.float32) for n, row in enumerate(values)}
        config = PublishConfig(precisions=(self.form,))
        self.publisher = Publisher(self, self.signer, config, epoch=PublisherEpoch(run, life), clock=lambda: self.now_s)
        for distributor in self.distributors:
            distributor.on_learner_opened("learner")

    def publish(self, versions: int = 1, share: float = 1.0) -> None:
        """Publishes versions; `changed` is the number of adapter values that differ between two."""
        for _ in range(versions):
            self.version += 1
            rng = np.random.default_rng(self.version if share == 1 else 0)
            adapter = rng.normal(size=self.adapter_bytes // 4).astype(np.float32)
            if share < 1:
                adapter[self.version % 100 :: int(1 / share)] += self.version
            self.publisher.publish({**self.backbone, "adapter": adapter}, self.version, self.version)
            assert self.publisher.encode_pending()
            self.settle()

    def settle(self) -> None:
        """Runs until no messages are left; then the distributors write their versions."""
        while True:
            while self.words:
                self._deliver(*self.words.popleft())
            self.receiver.step()
            for distributor in self.distributors:
                if distributor.has_messages:
                    distributor.process_message(0.0)
                distributor.collect_patches()
                distributor.download.fetcher.send_requests()
            self.now_s += 0.01
            if not self.words and all(
                not distributor.has_messages and not distributor.download.fetcher.targets
                for distributor in self.distributors
            ):
                break
        for distributor in self.distributors:
            if distributor.retention.flush.is_pending:
                distributor.save()
        if self.words:
            self.settle()

    def catch_up(self) -> int:
        """Reconnects the robot. Returns the bytes that lead it to the newest version."""
        self.sent_bytes = 0
        self.distributors[-1].on_robot_opened("robot")
        self.settle()
        self.distributors[-1].on_peer_closed("robot")
        assert self.receiver.loaded_version == self.version and self.receiver.rejected == 0
        published, _ = self.publisher.server.index.manifests[self.form, self.version]
        assert build_tensor_set(dict(self.held), self.form).digest == published.digest
        return self.sent_bytes

    @property
    def held(self) -> Mapping[str, Array]:
        assert self.receiver.loaded is not None
        return self.receiver.loaded.state.tensors

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        self.words.append((0, "learner", message, payload))
        return True

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        return None

    def _load(self, manifest: WeightsManifest, arrays: Mapping[str, Array], heard_s: float) -> None:
        return

    def _ask(self, patch: bytes, first: int, count: int) -> bool:
        self.words.append(
            (len(self.distributors) - 1, "robot", WeightsRequest(parcel=patch, first=first, count=count), None)
        )
        return True

    def _sender(self, number: int) -> SendMessage:
        def send(name: str, message: AnyMessage, payload: Payload | None) -> bool:
            self.words.append((-1 - number, name, message, payload))
            return True

        return send

    def _deliver(self, place: int, name: str, message: AnyMessage, payload: Payload | None) -> None:
        """Sends a message to the distributor at `place`, or from it to its source or receiver."""
        if place >= 0:
            return self.distributors[place].on_message(name, message, payload)
        number = -1 - place
        if name == "robot":
            return self._to_robot(message, payload)
        if name == "relay":
            return self.distributors[number + 1].on_message("learner", message, payload)
        if number > 0:
            if isinstance(message, WeightsOfferRequest):
                return self.distributors[number - 1].on_robot_opened("relay")
            return self.distributors[number - 1].on_message("relay", message, payload)
        return self.publisher.on_message(Envelope(message, payload))

    def _to_robot(self, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, WeightsOffer):
            self.offers.append(message)
            self.receiver.on_offer(message)
        elif isinstance(message, WeightsBlocks | WeightsGone):
            self.sent_bytes += 0 if payload is None else len(payload)
            self.receiver.on_reply(message, None if payload is None else memoryview(payload))


@pytest.mark.parametrize("form", ["exact", "bf16"])
@pytest.mark.parametrize("distributors", [1, 2])
@pytest.mark.parametrize("started_at", [1, 3])
def test_late_receiver_fetches_only_the_adapter(
    tmp_path: Path, form: Precision, distributors: int, started_at: int
) -> None:
    """Also through a relay, and from the first version, before the trained tensors are known."""
    site = PatchSite(tmp_path, distributors, form=form)
    site.publish(started_at)
    assert site.catch_up() > BACKBONE_BYTES / 2
    site.publish(MAX_VERSIONS_BEHIND + 70)
    assert site.catch_up() < 1.2 * ADAPTER_BYTES
    kept = newest_version(VersionStore(tmp_path / "distributor-0").load())
    assert kept is not None and kept[0].version == site.version


@pytest.mark.parametrize("run", [b"run", b"another"])
def test_another_frozen_part_is_fetched_in_full(tmp_path: Path, run: bytes) -> None:
    """A restarted learner may have another backbone."""
    site = PatchSite(tmp_path)
    site.publish(3)
    site.catch_up()
    site.begin(seed=1, life=2, run=run)
    site.publish(MAX_VERSIONS_BEHIND + 10)
    assert site.catch_up() > BACKBONE_BYTES / 2
    site.publish(MAX_VERSIONS_BEHIND + 10)
    assert site.catch_up() < 1.2 * ADAPTER_BYTES


def test_receiver_continues_after_a_publisher_restart(tmp_path: Path) -> None:
    site = PatchSite(tmp_path)
    site.publish(3)
    site.catch_up()
    site.begin(seed=0, life=2)
    site.version -= 1
    site.publish()
    assert site.catch_up() == 0, "the same once more"
    site.publish(MAX_VERSIONS_BEHIND + 10)
    assert site.catch_up() < 1.2 * ADAPTER_BYTES


def test_changed_frozen_part_is_fetched_once(tmp_path: Path) -> None:
    site = PatchSite(tmp_path, tensors=8)
    site.publish(3)
    site.catch_up()
    site.publish(MAX_VERSIONS_BEHIND + 10)
    first = next(iter(site.backbone))
    site.backbone[first] = site.backbone[first] + 1
    site.publish(MAX_VERSIONS_BEHIND + 10)
    assert BACKBONE_BYTES / 8 < site.catch_up() < BACKBONE_BYTES / 4


def test_separate_table_comes_with_the_adapter(tmp_path: Path) -> None:
    site = PatchSite(tmp_path, tensors=512)
    site.publish(2)
    site.catch_up()
    site.publish(MAX_VERSIONS_BEHIND + 10)
    table_bytes = site.publisher.server.index.manifests["exact", site.version][0].table_bytes
    assert 0 < table_bytes < site.catch_up() < 1.2 * ADAPTER_BYTES + table_bytes


def test_patches_are_bounded_by_the_kept_versions(
    tmp_path: Path,
) -> None:
    site = PatchSite(tmp_path)
    site.publish(MAX_VERSIONS_BEHIND + 9)
    assert len(VersionStore(tmp_path / "distributor-0").load().complete_versions()) == 2
    site.now_s += 2 * OFFER_PIN_S
    site.publish()
    site.catch_up()
    distributor = site.distributors[0]
    assert len(distributor.index.complete_versions()) == 2
    assert sorted(info.codec for info in distributor.index.patch_infos()) == ["full", "parts", "parts"]
    assert sorted(info.codec for info in site.offers[-1].parcels) == ["full", "parts"]
    assert len(site.publisher.server.index.patches) == 2


def test_small_changes_are_deltas_and_late_receivers_get_parts(
    tmp_path: Path,
) -> None:
    site = PatchSite(tmp_path, adapter_bytes=BACKBONE_BYTES // 8)
    site.publish(2, share=0.01)
    site.catch_up()
    site.publish(share=0.01)
    assert site.catch_up() < site.adapter_bytes / 10
    site.publish(5 * MAX_VERSIONS_BEHIND, share=0.01)
    assert site.catch_up() < 2 * site.adapter_bytes


def test_parts_in_transfer_are_retained(tmp_path: Path) -> None:
    """A receiver on a slow link would have to fetch all parts of a newer version."""
    site = PatchSite(tmp_path, adapter_bytes=BACKBONE_BYTES // 4)
    site.publish(4)
    parts = next(info for info in site.distributors[0].index.patch_infos() if info.version == 3)
    assert parts.codec == "parts" and parts.block_count > 3

    def gets(grain: int) -> tuple[bool, bool]:
        """Whether the robot gets a block from the distributor, and the distributor from the learner."""
        request, answers = WeightsRequest(parcel=parts.id, first=grain, count=1), list[AnyMessage]()
        site.distributors[0].on_message("slow", request, None)
        site.publisher.on_message(Envelope(request, None))
        while site.words:
            answers += [word for word in (site.words.popleft()[2],) if not isinstance(word, WeightsOffer)]
        of_distributor, of_learner = (isinstance(answer, WeightsBlocks) for answer in answers)
        return of_distributor, of_learner

    for grain in (0, 1, parts.block_count - 1):
        assert gets(grain) == (True, True)
        site.now_s += 2 * OFFER_PIN_S
        site.publish(3)
    assert gets(0) == (False, False)


class DistantSite(PatchSite):
    """Messages over one link, the learner's or the robot's, take half a round trip.

    The trained tensors do not compress, so all patches have one size.
    """

    ROUND_TRIP_S, PERIOD_S = 0.6, 0.1

    def __init__(self, folder: Path, link: str, tensors: int, frozen: bool) -> None:
        self.link, self.under_way = link, deque[tuple[float, tuple[int, str, AnyMessage, Payload | None]]]()
        self.frozen = frozen
        super().__init__(folder, tensors=tensors)

    def publish(self, versions: int = 1, share: float = 1.0) -> None:
        for _ in range(versions):
            rng = np.random.default_rng(self.version)
            for name in ("adapter.bits", *([] if self.frozen else self.backbone)):
                size = self.backbone[name].size if name in self.backbone else self.adapter_bytes // 4
                self.backbone[name] = rng.integers(0, 1 << 32, size, np.uint32)
            super().publish(share=share)

    def settle(self) -> None:
        end_s = self.now_s + self.PERIOD_S
        while self.now_s < end_s:
            while self.words:
                word = self.words.popleft()
                if word[1] == self.link:
                    self.under_way.append((self.now_s + self.ROUND_TRIP_S / 2, word))
                else:
                    self._deliver(*word)
            while self.under_way and self.under_way[0][0] <= self.now_s:
                self._deliver(*self.under_way.popleft()[1])
            self.receiver.step()
            self.distributors[0].step(0.0)
            self.now_s += 0.01


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("tensors", [1, 512])
@pytest.mark.parametrize("link", ["learner", "robot"])
def test_versions_faster_than_a_round_trip_arrive(tmp_path: Path, link: str, tensors: int, frozen: bool) -> None:
    """Also with a separate table of tensors; as parts, or as full patches."""
    site = DistantSite(tmp_path, link, tensors, frozen)
    site.publish(20)
    site.distributors[0].on_robot_opened("robot")
    site.publish(20)
    for _ in range(3):
        site.publish(20)
        assert site.version - site.receiver.loaded_version < 5 * site.ROUND_TRIP_S / site.PERIOD_S
