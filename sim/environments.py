"""The simulated tasks as Gymnasium environments, for other learners.

``import sim`` registers ``user_sim/PandaLift-v0``, ``user_sim/UR5eReach-v0`` and so on. So does
``gymnasium.make("sim:user_sim/PandaLift-v0")``.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hal.robot import Observation
from hal.spec import ENVIRONMENT_STATE, STATE, Array, ArraySpec
from sim.rendering import SimCamera
from sim.robot import SimRobot, SimRobotConfig
from sim.tasks import make_task

KEYS = {"state": STATE, "environment_state": ENVIRONMENT_STATE}


class ArmEnvironment(gymnasium.Env[dict[str, Any], Array]):
    """One simulated arm with one task.

    Observation: a dictionary of ``state`` and ``environment_state``, float32, in SI units, as in the robot's spec.
    Action: float32 (4,), each in [-1, 1]: mapped linearly to the bounds of the action spec.
    Reward: 1 at success, which ends the episode, else 0. ``info["is_success"]`` is the same as a boolean.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        task: str,
        model: str = "panda",
        render_mode: str | None = None,
        camera: str = "front",
        width: int = 480,
        height: int = 480,
    ) -> None:
        """Raises SpecError on an unknown task, model or camera."""
        self.render_mode = render_mode
        config = SimRobotConfig(model=model, scene=(task,), cameras=(camera,), image_width=width, image_height=height)
        self._task = make_task(task, config.arm)
        self._robot = SimRobot(config)
        self._robot.connect()
        self._camera: SimCamera | None = None
        self._steps = 0
        spec = self._robot.spec
        self.observation_space = spaces.Dict({key: _box(spec.feature(name)) for key, name in KEYS.items()})
        self.action_space = spaces.Box(-1.0, 1.0, spec.action.shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        super().reset(seed=seed)
        self._task.reset(self._robot, self.np_random)
        self._steps = 0
        return _named(self._robot.observe()), {"is_success": False}

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        spec = self._robot.spec.action
        low, high = np.array(spec.low), np.array(spec.high)
        share = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        self._robot.command((low + 0.5 * (share + 1.0) * (high - low)).astype(np.float32))
        observation = self._robot.observe()
        outcome = self._task.evaluate(observation)
        self._steps += 1
        truncated = not outcome.terminated and self._steps >= self._task.max_steps
        return _named(observation), outcome.reward, outcome.terminated, truncated, {"is_success": bool(outcome.success)}

    def render(self) -> Array | None:
        """The camera's image, uint8 (height, width, 3), or None without ``render_mode="rgb_array"``."""
        if self.render_mode is None:
            return None
        if self._camera is None:
            self._camera = SimCamera(self._robot, self._robot.spec.cameras[0])
            self._camera.connect()
        return self._camera.read().image

    def close(self) -> None:
        if self._camera is not None:
            self._camera.close()
            self._camera = None
        self._robot.close()


def _box(spec: ArraySpec) -> spaces.Box:
    return spaces.Box(np.array(spec.low, np.float32), np.array(spec.high, np.float32), dtype=np.float32)


def _named(observation: Observation) -> dict[str, Array]:
    return {key: observation.arrays[name] for key, name in KEYS.items()}
