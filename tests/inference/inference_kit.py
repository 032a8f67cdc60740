"""Helpers of the policy server's tests: keys, servers in this process or their own, and clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from hal.spec import Array, RobotSpec
from user_sys.compose import policy_factory
from user_sys.errors import PolicyUnavailable
from user_sys.inference.policy_server import PolicyFactory, PolicyServer
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import PolicyClient, read_server_address
from user_sys.policies.conformance import example_observation
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key, new_keypair, save_keypair

END_S = 120.0
UNHURRIED = 0.99
"""Share of a slow robot's control period, so that a busy machine causes no timeout."""
ROBOTS = ("left", "right")


def until(condition: Callable[[], Any], what: str, within_s: float = END_S) -> Any:
    """Polls until `condition` gives something; fails with `what` after a deadline."""
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)
    return result


def make_keys(folder: Path) -> Path:
    """A folder of keys whose keyring admits `ROBOTS`."""
    ring = Keyring(folder)
    save_keypair(new_keypair(), folder, POLICY_NODE)
    for name in ROBOTS:
        save_keypair(new_keypair(), folder, name)
        ring.allow(load_keypair(folder / f"{name}.key").public, name, "robot")
    return folder


def weights_of(spec: RobotSpec, seed: int, hidden: int = 32) -> dict[str, Array]:
    """Weights of an MLP with one hidden layer, large enough to act differently from seed to seed."""
    rng = np.random.default_rng(seed)
    inputs, actions = sum(len(s.labels) for s in spec.observation), len(spec.action.labels)
    low, high = (np.asarray(bound, np.float32) for bound in (spec.action.low, spec.action.high))
    shapes = {
        "input.offset": (inputs,),
        "input.scale": (inputs,),
        "hidden.0.weight": (inputs, hidden),
        "hidden.0.bias": (hidden,),
        "mean.weight": (hidden, actions),
        "mean.bias": (actions,),
        "log_std.weight": (hidden, actions),
        "log_std.bias": (actions,),
    }
    drawn = {name: (0.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    return drawn | {"action.centre": (low + high) / 2, "action.scale": (high - low) / 2}


@dataclass
class Server:
    """A policy server in a thread of this process."""

    server: PolicyServer
    endpoint: str


@contextmanager
def serving(keys: Path, make: PolicyFactory | None = None, endpoint: str = "tcp://127.0.0.1:0") -> Iterator[Server]:
    pair = load_keypair(keys / f"{POLICY_NODE}.key")
    server = PolicyServer(endpoint, pair, Keyring(keys), make or policy_factory("cpu"))
    stop, failures, found = threading.Event(), [], list[str]()

    def serve() -> None:
        try:
            server.run(stop, found.append)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=serve, name="policy-server")
    thread.start()
    try:
        until(lambda: found or failures, "it listens")
        yield Server(server, found[0])
    finally:
        stop.set()
        thread.join(END_S)
    assert not thread.is_alive() and not failures


class Process:
    """``python -m user_sys.inference``, which may be killed, stopped and restarted."""

    def __init__(self, keys: Path, folder: Path) -> None:
        self.keys, self.address, self._log = keys, folder / "policy.address", folder / "policy.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> None:
        """Returns when it listens."""
        self.address.unlink(missing_ok=True)
        argv = ("--listen", "tcp://127.0.0.1:0", "--keys", self.keys, "--device", "cpu", "--announce", self.address)
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "user_sys.inference", *map(str, argv)]
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        until(lambda: self.endpoint or self._process is None or self._process.poll() is not None, "it listens")
        assert self.endpoint, self.log

    @property
    def endpoint(self) -> str:
        return read_server_address(self.address)

    def send(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self, number: int = signal.SIGKILL) -> int:
        if self._process is None:
            return 0
        self.send(number)
        status = self._process.wait(END_S)
        self._process = None
        return status


@contextmanager
def process(keys: Path, folder: Path) -> Iterator[Process]:
    found = Process(keys, folder)
    found.start()
    try:
        yield found
    finally:
        found.end()


def link_to(
    find: Callable[[], str],
    keys: Path,
    spec: RobotSpec,
    robot: str = ROBOTS[0],
    timeout_fraction: float = UNHURRIED,
) -> PolicyClient:
    return PolicyClient(
        spec,
        "mlp",
        (),
        MlpPolicy.precisions,
        load_keypair(keys / f"{robot}.key"),
        load_public_key(keys / f"{POLICY_NODE}.pub"),
        find,
        timeout_fraction,
    )


def slowly(spec: RobotSpec) -> RobotSpec:
    """The robot with a control period of a minute, long enough for any machine."""
    return replace(spec, rate_hz=1 / 60)


def acts(policy: Policy, observation: dict[str, Array] | None = None, deterministic: bool = True) -> ActionChunk:
    """The policy's actions, once it is available."""
    seen = example_observation(np.random.default_rng(0)) if observation is None else observation

    def attempt() -> ActionChunk | None:
        try:
            return policy.act(seen, "", deterministic=deterministic)
        except PolicyUnavailable:
            return None

    return until(attempt, "the policy acts")
