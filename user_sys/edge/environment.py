"""The environment: robot, cameras, task and safety kernel, without policy, network and learner.

`RobotEnvironment` is the only caller of a robot. In a run it lives in the driver process (`driver_server`), and a
session steps it through `driver_client.DriverClient`. Recording and evaluation on one machine call it directly. Both
classes implement `Environment`, so one episode loop serves all three.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import msgspec
import numpy as np

from hal.camera import Camera, CameraFrame
from hal.errors import EmergencyStopped, HalError, HardwareLost, SpecError, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import Array, RobotSpec
from hal.task import Task, TaskOutcome
from hal.teleoperator import Teleoperator, TeleopInput

log = logging.getLogger(__name__)

T = TypeVar("T")

COMMAND_JITTER = 0.3  # share of a control period by which a command may be closer to the one before

PLACE_REASONS = SafetyReason.WORKSPACE | SafetyReason.FORCE | SafetyReason.JOINT_POSITION

SLOW_CONNECT_S = 1.0  # of an input device that does not answer
NO_OUTCOME = TaskOutcome(reward=0.0, terminated=False)


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A task, as agents and recorders use it."""

    name: str
    sentence: str
    max_steps: int

    @classmethod
    def of(cls, task: Task) -> Self:
        """The present description of `task`; a `hal.task.TaskMix` changes it at a reset."""
        return cls(name=task.name, sentence=task.instruction, max_steps=task.max_steps)


@dataclass(frozen=True)
class TimeStep:
    """The result of one control period.

    Attributes:
        observation: the robot's features after the period, without images.
        frames: new images by camera; after a reset the newest of each camera.
        t_capture_ns: when the features were sensed, by the monotonic clock of the edge; each frame has its own time.
        applied: float32 (a,), the action that was applied in the period; None after a reset or a hold.
        safety_reasons: bit set of `SafetyReason`: why the requested action did not reach the robot; 0 if it did.
        t_command_ns: when the action was applied; 0 without an action.
        outcome: the task's outcome of the period.
        held_periods: control periods since the previous time step in which the watchdog held the robot.
        stopped: the e-stop is latched.
        stopped_by: who pressed it; empty if it is not latched.
        stopped_why: the reason, of a stop that the robot latched by itself; else empty.
        local_input: input from a device on the robot's own computer; None while no device is engaged.
    """

    observation: Mapping[str, Array]
    frames: Mapping[str, CameraFrame]
    t_capture_ns: int
    applied: Array | None
    safety_reasons: int
    t_command_ns: int
    outcome: TaskOutcome
    held_periods: int
    stopped: bool
    local_input: TeleopInput | None = None
    stopped_by: str = ""
    stopped_why: str = ""


class Environment(Protocol):
    """The robot as the episode loop sees it, in this process or in a driver process."""

    @property
    def episode_task(self) -> TaskInfo:
        """The task of the episode, which the last reset has drawn."""

    def reset(self, seed: int) -> TimeStep:
        """Moves robot and scene to an initial state drawn from `seed`. Blocks meanwhile."""

    def step(self, action: Array) -> TimeStep:
        """Runs one control period with `action`, as the safety kernel limits it."""

    def hold(self) -> TimeStep:
        """Runs one control period in which the robot keeps its pose."""


class PeriodGrid:
    """The grid of control periods, and when the watchdog is due. All times in nanoseconds of `clock`."""

    def __init__(self, period_ns: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock, self._period_ns = clock, period_ns
        self.watchdog_ns = self._next_ns = clock()
        self.command_ns = self._next_ns - period_ns

    def feed_watchdog(self, periods: int, more_s: float = 0.0) -> None:
        """The watchdog is due after `periods` control periods and `more_s` from now."""
        self.watchdog_ns = self.clock() + periods * self._period_ns + int(more_s * 1e9)

    def begin(self) -> int:
        """Call it when a command was applied. Returns the end of its control period, on a fixed grid.

        A missed period starts a new grid. See `wait_for_command` for a command that is late within its period.
        """
        now = self.command_ns = self.clock()
        self._next_ns += self._period_ns
        if not now <= self._next_ns <= now + 2 * self._period_ns:
            self._next_ns = now + self._period_ns
        return self._next_ns

    def wait_for_command(self, wait_until: Callable[[int], object]) -> None:
        """Waits until a control period after the last command, less `COMMAND_JITTER`. A wait starts a new grid.

        A command moves the robot by one period's share of its limits, so lateness is not made up by a much shorter one.
        """
        earliest_ns = self.command_ns + round((1 - COMMAND_JITTER) * self._period_ns)
        if self.clock() < earliest_ns:
            wait_until(earliest_ns)
            self._next_ns = earliest_ns


class _InputDevices:
    """The input devices of a robot, which continues without one that is lost.

    A lost device is connected again at a reset, unless a try took longer than `SLOW_CONNECT_S`. Then it has no effect
    until it was released for its `release_s`: a hand that is on it moves no robot.
    """

    def __init__(self, devices: Sequence[Teleoperator]) -> None:
        self._devices = tuple(devices)
        self._lost: list[Teleoperator] = []
        self._slow: list[Teleoperator] = []  # lost ones that are not tried again
        self._engaged_s: dict[Teleoperator, float] = {}  # of those not released since they returned: last engaged

    @property
    def present(self) -> list[Teleoperator]:
        """Those that are not lost."""
        return [device for device in self._devices if device not in self._lost]

    def connect(self, check_stop: Callable[[], None]) -> None:
        """Raises as `Robot.check_stop`."""
        for device in self._devices:
            device.check_stop = check_stop
            self._try(device, device.connect)

    def connect_lost(self, check_stop: Callable[[], None]) -> None:
        """Call it while the robot stands still: connecting may block. Raises as `Robot.check_stop`."""
        for device in [each for each in self._lost if each not in self._slow]:
            device.check_stop, started_s, kind = check_stop, time.monotonic(), type(device).__name__
            try:
                device.connect()
            except HardwareLost as error:
                log.debug("teleoperator.still_lost %s", error)
                if time.monotonic() - started_s > SLOW_CONNECT_S:
                    log.warning("teleoperator.given_up %s: a try delays the reset; connected at the next start", kind)
                    self._slow.append(device)
                continue
            log.warning("teleoperator.returned %s: release it once, then it drives", kind)
            self._lost.remove(device)
            self._engaged_s[device] = time.monotonic()

    def read(self) -> TeleopInput | None:
        """Returns the input of the first device that is engaged or hands back."""
        for device in self.present:
            if (reading := self._try(device, device.read)) is None:
                continue
            if not (reading.engaged or reading.hands_back):
                if time.monotonic() - self._engaged_s.get(device, -math.inf) >= device.release_s:
                    self._engaged_s.pop(device, None)
            elif device in self._engaged_s:
                self._engaged_s[device] = time.monotonic()
            else:
                return reading
        return None

    def _try(self, device: Teleoperator, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except HardwareLost as error:
            log.warning("teleoperator.lost %s", error)
        self._lost.append(device)
        try:
            device.close()
        except (HalError, OSError) as error:
            log.warning("teleoperator.close_failed %s", error)
        return None


class RobotEnvironment:
    """Robot, cameras, task and safety kernel. One thread calls it; `close` when done.

    `reset`, `step` and `hold` raise SpecError if an observation or a reward is not finite; it names the source.

    Cameras are read at every `frame_stride`-th step, and in each control period while `real_time` is set. They are also
    read after a step that ends the task, reaches its `max_steps` or is refused: rewards judge the last pictures.

    Attributes:
        real_time: an action is observed at the end of its control period, after `wait_for_period_end`.
        wait_for_period_end: blocks until the control period is over; the owner of the environment sets it.
        wait_for_command: blocks until `step` may apply its command, about a control period after the last command. The
            owner sets it, for `real_time`.
        on_robot_connected: called after the robot is connected, before its cameras and input devices.
    """

    def __init__(
        self,
        robot: Robot,
        task: Task,
        kernel: SafetyKernel,
        cameras: Sequence[Camera] = (),
        *,
        frame_stride: int = 1,
        teleoperators: Sequence[Teleoperator] = (),
        name: str = "",
    ) -> None:
        """`name`: of the robot, for messages; default: its model."""
        self.robot, self.task, self.kernel, self.cameras = robot, task, kernel, tuple(cameras)
        self._name = name or robot.spec.model
        self.real_time = False
        self.wait_for_period_end: Callable[[], None] = lambda: None
        self.wait_for_command: Callable[[], None] = lambda: None
        self.on_robot_connected: Callable[[], None] = lambda: None
        self._input_devices = _InputDevices(teleoperators)
        self._connected = False
        self._frame_stride = frame_stride
        self._steps = 0
        self._captured_ns: dict[str, int] = {}  # by camera, of the newest frame in a time step
        self._newest: Observation | None = None
        self._logged_refusal = SafetyReason(0)

    @property
    def spec(self) -> RobotSpec:
        return self.robot.spec

    @property
    def episode_task(self) -> TaskInfo:
        return TaskInfo.of(self.task)

    def connect(self) -> None:
        """Connects the robot, then its cameras and input devices. A missing input device is left out until a
        reset finds it. Under a latched e-stop the robot is stopped first.

        `Robot.check_stop` is called while robot and cameras connect; its errors pass through.

        Raises:
            HardwareLost: the robot or a camera is missing, or the robot's own stop button is pressed, which latches
                too.
        """
        for camera in self.cameras:
            camera.preload()
        try:
            self.robot.connect()
        except EmergencyStopped as error:
            self.latch_own_stop(error)
            raise HardwareLost(f"{error}: release it, then re-arm at the console") from error
        self._connected = True
        self.on_robot_connected()
        if self.kernel.latched_estop is not None:
            self.robot.stop(StopLevel.SAFE)
            self._acknowledge()
        for camera in self.cameras:
            self.robot.check_stop()
            camera.check_stop = self.robot.check_stop
            camera.connect()
        self._input_devices.connect(self.robot.check_stop)
        self.kernel.reset()
        self._newest = self.robot.observe()

    def close(self) -> None:
        """Closes the robot first, then every device, even if one fails; then raises the error of the failed one."""
        with contextlib.ExitStack() as last_in_first_out:
            for device in self._input_devices.present:
                last_in_first_out.callback(device.close)
            for camera in self.cameras:
                last_in_first_out.callback(camera.close)
            last_in_first_out.callback(self.robot.close)

    def reset(self, seed: int) -> TimeStep:
        """Moves robot and scene to an initial state, then connects lost input devices that have returned.

        An e-stop, latched or new, leaves robot and scene in place.
        """
        self.stop_if_latched()
        if self.kernel.latched_estop is None:
            try:
                self.task.reset(self.robot, np.random.default_rng(seed))
                self._input_devices.connect_lost(self.robot.check_stop)
            except EmergencyStopped as error:
                self._stop_for(error)
        self.kernel.reset()
        self._steps = 0
        self._captured_ns.clear()
        return self._time_step(applied=None, reasons=SafetyReason(0), t_command_ns=0, evaluate=False)

    def step(self, action: Array) -> TimeStep:
        """See `Environment`. The e-stop latches if no action may move the robot at the first step after a reset: a
        person must bring it back, and has time for it until then. A step that keeps the arm at rest latches nothing:
        it ends an episode while a person still prepares the scene.
        """
        if self._newest is None:
            raise RuntimeError("the environment is not connected: call connect() first")
        if self.real_time:
            self.wait_for_command()
        self.stop_if_latched()
        if self.kernel.is_stale(self._newest):  # this process was delayed; the robot may be in order
            self._observe()
        decision = self.kernel.filter(action, self._newest)
        if decision.applied is None:
            if self._steps == 0 and decision.reasons & PLACE_REASONS and not self._rests(action, self._newest):
                return self._stop_step(
                    EmergencyStopped(
                        f"no action may move {self._name} after its reset ({str(decision.reasons.name).lower()}: "
                        f"{decision.text}): a person must move it back, or correct its limits"
                    )
                )
            if decision.reasons != self._logged_refusal:  # once, not in each control period
                log.warning("safety.refused reasons=%s %s", decision.reasons, decision.text)
            self._logged_refusal = decision.reasons
            self.robot.stop(decision.stop or StopLevel.HOLD)
            return self._time_step(None, decision.reasons, time.monotonic_ns(), evaluate=True)
        try:
            applied = np.asarray(self.robot.command(decision.applied), np.float32)
        except EmergencyStopped as error:
            return self._stop_step(error)
        self._logged_refusal = SafetyReason(0)
        self.kernel.set_applied(applied)
        return self._time_step(applied, decision.reasons, time.monotonic_ns(), evaluate=True)

    def _rests(self, action: Array, observation: Observation) -> bool:
        """Whether a valid `action` keeps the robot at `observation`, apart from a gripper."""
        if not self.spec.neutral:
            return False
        rest, moved = self.spec.rest_action(observation.arrays), np.arange(len(action)) != self.spec.gripper
        return bool((action == rest)[moved].all())

    def _stop_step(self, error: EmergencyStopped) -> TimeStep:
        self._stop_for(error)
        return self._time_step(None, SafetyReason.ESTOP, time.monotonic_ns(), evaluate=True)

    def _stop_for(self, error: EmergencyStopped) -> None:
        """Latches a stop of the robot's own button. After its release an operator re-arms at the console."""
        try:
            self.robot.stop(StopLevel.SAFE)
        finally:
            self.latch_own_stop(error)

    def latch_own_stop(self, error: HalError) -> None:
        """Latches a stop that a person made at the robot itself.

        Every method may raise StoppedAtRobot. The caller then latches it, before it connects again.
        """
        self.kernel.emergency_stop(f"the robot {self.spec.model}", str(error))

    def hold(self) -> TimeStep:
        self.stop_if_latched()
        decision = self.kernel.hold()
        self.robot.stop(decision.stop or StopLevel.HOLD)
        return self._time_step(applied=None, reasons=decision.reasons, t_command_ns=0, evaluate=False)

    def emergency_stop(self, person: str) -> None:
        """Stops the robot and then latches the e-stop, as the latch may wait for a busy disk.

        Raises:
            HardwareLost: the robot is lost; the e-stop is latched.
        """
        try:
            self.robot.stop(StopLevel.SAFE)
        finally:
            self.kernel.emergency_stop(person)
        self._acknowledge()
        self.run_watchdog()

    def stop_if_latched(self) -> None:
        """Stops the robot if another program pressed its e-stop, and acknowledges the press. A robot that is not
        connected yet is stopped once it is.

        Raises:
            HardwareLost: the robot is lost; the e-stop is latched.
        """
        self.kernel.retry_latch()
        if self.kernel.has_new_press():
            try:
                if self._connected:
                    self.robot.stop(StopLevel.SAFE)
            finally:
                self.kernel.load_latched_estop()
            self._acknowledge()

    def load_latch(self) -> None:
        """Stops the robot if an e-stop is latched in any of its files, and acknowledges the press.

        Raises:
            HardwareLost: the robot is lost; the e-stop is latched.
        """
        self.kernel.load_latched_estop()
        if self.kernel.latched_estop is not None:
            self.robot.stop(StopLevel.SAFE)
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.kernel.acknowledge(f"pid {os.getpid()}")

    def check_stop(self) -> None:
        """For the control periods of a motion by the robot itself, see `hal.robot.Robot.check_stop`.

        A robot that is not connected yet cannot be stopped.

        Raises:
            EmergencyStopped: the e-stop is pressed, and the robot is stopping.
            HardwareLost: the robot is lost.
        """
        self.stop_if_latched()
        if not self._connected:
            return
        if (stopped := self.kernel.latched_estop) is not None:
            raise EmergencyStopped(f"the e-stop was pressed by {stopped.by}")

    def run_watchdog(self) -> None:
        """Runs one control period without a command: the robot holds or stops safely, as the kernel decides.

        Raises:
            HardwareLost: the robot is lost.
        """
        self.stop_if_latched()
        decision = self.kernel.check_watchdog()
        self.robot.stop(decision.stop if decision and decision.stop else StopLevel.HOLD)
        self._observe()

    def _observe(self) -> None:
        try:
            self._newest = self.robot.observe()
        except StaleObservation as error:  # the kernel refuses to act on the old one, which is logged
            log.debug("environment.stale_observation %s", error)

    def _time_step(
        self, applied: Array | None, reasons: SafetyReason, t_command_ns: int, *, evaluate: bool
    ) -> TimeStep:
        if self.real_time:
            self.wait_for_period_end()
        observation = self.robot.observe()
        try:
            self.spec.validate(observation.arrays)
        except SpecError as error:
            raise SpecError(f"robot {self._name}: {error}") from error
        self._newest = observation
        outcome = self._evaluate(observation) if evaluate else NO_OUTCOME
        self._steps += evaluate
        ends = applied is None or outcome.terminated or outcome.truncated or self._steps >= self.task.max_steps
        is_due = self.real_time or self._steps % self._frame_stride == 0 or (evaluate and ends)
        estop = self.kernel.latched_estop
        return TimeStep(
            observation=observation.arrays,
            frames=self._frames() if is_due else {},
            t_capture_ns=observation.t_capture_ns,
            applied=applied,
            safety_reasons=int(reasons),
            t_command_ns=t_command_ns,
            outcome=outcome,
            held_periods=0,
            stopped=estop is not None,
            local_input=self._input_devices.read(),
            stopped_by="" if estop is None else estop.by,
            stopped_why="" if estop is None else estop.why,
        )

    def _evaluate(self, observation: Observation) -> TaskOutcome:
        outcome = self.task.evaluate(observation)
        if not math.isfinite(outcome.reward):
            raise SpecError(f"robot {self._name}: the task {self.task.name} gives the reward {outcome.reward}")
        return outcome

    def _frames(self) -> dict[str, CameraFrame]:
        found: dict[str, CameraFrame] = {}
        for camera in self.cameras:
            frame, name = camera.read(), camera.spec.name
            if frame.image.shape != camera.spec.shape or frame.image.dtype != np.uint8:
                found_image = f"{frame.image.dtype} {frame.image.shape}"
                raise HardwareLost(f"camera {name} gives {found_image}; its spec has uint8 {camera.spec.shape}")
            if frame.t_capture_ns != self._captured_ns.get(name):
                self._captured_ns[name] = frame.t_capture_ns
                found[name] = frame
        return found
