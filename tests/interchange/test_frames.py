"""Images in chunks and datasets may declare false sizes, which are never allocated; and videos frame by frame."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from interchange_kit import picture
from PIL import Image

from user_sys.errors import DataSetError
from user_sys.interchange.frames import decode_frame, decode_image_file, encode_jpeg, encode_png, frame_size
from user_sys.video import VideoReader, VideoWriter

CLAIMED = struct.pack(">HH", 65_000, 65_000)


def jpeg_bomb() -> bytes:
    file = bytearray(encode_jpeg(picture("front", 0)))
    at = file.index(b"\xff\xc0") + 5
    file[at : at + 4] = CLAIMED
    return bytes(file)


def png_bomb(side: int) -> bytes:
    """A valid single-colour image of a few kilobytes."""
    target = io.BytesIO()
    Image.new("1", (side, side)).save(target, "PNG")
    return target.getvalue()


def with_sampling(file: bytes, sampling: int) -> bytes:
    """`file` with other chroma subsampling factors; 0x14 is 1 horizontally, 4 vertically."""
    at = file.index(b"\xff\xc0") + 11
    return file[:at] + bytes([sampling]) + file[at + 1 :]


@pytest.mark.parametrize("use", [decode_frame, frame_size, decode_image_file])
def test_oversized_jpeg_is_refused_before_allocation(
    use: Callable[[bytes], object],
) -> None:
    bomb = jpeg_bomb()
    tracemalloc.start()
    try:
        with pytest.raises(DataSetError, match="frame"):
            use(bomb)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20, "codecs that are imported, and not a valid image"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("side", [6_000, 10_000, 20_000])
def test_image_with_too_many_pixels_is_refused(side: int) -> None:
    with pytest.raises(DataSetError, match="frame is not a valid image"):
        decode_image_file(png_bomb(side))


def test_valid_images_decode() -> None:
    honest = picture("front", 1)
    assert frame_size(encode_jpeg(honest)) == decode_frame(encode_jpeg(honest)).shape[:2] == honest.shape[:2]
    assert (decode_image_file(encode_png(honest)) == honest).all()


def test_video_frames_round_trip(tmp_path: Path) -> None:
    writer = VideoWriter(tmp_path / "v.mp4", 64, 96, 10.0)
    for shade in (20, 120, 220):
        writer.write(np.full((64, 96, 3), shade, np.uint8))
    writer.close()
    reader = VideoReader(tmp_path / "v.mp4")
    assert [round(float(frame.mean()), -1) for frame in reader.read(0.0, 3, 10.0)] == [20, 120, 220]
    reader.close()


def test_unsupported_video_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataSetError, match="refuses frames of"):
        VideoWriter(tmp_path / "v.mp4", 64, 1_000_000, 10.0)
