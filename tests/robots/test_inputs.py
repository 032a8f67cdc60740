"""Input devices on the robot's computer.

The fakes replace the kernel: key events and HID reports come through sockets and pipes, the gamepad is SDL's virtual
one.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hal.conformance import TeleoperatorConformance
from hal.driver import RobotSetupRequest
from hal.errors import HardwareLost, SpecError
from hal.teleoperator import Teleoperator
from robots.fake import FakeRobotConfig, fake_spec
from robots.gamepad import Gamepad, GamepadConfig
from robots.keyboard import Keyboard, KeyboardConfig, make_teleoperator
from robots.spacemouse import SpaceMouse, SpaceMouseConfig
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.errors import ConfigError

SPEC = fake_spec(FakeRobotConfig())
SPACE, W, S, Q, E = 57, 17, 31, 16, 18
KEY, SYN, DROPPED = 1, 0, 3
LEFT_X, LEFT_Y, SHOULDER = 0, 1, 10  # SDL's numbers on its virtual gamepad


class Keys:
    """The writing end of a pipe in place of the kernel's event device."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def send(self, *events: tuple[int, int, int]) -> None:
        self.write(b"".join(struct.pack("llHHi", 1, 2, *event) for event in events))

    def write(self, raw: bytes) -> None:
        os.write(self._file, raw)

    def press(self, *codes: int) -> None:
        self.send(*((KEY, code, 1) for code in codes), (SYN, 0, 0))

    def release(self, *codes: int) -> None:
        self.send(*((KEY, code, 0) for code in codes))

    def pull_out(self) -> None:
        os.close(self._file)
        self._file = -1

    def close(self) -> None:
        if self._file >= 0:
            self.pull_out()


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    made = Keys(tmp_path / "event0")
    yield made
    made.close()


@pytest.fixture
def keyboard(keys: Keys) -> Iterator[Keyboard]:
    made = Keyboard(KeyboardConfig(device=str(keys.path)), SPEC)
    made.connect()
    yield made
    made.close()


class TestKeyboard(TeleoperatorConformance):
    @pytest.fixture(autouse=True)
    def _keys(self, keys: Keys) -> None:
        self.keys = keys

    def make_teleoperator(self) -> Teleoperator:
        return make_teleoperator(RobotSetupRequest("fake-0", "", {"device": str(self.keys.path)}), SPEC)


def test_keys_act_while_hold_is_pressed(keys: Keys, keyboard: Keyboard) -> None:
    keys.press(W)
    assert not keyboard.read().engaged
    keys.press(SPACE)
    reading = keyboard.read()
    assert reading.engaged and reading.twist.tolist() == [0.5, 0, 0, 0]
    keys.press(S)
    assert keyboard.read().twist.tolist() == [0, 0, 0, 0], "both ways at once is neither"
    keys.release(W)
    assert keyboard.read().twist.tolist() == [-0.5, 0, 0, 0]
    keys.release(SPACE)
    assert not keyboard.read().engaged


def test_gripper_keys_move_full_range(keys: Keys, keyboard: Keyboard) -> None:
    keys.press(SPACE, E)
    assert keyboard.read().twist[3] == 1
    keys.release(E)
    keys.press(Q)
    assert keyboard.read().twist[3] == -1


def test_dropped_events_release_all_keys(keys: Keys, keyboard: Keyboard) -> None:
    keys.press(SPACE, W)
    assert keyboard.read().engaged
    keys.send((SYN, DROPPED, 0))
    reading = keyboard.read()
    assert not reading.engaged and not reading.twist.any()


def test_disconnected_or_missing_keyboard_is_lost(keys: Keys, keyboard: Keyboard, tmp_path: Path) -> None:
    keys.press(SPACE, W)
    keyboard.read()
    keys.pull_out()
    with pytest.raises(HardwareLost, match="was disconnected"):
        keyboard.read()
    with pytest.raises(HardwareLost, match="No such file"):
        Keyboard(KeyboardConfig(device=str(tmp_path / "none")), SPEC).connect()


def test_invalid_bindings_are_explained() -> None:
    with pytest.raises(SpecError, match="no control 'ctrl'"):
        Keyboard(KeyboardConfig(keys={"ctrl": "dx"}), SPEC)
    with pytest.raises(SpecError, match="no element 'roll'"):
        Keyboard(KeyboardConfig(keys={"w": "roll"}), SPEC)
    with pytest.raises(SpecError, match="did you mean 'hold'"):
        make_teleoperator(RobotSetupRequest("fake-0", "", {"holt": "space"}), SPEC)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("keyboard", {"speed": 0.0}, r"speed is 0; it must be in \(0, 1\]"),
        ("gamepad", {"dead_zone": 1.0}, "dead_zone must be"),
        ("gamepad", {"dead_zone": -0.1}, "dead_zone must be"),
        ("gamepad", {"index": -1}, "index at least 0"),
        ("spacemouse", {"dead_zone": -0.1}, "dead_zone is -0.1"),
    ],
)
def test_unsafe_input_settings_are_refused(kind: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_robot_setup(RobotConfig(name="fake-0", driver="fake", teleoperators=({"kind": kind, **options},)))


class VirtualPad:
    """SDL's virtual gamepad, with six axes and fifteen buttons."""

    def __init__(self) -> None:
        os.environ["SDL_VIDEODRIVER"] = "dummy"
        pygame = pytest.importorskip("pygame")
        loaded = Path("/proc/self/maps").read_text().splitlines()
        self._sdl = ctypes.CDLL(next(line.split()[-1] for line in loaded if "libSDL2-2" in line))
        self._sdl.SDL_JoystickOpen.restype = ctypes.c_void_p
        pygame.display.init()
        pygame.joystick.init()
        self._index = self._sdl.SDL_JoystickAttachVirtual(1, 6, 15, 1)
        assert self._index >= 0, "this SDL has no virtual joysticks"
        self._pad = ctypes.c_void_p(self._sdl.SDL_JoystickOpen(self._index))

    def axis(self, number: int, share: float) -> None:
        self._sdl.SDL_JoystickSetVirtualAxis(self._pad, number, ctypes.c_int16(round(share * 32767)))

    def button(self, number: int, down: bool) -> None:
        self._sdl.SDL_JoystickSetVirtualButton(self._pad, number, ctypes.c_uint8(down))

    def pull_out(self) -> None:
        if self._index >= 0:
            self._sdl.SDL_JoystickDetachVirtual(self._index)
            self._index = -1


@pytest.fixture
def pad() -> Iterator[VirtualPad]:
    made = VirtualPad()
    yield made
    made.pull_out()


class TestGamepad(TeleoperatorConformance):
    @pytest.fixture(autouse=True)
    def _pad(self, pad: VirtualPad) -> None:
        pass

    def make_teleoperator(self) -> Teleoperator:
        return Gamepad(GamepadConfig(), SPEC)


def test_sticks_act_while_shoulder_button_is_held(pad: VirtualPad) -> None:
    device = Gamepad(GamepadConfig(), SPEC)
    device.connect()
    try:
        pad.axis(LEFT_Y, -1.0)
        pad.axis(LEFT_X, 0.05)
        reading = device.read()
        assert not reading.engaged
        np.testing.assert_allclose(reading.twist, [1, 0, 0, 0], atol=1e-3)
        pad.button(SHOULDER, True)
        pad.button(0, True)
        reading = device.read()
        assert reading.engaged and reading.twist[3] == 1
        pad.button(0, False)
        pad.button(1, True)
        assert device.read().twist[3] == -1
        pad.button(SHOULDER, False)
        assert not device.read().engaged
    finally:
        device.close()


def test_disconnected_or_missing_gamepad_is_lost(pad: VirtualPad) -> None:
    device = Gamepad(GamepadConfig(), SPEC)
    device.connect()
    device.read()
    pad.pull_out()
    with pytest.raises(HardwareLost, match="was disconnected"):
        device.read()
    device.close()
    with pytest.raises(HardwareLost, match="no gamepad 7"):
        Gamepad(GamepadConfig(index=7), SPEC).connect()


def test_gamepad_that_sdl_cannot_open_is_lost(pad: VirtualPad, monkeypatch: pytest.MonkeyPatch) -> None:
    import pygame

    pygame.display.quit()
    monkeypatch.setenv("SDL_VIDEODRIVER", "no-such-display")
    with pytest.raises(HardwareLost, match="the gamepad 0 cannot be opened: .*not available"):
        Gamepad(GamepadConfig(), SPEC).connect()


def report(number: int, *values: int) -> bytes:
    """A SpaceNavigator's report: three axes of 16 bits each."""
    return struct.pack("<B3h", number, *values)


@pytest.fixture
def puck(tmp_path: Path) -> Iterator[Keys]:
    made = Keys(tmp_path / "hidraw0")
    yield made
    made.close()


def space_mouse(puck: Keys, **options: int) -> SpaceMouse:
    # type: ignore[arg-type]
    return SpaceMouse(SpaceMouseConfig(device=str(puck.path), model="SpaceNavigator", **options), SPEC)


class TestSpaceMouse(TeleoperatorConformance):
    @pytest.fixture(autouse=True)
    def _puck(self, puck: Keys) -> None:
        self.puck = puck

    def make_teleoperator(self) -> Teleoperator:
        return space_mouse(self.puck)


def test_released_cap_stops_the_robot(puck: Keys) -> None:
    device = space_mouse(puck)
    device.connect()
    try:
        assert not device.read().engaged
        puck.write(report(1, 0, -350, -175))
        reading = device.read()
        assert reading.engaged
        np.testing.assert_allclose(reading.twist, [1, 0, 0.5, 0], atol=0.01)
        puck.write(report(1, 0, 0, 0))
        assert not device.read().engaged
        puck.pull_out()
        with pytest.raises(HardwareLost, match="was disconnected"):
            device.read()
    finally:
        device.close()


def test_silent_cap_counts_as_released(puck: Keys) -> None:
    """If a wireless mouse drops out, its receiver stays connected."""
    now_s = 100.0
    config = SpaceMouseConfig(device=str(puck.path), model="SpaceNavigator", silent_s=0.2)
    device = SpaceMouse(config, SPEC, clock=lambda: now_s)
    device.connect()
    try:
        for _ in range(5):
            puck.write(report(1, 0, -350, 0))
            assert device.read().engaged
            now_s += 0.15
            assert device.read().engaged, "the reports come without a pause, and a late one does not matter"
        now_s += 0.1
        reading = device.read()
        assert not reading.engaged and not reading.twist.any()
        puck.write(report(3, 1, 0, 0))  # the button that opens the gripper; it does not report the cap
        assert device.read().engaged
        now_s += 0.3
        assert not device.read().engaged
        puck.write(report(1, 0, 0, 0))
        assert device.read().twist.tolist() == [0, 0, 0, 1], "a button that is held down is not reported again"
        now_s += 10
        assert device.read().twist.tolist() == [0, 0, 0, 1]
    finally:
        device.close()


def require_had_by_one(make: Callable[[], Teleoperator]) -> None:
    first, second = make(), make()
    first.connect()
    with pytest.raises(HardwareLost, match="is already in use by"):
        second.connect()
    first.read()
    first.close()
    second.connect()
    second.read()
    second.close()


def test_keyboard_and_spacemouse_are_locked_once(keys: Keys, puck: Keys) -> None:
    require_had_by_one(lambda: Keyboard(KeyboardConfig(device=str(keys.path)), SPEC))
    require_had_by_one(lambda: space_mouse(puck))


def test_gamepad_is_locked_once(pad: VirtualPad) -> None:
    require_had_by_one(lambda: Gamepad(GamepadConfig(), SPEC))
