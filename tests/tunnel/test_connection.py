"""A thread that waits for weights reads their socket itself; otherwise the client's thread reads it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tunnel_kit import QUICK, RecordingHandler, hello, prepare, until

from user_sys.errors import WireError
from user_sys.messages import WeightsBlocks, WeightsRequest
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.connection import ChannelReader, Connection
from user_sys.tunnel.keys import Keyring, new_keypair
from user_sys.tunnel.protocol import Channel
from user_sys.tunnel.server import TunnelServer

PARCEL = b"p" * 32
MORE_THAN_A_WINDOW = 3 * QUICK.weights.window_messages
KEEPING = """
import ctypes
from user_sys.tunnel.sockets import retain_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.mallinfo2.restype = ctypes.c_void_p, [ctypes.c_void_p], Info
assert retain_freed_memory()
libc.free(libc.malloc(8 << 20))
print(libc.mallinfo2().fordblks)
"""


class ConnectionPair:
    """A server that records its messages, and one client."""

    def __init__(self, folder: Path) -> None:
        self.handler, keys, server_keys = RecordingHandler(), prepare(folder), new_keypair()
        ring = Keyring(folder / "keys")
        self.server = TunnelServer("tcp://127.0.0.1:0", server_keys, ring, self.handler, QUICK)
        self.server.start()
        endpoint, greeting = self.server.endpoint, hello("panda-0")
        self.client = TunnelClient(endpoint, keys["panda-0"], server_keys.public, greeting, limits=QUICK)
        self.client.start()
        self.client.wait_open(120)
        until(lambda: self.server.peers(), "the gateway has opened it too")

    def give(self, number: int) -> None:
        assert self.server.send("panda-0", WeightsBlocks(parcel=PARCEL, first=number), bytes(1000))

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[ConnectionPair]:
    made = ConnectionPair(tmp_path)
    yield made
    made.close()
    assert made.server.failure is None


@contextmanager
def tunnels_thread_held_up(client: TunnelClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks the client's thread."""
    held, go_on = threading.Event(), threading.Event()

    def wait(link: Connection, *_: object) -> None:
        held.set()
        assert go_on.wait(120)

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "wait", wait)
        client.channels.wakeup.set()
        assert held.wait(120)
        try:
            yield
        finally:
            patched.undo()
            go_on.set()


def first_of(client: TunnelClient) -> int:
    envelope = client.receive_weights(120)
    assert envelope is not None and isinstance(envelope.message, WeightsBlocks)
    return envelope.message.first


def test_weights_arrive_while_the_client_thread_is_blocked(
    ends: ConnectionPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tunnels_thread_held_up(ends.client, monkeypatch):
        assert ends.client.send_weights(WeightsRequest(parcel=PARCEL, first=0, count=1))
        until(lambda: ends.handler.messages, "the request is there")
        for number in range(MORE_THAN_A_WINDOW):  # more messages need returned credit
            ends.give(number)
        assert [first_of(ends.client) for _ in range(MORE_THAN_A_WINDOW)] == list(range(MORE_THAN_A_WINDOW))


def test_client_thread_reads_weights_without_a_waiting_thread(ends: ConnectionPair) -> None:
    assert ends.client.receive_weights(0.01) is None  # a thread has waited once
    ends.give(0)
    until(lambda: len(ends.client.channels.readers[Channel.WEIGHTS].inbox), "the message is in the inbox")
    assert first_of(ends.client) == 0


def test_message_is_read_after_a_send_has_cleared_its_event(
    ends: ConnectionPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChannelReader, "is_reading", True)  # as if a thread polled a descriptor without an event
    ends.give(0)
    until(lambda: len(ends.client.channels.readers[Channel.WEIGHTS].inbox), "the message is in the inbox")


def test_waiting_thread_gets_weights_of_the_next_session(ends: ConnectionPair) -> None:
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(ends.client.receive_weights(120)))
    waiting.start()
    until(lambda: ends.client.channels.readers[Channel.WEIGHTS].is_reading, "the thread waits")
    ends.client.loop.fail(WireError("a malformed message"))
    until(lambda: len(ends.handler.opened) == 2, "another session")
    ends.give(0)
    waiting.join(120)
    assert found != [None]


def test_messages_read_by_two_threads_keep_their_order(ends: ConnectionPair) -> None:
    numbers, found = 400, list[int]()

    def take() -> None:
        while len(found) < numbers:
            found.append(first_of(ends.client))

    taking = threading.Thread(target=take)
    taking.start()
    for number in range(numbers):
        ends.give(number)
        ends.client.send_weights(
            WeightsRequest(parcel=PARCEL, first=number, count=1)
        )  # this also reads available messages
    taking.join(120)
    assert found == list(range(numbers))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a C library that does not tell")
def test_process_with_a_tunnel_retains_freed_memory() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) >= 8 << 20
