"""Input devices on the robot's computer.

The fakes replace the kernel: HID reports come through pipes, the gamepad is SDL's virtual one.
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
from hal.errors import HardwareLost
from hal.teleoperator import Teleoperator
from robots.fake import FakeRobotConfig, fake_spec
from robots.input_devices import Gamepad, GamepadConfig, SpaceMouse, SpaceMouseConfig
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.errors import ConfigError

SPEC = fake_spec(FakeRobotConfig())
LEFT_X, LEFT_Y, SHOULDER = 0, 1, 10  # SDL's numbers on its virtual gamepad


class Puck:
    """The writing end of a pipe in place of the kernel's raw reports of a SpaceMouse."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def report(self, number: int, *values: int) -> None:
        """A SpaceNavigator's report: three axes of 16 bits each."""
        self.send(struct.pack("<B3h", number, *values))

    def send(self, report: bytes) -> None:
        os.write(self._file, report)

    def pull_out(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gamepad", {"dead_zone": 1.0}, "dead_zone"),
        ("gamepad", {"index": -1}, "index"),
        ("gamepad", {"axes": {"wheel": "dx"}}, "no control 'wheel'"),
        ("gamepad", {"axes": {"leftx": "roll"}}, "no element 'roll'"),
        ("gamepad", {"holt": "a"}, "hold"),
        ("spacemouse", {"dead_zone": -0.1}, "dead_zone"),
    ],
)
def test_unsafe_input_settings_are_refused(kind: str, options: dict[str, object], message: str) -> None:
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


@pytest.fixture
def puck(tmp_path: Path) -> Iterator[Puck]:
    made = Puck(tmp_path / "hidraw0")
    yield made
    made.pull_out()


def space_mouse(puck: Puck, **options: int) -> SpaceMouse:
    # type: ignore[arg-type]
    return SpaceMouse(SpaceMouseConfig(device=str(puck.path), model="SpaceNavigator", **options), SPEC)


class TestSpaceMouse(TeleoperatorConformance):
    @pytest.fixture(autouse=True)
    def _puck(self, puck: Puck) -> None:
        self.puck = puck

    def make_teleoperator(self) -> Teleoperator:
        return space_mouse(self.puck)


def test_space_mouse_with_short_report_is_lost(puck: Puck) -> None:
    device = space_mouse(puck)
    device.connect()
    try:
        puck.send(bytes([3]))
        with pytest.raises(HardwareLost, match="the SpaceMouse sent a report that is too short; check .* `model`"):
            device.read()
    finally:
        device.close()


def test_released_cap_stops_the_robot(puck: Puck) -> None:
    device = space_mouse(puck)
    device.connect()
    try:
        assert not device.read().engaged
        puck.report(1, 0, -350, -175)
        reading = device.read()
        assert reading.engaged
        np.testing.assert_allclose(reading.twist, [1, 0, 0.5, 0], atol=0.01)
        puck.report(1, 0, 0, 0)
        assert not device.read().engaged
        puck.pull_out()
        with pytest.raises(HardwareLost, match="was disconnected"):
            device.read()
    finally:
        device.close()


def test_silent_cap_counts_as_released(puck: Puck) -> None:
    """If a wireless mouse drops out, its receiver stays connected."""
    now_s = 100.0
    config = SpaceMouseConfig(device=str(puck.path), model="SpaceNavigator", silent_s=0.2)
    device = SpaceMouse(config, SPEC, clock=lambda: now_s)
    device.connect()
    try:
        for _ in range(5):
            puck.report(1, 0, -350, 0)
            assert device.read().engaged
            now_s += 0.15
            assert device.read().engaged, "the reports come without a pause, and a late one does not matter"
        now_s += 0.1
        reading = device.read()
        assert not reading.engaged and not reading.twist.any()
        puck.report(3, 1, 0, 0)  # the button that opens the gripper; it does not report the cap
        assert device.read().engaged
        now_s += 0.3
        assert not device.read().engaged
        puck.report(1, 0, 0, 0)
        assert device.read().twist.tolist() == [0, 0, 0, 1], "a button that is held down is not reported again"
        now_s += 10
        assert device.read().twist.tolist() == [0, 0, 0, 1]
    finally:
        device.close()


def test_device_is_locked_once(puck: Puck, pad: VirtualPad) -> None:
    makers: list[Callable[[], Teleoperator]] = [lambda: space_mouse(puck), lambda: Gamepad(GamepadConfig(), SPEC)]
    for make in makers:
        first, second = make(), make()
        first.connect()
        with pytest.raises(HardwareLost, match="is already in use by"):
            second.connect()
        first.close()
        second.connect()
        second.read()
        second.close()
