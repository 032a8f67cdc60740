"""Real-time scheduling of driver and control loop, and its refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from edge_kit import driver_process, until

from user_sys.compose import RobotConfig
from user_sys.edge.driver_client import DriverClient

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize(("real_time", "realtime"), [(True, "auto"), (True, "off"), (False, "auto")])
def test_driver_gets_realtime_or_reports_the_refusal(tmp_path: Path, real_time: bool, realtime: str) -> None:
    config = RobotConfig(name="fake-0", driver="fake", real_time=real_time, realtime_scheduling=realtime)  # type: ignore[arg-type]
    with driver_process(tmp_path, config) as running, DriverClient("fake-0", token=1) as driver:
        driver.attach()
        asked = real_time and realtime == "auto"
        if asked:
            until(lambda: "realtime." in running.log, "it says what became of it")
        policy = os.sched_getscheduler(running.process.pid)
        assert (policy & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO) == (
            asked and "SCHED_FIFO" not in driver.refused_realtime
        )
        assert ("realtime.refused" in running.log) == bool(driver.refused_realtime)
        assert asked or not driver.refused_realtime


REFUSED = """
import resource
from user_sys.edge.realtime import enable_realtime
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
import os
if os.getuid() == 0:
    os.setuid(65534)
print(enable_realtime([4095]))
"""


def test_refusal_names_its_fix() -> None:
    output = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=300, check=True)
    assert "CPUs [4095]" in output.stdout
    assert "LimitRTPRIO" in output.stdout and "LimitMEMLOCK" in output.stdout
