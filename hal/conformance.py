"""What every robot, camera and teleoperator must do, as test suites that a driver's own tests inherit.

A driver, in this project or in another package, is done when its suite passes::

    class TestMyRobot(RobotConformance):
        def make_robot(self) -> Robot:
            return MyRobot(MyRobotConfig(...))

The suites move the robot by gentle actions only and need no test framework to be imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec
import numpy as np

from hal.camera import Camera
from hal.errors import HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, RobotSpec
from hal.teleoperator import Teleoperator


@contextlib.contextmanager
def _raises(kind: type[Exception], deed: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert str(error), f"{deed}: the {kind.__name__} says nothing"
        return
    raise AssertionError(f"{deed}: {kind.__name__} was expected, nothing was raised")


def gentle_action(spec: RobotSpec, observation: Observation) -> Array:
    """The spec's neutral action, or the middle of its bounds where it has none; joint targets where the joints are."""
    low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
    action: Array = np.array(spec.neutral or low / 2 + high / 2, np.float32)
    if joints := list(spec.joint_target):
        action[joints] = observation.arrays[STATE][list(spec.limits.joint_position)]
    return np.clip(action, low, high)


class RobotConformance(ABC):
    """The contract of `hal.robot.Robot`. Each test makes a robot of its own.

    Attributes:
        allows_large_steps: joints that are moved by targets may be sent to the end of their range at once, as in a
            simulation. Nothing slows a command down here: without it, no such joint is told to move.
    """

    allows_large_steps = False

    @abstractmethod
    def make_robot(self) -> Robot:
        """A fresh robot, not connected."""

    def gentle_action(self, robot: Robot) -> Array:
        """An action that is safe at any time; overridden for a robot that the spec's neutral action does not suit."""
        return gentle_action(robot.spec, robot.observe())

    def has_not_moved(self, before: Observation, after: Observation) -> bool:
        """True where nothing moved between two observations; overridden for a robot whose readings are noisy."""
        return all(np.array_equal(before.arrays[name], after.arrays[name]) for name in before.arrays)

    def test_the_spec_is_known_before_connecting_and_survives_serialisation(self) -> None:
        spec = self.make_robot().spec
        assert msgspec.json.decode(msgspec.json.encode(spec), type=RobotSpec) == spec
        assert spec.embodiment == self.make_robot().spec.embodiment, "two robots of one kind differ in embodiment"
        assert len(spec.embodiment) == 2 * hashlib.blake2b(digest_size=8).digest_size
        assert spec.rate_hz > 0 and spec.model
        names = [feature.name for feature in spec.observation] + [camera.feature for camera in spec.cameras]
        assert len(set(names)) == len(names), f"a feature is named twice: {names}"

    def test_the_safety_kernel_accepts_the_limits(self) -> None:
        SafetyKernel(self.make_robot().spec)

    def test_connecting_twice_is_harmless(self) -> None:
        with self.make_robot() as robot:
            robot.connect()
            robot.observe()

    def test_the_spec_does_not_change_by_connecting(self) -> None:
        robot = self.make_robot()
        before = robot.spec
        with robot:
            assert robot.spec == before

    def test_observations_fit_the_spec(self) -> None:
        with self.make_robot() as robot:
            cameras = {camera.feature: camera.shape for camera in robot.spec.cameras}
            known = {feature.name for feature in robot.spec.observation} | set(cameras)
            arrays = robot.observe().arrays
            robot.spec.validate(arrays)
            assert set(arrays) <= known, f"features that the spec does not name: {set(arrays) - known}"
            for name in set(cameras) & set(arrays):
                assert arrays[name].shape == cameras[name] and arrays[name].dtype == np.uint8

    def test_an_observation_is_not_changed_by_what_follows(self) -> None:
        with self.make_robot() as robot:
            observation = robot.observe()
            kept = {name: array.copy() for name, array in observation.arrays.items()}
            for _ in range(3):
                robot.command(self.gentle_action(robot))
                robot.observe()
            assert all(np.array_equal(kept[name], observation.arrays[name]) for name in kept)

    def test_times_of_capture_grow_and_are_past(self) -> None:
        with self.make_robot() as robot:
            newest = robot.observe().t_capture_ns
            for _ in range(3):
                robot.command(self.gentle_action(robot))
                captured = robot.observe().t_capture_ns
                assert newest <= captured <= time.monotonic_ns()
                newest = captured

    def test_a_command_returns_what_was_applied(self) -> None:
        with self.make_robot() as robot:
            action = self.gentle_action(robot)
            applied = robot.command(action)
            robot.spec.action.validate(applied)
            _assert_within(applied, robot.spec)
            assert applied is not action, "the applied action must be the receiver's own"

    def test_a_command_beyond_the_bounds_is_clipped_or_refused(self) -> None:
        with self.make_robot() as robot:
            far, spec = self.gentle_action(robot), robot.spec
            free = [i for i in range(len(far)) if self.allows_large_steps or i not in spec.joint_target]
            far[free[-1:]] = [spec.action.high[i] + 1 for i in free[-1:]]
            with contextlib.suppress(SpecError):
                _assert_within(robot.command(far), spec)

    def test_what_is_not_an_action_raises_and_commands_nothing(self) -> None:
        with self.make_robot() as robot:
            good = self.gentle_action(robot)
            before = robot.observe()
            for deed, bad in (
                ("a NaN", np.full_like(good, np.nan)),
                ("an infinity", np.full_like(good, np.inf)),
                ("an element too many", np.append(good, good[:1])),
                ("a row of actions", good[None]),
                ("another dtype", good.astype(np.float64)),
            ):
                with _raises(SpecError, deed):
                    robot.command(bad)
            assert self.has_not_moved(before, robot.observe()), "the robot moved upon a refused command"

    def test_stopping_is_allowed_at_any_time_and_may_be_repeated(self) -> None:
        with self.make_robot() as robot:
            for level in (StopLevel.HOLD, StopLevel.HOLD, StopLevel.SAFE, StopLevel.SAFE, StopLevel.HOLD):
                robot.stop(level)
                robot.spec.validate(robot.observe().arrays)
            robot.command(self.gentle_action(robot))
            robot.stop(StopLevel.HOLD)

    def test_closing_twice_or_unconnected_is_harmless(self) -> None:
        self.make_robot().close()
        with self.make_robot() as robot:
            pass
        robot.close()

    def test_a_closed_robot_raises(self) -> None:
        with self.make_robot() as robot:
            action = self.gentle_action(robot)
        with _raises(HardwareLost, "observe after close"):
            robot.observe()
        with _raises(HardwareLost, "command after close"):
            robot.command(action)


class CameraConformance(ABC):
    """The contract of `hal.camera.Camera`."""

    @abstractmethod
    def make_camera(self) -> Camera:
        """A fresh camera, not connected."""

    def test_frames_fit_the_spec_and_their_times_grow(self) -> None:
        camera = self.make_camera()
        camera.connect()
        try:
            newest = 0
            for _ in range(3):
                frame = camera.read()
                assert frame.image.shape == camera.spec.shape and frame.image.dtype == np.uint8
                assert newest <= frame.t_capture_ns <= time.monotonic_ns()
                newest = frame.t_capture_ns
        finally:
            camera.close()

    def test_a_frame_is_not_changed_by_the_next(self) -> None:
        camera = self.make_camera()
        camera.connect()
        try:
            frame = camera.read()
            kept = frame.image.copy()
            camera.read()
            assert np.array_equal(kept, frame.image)
        finally:
            camera.close()

    def test_connecting_and_closing_twice_is_harmless_and_a_closed_camera_raises(self) -> None:
        camera = self.make_camera()
        camera.close()
        for step in (camera.connect, camera.connect, camera.close, camera.close):
            step()
        with _raises(HardwareLost, "read after close"):
            camera.read()


class TeleoperatorConformance(ABC):
    """The contract of `hal.teleoperator.Teleoperator`."""

    @abstractmethod
    def make_teleoperator(self) -> Teleoperator:
        """A fresh teleoperator, not connected."""

    def test_inputs_are_shares_of_the_range_and_keep_their_size(self) -> None:
        device = self.make_teleoperator()
        device.connect()
        try:
            inputs = [device.read() for _ in range(5)]
        finally:
            device.close()
        for reading in inputs:
            assert reading.twist.dtype == np.float32 and reading.twist.shape == inputs[0].twist.shape
            assert reading.twist.ndim == 1 and (np.abs(reading.twist) <= 1).all()
            assert isinstance(reading.engaged, bool)

    def test_connecting_and_closing_twice_is_harmless_and_a_closed_device_raises(self) -> None:
        device = self.make_teleoperator()
        device.close()
        for step in (device.connect, device.connect, device.close, device.close):
            step()
        with _raises(HardwareLost, "read after close"):
            device.read()


def _assert_within(applied: Array, spec: RobotSpec) -> None:
    low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
    assert ((applied >= low) & (applied <= high)).all(), f"applied {applied.tolist()} is out of the spec's bounds"
