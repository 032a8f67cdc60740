"""How soon an arm stands when what drives it fails, on the simulated arms that the drivers are tested with.

``python -m benchmarks.faults [ur|lerobot|ros2]``; the latter two in the environments of ``make test-lerobot`` and
``make test-ros2``. A process stands for the policy and leads the arm to and fro through a real driver process; the one
or the other is stopped or killed. An arm stands from when it was seen last to move, or to be told to: that is read off
the arm, every few milliseconds. Goal 21 are two control periods.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, report
from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.driver_client import RemoteDriver

PEERS = Path(__file__).parent.parent / "tests" / "robots"
RATE_HZ = 10.0
PAIRS = 7
PERIODS_BEFORE, PERIODS_AFTER = 6, 6
START_S = 120.0
SWING, SWING_S = 0.3, 4.0  # rad to either side
PRESENT = 56  # a servo's register: where it is
POLICY, DRIVER = "the policy's process", "the driver process"

# LeRobot imports torchvision, which on some machines needs help first
DRIVE = """
import sys
if sys.argv.pop(1) == "lerobot":
    from lerobot_kit import let_torchvision_in
    let_torchvision_in()
from user_sys.edge.driver_process import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Arm:
    """A simulated arm. `shows` is where it is, or, of one that follows its target smoothly, is told to be."""

    options: dict[str, Any]
    joint: int
    shows: Callable[[], Any]


@contextmanager
def ur(folder: Path, rate_hz: float) -> Iterator[Arm]:
    from ur_kit import simulated_controller

    with simulated_controller() as peer:
        options = {"host": peer.host, "action": "joint_delta", "rate_hz": rate_hz}
        yield Arm(options, 5, lambda: peer.state["servo"])


@contextmanager
def lerobot(folder: Path, rate_hz: float) -> Iterator[Arm]:
    from lerobot_kit import simulated_arm

    with simulated_arm(folder) as peer:
        options = {"type": "so101_follower", "settings": peer.settings, "rate_hz": rate_hz}
        yield Arm(options, 0, lambda: peer.word("shoulder_pan", PRESENT))


@contextmanager
def ros2(folder: Path, rate_hz: float) -> Iterator[Arm]:
    from ros2_kit import DOMAIN, HERE_ONLY, ros2_peer

    os.environ.update(HERE_ONLY)
    with ros2_peer() as peer:
        limits = {"*": {"low": -2.0, "high": 2.0, "speed_max": 1.0}}
        names = ["shoulder", "elbow", "wrist"]
        options = {"joints": names, "controller": "arm_controller", "limits": limits, "domain": DOMAIN}
        yield Arm(
            {**options, "rate_hz": rate_hz},
            0,
            lambda: {name: round(at, 3) for name, at in peer.state()["place"].items()},
        )


def lead(robot: str, joint: int) -> None:
    """The policy's process: leads one joint to and fro for ever."""
    with RemoteDriver(robot, token=1) as driver:
        driver.attach(START_S)
        tick = driver.reset(0)
        begun_s, count = time.monotonic(), 0
        while True:
            action, phase = driver.spec.rest_action(tick.observation), 2 * np.pi / SWING_S
            at_s = time.monotonic() - begun_s
            step = np.cos(phase * at_s) * phase * driver.spec.period_s
            share = step if driver.spec.joint_delta else np.sin(phase * at_s)
            action[joint] = SWING * share
            tick, count = driver.command(action), count + 1
            if count == PERIODS_BEFORE:
                print("driving", flush=True)


@contextmanager
def driven(kind: str, arm: Arm, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The two processes, once the arm is under way."""
    save(RobotConfig(name="arm-0", driver=kind, task="free", options=arm.options), folder / "robot.yaml")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PEERS), str(PEERS.parent.parent)])}
    with ExitStack() as stack, (folder / "driver.log").open("wb") as log:
        argv = [sys.executable, "-c", DRIVE, kind, str(folder / "robot.yaml"), str(folder)]
        driver = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
        stack.callback(_end, driver)
        argv = [sys.executable, "-m", "benchmarks.faults", "--lead", "arm-0", str(arm.joint)]
        policy = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=log)
        stack.callback(_end, policy)
        assert policy.stdout is not None
        if policy.stdout.readline() != b"driving\n":
            raise RuntimeError(f"the arm is not led: {(folder / 'driver.log').read_text()}")
        stack.callback(policy.stdout.close)
        yield {POLICY: policy, DRIVER: driver}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def periods_until_it_stands(kind: str, rate_hz: float, who: str, number: signal.Signals, after: float) -> float:
    """Control periods from the signal until the arm showed something new for the last time; 0: not after it.

    The signal is sent so many periods `after` the arm is under way.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as name, ARMS[kind](Path(name), rate_hz) as arm:
        with driven(kind, arm, Path(name)) as processes:
            time.sleep(after / rate_hz)
            seen, changed_s = arm.shows(), 0.0
            processes[who].send_signal(number)
            sent_s = time.monotonic()
            while (now_s := time.monotonic()) < sent_s + PERIODS_AFTER / rate_hz:
                if (newer := arm.shows()) != seen:
                    seen, changed_s = newer, now_s
            return max(0.0, changed_s - sent_s) * rate_hz


def rows(kind: str, rate_hz: float, pairs: int) -> list[Row]:
    found = []
    for who in (POLICY, DRIVER):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            figures = [periods_until_it_stands(kind, rate_hz, who, number, pair / pairs) for pair in range(pairs)]
            what = f"{kind}: {number.name} of {who} until the arm stands, worst of {pairs}"
            worst, median = max(figures), statistics.median(figures)
            found.append(Row(21, what, "periods", worst, 2.0, None, None, worst <= 2.0, {"median": median}))
    return found


ARMS = {"ur": ur, "lerobot": lerobot, "ros2": ros2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("driver", nargs="?", choices=tuple(ARMS), default="ur")
    parser.add_argument("--rate", type=float, default=RATE_HZ, help="Hz; less on a machine that others use too")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--lead", nargs=2, metavar=("ROBOT", "JOINT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lead:
        lead(args.lead[0], int(args.lead[1]))
    sys.path.insert(0, str(PEERS))
    with tempfile.TemporaryDirectory(prefix="us-", dir="/tmp") as runtime:
        os.environ["USER_SYS_TEST_FOLDER"] = runtime
        report(f"faults-{args.driver}", rows(args.driver, args.rate, args.pairs))


if __name__ == "__main__":
    main()
