"""``user-sys node``: this computer as a node of a Ray cluster, with the robots and GPUs that it has."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import click

from hal.discovery import discover
from hal.errors import LeaseError, install_hint
from hal.machine_folder import find_machine_folder
from hal.placement import format_list
from hal.process_supervisor import exit_reason
from hal.ray_nodes import MAX_LABEL_CHARS, ensure_token_file, node_argv, node_environment, sanitize_label
from hal.resource import CUDA_VISIBLE_DEVICES, UUID_LABEL, Kind, ResourceRecord, parse_host_port
from user_sys.commands.options import PATH, combined
from user_sys.commands.output import print_line
from user_sys.compose import RobotConfig, resource_probes
from user_sys.config import load
from user_sys.errors import ConfigError, RunError
from user_sys.run.config import RunConfig

START_TRIES = 4
SLOW_START_S = (30.0, 180.0)  # Ray that ends in between did not start in time
JOIN_PAUSE_S = 10.0  # between two tries
PORT = 6379


_node_options = combined(
    click.argument("config", type=PATH, metavar="[CONFIG]", required=False),
    click.option("--robot", multiple=True, metavar="NAME", help="only this robot of CONFIG; repeatable"),
    click.option("--label", multiple=True, metavar="NAME=VALUE", help="such as site=lab; repeatable"),
    click.option("--ip", default="", metavar="ADDRESS", help="this computer's own address"),
)


@click.command()
@_node_options
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, metavar="N", help=f"for nodes (default: {PORT})")
@click.option("--token", type=PATH, default="ray-token", metavar="FILE", help="the cluster's token")
def head(config: Path | None, robot: Sequence[str], label: Sequence[str], ip: str, port: int, token: Path) -> int:
    """Start a cluster with this computer and the robots of CONFIG. Ctrl-C ends it; the exit status is Ray's own."""
    _require_ray()
    _require_local_ip(ip)
    labels, records = _labels(label), _local_resources(config, robot)
    ensure_token_file(token)
    argv = node_argv(records, labels, head_port=port, ip=ip)
    reached = f"{ip or 'THIS-COMPUTER'}:{port}"
    print_line(f"others join with: user-sys node join {reached} --token {token}")
    variables = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token.resolve()}"
    print_line(f"a run uses it with: {variables} user-sys train CONFIG --ray.address={reached}")
    return _run_until_end(argv, node_environment(token), records)


@click.command()
@click.argument("address", metavar="HOST:PORT")
@_node_options
@click.option("--token", type=PATH, metavar="FILE", help="a copy of the cluster's token")
def join(
    address: str, config: Path | None, robot: Sequence[str], label: Sequence[str], ip: str, token: Path | None
) -> int:
    """Join the cluster at HOST:PORT, with endless tries. Ctrl-C leaves it; the exit status is Ray's own."""
    _require_ray()
    if parse_host_port(address) is None:
        raise ConfigError(f"{address!r} is not an address: write HOST:PORT, such as 10.0.0.2:{PORT}")
    _require_local_ip(ip)
    labels, environment = _labels(label), node_environment(token)
    records = _local_resources(config, robot)
    argv = node_argv(records, labels, address=address, ip=ip)
    return _run_until_end(argv, environment, records, endless=True)


def _require_local_ip(ip: str) -> None:
    """Raises ConfigError if this computer has no such address, which Ray would try for minutes."""
    try:
        if ip:
            socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET).close()
    except (OSError, ValueError):  # ValueError: an impossible name
        raise ConfigError(f"--ip {ip[:80]}: this computer has no such address") from None


def _require_ray() -> None:
    if find_spec("ray") is None:
        raise RunError(f"a node needs the package 'ray': {install_hint('learner')}")


def _local_resources(config: Path | None, names: Sequence[str]) -> tuple[ResourceRecord, ...]:
    """The resources to declare: CONFIG's robots, and the GPUs that are not hidden. Prints what is wrong with them."""
    robots: Sequence[RobotConfig] = load(RunConfig, config).robots if config else ()
    chosen = [robot for robot in robots if not names or robot.name in names]
    if unknown := sorted(set(names) - {robot.name for robot in chosen}):
        reason = f"{config} has no such robot" if config else "give the CONFIG with this robot"
        raise ConfigError(f"--robot {unknown[0]}: {reason}")
    found = discover(resource_probes(chosen))
    for probe, failure in sorted(found.failures.items()):
        print_line(f"the resources of the probe {probe} are not declared: {failure}")
    if any(not robot.simulated for robot in chosen):
        try:
            find_machine_folder()
        except LeaseError as error:
            print_line(f"no run can use the real robots of this node: {error}")
    return _without_hidden_gpus(found.records)


def _without_hidden_gpus(records: Sequence[ResourceRecord]) -> tuple[ResourceRecord, ...]:
    """Raises ConfigError: CUDA_VISIBLE_DEVICES has an entry that is no UUID. That of a lost GPU is accepted."""
    uuids = {record.labels.get(UUID_LABEL, "") for record in records if record.kind is Kind.GPU}
    if not uuids or (visible := os.environ.get(CUDA_VISIBLE_DEVICES)) is None:
        return tuple(records)
    shown = {word.strip() for word in visible.split(",")} - {"", "-1"}
    if other := sorted(word for word in shown - uuids if not re.fullmatch("GPU-[0-9a-fA-F-]{36}", word)):
        raise ConfigError(f"{CUDA_VISIBLE_DEVICES} has {other[0]!r}: write the UUIDs that `nvidia-smi -L` prints")
    return tuple(record for record in records if record.kind is not Kind.GPU or record.labels.get(UUID_LABEL) in shown)


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    """Raises ConfigError for what Ray would refuse, or keep in other words than a run's `resources` requests."""
    if wrong := [pair for pair in pairs if not pair.partition("=")[0] or not pair.partition("=")[2]]:
        raise ConfigError(f"--label {wrong[0]}: write NAME=VALUE, such as site=lab")
    labels = dict(pair.split("=", 1) for pair in pairs)
    for word in (*labels, *labels.values()):
        if sanitize_label(word) != word:
            rule = (
                f"use at most {MAX_LABEL_CHARS} letters, digits, '-', '_' and '.', with a letter or digit at each end"
            )
            raise ConfigError(f"--label: Ray refuses {word[:80]!r}: {rule}")
    return labels


def _run_until_end(
    argv: list[str], environment: dict[str, str], records: Sequence[ResourceRecord], *, endless: bool = False
) -> int:
    """Blocks until Ray ends. Starts it again if it did not start within its own limit of half a minute.

    Args:
        endless: start it again whenever it ends by itself, until it succeeds or a signal ends it.
    """
    has = [f"{record.name} ({record.model})" for record in records if record.kind in (Kind.ROBOT, Kind.GPU)]
    print_line(f"this node has {format_list(has) if has else 'neither robots nor GPUs'}")
    least_s, most_s = SLOW_START_S
    tries = START_TRIES
    while True:
        began_s = time.monotonic()
        status, was_stopped = _run(argv, environment)
        slow = least_s <= time.monotonic() - began_s <= most_s
        tries -= 1
        if was_stopped or not status or not (endless or (slow and tries)):
            return status
        if endless:
            print_line(
                f"Ray ended {exit_reason(status)}; it joins again in {JOIN_PAUSE_S:g} s (if it refuses the token: "
                "`--token` names a copy of the file that `user-sys node head --token FILE` wrote)"
            )
            time.sleep(JOIN_PAUSE_S)
            continue
        print_line("Ray did not start within its own time limit, since this computer is busy; retrying")


def _run(argv: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """Ray's exit status, and whether a signal has stopped it."""
    was_stopped = False
    with subprocess.Popen(argv, env=environment, stdout=sys.stderr) as ray:

        def end(number: int, _: FrameType | None) -> None:
            nonlocal was_stopped
            was_stopped = True
            ray.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return ray.wait(), was_stopped
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
