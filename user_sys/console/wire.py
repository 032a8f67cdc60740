"""The messages between a page and the server: JSON both ways, and pictures as binary frames.

A page has two WebSockets. `Stop` and its confirmations have one of their own (``/stop``), so that nothing else can
delay them; everything else is on ``/ws``.

A picture is ``u32 header length, little-endian | JSON PictureHeader | JPEG``. The page names each in a `Seen`; only
then is the next of that camera sent, so that a slow page gets fewer pictures, never older ones.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, TypeVar

import msgspec

from user_sys.console.curves import CurveView
from user_sys.console.hub import Picture, RunView
from user_sys.errors import WireError

MAX_MESSAGE_BYTES = 16384  # from the page
MAX_NAMED = 64  # robots or pictures in one message
T = TypeVar("T")
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Press = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Share = Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)]


class _Tagged(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Hello(_Tagged, frozen=True, tag="hello"):
    """First message of the page, or a change of name; empty asks for any name."""

    operator: Annotated[str, msgspec.Meta(pattern=r"^[\w .@-]{0,32}$")] = ""


class Order(_Tagged, frozen=True, tag="order"):
    robot: Name
    order: Literal["take-over", "hand-back", "success", "failure", "reset", "re-arm"]


class Drive(_Tagged, frozen=True, tag="drive"):
    """The input, 25 times a second while a person drives: shares of x, y, z; gripper +1 open, -1 closed, 0 as it is."""

    robot: Name
    move: tuple[Share, Share, Share]
    gripper: Share


class Seen(_Tagged, frozen=True, tag="seen"):
    """The pictures that the page has shown since its last `Seen`, as (robot, camera)."""

    pictures: Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=MAX_NAMED)]


class Look(_Tagged, frozen=True, tag="look"):
    """Whether anybody sees the page now. A hidden one gets no pictures, and releases the robots that it drives."""

    on: bool


class Ping(_Tagged, frozen=True, tag="ping"):
    sent_ms: float


class Stop(_Tagged, frozen=True, tag="stop"):
    """E-stops: robot to the number of its press. The page repeats each under that number until it is confirmed."""

    operator: Annotated[str, msgspec.Meta(pattern=r"^[\w .@-]{1,40}$")]
    presses: Annotated[dict[Name, Press], msgspec.Meta(max_length=MAX_NAMED)]


FromPage = Hello | Order | Drive | Seen | Look | Ping
ToStop = Stop | Ping


class Welcome(_Tagged, frozen=True, tag="welcome"):
    """The name under which this page's orders go out and are audited."""

    operator: str


class State(_Tagged, frozen=True, tag="state"):
    view: RunView


class Curves(_Tagged, frozen=True, tag="curves"):
    curves: tuple[CurveView, ...]


class Reply(_Tagged, frozen=True, tag="reply"):
    robot: str
    order: str
    accepted: bool
    reason: str


class Pong(_Tagged, frozen=True, tag="pong"):
    sent_ms: float


class Stopped(_Tagged, frozen=True, tag="stopped"):
    """Whether the robot's driver has confirmed a press; `reason` says why it has not yet."""

    robot: str
    press: int
    confirmed: bool
    reason: str


ToPage = Welcome | State | Curves | Reply | Pong | Stopped


class PictureHeader(msgspec.Struct, frozen=True):
    robot: str
    camera: str
    step: int


_decoder: msgspec.json.Decoder[FromPage] = msgspec.json.Decoder(FromPage)
_stop_decoder: msgspec.json.Decoder[ToStop] = msgspec.json.Decoder(ToStop)
_encoder = msgspec.json.Encoder()


def decode(text: str) -> FromPage:
    """The page's message.

    Raises:
        WireError: it is too long or none of `FromPage`; the error says why in one line.
    """
    return _decode(text, _decoder)


def decode_stop(text: str) -> ToStop:
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


def encode_picture(picture: Picture) -> bytes:
    header = _encoder.encode(PictureHeader(picture.robot, picture.camera, picture.step))
    return struct.pack("<I", len(header)) + header + picture.jpeg
