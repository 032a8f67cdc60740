"""A computer as a node of a Ray cluster: the command that starts Ray there, with what the computer has.

Ray learns of custom resources and labels when a node starts, and never after. So every robot that a configuration names
is declared, whether or not it is switched on: its driver process waits for it.

Ray's own resource ``GPU`` says how many there are, and chooses one by itself. So each GPU is declared as a resource of
its own, with labels that say what it is, and Ray is told that there are none to choose from.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from hal.cards import UUID
from hal.durable import replace_durably
from hal.errors import HalError
from hal.resource import Health, Kind, ResourceRecord

DEFAULT_PORT = 6379
DEFAULT_OBJECT_STORE_BYTES = 150_000_000
NODE_SETTINGS = {"RAY_worker_niceness": "0", "RAY_kill_child_processes_on_worker_exit": "false"}
"""Else all that runs under Ray, robots' drivers too, gives way to everybody: Ray's own default is 15. And Ray would
kill drivers with their actors; they end by themselves, once they have stopped their robots."""
ROBOT, CARD = "robot:", "card:"
"""How the resources begin by which a node declares a robot, and a GPU."""
CLAIM = 0.6
"""Of a robot's resource, what a run reserves: more than half, so that one run has it. The rest is for its processes."""
ROBOT_LABEL, CARD_LABEL = "robot-", "card-"
"""How the labels begin that say what a robot is, and a GPU."""
CAN = "can."
"""How those of a robot's facts begin that are capabilities, as in ``robot-panda-0.can.camera.front``."""
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_LABEL_CHARS = 63


def ray_resources(records: Iterable[ResourceRecord]) -> dict[str, float]:
    """What a Ray node must declare so that jobs can ask for these robots and GPUs, e.g. ``robot:panda-0``,
    ``robot_model:panda`` and ``card:gpu-0``. Ray counts processors by itself.
    """
    there = list(records)
    robots = [record for record in there if record.kind is Kind.ROBOT]
    models = Counter(f"robot_model:{robot.model}" for robot in robots)
    found = {f"{ROBOT}{robot.name}": 1.0 for robot in robots} | {model: float(n) for model, n in models.items()}
    return found | {f"{CARD}{card}": 1.0 for card in _cards(there)}


def ray_labels(records: Iterable[ResourceRecord], labels: Mapping[str, str]) -> dict[str, str]:
    """`labels`, and what is known of the computer's robots and GPUs, in the characters that Ray allows."""
    there = list(records)
    found: dict[str, str] = {}
    for robot in (record for record in there if record.kind is Kind.ROBOT):
        found |= {robot_label(robot.name): fit(robot.model), **_robot_facts(robot)}
    for card, gpu in _cards(there).items():
        found |= {
            card_label(card, "model"): fit(gpu.model.replace(" ", "_")),
            card_label(card, "memory-mb"): str(gpu.memory_bytes // 10**6),
            card_label(card, UUID): fit(gpu.labels.get(UUID, "")),
        }
    return {name: value for name, value in found.items() if value} | {fit(n): fit(v) for n, v in labels.items()}


def robot_label(robot: str) -> str:
    """The label that says of what model a robot is."""
    return fit(f"{ROBOT_LABEL}{robot}")


def robot_facts(robot: str, labels: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The capabilities and the labels that a node's `labels` say `robot` has."""
    mark = f"{ROBOT_LABEL}{robot}."
    own = {label.removeprefix(mark): value for label, value in labels.items() if label.startswith(mark)}
    can = tuple(sorted(_capability(fact) for fact in own if fact.startswith(CAN)))
    return can, {fact: value for fact, value in own.items() if not fact.startswith(CAN)}


def _robot_facts(robot: ResourceRecord) -> dict[str, str]:
    """What `robot_facts` reads. A fact that Ray would not take as it is, is left out."""
    can = {f"{CAN}{each.replace(':', '.', 1)}": each for each in robot.capabilities}
    facts = {fact: "yes" for fact, each in can.items() if _capability(fact) == each} | robot.labels
    named = {f"{ROBOT_LABEL}{robot.name}.{fact}": value for fact, value in facts.items()}
    return {label: value for label, value in named.items() if fit(label) == label and fit(value) == value}


def _capability(fact: str) -> str:
    return fact.removeprefix(CAN).replace(".", ":", 1)


def card_label(card: str, fact: str) -> str:
    """The label that says of a GPU its ``model``, with ``_`` for each space, its ``memory-mb``, or its ``uuid``."""
    return fit(f"{CARD_LABEL}{card}-{fact}")


def node_argv(
    records: Iterable[ResourceRecord], labels: Mapping[str, str], *, head_port: int = 0, address: str = "", ip: str = ""
) -> list[str]:
    """The command line that keeps a Ray node going until SIGTERM.

    Args:
        records: what the computer has.
        labels: further labels, such as the site.
        head_port: begins a cluster whose others join at this port; 0 joins the one at `address`.
        ip: this node's own address; empty lets Ray find it.
    """
    found = list(records)
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    argv += ["--dashboard-agent-listen-port=0"]  # or a second node of one machine would want the first one's
    argv += ["--head", f"--port={head_port}", "--include-dashboard=false"] if head_port else [f"--address={address}"]
    argv += [f"--node-ip-address={ip}"] * bool(ip)
    argv += ["--num-gpus=0"]  # or Ray would choose from what it counts
    argv += [f"--resources={json.dumps(ray_resources(found))}"]
    argv += [f"--object-store-memory={DEFAULT_OBJECT_STORE_BYTES}"]
    chosen = ray_labels(found, labels)
    return [*argv, f"--labels={','.join(f'{k}={v}' for k, v in chosen.items())}"] if chosen else argv


def node_environment(token: Path | None) -> dict[str, str]:
    """This process's variables, and those that a node needs. `token` is the file of the cluster's token.

    Raises:
        HalError: no token is known, neither by `token` nor as Ray documents it.
    """
    known = {name: os.environ[name] for name in (_TOKEN, _TOKEN_PATH) if os.environ.get(name)}
    if token is not None:
        if not token.exists():
            raise HalError(f"there is no cluster's token at {token}; copy it from the computer that began the cluster")
        known = {_TOKEN_PATH: str(token.resolve())}
    if not known:
        raise HalError("which token does the cluster have? Give --token FILE, or set RAY_AUTH_TOKEN_PATH")
    rest = {name: value for name, value in os.environ.items() if name != _TOKEN}  # which to Ray counts more than a file
    return {**rest, "RAY_AUTH_MODE": "token", **NODE_SETTINGS, **known}


def ensure_token(path: Path) -> None:
    """Draws a cluster's token into `path`, for this user's eyes, where there is none."""
    if not path.exists():
        before = os.umask(0o077)
        try:
            replace_durably(path, secrets.token_hex(32).encode())
        finally:
            os.umask(before)


def fit(text: str) -> str:
    """`text` in the characters, and of the length, that Ray allows in a label."""
    return _UNFIT.sub("-", text)[:MAX_LABEL_CHARS].strip("-_.")


def _cards(records: Iterable[ResourceRecord]) -> dict[str, ResourceRecord]:
    """The GPUs that work, by what they are called on their own computer, e.g. ``gpu-0``."""
    there = [record for record in records if record.kind is Kind.GPU and record.health is not Health.LOST]
    return {fit(record.name.rpartition("/")[2]): record for record in there}
