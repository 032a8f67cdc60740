"""The registry of drivers, input devices, probes and policies. Each module is imported when it is first used.

Register a driver of this repository in `_BUILT_IN`; a driver of another package registers by an entry point
(`hal.driver`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from hal.discovery import PROBE_GROUP, Probe, configured_robots_probe, installed_probes, lazy_probe
from hal.doctor import OptionalLibrary
from hal.driver import RobotSetup, RobotSetupRequest, TeleoperatorFactory, load_driver
from hal.errors import HalError, SpecError, install_hint
from hal.resource import Health, Kind, ResourceRecord, local_node
from hal.settings import Count, Name, load_plugin
from hal.spec import Array, RobotSpec
from hal.task import TaskRequest
from user_sys.config import as_dict, build
from user_sys.errors import ConfigError, UserSysError
from user_sys.plugins import load_policy
from user_sys.policies.policy import ExecutionConfig, Policy
from user_sys.robot_records import SIMULATED_DRIVERS
from user_sys.tunnel.limits import MAX_PICTURE_BYTES, check_connect_endpoint

if TYPE_CHECKING:
    from sim.kinematics import ArmDrawing as ArmDrawing
    from sim.kinematics import Shape as Shape


@dataclass(frozen=True)
class TaskConfig:
    """One of several tasks of a robot, or a task with settings.

    Attributes:
        name: of the driver's tasks, or of an installed package's.
        options: of the task.
        sentence: the instruction for the policy; empty for the task's own.
        paraphrase: draw the instruction in each episode from the task's sentences.
        evaluated: an old task, which the robot evaluates at intervals and does not practise.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    sentence: str = ""
    paraphrase: bool = False
    evaluated: bool = False

    def to_request(self) -> TaskRequest:
        return TaskRequest(self.name, self.options, self.sentence, self.paraphrase)


@dataclass(frozen=True)
class RobotConfig:
    """One robot of a run.

    Attributes:
        name: unique in the fleet; part of episode names.
        driver: sim, gym, fake, lerobot, ur, franka, ros2, or the driver of an installed package.
        task: a name or list; see tasks.md. Each episode draws one of a list; an item is a name or a section.
        evaluate_every: each n-th episode; see tasks.md. All are if there are evaluated tasks only.
        real_time: follow the clock; null: all but sim, gym and fake. Simulated robots run
            as fast as the machine allows otherwise, and follow the clock while a person drives.
        realtime_scheduling: auto requests SCHED_FIFO and locked memory for a driver that follows the clock. If that is
            refused, the robot is driven all the same. off does not request them.
        explore: before the first weights: on acts at random, off holds, auto lets simulated robots explore.
        cpus: processors for the driver process; empty for all.
        frame_stride: pictures every n-th period; without real_time. A policy that reads pictures needs 1.
        options: of the driver; see robots.md.
        teleoperators: input devices; see devices.md.
        address: HOST:PORT that discovery probes.
        description: an MJCF or URDF file; or panda, so101 or ur5e. With it the console draws the robot, and people
            drive the tool of a robot whose actions are joint steps or targets.
        labels: such as {site: lab}; for resource requests.
        link: an emulated network; see tunnel.md.
    """

    name: Name = "panda-0"
    driver: str = "sim"
    task: str | TaskConfig | tuple[str | TaskConfig, ...] = "lift"
    evaluate_every: Annotated[int, Meta(ge=2)] = 4
    real_time: bool | None = None
    realtime_scheduling: Literal["auto", "off"] = "auto"
    explore: Literal["auto", "on", "off"] = "auto"
    cpus: tuple[int, ...] = ()
    frame_stride: Count = 5
    options: dict[str, Any] = field(default_factory=dict)
    teleoperators: tuple[dict[str, Any], ...] = ()
    address: str = ""
    description: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    link: dict[str, Any] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[TaskConfig, ...]:
        """All tasks."""
        listed = self.task if isinstance(self.task, tuple) else (self.task,)
        return tuple(TaskConfig(each) if isinstance(each, str) else each for each in listed)

    @property
    def simulated(self) -> bool:
        """Whether it can run on any computer, without hardware."""
        return self.driver in SIMULATED_DRIVERS

    @property
    def explores(self) -> bool:
        """Whether a policy without weights may move it."""
        return self.simulated if self.explore == "auto" else self.explore == "on"

    @property
    def follows_clock(self) -> bool:
        """Whether the control period follows the clock. A real robot must: the limits of a step assume the period."""
        return not self.simulated if self.real_time is None else self.real_time

    @property
    def picture_stride(self) -> int:
        """Pictures are taken in every n-th control period, in training as in evaluation; for a film in each one."""
        return 1 if self.follows_clock else self.frame_stride

    def __post_init__(self) -> None:
        if self.driver in _BUILT_IN and not self.simulated and not self.follows_clock:
            raise ConfigError(
                f"robot {self.name}: real_time: false is for simulated robots, but {self.driver} moves a real one; "
                "leave out real_time"
            )


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
        kind: see algorithms.md; or a package's.
        options: settings of the policy.
        features: observations; empty for all vectors.
        location: auto (edge if the policy acts without torch, else server), edge (in the robot's session), or server
            (one policy server for all robots of the run).
        device: of the policy server: cpu, cuda, or auto: a GPU if it has one.
        endpoint: of a policy server outside the run, tcp://HOST:PORT.
        timeout_fraction: of a control period; the robot holds if the server does not answer within.
        patience_s: seconds that a simulated robot without real_time waits instead, and a request of asynchronous
            execution; raise it for a large policy without a GPU.
        execution: how a robot executes the policy's action chunks.
    """

    kind: str = "mlp"
    options: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    location: Literal["auto", "edge", "server"] = "auto"
    device: Device = "auto"
    endpoint: str = ""
    timeout_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    patience_s: Annotated[float, Meta(gt=0, le=60)] = 2.0
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    @property
    def is_started_by_run(self) -> bool:
        """Whether the run starts a policy server."""
        return policy_location(self) == "server" and not self.endpoint

    def __post_init__(self) -> None:
        if self.location == "edge" and (self.device == "cuda" or self.endpoint):
            key, value = ("endpoint", self.endpoint) if self.endpoint else ("device", self.device)
            raise ConfigError(f"policy.{key} is {value}, which is for a policy server; add policy.location: server")
        if self.endpoint:
            check_connect_endpoint(self.endpoint, "policy.endpoint")


def policy_location(config: PolicyConfig) -> Literal["edge", "server"]:
    """Where the policy acts: `PolicyConfig.location`, with ``auto`` resolved.

    The policy is imported only if that decides it.

    Raises:
        ConfigError: there is no such policy, or it cannot act in a session.
    """
    if config.location == "server" or config.endpoint or config.device == "cuda":
        return "server"
    try:
        acts_without_torch = load_policy(config.kind, config.options)[0].acts_without_torch
    except ConfigError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ImportError):
            cause = cause.__cause__
        if cause is None or cause.name != "torch":
            raise
        acts_without_torch = False  # its module imports torch, which a robot's computer need not have
    if acts_without_torch:
        return "edge"
    if config.location == "edge":
        raise ConfigError(
            f"policy.location is edge, but the policy {config.kind} acts with torch, which a robot's session does not "
            "import; leave out policy.location"
        )
    return "server"


def select_cameras(policy: PolicyConfig, robot: RobotConfig) -> tuple[str, ...]:
    """The cameras of the robot that the policy reads. Builds neither.

    Raises ConfigError: the robot lacks one, or the policy cannot act for it.
    """
    try:
        return _select_cameras(policy, robot_spec(robot))
    except SpecError as error:
        raise ConfigError(build_error_message(robot, error)) from error


def _select_cameras(policy: PolicyConfig, spec: RobotSpec) -> tuple[str, ...]:
    """As `select_cameras`; SpecError: the policy cannot act for the robot."""
    kind, settings = load_policy(policy.kind, policy.options)
    kind.check_robot(spec, settings, policy.features)
    return kind.select_cameras(spec, settings)


def picture_bytes(policy: PolicyConfig, spec: RobotSpec) -> int:
    """Bytes of the pictures that the policy reads in one observation. Raises SpecError, ConfigError: it cannot act."""
    cameras = _select_cameras(policy, spec)
    return sum(math.prod(camera.shape) for camera in spec.cameras if camera.name in cameras)


def check_pictures(policy: PolicyConfig, robot: RobotConfig, *, at_server: bool = False) -> None:
    """Checks that the robot can give the pictures that the policy reads. Connects to no device.

    Args:
        at_server: only its policy server's computer need have the policy's packages and files. Nothing is checked if
            they are not here.

    Raises:
        ConfigError: the robot lacks a camera, takes too few pictures, or they are too large for a policy server.
    """
    spec = robot_spec(robot)
    try:
        cameras = _select_cameras(policy, spec)
    except SpecError as error:
        raise ConfigError(build_error_message(robot, error)) from error
    except ConfigError:
        if at_server:
            return
        raise
    if cameras and robot.picture_stride > 1:
        raise ConfigError(
            f"robot {robot.name}: frame_stride is {robot.frame_stride}, but the policy {policy.kind} reads pictures in "
            "each control period; set frame_stride: 1"
        )
    size_bytes = picture_bytes(policy, spec)
    if size_bytes > MAX_PICTURE_BYTES and policy_location(policy) == "server":
        raise ConfigError(
            f"robot {robot.name}: the pictures of {', '.join(cameras)} have {size_bytes} bytes, and a policy server "
            f"takes {MAX_PICTURE_BYTES} in one observation; make them smaller, or name fewer in policy.options.cameras"
        )


def check_execution(policy: PolicyConfig, *, at_server: bool = False) -> None:
    """Checks that the policy can do the method of asynchronous execution, with chunks that bridge `delay_periods`.

    Args:
        at_server: see `check_pictures`.

    Raises:
        ConfigError: it cannot, or its chunks are too short.
    """
    if policy.execution.mode == "wait":
        return
    try:
        kind, settings = load_policy(policy.kind, policy.options)
        delays = kind.execution_delays(settings)
    except ConfigError:
        if at_server:
            return
        raise
    method, wanted = policy.execution.method, policy.execution.delay_periods
    if method not in delays:
        raise ConfigError(
            f"policy.execution.method is {method}, which the policy {policy.kind} cannot do with its present "
            f"policy.options; use one of {', '.join(delays)}"
        )
    least, shown = (1, "measured, which is 1 at least") if wanted == "measured" else (wanted, wanted)
    if least > delays[method]:
        raise ConfigError(
            f"policy.execution.delay_periods is {shown}, and the policy {policy.kind} bridges at most "
            f"{delays[method]} with the method {method}: a chunk needs two actions for each (policy.options)"
        )


_BUILT_IN = {
    "sim": "sim.tasks:make_robot_setup",
    "fake": "robots.fake:make_robot_setup",
    "gym": "sim.gym:make_robot_setup",
    "lerobot": "robots.lerobot:make_robot_setup",
    "franka": "robots.franka:make_robot_setup",
    "ros2": "robots.ros2:make_robot_setup",
    "ur": "robots.ur:make_robot_setup",
}
"""The `hal.driver.RobotSetupFactory` of each driver of this repository."""

TELEOPERATOR_GROUP = "user_sys.teleoperators"
_TELEOPERATORS = {
    "gamepad": "robots.input_devices:make_gamepad",
    "lerobot": "robots.lerobot:make_teleoperator",
    "spacemouse": "robots.input_devices:make_space_mouse",
}
"""The `hal.driver.TeleoperatorFactory` of each input device of this repository."""

_PROBES = {"lerobot": "robots.lerobot_plugins:probe_plugins", "ros2": "robots.ros2_node:probe_graph"}
"""Probes of these drivers (`hal.discovery`)."""


OPTIONAL_LIBRARIES = (
    OptionalLibrary("mujoco", "the driver sim", install_hint("sim")),
    OptionalLibrary("gymnasium", "the driver gym", install_hint("sim")),
    OptionalLibrary("lerobot", "the driver lerobot", install_hint("lerobot")),
    OptionalLibrary("rtde_control", "the driver ur", install_hint("ur")),
    OptionalLibrary("franky", "the driver franka", install_hint("franka")),
    OptionalLibrary("rclpy", "the driver ros2", install_hint("ros2")),
    OptionalLibrary("pygame", "gamepads", install_hint("devices")),
    OptionalLibrary("pyspacemouse", "SpaceMice", install_hint("devices")),
    OptionalLibrary("cv2", "cameras of the drivers ur, franka and lerobot", install_hint("cameras")),
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
    ours = {name: lazy_probe(partial(load_plugin, PROBE_GROUP, name, _PROBES)) for name in _PROBES}
    return found | installed_probes() | ours


def _configured_robots_probe(robots: Sequence[RobotConfig], lenient: bool) -> Probe:
    specs: dict[str, RobotSpec] = {}
    unbuilt: list[ResourceRecord] = []
    for robot in robots:
        try:
            specs[robot.name] = robot_spec(robot)
        except Exception as error:  # a foreign driver may fail in any way
            if not lenient:
                raise
            trouble = build_error_message(robot, error).removeprefix(f"robot {robot.name}: ")
            unbuilt.append(lost_robot(robot, trouble, local_node()))
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


def lost_robot(robot: RobotConfig, trouble: str, node: str = "") -> ResourceRecord:
    """The record of a robot that is not there, for a reason that people read."""
    record = ResourceRecord(kind=Kind.ROBOT, name=robot.name, model="", node=node, health=Health.LOST, trouble=trouble)
    return msgspec.structs.replace(record, labels={"driver": robot.driver, **robot.labels})


def build_error_message(robot: RobotConfig, error: Exception) -> str:
    """The error in one line that names the robot."""
    says = str(error) if isinstance(error, UserSysError | HalError) else f"{type(error).__name__}: {error}"
    return says if says.startswith(f"robot {robot.name}") else f"robot {robot.name}: {says}"


def build_robot_setup(config: RobotConfig, *, cameras: bool = True, film: bool = False) -> RobotSetup:
    """Builds robot, cameras, task and input devices, without connecting.

    Args:
        cameras: whether to build the cameras.
        film: whether to build the film cameras of a simulated robot.

    Raises:
        ConfigError: the driver, or one of its options or tasks, is unknown; the message lists the known ones.
    """
    if not config.tasks:
        raise ConfigError(f"robot {config.name}: task: the list is empty; name a task")
    tasks = tuple(each.to_request() for each in config.tasks)
    request = RobotSetupRequest(config.name, tasks[0].name, config.options, cameras, film, tasks)
    try:
        station = load_driver(config.driver, _BUILT_IN)(request)
        for settings in config.teleoperators:
            station = _with_teleoperator(station, settings)
        return station
    except SpecError as error:
        raise ConfigError(build_error_message(config, error)) from error


def _with_teleoperator(setup: RobotSetup, settings: Mapping[str, Any]) -> RobotSetup:
    options = dict(settings)
    kind = str(options.pop("kind", ""))
    if kind == "scripted":
        from robots.scripted_operator import with_scripted_operator

        return with_scripted_operator(setup, options)
    make: TeleoperatorFactory = load_plugin(TELEOPERATOR_GROUP, kind, _TELEOPERATORS)
    device = make(RobotSetupRequest(setup.name, "", options), setup.robot.spec)
    return replace(setup, teleoperators=(*setup.teleoperators, device))


def robot_spec(config: RobotConfig) -> RobotSpec:
    """The spec of the robot that `config` describes, without connecting to it. Raises ConfigError."""
    return describe_robot(config).spec


JointVelocities = Callable[[Array, Array], Array]
"""See `sim.kinematics.ArmKinematics.joint_velocities`."""


def make_joint_velocities(description: str, spec: RobotSpec) -> JointVelocities:
    """Loads the kinematics of `RobotConfig.description`.

    Raises:
        SpecError: the file cannot be read, or does not fit the robot.
        ConfigError: this computer lacks MuJoCo.
    """
    if library := missing_library("sim"):
        raise ConfigError(f"a description needs {library.module}, which is not installed here: {library.install}")
    from sim.kinematics import ArmKinematics

    return ArmKinematics(description, spec).joint_velocities


def drawing_source(config: RobotConfig) -> str:
    """What a 3D view of the robot is drawn from, see `sim.kinematics.ArmDrawing`; empty if that is unknown."""
    if config.description or config.driver != "sim":
        return config.description
    return str(config.options.get("model", "panda"))


def draw_arm(source: str, spec: RobotSpec) -> ArmDrawing:
    """See `sim.kinematics.ArmDrawing`; needs MuJoCo."""
    from sim.kinematics import ArmDrawing

    return ArmDrawing(source, spec)


class RobotDescription(NamedTuple):
    """`has_expert`: each of the robot's tasks has a scripted expert. `is_judged`: a person judges at least one.
    `max_steps`: of its first task. `tasks`: their names.
    """

    spec: RobotSpec
    has_expert: bool
    is_judged: bool
    max_steps: int
    tasks: tuple[str, ...]


_DESCRIPTIONS: dict[str, RobotDescription] = {}


def describe_robot(config: RobotConfig) -> RobotDescription:
    """Builds the robot once in this process, without connecting to it. Raises ConfigError."""
    key = repr(config)
    if key not in _DESCRIPTIONS:
        setup = build_robot_setup(config, cameras=False)
        task = setup.task
        _DESCRIPTIONS[key] = RobotDescription(
            setup.robot.spec, task.has_expert, task.is_judged, task.max_steps, task.names
        )
    return _DESCRIPTIONS[key]


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


def make_policy(config: PolicyConfig, spec: RobotSpec, seed: int, device: str = "cpu") -> Policy:
    """A policy without weights for a robot with this spec.

    Raises:
        SpecError: the robot lacks a feature.
        ConfigError: there is no such policy.
    """
    kind, settings = load_policy(config.kind, config.options)
    return kind(spec, settings=settings, features=config.features, seed=seed, device=device)
