"""Unsafe settings of LeRobot's devices are refused with an explanation. This test does not need LeRobot."""

from __future__ import annotations

import pytest

from hal.driver import RobotSetupRequest, read_options
from hal.errors import SpecError
from robots.lerobot import LerobotConfig
from robots.lerobot_leader import LeaderConfig


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LerobotConfig, {"answer_within_s": 0.0}, "answer_within_s is .*; it must be above 0"),
        (
            LerobotConfig,
            {"features": {"*": {"unit": "degrees", "low": -180, "high": 180}}},
            "'degrees' is not known; use deg",
        ),
        (LeaderConfig, {"moved": 0.0}, "moved is 0; it must be"),
        (LeaderConfig, {"let_go_s": 0.0}, "let_go_s and answer_within_s must be above 0"),
    ],
)
def test_unsafe_settings_are_refused(kind: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_options(kind, RobotSetupRequest("arm-0", "", {"type": "so101", **options}))
