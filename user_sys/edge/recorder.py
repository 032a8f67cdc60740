"""Records steps in chunks: observation, action, controlling source, policy version and times.

`WriterThread` encodes and writes them, so that the control loop does not wait for the disk.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike

from hal.camera import CameraFrame
from hal.settings import Count
from hal.spec import ACTION, Array, RobotSpec
from user_sys.edge.environment import TaskInfo, TimeStep
from user_sys.episode import (
    APPLIED_ACTION,
    IMAGE_PREFIX,
    Chunk,
    ChunkHeader,
    EpisodeEnd,
    EpisodeSource,
    Phase,
    frame_columns,
    new_episode_id,
)
from user_sys.errors import ConfigError
from user_sys.tunnel.limits import MAX_CHUNK_BYTES

RESERVED_COLUMN_BYTES = 1 << 20  # of one step, for all columns except raw images
MAX_DELAY = 65535
MAX_QUEUED_TASKS = 50  # steps; a kill can lose them in addition to the open chunk
POLL_S = 0.5
CLOSE_TIMEOUT_S = 30.0

RecordedImage: TypeAlias = bytes | Array | None
"""A JPEG file, a raw image, or None: the camera's previous image still stands."""
WriteTask = Callable[[], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelectedAction:
    """An action and its source.

    Attributes:
        action: float32 (a,) in the action spec's units.
        phase: who selected it.
        policy_version: the weights that selected it; -1 without a policy.
        log_prob: under the behaviour policy; NaN if it has none.
        t_inference_ns: monotonic clock of the edge when the action was known.
        chunk, chunk_step: number of the policy's chunk in the episode, and the action's place in it; -1 without one.
        t_observation_ns: monotonic clock of the edge: capture of the observation that the chunk was computed from.
        delay: control periods in which actions were executed from that observation to the chunk's first use.
    """

    action: Array
    phase: Phase
    policy_version: int = -1
    log_prob: float = float("nan")
    t_inference_ns: int = field(default_factory=time.monotonic_ns)
    chunk: int = -1
    chunk_step: int = -1
    t_observation_ns: int = 0
    delay: int = 0


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, by the task's rule or a person's label (`source`)."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    source: str

    @property
    def is_last(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True)
class RecorderConfig:
    """The contents and sizes of chunks.

    Attributes:
        chunk_steps: steps in a chunk. A crash of the edge loses at most the open chunk and the queued steps.
        chunk_bytes: a chunk is closed before its columns take more, unless one step alone does.
        cameras: whether images are recorded.
        raw_cameras: cameras whose images are recorded uncompressed; those of other cameras become JPEG files.
    """

    chunk_steps: Count = 10
    chunk_bytes: Count = 4 << 20
    cameras: bool = True
    raw_cameras: tuple[str, ...] = ()


class _CameraSample(NamedTuple):
    """A camera's new image at a step, and the capture time of its newest image (0 before the first)."""

    image: RecordedImage
    captured_ns: int


class _OpenChunk:
    """The header and the columns of the open chunk. The header has no steps and no end yet."""

    def __init__(self, header: ChunkHeader) -> None:
        self.header = header
        self.count = self.size_bytes = 0
        self._columns: dict[str, list[ArrayLike]] = {}
        self._samples: dict[str, list[_CameraSample]] = {}

    def append(self, row: Mapping[str, ArrayLike], samples: Mapping[str, _CameraSample], size_bytes: int) -> None:
        for name, value in row.items():
            self._columns.setdefault(name, []).append(value)
        for camera, sample in samples.items():
            self._samples.setdefault(camera, []).append(sample)
        self.count += 1
        self.size_bytes += size_bytes

    def columns(self) -> dict[str, Array]:
        columns = {name: np.stack(rows) for name, rows in self._columns.items()}
        for camera, samples in self._samples.items():
            images, captured_ns = [each.image for each in samples], [each.captured_ns for each in samples]
            columns |= frame_columns(IMAGE_PREFIX + camera, images, captured_ns)
        return columns


class Recorder:
    """Records one episode after another, and passes each full chunk, encoded, to `sink`."""

    def __init__(
        self,
        spec: RobotSpec,
        robot: str,
        sink: Callable[[bytes], object],
        config: RecorderConfig = RecorderConfig(),
        run_task: Callable[[WriteTask], object] = lambda task: task(),
    ) -> None:
        """Args:
        sink: makes a chunk durable before it returns (the outbox, or the store).
        run_task: runs the encoding and `sink`, in order: at once, or in a `WriterThread`.

        Raises:
            ConfigError: the raw images of one step do not fit into a chunk.
        """
        _check_raw_image_size(spec, config)
        self._spec, self.robot = spec, robot
        self._sink, self._config, self._run_task = sink, config, run_task
        self.episode = ""
        self._open: _OpenChunk
        self._captured_ns: dict[str, int] = {}  # by camera, of the newest image
        self._last_applied: Array | None = None  # of any episode: a reset may leave the gripper closed

    def begin_episode(self, source: EpisodeSource, seed: int, task: TaskInfo) -> str:
        """Opens an episode of `task` and returns its identifier.

        The open chunk of an unfinished episode is discarded.
        """
        self.episode = new_episode_id(self.robot)
        unix_ns = time.time_ns()
        header = ChunkHeader(
            episode=self.episode,
            index=0,
            first_step=0,
            steps=0,
            robot=self.robot,
            embodiment=self._spec.embodiment,
            task=task.name,
            sentence=task.sentence,
            source=source,
            seed=seed,
            started_unix_ns=unix_ns,
            unix_offset_ns=unix_ns - time.monotonic_ns(),
        )
        self._run_task(partial(self._begin, header))
        return self.episode

    def _begin(self, header: ChunkHeader) -> None:
        self._open, self._captured_ns = _OpenChunk(header), {}

    def record(self, before: TimeStep, selected: SelectedAction, after: TimeStep, outcome: StepOutcome) -> None:
        """Records one step: the observation `before`, the action, and its result. A full or last chunk is written.

        If another thread runs the tasks, it owns the arrays from now on.
        """
        self._run_task(partial(self._record, before, selected, after, outcome))

    def _record(self, before: TimeStep, selected: SelectedAction, after: TimeStep, outcome: StepOutcome) -> None:
        applied = self._rest_action(before) if after.applied is None else after.applied
        self._last_applied = applied
        row: dict[str, ArrayLike] = {
            **{name: value for name, value in before.observation.items()},
            ACTION: selected.action,
            APPLIED_ACTION: applied,
            "reward": np.float32(outcome.reward),
            "terminated": np.bool_(outcome.terminated),
            "truncated": np.bool_(outcome.truncated),
            "phase": np.uint8(selected.phase),
            "safety": np.uint16(after.safety_reasons),
            "policy_version": np.int64(selected.policy_version),
            "log_prob": np.float32(selected.log_prob),
            "action_chunk": np.int32(selected.chunk),
            "action_chunk_step": np.int16(selected.chunk_step),
            "action_delay": np.uint16(min(selected.delay, MAX_DELAY)),
            "t_observation_ns": np.int64(selected.t_observation_ns),
            "t_capture_ns": np.int64(before.t_capture_ns),
            "t_inference_ns": np.int64(selected.t_inference_ns),
            "t_command_ns": np.int64(after.t_command_ns),
        }
        samples = self._camera_samples(before.frames)
        final = {**after.observation, **self._final_images(after.frames)} if outcome.is_last else {}
        self._append(row, samples, sum(each.nbytes for each in final.values()))
        if outcome.is_last:
            steps = self._open.header.first_step + self._open.count
            end = EpisodeEnd(steps=steps, success=outcome.success, reward_source=outcome.source)
            self._flush(end, final)
        elif self._open.count == self._config.chunk_steps:
            self._flush(None, {})

    def _rest_action(self, before: TimeStep) -> Array:
        """The action of a step in which the robot was stopped. The gripper keeps its grip."""
        rest, gripper = self._spec.rest_action(before.observation), self._spec.gripper
        if gripper >= 0 and self._last_applied is not None:
            rest[gripper] = self._last_applied[gripper]
        return rest

    def _final_images(self, frames: Mapping[str, CameraFrame]) -> dict[str, Array]:
        """The images after the last step, as columns; a camera without a new one has no column."""
        samples = self._camera_samples(frames).items()
        images = {IMAGE_PREFIX + name: sample.image for name, sample in samples if sample.image is not None}
        return {n: np.frombuffer(image, np.uint8) if isinstance(image, bytes) else image for n, image in images.items()}

    def _append(self, row: Mapping[str, ArrayLike], samples: Mapping[str, _CameraSample], final_bytes: int) -> None:
        """Adds a step. Writes the open chunk first if it has no room for the step and `final_bytes` more."""
        size = (
            final_bytes
            + sum(np.asarray(value).nbytes for value in row.values())
            + sum(map(_size_bytes, samples.values()))
        )
        if self._open.count and self._open.size_bytes + size > self._config.chunk_bytes:
            self._flush(None, {})
        self._open.append(row, samples, size)

    def _camera_samples(self, frames: Mapping[str, CameraFrame]) -> dict[str, _CameraSample]:
        samples: dict[str, _CameraSample] = {}
        for camera in self._spec.cameras if self._config.cameras else ():
            frame = frames.get(camera.name)
            image: RecordedImage = None
            if frame is not None:
                raw = camera.name in self._config.raw_cameras
                image = frame.image.copy() if raw else frame.jpeg
                self._captured_ns[camera.name] = frame.t_capture_ns
            samples[camera.name] = _CameraSample(image, self._captured_ns.get(camera.name, 0))
        return samples

    def _flush(self, end: EpisodeEnd | None, final: Mapping[str, Array]) -> None:
        opened, header = self._open, replace(self._open.header, steps=self._open.count, end=end)
        self._sink(Chunk(header, opened.columns(), dict(final)).encode())
        next_step = header.first_step + header.steps
        self._open = _OpenChunk(replace(opened.header, index=header.index + 1, first_step=next_step))


def _size_bytes(sample: _CameraSample) -> int:
    image = sample.image
    return 0 if image is None else len(image) if isinstance(image, bytes) else image.nbytes


def _check_raw_image_size(spec: RobotSpec, config: RecorderConfig) -> None:
    raw = {camera.name: math.prod(camera.shape) for camera in spec.cameras if camera.name in config.raw_cameras}
    if config.cameras and 2 * sum(raw.values()) > MAX_CHUNK_BYTES - RESERVED_COLUMN_BYTES:  # with the final images
        raise ConfigError(
            f"raw pictures of {', '.join(raw)} take {sum(raw.values())} bytes a step; a chunk of two "
            f"may have {MAX_CHUNK_BYTES}: take some out of recorder.raw_cameras"
        )


class WriterThread:
    """Runs tasks one after the other in a thread. The control loop's thread alone calls it. A context manager."""

    def __init__(self, on_blocked: Callable[[], None]) -> None:
        """`on_blocked` is called every `POLL_S` while a `put` waits."""
        self._on_blocked = on_blocked
        self._queue: queue.Queue[WriteTask | None] = queue.Queue(MAX_QUEUED_TASKS)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def put(self, task: WriteTask) -> None:
        """Queues `task`. Blocks while `MAX_QUEUED_TASKS` wait. Raises an earlier task's error."""
        while True:
            self._raise_failure()
            try:
                self._queue.put(task, timeout=POLL_S)
                return
            except queue.Full:
                self._on_blocked()

    def _run(self) -> None:
        while self._failure is None:
            try:
                task = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if task is None:
                return
            try:
                task()
            except Exception as error:  # of any kind: `put` or `__exit__` raises it
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Waits for all tasks, `CLOSE_TIMEOUT_S` at most. Raises a task's error unless the body raised one."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._failure is None and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=POLL_S)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if unwritten := sum(task is not None for task in self._queue.queue):
            log.error("recording.unwritten steps=%d", unwritten)
        if kind is None:
            self._raise_failure()
