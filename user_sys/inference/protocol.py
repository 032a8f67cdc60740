"""The messages between a session and a policy server: one request, one response.

A message is one packet (`user_sys.codec`): a record, and arrays. An `ActionRequest` carries the observation, and names
the policy that shall act by the digest of its description, so the server needs no session. Its `ActionResponse` carries
the arrays ``actions`` and ``log_prob`` of a `policies.policy.ActionChunk`, or the reason why there are none.

Pictures travel as raw uint8 arrays, and only those that the policy reads: a robot's first request has none, and the
response names them. So a robot needs neither the policy's package nor torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from hal.decode_errors import DECODE_ERRORS
from hal.errors import HalError
from hal.spec import RobotSpec, SafetyLimits
from user_sys.codec import Array, ParsedPacket, parse_packet
from user_sys.errors import WireError
from user_sys.messages import NO_VERSION, Digest
from user_sys.policies.policy import ChunkContext, ExecutionMethod
from user_sys.tunnel.limits import MAX_PICTURE_BYTES

POLICY_NODE = "policy"
"""The policy server's name among keys, processes and logs."""

POLICY_PROTOCOL_VERSION = 5
PREVIOUS_POLICY_PROTOCOL_VERSION = POLICY_PROTOCOL_VERSION - 1  # of robots that are not upgraded yet; the same fields
MAX_MESSAGE_BYTES = MAX_PICTURE_BYTES + (2 << 20)  # for vectors and the policy's description
MAX_DESCRIPTION_BYTES = 1 << 20
MAX_ARRAYS = 256
ACTIONS, LOG_PROB = "actions", "log_prob"
PREFIX = "prefix"  # of a request: `ChunkContext.prefix`
CORRECTION = "correction."  # prefix of the arrays of a response: `ChunkCorrection.arrays`
NO_CONTEXT = -1

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class PolicyDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A policy of `kind` for robots with `spec`; see `compose.PolicyConfig`. Robots with equal ones share a policy."""

    kind: Name
    options: dict[str, Any]
    features: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ARRAYS)]
    spec: RobotSpec

    @property
    def shared(self) -> PolicyDescription:
        """That of all robots of the embodiment: without the limits and the safe stop, which no policy reads.

        The places of the joints and the tool in the observation stay.
        """
        limits = self.spec.limits
        places = SafetyLimits(tool_position=limits.tool_position, joint_position=limits.joint_position)
        return replace(self, spec=replace(self.spec, limits=places, safe_stop=""))


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requests actions for one observation, whose arrays follow the record.

    Attributes:
        number: grows with each request of a client; the response repeats it.
        policy: BLAKE3 of the encoded `PolicyDescription`.
        description: the encoded `PolicyDescription`, in the first request and whenever a response asks for it.
        explore: without weights the policy acts at random; otherwise it does not act.
        timeout_s: how long the client waits. The server does not answer later.
        delay, method: of the `ChunkContext`, whose prefix is among the arrays; -1 and "" for a robot that waits.
    """

    protocol: int
    number: Number
    policy: Digest
    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)] = b""
    instruction: Annotated[str, msgspec.Meta(max_length=4096)]
    deterministic: bool
    explore: bool
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)]
    delay: Annotated[int, msgspec.Meta(ge=NO_CONTEXT, le=1 << 16)] = NO_CONTEXT
    method: ExecutionMethod | Literal[""] = ""


class ActionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays of an `ActionChunk` follow the record, unless `unavailable` or `invalid` is set.

    Attributes:
        number: the request's; 0 if the request could not be decoded.
        version: of the weights that acted.
        execute, bridged: see `ActionChunk`.
        swap_delay_s: from the announcement of that version to its first use at the server.
        awaits_weights: the policy has no weights, and the request does not allow it to explore.
        needs_description: the server does not know the policy.
        cameras: of which the policy needs a picture that the request lacks: all that it reads.
        unavailable: why there is no action now, to follow "the policy at HOST". The robot holds and asks again.
        invalid: why the policy cannot act on such an observation.
    """

    number: Number
    version: int = NO_VERSION
    execute: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    bridged: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    swap_delay_s: float = 0.0
    awaits_weights: bool = False
    needs_description: bool = False
    cameras: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ARRAYS)] = ()
    unavailable: str = ""
    invalid: str = ""


Arrays: TypeAlias = dict[str, Array]


class _AnyVersion(msgspec.Struct, frozen=True):
    protocol: int


_REQUESTS = msgspec.msgpack.Decoder(ActionRequest)
_RESPONSES = msgspec.msgpack.Decoder(ActionResponse)
_VERSIONS = msgspec.msgpack.Decoder(_AnyVersion)
_DESCRIPTIONS = msgspec.msgpack.Decoder(PolicyDescription)


def decode_request(frame: bytes | memoryview) -> tuple[ActionRequest, Arrays]:
    """A request, with read-only views of its arrays.

    Raises:
        WireError: not a request, or neither of this protocol version nor of the one before.
    """
    packet = _open_checked(frame)
    try:
        theirs = _VERSIONS.decode(packet.record).protocol
        if theirs not in (PREVIOUS_POLICY_PROTOCOL_VERSION, POLICY_PROTOCOL_VERSION):
            ours = POLICY_PROTOCOL_VERSION
            raise WireError(f"has protocol version {ours}, this robot {theirs}; install the same release")
        return _REQUESTS.decode(packet.record), packet.arrays()
    except DECODE_ERRORS as error:
        raise WireError(f"got no request: {str(error)[:200]}") from None


def request_context(request: ActionRequest, arrays: Arrays) -> ChunkContext | None:
    """The context of a decoded request; its prefix is removed from `arrays`.

    Raises:
        WireError: the prefix is missing, or is not float32 (k, a).
    """
    prefix = arrays.pop(PREFIX, None)
    if request.delay == NO_CONTEXT or not request.method:
        return None
    if prefix is None or prefix.ndim != 2 or prefix.dtype != np.float32:
        raise WireError("got promised actions that are not float32 (k, a)")
    return ChunkContext(prefix, request.delay, request.method)


def decode_response(frame: bytes | memoryview) -> tuple[ActionResponse, Arrays]:
    """A response, with read-only views of its arrays. Raises WireError: not a response."""
    packet = _open_checked(frame)
    try:
        return _RESPONSES.decode(packet.record), packet.arrays()
    except DECODE_ERRORS as error:
        raise WireError(f"not a response: {str(error)[:200]}") from None


def encode_description(description: PolicyDescription) -> bytes:
    """Equal descriptions have equal bytes, with options in any order."""
    return msgspec.msgpack.encode(description, order="deterministic")


def require_digest(encoded: bytes, digest: bytes) -> None:
    """Raises WireError unless the encoded `PolicyDescription` has this digest."""
    if blake3(encoded).digest() != digest:
        raise WireError("got a policy that does not match its digest")


def decode_description(encoded: bytes) -> PolicyDescription:
    """Raises WireError: it does not decode, or its spec is invalid."""
    try:
        return _DESCRIPTIONS.decode(encoded)
    except (*DECODE_ERRORS, HalError) as error:
        raise WireError(f"got no valid policy: {str(error)[:200]}") from None


def _open_checked(frame: bytes | memoryview) -> ParsedPacket:
    packet = parse_packet(frame)
    if len(packet.layout.arrays) > MAX_ARRAYS:
        raise WireError(f"a message with {len(packet.layout.arrays)} arrays; {MAX_ARRAYS} are allowed")
    return packet
