"""Invalid specs are refused before a run."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from hal.errors import SpecError
from hal.spec import ArraySpec, CameraSpec, RobotSpec
from robots.fake import FakeRobot
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.errors import ConfigError


@pytest.mark.parametrize(("height", "width", "rate_hz"), [(0, 64, 30.0), (48, -1, 30.0), (48, 64, 0.0)])
def test_camera_without_size_or_rate_is_refused(height: int, width: int, rate_hz: float) -> None:
    with pytest.raises(SpecError, match="camera top has .* pixels at .* Hz"):
        CameraSpec(name="top", height=height, width=width, rate_hz=rate_hz)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"camera_hz": 0.0}, "camera_hz"),
        ({"step_max_m": 0.0}, "step_max_m"),
        ({"rate_hz": 0.0}, "rate_hz is 0; a control period"),
        ({"rate_hz": 7.0}, "rate_hz is 7; a control period must be a whole number of physics steps of 2 ms"),
    ],
)
def test_invalid_options_of_a_simulated_arm_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_robot_setup(RobotConfig(name="panda-0", options=options), cameras=False)


def test_fingerprint_of_a_driver_that_gives_whole_numbers_is_that_of_its_stored_spec() -> None:
    spec = replace(FakeRobot().spec, rate_hz=50)
    stored = msgspec.json.decode(msgspec.json.encode(spec), type=RobotSpec)
    assert (spec.fingerprint, spec.embodiment) == (stored.fingerprint, stored.embodiment)


def test_angles_over_a_turn_beyond_their_bounds_are_found() -> None:
    free, grip, pan = ("free", "rad", -np.inf, np.inf), ("grip", "%", 0.0, 1.0), ("pan", "rad", -3.0, 3.0)
    spec = ArraySpec.from_rows("state", (free, grip, pan, ("spin", "rad/s", 0.0, 1.0)))
    usual = np.array([-500.0, -500.0, -9.0, -6.0]), np.array([500.0, 500.0, 9.0, 7.0])
    assert spec.find_far_angle(*usual) is None
    for element, low, high, text in (
        (2, -60.0, 9.0, "pan is -60, and its bound -3 rad"),
        (2, -9.0, 9.5, "pan is 9.5, and its bound 3 rad"),
        (3, 0.0, 90.0, "spin is 90, and its bound 1 rad/s"),
    ):
        lowest, highest = (each.copy() for each in usual)
        lowest[element], highest[element] = low, high
        assert spec.find_far_angle(lowest, highest) == text


def test_embodiment_stays_when_limits_or_the_safe_stop_change_and_the_fingerprint_does_not() -> None:
    spec = FakeRobot().spec
    gentle = replace(spec, limits=replace(spec.limits, reduced_speed=0.1, stale_after_s=0.2))
    faster = replace(spec, action=replace(spec.action, high=tuple(2 * high for high in spec.action.high)))
    limp = replace(spec, safe_stop="releases its motors")
    assert gentle.embodiment == limp.embodiment == spec.embodiment != faster.embodiment
    assert len({gentle.fingerprint, limp.fingerprint, spec.fingerprint}) == 3
