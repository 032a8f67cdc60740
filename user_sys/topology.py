"""From a run's configuration to named nodes: which processes there are, what each needs, and where its files lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hal.ray_nodes import CLAIM, ROBOT
from hal.request import Request
from hal.resource import Kind
from user_sys.compose import Device, PolicyConfig, RobotConfig, link_command, require_unique_names
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.edge.outbox import OutboxConfig
from user_sys.edge.recorder import RecorderConfig
from user_sys.edge.stations import module_argv, station_argv
from user_sys.errors import ConfigError
from user_sys.evaluate import EvaluationConfig
from user_sys.gateway import GatewayConfig
from user_sys.inference.wire import POLICY
from user_sys.learner.learner_config import LearnerConfig
from user_sys.metrics import LoggingConfig
from user_sys.needs import (
    NeedConfig,
    require_candidates,
    require_one_place,
    require_one_policy_process,
    require_whole_learners,
)
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.inlet import InletConfig


@dataclass(frozen=True)
class TargetConfig:
    """Training ends early once this share of the newest `episodes` autonomous episodes succeeded; 0 switches it off."""

    success: float = 0.0
    episodes: int = 50

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ConfigError("target: episodes must be at least 1")


@dataclass(frozen=True)
class ConsoleConfig:
    """The page where people watch and take over. `port` 0 takes a free one."""

    enabled: bool = True
    port: int = 8088


@dataclass(frozen=True)
class RayConfig:
    """`address` of an existing cluster; empty starts one on this machine."""

    address: str = ""
    dashboard: bool = False
    object_store_mb: int = 100


@dataclass(frozen=True)
class RunConfig:
    """Everything of one run. `runs` is the folder that holds run folders; `name` is empty to have one made up.

    `robots` are those that the run itself drives; where `needs` ask for robots, those that it may choose from, and it
    drives what it is given of them (`candidates`): its folder's configuration lists these alone. `guests` are driven by
    computers of their own and come in over the tunnel (``user-sys edge FILE --robot NAME``); others may too. `tunnel`
    bounds the robots' end of the tunnel, `gateway.tunnel` the other.
    """

    name: str = ""
    runs: Path = Path("runs")
    seed: int = 0
    robots: tuple[RobotConfig, ...] = ()
    guests: tuple[RobotConfig, ...] = ()
    needs: tuple[NeedConfig, ...] = ()
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: InletConfig = field(default_factory=InletConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        require_unique_names((*self.robots, *self.guests))
        require_one_place(self.needs)
        require_one_policy_process(self.needs, self.policy.is_started_by_run)
        require_candidates(self.needs, [robot.name for robot in self.robots])
        if self.learner.device != "cpu":
            require_whole_learners(self.needs, self.learner.processes)

    @property
    def chooses_robots(self) -> bool:
        """It drives some of its `robots`, as its needs say; else all of them."""
        return any(need.kind == "robot" for need in self.needs)

    def requests(self) -> tuple[Request, ...]:
        """All that it asks placement for: robots, then what computes."""
        return (*self.robot_requests(), *self.compute_requests(), *self.policy_requests())

    def robot_requests(self) -> tuple[Request, ...]:
        """Those that its needs choose; where they choose none, each of its `robots` by name."""
        if self.chooses_robots:
            return tuple(need.request() for need in self.needs if need.kind == "robot")
        return tuple(Request(kind=Kind.ROBOT, name=robot.name) for robot in self.robots)

    def compute_requests(self) -> tuple[Request, ...]:
        """GPUs and processors for its learners, in the order of its needs."""
        return tuple(need.request() for need in self.needs if need.kind != "robot" and need.use == "learner")

    def policy_requests(self) -> tuple[Request, ...]:
        """What its policy process asks for; nothing where that runs beside the run's folder."""
        return tuple(need.request() for need in self.needs if need.use == "policy")


@dataclass(frozen=True)
class RunFolder:
    """Where the files of one run lie."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def policy_address(self) -> Path:
        """Where its policy process listens, as that has written it."""
        return self.path / "policy.address"

    def edge(self, robot: str) -> Path:
        """State of one robot's computer: outbox, fence, e-stop latch, and its two configurations."""
        return self.path / "edge" / robot

    @property
    def robots(self) -> Path:
        """What is known of each robot (`robot_cards`), of those too that came in over the tunnel."""
        return self.path / "robots"

    def link(self, robot: str) -> Path:
        """Settings of the emulated network between a robot's session and the gateway."""
        return self.edge(robot) / "link.yaml"

    def log(self, node: str) -> Path:
        return self.path / "logs" / f"{node}.log"


@dataclass(frozen=True)
class Node:
    """One process: what it runs and the Ray resources that place it."""

    name: str
    argv: tuple[str, ...]
    resources: dict[str, float]
    log: Path


def topology(config: RunConfig, folder: RunFolder, here: str, declared: Callable[[str], bool]) -> tuple[Node, ...]:
    """The processes of a run but its learners and its policy process, in the order in which they start.

    The processes of a robot share its resource, so that they land where the robot is and nobody else's do.

    Args:
        here: the resource that stands for this machine.
        declared: whether some machine of the cluster has declared a resource. A simulated robot that none has declared
            runs here.
    """
    beside_folder = {here: 0.01}
    folder = RunFolder(folder.path.resolve())  # a node of a cluster that runs has a working directory of its own
    gateway = Node(
        "gateway", module_argv("user_sys.gateway", "--run", folder.path), beside_folder, folder.log("gateway")
    )
    edges = []
    for robot in config.robots:
        state = folder.edge(robot.name)
        resource = f"{ROBOT}{robot.name}"
        parts = station_argv(robot.name, state)
        if robot.link:
            parts = ((f"{robot.name}-link", link_command(folder.link(robot.name))), *parts)
        alone = {resource: round((1 - CLAIM) / len(parts), 2)}  # of which there is one
        place = alone if declared(resource) or not robot.simulated else beside_folder
        for name, argv in parts:
            edges.append(Node(name, argv, place, folder.log(name)))
    return (gateway, *edges)


def policy_node(folder: RunFolder, device: Device, resources: dict[str, float], address: str) -> Node:
    """The process in which the policies of the run's robots act. It runs where the run folder is seen, by a
    file in which robots find it.

    Args:
        address: of its computer, on which it listens.
    """
    folder = RunFolder(folder.path.resolve())
    options = {"listen": f"tcp://{address}:0", "keys": folder.keys, "device": device, "announce": folder.policy_address}
    argv = module_argv("user_sys.inference", *(word for key, value in options.items() for word in (f"--{key}", value)))
    return Node(POLICY, argv, resources, folder.log(POLICY))
