"""JPEG files from elsewhere: how large a picture claims to be is looked at before anything is made to hold it."""

from __future__ import annotations

from user_sys.errors import WireError

MAX_PIXELS = 1 << 25  # 8K; a header of a few bytes may claim 65,535 x 65,535, which is 13 GB


def jpeg_size(file: bytes | memoryview) -> tuple[int, int]:
    """Height and width in pixels that a JPEG file claims; nothing is decoded.

    Raises:
        WireError: no JPEG file, or a picture of more than `MAX_PIXELS`.
    """
    import simplejpeg  # here, because who sees no pictures does not install it

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(file)
    except (ValueError, KeyError) as error:  # KeyError: colours at a resolution that it has no name for, as 4:4:1
        raise WireError(f"a frame is no JPEG file that can be read: {error!r}") from None
    require_size(height, width)
    return height, width


def require_size(height: int, width: int) -> None:
    """Raises WireError: a picture of more than `MAX_PIXELS`."""
    if height * width > MAX_PIXELS:
        raise WireError(f"a frame that claims {width} x {height} pixels; the limit is {MAX_PIXELS}")
