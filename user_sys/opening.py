"""Before anything of a run starts: what cannot work is said, its places are taken, its folder is made."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hal.ray_bridge import connect
from hal.resource import local_node
from user_sys.compose import RobotConfig, link_settings, robot_spec
from user_sys.config import load, save
from user_sys.edge.demonstrations import require_shown
from user_sys.errors import RunError
from user_sys.gang import Gang
from user_sys.here import Here
from user_sys.learner.checkpoint import RESTART_FLAG, Survey, lost_message, set_aside, survey
from user_sys.learners import is_learner
from user_sys.prepare import (
    GATEWAY,
    free_endpoint,
    local_endpoint,
    require_keys,
    require_let_in,
    share_keys,
)
from user_sys.run_folder import RunCard, create, default_name, reopen, require_new
from user_sys.topology import RunConfig, RunFolder
from user_sys.tunnel.keys import Keyring, load_public_key


def read(args: Namespace, verb: str) -> tuple[RunConfig, Path]:
    """The run's configuration, and where its folder is or will be; what cannot work is said before anything is made."""
    if args.resume:
        folder, config, _ = reopen(Path(args.resume), args.overrides)
        _require_port(config)
        if not args.restart_if_unreadable:
            for path, found in _checkpoints(folder):
                if found.lost:
                    raise RunError(lost_message(path, found))
        return config, folder.path
    config = load(RunConfig, Path(args.config), args.overrides)
    if verb == "train" and not config.robots:
        raise RunError(
            f"{args.config}: robots: a run needs at least one robot; "
            "where they come in from computers of their own, run it with `user-sys cloud`"
        )
    _require_port(config)
    require_keys(config.gateway.endpoint, args.keys)
    require_let_in(config.guests, args.keys)
    for robot in _buildable(config):
        require_shown(robot, config.demonstrations)
        if robot.link:
            link_settings(robot, "", "")
    home = config.runs / (args.name or config.name or default_name(Path(args.config)))
    require_new(home)
    return config, home


def _buildable(config: RunConfig) -> Iterator[RobotConfig]:
    """The run's robots, but for those that it may choose from and cannot, since they cannot be built here."""
    for robot in config.robots:
        try:
            robot_spec(robot)
        except Exception:  # a foreign driver may fail in any way
            if not config.chooses_robots:
                raise
            continue
        yield robot


def make(args: Namespace, config: RunConfig, home: Path) -> tuple[RunFolder, RunCard]:
    """The run's folder: made, or the one that is there."""
    if args.resume:
        folder, _, card = reopen(home)
        if args.overrides:
            save(config, folder.config)
        return folder, card
    folder, card = create(config, home.name, free_endpoint(config.gateway.endpoint))
    if args.keys:
        share_keys(folder, args.keys)
    return folder, card


@dataclass(frozen=True)
class Places:
    """What a run has got before anything of it is made.

    Attributes:
        config: the run, with the robots alone that it drives.
        gang: its part of the cluster that it runs on; None on one of its own, which has this computer alone.
        gpus: the UUIDs of this computer's GPUs that meet its learners' needs, where it runs on this computer alone.
        policy_gpus: likewise, of its policy process.
    """

    config: RunConfig
    gang: Gang | None = None
    gpus: tuple[str, ...] = ()
    policy_gpus: tuple[str, ...] = ()


@contextmanager
def take_places(config: RunConfig, home: Path, console: Console) -> Iterator[Places]:
    """Takes what the run needs of this computer, or of the cluster, for as long as the context is.

    A run that goes on is given the robots that it had, which are all that its folder's configuration lists.

    Raises:
        PlacementError: the run needs what there is not.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if not config.ray.address:
        with Here(config, home.name, home.parent) as here:
            here.take(say)
            yield Places(here.config, gpus=here.gpus, policy_gpus=here.policy_gpus)
        return
    with Gang(connect(config.ray.address), config, home.name, home.parent) as gang:
        gang.take(say)
        yield Places(gang.config, gang)


def _checkpoints(folder: RunFolder) -> Iterator[tuple[Path, Survey]]:
    """The folder of each learner's checkpoints, and what can be read there."""
    further = (path for path in sorted(folder.checkpoints.glob("*/")) if is_learner(path.name))
    for path in (folder.checkpoints, *further):
        yield path, survey(path)


def tell_of_checkpoints(folder: RunFolder, console: Console) -> None:
    """Says which checkpoints cannot be read; those of a learner that has no other are kept aside."""
    for path, found in _checkpoints(folder):
        if found.unreadable:
            outcome = (
                f"{RESTART_FLAG}: training begins anew; they are kept in {set_aside(path)}"
                if found.lost
                else f"training goes on from {found.readable}"
            )
            console.print(f"cannot be read: {found}; {outcome}", highlight=False, markup=False, soft_wrap=True)


def invite(folder: RunFolder, card: RunCard, console: Console) -> None:
    """Tells people how robots come in."""
    ring = Keyring(folder.keys)
    allowed = ", ".join(entry.name for entry in ring.list() if entry.role not in ("learner", "console"))
    public = load_public_key(folder.keys / f"{GATEWAY}.pub")
    _, _, port = card.endpoint.rpartition(":")
    reached = f"tcp://{local_node()}:{port}" if local_endpoint(card.endpoint) != card.endpoint else card.endpoint
    for line in (
        f"listening on {card.endpoint}; this gateway's public key is {public}",
        f"let in: {allowed or 'no robot yet; user-sys keys allow NAME --role robot --folder ' + str(folder.keys)}",
        f"on a robot's computer: user-sys edge CONFIG --connect {reached}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _require_port(config: RunConfig) -> None:
    """Raises RunError when the console's port is taken: recording demonstrations first would waste a person's time."""
    if not config.console.enabled:
        return
    try:
        socket.create_server(("127.0.0.1", config.console.port)).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"console: port {config.console.port} cannot be listened on ({getattr(error, 'strerror', error)}); "
            "choose another with --console.port, or 0"
        ) from None
