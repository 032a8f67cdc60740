"""Keeps a policy process supplied: opens a session's slots and brings their weights, again where it has begun anew."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from user_sys.errors import UserSysError, WireError
from user_sys.inference.caller import Meeting
from user_sys.inference.wire import (
    MAX_SLOTS,
    PART,
    PART_BYTES,
    PROTOCOL,
    Absent,
    AnyAnswer,
    AnyRequest,
    Arrays,
    Busy,
    Done,
    Greeting,
    Load,
    Open,
    Part,
    Refusal,
    Unfit,
    Wanted,
    Welcome,
    decode_answer,
    encode,
)
from user_sys.tunnel.sockets import Socket

log = logging.getLogger(__name__)

GREET_EVERY_S = 1.0
AGAIN_S = 0.25  # after the process was not there
ANSWER_WITHIN_S = 2.0
LOAD_WITHIN_S = 120.0
BUSY_S = 0.02
LOOK_S = 0.1  # how often a wait looks whether it is to end
CLOSE_TIMEOUT_S = 5.0
_ENDS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED


class Weights:
    """`packet` is of a `wire.PackedWeights`, and `digest` its BLAKE3; both are empty where there are none."""

    def __init__(self, packet: bytes = b"", digest: bytes = b"") -> None:
        self.packet, self.digest = packet, digest


class Place:
    """One policy's slot: what it is to be, and what it is as far as is known.

    Attributes:
        number: of the slot.
        held: what the policy acts with.
        offered: what `Keeper.deliver` is about.
        refusal: why the process did not take what was offered last.
        settled: what was offered is at the process, or refused, or could not be brought now.
        opened_in: the process's life in which the slot was opened last.
        openings: how often it was.
        there: digest of the weights at the process; None where it is not known.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed
        self.held = Weights()
        self.offered: Weights | None = None
        self.refusal = ""
        self.settled = threading.Event()
        self.opened_in = b""
        self.openings = 0
        self.there: bytes | None = None

    @property
    def ready(self) -> bool:
        return self.there == self.held.digest

    def draws_with(self) -> int:
        """A seed for the next opening: a policy that is opened again does not draw the same once more."""
        if self.openings == 0:
            return self.seed
        return int(np.random.SeedSequence((self.seed, self.openings)).generate_state(1, np.uint32)[0])


class _Away(UserSysError):
    """The process does not serve this session now; the message says why, for after "the policy at HOST"."""


class Keeper:
    """A thread with a connection of its own, from `start` to `close`.

    Attributes:
        meeting: the process that was met last; None before the first.
        trouble: why the process cannot be used, for after "the policy at HOST"; empty where it can.
        failure: what ended the thread before its time.
    """

    def __init__(
        self,
        find: Callable[[], str],
        dial: Callable[[str], Socket],
        session: bytes,
        opening: Callable[[int, Place], Open],
    ) -> None:
        """Args:
        find: where the process listens now; empty where nobody knows.
        dial: a connected socket to an endpoint.
        opening: the request, with its number, that opens a slot.
        """
        self._find, self._dial, self._session, self._opening = find, dial, session, opening
        self.meeting: Meeting | None = None
        self.trouble = "is not found yet"
        self.endpoint = ""
        self.failure: Exception | None = None
        self._places: WeakValueDictionary[int, Place] = WeakValueDictionary()
        self._lock = threading.Lock()  # over what is held and offered
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._number = 0
        self._wakeup, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="policy-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and whatever waits in `deliver`."""
        self._closing.set()
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def keep(self, place: Place) -> None:
        """Has `place` opened at the process, for as long as anybody holds it."""
        with self._lock:
            self._places[place.number] = place
        self._wakeup.set()

    def look(self) -> None:
        """A slot is not as it should be: see to it soon."""
        self._wakeup.set()

    def deliver(self, place: Place, weights: Weights) -> None:
        """Brings `weights` to the process; where that is away, it gets them when it is back. Blocks until they
        are there, or it has turned out that they cannot be brought now.

        Raises:
            WireError: the policy does not take them; those that it had stay.
        """
        with self._lock:
            place.offered, place.refusal = weights, ""
            place.settled.clear()
        self._wakeup.set()
        if self._closing.is_set() or not place.settled.wait(LOAD_WITHIN_S) or self._closing.is_set():
            self._settle(place)
        if place.refusal:
            raise WireError(place.refusal)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._try_round()
                self._wakeup.wait(AGAIN_S if self.trouble else GREET_EVERY_S)
                self._wakeup.clear()
        except Exception as error:  # of any kind: whoever runs the session must hear of it, and asks
            log.exception("policy.keeper_failed")
            self.failure = error
        self._closing.set()  # nobody is to wait for this thread from here on
        self._hang_up()
        for place in self._all():
            place.settled.set()

    def _try_round(self) -> None:
        try:
            self._round()
            self.trouble = ""
        except _Away as why:
            if str(why) != self.trouble:
                log.warning("policy.away endpoint=%s: the policy %s", self.endpoint, why)
            self.trouble = str(why)
            self._hang_up()
            for place in self._all():
                self._settle(place)

    def _all(self) -> list[Place]:
        with self._lock:
            return list(self._places.values())

    def _settle(self, place: Place, refusal: str = "") -> None:
        """What was offered is what the policy acts with from now on, be it there yet or not; or it is `refusal`'s."""
        with self._lock:
            if place.offered is not None and not refusal:
                place.held = place.offered
            place.offered, place.refusal = None, refusal
            place.settled.set()

    def _round(self) -> None:
        """Greets the process, and brings every slot to what it is to be. Raises _Away."""
        if not (endpoint := self._find()):
            raise _Away("is not found yet")
        if endpoint != self.endpoint or self._socket is None:
            self._hang_up()
            self.endpoint = endpoint
            try:
                self._socket = self._dial(endpoint)
            except zmq.ZMQError as error:
                raise _Away(f"cannot be dialled: {error}") from None
            self._monitor = self._socket.get_monitor_socket(_ENDS)
        places = self._all()
        slots = tuple(place.number for place in places)[-MAX_SLOTS:]
        answer = self._ask(Greeting(number=0, session=self._session, protocol=PROTOCOL, slots=slots))
        if not isinstance(answer, Welcome):
            raise _Away("answers in words that this release does not know")
        for place in places:
            self._bring(place, answer.life)
        meeting = Meeting(endpoint, answer.life)
        if meeting != self.meeting:
            log.info("policy.met endpoint=%s device=%s", endpoint, answer.device)
        self.meeting = meeting

    def _bring(self, place: Place, life: bytes) -> None:
        if place.opened_in != life:
            place.there = None
            self._open(place, life)
        while True:
            with self._lock:
                offered = place.offered
                target = offered or place.held
            refusal = "" if place.there == target.digest else self._load(place, target)
            if not refusal:
                place.there = target.digest
            if offered is None:
                if refusal:
                    raise _Away(f"does not take this robot's weights: {refusal}")
                return
            self._settle_if(place, offered, refusal)

    def _settle_if(self, place: Place, offered: Weights, refusal: str) -> None:
        """As `_settle`, unless something else is offered by now."""
        if place.offered is offered:
            self._settle(place, refusal)

    def _open(self, place: Place, life: bytes) -> None:
        answer = self._ask(self._opening(0, place))
        if not isinstance(answer, Done):
            raise _Away("is busy with this robot's policies" if isinstance(answer, Busy) else "has begun anew just now")
        place.openings += 1
        place.opened_in, place.there = life, b""

    def _load(self, place: Place, weights: Weights) -> str:
        """Brings `weights`; why the policy does not take them, or empty."""
        load = Load(
            number=0,
            session=self._session,
            slot=place.number,
            digest=weights.digest,
            size_bytes=len(weights.packet),
        )
        until_s = time.monotonic() + LOAD_WITHIN_S
        request: Load | Part = load
        arrays: Arrays = {}
        while time.monotonic() < until_s:
            answer = self._ask(request, arrays)
            if isinstance(answer, Done | Unfit):
                return answer.reason if isinstance(answer, Unfit) else ""
            if isinstance(answer, Wanted) and 0 <= answer.offset < len(weights.packet):
                piece = weights.packet[answer.offset : answer.offset + PART_BYTES]
                request, arrays = _part(load, answer.offset), {PART: np.frombuffer(piece, np.uint8)}
                continue
            if not isinstance(answer, Busy):
                place.opened_in = b""
                raise _Away("has begun anew just now" if isinstance(answer, Absent) else "does not take weights")
            request, arrays = load, {}
            self._closing.wait(BUSY_S)
        raise _Away(f"has not taken weights within {LOAD_WITHIN_S:g} s")

    # One question after the other

    def _ask(self, request: AnyRequest, arrays: Arrays | None = None) -> AnyAnswer:
        """The answer to `request`, which is given the next number. Raises _Away: none, or a refusal."""
        assert self._socket is not None  # `_round` has dialled
        self._number += 1
        until_s = time.monotonic() + ANSWER_WITHIN_S
        self._await(zmq.POLLOUT, until_s)
        self._socket.send(encode(_numbered(request, self._number), arrays), zmq.DONTWAIT)
        while True:
            self._await(zmq.POLLIN, until_s)
            try:
                answer, _ = decode_answer(self._socket.recv_multipart(zmq.DONTWAIT)[0])
            except WireError:
                raise _Away("answers in words that this release does not know") from None
            if isinstance(answer, Refusal) and answer.number in (0, self._number):
                raise _Away(f"refuses this robot: {answer.reason}")
            if answer.number == self._number:
                return answer

    def _await(self, event: int, until_s: float) -> None:
        assert self._socket is not None and self._monitor is not None  # `_round` has dialled
        while not self._closing.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._socket.poll(math.ceil(1e3 * min(left_s, LOOK_S)), event):
                return
            if self._monitor.poll(0):
                denied = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                raise _Away("does not allow this robot's key" if denied else "does not answer")
        raise _Away("does not answer")

    def _hang_up(self) -> None:
        if self._monitor is not None and self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        if self._socket is not None:
            self._socket.close(0)
        self._socket = self._monitor = None


def _part(load: Load, offset: int) -> Part:
    return Part(number=0, session=load.session, slot=load.slot, digest=load.digest, offset=offset)


def _numbered(request: AnyRequest, number: int) -> AnyRequest:
    return msgspec.structs.replace(request, number=number)
