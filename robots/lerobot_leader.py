"""LeRobot's teleoperators, such as a leader arm, as input devices: the leader's pose is the commanded action."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hal.driver import RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError
from hal.spec import Array, RobotSpec
from hal.teleoperator import Teleoperator, TeleopInput
from robots.device_lock import DeviceLock, device_lock_names
from robots.device_thread import DeviceThread
from robots.lerobot_features import FeatureConfig, LerobotFeatures
from robots.lerobot_plugins import call_with_retries, make_device

CONNECT_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaderConfig:
    """Attributes:
    type, settings: the teleoperator's name and settings, as on LeRobot's command line.
    features: units by name or pattern, as for the robot.
    moved: the share of an element's range above which a change counts as motion, not noise.
    let_go_s: a leader without motion for this time counts as released; it has no other dead-man switch.
    answer_within_s: timeout of a call, after which the device is lost.
    """

    type: str
    settings: dict[str, Any] = field(default_factory=dict)
    features: dict[str, FeatureConfig] = field(default_factory=dict)
    moved: float = 0.01
    let_go_s: float = 2.0
    answer_within_s: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.moved < 1:
            raise ValueError(f"moved is {self.moved:g}; it must be in (0, 1)")
        if not (self.let_go_s > 0 and self.answer_within_s > 0):
            raise ValueError("let_go_s and answer_within_s must be above 0")


class LerobotLeader(Teleoperator):
    """A LeRobot teleoperator whose action has the robot's elements, matched by name."""

    def __init__(self, config: LeaderConfig, spec: RobotSpec, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SpecError: no such plugin, an unknown unit, or elements of the robot's action that are missing."""
        self.config, self._spec, self._clock = config, spec, clock
        self.device = make_device("teleoperator", config.type, config.settings)
        self._features = LerobotFeatures(self.device.action_features, config.features, self.device)
        missing = [name for name in spec.action.labels if name not in self._features.names]
        if missing:
            raise SpecError(f"LeRobot's {config.type} lacks {missing}, which the action of {spec.model} needs")
        self._order = [self._features.index(name) for name in spec.action.labels]
        units = tuple(self._features.features[index].unit for index in self._order)
        if units != spec.action.units:
            raise SpecError(
                f"{config.type} has the units {units}, {spec.model} has {spec.action.units}; set `features`"
            )
        self._low, self._high = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
        self._device_lock = DeviceLock(*device_lock_names(config.settings))
        self._thread: DeviceThread | None = None

    def connect(self) -> None:
        if self._thread is not None:
            return
        self._device_lock.acquire()
        self._thread = DeviceThread(f"LeRobot's {self.config.type}")
        self._patience_s = CONNECT_TIMEOUT_S
        try:
            self._thread.call("connecting", lambda: self.device.connect(calibrate=False), CONNECT_TIMEOUT_S)
            calibrated = self._thread.call(
                "checking the calibration", lambda: self.device.is_calibrated, CONNECT_TIMEOUT_S
            )
            if not calibrated:
                raise HardwareLost(f"{self.config.type} is not calibrated; run lerobot-calibrate with the same id")
        except HardwareLost:
            self.close()
            raise
        self._resting: Array = self._pose()
        self._moved_s = -np.inf

    def read(self) -> TeleopInput:
        """See `hal.teleoperator.Teleoperator`; `target` is the leader's pose within the action's bounds."""
        pose = self._pose()
        if (np.abs(pose - self._resting) > self.config.moved * (self._high - self._low)).any():
            self._resting, self._moved_s = pose, self._clock()
        engaged = bool(self._clock() - self._moved_s < self.config.let_go_s)
        return TeleopInput(np.zeros(len(pose), np.float32), engaged, pose)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.call("disconnecting", self._disconnect, self._patience_s)
        except HardwareLost as error:
            log.warning("lerobot.disconnect %s", error)
        thread.close()
        self._device_lock.release()

    def _disconnect(self) -> None:
        if self.device.is_connected:
            self.device.disconnect()

    def _pose(self) -> Array:
        if self._thread is None:
            raise HardwareLost(f"LeRobot's {self.config.type} is not connected")
        try:
            call = partial(call_with_retries, self.config.type, self.device.get_action)
            raw = self._thread.call("reading", call, self.config.answer_within_s)
        except HardwareLost:
            self._patience_s = self.config.answer_within_s  # from now on `close` must not block the robot's loop
            raise
        pose: Array = np.clip(self._features.to_vector(raw)[self._order], self._low, self._high)
        return pose


def make_teleoperator(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `LeaderConfig`."""
    return LerobotLeader(read_options(LeaderConfig, request), spec)
