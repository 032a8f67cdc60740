"""The registry of drivers, input devices, probes and policies. Each module is imported when it is first used.

Register a driver of this repository in `_BUILT_IN`; a driver of another package registers by an entry point
(`hal.driver`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from hal.discovery import Probe, configured_robots_probe, installed_probes, lazy_probe
from hal.doctor import OptionalLibrary
from hal.driver import (
    RobotSetup,
    RobotSetupFactory,
    RobotSetupRequest,
    TeleoperatorFactory,
    installed_drivers,
    load_driver,
)
from hal.errors import HalError, SpecError, install_hint
from hal.resource import Health, Kind, ResourceRecord, local_node
from hal.spec import RobotSpec
from hal.teleoperator import Teleoperator
from user_sys.config import as_dict, build
from user_sys.errors import ConfigError, UserSysError
from user_sys.messages import Precision
from user_sys.policies.policy import Policy
from user_sys.tunnel.endpoint import check_connect_endpoint


@dataclass(frozen=True)
class RobotConfig:
    """One robot of a run.

    Attributes:
        name: unique in the fleet; part of episode names.
        driver: sim, fake, lerobot, ur, franka, ros2, or the driver of an installed package.
        task: of the driver.
        real_time: whether the control period follows the clock; null: all but sim and fake. Simulated robots run as
            fast as the machine allows otherwise, and follow the clock while a person drives.
        realtime_scheduling: auto requests SCHED_FIFO and locked memory for a driver that follows the clock. If that is
            refused, the robot is driven all the same. off does not request them.
        explore: before the first weights: on acts at random, off holds, auto lets simulated robots explore.
        cpus: processors for the driver process; empty for all.
        frame_stride: without real_time, pictures are taken in every n-th control period.
        options: of the driver; see robots.md.
        teleoperators: input devices on the robot's computer; see robots.md.
        address: HOST:PORT that discovery probes, for a robot on a network.
        labels: facts for resource requests, such as {site: lab}.
        link: an emulated network between session and gateway; see links.md.
    """

    name: str = "panda-0"
    driver: str = "sim"
    task: str = "lift"
    real_time: bool | None = None
    realtime_scheduling: Literal["auto", "off"] = "auto"
    explore: Literal["auto", "on", "off"] = "auto"
    cpus: tuple[int, ...] = ()
    frame_stride: int = 5
    options: dict[str, Any] = field(default_factory=dict)
    teleoperators: tuple[dict[str, Any], ...] = ()
    address: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    link: dict[str, Any] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Whether it can run on any computer, without hardware."""
        return self.driver in ("sim", "fake")

    @property
    def explores(self) -> bool:
        """Whether a policy without weights may move it."""
        return self.simulated if self.explore == "auto" else self.explore == "on"

    @property
    def follows_clock(self) -> bool:
        """Whether the control period follows the clock. A real robot must: the limits of a step assume the period."""
        return not self.simulated if self.real_time is None else self.real_time

    def __post_init__(self) -> None:
        if self.frame_stride < 1:
            raise ConfigError(f"robot {self.name}: frame_stride must be at least 1")
        if self.driver in _BUILT_IN and not self.simulated and not self.follows_clock:
            raise ConfigError(
                f"robot {self.name}: real_time: false is for simulated robots, but {self.driver} moves a real one; "
                "leave out real_time"
            )
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"robot name {self.name!r}: use only letters, digits, '-' and '_'")


def require_unique_names(robots: Sequence[RobotConfig]) -> None:
    """Raises ConfigError if two robots have the same name."""
    names = [robot.name for robot in robots]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"robots: the name {min(twice)!r} is used twice; rename one robot")


Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class PolicyConfig:
    """Which policy acts, and where.

    Attributes:
        kind: of policy.
        features: observations that it reads; empty for all vectors of the robot.
        location: edge: in the robot's session; server: in one policy server for all robots of the run.
        device: of the policy server: cpu, cuda, or auto: a GPU if it has one.
        endpoint: tcp://HOST:PORT of a policy server that the run does not start.
        timeout_fraction: of a control period; the robot holds if the server does not answer within.
    """

    kind: Literal["mlp"] = "mlp"
    features: tuple[str, ...] = ()
    location: Literal["edge", "server"] = "edge"
    device: Device = "auto"
    endpoint: str = ""
    timeout_fraction: float = 0.5

    @property
    def is_started_by_run(self) -> bool:
        """Whether the run starts a policy server."""
        return self.location == "server" and not self.endpoint

    def __post_init__(self) -> None:
        if not 0 < self.timeout_fraction < 1:
            raise ConfigError(
                f"policy.timeout_fraction is {self.timeout_fraction:g}; it must be above 0 and below 1, a share of the "
                "control period, so that the robot holds before its driver takes the session for dead"
            )
        if self.location == "edge" and (self.device == "cuda" or self.endpoint):
            key, value = ("endpoint", self.endpoint) if self.endpoint else ("device", self.device)
            raise ConfigError(f"policy.{key} is {value}, which is for a policy server; add policy.location: server")
        if self.endpoint:
            check_connect_endpoint(self.endpoint, "policy.endpoint")


_BUILT_IN = {
    "sim": "sim.driver",
    "fake": "robots.fake",
    "lerobot": "robots.lerobot",
    "franka": "robots.franka",
    "ros2": "robots.ros2",
    "ur": "robots.ur",
}
"""Drivers of this repository, by the module whose ``make_robot_setup`` is their `hal.driver.RobotSetupFactory`."""

_TELEOPERATORS = {
    "gamepad": "robots.gamepad",
    "keyboard": "robots.keyboard",
    "lerobot": "robots.lerobot_leader",
    "spacemouse": "robots.spacemouse",
}
"""Input devices, by the module whose ``make_teleoperator`` is their `hal.driver.TeleoperatorFactory`."""


_PROBES: dict[str, tuple[str, str]] = {
    "lerobot": ("robots.lerobot_probe", "probe_plugins"),
    "ros2": ("robots.ros2_probe", "probe_graph"),
}
"""Probes of these drivers, by module and function (`hal.discovery`)."""


OPTIONAL_LIBRARIES = (
    OptionalLibrary("mujoco", "the driver sim", install_hint("sim")),
    OptionalLibrary("lerobot", "the driver lerobot", install_hint("lerobot")),
    OptionalLibrary("rtde_control", "the driver ur", install_hint("ur")),
    OptionalLibrary("franky", "the driver franka", install_hint("franka")),
    OptionalLibrary("rclpy", "the driver ros2", install_hint("ros2")),
    OptionalLibrary("pygame", "gamepads", install_hint("devices")),
    OptionalLibrary("pyspacemouse", "SpaceMice", install_hint("devices")),
    OptionalLibrary("cv2", "cameras of the drivers ur and franka", install_hint("cameras")),
    OptionalLibrary("pyrealsense2", "RealSense cameras", install_hint("realsense")),
)
"""Libraries that drivers and input devices import when they are used."""


def rendering_check_command() -> tuple[str, ...]:
    """The command that tests whether simulated cameras can be rendered here; empty without the extra `sim`."""
    return () if missing_library("sim") else (sys.executable, "-m", "sim.rendering")


def missing_library(driver: str) -> OptionalLibrary | None:
    """The library that the driver needs and this computer lacks, or None."""
    needed = (library for library in OPTIONAL_LIBRARIES if library.purpose == f"the driver {driver}")
    return next((library for library in needed if find_spec(library.module) is None), None)


def resource_probes(robots: Sequence[RobotConfig] = (), *, lenient: bool = False) -> dict[str, Probe]:
    """All probes for hardware: of the robots in a config, of the hardware layer, of drivers and installed packages.

    Args:
        lenient: a robot that cannot be built is LOST, and its record has the reason. A robot whose driver lacks a
            library here is LOST in any case.

    Raises:
        ConfigError: a robot cannot be built, and `lenient` is False.
    """
    found: dict[str, Probe] = {"config": _configured_robots_probe(robots, lenient)} if robots else {}

    def loader(module: str, function: str) -> Callable[[], Any]:
        return lambda: getattr(import_module(module), function)

    return found | installed_probes() | {name: lazy_probe(loader(*where)) for name, where in _PROBES.items()}


def _configured_robots_probe(robots: Sequence[RobotConfig], lenient: bool) -> Probe:
    specs: dict[str, RobotSpec] = {}
    unbuilt: list[ResourceRecord] = []
    for robot in robots:
        try:
            specs[robot.name] = robot_spec(robot)
        except Exception as error:  # a foreign driver may fail in any way
            if not lenient:
                raise
            unbuilt.append(_unbuildable_record(robot, error))
    look = configured_robots_probe(
        specs,
        addresses={robot.name: robot.address for robot in robots if robot.address and robot.name in specs},
        labels={robot.name: robot.labels for robot in robots},
    )

    lacks = {robot.name: library for robot in robots if (library := missing_library(robot.driver)) is not None}

    def probe() -> Iterator[ResourceRecord]:
        yield from unbuilt
        for record in look():
            yield _with_missing_library(lacks[record.name], record) if record.name in lacks else record

    return probe


def _with_missing_library(library: OptionalLibrary, record: ResourceRecord) -> ResourceRecord:
    trouble = f"{library.purpose} needs {library.module}, which is not installed here: {library.install}"
    return msgspec.structs.replace(record, health=Health.LOST, trouble=trouble)


def _unbuildable_record(robot: RobotConfig, error: Exception) -> ResourceRecord:
    return ResourceRecord(
        kind=Kind.ROBOT,
        name=robot.name,
        model="",
        node=local_node(),
        labels={"driver": robot.driver, **robot.labels},
        health=Health.LOST,
        trouble=build_error_message(robot, error).removeprefix(f"robot {robot.name}: "),
    )


def build_error_message(robot: RobotConfig, error: Exception) -> str:
    """The error in one line that names the robot."""
    says = str(error) if isinstance(error, UserSysError | HalError) else f"{type(error).__name__}: {error}"
    return says if says.startswith(f"robot {robot.name}") else f"robot {robot.name}: {says}"


def build_robot_setup(config: RobotConfig, *, cameras: bool = True, high_resolution: bool = False) -> RobotSetup:
    """Builds robot, cameras, task and input devices, without connecting.

    Args:
        cameras: whether to build the cameras.
        high_resolution: of simulated pictures.

    Raises:
        ConfigError: the driver, or one of its options or tasks, is unknown; the message lists the known ones.
    """
    request = RobotSetupRequest(config.name, config.task, config.options, cameras, high_resolution)
    try:
        station = _factory(config.name, config.driver)(request)
        inputs = [_teleoperator(config.name, settings, station.robot.spec) for settings in config.teleoperators]
        return replace(station, teleoperators=(*station.teleoperators, *inputs))
    except SpecError as error:
        raise ConfigError(str(error)) from error


def _teleoperator(robot: str, settings: Mapping[str, Any], spec: RobotSpec) -> Teleoperator:
    options = dict(settings)
    kind = options.pop("kind", None)
    if kind not in _TELEOPERATORS:
        raise ConfigError(f"robot {robot}: unknown input device kind {kind!r}; use one of {sorted(_TELEOPERATORS)}")
    factory: TeleoperatorFactory = import_module(_TELEOPERATORS[kind]).make_teleoperator
    return factory(RobotSetupRequest(robot, "", options), spec)


def _factory(robot: str, driver: str) -> RobotSetupFactory:
    if driver not in _BUILT_IN:
        if driver not in installed_drivers():
            there = sorted([*_BUILT_IN, *installed_drivers()])
            raise ConfigError(f"robot {robot}: no driver {driver!r}; there are {there}")
        return load_driver(driver)
    factory: RobotSetupFactory = import_module(_BUILT_IN[driver]).make_robot_setup
    return factory


def robot_spec(config: RobotConfig) -> RobotSpec:
    """The spec of the robot that `config` describes, without connecting to it. Raises ConfigError."""
    return build_robot_setup(config, cameras=False).robot.spec


def emulated_link_settings(config: RobotConfig, endpoint: str, gateway: str) -> dict[str, Any]:
    """What `emulated_link_command` reads: the emulated link from `endpoint`, which the session dials, to `gateway`.

    Raises:
        ConfigError: an unknown setting.
    """
    from sim.network_emulator import LinkConfig

    link = build(LinkConfig, config.link, f"robot {config.name}: link")
    listen, target = endpoint.removeprefix("tcp://"), gateway.removeprefix("tcp://")
    return {"listen": listen, "target": target, **as_dict(link)}


def emulated_link_command(settings: Path) -> tuple[str, ...]:
    """The command of an emulated link. It appends its byte counts to a ``.jsonl`` file in the folder of `settings`."""
    counts = settings.with_suffix(".jsonl")
    return (sys.executable, "-m", "sim.network_emulator", "--config", str(settings), "--counts", str(counts))


def make_policy(config: PolicyConfig, spec: RobotSpec, seed: int) -> Policy:
    """A numpy policy without weights for a robot with this spec.

    Raises SpecError: the robot lacks a feature.
    """
    from user_sys.policies.mlp import MlpPolicy

    return MlpPolicy(spec, features=config.features, seed=seed)


def policy_factory(device: str) -> Callable[[str, tuple[str, ...], RobotSpec, int], Policy]:
    """The constructor of a policy server's policies: numpy policies on ``cpu``, torch policies on other devices."""

    def make(kind: str, features: tuple[str, ...], spec: RobotSpec, seed: int) -> Policy:
        config = build(PolicyConfig, {"kind": kind, "features": list(features)}, "policy")
        if device == "cpu":
            return make_policy(config, spec, seed)
        from user_sys.policies.mlp_torch import TorchMlpPolicy

        return TorchMlpPolicy(spec, device, features=config.features, seed=seed)

    return make


def policy_precisions(config: PolicyConfig) -> tuple[Precision, ...]:
    """The forms of weights that such a policy acts well with (`Policy.forms`)."""
    from user_sys.policies.mlp import MlpPolicy

    return MlpPolicy.precisions
