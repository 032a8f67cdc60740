"""Helpers of the policy server's tests: keys, servers in this process or their own, and robots."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from wait_kit import until

from hal.spec import STATE, Array, RobotSpec
from user_sys.errors import PolicyUnavailable
from user_sys.inference.policy_server import OpenPolicy, PolicyServer
from user_sys.inference.protocol import POLICY_NODE, PolicyDescription
from user_sys.inference.remote_policy import RemotePolicy, read_server_address
from user_sys.messages import NO_VERSION
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.correction import ChunkCorrection
from user_sys.policies.policy import ActionChunk, ChunkContext, PolicyQuery
from user_sys.policies.scaling import feature_specs, require_features
from user_sys.tunnel.keys import GATEWAY_NAME, Keyring, load_keypair, load_public_key, new_keypair, save_keypair

END_S = 120.0
ROBOTS = ("left", "right")
SPEC = replace(example_spec(), rate_hz=1 / 60)
"""A robot with a control period of a minute, so that a busy machine causes no timeout."""
OBSERVATION = example_observation(np.random.default_rng(0))


def make_keys(folder: Path) -> Path:
    """A folder of keys whose keyring admits `ROBOTS`."""
    ring = Keyring(folder)
    for name in (POLICY_NODE, GATEWAY_NAME, *ROBOTS):
        save_keypair(new_keypair(), folder, name)
    for name in ROBOTS:
        ring.allow(load_keypair(folder / f"{name}.key").public, name, "robot")
    return folder


class EchoPolicy:
    """Acts with two actions, which are the first two elements of the state. The test sets its version.

    Attributes:
        go: `act_batch` waits until it is set.
        batches: the sizes of the batches so far.
        cameras: that it reads.
        seen: the newest observation.
        contexts: of the newest batch.
        correction, length, bridged: of its chunks.
    """

    def __init__(self, description: PolicyDescription) -> None:
        self._specs = feature_specs(description.spec, description.features)
        self.version, self.swap_delay_s, self.reason = 0, 0.5, ""
        self.ready: list[int] = []
        self.may_explore = True
        self.cameras: tuple[str, ...] = ()
        self.go = threading.Event()
        self.go.set()
        self.batches: list[int] = []
        self.options, self.seen = description.options, dict[str, Array]()
        self.contexts: list[ChunkContext | None] = []
        self.correction: ChunkCorrection | None = None
        self.bridged = 0
        self.length = 1

    def hold_reason(self, *, explore: bool) -> str:
        return "waiting for weights" if self.version == NO_VERSION and not explore else self.reason

    def swap(self) -> None:
        if self.ready:
            self.version = self.ready.pop(0)

    def act_batch(
        self,
        observations: Sequence[Mapping[str, Array]],
        instructions: Sequence[str],
        *,
        deterministic: bool,
        contexts: Sequence[ChunkContext | None] = (),
    ) -> list[ActionChunk]:
        self.batches.append(len(observations))
        self.contexts = list(contexts)
        assert self.go.wait(END_S)
        for observation in observations:
            require_features(self._specs, observation)
            self.seen = {name: array.copy() for name, array in observation.items()}
        actions = [np.repeat(seen[STATE][None, :2], self.length, 0) for seen in observations]
        log_prob = np.zeros(self.length, np.float32)
        return [ActionChunk(each, log_prob, 0, self.correction, self.bridged) for each in actions]

    def raise_failure(self) -> None:
        pass


class EchoServer:
    """A policy server in a thread of this process, with `EchoPolicy` policies in the order of their opening."""

    def __init__(self, keys: Path, on_open: Callable[[PolicyDescription], object] = lambda description: None) -> None:
        self.opened: list[EchoPolicy] = []
        self.closed = 0
        self._on_open = on_open
        self.now_s = 0.0
        self.server = PolicyServer(
            "tcp://127.0.0.1:0",
            load_keypair(keys / f"{POLICY_NODE}.key"),
            Keyring(keys),
            self._open,
            lambda: time.monotonic() + self.now_s,
        )
        self.endpoint = ""

    @contextmanager
    def _open(self, description: PolicyDescription) -> Iterator[EchoPolicy]:
        self._on_open(description)
        policy = EchoPolicy(description)
        self.opened.append(policy)
        yield policy
        self.closed += 1


@contextmanager
def running(server: PolicyServer) -> Iterator[str]:
    """Runs the server in a thread, and gives its endpoint."""
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
        yield found[0]
    finally:
        stop.set()
        thread.join(END_S)
    assert not thread.is_alive() and not failures


@contextmanager
def serving(
    keys: Path, on_open: Callable[[PolicyDescription], object] = lambda description: None
) -> Iterator[EchoServer]:
    echo = EchoServer(keys, on_open)
    with running(echo.server) as echo.endpoint:
        yield echo


def failing(error: Exception) -> OpenPolicy:
    """Opens no policy."""

    @contextmanager
    def open_policy(description: PolicyDescription) -> Iterator[EchoPolicy]:
        raise error
        yield

    return open_policy


class Process:
    """``python -m user_sys.inference``, which may be killed, suspended and restarted. It reaches no gateway."""

    def __init__(self, keys: Path, folder: Path) -> None:
        self.keys, self.address, self._log = keys, folder / "policy.address", folder / "policy.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        self.address.unlink(missing_ok=True)
        settings = {"listen": "tcp://127.0.0.1:0", "gateway": "tcp://127.0.0.1:1", "keys": self.keys}
        settings |= {"policy.device": "cpu"}
        argv = [f"--{key}={value}" for key, value in {**settings, "announce": self.address}.items()]
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "user_sys.inference", *argv]
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        until(lambda: self.endpoint or self._process is None or self._process.poll() is not None, "it listens")
        assert self.endpoint, self._log.read_text()

    @property
    def endpoint(self) -> str:
        return read_server_address(self.address)

    def send(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self.send(number)
            self._process.wait(END_S)
            self._process = None


@contextmanager
def process(keys: Path, folder: Path) -> Iterator[Process]:
    found = Process(keys, folder)
    found.start()
    try:
        yield found
    finally:
        found.end()


def remote(
    find: Callable[[], str], keys: Path, robot: str = ROBOTS[0], spec: RobotSpec = SPEC, **settings: Any
) -> RemotePolicy:
    """A policy with the `PolicyDescription` and the `RemotePolicy` that the settings give."""
    described = {"kind": "mlp", "options": {}, "features": ()}
    description = PolicyDescription(**{key: settings.pop(key, value) for key, value in described.items()}, spec=spec)  # type: ignore[arg-type]
    return RemotePolicy(
        description,
        load_keypair(keys / f"{robot}.key"),
        load_public_key(keys / f"{POLICY_NODE}.pub"),
        find,
        settings.pop("timeout_s", 0.99 * spec.period_s),
        **settings,
    )


def acts(policy: RemotePolicy, observation: Mapping[str, Array] = OBSERVATION) -> ActionChunk:
    """The policy's actions, once it is available."""

    def attempt() -> ActionChunk | None:
        try:
            return policy.act(PolicyQuery(observation, "", True))
        except PolicyUnavailable:
            return None

    return until(attempt, "the policy acts")


def unavailable(policy: RemotePolicy, reason: str) -> None:
    """Waits until the policy is unavailable for this reason."""

    def attempt() -> bool:
        try:
            policy.act(PolicyQuery(OBSERVATION, "", True))
        except PolicyUnavailable as error:
            return reason in str(error)
        return False

    until(attempt, f"it says {reason!r}")
