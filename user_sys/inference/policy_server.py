"""The policy server: runs the policies of several robots. Each robot reaches its own with its key.

One thread owns the socket and selects actions, one request after the other. It does not answer a request that a newer
one for the same slot has superseded. A second thread makes policies and loads weights, so that no robot waits while
another one's weights are loaded. No message of a peer raises out of the loop.
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

MAX_SESSIONS = 2  # of a robot: the running one, and its successor
SESSION_TIMEOUT_S = 60.0  # a session without a message for this long is removed
NO_WEIGHTS = b""
HOUSEKEEPING_PERIOD_S = 0.25
MAX_REQUESTS_PER_POLL = 64
MAX_CACHED_WEIGHTS_BYTES = 1 << 30
MAX_JOBS = MAX_SESSIONS * MAX_SLOTS  # of a robot, for the second thread: one for each of its slots
MAX_REASON_CHARS = 1000

PolicyFactory = Callable[[str, tuple[str, ...], RobotSpec, int], Policy]
"""Makes a policy from kind, features, spec and seed. Raises ConfigError or SpecError: there is no such policy."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PartialUpload:
    """A packet of weights that is being received. Its memory grows with the received bytes, not with `size_bytes`."""

    digest: bytes
    size_bytes: int
    content: bytearray = field(default_factory=bytearray)

    @property
    def is_complete(self) -> bool:
        return len(self.content) == self.size_bytes

    def append(self, offset: int, part: memoryview) -> None:
        """Appends the next bytes. Ignores a part that does not begin at the end of the previous one.

        Raises:
            WireError: the part is empty, or exceeds the announced size.
        """
        if not part or offset + len(part) > self.size_bytes:
            raise WireError(f"a part of {len(part)} bytes from {offset} on, of weights of {self.size_bytes}")
        if offset == len(self.content):
            self.content += part


@dataclass(eq=False)
class PolicySlot:
    """One policy. While it is `busy` the second thread makes or loads it, and no other thread uses it.

    Attributes:
        policy: None until it is made.
        digest: of the packet of its weights; empty before the first.
    """

    policy: Policy | None = None
    digest: bytes = NO_WEIGHTS
    busy: bool = False


@dataclass(eq=False)
class ClientSession:
    """The slots of one session of a robot, by number, and its upload in progress."""

    last_seen_s: float
    slots: dict[int, PolicySlot] = field(default_factory=dict)
    upload: PartialUpload | None = None

    def open(self, number: int) -> PolicySlot:
        """A new slot, in place of an existing one with that number. Raises WireError: too many slots."""
        if number not in self.slots and len(self.slots) >= MAX_SLOTS:
            raise WireError(f"a session has {MAX_SLOTS} slots at most")
        slot = self.slots[number] = PolicySlot()
        return slot

    def begin_upload(self, digest: bytes, size_bytes: int) -> PartialUpload:
        """The upload of that packet, new or in progress. Discards the upload of another packet."""
        if self.upload is None or (self.upload.digest, self.upload.size_bytes) != (digest, size_bytes):
            self.upload = PartialUpload(digest, size_bytes)
        return self.upload


class SessionTable:
    """The sessions of each robot. One thread calls it. Callers pass the robot of the peer's key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._robots: dict[str, OrderedDict[bytes, ClientSession]] = {}

    def heartbeat(self, robot: str, session: bytes, kept: Iterable[int]) -> None:
        """Adds or refreshes a session, and frees its slots except `kept`.

        If a robot has more than `MAX_SESSIONS`, the least recently seen session is removed.
        """
        sessions = self._robots.setdefault(robot, OrderedDict())
        found = sessions.setdefault(session, ClientSession(self._clock()))
        found.last_seen_s = self._clock()
        found.slots = {number: slot for number, slot in found.slots.items() if number in set(kept)}
        sessions.move_to_end(session)
        while len(sessions) > MAX_SESSIONS:
            sessions.popitem(last=False)

    def session(self, robot: str, session: bytes) -> ClientSession | None:
        """None before its first heartbeat, and after it was removed."""
        sessions = self._robots.get(robot)
        return None if sessions is None else sessions.get(session)

    def slot(self, robot: str, session: bytes, number: int) -> PolicySlot | None:
        found = self.session(robot, session)
        return None if found is None else found.slots.get(number)

    def expire(self, allowed: Callable[[str], bool]) -> None:
        """Removes sessions that have timed out, and the sessions of robots that are not `allowed` any more."""
        since_s = self._clock() - SESSION_TIMEOUT_S
        for robot, sessions in list(self._robots.items()):
            expired = [key for key, found in sessions.items() if found.last_seen_s < since_s or not allowed(robot)]
            for session in expired:
                del sessions[session]
            if not sessions:
                del self._robots[robot]


class EncodedWeightsCache:
    """Packets of weights by digest, so that each is uploaded once for all robots. Any thread may call it.

    It keeps the newest packet in any case, and earlier ones up to `limit_bytes` in total.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._packets: OrderedDict[bytes, memoryview] = OrderedDict()

    def get(self, digest: bytes) -> memoryview | None:
        with self._lock:
            if digest in self._packets:
                self._packets.move_to_end(digest)
            return self._packets.get(digest)

    def put(self, digest: bytes, packet: memoryview) -> None:
        with self._lock:
            self._packets[digest] = packet
            self._packets.move_to_end(digest)
            while len(self._packets) > 1 and sum(map(len, self._packets.values())) > self._limit_bytes:
                self._packets.popitem(last=False)


@dataclass(frozen=True)
class _Peer:
    """The sender of a request: its robot, and its address at the socket."""

    robot: str
    routing_id: bytes


class _SlotWorker:
    """The second thread: makes policies and loads weights. The socket's thread calls it; `close` when done.

    Attributes:
        wakeup: readable when a response is ready.
    """

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self._executor = ThreadPoolExecutor(1, "slot-worker")
        self._jobs: Counter[str] = Counter()  # of each robot, without a response so far
        self._finished: deque[tuple[_Peer, PolicyResponse]] = deque()

    def close(self) -> None:
        """Waits for the job in progress."""
        self._executor.shutdown()
        self.wakeup.close()

    def is_full(self, robot: str) -> bool:
        return self._jobs[robot] >= MAX_JOBS

    def submit(self, peer: _Peer, slot: PolicySlot, job: Callable[[], PolicyResponse]) -> None:
        """Runs `job` on a slot. `take_finished` then returns its response."""
        slot.busy = True
        self._jobs[peer.robot] += 1

        def run() -> None:
            try:
                response = job()
            except Exception as error:  # of any kind: one robot's weights must not stop the other robots
                log.exception("policy.failed")
                text = f"{type(error).__name__} at the policy server; its log says more"
                response = RequestRejected(number=0, reason=text)
            slot.busy = False
            self._finished.append((peer, response))
            self.wakeup.set()

        self._executor.submit(run)

    def take_finished(self) -> Iterable[tuple[_Peer, PolicyResponse]]:
        while self._finished:
            peer, response = self._finished.popleft()
            self._jobs[peer.robot] -= 1
            yield peer, response


class PolicyServer:
    """Serves policies while `run` runs.

    Attributes:
        counters: of answered and rejected requests; any thread may read them.
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
        device: the device name in `ServerInfo`.
        """
        self._endpoint, self._keys, self._ring, self._make, self._device = endpoint, keys, ring, make, device
        self.counters: Counter[str] = Counter()
        self._instance_id = secrets.token_bytes(SESSION_BYTES)
        self._log = RateLimitedLog()
        self._sessions, self._cache = SessionTable(clock), EncodedWeightsCache(MAX_CACHED_WEIGHTS_BYTES)

    def run(self, stop: threading.Event, on_listening: Callable[[str], None] = lambda endpoint: None) -> None:
        """Blocks until `stop` is set.

        Args:
            on_listening: called with the endpoint, with the port that was chosen.

        Raises:
            RunError: the port is in use, or the address is not one of this machine.
        """
        request_short_time_slice()
        with ExitStack() as stack:
            context: zmq.Context[ZmqSocket] = zmq.Context()
            stack.callback(context.term)
            self._router: ZmqSocket = context.socket(zmq.ROUTER)
            stack.callback(self._router.close, 0)
            self._quota = ReceiveQuotaGuard(MAX_FIRST_MESSAGE_BYTES, MAX_MESSAGE_BYTES)
            self._authenticator = Authenticator(
                context, self._router, self._ring, self.counters, self._log, discard_audit_event, self._quota
            )
            stack.callback(self._authenticator.close)
            self._worker = _SlotWorker()
            stack.callback(self._worker.close)
            endpoint = self._bind()
            log.info("policy.listening endpoint=%s device=%s public_key=%s", endpoint, self._device, self._keys.public)
            on_listening(endpoint)
            self._serve(stop)

    def _bind(self) -> str:
        configure_router(self._router, self._keys, TunnelLimits())
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        enable_ipv6(self._router, self._endpoint)
        try:
            self._router.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise RunError(
                f"the policy server cannot listen on {self._endpoint} ({error.strerror or error}); choose another "
                "address with --listen"
            ) from None
        self._authenticator.process_monitor_events()
        self._ring.refresh()
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _serve(self, stop: threading.Event) -> None:
        poller = zmq.Poller()
        wakeup, authenticator = self._worker.wakeup, self._authenticator
        for source in (self._router, authenticator.zap, authenticator.monitor, wakeup.fileno()):
            poller.register(source, zmq.POLLIN)
        next_housekeeping_s = 0.0
        while not stop.is_set():
            ready = dict(poller.poll(math.ceil(1e3 * min(HOUSEKEEPING_PERIOD_S, self._quota.check_interval_s))))
            if wakeup.fileno() in ready:
                wakeup.clear()
            authenticator.answer_zap_requests()
            for peer, response in self._worker.take_finished():
                self._send(peer.routing_id, response)
            self._receive()
            authenticator.check_receive_quotas(lambda: not has_message(self._router))
            if time.monotonic() >= next_housekeeping_s:
                next_housekeeping_s = time.monotonic() + HOUSEKEEPING_PERIOD_S
                self._ring.refresh()
                names = {entry.name for entry in self._ring.list() if entry.role == "robot"}
                self._sessions.expire(names.__contains__)

    # Requests

    def _receive(self) -> None:
        """Answers the waiting requests. Of several action requests for a slot it answers the newest."""
        actions: dict[tuple[str, bytes, int], tuple[_Peer, ActionRequest, Arrays]] = {}
        for _ in range(MAX_REQUESTS_PER_POLL):
            if (frames := receive_frames(self._router)) is None:
                break
            self._quota.on_message(frames)
            routing_id, public = frames[0].bytes, str(frames[-1].get("User-Id"))
            try:
                robot, request, arrays = self._read(frames, public)
            except WireError as error:
                self.counters["refused"] += 1
                self._log.warn(f"refused:{public}", f"policy.refused key={public} reason={error}")
                self._send(routing_id, RequestRejected(number=0, reason=str(error)))
                continue
            peer = _Peer(robot, routing_id)
            if isinstance(request, ActionRequest):
                key = robot, request.session, request.slot
                self.counters["superseded"] += key in actions
                actions[key] = peer, request, arrays
                continue
            if isinstance(request, SessionHeartbeat):
                self._quota.authorize(int(frames[-1].get(zmq.SRCFD)), request.session)
            self._handle(peer, request, arrays)
        for peer, action_request, arrays in actions.values():
            self._select_actions(peer, action_request, arrays)

    def _read(self, frames: list[zmq.Frame], public: str) -> tuple[str, AnyRequest, Arrays]:
        """The robot of the peer, and its request. Raises WireError: it is not allowed, or this is not a request."""
        if len(frames) != 2:
            raise WireError(f"a message of {len(frames) - 1} frames; it has one")
        entry = self._ring.find(public)
        if entry is None or entry.role != "robot":
            raise WireError("this key is not allowed" if entry is None else f"a {entry.role} has no policy here")
        return entry.name, *decode_request(frames[1].buffer)

    def _handle(self, peer: _Peer, request: AnyRequest, arrays: Arrays) -> None:
        try:
            match request:
                case SessionHeartbeat():
                    self._sessions.heartbeat(peer.robot, request.session, request.slots)
                    response: PolicyResponse | None = ServerInfo(
                        number=request.number, instance_id=self._instance_id, device=self._device
                    )
                case _ if self._worker.is_full(peer.robot):
                    response = SlotBusy(number=request.number)
                case OpenSlot():
                    response = self._open_slot(peer, request)
                case LoadSlotWeights() | WeightsPart():
                    response = self._load_weights(peer, request, arrays)
                case _:
                    raise WireError(f"{type(request).__name__} out of turn")
        except WireError as error:
            response = RequestRejected(number=request.number, reason=str(error))
        if response is not None:
            self._send(peer.routing_id, response)

    def _open_slot(self, peer: _Peer, request: OpenSlot) -> PolicyResponse | None:
        session = self._sessions.session(peer.robot, request.session)
        if session is None:
            return SlotNotFound(number=request.number)
        slot = session.open(request.slot)

        def make() -> PolicyResponse:
            try:
                slot.policy = self._make(request.kind, request.features, request.spec, request.seed)
            except (ConfigError, SpecError) as error:
                return RequestRejected(number=request.number, reason=str(error)[:MAX_REASON_CHARS])
            log.info("policy.opened robot=%s slot=%d", peer.robot, request.slot)
            return SlotReady(number=request.number)

        self._worker.submit(peer, slot, make)
        return None

    def _load_weights(
        self, peer: _Peer, request: LoadSlotWeights | WeightsPart, arrays: Arrays
    ) -> PolicyResponse | None:
        """Loads the weights if they are cached, or requests their next part. None if the response follows later."""
        session, number = self._sessions.session(peer.robot, request.session), request.number
        slot = None if session is None else session.slots.get(request.slot)
        if session is None or slot is None:
            return SlotNotFound(number=number)
        if slot.busy:
            return SlotBusy(number=number)
        if slot.digest == request.digest:
            return SlotReady(number=number)
        if (packet := self._cache.get(request.digest)) is not None:
            self._submit_load(peer, slot, request, packet)
            return None
        if isinstance(request, LoadSlotWeights):
            upload = session.begin_upload(request.digest, request.size_bytes)
            return NextPart(number=number, offset=len(upload.content))
        return self._add_part(peer, session, slot, request, arrays)

    def _add_part(
        self, peer: _Peer, session: ClientSession, slot: PolicySlot, part: WeightsPart, arrays: Arrays
    ) -> PolicyResponse | None:
        upload, piece = session.upload, arrays.get(PART_ARRAY)
        if upload is None or upload.digest != part.digest:
            return SlotNotFound(number=part.number)
        if piece is None or piece.dtype != "uint8" or piece.ndim != 1:
            raise WireError(f"a part comes as an array {PART_ARRAY!r} of bytes")
        upload.append(part.offset, piece.data)
        if not upload.is_complete:
            return NextPart(number=part.number, offset=len(upload.content))
        session.upload = None
        self.counters["packets"] += 1
        self._submit_load(peer, slot, part, memoryview(upload.content).toreadonly(), verify=True)
        return None

    def _submit_load(
        self,
        peer: _Peer,
        slot: PolicySlot,
        request: LoadSlotWeights | WeightsPart,
        packet: memoryview,
        *,
        verify: bool = False,
    ) -> None:
        """`verify`: check the packet's digest, which was not done yet."""

        def load() -> PolicyResponse:
            if slot.policy is None:
                return RequestRejected(number=request.number, reason="the policy of this slot could not be made")
            if verify and blake3(packet).digest() != request.digest:
                raise WireError("the uploaded weights do not match their announced digest")
            self._cache.put(request.digest, packet)
            try:
                slot.policy.load(decode_packet(packet, PackedWeights)[1])
            except WireError as error:
                return InvalidInput(number=request.number, reason=str(error)[:MAX_REASON_CHARS])
            slot.digest = request.digest
            digest = request.digest.hex()[:16]
            log.info("policy.loaded robot=%s slot=%d digest=%s", peer.robot, request.slot, digest)
            return SlotReady(number=request.number)

        self._worker.submit(peer, slot, load)

    def _select_actions(self, peer: _Peer, request: ActionRequest, arrays: Arrays) -> None:
        slot, number = self._sessions.slot(peer.robot, request.session, request.slot), request.number
        if slot is None or slot.busy or slot.policy is None or slot.digest != request.digest:
            self._send(peer.routing_id, SlotNotFound(number=number))
            return
        try:
            chunk = slot.policy.act(arrays, request.sentence, deterministic=request.deterministic)
        except SpecError as error:
            self._send(peer.routing_id, InvalidInput(number=number, reason=str(error)[:MAX_REASON_CHARS]))
            return
        except (
            ValueError,
            TypeError,
            IndexError,
        ) as error:  # of one robot's request; an error of the GPU ends the loop
            text = f"policy.act_failed robot={peer.robot}: {type(error).__name__}: {error}"
            self._log.warn(f"act:{peer.robot}", text)
            reason = "the policy failed to select an action; the policy server's log says more"
            self._send(peer.routing_id, RequestRejected(number=number, reason=reason))
            return
        self.counters["acts"] += 1
        arrays = {ACTIONS: chunk.actions, LOG_PROB: chunk.log_prob}
        self._send(peer.routing_id, ActionResponse(number=number), arrays)

    def _send(self, routing_id: bytes, response: PolicyResponse, arrays: Arrays | None = None) -> None:
        """Drops the response if the peer is gone or reads too slowly."""
        if not send_frames(self._router, [routing_id, encode(response, arrays)]):
            self.counters["unanswered"] += 1
