"""``user-sys node``: this computer as a node of a Ray cluster, with the robots and GPUs that it has."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType

from rich.console import Console
from rich.text import Text

from hal.address import host_and_port
from hal.cards import visible
from hal.discovery import discover
from hal.extras import with_extra
from hal.placement_words import listed
from hal.ray_address import require_token
from hal.ray_nodes import MAX_LABEL_CHARS, ensure_token, fit, node_argv, node_environment
from hal.resource import Kind, ResourceRecord
from user_sys.compose import RobotConfig, probes
from user_sys.config import load
from user_sys.errors import ConfigError, RunError
from user_sys.hardware.grammar import PORT
from user_sys.topology import RunConfig

START_TRIES = 4
SLOW_START_S = (30.0, 180.0)  # Ray that ends by itself in between did not come up
MAX_PORT = 65535


def head_main(args: Namespace) -> int:
    """``user-sys node head``: begins a cluster. Blocks until Ctrl-C; the exit status is Ray's own."""
    _require_ray()
    if not 1 <= args.port <= MAX_PORT:
        raise ConfigError(f"--port {args.port}: a port is a number from 1 to {MAX_PORT}")
    _require_own(args.ip)
    labels, records = _labels(args.label), _found(args)
    ensure_token(args.token)
    argv = node_argv(records, labels, head_port=args.port, ip=args.ip)
    reached = f"{args.ip or 'THIS-COMPUTER'}:{args.port}"
    _say(f"others join with: user-sys node join {reached} --token {args.token}")
    token = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={args.token.resolve()}"
    _say(f"a run uses it with: {token} user-sys train CONFIG --ray.address={reached}")
    return _keep(argv, node_environment(args.token), records)


def join_main(args: Namespace) -> int:
    """``user-sys node join ADDRESS``: joins a cluster, however long that takes. Blocks until Ctrl-C; the exit status is
    Ray's own. Raises HalError: the cluster is there, and refuses the token."""
    _require_ray()
    if host_and_port(args.address) is None:
        raise ConfigError(f"{args.address!r} is no address to join at: write HOST:PORT, such as 10.0.0.2:{PORT}")
    _require_own(args.ip)
    labels, environment = _labels(args.label), node_environment(args.token)
    require_token(args.address, environment)
    records = _found(args)
    return _keep(node_argv(records, labels, address=args.address, ip=args.ip), environment, records, tries=sys.maxsize)


def _require_own(ip: str) -> None:
    """Raises ConfigError where this computer has no such address: Ray would try it for minutes."""
    try:
        if ip:
            socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET).close()
    except (OSError, ValueError):  # the latter: a name that cannot be one
        raise ConfigError(f"--ip {ip[:80]}: this computer has no such address") from None


def _require_ray() -> None:
    if find_spec("ray") is None:
        raise RunError(f"a node needs the package 'ray': {with_extra('learner')}")


def _found(args: Namespace) -> tuple[ResourceRecord, ...]:
    """What is to be declared: CONFIG's robots, and the GPUs that are not hidden. What was not looked at is told."""
    robots: Sequence[RobotConfig] = load(RunConfig, args.config).robots if args.config else ()
    mine = [robot for robot in robots if not args.robot or robot.name in args.robot]
    if unknown := sorted(set(args.robot) - {robot.name for robot in mine}):
        where = f"{args.config} names no such robot" if args.config else "give the CONFIG that names it"
        raise ConfigError(f"--robot {unknown[0]}: {where}")
    found = discover(probes(mine))
    for probe, failure in sorted(found.failures.items()):
        _say(f"what the probe {probe} looks for is not declared: {failure}")
    return visible(found.records, os.environ)


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    """Raises ConfigError for what Ray would refuse, or keep in other words than a run's `needs` ask for."""
    if wrong := [pair for pair in pairs if not pair.partition("=")[0] or not pair.partition("=")[2]]:
        raise ConfigError(f"--label {wrong[0]}: write NAME=VALUE, such as site=lab")
    labels = dict(pair.split("=", 1) for pair in pairs)
    for word in (*labels, *labels.values()):
        if fit(word) != word:
            why = f"at most {MAX_LABEL_CHARS} letters, digits, '-', '_' and '.', and none of these three at an end"
            raise ConfigError(f"--label: Ray does not take {word[:80]!r}: {why}")
    return labels


def _keep(
    argv: list[str], environment: dict[str, str], records: Sequence[ResourceRecord], *, tries: int = START_TRIES
) -> int:
    """Blocks for as long as Ray runs; starts it anew where it did not come up within the half minute that it has."""
    has = [f"{record.name} ({record.model})" for record in records if record.kind in (Kind.ROBOT, Kind.GPU)]
    _say(f"this node has {listed(has) if has else 'neither robots nor GPUs'}")
    least_s, most_s = SLOW_START_S
    while True:
        began_s = time.monotonic()
        status, asked = _run(argv, environment)
        slow = least_s <= time.monotonic() - began_s <= most_s
        tries -= 1
        if asked or not status or not slow or not tries:
            return status
        _say("Ray did not come up in the time that it gives itself, since this computer is busy; trying again")


def _run(argv: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """Ray's exit status, and whether it was asked to end."""
    asked = False
    with subprocess.Popen(argv, env=environment, stdout=sys.stderr) as ray:

        def end(number: int, _: FrameType | None) -> None:
            nonlocal asked
            asked = True
            ray.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return ray.wait(), asked
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _say(line: str) -> None:
    Console().print(Text(line), soft_wrap=True)
