"""A desk between a learner and robots that ask when they have room: nobody loses the version that is on the way."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from user_sys.codec import Array
from user_sys.gateway.weights import LAGGARDS, TIDY_S, WeightsDesk
from user_sys.gateway.write_pace import PERSIST_AGAIN_S, PERSIST_BYTES, PERSIST_LATEST_S, PERSIST_S
from user_sys.messages import (
    WeightsApplied,
    WeightsGone,
    WeightsGrains,
    WeightsMessage,
    WeightsOffer,
    WeightsReceived,
    WeightsRequest,
)
from user_sys.tunnel.wire import AnyMessage, Envelope, Payload
from user_sys.weights.catalogue import Catalogue, Way, cheapest
from user_sys.weights.fetch import STALL_S
from user_sys.weights.offers import SILENT_S, fitting_offer
from user_sys.weights.parcel import GRAIN_BYTES, Parcel, delta_parcel, full_parcel, table_parcel
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.records import NO_VERSION, TABLE, UNNAMED, Form, Life, Manifest, Order, ParcelInfo
from user_sys.weights.serve import FETCHED_S, answers
from user_sys.weights.shelf import Shelf, newest
from user_sys.weights.signing import Signer, new_signer
from user_sys.weights.state import State, build_state, describe


def arrays(number: int) -> dict[str, Array]:
    return {"w": np.random.default_rng(number).normal(size=40_000).astype(np.float32)}


def nudged(state: State, number: int) -> State:
    """The same but for a few values."""
    fresh = state.tensors["w"].copy()
    fresh[number::1000] += 1
    return build_state({"w": fresh})


class Counter:
    """A desk whose thread is the test's own, and a learner that answers from a catalogue.

    Attributes:
        asked: the desk's requests that nobody has answered.
        told: what robots were sent.
    """

    def __init__(self, folder: Path, signer: Signer, kept: int = 2) -> None:
        self.signer, self.learner = signer, Catalogue()
        self.now_s, self.asked, self.told = 0.0, list[WeightsRequest](), list[tuple[str, AnyMessage]]()
        self.shelf = Shelf(folder)
        self.desk = WeightsDesk(self.shelf, self.send, kept, clock=lambda: self.now_s)
        self.desk.learner_opened("learner")
        self.round()

    def send(self, name: str, message: AnyMessage, payload: Payload | None) -> bool:
        if name != "learner":
            self.told.append((name, message))
        elif isinstance(message, WeightsRequest):
            self.asked.append(message)
        return True

    def offer(self, version: int, state: State, *parcels: Parcel, life: Life = UNNAMED) -> None:
        """The learner has a version, and nothing else any more but what leads there."""
        manifest = describe(state, version, version, -life.number, (0.0, 0.0), life)
        signed = self.signer.sign(manifest)
        self.learner.manifests["exact", version] = (manifest, signed)
        self.learner.parcels |= {parcel.info.id: parcel for parcel in parcels}
        self.learner.retain([version], version - 1)
        infos = self.learner.infos()
        offer = fitting_offer([signed], infos, ["exact"], version, signer=self.signer.public_key)
        self.desk.received("learner", offer, None)
        self.round()

    def full(self, version: int, life: Life = UNNAMED) -> State:
        state = build_state(arrays(version))
        self.offer(version, state, full_parcel(state, version), life=life)
        return state

    def round(self) -> None:
        """The desk takes in what has come, and asks."""
        while not self.desk._inbox.empty():
            self.desk._take_in(0.0)
            self.desk._collect()
        self.desk._fetcher.pump()

    def run_for(self, seconds: float) -> None:
        """The desk does what it has to, and the learner answers nothing."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + max(1e-6, self.desk._go_on(0.0)))

    def answer(self, requests: int = 10_000, keep: bool = True) -> None:
        """The learner answers, until nothing is asked any more, and what came is kept, where it is time for that."""
        while self.asked and requests:
            for message, payload in answers(self.learner, self.asked.pop(0)):
                self.desk.received("learner", message, payload)
            self.now_s += 1e-3
            self.round()
            requests -= 1
        if keep and self.desk._unkept.waits:
            self.desk._persist()

    def grain(self, name: str, parcel: Parcel, number: int) -> bool:
        """Whether a robot that asks for a grain gets it."""
        self.told.clear()
        self.desk.received(name, WeightsRequest(parcel=parcel.info.id, first=number, count=1), None)
        ((_, message),) = self.told
        assert isinstance(message, WeightsGrains | WeightsGone)
        return isinstance(message, WeightsGrains)

    def offered(self, name: str) -> tuple[int, WeightsOffer]:
        """What a robot that comes in is offered."""
        self.told.clear()
        self.desk.robot_opened(name)
        ((_, offer),) = self.told
        assert isinstance(offer, WeightsOffer)
        return self.signer.verifier.open(offer.manifests[0], Manifest).version, offer


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "weights", new_signer())


def test_a_version_that_a_slow_robot_is_fetching_stays_until_it_has_it(counter: Counter) -> None:
    first = full_parcel(counter.full(1), 1)
    counter.answer()
    for version in range(2, 12):
        assert counter.grain("slow", first, version % first.info.grains)
        counter.full(version)
        counter.answer()
    assert counter.grain("slow", first, first.info.grains - 1)
    assert len(counter.desk._catalogue.parcels) == 3, "that one, and as many as are kept"
    counter.now_s += 2 * FETCHED_S
    counter.full(12)
    counter.answer()
    assert not counter.grain("slow", first, 0), "nobody asked for it for long"


def test_the_differences_to_a_version_that_is_being_fetched_stay_as_well(counter: Counter) -> None:
    state = counter.full(1)
    first, second = full_parcel(state, 1), delta_parcel(1, state, 2, newer := nudged(state, 2))
    counter.answer()
    assert second is not None
    counter.offer(2, newer, second)
    counter.answer()
    assert counter.grain("slow", first, 0), "it aims at the second"
    for version in range(3, LAGGARDS + 8):
        counter.full(version)
        counter.answer()
    assert counter.grain("slow", first, 1) and counter.grain("slow", second, 0)


def waits(state: State, version: int, room_bytes: int = 1 << 20) -> WeightsApplied:
    return WeightsApplied(robot="one", version=version, seconds=0.1, digest=state.digest, ahead_bytes=room_bytes)


def test_a_robot_that_waits_gets_the_difference_with_its_offer_and_another_only_its_offer(counter: Counter) -> None:
    state = counter.full(1)
    counter.answer()
    for name in ("one", "busy"):
        counter.desk.robot_opened(name)
    counter.desk.received("one", waits(state, 1), None)
    counter.told.clear()
    parcel = delta_parcel(1, state, 2, newer := nudged(state, 2))
    assert parcel is not None
    counter.offer(2, newer, parcel)
    counter.answer()
    told = {name: [message for to, message in counter.told if to == name] for name in ("one", "busy")}
    offer, *grains = told["one"]
    assert isinstance(offer, WeightsOffer) and [request.parcel for request in offer.ahead] == [parcel.info.id]
    assert grains and all(isinstance(m, WeightsGrains) and m.parcel == parcel.info.id for m in grains)
    (plain,) = told["busy"]
    assert isinstance(plain, WeightsOffer) and not plain.ahead


def test_nothing_more_comes_unasked_until_a_robot_has_said_again_that_it_waits(counter: Counter) -> None:
    state = counter.full(1)
    counter.answer()
    counter.desk.robot_opened("one")
    counter.desk.received("one", waits(state, 1), None)
    for version in (2, 3):
        counter.told.clear()
        counter.full(version)
        counter.answer()
        assert any(isinstance(message, WeightsGrains) for _, message in counter.told) == (version == 2)
    counter.desk.received("one", waits(state, 1), None)
    counter.desk.closed("one")
    _, offer = counter.offered("one")
    assert not offer.ahead, "another session"


def test_no_more_comes_unasked_than_a_robot_lets_come(counter: Counter) -> None:
    state = build_state({"w": np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)})
    counter.offer(1, state, full_parcel(state, 1))
    counter.answer()
    counter.desk.robot_opened("one")
    for version, room_bytes, grains in ((2, GRAIN_BYTES - 1, 0), (3, 3 * GRAIN_BYTES, 3), (4, 1 << 40, 16)):
        counter.desk.received("one", waits(state, version - 1, room_bytes), None)
        counter.told.clear()
        state = build_state({"w": np.random.default_rng(version).normal(size=1 << 20).astype(np.float32)})
        counter.offer(version, state, full_parcel(state, version))
        counter.answer()
        offer = counter.told[0][1]
        assert isinstance(offer, WeightsOffer) and sum(request.count for request in offer.ahead) == grains


def test_a_version_is_kept_when_that_is_due_and_no_later(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's governor takes it for over by then."""
    counter.full(1)
    counter.answer()
    desk, waits = counter.desk, list[float]()
    desk._unkept.came(1)
    counter.now_s += PERSIST_S - 0.1

    def take_in(wait_s: float) -> None:
        waits.append(wait_s)
        counter.now_s += wait_s
        if len(waits) == 3:
            desk._stopping.set()

    monkeypatch.setattr(desk, "_take_in", take_in)
    desk._run()
    assert waits == pytest.approx([0.0, 0.1, STALL_S]) and not desk._unkept.waits


def test_what_a_newer_version_overtakes_before_it_is_kept_is_never_written(counter: Counter) -> None:
    counter.full(1)
    counter.answer()
    for version in range(2, 7):
        counter.full(version)
        counter.answer(keep=version == 6)
    assert counter.shelf.open().versions() == [1, 6]


@pytest.mark.parametrize(("values", "most"), [(10, 3), (1 << 20, 22)])
def test_versions_that_follow_upon_each_other_are_written_together_unless_they_are_large(
    counter: Counter, values: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write takes time from the learner beside it, and what waits for one takes memory."""
    written_s, keep = [0.0], counter.shelf.keep

    def kept(catalogue: Catalogue, signer: bytes = b"") -> None:
        keep(catalogue, signer)
        written_s.append(counter.now_s)

    monkeypatch.setattr(counter.shelf, "keep", kept)
    for version in range(1, 101):
        state = build_state({"w": np.full(values, version, np.float32)})
        counter.offer(version, state, full_parcel(state, version))
        counter.answer(keep=False)
        counter.run_for(0.1)
        assert counter.desk._unkept.waiting_bytes <= PERSIST_BYTES + PERSIST_S / 0.1 * state.size_bytes
        assert len(counter.desk._catalogue.parcels) <= 2 + TIDY_S / 0.1 + 1
    last_s = counter.now_s - 0.1
    counter.run_for(2.0)
    from_the_first_s = PERSIST_LATEST_S + 0.1
    assert len(written_s) - 1 <= most and max(np.diff(written_s)) <= from_the_first_s
    found = newest(counter.shelf.open())
    assert found is not None and found[0].version == 100 and written_s[-1] <= last_s + PERSIST_S + 0.01


def test_a_disk_that_was_full_is_tried_again_later(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    counter.full(1)
    counter.answer()

    def write(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as full:
        full.setattr("user_sys.weights.shelf.replace_durably", write)
        counter.full(2)
        counter.answer()
    assert counter.shelf.open().versions() == [1] and counter.offered("one")[0] == 2
    assert counter.desk._unkept.due_s(0.0) == pytest.approx(PERSIST_AGAIN_S)
    counter.desk._persist()
    assert counter.shelf.open().versions() == [1, 2]


def test_what_robots_that_hold_the_same_are_told_is_looked_for_once(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a hundred robots that get twenty versions a second take half a processor of the gateway's."""
    looked, calls = list[int](), list[int]()

    def look(infos: Iterable[ParcelInfo], form: Form, target: int, held: Mapping[int, bytes]) -> Way | None:
        looked.append(target)
        return cheapest(infos, form, target, held)

    for place in ("offers", "serve"):
        monkeypatch.setattr(f"user_sys.weights.{place}.cheapest", look)
    state = counter.full(1)
    counter.answer()
    for version, names in ((2, ("one",)), (3, tuple(f"robot-{n}" for n in range(20)))):
        for name in names:
            counter.desk.robot_opened(name)
            counter.desk.received(name, waits(state, version - 1), None)
        parcel = delta_parcel(version - 1, state, version, newer := nudged(state, version))
        assert parcel is not None
        looked.clear()
        counter.offer(version, newer, parcel)
        counter.answer(keep=False)
        calls.append(len(looked))
        counter.desk._persist()
        state = newer
        counter.desk.closed("one")
    assert calls[0] == calls[1]


def test_the_link_of_a_robot_that_says_nothing_is_not_filled_with_news(counter: Counter) -> None:
    """At a megabit a second news of twenty versions a second would leave next to no room for weights."""

    def publish(*versions: int) -> None:
        for version in versions:
            counter.full(version)
            counter.answer()

    def told() -> list[int]:
        offers = [message for name, message in counter.told if name == "slow" and isinstance(message, WeightsOffer)]
        return [counter.signer.verifier.open(offer.manifests[0], Manifest).version for offer in offers]

    publish(1)
    counter.desk.robot_opened("slow")
    publish(*range(2, 10))
    assert told() == [1, 2]
    counter.desk.received("slow", WeightsRequest(parcel=b"any", first=0, count=1), None)
    assert told() == [1, 2, 9], "it has read what it was told: now the newest"
    publish(10, 11)
    assert told() == [1, 2, 9, 10]
    counter.now_s += SILENT_S
    counter.desk._tell_overdue()
    assert told() == [1, 2, 9, 10, 11], "it may not want what it was offered"
    publish(12)
    counter.desk.received("slow", WeightsApplied(robot="slow", version=11, seconds=0.1), None)
    assert told()[-1] == 12


def test_what_the_learner_has_no_more_is_given_up_for_what_it_offers_now(counter: Counter) -> None:
    counter.full(1)
    counter.answer(requests=1)
    assert counter.asked, "the first is on its way"
    counter.full(2)
    counter.answer()
    assert counter.desk.version == 2 and counter.desk._fetcher.wanted == ()


def test_a_difference_is_fetched_for_robots_and_the_full_parcel_beside_it_for_latecomers(counter: Counter) -> None:
    state = counter.full(1)
    counter.answer()
    parcel = delta_parcel(1, state, 2, newer := nudged(state, 2))
    assert parcel is not None
    counter.offer(2, newer, parcel, full_parcel(newer, 2))
    assert counter.asked[0].parcel == parcel.info.id, "robots that have the first wait for it"
    counter.answer()
    assert sorted(info.codec for info in counter.desk._catalogue.infos() if info.version == 2) == ["delta", "full"]


def test_what_latecomers_need_holds_up_no_newer_version_and_comes_to_its_end(counter: Counter) -> None:
    """A full parcel of a large policy takes a relay on a slow link longer than many a difference."""
    state = counter.full(1)
    counter.answer()
    fulls = list[Parcel]()
    for version in range(2, 8):
        parcel = delta_parcel(version - 1, state, version, state := nudged(state, version))
        assert parcel is not None
        fulls.append(full_parcel(state, version))
        counter.offer(version, state, parcel, *fulls[-1:] if version in (2, 6) else ())
        counter.learner.parcels |= {fulls[0].info.id: fulls[0]}
        assert parcel.info.id in [request.parcel for request in counter.asked]
        others = [request for request in counter.asked if request.parcel != parcel.info.id]
        counter.asked[:] = [request for request in counter.asked if request.parcel == parcel.info.id]
        counter.answer(keep=False)
        assert counter.desk.version == version, "while the full parcel is under way"
        counter.asked[:] = others
    assert {request.parcel for request in counter.asked} == {fulls[0].info.id}
    counter.answer(requests=len(counter.asked), keep=False)
    assert counter.desk.has(fulls[0].info.id) and {request.parcel for request in counter.asked} == {fulls[4].info.id}


def many(number: int, values: int = 4) -> State:
    """So many tensors that the table of them travels apart."""
    return build_state({f"layers.{n:04d}.weight": np.full(values, number + n, np.float32) for n in range(1000)})


@pytest.mark.parametrize("apart", [True, False])
def test_what_has_come_of_a_version_stays_until_the_rest_is_here(counter: Counter, apart: bool) -> None:
    """A table and a full parcel; or a full parcel and a difference, of whose base nobody has told."""
    state = many(1, values=40) if apart else build_state(arrays(1))
    parcels: list[Parcel | None] = [full_parcel(state, 1), table_parcel(state, 1) if apart else None]
    if not apart:
        state, former = nudged(state, 2), state
        parcels.append(delta_parcel(1, former, 2, state))
    counter.offer(1 if apart else 2, state, *(parcel for parcel in parcels if parcel is not None))
    came = list[tuple[bytes, int]]()
    while counter.asked and len(came) < 100:
        came.append((counter.asked[0].parcel, counter.asked[0].first))
        counter.answer(requests=1, keep=False)
        counter.now_s += 2 * TIDY_S
    assert len(came) == len(set(came)) > 2 and counter.desk.version == (1 if apart else 2)


def test_when_the_table_of_a_version_is_gone_so_is_all_of_it(counter: Counter) -> None:
    """The desk turns to the next one at once; the full parcel without it would be of no use."""
    states = [many(1, values=400), many(2, values=400)]
    for version, state in enumerate(states, 1):
        counter.offer(version, state, full_parcel(state, version), table_parcel(state, version))
    asked, counter.asked[:] = list(counter.asked), []
    assert {request.parcel for request in asked}.isdisjoint(counter.learner.parcels), "all of the first version"
    counter.asked[:] = asked[:1]
    counter.answer(requests=1, keep=False)
    assert counter.asked and {request.parcel for request in counter.asked} <= counter.learner.parcels.keys()


def test_tables_that_travel_apart_are_handed_on_with_their_versions_and_given_up_with_them(counter: Counter) -> None:
    def tables() -> list[int]:
        return sorted(info.version for info in counter.desk._catalogue.infos() if info.codec == TABLE)

    for version in range(1, 8):
        state = many(version)
        counter.offer(version, state, full_parcel(state, version), table_parcel(state, version))
        assert counter.desk.version == version - 1 or version == 1, "not before the table is here"
        counter.answer()
        found, offer = counter.offered("one")
        assert found == version and [info.version for info in offer.parcels if info.codec == TABLE] == [version]
    assert tables() == counter.desk._catalogue.versions() and len(tables()) == 2, "as many as are kept"
    again = Counter(counter.shelf.folder, counter.signer)
    assert again.offered("one")[0] == 7
    kept = newest(Shelf(counter.shelf.folder).open())
    assert kept is not None and kept[1].digest == state.digest


def test_while_an_older_version_is_ordered_what_is_kept_does_not_grow(counter: Counter) -> None:
    state = counter.full(1)
    counter.answer()
    counter.shelf.give(counter.signer.sign(order(1)))
    counter.desk.look_for_order()
    for version in range(2, LAGGARDS + 20):
        parcel = delta_parcel(version - 1, state, version, newer := nudged(state, version))
        assert parcel is not None
        counter.offer(version, newer, parcel, full_parcel(newer, version))
        counter.answer()
        state = newer
    assert counter.desk.version == 1
    assert len(counter.desk._catalogue.parcels) == len(list(counter.shelf.folder.glob("*.parcel"))) <= LAGGARDS + 4


def order(version: int, life: Life = UNNAMED, serial: int = 1) -> Order:
    return Order(serial=serial, version=version, by="ada", reason="it shakes", given_unix_ns=0, run=life.run)


def test_a_gateway_that_starts_again_stands_by_the_order(counter: Counter) -> None:
    for version in (1, 2):
        counter.full(version)
        counter.answer()
    counter.shelf.give(counter.signer.sign(order(1)))
    counter.desk.look_for_order()
    again = Counter(counter.shelf.folder, counter.signer)
    version, offer = again.offered("one")
    assert version == again.desk.version == 1 and offer.order is not None


def test_what_is_ordered_is_not_given_up_before_the_gateway_has_looked(counter: Counter) -> None:
    for version in (1, 2):
        counter.full(version)
        counter.answer()
    counter.shelf.give(counter.signer.sign(order(1)))
    counter.full(3)
    counter.answer()  # of two that are kept the first would be given up now
    assert counter.offered("one")[0] == 1


def test_an_order_for_what_is_not_there_is_handed_to_nobody(counter: Counter) -> None:
    """Robots that obeyed it would take nothing any more."""
    counter.full(1)
    counter.answer()
    counter.shelf.give(counter.signer.sign(order(77)))
    counter.desk.look_for_order()
    version, offer = counter.offered("one")
    assert version == 1 and offer.order is None


def test_of_an_order_for_what_is_not_there_it_is_told_once(counter: Counter, caplog: pytest.LogCaptureFixture) -> None:
    counter.full(1)
    counter.answer()
    counter.shelf.give(counter.signer.sign(order(77)))
    counter.desk.look_for_order()
    for version in (2, 3):
        counter.full(version)
        counter.answer()
    assert caplog.text.count("weights.order_ignored version=77") == 1
    counter.shelf.give(counter.signer.sign(order(78, serial=2)))
    counter.desk.look_for_order()
    assert caplog.text.count("weights.order_ignored version=78") == 1


def test_an_order_that_somebody_else_signed_is_handed_to_nobody(counter: Counter) -> None:
    for version in (1, 2):
        counter.full(version)
        counter.answer()
    counter.shelf.give(new_signer().sign(order(1)))
    counter.desk.look_for_order()
    version, offer = counter.offered("one")
    assert version == 2 and offer.order is None


def test_what_has_rotted_on_the_disk_is_handed_to_nobody_and_fetched_anew(counter: Counter) -> None:
    parcel = full_parcel(state := counter.full(1), 1)
    counter.answer()
    again = Counter(counter.shelf.folder, counter.signer)
    again.offer(1, state, parcel)
    assert not again.asked and again.grain("one", parcel, 0), "it is there"
    (path,) = again.shelf.folder.glob("*.parcel")
    with open(path, "r+b") as file:
        file.seek(10)
        file.write(bytes([parcel.payload[10] ^ 1]))
    assert not again.grain("one", parcel, 0), "not what was described"
    again.desk._collect()
    again.round()
    assert again.asked, "the learner has it still"
    again.answer()
    assert again.desk.version == 1 and again.grain("one", parcel, 0)
    assert Shelf(again.shelf.folder).open().versions() == [1], "and so has the disk"


def test_a_parcel_that_the_learner_hands_out_damaged_is_given_up_for_another(counter: Counter) -> None:
    state = build_state(arrays(1))
    good = full_parcel(state, 1)
    content = bytearray(good.payload)
    content[0] ^= 1
    counter.offer(1, state, Parcel(good.info, memoryview(bytes(content))))
    counter.answer()
    assert not counter.asked and counter.desk.version == NO_VERSION
    counter.full(2)
    counter.answer()
    assert counter.desk.version == 2


FIRST, SECOND = Life(b"first", 5), Life(b"second", 6)


def test_a_relay_forgets_the_run_before_and_its_order(counter: Counter) -> None:
    for version in (7, 8):
        counter.full(version, FIRST)
        counter.answer()
    counter.shelf.give(counter.signer.sign(order(7, FIRST)))
    counter.desk.look_for_order()
    assert counter.desk.version == 7
    counter.learner, counter.signer = Catalogue(), new_signer()
    counter.full(1, SECOND)
    counter.answer()
    version, offer = counter.offered("one")
    assert version == 1 and offer.order is None and counter.shelf.order() is None
    assert offer.signer == counter.signer.public_key
    assert Shelf(counter.shelf.folder).open().versions() == [1]


def test_a_learner_that_lost_its_newest_checkpoints_is_heard_though_its_numbers_are_smaller(counter: Counter) -> None:
    for version in (7, 8):
        counter.full(version, FIRST)
        counter.answer()
    counter.learner = Catalogue()
    counter.full(3, Life(FIRST.run, FIRST.number + 1))
    counter.answer()
    assert counter.offered("one")[0] == 3


def test_an_order_of_the_next_run_may_be_there_before_its_weights(counter: Counter) -> None:
    """A relay takes an order down before the offer that it came with; its number is of another clock, perhaps."""
    for version in (1, 2):
        counter.full(version, FIRST)
        counter.answer()
    counter.shelf.give(counter.signer.sign(order(1, FIRST, serial=9)))
    counter.desk.look_for_order()
    counter.shelf.give(counter.signer.sign(order(1, SECOND, serial=3)))
    counter.desk.look_for_order()
    assert counter.desk.version == 2, "it says nothing of this run's"
    counter.learner = Catalogue()
    for version in (1, 2):
        counter.full(version, SECOND)
        counter.answer()
    version, offer = counter.offered("one")
    assert version == 1 and offer.order is not None
    assert counter.signer.verifier.open(offer.manifests[0], Manifest).run == SECOND.run


class Slow:
    """A gateway that asks for a grain now and then."""

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
    snapshot = publisher._next()
    assert snapshot is not None
    publisher._bring_out(snapshot)


def test_a_learner_fills_no_link_with_offers() -> None:
    """Those of twenty versions a second would leave a slow one no room for weights."""

    def offered() -> list[int]:
        return [signer.verifier.open(offer.manifests[0], Manifest).version for offer in link.offers]

    link, signer, now_s = Slow(), new_signer(), 0.0
    publisher = Publisher(link, signer, PublishConfig(), clock=lambda: now_s)
    for version in range(1, 6):
        publish(publisher, version)
    assert offered() == [1, 2]
    now_s = SILENT_S
    publisher._offer_if_due()
    assert offered() == [1, 2, 5], "it may not want what it was offered"
    publish(publisher, 6)
    assert offered() == [1, 2, 5]
    publisher._take(Envelope(WeightsReceived(version=5)))
    assert offered() == [1, 2, 5, 6]


def test_whoever_asks_for_what_is_gone_hears_of_the_newest_which_stays_until_it_is_asked_for() -> None:
    link = Slow()
    publisher = Publisher(link, new_signer(), PublishConfig())
    publisher._take(Envelope(WeightsRequest(parcel=b"of an earlier life", first=0, count=1)))
    assert isinstance(link.answers[-1], WeightsGone) and not link.offers
    publish(publisher, 1)
    (first,) = link.offers[0].parcels
    for version in range(2, 5):
        publish(publisher, version)
    for grain in range(2):
        publisher._take(Envelope(WeightsRequest(parcel=first.id, first=grain, count=1)))
        assert isinstance(link.answers[-1], WeightsGone)
    (newest,) = link.offers[-1].parcels
    assert newest.version == 4
    for version in range(5, 8):
        publish(publisher, version)
    publisher._take(Envelope(WeightsRequest(parcel=newest.id, first=0, count=1)))
    assert isinstance(link.answers[-1], WeightsGrains)


def test_the_learner_hands_a_version_out_until_a_slow_gateway_has_it() -> None:
    link = Slow()
    publisher = Publisher(link, new_signer(), PublishConfig())
    for version in range(1, 5):
        publish(publisher, version)
        (full,) = (info for info in link.offers[0].parcels)
        publisher._take(Envelope(WeightsRequest(parcel=full.id, first=0, count=1)))
        assert isinstance(link.answers[-1], WeightsGrains)
    assert {parcel.info.version for parcel in publisher._catalogue.parcels.values()} == {1, 4}
    assert publisher._newest == 4 > NO_VERSION


def test_a_full_parcel_that_is_fetched_beside_newer_versions_stays_to_its_end() -> None:
    link = Slow()
    publisher = Publisher(link, new_signer(), PublishConfig())
    publish(publisher, 1)
    (first,) = link.offers[0].parcels
    for version in range(2, 6):
        for (info,) in (link.offers[-1].parcels, link.offers[0].parcels):
            publisher._take(Envelope(WeightsRequest(parcel=info.id, first=0, count=1)))
            assert isinstance(link.answers[-1], WeightsGrains)
        publish(publisher, version)
    publisher._take(Envelope(WeightsRequest(parcel=first.id, first=1, count=first.grains - 1)))
    publish(publisher, 6)
    assert 1 not in {parcel.info.version for parcel in publisher._catalogue.parcels.values()}
