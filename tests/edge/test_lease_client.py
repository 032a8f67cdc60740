"""The lease client with a gateway that answers late, and the link of a computer's console to its sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from edge_kit import until

from hal.errors import LeaseError
from hal.lease import lease_clock_ns
from user_sys.edge.control_channel import LeaseClient
from user_sys.edge.local_link import LIMITS, LocalLink
from user_sys.messages import PROTOCOL_VERSION, Hello, LeaseGrant, LeaseRefusal, OperatorReply
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import new_keypair
from user_sys.tunnel.protocol import AnyMessage, Channel


def granted(token: int, asked_ns: int = 0) -> LeaseGrant:
    return LeaseGrant(robot="fake-0", holder="run", token=token, ttl_s=10.0, asked_ns=asked_ns)


@pytest.fixture
def lease() -> Iterator[LeaseClient]:
    hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name="fake-0", holder="run")
    with closing(TunnelClient("tcp://127.0.0.1:9", new_keypair(), new_keypair().public, hello)) as unconnected:
        yield LeaseClient("fake-0", "run", unconnected)


def test_second_grant_replaces_the_first(lease: LeaseClient) -> None:
    lease.on_message(granted(1))
    lease.on_message(granted(2))
    assert lease.token == 2
    lease.on_message(granted(1))
    lease.on_message(LeaseRefusal(robot="fake-0", reason="token 1 is too old", token=1))
    lease.on_message(LeaseRefusal(robot="fake-0", reason="held, when it was first asked for", token=0))
    assert lease.token == 2
    with pytest.raises(LeaseError, match="another run has it"):
        lease.on_message(LeaseRefusal(robot="fake-0", reason="another run has it", token=2))


def test_lease_counts_from_its_request(lease: LeaseClient) -> None:
    assert lease.is_expired()
    now_ns = lease_clock_ns()
    lease.on_message(granted(1, now_ns - 4_000_000_000))
    assert lease.until_ns == now_ns + 6_000_000_000 and not lease.is_expired()
    lease.on_message(granted(1, now_ns - 8_000_000_000))
    assert lease.until_ns == now_ns + 6_000_000_000, "an older answer takes nothing back"
    lease.on_message(granted(1, now_ns + 10**18))
    assert lease.until_ns <= lease_clock_ns() + 10_000_000_000, "none lasts longer than from now"
    lease.on_message(granted(2, now_ns - 11_000_000_000))
    assert lease.is_expired(), "that of another token is no lease of this one"


def test_link_goes_on_after_hostile_messages(tmp_path: Path) -> None:
    endpoint, heard = f"ipc://{tmp_path}/console", list[AnyMessage]()
    reply = OperatorReply(robot="fake-0", operator="ana", order="pause", accepted=True)
    with (
        LocalLink(endpoint, lambda message, _: heard.append(message)),
        LocalLink(endpoint, lambda *_: None, robot="fake-0") as session,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        stranger.connect(endpoint)
        hostile = ([b""], [b"?"], [Channel.CONTROL.value], [Channel.CONTROL.value, b"\xff"], [b"x"] * 9)
        for frames in hostile:
            stranger.send_multipart(frames)
        stranger.send_multipart([Channel.CONTROL.value, bytes(LIMITS.max_message_bytes + 1)])
        until(lambda: bool(session.send(reply) and heard), "the console hears the session")
    assert set(map(type, heard)) == {OperatorReply}
