"""Credit, bandwidth limits, back-off and the coalescing queue."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tunnel_kit import chunk

from hal.pacing import Backoff, TokenBucket
from hal.resource import Kind, ResourceRecord
from user_sys.config import build
from user_sys.edge.outbox import Outbox
from user_sys.errors import ConfigError, WireError
from user_sys.messages import (
    ChunkAck,
    ChunkOffer,
    ChunkRefusal,
    CreditGrant,
    DevicesReport,
    MetricsReport,
    OperatorReply,
    WeightsOffer,
)
from user_sys.tunnel import connection
from user_sys.tunnel.connection import INITIAL_WINDOW_BYTES, ChunkSender, PendingChunk
from user_sys.tunnel.flow_control import (
    MAX_QUEUED_BYTES,
    CoalescingQueue,
    ReceiveWindow,
    SendQueue,
)
from user_sys.tunnel.limits import MAX_CHUNK_BYTES, ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import Envelope, Payload, encode_envelope

LIMITS = ChannelLimits(window_messages=8, window_bytes=1000, queue_messages=16)


@pytest.mark.parametrize(
    "setting",
    [
        {"pipe_messages": 0},
        {"max_message_bytes": MAX_CHUNK_BYTES},
        {"heartbeat_s": 0},
        {"weights": {"bytes_per_s": -1}},
        {"backoff_min_s": 2, "backoff_max_s": 1},
    ],
)
def test_limits_that_allow_no_message_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match="pipe_messages|max_message_bytes|heartbeat_s|weights.bytes_per_s|backoff_min_s"
    ):
        build(TunnelLimits, setting, "tunnel")


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3)), max_size=200))
def test_sender_within_its_credit_is_never_refused_or_stuck(steps: list[tuple[int, int]]) -> None:
    sender, window = SendQueue(LIMITS), ReceiveWindow(LIMITS)
    waiting: list[int] = []
    for size, taken in steps:
        grant = window.next_grant()
        if grant is not None:
            window.mark_granted(grant)
            sender.add_credit(grant)
        if sender.can_send():
            sender.send(Envelope(ChunkOffer(sequence=0), bytes(size)), lambda frames: True)
            window.charge(size)
            waiting.append(size)
        else:
            assert waiting, "who may not send has something under way"
        assert len(waiting) <= LIMITS.window_messages
        assert sum(waiting) < LIMITS.window_bytes + 2001
        for size in waiting[:taken]:
            window.release(1, size)
        del waiting[:taken]


def test_sender_beyond_its_credit_is_refused() -> None:
    window = ReceiveWindow(LIMITS)
    with pytest.raises(WireError, match="window of 8"):
        window.charge(1)
    grant = window.next_grant()
    assert grant is not None
    window.mark_granted(grant)
    for _ in range(8):
        window.charge(1)
    with pytest.raises(WireError, match="window of 8"):
        window.charge(1)


def test_bandwidth_limit_holds_on_average() -> None:
    now = [0.0]
    bucket = TokenBucket(1e6, 250_000, clock=lambda: now[0])
    sent = 0
    while now[0] < 10:
        wait_s = bucket.wait_s()
        if wait_s > 0:
            now[0] += wait_s
            continue
        bucket.consume(3_000_000 if sent == 0 else 100_000)
        sent += 3_000_000 if sent == 0 else 100_000
    assert sent == pytest.approx(10e6, rel=0.1)


def test_slow_channel_keeps_order_and_newest_states() -> None:
    outlet, sent = SendQueue(LIMITS), list[Payload]()
    for count in range(4):
        outlet.put(Envelope(MetricsReport(node="n", count=count, scalars={})))
    assert not outlet.flush(lambda frames: sent.append(frames[0]) is None) and not sent, "no credit, nothing sent"
    grant = ReceiveWindow(LIMITS).next_grant()
    assert grant is not None
    outlet.add_credit(grant)
    assert outlet.flush(lambda frames: False), "libzmq is full"
    assert len(outlet) == 4
    outlet.flush(lambda frames: sent.append(frames[0]) is None)
    assert len(sent) == 4 and len(outlet) == 0
    for _ in range(LIMITS.queue_messages):
        assert outlet.put(Envelope(MetricsReport(node="n", count=4, scalars={})))
    assert not outlet.put(Envelope(MetricsReport(node="n", count=4, scalars={})))
    assert outlet.metrics.rejected == 1


def test_reports_of_a_long_outage_leave_room_for_the_next_message() -> None:
    queue, camera = SendQueue(LIMITS), ResourceRecord(kind=Kind.CAMERA, name="a/b", model="c", node="a")
    for number in range(100):
        for node in ("panda-0", "relay"):
            assert queue.put(Envelope(MetricsReport(node=node, scalars={"number": float(number)})))
        assert queue.put(Envelope(DevicesReport(records=(camera,) * (number % 2))))
    for count in range(1, 4):
        assert queue.put(Envelope(MetricsReport(node="learner", count=count, scalars={})))
    messages = [item.message for _ in range(len(queue)) if (item := queue.get_nowait())]
    metrics = [(each.node, each.count) for each in messages if isinstance(each, MetricsReport)]
    assert metrics == [("panda-0", 0), ("relay", 0), ("learner", 1), ("learner", 2), ("learner", 3)]
    assert [each.records for each in messages if isinstance(each, DevicesReport)] == [(camera,)]


def test_refused_chunk_makes_room_for_the_next(tmp_path: Path) -> None:
    with Outbox.open(tmp_path) as outbox:
        for index in range(3):
            outbox.append(chunk(index, floats=INITIAL_WINDOW_BYTES // 10))
        sender, queue, sent = ChunkSender(outbox), SendQueue(ChannelLimits()), list[Payload]()
        queue.add_credit(CreditGrant(messages=64, size_bytes=1 << 24))
        for number in range(3):
            for _ in range(3):
                sender.send_pending(queue, lambda frames: sent.append(frames[0]) is None)
            assert len(sent) == 1 + number, "one large chunk is in flight"
            sender.on_reply(ChunkRefusal(sequence=outbox.next_sequence - 3 + number, reason="damaged"))


@dataclass
class Chunks:
    """A source of `recorded` chunks of one size."""

    size_bytes: int
    recorded: int = 0
    done: int = 0

    def __len__(self) -> int:
        return self.recorded - self.done

    def pending(self, after_sequence: int) -> Iterator[PendingChunk]:
        return (PendingChunk(each, bytes(self.size_bytes)) for each in range(after_sequence + 1, self.recorded))

    def acknowledge(self, sequence: int) -> None:
        self.done = sequence + 1

    def set_aside(self, sequence: int, reason: str) -> None:
        raise AssertionError(reason)

    def set_on_append(self, on_append: Callable[[], None] | None) -> None:
        pass


class ChunkLink:
    """A sender of chunks, a link with a queue, and a gateway that syncs chunks in groups. Time is simulated.

    Attributes:
        round_trip_s, sync_s: of later chunks.
        longest_wait_s: the longest time that a byte waited for chunks before it, since a test has reset it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunks: Chunks, bytes_per_s: float) -> None:
        self.now_s, self.longest_wait_s, self.sync_s = 0.0, 0.0, 0.0
        monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.round_trip_s = 0.05
        self.chunks, self._bytes_per_s, self._sender = chunks, bytes_per_s, ChunkSender(chunks)
        self._queue = SendQueue(ChannelLimits(window_messages=1 << 20))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._sequences = itertools.count(), itertools.count()
        self._free_s, self._arrived, self._synced, self._syncing = 0.0, -1, -1, False

    def run(self, duration_s: float, record_each_s: float = 0.0) -> None:
        """Sends for a time, and records a chunk each period if it is not zero."""
        end_s = self.now_s + duration_s
        for number in range(int(duration_s / record_each_s) if record_each_s else 1):
            self._at(number * record_each_s, self._record if record_each_s else self._send)
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = end_s

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), event))

    def _record(self) -> None:
        self.chunks.recorded += 1
        self._send()

    def _send(self) -> None:
        self._queue.add_credit(
            CreditGrant(messages=1 << 20, size_bytes=(16 << 20) + self.chunks.done * self.chunks.size_bytes)
        )
        self._sender.send_pending(self._queue, self._transmit)

    def _transmit(self, frames: list[Payload]) -> bool:
        sequence = next(self._sequences)
        self._free_s = max(self._free_s, self.now_s) + len(frames[-1]) / self._bytes_per_s
        self.longest_wait_s = max(self.longest_wait_s, self._free_s - self.now_s)
        self._at(self._free_s - self.now_s + self.round_trip_s / 2, lambda: self._arrive(sequence))
        return True

    def _arrive(self, sequence: int) -> None:
        self._arrived = max(self._arrived, sequence)
        if not self._syncing:
            self._sync()

    def _sync(self) -> None:
        self._syncing, newest = self._arrived > self._synced, self._arrived
        if self._syncing:
            self._at(self.sync_s, lambda: self._on_synced(newest))

    def _on_synced(self, sequence: int) -> None:
        self._synced = sequence
        self._at(self.round_trip_s / 2, lambda: self._acknowledge(sequence))
        self._sync()

    def _acknowledge(self, sequence: int) -> None:
        self._sender.on_reply(ChunkAck(sequence=sequence))
        self._send()


@pytest.mark.parametrize(
    "size_bytes, period_s, round_trip_s, sync_s",
    [(2_000_000, 1.0, 2.5, 0.0), (200_000, 0.1, 4.0, 0.0), (2_000_000, 1.0, 0.05, 1.5), (200_000, 0.1, 0.05, 1.5)],
)
def test_chunks_keep_up_after_acknowledgements_become_slow(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, period_s: float, round_trip_s: float, sync_s: float
) -> None:
    link = ChunkLink(monkeypatch, Chunks(size_bytes), bytes_per_s=12e6)
    link.run(100, period_s)
    link.round_trip_s, link.sync_s = round_trip_s, sync_s
    link.run(300, period_s)
    assert len(link.chunks) <= 2 * (round_trip_s + 2 * sync_s) / period_s


@pytest.mark.parametrize("round_trip_s", [1.05, 1.2, 2.0])
def test_backlog_uses_the_link_after_the_round_trip_grows(monkeypatch: pytest.MonkeyPatch, round_trip_s: float) -> None:
    link = ChunkLink(monkeypatch, Chunks(200_000, recorded=10**6), bytes_per_s=3e6)
    link.run(50)
    link.round_trip_s = round_trip_s
    link.run(60)
    done = link.chunks.done
    link.run(100)
    assert (link.chunks.done - done) * 200_000 / 100 > 0.8 * 3e6


def test_own_queue_does_not_grow_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ChunkLink(monkeypatch, Chunks(300_000, recorded=10**6), bytes_per_s=250e3)
    link.run(800)
    assert link.longest_wait_s < 2.5
    assert link.chunks.done * 300_000 / 800 > 0.97 * 250e3


def test_window_shrinks_after_the_round_trip_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ChunkLink(monkeypatch, Chunks(50_000, recorded=10**6), bytes_per_s=250e3)
    link.round_trip_s = 1.2
    link.run(60)
    link.round_trip_s = 0.05
    link.run(60)
    link.longest_wait_s = 0.0
    link.run(100)
    assert link.longest_wait_s < 1.5


def test_first_offer_of_a_session_is_not_replaced() -> None:
    outlet, sent = SendQueue(LIMITS), list[Payload]()
    greeting, first, second = (
        WeightsOffer(manifests=(), signer=signer, greeting=not signer) for signer in (b"", b"1", b"2")
    )
    for offer in (greeting, first, second):
        outlet.put(Envelope(offer))
    outlet.add_credit(CreditGrant(messages=8, size_bytes=1000))
    outlet.flush(lambda frames: sent.append(frames[0]) is None)
    assert sent == [encode_envelope(Envelope(offer))[0] for offer in (greeting, second)]


def test_reconnects_of_a_hundred_clients_are_spread() -> None:
    returns = []
    for seed in range(100):
        backoff, at = Backoff(0.1, 5.0, random.Random(seed)), 0.0
        for _ in range(8):
            at += backoff.next_s()
            returns.append(at)
    busiest = np.histogram(returns, bins=np.arange(0, 20, 0.1))[0]
    assert busiest[10:].max() < 25, "after the first second, no tenth of a second sees a fourth of them"
    assert max(returns) < 100


def test_backoff_stays_within_its_bounds_and_resets() -> None:
    backoff = Backoff(0.1, 5.0, random.Random(1))
    bounds = []
    for _ in range(10):
        bounds.append(backoff.bound_s)
        assert 0 <= backoff.next_s() <= bounds[-1]
    assert bounds[:3] == [0.1, 0.2, 0.4] and bounds[-1] == 5.0
    backoff.reset()
    assert backoff.bound_s == 0.1


ITEMS = st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers()), max_size=40)


@given(ITEMS, st.integers(1, 50))
def test_queue_keeps_event_order_newest_states_and_its_capacity(
    puts: list[tuple[str | None, int]], capacity: int
) -> None:
    box: CoalescingQueue[tuple[str | None, int]] = CoalescingQueue(capacity)
    expected: list[tuple[str | None, int]] = []
    for key, value in puts:
        expected = [item for item in expected if key is None or item[0] != key]
        accepted = box.put((key, value), key)
        assert accepted == (len(expected) < capacity)
        expected += [(key, value)] if accepted else []
        assert len(box) == len(expected) <= capacity
    assert [box.get_nowait() for _ in expected] == expected
    assert box.get_nowait() is None


def test_queued_payloads_are_bounded() -> None:
    queue, part = SendQueue(LIMITS), Envelope(ChunkOffer(sequence=0), bytes(MAX_QUEUED_BYTES // 3 - 64))
    assert [queue.put(part) for _ in range(5)] == [True, True, True, False, False]
    queue.get_nowait()
    assert queue.put(part) and not queue.put(part)
    queue.remove_matching(lambda item: True)
    huge = Envelope(ChunkOffer(sequence=0), bytes(MAX_QUEUED_BYTES + 1))
    assert queue.put(huge), "one message of any size passes"
    assert not queue.put(part) and queue.put(Envelope(MetricsReport(node="a", count=0, scalars={})))
    assert queue.metrics.rejected == 4


def test_queued_records_without_payloads_are_bounded() -> None:
    queue = SendQueue(ChannelLimits())
    reply = OperatorReply(robot="a", operator="b", order="pause", accepted=True, reason="x" * (MAX_QUEUED_BYTES // 3))
    assert [queue.put(Envelope(reply)) for _ in range(7)] == [True] * 5 + [False] * 2


def test_newest_e_stop_reply_of_a_robot_replaces_a_waiting_one() -> None:
    queue = SendQueue(LIMITS)
    for robot, press in (("bad", 1), ("good", 7), *(("bad", press) for press in range(2, 99))):
        reply = OperatorReply(robot=robot, operator="ana", order="e-stop", accepted=True, press=press)
        assert queue.put(Envelope(reply))
    assert [item.message.press for _ in range(2) if (item := queue.get_nowait())] == [7, 98]  # type: ignore[union-attr]
    for _ in range(2):
        assert queue.put(Envelope(OperatorReply(robot="good", operator="ana", order="pause", accepted=True)))
    assert len(queue) == 2, "no one repeats other orders"


def test_get_returns_items_of_other_threads_or_times_out() -> None:
    box: CoalescingQueue[int] = CoalescingQueue(4)
    assert box.get(0.01) is None
    thread = threading.Thread(target=box.put, args=(7,))
    thread.start()
    assert box.get(120) == 7
    thread.join()


def test_remove_matching_returns_the_number_of_items() -> None:
    box: CoalescingQueue[int] = CoalescingQueue(2)
    assert box.put(1) and box.put(2) and not box.put(3)
    assert box.rejected == 1
    assert box.remove_matching(lambda item: item == 1) == 1
    assert box.get_nowait() == 2
