"""The policy process: the policies of several robots, each reached with its robot's key alone.

One thread owns the socket and computes what robots are to do, one request after the other; a request that a newer one
for the same slot has overtaken is not answered. A second thread makes policies and loads weights, so that no robot
waits while another takes new ones. Nothing that a peer sends raises out of the loop.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import zmq
from blake3 import blake3

from hal.audit import unaudited
from hal.errors import SpecError
from hal.spec import RobotSpec
from user_sys.codec import decode_packet
from user_sys.errors import ConfigError, RunError, WireError
from user_sys.inference.slots import MAX_SESSIONS, Packets, Session, Slot, Slots
from user_sys.inference.wire import (
    ACTIONS,
    LOG_PROB,
    MAX_MESSAGE_BYTES,
    MAX_SLOTS,
    MAX_UNGREETED_BYTES,
    PART,
    SESSION_BYTES,
    Absent,
    Act,
    Acted,
    Answer,
    AnyRequest,
    Arrays,
    Busy,
    Done,
    Greeting,
    Load,
    Open,
    PackedWeights,
    Part,
    Refusal,
    Unfit,
    Wanted,
    Welcome,
    decode_request,
    encode,
)
from user_sys.policies.policy import Policy
from user_sys.tunnel.floods import FloodGuard
from user_sys.tunnel.gatekeeper import Gatekeeper, SparingLog
from user_sys.tunnel.keys import KeyPair, Keyring
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.listen import open_router
from user_sys.tunnel.scheduling import prefer_latency
from user_sys.tunnel.sockets import Socket, Wakeup, admit_ipv6, readable, receive_frames, send_frames

log = logging.getLogger(__name__)

TICK_S = 0.25
BURST = 64
KEPT_BYTES = 1 << 30
MAX_JOBS = MAX_SESSIONS * MAX_SLOTS  # of a robot, for the second thread: one for each slot that it may have

MakePolicy = Callable[[str, tuple[str, ...], RobotSpec, int], Policy]
"""Kind, features, spec and seed; raises ConfigError or SpecError for what there is not."""


class PolicyServer:
    """Serves from `run` until it is told to stop.

    Attributes:
        counters: what was answered and refused; any thread may read them.
    """

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair,
        ring: Keyring,
        make: MakePolicy,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        endpoint: ``tcp://ADDRESS:PORT``; port 0 takes a free one.
        device: as it is told to sessions.
        """
        self._endpoint, self._keys, self._ring, self._make, self._device = endpoint, keys, ring, make, device
        self.counters: Counter[str] = Counter()
        self._life = secrets.token_bytes(SESSION_BYTES)
        self._log = SparingLog()
        self._slots, self._packets = Slots(clock), Packets(KEPT_BYTES)
        self._jobs: Counter[str] = Counter()  # of each robot, that are not answered yet
        self._finished: deque[tuple[str, bytes, Answer]] = deque()

    def run(self, stop: threading.Event, listening: Callable[[str], None] = lambda endpoint: None) -> None:
        """Blocks until `stop` is set.

        Args:
            listening: told the endpoint, with the port that was chosen.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        prefer_latency()
        with ExitStack() as stack:
            self._wakeup = Wakeup()
            stack.callback(self._wakeup.close)
            context: zmq.Context[Socket] = zmq.Context()
            stack.callback(context.term)
            self._router: Socket = context.socket(zmq.ROUTER)
            stack.callback(self._router.close, 0)
            self._floods = FloodGuard(MAX_UNGREETED_BYTES, MAX_MESSAGE_BYTES)
            self._gate = Gatekeeper(
                context, self._router, self._ring, self.counters, self._log, unaudited, self._floods
            )
            stack.callback(self._gate.close)
            self._workshop = stack.enter_context(ThreadPoolExecutor(1, "workshop"))
            endpoint = self._bind()
            log.info("policy.listening endpoint=%s device=%s public_key=%s", endpoint, self._device, self._keys.public)
            listening(endpoint)
            self._serve(stop)

    def _bind(self) -> str:
        open_router(self._router, self._keys, TunnelLimits())
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        admit_ipv6(self._router, self._endpoint)
        try:
            self._router.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise RunError(
                f"the policy process cannot listen on {self._endpoint} ({error.strerror or error}); choose another "
                "address with --listen"
            ) from None
        self._gate.watch()
        self._ring.refresh()
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _serve(self, stop: threading.Event) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._gate.zap, self._gate.monitor, self._wakeup.fileno()):
            poller.register(source, zmq.POLLIN)
        next_tick = 0.0
        while not stop.is_set():
            ready = dict(poller.poll(math.ceil(1e3 * min(TICK_S, self._floods.check_every_s))))
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
            self._gate.authenticate()
            while self._finished:
                robot, routing_id, answer = self._finished.popleft()
                self._jobs[robot] -= 1
                self._send(routing_id, answer)
            self._receive()
            self._gate.check_floods(lambda: not readable(self._router))
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._ring.refresh()
                names = {entry.name for entry in self._ring.list() if entry.role == "robot"}
                self._slots.forget(names.__contains__)

    # Requests

    def _receive(self) -> None:
        """Answers what has come; of several that ask the same slot what to do, the newest."""
        acts: dict[tuple[str, bytes, int], tuple[bytes, Act, Arrays]] = {}
        for _ in range(BURST):
            if (frames := receive_frames(self._router)) is None:
                break
            self._floods.heard(frames)
            routing_id, public = frames[0].bytes, str(frames[-1].get("User-Id"))
            try:
                robot, request, arrays = self._read(frames, public)
            except WireError as error:
                self.counters["refused"] += 1
                self._log.warn(f"refused:{public}", f"policy.refused key={public} reason={error}")
                self._send(routing_id, Refusal(number=0, reason=str(error)))
                continue
            if isinstance(request, Act):
                key = robot, request.session, request.slot
                self.counters["overtaken"] += key in acts
                acts[key] = routing_id, request, arrays
                continue
            if isinstance(request, Greeting):
                self._floods.admit(int(frames[-1].get(zmq.SRCFD)), request.session)
            self._obey(robot, routing_id, request, arrays)
        for (robot, _, _), (routing_id, act, arrays) in acts.items():
            self._act(robot, routing_id, act, arrays)

    def _read(self, frames: list[zmq.Frame], public: str) -> tuple[str, AnyRequest, Arrays]:
        """The robot that asks, and what. Raises WireError: it may not, or this is no request."""
        if len(frames) != 2:
            raise WireError(f"a message of {len(frames) - 1} frames; it has one")
        entry = self._ring.find(public)
        if entry is None or entry.role != "robot":
            raise WireError("this key is not allowed" if entry is None else f"a {entry.role} has no policy here")
        return entry.name, *decode_request(frames[1].buffer)

    def _obey(self, robot: str, routing_id: bytes, request: AnyRequest, arrays: Arrays) -> None:
        try:
            match request:
                case Greeting():
                    self._slots.greet(robot, request.session, request.slots)
                    answer: Answer | None = Welcome(number=request.number, life=self._life, device=self._device)
                case _ if self._jobs[robot] >= MAX_JOBS:
                    answer = Busy(number=request.number)
                case Open():
                    answer = self._open(robot, routing_id, request)
                case Load() | Part():
                    answer = self._take_weights(robot, routing_id, request, arrays)
                case _:
                    raise WireError(f"{type(request).__name__} out of turn")
        except WireError as error:
            answer = Refusal(number=request.number, reason=str(error))
        if answer is not None:
            self._send(routing_id, answer)

    def _open(self, robot: str, routing_id: bytes, request: Open) -> Answer | None:
        session = self._slots.session(robot, request.session)
        if session is None:
            return Absent(number=request.number)
        slot = session.open(request.slot)

        def build() -> Answer:
            try:
                slot.policy = self._make(request.kind, request.features, request.spec, request.seed)
            except (ConfigError, SpecError) as error:
                return Refusal(number=request.number, reason=str(error)[:1000])
            log.info("policy.opened robot=%s slot=%d", robot, request.slot)
            return Done(number=request.number)

        self._work(robot, slot, routing_id, build)
        return None

    def _take_weights(self, robot: str, routing_id: bytes, request: Load | Part, arrays: Arrays) -> Answer | None:
        """Loads them where they are here, or asks for more of them; None where the answer follows."""
        session, number = self._slots.session(robot, request.session), request.number
        slot = None if session is None else session.slots.get(request.slot)
        if session is None or slot is None:
            return Absent(number=number)
        if slot.busy:
            return Busy(number=number)
        if slot.digest == request.digest:
            return Done(number=number)
        if (packet := self._packets.find(request.digest)) is not None:
            self._load(slot, robot, routing_id, request, packet)
            return None
        if isinstance(request, Load):
            return Wanted(number=number, offset=len(session.expect(request.digest, request.size_bytes).content))
        return self._take_part(session, slot, robot, routing_id, request, arrays)

    def _take_part(
        self, session: Session, slot: Slot, robot: str, routing_id: bytes, part: Part, arrays: Arrays
    ) -> Answer | None:
        arrival, piece = session.arrival, arrays.get(PART)
        if arrival is None or arrival.digest != part.digest:
            return Absent(number=part.number)
        if piece is None or piece.dtype != "uint8" or piece.ndim != 1:
            raise WireError(f"a part comes as an array {PART!r} of bytes")
        arrival.append(part.offset, piece.data)
        if not arrival.complete:
            return Wanted(number=part.number, offset=len(arrival.content))
        session.arrival = None
        self.counters["packets"] += 1
        self._load(slot, robot, routing_id, part, memoryview(arrival.content).toreadonly(), fresh=True)
        return None

    def _load(
        self,
        slot: Slot,
        robot: str,
        routing_id: bytes,
        request: Load | Part,
        packet: memoryview,
        *,
        fresh: bool = False,
    ) -> None:
        """`fresh`: they have just come, and nobody has looked at them yet."""

        def build() -> Answer:
            if slot.policy is None:
                return Refusal(number=request.number, reason="the policy of this slot could not be made")
            if fresh and blake3(packet).digest() != request.digest:
                raise WireError("weights came that have not the digest which they were announced with")
            self._packets.keep(request.digest, packet)
            try:
                slot.policy.load(decode_packet(packet, PackedWeights)[1])
            except WireError as error:
                return Unfit(number=request.number, reason=str(error)[:1000])
            slot.digest = request.digest
            log.info("policy.loaded robot=%s slot=%d digest=%s", robot, request.slot, request.digest.hex()[:16])
            return Done(number=request.number)

        self._work(robot, slot, routing_id, build)

    def _work(self, robot: str, slot: Slot, routing_id: bytes, build: Callable[[], Answer]) -> None:
        """Has the second thread do something to a robot's slot, and the answer sent then."""
        slot.busy = True
        self._jobs[robot] += 1

        def job() -> None:
            try:
                answer = build()
            except Exception as error:  # of any kind: one robot's weights must not end what the others act with
                log.exception("policy.failed")
                answer = Refusal(number=0, reason=f"{type(error).__name__} at the policy process; its log says more")
            slot.busy = False
            self._finished.append((robot, routing_id, answer))
            self._wakeup.set()

        self._workshop.submit(job)

    def _act(self, robot: str, routing_id: bytes, act: Act, arrays: Arrays) -> None:
        slot = self._slots.slot(robot, act.session, act.slot)
        if slot is None or slot.busy or slot.policy is None or slot.digest != act.digest:
            self._send(routing_id, Absent(number=act.number))
            return
        try:
            chunk = slot.policy.act(arrays, act.sentence, deterministic=act.deterministic)
        except SpecError as error:
            self._send(routing_id, Unfit(number=act.number, reason=str(error)[:1000]))
            return
        except (ValueError, TypeError, IndexError) as error:  # one robot's request ends nothing; a GPU's error does
            self._log.warn(f"act:{robot}", f"policy.cannot_act robot={robot}: {type(error).__name__}: {error}")
            self._send(routing_id, Refusal(number=act.number, reason="its policy cannot act; the log there says more"))
            return
        self.counters["acts"] += 1
        self._send(routing_id, Acted(number=act.number), {ACTIONS: chunk.actions, LOG_PROB: chunk.log_prob})

    def _send(self, routing_id: bytes, answer: Answer, arrays: Arrays | None = None) -> None:
        """A peer that is gone, or takes nothing in, does without."""
        if not send_frames(self._router, [routing_id, encode(answer, arrays)]):
            self.counters["unanswered"] += 1
