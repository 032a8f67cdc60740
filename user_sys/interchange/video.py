"""Frames into an MP4 file and out of it, one at a time, by PyAV."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import av.video.reformatter
import numpy as np

from user_sys.codec import Array
from user_sys.errors import DataSetError

os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder writes to the terminal by itself; errors only

# Every second frame is a key frame, as in LeRobot's own videos: whoever draws single frames must not decode many.
# x264's macroblock tree gains nothing then, and makes its output depend on what memory held before: it is off.
ENCODERS = {
    "h264": ("libx264", {"g": "2", "crf": "18", "preset": "veryfast", "x264-params": "mbtree=0"}),
    "av1": ("libsvtav1", {"g": "2", "crf": "25", "preset": "10"}),
}

_REALTIME_MAX = 99  # the priority that it takes


def pixel_format(height: int, width: int, codec: str) -> str:
    """Colour at half the resolution, as every player takes it, where the size is even."""
    return "yuv420p" if height % 2 == width % 2 == 0 or codec == "av1" else "yuv444p"


@contextlib.contextmanager
def _same_scheduling() -> Iterator[None]:
    """Undoes what the AV1 encoder does where it is permitted, as it is to root: it makes the calling thread and its own
    ones real-time ones of the highest priority, and so every process started from there later."""
    if sys.platform != "linux":
        yield
        return
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                if os.sched_getparam(int(thread)).sched_priority == _REALTIME_MAX:
                    os.sched_setscheduler(int(thread), policy, parameter)


class VideoWriter:
    """Writes frames of one size, at a constant rate, into `path`. Raises DataSetError where the encoder refuses."""

    def __init__(self, path: Path, height: int, width: int, fps: float, codec: str) -> None:
        encoder, options = ENCODERS[codec]
        self._size = (height, width, 3)
        self._container = av.open(str(path), "w", format="mp4")
        stream = self._container.add_stream(encoder, rate=Fraction(fps).limit_denominator(1000), options=options)
        assert isinstance(stream, av.VideoStream)  # as both encoders make
        self._stream = stream
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = pixel_format(height, width, codec)
        try:
            with _same_scheduling():
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
        """Writes what the encoder still holds, and the file's index."""
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def abort(self) -> None:
        """Lets go of the file, which is then no video."""
        self._container.close()


class VideoReader:
    """Reads the frames of a video in order; going on where one stopped costs nothing, anything else a search."""

    def __init__(self, path: Path) -> None:
        try:
            self._container = av.open(str(path))
            self._stream = self._container.streams.video[0]
        except (av.FFmpegError, IndexError, OSError) as error:
            raise DataSetError(f"{path} is no video that can be read: {error}") from None
        self._stream.thread_type = "AUTO"
        self._path = path
        self._frames = self._container.decode(self._stream)
        self._to_rgb = av.video.reformatter.VideoReformatter()  # one for all: each sets up its tables anew
        self._at_s = 0.0  # where the next frame should be

    def read(self, start_s: float, count: int, fps: float) -> Iterator[Array]:
        """`count` frames, uint8 (h, w, 3), the first at `start_s` seconds, the others a period apart.

        Raises:
            DataSetError: the video ends before, or has no frame where one should be.
        """
        if abs(start_s - self._at_s) > 0.5 / fps:
            self._seek(start_s)
        given = 0
        try:
            while given < count:
                frame = next(self._frames)
                wanted = start_s + given / fps
                if frame.time is None or frame.time < wanted - 0.5 / fps:
                    continue
                if frame.time > wanted + 0.5 / fps:
                    raise DataSetError(f"{self._path} has no frame at {wanted:.3f} s; the next is at {frame.time:.3f}")
                given += 1
                self._at_s = start_s + given / fps
                yield self._to_rgb.reformat(frame, format="rgb24").to_ndarray()
        except StopIteration:
            raise DataSetError(f"{self._path} ends before {start_s + given / fps:.3f} s") from None
        except av.FFmpegError as error:
            raise DataSetError(f"{self._path} is damaged: {error}") from None

    def _seek(self, start_s: float) -> None:
        base = self._stream.time_base or Fraction(1, 1)
        self._container.seek(int(start_s / base), stream=self._stream)  # to the key frame before
        self._frames = self._container.decode(self._stream)

    def close(self) -> None:
        self._container.close()
