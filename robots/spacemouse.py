"""A SpaceMouse on the robot's computer, with pyspacemouse's device table (extra ``devices``).

The driver reads the kernel's raw reports (``/dev/hidraw*``), for which its user needs permission. A released cap
springs back, which is the dead-man switch; a `hold` button can be required in addition. A deflected cap sends a report
every 8 ms, or 16 ms if wireless. Without reports for `silent_s`, for example after a radio dropout, the cap counts as
released.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hal.driver import RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError, install_hint
from hal.spec import RobotSpec
from hal.teleoperator import Teleoperator, TeleopInput
from robots.device_lock import DeviceLock
from robots.input_bindings import InputBindings, motion_labels, pair_in_order

AXES = ("x", "y", "z", "roll", "pitch", "yaw")
_HIDRAW_FOLDER = Path("/sys/class/hidraw")
_MAX_REPORTS_PER_READ = 256  # per reading, so that a flooding device cannot block


@dataclass(frozen=True)
class SpaceMouseConfig:
    """Attributes:
    device: e.g. ``/dev/hidraw2``; empty for the first SpaceMouse.
    model: pyspacemouse's name; needed only for a `device` that the kernel does not describe.
    axes: ``x`` forward, ``y`` left, ``z`` up, ``roll``, ``pitch``, ``yaw`` to action element; a minus sign before the
    element inverts it. Default: the order of the action's elements.
    open, close: buttons of the gripper.
    hold: a button that must be held; -1 for none: deflecting the cap is enough.
    dead_zone: share of an axis's range that counts as 0.
    silent_s: a deflection without a new report for this time counts as released.
    """

    device: str = ""
    model: str = ""
    axes: dict[str, str] = field(default_factory=dict)
    open: int = 0
    close: int = 1
    hold: int = -1
    dead_zone: float = 0.1
    silent_s: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.dead_zone < 1:
            raise ValueError(f"dead_zone is {self.dead_zone:g}; it must be in [0, 1)")


class HidRawDevice:
    """The kernel's raw reports, with the interface that `pyspacemouse.device.SpaceMouseDevice` expects of a device."""

    product_string = manufacturer_string = serial_number = ""
    release_number = 0

    def __init__(self, path: str) -> None:
        self._path, self._file = path, -1

    def open(self) -> None:
        self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, size: int) -> bytes:
        """Read one report; empty if there is none. Raises HardwareLost."""
        try:
            report = os.read(self._file, size)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise HardwareLost(f"the SpaceMouse was disconnected: {error.strerror}") from error
        if not report:
            raise HardwareLost("the SpaceMouse was disconnected")
        return report

    def close(self) -> None:
        os.close(self._file)


class SpaceMouse(Teleoperator):
    def __init__(self, config: SpaceMouseConfig, spec: RobotSpec, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SpecError for an unknown axis or element."""
        self.config, self._clock = config, clock
        self._bindings = InputBindings(config.axes or pair_in_order(AXES, motion_labels(spec)), AXES, spec)
        self._gripper = spec.gripper
        self._device: Any = None
        self._device_lock = DeviceLock()
        self._report_stamp, self._report_s = -1.0, 0.0  # last report: pyspacemouse's time, and its arrival on our clock

    def connect(self) -> None:
        if self._device is not None:
            return
        path, model = self._find()
        from pyspacemouse.config_helpers import apply_axis_convention
        from pyspacemouse.device import SpaceMouseDevice
        from pyspacemouse.types import AxisConvention

        device = SpaceMouseDevice(apply_axis_convention(model, AxisConvention.ROS), HidRawDevice(path))
        self._device_lock = DeviceLock(path)
        self._device_lock.acquire()
        try:
            device.open()
        except OSError as error:
            self._device_lock.release()
            raise HardwareLost(f"SpaceMouse {path}: {error.strerror}") from error
        self._device = device

    def read(self) -> TeleopInput:
        if self._device is None:
            raise HardwareLost("the SpaceMouse is not connected")
        state, before = self._device.read(), -1.0
        for _ in range(_MAX_REPORTS_PER_READ):
            if state.t == before:
                break
            before, state = state.t, self._device.read()
        if state.t != self._report_stamp:
            self._report_stamp, self._report_s = state.t, self._clock()
        twist = self._bindings.twist({name: getattr(state, name) for name in AXES}, self.config.dead_zone)
        if twist.any() and self._clock() - self._report_s > self.config.silent_s:
            return TeleopInput(np.zeros_like(twist), False)
        pressed = [bool(each) for each in state.buttons]
        opening, closing, hold = (
            0 <= number < len(pressed) and pressed[number]
            for number in (self.config.open, self.config.close, self.config.hold)
        )
        if self._gripper >= 0 and opening != closing:
            twist[self._gripper] = 1 if opening else -1
        return TeleopInput(twist, bool(twist.any()) if self.config.hold < 0 else hold)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None
            self._device_lock.release()

    def _find(self) -> tuple[str, Any]:
        """Find the device's path, and pyspacemouse's description of it. Raises HardwareLost, SpecError."""
        try:
            from pyspacemouse.loader import get_device_specs
        except ImportError as error:
            raise HardwareLost(
                f"pyspacemouse cannot be imported ({error}); install it with: {install_hint('devices')}"
            ) from error
        models = get_device_specs()
        if self.config.device and self.config.model:
            if self.config.model not in models:
                raise SpecError(f"no SpaceMouse model {self.config.model!r}; choose one of {sorted(models)}")
            return self.config.device, models[self.config.model]
        by_number = {(each.vendor_id, each.product_id): each for each in models.values()}
        for path, numbers in _hid_devices():
            if numbers in by_number and self.config.device in ("", path):
                return path, by_number[numbers]
        raise HardwareLost(f"no SpaceMouse {self.config.device or 'is connected'}; connected devices: {_hid_devices()}")


def _hid_devices() -> list[tuple[str, tuple[int, int]]]:
    """List the raw devices with their vendor and product numbers."""
    found = []
    for entry in sorted(_HIDRAW_FOLDER.glob("*/device/uevent")):
        try:
            lines = dict(line.partition("=")[::2] for line in entry.read_text().splitlines())
        except OSError:  # unplugged meanwhile
            continue
        _, vendor, product = lines.get("HID_ID", "0:0:0").split(":")
        found.append((f"/dev/{entry.parts[-3]}", (int(vendor, 16), int(product, 16))))
    return found


def make_teleoperator(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `SpaceMouseConfig`."""
    return SpaceMouse(read_options(SpaceMouseConfig, request), spec)
