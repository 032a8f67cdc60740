"""An evaluation under a delay, of robots that follow the clock in the run and of others."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from acting_kit import CountingPolicy
from rich.console import Console

import user_sys.run.evaluate as module
from user_sys.compose import PolicyConfig, RobotConfig
from user_sys.policies.policy import ExecutionConfig
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder
from user_sys.run.evaluate import evaluate, run_evaluation

DELAYED = ExecutionConfig(mode="async", delay_periods=3)
PERIODS = 8


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> CountingPolicy:
    found = CountingPolicy()
    monkeypatch.setattr(module, "make_policy", lambda *args: found)
    return found


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The driver of an installed package: that of a real robot."""
    metadata = tmp_path / "lab_arms-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-arms\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[user_sys.drivers]\nlab-arm = robots.fake:make_robot_setup\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "lab-arm"


def acted(acting: CountingPolicy, robot: RobotConfig, policy: PolicyConfig) -> int:
    """The actions of the first `PERIODS` control periods."""
    periods = 0

    def check_stop() -> None:
        nonlocal periods
        periods += acting.actions > 0
        if periods == PERIODS:
            raise KeyboardInterrupt

    config = EvaluationConfig(episodes=1, video_episodes=0)
    with pytest.raises(KeyboardInterrupt):
        list(evaluate(robot, policy, {}, config, lambda _: None, check_stop=check_stop))
    return acting.actions


def test_real_robot_uses_a_chunk_as_soon_as_it_is_there(acting: CountingPolicy, driver: str) -> None:
    robot = RobotConfig(name="arm", driver=driver, task="reach")
    assert acted(acting, robot, PolicyConfig(execution=DELAYED)) == PERIODS


@pytest.mark.parametrize("real_time", [False, True])
def test_simulated_robot_counts_the_delay(acting: CountingPolicy, real_time: bool) -> None:
    robot = RobotConfig(name="arm", driver="fake", task="reach", real_time=real_time)
    assert acted(acting, robot, PolicyConfig(execution=DELAYED)) <= PERIODS // 2


@pytest.mark.parametrize(
    ("real_time", "execution", "is_said"),
    [
        (True, ExecutionConfig(mode="async"), True),
        (True, ExecutionConfig(), False),
        (True, DELAYED, False),
        (False, ExecutionConfig(mode="async"), False),
    ],
)
def test_evaluation_without_the_delay_of_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_time: bool, execution: ExecutionConfig, is_said: bool
) -> None:
    def nothing(*args: Any, **settings: Any) -> Iterator[None]:
        yield from ()

    monkeypatch.setattr(module, "load_acting_weights", lambda *args: (SimpleNamespace(version=7), {}))
    monkeypatch.setattr(module, "evaluate", nothing)
    robot = RobotConfig(name="arm", driver="fake", task="reach", real_time=real_time)
    shown, config = io.StringIO(), RunConfig(robots=(robot,), policy=PolicyConfig(kind="flow", execution=execution))
    run_evaluation(config, RunFolder(tmp_path), 1, Console(file=shown, width=200))
    assert ("arm is evaluated without the delay" in shown.getvalue()) is is_said
