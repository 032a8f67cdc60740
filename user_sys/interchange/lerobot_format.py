"""LeRobot's dataset format v3.0: paths, feature names, records and videos.

A dataset is a folder::

    meta/info.json                                    features, frame rate, totals; written last
    meta/stats.json                                   statistics of each feature over all episodes
    meta/tasks.parquet                                task sentences and their numbers
    meta/episodes/chunk-000/file-000.parquet          one row per episode: location of its data, statistics
    data/chunk-000/file-000.parquet                   one row per step
    videos/<feature>/chunk-000/file-000.mp4           frames, if stored as video

Store data without a place in the format goes into extra features (`LEROBOT_NAMES`, `TEXT_FEATURES`,
``next.success``) and into extra columns of the episodes table with the prefix `USER_PREFIX`, which LeRobot ignores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import av
import av.video.reformatter
import msgspec
import numpy as np

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StepLayout, element_labels

LEROBOT_VERSION = "v3.0"
FILES_PER_CHUNK = 1000
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200

INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASK_INDEX_NAME = "__index_level_0__"  # pandas' name for an unnamed index in Parquet

# LeRobot's names of store columns. The name of the applied action must not begin with "action", because policies
# would predict it too.
LEROBOT_NAMES: Mapping[str, str] = {
    "reward": "next.reward",
    "terminated": "next.terminated",
    "truncated": "next.truncated",
    APPLIED_ACTION: "applied_action",
}
STORE_NAMES: Mapping[str, str] = {theirs: ours for ours, theirs in LEROBOT_NAMES.items()}
DONE, SUCCESS = "next.done", "next.success"
TEXT_FEATURES = ("source", "robot", "embodiment")
INDEX_FEATURES: Mapping[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
USER_PREFIX = "user/"
FINAL_PREFIX = USER_PREFIX + "final/"
CODEC = "h264"
# Every second frame is a key frame, as in LeRobot's videos, so that single frames decode fast.
# x264's macroblock tree is off: it has no benefit then, and makes the output depend on uninitialised memory.
OPTIONS = {"g": "2", "crf": "18", "preset": "veryfast", "x264-params": "mbtree=0"}


class DatasetFeature(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of ``features``; `info` describes a video."""

    dtype: str
    shape: tuple[int, ...]
    names: object = None
    info: dict[str, object] | None = None

    @property
    def is_visual(self) -> bool:
        return self.dtype in ("image", "video")


class DatasetInfo(msgspec.Struct, frozen=True):
    """``meta/info.json``."""

    codebase_version: str
    fps: float
    features: dict[str, DatasetFeature]
    total_episodes: int
    total_frames: int
    total_tasks: int = 0
    robot_type: str | None = None
    chunks_size: int = FILES_PER_CHUNK
    data_files_size_in_mb: int = DATA_FILE_MB
    video_files_size_in_mb: int = VIDEO_FILE_MB
    splits: dict[str, str] = {}
    data_path: str = DATA_PATH
    video_path: str | None = VIDEO_PATH


def file_path(template: str, number: int, video_key: str = "") -> Path:
    """Path, within the dataset, of the file with running number `number`."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return Path(template.format(chunk_index=chunk, file_index=file, video_key=video_key))


def capture_feature(camera: str) -> str:
    """The feature with the capture times of ``observation.images.<camera>``.

    Its name must not begin with "observation", because policies would use it as an input.
    """
    return "t_capture_ns." + camera.removeprefix(IMAGE_PREFIX)


def features_of(layout: StepLayout, video: bool, fps: float, spec: RobotSpec | None) -> dict[str, DatasetFeature]:
    """The features of a dataset with steps of `layout`.

    Args:
        video: store frames as video, otherwise as images.
        spec: names the elements, if known.

    Raises:
        DataSetError: a column has a matrix per step.
    """
    labels = element_labels(spec)
    features = {}
    for name, dtype, shape in layout.columns:
        if len(shape) > 1:
            raise DataSetError(f"column {name!r} holds {shape} a step; a dataset takes scalars and vectors")
        features[LEROBOT_NAMES.get(name, name)] = DatasetFeature(dtype, shape or (1,), labels.get(name))
    features |= {name: DatasetFeature("bool", (1,)) for name in (DONE, SUCCESS)}
    features |= {name: DatasetFeature("string", (1,)) for name in TEXT_FEATURES}
    features |= {capture_feature(name): DatasetFeature("int64", (1,)) for name, _, _ in layout.cameras}
    for name, height, width in layout.cameras:
        info = _video_info(height, width, fps) if video else None
        axes = ("height", "width", "channels")
        features[name] = DatasetFeature("video" if video else "image", (height, width, 3), axes, info)
    return features | {name: DatasetFeature(dtype, (1,)) for name, dtype in INDEX_FEATURES.items()}


def _video_info(height: int, width: int, fps: float) -> dict[str, object]:
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": CODEC,
        "video.pix_fmt": pixel_format(height, width),
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def pixel_format(height: int, width: int) -> str:
    """Half-resolution colour, which every player supports, if the size is even."""
    return "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"


class VideoWriter:
    """Writes frames of one size at a constant rate into `path`. Raises DataSetError: the encoder fails."""

    def __init__(self, path: Path, height: int, width: int, fps: float) -> None:
        self._size = (height, width, 3)
        self._container = av.open(str(path), "w", format="mp4")
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
