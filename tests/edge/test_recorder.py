"""Recorded steps: source, actions, images and the end of an episode; and the thread that writes them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from edge_kit import RIGHT, STILL

from hal.safety import SafetyKernel, SafetyReason
from hal.spec import Array
from robots.fake import FakeCamera, FakeRobot, FakeRobotConfig, FakeTask
from user_sys.edge.agents import task_outcome
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.edge.recorder import MAX_QUEUED_TASKS, Recorder, RecorderConfig, SelectedAction, StepOutcome, WriterThread
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX, Chunk, EpisodeEnd, EpisodeSource, Phase, decode_chunk
from user_sys.errors import ConfigError, StoreError
from user_sys.replay.batches import ObservationFeatures
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.selectors import UniformSelector
from user_sys.store.store import StoreReader, StoreWriter

CUT = StepOutcome(reward=0.0, terminated=False, truncated=True, success=False, source="rule")


class Stage:
    """A fake robot with a camera, and the chunks of its recorder."""

    def __init__(self, config: RecorderConfig | None = None, cameras: tuple[str, ...] = ("front",)) -> None:
        robot = FakeRobot(FakeRobotConfig(cameras=cameras, image_size=32))
        views = [FakeCamera(robot, spec) for spec in robot.spec.cameras]
        self.driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), views, frame_stride=2)
        self.driver.connect()
        self.packets: list[bytes] = []
        self.recorder = Recorder(robot.spec, "fake-0", self.packets.append, config or RecorderConfig())

    @property
    def chunks(self) -> list[Chunk]:
        return [decode_chunk(packet) for packet in self.packets]

    def act(self, steps: int, action: Array = STILL, last: StepOutcome | None = None) -> list[TimeStep]:
        """Opens an episode and makes `steps` steps; `last` is the outcome of the last one."""
        ticks = [self.driver.reset(seed=1)]
        self.recorder.begin_episode(EpisodeSource.ONLINE, 1, self.driver.episode_task)
        for step in range(steps):
            decision = SelectedAction(action, Phase.POLICY, policy_version=step, log_prob=-float(step))
            ticks.append(self.driver.step(action))
            outcome = last if last and step == steps - 1 else task_outcome(ticks[-1], late=False)
            self.recorder.record(ticks[-2], decision, ticks[-1], outcome)
        return ticks


def test_episode_is_recorded_in_consecutive_chunks() -> None:
    stage = Stage(RecorderConfig(chunk_steps=10))
    ticks = stage.act(25, RIGHT, CUT)
    headers = [chunk.header for chunk in stage.chunks]
    assert [(h.index, h.first_step, h.steps) for h in headers] == [(0, 0, 10), (1, 10, 10), (2, 20, 5)]
    assert [h.end for h in headers] == [None, None, EpisodeEnd(steps=25, success=False)]
    assert {h.episode for h in headers} == {stage.recorder.episode}
    assert (headers[0].robot, headers[0].embodiment) == ("fake-0", stage.driver.spec.embodiment)
    assert [bool(chunk.final) for chunk in stage.chunks] == [False, False, True]

    def column(name: str) -> Array:
        return np.concatenate([chunk.columns[name] for chunk in stage.chunks])

    for name in ("observation.state", "observation.environment_state"):
        np.testing.assert_array_equal(column(name), [time_step.observation[name] for time_step in ticks[:-1]])
        np.testing.assert_array_equal(stage.chunks[-1].final[name], ticks[-1].observation[name])
    np.testing.assert_array_equal(column("policy_version"), range(25))
    np.testing.assert_array_equal(column("truncated"), [False] * 24 + [True])
    assert (column("t_capture_ns") <= column("t_inference_ns")).all()
    assert (column("t_inference_ns") <= column("t_command_ns")).all()
    assert (np.diff(column("t_capture_ns")) > 0).all()


def test_refused_step_is_recorded_with_the_grip_as_it_was() -> None:
    stage = Stage()
    closed = STILL.copy()
    closed[3] = 0.0
    stage.act(2, closed, CUT)
    stage.recorder.begin_episode(EpisodeSource.ONLINE, 1, stage.driver.episode_task)
    before = stage.driver.hold()
    stage.driver.emergency_stop("ada")
    stage.recorder.record(before, SelectedAction(closed, Phase.POLICY), stage.driver.step(closed), CUT)
    assert [chunk.columns[APPLIED_ACTION][:, 3].tolist() for chunk in stage.chunks] == [[0.0, 0.0], [0.0]]


def test_images_are_recorded_as_jpeg() -> None:
    stage = Stage()
    ticks = stage.act(10, last=CUT)
    (chunk,) = stage.chunks
    lengths, data = chunk.columns[f"{IMAGE_PREFIX}front.length"], chunk.columns[f"{IMAGE_PREFIX}front"].tobytes()
    assert [bool(n) for n in lengths] == [True, False] * 5
    assert sum(lengths) == len(data)
    begin = 0
    for length, time_step in zip(lengths, ticks, strict=False):
        if length:
            picture = simplejpeg.decode_jpeg(data[begin : begin + length])
            assert np.abs(picture.astype(int) - time_step.frames["front"].image).mean() < 4
            begin += length


def test_raw_images_are_recorded_unchanged() -> None:
    stage = Stage(RecorderConfig(raw_cameras=("front",)))
    ticks = stage.act(6, last=CUT)
    (chunk,) = stage.chunks
    taken = [time_step.frames["front"].image for time_step in ticks[:-1] if "front" in time_step.frames]
    np.testing.assert_array_equal(chunk.columns[f"{IMAGE_PREFIX}front"], taken)
    assert set(chunk.columns[f"{IMAGE_PREFIX}front.length"].tolist()) == {0, taken[0].nbytes}
    assert len(chunk.columns[f"{IMAGE_PREFIX}front.crc"]) == 6


def test_steps_carry_the_capture_time_of_their_image() -> None:
    stage = Stage(RecorderConfig(chunk_steps=3))
    ticks = stage.act(8, last=CUT)
    reported = np.concatenate([chunk.columns[f"{IMAGE_PREFIX}front.t_capture_ns"] for chunk in stage.chunks])
    captured = [time_step.frames["front"].t_capture_ns for time_step in ticks[:-1:2]]  # of every other period
    np.testing.assert_array_equal(reported, np.repeat(captured, 2))
    assert len(set(captured)) == 4 and reported.dtype == np.int64


def test_refused_action_is_recorded_as_not_applied() -> None:
    stage = Stage()
    stage.driver.kernel.emergency_stop("ada")
    stage.act(1, RIGHT)
    (chunk,) = stage.chunks
    np.testing.assert_array_equal(chunk.columns["action"], [RIGHT])
    np.testing.assert_array_equal(chunk.columns[APPLIED_ACTION], [np.float32(stage.driver.spec.neutral)])
    assert chunk.columns["safety"].tolist() == [SafetyReason.ESTOP]
    assert chunk.columns["truncated"].tolist() == [True]
    assert chunk.header.end == EpisodeEnd(steps=1, success=None)


def test_last_step_of_an_open_episode_is_never_sampled() -> None:
    stage = Stage(RecorderConfig(chunk_steps=4))
    stage.act(6)  # the session dies with two steps in no chunk
    first = stage.recorder.episode
    stage.act(4, last=CUT)
    headers = [chunk.header for chunk in stage.chunks]
    assert [(h.episode == first, h.steps, h.end is None) for h in headers] == [(True, 4, True), (False, 4, False)]
    assert headers[1].index == 0 and headers[1].first_step == 0


@pytest.mark.parametrize(("steps", "end", "transitions"), [(1, CUT, 1), (6, CUT, 6), (6, None, 3)])
def test_learner_draws_every_step_with_a_known_outcome(
    tmp_path: Path, steps: int, end: StepOutcome | None, transitions: int
) -> None:
    """The last step of an open episode has no known outcome."""
    stage = Stage(RecorderConfig(chunk_steps=4), cameras=())
    stage.act(steps, RIGHT, end)
    with StoreWriter.open(tmp_path) as writer:
        for chunk in stage.chunks:
            writer.append(chunk.encode())
    chooser, features = UniformSelector(), ObservationFeatures.of(stage.driver.spec)
    with StoreReader.open(tmp_path) as reader, ReplayBuffer(reader, features, cache_bytes=1 << 20) as replay:
        replay.subscribe(chooser.update)
        replay.refresh()
        assert len(chooser) == transitions


def test_chunks_stay_below_their_size_limit() -> None:
    stage = Stage(RecorderConfig(raw_cameras=("front",), chunk_bytes=10_000))
    ticks = stage.act(10, last=CUT)  # an image of 3,072 bytes with every other step
    headers = [chunk.header for chunk in stage.chunks]
    assert len(headers) > 1 and max(map(len, stage.packets)) < 12_000
    assert [h.first_step for h in headers] == [sum(h.steps for h in headers[:n]) for n in range(len(headers))]
    assert sum(h.steps for h in headers) == 10 and headers[-1].end is not None
    pictures = np.concatenate([chunk.columns[f"{IMAGE_PREFIX}front"] for chunk in stage.chunks])
    np.testing.assert_array_equal(pictures, [t.frames["front"].image for t in ticks[:-1] if "front" in t.frames])


@pytest.mark.parametrize("raw", [False, True])
def test_final_observation_keeps_its_images(raw: bool) -> None:
    stage = Stage(RecorderConfig(raw_cameras=("front",) if raw else ()))
    ticks = stage.act(4, last=CUT)
    last = stage.chunks[-1].final.get(f"{IMAGE_PREFIX}front")
    assert "front" in ticks[-1].frames and last is not None
    image = last if raw else simplejpeg.decode_jpeg(last.tobytes())
    np.testing.assert_allclose(image.mean((0, 1)), ticks[-1].frames["front"].image.mean((0, 1)), atol=3)


def test_too_large_raw_images_are_refused() -> None:
    robot = FakeRobot(FakeRobotConfig(cameras=("front", "wrist"), image_size=1500))
    record = RecorderConfig(raw_cameras=("front", "wrist"))
    with pytest.raises(ConfigError, match=r"front, wrist .*raw_cameras"):
        Recorder(robot.spec, "fake-0", print, record)


def never() -> None:
    raise AssertionError("it should not have to wait")


def test_tasks_run_in_order_before_the_exit() -> None:
    done: list[int] = []
    with WriterThread(never) as writer:
        for number in range(MAX_QUEUED_TASKS):
            writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(MAX_QUEUED_TASKS))


def test_full_queue_blocks_and_reports() -> None:
    free, reported = threading.Event(), threading.Event()

    def blocked() -> None:
        reported.set()
        free.set()

    done: list[int] = []
    with WriterThread(blocked) as writer:
        writer.put(lambda: done.append(int(free.wait(60))))
        for _ in range(MAX_QUEUED_TASKS + 1):
            writer.put(lambda: done.append(1))
    assert reported.is_set() and done == [1] * (MAX_QUEUED_TASKS + 2)


def test_task_error_is_raised_by_put_and_ends_the_tasks() -> None:
    def fail() -> None:
        raise StoreError("the disk failed")

    done: list[int] = []
    with pytest.raises(StoreError, match="the disk failed"), WriterThread(lambda: None) as writer:
        writer.put(fail)
        while True:
            writer.put(lambda: done.append(1))
    assert done == []


def test_error_of_the_last_task_is_raised_at_the_exit() -> None:
    with pytest.raises(StoreError, match="full"), WriterThread(never) as writer:
        writer.put(lambda: (_ for _ in ()).throw(StoreError("full")))
