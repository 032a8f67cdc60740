"""How soon an arm is safe when a part of its control fails, at the rates at which the drivers ship.

``python -m benchmarks.faults DRIVER`` with ``ur``, ``lerobot``, ``ros2`` or ``franka``, in the environment of
``make test-DRIVER``; `python -m benchmarks` runs each in its own. A process in the place of the policy moves one joint
of a simulated arm to and fro through a real driver process. The one or the other is stopped or killed, or the arm's
cable or its camera fails.

The simulated arm and this program run at a real-time priority if the system allows it, as a real controller does.

An arm stands from its last observed move or new target on; the program reads the arm each millisecond. The figure of a
cable ends when the driver process reports the arm as stale or lost: the arm itself cannot be observed then.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, report
from hal.camera import default_stale_after_s
from hal.errors import HalError
from user_sys.compose import RobotConfig
from user_sys.config import save
from user_sys.edge.driver_client import DriverClient

PEERS = Path(__file__).parent.parent / "tests" / "robots"
RATES = {"ur": (20.0, 50.0, 125.0), "lerobot": (30.0, 50.0), "ros2": (20.0, 50.0), "franka": (20.0, 50.0)}
"""Hz: the driver's default, and faster ones that its device can follow."""
PAIRS = 5
PERIODS_BEFORE = 6
WATCH_S = 0.6  # at least, and six periods
CAMERA_HZ = 20.0
STARTS = 3
DRIVER_POLL_S = 0.5
START_S = 120.0
SWING, SPEED = 0.3, 0.25  # rad to either side, rad/s
PRESENT = 56  # a servo's register of its position
POLICY, DRIVER, CABLE, CAMERA = "the policy's process", "the driver process", "the arm's cable", "a camera"
STALE = ("request.refused StaleObservation", "request.refused HardwareLost", "robot.lost", "watchdog.hold")

# LeRobot imports torchvision, which on some machines needs help first
DRIVE = """
import sys
if sys.argv.pop(1) == "lerobot":
    from lerobot_kit import allow_torchvision_import
    allow_torchvision_import()
from user_sys.edge.driver_server import main
sys.exit(main(sys.argv[1:]))
"""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """A simulated arm.

    Attributes:
        joint: the action element that moves it.
        shows: its position, or the target of an arm that follows its target smoothly.
        breaks: the faults of its devices, by name.
    """

    options: dict[str, Any]
    joint: int
    shows: Callable[[], Any]
    breaks: Mapping[str, Callable[[], None]] = field(default_factory=dict)


@contextmanager
def network_camera(folder: Path) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """A camera for `robots.cameras`, and what freezes it."""
    import simplejpeg

    picture = folder / "picture.jpg"
    picture.write_bytes(simplejpeg.encode_jpeg(np.zeros((48, 64, 3), np.uint8)))
    argv = [sys.executable, str(PEERS / "mjpeg_camera.py"), str(picture)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{process.stdout.readline().split()[-1]}/stream.mjpg"
        settings = {"device": address, "width": 64, "height": 48, "rate_hz": CAMERA_HZ}
        yield settings, lambda: process.send_signal(signal.SIGSTOP)
        process.kill()


@contextmanager
def ur(folder: Path, rate_hz: float) -> Iterator[Arm]:
    from ur_kit import simulated_controller

    with simulated_controller() as peer, network_camera(folder) as (camera, freeze):
        options = {"host": peer.host, "action": "joint_delta", "rate_hz": rate_hz, "cameras": {"front": camera}}
        yield Arm(options, 5, lambda: peer.state["servo"], {CABLE: peer.freeze, CAMERA: freeze})


@contextmanager
def lerobot(folder: Path, rate_hz: float) -> Iterator[Arm]:
    from lerobot_kit import feetech_arm_simulator

    with feetech_arm_simulator(folder) as peer:
        options = {"type": "so101_follower", "settings": peer.settings, "rate_hz": rate_hz}
        yield Arm(options, 0, lambda: peer.word("shoulder_pan", PRESENT), {CABLE: peer.freeze})


@contextmanager
def ros2(folder: Path, rate_hz: float) -> Iterator[Arm]:
    from ros2_kit import DOMAIN, HERE_ONLY, ros2_peer

    os.environ.update(HERE_ONLY)
    with ros2_peer() as peer:
        limits = {"*": {"low": -2.0, "high": 2.0, "speed_max": 1.0}}
        names = ["shoulder", "elbow", "wrist"]
        options = {"joints": names, "controller": "arm_controller", "limits": limits, "domain": DOMAIN}
        camera = {"topic": "/camera/image_raw", "width": 64, "height": 48}
        yield Arm(
            {**options, "rate_hz": rate_hz, "cameras": {"front": camera}},
            0,
            lambda: {name: round(at, 4) for name, at in peer.state()["place"].items()},
            {CABLE: peer.freeze, CAMERA: lambda: peer.send("mute pictures")},
        )


@contextmanager
def franka(folder: Path, rate_hz: float) -> Iterator[Arm]:
    from franka_kit import FrankaSimulator

    peer = FrankaSimulator()
    with network_camera(folder) as (camera, freeze):
        options = {"host": peer.host, "action": "joint_delta", "rate_hz": rate_hz, "realtime": False}
        breaks = {CABLE: lambda: peer.process.send_signal(signal.SIGSTOP), CAMERA: freeze}
        yield Arm({**options, "cameras": {"front": camera}}, 6, peer.angles, breaks)
    peer.kill()


ARMS = {"ur": ur, "lerobot": lerobot, "ros2": ros2, "franka": franka}
CAMERAS_HZ = {"ur": CAMERA_HZ, "ros2": 30.0, "franka": CAMERA_HZ}
CONTROLLERS_S = {"ur": 0.012, "lerobot": 0.005, "ros2": 0.02, "franka": None}
"""What an arm's controller takes besides, until it stands: of a UR an RTDE period and a step of its own, of a servo the
next packet's decoding, of ros2_control two of its updates. Of a Franka it is not
measured: its simulation does not stand still, so the figure is when the driver holds."""


def lead(robot: str, joint: int) -> None:
    """Acts as the policy: moves one joint to and fro at a constant speed. After a refusal it sends nothing more,
    as a session does."""
    with DriverClient(robot, token=1) as driver:
        driver.attach(START_S)
        tick = driver.reset(0)
        spec, begun_s, count = driver.spec, time.monotonic(), 0
        at = start = 0.0 if spec.joint_delta else float(spec.rest_action(tick.observation)[joint])
        while True:
            phase = ((time.monotonic() - begun_s) * SPEED / SWING + 1.0) % 4.0
            target = SWING * (1.0 - abs(phase - 2.0)) + start
            action = spec.rest_action(tick.observation)
            action[joint] = target - at if spec.joint_delta else target
            at = target
            try:
                tick = driver.step(action)
            except HalError:
                time.sleep(START_S)
            count += 1
            if count == PERIODS_BEFORE:
                print("driving", flush=True)


@dataclass(frozen=True)
class Scene:
    """An arm under way: its processes by name, and the log of its driver process."""

    processes: dict[str, subprocess.Popen[bytes]]
    log: Path

    def told_s(self, since_s: float) -> float | None:
        """When the driver process said first, after `since_s`, that it holds, or that a reading is stale or lost."""
        for line in self.log.read_text().splitlines():
            if any(each in line for each in STALE):
                at_s = datetime.datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                if at_s >= since_s - 0.001:
                    return at_s
        return None


@contextmanager
def driven(kind: str, arm: Arm, folder: Path) -> Iterator[Scene]:
    """The two processes, once the arm is under way."""
    save(RobotConfig(name="arm-0", driver=kind, task="free", options=arm.options), folder / "robot.yaml")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PEERS), str(PEERS.parent.parent)])}
    path = folder / "driver.log"
    with ExitStack() as stack, path.open("wb") as log:
        argv = [sys.executable, "-c", DRIVE, kind, str(folder / "robot.yaml"), str(folder)]
        driver = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, preexec_fn=_usual)
        stack.callback(_end, driver)
        argv = [sys.executable, "-m", "benchmarks.faults", "--lead", "arm-0", str(arm.joint)]
        policy = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=log, preexec_fn=_usual)
        stack.callback(_end, policy)
        assert policy.stdout is not None
        while not select.select([policy.stdout], [], [], DRIVER_POLL_S)[0] and driver.poll() is None:
            pass
        if driver.poll() is not None or policy.stdout.readline() != b"driving\n":
            raise NotDriven(path.read_text())
        stack.callback(policy.stdout.close)
        yield Scene({POLICY: policy, DRIVER: driver}, path)


class NotDriven(Exception):
    """The arm did not begin to move, or its driver process ended before; with the driver's log."""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@dataclass(frozen=True)
class Outcome:
    """Seconds from a fault until the arm showed something new for the last time, and until the driver process said that
    it holds or that the arm is stale or lost; None if it did not."""

    stands_s: float | None
    told_s: float | None


@contextmanager
def realtime() -> Iterator[None]:
    """Gives the simulated controller real-time priority: this process and its children, except those with `_usual`."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        print("no real-time priority is granted: the simulated arms may be late", file=sys.stderr)
    yield
    _usual()


def _usual() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def fail_when_driven(kind: str, rate_hz: float, what: str, number: signal.Signals | None, after: float) -> Outcome:
    """`fail`, in up to `STARTS` starts; raises NotDriven after the last.

    A late reply of a simulated arm can end its driver before the fault. In a run a supervisor starts the driver again.
    """
    for _ in range(STARTS - 1):
        try:
            return fail(kind, rate_hz, what, number, after)
        except NotDriven as error:
            log.warning("the arm is not driven, starting again: %s", error)
    return fail(kind, rate_hz, what, number, after)


def fail(kind: str, rate_hz: float, what: str, number: signal.Signals | None, after: float) -> Outcome:
    """Causes a fault, so many periods `after` the arm is under way."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, realtime(), ARMS[kind](Path(name), rate_hz) as arm:
        with driven(kind, arm, Path(name)) as scene:
            time.sleep((after + 2) / rate_hz)
            seen, changed_s = arm.shows(), 0.0
            sent_unix_s, sent_s = time.time(), time.monotonic()
            arm.breaks[what]() if number is None else scene.processes[what].send_signal(number)
            until_s = sent_s + max(WATCH_S, 6 / rate_hz)
            while (now_s := time.monotonic()) < until_s:
                if what != CABLE and (newer := arm.shows()) != seen:
                    seen, changed_s = newer, now_s
                time.sleep(0.001)
            told_s = scene.told_s(sent_unix_s)
            stands_s = None if what == CABLE else max(0.0, changed_s - sent_s)
            return Outcome(stands_s, None if told_s is None else told_s - sent_unix_s)


def faults(kind: str) -> list[tuple[str, signal.Signals | None]]:
    ended = [(who, number) for who in (POLICY, DRIVER) for number in (signal.SIGSTOP, signal.SIGKILL)]
    devices: list[tuple[str, signal.Signals | None]] = [(CABLE, None)]
    return [*ended, *devices, *([(CAMERA, None)] if kind in CAMERAS_HZ else [])]


def limit_ms(kind: str, rate_hz: float, what: str) -> float:
    """The bound of a fault, in ms: two control periods from the moment when it can be noticed."""
    notice_s = {
        CABLE: 1 / rate_hz,  # until the next call
        CAMERA: default_stale_after_s(CAMERAS_HZ.get(kind, 1.0)) + 1 / rate_hz,
    }.get(what, 0.0)
    return 1000 * (notice_s + 2 / rate_hz)


def row(kind: str, rate_hz: float, what: str, number: signal.Signals | None, pairs: int) -> list[Row]:
    event = number.name if number else {CABLE: "silence", CAMERA: "frozen picture"}[what]
    name = f"{kind} at {rate_hz:g} Hz: {event} of {what} until"
    try:
        outcomes = [fail_when_driven(kind, rate_hz, what, number, pair / pairs) for pair in range(pairs)]
    except NotDriven as error:
        log.error("%s", error)
        note = f"the arm was not driven in {STARTS} starts"
        return [Row(21, name.removesuffix(" until"), "ms", None, None, None, 1.0, False, note=note)]
    bound, controller_s = limit_ms(kind, rate_hz, what), CONTROLLERS_S[kind]
    found = []
    if what != CABLE and controller_s is not None:
        stands = [1000 * (each.stands_s or 0.0) for each in outcomes]
        limit = bound + 1000 * controller_s
        note = "" if not controller_s else f"of the bound {1000 * controller_s:g} ms are the controller's"
        found.append(_row(f"{name} the arm stands", stands, limit, rate_hz, note))
    if what != DRIVER:
        told = [math.inf if each.told_s is None else 1000 * each.told_s for each in outcomes]
        found.append(_row(f"{name} the driver holds or says so", told, bound, rate_hz))
    return found


def _row(name: str, figures: list[float], bound: float | None, rate_hz: float, note: str = "") -> Row:
    """`figures` and `bound` in ms; without a bound the row is only reported."""
    worst = max(figures)
    peers = {"periods": worst * rate_hz / 1000, "median": statistics.median(figures)}
    ratio = None if bound is None or not worst else bound / worst
    target, met = (None, None) if bound is None else (1.0, worst <= bound)
    name = f"{name}, worst of {len(figures)}"
    if math.isinf(worst):
        note = "; ".join([*([note] if note else []), f"at least once not within {WATCH_S:g} s"])
        return Row(21, name, "ms", None, bound, None, target, met, note=note)
    return Row(21, name, "ms", worst, bound, ratio, target, met, peers, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("driver", nargs="?", choices=tuple(ARMS), default="ur")
    parser.add_argument("--rates", type=float, nargs="+", help="Hz; by default those at which the driver ships")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="how often each fault is caused")
    parser.add_argument("--lead", nargs=2, metavar=("ROBOT", "JOINT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lead:
        lead(args.lead[0], int(args.lead[1]))
    sys.path.insert(0, str(PEERS))
    rates = args.rates or RATES[args.driver]
    with tempfile.TemporaryDirectory(prefix="us-", dir="/tmp") as runtime:
        os.environ["USER_SYS_TEST_FOLDER"] = runtime
        rows = []
        for rate_hz in rates:
            for what, number in faults(args.driver):
                rows += row(args.driver, rate_hz, what, number, args.pairs)
    reduced = "" if args.pairs >= PAIRS and not args.rates else f"{args.pairs} of {PAIRS} times at {rates} Hz"
    report(f"faults-{args.driver}", rows, reduced=reduced)


if __name__ == "__main__":
    main()
