"""The grammar of ``user-sys hardware``; it imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

HARDWARE_MODULE = "user_sys.commands.hardware"
NODE_MODULE = "user_sys.commands.node"
PORT = 6379


def add_hardware_parser(verbs: Any) -> None:
    """Adds the verb to `verbs`."""
    parser_class = verbs._parser_class
    hardware = verbs.add_parser(
        "hardware",
        help="find robots and GPUs, see how they fare, say who may use them",
        description="Finds what this computer and its robots are, and what keeps them from working.",
    )
    orders = hardware.add_subparsers(metavar="ORDER", required=True, parser_class=parser_class)
    for name, summary in (
        ("list", "what there is now"),
        ("watch", "what appears, degrades, vanishes and returns, until Ctrl-C"),
        ("doctor", "what keeps this computer from driving robots well, and how to mend it"),
    ):
        order = orders.add_parser(name, help=summary, description=f"Tells {summary}.")
        order.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file that names robots")
        order.add_argument("--json", action="store_true", help="for other programs")
        order.set_defaults(runs=(HARDWARE_MODULE, f"{name}_main"))
        if name == "list":
            _add_run(order)
    _add_explain(orders)
    _add_people(orders)
    _add_audit(orders)


def _add_explain(orders: Any) -> None:
    explain = orders.add_parser(
        "explain",
        help="whether a job could run here now, on what, or why not",
        description="Says whether the job of CONFIG (robots and needs) can be placed on what there is.",
    )
    explain.add_argument("config", type=Path, metavar="JOB", help="YAML file of a run, such as configs/fleet.yaml")
    explain.add_argument("--json", action="store_true", help="for other programs")
    explain.add_argument(
        "--ray", default="", metavar="HOST:PORT", help="of the Ray cluster that it would run on (default: JOB's)"
    )
    _add_run(explain)
    explain.set_defaults(runs=(HARDWARE_MODULE, "plan_main"))


def _add_people(orders: Any) -> None:
    for name, summary in (
        ("quarantine", "take a robot out of use at once; its lease ends"),
        ("drain", "let the session at work finish, and give the robot to no other"),
        ("restore", "put a robot back into use"),
    ):
        order = orders.add_parser(name, help=summary, description=f"Orders to {summary}. A gateway obeys at once.")
        order.add_argument("name", metavar="ROBOT", help="its name")
        order.add_argument("--run", type=Path, required=True, metavar="RUN", help="run folder, such as runs/latest")
        order.add_argument("--by", default=None, metavar="NAME", help="who orders it (default: who is logged in)")
        if name != "restore":
            order.add_argument("--reason", default="", metavar="TEXT", help="why; whoever asks for the robot is told")
        order.set_defaults(runs=(HARDWARE_MODULE, f"{name}_main"))


def _add_audit(orders: Any) -> None:
    summary = "who ordered what, signed in, connected, was refused, or drove a robot"
    audit = orders.add_parser("audit", help=summary, description=f"Tells {summary}.")
    audit.add_argument("name", nargs="?", default="", metavar="ROBOT", help="this one only")
    audit.add_argument(
        "--run", type=Path, metavar="RUN", help="run folder, such as runs/latest (default: what belongs to no run)"
    )
    audit.add_argument("--json", action="store_true", help="for other programs")
    audit.set_defaults(runs=(HARDWARE_MODULE, "audit_main"))


def _add_run(order: argparse.ArgumentParser) -> None:
    order.add_argument("--run", type=Path, metavar="RUN", help="add the robots that this run's gateway knows")


def add_node_parser(verbs: Any) -> None:
    """Adds ``user-sys node`` to `verbs`."""
    node = verbs.add_parser("node", help="make this computer a node of a Ray cluster, with what it has")
    orders = node.add_subparsers(metavar="ORDER", required=True, parser_class=verbs._parser_class)
    head = orders.add_parser("head", help="begin a cluster here", description="Begins a cluster; Ctrl-C ends it.")
    head.add_argument("--port", type=int, default=PORT, metavar="N", help=f"where others join (default: {PORT})")
    join = orders.add_parser("join", help="join a cluster", description="Joins a cluster; Ctrl-C leaves it.")
    join.add_argument("address", metavar="HOST:PORT", help="of the computer that began the cluster")
    for order, function, token in ((head, "head_main", Path("ray-token")), (join, "join_main", None)):
        order.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file that names robots")
        order.add_argument(
            "--robot", action="append", default=[], metavar="NAME", help="only this one of CONFIG's robots; repeatable"
        )
        order.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="such as site=lab")
        order.add_argument("--ip", default="", metavar="ADDRESS", help="this computer's own address")
        order.add_argument("--token", type=Path, default=token, metavar="FILE", help="the cluster's token")
        order.set_defaults(runs=(NODE_MODULE, function))
