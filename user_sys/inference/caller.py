"""The control loop's connection to a policy process: one question at a time, and never a long wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from user_sys.errors import WireError
from user_sys.inference.wire import Act, AnyAnswer, Arrays, decode_answer, encode
from user_sys.tunnel.sockets import Socket

PROBE_S = 0.1


class Meeting(NamedTuple):
    """Where a policy process listens, and in which of its lives."""

    endpoint: str
    life: bytes


class Caller:
    """One thread calls it.

    An answer counts only if it comes in time, and only as the answer to the newest question. After one that did not
    come it waits for none: it asks every `PROBE_S`, or less often if an answer may take longer, and goes on as usual
    once the newest of these was answered.
    """

    def __init__(self, dial: Callable[[str], Socket], wait_s: float, clock: Callable[[], float] = time.monotonic):
        """Args:
        dial: a connected socket to an endpoint, which does not block.
        wait_s: how long an answer may take.
        """
        self._dial, self._wait_s, self._clock = dial, wait_s, clock
        self._socket: Socket | None = None
        self._met: Meeting | None = None
        self._number = 0
        self._away = False
        self._probe_at_s = 0.0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def call(self, meeting: Meeting, ask: Callable[[int], Act], arrays: Arrays) -> tuple[AnyAnswer, Arrays] | None:
        """The answer to ``ask(number)``; None where none has come in time, or is likely to.

        Blocks for `wait_s` at most, and for nothing while the process is known not to answer.
        """
        self._connect(meeting)
        if self._away and not self._has_answered():
            if self._clock() >= self._probe_at_s:
                self._probe_at_s = self._clock() + max(PROBE_S, self._wait_s)
                self._ask(ask, arrays)
            return None
        answer = self._await() if self._ask(ask, arrays) else None
        self._away = answer is None
        if self._away:
            self._probe_at_s = self._clock() + max(PROBE_S, self._wait_s)
        return answer

    def _connect(self, meeting: Meeting) -> None:
        """A process that was started anew is dialled anew, without waiting for libzmq to notice."""
        if meeting != self._met or self._socket is None:
            self.close()
            self._socket, self._met = self._dial(meeting.endpoint), meeting

    def _ask(self, ask: Callable[[int], Act], arrays: Arrays) -> bool:
        """False where libzmq takes no message: it is not connected."""
        assert self._socket is not None  # `_connect` was called
        self._number += 1
        deadline_s = self._clock() + self._wait_s
        packet = encode(ask(self._number), arrays)
        while True:
            try:
                self._socket.send(packet, zmq.DONTWAIT)
                return True
            except zmq.Again:
                if self._away or not self._ready(zmq.POLLOUT, deadline_s):
                    return False

    def _await(self) -> tuple[AnyAnswer, Arrays] | None:
        deadline_s = self._clock() + self._wait_s
        while self._ready(zmq.POLLIN, deadline_s):
            if (answer := self._take()) is not None:
                return answer
        return None

    def _ready(self, event: int, deadline_s: float) -> bool:
        assert self._socket is not None  # `_connect` was called
        return bool(self._socket.poll(max(0, math.ceil(1e3 * (deadline_s - self._clock()))), event))

    def _has_answered(self) -> bool:
        """Takes in what has come meanwhile, without waiting: whether the newest question is among what it answers."""
        while self._ready(zmq.POLLIN, 0.0):
            if self._take() is not None:
                self._away = False
        return not self._away

    def _take(self) -> tuple[AnyAnswer, Arrays] | None:
        """The next message, where it answers the newest question."""
        assert self._socket is not None  # `_connect` was called
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        try:
            answer, arrays = decode_answer(frames[0])
        except WireError:
            return None
        return (answer, arrays) if answer.number in (0, self._number) else None
