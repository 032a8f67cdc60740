"""What must lie in a run folder before its processes start: keys, specs, the nodes' configurations, demonstrations."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import msgspec

from hal.durable import replace_durably
from hal.spec import RobotSpec
from user_sys.compose import robot_spec
from user_sys.config import save
from user_sys.edge.session import SessionConfig
from user_sys.errors import RunError
from user_sys.run_folder import RunCard
from user_sys.topology import RunConfig, RunFolder
from user_sys.tunnel.keys import Keyring, Role, load_keypair, new_keypair, save_keypair

log = logging.getLogger(__name__)

GATEWAY, LEARNER, CONSOLE = "gateway", "learner", "console"


def prepare(config: RunConfig, folder: RunFolder, card: RunCard) -> dict[str, RobotSpec]:
    """Writes what the run's processes read; what is there already stays. Returns each robot's spec."""
    _keys(config, folder)
    specs = {robot.name: robot_spec(robot) for robot in config.robots}
    for robot in config.robots:
        state = folder.edge(robot.name)
        state.mkdir(parents=True, exist_ok=True)
        replace_durably(folder.spec(robot.name), msgspec.json.encode(specs[robot.name]))
        save(robot, state / "robot.yaml")
        session = SessionConfig(
            robot=robot.name,
            holder=f"run {card.name}",
            endpoint=card.endpoint,
            keys=folder.keys.resolve(),
            state=state.resolve(),
            seed=config.seed,
            real_time=robot.real_time,
            recorder=config.recorder,
            policy=config.policy,
        )
        save(session, state / "session.yaml")
    return specs


def _keys(config: RunConfig, folder: RunFolder) -> None:
    """A key pair for each process of the run, and the gateway's ring of those it lets in."""
    ring = Keyring(folder.keys)
    roles: dict[str, Role] = {LEARNER: "learner", CONSOLE: "console"}
    roles |= {robot.name: "robot" for robot in config.robots}
    for name in (GATEWAY, *roles):
        path = folder.keys / f"{name}.key"
        if not path.exists():
            save_keypair(new_keypair(), folder.keys, name)
        if name in roles:
            ring.allow(load_keypair(path).public, name, roles[name])


def free_endpoint(endpoint: str) -> str:
    """`endpoint` with a free port of this machine in place of port 0, so that it stays the same over restarts."""
    host, _, port = endpoint.rpartition(":")
    if port != "0":
        return endpoint
    with socket.create_server((host.removeprefix("tcp://"), 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


def read_spec(path: Path) -> RobotSpec:
    """A spec that `prepare` wrote. Raises RunError where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RobotSpec)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"no robot spec at {path}: {error}") from None
