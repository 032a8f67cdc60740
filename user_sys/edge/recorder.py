"""Turns steps into chunks: what happened, who was in control, which weights acted, and when.

The session's writing thread: encodes what was recorded and waits for the disk, so that the control loop does not.
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
from numpy.typing import ArrayLike

from hal.camera import CameraFrame
from hal.spec import ACTION, Array, RobotSpec
from user_sys.edge.environment import TimeStep
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

JPEG_QUALITY = 90
RESERVED_COLUMN_BYTES = 1 << 20  # of one step, set apart for all that is no raw picture
RecordedImage: TypeAlias = bytes | Array | None  # a JPEG file, a raw picture, or None: the one before still stands


class _CameraSample(NamedTuple):
    """What a camera shows at a step: its new picture, and when the one that stands was captured (0: there is none)."""

    picture: RecordedImage
    captured_ns: int


@dataclass(frozen=True)
class SelectedAction:
    """An action and where it came from.

    Attributes:
        action: float32 (a,) in the action spec's units.
        phase: who chose it.
        policy_version: the weights that chose it; -1 where no policy did.
        log_prob: of the behaviour policy; NaN where it has none.
        t_inference_ns: monotonic clock of the edge when the action was known.
    """

    action: Array
    phase: Phase
    policy_version: int = -1
    log_prob: float = float("nan")
    t_inference_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True)
class StepOutcome:
    """How a step ended: the task's or a person's word."""

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
    """What is recorded, and in which pieces.

    Attributes:
        chunk_steps: bounds what a crash of the edge can take: the steps since the last chunk, and the few that wait to
            be written.
        chunk_bytes: a chunk is closed before its columns take more, unless one step alone does.
        cameras: whether pictures are recorded.
        raw_cameras: names of those whose pictures are kept as they are; the others' become JPEG files.
    """

    chunk_steps: int = 10
    chunk_bytes: int = 4 << 20
    cameras: bool = True
    raw_cameras: tuple[str, ...] = ()


class Recorder:
    """Collects one episode after another and hands each chunk, encoded, to `sink` as soon as it is full.

    `sink` makes the chunk durable before it returns (the outbox, or the store itself). `writing` has encoding and sink
    do their work, piece by piece and in order: at once, or in another thread.
    """

    def __init__(
        self,
        spec: RobotSpec,
        robot: str,
        task: str,
        sentence: str,
        sink: Callable[[bytes], object],
        config: RecorderConfig = RecorderConfig(),
        run_task: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """Raises ConfigError: the raw pictures of one step would not fit into a chunk that can be sent."""
        _check_raw_image_size(spec, config)
        self._spec, self._robot, self._task, self._sentence = spec, robot, task, sentence
        self._sink, self._config, self._writing = sink, config, run_task
        self.episode = ""
        self._columns: dict[str, list[ArrayLike]] = {}
        self._views: dict[str, list[_CameraSample]] = {}
        self._shown_ns: dict[str, int] = {}  # by camera, when the picture that stands was captured
        self._rows = self._bytes = 0

    def begin_episode(self, source: EpisodeSource, seed: int) -> str:
        """Opens an episode and returns its identifier. What was left of one that never ended is cut off."""
        self.episode = new_episode_id(self._robot)
        self._writing(partial(self._open, self.episode, source, seed, time.time_ns(), time.monotonic_ns()))
        return self.episode

    def _open(self, episode: str, source: EpisodeSource, seed: int, unix_ns: int, monotonic_ns: int) -> None:
        self._episode, self._source, self._seed, self._started_unix_ns = episode, source, seed, unix_ns
        self._unix_offset_ns = unix_ns - monotonic_ns
        self._index = self._first_step = 0
        self._shown_ns = {}
        self._clear()

    def record(self, before: TimeStep, selected: SelectedAction, after: TimeStep, outcome: StepOutcome) -> None:
        """One step: observed `before`, decided, and what came of it. Flushes a chunk that is full or last.

        Where another thread writes, the arrays are its own from now on.
        """
        self._writing(partial(self._take, before, selected, after, outcome))

    def _take(self, before: TimeStep, decision: SelectedAction, after: TimeStep, verdict: StepOutcome) -> None:
        applied = after.applied if after.applied is not None else self._spec.rest_action(before.observation)
        row: dict[str, ArrayLike] = {
            **{name: value for name, value in before.observation.items()},
            ACTION: decision.action,
            APPLIED_ACTION: applied,
            "reward": np.float32(verdict.reward),
            "terminated": np.bool_(verdict.terminated),
            "truncated": np.bool_(verdict.truncated),
            "phase": np.uint8(decision.phase),
            "safety": np.uint16(after.safety_reasons),
            "policy_version": np.int64(decision.policy_version),
            "log_prob": np.float32(decision.log_prob),
            "t_capture_ns": np.int64(before.t_capture_ns),
            "t_inference_ns": np.int64(decision.t_inference_ns),
            "t_command_ns": np.int64(after.t_command_ns),
        }
        self._append(row, self._look(before.frames))
        if verdict.is_last:
            end = EpisodeEnd(steps=self._first_step + self._rows, success=verdict.success, reward_source=verdict.source)
            self._flush(end, after.observation)
        elif self._rows == self._config.chunk_steps:
            self._flush(None, {})

    def _append(self, row: Mapping[str, ArrayLike], views: Mapping[str, _CameraSample]) -> None:
        """Adds a step, to a new chunk where this one has no room for it."""
        size = sum(np.asarray(value).nbytes for value in row.values()) + sum(map(_size_bytes, views.values()))
        if self._rows and self._bytes + size > self._config.chunk_bytes:
            self._flush(None, {})
        for name, value in row.items():
            self._columns.setdefault(name, []).append(value)
        for camera, view in views.items():
            self._views.setdefault(camera, []).append(view)
        self._rows += 1
        self._bytes += size

    def _look(self, frames: Mapping[str, CameraFrame]) -> dict[str, _CameraSample]:
        views: dict[str, _CameraSample] = {}
        for camera in self._spec.cameras if self._config.cameras else ():
            frame = frames.get(camera.name)
            picture: RecordedImage = None
            if frame is not None:
                raw = camera.name in self._config.raw_cameras
                picture = frame.image.copy() if raw else encode_jpeg(frame.image)
                self._shown_ns[camera.name] = frame.t_capture_ns
            views[camera.name] = _CameraSample(picture, self._shown_ns.get(camera.name, 0))
        return views

    def _flush(self, end: EpisodeEnd | None, final: Mapping[str, Array]) -> None:
        header = ChunkHeader(
            episode=self._episode,
            index=self._index,
            first_step=self._first_step,
            steps=self._rows,
            robot=self._robot,
            embodiment=self._spec.embodiment,
            task=self._task,
            sentence=self._sentence,
            source=self._source,
            seed=self._seed,
            started_unix_ns=self._started_unix_ns,
            unix_offset_ns=self._unix_offset_ns,
            end=end,
        )
        columns = {name: np.stack(rows) for name, rows in self._columns.items()}
        for camera, views in self._views.items():
            pictures, captured_ns = [each.picture for each in views], [each.captured_ns for each in views]
            columns |= frame_columns(IMAGE_PREFIX + camera, pictures, captured_ns)
        self._sink(Chunk(header, columns, dict(final)).encode())
        self._index += 1
        self._first_step += self._rows
        self._clear()

    def _clear(self) -> None:
        self._columns, self._views, self._rows, self._bytes = {}, {}, 0, 0


def _size_bytes(view: _CameraSample) -> int:
    picture = view.picture
    return 0 if picture is None else len(picture) if isinstance(picture, bytes) else picture.nbytes


def _check_raw_image_size(spec: RobotSpec, config: RecorderConfig) -> None:
    raw = {camera.name: math.prod(camera.shape) for camera in spec.cameras if camera.name in config.raw_cameras}
    if config.cameras and sum(raw.values()) > MAX_CHUNK_BYTES - RESERVED_COLUMN_BYTES:
        raise ConfigError(
            f"raw pictures of {', '.join(raw)} take {sum(raw.values())} bytes a step; a chunk may have "
            f"{MAX_CHUNK_BYTES}: take some out of recorder.raw_cameras"
        )


def encode_jpeg(image: Array) -> bytes:
    """`image`, uint8 (h, w, 3) RGB, as a JPEG file."""
    import simplejpeg  # a robot without cameras does not install it

    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=JPEG_QUALITY, colorspace="RGB"))


log = logging.getLogger(__name__)

MAX_QUEUED_TASKS = 50  # steps; what a kill can take beside the chunk that is being collected
POLL_S = 0.5
CLOSE_TIMEOUT_S = 30.0
WriteTask = Callable[[], None]


class WriterThread:
    """Does works one after the other. The control loop's thread alone calls it."""

    def __init__(self, on_blocked: Callable[[], None]) -> None:
        """`blocked` is called now and then by a `put` that waits."""
        self._blocked = on_blocked
        self._queue: queue.Queue[WriteTask | None] = queue.Queue(MAX_QUEUED_TASKS)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="scribe", daemon=True)

    def put(self, work: WriteTask) -> None:
        """Takes `work` over; blocks while `MAX_QUEUED_TASKS` wait. Raises what an earlier work raised; none follows
        it.
        """
        while True:
            self._raise_failure()
            try:
                self._queue.put(work, timeout=POLL_S)
                return
            except queue.Full:
                self._blocked()

    def _run(self) -> None:
        while self._failure is None:
            try:
                work = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if work is None:
                return
            try:
                work()
            except Exception as error:  # of any kind: `put` or the end of the session raises it
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Waits until all is written, `CLOSE_TIMEOUT_S` at most. Raises what a work raised, unless the body did."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._failure is None and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=POLL_S)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if unwritten := sum(work is not None for work in self._queue.queue):
            log.error("recording.unwritten steps=%d", unwritten)
        if kind is None:
            self._raise_failure()
