"""A Gymnasium environment that raises is a lost robot: its driver ends, and the session goes on with the next one."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from edge_kit import END_S, until
from session_kit import ROBOT, Site

from user_sys.compose import RobotConfig
from user_sys.edge.driver_server import EXIT_ROBOT_LOST
from user_sys.messages import StopRun
from user_sys.run.prepare import CONSOLE

pytest.importorskip("gymnasium")

MODULE = """
import gymnasium, numpy as np
from gymnasium import spaces

class Fragile(gymnasium.Env):
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 40:
            raise ZeroDivisionError("the simulator fell over")
        return np.array([0.0, action[0]], np.float32), 0.0, False, False, {}

gymnasium.register("Fragile-v0", entry_point=Fragile, max_episode_steps=15)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("runtime")
def test_environment_that_raises_is_a_lost_robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fragile.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    robot = RobotConfig(name=ROBOT.name, driver="gym", task="balance", options={"id": "fragile:Fragile-v0"})
    with ExitStack() as stack:
        site = Site(tmp_path / "run", stack, robots=(robot,))
        site.gateway()
        driver, session = site.driver(), site.session()
        console = site.client(CONSOLE)
        assert driver.process.wait(END_S) == EXIT_ROBOT_LOST
        assert "robot.lost gym fragile:Fragile-v0: a step failed: ZeroDivisionError: the simulator fell" in driver.log
        session.wait_for_log("driver.lost")
        stored = len(until(site.stored, "the first episodes arrive"))
        site.driver()  # as its supervisor does
        until(lambda: len(site.stored()) > stored + 2, "the session goes on")
        console.send(StopRun(reason="the test is over"))
        assert session.process.wait(END_S) == 0
    for chunk in site.chunks():
        assert chunk.header.task == "balance" and np.isfinite(chunk.columns["action"]).all()
