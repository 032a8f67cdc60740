"""Prepares a run before its processes start: checks, its folder, keys, robot records, process configurations."""

from __future__ import annotations

import logging
import random
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from hal.durable import replace_durably
from hal.errors import LeaseHeld
from hal.lease import MachineLock
from hal.resource import local_node
from hal.spec import RobotSpec
from user_sys.compose import (
    RobotConfig,
    check_execution,
    check_pictures,
    emulated_link_settings,
    policy_location,
    robot_spec,
)
from user_sys.config import load, save
from user_sys.console.config import require_certificate
from user_sys.edge.demonstrations import (
    DemonstrationConfig,
    check_demonstrable,
    generate_demonstrations,
    missing_demonstrations,
)
from user_sys.edge.help_requests import require_progress_model
from user_sys.edge.local_environment import StopCheck, defer_signals, never_stop
from user_sys.edge.recorder import RecorderConfig
from user_sys.edge.robot_processes import write_process_configs
from user_sys.edge.session import EpisodeStarts, SessionConfig
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError, RunError, WireError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import action_timeout_s, check_server_swaps
from user_sys.learner.checkpoint import (
    RESTART_FLAG,
    CheckpointScan,
    quarantine_checkpoints,
    scan_checkpoints,
    unreadable_message,
)
from user_sys.learner.config import LearnerConfig
from user_sys.messages import PROTOCOL_VERSION, EpisodeReport, Hello
from user_sys.plugins import load_algorithm, load_policy, load_reward, path_options, with_absolute_paths
from user_sys.robot_records import (
    LEARNER,
    assign_learners,
    first_difference,
    is_learner_name,
    learner_folder,
    learner_from_robot,
    read_robot_records,
    save_robot_record,
)
from user_sys.run.config import (
    RunConfig,
    RunFolder,
    RunMetadata,
    changed_robot_sections,
    create_run_folder,
    default_run_name,
    open_run_folder,
    require_applied_sections,
    require_no_run,
)
from user_sys.run.report import stored_episodes
from user_sys.run.topology import CONSOLE, LOOPBACK
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import GATEWAY_NAME, Keyring, Role, load_keypair, load_public_key, new_keypair, save_keypair
from user_sys.tunnel.limits import is_loopback
from user_sys.tunnel.router import require_free_endpoint
from user_sys.weights.version_store import INDEX_FILE

log = logging.getLogger(__name__)

LAUNCHER = "launcher"  # follows the run as a console does
LOCK_FILE = "launcher.lock"  # in the run's folder
REMOTE_PORTS = (20_000, 32_000)  # below those that Linux gives to outgoing connections


@dataclass
class LaunchRequest:
    """The arguments of ``user-sys train`` or ``user-sys cloud``, where robots connect from their own computers.

    Attributes:
        config: None to resume a run.
        keys: folder of keys; None if the run makes its own.
        profile: write a trace of the run's processes.
        folder: of the run, once it exists.
    """

    verb: Literal["train", "cloud"]
    config: Path | None
    resume: Path | None
    restart_if_unreadable: bool
    any_result: bool
    keys: Path | None
    overrides: list[str]
    profile: bool = False
    folder: Path | None = None

    def resume_hint(self) -> str:
        """How to continue the run; empty before there is one."""
        run = self.folder or self.resume
        return f"; continue with: user-sys {self.verb} --resume {run}" if run else ""


def load_run(request: LaunchRequest) -> tuple[RunConfig, Path]:
    """The run's configuration, and the path of its folder, which may not exist yet.

    Raises:
        RunError, ConfigError: the run could not work. Nothing has been created.
    """
    if request.resume:
        folder, config, _ = open_run_folder(request.resume, request.overrides)
        lock = MachineLock(folder.path / LOCK_FILE)
        if lock.is_held():
            raise _in_use_error(lock, folder.path)
        _require_keys_folder(folder)
        _require_console(config)
        require_free_endpoint(config.gateway.endpoint, "its robots connect there: end the program that listens there")
        _require_same_training(config, folder)
        require_applied_sections(config, before=open_run_folder(request.resume)[1])
        config = replace(config, learner=_with_changed_initial_policy(config.learner, folder))
        check_plugins(config)
        _require_embodiments(config, folder)
        if not request.restart_if_unreadable:
            for path, found in _surveyed_checkpoints(folder):
                if found.is_all_unreadable:
                    raise RunError(unreadable_message(path, found))
        return resolve_paths(config), folder.path
    config = load(RunConfig, request.config, request.overrides)
    if request.verb == "train" and not config.robots:
        raise RunError(
            f"{request.config}: robots: a run needs at least one robot; "
            "if all robots connect from other computers, use `user-sys cloud`"
        )
    require_applied_sections(config, before=RunConfig())
    _require_console(config)
    if not config.gateway.endpoint.endswith(":0"):
        require_free_endpoint(config.gateway.endpoint, "choose another port with --gateway.endpoint")
    check_plugins(config)
    config = resolve_paths(config)
    if config.learner.initial_policy:
        config = replace(config, learner=_with_initial_policy(config.learner))
    require_keys(config.gateway.endpoint, request.keys)
    require_allowed(config.remote_robots, request.keys)
    for robot in _buildable_robots(config):
        check_demonstrable(robot, config.demonstrations)
        if robot.link:
            emulated_link_settings(robot, "", "")
    home = config.runs / (config.name or default_run_name(request.config))
    require_no_run(home)
    return config, home


def resolve_paths(config: RunConfig) -> RunConfig:
    """`config` with absolute paths to the files of its settings, so that the run can be resumed in any folder.

    Of robots, the policy and requests for help, to those that exist here.
    """
    rewards, policy, console, help_ = config.rewards, config.policy, config.console, config.intervention.help
    if rewards.kind:
        rewards = with_absolute_paths(rewards)
    _, settings = load_policy(policy.kind, policy.options)
    options = _absolute_options(policy.options, settings)
    if policy.kind == "steered":
        from user_sys.policies.steered import load_base  # imports torch, as the policy has

        _, base_settings = load_base(settings)
        options["base_options"] = _absolute_options(settings.base_options, base_settings)
    policy = replace(policy, options=options)
    if console.certificate:
        # A renewed certificate is another file behind the same link.
        files = [str(Path(each).absolute()) for each in (console.certificate, console.certificate_key)]
        console = replace(console, certificate=files[0], certificate_key=files[1])
    intervention = replace(config.intervention, help=replace(help_, progress=_absolute_file(help_.progress)))
    return replace(
        config,
        rewards=rewards,
        policy=policy,
        console=console,
        intervention=intervention,
        robots=tuple(map(_with_absolute_files, config.robots)),
        remote_robots=tuple(map(_with_absolute_files, config.remote_robots)),
    )


def _absolute_options(options: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """`options` with absolute paths to what exists here; `settings` are a policy's, made from them."""
    found = {name: str(path.resolve()) for name, path in path_options(settings).items() if path.exists()}
    return {**options, **found}


def _with_absolute_files(robot: RobotConfig) -> RobotConfig:
    """`robot` with absolute paths to its description for the console, and to files of its driver and input devices."""
    return replace(
        robot,
        description=_absolute_file(robot.description),
        options=_absolute_device_options(robot.options),
        teleoperators=tuple(map(_absolute_device_options, robot.teleoperators)),
    )


def _absolute_device_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with absolute paths to a description and to folders such as LeRobot's ``settings.calibration_dir``."""
    found = dict(options)
    for name, value in options.items():
        if isinstance(value, Mapping):
            found[name] = _absolute_device_options(value)
        elif isinstance(value, str) and name == "description":
            found[name] = _absolute_file(value)
        elif isinstance(value, str) and name.endswith("_dir") and Path(value).is_dir():
            found[name] = str(Path(value).resolve())
    return found


def _absolute_file(name: str) -> str:
    """The absolute path of the file `name`; `name` itself if it is no file."""
    return str(Path(name).resolve()) if Path(name).is_file() else name


def _with_initial_policy(config: LearnerConfig) -> LearnerConfig:
    """`config` with an absolute path. Raises ConfigError if the other run has no checkpoint."""
    path = Path(config.initial_policy).resolve()
    if scan_checkpoints(RunFolder(path).checkpoints).readable is None:
        raise ConfigError(
            f"learner.initial_policy: {path} has no checkpoint that can be read; give the folder of a run that has "
            "trained"
        )
    return replace(config, initial_policy=str(path))


def _with_changed_initial_policy(config: LearnerConfig, folder: RunFolder) -> LearnerConfig:
    """`config` of a resumed run, as `_with_initial_policy` if that setting was changed before the first update.

    Raises ConfigError: it was changed later, or the other run has no checkpoint.
    """
    before = open_run_folder(folder.path)[1].learner.initial_policy
    wanted = str(Path(config.initial_policy).resolve()) if config.initial_policy else ""
    if wanted == before or config.initial_policy == before:
        return replace(config, initial_policy=before)
    if any(found.has_updates for _, found in _surveyed_checkpoints(folder)):
        origin = f"from {before}" if before else "without it"
        raise ConfigError(
            f"learner.initial_policy is {config.initial_policy!r}, and {folder.path} has trained {origin}: leave "
            "it as it was, or start a new run"
        )
    return _with_initial_policy(config) if wanted else config


def check_plugins(config: RunConfig) -> None:
    """Raises ConfigError if algorithm, policy or reward cannot be imported, or has no such options, location or
    execution, or if the algorithm cannot train the policy or uses steps before the reward labels them, or if a robot
    lacks the pictures that the policy reads, or the model that requests help."""
    load_policy(config.policy.kind, config.policy.options)
    policy_location(config.policy)
    check_execution(config.policy)
    robots = tuple(_buildable_robots(config))
    for robot in robots:
        check_pictures(config.policy, robot)
    if _training_settings(config) != _training_settings(RunConfig()):  # the defaults suit each other and any robot
        from user_sys.learner.trainer import require_trainable  # imports torch

        load_algorithm(config.learner.algorithm, config.learner.options)
        for spec in {spec.embodiment: spec for spec in map(robot_spec, robots)}.values():
            data = require_trainable(config.learner, config.policy, spec)
            if data is not None and data.once:
                config.rewards.require_replay(config.learner.algorithm)
    if config.rewards.kind:
        load_reward(config.rewards)
    if config.robots and not config.ray.address:  # in a cluster the robots may be on other computers
        require_progress_model(config.intervention.help, map(robot_spec, robots))


def _training_settings(config: RunConfig) -> tuple[object, ...]:
    """The settings that decide whether the algorithm can train the policy."""
    learner, policy = config.learner, config.policy
    return learner.algorithm, learner.options, learner.compute, policy.kind, policy.options, policy.features


def _require_embodiments(config: RunConfig, folder: RunFolder) -> None:
    """Raises ConfigError if a robot is another embodiment than before, whose stored steps no learner would draw."""
    recorded = {record.robot: record for record in read_robot_records(folder.robots)}
    for robot in _buildable_robots(config):
        before, after = recorded.get(robot.name), robot_spec(robot)
        if before is None or before.spec.embodiment == after.embodiment:
            continue
        if any(e.robot == robot.name and e.embodiment in before.embodiments for e in stored_episodes(folder.store)):
            raise ConfigError(
                f"robot {robot.name}: {first_difference(before.spec, after)}, and the policy of {folder.path} cannot "
                "learn from its stored steps any more: set it as it was, or start a new run"
            )


def _require_same_training(config: RunConfig, folder: RunFolder) -> None:
    """Raises ConfigError if the checkpoints are of another algorithm or kind of policy, or do not fit new settings."""
    _, before, _ = open_run_folder(folder.path)
    for setting, trained, wanted in (
        ("learner.algorithm", before.learner.algorithm, config.learner.algorithm),
        ("policy.kind", before.policy.kind, config.policy.kind),
    ):
        if trained != wanted and any(found.readable for _, found in _surveyed_checkpoints(folder)):
            raise ConfigError(
                f"{setting} is {wanted}, and {folder.path} has trained with {trained}: leave it as it was, or start a "
                "new run"
            )
    if _training_settings(config) == _training_settings(before):
        return
    from user_sys.learner.trainer import require_trainable  # imports torch

    for learner, spec in assign_learners(read_robot_records(folder.robots)).items():
        if (path := scan_checkpoints(learner_folder(folder.checkpoints, learner)).readable) is not None:
            try:
                require_trainable(config.learner, config.policy, spec, path)
            except WireError as error:
                raise ConfigError(
                    f"learner and policy: {error}, from {path}: leave their settings as they were, or start a new run"
                ) from None


def _buildable_robots(config: RunConfig) -> Iterator[RobotConfig]:
    """The run's robots. If the run selects its robots, those that cannot be built here are skipped."""
    for robot in config.robots:
        try:
            robot_spec(robot)
        except Exception:  # a foreign driver may fail in any way
            if not config.selects_robots:
                raise
            continue
        yield robot


@contextmanager
def open_or_create_folder(
    request: LaunchRequest, config: RunConfig, home: Path
) -> Iterator[tuple[RunFolder, RunMetadata]]:
    """Creates the run's folder, or opens the existing one to resume it. Locks it against other launchers.

    Raises:
        RunError: another launcher runs the run, the new run's name is taken, or the folder cannot be written.
    """
    if request.resume:
        folder, _, metadata = open_run_folder(home)
    else:
        if request.keys:
            request.keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder, metadata = create_run_folder(config, home.name, free_endpoint(config.gateway.endpoint), request.keys)
    lock = MachineLock(home / LOCK_FILE)
    try:
        lock.acquire()
    except LeaseHeld:
        raise _in_use_error(lock, home) from None
    with lock:
        if request.resume and request.overrides:
            save(config, folder.config)
        yield folder, metadata


def _in_use_error(lock: MachineLock, home: Path) -> RunError:
    return RunError(f"{home} is already run by {lock.owner() or 'another process'}; end that first")


def _surveyed_checkpoints(folder: RunFolder) -> Iterator[tuple[Path, CheckpointScan]]:
    """The checkpoint folder of each learner, and which checkpoints in it can be read."""
    others = (path for path in sorted(folder.checkpoints.glob("*/")) if is_learner_name(path.name))
    for path in (folder.checkpoints, *others):
        yield path, scan_checkpoints(path)


def report_unreadable_checkpoints(folder: RunFolder, console: Console) -> None:
    """Prints unreadable checkpoints. If a learner has no readable one, its checkpoints are moved aside."""
    for path, found in _surveyed_checkpoints(folder):
        if found.unreadable:
            outcome = (
                f"{RESTART_FLAG}: training starts from the beginning; they are kept in {quarantine_checkpoints(path)}"
                if found.is_all_unreadable
                else f"training continues from {found.readable}"
            )
            console.print(f"cannot be read: {found}; {outcome}", highlight=False, markup=False, soft_wrap=True)


def print_join_instructions(config: RunConfig, folder: RunFolder, metadata: RunMetadata, console: Console) -> None:
    """Prints how robots on other computers connect, and which settings of `config` are not for them."""
    ring = Keyring(folder.keys)
    allowed = ", ".join(entry.name for entry in ring.list() if entry.role not in ("learner", "console"))
    public = load_public_key(folder.keys / f"{GATEWAY_NAME}.pub")
    _, _, port = metadata.endpoint.rpartition(":")
    is_wildcard = local_endpoint(metadata.endpoint) != metadata.endpoint
    reached = f"tcp://{local_node()}:{port}" if is_wildcard else metadata.endpoint
    lines = [
        f"listening on {metadata.endpoint}; this gateway's public key is {public}",
        f"allowed: {allowed or f'no robot yet; user-sys keys allow NAME --role robot --folder {folder.keys}'}",
        f"on a robot's computer: user-sys edge CONFIG --connect {reached}",
    ]
    if changed := changed_robot_sections(config, RunConfig()):
        lines.append(
            f"{', '.join(changed)}: for robots that this command starts; `user-sys edge` applies what its CONFIG sets"
        )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _require_console(config: RunConfig) -> None:
    """Raises an error at once if the console cannot be served: demonstrations recorded before that would cost time.

    Raises:
        RunError: its port is taken.
        ConfigError: it needs accounts, and there is none; or its certificate cannot be used.
    """
    if not config.console.enabled:
        return
    if config.console.has_accounts:
        from user_sys.console.accounts import AccountStore, require_accounts  # imports argon2

        require_accounts(config.console, AccountStore())
    require_certificate(config.console)
    try:
        host = config.console.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, config.console.port), family=family).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"console: cannot listen on port {config.console.port} ({getattr(error, 'strerror', error)}); "
            "choose another with --console.port, or 0"
        ) from None


def prepare_run_folder(
    config: RunConfig,
    folder: RunFolder,
    metadata: RunMetadata,
    on_other_nodes: Collection[str] = (),
    address: str = LOOPBACK,
) -> dict[str, RobotSpec]:
    """Writes keys, robot records and the configurations of the robots' processes. Existing files are kept.

    Args:
        on_other_nodes: robots that other computers drive, which reach this one at `address`.

    Returns:
        Each robot's spec.

    Raises:
        RunError: the policy acts in a server that the run does not start, and its public key is missing.
        ConfigError: the policy server could not answer within a control period.
    """
    _create_keys(config, folder)
    specs = {robot.name: robot_spec(robot) for robot in config.robots}
    location = policy_location(config.policy)
    if location == "server":
        check_server_swaps(config.weights)
        for robot in config.robots:
            fraction = config.policy.timeout_fraction
            may_take_long = not robot.follows_clock or config.policy.execution.mode == "async"
            action_timeout_s(specs[robot.name], fraction, may_take_long=may_take_long)
    for robot in config.robots:
        save_robot_record(folder.robots, robot.name, specs[robot.name])
    learners = learner_from_robot(read_robot_records(folder.robots))
    for robot in config.robots:
        has_weights = (learner_folder(folder.weights, learners[robot.name]) / INDEX_FILE).exists()  # it waits for them
        gateway = local_endpoint(metadata.endpoint, address if robot.name in on_other_nodes else LOOPBACK)
        state = folder.edge(robot.name)
        session = SessionConfig(
            robot=robot.name,
            holder=f"run {metadata.name}",
            endpoint=_session_endpoint(robot, folder, gateway),
            keys=folder.keys.resolve(),
            state=state.resolve(),
            starts=EpisodeStarts.of(robot, config.seed),
            real_time=robot.follows_clock,
            realtime_scheduling=robot.realtime_scheduling,
            explore=robot.explores and not has_weights,
            description=robot.description,
            policy_address=folder.policy_address.resolve(),
            outbox=config.outbox,
            recorder=config.recorder,
            intervention=config.intervention,
            policy=replace(config.policy, location=location),
            weights=config.weights,
            tunnel=config.tunnel,
        )
        write_process_configs(state, robot, session)
    return specs


def require_keys(endpoint: str, keys: Path | None) -> None:
    """Raises RunError if a gateway beyond loopback would have no key pair that a person made for it.

    Args:
        keys: the folder of keys; None for a run's own, which is created with the run.
    """
    if is_loopback(endpoint) or (keys is not None and (keys / f"{GATEWAY_NAME}.key").exists()):
        return
    folder = keys or Path("keys")
    raise RunError(
        f"gateway.endpoint: {endpoint} can be reached from other computers, and the gateway has no key there: make one "
        f"with `user-sys keys new {GATEWAY_NAME} --folder {folder}` and give --keys {folder}"
    )


def _require_keys_folder(folder: RunFolder) -> None:
    """Raises RunError if the run uses a folder of keys that is not there, such as after a move."""
    if folder.keys.is_symlink() and not folder.keys.exists():
        raise RunError(
            f"the run's keys are missing: {folder.keys} is a link to {folder.keys.readlink()}; move the keys back, or "
            f"make the link again with `ln -sfn KEYS {folder.keys}`, KEYS being their absolute path"
        )


def require_allowed(robots: Sequence[RobotConfig], keys: Path | None) -> None:
    """Raises RunError if the gateway would reject one of these remote robots.

    Args:
        keys: the folder of keys; None for a run's own, which allows no remote robot.
    """
    folder = keys or Path("keys")
    known = {entry.name for entry in Keyring(folder).list() if entry.role == "robot"} if keys else set()
    if unknown := [robot.name for robot in robots if robot.name not in known]:
        raise RunError(
            f"remote_robots: the key of {unknown[0]} is not allowed; allow it with `user-sys keys allow {unknown[0]} "
            f"--role robot --public=KEY --folder {folder}`, and give --keys {folder}"
        )


def _session_endpoint(robot: RobotConfig, folder: RunFolder, gateway: str) -> str:
    """The endpoint that a robot's session dials: the gateway, or the near end of its emulated link."""
    if not robot.link:
        return gateway
    near = free_endpoint(f"tcp://{LOOPBACK}:0")
    settings = emulated_link_settings(robot, near, gateway)
    replace_durably(folder.link(robot.name), msgspec.json.encode(settings))
    return near


def _create_keys(config: RunConfig, folder: RunFolder) -> None:
    """Creates a key pair for each process of the run, and the gateway's ring of allowed peers."""
    roles: dict[str, Role] = {LEARNER: "learner", CONSOLE: "console", LAUNCHER: "console"}
    roles |= {robot.name: "robot" for robot in config.robots}
    _create_key(folder, GATEWAY_NAME)
    if config.policy.is_started_by_run:
        roles[POLICY_NODE] = "policy"
    elif policy_location(config.policy) == "server" and config.robots:
        load_public_key(folder.keys / f"{POLICY_NODE}.pub")
    for name, role in roles.items():
        allow_process(folder, name, role)


def allow_process(folder: RunFolder, name: str, role: Role) -> None:
    """Creates a process's key pair if it has none, and allows it at the gateway, whether or not that runs.

    Raises:
        RunError: a robot of that name on another computer has the private key.
    """
    ring = Keyring(folder.keys)
    is_known = any((entry.name, entry.role) == (name, "robot") for entry in ring.list())
    if is_known and not (folder.keys / f"{name}.key").exists():
        raise RunError(
            f"robots: {name} is the name of a robot on another computer, whose key is in {ring.folder}; choose another "
            "name for the robot of this run"
        )
    ring.allow(_create_key(folder, name), name, role)


def _create_key(folder: RunFolder, name: str) -> str:
    """The public key of that name in the run's folder of keys; the pair is created if it is missing."""
    path = folder.keys / f"{name}.key"
    if not path.exists():
        save_keypair(new_keypair(), folder.keys, name)
    return load_keypair(path).public


def gateway_client(folder: RunFolder, metadata: RunMetadata, name: str) -> TunnelClient:
    """A client of the run's gateway in the role of a console."""
    keys, gateway_key = load_keypair(folder.keys / f"{name}.key"), load_public_key(folder.keys / f"{GATEWAY_NAME}.pub")
    hello = Hello(protocol=PROTOCOL_VERSION, role="console", name=name)
    return TunnelClient(local_endpoint(metadata.endpoint), keys, gateway_key, hello)


def local_endpoint(endpoint: str, address: str = LOOPBACK) -> str:
    """The endpoint at which the run's own processes reach a gateway that listens on `endpoint`.

    Args:
        address: of this computer, dialled if `endpoint` stands for all addresses.
    """
    host, _, port = endpoint.rpartition(":")
    return f"tcp://{address}:{port}" if host in ("tcp://0.0.0.0", "tcp://*", "tcp://[::]") else endpoint


def free_port(address: str) -> int:
    """A port for a process that listens on `address`; a random one if that belongs to another computer."""
    try:
        return int(free_endpoint(f"tcp://{address}:0").rpartition(":")[2])
    except RunError:
        return random.randrange(*REMOTE_PORTS)


def free_endpoint(endpoint: str) -> str:
    """`endpoint` with a free port in place of port 0, so that the port stays the same over restarts.

    A bound socket that does not listen reserves the port until this process ends: the kernel gives it to no other
    process. SO_REUSEADDR, which libzmq and asyncio set too, lets a process listen on it by its number.

    Raises:
        RunError: this machine has no such address.
    """
    host, _, port = endpoint.rpartition(":")
    if port != "0":
        return endpoint
    address = host.removeprefix("tcp://").replace("*", "0.0.0.0")
    with socket.socket(socket.AF_INET6 if address.startswith("[") else socket.AF_INET) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reservation.bind((address.strip("[]"), 0))
        except OSError as error:
            raise RunError(f"gateway.endpoint: cannot listen on {endpoint}: {error.strerror}") from error
        chosen = reservation.getsockname()[1]
        reservation.detach()
    return f"{host}:{chosen}"


def count_demonstrations(store: Path, robot: str) -> Counter[str]:
    """Complete, successful demonstrations of `robot` in the store at `store`, by task; none if there is no store."""
    episodes = stored_episodes(store)
    return Counter(e.task for e in episodes if e.source is EpisodeSource.DEMO and e.robot == robot and e.success)


def record_demonstrations(
    config: RobotConfig,
    store: Path,
    demonstrations: DemonstrationConfig,
    recorder: RecorderConfig,
    *,
    seed: int,
    check_stop: StopCheck = never_stop,
) -> Iterator[EpisodeReport]:
    """Records until the store has each task's share of successful demonstrations; yields each durable one.

    `check_stop`: see `generate_demonstrations`.

    Raises:
        ConfigError: the task has no scripted expert, or the expert fails too often.
        HalError: the robot cannot be driven now.
    """
    existing = count_demonstrations(store, config.name)
    if not missing_demonstrations(config, demonstrations, existing):
        return
    with StoreWriter.open(store) as writer:
        used = _stored_seeds(store, config.name)

        def persist(chunks: Sequence[bytes]) -> None:
            for chunk in chunks:
                writer.append(chunk)
            writer.sync()

        yield from generate_demonstrations(
            config,
            demonstrations,
            existing,
            persist,
            recorder,
            seed=seed,
            used=used,
            check_stop=check_stop,
        )


def _stored_seeds(store: Path, robot: str) -> frozenset[int]:
    """The seeds of `robot`'s episodes in the store at `store`, failed and deleted ones too."""
    with StoreReader.open(store) as reader:
        reader.refresh()
        episodes = reader.index.episodes
        return frozenset(episodes.seed[episodes.robot == episodes.robots.find(robot)].tolist())


def record_all_demonstrations(
    config: RunConfig,
    store: Path,
    console: Console,
    on_other_nodes: Collection[str],
    held: Collection[str] = (),
) -> None:
    """Records the demonstrations of each of the run's robots and prints their number.

    Args:
        on_other_nodes: robots that other computers drive. This computer records for the simulated ones of them only.
        held: robots that do not move; the next launch records for those that are in use again.

    Raises:
        RunError: a real robot on another computer lacks demonstrations. No robot has moved.
    """
    for robot in config.robots:
        if robot.simulated or robot.name not in on_other_nodes:
            continue
        existing = count_demonstrations(store, robot.name)
        if missing := missing_demonstrations(robot, config.demonstrations, existing):
            episodes = len(robot.tasks) * max(Counter(missing).values())  # the record verb shares them out evenly
            raise RunError(
                f"{robot.name} is on another computer, and {len(missing)} of its demonstrations are missing: record "
                f"them there with `user-sys record CONFIG --episodes {episodes}`, copy runs/demonstrations here, "
                f"`user-sys store merge runs/demonstrations --into {store}`, and `--resume {store.parent}`; "
                "or set demonstrations.episodes to 0"
            )
    with defer_signals() as check_stop:
        for robot in config.robots:
            if robot.name in held:
                continue
            recorded = record_demonstrations(
                robot,
                store,
                config.demonstrations,
                config.recorder,
                seed=config.seed,
                check_stop=check_stop,
            )
            steps = [episode.steps for episode in recorded]
            if steps:
                console.print(f"{robot.name}: {len(steps)} demonstrations by the scripted expert, {sum(steps)} steps")
