"""Asking a policy process what to do, at 100 Hz over loopback, against the same policy in the caller's own process.

``python -m benchmarks.policy_process [--seconds 20] [--device cpu]``: a real process with CURVE, a policy of the demo's
size, one robot that asks every 10 ms and then four at once. Times are from the question to the action, in milliseconds.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.harness import Row, report
from hal.spec import Array, RobotSpec
from user_sys.algorithms.rlpd import Rlpd, RlpdConfig
from user_sys.compose import PolicyConfig, RobotConfig, make_policy, policy_precisions, robot_spec
from user_sys.edge.robot_processes import module_argv
from user_sys.errors import PolicyUnavailable, RunError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import PolicyClient, read_server_address
from user_sys.policies.policy import Policy
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key, new_keypair, save_keypair

RATE_HZ = 100.0
ROBOTS = ("left", "right", "front", "back")
START_S = 300.0
WAIT = 0.9  # of the control period: a later answer counts as missed


@contextmanager
def policy_process(folder: Path, device: str) -> Iterator[Path]:
    """The file with the address of a process that lets `ROBOTS` in with the keys in `folder`."""
    save_keypair(new_keypair(), folder, POLICY_NODE)
    for robot in ROBOTS:
        save_keypair(new_keypair(), folder, robot)
        Keyring(folder).allow(load_keypair(folder / f"{robot}.key").public, robot, "robot")
    address = folder / "address"
    options = ("--listen", "tcp://127.0.0.1:0", "--keys", folder, "--device", device, "--announce", address)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(module_argv("user_sys.inference", *options), stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(START_S)


def link_of(robot: str, folder: Path, address: Path, spec: RobotSpec) -> PolicyClient:
    keys, public = load_keypair(folder / f"{robot}.key"), load_public_key(folder / f"{POLICY_NODE}.pub")
    forms = policy_precisions(PolicyConfig())
    return PolicyClient(spec, "mlp", (), forms, keys, public, lambda: read_server_address(address), WAIT)


def await_policy(policy: Policy, spec: RobotSpec) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            policy.act(observation(spec), "", deterministic=True)
            return
        except PolicyUnavailable:
            time.sleep(0.1)
    raise RunError("the policy process did not come up")


def observation(spec: RobotSpec) -> dict[str, Array]:
    return {feature.name: np.zeros(feature.shape, np.float32) for feature in spec.observation}


def ask(policy: Policy, spec: RobotSpec, seconds: float, times_ms: list[float]) -> None:
    """Asks at `RATE_HZ`; an answer that did not come in time is an infinite one."""
    seen, due = observation(spec), time.monotonic()
    for _ in range(int(seconds * RATE_HZ)):
        due += 1 / RATE_HZ
        time.sleep(max(0.0, due - time.monotonic()))
        began = time.perf_counter()
        try:
            policy.act(seen, "", deterministic=False)
            times_ms.append(1e3 * (time.perf_counter() - began))
        except PolicyUnavailable:
            times_ms.append(np.inf)


def together(policies: list[Policy], spec: RobotSpec, seconds: float) -> list[float]:
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
    weights = Rlpd(RlpdConfig(), spec, seed=0).policy_weights()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        address = stack.enter_context(policy_process(folder, device))
        links = [stack.enter_context(link_of(robot, folder, address, spec)) for robot in ROBOTS]
        there: list[Policy] = [link.make_policy(0) for link in links]
        here = make_policy(PolicyConfig(), spec, 0)
        for policy in (here, *there):
            policy.load(weights)
            await_policy(policy, spec)
        return [
            *figures("in the caller's process", together([here], spec, seconds)),
            *figures(f"one robot, {device}", together(there[:1], spec, seconds)),
            *figures(f"four robots, {device}", together(there, spec, seconds)),
        ]


def figures(name: str, times_ms: list[float]) -> list[Row]:
    missed = sum(not np.isfinite(each) for each in times_ms)
    shares = {"p50": 50, "p99": 99, "p99.9": 99.9}
    found = [
        Row(0, f"{name}, {share}", "ms", float(np.percentile(times_ms, percent)), None, None)
        for share, percent in shares.items()
    ]
    return [*found, Row(0, f"{name}, missed of {len(times_ms)}", "", float(missed), None, None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of three measurements")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    report("policy_process", rows(args.seconds, args.device))


if __name__ == "__main__":
    main()
