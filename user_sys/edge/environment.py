"""The driver: robot, cameras, task and safety kernel in one place, apart from policy, network and learner.

`RobotEnvironment` is what a loop talks to, and the only caller of a robot. It runs in the driver process
(`driver_process`), where a session reaches it through `driver_client.RemoteDriver`; recording and evaluation on one
machine call it directly. Both speak `Environment`, so one loop serves all three.

Why a command came too late: what the session did in the time from an observation to its command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from hal.camera import Camera, CameraFrame
from hal.errors import EmergencyStopped, HalError, HardwareLost, StaleObservation
from hal.robot import Observation, Robot, StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import Array
from hal.task import Task, TaskOutcome
from hal.teleoperator import Teleoperator, TeleopInput

log = logging.getLogger(__name__)

T = TypeVar("T")

NO_OUTCOME = TaskOutcome(reward=0.0, terminated=False)


@dataclass(frozen=True)
class TimeStep:
    """What one control period brought.

    Attributes:
        observation: the robot's features after the period (no pictures).
        frames: by camera, only what no tick before had; after a reset the newest of each camera.
        t_capture_ns: when the features were sensed, by the monotonic clock of the edge; each frame has its own time.
        applied: float32 (a,), the action that was applied in the period; None where none was (reset, hold).
        safety_reasons: bit set of `hal.safety.Reason`: why applied differs from what was asked.
        t_command_ns: when it was applied; 0 where nothing was.
        outcome: the task's verdict on the period.
        held_periods: control periods since the tick before in which the watchdog held the robot.
        stopped: the e-stop is latched.
        stopped_by: who pressed it; empty if it is not latched.
        local_input: what a person does at an input device of the robot's own computer; None while no hand is on one.
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


class Environment(Protocol):
    """What the episode loop needs of a robot, near or far."""

    def reset(self, seed: int) -> TimeStep:
        """Brings robot and scene to a start drawn from `seed`. Blocks while the robot moves there."""

    def step(self, action: Array) -> TimeStep:
        """One control period with `action`, as far as the safety kernel lets it through."""

    def hold(self) -> TimeStep:
        """One control period in which the robot keeps its pose."""


class RobotEnvironment:
    """Robot, cameras, task and safety kernel. One thread calls it; `close` when done.

    Cameras are read in every `frame_stride`-th control period, and in each while `real_time` is set; a tick has the
    pictures that none before it had, and after a reset the newest of each.

    Attributes:
        real_time: a command is observed at the end of its control period, for which `wait_for_period_end` waits.
        wait_for_period_end: blocks until the control period is over; whoever serves the driver sets it.
        on_robot_connected: called between the robot's connection and those of cameras and input devices.
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
    ) -> None:
        self.robot, self.task, self.kernel, self.cameras = robot, task, kernel, tuple(cameras)
        self.spec = robot.spec
        self.real_time = False
        self.wait_for_period_end: Callable[[], None] = lambda: None
        self.on_robot_connected: Callable[[], None] = lambda: None
        self._teleoperators = list(teleoperators)
        self._connected = False
        self._frame_stride = frame_stride
        self._periods = 0
        self._pictured_ns: dict[str, int] = {}  # by camera, the newest picture that a tick had
        self._newest: Observation | None = None
        self._refused = SafetyReason(0)

    def connect(self) -> None:
        """Connects the robot, then its cameras and input devices; a missing input device is left out until the next
        start. Under a latched e-stop the robot is stopped before anything else takes its time.

        `Robot.attend` is called while robot and cameras are waited for; what it raises passes through.

        Raises:
            HardwareLost: the robot or a camera is not there, or a stop button of its own is pressed: that latches too.
        """
        for camera in self.cameras:
            camera.preload()
        try:
            self.robot.connect()
        except EmergencyStopped as error:
            self.kernel.emergency_stop(f"the robot {self.spec.model}", str(error))
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
        for device in list(self._teleoperators):
            self._try(device, device.connect)
        self.kernel.reset()
        self._newest = self.robot.observe()

    def close(self) -> None:
        """The robot first, and all of them whatever becomes of one; then raises what the devices raised."""
        with contextlib.ExitStack() as last_in_first_out:
            for device in self._teleoperators:
                last_in_first_out.callback(device.close)
            for camera in self.cameras:
                last_in_first_out.callback(camera.close)
            last_in_first_out.callback(self.robot.close)

    def reset(self, seed: int) -> TimeStep:
        """Brings robot and scene to a start; an e-stop meanwhile leaves them where they are, as a latched one does."""
        self.stop_if_latched()
        if self.kernel.latched_estop is None:
            try:
                self.task.reset(self.robot, np.random.default_rng(seed))
            except EmergencyStopped as error:
                self._stop_for(error)
        self.kernel.reset()
        self._periods = 0
        self._pictured_ns.clear()
        return self._tick(applied=None, reasons=SafetyReason(0), t_command_ns=0, judged=False)

    def step(self, action: Array) -> TimeStep:
        if self._newest is None:
            raise RuntimeError("the driver is not connected")
        self.stop_if_latched()
        if self.kernel.is_stale(self._newest):  # this process was kept from looking; the robot may be in order
            self._look()
        verdict = self.kernel.filter(action, self._newest)
        if verdict.applied is None:
            if verdict.reasons != self._refused:  # not in each control period for as long as it lasts
                log.warning("safety.refused reasons=%s %s", verdict.reasons, verdict.text)
            self._refused = verdict.reasons
            self.robot.stop(verdict.stop or StopLevel.HOLD)
            return self._tick(None, verdict.reasons, time.monotonic_ns(), judged=True)
        try:
            applied = np.asarray(self.robot.command(verdict.applied), np.float32)
        except EmergencyStopped as error:
            self._stop_for(error)
            return self._tick(None, SafetyReason.ESTOP, time.monotonic_ns(), judged=True)
        self._refused = SafetyReason(0)
        self.kernel.set_applied(applied)
        return self._tick(applied, verdict.reasons, time.monotonic_ns(), judged=True)

    def _stop_for(self, error: EmergencyStopped) -> None:
        """Latches a stop that the robot tells of, as of a button of its own: once released, a person re-arms here."""
        try:
            self.robot.stop(StopLevel.SAFE)
        finally:
            self.kernel.emergency_stop(f"the robot {self.spec.model}", str(error))

    def hold(self) -> TimeStep:
        self.stop_if_latched()
        verdict = self.kernel.hold()
        self.robot.stop(verdict.stop or StopLevel.HOLD)
        return self._tick(applied=None, reasons=verdict.reasons, t_command_ns=0, judged=False)

    def emergency_stop(self, person: str) -> None:
        """Stops the robot and latches the e-stop, in that order: the latch may wait for a disk that is busy.

        Raises:
            HardwareLost: the robot went away; the e-stop is latched all the same.
        """
        try:
            self.robot.stop(StopLevel.SAFE)
        finally:
            self.kernel.emergency_stop(person)
        self._acknowledge()
        self.run_watchdog()

    def stop_if_latched(self) -> None:
        """Stops the robot if its e-stop was pressed elsewhere, by a program that does not drive it, and acknowledges
        that. A robot that is not connected yet is stopped once it is.

        Raises:
            HardwareLost: the robot went away; the e-stop is latched all the same.
        """
        if self.kernel.has_new_press():
            try:
                if self._connected:
                    self.robot.stop(StopLevel.SAFE)
            finally:
                self.kernel.load_latched_estop()
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.kernel.acknowledge(f"pid {os.getpid()}")

    def check_stop(self) -> None:
        """For the periods of a motion that the robot makes by itself, see `hal.robot.Robot.attend`. A robot that is not
        connected yet cannot be stopped.

        Raises:
            EmergencyStopped: the e-stop is pressed, and the robot was told to stop.
            HardwareLost: the robot went away.
        """
        self.stop_if_latched()
        if not self._connected:
            return
        if (stopped := self.kernel.latched_estop) is not None:
            raise EmergencyStopped(f"the e-stop was pressed by {stopped.by}")

    def run_watchdog(self) -> None:
        """One control period without a command: the robot holds or safe-stops, as the kernel says.

        Raises:
            HardwareLost: the robot went away.
        """
        self.stop_if_latched()
        verdict = self.kernel.check_watchdog()
        self.robot.stop(verdict.stop if verdict and verdict.stop else StopLevel.HOLD)
        self._look()

    def _look(self) -> None:
        try:
            self._newest = self.robot.observe()
        except StaleObservation as error:  # the kernel refuses to act upon the old one, and says so
            log.debug("driver.stale %s", error)

    def _tick(self, applied: Array | None, reasons: SafetyReason, t_command_ns: int, *, judged: bool) -> TimeStep:
        if self.real_time:
            self.wait_for_period_end()
        observation = self.robot.observe()
        self.spec.validate(observation.arrays)
        self._newest = observation
        return TimeStep(
            observation=observation.arrays,
            frames=self._frames(),
            t_capture_ns=observation.t_capture_ns,
            applied=applied,
            safety_reasons=int(reasons),
            t_command_ns=t_command_ns,
            outcome=self.task.evaluate(observation) if judged else NO_OUTCOME,
            held_periods=0,
            stopped=self.kernel.latched_estop is not None,
            local_input=self._hand(),
            stopped_by="" if self.kernel.latched_estop is None else self.kernel.latched_estop.by,
        )

    def _hand(self) -> TeleopInput | None:
        """The input of the first device that has a hand on it."""
        for device in list(self._teleoperators):
            reading = self._try(device, device.read)
            if reading is not None and reading.engaged:
                return reading
        return None

    def _try(self, device: Teleoperator, call: Callable[[], T]) -> T | None:
        """A robot goes on without an input device that is lost."""
        try:
            return call()
        except HardwareLost as error:
            log.warning("teleoperator.lost %s", error)
        self._teleoperators.remove(device)
        try:
            device.close()
        except (HalError, OSError) as error:
            log.warning("teleoperator.not_closed %s", error)
        return None

    def _frames(self) -> dict[str, CameraFrame]:
        due = self.real_time or self._periods % self._frame_stride == 0
        self._periods += 1
        found: dict[str, CameraFrame] = {}
        for camera in self.cameras if due else ():
            frame, name = camera.read(), camera.spec.name
            if frame.image.shape != camera.spec.shape or frame.image.dtype != np.uint8:
                seen = f"{frame.image.dtype} {frame.image.shape}"
                raise HardwareLost(f"camera {name} shows {seen}; its spec says uint8 {camera.spec.shape}")
            if frame.t_capture_ns != self._pictured_ns.get(name):
                self._pictured_ns[name] = frame.t_capture_ns
                found[name] = frame
        return found


_RUSAGE_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # of the thread on Linux


@dataclass(frozen=True)
class _ThreadUsage:
    """What the calling thread has used until now."""

    at_ns: int
    processor_ns: int
    page_faults: int
    preemptions: int


class LateCommandLogger:
    """A `Environment` that passes orders on to another. One thread uses it.

    After each command before which the watchdog held the robot it logs ``command.late``, with the parts of the time
    from the observation to the command: until the session had the observation, computing, waiting for the processor or
    for others, and until the driver applied the command.
    """

    def __init__(self, driver: Environment, robot: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._driver, self._robot, self._clock = driver, robot, clock
        self._seen: tuple[TimeStep, _ThreadUsage] | None = None

    def reset(self, seed: int) -> TimeStep:
        return self._saw(self._driver.reset(seed))

    def hold(self) -> TimeStep:
        return self._saw(self._driver.hold())

    def step(self, action: Array) -> TimeStep:
        sent, before = self._now(), self._seen
        after = self._driver.step(action)
        if after.held_periods and before is not None:
            self._tell(*before, sent, after.t_command_ns or self._clock())
        return self._saw(after)

    def _saw(self, tick: TimeStep) -> TimeStep:
        self._seen = tick, self._now()
        return tick

    def _now(self) -> _ThreadUsage:
        used = resource.getrusage(_RUSAGE_THREAD)
        return _ThreadUsage(self._clock(), time.thread_time_ns(), used.ru_minflt + used.ru_majflt, used.ru_nivcsw)

    def _tell(self, tick: TimeStep, seen: _ThreadUsage, sent: _ThreadUsage, applied_ns: int) -> None:
        computing_ns = sent.processor_ns - seen.processor_ns
        log.warning(
            "command.late robot=%s: %.1f ms after its observation: %.1f until the session had that, %.1f computing, "
            "%.1f waiting (%d page faults, preempted %d times), %.1f until the driver applied it",
            self._robot,
            (applied_ns - tick.t_capture_ns) / 1e6,
            (seen.at_ns - tick.t_capture_ns) / 1e6,
            computing_ns / 1e6,
            (sent.at_ns - seen.at_ns - computing_ns) / 1e6,
            sent.page_faults - seen.page_faults,
            sent.preemptions - seen.preemptions,
            (applied_ns - sent.at_ns) / 1e6,
        )
