"""The request client: a response counts in time, and for the newest request only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from user_sys.inference.protocol import (
    SESSION_BYTES,
    ActionRequest,
    ActionResponse,
    PolicyResponse,
    decode_request,
    encode,
)
from user_sys.inference.remote_policy import PROBE_PERIOD_S, RequestClient, ServerIdentity
from user_sys.tunnel.sockets import ZmqSocket

HERE = "inproc://policy"
MEETING = ServerIdentity(HERE, b"first")
WAIT_S = 30.0


class Clock:
    """A clock that advances by `step_s` at each reading; 0 never times out."""

    def __init__(self) -> None:
        self.now_s, self.step_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Process:
    """A server that responds when the test calls it."""

    def __init__(self) -> None:
        self.context: zmq.Context[ZmqSocket] = zmq.Context()
        self.router: ZmqSocket = self.context.socket(zmq.ROUTER)
        self.router.bind(HERE)
        self.requested: list[tuple[bytes, ActionRequest]] = []
        self.dialled = 0

    def dial(self, endpoint: str) -> ZmqSocket:
        self.dialled += 1
        socket = self.context.socket(zmq.DEALER)
        socket.connect(endpoint)
        return socket

    def listen(self) -> list[int]:
        """Reads the waiting requests; returns the numbers of all requests."""
        while self.router.poll(0):
            routing_id, frame = self.router.recv_multipart()
            request, _ = decode_request(frame)
            assert isinstance(request, ActionRequest)
            self.requested.append((routing_id, request))
        return [request.number for _, request in self.requested]

    def answer(self, number: int, answer: PolicyResponse | None = None) -> None:
        routing_id = next(routing_id for routing_id, request in self.requested if request.number == number)
        self.router.send_multipart([routing_id, encode(answer or ActionResponse(number=number))])


def act(number: int) -> ActionRequest:
    return ActionRequest(
        number=number, session=bytes(SESSION_BYTES), slot=0, digest=b"", sentence=str(number), deterministic=True
    )


@pytest.fixture
def process() -> Iterator[Process]:
    found = Process()
    yield found
    found.context.destroy(0)


class ClientBench:
    def __init__(self, process: Process) -> None:
        self.process, self.clock = process, Clock()
        self.caller = RequestClient(process.dial, WAIT_S, self.clock)

    def call(self, identity: ServerIdentity = MEETING) -> int:
        """The number of the response; 0 without one. Expected responses have arrived before."""
        found = self.caller.call(identity, act, {"observation.state": np.zeros(2, np.float32)})
        return 0 if found is None else found[0].number

    def in_vain(self, identity: ServerIdentity = MEETING) -> None:
        """A call that times out at once."""
        self.clock.step_s = WAIT_S
        assert self.call(identity) == 0
        self.clock.step_s = 0.0


@pytest.fixture
def bench(process: Process) -> Iterator[ClientBench]:
    found = ClientBench(process)
    yield found
    found.caller.close()


def test_late_response_is_not_taken_for_a_new_one(bench: ClientBench, process: Process) -> None:
    bench.in_vain()
    assert process.listen() == [1]
    process.answer(1)  # late, but for the newest request, so the server is responsive again
    bench.in_vain()
    assert process.listen() == [1, 2]
    process.answer(1)
    process.answer(1)
    assert bench.call() == 0  # two old responses do not answer the newest request
    assert process.listen() == [1, 2]


def test_unresponsive_server_is_probed_without_waiting(bench: ClientBench, process: Process) -> None:
    bench.in_vain()
    for _ in range(5):
        assert bench.call() == 0  # at once, although its clock would permit half a minute
    assert process.listen() == [1]
    bench.clock.now_s += PROBE_PERIOD_S
    assert bench.call() == 0
    assert process.listen() == [1], "an answer may take longer than that, and only one to the newest question counts"
    bench.clock.now_s += WAIT_S
    assert bench.call() == 0
    assert bench.call() == 0
    assert process.listen() == [1, 2]


def test_client_resumes_after_the_newest_response(bench: ClientBench, process: Process) -> None:
    bench.in_vain()
    bench.clock.now_s += WAIT_S
    assert bench.call() == 0
    assert process.listen() == [1, 2]
    process.answer(2)
    bench.in_vain()
    assert process.listen() == [1, 2, 3]  # the response to 2 belongs to an old observation and is ignored


def test_client_reconnects_to_a_restarted_server(bench: ClientBench, process: Process) -> None:
    bench.in_vain()
    bench.in_vain()
    assert process.dialled == 1
    bench.in_vain(ServerIdentity(HERE, b"second"))
    assert process.dialled == 2


def test_malformed_responses_are_ignored(bench: ClientBench, process: Process) -> None:
    bench.in_vain()
    process.listen()
    routing_id = process.requested[0][0]
    process.router.send_multipart([routing_id, b"nonsense"])
    process.router.send_multipart([routing_id, b""])
    assert bench.call() == 0
