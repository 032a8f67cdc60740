"""The one place that names concrete robots, simulations and policies; each is imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hal.camera import Camera
from hal.robot import Observation, Robot
from hal.spec import Array, RobotSpec
from hal.task import Task
from user_sys.config import build
from user_sys.errors import ConfigError
from user_sys.policies.policy import Policy

Expert = Callable[[Mapping[str, Array]], Array]


@dataclass(frozen=True)
class RobotConfig:
    """One robot of a run.

    Attributes:
        name: unique in the fleet and on its machine; part of episode names.
        driver: which driver drives it.
        task: what it is asked to do.
        real_time: the control period follows the clock. A simulated robot may run as fast as the machine allows
            instead; it follows the clock all the same while a person drives.
        frame_stride: without real time, pictures are taken in every so-many-th control period.
        options: the driver's own settings (`sim.robot.SimRobotConfig`, `robots.fake.FakeRobotConfig`).
    """

    name: str = "panda-0"
    driver: Literal["sim", "fake"] = "sim"
    task: str = "lift"
    real_time: bool = False
    frame_stride: int = 5
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Needs no hardware, so it can run anywhere."""
        return self.driver in ("sim", "fake")

    def __post_init__(self) -> None:
        if self.frame_stride < 1:
            raise ConfigError(f"robot {self.name}: frame_stride must be at least 1")
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"robot name {self.name!r}: use letters, digits, '-' and '_'")


def require_unique_names(robots: Sequence[RobotConfig]) -> None:
    """Raises ConfigError where two robots have the same name."""
    names = [robot.name for robot in robots]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"robots: the name {min(twice)!r} is given twice; names are unique in a fleet")


@dataclass(frozen=True)
class PolicyConfig:
    """Which policy acts, and which observations it reads (empty: all of the robot's vectors)."""

    kind: Literal["mlp"] = "mlp"
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Station:
    """A robot with all that belongs to it on its computer.

    `expert` makes a scripted demonstrator from a seed and a noise (a share of the action's bounds), where there is one.
    """

    name: str
    robot: Robot
    task: Task
    cameras: tuple[Camera, ...]
    expert: Callable[[int, float], Expert] | None


FILM_PIXELS = 256
"""Height and width of a simulated camera's pictures when people are to look at them."""


def build_station(config: RobotConfig, *, cameras: bool = True, film: bool = False) -> Station:
    """Builds robot, cameras and task; connects nothing. `film` asks for finer pictures where they are simulated.

    Raises:
        ConfigError: an option or a task that the driver does not have; the message lists what there is.
    """
    return _sim(config, cameras, film) if config.driver == "sim" else _fake(config, cameras)


def robot_spec(config: RobotConfig) -> RobotSpec:
    """The spec of the robot that `config` describes, without connecting to it."""
    return build_station(config, cameras=False).robot.spec


def _sim(config: RobotConfig, cameras: bool, film: bool) -> Station:
    from sim.robot import SimRobotConfig
    from sim.scenes import make_expert, make_robot, make_task

    finer = {"image_height": FILM_PIXELS, "image_width": FILM_PIXELS} if film else {}
    options = build(SimRobotConfig, {"scene": config.task, **config.options, **finer}, f"robot {config.name}")
    robot, task = make_robot(options), make_task(config.task)

    def expert(seed: int, noise: float) -> Expert:
        scripted = make_expert(config.task, robot.spec, noise, seed)
        return lambda arrays: scripted(Observation(arrays=arrays, t_capture_ns=0))

    if not cameras:
        return Station(config.name, robot, task, (), expert)
    from sim.rendering import make_cameras

    return Station(config.name, robot, task, tuple(make_cameras(robot).values()), expert)


def _fake(config: RobotConfig, cameras: bool) -> Station:
    from robots.fake import FakeCamera, FakeRobot, FakeRobotConfig, FakeTask, fake_expert

    robot = FakeRobot(build(FakeRobotConfig, config.options, f"robot {config.name}"))
    views = tuple(FakeCamera(robot, spec) for spec in robot.spec.cameras) if cameras else ()
    return Station(config.name, robot, FakeTask(), views, lambda seed, noise: fake_expert)


def make_policy(config: PolicyConfig, spec: RobotSpec, seed: int) -> Policy:
    """A policy without weights for the robot that `spec` describes. Raises SpecError for a feature that it lacks."""
    from user_sys.policies.mlp import MlpPolicy

    return MlpPolicy(spec, features=config.features, seed=seed)
