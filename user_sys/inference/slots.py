"""What the sessions of each robot have at a policy process: their slots, and the weights that are on their way."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from user_sys.errors import WireError
from user_sys.inference.wire import MAX_SLOTS
from user_sys.policies.policy import Policy

MAX_SESSIONS = 2  # of a robot: one, and its successor
FORGET_AFTER_S = 60.0  # a session that has said nothing for so long is over
NO_WEIGHTS = b""


@dataclass(eq=False)
class Arrival:
    """A packet of weights of which a part is here. Memory grows with what has come, not with what was announced."""

    digest: bytes
    size_bytes: int
    content: bytearray = field(default_factory=bytearray)

    @property
    def complete(self) -> bool:
        return len(self.content) == self.size_bytes

    def append(self, offset: int, part: memoryview) -> None:
        """Takes the next bytes; a part that does not begin where the last one ended is dropped.

        Raises:
            WireError: more than was announced, or nothing.
        """
        if not part or offset + len(part) > self.size_bytes:
            raise WireError(f"a part of {len(part)} bytes from {offset} on, of weights of {self.size_bytes}")
        if offset == len(self.content):
            self.content += part


@dataclass(eq=False)
class Slot:
    """One policy. While it is `busy` a thread of its own makes or loads it, and nobody else touches it.

    Attributes:
        policy: None until it is made.
        digest: of the packet of its weights; empty before the first.
    """

    policy: Policy | None = None
    digest: bytes = NO_WEIGHTS
    busy: bool = False


@dataclass(eq=False)
class Session:
    """What one session of a robot has here, by number; it sends one packet of weights at a time."""

    heard_s: float
    slots: dict[int, Slot] = field(default_factory=dict)
    arrival: Arrival | None = None

    def open(self, number: int) -> Slot:
        """A new slot in the place of whatever had that number. Raises WireError: there are as many as there may be."""
        if number not in self.slots and len(self.slots) >= MAX_SLOTS:
            raise WireError(f"a session has {MAX_SLOTS} slots at most")
        slot = self.slots[number] = Slot()
        return slot

    def expect(self, digest: bytes, size_bytes: int) -> Arrival:
        """The packet with that digest, of which a part may be here; another that was on its way is dropped."""
        if self.arrival is None or (self.arrival.digest, self.arrival.size_bytes) != (digest, size_bytes):
            self.arrival = Arrival(digest, size_bytes)
        return self.arrival


class Slots:
    """One thread calls it. Whoever asks names the robot by its key: nobody reaches another robot's slots."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._robots: dict[str, OrderedDict[bytes, Session]] = {}

    def greet(self, robot: str, session: bytes, kept: Iterable[int]) -> None:
        """A session is there, and has a use for the slots `kept`; its others are freed.

        Of more than `MAX_SESSIONS` of a robot, the one that was silent for longest is forgotten.
        """
        sessions = self._robots.setdefault(robot, OrderedDict())
        found = sessions.setdefault(session, Session(self._clock()))
        found.heard_s = self._clock()
        found.slots = {number: slot for number, slot in found.slots.items() if number in set(kept)}
        sessions.move_to_end(session)
        while len(sessions) > MAX_SESSIONS:
            sessions.popitem(last=False)

    def session(self, robot: str, session: bytes) -> Session | None:
        """None where it has not greeted, or was forgotten."""
        sessions = self._robots.get(robot)
        return None if sessions is None else sessions.get(session)

    def slot(self, robot: str, session: bytes, number: int) -> Slot | None:
        found = self.session(robot, session)
        return None if found is None else found.slots.get(number)

    def forget(self, allowed: Callable[[str], bool]) -> None:
        """Lets go of sessions that have fallen silent, and of robots that are not `allowed` any more."""
        since_s = self._clock() - FORGET_AFTER_S
        for robot, sessions in list(self._robots.items()):
            for session in [key for key, found in sessions.items() if found.heard_s < since_s or not allowed(robot)]:
                del sessions[session]
            if not sessions:
                del self._robots[robot]


class Packets:
    """Packets of weights by their digests: what one robot has brought, the next need not send. Any thread calls it.

    The newest stays in any case, and others as long as all together have at most `limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, memoryview] = OrderedDict()

    def find(self, digest: bytes) -> memoryview | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def keep(self, digest: bytes, packet: memoryview) -> None:
        with self._lock:
            self._kept[digest] = packet
            self._kept.move_to_end(digest)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self._limit_bytes:
                self._kept.popitem(last=False)
