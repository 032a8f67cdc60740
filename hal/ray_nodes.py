"""A computer as a node of a Ray cluster: the command that starts Ray there, with what the computer has.

Ray learns of custom resources and labels when a node starts, and never after. So every robot that a configuration names
is declared, whether or not it is switched on: its driver process waits for it.
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

from hal.durable import replace_durably
from hal.errors import HalError
from hal.resource import Kind, ResourceRecord

DEFAULT_PORT = 6379
DEFAULT_OBJECT_STORE_BYTES = 150_000_000
NO_NICER = {"RAY_worker_niceness": "0"}
"""Else all that runs under Ray, robots' drivers too, gives way to everybody: Ray's own default is 15."""
ROBOT = "robot:"
"""How the resource begins by which a node declares a robot."""
CLAIM = 0.6
"""Of a robot's resource, what a run reserves: more than half, so that one run has it. The rest is for its processes."""
GPU_MODEL, GPU_MEMORY, ROBOT_LABEL = "gpu-model", "gpu-memory-gb", "robot-"
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_LABEL_CHARS = 63


def ray_resources(records: Iterable[ResourceRecord]) -> dict[str, float]:
    """What a Ray node must declare so that jobs can ask for these robots, e.g. ``robot:panda-0`` and
    ``robot_model:panda``. Ray counts processors and GPUs by itself.
    """
    robots = [record for record in records if record.kind is Kind.ROBOT]
    models = Counter(f"robot_model:{robot.model}" for robot in robots)
    return {f"{ROBOT}{robot.name}": 1.0 for robot in robots} | {model: float(n) for model, n in models.items()}


def ray_labels(records: Iterable[ResourceRecord], labels: Mapping[str, str]) -> dict[str, str]:
    """`labels`, and what is known of the computer's GPUs and its robots' models, in the characters that Ray allows."""
    there = list(records)
    gpus = [record for record in there if record.kind is Kind.GPU]
    found = {robot_label(record.name): record.model for record in there if record.kind is Kind.ROBOT}
    if gpus:
        found |= {GPU_MODEL: gpus[0].model, GPU_MEMORY: str(gpus[0].memory_bytes // 10**9)}
    return {_fit(name): _fit(value) for name, value in {**found, **labels}.items()}


def robot_label(robot: str) -> str:
    """The label that says of what model a robot is."""
    return _fit(f"{ROBOT_LABEL}{robot}")


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
    argv += [f"--resources={json.dumps(ray_resources(found))}"]
    argv += [f"--object-store-memory={DEFAULT_OBJECT_STORE_BYTES}"]
    chosen = ray_labels(found, labels)
    return [*argv, f"--labels={','.join(f'{k}={v}' for k, v in chosen.items())}"] if chosen else argv


def node_environment(token: Path | None) -> dict[str, str]:
    """This process's variables, and those that a node needs. `token` is the file of the cluster's token.

    Raises:
        HalError: no token is known, neither by `token` nor as Ray documents it.
    """
    known = {name: os.environ[name] for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)}
    if token is not None:
        if not token.exists():
            raise HalError(f"there is no cluster's token at {token}; copy it from the computer that began the cluster")
        known = {"RAY_AUTH_TOKEN_PATH": str(token.resolve())}
    if not known:
        raise HalError("which token does the cluster have? Give --token FILE, or set RAY_AUTH_TOKEN_PATH")
    return {**os.environ, "RAY_AUTH_MODE": "token", **NO_NICER, **known}


def ensure_token(path: Path) -> None:
    """Draws a cluster's token into `path`, for this user's eyes, where there is none."""
    if not path.exists():
        before = os.umask(0o077)
        try:
            replace_durably(path, secrets.token_hex(32).encode())
        finally:
            os.umask(before)


def _fit(text: str) -> str:
    return _UNFIT.sub("-", text)[:MAX_LABEL_CHARS].strip("-_.")
