"""Credit, bandwidth limits, backoff, state machines, histograms and the coalescing queue."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from user_sys.errors import ConfigError, TunnelError, WireError
from user_sys.messages import CreditGrant, MetricsReport, WeightsOffer
from user_sys.tunnel.connection import Backoff
from user_sys.tunnel.flow_control import (
    CoalescingQueue,
    LatencyHistogram,
    ReceiveWindow,
    SendCredit,
    SendQueue,
    TokenBucket,
)
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import TUNNEL_TRANSITIONS, Envelope, Payload, StateMachine, TunnelState, encode_envelope

LIMITS = ChannelLimits(window_messages=8, window_bytes=1000, queue_messages=16)


@pytest.mark.parametrize(
    "key", ["window_messages", "window_bytes", "queue_messages", "pipe_messages", "heartbeat_s", "dead_after_s"]
)
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_that_allow_no_message_are_refused(key: str, value: float) -> None:
    kind = ChannelLimits if hasattr(ChannelLimits, key) else TunnelLimits
    with pytest.raises(ConfigError, match=f"{key} is .*; it must be finite and above 0"):
        kind(**{key: value})


def test_invalid_bandwidth_and_backoff_are_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_per_s is -1; it must be finite and at least 0"):
        ChannelLimits(bytes_per_s=-1)
    with pytest.raises(ConfigError, match="backoff_min_s is 2; it must be between 0 and backoff_max_s, 1"):
        TunnelLimits(backoff_min_s=2.0, backoff_max_s=1.0)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3)), max_size=200))
def test_sender_within_its_credit_is_never_refused_or_stuck(steps: list[tuple[int, int]]) -> None:
    purse, window = SendCredit(), ReceiveWindow(LIMITS)
    waiting: list[int] = []
    for size, taken in steps:
        grant = window.next_grant()
        if grant is not None:
            window.mark_granted(grant)
            purse.grant(grant)
        if purse.is_available():
            window.charge(size)
            purse.consume(size)
            waiting.append(size)
        else:
            assert waiting, "who may not send has something under way"
        assert len(waiting) <= LIMITS.window_messages
        assert window.unreleased_bytes == sum(waiting) < LIMITS.window_bytes + 2001
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
    bucket = TokenBucket(1e6, clock=lambda: now[0])
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
        assert outlet.put(Envelope(MetricsReport(node="n", count=0, scalars={})))
    assert not outlet.put(Envelope(MetricsReport(node="n", count=0, scalars={})))
    assert outlet.metrics.rejected == 1


def test_first_offer_of_a_session_is_not_replaced() -> None:
    outlet, sent = SendQueue(LIMITS), list[Payload]()
    greeting, first, second = (
        WeightsOffer(manifests=(), parcels=(), signer=signer, greeting=not signer) for signer in (b"", b"1", b"2")
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


@given(st.lists(st.sampled_from(TunnelState), max_size=8))
def test_illegal_transition_raises(path: list[TunnelState]) -> None:
    machine = StateMachine("the tunnel", TunnelState.IDLE, TUNNEL_TRANSITIONS)
    for state in path:
        before = machine.state
        if state in TUNNEL_TRANSITIONS[before]:
            machine.transition_to(state)
            continue
        with pytest.raises(TunnelError, match=f"cannot go from {before.value} to {state.value}"):
            machine.transition_to(state)
        assert machine.state is before


@given(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_histogram_quantile_is_within_a_bucket(seconds: list[float], share: float) -> None:
    histogram = LatencyHistogram()
    for value in seconds:
        histogram.add(value)
    exact = float(np.quantile(seconds, share, method="inverted_cdf"))
    assert histogram.count == len(seconds)
    if 2e-6 < exact < 100:
        assert exact * 0.999 <= histogram.quantile_s(share) <= exact * 1.42


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


def test_discard_keeps_the_replacement_of_a_peeked_item() -> None:
    box: CoalescingQueue[list[int]] = CoalescingQueue(4)
    box.put([1], "state")
    sending = box.peek()
    box.put([2], "state")
    assert sending is not None
    box.discard(sending)
    assert box.get_nowait() == [2]


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
