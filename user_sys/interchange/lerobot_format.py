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

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hal.spec import RobotSpec
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StepLayout, element_labels
from user_sys.video import CODEC, pixel_format

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
IN_DEGREES = USER_PREFIX + "use_degrees"


class DatasetFeature(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of ``features``; `info`, in older datasets `video_info`, describes pictures."""

    dtype: str
    shape: tuple[int, ...]
    names: object = None
    info: dict[str, object] | None = None
    video_info: dict[str, object] | None = None

    @property
    def is_visual(self) -> bool:
        return self.dtype in ("image", "video")

    @property
    def is_text(self) -> bool:
        return self.dtype in ("string", "language")

    @property
    def colour_size(self) -> tuple[int, int] | None:
        """Height and width of colour pictures, declared with their channels at either end; None of others and depth."""
        described = (self.info or {}) | (self.video_info or {})
        is_depth = any(described.get(name) for name in ("is_depth_map", "video.is_depth_map"))
        if not self.is_visual or is_depth or len(self.shape) != 3 or 3 not in (self.shape[0], self.shape[-1]):
            return None
        height, width = self.shape[:2] if self.shape[-1] == 3 else self.shape[1:]
        return height, width


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
