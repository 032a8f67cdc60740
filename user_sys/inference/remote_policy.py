"""Policies that run in a policy server (`user_sys.inference.policy_server`), as a session uses them.

`RequestClient` is the control loop's connection, with one request at a time and a short timeout.
`PolicyServerConnection` is a thread with a second connection. It opens the session's slots and uploads their weights,
again after the server restarts.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import zmq
from blake3 import blake3
from zmq.utils.monitor import recv_monitor_message

from hal.errors import SpecError
from hal.spec import Array, ArraySpec, RobotSpec
from user_sys.codec import encode_packet
from user_sys.errors import ConfigError, PolicyUnavailable, UserSysError, WireError
from user_sys.inference.protocol import (
    ACTIONS,
    LOG_PROB,
    MAX_MESSAGE_BYTES,
    MAX_SLOTS,
    MAX_WEIGHTS_BYTES,
    PART_ARRAY,
    PART_BYTES,
    POLICY_PROTOCOL_VERSION,
    SESSION_BYTES,
    ActionRequest,
    ActionResponse,
    AnyRequest,
    AnyResponse,
    Arrays,
    InvalidInput,
    LoadSlotWeights,
    NextPart,
    OpenSlot,
    PackedWeights,
    RequestRejected,
    ServerInfo,
    SessionHeartbeat,
    SlotBusy,
    SlotNotFound,
    SlotReady,
    WeightsPart,
    decode_response,
    encode,
)
from user_sys.messages import Precision
from user_sys.policies.mlp import feature_specs, require_features
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.sockets import ZmqSocket, configure_socket, enable_ipv6

MAX_ADDRESS_BYTES = 256
PROBE_PERIOD_S = 0.1
HEARTBEAT_PERIOD_S = 1.0
RECONNECT_S = 0.25
RESPONSE_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 120.0
BUSY_RETRY_S = 0.02
POLL_S = 0.1  # how often a wait checks whether it is cancelled
CLOSE_TIMEOUT_S = 5.0
MIN_ACTION_TIMEOUT_S = 0.002
PIPE_MESSAGES = 16
CONNECTION_TIMEOUT_S = 3.0  # a connection without a response for this long is opened again
_DISCONNECT_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED

log = logging.getLogger(__name__)


def read_server_address(path: Path) -> str:
    """The endpoint of a run's policy server, from a file that the server rewrites at each start.

    Empty if the file is missing or unreadable.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_ADDRESS_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


class ServerIdentity(NamedTuple):
    """A policy server's endpoint, and the identifier of its process."""

    endpoint: str
    instance_id: bytes


class RequestClient:
    """The control loop's connection to a policy server. One thread calls it.

    A response counts only if it arrives in time and answers the newest request. After a timeout the client does not
    wait: it sends a request every `PROBE_PERIOD_S`, or every `timeout_s` if that is longer, and waits again once the
    newest of these was answered.
    """

    def __init__(
        self, connect: Callable[[str], ZmqSocket], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ):
        """Args:
        connect: returns a socket that is connected to an endpoint, without blocking.
        timeout_s: the longest wait for a response.
        """
        self._open_socket, self._timeout_s, self._clock = connect, timeout_s, clock
        self._socket: ZmqSocket | None = None
        self._server: ServerIdentity | None = None
        self._number = 0
        self._is_unresponsive = False
        self._probe_at_s = 0.0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def call(
        self, server: ServerIdentity, make_request: Callable[[int], ActionRequest], arrays: Arrays
    ) -> tuple[AnyResponse, Arrays] | None:
        """The response to ``make_request(number)``; None if none arrives in time, or if the server is unresponsive.

        Blocks for `timeout_s` at most, and not at all while the server is unresponsive.
        """
        self._connect(server)
        if self._is_unresponsive and not self._has_answered():
            if self._clock() >= self._probe_at_s:
                self._schedule_probe()
                self._send(make_request, arrays)
            return None
        response = self._await_response() if self._send(make_request, arrays) else None
        self._is_unresponsive = response is None
        if self._is_unresponsive:
            self._schedule_probe()
        return response

    def _schedule_probe(self) -> None:
        self._probe_at_s = self._clock() + max(PROBE_PERIOD_S, self._timeout_s)

    def _connect(self, server: ServerIdentity) -> None:
        """Reconnects to a restarted server at once, before libzmq detects the restart."""
        if server != self._server or self._socket is None:
            self.close()
            self._socket, self._server = self._open_socket(server.endpoint), server

    def _send(self, make_request: Callable[[int], ActionRequest], arrays: Arrays) -> bool:
        """False if libzmq takes no message, because it is not connected."""
        assert self._socket is not None  # `_connect` was called
        self._number += 1
        deadline_s = self._clock() + self._timeout_s
        packet = encode(make_request(self._number), arrays)
        while True:
            try:
                self._socket.send(packet, zmq.DONTWAIT)
                return True
            except zmq.Again:
                if self._is_unresponsive or not self._poll(zmq.POLLOUT, deadline_s):
                    return False

    def _await_response(self) -> tuple[AnyResponse, Arrays] | None:
        deadline_s = self._clock() + self._timeout_s
        while self._poll(zmq.POLLIN, deadline_s):
            if (response := self._receive()) is not None:
                return response
        return None

    def _poll(self, event: int, deadline_s: float) -> bool:
        assert self._socket is not None  # `_connect` was called
        return bool(self._socket.poll(max(0, math.ceil(1e3 * (deadline_s - self._clock()))), event))

    def _has_answered(self) -> bool:
        """Reads the received messages without waiting. Whether one of them answers the newest request."""
        while self._poll(zmq.POLLIN, 0.0):
            if self._receive() is not None:
                self._is_unresponsive = False
        return not self._is_unresponsive

    def _receive(self) -> tuple[AnyResponse, Arrays] | None:
        """The next message, if it answers the newest request."""
        assert self._socket is not None  # `_connect` was called
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        try:
            response, arrays = decode_response(frames[0])
        except WireError:
            return None
        return (response, arrays) if response.number in (0, self._number) else None


class EncodedWeights:
    """`packet` holds a `protocol.PackedWeights`; `digest` is its BLAKE3. Both are empty without weights."""

    def __init__(self, packet: bytes = b"", digest: bytes = b"") -> None:
        self.packet, self.digest = packet, digest


class RemoteSlot:
    """One policy's slot: its intended state, and its known state at the server.

    Attributes:
        number: of the slot.
        active: the weights that the policy acts with.
        pending: the weights of a `PolicyServerConnection.load` in progress.
        rejection: why the server rejected the weights of the last load.
        is_resolved: set when a load has succeeded, was rejected, or cannot be done now.
        opened_at: the server instance at which the slot was opened last.
        open_count: how often it was opened.
        server_digest: digest of the weights at the server; None if it is not known.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed
        self.active = EncodedWeights()
        self.pending: EncodedWeights | None = None
        self.rejection = ""
        self.is_resolved = threading.Event()
        self.opened_at = b""
        self.open_count = 0
        self.server_digest: bytes | None = None

    @property
    def is_ready(self) -> bool:
        return self.server_digest == self.active.digest

    def next_seed(self) -> int:
        """A seed for the next opening, so that a reopened policy does not repeat its random numbers."""
        if self.open_count == 0:
            return self.seed
        return int(np.random.SeedSequence((self.seed, self.open_count)).generate_state(1, np.uint32)[0])


class _Unavailable(UserSysError):
    """The server does not serve this session now. The message continues the text "the policy at HOST"."""


class ServerAccess(Protocol):
    """How a connection finds a policy server and opens slots there."""

    def locate(self) -> str:
        """The server's endpoint; empty if it is not known."""

    def connect(self, endpoint: str) -> ZmqSocket:
        """A socket that is connected to `endpoint`. Does not block."""

    def open_request(self, number: int, slot: RemoteSlot) -> OpenSlot:
        """The request, with its number, that opens `slot`."""


class PolicyServerConnection:
    """Opens slots and uploads weights in a thread with its own connection, from `start` to `close`.

    Attributes:
        server: the server that was reached last; None before the first.
        unavailable_reason: why the server cannot be used, to follow "the policy at HOST"; empty if it can.
        failure: the error that ended the thread, if any.
    """

    def __init__(self, session: bytes, access: ServerAccess) -> None:
        """`session`: 32 random bytes that identify the session."""
        self._session, self._access = session, access
        self.server: ServerIdentity | None = None
        self.unavailable_reason = "is not found yet"
        self.endpoint = ""
        self.failure: Exception | None = None
        self._slots: WeakValueDictionary[int, RemoteSlot] = WeakValueDictionary()
        self._lock = threading.Lock()  # guards `_slots`, and the active and pending weights of each
        self._socket: ZmqSocket | None = None
        self._monitor: ZmqSocket | None = None
        self._number = 0
        self._wakeup, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="policy-connection", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and any wait in `load`."""
        self._closing.set()
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def register(self, slot: RemoteSlot) -> None:
        """Opens `slot` at the server, and keeps it open for as long as the object exists."""
        with self._lock:
            self._slots[slot.number] = slot
        self._wakeup.set()

    def wake(self) -> None:
        """Checks the slots soon."""
        self._wakeup.set()

    def load(self, slot: RemoteSlot, weights: EncodedWeights) -> None:
        """Uploads `weights`. Blocks until the server has them or cannot be reached.

        An unreachable server gets them when it returns.

        Raises:
            WireError: the policy rejects them; it keeps its earlier weights.
        """
        with self._lock:
            slot.pending, slot.rejection = weights, ""
            slot.is_resolved.clear()
        self._wakeup.set()
        if self._closing.is_set() or not slot.is_resolved.wait(LOAD_TIMEOUT_S) or self._closing.is_set():
            self._resolve(slot)
        if slot.rejection:
            raise WireError(slot.rejection)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._try_sync()
                self._wakeup.wait(RECONNECT_S if self.unavailable_reason else HEARTBEAT_PERIOD_S)
                self._wakeup.clear()
        except Exception as error:  # of any kind: the session checks `failure`
            log.exception("policy.connection_failed")
            self.failure = error
        self._closing.set()  # from here on no load waits for this thread
        self._disconnect()
        for slot in self._registered():
            slot.is_resolved.set()

    def _try_sync(self) -> None:
        try:
            self._sync()
            self.unavailable_reason = ""
        except _Unavailable as why:
            if str(why) != self.unavailable_reason:
                log.warning("policy.unavailable endpoint=%s: the policy %s", self.endpoint, why)
            self.unavailable_reason = str(why)
            self._disconnect()
            for slot in self._registered():
                self._resolve(slot)

    def _registered(self) -> list[RemoteSlot]:
        with self._lock:
            return list(self._slots.values())

    def _resolve(self, slot: RemoteSlot, rejection: str = "") -> None:
        """Ends a load. Without a `rejection` the pending weights become active, uploaded or not."""
        with self._lock:
            if slot.pending is not None and not rejection:
                slot.active = slot.pending
            slot.pending, slot.rejection = None, rejection
            slot.is_resolved.set()

    def _sync(self) -> None:
        """Sends a heartbeat, and brings every slot to its intended state. Raises _Unavailable."""
        if not (endpoint := self._access.locate()):
            raise _Unavailable("is not found yet")
        if endpoint != self.endpoint or self._socket is None:
            self._disconnect()
            self.endpoint = endpoint
            try:
                self._socket = self._access.connect(endpoint)
            except zmq.ZMQError as error:
                raise _Unavailable(f"cannot be connected to: {error}") from None
            self._monitor = self._socket.get_monitor_socket(_DISCONNECT_EVENTS)
        slots = self._registered()
        numbers = tuple(slot.number for slot in slots)[-MAX_SLOTS:]
        response = self._request(
            SessionHeartbeat(number=0, session=self._session, protocol=POLICY_PROTOCOL_VERSION, slots=numbers)
        )
        if not isinstance(response, ServerInfo):
            raise _Unavailable("sends a response that this release does not know")
        for slot in slots:
            self._sync_slot(slot, response.instance_id)
        server = ServerIdentity(endpoint, response.instance_id)
        if server != self.server:
            log.info("policy.connected endpoint=%s device=%s", endpoint, response.device)
        self.server = server

    def _sync_slot(self, slot: RemoteSlot, instance_id: bytes) -> None:
        if slot.opened_at != instance_id:
            slot.server_digest = None
            self._open_slot(slot, instance_id)
        while True:
            with self._lock:
                pending = slot.pending
                target = pending or slot.active
            rejection = "" if slot.server_digest == target.digest else self._upload(slot, target)
            if not rejection:
                slot.server_digest = target.digest
            if pending is None:
                if rejection:
                    raise _Unavailable(f"does not take this robot's weights: {rejection}")
                return
            if slot.pending is pending:  # else newer weights are pending
                self._resolve(slot, rejection)

    def _open_slot(self, slot: RemoteSlot, instance_id: bytes) -> None:
        response = self._request(self._access.open_request(0, slot))
        if not isinstance(response, SlotReady):
            busy = isinstance(response, SlotBusy)
            raise _Unavailable("is busy with this robot's policies" if busy else "has just restarted")
        slot.open_count += 1
        slot.opened_at, slot.server_digest = instance_id, b""

    def _upload(self, slot: RemoteSlot, weights: EncodedWeights) -> str:
        """Uploads `weights`. Returns why the policy rejects them; empty if it does not."""
        load = LoadSlotWeights(
            number=0,
            session=self._session,
            slot=slot.number,
            digest=weights.digest,
            size_bytes=len(weights.packet),
        )
        until_s = time.monotonic() + LOAD_TIMEOUT_S
        request: LoadSlotWeights | WeightsPart = load
        arrays: Arrays = {}
        while time.monotonic() < until_s:
            response = self._request(request, arrays)
            if isinstance(response, SlotReady | InvalidInput):
                return response.reason if isinstance(response, InvalidInput) else ""
            if isinstance(response, NextPart) and 0 <= response.offset < len(weights.packet):
                piece = weights.packet[response.offset : response.offset + PART_BYTES]
                request = _weights_part(load, response.offset)
                arrays = {PART_ARRAY: np.frombuffer(piece, np.uint8)}
                continue
            if not isinstance(response, SlotBusy):
                slot.opened_at = b""
                restarted = isinstance(response, SlotNotFound)
                raise _Unavailable("has just restarted" if restarted else "does not take weights")
            request, arrays = load, {}
            self._closing.wait(BUSY_RETRY_S)
        raise _Unavailable(f"has not taken weights within {LOAD_TIMEOUT_S:g} s")

    # One request after the other

    def _request(self, request: AnyRequest, arrays: Arrays | None = None) -> AnyResponse:
        """The response to `request`, which gets the next number. Raises _Unavailable: none, or a rejection."""
        assert self._socket is not None  # `_sync` has connected
        self._number += 1
        until_s = time.monotonic() + RESPONSE_TIMEOUT_S
        self._wait_for(zmq.POLLOUT, until_s)
        self._socket.send(encode(_with_number(request, self._number), arrays), zmq.DONTWAIT)
        while True:
            self._wait_for(zmq.POLLIN, until_s)
            try:
                response, _ = decode_response(self._socket.recv_multipart(zmq.DONTWAIT)[0])
            except WireError:
                raise _Unavailable("sends a response that this release does not know") from None
            if isinstance(response, RequestRejected) and response.number in (0, self._number):
                raise _Unavailable(f"refuses this robot: {response.reason}")
            if response.number == self._number:
                return response

    def _wait_for(self, event: int, until_s: float) -> None:
        assert self._socket is not None and self._monitor is not None  # `_sync` has connected
        while not self._closing.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._socket.poll(math.ceil(1e3 * min(left_s, POLL_S)), event):
                return
            if self._monitor.poll(0):
                denied = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                raise _Unavailable("does not allow this robot's key" if denied else "does not answer")
        raise _Unavailable("does not answer")

    def _disconnect(self) -> None:
        if self._monitor is not None and self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        if self._socket is not None:
            self._socket.close(0)
        self._socket = self._monitor = None


def _weights_part(load: LoadSlotWeights, offset: int) -> WeightsPart:
    return WeightsPart(number=0, session=load.session, slot=load.slot, digest=load.digest, offset=offset)


def _with_number(request: AnyRequest, number: int) -> AnyRequest:
    return msgspec.structs.replace(request, number=number)


def action_timeout_s(spec: RobotSpec, timeout_fraction: float) -> float:
    """The longest wait for an action, `timeout_fraction` of the control period.

    Raises:
        ConfigError: the timeout is too short for any network.
    """
    timeout_s = timeout_fraction * spec.period_s
    if timeout_s < MIN_ACTION_TIMEOUT_S:
        raise ConfigError(
            f"policy.timeout_fraction: {timeout_fraction:g} of a control period of {1e3 * spec.period_s:g} ms is "
            f"{1e3 * timeout_s:g} ms, less than the {1e3 * MIN_ACTION_TIMEOUT_S:g} ms that a network needs: "
            "set policy.location: edge, which runs the policy in the session's process"
        )
    return timeout_s


class RemotePolicy(Policy):
    """A slot at a policy server. The control thread calls `act`, another thread `load`."""

    def __init__(self, client: PolicyClient, slot: RemoteSlot) -> None:
        self._client, self._slot = client, slot
        self.precisions = client.precisions

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        """See `Policy.act`. It waits for the response as `PolicyClient` describes.

        Raises:
            PolicyUnavailable: no response in time, or the server does not have these weights yet.
        """
        return self._client.act(self._slot, observation, sentence, deterministic)

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`. An unreachable server gets them when it returns; until then `act` raises."""
        self._client.load(self._slot, weights)


class PolicyClient:
    """A session's client of a policy server, which its policies share. A context manager: they act within it.

    It is the `ServerAccess` of its connection.

    Requests carry the observation arrays that the policy reads, the instruction, and new weights. Each version of the
    weights is uploaded once, and not at all if another robot has uploaded it.
    """

    def __init__(
        self,
        spec: RobotSpec,
        kind: str,
        features: Sequence[str],
        precisions: tuple[Precision, ...],
        keys: KeyPair,
        server_key: str,
        locate: Callable[[], str],
        timeout_fraction: float,
    ) -> None:
        """Args:
        kind, features: as in `compose.PolicyConfig`.
        precisions: see `Policy.precisions`.
        server_key: the server's public key.
        locate: returns the server's endpoint, empty if it is not known. Called again while the server is unreachable.
        timeout_fraction: the share of a control period after which a robot without an action holds.

        Raises:
            ConfigError: the timeout is too short for any network.
            SpecError: the robot lacks a feature.
        """
        timeout_s = action_timeout_s(spec, timeout_fraction)
        self.precisions = precisions
        self._spec, self._kind, self._features = spec, kind, tuple(features)
        self._observed: tuple[ArraySpec, ...] = feature_specs(spec, features)
        self._keys, self._server_key = keys, server_key
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._slot_numbers = itertools.count()
        self._locate = locate
        self._requests = RequestClient(self.connect, timeout_s)
        self._connection = PolicyServerConnection(self._session, self)

    def __enter__(self) -> Self:
        self._context: zmq.Context[ZmqSocket] = zmq.Context()
        self._connection.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop_loading()
        self._requests.close()
        self._context.destroy(0)

    def stop_loading(self) -> None:
        """Ends any wait in `RemotePolicy.load`, and all uploads. Any thread may call it."""
        self._connection.close()

    def raise_failure(self) -> None:
        """Raises the error that ended the uploading thread, if any. Any thread may call it."""
        if self._connection.failure is not None:
            raise self._connection.failure

    def make_policy(self, seed: int) -> RemotePolicy:
        """A policy without weights, with random numbers from `seed`. Its slot is freed with the object."""
        slot = RemoteSlot(next(self._slot_numbers), seed)
        self._connection.register(slot)
        return RemotePolicy(self, slot)

    def act(
        self, slot: RemoteSlot, observation: Mapping[str, Array], sentence: str, deterministic: bool
    ) -> ActionChunk:
        """See `RemotePolicy.act`."""
        require_features(self._observed, observation)
        server = self._connection.server
        if server is None or not slot.is_ready:
            raise self._unavailable(self._connection.unavailable_reason or "has not this robot's weights yet")
        arrays = {spec.name: observation[spec.name] for spec in self._observed}

        def make_request(number: int) -> ActionRequest:
            return ActionRequest(
                number=number,
                session=self._session,
                slot=slot.number,
                digest=slot.active.digest,
                sentence=sentence,
                deterministic=deterministic,
            )

        found = self._requests.call(server, make_request, arrays)
        if found is None:
            raise self._unavailable("does not answer")
        return self._action_chunk(slot, *found)

    def load(self, slot: RemoteSlot, weights: Mapping[str, Array]) -> None:
        """See `RemotePolicy.load`."""
        packet = encode_packet(PackedWeights(), {name: np.asarray(weights[name]) for name in sorted(weights)})
        if len(packet) > MAX_WEIGHTS_BYTES:
            raise WireError(f"weights of {len(packet)} bytes; a policy server takes {MAX_WEIGHTS_BYTES}")
        self._connection.load(slot, EncodedWeights(packet, blake3(packet).digest()))

    def _action_chunk(self, slot: RemoteSlot, response: AnyResponse, arrays: Arrays) -> ActionChunk:
        match response:
            case ActionResponse():
                return self._checked_chunk(arrays)
            case InvalidInput():
                raise SpecError(response.reason)
            case SlotNotFound():
                slot.server_digest = None
                self._connection.wake()
                raise self._unavailable("is being given its weights again")
            case RequestRejected():
                raise self._unavailable(f"refuses this robot: {response.reason}")
            case _:
                raise self._unavailable("sends a response that this release does not know")

    def _checked_chunk(self, arrays: Arrays) -> ActionChunk:
        """Checks shapes and dtypes, which driver and recorder rely on. The driver checks the values."""
        actions, log_prob = arrays.get(ACTIONS), arrays.get(LOG_PROB)
        width = self._spec.action.shape
        fits = actions is not None and actions.dtype == np.float32 and actions.ndim == 2 and len(actions) > 0
        if not fits or actions is None or log_prob is None or actions.shape[1:] != width:
            raise self._unavailable("answers with actions that are not this robot's")
        if log_prob.dtype != np.float32 or log_prob.shape != actions.shape[:1]:
            raise self._unavailable("answers with actions that are not this robot's")
        return ActionChunk(actions.copy(), log_prob.copy())

    def _unavailable(self, why: str) -> PolicyUnavailable:
        at = self._connection.endpoint.removeprefix("tcp://")
        return PolicyUnavailable(f"the policy{' at ' + at if at else ''} {why}; the robot holds")

    def locate(self) -> str:
        return self._locate()

    def open_request(self, number: int, slot: RemoteSlot) -> OpenSlot:
        return OpenSlot(
            number=number,
            session=self._session,
            slot=slot.number,
            kind=self._kind,
            features=self._features,
            seed=slot.next_seed(),
            spec=self._spec,
        )

    def connect(self, endpoint: str) -> ZmqSocket:
        """A socket that takes messages only while its connection stands."""
        socket = self._context.socket(zmq.DEALER)
        configure_socket(socket, TunnelLimits(pipe_messages=PIPE_MESSAGES))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1e3 * CONNECTION_TIMEOUT_S / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1e3 * CONNECTION_TIMEOUT_S))
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()
        socket.curve_serverkey = self._server_key.encode()
        enable_ipv6(socket, endpoint)
        socket.connect(endpoint)
        return socket
