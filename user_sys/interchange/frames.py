"""Converts camera frames between the store's columns and image files."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np

from user_sys.codec import Array, check_jpeg_size, jpeg_size
from user_sys.episode import LENGTH_SUFFIX, Chunk
from user_sys.errors import DataSetError, WireError

Frame = bytes | Array  # a JPEG file, or uint8 (h, w, 3) RGB
EXPORT_JPEG_QUALITY = 95

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)  # Pillow, on damaged files


def frames_of(chunk: Chunk, feature: str) -> list[Frame | None]:
    """Each step's frame of one camera; None repeats the previous frame."""
    joined, lengths = chunk.columns[feature], chunk.columns[feature + LENGTH_SUFFIX]
    if joined.ndim == 4:
        pictures = iter(joined)
        return [next(pictures) if length else None for length in lengths]
    ends = np.cumsum(lengths, dtype=np.int64)
    return [joined[end - length : end].tobytes() if length else None for end, length in zip(ends, lengths, strict=True)]


def frame_size(frame: Frame) -> tuple[int, int]:
    """Height and width in pixels, without decoding.

    Raises:
        DataSetError: a JPEG file is damaged, or declares more than `user_sys.jpeg.MAX_PIXELS`.
    """
    if not isinstance(frame, bytes):
        return frame.shape[0], frame.shape[1]
    try:
        return jpeg_size(frame)
    except WireError as error:
        raise DataSetError(str(error)) from None


def decode_frame(frame: Frame) -> Array:
    """uint8 (h, w, 3), RGB. Raises as `frame_size`, before it allocates the picture."""
    import simplejpeg

    if not isinstance(frame, bytes):
        return frame
    frame_size(frame)
    try:
        picture: Array = simplejpeg.decode_jpeg(frame, colorspace="RGB")
    except ValueError as error:
        raise DataSetError(f"a frame is not a JPEG file: {error}") from None
    return picture


def encode_jpeg(picture: Array) -> bytes:
    """`picture`, uint8 (h, w, 3) RGB, as a JPEG file of `EXPORT_JPEG_QUALITY`."""
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=EXPORT_JPEG_QUALITY, colorspace="RGB"))


def encode_png(picture: Array) -> bytes:
    """`picture`, uint8 (h, w, 3) RGB, as a lossless PNG file."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(picture).save(target, "PNG", compress_level=1)
    return target.getvalue()


def decode_image_file(content: bytes) -> Frame:
    """The frame in an image file: a colour JPEG stays a file, other images become uint8 (h, w, 3).

    Raises:
        DataSetError: it is not a valid JPEG or PNG file, or has more than `user_sys.jpeg.MAX_PIXELS`.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as picture:  # reads the header alone
            check_jpeg_size(picture.height, picture.width)
            if picture.format == "JPEG" and picture.mode == "RGB":
                return content
            return np.asarray(picture.convert("RGB"))
    except (*_BROKEN, WireError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataSetError(f"a frame is not a valid image: {error}") from None


def same_frame(a: Frame, b: Frame) -> bool:
    """Whether both are equal files, or equal pictures pixel by pixel."""
    if a is b:
        return True
    if isinstance(a, bytes) or isinstance(b, bytes):
        return isinstance(a, bytes) and isinstance(b, bytes) and a == b
    return np.array_equal(a, b)
