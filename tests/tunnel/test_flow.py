"""Credit, bandwidth, back-off, states and gauges, each by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from user_sys.errors import ConfigError, TunnelError, WireError
from user_sys.messages import Grant, MetricsReport, WeightsOffer
from user_sys.tunnel.backoff import Backoff
from user_sys.tunnel.credit import Purse, TokenBucket, Window
from user_sys.tunnel.gauges import Histogram
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.outlet import Outlet
from user_sys.tunnel.states import TUNNEL, StateMachine, TunnelState
from user_sys.tunnel.wire import Envelope, Payload, encode

LIMITS = ChannelLimits(window_messages=8, window_bytes=1000, queue_messages=16)


@pytest.mark.parametrize(
    "key", ["window_messages", "window_bytes", "queue_messages", "pipe_messages", "heartbeat_s", "dead_after_s"]
)
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_with_which_nothing_could_ever_be_sent_are_refused(key: str, value: float) -> None:
    kind = ChannelLimits if hasattr(ChannelLimits, key) else TunnelLimits
    with pytest.raises(ConfigError, match=f"{key} is .*; it must be above 0, and finite"):
        kind(**{key: value})


def test_a_bandwidth_and_a_pause_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_per_s is -1; 0 is without a limit"):
        ChannelLimits(bytes_per_s=-1)
    with pytest.raises(ConfigError, match="backoff_min_s is 2; it must lie between 0 and backoff_max_s, which is 1"):
        TunnelLimits(backoff_min_s=2.0, backoff_max_s=1.0)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3)), max_size=200))
def test_a_sender_that_heeds_its_grants_is_never_refused_and_never_stuck(steps: list[tuple[int, int]]) -> None:
    purse, window = Purse(), Window(LIMITS)
    waiting: list[int] = []
    for size, taken in steps:
        grant = window.due()
        if grant is not None:
            window.granted(grant)
            purse.grant(grant)
        if purse.can_pay():
            window.charge(size)
            purse.pay(size)
            waiting.append(size)
        else:
            assert waiting, "who may not send has something under way"
        assert len(waiting) <= LIMITS.window_messages
        assert window.open_bytes == sum(waiting) < LIMITS.window_bytes + 2001
        for size in waiting[:taken]:
            window.release(1, size)
        del waiting[:taken]


def test_a_sender_that_does_not_is_refused_at_the_first_message_too_many() -> None:
    window = Window(LIMITS)
    with pytest.raises(WireError, match="window of 8"):
        window.charge(1)
    grant = window.due()
    assert grant is not None
    window.granted(grant)
    for _ in range(8):
        window.charge(1)
    with pytest.raises(WireError, match="window of 8"):
        window.charge(1)


def test_a_bandwidth_limit_holds_on_average_and_lets_a_large_message_pass() -> None:
    now = [0.0]
    bucket = TokenBucket(1e6, clock=lambda: now[0])
    sent = 0
    while now[0] < 10:
        wait_s = bucket.wait_s()
        if wait_s > 0:
            now[0] += wait_s
            continue
        bucket.spend(3_000_000 if sent == 0 else 100_000)
        sent += 3_000_000 if sent == 0 else 100_000
    assert sent == pytest.approx(10e6, rel=0.1)


def test_a_slow_channel_keeps_the_order_and_the_newest_of_each_state() -> None:
    outlet, sent = Outlet(LIMITS), list[Payload]()
    for count in range(4):
        outlet.offer(Envelope(MetricsReport(node="n", count=count, scalars={})))
    assert not outlet.flush(lambda frames: sent.append(frames[0]) is None) and not sent, "no credit, nothing sent"
    grant = Window(LIMITS).due()
    assert grant is not None
    outlet.grant(grant)
    assert outlet.flush(lambda frames: False), "libzmq is full"
    assert len(outlet) == 4
    outlet.flush(lambda frames: sent.append(frames[0]) is None)
    assert len(sent) == 4 and len(outlet) == 0
    for _ in range(LIMITS.queue_messages):
        assert outlet.offer(Envelope(MetricsReport(node="n", count=0, scalars={})))
    assert not outlet.offer(Envelope(MetricsReport(node="n", count=0, scalars={})))
    assert outlet.gauges.refused == 1


def test_a_greeting_offer_of_weights_is_not_replaced_by_the_next_offer() -> None:
    outlet, sent = Outlet(LIMITS), list[Payload]()
    greeting, first, second = (
        WeightsOffer(manifests=(), parcels=(), signer=signer, greeting=not signer) for signer in (b"", b"1", b"2")
    )
    for offer in (greeting, first, second):
        outlet.offer(Envelope(offer))
    outlet.grant(Grant(messages=8, size_bytes=1000))
    outlet.flush(lambda frames: sent.append(frames[0]) is None)
    assert sent == [encode(Envelope(offer))[0] for offer in (greeting, second)]


def test_a_hundred_clients_do_not_come_back_together() -> None:
    returns = []
    for seed in range(100):
        backoff, at = Backoff(0.1, 5.0, random.Random(seed)), 0.0
        for _ in range(8):
            at += backoff.next_s()
            returns.append(at)
    busiest = np.histogram(returns, bins=np.arange(0, 20, 0.1))[0]
    assert busiest[10:].max() < 25, "after the first second, no tenth of a second sees a fourth of them"
    assert max(returns) < 100


def test_a_pause_stays_within_its_bounds_and_starts_anew_after_success() -> None:
    backoff = Backoff(0.1, 5.0, random.Random(1))
    bounds = []
    for _ in range(10):
        bounds.append(backoff.bound_s)
        assert 0 <= backoff.next_s() <= bounds[-1]
    assert bounds[:3] == [0.1, 0.2, 0.4] and bounds[-1] == 5.0
    backoff.reset()
    assert backoff.bound_s == 0.1


@given(st.lists(st.sampled_from(TunnelState), max_size=8))
def test_a_tunnel_goes_only_where_its_table_leads(path: list[TunnelState]) -> None:
    machine = StateMachine("the tunnel", TunnelState.IDLE, TUNNEL)
    for state in path:
        before = machine.state
        if state in TUNNEL[before]:
            machine.enter(state)
            continue
        with pytest.raises(TunnelError, match=f"cannot go from {before.value} to {state.value}"):
            machine.enter(state)
        assert machine.state is before


@given(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_histogram_is_right_within_a_bucket(seconds: list[float], share: float) -> None:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    exact = float(np.quantile(seconds, share, method="inverted_cdf"))
    assert histogram.count == len(seconds)
    if 2e-6 < exact < 100:
        assert exact * 0.999 <= histogram.quantile_s(share) <= exact * 1.42
