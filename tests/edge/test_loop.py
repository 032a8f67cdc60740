"""The episode loop: every step is selected, applied, evaluated and recorded; a hold is no step."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kit import STILL, RecordingRobot

from hal.errors import HardwareLost
from hal.robot import StopLevel
from hal.safety import SafetyKernel
from robots.fake import FakeCamera, FakeRobotConfig, FakeTask, FaultPlan, fake_expert
from user_sys.edge.agents import ScriptedAgent
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.edge.loop import EpisodeResult, run_episode
from user_sys.edge.recorder import Recorder, RecorderConfig, SelectedAction
from user_sys.episode import Chunk, EpisodeEnd, EpisodeSource, Phase, decode_chunk


class Bench:
    """A fake robot with a recorder."""

    def __init__(self, faults: FaultPlan | None = None) -> None:
        self.robot = RecordingRobot(FakeRobotConfig(faults=faults or FaultPlan()))
        self.task = FakeTask()
        self.driver = RobotEnvironment(self.robot, self.task, SafetyKernel(self.robot.spec))
        self.driver.connect()
        self.packets: list[bytes] = []
        self.recorder = Recorder(
            self.robot.spec, "fake-0", "reach", "go", self.packets.append, RecorderConfig(chunk_steps=3)
        )
        self.notified: list[tuple[TimeStep, SelectedAction | None]] = []

    @property
    def chunks(self) -> list[Chunk]:
        return [decode_chunk(packet) for packet in self.packets]

    def run(self, agent: ScriptedAgent, seed: int = 3) -> EpisodeResult:
        return run_episode(
            self.driver,
            agent,
            self.recorder,
            source=EpisodeSource.DEMO,
            seed=seed,
            listeners=[lambda time_step, selected: self.notified.append((time_step, selected))],
        )


def test_episode_is_recorded_to_its_end() -> None:
    bench = Bench()
    result = bench.run(ScriptedAgent(fake_expert, bench.task.max_steps))
    assert (result.success, result.episode_return, result.policy_version) == (True, 1.0, -1)
    assert result.steps == result.intervention_steps == len(bench.robot.commands) == len(bench.notified)
    assert sum(chunk.header.steps for chunk in bench.chunks) == result.steps
    assert bench.chunks[-1].header.end == EpisodeEnd(steps=result.steps, success=True)
    assert {chunk.header.episode for chunk in bench.chunks} == {result.episode}
    assert {(chunk.header.source, chunk.header.seed) for chunk in bench.chunks} == {(EpisodeSource.DEMO, 3)}
    assert all((chunk.columns["phase"] == Phase.TELEOP).all() for chunk in bench.chunks)


def test_episode_beyond_the_step_limit_fails() -> None:
    bench = Bench()
    result = bench.run(ScriptedAgent(lambda arrays: STILL, max_steps=7))
    assert (result.steps, result.success, result.episode_return) == (7, False, 0.0)
    assert bench.chunks[-1].columns["truncated"].tolist() == [True]
    assert not bench.chunks[-1].columns["terminated"].any()


def test_period_without_an_action_holds_and_is_no_step() -> None:
    class Hesitant(ScriptedAgent):
        calls = 0

        def select_action(self, time_step: TimeStep) -> SelectedAction | None:
            self.calls += 1
            return None if self.calls % 2 else super().select_action(time_step)

    bench = Bench()
    result = bench.run(Hesitant(lambda arrays: STILL, max_steps=4))
    assert result.steps == len(bench.robot.commands) == 4
    assert bench.robot.stops == [StopLevel.HOLD] * 4
    assert [selected is None for _, selected in bench.notified] == [True, False] * 4
    assert sum(chunk.header.steps for chunk in bench.chunks) == 4


def test_refused_action_truncates_the_episode() -> None:
    bench = Bench()

    def spoiled(arrays: object) -> np.ndarray:
        return STILL if len(bench.robot.commands) < 2 else np.full(4, np.nan, np.float32)

    result = bench.run(ScriptedAgent(spoiled, max_steps=10))
    assert (result.steps, result.success) == (3, None)
    assert len(bench.robot.commands) == 2
    assert bench.chunks[-1].header.end == EpisodeEnd(steps=3, success=None)


def test_lost_robot_leaves_the_episode_open() -> None:
    bench = Bench(FaultPlan(drop_out_at=5))
    with pytest.raises(HardwareLost):
        bench.run(ScriptedAgent(lambda arrays: STILL, max_steps=50))
    assert [chunk.header.steps for chunk in bench.chunks] == [3]
    assert bench.chunks[0].header.end is None


def test_frame_before_a_hold_is_recorded_with_the_next_step() -> None:
    class Waiting(ScriptedAgent):
        calls = 0

        def select_action(self, time_step: TimeStep) -> SelectedAction | None:
            self.calls += 1
            return None if self.calls <= 2 else super().select_action(time_step)

    robot = RecordingRobot(FakeRobotConfig(cameras=("front",), image_size=16))
    camera = FakeCamera(robot, robot.spec.cameras[0])
    driver = RobotEnvironment(robot, FakeTask(), SafetyKernel(robot.spec), [camera], frame_stride=100)
    driver.connect()
    packets: list[bytes] = []
    recorder = Recorder(robot.spec, "fake-0", "reach", "go", packets.append)
    run_episode(driver, Waiting(lambda arrays: STILL, max_steps=2), recorder, source=EpisodeSource.ONLINE, seed=3)
    (chunk,) = map(decode_chunk, packets)
    assert [bool(length) for length in chunk.columns["observation.images.front.length"]] == [True, False]
