"""The simulated arms' pace, against bare MuJoCo on the same motion. ``python -m benchmarks.simulation``"""

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
from sim.robot import ARMS, SimRobot, SimRobotConfig
from sim.tasks import make_task

GOAL = 0  # of the simulation none is stated
PERIODS = 300
SUBSTEPS = 50


class Lifting:
    """The scripted expert lifts cubes over and over: the mix of free motion and contact that training sees."""

    def __init__(self, model: str, cameras: int) -> None:
        self.robot: SimRobot = SimRobot(SimRobotConfig(model=model))
        self.robot.connect()
        self._task = make_task("lift", self.robot.config.arm)
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

    def __init__(self, model: mujoco.MjModel, held: mujoco.MjData | None = None, cameras: tuple[str, ...] = ()) -> None:
        self._model, self._data, self._cameras = model, mujoco.MjData(model), cameras
        if held is not None:
            self._data.qpos[:], self._data.act[:] = held.qpos, held.act
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


def held_cube(name: str) -> tuple[mujoco.MjModel, mujoco.MjData]:
    """The lift scene with the cube between the closed fingers."""
    robot = SimRobot(SimRobotConfig(model=name, cameras=()))
    robot.connect()
    arm = robot.config.arm
    x, y = np.mean(arm.cube_start_area, axis=0)
    height = arm.cube_edge_m / 2
    robot.world.reset(np.array([x, y, max(height, arm.workspace.low[2])]), {"cube": (x, y, height, 0.0)})
    for _ in range(8):
        robot.command(np.zeros(4, np.float32))
    return robot.world.model, robot.world.data


def physics_peers() -> dict[str, Callable[[], float]]:
    """The packaged Panda of gym-hil with its meshes and two-joint gripper, at rest, if it is installed."""
    found = importlib.util.find_spec("gym_hil")
    if found is None or found.origin is None:
        return {}
    path = Path(found.origin).parent / "assets" / "scene.xml"
    return {"gym-hil's panda": Bare(mujoco.MjModel.from_xml_path(str(path))).physics}


def rows() -> list[Row]:
    """The Panda's physics alone, then control periods without and with cameras; the other arms' without."""
    model, held = held_cube("panda")
    bare = Bare(model, held)
    result = [
        compare(
            "physics, cube in the grip", bare.physics, bare.physics, goal=GOAL, unit="steps/s", peers=physics_peers()
        )
    ]
    result += [periods("panda", views) for views in ((), ("front",), ("front", "wrist"))]
    return result + [periods(name, ()) for name in ARMS if name != "panda"]


def periods(name: str, views: tuple[str, ...]) -> Row:
    """Control periods of the arm called `name`, with those cameras."""
    ours, bound = Lifting(name, len(views)), Bare(*held_cube(name), views)
    title = f"{name}: control periods of {SUBSTEPS} steps, {len(views)} camera{'' if len(views) == 1 else 's'}"
    row = compare(title, ours.rate, bound.rate, goal=GOAL, unit="periods/s")
    ours.close()
    bound.close()
    return row


if __name__ == "__main__":
    report("simulation", rows())
