"""A keyboard on the robot's computer, read from the Linux kernel without a display or a library.

The robot moves while the `hold` key is pressed (dead-man switch). The driver's user needs permission to read the
device: on most systems, membership in the group ``input``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hal.driver import RobotSetupRequest, read_options
from hal.errors import HardwareLost
from hal.spec import RobotSpec
from hal.teleoperator import Teleoperator, TeleopInput
from robots.device_lock import DeviceLock
from robots.input_bindings import InputBindings, gripper_label, motion_labels

# linux/input-event-codes.h
_ROWS = {16: "qwertyuiop", 30: "asdfghjkl", 44: "zxcvbnm", 2: "1234567890"}
KEYS = {letter: first + place for first, row in _ROWS.items() for place, letter in enumerate(row)}
KEYS |= {"space": 57, "shift": 42, "up": 103, "left": 105, "right": 106, "down": 108}
_EVENT = struct.Struct("llHHi")  # struct input_event: seconds, microseconds, type, code, value
_SYN, _KEY, _SYN_DROPPED = 0, 1, 3
_MAX_EVENTS_PER_READ = 64
_DEVICE_LINKS = Path("/dev/input/by-path")

KEY_PAIRS = (("w", "s"), ("a", "d"), ("r", "f"), ("i", "k"), ("j", "l"), ("u", "o"))
GRIPPER_KEYS = ("e", "q")  # open, close


@dataclass(frozen=True)
class KeyboardConfig:
    """Attributes:
    device: the kernel's event device; empty for the first keyboard.
    hold: the key that must be held.
    keys: key to action element; a minus sign before the element inverts it. Default: pairs of keys in the order of the
    action's elements.
    speed: share of the element's range that a key commands.
    """

    device: str = ""
    hold: str = "space"
    keys: dict[str, str] = field(default_factory=dict)
    speed: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 1:
            raise ValueError(f"speed is {self.speed:g}; it must be in (0, 1]")


def default_keys(spec: RobotSpec) -> dict[str, str]:
    """One pair of keys for each element, as far as there are pairs, and one for the gripper."""
    pairs = list(zip(KEY_PAIRS, motion_labels(spec), strict=False))
    if gripper := gripper_label(spec):
        pairs.append((GRIPPER_KEYS, gripper))
    return {key: sign + element for keys, element in pairs for key, sign in zip(keys, ("", "-"), strict=True)}


class Keyboard(Teleoperator):
    def __init__(self, config: KeyboardConfig, spec: RobotSpec) -> None:
        """Raises SpecError for an unknown key or element."""
        self.config = config
        bound: Mapping[str, str] = config.keys or default_keys(spec)
        self._bindings = InputBindings(bound, tuple(KEYS), spec)
        InputBindings({config.hold: spec.action.labels[0]}, tuple(KEYS), spec)
        self._gripper = spec.gripper
        self._pressed: set[int] = set()
        self._file = -1
        self._partial_event = b""
        self._device_lock = DeviceLock()

    def connect(self) -> None:
        if self._file < 0:
            path = self.config.device or _first_keyboard()
            self._device_lock = DeviceLock(path)
            self._device_lock.acquire()
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError as error:
                self._device_lock.release()
                raise HardwareLost(f"keyboard {path}: {error.strerror}") from error
            self._pressed.clear()
            self._partial_event = b""

    def read(self) -> TeleopInput:
        if self._file < 0:
            raise HardwareLost("the keyboard is not connected")
        while self._read_events():
            pass
        held = {name: self.config.speed for name, code in KEYS.items() if code in self._pressed}
        twist = self._bindings.twist(held)
        if self._gripper >= 0:
            twist[self._gripper] = round(twist[self._gripper] / self.config.speed)  # fully open or closed
        return TeleopInput(twist, KEYS[self.config.hold] in self._pressed)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._device_lock.release()

    def _read_events(self) -> bool:
        """Read the pending key events; False if there are none left."""
        try:
            arrived = os.read(self._file, _EVENT.size * _MAX_EVENTS_PER_READ)
        except BlockingIOError:
            return False
        except OSError as error:
            raise HardwareLost(f"the keyboard was disconnected: {error.strerror}") from error
        if not arrived:
            raise HardwareLost("the keyboard was disconnected")
        buffered = self._partial_event + arrived
        whole = len(buffered) // _EVENT.size * _EVENT.size
        self._partial_event = buffered[whole:]
        for _, _, kind, code, value in _EVENT.iter_unpack(buffered[:whole]):
            self._apply_event(kind, code, value)
        return True

    def _apply_event(self, kind: int, code: int, value: int) -> None:
        if (kind, code) == (_SYN, _SYN_DROPPED):  # the kernel dropped events: treat all keys as released
            self._pressed.clear()
        elif kind == _KEY and value == 0:
            self._pressed.discard(code)
        elif kind == _KEY and value == 1:
            self._pressed.add(code)


def _first_keyboard() -> str:
    found = sorted(_DEVICE_LINKS.glob("*-event-kbd")) if _DEVICE_LINKS.is_dir() else []
    if not found:
        raise HardwareLost(f"no keyboard in {_DEVICE_LINKS}; set `device`, e.g. /dev/input/event3")
    return str(found[0])


def make_teleoperator(request: RobotSetupRequest, spec: RobotSpec) -> Teleoperator:
    """A `hal.driver.TeleoperatorFactory`; options: `KeyboardConfig`."""
    return Keyboard(read_options(KeyboardConfig, request), spec)
