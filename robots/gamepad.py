"""A gamepad on the robot's own computer, by pygame (SDL): ``pip install 'user-sys[devices]'``. No display is needed.

The robot moves while the `hold` button is pressed (dead-man switch). Axes and buttons are counted as SDL counts them;
the defaults suit an Xbox pad. Constructed anywhere, used from one thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hal.errors import HardwareLost
from hal.spec import RobotSpec
from hal.station import StationRequest, read_options
from hal.teleoperator import Teleoperator, TeleopInput
from robots.bindings import Bindings, gripper_element, in_order, moving_elements

AXES = 8
CONTROLS = tuple(f"axis{number}" for number in range(AXES))
USUAL_AXES = ("axis1", "axis0", "axis4", "axis3")  # left stick up and left, right stick up and left; SDL's are opposite


@dataclass(frozen=True)
class GamepadConfig:
    """Attributes:
    index: which of the pads that are plugged in.
    hold: the button that must be held.
    axes: ``axis0`` ... to action element, a minus sign before the element for the other way.
    open, close: buttons of the gripper.
    dead_zone: the share of an axis's way that counts as none.
    """

    index: int = 0
    hold: int = 5
    axes: dict[str, str] = field(default_factory=dict)
    open: int = 0
    close: int = 1
    dead_zone: float = 0.1


class Gamepad(Teleoperator):
    def __init__(self, config: GamepadConfig, spec: RobotSpec) -> None:
        """Raises SpecError for an axis or an element that there is not."""
        self.config = config
        usual = {axis: f"-{element}" for axis, element in in_order(USUAL_AXES, moving_elements(spec)).items()}
        self._bindings = Bindings(config.axes or usual, CONTROLS, spec)
        self._gripper = spec.gripper if gripper_element(spec) else -1
        self._pad: Any = None

    def connect(self) -> None:
        if self._pad is not None:
            return
        pygame = _pygame()
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # SDL hands on input only where it has a display
        os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
        pygame.display.init()
        pygame.joystick.init()
        pygame.event.pump()
        found = pygame.joystick.get_count()
        if self.config.index >= found:
            raise HardwareLost(f"no gamepad {self.config.index}: {found} plugged in")
        self._pad = pygame.joystick.Joystick(self.config.index)

    def read(self) -> TeleopInput:
        if self._pad is None:
            raise HardwareLost("the gamepad is not connected")
        pygame, pad = _pygame(), self._pad
        for event in pygame.event.get():
            if event.type == pygame.JOYDEVICEREMOVED and event.instance_id == pad.get_instance_id():
                raise HardwareLost(f"the gamepad {pad.get_name()} went away")
        axes = {name: pad.get_axis(number) for number, name in enumerate(CONTROLS[: pad.get_numaxes()])}
        twist = self._bindings.twist(axes, self.config.dead_zone)
        if self._gripper >= 0 and (share := self._pressed(self.config.open) - self._pressed(self.config.close)):
            twist[self._gripper] = share
        return TeleopInput(twist, bool(self._pressed(self.config.hold)))

    def close(self) -> None:
        if self._pad is not None:
            self._pad.quit()
            self._pad = None

    def _pressed(self, button: int) -> int:
        return int(self._pad.get_button(button)) if button < self._pad.get_numbuttons() else 0


def _pygame() -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame
    except ImportError as error:
        raise HardwareLost(f"a gamepad needs pygame: pip install 'user-sys[devices]' ({error})") from error
    return pygame


def make_teleoperator(request: StationRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.station.TeleoperatorFactory`; options: `GamepadConfig`."""
    return Gamepad(read_options(GamepadConfig, request), spec)
