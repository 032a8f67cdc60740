"""When `user-sys edge` ends, with robots that other processes would drive."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import user_sys.commands.edge
from user_sys.commands.edge import EdgeConfig, check_config, run_robots
from user_sys.compose import PolicyConfig, RobotConfig, check_execution, check_pictures, policy_location
from user_sys.edge.robot_processes import RUN_FINISHED, UNREACHABLE, EdgeStatusFile, RobotHealth, RobotProcesses
from user_sys.errors import ConfigError
from user_sys.policies.policy import ExecutionConfig
from user_sys.tunnel.keys import new_keypair, save_keypair

ROUNDS = 20
FAULT, GOOD = RobotHealth(UNREACHABLE, "the gateway is unreachable"), RobotHealth("driving", "the run drives the robot")


class Shown(RobotProcesses):
    """A robot without processes, of a given health."""

    def __init__(self, folder: Path, health: RobotHealth, stop: threading.Event) -> None:
        super().__init__("arm", folder, folder, "tcp://desk:5555", lambda line: None)
        self.given, self._end, self.polls, self.stopped = health, stop, 0, False

    def start(self) -> None:
        pass

    def poll(self) -> None:
        self.health, self.polls = self.given, self.polls + 1
        if self.polls == ROUNDS:
            self._end.set()

    def request_stop(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs robots of these healths to the end; how often each was polled."""
    for name in ("POLL_S", "SESSION_STOP_LEAD_S"):
        monkeypatch.setattr(user_sys.commands.edge, name, 0.0)

    def run(*healths: RobotHealth) -> int:
        stop = threading.Event()
        robots = [Shown(tmp_path, health, stop) for health in healths]
        run_robots(robots, [tmp_path / "arm.key"] * len(robots), stop, lambda line: None, EdgeStatusFile(tmp_path))
        assert all(robot.stopped for robot in robots)
        return robots[0].polls

    (tmp_path / "arm.key").write_text("")
    return run


def test_edge_ends_when_its_last_robots_cannot_reach_the_run_that_is_over(
    polls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert polls(RUN_FINISHED, FAULT) == ROUNDS, "the others may still hear of the end"
    monkeypatch.setattr(user_sys.commands.edge, "END_WAIT_S", 0.0)
    assert polls(RUN_FINISHED, FAULT) < ROUNDS


@pytest.mark.parametrize("healths", [(RUN_FINISHED, GOOD), (RUN_FINISHED, GOOD, FAULT), (FAULT, FAULT)])
def test_edge_goes_on_while_a_robot_works_or_the_run_is_not_over(
    healths: tuple[RobotHealth, ...], polls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_sys.commands.edge, "END_WAIT_S", 0.0, raising=False)
    assert polls(*healths) == ROUNDS


def test_edge_that_is_stopped_before_its_robots_start_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    stop.set()
    robot = Shown(tmp_path, GOOD, stop)
    monkeypatch.setattr(robot, "start", lambda: pytest.fail("a driver starts"))
    (tmp_path / "arm.key").write_text("")
    run_robots([robot], [tmp_path / "arm.key"], stop, lambda line: None, EdgeStatusFile(tmp_path))


def test_robot_needs_no_checkpoint_of_a_policy_that_acts_in_a_server(tmp_path: Path) -> None:
    """torch is here, such as for a progress model; LeRobot or the checkpoint is not."""
    for name in ("gateway", "policy", "arm"):
        save_keypair(new_keypair(), tmp_path, name)
    robot, options = RobotConfig(name="arm", driver="fake", task="reach"), {"path": str(tmp_path / "smolvla")}
    execution = ExecutionConfig(mode="async", method="rtc")
    policy = PolicyConfig("lerobot", options, endpoint="tcp://site:5557", execution=execution)
    check_config(EdgeConfig(robots=(robot,), policy=policy), "tcp://desk:5555", tmp_path)
    for check in (lambda: check_execution(policy), lambda: check_pictures(policy, robot)):
        with pytest.raises(ConfigError, match="LeRobot|smolvla"):  # a run's computer trains it
            check()
    unfit = EdgeConfig(robots=(robot,), policy=PolicyConfig("cnn", endpoint="tcp://site:5557"))
    with pytest.raises(ConfigError, match="robot arm: .*no camera"):
        check_config(unfit, "tcp://desk:5555", tmp_path)


@pytest.mark.parametrize("kind", ["flow", "lerobot", "vla"])
def test_robots_computer_without_torch_is_told_that_the_policy_acts_in_a_server(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, f"user_sys.policies.{kind}", raising=False)
    robots = (RobotConfig(name="arm", driver="fake", task="reach"),)
    with pytest.raises(ConfigError, match=f"{kind} acts in a policy server, .*--policy.endpoint"):
        check_config(EdgeConfig(robots=robots, policy=PolicyConfig(kind)), "tcp://desk:5555", tmp_path)
    with pytest.raises(ConfigError, match=f"policy.location is edge, but the policy {kind} acts with torch"):
        policy_location(PolicyConfig(kind, location="edge"))


@pytest.mark.parametrize(("library", "location"), [("torch", "server"), ("unheard_of", None)])
def test_installed_policy_whose_module_needs_torch_acts_in_a_server(
    library: str, location: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "needing-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: needing\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[user_sys.policies]\nneeding = needing_{library}:Needing\n")
    (tmp_path / f"needing_{library}.py").write_text(f"import {library}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    if location is None:
        with pytest.raises(ConfigError, match=f"policy.kind: 'needing' .* cannot be imported: .*{library}"):
            policy_location(PolicyConfig("needing"))
    else:
        assert policy_location(PolicyConfig("needing")) == location
