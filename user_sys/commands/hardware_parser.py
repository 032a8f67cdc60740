"""The parsers of ``user-sys hardware`` and ``user-sys node``. Imports nothing heavy, so that ``--help`` stays fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

HARDWARE_MODULE = "user_sys.commands.hardware"
NODE_MODULE = "user_sys.commands.node"
PORT = 6379


def add_hardware_parser(verbs: Any) -> None:
    """Adds ``user-sys hardware`` to `verbs`."""
    hardware = verbs.add_parser(
        "hardware",
        help="list robots and GPUs, check this computer, take robots out of use",
        description="Lists and checks the resources of this computer and its robots, and controls their use.",
    )
    commands = hardware.add_subparsers(metavar="COMMAND", required=True, parser_class=verbs._parser_class)
    for name, summary in (
        ("list", "list the present resources"),
        ("watch", "print changes of the resources, until Ctrl-C"),
        ("doctor", "print problems of this computer, and how to fix them"),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        command.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file with robots")
        command.add_argument("--json", action="store_true", help="for other programs")
        command.set_defaults(runs=(HARDWARE_MODULE, f"{name}_main"))
        if name == "list":
            _add_run(command)
    _add_plan(commands)
    _add_overrides(commands)
    _add_audit(commands)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="whether a job can run now, on what, or why not",
        description="Places the robots and resources of JOB on those that are free now, without reserving them.",
    )
    plan.add_argument("config", type=Path, metavar="JOB", help="YAML file of a run, such as configs/fleet.yaml")
    plan.add_argument("--json", action="store_true", help="for other programs")
    plan.add_argument("--ray", default="", metavar="HOST:PORT", help="address of the Ray cluster (default: JOB's)")
    _add_run(plan)
    plan.set_defaults(runs=(HARDWARE_MODULE, "plan_main"))


def _add_overrides(commands: Any) -> None:
    for name, summary in (
        ("quarantine", "take a robot out of use at once; its lease ends"),
        ("drain", "let the robot's session finish, and give the robot to no other"),
        ("restore", "put a robot back into use"),
    ):
        description = f"{summary.capitalize()}. A running gateway applies this at once."
        command = commands.add_parser(name, help=summary, description=description)
        command.add_argument("name", metavar="ROBOT", help="its name")
        command.add_argument("--run", type=Path, required=True, metavar="RUN", help="run folder, such as runs/latest")
        command.add_argument("--by", default=None, metavar="NAME", help="the operator (default: the logged-in user)")
        if name != "restore":
            command.add_argument("--reason", default="", metavar="TEXT", help="shown to sessions that want the robot")
        command.set_defaults(runs=(HARDWARE_MODULE, f"{name}_main"))


def _add_audit(commands: Any) -> None:
    summary = "print operators' actions, sign-ins, connections, refusals and leases"
    audit = commands.add_parser("audit", help=summary, description=f"{summary.capitalize()}.")
    audit.add_argument("name", nargs="?", default="", metavar="ROBOT", help="only this robot")
    audit.add_argument(
        "--run", type=Path, metavar="RUN", help="run folder, such as runs/latest (default: actions outside of runs)"
    )
    audit.add_argument("--json", action="store_true", help="for other programs")
    audit.set_defaults(runs=(HARDWARE_MODULE, "audit_main"))


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run", type=Path, metavar="RUN", help="add the resources of this run's gateway")


def add_node_parser(verbs: Any) -> None:
    """Adds ``user-sys node`` to `verbs`."""
    node = verbs.add_parser("node", help="make this computer a node of a Ray cluster, with its robots and GPUs")
    commands = node.add_subparsers(metavar="COMMAND", required=True, parser_class=verbs._parser_class)
    head = commands.add_parser("head", help="start a cluster", description="Starts a cluster; Ctrl-C ends it.")
    head.add_argument("--port", type=int, default=PORT, metavar="N", help=f"for other nodes (default: {PORT})")
    join = commands.add_parser("join", help="join a cluster", description="Joins a cluster; Ctrl-C leaves it.")
    join.add_argument("address", metavar="HOST:PORT", help="of the computer that started the cluster")
    for command, function, token in ((head, "head_main", Path("ray-token")), (join, "join_main", None)):
        command.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file with robots")
        command.add_argument(
            "--robot", action="append", default=[], metavar="NAME", help="only this robot of CONFIG; repeatable"
        )
        command.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="such as site=lab")
        command.add_argument("--ip", default="", metavar="ADDRESS", help="this computer's own address")
        command.add_argument("--token", type=Path, default=token, metavar="FILE", help="the cluster's token")
        command.set_defaults(runs=(NODE_MODULE, function))
