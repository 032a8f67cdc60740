"""A gamepad on the robot's computer, by pygame (SDL; extra ``devices``). It needs no display.

The robot moves while the `hold` button is pressed (dead-man switch). SDL maps most gamepads, so axes and buttons have
the names of an Xbox gamepad. Construct it in any thread; one thread uses it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hal.driver import RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError, install_hint
from hal.spec import RobotSpec
from hal.teleoperator import Teleoperator, TeleopInput
from robots.device_lock import DeviceLock
from robots.input_bindings import InputBindings, gripper_label, motion_labels, pair_in_order

AXES = ("leftx", "lefty", "rightx", "righty", "triggerleft", "triggerright")
BUTTONS = ("a", "b", "x", "y", "leftshoulder", "rightshoulder", "leftstick", "rightstick", "back", "start")
DEFAULT_AXES = ("lefty", "leftx", "righty", "rightx")  # inverted: up and left are forward and left
_AXIS_RANGE = 32767


@dataclass(frozen=True)
class GamepadConfig:
    """Attributes:
    index: number among the connected gamepads.
    hold: the button that must be held.
    axes: ``leftx``, ``lefty``, ... to action element; a minus sign before the element inverts it.
    open, close: buttons of the gripper.
    dead_zone: share of an axis's range that counts as 0.
    """

    index: int = 0
    hold: str = "rightshoulder"
    axes: dict[str, str] = field(default_factory=dict)
    open: str = "a"
    close: str = "b"
    dead_zone: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.dead_zone < 1 or self.index < 0:
            raise ValueError(
                f"dead_zone must be in [0, 1) and index at least 0; they are {self.dead_zone} and {self.index}"
            )


class Gamepad(Teleoperator):
    def __init__(self, config: GamepadConfig, spec: RobotSpec) -> None:
        """Raises SpecError for an unknown axis, button or element."""
        if unknown := {config.hold, config.open, config.close} - set(BUTTONS):
            raise SpecError(f"a gamepad has no button {min(unknown)!r}; choose one of {list(BUTTONS)}")
        self.config = config
        usual = {axis: f"-{element}" for axis, element in pair_in_order(DEFAULT_AXES, motion_labels(spec)).items()}
        self._bindings = InputBindings(config.axes or usual, AXES, spec)
        self._gripper = spec.gripper if gripper_label(spec) else -1
        self._device_lock = DeviceLock(f"gamepad-{config.index}")
        self._pad: Any = None

    def connect(self) -> None:
        if self._pad is not None:
            return
        pygame = _import_pygame()
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # SDL delivers input only with a display
        os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
        self._device_lock.acquire()
        try:
            self._pad = self._open(pygame)
        except pygame.error as error:  # e.g. an SDL_VIDEODRIVER without display, or no permission to open the gamepad
            raise HardwareLost(f"the gamepad {self.config.index} cannot be opened: {error}") from error
        finally:
            if self._pad is None:
                self._device_lock.release()

    def _open(self, pygame: Any) -> Any:
        pygame.display.init()
        controllers = _import_controller()
        controllers.init()
        pygame.event.pump()
        found = [number for number in range(controllers.get_count()) if controllers.is_controller(number)]
        if self.config.index >= len(found):
            raise HardwareLost(
                f"no gamepad {self.config.index}: SDL supports {len(found)} of the connected ones; set `index`"
            )
        return controllers.Controller(found[self.config.index])

    def read(self) -> TeleopInput:
        if self._pad is None:
            raise HardwareLost("the gamepad is not connected")
        pygame = _import_pygame()
        try:
            return self._read(pygame)
        except pygame.error as error:
            raise HardwareLost(f"the gamepad {self.config.index} cannot be read: {error}") from error

    def _read(self, pygame: Any) -> TeleopInput:
        pygame.event.clear()  # this also updates SDL's device states
        if not self._pad.attached():
            raise HardwareLost(f"the gamepad {self.config.index} was disconnected")
        axes = {
            name: self._pad.get_axis(getattr(pygame, f"CONTROLLER_AXIS_{name.upper()}")) / _AXIS_RANGE for name in AXES
        }
        twist = self._bindings.twist(axes, self.config.dead_zone)
        if self._gripper >= 0 and (share := self._pressed(self.config.open) - self._pressed(self.config.close)):
            twist[self._gripper] = share
        return TeleopInput(twist, bool(self._pressed(self.config.hold)))

    def close(self) -> None:
        if self._pad is not None:
            self._pad.quit()
            self._pad = None
            self._device_lock.release()

    def _pressed(self, button: str) -> int:
        return int(self._pad.get_button(getattr(_import_pygame(), f"CONTROLLER_BUTTON_{button.upper()}")))


def _import_controller() -> Any:
    """pygame's module for SDL's game controller mappings; raises HardwareLost if pygame is missing."""
    _import_pygame()
    from pygame._sdl2 import controller

    return controller


def _import_pygame() -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame
    except ImportError as error:
        raise HardwareLost(
            f"pygame cannot be imported ({error}); install it with: {install_hint('devices')}"
        ) from error
    return pygame


def make_teleoperator(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `GamepadConfig`."""
    return Gamepad(read_options(GamepadConfig, request), spec)
