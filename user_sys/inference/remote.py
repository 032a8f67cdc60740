"""A session's policies where they act elsewhere, in a policy process (`user_sys.inference.server`)."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import zmq
from blake3 import blake3

from hal.errors import SpecError
from hal.spec import Array, ArraySpec, RobotSpec
from user_sys.codec import encode_packet
from user_sys.errors import ConfigError, PolicyAway, WireError
from user_sys.inference.caller import Caller
from user_sys.inference.keeper import Keeper, Place, Weights
from user_sys.inference.wire import (
    ACTIONS,
    LOG_PROB,
    MAX_MESSAGE_BYTES,
    MAX_WEIGHTS_BYTES,
    SESSION_BYTES,
    Absent,
    Act,
    Acted,
    AnyAnswer,
    Arrays,
    Open,
    PackedWeights,
    Refusal,
    Unfit,
)
from user_sys.policies.mlp import feature_specs, require_features
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.sockets import Socket, admit_ipv6, configure
from user_sys.weights.records import Form

LEAST_WAIT_S = 0.002
PIPE_MESSAGES = 16
LOST_AFTER_S = 3.0  # a connection on which nothing comes back is dialled anew


def answer_deadline_s(spec: RobotSpec, answer_within: float) -> float:
    """How long a robot waits for an action, by its share of the control period.

    Raises:
        ConfigError: that is too little for any network.
    """
    wait_s = answer_within * spec.period_s
    if wait_s < LEAST_WAIT_S:
        raise ConfigError(
            f"policy.answer_within: {answer_within:g} of a control period of {1e3 * spec.period_s:g} ms is "
            f"{1e3 * wait_s:g} ms, and over a network no policy answers within {1e3 * LEAST_WAIT_S:g} ms: "
            "let it act in the session's process, with policy.at: edge"
        )
    return wait_s


class RemotePolicy(Policy):
    """A slot at a policy process. `act` is the control thread's, `load` another's, as of two policies of a swapper."""

    def __init__(self, link: PolicyLink, place: Place) -> None:
        self._link, self._place = link, place
        self.forms = link.forms

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        """See `Policy.act`; it waits for the answer as long as `PolicyLink` says.

        Raises:
            PolicyAway: no answer, or the process has not these weights yet.
        """
        return self._link.act(self._place, observation, sentence, deterministic)

    def load(self, weights: Mapping[str, Array]) -> None:
        """See `Policy.load`. Where the process is away it gets them when it is back; until then `act` says so."""
        self._link.load(self._place, weights)


class PolicyLink:
    """A session's way to a policy process, which its policies share. A context manager: they act within it.

    What travels is what the policy reads of an observation, the sentence, and weights; of these, each version once,
    and not at all where another robot has brought it.
    """

    def __init__(
        self,
        spec: RobotSpec,
        kind: str,
        features: Sequence[str],
        forms: tuple[Form, ...],
        keys: KeyPair,
        server_key: str,
        find: Callable[[], str],
        answer_within: float,
    ) -> None:
        """Args:
        kind, features: as in `compose.PolicyConfig`.
        forms: see `Policy.forms`.
        server_key: the process's public key.
        find: where it listens now; empty where that is not known. It is asked again while the process is away.
        answer_within: the share of a control period after which a robot holds that has no answer.

        Raises:
            ConfigError: that is too little for any network.
            SpecError: a feature that the robot lacks.
        """
        wait_s = answer_deadline_s(spec, answer_within)
        self.forms = forms
        self._spec, self._kind, self._features, self._wait_s = spec, kind, tuple(features), wait_s
        self._reads: tuple[ArraySpec, ...] = feature_specs(spec, features)
        self._keys, self._server_key = keys, server_key
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._numbers = itertools.count()
        self._caller = Caller(self._dial, wait_s)
        self._keeper = Keeper(find, self._dial, self._session, self._opening)

    def __enter__(self) -> Self:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._keeper.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.hang_up()
        self._caller.close()
        self._context.destroy(0)

    def hang_up(self) -> None:
        """Ends whatever waits in `RemotePolicy.load`; the process hears nothing more of weights. Any thread."""
        self._keeper.close()

    def raise_failure(self) -> None:
        """Raises what ended the thread that brings the weights before its time, if anything did. Any thread."""
        if self._keeper.failure is not None:
            raise self._keeper.failure

    def policy(self, seed: int) -> RemotePolicy:
        """A policy without weights, which draws with `seed`; its slot is freed when it is let go of."""
        place = Place(next(self._numbers), seed)
        self._keeper.keep(place)
        return RemotePolicy(self, place)

    def act(self, place: Place, observation: Mapping[str, Array], sentence: str, deterministic: bool) -> ActionChunk:
        """See `RemotePolicy.act`."""
        require_features(self._reads, observation)
        meeting = self._keeper.meeting
        if meeting is None or not place.ready:
            raise self._away(self._keeper.trouble or "has not this robot's weights yet")
        arrays = {spec.name: observation[spec.name] for spec in self._reads}

        def ask(number: int) -> Act:
            return Act(
                number=number,
                session=self._session,
                slot=place.number,
                digest=place.held.digest,
                sentence=sentence,
                deterministic=deterministic,
            )

        found = self._caller.call(meeting, ask, arrays)
        if found is None:
            raise self._away("does not answer")
        return self._chunk(place, *found)

    def load(self, place: Place, weights: Mapping[str, Array]) -> None:
        """See `RemotePolicy.load`."""
        packet = encode_packet(PackedWeights(), {name: np.asarray(weights[name]) for name in sorted(weights)})
        if len(packet) > MAX_WEIGHTS_BYTES:
            raise WireError(f"weights of {len(packet)} bytes; a policy process takes {MAX_WEIGHTS_BYTES}")
        self._keeper.deliver(place, Weights(packet, blake3(packet).digest()))

    def _chunk(self, place: Place, answer: AnyAnswer, arrays: Arrays) -> ActionChunk:
        match answer:
            case Acted():
                return self._checked(arrays)
            case Unfit():
                raise SpecError(answer.reason)
            case Absent():
                place.there = None
                self._keeper.look()
                raise self._away("is being given its weights again")
            case Refusal():
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

    def _away(self, why: str) -> PolicyAway:
        at = self._keeper.endpoint.removeprefix("tcp://")
        return PolicyAway(f"the policy{' at ' + at if at else ''} {why}; the robot holds")

    def _opening(self, number: int, place: Place) -> Open:
        return Open(
            number=number,
            session=self._session,
            slot=place.number,
            kind=self._kind,
            features=self._features,
            seed=place.draws_with(),
            spec=self._spec,
        )

    def _dial(self, endpoint: str) -> Socket:
        """A connection that takes messages while it stands and keeps none while it does not."""
        socket = self._context.socket(zmq.DEALER)
        configure(socket, TunnelLimits(pipe_messages=PIPE_MESSAGES))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1e3 * LOST_AFTER_S / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1e3 * LOST_AFTER_S))
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()
        socket.curve_serverkey = self._server_key.encode()
        admit_ipv6(socket, endpoint)
        socket.connect(endpoint)
        return socket
