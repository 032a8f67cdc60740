"""Gamepad and SpaceMouse on the robot's computer, with controls that are bound to action elements (extra ``devices``).

Gamepad, by pygame (SDL); it needs no display. The robot moves while the `hold` button is pressed (dead-man switch). SDL
maps most gamepads, so axes and buttons have the names of an Xbox gamepad.

SpaceMouse, with pyspacemouse's device table. The driver reads the kernel's raw reports (``/dev/hidraw*``), for which
its user needs permission. A released cap springs back, which is the dead-man switch; a `hold` button can be required in
addition. A deflected cap sends a report every 8 ms, or 16 ms if wireless. Without reports for `silent_s`, for example
after a radio dropout, the cap counts as released.

Construct a device in any thread; one thread uses it.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from hal.driver import RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError
from hal.settings import Limit
from hal.spec import Array, RobotSpec
from hal.teleoperator import Teleoperator, TeleopInput
from robots.device import DeviceLock, import_library

GAMEPAD_AXES = ("leftx", "lefty", "rightx", "righty", "triggerleft", "triggerright")
BUTTONS = ("a", "b", "x", "y", "leftshoulder", "rightshoulder", "leftstick", "rightstick", "back", "start")
DEFAULT_AXES = ("lefty", "leftx", "righty", "rightx")  # inverted: up and left are forward and left
_AXIS_RANGE = 32767

SPACEMOUSE_AXES = ("x", "y", "z", "roll", "pitch", "yaw")
_HIDRAW_FOLDER = Path("/sys/class/hidraw")
_MAX_REPORTS_PER_READ = 256  # per reading, so that a flooding device cannot block


def motion_labels(spec: RobotSpec) -> tuple[str, ...]:
    """The labels of the action elements except the gripper, in order."""
    return tuple(label for index, label in enumerate(spec.action.labels) if index != spec.gripper)


class BoundInput(Teleoperator):
    """An input device, locked while it is connected.

    A binding maps a control to a signed action element: ``-z`` is the element z, inverted.
    """

    name: str  # in error messages

    def __init__(self, element_from_control: Mapping[str, str], controls: Sequence[str], spec: RobotSpec) -> None:
        """Raises SpecError for a control that is not in `controls`, or an element that is not in the action."""
        self._gripper = spec.gripper
        self._size = len(spec.action.labels)
        self._bound: dict[str, tuple[int, float]] = {}
        for control, target in element_from_control.items():
            element = target.removeprefix("-")
            if control not in controls:
                raise SpecError(f"there is no control {control!r}; choose one of {list(controls)}")
            if element not in spec.action.labels:
                raise SpecError(
                    f"{control}: {spec.model} has no element {element!r}; choose one of {spec.action.labels}"
                )
            self._bound[control] = spec.action.labels.index(element), -1.0 if target.startswith("-") else 1.0
        self._device: Any = None
        self._device_lock = DeviceLock()

    def connect(self) -> None:
        if self._device is not None:
            return
        place = self._find()
        self._device_lock = DeviceLock(place)
        self._device_lock.acquire()
        try:
            self._device = self._open(place)
        except OSError as error:
            raise HardwareLost(f"{self.name} {place}: {error.strerror}") from error
        finally:
            if self._device is None:
                self._device_lock.release()

    def read(self) -> TeleopInput:
        if self._device is None:
            raise HardwareLost(f"the {self.name} is not connected")
        return self._read(self._device)

    def close(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            self._close(device)
            self._device_lock.release()

    @abstractmethod
    def _find(self) -> str:
        """The device's place, for its lock. Raises HardwareLost, SpecError."""

    @abstractmethod
    def _open(self, place: str) -> Any:
        """Open the device and return its handle. Raises HardwareLost, OSError."""

    @abstractmethod
    def _read(self, device: Any) -> TeleopInput:
        """See `Teleoperator.read`."""

    @abstractmethod
    def _close(self, device: Any) -> None: ...

    def _twist(self, values: Mapping[str, float], dead_zone: float = 0.0) -> Array:
        """Sum each element's controls, clipped: float32 (a,) in [-1, 1]. Values within the dead zone count as 0."""
        twist = np.zeros(self._size, np.float32)
        for control, value in values.items():
            if control in self._bound and abs(value) > dead_zone:
                index, sign = self._bound[control]
                twist[index] += sign * value
        clipped: Array = np.clip(twist, -1, 1)
        return clipped


@dataclass(frozen=True)
class GamepadConfig:
    """Attributes:
    index: number among the connected gamepads.
    hold: the button that must be held.
    axes: ``leftx``, ``lefty``, ... to action element; a minus sign before the element inverts it.
    open, close: buttons of the gripper.
    dead_zone: share of an axis's range that counts as 0.
    """

    index: Limit = 0
    hold: str = "rightshoulder"
    axes: dict[str, str] = field(default_factory=dict)
    open: str = "a"
    close: str = "b"
    dead_zone: Annotated[float, Meta(ge=0, lt=1)] = 0.1


class Gamepad(BoundInput):
    name = "gamepad"

    def __init__(self, config: GamepadConfig, spec: RobotSpec) -> None:
        """Raises SpecError for an unknown axis, button or element."""
        usual = {axis: f"-{element}" for axis, element in zip(DEFAULT_AXES, motion_labels(spec), strict=False)}
        super().__init__(config.axes or usual, GAMEPAD_AXES, spec)
        if unknown := {config.hold, config.open, config.close} - set(BUTTONS):
            raise SpecError(f"a gamepad has no button {min(unknown)!r}; choose one of {list(BUTTONS)}")
        self.config = config
        self._pygame: Any = None

    def _find(self) -> str:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # SDL delivers input only with a display
        os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
        self._pygame = import_library("pygame", "devices", HardwareLost)
        return f"gamepad-{self.config.index}"

    def _open(self, place: str) -> Any:
        try:
            self._pygame.display.init()
            controllers = import_module("pygame._sdl2.controller")  # SDL's mappings of game controllers
            controllers.init()
            self._pygame.event.pump()
            found = [number for number in range(controllers.get_count()) if controllers.is_controller(number)]
            if self.config.index < len(found):
                return controllers.Controller(found[self.config.index])
        except self._pygame.error as error:  # e.g. an SDL_VIDEODRIVER without display, or no permission
            raise HardwareLost(f"the gamepad {self.config.index} cannot be opened: {error}") from error
        raise HardwareLost(
            f"no gamepad {self.config.index}: SDL supports {len(found)} of the connected ones; set `index`"
        )

    def _read(self, device: Any) -> TeleopInput:
        pygame = self._pygame

        def value(read: Any, kind: str, name: str) -> int:
            return int(read(getattr(pygame, f"CONTROLLER_{kind}_{name.upper()}")))

        try:
            pygame.event.clear()  # this also updates SDL's device states
            if not device.attached():
                raise HardwareLost(f"the gamepad {self.config.index} was disconnected")
            axes = {name: value(device.get_axis, "AXIS", name) / _AXIS_RANGE for name in GAMEPAD_AXES}
            opens, closes, holds = (
                value(device.get_button, "BUTTON", name)
                for name in (self.config.open, self.config.close, self.config.hold)
            )
        except pygame.error as error:
            raise HardwareLost(f"the gamepad {self.config.index} cannot be read: {error}") from error
        twist = self._twist(axes, self.config.dead_zone)
        if self._gripper >= 0 and opens != closes:
            twist[self._gripper] = opens - closes
        return TeleopInput(twist, bool(holds))

    def _close(self, device: Any) -> None:
        device.quit()


def make_gamepad(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `GamepadConfig`."""
    return Gamepad(read_options(GamepadConfig, request), spec)


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
    dead_zone: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    silent_s: float = 0.2


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


class SpaceMouse(BoundInput):
    name = "SpaceMouse"

    def __init__(self, config: SpaceMouseConfig, spec: RobotSpec, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SpecError for an unknown axis or element."""
        super().__init__(
            config.axes or dict(zip(SPACEMOUSE_AXES, motion_labels(spec), strict=False)), SPACEMOUSE_AXES, spec
        )
        self.config, self._clock = config, clock
        self._model: Any = None  # pyspacemouse's description of the device
        self._report_stamp, self._report_s = -1.0, 0.0  # last report: pyspacemouse's time, and its arrival on our clock

    def _find(self) -> str:
        models = import_library("pyspacemouse.loader", "devices", HardwareLost).get_device_specs()
        path, model = self.config.device, self.config.model
        if path and model:
            if model not in models:
                raise SpecError(f"no SpaceMouse model {model!r}; choose one of {sorted(models)}")
            self._model = models[model]
            return path
        by_number = {(each.vendor_id, each.product_id): each for each in models.values()}
        for found, numbers in _hid_devices():
            if numbers in by_number and path in ("", found):
                self._model = by_number[numbers]
                return found
        raise HardwareLost(f"no SpaceMouse {path or 'is connected'}; connected devices: {_hid_devices()}")

    def _open(self, place: str) -> Any:
        from pyspacemouse.config_helpers import apply_axis_convention
        from pyspacemouse.device import SpaceMouseDevice
        from pyspacemouse.types import AxisConvention

        device = SpaceMouseDevice(apply_axis_convention(self._model, AxisConvention.ROS), HidRawDevice(place))
        device.open()
        return device

    def _read(self, device: Any) -> TeleopInput:
        before = -1.0
        try:
            state = device.read()
            for _ in range(_MAX_REPORTS_PER_READ):
                if state.t == before:
                    break
                before, state = state.t, device.read()
        except IndexError as error:
            raise HardwareLost("the SpaceMouse sent a report that is too short; check the option `model`") from error
        if state.t != self._report_stamp:
            self._report_stamp, self._report_s = state.t, self._clock()
        twist = self._twist({name: getattr(state, name) for name in SPACEMOUSE_AXES}, self.config.dead_zone)
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

    def _close(self, device: Any) -> None:
        device.close()


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


def make_space_mouse(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `SpaceMouseConfig`."""
    return SpaceMouse(read_options(SpaceMouseConfig, request), spec)
