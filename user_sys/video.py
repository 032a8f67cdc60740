"""Videos in H.264: the films of runs and episodes, and those of LeRobot's datasets."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import av.video.reformatter
import numpy as np

from user_sys.codec import Array
from user_sys.errors import DataSetError

CODEC = "h264"
# Every second frame is a key frame, as in LeRobot's videos, so that single frames decode fast.
# x264's macroblock tree is off: it has no benefit then, and makes the output depend on uninitialised memory.
OPTIONS = {"g": "2", "crf": "18", "preset": "veryfast", "x264-params": "mbtree=0"}


def pixel_format(height: int, width: int) -> str:
    """Half-resolution colour, which every player supports, if the size is even."""
    return "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"


class VideoWriter:
    """Writes frames of one size at a constant rate into `path`. Raises DataSetError: the encoder fails."""

    def __init__(self, path: Path, height: int, width: int, fps: float) -> None:
        self._size = (height, width, 3)
        at_front = {"movflags": "+faststart"}  # the index, so that the video plays while it loads
        self._container = av.open(str(path), "w", format="mp4", options=at_front)
        stream = self._container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000), options=OPTIONS)
        assert isinstance(stream, av.VideoStream)
        self._stream = stream
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = pixel_format(height, width)
        try:
            self._container.start_encoding()
        except av.FFmpegError as error:
            self._container.close()
            raise DataSetError(f"the encoder refuses frames of {self._size}: {error}") from None

    def write(self, picture: Array) -> None:
        if picture.shape != self._size:
            raise DataSetError(f"a frame of {picture.shape} in a video of {self._size}")
        try:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            self._container.mux(self._stream.encode(frame))
        except av.FFmpegError as error:
            raise DataSetError(f"the encoder refuses a frame of {self._size}: {error}") from None

    def close(self) -> None:
        """Writes buffered frames and the file's index."""
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def abort(self) -> None:
        """Releases the file, which is then not a valid video."""
        self._container.close()


class VideoReader:
    """Reads the frames of a video in order; any other access seeks."""

    def __init__(self, path: Path) -> None:
        try:
            self._container = av.open(str(path))
            self._stream = self._container.streams.video[0]
        except (av.FFmpegError, IndexError, OSError) as error:
            raise DataSetError(f"{path} is not a readable video: {error}") from None
        self._stream.thread_type = "AUTO"
        self._path = path
        self._frames = self._container.decode(self._stream)
        self._to_rgb = av.video.reformatter.VideoReformatter()  # reused, because each instance builds its tables
        self._at_s = 0.0  # expected time of the next frame

    def read(self, start_s: float, count: int, fps: float) -> Iterator[Array]:
        """`count` frames, uint8 (h, w, 3), from `start_s` seconds on at the rate `fps`.

        Raises:
            DataSetError: the video ends early, or has no frame at an expected time.
        """
        if abs(start_s - self._at_s) > 0.5 / fps:
            self._seek(start_s)
        given = 0
        try:
            while given < count:
                frame = next(self._frames)
                expected_s = start_s + given / fps
                if frame.time is None or frame.time < expected_s - 0.5 / fps:
                    continue
                if frame.time > expected_s + 0.5 / fps:
                    raise DataSetError(
                        f"{self._path} has no frame at {expected_s:.3f} s; the next is at {frame.time:.3f}"
                    )
                given += 1
                self._at_s = start_s + given / fps
                yield self._to_rgb.reformat(frame, format="rgb24").to_ndarray()
        except StopIteration:
            raise DataSetError(f"{self._path} ends before {start_s + given / fps:.3f} s") from None
        except av.FFmpegError as error:
            raise DataSetError(f"{self._path} is damaged: {error}") from None

    def _seek(self, start_s: float) -> None:
        base = self._stream.time_base or Fraction(1, 1)
        self._container.seek(int(start_s / base), stream=self._stream)  # to the previous key frame
        self._frames = self._container.decode(self._stream)

    def close(self) -> None:
        self._container.close()
