"""The conformance suite of a robot: a driver is done when this passes."""

from __future__ import annotations

from point_robot import Options, PointRobot

from hal.conformance import RobotConformance
from hal.driver import RobotSetupRequest, load_driver
from hal.robot import Robot


class TestPointRobot(RobotConformance):
    def make_robot(self) -> Robot:
        return PointRobot(Options())


def test_driver_is_found_by_its_name() -> None:
    setup = load_driver("point")(RobotSetupRequest("point-0", "upright", {"rate_hz": 10.0}))
    assert setup.robot.spec.rate_hz == 10.0


def test_reach_task_is_available() -> None:
    setup = load_driver("point")(RobotSetupRequest("point-0", "reach", {"reach": {"max_steps": 40}}))
    assert (setup.task.name, setup.task.max_steps) == ("reach", 40) and setup.task.has_expert
