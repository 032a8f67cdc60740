"""A chunk's JPEG files as arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from user_sys.codec import Array
from user_sys.episode import Chunk
from user_sys.errors import WireError


def decode_frames(
    chunk: Chunk, cameras: Mapping[str, tuple[int, int, int]], before: Mapping[str, Array]
) -> tuple[dict[str, Array], int]:
    """The frames of every step of `chunk`, and of its final observation where it has one.

    Returns uint8 (rows, height, width, 3) for each camera, and the first row at which every camera has shown something:
    a step without a new frame shows the one before it, which for the first steps is that of `before`.

    Raises:
        WireError: a frame that does not decode, or of another size than its camera's.
    """
    rows = chunk.header.steps + (chunk.header.end is not None)
    frames, first = {}, 0
    for name, shape in cameras.items():
        frames[name] = np.empty((rows, *shape), np.uint8)
        first = max(first, _decode(chunk, name, frames[name], before.get(name)))
    return frames, first


def _decode(chunk: Chunk, name: str, target: Array, shown: Array | None) -> int:
    """Fills `target` row by row; returns the first row that has a frame."""
    first, offset = 0, 0
    lengths = chunk.columns[f"{name}.length"].tolist()
    if len(lengths) < len(target):
        lengths.append(chunk.final[name].size if name in chunk.final else 0)
    joined = chunk.columns[name]
    for row, length in enumerate(lengths):
        if length:
            of_final = row == chunk.header.steps
            jpeg = chunk.final[name].reshape(-1) if of_final else joined[offset : offset + length]
            offset += 0 if of_final else length
            _decode_one(jpeg, name, target[row])
            shown = target[row]
        elif shown is not None:
            target[row] = shown
        else:
            first = row + 1
    return first


def _decode_one(jpeg: Array, name: str, target: Array) -> None:
    import simplejpeg  # here, because a learner of states alone needs no codec

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(jpeg)
        if (height, width) != target.shape[:2]:
            raise WireError(
                f"{name}: a frame of {width}x{height}; the camera's are {target.shape[1]}x{target.shape[0]}"
            )
        simplejpeg.decode_jpeg(jpeg, buffer=target)
    except ValueError as error:
        raise WireError(f"{name}: a frame does not decode: {error}") from None
