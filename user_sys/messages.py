"""What is said about weights: manifests of versions, parcels that carry them, and people's orders.

A *version* is what the learner published under one number. Each *form* of it (exact, or rounded) has a manifest with
the digest of every tensor, signed by the learner. *Parcels* are the bytes that lead to a form: a full one from nothing,
others from an earlier version of the same form. They need no signature: what comes of them must have the manifest's
digests.

Every message that crosses a process or a network boundary: frozen, typed, versioned.

A message travels as one msgpack frame. Some (`ChunkOffer`, `Preview`, `WeightsBlocks`) announce a second
frame with bulk bytes. Each channel decodes only its own union, so a message on the wrong channel is refused.
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
"""In the place of a version of another run, or of one not known to be of this: its number would say nothing here."""
MAX_PATCH_BYTES = 1 << 34
MAX_BLOCKS = 4096
MAX_TENSORS = 1 << 15
"""of a version, in each of its forms; the scales of integers count."""
MAX_TABLE_BYTES = 16 << 20
INLINE_TABLE_BYTES = 32 << 10
"""A manifest whose table of tensors is longer is without it; the table travels as a parcel of its own."""
TENSOR_TABLE: Literal["table"] = "table"
CRC_BYTES = 4
DIGEST_BYTES = 32

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class PublisherEpoch(msgspec.Struct, frozen=True):
    """Of which run, and in which of its lives, a learner publishes; see `WeightsManifest` and
    `user_sys.weights.signing`.
    """

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
    """One form of a version: policy and normalizers, complete.

    Attributes:
        version: grows with each publication of a run, and over restarts of its learner.
        updates: how many updates the learner had made.
        form: ``exact``; or ``bf16`` / ``int8`` for inference, rounded at the source.
        tensors: in the order of their names; none where their table travels apart, as a parcel of `table_bytes`.
        digest: of `form` and `tensors`, so of every byte.
        size_bytes: of all tensors.
        published_unix_ns: the learner's clock.
        max_error, rms_error: of rounding: the largest, in the tensors' unit, and relative to their root mean square.
        run: identifies the run whose numbers these are; see `user_sys.weights.signing`.
        life: of the learner; of two runs the later has the greater ones.
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
        """Whether `tensors` are there."""
        return bool(self.tensors) or not self.table_bytes


class PinnedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A person's word: from now on every robot acts with `version`, or again with the newest (`NO_VERSION`).

    It says nothing of versions of another run than `run`. `serial` grows with each order; receivers obey only one that
    is newer than the last of its run that they obeyed.
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
    """One parcel: what it leads to, from where, and how to check its pieces as they come.

    Attributes:
        id: BLAKE3 of what it leads to, from where and how: a parcel is the same wherever it lies.
        base: the version that it changes; of ``parts``, the oldest of those that it changes; `NO_VERSION` for a full
            one.
        base_digest: of that version's manifest; empty for a full one.
        codec: ``full``: every tensor; ``parts``: whole tensors, all that changed since `base`, so that it changes any
            version of the same life from there on; ``delta``: changed bits too.
            ``table``: no tensor, but what they are and their digests, for a manifest that is without.
        block_bytes: it is checked, and asked for, in grains of so many bytes; the last one may be shorter.
        crcs: CRC32C of each grain, little-endian, one after the other.
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
    """Raises WireError: not a record of this kind."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise WireError(f"not a {kind.__name__}: {str(error)[:200]}") from None


def check_patch(info: PatchInfo) -> None:
    """Whether a parcel's description is within its bounds, before anything is allocated for it. Raises WireError."""
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
            f"the description of a parcel to version {info.version} of {info.size_bytes} bytes is not sound"
        )


PROTOCOL_VERSION = 4
OLDEST_PROTOCOL = 4  # the oldest version that this release still speaks


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


# Opening a session ----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a client on each channel. Its key decides which `name` and `role` it may claim.

    It speaks all versions from `oldest` to `protocol`; 0 stands for `protocol` alone. `holder` is a robot session's
    name in leases: while another holds the robot, the gateway refuses the connection. `stream` names a robot's outbox:
    within one stream, sequence numbers of chunks never start anew.
    """

    protocol: int
    role: Literal["robot", "learner", "console", "relay"]
    name: str
    oldest: int = 0
    holder: str = ""
    stream: str = ""
    spec: RobotSpec | None = None


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The gateway accepts, and speaks version `protocol` from here on.

    On the experience channel, `resume_after` is the newest chunk of the robot's `stream` that is known to be durable,
    so that it is not sent again; -1 where the gateway does not know.
    """

    protocol: int
    gateway: str
    resume_after: int = -1


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """The gateway refuses for good; `reason` is a sentence for a person."""

    reason: str


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent by the client on each channel, and answered on each when it came on control, with the gateway's clock.

    Control's give the clock's offset and the round trip; the others' only show that something still comes.
    """

    t_client_ns: int
    t_gateway_unix_ns: int = 0


class CreditGrant(Message, frozen=True, kw_only=True, tag="grant"):
    """Flow control: how many messages and bytes the receiver of this may have sent on this channel since it opened."""

    messages: int
    size_bytes: int


# Leases ---------------------------------------------------------------------------------------------------------------


class LeaseRequest(Message, frozen=True, kw_only=True, tag="lease-request"):
    """A session asks to drive `robot`, or renews when `token` is the one it holds.

    `floor` is the newest token that the robot's driver has seen: what is granted must be greater.
    `asked_ns` is when it was sent, by the sender's `hal.lease.lease_clock_ns`.
    """

    robot: str
    holder: str
    token: int = 0
    floor: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    asked_ns: Annotated[int, msgspec.Meta(ge=0)] = 0


class LeaseGrant(Message, frozen=True, kw_only=True, tag="lease-grant"):
    """`asked_ns` is that of the request: the lease lasts for `ttl_s` from then on, however late this arrives."""

    robot: str
    holder: str
    token: int
    ttl_s: float
    asked_ns: Annotated[int, msgspec.Meta(ge=0)] = 0


class LeaseRefusal(Message, frozen=True, kw_only=True, tag="lease-refusal"):
    """`reason` names the holder. `token` is that of the request: 0 where it asked for a new lease."""

    robot: str
    reason: str
    token: int = 0


class LeaseRelease(Message, frozen=True, kw_only=True, tag="lease-release"):
    robot: str
    token: int


# People ---------------------------------------------------------------------------------------------------------------


class OperatorCommand(Message, frozen=True, kw_only=True, tag="operator"):
    """A person's order to one robot. `twist` has one element an action element, each in [-1, 1]; only for ``drive``.

    ``release`` ends the operator's control: the robot holds. The console sends it when a page goes away.
    `sequence` grows with each order of a console. An ``e-stop`` travels on a channel of its own and is repeated under
    the same `press` until it is confirmed.
    `address` is the computer of the person's browser, if the console knows it.
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
        """Who gives it, and from where."""
        return f"{self.operator} at {self.address}" if self.address else self.operator


class OperatorReply(Message, frozen=True, kw_only=True, tag="operator-reply"):
    """Whether an order took effect, to the operator who gave it. An ``e-stop`` is accepted once the driver has it."""

    robot: str
    operator: str
    order: str
    accepted: bool
    reason: str = ""
    press: int = 0


class PreviewRequest(Message, frozen=True, kw_only=True, tag="watch"):
    """A console wants pictures of `robot` for the next `ttl_s` seconds at no more than `rate_hz`."""

    robot: str
    rate_hz: float
    ttl_s: float


# What everyone may know -----------------------------------------------------------------------------------------------


class RobotStatus(Message, frozen=True, kw_only=True, tag="robot-status"):
    """A robot's state, published a few times a second and at each change of authority.

    `dropped_episodes`: given up by its outbox for want of room, since the outbox was made.
    `refused_realtime`: what its driver asked the system for and was refused, so that its control rate may waver.
    `faults`: how often its hardware failed since its session started; `note` tells of the last.
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
    """One finished episode, for curves; the store is the truth."""

    robot: str
    episode: str
    source: str
    steps: int
    success: bool | None
    intervention_steps: int
    episode_return: float
    policy_version: int


class MetricsReport(Message, frozen=True, kw_only=True, tag="metrics"):
    """Scalars of one node at one count (the learner's updates, the gateway's steps)."""

    node: str
    count: int
    scalars: dict[str, float]


class DevicesReport(Message, frozen=True, kw_only=True, tag="devices"):
    """The GPUs, cameras, buses and input devices that are now at the sender's computer."""

    records: Annotated[tuple[ResourceRecord, ...], msgspec.Meta(max_length=64)]


class ResourceUpdate(Message, frozen=True, kw_only=True, tag="resource"):
    """To consoles: a robot or device of the run's computers was lost, has returned or is new; see its `health`."""

    record: ResourceRecord


class StopRun(Message, frozen=True, kw_only=True, tag="stop-run"):
    """The run is over: sessions finish their step, drain their outbox and leave."""

    reason: str


# Experience -----------------------------------------------------------------------------------------------------------


class ChunkOffer(Message, frozen=True, kw_only=True, tag="chunk"):
    """The second frame is an encoded `user_sys.episode.Chunk`."""

    sequence: int
    episode: str
    index: int


class ChunkAck(Message, frozen=True, kw_only=True, tag="chunk-ack"):
    """Everything the client sent up to and including `sequence` is durable."""

    sequence: int


class ChunkRefusal(Message, frozen=True, kw_only=True, tag="chunk-refusal"):
    """The chunk can never be stored (damaged, or in another robot's name). The edge sets it aside and goes on."""

    sequence: int
    reason: str


class Preview(Message, frozen=True, kw_only=True, tag="preview"):
    """The second frame is a JPEG picture for people to see; newest wins, one in flight."""

    robot: str
    camera: str
    step: int


class PreviewAck(Message, frozen=True, kw_only=True, tag="preview-ack"):
    robot: str
    camera: str


# Weights --------------------------------------------------------------------------------------------------------------


class WeightsOfferRequest(Message, frozen=True, kw_only=True, tag="weights-ask"):
    """The gateway asks the learner for its offer, as after a new connection."""


class WeightsOffer(Message, frozen=True, kw_only=True, tag="weights-offer"):
    """The version that is to act, and what leads to it; newest wins. Whoever gets it asks for the parcels it needs.

    `manifests` hold one `user_sys.messages.WeightsManifest` for each form of the version, `order` the newest `Order` of
    a person, where there is one; both are signed by the learner's key.
    `learner` is the name of whose version it is, and `embodiment` what that learns for: a relay hears of every learner.
    `ahead` is answered without having been asked: its grains follow at once.
    """

    manifests: tuple[SignedRecord, ...]
    parcels: tuple[PatchInfo, ...]
    signer: bytes  # the learner's public key, for receivers that were given none
    order: SignedRecord | None = None
    greeting: bool = False  # the first of a session: what was asked for in an earlier one will not come
    learner: str = ""
    embodiment: str = ""
    ahead: tuple[WeightsRequest, ...] = ()


class WeightsRequest(Message, frozen=True, kw_only=True, tag="weights-request"):
    """Asks for `count` grains of a parcel from grain `first` on."""

    parcel: bytes
    first: int
    count: int


class WeightsBlocks(Message, frozen=True, kw_only=True, tag="weights-grains"):
    """The second frame holds consecutive grains of a parcel from grain `first` on."""

    parcel: bytes
    first: int


class WeightsGone(Message, frozen=True, kw_only=True, tag="weights-gone"):
    """A parcel that was asked for is not kept any more."""

    parcel: bytes


class WeightsProgress(Message, frozen=True, kw_only=True, tag="weights-progress"):
    """To the learner: the oldest version with which a connected robot acts, and the one that a person ordered.

    -1 where none acts with any, and where none is ordered.
    """

    oldest: int
    ordered: int = -1


class WeightsReceived(Message, frozen=True, kw_only=True, tag="weights-received"):
    """Credit for the next version: a robot has taken this one over, or the gateway has it on disk."""

    version: int


class WeightsApplied(Message, frozen=True, kw_only=True, tag="weights-applied"):
    """`robot` acts with `version` since now, `seconds` after it first heard of it.

    Where it holds that as `form` with `digest` and waits for the next, `ahead_bytes` of what leads from there to the
    next one may follow its offer unasked.
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
