"""A policy that runs in a policy server (`user_sys.inference.policy_server`), as a robot's session uses it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq
from blake3 import blake3
from zmq.utils.monitor import recv_monitor_message

from hal.context import ClosedAtExit
from hal.errors import SpecError
from hal.spec import IMAGES, RobotSpec
from user_sys.codec import encode_packet
from user_sys.errors import ConfigError, PolicyUnavailable, WireError
from user_sys.inference.protocol import (
    ACTIONS,
    CORRECTION,
    LOG_PROB,
    MAX_MESSAGE_BYTES,
    NO_CONTEXT,
    POLICY_PROTOCOL_VERSION,
    PREFIX,
    ActionRequest,
    ActionResponse,
    Arrays,
    PolicyDescription,
    decode_response,
    encode_description,
)
from user_sys.messages import NO_VERSION
from user_sys.policies.correction import ChunkCorrection
from user_sys.policies.policy import AGE_SUFFIX, ActionChunk, PolicyQuery
from user_sys.policies.scaling import feature_specs, require_features
from user_sys.tunnel.connection import ZAP_DENIED, ZmqSocket, configure_socket, enable_ipv6, has_message
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.receiver import ReceiverConfig

MAX_ADDRESS_BYTES = 256
MIN_ACTION_TIMEOUT_S = 0.002
STANDING_TIMEOUT_S = 2.0  # for a simulated robot whose time stands still until its next action
PIPE_MESSAGES = 16
CONNECTION_TIMEOUT_S = 3.0  # a connection is opened again this long after a request without a response
LOCATE_PERIOD_S = 0.25  # how often an unavailable server's address is read again
REPORT_PERIOD_S = 1.0  # a gateway that has restarted does not know the acting version


def read_server_address(path: Path) -> str:
    """The endpoint of a run's policy server, from a file that the server rewrites at each start.

    Empty if the file is missing or unreadable.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_ADDRESS_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def action_timeout_s(
    spec: RobotSpec, timeout_fraction: float, *, may_take_long: bool, patience_s: float = STANDING_TIMEOUT_S
) -> float:
    """The longest wait for an action, `timeout_fraction` of the control period.

    If it `may_take_long` it is `patience_s` at least: a robot that does not follow the clock stands meanwhile,
    and one with asynchronous execution goes on.

    Raises:
        ConfigError: the timeout is too short for any network.
    """
    if may_take_long:
        return max(patience_s, timeout_fraction * spec.period_s)
    timeout_s = timeout_fraction * spec.period_s
    if timeout_s < MIN_ACTION_TIMEOUT_S:
        raise ConfigError(
            f"policy.timeout_fraction: {timeout_fraction:g} of a control period of {1e3 * spec.period_s:g} ms is "
            f"{1e3 * timeout_s:g} ms, less than the {1e3 * MIN_ACTION_TIMEOUT_S:g} ms that a network needs: "
            "set policy.location: edge, which runs the policy in the session's process"
        )
    return timeout_s


def check_server_swaps(weights: ReceiverConfig) -> None:
    """Raises ConfigError: the robots of a policy server share its weights, so they cannot swap between episodes."""
    if weights.swap_at == "episode":
        raise ConfigError(
            "weights.swap_at is episode, which a policy server cannot do: set weights.swap_at: chunk, or "
            "policy.location: edge if the policy acts without torch"
        )


class _Connection:
    """The connection to a policy server, which may move or restart.

    Attributes:
        socket: None while the server's endpoint is not known.
    """

    def __init__(self, keys: KeyPair, server_key: str, locate: Callable[[], str], clock: Callable[[], float]) -> None:
        """Arguments as in `RemotePolicy`."""
        self._keys, self._server_key, self._locate, self._clock = keys, server_key, locate, clock
        self._context: zmq.Context[ZmqSocket] = zmq.Context()
        self.socket: ZmqSocket | None = None
        self._monitor: ZmqSocket | None = None
        self._refused_at_s = -math.inf
        self._endpoint = ""
        self._locate_at_s = -math.inf
        self._reconnect_at_s = math.inf

    def renew(self) -> bool:
        """Connects to the server's present endpoint, again if it stays silent for `CONNECTION_TIMEOUT_S`.

        Returns whether the socket is a new one. Raises PolicyUnavailable: the endpoint is not valid.
        """
        now_s = self._clock()
        if now_s < self._locate_at_s:
            return False
        self._locate_at_s = now_s + LOCATE_PERIOD_S
        endpoint = self._locate()
        if endpoint == self._endpoint and self.socket is not None and now_s < self._reconnect_at_s:
            return False
        self._close_socket()
        self._endpoint = endpoint
        if endpoint:
            self._open_socket(endpoint)
        self._reconnect_at_s = math.inf
        return True

    def note_silence(self) -> PolicyUnavailable:
        """The server has not answered a request in time. A pause between requests says nothing about the connection.

        Returns the error, with the reason if the server refuses the key.
        """
        now_s = self._clock()
        self._reconnect_at_s = min(self._reconnect_at_s, now_s + CONNECTION_TIMEOUT_S)
        while self._monitor is not None and has_message(self._monitor):
            if recv_monitor_message(self._monitor)["value"] == ZAP_DENIED:
                self._refused_at_s = now_s
        if now_s - self._refused_at_s < 2 * CONNECTION_TIMEOUT_S:  # it is refused again after `CONNECTION_TIMEOUT_S`
            return self.unavailable("does not allow this robot's key; run `user-sys keys allow` there")
        return self.unavailable("does not answer")

    def note_answer(self) -> None:
        """The server has answered, so the connection stands."""
        self._reconnect_at_s, self._refused_at_s = math.inf, -math.inf

    def unavailable(self, why: str) -> PolicyUnavailable:
        """The error with the server's address; `why` continues "the policy"."""
        at = self._endpoint.removeprefix("tcp://")
        return PolicyUnavailable(f"the policy{' at ' + at if at else ''} {why}; the robot holds")

    def close(self) -> None:
        self._context.destroy(0)

    def _open_socket(self, endpoint: str) -> None:
        """Opens a socket that takes messages only while its connection stands."""
        socket = self.socket = self._context.socket(zmq.DEALER)
        configure_socket(socket, TunnelLimits(pipe_messages=PIPE_MESSAGES))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1e3 * CONNECTION_TIMEOUT_S / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1e3 * CONNECTION_TIMEOUT_S))
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()
        socket.curve_serverkey = self._server_key.encode()
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        enable_ipv6(socket, endpoint)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._close_socket()
            raise self.unavailable(f"cannot be connected to: {error}") from None

    def _close_socket(self) -> None:
        if self.socket is not None and self._monitor is not None:
            self.socket.disable_monitor()
            self.socket.close(0)
            self._monitor.close(0)
        self.socket = self._monitor = None


class RemotePolicy(ClosedAtExit):
    """A robot's policy at a policy server. A context manager; the control loop's thread calls it.

    A response counts only if it arrives in time and answers the newest request. It finds a restarted server by itself.

    Attributes:
        version: of the weights that acted last; -1 before the first.
        cameras: that the policy reads; empty until the server has named them.
        timeout_s: how long `act` blocks at most.
        awaits_weights: the server has no weights, and the robot may not explore.
    """

    def __init__(
        self,
        description: PolicyDescription,
        keys: KeyPair,
        server_key: str,
        locate: Callable[[], str],
        timeout_s: float,
        *,
        explore: bool = False,
        on_version: Callable[[int, float], object] = lambda version, delay_s: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        server_key: the server's public key.
        locate: returns the server's endpoint, empty if it is not known.
        timeout_s: the robot holds without a response within.
        explore: the policy acts at random until its weights arrive.
        on_version: called with the acting version and its delay when it changes, and every `REPORT_PERIOD_S`;
            with -1 when a pause begins.

        Raises:
            SpecError: the robot lacks a feature.
        """
        self.version, self.awaits_weights, self.cameras = NO_VERSION, False, tuple[str, ...]()
        self.timeout_s = timeout_s
        self._spec = description.spec  # all its vectors are sent: a steered policy reads `base_features` too
        self._features = feature_specs(description.spec, description.features)  # a correction reads these only
        self._description = encode_description(description.shared)
        self._digest, self._sends_description = blake3(self._description).digest(), True
        self._explore, self._on_version, self._clock = explore, on_version, clock
        self._connection = _Connection(keys, server_key, locate, clock)
        self._number = 0
        self._until_s = -math.inf  # the response to the newest request counts until then
        self._report_at_s = -math.inf

    def close(self) -> None:
        self._connection.close()

    # agents.UpdatingPolicy

    def begin_episode(self) -> None:
        """The server swaps weights by itself."""

    def pause(self) -> None:
        """Reports that no version is in use until the next response: a learner need not wait for this robot."""
        if self._report_at_s > -math.inf:
            self._report_at_s = -math.inf
            self._on_version(NO_VERSION, 0.0)

    def act(self, query: PolicyQuery) -> ActionChunk:
        """As `policies.policy.Policy.act`. Blocks for `timeout_s` at most.

        Raises:
            PolicyUnavailable: no response in time, or the server has no action. The robot holds.
        """
        self.request(query)
        chunk = self.response(wait=True)
        assert chunk is not None  # as it has waited
        return chunk

    # chunk_executor.AsyncPolicy

    def request(self, query: PolicyQuery) -> None:
        """Sends a request; an earlier one is given up. Does not block.

        Raises:
            PolicyUnavailable: the server is not connected.
        """
        observation, context = query.observation, query.context
        require_features(self._spec.observation, observation)
        if self._connection.renew():
            self.cameras = ()  # until its first request the server takes few bytes of a connection, so no pictures
        pictures = [IMAGES + camera for camera in self.cameras]
        arrays = {spec.name: observation[spec.name] for spec in self._spec.observation}
        arrays |= {name: observation[name] for each in pictures for name in (each, each + AGE_SUFFIX)}
        if context is not None:
            arrays[PREFIX] = np.ascontiguousarray(context.prefix, np.float32)
        self._send(query, arrays)

    def response(self, *, wait: bool) -> ActionChunk | None:
        """The response to the newest request. Without `wait` it is None while the server computes.

        Raises:
            PolicyUnavailable: no response within `timeout_s` of the request, or the server has no action.
        """
        found = self._receive(wait)
        if found is None:
            return None
        response, received = found
        self.awaits_weights, self._sends_description = response.awaits_weights, response.needs_description
        if response.cameras:
            self.cameras = response.cameras
        if response.invalid:
            raise SpecError(response.invalid)
        if response.awaits_weights:
            raise PolicyUnavailable(response.unavailable)
        if response.unavailable:
            raise self._connection.unavailable(response.unavailable)
        chunk = self._checked_chunk(response, received)
        self._report(response)
        return chunk

    def scalars(self) -> dict[str, float]:
        """Metrics of the weights. Any thread may call it."""
        return {"weights/version": float(self.version)}

    def raise_failure(self) -> None:
        """It has no thread that could fail."""

    def _send(self, query: PolicyQuery, arrays: Arrays) -> None:
        if self._connection.socket is None:
            raise self._connection.unavailable("is not found yet")
        self._number += 1
        request = ActionRequest(
            protocol=POLICY_PROTOCOL_VERSION,
            number=self._number,
            policy=self._digest,
            description=self._description if self._sends_description else b"",
            instruction=query.sentence,
            deterministic=query.deterministic,
            explore=self._explore and self.version == NO_VERSION,  # not after a restart of the server
            timeout_s=self.timeout_s,
            delay=NO_CONTEXT if query.context is None else query.context.delay,
            method="" if query.context is None else query.context.method,
        )
        self._until_s = self._clock() + self.timeout_s
        try:
            self._connection.socket.send(encode_packet(request, arrays), zmq.DONTWAIT)
        except zmq.Again:  # not connected
            raise self._connection.note_silence() from None

    def _receive(self, wait: bool) -> tuple[ActionResponse, Arrays] | None:
        """The response to the newest request."""
        if self._connection.socket is None:
            raise self._connection.unavailable("is not found yet")
        while self._connection.socket.poll(max(0, math.ceil(1e3 * (self._until_s - self._clock()))) if wait else 0):
            try:
                response, received = decode_response(self._connection.socket.recv_multipart(zmq.DONTWAIT)[0])
            except WireError:
                raise self._connection.unavailable("sends a response that this release does not know") from None
            if response.number in (0, self._number):
                self._connection.note_answer()
                return response, received
        if wait or self._clock() >= self._until_s:
            raise self._connection.note_silence()
        return None

    def _checked_chunk(self, response: ActionResponse, arrays: Arrays) -> ActionChunk:
        """Checks shapes and dtypes, which driver and recorder rely on. The driver checks the values."""
        actions, log_prob = arrays.get(ACTIONS), arrays.get(LOG_PROB)
        if actions is None or log_prob is None or actions.ndim != 2 or len(actions) == 0:
            raise self._connection.unavailable("answers with actions that are not this robot's")
        width = self._spec.action.shape
        fits = actions.shape[1:] == width and log_prob.shape == actions.shape[:1]
        if not fits or actions.dtype != np.float32 or log_prob.dtype != np.float32:
            raise self._connection.unavailable("answers with actions that are not this robot's")
        found = {n.removeprefix(CORRECTION): each for n, each in arrays.items() if n.startswith(CORRECTION)}
        try:
            sizes = {spec.name: spec.shape[0] for spec in self._features}
            correction = ChunkCorrection.from_arrays(sizes, *width, len(actions), found) if found else None
        except WireError as error:
            raise self._connection.unavailable(f"answers with {error}") from None
        execute = min(response.execute, len(actions))
        return ActionChunk(actions.copy(), log_prob.copy(), execute, correction, response.bridged)

    def _report(self, response: ActionResponse) -> None:
        now_s = self._clock()
        if response.version != self.version or now_s >= self._report_at_s:
            self.version, self._report_at_s = response.version, now_s + REPORT_PERIOD_S
            self._on_version(response.version, response.swap_delay_s)
