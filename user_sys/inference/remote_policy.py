"""Where a run's policy process listens: a file in the run's folder, which it writes anew each time that it starts.

The control loop's connection to a policy process: one question at a time, and never a long wait.

Keeps a policy process supplied: opens a session's slots and brings their weights, again where it has begun anew.

A session's policies where they act elsewhere, in a policy process (`user_sys.inference.policy_server`).
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
from typing import NamedTuple, Self
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


def read_server_address(path: Path) -> str:
    """The endpoint; empty where nobody has written it yet, or the file cannot be read now."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_ADDRESS_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


PROBE_PERIOD_S = 0.1


class ServerIdentity(NamedTuple):
    """Where a policy process listens, and in which of its lives."""

    endpoint: str
    instance_id: bytes


class RequestClient:
    """One thread calls it.

    An answer counts only if it comes in time, and only as the answer to the newest question. After one that did not
    come it waits for none: it asks every `PROBE_PERIOD_S`, or less often if an answer may take longer, and goes on as
    usual once the newest of these was answered.
    """

    def __init__(
        self, connect: Callable[[str], ZmqSocket], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ):
        """Args:
        dial: a connected socket to an endpoint, which does not block.
        wait_s: how long an answer may take.
        """
        self._dial, self._wait_s, self._clock = connect, timeout_s, clock
        self._socket: ZmqSocket | None = None
        self._met: ServerIdentity | None = None
        self._number = 0
        self._away = False
        self._probe_at_s = 0.0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def call(
        self, server: ServerIdentity, make_request: Callable[[int], ActionRequest], arrays: Arrays
    ) -> tuple[AnyResponse, Arrays] | None:
        """The answer to ``ask(number)``; None where none has come in time, or is likely to.

        Blocks for `wait_s` at most, and for nothing while the process is known not to answer.
        """
        self._connect(server)
        if self._away and not self._has_answered():
            if self._clock() >= self._probe_at_s:
                self._probe_at_s = self._clock() + max(PROBE_PERIOD_S, self._wait_s)
                self._ask(make_request, arrays)
            return None
        answer = self._await() if self._ask(make_request, arrays) else None
        self._away = answer is None
        if self._away:
            self._probe_at_s = self._clock() + max(PROBE_PERIOD_S, self._wait_s)
        return answer

    def _connect(self, meeting: ServerIdentity) -> None:
        """A process that was started anew is dialled anew, without waiting for libzmq to notice."""
        if meeting != self._met or self._socket is None:
            self.close()
            self._socket, self._met = self._dial(meeting.endpoint), meeting

    def _ask(self, ask: Callable[[int], ActionRequest], arrays: Arrays) -> bool:
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

    def _await(self) -> tuple[AnyResponse, Arrays] | None:
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

    def _take(self) -> tuple[AnyResponse, Arrays] | None:
        """The next message, where it answers the newest question."""
        assert self._socket is not None  # `_connect` was called
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        try:
            answer, arrays = decode_response(frames[0])
        except WireError:
            return None
        return (answer, arrays) if answer.number in (0, self._number) else None


log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 1.0
RECONNECT_S = 0.25  # after the process was not there
RESPONSE_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 120.0
BUSY_RETRY_S = 0.02
POLL_S = 0.1  # how often a wait looks whether it is to end
CLOSE_TIMEOUT_S = 5.0
_DISCONNECT_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED


class EncodedWeights:
    """`packet` is of a `wire.PackedWeights`, and `digest` its BLAKE3; both are empty where there are none."""

    def __init__(self, packet: bytes = b"", digest: bytes = b"") -> None:
        self.packet, self.digest = packet, digest


class RemoteSlot:
    """One policy's slot: what it is to be, and what it is as far as is known.

    Attributes:
        number: of the slot.
        active: what the policy acts with.
        pending: what `PolicyServerConnection.deliver` is about.
        rejection: why the process did not take what was offered last.
        is_resolved: what was offered is at the process, or refused, or could not be brought now.
        opened_at: the process's life in which the slot was opened last.
        open_count: how often it was.
        server_digest: digest of the weights at the process; None where it is not known.
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
        """A seed for the next opening: a policy that is opened again does not draw the same once more."""
        if self.open_count == 0:
            return self.seed
        return int(np.random.SeedSequence((self.seed, self.open_count)).generate_state(1, np.uint32)[0])


class _Unavailable(UserSysError):
    """The process does not serve this session now; the message says why, for after "the policy at HOST"."""


class PolicyServerConnection:
    """A thread with a connection of its own, from `start` to `close`.

    Attributes:
        server: the process that was met last; None before the first.
        unavailable_reason: why the process cannot be used, for after "the policy at HOST"; empty where it can.
        failure: what ended the thread before its time.
    """

    def __init__(
        self,
        find: Callable[[], str],
        dial: Callable[[str], ZmqSocket],
        session: bytes,
        opening: Callable[[int, RemoteSlot], OpenSlot],
    ) -> None:
        """Args:
        find: where the process listens now; empty where nobody knows.
        dial: a connected socket to an endpoint.
        opening: the request, with its number, that opens a slot.
        """
        self._find, self._dial, self._session, self._opening = find, dial, session, opening
        self.server: ServerIdentity | None = None
        self.unavailable_reason = "is not found yet"
        self.endpoint = ""
        self.failure: Exception | None = None
        self._places: WeakValueDictionary[int, RemoteSlot] = WeakValueDictionary()
        self._lock = threading.Lock()  # over what is held and offered
        self._socket: ZmqSocket | None = None
        self._monitor: ZmqSocket | None = None
        self._number = 0
        self._wakeup, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="policy-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and whatever waits in `load`."""
        self._closing.set()
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def register(self, place: RemoteSlot) -> None:
        """Has `place` opened at the process, for as long as anybody holds it."""
        with self._lock:
            self._places[place.number] = place
        self._wakeup.set()

    def wake(self) -> None:
        """A slot is not as it should be: see to it soon."""
        self._wakeup.set()

    def load(self, place: RemoteSlot, weights: EncodedWeights) -> None:
        """Brings `weights` to the process; where that is away, it gets them when it is back. Blocks until they
        are there, or it has turned out that they cannot be brought now.

        Raises:
            WireError: the policy does not take them; those that it had stay.
        """
        with self._lock:
            place.pending, place.rejection = weights, ""
            place.is_resolved.clear()
        self._wakeup.set()
        if self._closing.is_set() or not place.is_resolved.wait(LOAD_TIMEOUT_S) or self._closing.is_set():
            self._settle(place)
        if place.rejection:
            raise WireError(place.rejection)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._try_round()
                self._wakeup.wait(RECONNECT_S if self.unavailable_reason else HEARTBEAT_PERIOD_S)
                self._wakeup.clear()
        except Exception as error:  # of any kind: whoever runs the session must hear of it, and asks
            log.exception("policy.keeper_failed")
            self.failure = error
        self._closing.set()  # nobody is to wait for this thread from here on
        self._hang_up()
        for place in self._all():
            place.is_resolved.set()

    def _try_round(self) -> None:
        try:
            self._round()
            self.unavailable_reason = ""
        except _Unavailable as why:
            if str(why) != self.unavailable_reason:
                log.warning("policy.away endpoint=%s: the policy %s", self.endpoint, why)
            self.unavailable_reason = str(why)
            self._hang_up()
            for place in self._all():
                self._settle(place)

    def _all(self) -> list[RemoteSlot]:
        with self._lock:
            return list(self._places.values())

    def _settle(self, place: RemoteSlot, refusal: str = "") -> None:
        """What was offered is what the policy acts with from now on, be it there yet or not; or it is `refusal`'s."""
        with self._lock:
            if place.pending is not None and not refusal:
                place.active = place.pending
            place.pending, place.rejection = None, refusal
            place.is_resolved.set()

    def _round(self) -> None:
        """Greets the process, and brings every slot to what it is to be. Raises _Away."""
        if not (endpoint := self._find()):
            raise _Unavailable("is not found yet")
        if endpoint != self.endpoint or self._socket is None:
            self._hang_up()
            self.endpoint = endpoint
            try:
                self._socket = self._dial(endpoint)
            except zmq.ZMQError as error:
                raise _Unavailable(f"cannot be dialled: {error}") from None
            self._monitor = self._socket.get_monitor_socket(_DISCONNECT_EVENTS)
        places = self._all()
        slots = tuple(place.number for place in places)[-MAX_SLOTS:]
        answer = self._ask(
            SessionHeartbeat(number=0, session=self._session, protocol=POLICY_PROTOCOL_VERSION, slots=slots)
        )
        if not isinstance(answer, ServerInfo):
            raise _Unavailable("answers in words that this release does not know")
        for place in places:
            self._bring(place, answer.instance_id)
        meeting = ServerIdentity(endpoint, answer.instance_id)
        if meeting != self.server:
            log.info("policy.met endpoint=%s device=%s", endpoint, answer.device)
        self.server = meeting

    def _bring(self, place: RemoteSlot, life: bytes) -> None:
        if place.opened_at != life:
            place.server_digest = None
            self._open(place, life)
        while True:
            with self._lock:
                offered = place.pending
                target = offered or place.active
            refusal = "" if place.server_digest == target.digest else self._load(place, target)
            if not refusal:
                place.server_digest = target.digest
            if offered is None:
                if refusal:
                    raise _Unavailable(f"does not take this robot's weights: {refusal}")
                return
            self._settle_if(place, offered, refusal)

    def _settle_if(self, place: RemoteSlot, offered: EncodedWeights, refusal: str) -> None:
        """As `_settle`, unless something else is offered by now."""
        if place.pending is offered:
            self._settle(place, refusal)

    def _open(self, place: RemoteSlot, life: bytes) -> None:
        answer = self._ask(self._opening(0, place))
        if not isinstance(answer, SlotReady):
            raise _Unavailable(
                "is busy with this robot's policies" if isinstance(answer, SlotBusy) else "has begun anew just now"
            )
        place.open_count += 1
        place.opened_at, place.server_digest = life, b""

    def _load(self, place: RemoteSlot, weights: EncodedWeights) -> str:
        """Brings `weights`; why the policy does not take them, or empty."""
        load = LoadSlotWeights(
            number=0,
            session=self._session,
            slot=place.number,
            digest=weights.digest,
            size_bytes=len(weights.packet),
        )
        until_s = time.monotonic() + LOAD_TIMEOUT_S
        request: LoadSlotWeights | WeightsPart = load
        arrays: Arrays = {}
        while time.monotonic() < until_s:
            answer = self._ask(request, arrays)
            if isinstance(answer, SlotReady | InvalidInput):
                return answer.reason if isinstance(answer, InvalidInput) else ""
            if isinstance(answer, NextPart) and 0 <= answer.offset < len(weights.packet):
                piece = weights.packet[answer.offset : answer.offset + PART_BYTES]
                request, arrays = _weights_part(load, answer.offset), {PART_ARRAY: np.frombuffer(piece, np.uint8)}
                continue
            if not isinstance(answer, SlotBusy):
                place.opened_at = b""
                raise _Unavailable(
                    "has begun anew just now" if isinstance(answer, SlotNotFound) else "does not take weights"
                )
            request, arrays = load, {}
            self._closing.wait(BUSY_RETRY_S)
        raise _Unavailable(f"has not taken weights within {LOAD_TIMEOUT_S:g} s")

    # One question after the other

    def _ask(self, request: AnyRequest, arrays: Arrays | None = None) -> AnyResponse:
        """The answer to `request`, which is given the next number. Raises _Away: none, or a refusal."""
        assert self._socket is not None  # `_round` has dialled
        self._number += 1
        until_s = time.monotonic() + RESPONSE_TIMEOUT_S
        self._await(zmq.POLLOUT, until_s)
        self._socket.send(encode(_with_number(request, self._number), arrays), zmq.DONTWAIT)
        while True:
            self._await(zmq.POLLIN, until_s)
            try:
                answer, _ = decode_response(self._socket.recv_multipart(zmq.DONTWAIT)[0])
            except WireError:
                raise _Unavailable("answers in words that this release does not know") from None
            if isinstance(answer, RequestRejected) and answer.number in (0, self._number):
                raise _Unavailable(f"refuses this robot: {answer.reason}")
            if answer.number == self._number:
                return answer

    def _await(self, event: int, until_s: float) -> None:
        assert self._socket is not None and self._monitor is not None  # `_round` has dialled
        while not self._closing.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._socket.poll(math.ceil(1e3 * min(left_s, POLL_S)), event):
                return
            if self._monitor.poll(0):
                denied = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                raise _Unavailable("does not allow this robot's key" if denied else "does not answer")
        raise _Unavailable("does not answer")

    def _hang_up(self) -> None:
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


MIN_ACTION_TIMEOUT_S = 0.002
PIPE_MESSAGES = 16
CONNECTION_TIMEOUT_S = 3.0  # a connection on which nothing comes back is dialled anew


def action_timeout_s(spec: RobotSpec, timeout_fraction: float) -> float:
    """How long a robot waits for an action, by its share of the control period.

    Raises:
        ConfigError: that is too little for any network.
    """
    wait_s = timeout_fraction * spec.period_s
    if wait_s < MIN_ACTION_TIMEOUT_S:
        raise ConfigError(
            f"policy.timeout_fraction: {timeout_fraction:g} of a control period of {1e3 * spec.period_s:g} ms is "
            f"{1e3 * wait_s:g} ms, and over a network no policy answers within {1e3 * MIN_ACTION_TIMEOUT_S:g} ms: "
            "let it act in the session's process, with policy.location: edge"
        )
    return wait_s


class RemotePolicy(Policy):
    """A slot at a policy process. `act` is the control thread's, `load` another's, as of two policies of a swapper."""

    def __init__(self, link: PolicyClient, place: RemoteSlot) -> None:
        self._link, self._place = link, place
        self.precisions = link.forms

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        """See `Policy.act`; it waits for the answer as long as `PolicyClient` says.

        Raises:
            PolicyAway: no answer, or the process has not these weights yet.
        """
        return self._link.act(self._place, observation, sentence, deterministic)

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`. Where the process is away it gets them when it is back; until then `act` says so."""
        self._link.load(self._place, weights)


class PolicyClient:
    """A session's way to a policy process, which its policies share. A context manager: they act within it.

    What travels is what the policy reads of an observation, the sentence, and weights; of these, each version once,
    and not at all where another robot has brought it.
    """

    def __init__(
        self,
        spec: RobotSpec,
        kind: str,
        features: Sequence[str],
        forms: tuple[Precision, ...],
        keys: KeyPair,
        server_key: str,
        locate: Callable[[], str],
        timeout_fraction: float,
    ) -> None:
        """Args:
        kind, features: as in `compose.PolicyConfig`.
        forms: see `Policy.forms`.
        server_key: the process's public key.
        find: where it listens now; empty where that is not known. It is asked again while the process is away.
        timeout_fraction: the share of a control period after which a robot holds that has no answer.

        Raises:
            ConfigError: that is too little for any network.
            SpecError: a feature that the robot lacks.
        """
        wait_s = action_timeout_s(spec, timeout_fraction)
        self.forms = forms
        self._spec, self._kind, self._features, self._wait_s = spec, kind, tuple(features), wait_s
        self._reads: tuple[ArraySpec, ...] = feature_specs(spec, features)
        self._keys, self._server_key = keys, server_key
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._numbers = itertools.count()
        self._caller = RequestClient(self._dial, wait_s)
        self._keeper = PolicyServerConnection(locate, self._dial, self._session, self._opening)

    def __enter__(self) -> Self:
        self._context: zmq.Context[ZmqSocket] = zmq.Context()
        self._keeper.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop_loading()
        self._caller.close()
        self._context.destroy(0)

    def stop_loading(self) -> None:
        """Ends whatever waits in `RemotePolicy.load`; the process hears nothing more of weights. Any thread."""
        self._keeper.close()

    def raise_failure(self) -> None:
        """Raises what ended the thread that brings the weights before its time, if anything did. Any thread."""
        if self._keeper.failure is not None:
            raise self._keeper.failure

    def make_policy(self, seed: int) -> RemotePolicy:
        """A policy without weights, which draws with `seed`; its slot is freed when it is let go of."""
        place = RemoteSlot(next(self._numbers), seed)
        self._keeper.register(place)
        return RemotePolicy(self, place)

    def act(
        self, place: RemoteSlot, observation: Mapping[str, Array], sentence: str, deterministic: bool
    ) -> ActionChunk:
        """See `RemotePolicy.act`."""
        require_features(self._reads, observation)
        meeting = self._keeper.server
        if meeting is None or not place.is_ready:
            raise self._away(self._keeper.unavailable_reason or "has not this robot's weights yet")
        arrays = {spec.name: observation[spec.name] for spec in self._reads}

        def ask(number: int) -> ActionRequest:
            return ActionRequest(
                number=number,
                session=self._session,
                slot=place.number,
                digest=place.active.digest,
                sentence=sentence,
                deterministic=deterministic,
            )

        found = self._caller.call(meeting, ask, arrays)
        if found is None:
            raise self._away("does not answer")
        return self._chunk(place, *found)

    def load(self, place: RemoteSlot, weights: Mapping[str, Array]) -> None:
        """See `RemotePolicy.load`."""
        packet = encode_packet(PackedWeights(), {name: np.asarray(weights[name]) for name in sorted(weights)})
        if len(packet) > MAX_WEIGHTS_BYTES:
            raise WireError(f"weights of {len(packet)} bytes; a policy process takes {MAX_WEIGHTS_BYTES}")
        self._keeper.load(place, EncodedWeights(packet, blake3(packet).digest()))

    def _chunk(self, place: RemoteSlot, answer: AnyResponse, arrays: Arrays) -> ActionChunk:
        match answer:
            case ActionResponse():
                return self._checked(arrays)
            case InvalidInput():
                raise SpecError(answer.reason)
            case SlotNotFound():
                place.server_digest = None
                self._keeper.wake()
                raise self._away("is being given its weights again")
            case RequestRejected():
                raise self._away(f"refuses this robot: {answer.reason}")
            case _:
                raise self._away("answers in words that this release does not know")

    def _checked(self, arrays: Arrays) -> ActionChunk:
        """What the driver and the recorder rely on; whether actions are finite and within bounds the driver judges."""
        actions, log_prob = arrays.get(ACTIONS), arrays.get(LOG_PROB)
        width = self._spec.action.shape
        fits = actions is not None and actions.dtype == np.float32 and actions.ndim == 2 and len(actions) > 0
        if not fits or actions is None or log_prob is None or actions.shape[1:] != width:
            raise self._away("answers with actions that are not this robot's")
        if log_prob.dtype != np.float32 or log_prob.shape != actions.shape[:1]:
            raise self._away("answers with actions that are not this robot's")
        return ActionChunk(actions.copy(), log_prob.copy())

    def _away(self, why: str) -> PolicyUnavailable:
        at = self._keeper.endpoint.removeprefix("tcp://")
        return PolicyUnavailable(f"the policy{' at ' + at if at else ''} {why}; the robot holds")

    def _opening(self, number: int, place: RemoteSlot) -> OpenSlot:
        return OpenSlot(
            number=number,
            session=self._session,
            slot=place.number,
            kind=self._kind,
            features=self._features,
            seed=place.next_seed(),
            spec=self._spec,
        )

    def _dial(self, endpoint: str) -> ZmqSocket:
        """A connection that takes messages while it stands and keeps none while it does not."""
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
