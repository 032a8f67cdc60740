"""The configuration of a run and the layout of its folder: created once, reopened to resume or to evaluate."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hal.decode_errors import DECODE_ERRORS
from hal.durable import replace_durably, sync_folder
from hal.resource import Kind, ResourceRequest
from hal.settings import Count, Limit, Share, suggest
from user_sys.compose import PolicyConfig, RobotConfig, require_unique_names
from user_sys.config import build, read_yaml, save
from user_sys.console.config import ConsoleConfig
from user_sys.edge.demonstrations import DemonstrationConfig
from user_sys.edge.help_requests import InterventionConfig
from user_sys.edge.outbox import OutboxConfig
from user_sys.edge.recorder import RecorderConfig
from user_sys.errors import ConfigError, RunError
from user_sys.gateway.config import GatewayConfig
from user_sys.learner.config import LearnerConfig
from user_sys.rewards.reward import RewardConfig
from user_sys.robot_records import CONFIG_FILE
from user_sys.run.metrics import LoggingConfig
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.receiver import ReceiverConfig

MAX_COUNT = 256
RUN_FORMAT = 2
METADATA_FILE = "run.json"
RunName = Annotated[
    str, Meta(pattern=r"^([\w-][\w.-]{0,99})?\Z", description="letters, digits, '-', '_' and, after the first one, '.'")
]


@dataclass(frozen=True)
class ResourceRequestConfig:
    """Requests `count` resources of one kind for a run; robots are chosen from the run's `robots`.

    Attributes:
        kind: robot, gpu or compute.
        count: how many.
        name: of one certain resource; empty for any.
        model: of a robot or GPU; empty for any.
        memory_gb: at least, of each.
        cores: at least, of each computer.
        capabilities: such as camera:front.
        labels: such as {site: lab}.
        colocate: one place for equal words.
        colocate_by: on one node, or site.
        use: of a GPU or computer: for the learners, or for the policy server.
    """

    kind: Literal["robot", "gpu", "compute"]
    count: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1
    name: str = ""
    model: str = ""
    memory_gb: Annotated[float, Meta(ge=0)] = 0.0
    cores: Limit = 0
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    colocate: str = ""
    colocate_by: Literal["node", "site"] = "node"
    use: Literal["learner", "policy"] = "learner"

    def __post_init__(self) -> None:
        if self.name and self.count > 1:
            raise ConfigError(
                f"resources: count is {self.count}, but only one resource is named {self.name}; leave out count"
            )
        if (self.cores and self.kind != "compute") or (self.memory_gb and self.kind == "robot"):
            key = "cores" if self.cores else "memory_gb"
            raise ConfigError(f"resources: a {self.kind} has no {key}; request a gpu or compute in an item of its own")
        if self.use == "policy" and self.kind == "robot":
            raise ConfigError("resources: use: policy is for a gpu or compute, not for a robot; leave out use")

    @property
    def is_learner_gpu(self) -> bool:
        """Whether learners train on it."""
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
            colocate=self.colocate,
            colocate_by=self.colocate_by,
        )


def _request_problems(
    requests: Sequence[ResourceRequestConfig], robots: Sequence[str], policy: PolicyConfig, learner: LearnerConfig
) -> Iterator[str]:
    """Why `requests` can never be met together: by the listed `robots`, one policy server, and the learner's GPUs."""
    meaning: dict[str, str] = {}
    for each in requests:
        if each.colocate and meaning.setdefault(each.colocate, each.colocate_by) != each.colocate_by:
            yield f"colocate {each.colocate!r} is by node in one item and by site in another; use two words"
    requested = [each for each in requests if each.kind == "robot"]
    if requested and not robots:
        yield "robots are chosen from the list `robots`, and it is empty"
    names = [each.name for each in requested if each.name]
    for name in names:
        if names.count(name) > 1:
            yield f"the robot {name} is requested twice; remove one item"
        if name not in robots:
            yield f"`robots` lists no {name}; {suggest(name, robots)}"
    if (count := sum(each.count for each in requested)) > len(robots):
        yield f"{count} robots are requested, but `robots` lists only {len(robots)}"
    servers = sum(each.count for each in requests if each.use == "policy")
    if servers and not policy.is_started_by_run:
        yield "use: policy, but the run starts no policy server; add policy.location: server"
    if servers > 1:
        yield f"{servers} are requested with use: policy, but a run has one policy server"
    gpus = sum(each.count for each in requests if each.is_learner_gpu)
    if 0 < gpus < learner.processes and learner.device != "cpu":
        yield (
            f"{gpus} GPUs are requested, but each of learner.processes ({learner.processes}) trains on one of its own; "
            f"request {{kind: gpu, count: {learner.processes}}}"
        )


@dataclass(frozen=True)
class TargetConfig:
    """When training ends early.

    Attributes:
        success: share of successes among the newest autonomous episodes; 0 switches the target off.
        episodes: how many of the newest autonomous episodes count.
    """

    success: Share = 0.0
    episodes: Count = 50


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation after training.

    Attributes:
        episodes: on simulated robots; 0: none.
        video_episodes: how many of them to film, from the first on.
        video_failures: failed ones to film, into a video of their own.
        required: success; exit status 1 if below.
    """

    episodes: Limit = 100
    video_episodes: Limit = 4
    video_failures: Limit = 4
    required: Share = 0.0


@dataclass(frozen=True)
class RayConfig:
    """The Ray cluster of a run.

    Attributes:
        address: existing cluster; empty starts one here.
        object_store_mb: memory of Ray's object store.
    """

    address: str = ""
    object_store_mb: Count = 100


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run.

    Attributes:
        name: of the run's folder; empty: made of the file's name and the time.
        runs: the folder that holds run folders.
        seed: of policies, demonstrations and evaluation.
        robots: that the run drives; if `resources` requests robots, the candidates for these.
        remote_robots: driven by `user-sys edge`; on other computers.
        resources: hardware.md; robots, GPUs, computers that the run waits for.
        demonstrations: by scripted experts; before the policy acts.
        recorder: the recording of steps.
        intervention: people.md; the effect of a person's help.
        outbox: steps not yet acknowledged.
        tunnel: limits at the robots' end; those of the other end are in gateway.
        policy: which policy acts, and where.
        weights: how a robot takes new weights.
        learner: how the policy is trained.
        rewards: rewards.md; a reward that also labels online episodes.
        target: when training ends early.
        gateway: the process that robots connect to.
        console: the web page.
        ray: the cluster on which processes run.
        logging: operations.md; metrics beyond the run's folder.
        evaluation: after training.
    """

    name: RunName = ""
    runs: Path = Path("runs")
    seed: Limit = 0
    robots: tuple[RobotConfig, ...] = ()
    remote_robots: tuple[RobotConfig, ...] = ()
    resources: tuple[ResourceRequestConfig, ...] = ()
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        require_unique_names((*self.robots, *self.remote_robots))
        robots = [robot.name for robot in self.robots]
        for problem in _request_problems(self.resources, robots, self.policy, self.learner):
            raise ConfigError(f"resources: {problem}")

    @property
    def selects_robots(self) -> bool:
        """Whether it drives only those of its `robots` that placement assigns; else it drives all of them."""
        return any(each.kind == "robot" for each in self.resources)

    def requests(self) -> tuple[ResourceRequest, ...]:
        """All requests for placement: robots first, then compute."""
        return (*self.robot_requests(), *self.compute_requests(), *self.policy_requests())

    def robot_requests(self) -> tuple[ResourceRequest, ...]:
        """The requests for robots in `resources`; if there are none, each of `robots` by name."""
        if self.selects_robots:
            return tuple(each.to_request() for each in self.resources if each.kind == "robot")
        return tuple(ResourceRequest(kind=Kind.ROBOT, name=robot.name) for robot in self.robots)

    def compute_requests(self) -> tuple[ResourceRequest, ...]:
        """GPUs and computers for the learners, in the order of `resources`."""
        return tuple(each.to_request() for each in self.resources if each.kind != "robot" and each.use == "learner")

    def policy_requests(self) -> tuple[ResourceRequest, ...]:
        """Compute for the policy server; if there is none, it runs on the launcher's computer."""
        return tuple(each.to_request() for each in self.resources if each.use == "policy")


ROBOT_SECTIONS = ("intervention", "outbox", "recorder")  # settings that only robots apply


def changed_robot_sections(config: RunConfig, before: RunConfig) -> list[str]:
    """The `ROBOT_SECTIONS` in which `config` differs from `before`."""
    return [section for section in ROBOT_SECTIONS if getattr(config, section) != getattr(before, section)]


def require_applied_sections(config: RunConfig, before: RunConfig) -> None:
    """Raises ConfigError if `config` differs from `before` in a section that none of its robots would apply.

    `user-sys edge` reads the section from its own file, or from a run's file that lists `remote_robots`.
    """
    changed = changed_robot_sections(config, before)
    if changed and not config.robots and not config.remote_robots:
        raise ConfigError(
            f"{', '.join(changed)}: no robot of this run would apply it; set it in the file of `user-sys edge` on the "
            "robot's computer"
        )


class RunFolder:
    """The paths of one run's files.

    Attributes:
        trace: spans of the run's processes, with ``--profile``; see `user_sys.trace`.
        robots: a record of each robot (`user_sys.robot_records`), also of those that connect through the tunnel.
        policy_address: written by the policy server: the address on which it listens.
        console_address: written by the console's process: the address of its page, with the secret.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, path / CONFIG_FILE
        self.store, self.keys, self.robots = path / "store", path / "keys", path / "robots"
        self.checkpoints, self.weights, self.trace = path / "checkpoints", path / "weights", path / "trace"
        self.policy_address, self.console_address = path / "policy.address", path / "console.address"

    def edge(self, robot: str) -> Path:
        """Files of one robot's processes: outbox, fence, e-stop latch, configurations."""
        return self.path / "edge" / robot

    def link(self, robot: str) -> Path:
        """Settings of the emulated network between a robot's session and the gateway."""
        return self.edge(robot) / "link.yaml"

    def log(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run folder's `run.json`. `endpoint` is the gateway's address, which never changes."""

    format: int
    name: str
    started_unix_s: float
    endpoint: str


def create_run_folder(
    config: RunConfig, name: str, endpoint: str, keys: Path | None = None
) -> tuple[RunFolder, RunMetadata]:
    """Creates a run folder with the resolved configuration. It gets its name when it is complete.

    Args:
        keys: an existing folder, so that the gateway has the same key in every run; None for keys of the run's own.

    Raises:
        RunError: a run of that name exists, or the folder cannot be written.
    """
    folder, unfinished = RunFolder(config.runs / name), RunFolder(config.runs / f".{name}.{os.getpid()}")
    metadata = RunMetadata(format=RUN_FORMAT, name=name, started_unix_s=time.time(), endpoint=endpoint)
    require_no_run(folder.path)
    try:
        shutil.rmtree(unfinished.path, ignore_errors=True)  # of a killed process with this id
        (unfinished.path / "logs").mkdir(parents=True)
        if keys is not None:
            unfinished.keys.symlink_to(keys.resolve(), target_is_directory=True)
        gateway = replace(config.gateway, endpoint=endpoint)
        save(replace(config, name=name, gateway=gateway), unfinished.config)
        replace_durably(unfinished.path / METADATA_FILE, msgspec.json.encode(metadata))
        unfinished.path.rename(folder.path)
        for above in (folder.path.parent, folder.path.parent.parent):
            sync_folder(above)
    except OSError as error:
        shutil.rmtree(unfinished.path, ignore_errors=True)
        require_no_run(folder.path)  # another process has just created it
        raise _unwritable_error(folder, error) from None
    return folder, metadata


def require_no_run(path: Path) -> None:
    """Raises RunError if a run folder exists at `path`."""
    if path.exists():
        raise _run_exists_error(path)


def _run_exists_error(path: Path) -> RunError:
    name, runs = path.name, path.parent
    return RunError(f"the run {name!r} exists in {runs}; continue it with `--resume {path}` or choose another --name")


def _unwritable_error(folder: RunFolder, error: OSError) -> RunError:
    return RunError(f"cannot create the run folder {folder.path}: {os.strerror(error.errno or 0)}")


def read_run_metadata(path: Path) -> RunMetadata:
    """The metadata of the run folder at `path`. Raises RunError: it is not a run folder, or the file is damaged."""
    try:
        return msgspec.json.decode((path / METADATA_FILE).read_bytes(), type=RunMetadata)
    except OSError:
        raise RunError(f"{path} is not a run folder: it has no {METADATA_FILE}") from None
    except DECODE_ERRORS as error:
        raise RunError(f"{path / METADATA_FILE} cannot be read: {error}") from None


def open_run_folder(path: Path, overrides: Sequence[str] = ()) -> tuple[RunFolder, RunConfig, RunMetadata]:
    """Opens an existing run with its settings; `overrides` change some of them from now on.

    Raises:
        RunError: there is no run, its format has another version, its settings have another name, as those of an empty
            file, or `overrides` change its gateway's address, which its robots know.
        ConfigError: its configuration cannot be read.
    """
    folder = RunFolder(path.resolve())
    metadata = read_run_metadata(path)
    if metadata.format != RUN_FORMAT:
        raise RunError(
            f"{path} has run format {metadata.format}, this version reads {RUN_FORMAT}; "
            "open it with the version that made it, or start a new run"
        )
    try:
        saved = _read_settings(folder.config)
        config = build(RunConfig, saved, str(folder.config))
    except ConfigError as error:
        raise ConfigError(
            f"{error}; this run was made by another version, or its file was edited: open it with the version that "
            "made it, mend the file, or start a new run"
        ) from None
    config = build(RunConfig, saved, str(folder.config), overrides) if overrides else config
    if config.name != metadata.name:
        raise RunError(
            f"{folder.config}: name is {config.name!r}, and the run is called {metadata.name!r}; leave out --name, or "
            "restore the file if it was damaged"
        )
    if overrides and config.gateway.endpoint != metadata.endpoint:
        raise RunError(
            f"gateway.endpoint: the run in {path} listens on {metadata.endpoint}, and its robots connect there; "
            "start a new run to listen on another address"
        )
    return folder, config, metadata


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings of a run, of an earlier version too. Raises ConfigError: as `read_yaml`."""
    saved = read_yaml(path)
    match saved:
        case {"learner": {"publish": {"kl": 0}}}:  # earlier versions wrote that it was off
            del saved["learner"]["publish"]["kl"]
    return saved


def default_run_name(config_path: Path | None) -> str:
    """A `RunName` made of the configuration's name and the time, such as ``demo-1121-0315-07``."""
    stem = re.sub(r"[^\w.-]+", "-", config_path.stem if config_path else "").strip(".-")[:80]
    return f"{stem or 'run'}-{time.strftime('%m%d-%H%M-%S')}"
