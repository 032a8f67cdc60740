"""A session keeps its lease through a gateway that answers late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from hal.errors import LeaseError
from user_sys.edge.lease_keeper import LeaseKeeper
from user_sys.messages import PROTOCOL_VERSION, Hello, LeaseGrant, LeaseRefusal
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import new_keypair


def granted(token: int) -> LeaseGrant:
    return LeaseGrant(robot="fake-0", holder="run", token=token, ttl_s=10.0)


@pytest.fixture
def lease() -> Iterator[LeaseKeeper]:
    hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name="fake-0", holder="run")
    with closing(TunnelClient("tcp://127.0.0.1:9", new_keypair(), new_keypair().public, hello)) as unconnected:
        yield LeaseKeeper("fake-0", "run", unconnected)


def test_a_second_answer_to_the_same_question_is_the_newer_lease_and_ends_nothing(lease: LeaseKeeper) -> None:
    lease.on_message(granted(1))
    lease.on_message(granted(2))
    assert lease.token == 2
    lease.on_message(granted(1))
    lease.on_message(LeaseRefusal(robot="fake-0", reason="token 1 is too old", token=1))
    lease.on_message(LeaseRefusal(robot="fake-0", reason="held, when it was first asked for", token=0))
    assert lease.token == 2
    with pytest.raises(LeaseError, match="another run has it"):
        lease.on_message(LeaseRefusal(robot="fake-0", reason="another run has it", token=2))
