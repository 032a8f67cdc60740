"""What the sessions of each robot have at a policy process: their slots, and the weights that are on their way.

The policy process: the policies of several robots, each reached with its robot's key alone.

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
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import zmq
from blake3 import blake3

from hal.audit import discard_audit_event
from hal.errors import SpecError
from hal.spec import RobotSpec
from user_sys.codec import decode_packet
from user_sys.errors import ConfigError, RunError, WireError
from user_sys.inference.protocol import (
    ACTIONS,
    LOG_PROB,
    MAX_FIRST_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SLOTS,
    PART_ARRAY,
    SESSION_BYTES,
    ActionRequest,
    ActionResponse,
    AnyRequest,
    Arrays,
    InvalidInput,
    LoadSlotWeights,
    NextPart,
    OpenSlot,
    PackedWeights,
    PolicyResponse,
    RequestRejected,
    ServerInfo,
    SessionHeartbeat,
    SlotBusy,
    SlotNotFound,
    SlotReady,
    WeightsPart,
    decode_request,
    encode,
)
from user_sys.policies.policy import Policy
from user_sys.tunnel.endpoint import configure_router
from user_sys.tunnel.keys import KeyPair, Keyring
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.receive_quota import ReceiveQuotaGuard
from user_sys.tunnel.session import Authenticator, RateLimitedLog
from user_sys.tunnel.sockets import (
    Wakeup,
    ZmqSocket,
    enable_ipv6,
    has_message,
    receive_frames,
    request_short_time_slice,
    send_frames,
)

MAX_SESSIONS = 2  # of a robot: one, and its successor
SESSION_TIMEOUT_S = 60.0  # a session that has said nothing for so long is over
NO_WEIGHTS = b""


@dataclass(eq=False)
class PartialUpload:
    """A packet of weights of which a part is here. Memory grows with what has come, not with what was announced."""

    digest: bytes
    size_bytes: int
    content: bytearray = field(default_factory=bytearray)

    @property
    def is_complete(self) -> bool:
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
class PolicySlot:
    """One policy. While it is `busy` a thread of its own makes or loads it, and nobody else touches it.

    Attributes:
        policy: None until it is made.
        digest: of the packet of its weights; empty before the first.
    """

    policy: Policy | None = None
    digest: bytes = NO_WEIGHTS
    busy: bool = False


@dataclass(eq=False)
class ClientSession:
    """What one session of a robot has here, by number; it sends one packet of weights at a time."""

    last_seen_s: float
    slots: dict[int, PolicySlot] = field(default_factory=dict)
    upload: PartialUpload | None = None

    def open(self, number: int) -> PolicySlot:
        """A new slot in the place of whatever had that number. Raises WireError: there are as many as there may be."""
        if number not in self.slots and len(self.slots) >= MAX_SLOTS:
            raise WireError(f"a session has {MAX_SLOTS} slots at most")
        slot = self.slots[number] = PolicySlot()
        return slot

    def begin_upload(self, digest: bytes, size_bytes: int) -> PartialUpload:
        """The packet with that digest, of which a part may be here; another that was on its way is dropped."""
        if self.upload is None or (self.upload.digest, self.upload.size_bytes) != (digest, size_bytes):
            self.upload = PartialUpload(digest, size_bytes)
        return self.upload


class SessionTable:
    """One thread calls it. Whoever asks names the robot by its key: nobody reaches another robot's slots."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._robots: dict[str, OrderedDict[bytes, ClientSession]] = {}

    def heartbeat(self, robot: str, session: bytes, kept: Iterable[int]) -> None:
        """A session is there, and has a use for the slots `kept`; its others are freed.

        Of more than `MAX_SESSIONS` of a robot, the one that was silent for longest is forgotten.
        """
        sessions = self._robots.setdefault(robot, OrderedDict())
        found = sessions.setdefault(session, ClientSession(self._clock()))
        found.last_seen_s = self._clock()
        found.slots = {number: slot for number, slot in found.slots.items() if number in set(kept)}
        sessions.move_to_end(session)
        while len(sessions) > MAX_SESSIONS:
            sessions.popitem(last=False)

    def session(self, robot: str, session: bytes) -> ClientSession | None:
        """None where it has not greeted, or was forgotten."""
        sessions = self._robots.get(robot)
        return None if sessions is None else sessions.get(session)

    def slot(self, robot: str, session: bytes, number: int) -> PolicySlot | None:
        found = self.session(robot, session)
        return None if found is None else found.slots.get(number)

    def expire(self, allowed: Callable[[str], bool]) -> None:
        """Lets go of sessions that have fallen silent, and of robots that are not `allowed` any more."""
        since_s = self._clock() - SESSION_TIMEOUT_S
        for robot, sessions in list(self._robots.items()):
            for session in [
                key for key, found in sessions.items() if found.last_seen_s < since_s or not allowed(robot)
            ]:
                del sessions[session]
            if not sessions:
                del self._robots[robot]


class EncodedWeightsCache:
    """Packets of weights by their digests: what one robot has brought, the next need not send. Any thread calls it.

    The newest stays in any case, and others as long as all together have at most `limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, memoryview] = OrderedDict()

    def get(self, digest: bytes) -> memoryview | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def put(self, digest: bytes, packet: memoryview) -> None:
        with self._lock:
            self._kept[digest] = packet
            self._kept.move_to_end(digest)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self._limit_bytes:
                self._kept.popitem(last=False)


log = logging.getLogger(__name__)

HOUSEKEEPING_PERIOD_S = 0.25
MAX_REQUESTS_PER_POLL = 64
MAX_CACHED_WEIGHTS_BYTES = 1 << 30
MAX_JOBS = MAX_SESSIONS * MAX_SLOTS  # of a robot, for the second thread: one for each slot that it may have

PolicyFactory = Callable[[str, tuple[str, ...], RobotSpec, int], Policy]
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
        make: PolicyFactory,
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
        self._log = RateLimitedLog()
        self._slots, self._packets = SessionTable(clock), EncodedWeightsCache(MAX_CACHED_WEIGHTS_BYTES)
        self._jobs: Counter[str] = Counter()  # of each robot, that are not answered yet
        self._finished: deque[tuple[str, bytes, PolicyResponse]] = deque()

    def run(self, stop: threading.Event, listening: Callable[[str], None] = lambda endpoint: None) -> None:
        """Blocks until `stop` is set.

        Args:
            listening: told the endpoint, with the port that was chosen.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        request_short_time_slice()
        with ExitStack() as stack:
            self._wakeup = Wakeup()
            stack.callback(self._wakeup.close)
            context: zmq.Context[ZmqSocket] = zmq.Context()
            stack.callback(context.term)
            self._router: ZmqSocket = context.socket(zmq.ROUTER)
            stack.callback(self._router.close, 0)
            self._floods = ReceiveQuotaGuard(MAX_FIRST_MESSAGE_BYTES, MAX_MESSAGE_BYTES)
            self._gate = Authenticator(
                context, self._router, self._ring, self.counters, self._log, discard_audit_event, self._floods
            )
            stack.callback(self._gate.close)
            self._workshop = stack.enter_context(ThreadPoolExecutor(1, "workshop"))
            endpoint = self._bind()
            log.info("policy.listening endpoint=%s device=%s public_key=%s", endpoint, self._device, self._keys.public)
            listening(endpoint)
            self._serve(stop)

    def _bind(self) -> str:
        configure_router(self._router, self._keys, TunnelLimits())
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        enable_ipv6(self._router, self._endpoint)
        try:
            self._router.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise RunError(
                f"the policy process cannot listen on {self._endpoint} ({error.strerror or error}); choose another "
                "address with --listen"
            ) from None
        self._gate.process_monitor_events()
        self._ring.refresh()
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _serve(self, stop: threading.Event) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._gate.zap, self._gate.monitor, self._wakeup.fileno()):
            poller.register(source, zmq.POLLIN)
        next_tick = 0.0
        while not stop.is_set():
            ready = dict(poller.poll(math.ceil(1e3 * min(HOUSEKEEPING_PERIOD_S, self._floods.check_interval_s))))
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
            self._gate.answer_zap_requests()
            while self._finished:
                robot, routing_id, answer = self._finished.popleft()
                self._jobs[robot] -= 1
                self._send(routing_id, answer)
            self._receive()
            self._gate.check_receive_quotas(lambda: not has_message(self._router))
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + HOUSEKEEPING_PERIOD_S
                self._ring.refresh()
                names = {entry.name for entry in self._ring.list() if entry.role == "robot"}
                self._slots.expire(names.__contains__)

    # Requests

    def _receive(self) -> None:
        """Answers what has come; of several that ask the same slot what to do, the newest."""
        acts: dict[tuple[str, bytes, int], tuple[bytes, ActionRequest, Arrays]] = {}
        for _ in range(MAX_REQUESTS_PER_POLL):
            if (frames := receive_frames(self._router)) is None:
                break
            self._floods.on_message(frames)
            routing_id, public = frames[0].bytes, str(frames[-1].get("User-Id"))
            try:
                robot, request, arrays = self._read(frames, public)
            except WireError as error:
                self.counters["refused"] += 1
                self._log.warn(f"refused:{public}", f"policy.refused key={public} reason={error}")
                self._send(routing_id, RequestRejected(number=0, reason=str(error)))
                continue
            if isinstance(request, ActionRequest):
                key = robot, request.session, request.slot
                self.counters["overtaken"] += key in acts
                acts[key] = routing_id, request, arrays
                continue
            if isinstance(request, SessionHeartbeat):
                self._floods.authorize(int(frames[-1].get(zmq.SRCFD)), request.session)
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
                case SessionHeartbeat():
                    self._slots.heartbeat(robot, request.session, request.slots)
                    answer: PolicyResponse | None = ServerInfo(
                        number=request.number, instance_id=self._life, device=self._device
                    )
                case _ if self._jobs[robot] >= MAX_JOBS:
                    answer = SlotBusy(number=request.number)
                case OpenSlot():
                    answer = self._open(robot, routing_id, request)
                case LoadSlotWeights() | WeightsPart():
                    answer = self._take_weights(robot, routing_id, request, arrays)
                case _:
                    raise WireError(f"{type(request).__name__} out of turn")
        except WireError as error:
            answer = RequestRejected(number=request.number, reason=str(error))
        if answer is not None:
            self._send(routing_id, answer)

    def _open(self, robot: str, routing_id: bytes, request: OpenSlot) -> PolicyResponse | None:
        session = self._slots.session(robot, request.session)
        if session is None:
            return SlotNotFound(number=request.number)
        slot = session.open(request.slot)

        def build() -> PolicyResponse:
            try:
                slot.policy = self._make(request.kind, request.features, request.spec, request.seed)
            except (ConfigError, SpecError) as error:
                return RequestRejected(number=request.number, reason=str(error)[:1000])
            log.info("policy.opened robot=%s slot=%d", robot, request.slot)
            return SlotReady(number=request.number)

        self._work(robot, slot, routing_id, build)
        return None

    def _take_weights(
        self, robot: str, routing_id: bytes, request: LoadSlotWeights | WeightsPart, arrays: Arrays
    ) -> PolicyResponse | None:
        """Loads them where they are here, or asks for more of them; None where the answer follows."""
        session, number = self._slots.session(robot, request.session), request.number
        slot = None if session is None else session.slots.get(request.slot)
        if session is None or slot is None:
            return SlotNotFound(number=number)
        if slot.busy:
            return SlotBusy(number=number)
        if slot.digest == request.digest:
            return SlotReady(number=number)
        if (packet := self._packets.get(request.digest)) is not None:
            self._load(slot, robot, routing_id, request, packet)
            return None
        if isinstance(request, LoadSlotWeights):
            return NextPart(number=number, offset=len(session.begin_upload(request.digest, request.size_bytes).content))
        return self._take_part(session, slot, robot, routing_id, request, arrays)

    def _take_part(
        self, session: ClientSession, slot: PolicySlot, robot: str, routing_id: bytes, part: WeightsPart, arrays: Arrays
    ) -> PolicyResponse | None:
        arrival, piece = session.upload, arrays.get(PART_ARRAY)
        if arrival is None or arrival.digest != part.digest:
            return SlotNotFound(number=part.number)
        if piece is None or piece.dtype != "uint8" or piece.ndim != 1:
            raise WireError(f"a part comes as an array {PART_ARRAY!r} of bytes")
        arrival.append(part.offset, piece.data)
        if not arrival.is_complete:
            return NextPart(number=part.number, offset=len(arrival.content))
        session.upload = None
        self.counters["packets"] += 1
        self._load(slot, robot, routing_id, part, memoryview(arrival.content).toreadonly(), fresh=True)
        return None

    def _load(
        self,
        slot: PolicySlot,
        robot: str,
        routing_id: bytes,
        request: LoadSlotWeights | WeightsPart,
        packet: memoryview,
        *,
        fresh: bool = False,
    ) -> None:
        """`fresh`: they have just come, and nobody has looked at them yet."""

        def build() -> PolicyResponse:
            if slot.policy is None:
                return RequestRejected(number=request.number, reason="the policy of this slot could not be made")
            if fresh and blake3(packet).digest() != request.digest:
                raise WireError("weights came that have not the digest which they were announced with")
            self._packets.put(request.digest, packet)
            try:
                slot.policy.load(decode_packet(packet, PackedWeights)[1])
            except WireError as error:
                return InvalidInput(number=request.number, reason=str(error)[:1000])
            slot.digest = request.digest
            log.info("policy.loaded robot=%s slot=%d digest=%s", robot, request.slot, request.digest.hex()[:16])
            return SlotReady(number=request.number)

        self._work(robot, slot, routing_id, build)

    def _work(self, robot: str, slot: PolicySlot, routing_id: bytes, build: Callable[[], PolicyResponse]) -> None:
        """Has the second thread do something to a robot's slot, and the answer sent then."""
        slot.busy = True
        self._jobs[robot] += 1

        def job() -> None:
            try:
                answer = build()
            except Exception as error:  # of any kind: one robot's weights must not end what the others act with
                log.exception("policy.failed")
                answer = RequestRejected(
                    number=0, reason=f"{type(error).__name__} at the policy process; its log says more"
                )
            slot.busy = False
            self._finished.append((robot, routing_id, answer))
            self._wakeup.set()

        self._workshop.submit(job)

    def _act(self, robot: str, routing_id: bytes, act: ActionRequest, arrays: Arrays) -> None:
        slot = self._slots.slot(robot, act.session, act.slot)
        if slot is None or slot.busy or slot.policy is None or slot.digest != act.digest:
            self._send(routing_id, SlotNotFound(number=act.number))
            return
        try:
            chunk = slot.policy.act(arrays, act.sentence, deterministic=act.deterministic)
        except SpecError as error:
            self._send(routing_id, InvalidInput(number=act.number, reason=str(error)[:1000]))
            return
        except (ValueError, TypeError, IndexError) as error:  # one robot's request ends nothing; a GPU's error does
            self._log.warn(f"act:{robot}", f"policy.cannot_act robot={robot}: {type(error).__name__}: {error}")
            self._send(
                routing_id, RequestRejected(number=act.number, reason="its policy cannot act; the log there says more")
            )
            return
        self.counters["acts"] += 1
        self._send(routing_id, ActionResponse(number=act.number), {ACTIONS: chunk.actions, LOG_PROB: chunk.log_prob})

    def _send(self, routing_id: bytes, answer: PolicyResponse, arrays: Arrays | None = None) -> None:
        """A peer that is gone, or takes nothing in, does without."""
        if not send_frames(self._router, [routing_id, encode(answer, arrays)]):
            self.counters["unanswered"] += 1
