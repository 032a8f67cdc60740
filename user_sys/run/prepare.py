"""Prepares a run before its processes start: checks, its folder, keys, robot records, process configurations."""

from __future__ import annotations

import logging
import socket
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from hal.durable import replace_durably
from hal.resource import local_node
from hal.spec import RobotSpec
from user_sys.compose import RobotConfig, emulated_link_settings, robot_spec
from user_sys.config import load, save
from user_sys.edge.demonstrations import check_demonstrable
from user_sys.edge.robot_processes import write_process_configs
from user_sys.edge.session import SessionConfig
from user_sys.errors import RunError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import action_timeout_s
from user_sys.learner.checkpoint import (
    RESTART_FLAG,
    CheckpointScan,
    quarantine_checkpoints,
    scan_checkpoints,
    unreadable_message,
)
from user_sys.robot_records import LEARNER, is_learner_name, save_robot_record
from user_sys.run.config import (
    RunConfig,
    RunFolder,
    RunMetadata,
    create_run_folder,
    default_run_name,
    open_run_folder,
    require_no_run,
)
from user_sys.run.topology import LOOPBACK
from user_sys.tunnel.endpoint import is_loopback
from user_sys.tunnel.keys import GATEWAY_NAME, Keyring, Role, load_keypair, load_public_key, new_keypair, save_keypair

log = logging.getLogger(__name__)

CONSOLE = "console"


def load_run(args: Namespace, verb: str) -> tuple[RunConfig, Path]:
    """The run's configuration, and the path of its folder, which may not exist yet.

    Raises:
        RunError, ConfigError: the run could not work. Nothing has been created.
    """
    if args.resume:
        folder, config, _ = open_run_folder(Path(args.resume), args.overrides)
        _require_free_port(config)
        if not args.restart_if_unreadable:
            for path, found in _surveyed_checkpoints(folder):
                if found.is_all_unreadable:
                    raise RunError(unreadable_message(path, found))
        return config, folder.path
    config = load(RunConfig, Path(args.config), args.overrides)
    if verb == "train" and not config.robots:
        raise RunError(
            f"{args.config}: robots: a run needs at least one robot; "
            "if all robots connect from other computers, use `user-sys cloud`"
        )
    _require_free_port(config)
    require_keys(config.gateway.endpoint, args.keys)
    require_allowed(config.remote_robots, args.keys)
    for robot in _buildable_robots(config):
        check_demonstrable(robot, config.demonstrations)
        if robot.link:
            emulated_link_settings(robot, "", "")
    home = config.runs / (args.name or config.name or default_run_name(Path(args.config)))
    require_no_run(home)
    return config, home


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


def open_or_create_folder(args: Namespace, config: RunConfig, home: Path) -> tuple[RunFolder, RunMetadata]:
    """Creates the run's folder, or opens the existing one to resume it."""
    if args.resume:
        folder, _, metadata = open_run_folder(home)
        if args.overrides:
            save(config, folder.config)
        return folder, metadata
    folder, metadata = create_run_folder(config, home.name, free_endpoint(config.gateway.endpoint))
    if args.keys:
        link_keys(folder, args.keys)
    return folder, metadata


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


def print_join_instructions(folder: RunFolder, metadata: RunMetadata, console: Console) -> None:
    """Prints how robots on other computers connect."""
    ring = Keyring(folder.keys)
    allowed = ", ".join(entry.name for entry in ring.list() if entry.role not in ("learner", "console"))
    public = load_public_key(folder.keys / f"{GATEWAY_NAME}.pub")
    _, _, port = metadata.endpoint.rpartition(":")
    is_wildcard = local_endpoint(metadata.endpoint) != metadata.endpoint
    reached = f"tcp://{local_node()}:{port}" if is_wildcard else metadata.endpoint
    for line in (
        f"listening on {metadata.endpoint}; this gateway's public key is {public}",
        f"allowed: {allowed or f'no robot yet; user-sys keys allow NAME --role robot --folder {folder.keys}'}",
        f"on a robot's computer: user-sys edge CONFIG --connect {reached}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _require_free_port(config: RunConfig) -> None:
    """Raises RunError if the console's port is taken: demonstrations recorded before that would cost time."""
    if not config.console.enabled:
        return
    try:
        socket.create_server((LOOPBACK, config.console.port)).close()
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
    if config.policy.location == "server":
        for spec in specs.values():
            action_timeout_s(spec, config.policy.timeout_fraction)
    for robot in config.robots:
        save_robot_record(folder.robots, robot.name, specs[robot.name])
        gateway = local_endpoint(metadata.endpoint, address if robot.name in on_other_nodes else LOOPBACK)
        state = folder.edge(robot.name)
        session = SessionConfig(
            robot=robot.name,
            holder=f"run {metadata.name}",
            endpoint=_session_endpoint(robot, folder, gateway),
            keys=folder.keys.resolve(),
            state=state.resolve(),
            seed=config.seed,
            real_time=robot.follows_clock,
            realtime_scheduling=robot.realtime_scheduling,
            explore=robot.explores,
            policy_address=folder.policy_address.resolve(),
            outbox=config.outbox,
            recorder=config.recorder,
            policy=config.policy,
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


def link_keys(folder: RunFolder, keys: Path) -> None:
    """Makes the run use the folder `keys`, so that the gateway has the same key in every run."""
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.keys.is_symlink() or not folder.keys.exists():
        folder.keys.unlink(missing_ok=True)
        folder.keys.symlink_to(keys.resolve(), target_is_directory=True)
    elif not folder.keys.samefile(keys):
        raise RunError(f"{folder.path} has keys of its own in {folder.keys}; leave out --keys {keys}")


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
    ring = Keyring(folder.keys)
    roles: dict[str, Role] = {LEARNER: "learner", CONSOLE: "console"}
    roles |= {robot.name: "robot" for robot in config.robots}
    _create_key(folder, GATEWAY_NAME)
    if config.policy.is_started_by_run:
        _create_key(folder, POLICY_NODE)
    elif config.policy.location == "server" and config.robots:
        load_public_key(folder.keys / f"{POLICY_NODE}.pub")
    for name, role in roles.items():
        ring.allow(_create_key(folder, name), name, role)


def allow_learner(folder: RunFolder, name: str) -> None:
    """Creates a learner's key pair if it has none, and allows it at the gateway, whether or not that runs."""
    Keyring(folder.keys).allow(_create_key(folder, name), name, "learner")


def _create_key(folder: RunFolder, name: str) -> str:
    """The public key of that name in the run's folder of keys; the pair is created if it is missing."""
    path = folder.keys / f"{name}.key"
    if not path.exists():
        save_keypair(new_keypair(), folder.keys, name)
    return load_keypair(path).public


def local_endpoint(endpoint: str, address: str = LOOPBACK) -> str:
    """The endpoint at which the run's own processes reach a gateway that listens on `endpoint`.

    Args:
        address: of this computer, dialled if `endpoint` stands for all addresses.
    """
    host, _, port = endpoint.rpartition(":")
    return f"tcp://{address}:{port}" if host in ("tcp://0.0.0.0", "tcp://*", "tcp://[::]") else endpoint


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
