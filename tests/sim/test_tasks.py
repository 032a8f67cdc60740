"""Each task of the simulation keeps the contract of tasks."""

from __future__ import annotations

import numpy as np
import pytest

from hal.conformance import TaskConformance
from hal.driver import RobotSetup, RobotSetupRequest
from hal.task import TaskRequest
from sim import gym
from sim.objects import CUBE_COLOURS
from sim.tasks import FOLLOWED_M_S, TASKS, LiftTask, make_robot_setup


class SimTaskConformance(TaskConformance):
    task = ""
    episodes = 3
    expert_success = 0.6

    def make_setup(self) -> RobotSetup:
        return make_robot_setup(RobotSetupRequest("arm", self.task, {"cameras": []}))


class TestLift(SimTaskConformance):
    task = "lift"


class TestLiftColour(SimTaskConformance):
    task = "lift_green"
    expert_success = 0.95

    def test_tasks_of_all_colours_have_the_same_starts(self) -> None:
        starts = [TASKS[f"lift_{colour}"]().draw_poses(np.random.default_rng(3)) for colour in CUBE_COLOURS]
        assert len(starts[0]) == len(CUBE_COLOURS) and all(start == starts[0] for start in starts)


class TestFollow(SimTaskConformance):
    task = "follow"

    def test_target_moves_with_time_alone(self) -> None:
        setup = self.make_setup()
        setup.robot.connect()
        runs = []
        for _ in range(2):
            setup.task.reset(setup.robot, np.random.default_rng(5))
            places = []
            for _ in range(20):
                setup.robot.command(np.array([0.0, 0.0, 0.01, 0.08], np.float32))
                places.append(setup.robot.observe().arrays["observation.environment_state"][:3])
            runs.append(np.array(places))
        np.testing.assert_array_equal(runs[0], runs[1])
        steps = np.linalg.norm(np.diff(runs[0], axis=0), axis=1)
        assert 0.9 * FOLLOWED_M_S / 10 < np.median(steps) < 1.01 * FOLLOWED_M_S / 10


class TestPeg(SimTaskConformance):
    task = "peg"


class TestSeveral(SimTaskConformance):
    def make_setup(self) -> RobotSetup:
        tasks = (TaskRequest("cap"), TaskRequest("reach", paraphrase=True), TaskRequest("place"))
        return make_robot_setup(RobotSetupRequest("arm", "cap", {"cameras": []}, tasks=tasks))


class TestGym(TaskConformance):
    def make_setup(self) -> RobotSetup:
        return gym.make_robot_setup(RobotSetupRequest("gym", "swing_up", {"id": "Pendulum-v1"}))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_expert_of_each_task_succeeds(name: str) -> None:
    suite = SimTaskConformance()
    suite.task, suite.episodes, suite.expert_success = name, 40, 0.95
    suite.test_expert_succeeds()


class Push(LiftTask):
    """A package's task with an expert of its own."""

    name, has_expert = "push", True

    @classmethod
    def needed_objects(cls) -> tuple[str, ...]:
        return ("cube",)


def test_own_expert_of_a_packages_task_counts() -> None:
    assert Push().has_expert and LiftTask().has_expert
    assert not type("Pull", (Push,), {"name": "pull", "has_expert": False})().has_expert
