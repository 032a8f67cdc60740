"""The contracts of robots, cameras, teleoperators and tasks as test suites, which other tests inherit.

A driver, in this project or in another package, is done when its suite passes::

    class TestMyRobot(RobotConformance):
        def make_robot(self) -> Robot:
            return MyRobot(MyRobotConfig(...))

A task's suite inherits `TaskConformance` and defines ``make_setup``. The suites command gentle actions only, those of
tasks by the safety kernel. They import no test framework.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from hal.camera import Camera
from hal.driver import RobotSetup
from hal.errors import HalError, HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, RobotSpec
from hal.task import TaskOutcome
from hal.teleoperator import Teleoperator


@contextlib.contextmanager
def _raises(kind: type[Exception], step: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert str(error), f"{step}: the {kind.__name__} has no message"
        return
    raise AssertionError(f"{step}: {kind.__name__} was expected, nothing was raised")


def gentle_action(spec: RobotSpec, observation: Observation) -> Array:
    """The spec's neutral action, else the middle of its bounds. Joint targets are the measured joints."""
    low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
    action: Array = np.array(spec.neutral or low / 2 + high / 2, np.float32)
    if joints := list(spec.joint_target):
        action[joints] = observation.arrays[STATE][list(spec.limits.joint_position)]
    return np.clip(action, low, high)


class RobotConformance(ABC):
    """The contract of `hal.robot.Robot`. Each test makes its own robot.

    Attributes:
        allows_large_steps: the tests may send joint targets to the end of their range at once, as in a simulation.
            The suite limits no speed, so without this flag it moves no such joint.
    """

    allows_large_steps = False

    @abstractmethod
    def make_robot(self) -> Robot:
        """A fresh robot, not connected."""

    def gentle_action(self, robot: Robot) -> Array:
        """An action that is safe at any time. Override it if the spec's neutral action does not suit the robot."""
        return gentle_action(robot.spec, robot.observe())

    def has_not_moved(self, before: Observation, after: Observation) -> bool:
        """Whether two observations are equal. Override it for a robot with noisy readings."""
        return all(np.array_equal(before.arrays[name], after.arrays[name]) for name in before.arrays)

    def test_spec_before_connect_survives_serialisation(self) -> None:
        spec = self.make_robot().spec
        assert msgspec.json.decode(msgspec.json.encode(spec), type=RobotSpec) == spec
        assert spec.embodiment == self.make_robot().spec.embodiment, "two robots of one model differ in embodiment"
        assert len(spec.embodiment) == 2 * hashlib.blake2b(digest_size=8).digest_size
        assert spec.rate_hz > 0 and spec.model
        names = [feature.name for feature in spec.observation] + [camera.feature for camera in spec.cameras]
        assert len(set(names)) == len(names), f"a feature occurs twice: {names}"

    def test_spec_limits_suit_safety_kernel(self) -> None:
        SafetyKernel(self.make_robot().spec)

    def test_second_connect_is_harmless(self) -> None:
        with self.make_robot() as robot:
            robot.connect()
            robot.observe()

    def test_connect_keeps_spec(self) -> None:
        robot = self.make_robot()
        before = robot.spec
        with robot:
            assert robot.spec == before

    def test_observation_fits_spec(self) -> None:
        with self.make_robot() as robot:
            cameras = {camera.feature: camera.shape for camera in robot.spec.cameras}
            known = {feature.name for feature in robot.spec.observation} | set(cameras)
            arrays = robot.observe().arrays
            robot.spec.validate(arrays)
            assert set(arrays) <= known, f"features that the spec lacks: {set(arrays) - known}"
            for name in set(cameras) & set(arrays):
                assert arrays[name].shape == cameras[name] and arrays[name].dtype == np.uint8

    def test_observation_does_not_change_afterwards(self) -> None:
        with self.make_robot() as robot:
            observation = robot.observe()
            kept = {name: array.copy() for name, array in observation.arrays.items()}
            for _ in range(3):
                robot.command(self.gentle_action(robot))
                robot.observe()
            assert all(np.array_equal(kept[name], observation.arrays[name]) for name in kept)

    def test_capture_times_grow_and_are_past(self) -> None:
        with self.make_robot() as robot:
            newest = robot.observe().t_capture_ns
            for _ in range(3):
                robot.command(self.gentle_action(robot))
                captured = robot.observe().t_capture_ns
                assert newest <= captured <= time.monotonic_ns()
                newest = captured

    def test_command_returns_applied_action(self) -> None:
        with self.make_robot() as robot:
            action = self.gentle_action(robot)
            applied = robot.command(action)
            robot.spec.action.validate(applied)
            _assert_within(applied, robot.spec)
            assert applied is not action, "the applied action must be a new array"

    def test_command_beyond_bounds_is_clipped_or_refused(self) -> None:
        with self.make_robot() as robot:
            far, spec = self.gentle_action(robot), robot.spec
            free = [i for i in range(len(far)) if self.allows_large_steps or i not in spec.joint_target]
            far[free[-1:]] = [spec.action.high[i] + 1 for i in free[-1:]]
            with contextlib.suppress(SpecError):
                _assert_within(robot.command(far), spec)

    def test_invalid_action_raises_and_moves_nothing(self) -> None:
        with self.make_robot() as robot:
            good = self.gentle_action(robot)
            before = robot.observe()
            for step, bad in (
                ("a NaN", np.full_like(good, np.nan)),
                ("an infinity", np.full_like(good, np.inf)),
                ("an element too many", np.append(good, good[:1])),
                ("a row of actions", good[None]),
                ("another dtype", good.astype(np.float64)),
            ):
                with _raises(SpecError, step):
                    robot.command(bad)
            assert self.has_not_moved(before, robot.observe()), "the robot moved after a refused command"

    def test_stop_at_any_time_and_repeated_is_allowed(self) -> None:
        with self.make_robot() as robot:
            for level in (StopLevel.HOLD, StopLevel.HOLD, StopLevel.SAFE, StopLevel.SAFE, StopLevel.HOLD):
                robot.stop(level)
                robot.spec.validate(robot.observe().arrays)
            robot.command(self.gentle_action(robot))
            robot.stop(StopLevel.HOLD)

    def test_close_twice_or_unconnected_is_harmless(self) -> None:
        self.make_robot().close()
        with self.make_robot() as robot:
            pass
        robot.close()

    def test_closed_robot_raises(self) -> None:
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

    def test_frames_fit_spec_and_capture_times_grow(self) -> None:
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

    def test_frame_does_not_change_afterwards(self) -> None:
        camera = self.make_camera()
        camera.connect()
        try:
            frame = camera.read()
            kept = frame.image.copy()
            camera.read()
            assert np.array_equal(kept, frame.image)
        finally:
            camera.close()

    def test_connect_and_close_twice_are_harmless_then_read_raises(self) -> None:
        _check_life_cycle(self.make_camera())


class TeleoperatorConformance(ABC):
    """The contract of `hal.teleoperator.Teleoperator`."""

    @abstractmethod
    def make_teleoperator(self) -> Teleoperator:
        """A fresh teleoperator, not connected."""

    def test_readings_are_within_unit_range_and_keep_shape(self) -> None:
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

    def test_connect_and_close_twice_are_harmless_then_read_raises(self) -> None:
        _check_life_cycle(self.make_teleoperator())


def _check_life_cycle(device: Camera | Teleoperator) -> None:
    device.close()
    for step in (device.connect, device.connect, device.close, device.close):
        step()
    with _raises(HardwareLost, "read after close"):
        device.read()


def _assert_within(applied: Array, spec: RobotSpec) -> None:
    low, high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
    assert ((applied >= low) & (applied <= high)).all(), f"applied {applied.tolist()} exceeds the spec's bounds"


class _Stopped(HalError):
    """Raised by the `check_stop` of a test."""


class TaskConformance(ABC):
    """The contract of `hal.task.Task`. Each test makes its own robot.

    Attributes:
        draws_start: a reset draws the start of robot or scene from its random generator.
        episodes: how many the expert plays.
        expert_success: share of them that must succeed.
    """

    draws_start = True
    episodes = 10
    expert_success = 0.9

    @abstractmethod
    def make_setup(self) -> RobotSetup:
        """A fresh robot, not connected, with the task."""

    def test_task_describes_itself(self) -> None:
        for each in self.make_setup().task.parts:
            assert each.name and each.instruction, "a task has a name and an instruction"
            assert each.max_steps >= 1, f"{each.name}: max_steps is {each.max_steps}"
            assert all(each.sentences), f"{each.name}: a sentence is empty"
            each.settings()  # all of its settings have defaults

    def test_start_depends_on_the_random_generator_alone(self) -> None:
        starts = [self._start(seed) for seed in (1, 1, 2)]
        assert _equal(starts[0], starts[1]), "two resets with equal generators differ"
        if self.draws_start:
            assert not _equal(starts[0], starts[2]), "two resets with other generators are equal"

    def test_second_reset_forgets_the_first_episode(self) -> None:
        setup = self.make_setup()
        with setup.robot as robot:
            setup.task.reset(robot, np.random.default_rng(2))
            for _ in range(3):
                robot.command(gentle_action(robot.spec, robot.observe()))
            setup.task.reset(robot, np.random.default_rng(1))
            assert _equal(robot.observe().arrays, self._start(1)), "an earlier episode changes the start"

    def test_outcomes_are_valid(self) -> None:
        setup = self.make_setup()
        with setup.robot as robot:
            setup.task.reset(robot, np.random.default_rng(0))
            for _ in range(min(setup.task.max_steps, 10)):
                robot.command(gentle_action(robot.spec, robot.observe()))
                outcome = setup.task.evaluate(robot.observe())
                assert isinstance(outcome, TaskOutcome) and math.isfinite(outcome.reward), outcome
                if outcome.terminated:
                    break

    def test_stop_during_a_reset_passes_through(self) -> None:
        stops = 0

        def stop() -> None:
            nonlocal stops
            stops += 1
            raise _Stopped("a person stops the robot")

        setup = self.make_setup()
        with setup.robot as robot:
            robot.check_stop = stop
            try:
                setup.task.reset(robot, np.random.default_rng(0))
            except _Stopped:
                return
            assert not stops, "the reset goes on after `check_stop` raised an error: let it pass"

    def test_expert_succeeds(self) -> None:
        setup = self.make_setup()
        if not setup.task.has_expert:
            _require_no_expert(setup)
            return
        with setup.robot:
            done = sum(self._succeeds(setup, seed) for seed in range(self.episodes))
        assert done >= self.expert_success * self.episodes, f"the expert succeeded in {done} of {self.episodes}"

    def _start(self, seed: int) -> dict[str, Array]:
        setup = self.make_setup()
        with setup.robot as robot:
            setup.task.reset(robot, np.random.default_rng(seed))
            return dict(robot.observe().arrays)

    def _succeeds(self, setup: RobotSetup, seed: int) -> bool:
        robot, task, kernel = setup.robot, setup.task, SafetyKernel(setup.robot.spec)
        expert = task.make_expert(robot, seed, 0.0)
        task.reset(robot, np.random.default_rng(seed))
        kernel.reset()
        for _ in range(task.max_steps):
            _step(setup, kernel, expert(robot.observe().arrays))
            outcome = task.evaluate(robot.observe())
            if outcome.terminated or outcome.success:
                return outcome.success is True
        return False


def _step(setup: RobotSetup, kernel: SafetyKernel, action: Array) -> None:
    observed: Observation = setup.robot.observe()
    decision = kernel.filter(action, observed)
    assert decision.applied is not None, f"the safety kernel refuses the expert's action: {decision.text}"
    kernel.set_applied(setup.robot.command(decision.applied))


def _require_no_expert(setup: RobotSetup) -> None:
    try:
        setup.task.make_expert(setup.robot, 0, 0.0)
    except SpecError:
        return
    raise AssertionError("has_expert is False, but make_expert gives one")


def _equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(np.allclose(one[name], other[name], atol=1e-6) for name in one)
