"""A SpaceMouse on the robot's own computer; the extra ``devices`` brings pyspacemouse's table of devices.

Its reports are read from the kernel (``/dev/hidraw*``), which whoever runs the driver must be allowed to read. A cap
that is let go springs back: that is its dead-man switch, and a `hold` button can be asked for besides. A deflected cap
is reported every 8 ms, or 16 by a wireless mouse; one of which nothing more is heard, as when that drops out, counts as
let go.
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
_MAX_REPORTS_PER_READ = 256  # in one reading: a device that floods is not listened to for ever


@dataclass(frozen=True)
class SpaceMouseConfig:
    """Attributes:
    device: e.g. ``/dev/hidraw2``; empty: the first SpaceMouse.
    model: as pyspacemouse calls it; needed only with a `device` that the kernel does not describe.
    axes: ``x`` forward, ``y`` left, ``z`` up, ``roll``, ``pitch``, ``yaw`` to action element, a minus sign before the
        element for the other way; by default in the order of the action's elements.
    open, close: buttons of the gripper.
    hold: a button that must be held; -1: none, the deflected cap is enough.
    dead_zone: the share of an axis's way that counts as none.
    silent_s: a deflection that was not reported again for so long counts as let go.
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
            raise ValueError(f"dead_zone is {self.dead_zone:g}; it is a share in [0, 1)")


class HidRawDevice:
    """The kernel's raw reports, as `pyspacemouse.device.SpaceMouseDevice` asks a device for them."""

    product_string = manufacturer_string = serial_number = ""
    release_number = 0

    def __init__(self, path: str) -> None:
        self._path, self._file = path, -1

    def open(self) -> None:
        self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, size: int) -> bytes:
        """One report; empty where there is none. Raises HardwareLost."""
        try:
            report = os.read(self._file, size)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise HardwareLost(f"the SpaceMouse went away: {error.strerror}") from error
        if not report:
            raise HardwareLost("the SpaceMouse went away")
        return report

    def close(self) -> None:
        os.close(self._file)


class SpaceMouse(Teleoperator):
    def __init__(self, config: SpaceMouseConfig, spec: RobotSpec, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SpecError for an axis or an element that there is not."""
        self.config, self._clock = config, clock
        self._bindings = InputBindings(config.axes or pair_in_order(AXES, motion_labels(spec)), AXES, spec)
        self._gripper = spec.gripper
        self._device: Any = None
        self._alone = DeviceLock()
        self._newest, self._heard_s = -1.0, 0.0  # report, by pyspacemouse's time and by ours

    def connect(self) -> None:
        if self._device is not None:
            return
        path, model = self._find()
        from pyspacemouse.config_helpers import apply_axis_convention
        from pyspacemouse.device import SpaceMouseDevice
        from pyspacemouse.types import AxisConvention

        device = SpaceMouseDevice(apply_axis_convention(model, AxisConvention.ROS), HidRawDevice(path))
        self._alone = DeviceLock(path)
        self._alone.acquire()
        try:
            device.open()
        except OSError as error:
            self._alone.release()
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
        if state.t != self._newest:
            self._newest, self._heard_s = state.t, self._clock()
        twist = self._bindings.twist({name: getattr(state, name) for name in AXES}, self.config.dead_zone)
        if twist.any() and self._clock() - self._heard_s > self.config.silent_s:
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
            self._alone.release()

    def _find(self) -> tuple[str, Any]:
        """Where the device is, and pyspacemouse's description of it. Raises HardwareLost, SpecError."""
        try:
            from pyspacemouse.loader import get_device_specs
        except ImportError as error:
            raise HardwareLost(f"it needs pyspacemouse ({error}): {install_hint('devices')}") from error
        known = get_device_specs()
        if self.config.device and self.config.model:
            if self.config.model not in known:
                raise SpecError(f"no SpaceMouse model {self.config.model!r}; there are {sorted(known)}")
            return self.config.device, known[self.config.model]
        by_number = {(each.vendor_id, each.product_id): each for each in known.values()}
        for path, numbers in _hid_devices():
            if numbers in by_number and self.config.device in ("", path):
                return path, by_number[numbers]
        raise HardwareLost(f"no SpaceMouse {self.config.device or 'is plugged in'}; plugged in are {_hid_devices()}")


def _hid_devices() -> list[tuple[str, tuple[int, int]]]:
    """Each raw device with its vendor's and product's number."""
    found = []
    for entry in sorted(_HIDRAW_FOLDER.glob("*/device/uevent")):
        try:
            lines = dict(line.partition("=")[::2] for line in entry.read_text().splitlines())
        except OSError:  # pulled out just now
            continue
        _, vendor, product = lines.get("HID_ID", "0:0:0").split(":")
        found.append((f"/dev/{entry.parts[-3]}", (int(vendor, 16), int(product, 16))))
    return found


def make_teleoperator(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `SpaceMouseConfig`."""
    return SpaceMouse(read_options(SpaceMouseConfig, request), spec)
