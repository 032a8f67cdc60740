"""Drivers of other packages, and their options in a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hal.driver import RobotSetupRequest, installed_drivers, load_driver, read_options
from hal.errors import SpecError
from hal.robot import StopLevel
from robots.fake import FakeRobotConfig
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.errors import ConfigError

OUTSIDE = """
from hal.driver import RobotSetup, read_options
from robots.fake import FakeRobot, FakeRobotConfig, FakeTask

def make_robot_setup(request):
    return RobotSetup(request.name, FakeRobot(read_options(FakeRobotConfig, request)), FakeTask())
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers two drivers, one of which does not import."""
    (tmp_path / "lab_arms.py").write_text(OUTSIDE)
    (tmp_path / "lab_broken.py").write_text("import no_such_vendor_library\n")
    metadata = tmp_path / "lab_arms-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-arms\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[user_sys.drivers]\nlab-arm = lab_arms:make_robot_setup\nlab-broken = lab_broken:make_robot_setup\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("outside")
def test_installed_driver_is_found_by_name() -> None:
    assert "lab-arm" in installed_drivers()
    setup = build_robot_setup(RobotConfig(name="left", driver="lab-arm", options={"rate_hz": 20.0}))
    with setup.robot as robot:
        robot.stop(StopLevel.HOLD)
    assert (setup.name, setup.robot.spec.rate_hz, setup.cameras) == ("left", 20.0, ())


@pytest.mark.usefixtures("outside")
def test_package_that_fails_to_import_is_named_with_reason() -> None:
    with pytest.raises(SpecError, match="lab-broken.*lab_broken:make_robot_setup.*no_such_vendor_library"):
        load_driver("lab-broken")


def test_unknown_driver_error_lists_known_drivers() -> None:
    with pytest.raises(ConfigError, match="robot panda-0: no driver 'frankenstein'; known are fake.* sim"):
        build_robot_setup(RobotConfig(driver="frankenstein"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 5.0}, "robot arm: rate: unknown key; did you mean 'rate_hz'"),
        ({"faults": {"drop_out": 3}}, "robot arm: faults.drop_out: unknown key; did you mean 'faults.drop_out_at'"),
        ({"rate_hz": "fast"}, "robot arm: rate_hz: expected a number, got 'fast'"),
        ({"zzzzzz": 1}, "zzzzzz: unknown key; known are rate_hz, "),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_options(FakeRobotConfig, RobotSetupRequest("arm", "reach", options))


@dataclass(frozen=True)
class Lens:
    width: int = 640


@dataclass(frozen=True)
class Rig:
    spare: Lens | None = None
    cameras: dict[str, Lens] = field(default_factory=dict)


@pytest.mark.parametrize("options", [{"spare": {"widht": 3}}, {"cameras": {"front": {"widht": 3}}}])
def test_misspelt_nested_option_is_refused_with_suggestion(options: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"arm: (spare|cameras\.front)\.widht: unknown key; did you mean '\1\.width'"):
        read_options(Rig, RobotSetupRequest("arm", "free", options))


def test_lists_of_config_become_tuples() -> None:
    config = read_options(
        FakeRobotConfig, RobotSetupRequest("arm", "reach", {"cameras": ["a"], "faults": {"nan_at": 3}})
    )
    assert config.cameras == ("a",) and config.faults.nan_at == 3
