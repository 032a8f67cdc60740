"""What the page and the server say to each other over one WebSocket: JSON both ways, and pictures as binary frames.

A picture is ``u32 header length, little-endian | JSON PictureHeader | JPEG``. The page answers each with `Seen`; only
then is the next of that camera sent, so that a slow page sees fewer pictures, never older ones.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec

from user_sys.console.curves import CurveView
from user_sys.console.hub import Picture, RunView
from user_sys.errors import WireError

MAX_MESSAGE_BYTES = 4096  # from the page
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Share = Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)]


class _Tagged(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Hello(_Tagged, frozen=True, tag="hello"):
    """First message of the page, or a change of name; empty asks for any name."""

    operator: Annotated[str, msgspec.Meta(pattern=r"^[\w .@-]{0,32}$")] = ""


class Order(_Tagged, frozen=True, tag="order"):
    robot: Name
    order: Literal["take-over", "hand-back", "success", "failure", "reset", "e-stop", "re-arm"]


class Drive(_Tagged, frozen=True, tag="drive"):
    """The input, 25 times a second while a person drives: shares of x, y, z; gripper +1 open, -1 closed, 0 as it is."""

    robot: Name
    move: tuple[Share, Share, Share]
    gripper: Share


class Seen(_Tagged, frozen=True, tag="seen"):
    robot: Name
    camera: Name


class Look(_Tagged, frozen=True, tag="look"):
    """Whether anybody sees the page now; a hidden one gets no pictures."""

    on: bool


class Ping(_Tagged, frozen=True, tag="ping"):
    sent_ms: float


FromPage = Hello | Order | Drive | Seen | Look | Ping


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


ToPage = Welcome | State | Curves | Reply | Pong


class PictureHeader(msgspec.Struct, frozen=True):
    robot: str
    camera: str
    step: int


_decoder: msgspec.json.Decoder[FromPage] = msgspec.json.Decoder(FromPage)
_encoder = msgspec.json.Encoder()


def decode(text: str) -> FromPage:
    """The page's message.

    Raises:
        WireError: it is too long or none of `FromPage`; the error says why in one line.
    """
    if len(text) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(text)} characters; at most {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise WireError(f"not a message: {error}") from None


def encode(message: ToPage) -> str:
    return _encoder.encode(message).decode()


def encode_picture(picture: Picture) -> bytes:
    header = _encoder.encode(PictureHeader(picture.robot, picture.camera, picture.step))
    return struct.pack("<I", len(header)) + header + picture.jpeg
