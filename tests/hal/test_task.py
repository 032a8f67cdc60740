"""Tasks: by name, with settings, several for one robot, and the suite of their contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hal.conformance import TaskConformance
from hal.driver import RobotSetup, RobotSetupRequest
from hal.errors import SpecError
from hal.robot import Robot
from hal.task import Task, TaskMix, TaskRequest, build_task
from robots.fake import FakeRobot, FakeTask, make_robot_setup
from robots.homing import HumanJudgedTask

MODULE = """
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from robots.fake import FakeTask

@dataclass(frozen=True)
class Settings:
    radius_m: Annotated[float, Meta(gt=0)] = 0.05

class Near(FakeTask):
    name, instruction, settings = "near", "come near", Settings

    @classmethod
    def for_robot(cls, robot, settings):
        return cls(settings.radius_m)
"""
ENTRY_POINTS = "[user_sys.tasks]\nnear = tasks_package:Near\nsettings = tasks_package:Settings\nbroken = missing:X\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "tasks_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tasks-package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "tasks_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def setup(*tasks: TaskRequest, options: dict[str, Any] | None = None) -> RobotSetup:
    return make_robot_setup(RobotSetupRequest("fake-0", tasks[0].name, options or {}, tasks=tasks))


class TestFakeTask(TaskConformance):
    def make_setup(self) -> RobotSetup:
        return setup(TaskRequest("reach"))


class TestHumanJudgedTask(TaskConformance):
    draws_start = False

    def make_setup(self) -> RobotSetup:
        return RobotSetup("arm", FakeRobot(), HumanJudgedTask("tidy", "tidy up", 50))


@pytest.mark.usefixtures("package")
class TestTaskMix(TaskConformance):
    def make_setup(self) -> RobotSetup:
        return setup(TaskRequest("reach", paraphrase=True), TaskRequest("near", {"radius_m": 0.2}, "come very near"))


def drawn(task: Task, robot: Robot, seeds: range) -> list[tuple[str, str, int]]:
    found = []
    for seed in seeds:
        task.reset(robot, np.random.default_rng(seed))
        found.append((task.name, task.instruction, task.max_steps))
    return found


@pytest.mark.usefixtures("package")
def test_each_reset_draws_a_task_and_its_sentence_by_the_seed() -> None:
    made = setup(TaskRequest("reach", paraphrase=True), TaskRequest("near", sentence="come very near"))
    with made.robot as robot:
        found = drawn(made.task, robot, range(40))
        assert found == drawn(made.task, robot, range(40))
    assert {name for name, _, _ in found} == {"reach", "near"}
    assert {text for name, text, _ in found if name == "near"} == {"come very near"}
    assert {text for name, text, _ in found if name == "reach"} == {"move to the goal", *FakeTask.sentences}


def test_one_task_keeps_its_starts() -> None:
    made = setup(TaskRequest("reach"))
    assert not isinstance(made.task, TaskMix)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (TaskRequest("nearr"), "no task 'nearr'; did you mean 'near'"),
        (TaskRequest("near", {"radius": 1.0}), "the task 'near': options: radius: .* did you mean 'radius_m'"),
        (TaskRequest("near", {"radius_m": -1.0}), "the task 'near': options: radius_m: expected a number > 0"),
        (TaskRequest("settings"), "the task 'settings' is not a subclass of hal.task.Task"),
        (TaskRequest("broken"), "'broken' .* cannot be imported: ModuleNotFoundError"),
    ],
)
@pytest.mark.usefixtures("package")
def test_unusable_task_is_refused_in_one_line(task: TaskRequest, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        build_task((task,), FakeRobot(), {"reach": FakeTask})
    assert "\n" not in str(caught.value)


def test_tasks_of_one_name_and_options_of_a_judged_task_are_refused() -> None:
    with pytest.raises(SpecError, match="task: 'reach' is named twice; remove one"):
        build_task((TaskRequest("reach"),) * 2, FakeRobot(), {"reach": FakeTask})
    with pytest.raises(SpecError, match="speed: unknown key"):
        build_task(
            (TaskRequest("tidy", {"speed": 1}),), FakeRobot(), {}, lambda each: HumanJudgedTask(each.name, "", 9)
        )
