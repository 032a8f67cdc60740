"""Settings and discovery of LeRobot's devices. This test does not need LeRobot."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.driver import RobotSetupRequest, read_options
from hal.errors import SpecError
from hal.resource import Kind
from robots.lerobot import LeaderConfig, LerobotConfig
from robots.lerobot_plugins import probe_plugins


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LerobotConfig, {"answer_within_s": 0.0}, "answer_within_s"),
        (LerobotConfig, {"settings": {"cameras": {}}}, "use the option `cameras`"),
        (LerobotConfig, {"type": "lekiwi_client"}, "type: lekiwi_client .*; run .* with the type lekiwi"),
        (LerobotConfig, {"features": {"*": {"unit": "degrees", "low": -180, "high": 180}}}, "not known; use deg"),
        (LeaderConfig, {"moved": 0.0}, "moved"),
        (LeaderConfig, {"let_go_s": 0.0}, "let_go_s"),
    ],
)
def test_unsafe_settings_are_refused(kind: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_options(kind, RobotSetupRequest("arm-0", "", {"type": "so101", **options}))


def test_probe_finds_plugins_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("__init__.py", "robots/so101_follower/__init__.py", "teleoperators/so101_leader/__init__.py"):
        (tmp_path / "lerobot" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lerobot" / path).write_text("raise RuntimeError('imported')")
    plugin = tmp_path / "lerobot_robot_crane-2.0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Name: lerobot-robot-crane\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {record.name: record for record in probe_plugins()}
    assert {"lerobot/robot/so101_follower", "lerobot/teleoperator/so101_leader", "lerobot/robot/crane"} <= set(found)
    crane = found["lerobot/robot/crane"]
    assert (crane.kind, crane.model, crane.labels) == (Kind.DRIVER, "crane", {"package": "lerobot_robot_crane 2.0"})
