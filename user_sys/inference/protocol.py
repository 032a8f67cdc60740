"""What a session and a policy process say to each other.

A message is one packet (`user_sys.codec`): a typed record, and arrays where the record's words say so. Each request has
a number, which its answer repeats; a session's numbers only grow on each of its two connections. A *slot* is one policy
at the process; it belongs to the session that opened it, and the session to the robot whose key its connection has.

    Greeting -> Welcome          once a second; a process that has begun anew has another `life`, and no slots
    Open     -> Done | Busy      a slot with a policy that has no weights
    Load     -> Done | Wanted | Unfit | Busy | Absent
    Part     -> likewise         the next bytes of what `LoadSlotWeights` named
    Act      -> Acted | Unfit | Absent
    anything -> Refusal
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.errors import HalError
from hal.spec import RobotSpec
from user_sys.codec import Array, ParsedPacket, encode_packet, parse_packet
from user_sys.errors import WireError

POLICY_NODE = "policy"
"""The policy process's name among keys, nodes and logs."""

POLICY_PROTOCOL_VERSION = 1
SESSION_BYTES = DIGEST_BYTES = 32
MAX_SLOTS = 4  # of a session: one policy acts, one takes weights, and one or two may be on their way out
PART_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 2 << 20
MAX_FIRST_MESSAGE_BYTES = 256 << 10  # of one message, before a connection's Greeting
MAX_WEIGHTS_BYTES = 1 << 30
MAX_ARRAYS = 256
PART_ARRAY = "part"
ACTIONS, LOG_PROB = "actions", "log_prob"

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
SlotNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
SessionId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
WeightsSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHTS_BYTES)]


class PolicyRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """`session` is 32 random bytes that the session has drawn."""

    number: Number
    session: SessionId


class SessionHeartbeat(PolicyRequest, frozen=True, kw_only=True, tag="greeting"):
    """`slots` are those that the session still has a use for; its others are freed."""

    protocol: int
    slots: Annotated[tuple[SlotNumber, ...], msgspec.Meta(max_length=MAX_SLOTS)] = ()


class OpenSlot(PolicyRequest, frozen=True, kw_only=True, tag="open"):
    """Makes a policy of `kind` for the robot that `spec` describes, which draws with `seed` (`compose.PolicyConfig`).

    A slot of that number is replaced.
    """

    slot: SlotNumber
    kind: Name
    features: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ARRAYS)]
    seed: Number
    spec: RobotSpec


class LoadSlotWeights(PolicyRequest, frozen=True, kw_only=True, tag="load"):
    """Has a slot's policy take the weights whose packet has so many bytes and that BLAKE3 `digest`."""

    slot: SlotNumber
    digest: Digest
    size_bytes: WeightsSize


class WeightsPart(PolicyRequest, frozen=True, kw_only=True, tag="part"):
    """The bytes from `offset` on of the packet with that digest, in the array ``part``, uint8 (n,)."""

    slot: SlotNumber
    digest: Digest
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHTS_BYTES)]


class ActionRequest(PolicyRequest, frozen=True, kw_only=True, tag="act"):
    """Asks a slot's policy what to do; the arrays are the observation. It acts with the weights of `digest` or not at
    all; an empty one is for a policy that has none yet.
    """

    slot: SlotNumber
    digest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
    sentence: Annotated[str, msgspec.Meta(max_length=4096)]
    deterministic: bool


class PolicyResponse(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """`number` is that of the request; 0 where the request could not be read."""

    number: Number


class ServerInfo(PolicyResponse, frozen=True, kw_only=True, tag="welcome"):
    instance_id: bytes
    device: Name


class SlotReady(PolicyResponse, frozen=True, kw_only=True, tag="done"):
    """The slot is as was asked for."""


class NextPart(PolicyResponse, frozen=True, kw_only=True, tag="wanted"):
    """Weights that are not here: send them from `offset` on."""

    offset: int


class SlotBusy(PolicyResponse, frozen=True, kw_only=True, tag="busy"):
    """The slot is being worked on, or as much as a robot may ask for at a time: ask again in a moment."""


class SlotNotFound(PolicyResponse, frozen=True, kw_only=True, tag="absent"):
    """There is no such slot, or it has other weights than those that the request names."""


class InvalidInput(PolicyResponse, frozen=True, kw_only=True, tag="unfit"):
    """The policy does not take these weights, or this observation; the slot is as it was."""

    reason: str


class ActionResponse(PolicyResponse, frozen=True, kw_only=True, tag="acted"):
    """With the arrays ``actions`` and ``log_prob`` of a `policies.policy.ActionChunk`."""


class RequestRejected(PolicyResponse, frozen=True, kw_only=True, tag="refusal"):
    """The process does not serve this; `reason` is for a person."""

    reason: str


AnyRequest: TypeAlias = SessionHeartbeat | OpenSlot | LoadSlotWeights | WeightsPart | ActionRequest
AnyResponse: TypeAlias = (
    ServerInfo | SlotReady | NextPart | SlotBusy | SlotNotFound | InvalidInput | ActionResponse | RequestRejected
)
Arrays: TypeAlias = dict[str, Array]


class _AnyHeartbeat(msgspec.Struct, frozen=True):
    protocol: int


_REQUESTS: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_RESPONSES: msgspec.msgpack.Decoder[AnyResponse] = msgspec.msgpack.Decoder(AnyResponse)
_HEARTBEATS = msgspec.msgpack.Decoder(_AnyHeartbeat)


class PackedWeights(msgspec.Struct, frozen=True, tag="weights"):
    """The record of a packet of weights: the arrays are all there is to it."""


def encode(message: PolicyRequest | PolicyResponse, arrays: Arrays | None = None) -> bytes:
    """The one frame of a message. Raises WireError: an array's dtype does not travel."""
    return encode_packet(message, arrays or {})


def decode_request(frame: bytes | memoryview) -> tuple[AnyRequest, Arrays]:
    """A request, with read-only views of its arrays. Raises WireError: it is none, or has another protocol version."""
    packet = _open_checked(frame)
    try:
        request = _REQUESTS.decode(packet.record)
    except (*DECODE_ERRORS, HalError) as error:  # the latter of a spec that no robot can have
        raise WireError(_version_mismatch(packet) or f"not a request: {str(error)[:200]}") from None
    if isinstance(request, SessionHeartbeat) and request.protocol != POLICY_PROTOCOL_VERSION:
        raise WireError(_version_mismatch(packet))
    return request, packet.arrays()


def decode_response(frame: bytes | memoryview) -> tuple[AnyResponse, Arrays]:
    """An answer, with read-only views of its arrays. Raises WireError: it is none."""
    packet = _open_checked(frame)
    try:
        return _RESPONSES.decode(packet.record), packet.arrays()
    except DECODE_ERRORS as error:
        raise WireError(f"not an answer: {str(error)[:200]}") from None


def _open_checked(frame: bytes | memoryview) -> ParsedPacket:
    packet = parse_packet(frame)
    if len(packet.layout.arrays) > MAX_ARRAYS:
        raise WireError(f"a message with {len(packet.layout.arrays)} arrays; {MAX_ARRAYS} are allowed")
    return packet


def _version_mismatch(packet: ParsedPacket) -> str:
    """What to say to a peer whose Greeting names another protocol version; empty where it names ours, or none."""
    try:
        theirs = _HEARTBEATS.decode(packet.record).protocol
    except DECODE_ERRORS:
        return ""
    if theirs == POLICY_PROTOCOL_VERSION:
        return ""
    version = POLICY_PROTOCOL_VERSION
    return f"the policy process speaks protocol version {version}, this peer {theirs}; install the same release"
