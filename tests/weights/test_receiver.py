"""A robot's end over a link that drops, repeats, damages, reorders and lies: what acts is always what was signed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from weights_kit import changed, full_version, learner_key, random_weights, version_of

from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import (
    INLINE_TABLE_BYTES,
    NO_VERSION,
    PinnedVersion,
    Precision,
    PublisherEpoch,
    SignedRecord,
    WeightsApplied,
    WeightsBlocks,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.weights.distribution import PrefetchPlanner, read_blocks
from user_sys.weights.fetcher import MAX_DAMAGED_ATTEMPTS, STALL_TIMEOUT_S
from user_sys.weights.patches import (
    BLOCK_BYTES,
    Patch,
    VersionIndex,
    delta_patch,
    full_patch,
    subset_patch,
    table_patch,
)
from user_sys.weights.precision import quantize
from user_sys.weights.receiver import MAX_EXACT_WAIT_S, UpdatePlanner
from user_sys.weights.signing import Signer, TrustedLearnerKey, new_signer
from user_sys.weights.state import TensorSet, build_manifest, build_tensor_set


@dataclass
class ReceiverBench:
    """A receiver and whoever serves it, with a clock that moves when told and a link that a test may spoil."""

    folder: Path
    forms: tuple[Precision, ...] = ("exact",)
    bytes_per_s: float = 1e9
    now_s: float = 0.0
    loaded: list[tuple[WeightsManifest, Mapping[str, Array]]] = field(default_factory=list)
    catalogue: VersionIndex = field(default_factory=VersionIndex)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self.signer, trust = learner_key(self.folder)
        self.refuses = False
        self.queue: deque[WeightsRequest] = deque()
        self.receiver = UpdatePlanner(trust, self.load, self.ask, precisions=self.forms, clock=lambda: self.now_s)

    def load(self, manifest: WeightsManifest, arrays: Mapping[str, Array], heard_s: float) -> None:
        if self.refuses:
            raise WireError("not this policy's")
        self.loaded.append((manifest, arrays))

    def ask(self, patch: bytes, first: int, count: int) -> bool:
        self.queue.append(WeightsRequest(parcel=patch, first=first, count=count))
        return True

    def add(self, manifest: WeightsManifest, signed: SignedRecord, *patches: Patch) -> None:
        self.catalogue.manifests[manifest.form, manifest.version] = (manifest, signed)
        self.catalogue.patches |= {patch.info.id: patch for patch in patches}

    def offer(
        self,
        version: int,
        order: SignedRecord | None = None,
        greeting: bool = False,
        ahead: tuple[WeightsRequest, ...] = (),
    ) -> WeightsOffer:
        manifests = tuple(s for (_, v), (_, s) in self.catalogue.manifests.items() if v == version)
        infos = tuple(info for info in self.catalogue.patch_infos() if info.version <= version)
        return WeightsOffer(
            manifests=manifests,
            parcels=infos,
            order=order,
            signer=self.signer.public_key,
            greeting=greeting,
            ahead=ahead,
        )

    def ahead(self, version: int, room_bytes: int) -> tuple[WeightsRequest, ...]:
        """What the gateway sends with the offer of `version` to a receiver that lets so much come unasked."""
        assert self.receiver.loaded is not None
        held = self.receiver.loaded.manifest
        said = WeightsApplied(robot="r", version=held.version, seconds=0.0, digest=held.digest, ahead_bytes=room_bytes)
        return PrefetchPlanner(self.catalogue, version).requests(said)

    def serve(self) -> bool:
        """Answers one request as the gateway does, at the link's rate; False where none waits."""
        if not self.queue:
            return False
        for message, payload in read_blocks(self.catalogue, self.queue.popleft()):
            if payload is not None:
                self.sent_bytes += len(payload)
                self.now_s += len(payload) / self.bytes_per_s
            self.receiver.on_reply(message, payload)
        return True

    def run(self, rounds: int = 10_000) -> None:
        """Until nothing more happens."""
        for _ in range(rounds):
            self.receiver.step()
            if not self.serve() and not self.receiver.is_updating:
                return
            self.now_s += 1e-3
        raise AssertionError("it does not come to an end")


@pytest.fixture
def world(tmp_path: Path) -> ReceiverBench:
    return ReceiverBench(tmp_path)


def order(signer: Signer, serial: int, version: int) -> SignedRecord:
    return signer.sign(PinnedVersion(serial=serial, version=version, by="ada", reason="it shakes", given_unix_ns=0))


def chain(world: ReceiverBench, versions: int, share: float = 0.01, rows: int = 512) -> list[TensorSet]:
    """A full patch of version 0 and differences up to the last, in the world's catalogue."""
    states = [build_tensor_set(random_weights(0, rows))]
    world.add(*version_of(states[0], 0, world.signer), full_patch(states[0], 0))
    for version in range(1, versions):
        states.append(build_tensor_set(changed(states[-1].tensors, share, version)))
        patch = delta_patch(version - 1, states[-2], version, states[-1])
        assert patch is not None
        world.add(*version_of(states[-1], version, world.signer), patch)
    return states


def test_who_has_the_base_gets_the_difference_and_a_latecomer_the_full_one_and_what_followed(
    world: ReceiverBench,
) -> None:
    states = chain(world, 4)
    world.receiver.on_offer(world.offer(2))
    world.run()
    assert world.receiver.loaded_version == 2 and world.loaded[-1][0].digest == states[2].digest
    before = world.sent_bytes
    world.receiver.on_offer(world.offer(3))
    world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [2, 3]
    assert (world.sent_bytes - before) * 20 < states[0].size_bytes
    assert world.receiver.rejected == 0


def test_what_follows_an_offer_unasked_is_not_asked_for(world: ReceiverBench) -> None:
    states = chain(world, 2)
    world.receiver.on_offer(world.offer(0))
    world.run()
    ahead = world.ahead(1, world.receiver.prefetch_budget_bytes)
    world.receiver.on_offer(world.offer(1, ahead=ahead))
    assert ahead and world.receiver.prefetch_budget_bytes == 0, "the next one is under way"
    world.receiver.step()
    assert not world.queue
    world.queue.extend(ahead)
    world.run()
    assert world.loaded[-1][0].digest == states[1].digest


def test_of_a_large_version_only_the_rest_is_asked_for(world: ReceiverBench) -> None:
    first, second = build_tensor_set(random_weights(0, 4096)), build_tensor_set(random_weights(1, 4096))
    for version, state in enumerate((first, second)):
        world.add(*version_of(state, version, world.signer), full_patch(state, version))
    world.receiver.on_offer(world.offer(0))
    world.run()
    (ahead,) = world.ahead(1, 2 * BLOCK_BYTES)
    world.receiver.on_offer(world.offer(1, ahead=(ahead,)))
    world.receiver.step()
    assert (ahead.first, ahead.count) == (0, 2) and min(request.first for request in world.queue) == 2
    world.queue.appendleft(ahead)
    sent = world.sent_bytes
    world.run()
    assert world.loaded[-1][0].digest == second.digest
    assert world.sent_bytes - sent == full_patch(second, 1).info.size_bytes, "nothing came twice"


def test_what_was_to_follow_and_does_not_is_asked_for(world: ReceiverBench) -> None:
    states = chain(world, 2)
    world.receiver.on_offer(world.offer(0))
    world.run()
    world.receiver.on_offer(world.offer(1, ahead=world.ahead(1, 1 << 20)))
    world.receiver.step()
    assert not world.queue
    world.now_s += 60
    world.run()
    assert world.loaded[-1][0].digest == states[1].digest


def test_a_promise_that_makes_no_sense_changes_nothing(world: ReceiverBench) -> None:
    states = chain(world, 2)
    patches = [info.id for info in world.catalogue.patch_infos()]
    nonsense = tuple(
        WeightsRequest(parcel=patch, first=first, count=count)
        for patch in (*patches, b"x" * 32)
        for first, count in ((-(1 << 62), 1), (1 << 62, 1 << 62), (0, -1), (5, 0))
    )
    for version in range(2):
        world.receiver.on_offer(world.offer(version, ahead=nonsense))
        world.run()
    assert world.loaded[-1][0].digest == states[1].digest


def test_so_much_may_come_unasked_as_is_little_for_the_link(world: ReceiverBench) -> None:
    chain(world, 2)
    world.bytes_per_s = 1e5
    world.receiver.on_offer(world.offer(0))
    world.run()
    assert 0 < world.receiver.prefetch_budget_bytes <= 0.25 * 1.1 * world.bytes_per_s
    assert not world.ahead(1, 0)


def test_of_small_parcels_as_many_come_unasked_as_have_room(world: ReceiverBench) -> None:
    """A difference of some kilobytes is a block, but does not take a block's room."""
    chain(world, 5)
    world.receiver.on_offer(world.offer(0))
    world.run()
    sizes = [info.size_bytes for info in world.catalogue.patch_infos() if info.codec == "delta"]
    assert len(sizes) == 4 and sum(sizes) < BLOCK_BYTES
    for room_bytes, patches in ((sum(sizes), 4), (sum(sizes[:2]) + 1, 2), (sizes[0] - 1, 0)):
        ahead = world.ahead(4, room_bytes)
        assert [(request.first, request.count) for request in ahead] == [(0, 1)] * patches


def test_a_newer_version_is_not_turned_to_before_what_is_on_its_way_already(world: ReceiverBench) -> None:
    """It would come behind that, and might be gone by then, as might the one that follows."""
    states = [build_tensor_set(random_weights(seed, 512)) for seed in range(2)]
    for version, state in enumerate(states):
        world.add(*version_of(state, version, world.signer), full_patch(state, version))
    nearly = build_tensor_set(changed(states[0].tensors, 0.01, 0))
    delta = delta_patch(0, states[0], 1, nearly)
    assert delta is not None
    world.catalogue.patches.clear()
    world.add(*version_of(nearly, 1, world.signer), full_patch(states[0], 0), delta)
    world.receiver.on_offer(world.offer(1))
    world.receiver.step()
    assert {request.parcel for request in world.queue} == set(world.catalogue.patches)
    world.add(*version_of(states[1], 2, world.signer), full_patch(states[1], 2))
    world.receiver.on_offer(world.offer(2))
    world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [1, 2] and world.receiver.abandoned == 0


def test_who_holds_a_version_waits_in_silence_for_its_form_of_the_next_one(world: ReceiverBench) -> None:
    """A small form is at the gateway before a large one."""
    chain(world, 1)
    world.receiver.on_offer(world.offer(0))
    world.run()
    arrays, errors = quantize(random_weights(1, 512), "int8")
    rounded = build_tensor_set(arrays, "int8")
    manifest = build_manifest(rounded, 1, 1, 0, errors)
    world.add(manifest, world.signer.sign(manifest), full_patch(rounded, 1))
    world.receiver.on_offer(world.offer(1))
    assert world.receiver.rejected == 0 and world.receiver.loaded_version == 0


def test_one_without_the_base_is_never_sent_a_difference(world: ReceiverBench) -> None:
    states = chain(world, 2)
    world.add(*version_of(states[1], 1, world.signer), full_patch(states[1], 1))
    world.receiver.on_offer(world.offer(1))
    world.run()
    assert world.receiver.loaded_version == 1 and world.receiver.rejected == 0


def test_parts_change_any_version_from_their_base_on_and_none_of_another_life(world: ReceiverBench) -> None:
    states = [build_tensor_set(random_weights(0, 512))]
    for version in range(1, 60):
        states.append(build_tensor_set(states[0].tensors | {"steps": np.array(version)}))
    for version in (20, 40):
        world.add(*version_of(states[version], version, world.signer), full_patch(states[version], version))
        world.receiver.on_offer(world.offer(version))
        world.run()
    world.catalogue = VersionIndex()
    parts = subset_patch(0, states[0].digest, 59, states[59], {"steps"})
    assert parts is not None
    world.add(*version_of(states[59], 59, world.signer), parts)
    sent = world.sent_bytes
    later = build_manifest(states[59], 59, 590, 0, (0.0, 0.0), PublisherEpoch(b"", 1))
    offer = world.offer(59)
    world.receiver.on_offer(replace(offer, manifests=(world.signer.sign(later),)))
    assert not world.receiver.is_updating
    assert world.receiver.loaded is not None
    world.receiver.load_saved(world.receiver.loaded)
    world.receiver.on_offer(offer)
    world.run()
    assert world.loaded[-1][0].digest == states[59].digest and world.receiver.rejected == 0
    assert world.sent_bytes - sent == parts.info.size_bytes < 1000


def test_parts_that_do_not_hold_all_that_changed_are_found_and_another_way_is_taken(world: ReceiverBench) -> None:
    first = build_tensor_set(random_weights(0, 512))
    second = build_tensor_set(first.tensors | {"steps": np.array(7), "input.offset": np.ones(5, np.float32)})
    world.add(*version_of(first, 0, world.signer), full_patch(first, 0))
    world.receiver.on_offer(world.offer(0))
    world.run()
    lie, full = subset_patch(0, first.digest, 1, second, {"steps"}), full_patch(second, 1)
    assert lie is not None
    world.add(*version_of(second, 1, world.signer), lie, full)
    world.receiver.on_offer(world.offer(1))
    world.run()
    assert world.loaded[-1][0].digest == second.digest and world.receiver.rejected == 1


def test_where_parts_are_gone_before_the_frozen_rest_is_here_that_is_fetched_no_second_time(
    world: ReceiverBench,
) -> None:
    states = [build_tensor_set(random_weights(0, 8192))]
    states += [build_tensor_set(states[0].tensors | {"steps": np.array(version)}) for version in (1, 2)]
    full = full_patch(states[0], 0)
    first, second = (subset_patch(0, states[0].digest, version, states[version], {"steps"}) for version in (1, 2))
    assert first is not None and second is not None
    world.add(*version_of(states[1], 1, world.signer), full, first)
    world.receiver.on_offer(world.offer(1))
    world.receiver.step()
    world.serve()
    del world.catalogue.patches[first.info.id]
    world.add(*version_of(states[2], 2, world.signer), second)
    world.run()
    world.receiver.on_offer(world.offer(2))
    world.run()
    assert world.loaded[-1][0].digest == states[2].digest and world.receiver.rejected == 0
    assert world.sent_bytes == full.info.size_bytes + second.info.size_bytes


def test_a_transfer_that_was_cut_goes_on_where_it_stood(world: ReceiverBench) -> None:
    manifest, signed, patch = full_version(random_weights(0, rows=8192), 1, world.signer)
    world.add(manifest, signed, patch)
    world.receiver.on_offer(world.offer(1))
    while world.sent_bytes < patch.info.size_bytes // 2:
        world.receiver.step()
        world.serve()
    world.queue.clear()  # the connection is gone, with what was asked for
    world.receiver.on_offer(world.offer(1, greeting=True))
    world.run()
    assert world.receiver.loaded_version == 1
    assert world.sent_bytes <= patch.info.size_bytes, "nothing came twice"


def test_answers_that_never_come_are_asked_for_again(world: ReceiverBench) -> None:
    manifest, signed, patch = full_version(random_weights(0, rows=8192), 1, world.signer)
    world.add(manifest, signed, patch)
    world.receiver.on_offer(world.offer(1))
    world.receiver.step()
    world.queue.clear()
    world.now_s += 10 * STALL_TIMEOUT_S
    world.run()
    assert world.receiver.loaded_version == 1


def test_newer_offers_do_not_starve_a_link_that_is_slower_than_the_learner(world: ReceiverBench) -> None:
    world.bytes_per_s = 1e5
    size, version, due_s = 0, 0, 0.0
    for _ in range(20_000):
        if world.now_s >= due_s:
            version += 1
            manifest, signed, patch = full_version(random_weights(version, rows=8192), version, world.signer)
            world.catalogue.patches.clear() if version % 10 == 0 else None
            world.add(manifest, signed, patch)
            world.receiver.on_offer(world.offer(version))
            size, due_s = patch.info.size_bytes, due_s + 5.0
        world.receiver.step()
        world.serve()
        world.now_s += 1e-3
        if len(world.loaded) == 4:
            break
    versions = [manifest.version for manifest, _ in world.loaded]
    assert len(versions) == 4 and versions == sorted(set(versions))
    assert world.sent_bytes < 8 * size


def test_a_version_under_way_is_given_up_for_one_that_arrives_sooner(world: ReceiverBench) -> None:
    world.bytes_per_s = 1e6
    states = chain(world, 1, rows=8192)
    world.receiver.on_offer(world.offer(0))
    world.run()
    big = build_tensor_set(random_weights(9, rows=8192))
    world.add(*version_of(big, 1, world.signer), full_patch(big, 1))
    world.receiver.on_offer(world.offer(1))
    for _ in range(3):
        world.receiver.step()
        world.serve()
    small = build_tensor_set(changed(states[0].tensors, 0.001, 1))
    patch = delta_patch(0, states[0], 2, small)
    assert patch is not None
    world.add(*version_of(small, 2, world.signer), patch)
    world.receiver.on_offer(world.offer(2))
    world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [0, 2] and world.receiver.abandoned == 1


@pytest.mark.parametrize("gone", [False, True])
def test_what_is_under_way_of_a_version_that_was_given_up_holds_up_nothing(world: ReceiverBench, gone: bool) -> None:
    world.bytes_per_s = 1e6
    states = chain(world, 1, rows=8192)
    world.receiver.on_offer(world.offer(0))
    world.run()
    big = full_patch(state := build_tensor_set(random_weights(9, rows=8192)), 1)
    world.add(*version_of(state, 1, world.signer), big)
    world.receiver.on_offer(world.offer(1))
    world.receiver.step()
    assert world.queue, "as much of it as the window lets through"
    small = build_tensor_set(changed(states[0].tensors, 0.001, 1))
    patch = delta_patch(0, states[0], 2, small)
    assert patch is not None
    world.add(*version_of(small, 2, world.signer), patch)
    offer = world.offer(2)
    world.receiver.on_offer(replace(offer, parcels=tuple(info for info in offer.parcels if info.id != big.info.id)))
    if gone:
        del world.catalogue.patches[big.info.id]
    since_s = world.now_s
    world.run()
    assert world.receiver.loaded_version == 2 and world.receiver.abandoned == 1
    assert world.now_s - since_s < STALL_TIMEOUT_S, "nobody waited for what would not come"


FIRST, SECOND = PublisherEpoch(b"first", 5), PublisherEpoch(b"second", 6)


def published(
    world: ReceiverBench, version: int, seed: int, life: PublisherEpoch, order: SignedRecord | None = None
) -> WeightsOffer:
    """An offer of a full version; the learner's clock goes backwards from run to run."""
    state = build_tensor_set(random_weights(seed))
    manifest = build_manifest(state, version, 0, -life.number, (0.0, 0.0), life)
    world.add(manifest, world.signer.sign(manifest), full_patch(state, version))
    return world.offer(version, order)


@pytest.mark.parametrize("number", [1, 300])
def test_a_run_that_began_since_is_newer_whatever_its_numbers_and_the_clock(world: ReceiverBench, number: int) -> None:
    """A robot comes to its next run with what it kept of the last one, which may have had the same signing key."""
    world.receiver.on_offer(published(world, 300, 1, FIRST))
    world.run()
    kept = world.receiver.loaded
    assert kept is not None and world.receiver.run == FIRST.run
    world.__post_init__()
    world.catalogue = VersionIndex()
    world.receiver.load_saved(kept)
    assert not world.receiver.has_offer and world.receiver.run == b"", "nobody has said yet which run this is"
    former = published(world, 299, 2, FIRST)
    world.receiver.on_offer(former)
    world.run()
    assert world.receiver.loaded_version == 300 and world.receiver.run == FIRST.run, "an earlier one of the same run"
    world.catalogue = VersionIndex()
    world.receiver.on_offer(published(world, number, 3, SECOND))
    world.run()
    assert world.loaded[-1][0].version == number and world.loaded[-1][1]["steps"] == 3
    world.receiver.on_offer(published(world, number + 1, 4, SECOND))
    world.run()
    assert world.receiver.loaded_version == number + 1 and world.receiver.rejected == 0
    world.receiver.on_offer(former)
    world.run()
    assert world.receiver.rejected == 1 and world.receiver.run == SECOND.run, "what was left does not come back"
    world.catalogue = VersionIndex()
    world.receiver.on_offer(published(world, 301, 5, PublisherEpoch(FIRST.run, 7)))
    world.run()
    assert world.loaded[-1][0].version == 301, "unless its learner goes on with it"


def test_a_later_life_of_the_same_run_is_taken_though_its_numbers_are_smaller(world: ReceiverBench) -> None:
    """Its learner has lost its newest checkpoints. What is of the life before is not, nor its own earlier ones."""
    world.receiver.on_offer(published(world, 300, 1, FIRST))
    world.run()
    world.catalogue = VersionIndex()
    for number, life, acting in ((3, 6, 3), (300, 5, 3), (2, 6, 3), (4, 6, 4)):
        world.receiver.on_offer(published(world, number, number, PublisherEpoch(FIRST.run, life)))
        world.run()
        assert world.receiver.loaded_version == acting


def test_an_order_is_for_versions_of_its_run(world: ReceiverBench) -> None:
    def order(serial: int, version: int, life: PublisherEpoch) -> SignedRecord:
        order = PinnedVersion(serial=serial, version=version, by="ada", reason="", given_unix_ns=0, run=life.run)
        return world.signer.sign(order)

    for version in (1, 2):
        world.receiver.on_offer(published(world, version, version, FIRST))
        world.run()
    world.receiver.on_offer(published(world, 1, 1, FIRST, order(9, 1, FIRST)))
    world.run()
    assert world.receiver.loaded_version == 1
    world.catalogue = VersionIndex()
    for version in (1, 2):
        world.receiver.on_offer(published(world, version, 2 + version, SECOND))
        world.run()
    assert world.loaded[-1][1]["steps"] == 4, "the order was for another run's"
    world.receiver.on_offer(published(world, 1, 3, SECOND, order(2, 1, SECOND)))
    world.run()
    assert world.loaded[-1][1]["steps"] == 3, "one of this run is obeyed, whatever its number"


def spoilt(patch: Patch) -> Patch:
    """The same with a byte changed: at its source, so that it comes damaged however often it is asked for."""
    content = bytearray(patch.payload)
    content[-1] ^= 1
    return Patch(patch.info, memoryview(bytes(content)))


def test_a_parcel_that_comes_damaged_however_often_it_is_asked_for_is_given_up_for_another_way(
    world: ReceiverBench,
) -> None:
    states = chain(world, 2)
    world.receiver.on_offer(world.offer(0))
    world.run()
    difference = next(patch for patch in world.catalogue.patches.values() if patch.info.codec == "delta")
    world.catalogue.patches[difference.info.id] = spoilt(difference)
    full = full_patch(states[1], 1)
    world.catalogue.patches |= {full.info.id: full}
    world.receiver.on_offer(world.offer(1))
    world.run(rounds=100)
    assert (
        world.receiver.loaded_version == 1
        and world.receiver.damaged_blocks == MAX_DAMAGED_ATTEMPTS
        and world.receiver.rejected == 1
    )


def test_without_another_way_it_is_tried_again_when_a_session_begins(world: ReceiverBench) -> None:
    manifest, signed, patch = full_version(random_weights(0), 1, world.signer)
    world.add(manifest, signed, spoilt(patch))
    for _ in range(2):
        world.receiver.on_offer(world.offer(1))
        world.run(rounds=100)
        assert world.receiver.loaded_version == NO_VERSION and world.receiver.damaged_blocks == MAX_DAMAGED_ATTEMPTS
    world.add(manifest, signed, patch)
    world.receiver.on_offer(world.offer(1, greeting=True))
    world.run(rounds=100)
    assert world.receiver.loaded_version == 1


def test_what_was_gone_and_is_offered_again_is_asked_for_again(world: ReceiverBench) -> None:
    manifest, signed, patch = full_version(random_weights(0), 1, world.signer)
    world.add(manifest, signed, patch)
    offer = world.offer(1)
    world.catalogue.patches.clear()
    world.receiver.on_offer(offer)
    world.run(rounds=100)
    assert world.receiver.loaded_version == NO_VERSION and not world.receiver.is_updating
    world.add(manifest, signed, patch)
    world.receiver.on_offer(offer)
    world.run(rounds=100)
    assert world.receiver.loaded_version == 1


def many(number: int) -> dict[str, Array]:
    """Weights whose table of tensors is too long for a manifest."""
    rng = np.random.default_rng(number)
    return {f"layers.{n:04d}.attention.weight": rng.normal(size=(4, 4)).astype(np.float32) for n in range(1000)}


def test_a_table_of_tensors_that_travels_apart_comes_first_and_is_checked(world: ReceiverBench) -> None:
    states = [build_tensor_set(many(0))]
    states.append(build_tensor_set(states[0].tensors | {"layers.0007.attention.weight": np.ones((4, 4), np.float32)}))
    world.add(*version_of(states[0], 0, world.signer), full_patch(states[0], 0), table_patch(states[0], 0))
    difference = delta_patch(0, states[0], 1, states[1])
    assert difference is not None
    world.add(*version_of(states[1], 1, world.signer), difference, table_patch(states[1], 1))
    for version, state in enumerate(states):
        assert not world.catalogue.manifests["exact", version][0].has_tensors
        before = world.sent_bytes
        world.receiver.on_offer(world.offer(version))
        world.run()
        manifest, loaded = world.loaded[-1]
        assert manifest.version == version and manifest.tensors == state.entries
        assert all(np.array_equal(loaded[name], array) for name, array in state.tensors.items())
    table_bytes = world.catalogue.manifests["exact", 1][0].table_bytes
    assert world.sent_bytes - before == difference.info.size_bytes + table_bytes, "the base is held"
    assert world.receiver.rejected == 0


def test_a_table_that_is_not_what_was_signed_is_given_up_for_another(world: ReceiverBench) -> None:
    state = build_tensor_set(many(0))
    world.add(*version_of(state, 1, world.signer), full_patch(state, 1))
    (lie, table) = table_patch(build_tensor_set(many(1)), 1), table_patch(state, 1)
    world.catalogue.patches |= {lie.info.id: lie}
    world.receiver.on_offer(world.offer(1))
    world.run()
    assert world.receiver.rejected == 1 and world.receiver.loaded_version == NO_VERSION
    world.catalogue.patches |= {table.info.id: table}
    world.receiver.on_offer(world.offer(1))
    world.run()
    assert world.receiver.loaded_version == 1 and world.receiver.rejected == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_full_parcel_of_another_size_than_its_tensors_leaves_what_acts_and_the_next_way_is_taken(
    world: ReceiverBench, apart: bool
) -> None:
    """While an earlier version is under way, whose patch is not offered any more."""
    weights = many if apart else random_weights
    first, second = (build_tensor_set(weights(number)) for number in (1, 2))
    world.add(*version_of(first, 1, world.signer), full_patch(first, 1), *([table_patch(first, 1)] * apart))
    world.receiver.on_offer(world.offer(1))
    world.receiver.step()
    world.catalogue = VersionIndex()
    patch = full_patch(second, 2)
    short = build_tensor_set(random_weights(3, rows=8))
    lie = full_patch(TensorSet(second.form, short.entries, short.tensors, short.digest), 2)
    world.add(*version_of(second, 2, world.signer), lie, *([table_patch(second, 2)] * apart))
    world.receiver.on_offer(world.offer(2))
    world.queue.clear()
    world.run()
    assert (
        world.receiver.loaded_version == NO_VERSION and world.receiver.rejected == 1 and not world.receiver.is_updating
    )
    world.catalogue.patches |= {patch.info.id: patch}
    world.receiver.on_offer(world.offer(2))
    world.run()
    assert world.receiver.loaded_version == 2


def test_a_version_that_comes_in_no_form_that_is_taken_is_refused(world: ReceiverBench) -> None:
    arrays, _ = quantize(random_weights(0), "int8")
    world.add(*full_version(arrays, 1, world.signer, "int8"))
    world.receiver.on_offer(world.offer(1))
    assert world.receiver.rejected == 1 and not world.receiver.is_updating
    world.forms = ("int8",)
    world.__post_init__()
    world.receiver.on_offer(world.offer(1))
    world.run()
    kept = world.receiver.loaded
    assert kept is not None
    world.forms = ("exact",)
    world.__post_init__()
    with pytest.raises(WireError, match="version is int8"):
        world.receiver.load_saved(kept)


def test_versions_only_grow_unless_a_person_orders_otherwise(world: ReceiverBench) -> None:
    chain(world, 4)
    for version in (3, 1, 0):
        world.receiver.on_offer(world.offer(version))
        world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [3]
    world.receiver.on_offer(world.offer(1, order=order(new_signer(), 1, 1)))
    assert world.receiver.rejected == 1, "an order that somebody else signed"
    world.receiver.on_offer(world.offer(1, order=order(world.signer, 1, 1)))
    world.run()
    assert world.receiver.loaded_version == 1
    world.receiver.on_offer(world.offer(3, order=order(world.signer, 1, 1)))
    world.receiver.on_offer(world.offer(3))
    world.run()
    assert world.receiver.loaded_version == 1, "the order stands"
    world.receiver.on_offer(world.offer(3, order=order(world.signer, 2, NO_VERSION)))
    world.run()
    world.receiver.on_offer(world.offer(1, order=order(world.signer, 1, 1)))
    world.run()
    assert world.receiver.loaded_version == 3, "an order that was taken back does not come again"


def test_what_somebody_else_signed_or_changed_is_refused(world: ReceiverBench) -> None:
    manifest, _, patch = full_version(random_weights(0), 1, world.signer)
    stranger = new_signer()
    world.add(manifest, stranger.sign(manifest), patch)
    world.receiver.on_offer(replace(world.offer(1), signer=stranger.public_key))
    assert world.receiver.rejected == 1 and not world.queue
    signed = world.signer.sign(manifest)
    world.add(manifest, SignedRecord(signed.body.replace(b"adapter", b"adaptor"), signed.signature), patch)
    world.receiver.on_offer(world.offer(1))
    assert world.receiver.rejected == 2 and not world.queue and world.receiver.loaded_version == NO_VERSION


def test_a_robot_without_a_key_trusts_the_first_that_the_gateway_names_and_no_other(world: ReceiverBench) -> None:
    world.add(*full_version(random_weights(0), 1, world.signer))
    trust = world.folder / "learner.verify"
    trust.unlink()
    trust_in_nobody(world)
    world.receiver.on_offer(world.offer(1))
    world.run()
    assert world.receiver.loaded_version == 1 and trust.exists()
    other = new_signer()
    world.add(*full_version(random_weights(1), 2, other))
    world.receiver.on_offer(replace(world.offer(2), signer=other.public_key))
    assert world.receiver.rejected == 1 and world.receiver.loaded_version == 1


def trust_in_nobody(world: ReceiverBench) -> None:
    world.receiver = UpdatePlanner(
        TrustedLearnerKey(world.folder / "learner.verify"), world.load, world.ask, clock=lambda: world.now_s
    )


def test_weights_that_the_policy_refuses_leave_what_acts_and_the_next_version_comes(world: ReceiverBench) -> None:
    states = chain(world, 3)
    world.receiver.on_offer(world.offer(0))
    world.run()
    world.refuses = True
    world.receiver.on_offer(world.offer(1))
    world.run()
    assert world.receiver.loaded_version == 0 and world.receiver.rejected >= 1 and world.receiver.loaded is not None
    assert world.receiver.loaded.state.digest == states[0].digest
    world.refuses = False
    world.receiver.on_offer(world.offer(2))
    world.run()
    assert world.receiver.loaded_version == 2


def test_a_slow_link_brings_a_rounded_form_where_the_policy_allows_it(tmp_path: Path) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)}
    for forms, rate, chosen in (
        (("exact", "bf16", "int8"), 1e9, "exact"),
        (("exact", "bf16", "int8"), 2e5 / MAX_EXACT_WAIT_S, "int8"),
        (("exact",), 2e5 / MAX_EXACT_WAIT_S, "exact"),
    ):
        world = ReceiverBench(tmp_path, forms=forms, bytes_per_s=rate)  # type: ignore[arg-type]
        measured = {"w": np.random.default_rng(1).normal(size=(512, 256)).astype(np.float32)}
        world.add(*full_version(measured, 0, world.signer))
        world.receiver.on_offer(world.offer(0))
        world.run(100_000)  # measures the rate of the link
        for form in ("exact", "bf16", "int8"):
            arrays, _ = quantize(weights, form)  # type: ignore[arg-type]
            world.add(*full_version(arrays, 1, world.signer, form))  # type: ignore[arg-type]
        world.receiver.on_offer(world.offer(1))
        world.run()
        manifest, loaded = world.loaded[-1]
        assert manifest.form == chosen
        assert loaded["w"].dtype == np.float32 and np.abs(loaded["w"] - weights["w"]).max() < 0.03


def test_descriptions_that_want_our_memory_are_ignored(world: ReceiverBench) -> None:
    manifest, signed, patch = full_version(random_weights(0), 1, world.signer)
    for lie in (
        {"size_bytes": 1 << 33},
        {"block_bytes": 1},
        {"crcs": b""},
        {"base": 5, "base_digest": b"x", "codec": "delta"},
        {"block_bytes": -4},
    ):
        world.add(manifest, signed, Patch(replace(patch.info, **lie), patch.payload))
        world.receiver.on_offer(world.offer(1))
        world.receiver.step()
        assert not world.queue and not world.receiver.is_updating


# Thousands of versions over a link that does everything wrong ---------------------------------------------------------


class UnreliableBench:
    """Drops, repeats, delays, reorders and damages what goes to a receiver, restarts it, and hands it wrong bases."""

    def __init__(self, world: ReceiverBench, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.flying: list[tuple[WeightsBlocks | WeightsGone | WeightsOffer, memoryview | None]] = []
        self.restarts = 0

    def step(self) -> None:
        world, rng = self.world, self.rng
        world.receiver.step()
        while world.queue:
            request = world.queue.popleft()
            if rng.random() > 0.05:
                for answer in read_blocks(world.catalogue, request):
                    self.flying += [answer] * (2 if rng.random() < 0.05 else 1)
        if rng.random() < 0.1:
            rng.shuffle(self.flying)
        while self.flying and rng.random() < 0.9:
            message, payload = self.flying.pop(0)
            if rng.random() < 0.03:
                continue
            if isinstance(message, WeightsOffer):
                world.receiver.on_offer(message)
            else:
                world.receiver.on_reply(message, self.spoilt(payload))
        world.now_s += 0.05
        if rng.random() < 0.01:
            self.restart()

    def spoilt(self, payload: memoryview | None) -> memoryview | None:
        if payload is None or self.rng.random() > 0.03:
            return payload
        content = bytearray(payload)
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        return memoryview(bytes(content[: self.rng.choice([len(content), len(content) // 2])]))

    def restart(self) -> None:
        """The robot's process is another one: nothing is left of it, or what it kept last."""
        held, world = self.world.receiver.loaded, self.world
        world.__post_init__()
        if held is not None and self.rng.random() < 0.5:
            world.receiver.load_saved(held)
        self.restarts += 1


def since(base: int, version: int, states: Mapping[int, TensorSet]) -> Patch | None:
    """What has changed since `base`; of that, nothing is changed back."""
    spans = [{entry.name: entry.digest for entry in states[number].entries} for number in range(base, version + 1)]
    names = {name for name in spans[0] if len({span[name] for span in spans}) > 1}
    return subset_patch(base, states[base].digest, version, states[version], names)


def chaotic(world: ReceiverBench, versions: int, seed: int) -> None:
    rng, chaos = random.Random(seed), UnreliableBench(world, seed)
    state = build_tensor_set(random_weights(0, rows=32))
    digests: dict[int, bytes] = {}
    earlier: dict[int, TensorSet] = {}
    for version in range(versions):
        share = rng.choice([0.001, 0.01, 0.3, 1.0])
        fresh = changed(state.tensors, share, version)
        new = build_tensor_set(
            fresh | ({"hidden.0.weight": state.tensors["hidden.0.weight"]} if rng.random() < 0.9 else {})
        )
        earlier[version] = new
        patches = [delta_patch(version - 1, state, version, new)] if version and rng.random() < 0.9 else []
        if not patches or patches[0] is None or rng.random() < 0.1:
            patches.append(full_patch(new, version))
        if rng.random() < 0.02 and version:  # a difference that claims a base which it does not have
            other = build_tensor_set(random_weights(version, rows=32))
            lie = delta_patch(version - 1, other, version, new) or full_patch(new, version)
            patches.append(
                Patch(replace(lie.info, base_digest=state.digest if lie.info.base >= 0 else b""), lie.payload)
            )
        if rng.random() < 0.1 and version:
            patches.append(since(rng.randrange(max(0, version - 40), version), version, earlier))
            earlier = {number: state for number, state in earlier.items() if number >= version - 40}
        manifest, signed = version_of(new, version, world.signer)
        tables = [] if manifest.has_tensors else [table_patch(new, version)]
        world.add(manifest, signed, *tables, *[p for p in patches if p is not None])
        digests[version] = new.digest
        world.catalogue.retain([version], version - 8)
        ahead = world.ahead(version, rng.choice([0, 1 << 20])) if world.receiver.loaded is not None else ()
        chaos.flying.append((world.offer(version, greeting=rng.random() < 0.05, ahead=ahead), None))
        chaos.flying += [answer for request in ahead for answer in read_blocks(world.catalogue, request)]
        state = new
        for _ in range(rng.randrange(8)):
            chaos.step()
    for attempt in range(2000):
        if world.receiver.loaded_version == versions - 1:
            break
        if attempt % 50 == 0:
            chaos.flying.append((world.offer(versions - 1, greeting=True), None))
        chaos.step()
    assert world.receiver.loaded_version == versions - 1, "the newest arrives in the end"
    assert chaos.restarts >= versions // 500
    for manifest, arrays in world.loaded:
        loaded = build_tensor_set({name: array for name, array in arrays.items()})
        assert loaded.digest == digests[manifest.version]
    assert len(world.loaded) > versions // 10


@pytest.mark.parametrize("inline_bytes", [INLINE_TABLE_BYTES, 0])
def test_versions_through_chaos_are_digest_equal(
    world: ReceiverBench, inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tables of tensors travel apart."""
    monkeypatch.setattr("user_sys.weights.state.INLINE_TABLE_BYTES", inline_bytes)
    chaotic(world, 500, seed=1)


@pytest.mark.slow
def test_ten_thousand_versions_through_chaos_are_digest_equal(world: ReceiverBench) -> None:
    chaotic(world, 10_000, seed=2)
