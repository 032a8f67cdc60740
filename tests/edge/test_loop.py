"""The episode loop: every step is selected, applied, evaluated and recorded; a hold is no step."""

from __future__ import annotations

import numpy as np
import pytest
from edge_kit import STILL, RecordingRobot

from hal.errors import HardwareLost, SpecError
from hal.robot import StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.task import Task, TaskMix, TaskOutcome
from robots.fake import FakeCamera, FakeRobotConfig, FakeTask, FaultPlan, fake_expert
from user_sys.edge.agents import ScriptedAgent, task_outcome
from user_sys.edge.environment import NO_OUTCOME, RobotEnvironment, TimeStep
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import Recorder, RecorderConfig, SelectedAction
from user_sys.episode import Chunk, EpisodeEnd, EpisodeSource, Phase, decode_chunk
from user_sys.messages import EpisodeReport


class Bench:
    """A fake robot with a recorder."""

    def __init__(self, faults: FaultPlan | None = None, task: Task | None = None) -> None:
        self.robot = RecordingRobot(FakeRobotConfig(faults=faults or FaultPlan()))
        self.task = task or FakeTask()
        self.driver = RobotEnvironment(self.robot, self.task, SafetyKernel(self.robot.spec))
        self.driver.connect()
        self.packets: list[bytes] = []
        self.recorder = Recorder(self.robot.spec, "fake-0", self.packets.append, RecorderConfig(chunk_steps=3))
        self.notified: list[tuple[TimeStep, SelectedAction | None]] = []

    @property
    def chunks(self) -> list[Chunk]:
        return [decode_chunk(packet) for packet in self.packets]

    def run(self, agent: ScriptedAgent, seed: int = 3) -> EpisodeReport:
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
    result = bench.run(ScriptedAgent(fake_expert))
    assert (result.success, result.episode_return, result.policy_version) == (True, 1.0, -1)
    assert result.steps == result.intervention_steps == len(bench.robot.commands) == len(bench.notified)
    assert sum(chunk.header.steps for chunk in bench.chunks) == result.steps
    assert bench.chunks[-1].header.end == EpisodeEnd(steps=result.steps, success=True)
    assert {chunk.header.episode for chunk in bench.chunks} == {result.episode}
    assert {(chunk.header.source, chunk.header.seed) for chunk in bench.chunks} == {(EpisodeSource.DEMO, 3)}
    assert all((chunk.columns["phase"] == Phase.TELEOP).all() for chunk in bench.chunks)


def test_period_without_an_action_holds_and_is_no_step() -> None:
    class Hesitant(ScriptedAgent):
        calls = 0

        def select_action(self, time_step: TimeStep) -> SelectedAction | None:
            self.calls += 1
            return None if self.calls % 2 else super().select_action(time_step)

    bench = Bench(task=FakeTask(max_steps=4))
    result = bench.run(Hesitant(lambda arrays: STILL))
    assert result.steps == len(bench.robot.commands) == 4
    assert bench.robot.stops == [StopLevel.HOLD] * 4
    assert [selected is None for _, selected in bench.notified] == [True, False] * 4
    assert sum(chunk.header.steps for chunk in bench.chunks) == 4


def test_first_step_that_an_e_stop_prevents_is_no_episode() -> None:
    class Stopped(ScriptedAgent):
        def select_action(self, time_step: TimeStep) -> SelectedAction:
            bench.driver.kernel.emergency_stop("ada")
            return super().select_action(time_step)

    bench = Bench()
    result = bench.run(Stopped(fake_expert))
    assert (result.episode, result.success, bench.packets) == ("", None, [])


@pytest.mark.parametrize(
    ("reason", "success"),
    [
        (SafetyReason.FORCE, False),
        (SafetyReason.NOT_FINITE, False),
        (SafetyReason.ESTOP, None),
        (SafetyReason.STALE, None),
    ],
)
def test_stop_by_the_safety_kernel_is_a_failure_and_an_interruption_is_not(
    reason: SafetyReason, success: bool | None
) -> None:
    after = TimeStep({}, {}, 0, None, int(reason), 0, NO_OUTCOME, 0, False)
    outcome = task_outcome(after, late=False)
    assert outcome.truncated and outcome.success is success


@pytest.mark.parametrize("success", [None, False, True])
def test_episode_that_the_task_ends_without_a_verdict_is_a_failure(success: bool | None) -> None:
    ended = TaskOutcome(reward=0.0, terminated=True, success=success)
    outcome = task_outcome(TimeStep({}, {}, 0, STILL, 0, 0, ended, 0, False), late=False)
    assert outcome.terminated and outcome.success is bool(success)


def test_refused_action_truncates_the_episode() -> None:
    bench = Bench()

    def stopped(arrays: object) -> np.ndarray:
        if len(bench.robot.commands) == 2:
            bench.driver.emergency_stop("ada")
        return STILL

    result = bench.run(ScriptedAgent(stopped))
    assert (result.steps, result.success) == (3, None)
    assert len(bench.robot.commands) == 2
    assert bench.chunks[-1].header.end == EpisodeEnd(steps=3, success=None)


def test_action_of_an_expert_that_is_not_finite_is_not_recorded() -> None:
    bench = Bench()

    def spoiled(arrays: object) -> np.ndarray:
        return STILL if len(bench.robot.commands) < 4 else np.full(4, np.nan, np.float32)

    with pytest.raises(SpecError, match=r"the scripted expert gives the action \[nan, nan, nan, nan\], which is not"):
        bench.run(ScriptedAgent(spoiled))
    assert [chunk.header.steps for chunk in bench.chunks] == [3] and bench.chunks[0].header.end is None


def test_lost_robot_leaves_the_episode_open() -> None:
    bench = Bench(FaultPlan(drop_out_at=5))
    with pytest.raises(HardwareLost):
        bench.run(ScriptedAgent(lambda arrays: STILL))
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
    driver = RobotEnvironment(robot, FakeTask(max_steps=2), SafetyKernel(robot.spec), [camera], frame_stride=100)
    driver.connect()
    packets: list[bytes] = []
    recorder = Recorder(robot.spec, "fake-0", packets.append)
    run_episode(driver, Waiting(lambda arrays: STILL), recorder, source=EpisodeSource.ONLINE, seed=3)
    (chunk,) = map(decode_chunk, packets)
    assert [bool(length) for length in chunk.columns["observation.images.front.length"]] == [True, False]


def test_each_episode_is_recorded_with_the_task_that_its_seed_draws() -> None:
    far = FakeTask(radius_m=1e-9, max_steps=3)
    far.name, far.instruction = "far", "go far"
    bench = Bench(task=TaskMix((FakeTask(max_steps=40), far)))
    results = [bench.run(ScriptedAgent(lambda arrays: STILL), seed) for seed in range(8)]
    steps = {result.task: result.steps for result in results}
    assert steps == {"reach": 40, "far": 3}
    headers = {chunk.header.episode: chunk.header for chunk in bench.chunks}
    assert [headers[result.episode].task for result in results] == [result.task for result in results]
    assert {(each.task, each.sentence) for each in headers.values()} == {
        ("reach", "move to the goal"),
        ("far", "go far"),
    }
    again = [bench.run(ScriptedAgent(lambda arrays: STILL), seed).task for seed in range(8)]
    assert again == [result.task for result in results]
