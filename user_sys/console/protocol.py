"""The messages between a page and the server: JSON both ways, and pictures as binary frames.

A page has two WebSockets. E-stops and their confirmations use ``/stop``, so that no other message delays them. All
other messages use ``/ws``.

A picture is ``u32 header length, little-endian | JSON PreviewHeader | JPEG``. The page acknowledges each in a
`PreviewsShown`. Only then is the next picture of that camera sent: a slow page gets fewer pictures, never older ones.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, TypeVar

import msgspec

from hal.motion_limits import SafetyReason
from user_sys.console.hub import PreviewImage
from user_sys.console.progress import CurveView, RunView
from user_sys.errors import WireError
from user_sys.messages import ControlOrder, ControlPeriod

MAX_MESSAGE_BYTES = 16384  # from the page
MAX_NAMES = 64  # robots or pictures in one message
MAX_NAME_CHARS = 32  # of an operator
LIMIT_NAMES = tuple(str(reason.name).lower() for reason in SafetyReason)
T = TypeVar("T")
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
PressNumber = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Share = Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)]


class _Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class PageHello(_Message, frozen=True, tag="hello"):
    """First message of the page, or a change of name; an empty name requests any name."""

    operator: Annotated[str, msgspec.Meta(pattern=rf"^[\w .@-]{{0,{MAX_NAME_CHARS}}}$")] = ""


class PageOrder(_Message, frozen=True, tag="order"):
    """An order to a robot.

    Attributes:
        server_s: of the newest `Pong` that the page has. An order that a network held back is refused by it; None is
            never too old.
        episode: see `OperatorCommand`.
    """

    robot: Name
    order: ControlOrder | Literal["success", "failure", "reset", "re-arm"]
    server_s: float | None = None
    episode: Annotated[str, msgspec.Meta(max_length=128)] = ""


class PageOverride(_Message, frozen=True, tag="override"):
    """Takes a robot out of use or puts it back, by an admin."""

    robot: Name
    order: Literal["quarantine", "drain", "restore"]
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""


class DriveInput(_Message, frozen=True, tag="drive"):
    """Input, 25 times a second while an operator drives: shares of x, y, z; gripper +1 open, -1 closed, 0 no change.

    Attributes:
        rewind: the robot retraces its path of this episode instead.
        joint: moves this joint, counted from 0, by the first share of `move`; -1 moves the tool.
    """

    robot: Name
    move: tuple[Share, Share, Share]
    gripper: Share
    rewind: bool = False
    joint: Annotated[int, msgspec.Meta(ge=-1, le=63)] = -1


class PreviewsShown(_Message, frozen=True, tag="seen"):
    """The pictures that the page has shown since its last `PreviewsShown`, as (robot, camera)."""

    pictures: Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=MAX_NAMES)]


class PageVisibility(_Message, frozen=True, tag="look"):
    """Whether the page is visible. A hidden page gets no pictures, and releases the robots that it drives.

    Attributes:
        large, thumbnails: the cameras that it shows, see `hub.ShownCameras`.
    """

    on: bool
    large: Annotated[frozenset[Name], msgspec.Meta(max_length=MAX_NAMES)] | None = None
    thumbnails: bool = False


class TraceRequest(_Message, frozen=True, tag="trace"):
    """The page shows the traces of this robot from now on, with `pose` also its state; an empty name for none."""

    robot: Annotated[str, msgspec.Meta(max_length=128)]
    pose: bool = False


class Ping(_Message, frozen=True, tag="ping"):
    sent_ms: float


class EstopRequest(_Message, frozen=True, tag="stop"):
    """E-stops: the number of the press by robot. The page repeats each press under its number until it is confirmed."""

    operator: Annotated[str, msgspec.Meta(pattern=r"^[\w .@-]{1,40}\Z")]
    presses: Annotated[dict[Name, PressNumber], msgspec.Meta(max_length=MAX_NAMES)]


FromPage = PageHello | PageOrder | PageOverride | DriveInput | PreviewsShown | PageVisibility | TraceRequest | Ping
ToEstopSocket = EstopRequest | Ping


class OperatorAssigned(_Message, frozen=True, tag="welcome"):
    """The operator's name in this page's orders and in the audit log.

    Attributes:
        role: of the person's account; ``admin`` on loopback.
        signed_in: the name is that of an account, so the page cannot change it.
    """

    operator: str
    role: str = "admin"
    signed_in: bool = False


class StateUpdate(_Message, frozen=True, tag="state"):
    view: RunView


class CurvesUpdate(_Message, frozen=True, tag="curves"):
    curves: tuple[CurveView, ...]


class Signal(msgspec.Struct, frozen=True):
    """One element of a robot's action. Without a bound it is infinite, which JSON writes as null."""

    label: str
    unit: str
    low: float
    high: float


class TraceUpdate(_Message, frozen=True, tag="trace"):
    """Control periods since the last update.

    Attributes:
        signals: in the first update; empty without a spec.
        limits: the name of each bit of `ControlPeriod.limits`, in the first update.
        state: the newest observed state, and the labels of its elements; empty without the request's `pose`.
    """

    robot: str
    signals: tuple[Signal, ...]
    periods: tuple[ControlPeriod, ...]
    limits: tuple[str, ...] = ()
    state_labels: tuple[str, ...] = ()
    state: tuple[float, ...] = ()


class OrderReply(_Message, frozen=True, tag="reply"):
    robot: str
    order: str
    accepted: bool
    reason: str


class Pong(_Message, frozen=True, tag="pong"):
    """The reply to a `Ping`, at `server_s` of the server's monotonic clock."""

    sent_ms: float
    server_s: float


class EstopStatus(_Message, frozen=True, tag="stopped"):
    """Whether the robot's driver has confirmed a press; if not, `reason` says why."""

    robot: str
    press: int
    confirmed: bool
    reason: str


ToPage = OperatorAssigned | StateUpdate | CurvesUpdate | TraceUpdate | OrderReply | Pong | EstopStatus


class PreviewHeader(msgspec.Struct, frozen=True):
    robot: str
    camera: str
    step: int
    age_s: float


_decoder: msgspec.json.Decoder[FromPage] = msgspec.json.Decoder(FromPage)
_stop_decoder: msgspec.json.Decoder[ToEstopSocket] = msgspec.json.Decoder(ToEstopSocket)
_encoder = msgspec.json.Encoder()


def decode(text: str) -> FromPage:
    """The page's message.

    Raises:
        WireError: it is too long, or not a `FromPage`.
    """
    return _decode(text, _decoder)


def decode_estop(text: str) -> ToEstopSocket:
    """The page's message on the WebSocket for e-stops. Raises WireError as `decode` does."""
    return _decode(text, _stop_decoder)


def _decode(text: str, decoder: msgspec.json.Decoder[T]) -> T:
    if len(text) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(text)} characters; at most {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise WireError(f"not a message: {error}") from None


def encode(message: ToPage) -> str:
    return _encoder.encode(message).decode()


def encode_preview(picture: PreviewImage, age_s: float) -> bytes:
    header = _encoder.encode(PreviewHeader(picture.robot, picture.camera, picture.step, age_s))
    return struct.pack("<I", len(header)) + header + picture.jpeg
