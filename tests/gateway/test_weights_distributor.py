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
        self.version_store = VersionStore(folder)
        self.distributor = WeightsDistributor(self.version_store, self.send, kept, clock=lambda: self.now_s)
        self.distributor.on_learner_opened("learner")
        self.round()

    def send(self, name: str, message: AnyMessage, payload: Payload | None) -> bool:
        if name != "learner":
            self.told.append((name, message))
        elif isinstance(message, WeightsRequest):
            self.asked.append(message)
        return True

    def offer(self, version: int, state: TensorSet, *patches: Patch, life: PublisherEpoch = NO_EPOCH) -> None:
        """The learner offers a version, and drops all patches that do not lead to it."""
        manifest = build_manifest(state, version, version, -life.number, (0.0, 0.0), life)
        signed = self.signer.sign(manifest)
        self.learner.manifests["exact", version] = (manifest, signed)
        self.learner.patches |= {patch.info.id: patch for patch in patches}
        self.learner.retain([version], version - 1)
        infos = self.learner.patch_infos()
        offer = build_offer([signed], infos, ["exact"], version, signer=self.signer.public_key)
        self.distributor.on_message("learner", offer, None)
        self.round()

    def full(self, version: int, life: PublisherEpoch = NO_EPOCH) -> TensorSet:
        state = build_tensor_set(arrays(version))
        self.offer(version, state, full_patch(state, version), life=life)
        return state

    def round(self) -> None:
        """Processes the received messages, and sends requests."""
        while self.distributor.has_messages:
            self.distributor.process_message(0.0)
            self.distributor.collect_patches()
        self.distributor.download.fetcher.send_requests()

    def run_for(self, seconds: float) -> None:
        """Runs the distributor without replies of the learner."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + max(1e-6, self.distributor.step(0.0)))

    def answer(self, requests: int = 10_000, keep: bool = True) -> None:
        """The learner answers all requests; then the distributor writes the versions."""
        while self.asked and requests:
            for message, payload in read_blocks(self.learner, self.asked.pop(0)):
                self.distributor.on_message("learner", message, payload)
            self.now_s += 1e-3
            self.round()
            requests -= 1
        if keep and self.distributor.retention.flush.is_pending:
            self.distributor.save()

    def grain(self, name: str, patch: Patch, number: int) -> bool:
        """Whether a robot gets a requested block."""
        self.told.clear()
        self.distributor.on_message(name, WeightsRequest(parcel=patch.info.id, first=number, count=1), None)
        ((_, message),) = self.told
        assert isinstance(message, WeightsBlocks | WeightsGone)
        return isinstance(message, WeightsBlocks)

    def offered(self, name: str) -> tuple[int, WeightsOffer]:
        """The offer to a new robot."""
        self.told.clear()
        self.distributor.on_robot_opened(name)
        ((_, offer),) = self.told
        assert isinstance(offer, WeightsOffer)
        return self.signer.verifier.verify(offer.manifests[0], WeightsManifest).version, offer


@pytest.fixture
def bench(tmp_path: Path) -> DistributorBench:
    return DistributorBench(tmp_path / "weights", new_signer())


def test_version_in_transfer_is_retained(bench: DistributorBench) -> None:
    first = full_patch(bench.full(1), 1)
    bench.answer()
    for version in range(2, 12):
        assert bench.grain("slow", first, version % first.info.block_count)
        bench.full(version)
        bench.answer()
    assert bench.grain("slow", first, first.info.block_count - 1)
    assert len(bench.distributor.index.patches) == 3, "that one, and as many as are kept"
    bench.now_s += 2 * DOWNLOAD_TIMEOUT_S
    bench.full(12)
    bench.answer()
    assert not bench.grain("slow", first, 0), "nobody asked for it for long"


def test_deltas_to_a_version_in_transfer_are_retained(bench: DistributorBench) -> None:
    state = bench.full(1)
    first, second = full_patch(state, 1), delta_patch(1, state, 2, newer := nudged(state, 2))
    bench.answer()
    assert second is not None
    bench.offer(2, newer, second)
    bench.answer()
    assert bench.grain("slow", first, 0), "it aims at the second"
    for version in range(3, MAX_VERSIONS_BEHIND + 8):
        bench.full(version)
        bench.answer()
    assert bench.grain("slow", first, 1) and bench.grain("slow", second, 0)


def waits(state: TensorSet, version: int, room_bytes: int = 1 << 20) -> WeightsApplied:
    return WeightsApplied(robot="one", version=version, seconds=0.1, digest=state.digest, ahead_bytes=room_bytes)


def test_only_a_ready_robot_gets_blocks_with_its_offer(
    bench: DistributorBench,
) -> None:
    state = bench.full(1)
    bench.answer()
    for name in ("one", "busy"):
        bench.distributor.on_robot_opened(name)
    bench.distributor.on_message("one", waits(state, 1), None)
    bench.told.clear()
    patch = delta_patch(1, state, 2, newer := nudged(state, 2))
    assert patch is not None
    bench.offer(2, newer, patch)
    bench.answer()
    told = {name: [message for to, message in bench.told if to == name] for name in ("one", "busy")}
    offer, *grains = told["one"]
    assert isinstance(offer, WeightsOffer) and [request.parcel for request in offer.ahead] == [patch.info.id]
    assert grains and all(isinstance(m, WeightsBlocks) and m.parcel == patch.info.id for m in grains)
    (plain,) = told["busy"]
    assert isinstance(plain, WeightsOffer) and not plain.ahead


def test_prefetch_stops_until_the_robot_is_ready_again(bench: DistributorBench) -> None:
    state = bench.full(1)
    bench.answer()
    bench.distributor.on_robot_opened("one")
    bench.distributor.on_message("one", waits(state, 1), None)
    for version in (2, 3):
        bench.told.clear()
        bench.full(version)
        bench.answer()
        assert any(isinstance(message, WeightsBlocks) for _, message in bench.told) == (version == 2)
    bench.distributor.on_message("one", waits(state, 1), None)
    bench.distributor.on_peer_closed("one")
    _, offer = bench.offered("one")
    assert not offer.ahead, "another session"


def test_prefetch_respects_the_robots_limit(bench: DistributorBench) -> None:
    state = build_tensor_set({"w": np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)})
    bench.offer(1, state, full_patch(state, 1))
    bench.answer()
    bench.distributor.on_robot_opened("one")
    for version, room_bytes, grains in ((2, BLOCK_BYTES - 1, 0), (3, 3 * BLOCK_BYTES, 3), (4, 1 << 40, 16)):
        bench.distributor.on_message("one", waits(state, version - 1, room_bytes), None)
        bench.told.clear()
        state = build_tensor_set({"w": np.random.default_rng(version).normal(size=1 << 20).astype(np.float32)})
        bench.offer(version, state, full_patch(state, version))
        bench.answer()
        offer = bench.told[0][1]
        assert isinstance(offer, WeightsOffer) and sum(request.count for request in offer.ahead) == grains


def test_version_is_written_when_due(bench: DistributorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's governor assumes that the write has finished by then."""
    bench.full(1)
    bench.answer()
    distributor, waits = bench.distributor, list[float]()
    distributor.retention.flush.received(1)
    bench.now_s += FLUSH_DELAY_S - 0.1

    def wait(wait_s: float) -> None:
        waits.append(wait_s)
        bench.now_s += wait_s

    monkeypatch.setattr(distributor, "process_message", wait)
    wait_s = 0.0
    for _ in range(3):
        wait_s = distributor.step(wait_s)
    assert waits == pytest.approx([0.0, 0.1, STALL_TIMEOUT_S]) and not distributor.retention.flush.is_pending


def test_replaced_version_is_never_written(bench: DistributorBench) -> None:
    bench.full(1)
    bench.answer()
    for version in range(2, 7):
        bench.full(version)
        bench.answer(keep=version == 6)
    assert bench.version_store.load().complete_versions() == [1, 6]


@pytest.mark.parametrize(("values", "most"), [(10, 3), (1 << 20, 22)])
def test_small_versions_are_written_together(
    bench: DistributorBench, values: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes cost the learner time; waiting data costs memory."""
    written_s, keep = [0.0], bench.version_store.save

    def kept(catalogue: VersionIndex, signer: bytes = b"") -> None:
        keep(catalogue, signer)
        written_s.append(bench.now_s)

    monkeypatch.setattr(bench.version_store, "save", kept)
    for version in range(1, 101):
        state = build_tensor_set({"w": np.full(values, version, np.float32)})
        bench.offer(version, state, full_patch(state, version))
        bench.answer(keep=False)
        bench.run_for(0.1)
        assert bench.distributor.retention.flush.pending_bytes <= FLUSH_BYTES + FLUSH_DELAY_S / 0.1 * state.size_bytes
        assert len(bench.distributor.index.patches) <= 2 + PRUNE_INTERVAL_S / 0.1 + 1
    last_s = bench.now_s - 0.1
    bench.run_for(2.0)
    from_the_first_s = FLUSH_DEADLINE_S + 0.1
    assert len(written_s) - 1 <= most and max(np.diff(written_s)) <= from_the_first_s
    found = newest_version(bench.version_store.load())
    assert found is not None and found[0].version == 100 and written_s[-1] <= last_s + FLUSH_DELAY_S + 0.01


def test_write_to_a_full_disk_is_retried(bench: DistributorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.full(1)
    bench.answer()

    def write(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as full:
        full.setattr("user_sys.weights.version_store.replace_durably", write)
        bench.full(2)
        bench.answer()
    assert bench.version_store.load().complete_versions() == [1] and bench.offered("one")[0] == 2
    assert bench.distributor.retention.flush.due_s(0.0) == pytest.approx(FLUSH_RETRY_S)
    bench.distributor.save()
    assert bench.version_store.load().complete_versions() == [1, 2]


def test_path_search_is_shared_by_equal_robots(bench: DistributorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a hundred robots at twenty versions a second use half a processor."""
    looked, calls = list[int](), list[int]()

    def look(infos: Iterable[PatchInfo], form: Precision, target: int, held: Mapping[int, bytes]) -> UpdatePath | None:
        looked.append(target)
        return cheapest_path(infos, form, target, held)

    monkeypatch.setattr("user_sys.weights.distribution.cheapest_path", look)
    state = bench.full(1)
    bench.answer()
    for version, names in ((2, ("one",)), (3, tuple(f"robot-{n}" for n in range(20)))):
        for name in names:
            bench.distributor.on_robot_opened(name)
            bench.distributor.on_message(name, waits(state, version - 1), None)
        patch = delta_patch(version - 1, state, version, newer := nudged(state, version))
        assert patch is not None
        looked.clear()
        bench.offer(version, newer, patch)
        bench.answer(keep=False)
        calls.append(len(looked))
        bench.distributor.save()
        state = newer
        bench.distributor.on_peer_closed("one")
    assert calls[0] == calls[1]


def test_silent_robot_gets_few_offers(bench: DistributorBench) -> None:
    """At 1 Mbit/s, twenty offers a second would leave almost no bandwidth for weights."""

    def publish(*versions: int) -> None:
        for version in versions:
            bench.full(version)
            bench.answer()

    def told() -> list[int]:
        offers = [message for name, message in bench.told if name == "slow" and isinstance(message, WeightsOffer)]
        return [bench.signer.verifier.verify(offer.manifests[0], WeightsManifest).version for offer in offers]

    publish(1)
    bench.distributor.on_robot_opened("slow")
    publish(*range(2, 10))
    assert told() == [1, 2]
    bench.distributor.on_message("slow", WeightsRequest(parcel=b"any", first=0, count=1), None)
    assert told() == [1, 2, 9], "it has read what it was told: now the newest"
    publish(10, 11)
    assert told() == [1, 2, 9, 10]
    bench.now_s += UNANSWERED_TIMEOUT_S
    bench.distributor.announcer.notify_overdue()
    assert told() == [1, 2, 9, 10, 11], "it may not want what it was offered"
    publish(12)
    bench.distributor.on_message("slow", WeightsApplied(robot="slow", version=11, seconds=0.1), None)
    assert told()[-1] == 12


def test_patch_gone_at_the_learner_is_replaced_by_the_new_offer(bench: DistributorBench) -> None:
    bench.full(1)
    bench.answer(requests=1)
    assert bench.asked, "the first is on its way"
    bench.full(2)
    bench.answer()
    assert bench.distributor.version == 2 and bench.distributor.download.fetcher.targets == ()


def test_delta_for_robots_and_full_patch_for_late_joiners_are_fetched(
    bench: DistributorBench,
) -> None:
    state = bench.full(1)
    bench.answer()
    patch = delta_patch(1, state, 2, newer := nudged(state, 2))
    assert patch is not None
    bench.offer(2, newer, patch, full_patch(newer, 2))
    assert bench.asked[0].parcel == patch.info.id, "robots that have the first wait for it"
    bench.answer()
    assert sorted(info.codec for info in bench.distributor.index.patch_infos() if info.version == 2) == [
        "delta",
        "full",
    ]


def test_patch_for_late_joiners_delays_no_newer_version(bench: DistributorBench) -> None:
    """On a slow link, a full patch of a large policy takes longer than many deltas."""
    state = bench.full(1)
    bench.answer()
    fulls = list[Patch]()
    for version in range(2, 8):
        patch = delta_patch(version - 1, state, version, state := nudged(state, version))
        assert patch is not None
        fulls.append(full_patch(state, version))
        bench.offer(version, state, patch, *fulls[-1:] if version in (2, 6) else ())
        bench.learner.patches |= {fulls[0].info.id: fulls[0]}
        assert patch.info.id in [request.parcel for request in bench.asked]
        others = [request for request in bench.asked if request.parcel != patch.info.id]
        bench.asked[:] = [request for request in bench.asked if request.parcel == patch.info.id]
        bench.answer(keep=False)
        assert bench.distributor.version == version, "while the full patch is under way"
        bench.asked[:] = others
    assert {request.parcel for request in bench.asked} == {fulls[0].info.id}
    bench.answer(requests=len(bench.asked), keep=False)
    assert bench.distributor.has_patch(fulls[0].info.id) and {request.parcel for request in bench.asked} == {
        fulls[4].info.id
    }


def many(number: int, values: int = 4) -> TensorSet:
    """Enough tensors for a separate table."""
    return build_tensor_set({f"layers.{n:04d}.weight": np.full(values, number + n, np.float32) for n in range(1000)})


@pytest.mark.parametrize("apart", [True, False])
def test_partial_version_is_retained_until_complete(bench: DistributorBench, apart: bool) -> None:
    """A table and a full patch; or a full patch and a delta with an unknown base."""
    state = many(1, values=40) if apart else build_tensor_set(arrays(1))
    patches: list[Patch | None] = [full_patch(state, 1), table_patch(state, 1) if apart else None]
    if not apart:
        state, former = nudged(state, 2), state
        patches.append(delta_patch(1, former, 2, state))
    bench.offer(1 if apart else 2, state, *(patch for patch in patches if patch is not None))
    came = list[tuple[bytes, int]]()
    while bench.asked and len(came) < 100:
        came.append((bench.asked[0].parcel, bench.asked[0].first))
        bench.answer(requests=1, keep=False)
        bench.now_s += 2 * PRUNE_INTERVAL_S
    assert len(came) == len(set(came)) > 2 and bench.distributor.version == (1 if apart else 2)


def test_version_without_its_table_is_dropped(bench: DistributorBench) -> None:
    """The distributor switches to the next version at once: without its table the full patch is useless."""
    states = [many(1, values=400), many(2, values=400)]
    for version, state in enumerate(states, 1):
        bench.offer(version, state, full_patch(state, version), table_patch(state, version))
    asked, bench.asked[:] = list(bench.asked), []
    assert {request.parcel for request in asked}.isdisjoint(bench.learner.patches), "all of the first version"
    bench.asked[:] = asked[:1]
    bench.answer(requests=1, keep=False)
    assert bench.asked and {request.parcel for request in bench.asked} <= bench.learner.patches.keys()


def test_separate_tables_follow_their_versions(
    bench: DistributorBench,
) -> None:
    def tables() -> list[int]:
        return sorted(info.version for info in bench.distributor.index.patch_infos() if info.codec == TENSOR_TABLE)

    for version in range(1, 8):
        state = many(version)
        bench.offer(version, state, full_patch(state, version), table_patch(state, version))
        assert bench.distributor.version == version - 1 or version == 1, "not before the table is here"
        bench.answer()
        found, offer = bench.offered("one")
        assert found == version and [info.version for info in offer.parcels if info.codec == TENSOR_TABLE] == [version]
    assert tables() == bench.distributor.index.complete_versions() and len(tables()) == 2, "as many as are kept"
    again = DistributorBench(bench.version_store.folder, bench.signer)
    assert again.offered("one")[0] == 7
    kept = newest_version(VersionStore(bench.version_store.folder).load())
    assert kept is not None and kept[1].digest == state.digest


def test_storage_is_bounded_while_an_older_version_is_pinned(bench: DistributorBench) -> None:
    state = bench.full(1)
    bench.answer()
    bench.version_store.set_pin(bench.signer.sign(order(1)))
    bench.distributor.poll_pin()
    for version in range(2, MAX_VERSIONS_BEHIND + 20):
        patch = delta_patch(version - 1, state, version, newer := nudged(state, version))
        assert patch is not None
        bench.offer(version, newer, patch, full_patch(newer, version))
        bench.answer()
        state = newer
    assert bench.distributor.version == 1
    assert (
        len(bench.distributor.index.patches)
        == len(list(bench.version_store.folder.glob("*.parcel")))
        <= MAX_VERSIONS_BEHIND + 4
    )


def order(version: int, life: PublisherEpoch = NO_EPOCH, serial: int = 1) -> PinnedVersion:
    return PinnedVersion(serial=serial, version=version, by="ada", reason="it shakes", given_unix_ns=0, run=life.run)


def test_pin_survives_a_gateway_restart(bench: DistributorBench) -> None:
    for version in (1, 2):
        bench.full(version)
        bench.answer()
    bench.version_store.set_pin(bench.signer.sign(order(1)))
    bench.distributor.poll_pin()
    again = DistributorBench(bench.version_store.folder, bench.signer)
    version, offer = again.offered("one")
    assert version == again.distributor.version == 1 and offer.order is not None


def test_pinned_version_is_not_pruned_before_the_next_poll(bench: DistributorBench) -> None:
    for version in (1, 2):
        bench.full(version)
        bench.answer()
    bench.version_store.set_pin(bench.signer.sign(order(1)))
    bench.full(3)
    bench.answer()  # the first of two kept versions would be pruned now
    assert bench.offered("one")[0] == 1


def test_pin_to_a_missing_version_is_not_sent(bench: DistributorBench) -> None:
    """Robots that applied it would accept no later version."""
    bench.full(1)
    bench.answer()
    bench.version_store.set_pin(bench.signer.sign(order(77)))
    bench.distributor.poll_pin()
    version, offer = bench.offered("one")
    assert version == 1 and offer.order is None


def test_pin_to_a_missing_version_is_logged_once(bench: DistributorBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.full(1)
    bench.answer()
    bench.version_store.set_pin(bench.signer.sign(order(77)))
    bench.distributor.poll_pin()
    for version in (2, 3):
        bench.full(version)
        bench.answer()
    assert caplog.text.count("weights.pin_ignored version=77") == 1
    bench.version_store.set_pin(bench.signer.sign(order(78, serial=2)))
    bench.distributor.poll_pin()
    assert caplog.text.count("weights.pin_ignored version=78") == 1


def test_pin_signed_by_another_key_is_not_sent(bench: DistributorBench) -> None:
    for version in (1, 2):
        bench.full(version)
        bench.answer()
    bench.version_store.set_pin(new_signer().sign(order(1)))
    bench.distributor.poll_pin()
    version, offer = bench.offered("one")
    assert version == 2 and offer.order is None


def test_patch_corrupted_on_disk_is_fetched_again(bench: DistributorBench) -> None:
    patch = full_patch(state := bench.full(1), 1)
    bench.answer()
    again = DistributorBench(bench.version_store.folder, bench.signer)
    again.offer(1, state, patch)
    assert not again.asked and again.grain("one", patch, 0), "it is there"
    (path,) = again.version_store.folder.glob("*.parcel")
    with open(path, "r+b") as file:
        file.seek(10)
        file.write(bytes([patch.payload[10] ^ 1]))
    assert not again.grain("one", patch, 0), "not what was described"
    again.distributor.collect_patches()
    again.round()
    assert again.asked, "the learner has it still"
    again.answer()
    assert again.distributor.version == 1 and again.grain("one", patch, 0)
    assert VersionStore(again.version_store.folder).load().complete_versions() == [1], "and so has the disk"


def test_damaged_patch_is_replaced_by_another(bench: DistributorBench) -> None:
    state = build_tensor_set(arrays(1))
    good = full_patch(state, 1)
    content = bytearray(good.payload)
    content[0] ^= 1
    bench.offer(1, state, Patch(good.info, memoryview(bytes(content))))
    bench.answer()
    assert not bench.asked and bench.distributor.version == NO_VERSION
    bench.full(2)
    bench.answer()
    assert bench.distributor.version == 2


FIRST, SECOND = PublisherEpoch(b"first", 5), PublisherEpoch(b"second", 6)


def test_new_run_drops_versions_and_pin_of_the_last(bench: DistributorBench) -> None:
    for version in (7, 8):
        bench.full(version, FIRST)
        bench.answer()
    bench.version_store.set_pin(bench.signer.sign(order(7, FIRST)))
    bench.distributor.poll_pin()
    assert bench.distributor.version == 7
    bench.learner, bench.signer = VersionIndex(), new_signer()
    bench.full(1, SECOND)
    bench.answer()
    version, offer = bench.offered("one")
    assert version == 1 and offer.order is None and bench.version_store.read_pin() is None
    assert offer.signer == bench.signer.public_key
    assert VersionStore(bench.version_store.folder).load().complete_versions() == [1]


def test_smaller_versions_of_a_restarted_learner_are_accepted(
    bench: DistributorBench,
) -> None:
    for version in (7, 8):
        bench.full(version, FIRST)
        bench.answer()
    bench.learner = VersionIndex()
    bench.full(3, PublisherEpoch(FIRST.run, FIRST.number + 1))
    bench.answer()
    assert bench.offered("one")[0] == 3


def test_pin_of_the_next_run_may_precede_its_weights(bench: DistributorBench) -> None:
    """A relay stores a pin before its offer; its serial may come from another clock."""
    for version in (1, 2):
        bench.full(version, FIRST)
        bench.answer()
    bench.version_store.set_pin(bench.signer.sign(order(1, FIRST, serial=9)))
    bench.distributor.poll_pin()
    bench.version_store.set_pin(bench.signer.sign(order(1, SECOND, serial=3)))
    bench.distributor.poll_pin()
    assert bench.distributor.version == 2, "it says nothing of this run's"
    bench.learner = VersionIndex()
    for version in (1, 2):
        bench.full(version, SECOND)
        bench.answer()
    version, offer = bench.offered("one")
    assert version == 1 and offer.order is not None
    assert bench.signer.verifier.verify(offer.manifests[0], WeightsManifest).run == SECOND.run


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
    assert {patch.info.version for patch in publisher.server.index.patches.values()} == {1, 4}
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
    assert 1 not in {patch.info.version for patch in publisher.server.index.patches.values()}
