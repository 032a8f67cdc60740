"""An evaluation of a task that a person judges: it asks on the terminal, and the robot holds until the answers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from acting_kit import CountingPolicy
from msgspec import structs
from rich.console import Console

import user_sys.run.evaluate as module
from hal.errors import HardwareLost
from robots.homing import HumanJudgedTask
from user_sys.compose import PolicyConfig, RobotConfig, build_robot_setup, describe_robot
from user_sys.errors import RunError
from user_sys.messages import EpisodeReport
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder
from user_sys.run.evaluate import TerminalJudge, evaluate, run_evaluation

MAX_STEPS = 5


class Person:
    """Types a line of `lines` at each call; None stands for nothing typed. Notes how far the policy then was."""

    def __init__(self, policy: CountingPolicy, *lines: str | None) -> None:
        self._policy, self._lines = policy, list(lines)
        self.asked: list[tuple[str, int]] = []

    def ask(self, text: str) -> None:
        self.asked.append((text.split()[0], self._policy.actions))

    def answer(self) -> str | None:
        return self._lines.pop(0)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> CountingPolicy:
    """The policy of evaluations, whose robot has a task that a person judges."""

    def judged(config: RobotConfig, **options: Any) -> Any:
        return replace(build_robot_setup(config, **options), task=HumanJudgedTask("tidy", "tidy up", MAX_STEPS))

    policy = CountingPolicy(0.1)
    monkeypatch.setattr(module, "build_robot_setup", judged)
    monkeypatch.setattr(module, "describe_robot", lambda robot: describe_robot(robot)._replace(is_judged=True))
    monkeypatch.setattr(module, "make_policy", lambda *args, **settings: policy)
    return policy


def run(person: Person, episodes: int) -> list[EpisodeReport]:
    config = EvaluationConfig(episodes=episodes, video_episodes=0)
    robot = RobotConfig(name="arm", driver="fake", task="reach")
    return list(evaluate(robot, PolicyConfig(), {}, config, lambda _: None, judge=person))


def test_policy_waits_for_the_scene_and_its_episode_ends_with_the_answer(policy: CountingPolicy) -> None:
    person = Person(policy, None, None, "", None, None, "y", None, "", None, "n")
    first, second = run(person, 2)
    assert (first.success, second.success) == (True, False)
    assert person.asked == [("reset", 0), ("success?", 0), ("reset", 3), ("success?", 3)]
    assert (first.steps, second.steps) == (4, 3), "the last step of each is at rest"
    assert (first.intervention_steps, policy.actions) == (0, 5)


def test_robot_holds_after_the_last_step_until_a_valid_answer(policy: CountingPolicy) -> None:
    person = Person(policy, "", *[None] * (MAX_STEPS + 4), "maybe", None, "y")
    (report,) = run(person, 1)
    assert report.success is True and report.steps == MAX_STEPS + 1 and policy.actions == MAX_STEPS
    assert person.asked == [("reset", 0), ("success?", 0), ("success?", MAX_STEPS)]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of a person at a terminal, which is this program's input."""
    person, program = os.openpty()
    with os.fdopen(program) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        yield person
    os.close(person)


def test_terminal_gives_each_line_once_and_none_from_before_a_question(terminal: int) -> None:
    shown = io.StringIO()
    judge = TerminalJudge("arm", Console(file=shown))
    os.write(terminal, b"\n")
    judge.ask("success?")
    assert judge.answer() is None and shown.getvalue() == "success?\n"
    os.write(terminal, b" Y \nn\n")
    assert [judge.answer(), judge.answer(), judge.answer()] == ["y", "n", None]
    os.write(terminal, b"\x04")  # Ctrl-D
    with pytest.raises(KeyboardInterrupt):
        judge.answer()


def test_judged_evaluation_without_a_terminal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(RunError, match="robot arm: a person judges its task: start the evaluation in a terminal"):
        TerminalJudge("arm", Console(file=io.StringIO()))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), HardwareLost("the cable is out")])
def test_success_of_the_episodes_before_an_interruption_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    report = EpisodeReport(
        robot="arm", episode="", source="evaluation", steps=10, success=True, intervention_steps=0, policy_version=7
    )

    def ending(*args: Any, **settings: Any) -> Iterator[EpisodeReport]:
        yield report
        yield structs.replace(report, success=False)
        raise error

    monkeypatch.setattr(module, "load_acting_weights", lambda *args: (SimpleNamespace(version=7), {}))
    monkeypatch.setattr(module, "evaluate", ending)
    shown, config = io.StringIO(), RunConfig(robots=(RobotConfig(name="arm", driver="fake", task="reach"),))
    with pytest.raises(type(error)):
        run_evaluation(config, RunFolder(tmp_path), 20, Console(file=shown, width=200))
    assert "ended after 2 of 20 episodes of version 7: success 50.0% (95% interval " in shown.getvalue()
