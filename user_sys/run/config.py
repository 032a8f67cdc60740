"""What a run needs, in a config's words: some of the robots that it lists, and GPUs and processors.

From a run's configuration to named nodes: which processes there are, what each needs, and where its files lie.

A run's folder: made once, opened again to resume or to evaluate, refused when another version wrote it.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import replace_durably, sync_folder
from hal.placement import format_list
from hal.ray_nodes import ROBOT_CLAIM, ROBOT_RESOURCE_PREFIX
from hal.resource import Kind, ResourceRequest
from user_sys.compose import Device, PolicyConfig, RobotConfig, emulated_link_command, require_unique_names
from user_sys.config import load, save
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.edge.outbox import OutboxConfig
from user_sys.edge.recorder import RecorderConfig
from user_sys.edge.robot_processes import module_argv, robot_process_argv
from user_sys.errors import ConfigError, RunError
from user_sys.gateway import GatewayConfig
from user_sys.inference.protocol import POLICY_NODE
from user_sys.learner.config import LearnerConfig
from user_sys.run.evaluate import EvaluationConfig
from user_sys.run.metrics import LoggingConfig
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.receiver import ReceiverConfig

MAX_COUNT = 256


@dataclass(frozen=True)
class ResourceRequestConfig:
    """`count` resources of one sort (`hal.resource.ResourceRequest`); robots are chosen from those that the run lists.

    Attributes:
        use: what a GPU or a computer is for: the run's learners, or the process in which its policies act.
        memory_gb: of each GPU or computer, at least.
        near: needs with the same word are met in one place: on one computer, or at one site (`near_by`).
    """

    kind: Literal["robot", "gpu", "compute"]
    count: int = 1
    name: str = ""
    model: str = ""
    memory_gb: float = 0.0
    cores: int = 0
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    near: str = ""
    near_by: Literal["node", "site"] = "node"
    use: Literal["learner", "policy"] = "learner"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_COUNT or self.cores < 0 or not 0 <= self.memory_gb < math.inf:
            raise ConfigError(f"needs: count must be at least 1, at most {MAX_COUNT}; cores and memory_gb at least 0")
        if self.name and self.count > 1:
            raise ConfigError(f"needs: there is one {self.name}; leave out count, or name each")
        if (self.cores and self.kind != "compute") or (self.memory_gb and self.kind == "robot"):
            what = "cores" if self.cores else "memory_gb"
            raise ConfigError(f"needs: a {self.kind} has no {what}; ask for them apart")
        if self.use == "policy" and self.kind == "robot":
            raise ConfigError("needs: use says what a GPU or a computer is for; a robot is for itself")

    @property
    def is_learner_gpu(self) -> bool:
        """It is a GPU that learners train on."""
        return self.kind == "gpu" and self.use == "learner"

    def to_request(self) -> ResourceRequest:
        return ResourceRequest(
            kind=Kind(self.kind),
            count=self.count,
            name=self.name,
            model=self.model,
            memory_bytes=round(self.memory_gb * 1e9),
            cores=self.cores,
            capabilities=self.capabilities,
            labels=self.labels,
            colocate=self.near,
            colocate_by=self.near_by,
        )


def require_consistent_colocation(needs: Sequence[ResourceRequestConfig]) -> None:
    """Raises ConfigError where one word of `near` means a computer in one need and a site in another."""
    meant: dict[str, str] = {}
    for need in needs:
        if need.near and meant.setdefault(need.near, need.near_by) != need.near_by:
            raise ConfigError(f"needs: near {need.near!r} is by node in one and by site in another; use two words")


def require_listed_robots(needs: Sequence[ResourceRequestConfig], robots: Sequence[str]) -> None:
    """Raises ConfigError where robots are asked for that the run's list of `robots` cannot give, whoever uses them."""
    wanted = [need for need in needs if need.kind == "robot"]
    if not wanted:
        return
    if not robots:
        raise ConfigError("needs: robots are chosen from those that `robots` lists, and it lists none")
    names = [need.name for need in wanted if need.name]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"needs: {twice[0]} is asked for twice, and there is one")
    if unknown := [name for name in names if name not in robots]:
        near = get_close_matches(unknown[0], robots, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it lists {format_list(sorted(robots))}"
        raise ConfigError(f"needs: `robots` lists no {unknown[0]}; {hint}")
    if (count := sum(need.count for need in wanted)) > len(robots):
        raise ConfigError(f"needs: {count} robots are asked for, and `robots` lists {len(robots)} to choose from")


def require_one_policy_process(needs: Sequence[ResourceRequestConfig], is_started: bool) -> None:
    """Raises ConfigError where there is to be room for other than the one policy process that a run may have.

    Args:
        is_started: the run starts one.
    """
    asked = sum(need.count for need in needs if need.use == "policy")
    if asked and not is_started:
        raise ConfigError("needs: use: policy, but the run starts no policy process; that takes policy.at: site")
    if asked > 1:
        raise ConfigError(f"needs: {asked} are asked for with use: policy; a run's policies act in one process")


def require_gpu_per_process(needs: Sequence[ResourceRequestConfig], processes: int) -> None:
    """Raises ConfigError where GPUs are asked for, and fewer of them than a learner has `processes`."""
    gpus = sum(need.count for need in needs if need.is_learner_gpu)
    if 0 < gpus < processes:
        raise ConfigError(
            f"learner.processes is {processes}, each trains on a GPU of its own, and needs asks for {gpus}: "
            f"needs: [{{kind: gpu, count: {processes}}}]"
        )


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
    needs: tuple[ResourceRequestConfig, ...] = ()
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        require_unique_names((*self.robots, *self.guests))
        require_consistent_colocation(self.needs)
        require_one_policy_process(self.needs, self.policy.is_started_by_run)
        require_listed_robots(self.needs, [robot.name for robot in self.robots])
        if self.learner.device != "cpu":
            require_gpu_per_process(self.needs, self.learner.processes)

    @property
    def selects_robots(self) -> bool:
        """It drives some of its `robots`, as its needs say; else all of them."""
        return any(need.kind == "robot" for need in self.needs)

    def requests(self) -> tuple[ResourceRequest, ...]:
        """All that it asks placement for: robots, then what computes."""
        return (*self.robot_requests(), *self.compute_requests(), *self.policy_requests())

    def robot_requests(self) -> tuple[ResourceRequest, ...]:
        """Those that its needs choose; where they choose none, each of its `robots` by name."""
        if self.selects_robots:
            return tuple(need.to_request() for need in self.needs if need.kind == "robot")
        return tuple(ResourceRequest(kind=Kind.ROBOT, name=robot.name) for robot in self.robots)

    def compute_requests(self) -> tuple[ResourceRequest, ...]:
        """GPUs and processors for its learners, in the order of its needs."""
        return tuple(need.to_request() for need in self.needs if need.kind != "robot" and need.use == "learner")

    def policy_requests(self) -> tuple[ResourceRequest, ...]:
        """What its policy process asks for; nothing where that runs beside the run's folder."""
        return tuple(need.to_request() for need in self.needs if need.use == "policy")


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
class ProcessSpec:
    """One process: what it runs and the Ray resources that place it."""

    name: str
    argv: tuple[str, ...]
    resources: dict[str, float]
    log: Path


def topology(
    config: RunConfig, folder: RunFolder, local_resource: str, is_declared: Callable[[str], bool]
) -> tuple[ProcessSpec, ...]:
    """The processes of a run but its learners and its policy process, in the order in which they start.

    The processes of a robot share its resource, so that they land where the robot is and nobody else's do.

    Args:
        here: the resource that stands for this machine.
        declared: whether some machine of the cluster has declared a resource. A simulated robot that none has declared
            runs here.
    """
    beside_folder = {local_resource: 0.01}
    folder = RunFolder(folder.path.resolve())  # a node of a cluster that runs has a working directory of its own
    gateway = ProcessSpec(
        "gateway", module_argv("user_sys.gateway", "--run", folder.path), beside_folder, folder.log("gateway")
    )
    edges = []
    for robot in config.robots:
        state = folder.edge(robot.name)
        resource = f"{ROBOT_RESOURCE_PREFIX}{robot.name}"
        parts = robot_process_argv(robot.name, state)
        if robot.link:
            parts = ((f"{robot.name}-link", emulated_link_command(folder.link(robot.name))), *parts)
        alone = {resource: round((1 - ROBOT_CLAIM) / len(parts), 2)}  # of which there is one
        place = alone if is_declared(resource) or not robot.simulated else beside_folder
        for name, argv in parts:
            edges.append(ProcessSpec(name, argv, place, folder.log(name)))
    return (gateway, *edges)


def policy_process(folder: RunFolder, device: Device, resources: dict[str, float], address: str) -> ProcessSpec:
    """The process in which the policies of the run's robots act. It runs where the run folder is seen, by a
    file in which robots find it.

    Args:
        address: of its computer, on which it listens.
    """
    folder = RunFolder(folder.path.resolve())
    options = {"listen": f"tcp://{address}:0", "keys": folder.keys, "device": device, "announce": folder.policy_address}
    argv = module_argv("user_sys.inference", *(word for key, value in options.items() for word in (f"--{key}", value)))
    return ProcessSpec(POLICY_NODE, argv, resources, folder.log(POLICY_NODE))


RUN_FORMAT = 1
METADATA_FILE = "run.json"


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder says of itself. `endpoint` is the gateway's address, fixed for the life of the run."""

    format: int
    name: str
    started_unix_s: float
    endpoint: str


def create_run_folder(config: RunConfig, name: str, endpoint: str) -> tuple[RunFolder, RunMetadata]:
    """A new run folder with the resolved configuration.

    Raises:
        RunError: a run of that name exists, or the folder cannot be written.
    """
    folder = RunFolder(config.runs / name)
    card = RunMetadata(format=RUN_FORMAT, name=name, started_unix_s=time.time(), endpoint=endpoint)
    try:
        folder.path.mkdir(parents=True)
    except FileExistsError:
        raise _run_exists_error(folder.path) from None
    except OSError as error:
        raise _unwritable_error(folder, error) from None
    try:
        (folder.path / "logs").mkdir()
        gateway = replace(config.gateway, endpoint=endpoint)
        save(replace(config, name=name, gateway=gateway), folder.config)
        replace_durably(folder.path / METADATA_FILE, msgspec.json.encode(card))
        for above in (folder.path.parent, folder.path.parent.parent):
            sync_folder(above)
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)  # half a run folder could be neither resumed nor made anew
        raise _unwritable_error(folder, error) from None
    return folder, card


def require_no_run(path: Path) -> None:
    """Raises RunError where there is a run folder at `path` already."""
    if path.exists():
        raise _run_exists_error(path)


def _run_exists_error(path: Path) -> RunError:
    name, runs = path.name, path.parent
    return RunError(f"there is a run {name!r} in {runs} already; go on with `--resume {path}` or choose a --name")


def _unwritable_error(folder: RunFolder, error: OSError) -> RunError:
    return RunError(f"cannot make the run folder {folder.path}: {os.strerror(error.errno or 0)}")


def read_run_metadata(path: Path) -> RunMetadata:
    """What the run folder at `path` says of itself. Raises RunError: it is none, or its card is damaged."""
    try:
        return msgspec.json.decode((path / METADATA_FILE).read_bytes(), type=RunMetadata)
    except OSError:
        raise RunError(f"{path} is not a run folder: it has no {METADATA_FILE}") from None
    except DECODE_ERRORS as error:
        raise RunError(f"{path / METADATA_FILE} cannot be read: {error}") from None


def open_run_folder(path: Path, overrides: Sequence[str] = ()) -> tuple[RunFolder, RunConfig, RunMetadata]:
    """An existing run, with the settings it has; `overrides` change some of them from here on.

    Raises:
        RunError: there is none, another version of this program made it, or `overrides` would move its gateway, whose
            address its robots know.
        ConfigError: its configuration cannot be read.
    """
    folder = RunFolder(path.resolve())
    card = read_run_metadata(path)
    if card.format != RUN_FORMAT:
        raise RunError(
            f"{path} was made by another version (run format {card.format}, this is {RUN_FORMAT}); "
            "open it with that version, or start a new run"
        )
    config = load(RunConfig, folder.config, overrides)
    if overrides and config.gateway.endpoint != card.endpoint:
        raise RunError(
            f"gateway.endpoint: the run in {path} listens on {card.endpoint} for as long as it lives, where its robots "
            "look for it; start a new run to listen elsewhere"
        )
    return folder, config, card


def default_run_name(config_path: Path | None) -> str:
    """A name made of the configuration's and the time, e.g. ``demo-1121-0315-07``."""
    stem = config_path.stem if config_path else "run"
    return f"{stem}-{time.strftime('%m%d-%H%M-%S')}"
