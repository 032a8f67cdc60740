"""The control messages of a session, as its inbox receives them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from wait_kit import until

from robots.fake import FakeRobot
from user_sys.edge.agents import OperatorCommandQueue
from user_sys.edge.control_authority import MAX_ORDER_AGE_S, ControlAuthority
from user_sys.edge.control_channel import ControlInbox
from user_sys.messages import OperatorCommand, OperatorReply
from user_sys.tunnel.client import ClockEstimate

OFFSET_NS = 1_700_000_000_000_000_000  # of the gateway's clock
CLOCK = ClockEstimate(rtt_ns=0, offset_ns=OFFSET_NS)


def received(command: OperatorCommand, clock: ClockEstimate | None) -> OperatorReply:
    """The reply to a command that arrives from the tunnel, of a robot that holds."""
    authority = ControlAuthority("fake-0", FakeRobot().spec)
    authority.apply(OperatorCommand(robot="fake-0", operator="ada", order="pause"))
    commands = OperatorCommandQueue(authority.clock, lambda reply: None)
    arriving = [command]

    def receive(timeout_s: float) -> OperatorCommand | None:
        return arriving.pop() if arriving else time.sleep(timeout_s)

    parts: Any = (
        SimpleNamespace(receive=receive, clock=clock),
        SimpleNamespace(robot="fake-0"),
        SimpleNamespace(renew_if_due=lambda: None),
        SimpleNamespace(next_sequence=lambda: 1),
        commands,
        None,
    )
    with ControlInbox(*parts, threading.Event(), lambda: None):
        pending = until(commands.get_nowait, "the command arrives")
    return authority.apply(pending.command, pending.received_s)


@pytest.mark.parametrize(
    ("order", "age_s", "clock", "accepted"),
    [
        ("hand-back", MAX_ORDER_AGE_S + 1, CLOCK, False),
        ("reset", MAX_ORDER_AGE_S + 1, CLOCK, False),
        ("hand-back", MAX_ORDER_AGE_S - 1, CLOCK, True),
        ("hand-back", -600.0, CLOCK, True),  # the gateway's clock was set
        ("hand-back", MAX_ORDER_AGE_S + 1, None, True),
        ("take-over", 600.0, CLOCK, True),
        ("e-stop", 600.0, CLOCK, True),
    ],
)
def test_order_that_waited_in_the_robots_network_is_refused_if_it_lets_the_robot_move(
    order: Any, age_s: float, clock: ClockEstimate | None, accepted: bool
) -> None:
    forwarded_ns = OFFSET_NS + time.monotonic_ns() - round(age_s * 1e9)
    command = OperatorCommand(robot="fake-0", operator="ada", order=order, forwarded_unix_ns=forwarded_ns)
    reply = received(command, clock)
    assert reply.accepted is accepted
    assert accepted or reply.reason == "it waited too long; give it again if it still applies"


def test_order_without_the_gateways_time_counts_from_its_arrival() -> None:
    assert received(OperatorCommand(robot="fake-0", operator="ada", order="hand-back"), CLOCK).accepted
