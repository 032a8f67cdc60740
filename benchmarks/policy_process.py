"""Asking a policy process what to do, at 100 Hz over loopback, against the same policy in the caller's own process.

``python -m benchmarks.policy_process [--seconds 20] [--device cpu]``: a real process with CURVE, a policy of the demo's
size, one robot that asks every 10 ms, one that shows two pictures of 64 by 64 pixels, and then four at once. Times are
from the question to the action, in milliseconds.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.harness import Row, report, running
from hal.durable import replace_durably
from hal.spec import IMAGES, Array, RobotSpec
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.compose import PolicyConfig, RobotConfig, make_policy, robot_spec
from user_sys.edge.agents import LoadedPolicy
from user_sys.edge.robot_processes import module_argv
from user_sys.errors import PolicyUnavailable, RunError
from user_sys.inference.__main__ import select_device
from user_sys.inference.policy_server import PolicyServer
from user_sys.inference.protocol import POLICY_NODE, PolicyDescription
from user_sys.inference.remote_policy import RemotePolicy, read_server_address
from user_sys.logs import configure_logging
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import AGE_SUFFIX, PolicyQuery
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key, new_keypair, save_keypair

RATE_HZ = 100.0
ROBOTS = ("left", "right", "front", "back")
CAMERAS = ("front", "wrist")
START_S = 300.0
Actor = LoadedPolicy | RemotePolicy
WAIT = 0.9  # of the control period: a later answer counts as missed


class FixedPolicy:
    """A policy that a server runs with weights of its own. It takes the pictures that its options name."""

    version, swap_delay_s = 0, 0.0

    def __init__(self, description: PolicyDescription, device: str) -> None:
        self._policy = make_policy(PolicyConfig(), description.spec, 0, device)
        self._policy.load(weights(description.spec))
        self.act_batch = self._policy.act_batch
        self.cameras = tuple(description.options.get("cameras", ()))

    def hold_reason(self, *, explore: bool) -> str:
        return ""

    def swap(self) -> None:
        """It has one version."""

    def raise_failure(self) -> None:
        """It has no thread."""


def weights(spec: RobotSpec) -> dict[str, Array]:
    return policy_arrays(MlpPolicy.make_module(spec))


def serve(folder: Path, device: str) -> None:
    """Runs the policy server, in a process of its own."""
    configure_logging()
    select_device(device)  # type: ignore[arg-type]
    keys = load_keypair(folder / f"{POLICY_NODE}.key")
    server = PolicyServer(
        "tcp://127.0.0.1:0", keys, Keyring(folder), lambda described: nullcontext(FixedPolicy(described, device))
    )
    server.run(threading.Event(), lambda endpoint: replace_durably(folder / "address", endpoint.encode()))


@contextmanager
def policy_process(folder: Path, device: str) -> Iterator[Path]:
    """The file with the address of a process that lets `ROBOTS` in with the keys in `folder`."""
    save_keypair(new_keypair(), folder, POLICY_NODE)
    for robot in ROBOTS:
        save_keypair(new_keypair(), folder, robot)
        Keyring(folder).allow(load_keypair(folder / f"{robot}.key").public, robot, "robot")
    argv = module_argv("benchmarks.policy_process", "--serve", folder, "--device", device)
    with running(argv, folder / "log"):
        yield folder / "address"


def link_of(robot: str, folder: Path, address: Path, spec: RobotSpec, cameras: Sequence[str] = ()) -> RemotePolicy:
    keys, public = load_keypair(folder / f"{robot}.key"), load_public_key(folder / f"{POLICY_NODE}.pub")
    description = PolicyDescription(kind="mlp", options={"cameras": list(cameras)}, features=(), spec=spec)
    return RemotePolicy(description, keys, public, lambda: read_server_address(address), WAIT / RATE_HZ)


def await_policy(policy: Actor, spec: RobotSpec) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            policy.act(PolicyQuery(observation(spec), "", True))
            return
        except PolicyUnavailable:
            time.sleep(0.1)
    raise RunError("the policy process did not come up")


def observation(spec: RobotSpec) -> dict[str, Array]:
    found: dict[str, Array] = {feature.name: np.zeros(feature.shape, np.float32) for feature in spec.observation}
    for camera in CAMERAS:
        found[IMAGES + camera] = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
        found[IMAGES + camera + AGE_SUFFIX] = np.zeros(1, np.float32)
    return found


def ask(policy: Actor, spec: RobotSpec, seconds: float, times_ms: list[float]) -> None:
    """Asks at `RATE_HZ`; an answer that did not come in time is an infinite one."""
    seen, due = observation(spec), time.monotonic()
    for _ in range(int(seconds * RATE_HZ)):
        due += 1 / RATE_HZ
        time.sleep(max(0.0, due - time.monotonic()))
        began = time.perf_counter()
        try:
            policy.act(PolicyQuery(seen, "", False))
            times_ms.append(1e3 * (time.perf_counter() - began))
        except PolicyUnavailable:
            times_ms.append(np.inf)


def together(policies: list[Actor], spec: RobotSpec, seconds: float) -> list[float]:
    found: list[list[float]] = [[] for _ in policies]
    threads = [
        threading.Thread(target=ask, args=(policy, spec, seconds, times))
        for policy, times in zip(policies, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each for times in found for each in times]


def rows(seconds: float, device: str) -> list[Row]:
    spec = replace(robot_spec(RobotConfig(driver="fake")), rate_hz=RATE_HZ)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        address = stack.enter_context(policy_process(folder, device))
        there: list[Actor] = [stack.enter_context(link_of(robot, folder, address, spec)) for robot in ROBOTS]
        here = LoadedPolicy(make_policy(PolicyConfig(), spec, 0))
        here.load(weights(spec))
        seeing = stack.enter_context(link_of(ROBOTS[0], folder, address, spec, CAMERAS))
        for policy in (here, *there, seeing):
            await_policy(policy, spec)
        return [
            *figures("in the caller's process", together([here], spec, seconds)),
            *figures(f"one robot, {device}", together(there[:1], spec, seconds)),
            *figures(f"one robot with two pictures, {device}", together([seeing], spec, seconds)),
            *figures(f"four robots, {device}", together(there, spec, seconds)),
        ]


def figures(name: str, times_ms: list[float]) -> list[Row]:
    missed = sum(not np.isfinite(each) for each in times_ms)
    shares = {"p50": 50, "p99": 99, "p99.9": 99.9}
    found = [
        Row(0, f"{name}, {share}", "ms", float(np.percentile(times_ms, percent))) for share, percent in shares.items()
    ]
    return [*found, Row(0, f"{name}, missed of {len(times_ms)}", "", float(missed))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of four measurements")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.device)
        return
    report("policy_process", rows(args.seconds, args.device))


if __name__ == "__main__":
    main()
