"""Every message that crosses a process or a network boundary: frozen, typed, versioned.

A message is one msgpack frame. `ChunkOffer`, `Preview` and `WeightsBlobs` have a second frame with bulk bytes. Each
channel decodes only its own union, so a message on the wrong channel is refused.

Weights: a *version* is a publication of the learner. For each precision it has a manifest, which the learner signs. The
manifest names the BLAKE3 digest of the table of tensors, and the table names the digest of every tensor's *blobs*.
Blobs need no signature: a receiver requests the digests that it lacks, and verifies each.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.resource import ResourceRecord
from hal.spec import RobotSpec
from user_sys.errors import WireError

Precision: TypeAlias = Literal["exact", "bf16"]

NO_VERSION = -1
FOREIGN_RUN = -2
"""Replaces the version of another or an unknown run, because its number has no meaning in this run."""
BLOB_BYTES = 4 << 20
"""A tensor is cut into blobs of this size; the last one may be shorter."""
MAX_TENSORS = 1 << 15
MAX_TABLE_BYTES = 16 << 20
MAX_VERSION_BYTES = 1 << 36
INLINE_TABLE_BYTES = 16 << 10
"""A longer table of tensors is not part of the offer: receivers request it like a blob."""
MAX_WANTS = 1024
"""Maximum number of blobs in one request."""
DIGEST_BYTES = 32

Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION_BYTES)]

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor; its bytes are little-endian, in C order. `blobs` has the digest of each `BLOB_BYTES` of them."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    blobs: tuple[Digest, ...]


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version in one precision: all tensors of the policy and its normalizers.

    Attributes:
        version: grows with each publication of a run, also over restarts of its learner.
        updates: the number of updates that the learner had made.
        precision: ``exact``, or ``bf16``: floats are rounded for inference.
        digest: of the encoded table of tensors, and so of every byte.
        table_bytes: size of the encoded table.
        size_bytes: of all tensors.
        published_unix_ns: by the learner's clock.
        run: the run that the version numbers belong to; see `user_sys.weights.signing`.
        epoch: the number of the publisher's start; grows also from run to run.
    """

    version: int
    updates: int
    precision: Precision
    digest: Digest
    table_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_TABLE_BYTES)]
    size_bytes: Count
    published_unix_ns: int
    run: bytes = b""
    epoch: int = 0


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


def decode_record(raw: bytes, kind: type[RecordT]) -> RecordT:
    """Raises WireError if `raw` is not a record of this kind."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise WireError(f"not a {kind.__name__}: {str(error)[:200]}") from None


PROTOCOL_VERSION = 6
PREVIOUS_PROTOCOL_VERSION = PROTOCOL_VERSION - 1
"""A gateway also accepts robots and relays of this version, so that the cloud can be upgraded first."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


# Opening a session ----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a client on each channel. Its key decides which `name` and `role` it may claim.

    Attributes:
        protocol: its protocol version: that of the gateway, or of a robot or relay the previous one.
        holder: a robot session's name in leases. The gateway refuses the session while another holder has the robot.
        stream: unused; robots of earlier releases send it.
    """

    protocol: int
    role: Literal["robot", "learner", "console", "relay", "policy"]
    name: str
    holder: str = ""
    stream: str = ""
    spec: RobotSpec | None = None


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The gateway accepts the channel."""


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
    floor: Annotated[int, msgspec.Meta(ge=0)] = 0
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


ControlOrder: TypeAlias = Literal["take-over", "hand-back", "request-control", "accept", "decline", "pause"]
OperatorOrder: TypeAlias = ControlOrder | Literal["drive", "release", "success", "failure", "reset", "e-stop", "re-arm"]
FIRST_PROTOCOL_OF_ORDER: dict[str, int] = dict.fromkeys(("request-control", "accept", "decline", "pause"), 6)
"""Orders that a robot of the previous protocol version cannot decode: a gateway does not send them to it."""


class OperatorCommand(Message, frozen=True, kw_only=True, tag="operator"):
    """A person's command to one robot.

    ``release`` ends the operator's control: the robot holds. ``request-control`` asks the driver, who sends
    ``accept`` or ``decline``. ``pause`` holds the robot of any driver.

    Attributes:
        twist: only of ``drive``: one value in [-1, 1] for each action element.
        tool: only of ``drive``: shares of the tool's speed along x, y and z, of a robot with `RobotStatus.tool_speed`.
        rewind: only of ``drive``: the robot retraces its path of this episode, and `twist` has no effect.
        sequence: grows with each command of a console: the wall clock, in nanoseconds, or more.
        press: of an ``e-stop``, which uses the stop channel and is repeated under the same number until confirmed.
        address: the computer of the person's browser, if the console knows it.
        episode: the order applies to this episode only, and is refused in another; empty for any.
        forwarded_unix_ns: when the gateway forwarded it, by the gateway's clock; 0 for an ``e-stop``, or if unknown.
    """

    robot: str
    operator: str
    order: OperatorOrder
    twist: tuple[float, ...] = ()
    tool: tuple[float, ...] = ()
    rewind: bool = False
    sequence: int = 0
    press: int = 0
    address: str = ""
    episode: str = ""
    forwarded_unix_ns: int = 0

    @property
    def issuer(self) -> str:
        """The operator, and the address if it is known."""
        return f"{self.operator} at {self.address}" if self.address else self.operator

    def reply(self, *, accepted: bool, reason: str = "") -> OperatorReply:
        """The reply to this command."""
        return OperatorReply(
            robot=self.robot,
            operator=self.operator,
            order=self.order,
            accepted=accepted,
            reason=reason,
            press=self.press,
        )


class OperatorReply(Message, frozen=True, kw_only=True, tag="operator-reply"):
    """Whether a command took effect. An ``e-stop`` is accepted when the driver has it."""

    robot: str
    operator: str
    order: str
    accepted: bool
    reason: str = ""
    press: int = 0


class PreviewRequest(Message, frozen=True, kw_only=True, tag="watch"):
    """A console requests pictures of `robot` for the next `ttl_s` seconds, at most at `rate_hz`.

    Attributes:
        pose: requests `RobotStatus.state` and `promised` instead, 12 times a second at most.
        cameras: of these only; empty for all.
    """

    robot: str
    rate_hz: float
    ttl_s: float
    pose: bool = False
    cameras: tuple[str, ...] = ()


# Reports --------------------------------------------------------------------------------------------------------------


class ControlPeriod(msgspec.Struct, frozen=True, array_like=True):
    """One control period with an action, for a console's traces.

    Attributes:
        t_s: when the action was applied, by the edge's monotonic clock.
        requested, applied: (a,) in the action spec's units; `applied` is empty if the safety kernel refused the action.
        limits: bit set of `hal.safety.SafetyReason`.
        act_ms, apply_ms: from the capture of the observation to the action, and from there until it was applied.
    """

    t_s: float
    requested: tuple[float, ...]
    applied: tuple[float, ...]
    limits: int
    act_ms: float
    apply_ms: float


class RobotStatus(Message, frozen=True, kw_only=True, tag="robot-status"):
    """A robot's state, sent a few times a second and at each change of authority.

    Attributes:
        dropped_episodes: episodes that its full outbox has deleted, since the outbox was created.
        refused_realtime: real-time settings that the system refused to its driver; its control rate may vary.
        faults: hardware outages since its session started, however often each was retried; `note` describes the last.
        limits: reasons of the safety kernel, such as ``workspace``, that changed an action since the last status.
        requested_by: another operator who requests control from `operator`.
        help: why the robot requests help, in the state ``requesting``; or how to prepare the scene, if `awaits_reset`.
        resets: its driver resets it, and sends no pictures meanwhile.
        tool_speed: of a tool that the session can drive by moving the joints, m/s at the full share in its
            newest direction; else 0.
        tool_refusal: why it cannot, if the action moves joints.
        task: of the running episode.
        periods: the newest control periods since the last status, while a console requests pictures.
        state: ``observation.state``, in the spec's units, while a console requests the pose.
        promised: likewise, the actions that the policy has predicted for the next control periods, (a,) each.
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
    control_hz: float = 0.0
    safety_interventions: int
    dropped_episodes: int = 0
    refused_realtime: str = ""
    faults: int = 0
    note: str = ""
    limits: tuple[str, ...] = ()
    requested_by: str = ""
    help: str = ""
    awaits_reset: bool = False
    resets: bool = False
    tool_speed: float = 0.0
    tool_refusal: str = ""
    task: str = ""
    periods: tuple[ControlPeriod, ...] = ()
    state: tuple[float, ...] = ()
    promised: tuple[tuple[float, ...], ...] = ()


class EpisodeReport(Message, frozen=True, kw_only=True, tag="episode"):
    """One finished episode, for curves; the store has the authoritative record."""

    robot: str
    episode: str
    source: str
    steps: int
    success: bool | None
    intervention_steps: int
    episode_return: float = 0.0
    policy_version: int
    task: str = ""


MAX_POSE_VALUES = 4096  # of `RobotStatus.state` and `promised` together
LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """A distribution of delays: how many are in each bucket of `LATENCY_BOUNDS_S` and above the last, and their sum."""

    counts: tuple[int, ...]
    sum_s: float


class MetricsReport(Message, frozen=True, kw_only=True, tag="metrics"):
    """Scalars of one node; `count`: the updates of a learner.

    Only a gateway has `histograms`: delays of its robots, under ``<name>/<robot>``; see `user_sys.gateway.ingest`.
    """

    node: str
    count: int = 0
    scalars: dict[str, float]
    histograms: dict[str, Histogram] = {}


class DevicesReport(Message, frozen=True, kw_only=True, tag="devices"):
    """The GPUs, cameras, buses and input devices of the sender's computer."""

    records: Annotated[tuple[ResourceRecord, ...], msgspec.Meta(max_length=64)]


class ResourceUpdate(Message, frozen=True, kw_only=True, tag="resource"):
    """To consoles: a robot or device of the run is new, lost or back; see its `health`.

    Attributes:
        is_change: False in the present records that a console gets when it connects.
    """

    record: ResourceRecord
    is_change: bool = True


class StopRun(Message, frozen=True, kw_only=True, tag="stop-run"):
    """The run has ended: sessions finish their step, drain their outbox and exit."""

    reason: str


# Experience -----------------------------------------------------------------------------------------------------------


class ChunkOffer(Message, frozen=True, kw_only=True, tag="chunk"):
    """The second frame is an encoded `user_sys.episode.Chunk`."""

    sequence: int


class ChunkAck(Message, frozen=True, kw_only=True, tag="chunk-ack"):
    """All chunks up to and including `sequence` are durable."""

    sequence: int


class ChunkRefusal(Message, frozen=True, kw_only=True, tag="chunk-refusal"):
    """The chunk can never be stored: it is damaged or has another robot's name. The edge sets it aside."""

    sequence: int
    reason: str


class Preview(Message, frozen=True, kw_only=True, tag="preview"):
    """A picture for people; the second frame is a JPEG file. A newer one replaces a waiting one, one is in flight.

    `captured_unix_ns` is by the gateway's clock, or by the robot's for a console on its computer; 0 if unknown.
    """

    robot: str
    camera: str
    step: int
    captured_unix_ns: int = 0

    def age_s(self, now_unix_ns: int) -> float:
        """Seconds since the capture, `now_unix_ns` being by the same clock; 0 if it is unknown."""
        return max(0, now_unix_ns - self.captured_unix_ns) / 1e9 if self.captured_unix_ns else 0.0


class PreviewAck(Message, frozen=True, kw_only=True, tag="preview-ack"):
    robot: str
    camera: str


# Weights --------------------------------------------------------------------------------------------------------------


class WeightsOfferRequest(Message, frozen=True, kw_only=True, tag="weights-ask"):
    """The gateway requests the learner's offer, for example after a new connection."""


class WeightsOffer(Message, frozen=True, kw_only=True, tag="weights-offer"):
    """The version to use; a newer offer replaces it. The receiver requests the blobs that it lacks.

    Attributes:
        manifests: one signed `WeightsManifest` for each precision of the version; empty if the sender has no version.
        tables: the short tables of tensors of these manifests.
        signer: the learner's public key, for receivers without one.
        pin: the newest signed `PinnedVersion`, if any.
        greeting: the first offer of a session; requests of an earlier session get no reply.
        learner, embodiment: the learner and its robots' embodiment; only to relays, which get the offers of all.
    """

    manifests: tuple[SignedRecord, ...]
    signer: bytes
    tables: tuple[bytes, ...] = ()
    pin: SignedRecord | None = None
    greeting: bool = False
    learner: str = ""
    embodiment: str = ""


class BlobWant(msgspec.Struct, frozen=True, array_like=True):
    """A blob that the receiver lacks.

    Attributes:
        base: the digest of a blob of the same size that the receiver holds; empty without one.
        width: bytes of one value, which a difference may group by their significance.
        offset: how many bytes of the encoded blob with checksum `check` have arrived.
    """

    digest: Digest
    base: bytes = b""
    width: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    offset: Count = 0
    check: int = 0


class WeightsRequest(Message, frozen=True, kw_only=True, tag="weights-request"):
    """Requests blobs, in order. A request with a greater serial number replaces the one before.

    Attributes:
        version: the `user_sys.weights.catalog.version_id` that the blobs belong to; the sender keeps it meanwhile.
        limit_bytes: how many bytes the sender may send in total for this serial number. A request of the same serial
            number without `wants` raises the limit.
        message_bytes: of one reply, at most.
    """

    version: Digest
    serial: int
    limit_bytes: int
    message_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    wants: Annotated[tuple[BlobWant, ...], msgspec.Meta(max_length=MAX_WANTS)] = ()


BlobCodec: TypeAlias = Literal["raw", "zstd", "xor"]


class BlobPart(msgspec.Struct, frozen=True, array_like=True):
    """`size_bytes` of an encoded blob, from `offset` on.

    Attributes:
        codec: ``raw``, ``zstd``, or ``xor``: a compressed difference from the blob `base`.
        planes: the values are stored by the significance of their bytes, so many bytes each.
        encoded_bytes, check: size and CRC32C of the whole encoded blob; of a raw one a constant.
    """

    digest: Digest
    base: bytes
    codec: BlobCodec
    planes: Annotated[int, msgspec.Meta(ge=1, le=8)]
    encoded_bytes: Count
    check: int
    offset: Count
    size_bytes: Count


class WeightsBlobs(Message, frozen=True, kw_only=True, tag="weights-blobs"):
    """Parts of requested blobs; the second frame has their bytes, one part after the other."""

    version: Digest
    parts: Annotated[tuple[BlobPart, ...], msgspec.Meta(max_length=MAX_WANTS)]


class WeightsGone(Message, frozen=True, kw_only=True, tag="weights-gone"):
    """A blob of a requested version is no longer stored."""

    version: Digest


class WeightsProgress(Message, frozen=True, kw_only=True, tag="weights-progress"):
    """To the learner: the oldest version that a connected robot uses, and the pinned version; -1 without one."""

    oldest: int
    pinned: int = -1


class WeightsReceived(Message, frozen=True, kw_only=True, tag="weights-received"):
    """The gateway has this version on disk."""

    version: int


class WeightsApplied(Message, frozen=True, kw_only=True, tag="weights-applied"):
    """`robot` uses `version` from now on, `seconds` after its offer; -1: none until its next report."""

    robot: str
    version: int
    seconds: float


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
    | WeightsOffer | WeightsRequest | WeightsBlobs | WeightsGone | WeightsProgress
)  # fmt: skip
