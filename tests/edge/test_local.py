"""A driver in this process: real robots are moved at their own pace, simulated ones as fast as the machine allows."""

from __future__ import annotations

from hal.station import StationRequest
from robots.fake import make_station
from user_sys.compose import RobotConfig
from user_sys.edge.local import Pace, local_driver

PERIOD_S = 0.1


class Clock:
    """Time that passes only while somebody sleeps, or a test says so."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds


def test_control_periods_follow_a_grid_and_lateness_is_not_made_up_by_haste() -> None:
    clock = Clock()
    pace = Pace(PERIOD_S, lambda: clock.now_s, clock.sleep)
    ends = []
    for work_s in (0.02, 0.09, 0.35, 0.0, 0.05):
        clock.now_s += work_s
        pace()
        ends.append(round(clock.now_s - 5.0, 6))
    assert ends == [0.1, 0.2, 0.65, 0.75, 0.85], "the third was late; a whole period follows it"


def test_a_real_robot_keeps_its_pace_and_a_simulated_one_need_not() -> None:
    station = make_station(StationRequest("arm-0", "reach", {}))
    for driver, real_time, paced in (("ur", True, True), ("ur", False, False), ("fake", True, False)):
        with local_driver(station, RobotConfig(name="arm-0", driver=driver, real_time=real_time)) as found:
            assert found.real_time is paced
            assert found.reset(0).observation
