"""A client's estimate of the gateway's clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from user_sys.messages import Heartbeat
from user_sys.tunnel.clock import ClockEstimator

SECOND_NS = 1_000_000_000


@given(st.integers(-(10**18), 10**18), st.lists(st.integers(0, 10**9), min_size=1, max_size=40))
def test_offset_error_is_within_half_of_the_round_trip(offset_ns: int, delays: list[int]) -> None:
    clock, now = ClockEstimator(), 0
    for delay in delays:
        sent, now = now, now + delay
        clock.add(Heartbeat(t_client_ns=sent, t_gateway_unix_ns=sent + offset_ns + delay // 3), now)
        now += 1
    estimate = clock.estimate(now)
    assert estimate is not None
    assert estimate.rtt_ns == min(delays[-16:])
    assert abs(estimate.gateway_unix_ns(now) - (now + offset_ns)) <= estimate.rtt_ns / 2 + 1


def test_drift_is_followed_between_heartbeats() -> None:
    rng, clock, drift = random.Random(3), ClockEstimator(), 80e-6
    for second in range(600):
        sent = second * SECOND_NS
        up, down = (int(2e6 + rng.expovariate(1 / 4e6)) for _ in range(2))
        heard = sent + up
        clock.add(Heartbeat(t_client_ns=sent, t_gateway_unix_ns=heard + round(drift * heard)), heard + down)
    later = 660 * SECOND_NS
    estimate = clock.estimate(later)
    assert estimate is not None
    assert estimate.drift_ppm == pytest.approx(80, abs=10)
    assert estimate.gateway_unix_ns(later) == pytest.approx(later + drift * later, abs=3e6)


def test_echo_from_the_future_is_ignored() -> None:
    clock = ClockEstimator()
    clock.add(Heartbeat(t_client_ns=10, t_gateway_unix_ns=0), 5)
    assert clock.estimate(20) is None
