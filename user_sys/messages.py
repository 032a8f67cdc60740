"""Every message that crosses a process or a network boundary: frozen, typed, versioned.

A message is one msgpack frame. `ChunkOffer`, `Preview` and `WeightsBlocks` have a second frame with bulk bytes. Each
channel decodes only its own union, so a message on the wrong channel is refused.

Weights: a *version* is a publication of the learner. For each precision (exact or rounded) it has a manifest with the
digest of every tensor, which the learner signs. A *patch* is the bytes that lead to a version: a full one from nothing,
others from an earlier version in the same precision. Patches need no signature: their result must have the digests of
the manifest. The fields `form`, `parcel` and `life` keep their names of protocol version 4.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.resource import ResourceRecord
from hal.spec import RobotSpec
from user_sys.errors import WireError

Precision: TypeAlias = Literal["exact", "bf16", "int8"]
PatchCodec: TypeAlias = Literal["full", "delta", "parts", "table"]

NO_VERSION = -1
FOREIGN_RUN = -2
"""Replaces the version of another or an unknown run, because its number has no meaning in this run."""
MAX_PATCH_BYTES = 1 << 34
MAX_BLOCKS = 4096
MAX_TENSORS = 1 << 15
"""Limit for one manifest; the scales of integer tensors count."""
MAX_TABLE_BYTES = 16 << 20
INLINE_TABLE_BYTES = 32 << 10
"""A longer table of tensors is not part of its manifest; it is a patch with codec ``table``."""
TENSOR_TABLE: Literal["table"] = "table"
CRC_BYTES = 4
DIGEST_BYTES = 32

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class PublisherEpoch(msgspec.Struct, frozen=True):
    """A run, and the number of the learner's start in it; see `user_sys.weights.signing`."""

    run: bytes = b""
    number: int = 0


NO_EPOCH = PublisherEpoch()


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """`digest` is the BLAKE3 of the tensor's bytes, little-endian, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version in one precision: all tensors of the policy and its normalizers.

    Attributes:
        version: grows with each publication of a run, also over restarts of its learner.
        updates: the number of updates that the learner had made.
        form: the precision: ``exact``, or ``bf16`` / ``int8``, which the learner rounds for inference.
        tensors: sorted by name; empty if their table is a patch of `table_bytes`.
        digest: of `form` and `tensors`, and so of every byte.
        size_bytes: of all tensors.
        published_unix_ns: by the learner's clock.
        max_error, rms_error: rounding errors: the largest, in the tensors' unit, and the one relative to their RMS.
        run: the run that the version numbers belong to; see `user_sys.weights.signing`.
        life: the number of the learner's start; a later run has greater ones.
    """

    version: int
    updates: int
    form: Precision
    tensors: tuple[TensorEntry, ...]
    digest: bytes
    size_bytes: int
    published_unix_ns: int
    table_bytes: int = 0
    max_error: float = 0.0
    rms_error: float = 0.0
    run: bytes = b""
    life: int = 0

    @property
    def has_tensors(self) -> bool:
        """Whether `tensors` has the table."""
        return bool(self.tensors) or not self.table_bytes


class PinnedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A person's pin: every robot uses `version`, or the newest again (`NO_VERSION`).

    It applies to `run` only. `serial` grows with each pin; a receiver applies a pin only if it is newer than its last.
    """

    serial: int
    version: int
    by: str
    reason: str
    given_unix_ns: int
    run: bytes = b""


class SignedRecord(msgspec.Struct, frozen=True, array_like=True):
    """An encoded `WeightsManifest` or `PinnedVersion`, and its Ed25519 signature."""

    body: bytes
    signature: bytes


class PatchInfo(msgspec.Struct, frozen=True, array_like=True):
    """A patch: its base, its result, and the checksums of its blocks.

    Attributes:
        id: BLAKE3 of base, result and codec, so equal at every peer.
        base: the version that it changes; `NO_VERSION` for a full patch. Of ``parts``, the oldest possible base.
        base_digest: of the base's manifest; empty for a full patch.
        codec: ``full``: every tensor. ``parts``: whole tensors, all that changed since `base`; it applies to every
            later version of the same start of the learner. ``delta``: changed bits. ``table``: no tensor, but the
            table for a manifest without one.
        block_bytes: receivers request and check blocks of this size; the last one may be shorter.
        crcs: CRC32C of each block, little-endian, concatenated.
    """

    id: bytes
    form: Precision
    version: int
    base: int
    base_digest: bytes
    codec: PatchCodec
    size_bytes: int
    block_bytes: int
    crcs: bytes

    @property
    def block_count(self) -> int:
        return -(-self.size_bytes // self.block_bytes)


def decode_record(raw: bytes, kind: type[RecordT]) -> RecordT:
    """Raises WireError if `raw` is not a record of this kind."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise WireError(f"not a {kind.__name__}: {str(error)[:200]}") from None


def check_patch(info: PatchInfo) -> None:
    """Raises WireError unless the fields of a patch are within their limits. Call it before allocating memory."""
    sound = (
        0 < info.size_bytes <= (MAX_TABLE_BYTES if info.codec == TENSOR_TABLE else MAX_PATCH_BYTES)
        and 0 < info.block_bytes
        and info.block_count <= MAX_BLOCKS
        and len(info.crcs) == CRC_BYTES * info.block_count
        and len(info.id) == DIGEST_BYTES
        and (info.base == NO_VERSION) == (info.codec in ("full", TENSOR_TABLE)) == (not info.base_digest)
        and NO_VERSION <= info.base < info.version
    )
    if not sound:
        raise WireError(
            f"invalid description of a patch to version {info.version} with {info.size_bytes} bytes: a field is out of "
            "its limits"
        )


PROTOCOL_VERSION = 4
OLDEST_PROTOCOL = 4  # the oldest version that this release supports


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


# Opening a session ----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a client on each channel. Its key decides which `name` and `role` it may claim.

    Attributes:
        protocol, oldest: the newest and oldest protocol version that it supports; 0 means `protocol` only.
        holder: a robot session's name in leases. The gateway refuses the session while another holder has the robot.
        stream: names a robot's outbox; sequence numbers of chunks are unique in a stream.
    """

    protocol: int
    role: Literal["robot", "learner", "console", "relay"]
    name: str
    oldest: int = 0
    holder: str = ""
    stream: str = ""
    spec: RobotSpec | None = None


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The gateway accepts the session and uses protocol version `protocol`.

    On the experience channel, `resume_after` is the newest durable chunk of the robot's `stream`, so that the robot
    does not resend it; -1 if the gateway does not know one.
    """

    protocol: int
    gateway: str
    resume_after: int = -1


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """The gateway refuses the session for good; `reason` is a sentence for a person."""

    reason: str


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """The client sends it on each channel. The gateway echoes the one of control on all channels, with its clock.

    The echo on control measures the clock offset and the round trip; the others only show that a channel is alive.
    """

    t_client_ns: int
    t_gateway_unix_ns: int = 0


class CreditGrant(Message, frozen=True, kw_only=True, tag="grant"):
    """Flow control: the total of messages and bytes that the peer may have sent on this channel since it opened."""

    messages: int
    size_bytes: int


# Leases ---------------------------------------------------------------------------------------------------------------


class LeaseRequest(Message, frozen=True, kw_only=True, tag="lease-request"):
    """A session requests a lease of `robot`, or renews the lease with `token`.

    Attributes:
        floor: the newest token that the robot's driver has seen; a granted token must be greater.
        asked_ns: time of sending, by the sender's `hal.lease.lease_clock_ns`.
    """

    robot: str
    holder: str
    token: int = 0
    floor: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    asked_ns: Annotated[int, msgspec.Meta(ge=0)] = 0


class LeaseGrant(Message, frozen=True, kw_only=True, tag="lease-grant"):
    """A granted lease. It lasts for `ttl_s` from `asked_ns` of the request, also if this message is late."""

    robot: str
    holder: str
    token: int
    ttl_s: float
    asked_ns: Annotated[int, msgspec.Meta(ge=0)] = 0


class LeaseRefusal(Message, frozen=True, kw_only=True, tag="lease-refusal"):
    """A refused lease; `reason` names the holder. `token` is that of the request: 0 for a new lease."""

    robot: str
    reason: str
    token: int = 0


class LeaseRelease(Message, frozen=True, kw_only=True, tag="lease-release"):
    robot: str
    token: int


# People ---------------------------------------------------------------------------------------------------------------


class OperatorCommand(Message, frozen=True, kw_only=True, tag="operator"):
    """A person's command to one robot. ``release`` ends the operator's control: the robot holds.

    Attributes:
        twist: only of ``drive``: one value in [-1, 1] for each action element.
        sequence: grows with each command of a console.
        press: of an ``e-stop``, which uses the stop channel and is repeated under the same number until confirmed.
        address: the computer of the person's browser, if the console knows it.
    """

    robot: str
    operator: str
    order: Literal["take-over", "drive", "release", "hand-back", "success", "failure", "reset", "e-stop", "re-arm"]
    twist: tuple[float, ...] = ()
    sequence: int = 0
    press: int = 0
    address: str = ""

    @property
    def issuer(self) -> str:
        """The operator, and the address if it is known."""
        return f"{self.operator} at {self.address}" if self.address else self.operator


class OperatorReply(Message, frozen=True, kw_only=True, tag="operator-reply"):
    """Whether a command took effect. An ``e-stop`` is accepted when the driver has it."""

    robot: str
    operator: str
    order: str
    accepted: bool
    reason: str = ""
    press: int = 0


class PreviewRequest(Message, frozen=True, kw_only=True, tag="watch"):
    """A console requests pictures of `robot` for the next `ttl_s` seconds, at most at `rate_hz`."""

    robot: str
    rate_hz: float
    ttl_s: float


# Reports --------------------------------------------------------------------------------------------------------------


class RobotStatus(Message, frozen=True, kw_only=True, tag="robot-status"):
    """A robot's state, sent a few times a second and at each change of authority.

    Attributes:
        dropped_episodes: episodes that its full outbox has deleted, since the outbox was created.
        refused_realtime: real-time settings that the system refused to its driver; its control rate may vary.
        faults: hardware failures since its session started; `note` describes the last.
    """

    robot: str
    authority: str
    operator: str
    phase: str
    episode: str
    step: int
    policy_version: int
    real_time: bool
    outbox_chunks: int
    control_hz: float
    safety_interventions: int
    dropped_episodes: int = 0
    refused_realtime: str = ""
    faults: int = 0
    note: str = ""


class EpisodeReport(Message, frozen=True, kw_only=True, tag="episode"):
    """One finished episode, for curves; the store has the authoritative record."""

    robot: str
    episode: str
    source: str
    steps: int
    success: bool | None
    intervention_steps: int
    episode_return: float
    policy_version: int


class MetricsReport(Message, frozen=True, kw_only=True, tag="metrics"):
    """Scalars of one node at a count: the updates of a learner, or the steps of a gateway."""

    node: str
    count: int
    scalars: dict[str, float]


class DevicesReport(Message, frozen=True, kw_only=True, tag="devices"):
    """The GPUs, cameras, buses and input devices of the sender's computer."""

    records: Annotated[tuple[ResourceRecord, ...], msgspec.Meta(max_length=64)]


class ResourceUpdate(Message, frozen=True, kw_only=True, tag="resource"):
    """To consoles: a robot or device of the run is new, lost or back; see its `health`."""

    record: ResourceRecord


class StopRun(Message, frozen=True, kw_only=True, tag="stop-run"):
    """The run has ended: sessions finish their step, drain their outbox and exit."""

    reason: str


# Experience -----------------------------------------------------------------------------------------------------------


class ChunkOffer(Message, frozen=True, kw_only=True, tag="chunk"):
    """The second frame is an encoded `user_sys.episode.Chunk`."""

    sequence: int
    episode: str
    index: int


class ChunkAck(Message, frozen=True, kw_only=True, tag="chunk-ack"):
    """All chunks up to and including `sequence` are durable."""

    sequence: int


class ChunkRefusal(Message, frozen=True, kw_only=True, tag="chunk-refusal"):
    """The chunk can never be stored: it is damaged or has another robot's name. The edge sets it aside."""

    sequence: int
    reason: str


class Preview(Message, frozen=True, kw_only=True, tag="preview"):
    """A picture for people; the second frame is a JPEG file. A newer one replaces a waiting one, one is in flight."""

    robot: str
    camera: str
    step: int


class PreviewAck(Message, frozen=True, kw_only=True, tag="preview-ack"):
    robot: str
    camera: str


# Weights --------------------------------------------------------------------------------------------------------------


class WeightsOfferRequest(Message, frozen=True, kw_only=True, tag="weights-ask"):
    """The gateway requests the learner's offer, for example after a new connection."""


class WeightsOffer(Message, frozen=True, kw_only=True, tag="weights-offer"):
    """The version to use and the patches that lead to it; a newer offer replaces it. The receiver requests the patches.

    Attributes:
        manifests: one signed `WeightsManifest` for each precision of the version.
        signer: the learner's public key, for receivers without one.
        order: the newest signed `PinnedVersion`, if any.
        greeting: the first offer of a session; requests of an earlier session get no reply.
        learner, embodiment: the learner and its robots' embodiment; only to relays, which get the offers of all.
        ahead: requests that the sender answers at once, without receiving them.
    """

    manifests: tuple[SignedRecord, ...]
    parcels: tuple[PatchInfo, ...]
    signer: bytes
    order: SignedRecord | None = None
    greeting: bool = False
    learner: str = ""
    embodiment: str = ""
    ahead: tuple[WeightsRequest, ...] = ()


class WeightsRequest(Message, frozen=True, kw_only=True, tag="weights-request"):
    """Requests `count` blocks of a patch, from block `first` on."""

    parcel: bytes
    first: int
    count: int


class WeightsBlocks(Message, frozen=True, kw_only=True, tag="weights-grains"):
    """Blocks of a patch: the second frame has consecutive blocks from block `first` on."""

    parcel: bytes
    first: int


class WeightsGone(Message, frozen=True, kw_only=True, tag="weights-gone"):
    """A requested patch is no longer stored."""

    parcel: bytes


class WeightsProgress(Message, frozen=True, kw_only=True, tag="weights-progress"):
    """To the learner: the oldest version that a connected robot uses, and the pinned version; -1 without one."""

    oldest: int
    ordered: int = -1


class WeightsReceived(Message, frozen=True, kw_only=True, tag="weights-received"):
    """Credit for the next version: a robot uses this one, or the gateway has it on disk."""

    version: int


class WeightsApplied(Message, frozen=True, kw_only=True, tag="weights-applied"):
    """`robot` uses `version` from now on, `seconds` after its offer.

    If `digest` is set, the robot holds the version in precision `form` and is ready for the next one: `ahead_bytes` of
    the patches from there may follow the next offer without a request.
    """

    robot: str
    version: int
    seconds: float
    form: Precision = "exact"
    digest: bytes = b""
    ahead_bytes: int = 0


ControlMessage = (
    Hello | Welcome | Refusal | Heartbeat | CreditGrant | LeaseRequest | LeaseGrant | LeaseRefusal | LeaseRelease
    | OperatorCommand | OperatorReply | PreviewRequest | RobotStatus | EpisodeReport | MetricsReport | StopRun
    | DevicesReport | ResourceUpdate
)  # fmt: skip
StopMessage = Hello | Welcome | Refusal | Heartbeat | CreditGrant | OperatorCommand | OperatorReply
ExperienceMessage = (
    Hello | Welcome | Refusal | Heartbeat | CreditGrant | ChunkOffer | ChunkAck | ChunkRefusal | Preview | PreviewAck
)  # fmt: skip
WeightsMessage = (
    Hello | Welcome | Refusal | Heartbeat | CreditGrant | WeightsReceived | WeightsApplied | WeightsOfferRequest
    | WeightsOffer | WeightsRequest | WeightsBlocks | WeightsGone | WeightsProgress
)  # fmt: skip
