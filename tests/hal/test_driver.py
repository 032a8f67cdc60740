"""Drivers of other packages, and what they are told of a run's config."""

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
from hal.driver import Station, read_options
from robots.fake import FakeRobot, FakeRobotConfig, FakeTask

def make_robot_setup(request):
    return Station(request.name, FakeRobot(read_options(FakeRobotConfig, request)), FakeTask())
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers two drivers, one of which does not import."""
    (tmp_path / "lab_arms.py").write_text(OUTSIDE)
    (tmp_path / "lab_broken.py").write_text("import no_such_vendor_library\n")
    card = tmp_path / "lab_arms-1.0.dist-info"
    card.mkdir()
    (card / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-arms\nVersion: 1.0\n")
    (card / "entry_points.txt").write_text(
        "[user_sys.drivers]\nlab-arm = lab_arms:make_robot_setup\nlab-broken = lab_broken:make_robot_setup\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("outside")
def test_a_driver_of_another_package_is_found_by_its_name_in_the_config() -> None:
    assert "lab-arm" in installed_drivers()
    station = build_robot_setup(RobotConfig(name="left", driver="lab-arm", options={"rate_hz": 20.0}))
    with station.robot as robot:
        robot.stop(StopLevel.HOLD)
    assert (station.name, station.robot.spec.rate_hz, station.cameras) == ("left", 20.0, ())


@pytest.mark.usefixtures("outside")
def test_a_package_that_does_not_import_is_named_with_the_reason() -> None:
    with pytest.raises(SpecError, match="lab-broken.*lab_broken:make_robot_setup.*no_such_vendor_library"):
        load_driver("lab-broken")


def test_an_unknown_driver_is_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no driver 'frankenstein'; there are .*'fake'.*'sim'"):
        build_robot_setup(RobotConfig(driver="frankenstein"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 5.0}, "robot arm: unknown option 'rate'; did you mean 'rate_hz'"),
        ({"faults": {"drop_out": 3}}, "robot arm.faults: unknown option 'drop_out'; did you mean 'drop_out_at'"),
        ({"rate_hz": "fast"}, "robot arm: .*rate_hz"),
        ({"zzzzzz": 1}, "unknown option 'zzzzzz'; there are"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(options: dict[str, object], message: str) -> None:
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
def test_a_misspelt_option_within_an_option_is_told(options: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"arm\.(spare|cameras\.front): unknown option 'widht'; did you mean 'width'"):
        read_options(Rig, RobotSetupRequest("arm", "free", options))


def test_lists_in_the_config_become_tuples() -> None:
    config = read_options(
        FakeRobotConfig, RobotSetupRequest("arm", "reach", {"cameras": ["a"], "faults": {"nan_at": 3}})
    )
    assert config.cameras == ("a",) and config.faults.nan_at == 3
