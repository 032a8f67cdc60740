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
from user_sys.messages import WeightsApplied, WeightsGone, WeightsGrains, WeightsOffer, WeightsRequest
from user_sys.weights.catalogue import Catalogue
from user_sys.weights.fetch import MOST_DAMAGED, STALL_S
from user_sys.weights.forms import convert
from user_sys.weights.parcel import GRAIN_BYTES, Parcel, delta_parcel, full_parcel, parts_parcel, table_parcel
from user_sys.weights.receiver import PATIENCE_S, Receiver
from user_sys.weights.records import INLINE_TABLE_BYTES, NO_VERSION, Form, Life, Manifest, Order, Signed
from user_sys.weights.serve import Ahead, answers
from user_sys.weights.signing import Signer, Trust, new_signer
from user_sys.weights.state import State, build_state, describe


@dataclass
class World:
    """A receiver and whoever serves it, with a clock that moves when told and a link that a test may spoil."""

    folder: Path
    forms: tuple[Form, ...] = ("exact",)
    bytes_per_s: float = 1e9
    now_s: float = 0.0
    loaded: list[tuple[Manifest, Mapping[str, Array]]] = field(default_factory=list)
    catalogue: Catalogue = field(default_factory=Catalogue)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self.signer, trust = learner_key(self.folder)
        self.refuses = False
        self.queue: deque[WeightsRequest] = deque()
        self.receiver = Receiver(trust, self.load, self.ask, forms=self.forms, clock=lambda: self.now_s)

    def load(self, manifest: Manifest, arrays: Mapping[str, Array], heard_s: float) -> None:
        if self.refuses:
            raise WireError("not this policy's")
        self.loaded.append((manifest, arrays))

    def ask(self, parcel: bytes, first: int, count: int) -> bool:
        self.queue.append(WeightsRequest(parcel=parcel, first=first, count=count))
        return True

    def add(self, manifest: Manifest, signed: Signed, *parcels: Parcel) -> None:
        self.catalogue.manifests[manifest.form, manifest.version] = (manifest, signed)
        self.catalogue.parcels |= {parcel.info.id: parcel for parcel in parcels}

    def offer(
        self,
        version: int,
        order: Signed | None = None,
        greeting: bool = False,
        ahead: tuple[WeightsRequest, ...] = (),
    ) -> WeightsOffer:
        manifests = tuple(s for (_, v), (_, s) in self.catalogue.manifests.items() if v == version)
        infos = tuple(info for info in self.catalogue.infos() if info.version <= version)
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
        assert self.receiver.held is not None
        held = self.receiver.held.manifest
        said = WeightsApplied(robot="r", version=held.version, seconds=0.0, digest=held.digest, ahead_bytes=room_bytes)
        return Ahead(self.catalogue, version).requests(said)

    def serve(self) -> bool:
        """Answers one request as the gateway does, at the link's rate; False where none waits."""
        if not self.queue:
            return False
        for message, payload in answers(self.catalogue, self.queue.popleft()):
            if payload is not None:
                self.sent_bytes += len(payload)
                self.now_s += len(payload) / self.bytes_per_s
            self.receiver.arrived(message, payload)
        return True

    def run(self, rounds: int = 10_000) -> None:
        """Until nothing more happens."""
        for _ in range(rounds):
            self.receiver.step()
            if not self.serve() and not self.receiver.busy:
                return
            self.now_s += 1e-3
        raise AssertionError("it does not come to an end")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def order(signer: Signer, serial: int, version: int) -> Signed:
    return signer.sign(Order(serial=serial, version=version, by="ada", reason="it shakes", given_unix_ns=0))


def chain(world: World, versions: int, share: float = 0.01, rows: int = 512) -> list[State]:
    """A full parcel of version 0 and differences up to the last, in the world's catalogue."""
    states = [build_state(random_weights(0, rows))]
    world.add(*version_of(states[0], 0, world.signer), full_parcel(states[0], 0))
    for version in range(1, versions):
        states.append(build_state(changed(states[-1].tensors, share, version)))
        parcel = delta_parcel(version - 1, states[-2], version, states[-1])
        assert parcel is not None
        world.add(*version_of(states[-1], version, world.signer), parcel)
    return states


def test_who_has_the_base_gets_the_difference_and_a_latecomer_the_full_one_and_what_followed(world: World) -> None:
    states = chain(world, 4)
    world.receiver.offered(world.offer(2))
    world.run()
    assert world.receiver.version == 2 and world.loaded[-1][0].digest == states[2].digest
    before = world.sent_bytes
    world.receiver.offered(world.offer(3))
    world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [2, 3]
    assert (world.sent_bytes - before) * 20 < states[0].size_bytes
    assert world.receiver.refused == 0


def test_what_follows_an_offer_unasked_is_not_asked_for(world: World) -> None:
    states = chain(world, 2)
    world.receiver.offered(world.offer(0))
    world.run()
    ahead = world.ahead(1, world.receiver.room_bytes)
    world.receiver.offered(world.offer(1, ahead=ahead))
    assert ahead and world.receiver.room_bytes == 0, "the next one is under way"
    world.receiver.step()
    assert not world.queue
    world.queue.extend(ahead)
    world.run()
    assert world.loaded[-1][0].digest == states[1].digest


def test_of_a_large_version_only_the_rest_is_asked_for(world: World) -> None:
    first, second = build_state(random_weights(0, 4096)), build_state(random_weights(1, 4096))
    for version, state in enumerate((first, second)):
        world.add(*version_of(state, version, world.signer), full_parcel(state, version))
    world.receiver.offered(world.offer(0))
    world.run()
    (ahead,) = world.ahead(1, 2 * GRAIN_BYTES)
    world.receiver.offered(world.offer(1, ahead=(ahead,)))
    world.receiver.step()
    assert (ahead.first, ahead.count) == (0, 2) and min(request.first for request in world.queue) == 2
    world.queue.appendleft(ahead)
    sent = world.sent_bytes
    world.run()
    assert world.loaded[-1][0].digest == second.digest
    assert world.sent_bytes - sent == full_parcel(second, 1).info.size_bytes, "nothing came twice"


def test_what_was_to_follow_and_does_not_is_asked_for(world: World) -> None:
    states = chain(world, 2)
    world.receiver.offered(world.offer(0))
    world.run()
    world.receiver.offered(world.offer(1, ahead=world.ahead(1, 1 << 20)))
    world.receiver.step()
    assert not world.queue
    world.now_s += 60
    world.run()
    assert world.loaded[-1][0].digest == states[1].digest


def test_a_promise_that_makes_no_sense_changes_nothing(world: World) -> None:
    states = chain(world, 2)
    parcels = [info.id for info in world.catalogue.infos()]
    nonsense = tuple(
        WeightsRequest(parcel=parcel, first=first, count=count)
        for parcel in (*parcels, b"x" * 32)
        for first, count in ((-(1 << 62), 1), (1 << 62, 1 << 62), (0, -1), (5, 0))
    )
    for version in range(2):
        world.receiver.offered(world.offer(version, ahead=nonsense))
        world.run()
    assert world.loaded[-1][0].digest == states[1].digest


def test_so_much_may_come_unasked_as_is_little_for_the_link(world: World) -> None:
    chain(world, 2)
    world.bytes_per_s = 1e5
    world.receiver.offered(world.offer(0))
    world.run()
    assert 0 < world.receiver.room_bytes <= 0.25 * 1.1 * world.bytes_per_s
    assert not world.ahead(1, 0)


def test_of_small_parcels_as_many_come_unasked_as_have_room(world: World) -> None:
    """A difference of some kilobytes is a grain, but does not take a grain's room."""
    chain(world, 5)
    world.receiver.offered(world.offer(0))
    world.run()
    sizes = [info.size_bytes for info in world.catalogue.infos() if info.codec == "delta"]
    assert len(sizes) == 4 and sum(sizes) < GRAIN_BYTES
    for room_bytes, parcels in ((sum(sizes), 4), (sum(sizes[:2]) + 1, 2), (sizes[0] - 1, 0)):
        ahead = world.ahead(4, room_bytes)
        assert [(request.first, request.count) for request in ahead] == [(0, 1)] * parcels


def test_a_newer_version_is_not_turned_to_before_what_is_on_its_way_already(world: World) -> None:
    """It would come behind that, and might be gone by then, as might the one that follows."""
    states = [build_state(random_weights(seed, 512)) for seed in range(2)]
    for version, state in enumerate(states):
        world.add(*version_of(state, version, world.signer), full_parcel(state, version))
    nearly = build_state(changed(states[0].tensors, 0.01, 0))
    delta = delta_parcel(0, states[0], 1, nearly)
    assert delta is not None
    world.catalogue.parcels.clear()
    world.add(*version_of(nearly, 1, world.signer), full_parcel(states[0], 0), delta)
    world.receiver.offered(world.offer(1))
    world.receiver.step()
    assert {request.parcel for request in world.queue} == set(world.catalogue.parcels)
    world.add(*version_of(states[1], 2, world.signer), full_parcel(states[1], 2))
    world.receiver.offered(world.offer(2))
    world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [1, 2] and world.receiver.abandoned == 0


def test_who_holds_a_version_waits_in_silence_for_its_form_of_the_next_one(world: World) -> None:
    """A small form is at the gateway before a large one."""
    chain(world, 1)
    world.receiver.offered(world.offer(0))
    world.run()
    arrays, errors = convert(random_weights(1, 512), "int8")
    rounded = build_state(arrays, "int8")
    manifest = describe(rounded, 1, 1, 0, errors)
    world.add(manifest, world.signer.sign(manifest), full_parcel(rounded, 1))
    world.receiver.offered(world.offer(1))
    assert world.receiver.refused == 0 and world.receiver.version == 0


def test_one_without_the_base_is_never_sent_a_difference(world: World) -> None:
    states = chain(world, 2)
    world.add(*version_of(states[1], 1, world.signer), full_parcel(states[1], 1))
    world.receiver.offered(world.offer(1))
    world.run()
    assert world.receiver.version == 1 and world.receiver.refused == 0


def test_parts_change_any_version_from_their_base_on_and_none_of_another_life(world: World) -> None:
    states = [build_state(random_weights(0, 512))]
    for version in range(1, 60):
        states.append(build_state(states[0].tensors | {"steps": np.array(version)}))
    for version in (20, 40):
        world.add(*version_of(states[version], version, world.signer), full_parcel(states[version], version))
        world.receiver.offered(world.offer(version))
        world.run()
    world.catalogue = Catalogue()
    parts = parts_parcel(0, states[0].digest, 59, states[59], {"steps"})
    assert parts is not None
    world.add(*version_of(states[59], 59, world.signer), parts)
    sent = world.sent_bytes
    later = describe(states[59], 59, 590, 0, (0.0, 0.0), Life(b"", 1))
    offer = world.offer(59)
    world.receiver.offered(replace(offer, manifests=(world.signer.sign(later),)))
    assert not world.receiver.busy
    assert world.receiver.held is not None
    world.receiver.start_from(world.receiver.held)
    world.receiver.offered(offer)
    world.run()
    assert world.loaded[-1][0].digest == states[59].digest and world.receiver.refused == 0
    assert world.sent_bytes - sent == parts.info.size_bytes < 1000


def test_parts_that_do_not_hold_all_that_changed_are_found_and_another_way_is_taken(world: World) -> None:
    first = build_state(random_weights(0, 512))
    second = build_state(first.tensors | {"steps": np.array(7), "input.offset": np.ones(5, np.float32)})
    world.add(*version_of(first, 0, world.signer), full_parcel(first, 0))
    world.receiver.offered(world.offer(0))
    world.run()
    lie, full = parts_parcel(0, first.digest, 1, second, {"steps"}), full_parcel(second, 1)
    assert lie is not None
    world.add(*version_of(second, 1, world.signer), lie, full)
    world.receiver.offered(world.offer(1))
    world.run()
    assert world.loaded[-1][0].digest == second.digest and world.receiver.refused == 1


def test_where_parts_are_gone_before_the_frozen_rest_is_here_that_is_fetched_no_second_time(world: World) -> None:
    states = [build_state(random_weights(0, 8192))]
    states += [build_state(states[0].tensors | {"steps": np.array(version)}) for version in (1, 2)]
    full = full_parcel(states[0], 0)
    first, second = (parts_parcel(0, states[0].digest, version, states[version], {"steps"}) for version in (1, 2))
    assert first is not None and second is not None
    world.add(*version_of(states[1], 1, world.signer), full, first)
    world.receiver.offered(world.offer(1))
    world.receiver.step()
    world.serve()
    del world.catalogue.parcels[first.info.id]
    world.add(*version_of(states[2], 2, world.signer), second)
    world.run()
    world.receiver.offered(world.offer(2))
    world.run()
    assert world.loaded[-1][0].digest == states[2].digest and world.receiver.refused == 0
    assert world.sent_bytes == full.info.size_bytes + second.info.size_bytes


def test_a_transfer_that_was_cut_goes_on_where_it_stood(world: World) -> None:
    manifest, signed, parcel = full_version(random_weights(0, rows=8192), 1, world.signer)
    world.add(manifest, signed, parcel)
    world.receiver.offered(world.offer(1))
    while world.sent_bytes < parcel.info.size_bytes // 2:
        world.receiver.step()
        world.serve()
    world.queue.clear()  # the connection is gone, with what was asked for
    world.receiver.offered(world.offer(1, greeting=True))
    world.run()
    assert world.receiver.version == 1
    assert world.sent_bytes <= parcel.info.size_bytes, "nothing came twice"


def test_answers_that_never_come_are_asked_for_again(world: World) -> None:
    manifest, signed, parcel = full_version(random_weights(0, rows=8192), 1, world.signer)
    world.add(manifest, signed, parcel)
    world.receiver.offered(world.offer(1))
    world.receiver.step()
    world.queue.clear()
    world.now_s += 10 * STALL_S
    world.run()
    assert world.receiver.version == 1


def test_newer_offers_do_not_starve_a_link_that_is_slower_than_the_learner(world: World) -> None:
    world.bytes_per_s = 1e5
    size, version, due_s = 0, 0, 0.0
    for _ in range(20_000):
        if world.now_s >= due_s:
            version += 1
            manifest, signed, parcel = full_version(random_weights(version, rows=8192), version, world.signer)
            world.catalogue.parcels.clear() if version % 10 == 0 else None
            world.add(manifest, signed, parcel)
            world.receiver.offered(world.offer(version))
            size, due_s = parcel.info.size_bytes, due_s + 5.0
        world.receiver.step()
        world.serve()
        world.now_s += 1e-3
        if len(world.loaded) == 4:
            break
    versions = [manifest.version for manifest, _ in world.loaded]
    assert len(versions) == 4 and versions == sorted(set(versions))
    assert world.sent_bytes < 8 * size


def test_a_version_under_way_is_given_up_for_one_that_arrives_sooner(world: World) -> None:
    world.bytes_per_s = 1e6
    states = chain(world, 1, rows=8192)
    world.receiver.offered(world.offer(0))
    world.run()
    big = build_state(random_weights(9, rows=8192))
    world.add(*version_of(big, 1, world.signer), full_parcel(big, 1))
    world.receiver.offered(world.offer(1))
    for _ in range(3):
        world.receiver.step()
        world.serve()
    small = build_state(changed(states[0].tensors, 0.001, 1))
    parcel = delta_parcel(0, states[0], 2, small)
    assert parcel is not None
    world.add(*version_of(small, 2, world.signer), parcel)
    world.receiver.offered(world.offer(2))
    world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [0, 2] and world.receiver.abandoned == 1


@pytest.mark.parametrize("gone", [False, True])
def test_what_is_under_way_of_a_version_that_was_given_up_holds_up_nothing(world: World, gone: bool) -> None:
    world.bytes_per_s = 1e6
    states = chain(world, 1, rows=8192)
    world.receiver.offered(world.offer(0))
    world.run()
    big = full_parcel(state := build_state(random_weights(9, rows=8192)), 1)
    world.add(*version_of(state, 1, world.signer), big)
    world.receiver.offered(world.offer(1))
    world.receiver.step()
    assert world.queue, "as much of it as the window lets through"
    small = build_state(changed(states[0].tensors, 0.001, 1))
    parcel = delta_parcel(0, states[0], 2, small)
    assert parcel is not None
    world.add(*version_of(small, 2, world.signer), parcel)
    offer = world.offer(2)
    world.receiver.offered(replace(offer, parcels=tuple(info for info in offer.parcels if info.id != big.info.id)))
    if gone:
        del world.catalogue.parcels[big.info.id]
    since_s = world.now_s
    world.run()
    assert world.receiver.version == 2 and world.receiver.abandoned == 1
    assert world.now_s - since_s < STALL_S, "nobody waited for what would not come"


FIRST, SECOND = Life(b"first", 5), Life(b"second", 6)


def published(world: World, version: int, seed: int, life: Life, order: Signed | None = None) -> WeightsOffer:
    """An offer of a full version; the learner's clock goes backwards from run to run."""
    state = build_state(random_weights(seed))
    manifest = describe(state, version, 0, -life.number, (0.0, 0.0), life)
    world.add(manifest, world.signer.sign(manifest), full_parcel(state, version))
    return world.offer(version, order)


@pytest.mark.parametrize("number", [1, 300])
def test_a_run_that_began_since_is_newer_whatever_its_numbers_and_the_clock(world: World, number: int) -> None:
    """A robot comes to its next run with what it kept of the last one, which may have had the same signing key."""
    world.receiver.offered(published(world, 300, 1, FIRST))
    world.run()
    kept = world.receiver.held
    assert kept is not None and world.receiver.run == FIRST.run
    world.__post_init__()
    world.catalogue = Catalogue()
    world.receiver.start_from(kept)
    assert not world.receiver.told and world.receiver.run == b"", "nobody has said yet which run this is"
    former = published(world, 299, 2, FIRST)
    world.receiver.offered(former)
    world.run()
    assert world.receiver.version == 300 and world.receiver.run == FIRST.run, "an earlier one of the same run"
    world.catalogue = Catalogue()
    world.receiver.offered(published(world, number, 3, SECOND))
    world.run()
    assert world.loaded[-1][0].version == number and world.loaded[-1][1]["steps"] == 3
    world.receiver.offered(published(world, number + 1, 4, SECOND))
    world.run()
    assert world.receiver.version == number + 1 and world.receiver.refused == 0
    world.receiver.offered(former)
    world.run()
    assert world.receiver.refused == 1 and world.receiver.run == SECOND.run, "what was left does not come back"
    world.catalogue = Catalogue()
    world.receiver.offered(published(world, 301, 5, Life(FIRST.run, 7)))
    world.run()
    assert world.loaded[-1][0].version == 301, "unless its learner goes on with it"


def test_a_later_life_of_the_same_run_is_taken_though_its_numbers_are_smaller(world: World) -> None:
    """Its learner has lost its newest checkpoints. What is of the life before is not, nor its own earlier ones."""
    world.receiver.offered(published(world, 300, 1, FIRST))
    world.run()
    world.catalogue = Catalogue()
    for number, life, acting in ((3, 6, 3), (300, 5, 3), (2, 6, 3), (4, 6, 4)):
        world.receiver.offered(published(world, number, number, Life(FIRST.run, life)))
        world.run()
        assert world.receiver.version == acting


def test_an_order_is_for_versions_of_its_run(world: World) -> None:
    def order(serial: int, version: int, life: Life) -> Signed:
        order = Order(serial=serial, version=version, by="ada", reason="", given_unix_ns=0, run=life.run)
        return world.signer.sign(order)

    for version in (1, 2):
        world.receiver.offered(published(world, version, version, FIRST))
        world.run()
    world.receiver.offered(published(world, 1, 1, FIRST, order(9, 1, FIRST)))
    world.run()
    assert world.receiver.version == 1
    world.catalogue = Catalogue()
    for version in (1, 2):
        world.receiver.offered(published(world, version, 2 + version, SECOND))
        world.run()
    assert world.loaded[-1][1]["steps"] == 4, "the order was for another run's"
    world.receiver.offered(published(world, 1, 3, SECOND, order(2, 1, SECOND)))
    world.run()
    assert world.loaded[-1][1]["steps"] == 3, "one of this run is obeyed, whatever its number"


def spoilt(parcel: Parcel) -> Parcel:
    """The same with a byte changed: at its source, so that it comes damaged however often it is asked for."""
    content = bytearray(parcel.payload)
    content[-1] ^= 1
    return Parcel(parcel.info, memoryview(bytes(content)))


def test_a_parcel_that_comes_damaged_however_often_it_is_asked_for_is_given_up_for_another_way(world: World) -> None:
    states = chain(world, 2)
    world.receiver.offered(world.offer(0))
    world.run()
    difference = next(parcel for parcel in world.catalogue.parcels.values() if parcel.info.codec == "delta")
    world.catalogue.parcels[difference.info.id] = spoilt(difference)
    full = full_parcel(states[1], 1)
    world.catalogue.parcels |= {full.info.id: full}
    world.receiver.offered(world.offer(1))
    world.run(rounds=100)
    assert world.receiver.version == 1 and world.receiver.damaged == MOST_DAMAGED and world.receiver.refused == 1


def test_without_another_way_it_is_tried_again_when_a_session_begins(world: World) -> None:
    manifest, signed, parcel = full_version(random_weights(0), 1, world.signer)
    world.add(manifest, signed, spoilt(parcel))
    for _ in range(2):
        world.receiver.offered(world.offer(1))
        world.run(rounds=100)
        assert world.receiver.version == NO_VERSION and world.receiver.damaged == MOST_DAMAGED
    world.add(manifest, signed, parcel)
    world.receiver.offered(world.offer(1, greeting=True))
    world.run(rounds=100)
    assert world.receiver.version == 1


def test_what_was_gone_and_is_offered_again_is_asked_for_again(world: World) -> None:
    manifest, signed, parcel = full_version(random_weights(0), 1, world.signer)
    world.add(manifest, signed, parcel)
    offer = world.offer(1)
    world.catalogue.parcels.clear()
    world.receiver.offered(offer)
    world.run(rounds=100)
    assert world.receiver.version == NO_VERSION and not world.receiver.busy
    world.add(manifest, signed, parcel)
    world.receiver.offered(offer)
    world.run(rounds=100)
    assert world.receiver.version == 1


def many(number: int) -> dict[str, Array]:
    """Weights whose table of tensors is too long for a manifest."""
    rng = np.random.default_rng(number)
    return {f"layers.{n:04d}.attention.weight": rng.normal(size=(4, 4)).astype(np.float32) for n in range(1000)}


def test_a_table_of_tensors_that_travels_apart_comes_first_and_is_checked(world: World) -> None:
    states = [build_state(many(0))]
    states.append(build_state(states[0].tensors | {"layers.0007.attention.weight": np.ones((4, 4), np.float32)}))
    world.add(*version_of(states[0], 0, world.signer), full_parcel(states[0], 0), table_parcel(states[0], 0))
    difference = delta_parcel(0, states[0], 1, states[1])
    assert difference is not None
    world.add(*version_of(states[1], 1, world.signer), difference, table_parcel(states[1], 1))
    for version, state in enumerate(states):
        assert not world.catalogue.manifests["exact", version][0].entire
        before = world.sent_bytes
        world.receiver.offered(world.offer(version))
        world.run()
        manifest, loaded = world.loaded[-1]
        assert manifest.version == version and manifest.tensors == state.entries
        assert all(np.array_equal(loaded[name], array) for name, array in state.tensors.items())
    table_bytes = world.catalogue.manifests["exact", 1][0].table_bytes
    assert world.sent_bytes - before == difference.info.size_bytes + table_bytes, "the base is held"
    assert world.receiver.refused == 0


def test_a_table_that_is_not_what_was_signed_is_given_up_for_another(world: World) -> None:
    state = build_state(many(0))
    world.add(*version_of(state, 1, world.signer), full_parcel(state, 1))
    (lie, table) = table_parcel(build_state(many(1)), 1), table_parcel(state, 1)
    world.catalogue.parcels |= {lie.info.id: lie}
    world.receiver.offered(world.offer(1))
    world.run()
    assert world.receiver.refused == 1 and world.receiver.version == NO_VERSION
    world.catalogue.parcels |= {table.info.id: table}
    world.receiver.offered(world.offer(1))
    world.run()
    assert world.receiver.version == 1 and world.receiver.refused == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_full_parcel_of_another_size_than_its_tensors_leaves_what_acts_and_the_next_way_is_taken(
    world: World, apart: bool
) -> None:
    """While an earlier version is under way, whose parcel is not offered any more."""
    weights = many if apart else random_weights
    first, second = (build_state(weights(number)) for number in (1, 2))
    world.add(*version_of(first, 1, world.signer), full_parcel(first, 1), *([table_parcel(first, 1)] * apart))
    world.receiver.offered(world.offer(1))
    world.receiver.step()
    world.catalogue = Catalogue()
    parcel = full_parcel(second, 2)
    short = build_state(random_weights(3, rows=8))
    lie = full_parcel(State(second.form, short.entries, short.tensors, short.digest), 2)
    world.add(*version_of(second, 2, world.signer), lie, *([table_parcel(second, 2)] * apart))
    world.receiver.offered(world.offer(2))
    world.queue.clear()
    world.run()
    assert world.receiver.version == NO_VERSION and world.receiver.refused == 1 and not world.receiver.busy
    world.catalogue.parcels |= {parcel.info.id: parcel}
    world.receiver.offered(world.offer(2))
    world.run()
    assert world.receiver.version == 2


def test_a_version_that_comes_in_no_form_that_is_taken_is_refused(world: World) -> None:
    arrays, _ = convert(random_weights(0), "int8")
    world.add(*full_version(arrays, 1, world.signer, "int8"))
    world.receiver.offered(world.offer(1))
    assert world.receiver.refused == 1 and not world.receiver.busy
    world.forms = ("int8",)
    world.__post_init__()
    world.receiver.offered(world.offer(1))
    world.run()
    kept = world.receiver.held
    assert kept is not None
    world.forms = ("exact",)
    world.__post_init__()
    with pytest.raises(WireError, match="kept as int8"):
        world.receiver.start_from(kept)


def test_versions_only_grow_unless_a_person_orders_otherwise(world: World) -> None:
    chain(world, 4)
    for version in (3, 1, 0):
        world.receiver.offered(world.offer(version))
        world.run()
    assert [manifest.version for manifest, _ in world.loaded] == [3]
    world.receiver.offered(world.offer(1, order=order(new_signer(), 1, 1)))
    assert world.receiver.refused == 1, "an order that somebody else signed"
    world.receiver.offered(world.offer(1, order=order(world.signer, 1, 1)))
    world.run()
    assert world.receiver.version == 1
    world.receiver.offered(world.offer(3, order=order(world.signer, 1, 1)))
    world.receiver.offered(world.offer(3))
    world.run()
    assert world.receiver.version == 1, "the order stands"
    world.receiver.offered(world.offer(3, order=order(world.signer, 2, NO_VERSION)))
    world.run()
    world.receiver.offered(world.offer(1, order=order(world.signer, 1, 1)))
    world.run()
    assert world.receiver.version == 3, "an order that was taken back does not come again"


def test_what_somebody_else_signed_or_changed_is_refused(world: World) -> None:
    manifest, _, parcel = full_version(random_weights(0), 1, world.signer)
    stranger = new_signer()
    world.add(manifest, stranger.sign(manifest), parcel)
    world.receiver.offered(replace(world.offer(1), signer=stranger.public_key))
    assert world.receiver.refused == 1 and not world.queue
    signed = world.signer.sign(manifest)
    world.add(manifest, Signed(signed.body.replace(b"adapter", b"adaptor"), signed.signature), parcel)
    world.receiver.offered(world.offer(1))
    assert world.receiver.refused == 2 and not world.queue and world.receiver.version == NO_VERSION


def test_a_robot_without_a_key_trusts_the_first_that_the_gateway_names_and_no_other(world: World) -> None:
    world.add(*full_version(random_weights(0), 1, world.signer))
    trust = world.folder / "learner.verify"
    trust.unlink()
    trust_in_nobody(world)
    world.receiver.offered(world.offer(1))
    world.run()
    assert world.receiver.version == 1 and trust.exists()
    other = new_signer()
    world.add(*full_version(random_weights(1), 2, other))
    world.receiver.offered(replace(world.offer(2), signer=other.public_key))
    assert world.receiver.refused == 1 and world.receiver.version == 1


def trust_in_nobody(world: World) -> None:
    world.receiver = Receiver(Trust(world.folder / "learner.verify"), world.load, world.ask, clock=lambda: world.now_s)


def test_weights_that_the_policy_refuses_leave_what_acts_and_the_next_version_comes(world: World) -> None:
    states = chain(world, 3)
    world.receiver.offered(world.offer(0))
    world.run()
    world.refuses = True
    world.receiver.offered(world.offer(1))
    world.run()
    assert world.receiver.version == 0 and world.receiver.refused >= 1 and world.receiver.held is not None
    assert world.receiver.held.state.digest == states[0].digest
    world.refuses = False
    world.receiver.offered(world.offer(2))
    world.run()
    assert world.receiver.version == 2


def test_a_slow_link_brings_a_rounded_form_where_the_policy_allows_it(tmp_path: Path) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)}
    for forms, rate, chosen in (
        (("exact", "bf16", "int8"), 1e9, "exact"),
        (("exact", "bf16", "int8"), 2e5 / PATIENCE_S, "int8"),
        (("exact",), 2e5 / PATIENCE_S, "exact"),
    ):
        world = World(tmp_path, forms=forms, bytes_per_s=rate)  # type: ignore[arg-type]
        world.receiver._fetcher.rate = world.receiver._fetcher.rate.after(rate)
        for form in ("exact", "bf16", "int8"):
            arrays, _ = convert(weights, form)  # type: ignore[arg-type]
            world.add(*full_version(arrays, 1, world.signer, form))  # type: ignore[arg-type]
        world.receiver.offered(world.offer(1))
        world.run()
        manifest, loaded = world.loaded[-1]
        assert manifest.form == chosen
        assert loaded["w"].dtype == np.float32 and np.abs(loaded["w"] - weights["w"]).max() < 0.03


def test_descriptions_that_want_our_memory_are_ignored(world: World) -> None:
    manifest, signed, parcel = full_version(random_weights(0), 1, world.signer)
    for lie in (
        {"size_bytes": 1 << 33},
        {"grain_bytes": 1},
        {"crcs": b""},
        {"base": 5, "base_digest": b"x", "codec": "delta"},
        {"grain_bytes": -4},
    ):
        world.add(manifest, signed, Parcel(replace(parcel.info, **lie), parcel.payload))
        world.receiver.offered(world.offer(1))
        world.receiver.step()
        assert not world.queue and not world.receiver.busy


# Thousands of versions over a link that does everything wrong ---------------------------------------------------------


class Chaos:
    """Drops, repeats, delays, reorders and damages what goes to a receiver, restarts it, and hands it wrong bases."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.flying: list[tuple[WeightsGrains | WeightsGone | WeightsOffer, memoryview | None]] = []
        self.restarts = 0

    def step(self) -> None:
        world, rng = self.world, self.rng
        world.receiver.step()
        while world.queue:
            request = world.queue.popleft()
            if rng.random() > 0.05:
                for answer in answers(world.catalogue, request):
                    self.flying += [answer] * (2 if rng.random() < 0.05 else 1)
        if rng.random() < 0.1:
            rng.shuffle(self.flying)
        while self.flying and rng.random() < 0.9:
            message, payload = self.flying.pop(0)
            if rng.random() < 0.03:
                continue
            if isinstance(message, WeightsOffer):
                world.receiver.offered(message)
            else:
                world.receiver.arrived(message, self.spoilt(payload))
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
        held, world = self.world.receiver.held, self.world
        world.__post_init__()
        if held is not None and self.rng.random() < 0.5:
            world.receiver.start_from(held)
        self.restarts += 1


def since(base: int, version: int, states: Mapping[int, State]) -> Parcel | None:
    """What has changed since `base`; of that, nothing is changed back."""
    spans = [{entry.name: entry.digest for entry in states[number].entries} for number in range(base, version + 1)]
    names = {name for name in spans[0] if len({span[name] for span in spans}) > 1}
    return parts_parcel(base, states[base].digest, version, states[version], names)


def chaotic(world: World, versions: int, seed: int) -> None:
    rng, chaos = random.Random(seed), Chaos(world, seed)
    state = build_state(random_weights(0, rows=32))
    digests: dict[int, bytes] = {}
    earlier: dict[int, State] = {}
    for version in range(versions):
        share = rng.choice([0.001, 0.01, 0.3, 1.0])
        fresh = changed(state.tensors, share, version)
        new = build_state(fresh | ({"hidden.0.weight": state.tensors["hidden.0.weight"]} if rng.random() < 0.9 else {}))
        earlier[version] = new
        parcels = [delta_parcel(version - 1, state, version, new)] if version and rng.random() < 0.9 else []
        if not parcels or parcels[0] is None or rng.random() < 0.1:
            parcels.append(full_parcel(new, version))
        if rng.random() < 0.02 and version:  # a difference that claims a base which it does not have
            other = build_state(random_weights(version, rows=32))
            lie = delta_parcel(version - 1, other, version, new) or full_parcel(new, version)
            parcels.append(
                Parcel(replace(lie.info, base_digest=state.digest if lie.info.base >= 0 else b""), lie.payload)
            )
        if rng.random() < 0.1 and version:
            parcels.append(since(rng.randrange(max(0, version - 40), version), version, earlier))
            earlier = {number: state for number, state in earlier.items() if number >= version - 40}
        manifest, signed = version_of(new, version, world.signer)
        tables = [] if manifest.entire else [table_parcel(new, version)]
        world.add(manifest, signed, *tables, *[p for p in parcels if p is not None])
        digests[version] = new.digest
        world.catalogue.retain([version], version - 8)
        ahead = world.ahead(version, rng.choice([0, 1 << 20])) if world.receiver.held is not None else ()
        chaos.flying.append((world.offer(version, greeting=rng.random() < 0.05, ahead=ahead), None))
        chaos.flying += [answer for request in ahead for answer in answers(world.catalogue, request)]
        state = new
        for _ in range(rng.randrange(8)):
            chaos.step()
    for attempt in range(2000):
        if world.receiver.version == versions - 1:
            break
        if attempt % 50 == 0:
            chaos.flying.append((world.offer(versions - 1, greeting=True), None))
        chaos.step()
    assert world.receiver.version == versions - 1, "the newest arrives in the end"
    assert chaos.restarts >= versions // 500
    for manifest, arrays in world.loaded:
        loaded = build_state({name: array for name, array in arrays.items()})
        assert loaded.digest == digests[manifest.version]
    assert len(world.loaded) > versions // 10


@pytest.mark.parametrize("inline_bytes", [INLINE_TABLE_BYTES, 0])
def test_versions_through_chaos_are_digest_equal(
    world: World, inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tables of tensors travel apart."""
    monkeypatch.setattr("user_sys.weights.state.INLINE_TABLE_BYTES", inline_bytes)
    chaotic(world, 500, seed=1)


@pytest.mark.slow
def test_ten_thousand_versions_through_chaos_are_digest_equal(world: World) -> None:
    chaotic(world, 10_000, seed=2)
