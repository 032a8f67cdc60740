"""The messages between a session and a policy server.

A message is one packet (`user_sys.codec`): a typed record, and arrays if the record's docstring names some. Each
request has a number, which its response repeats. A session's numbers only grow on each of its two connections. A *slot*
is one policy at the server. It belongs to the session that opened it, and the session to the robot of the connection's
key.

    SessionHeartbeat -> ServerInfo            once a second; a restarted server has another `instance_id` and no slots
    OpenSlot         -> SlotReady | SlotBusy  a slot with a policy without weights
    LoadSlotWeights  -> SlotReady | NextPart | InvalidInput | SlotBusy | SlotNotFound
    WeightsPart      -> likewise              the next bytes of the packet of `LoadSlotWeights`
    ActionRequest    -> ActionResponse | InvalidInput | SlotNotFound
    any request      -> RequestRejected
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
"""The policy server's name among keys, processes and logs."""

POLICY_PROTOCOL_VERSION = 1
SESSION_BYTES = DIGEST_BYTES = 32
MAX_SLOTS = 4  # of a session: one policy acts, one takes weights, and one or two may be about to be freed
PART_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 2 << 20
MAX_FIRST_MESSAGE_BYTES = 256 << 10  # of one message, before a connection's first heartbeat
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
    """`session` is 32 random bytes of the session."""

    number: Number
    session: SessionId


class SessionHeartbeat(PolicyRequest, frozen=True, kw_only=True, tag="greeting"):
    """`slots` are in use; the session's other slots are freed."""

    protocol: int
    slots: Annotated[tuple[SlotNumber, ...], msgspec.Meta(max_length=MAX_SLOTS)] = ()


class OpenSlot(PolicyRequest, frozen=True, kw_only=True, tag="open"):
    """Makes a policy of `kind` for a robot with `spec`; its random numbers use `seed` (`compose.PolicyConfig`).

    It replaces an existing slot with that number.
    """

    slot: SlotNumber
    kind: Name
    features: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ARRAYS)]
    seed: Number
    spec: RobotSpec


class LoadSlotWeights(PolicyRequest, frozen=True, kw_only=True, tag="load"):
    """Loads the weights whose packet has `size_bytes` and the BLAKE3 `digest` into a slot's policy."""

    slot: SlotNumber
    digest: Digest
    size_bytes: WeightsSize


class WeightsPart(PolicyRequest, frozen=True, kw_only=True, tag="part"):
    """The bytes of a packet from `offset` on, in the array ``part``, uint8 (n,)."""

    slot: SlotNumber
    digest: Digest
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHTS_BYTES)]


class ActionRequest(PolicyRequest, frozen=True, kw_only=True, tag="act"):
    """Requests actions of a slot's policy; the arrays are the observation.

    The policy acts with the weights of `digest` or not at all. An empty digest is for a policy without weights.
    """

    slot: SlotNumber
    digest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
    sentence: Annotated[str, msgspec.Meta(max_length=4096)]
    deterministic: bool


class PolicyResponse(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """`number` is the request's; 0 if the request could not be decoded."""

    number: Number


class ServerInfo(PolicyResponse, frozen=True, kw_only=True, tag="welcome"):
    """The server's process, which `instance_id` identifies, and its device."""

    instance_id: bytes = msgspec.field(name="life")
    device: Name


class SlotReady(PolicyResponse, frozen=True, kw_only=True, tag="done"):
    """The slot is in the requested state."""


class NextPart(PolicyResponse, frozen=True, kw_only=True, tag="wanted"):
    """The server does not have the weights: send them from `offset` on."""

    offset: int


class SlotBusy(PolicyResponse, frozen=True, kw_only=True, tag="busy"):
    """The slot is busy, or the robot's queue is full. Send the request again soon."""


class SlotNotFound(PolicyResponse, frozen=True, kw_only=True, tag="absent"):
    """There is no such slot, or it has other weights than the request names."""


class InvalidInput(PolicyResponse, frozen=True, kw_only=True, tag="unfit"):
    """The policy rejects these weights or this observation. The slot is unchanged."""

    reason: str


class ActionResponse(PolicyResponse, frozen=True, kw_only=True, tag="acted"):
    """It carries the arrays ``actions`` and ``log_prob`` of a `policies.policy.ActionChunk`."""


class RequestRejected(PolicyResponse, frozen=True, kw_only=True, tag="refusal"):
    """The server does not serve this request; `reason` is for a person."""

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
    """The record of a packet of weights, which are its arrays."""


def encode(message: PolicyRequest | PolicyResponse, arrays: Arrays | None = None) -> bytes:
    """The one frame of a message. Raises WireError: an array's dtype is not supported."""
    return encode_packet(message, arrays or {})


def decode_request(frame: bytes | memoryview) -> tuple[AnyRequest, Arrays]:
    """A request, with read-only views of its arrays. Raises WireError: not a request, or another protocol version."""
    packet = _open_checked(frame)
    try:
        request = _REQUESTS.decode(packet.record)
    except (*DECODE_ERRORS, HalError) as error:  # HalError: an invalid spec
        raise WireError(_version_mismatch(packet) or f"not a request: {str(error)[:200]}") from None
    if isinstance(request, SessionHeartbeat) and request.protocol != POLICY_PROTOCOL_VERSION:
        raise WireError(_version_mismatch(packet))
    return request, packet.arrays()


def decode_response(frame: bytes | memoryview) -> tuple[AnyResponse, Arrays]:
    """A response, with read-only views of its arrays. Raises WireError: not a response."""
    packet = _open_checked(frame)
    try:
        return _RESPONSES.decode(packet.record), packet.arrays()
    except DECODE_ERRORS as error:
        raise WireError(f"not a response: {str(error)[:200]}") from None


def _open_checked(frame: bytes | memoryview) -> ParsedPacket:
    packet = parse_packet(frame)
    if len(packet.layout.arrays) > MAX_ARRAYS:
        raise WireError(f"a message with {len(packet.layout.arrays)} arrays; {MAX_ARRAYS} are allowed")
    return packet


def _version_mismatch(packet: ParsedPacket) -> str:
    """An error text for a peer with another protocol version; empty if it has ours, or names none."""
    try:
        theirs = _HEARTBEATS.decode(packet.record).protocol
    except DECODE_ERRORS:
        return ""
    if theirs == POLICY_PROTOCOL_VERSION:
        return ""
    version = POLICY_PROTOCOL_VERSION
    return f"the policy server has protocol version {version}, this peer {theirs}; install the same release"
