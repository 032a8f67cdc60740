"""What must lie in a run folder before its processes start: keys, specs, the nodes' configurations, demonstrations."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from hal.durable import replace_durably
from hal.spec import RobotSpec
from user_sys.compose import RobotConfig, emulated_link_settings, robot_spec
from user_sys.edge.robot_processes import write_process_configs
from user_sys.edge.session import SessionConfig
from user_sys.errors import RunError
from user_sys.gateway.gateway import is_loopback
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import action_timeout_s
from user_sys.robot_records import LEARNER, save_robot_record
from user_sys.run.config import RunConfig, RunFolder, RunMetadata
from user_sys.tunnel.keys import Keyring, Role, load_keypair, load_public_key, new_keypair, save_keypair

log = logging.getLogger(__name__)

GATEWAY, CONSOLE = "gateway", "console"
LOOPBACK = "127.0.0.1"


def prepare_run_folder(
    config: RunConfig,
    folder: RunFolder,
    metadata: RunMetadata,
    on_other_nodes: Collection[str] = (),
    address: str = LOOPBACK,
) -> dict[str, RobotSpec]:
    """Writes what the run's processes read; what is there already stays. Returns each robot's spec.

    Args:
        from_afar: the robots that other computers drive, which reach this one at `address`.

    Raises:
        RunError: the policy acts in a process that the run does not start, and the key of that is not known.
        ConfigError: the policy acts in a process that could not answer in time.
    """
    _create_keys(config, folder)
    specs = {robot.name: robot_spec(robot) for robot in config.robots}
    if config.policy.at == "site":
        for spec in specs.values():
            action_timeout_s(spec, config.policy.answer_within)
    for robot in config.robots:
        save_robot_record(folder.robots, robot.name, specs[robot.name])
        state = folder.edge(robot.name)
        session = SessionConfig(
            robot=robot.name,
            holder=f"run {metadata.name}",
            endpoint=_session_endpoint(
                robot,
                folder,
                local_endpoint(metadata.endpoint, address if robot.name in on_other_nodes else LOOPBACK),
            ),
            keys=folder.keys.resolve(),
            state=state.resolve(),
            seed=config.seed,
            real_time=robot.follows_clock,
            realtime=robot.realtime,
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
    """Raises RunError where a gateway that others can reach would have no key pair that a person made for it.

    Args:
        keys: the folder of keys; None for a run's own, which is made with the run.
    """
    if is_loopback(endpoint) or (keys is not None and (keys / f"{GATEWAY}.key").exists()):
        return
    folder = keys or Path("keys")
    raise RunError(
        f"gateway.endpoint: {endpoint} can be reached from outside, and there are no keys for it: make some with "
        f"`user-sys keys new {GATEWAY} --folder {folder}` and give --keys {folder}"
    )


def require_allowed(robots: Sequence[RobotConfig], keys: Path | None) -> None:
    """Raises RunError where the gateway would not let one of the run's `guests` in.

    Args:
        keys: the folder of keys; None for a run's own, which no guest can be in.
    """
    folder = keys or Path("keys")
    known = {entry.name for entry in Keyring(folder).list() if entry.role == "robot"} if keys else set()
    if strangers := [robot.name for robot in robots if robot.name not in known]:
        raise RunError(
            f"guests: {strangers[0]} comes in from a computer of its own, and its key is not let in: `user-sys keys "
            f"allow {strangers[0]} --role robot --public=KEY --folder {folder}`, and give --keys {folder}"
        )


def link_keys(folder: RunFolder, keys: Path) -> None:
    """Has the run use the keys in `keys`, so that the gateway is known by the same key in every run."""
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.keys.is_symlink() or not folder.keys.exists():
        folder.keys.unlink(missing_ok=True)
        folder.keys.symlink_to(keys.resolve(), target_is_directory=True)
    elif not folder.keys.samefile(keys):
        raise RunError(f"{folder.path} has keys of its own, in {folder.keys}; leave --keys away")


def _session_endpoint(robot: RobotConfig, folder: RunFolder, gateway: str) -> str:
    """Where a robot's session finds the gateway: at the near end of its emulated link, if it has one."""
    if not robot.link:
        return gateway
    near = free_endpoint("tcp://127.0.0.1:0")
    replace_durably(folder.link(robot.name), msgspec.json.encode(emulated_link_settings(robot, near, gateway)))
    return near


def _create_keys(config: RunConfig, folder: RunFolder) -> None:
    """A key pair for each process of the run, and the gateway's ring of those it lets in."""
    ring = Keyring(folder.keys)
    roles: dict[str, Role] = {LEARNER: "learner", CONSOLE: "console"}
    roles |= {robot.name: "robot" for robot in config.robots}
    _create_key(folder, GATEWAY)
    if config.policy.is_started_by_run:
        _create_key(folder, POLICY_NODE)
    elif config.policy.at == "site" and config.robots:
        load_public_key(folder.keys / f"{POLICY_NODE}.pub")
    for name, role in roles.items():
        ring.allow(_create_key(folder, name), name, role)


def allow_learner(folder: RunFolder, name: str) -> None:
    """Makes a key pair for a learner, where there is none, and has the gateway let it in, whether or not that runs."""
    Keyring(folder.keys).allow(_create_key(folder, name), name, "learner")


def _create_key(folder: RunFolder, name: str) -> str:
    """The public half of the pair in the run's folder of keys, made where it is missing."""
    path = folder.keys / f"{name}.key"
    if not path.exists():
        save_keypair(new_keypair(), folder.keys, name)
    return load_keypair(path).public


def local_endpoint(endpoint: str, address: str = LOOPBACK) -> str:
    """How a run's own processes reach a gateway that listens on `endpoint`, be it all addresses of this machine.

    Args:
        address: the one of them that a process dials; another computer's cannot dial loopback.
    """
    host, _, port = endpoint.rpartition(":")
    return f"tcp://{address}:{port}" if host in ("tcp://0.0.0.0", "tcp://*", "tcp://[::]") else endpoint


def free_endpoint(endpoint: str) -> str:
    """`endpoint` with a free port of this machine in place of port 0, so that it stays the same over restarts.

    The port is kept for whoever listens on it by name, until this process ends: a socket that is bound and does not
    listen keeps the kernel from choosing it for others, and SO_REUSEADDR, which libzmq and asyncio set too, lets one
    listen beside it.

    Raises:
        RunError: this machine has no such address.
    """
    host, _, port = endpoint.rpartition(":")
    if port != "0":
        return endpoint
    address = host.removeprefix("tcp://").replace("*", "0.0.0.0")
    with socket.socket(socket.AF_INET6 if address.startswith("[") else socket.AF_INET) as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            keeper.bind((address.strip("[]"), 0))
        except OSError as error:
            raise RunError(f"gateway.endpoint: cannot listen on {endpoint}: {error.strerror}") from error
        chosen = keeper.getsockname()[1]
        keeper.detach()
    return f"{host}:{chosen}"
