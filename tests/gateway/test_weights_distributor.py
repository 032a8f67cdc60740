"""The distributor between a learner and robots of different speeds."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from user_sys.codec import Array
from user_sys.gateway.weights import (
    FLUSH_BYTES,
    FLUSH_DEADLINE_S,
    FLUSH_DELAY_S,
    FLUSH_RETRY_S,
    MAX_VERSIONS_BEHIND,
    PRUNE_INTERVAL_S,
    WeightsDistributor,
)
from user_sys.messages import (
    NO_EPOCH,
    NO_VERSION,
    TENSOR_TABLE,
    PatchInfo,
    PinnedVersion,
    Precision,
    PublisherEpoch,
    WeightsApplied,
    WeightsBlocks,
    WeightsGone,
    WeightsManifest,
    WeightsMessage,
    WeightsOffer,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Envelope, Payload
from user_sys.weights.distribution import DOWNLOAD_TIMEOUT_S, UNANSWERED_TIMEOUT_S, build_offer, read_blocks
from user_sys.weights.fetcher import STALL_TIMEOUT_S
from user_sys.weights.patches import (
    BLOCK_BYTES,
    Patch,
    UpdatePath,
    VersionIndex,
    cheapest_path,
    delta_patch,
    full_patch,
    table_patch,
)
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.signing import Signer, new_signer
from user_sys.weights.state import TensorSet, build_manifest, build_tensor_set
from user_sys.weights.version_store import VersionStore, newest_version


def arrays(number: int) -> dict[str, Array]:
    return {"w": np.random.default_rng(number).normal(size=40_000).astype(np.float32)}


def nudged(state: TensorSet, number: int) -> TensorSet:
    """The same with a few changed values."""
    fresh = state.tensors["w"].copy()
    fresh[number::1000] += 1
    return build_tensor_set({"w": fresh})


class DistributorBench:
    """A distributor without a thread, and a learner that answers from an index.

    Attributes:
        asked: the unanswered requests to the learner.
        told: the messages to robots.
    """

    def __init__(self, folder: Path, signer: Signer, kept: int = 2) -> None:
        self.signer, self.learner = signer, VersionIndex()
        self.now_s, self.asked, self.told = 0.0, list[WeightsRequest](), list[tuple[str, AnyMessage]]()
        self.shelf = VersionStore(folder)
        self.desk = WeightsDistributor(self.shelf, self.send, kept, clock=lambda: self.now_s)
        self.desk.on_learner_opened("learner")
        self.round()

    def send(self, name: str, message: AnyMessage, payload: Payload | None) -> bool:
        if name != "learner":
            self.told.append((name, message))
        elif isinstance(message, WeightsRequest):
            self.asked.append(message)
        return True

    def offer(self, version: int, state: TensorSet, *parcels: Patch, life: PublisherEpoch = NO_EPOCH) -> None:
        """The learner offers a version, and drops all patches that do not lead to it."""
        manifest = build_manifest(state, version, version, -life.number, (0.0, 0.0), life)
        signed = self.signer.sign(manifest)
        self.learner.manifests["exact", version] = (manifest, signed)
        self.learner.patches |= {parcel.info.id: parcel for parcel in parcels}
        self.learner.retain([version], version - 1)
        infos = self.learner.patch_infos()
        offer = build_offer([signed], infos, ["exact"], version, signer=self.signer.public_key)
        self.desk.on_message("learner", offer, None)
        self.round()

    def full(self, version: int, life: PublisherEpoch = NO_EPOCH) -> TensorSet:
        state = build_tensor_set(arrays(version))
        self.offer(version, state, full_patch(state, version), life=life)
        return state

    def round(self) -> None:
        """Processes the received messages, and sends requests."""
        while self.desk.has_messages:
            self.desk.process_message(0.0)
            self.desk.collect_patches()
        self.desk.download.fetcher.send_requests()

    def run_for(self, seconds: float) -> None:
        """Runs the distributor without replies of the learner."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + max(1e-6, self.desk.step(0.0)))

    def answer(self, requests: int = 10_000, keep: bool = True) -> None:
        """The learner answers all requests; then the distributor writes the versions."""
        while self.asked and requests:
            for message, payload in read_blocks(self.learner, self.asked.pop(0)):
                self.desk.on_message("learner", message, payload)
            self.now_s += 1e-3
            self.round()
            requests -= 1
        if keep and self.desk.retention.flush.is_pending:
            self.desk.save()

    def grain(self, name: str, parcel: Patch, number: int) -> bool:
        """Whether a robot gets a requested block."""
        self.told.clear()
        self.desk.on_message(name, WeightsRequest(parcel=parcel.info.id, first=number, count=1), None)
        ((_, message),) = self.told
        assert isinstance(message, WeightsBlocks | WeightsGone)
        return isinstance(message, WeightsBlocks)

    def offered(self, name: str) -> tuple[int, WeightsOffer]:
        """The offer to a new robot."""
        self.told.clear()
        self.desk.on_robot_opened(name)
        ((_, offer),) = self.told
        assert isinstance(offer, WeightsOffer)
        return self.signer.verifier.verify(offer.manifests[0], WeightsManifest).version, offer


@pytest.fixture
def counter(tmp_path: Path) -> DistributorBench:
    return DistributorBench(tmp_path / "weights", new_signer())


def test_version_in_transfer_is_retained(counter: DistributorBench) -> None:
    first = full_patch(counter.full(1), 1)
    counter.answer()
    for version in range(2, 12):
        assert counter.grain("slow", first, version % first.info.block_count)
        counter.full(version)
        counter.answer()
    assert counter.grain("slow", first, first.info.block_count - 1)
    assert len(counter.desk.index.patches) == 3, "that one, and as many as are kept"
    counter.now_s += 2 * DOWNLOAD_TIMEOUT_S
    counter.full(12)
    counter.answer()
    assert not counter.grain("slow", first, 0), "nobody asked for it for long"


def test_deltas_to_a_version_in_transfer_are_retained(counter: DistributorBench) -> None:
    state = counter.full(1)
    first, second = full_patch(state, 1), delta_patch(1, state, 2, newer := nudged(state, 2))
    counter.answer()
    assert second is not None
    counter.offer(2, newer, second)
    counter.answer()
    assert counter.grain("slow", first, 0), "it aims at the second"
    for version in range(3, MAX_VERSIONS_BEHIND + 8):
        counter.full(version)
        counter.answer()
    assert counter.grain("slow", first, 1) and counter.grain("slow", second, 0)


def waits(state: TensorSet, version: int, room_bytes: int = 1 << 20) -> WeightsApplied:
    return WeightsApplied(robot="one", version=version, seconds=0.1, digest=state.digest, ahead_bytes=room_bytes)


def test_only_a_ready_robot_gets_blocks_with_its_offer(
    counter: DistributorBench,
) -> None:
    state = counter.full(1)
    counter.answer()
    for name in ("one", "busy"):
        counter.desk.on_robot_opened(name)
    counter.desk.on_message("one", waits(state, 1), None)
    counter.told.clear()
    parcel = delta_patch(1, state, 2, newer := nudged(state, 2))
    assert parcel is not None
    counter.offer(2, newer, parcel)
    counter.answer()
    told = {name: [message for to, message in counter.told if to == name] for name in ("one", "busy")}
    offer, *grains = told["one"]
    assert isinstance(offer, WeightsOffer) and [request.parcel for request in offer.ahead] == [parcel.info.id]
    assert grains and all(isinstance(m, WeightsBlocks) and m.parcel == parcel.info.id for m in grains)
    (plain,) = told["busy"]
    assert isinstance(plain, WeightsOffer) and not plain.ahead


def test_prefetch_stops_until_the_robot_is_ready_again(counter: DistributorBench) -> None:
    state = counter.full(1)
    counter.answer()
    counter.desk.on_robot_opened("one")
    counter.desk.on_message("one", waits(state, 1), None)
    for version in (2, 3):
        counter.told.clear()
        counter.full(version)
        counter.answer()
        assert any(isinstance(message, WeightsBlocks) for _, message in counter.told) == (version == 2)
    counter.desk.on_message("one", waits(state, 1), None)
    counter.desk.on_peer_closed("one")
    _, offer = counter.offered("one")
    assert not offer.ahead, "another session"


def test_prefetch_respects_the_robots_limit(counter: DistributorBench) -> None:
    state = build_tensor_set({"w": np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)})
    counter.offer(1, state, full_patch(state, 1))
    counter.answer()
    counter.desk.on_robot_opened("one")
    for version, room_bytes, grains in ((2, BLOCK_BYTES - 1, 0), (3, 3 * BLOCK_BYTES, 3), (4, 1 << 40, 16)):
        counter.desk.on_message("one", waits(state, version - 1, room_bytes), None)
        counter.told.clear()
        state = build_tensor_set({"w": np.random.default_rng(version).normal(size=1 << 20).astype(np.float32)})
        counter.offer(version, state, full_patch(state, version))
        counter.answer()
        offer = counter.told[0][1]
        assert isinstance(offer, WeightsOffer) and sum(request.count for request in offer.ahead) == grains


def test_version_is_written_when_due(counter: DistributorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's governor assumes that the write has finished by then."""
    counter.full(1)
    counter.answer()
    desk, waits = counter.desk, list[float]()
    desk.retention.flush.received(1)
    counter.now_s += FLUSH_DELAY_S - 0.1

    def wait(wait_s: float) -> None:
        waits.append(wait_s)
        counter.now_s += wait_s

    monkeypatch.setattr(desk, "process_message", wait)
    wait_s = 0.0
    for _ in range(3):
        wait_s = desk.step(wait_s)
    assert waits == pytest.approx([0.0, 0.1, STALL_TIMEOUT_S]) and not desk.retention.flush.is_pending


def test_replaced_version_is_never_written(counter: DistributorBench) -> None:
    counter.full(1)
    counter.answer()
    for version in range(2, 7):
        counter.full(version)
        counter.answer(keep=version == 6)
    assert counter.shelf.load().complete_versions() == [1, 6]


@pytest.mark.parametrize(("values", "most"), [(10, 3), (1 << 20, 22)])
def test_small_versions_are_written_together(
    counter: DistributorBench, values: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes cost the learner time; waiting data costs memory."""
    written_s, keep = [0.0], counter.shelf.save

    def kept(catalogue: VersionIndex, signer: bytes = b"") -> None:
        keep(catalogue, signer)
        written_s.append(counter.now_s)

    monkeypatch.setattr(counter.shelf, "save", kept)
    for version in range(1, 101):
        state = build_tensor_set({"w": np.full(values, version, np.float32)})
        counter.offer(version, state, full_patch(state, version))
        counter.answer(keep=False)
        counter.run_for(0.1)
        assert counter.desk.retention.flush.pending_bytes <= FLUSH_BYTES + FLUSH_DELAY_S / 0.1 * state.size_bytes
        assert len(counter.desk.index.patches) <= 2 + PRUNE_INTERVAL_S / 0.1 + 1
    last_s = counter.now_s - 0.1
    counter.run_for(2.0)
    from_the_first_s = FLUSH_DEADLINE_S + 0.1
    assert len(written_s) - 1 <= most and max(np.diff(written_s)) <= from_the_first_s
    found = newest_version(counter.shelf.load())
    assert found is not None and found[0].version == 100 and written_s[-1] <= last_s + FLUSH_DELAY_S + 0.01


def test_write_to_a_full_disk_is_retried(counter: DistributorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    counter.full(1)
    counter.answer()

    def write(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as full:
        full.setattr("user_sys.weights.version_store.replace_durably", write)
        counter.full(2)
        counter.answer()
    assert counter.shelf.load().complete_versions() == [1] and counter.offered("one")[0] == 2
    assert counter.desk.retention.flush.due_s(0.0) == pytest.approx(FLUSH_RETRY_S)
    counter.desk.save()
    assert counter.shelf.load().complete_versions() == [1, 2]


def test_path_search_is_shared_by_equal_robots(counter: DistributorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a hundred robots at twenty versions a second use half a processor."""
    looked, calls = list[int](), list[int]()

    def look(infos: Iterable[PatchInfo], form: Precision, target: int, held: Mapping[int, bytes]) -> UpdatePath | None:
        looked.append(target)
        return cheapest_path(infos, form, target, held)

    monkeypatch.setattr("user_sys.weights.distribution.cheapest_path", look)
    state = counter.full(1)
    counter.answer()
    for version, names in ((2, ("one",)), (3, tuple(f"robot-{n}" for n in range(20)))):
        for name in names:
            counter.desk.on_robot_opened(name)
            counter.desk.on_message(name, waits(state, version - 1), None)
        parcel = delta_patch(version - 1, state, version, newer := nudged(state, version))
        assert parcel is not None
        looked.clear()
        counter.offer(version, newer, parcel)
        counter.answer(keep=False)
        calls.append(len(looked))
        counter.desk.save()
        state = newer
        counter.desk.on_peer_closed("one")
    assert calls[0] == calls[1]


def test_silent_robot_gets_few_offers(counter: DistributorBench) -> None:
    """At 1 Mbit/s, twenty offers a second would leave almost no bandwidth for weights."""

    def publish(*versions: int) -> None:
        for version in versions:
            counter.full(version)
            counter.answer()

    def told() -> list[int]:
        offers = [message for name, message in counter.told if name == "slow" and isinstance(message, WeightsOffer)]
        return [counter.signer.verifier.verify(offer.manifests[0], WeightsManifest).version for offer in offers]

    publish(1)
    counter.desk.on_robot_opened("slow")
    publish(*range(2, 10))
    assert told() == [1, 2]
    counter.desk.on_message("slow", WeightsRequest(parcel=b"any", first=0, count=1), None)
    assert told() == [1, 2, 9], "it has read what it was told: now the newest"
    publish(10, 11)
    assert told() == [1, 2, 9, 10]
    counter.now_s += UNANSWERED_TIMEOUT_S
    counter.desk.announcer.notify_overdue()
    assert told() == [1, 2, 9, 10, 11], "it may not want what it was offered"
    publish(12)
    counter.desk.on_message("slow", WeightsApplied(robot="slow", version=11, seconds=0.1), None)
    assert told()[-1] == 12


def test_patch_gone_at_the_learner_is_replaced_by_the_new_offer(counter: DistributorBench) -> None:
    counter.full(1)
    counter.answer(requests=1)
    assert counter.asked, "the first is on its way"
    counter.full(2)
    counter.answer()
    assert counter.desk.version == 2 and counter.desk.download.fetcher.targets == ()


def test_delta_for_robots_and_full_patch_for_late_joiners_are_fetched(
    counter: DistributorBench,
) -> None:
    state = counter.full(1)
    counter.answer()
    parcel = delta_patch(1, state, 2, newer := nudged(state, 2))
    assert parcel is not None
    counter.offer(2, newer, parcel, full_patch(newer, 2))
    assert counter.asked[0].parcel == parcel.info.id, "robots that have the first wait for it"
    counter.answer()
    assert sorted(info.codec for info in counter.desk.index.patch_infos() if info.version == 2) == [
        "delta",
        "full",
    ]


def test_patch_for_late_joiners_delays_no_newer_version(counter: DistributorBench) -> None:
    """On a slow link, a full patch of a large policy takes longer than many deltas."""
    state = counter.full(1)
    counter.answer()
    fulls = list[Patch]()
    for version in range(2, 8):
        parcel = delta_patch(version - 1, state, version, state := nudged(state, version))
        assert parcel is not None
        fulls.append(full_patch(state, version))
        counter.offer(version, state, parcel, *fulls[-1:] if version in (2, 6) else ())
        counter.learner.patches |= {fulls[0].info.id: fulls[0]}
        assert parcel.info.id in [request.parcel for request in counter.asked]
        others = [request for request in counter.asked if request.parcel != parcel.info.id]
        counter.asked[:] = [request for request in counter.asked if request.parcel == parcel.info.id]
        counter.answer(keep=False)
        assert counter.desk.version == version, "while the full parcel is under way"
        counter.asked[:] = others
    assert {request.parcel for request in counter.asked} == {fulls[0].info.id}
    counter.answer(requests=len(counter.asked), keep=False)
    assert counter.desk.has_patch(fulls[0].info.id) and {request.parcel for request in counter.asked} == {
        fulls[4].info.id
    }


def many(number: int, values: int = 4) -> TensorSet:
    """Enough tensors for a separate table."""
    return build_tensor_set({f"layers.{n:04d}.weight": np.full(values, number + n, np.float32) for n in range(1000)})


@pytest.mark.parametrize("apart", [True, False])
def test_partial_version_is_retained_until_complete(counter: DistributorBench, apart: bool) -> None:
    """A table and a full patch; or a full patch and a delta with an unknown base."""
    state = many(1, values=40) if apart else build_tensor_set(arrays(1))
    parcels: list[Patch | None] = [full_patch(state, 1), table_patch(state, 1) if apart else None]
    if not apart:
        state, former = nudged(state, 2), state
        parcels.append(delta_patch(1, former, 2, state))
    counter.offer(1 if apart else 2, state, *(parcel for parcel in parcels if parcel is not None))
    came = list[tuple[bytes, int]]()
    while counter.asked and len(came) < 100:
        came.append((counter.asked[0].parcel, counter.asked[0].first))
        counter.answer(requests=1, keep=False)
        counter.now_s += 2 * PRUNE_INTERVAL_S
    assert len(came) == len(set(came)) > 2 and counter.desk.version == (1 if apart else 2)


def test_version_without_its_table_is_dropped(counter: DistributorBench) -> None:
    """The distributor switches to the next version at once: without its table the full patch is useless."""
    states = [many(1, values=400), many(2, values=400)]
    for version, state in enumerate(states, 1):
        counter.offer(version, state, full_patch(state, version), table_patch(state, version))
    asked, counter.asked[:] = list(counter.asked), []
    assert {request.parcel for request in asked}.isdisjoint(counter.learner.patches), "all of the first version"
    counter.asked[:] = asked[:1]
    counter.answer(requests=1, keep=False)
    assert counter.asked and {request.parcel for request in counter.asked} <= counter.learner.patches.keys()


def test_separate_tables_follow_their_versions(
    counter: DistributorBench,
) -> None:
    def tables() -> list[int]:
        return sorted(info.version for info in counter.desk.index.patch_infos() if info.codec == TENSOR_TABLE)

    for version in range(1, 8):
        state = many(version)
        counter.offer(version, state, full_patch(state, version), table_patch(state, version))
        assert counter.desk.version == version - 1 or version == 1, "not before the table is here"
        counter.answer()
        found, offer = counter.offered("one")
        assert found == version and [info.version for info in offer.parcels if info.codec == TENSOR_TABLE] == [version]
    assert tables() == counter.desk.index.complete_versions() and len(tables()) == 2, "as many as are kept"
    again = DistributorBench(counter.shelf.folder, counter.signer)
    assert again.offered("one")[0] == 7
    kept = newest_version(VersionStore(counter.shelf.folder).load())
    assert kept is not None and kept[1].digest == state.digest


def test_storage_is_bounded_while_an_older_version_is_pinned(counter: DistributorBench) -> None:
    state = counter.full(1)
    counter.answer()
    counter.shelf.set_pin(counter.signer.sign(order(1)))
    counter.desk.poll_pin()
    for version in range(2, MAX_VERSIONS_BEHIND + 20):
        parcel = delta_patch(version - 1, state, version, newer := nudged(state, version))
        assert parcel is not None
        counter.offer(version, newer, parcel, full_patch(newer, version))
        counter.answer()
        state = newer
    assert counter.desk.version == 1
    assert (
        len(counter.desk.index.patches) == len(list(counter.shelf.folder.glob("*.parcel"))) <= MAX_VERSIONS_BEHIND + 4
    )


def order(version: int, life: PublisherEpoch = NO_EPOCH, serial: int = 1) -> PinnedVersion:
    return PinnedVersion(serial=serial, version=version, by="ada", reason="it shakes", given_unix_ns=0, run=life.run)


def test_pin_survives_a_gateway_restart(counter: DistributorBench) -> None:
    for version in (1, 2):
        counter.full(version)
        counter.answer()
    counter.shelf.set_pin(counter.signer.sign(order(1)))
    counter.desk.poll_pin()
    again = DistributorBench(counter.shelf.folder, counter.signer)
    version, offer = again.offered("one")
    assert version == again.desk.version == 1 and offer.order is not None


def test_pinned_version_is_not_pruned_before_the_next_poll(counter: DistributorBench) -> None:
    for version in (1, 2):
        counter.full(version)
        counter.answer()
    counter.shelf.set_pin(counter.signer.sign(order(1)))
    counter.full(3)
    counter.answer()  # the first of two kept versions would be pruned now
    assert counter.offered("one")[0] == 1


def test_pin_to_a_missing_version_is_not_sent(counter: DistributorBench) -> None:
    """Robots that applied it would accept no later version."""
    counter.full(1)
    counter.answer()
    counter.shelf.set_pin(counter.signer.sign(order(77)))
    counter.desk.poll_pin()
    version, offer = counter.offered("one")
    assert version == 1 and offer.order is None


def test_pin_to_a_missing_version_is_logged_once(counter: DistributorBench, caplog: pytest.LogCaptureFixture) -> None:
    counter.full(1)
    counter.answer()
    counter.shelf.set_pin(counter.signer.sign(order(77)))
    counter.desk.poll_pin()
    for version in (2, 3):
        counter.full(version)
        counter.answer()
    assert caplog.text.count("weights.pin_ignored version=77") == 1
    counter.shelf.set_pin(counter.signer.sign(order(78, serial=2)))
    counter.desk.poll_pin()
    assert caplog.text.count("weights.pin_ignored version=78") == 1


def test_pin_signed_by_another_key_is_not_sent(counter: DistributorBench) -> None:
    for version in (1, 2):
        counter.full(version)
        counter.answer()
    counter.shelf.set_pin(new_signer().sign(order(1)))
    counter.desk.poll_pin()
    version, offer = counter.offered("one")
    assert version == 2 and offer.order is None


def test_patch_corrupted_on_disk_is_fetched_again(counter: DistributorBench) -> None:
    parcel = full_patch(state := counter.full(1), 1)
    counter.answer()
    again = DistributorBench(counter.shelf.folder, counter.signer)
    again.offer(1, state, parcel)
    assert not again.asked and again.grain("one", parcel, 0), "it is there"
    (path,) = again.shelf.folder.glob("*.parcel")
    with open(path, "r+b") as file:
        file.seek(10)
        file.write(bytes([parcel.payload[10] ^ 1]))
    assert not again.grain("one", parcel, 0), "not what was described"
    again.desk.collect_patches()
    again.round()
    assert again.asked, "the learner has it still"
    again.answer()
    assert again.desk.version == 1 and again.grain("one", parcel, 0)
    assert VersionStore(again.shelf.folder).load().complete_versions() == [1], "and so has the disk"


def test_damaged_patch_is_replaced_by_another(counter: DistributorBench) -> None:
    state = build_tensor_set(arrays(1))
    good = full_patch(state, 1)
    content = bytearray(good.payload)
    content[0] ^= 1
    counter.offer(1, state, Patch(good.info, memoryview(bytes(content))))
    counter.answer()
    assert not counter.asked and counter.desk.version == NO_VERSION
    counter.full(2)
    counter.answer()
    assert counter.desk.version == 2


FIRST, SECOND = PublisherEpoch(b"first", 5), PublisherEpoch(b"second", 6)


def test_new_run_drops_versions_and_pin_of_the_last(counter: DistributorBench) -> None:
    for version in (7, 8):
        counter.full(version, FIRST)
        counter.answer()
    counter.shelf.set_pin(counter.signer.sign(order(7, FIRST)))
    counter.desk.poll_pin()
    assert counter.desk.version == 7
    counter.learner, counter.signer = VersionIndex(), new_signer()
    counter.full(1, SECOND)
    counter.answer()
    version, offer = counter.offered("one")
    assert version == 1 and offer.order is None and counter.shelf.read_pin() is None
    assert offer.signer == counter.signer.public_key
    assert VersionStore(counter.shelf.folder).load().complete_versions() == [1]


def test_smaller_versions_of_a_restarted_learner_are_accepted(
    counter: DistributorBench,
) -> None:
    for version in (7, 8):
        counter.full(version, FIRST)
        counter.answer()
    counter.learner = VersionIndex()
    counter.full(3, PublisherEpoch(FIRST.run, FIRST.number + 1))
    counter.answer()
    assert counter.offered("one")[0] == 3


def test_pin_of_the_next_run_may_precede_its_weights(counter: DistributorBench) -> None:
    """A relay stores a pin before its offer; its serial may come from another clock."""
    for version in (1, 2):
        counter.full(version, FIRST)
        counter.answer()
    counter.shelf.set_pin(counter.signer.sign(order(1, FIRST, serial=9)))
    counter.desk.poll_pin()
    counter.shelf.set_pin(counter.signer.sign(order(1, SECOND, serial=3)))
    counter.desk.poll_pin()
    assert counter.desk.version == 2, "it says nothing of this run's"
    counter.learner = VersionIndex()
    for version in (1, 2):
        counter.full(version, SECOND)
        counter.answer()
    version, offer = counter.offered("one")
    assert version == 1 and offer.order is not None
    assert counter.signer.verifier.verify(offer.manifests[0], WeightsManifest).run == SECOND.run


class SlowGateway:
    """A gateway that requests few blocks."""

    def __init__(self) -> None:
        self.offers: list[WeightsOffer] = []
        self.answers: list[WeightsMessage] = []

    def receive_weights(self, timeout_s: float) -> None:
        return None

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        (self.offers if isinstance(message, WeightsOffer) else self.answers).append(message)  # type: ignore[arg-type]
        return True


def publish(publisher: Publisher, version: int) -> None:
    publisher.publish(arrays(version), version, updates=version)
    assert publisher.encode_pending()


def test_learner_limits_its_offers() -> None:
    """Twenty offers a second would use the whole bandwidth of a slow link."""

    def offered() -> list[int]:
        return [signer.verifier.verify(offer.manifests[0], WeightsManifest).version for offer in link.offers]

    link, signer, now_s = SlowGateway(), new_signer(), 0.0
    publisher = Publisher(link, signer, PublishConfig(), clock=lambda: now_s)
    for version in range(1, 6):
        publish(publisher, version)
    assert offered() == [1, 2]
    now_s = UNANSWERED_TIMEOUT_S
    publisher.offer_if_due()
    assert offered() == [1, 2, 5], "it may not want what it was offered"
    publish(publisher, 6)
    assert offered() == [1, 2, 5]
    publisher.on_message(Envelope(WeightsReceived(version=5)))
    assert offered() == [1, 2, 5, 6]


def test_request_of_a_gone_patch_gets_and_pins_the_newest_offer() -> None:
    link = SlowGateway()
    publisher = Publisher(link, new_signer(), PublishConfig())
    publisher.on_message(Envelope(WeightsRequest(parcel=b"of an earlier life", first=0, count=1)))
    assert isinstance(link.answers[-1], WeightsGone) and not link.offers
    publish(publisher, 1)
    (first,) = link.offers[0].parcels
    for version in range(2, 5):
        publish(publisher, version)
    for grain in range(2):
        publisher.on_message(Envelope(WeightsRequest(parcel=first.id, first=grain, count=1)))
        assert isinstance(link.answers[-1], WeightsGone)
    (newest,) = link.offers[-1].parcels
    assert newest.version == 4
    for version in range(5, 8):
        publish(publisher, version)
    publisher.on_message(Envelope(WeightsRequest(parcel=newest.id, first=0, count=1)))
    assert isinstance(link.answers[-1], WeightsBlocks)


def test_learner_retains_a_version_until_a_slow_gateway_has_it() -> None:
    link = SlowGateway()
    publisher = Publisher(link, new_signer(), PublishConfig())
    for version in range(1, 5):
        publish(publisher, version)
        (full,) = (info for info in link.offers[0].parcels)
        publisher.on_message(Envelope(WeightsRequest(parcel=full.id, first=0, count=1)))
        assert isinstance(link.answers[-1], WeightsBlocks)
    assert {parcel.info.version for parcel in publisher.server.index.patches.values()} == {1, 4}
    assert publisher.server.newest == 4 > NO_VERSION


def test_full_patch_in_transfer_is_retained() -> None:
    link = SlowGateway()
    publisher = Publisher(link, new_signer(), PublishConfig())
    publish(publisher, 1)
    (first,) = link.offers[0].parcels
    for version in range(2, 6):
        for (info,) in (link.offers[-1].parcels, link.offers[0].parcels):
            publisher.on_message(Envelope(WeightsRequest(parcel=info.id, first=0, count=1)))
            assert isinstance(link.answers[-1], WeightsBlocks)
        publish(publisher, version)
    publisher.on_message(Envelope(WeightsRequest(parcel=first.id, first=1, count=first.block_count - 1)))
    publish(publisher, 6)
    assert 1 not in {parcel.info.version for parcel in publisher.server.index.patches.values()}
