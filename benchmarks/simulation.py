"""The simulated arm's pace, against bare MuJoCo on the same motion. ``python -m benchmarks.simulation``"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")  # for MuJoCo's own renderer; read when it is imported

import mujoco
import numpy as np

from benchmarks.harness import Row, compare, report
from sim.experts import make_expert
from sim.rendering import make_cameras
from sim.robot import SimRobot, SimRobotConfig
from sim.scenes import make_task

GOAL = 12  # the demo, whose robot this is
PERIODS = 300
SUBSTEPS = 50


class Lifting:
    """The scripted expert lifts cubes over and over: the mix of free motion and contact that training sees."""

    def __init__(self, cameras: int) -> None:
        self.robot: SimRobot = SimRobot(SimRobotConfig())
        self.robot.connect()
        self._task = make_task("lift")
        self._expert = make_expert("lift", self.robot)
        self._rng = np.random.default_rng(0)
        self._cameras = list(make_cameras(self.robot).values())[:cameras]
        for camera in self._cameras:
            camera.connect()

    def rate(self) -> float:
        """Control periods a second: observe, act, judge, and read the cameras."""
        start, done = time.perf_counter(), 0
        while done < PERIODS:
            done += self._episode()
        return done / (time.perf_counter() - start)

    def _episode(self) -> int:
        self._task.reset(self.robot, self._rng)
        observation = self.robot.observe()
        for step in range(self._task.max_steps):
            self.robot.command(self._expert(observation))
            for camera in self._cameras:
                camera.read()
            observation = self.robot.observe()
            if self._task.evaluate(observation).terminated:
                return step + 1
        return self._task.max_steps

    def close(self) -> None:
        for camera in self._cameras:
            camera.close()
        self.robot.close()


class Bare:
    """MuJoCo alone: the same model holding a cube, the same number of physics steps, its own renderer."""

    def __init__(self, model: mujoco.MjModel, qpos: np.ndarray | None = None, cameras: tuple[str, ...] = ()) -> None:
        self._model, self._data, self._cameras = model, mujoco.MjData(model), cameras
        if qpos is not None:
            self._data.qpos[:] = qpos
            self._data.act[:7] = qpos[:7]
        self._renderer = mujoco.Renderer(model, 128, 128) if cameras else None

    def rate(self) -> float:
        """Control periods a second."""
        start = time.perf_counter()
        for _ in range(PERIODS):
            mujoco.mj_step(self._model, self._data, nstep=SUBSTEPS)
            if self._renderer is not None:
                for camera in self._cameras:
                    self._renderer.update_scene(self._data, camera)
                    self._renderer.render()
        return PERIODS / (time.perf_counter() - start)

    def physics(self) -> float:
        """Physics steps a second."""
        return self.rate() * SUBSTEPS

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()


def held_cube() -> tuple[mujoco.MjModel, np.ndarray]:
    """The lift scene with the cube between the closed fingers."""
    robot = SimRobot(SimRobotConfig(cameras=()))
    robot.connect()
    robot.world.reset(np.array([0.5, 0.0, 0.02]), np.array([0.5, 0.0, 0.02]))
    for _ in range(8):
        robot.command(np.zeros(4, np.float32))
    return robot.world.model, robot.world.data.qpos.copy()


def physics_peers() -> dict[str, Callable[[], float]]:
    """The packaged Panda of gym-hil with its meshes and two-joint gripper, at rest, where it is installed."""
    found = importlib.util.find_spec("gym_hil")
    if found is None or found.origin is None:
        return {}
    path = Path(found.origin).parent / "assets" / "scene.xml"
    return {"gym-hil's panda": Bare(mujoco.MjModel.from_xml_path(str(path))).physics}


def rows() -> list[Row]:
    """Physics alone, then control periods without and with cameras."""
    model, qpos = held_cube()
    bare = Bare(model, qpos)
    result = [
        compare(
            "physics, cube in the grip", bare.physics, bare.physics, goal=GOAL, unit="steps/s", peers=physics_peers()
        )
    ]
    for count, views in enumerate(((), ("front",), ("front", "wrist"))):
        ours, bound = Lifting(count), Bare(model, qpos, views)
        name = f"control periods of {SUBSTEPS} steps, {count} camera{'' if count == 1 else 's'}"
        result.append(compare(name, ours.rate, bound.rate, goal=GOAL, unit="periods/s"))
        ours.close()
        bound.close()
    return result


if __name__ == "__main__":
    report("simulation", rows())
