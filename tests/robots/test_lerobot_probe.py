from __future__ import annotations

from pathlib import Path

import pytest

from hal.resource import Kind
from robots.lerobot_probe import probe_plugins


def test_probe_finds_plugins_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("__init__.py", "robots/so101_follower/__init__.py", "cameras/opencv/__init__.py"):
        (tmp_path / "lerobot" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lerobot" / path).write_text("raise RuntimeError('imported')")
    plugin = tmp_path / "lerobot_robot_crane-2.0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Name: lerobot-robot-crane\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {record.name: record for record in probe_plugins()}
    assert {"lerobot/robot/so101_follower", "lerobot/camera/opencv", "lerobot/robot/crane"} <= set(found)
    crane = found["lerobot/robot/crane"]
    assert (crane.kind, crane.model, crane.labels) == (Kind.DRIVER, "crane", {"package": "lerobot_robot_crane 2.0"})
