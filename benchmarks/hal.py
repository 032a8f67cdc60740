"""The safety of the hardware layer: hostile actions by the million, and how soon a robot is safe; and its costs.

``python -m benchmarks.hal [--rounds N]``. The costs are those of the safety kernel in each control period, of a durable
lease, and of the start of Ray. A failing party is a process of its own if that matters: a commander that is
stopped or killed while a driver process obeys it. Times to the safe state are those of the driver process's own log.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import Row, at_most, compare, report
from benchmarks.limits import Limits
from hal.driver import installed_drivers
from hal.errors import HardwareLost, LeaseError, StaleObservation
from hal.lease import Fence, LeaseTable
from hal.ray_cluster import start_local_cluster
from hal.robot import Observation
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, ArraySpec, Box, RobotSpec, SafetyLimits
from hal.state_database import STATE_FILE, StateDatabase
from robots.fake import FakeRobot, FakeRobotConfig, FakeTable
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.config import save
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.environment import RobotEnvironment

ROUNDS = 1_000_000
PAIRS = 7
PERIODS_BEFORE = 20  # the commander drives before it is stopped
DEADLINE_S = 120.0
KERNEL_BUDGET_US, RAY_BUDGET_S = 100.0, 30.0
BATCHES = 15
HOSTILE = (np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, 1e-45)
DRIVERS = {"fake": ("reach", {}), "sim": ("reach", {"cameras": []}), "point": ("upright", {})}
"""Driver -> task and options; ``point`` is docs/template, if it is installed."""


def arm() -> RobotSpec:
    """Seven joints, their speeds and a tool: every limit of the kernel is in use."""
    seven = tuple(range(7))
    labels = tuple(f"q{i}" for i in seven) + tuple(f"v{i}" for i in seven) + ("x", "y", "z", "width")
    units = ("rad",) * 7 + ("rad/s",) * 7 + ("m",) * 4
    state = ArraySpec(name=STATE, labels=labels, units=units, low=(-9.0,) * 18, high=(9.0,) * 18)
    return RobotSpec(
        model="arm",
        rate_hz=10.0,
        observation=(state,),
        action=ArraySpec(
            name="action",
            labels=("dx", "dy", "dz", "width"),
            units=("m",) * 4,
            low=(-0.05, -0.05, -0.05, 0.0),
            high=(0.05, 0.05, 0.05, 0.08),
        ),
        limits=SafetyLimits(
            workspace_low=(-0.5, -0.5, -0.5),
            workspace_high=(0.5, 0.5, 0.5),
            tool_position=(14, 15, 16),
            joint_position=seven,
            joint_low=(-3.0,) * 7,
            joint_high=(3.0,) * 7,
            joint_velocity=tuple(range(7, 14)),
            joint_velocity_max=(2.0,) * 7,
            keep_out=(Box((0.3, -0.1, -0.1), (0.4, 0.1, 0.1)), Box((-0.4, -0.1, -0.1), (-0.3, 0.1, 0.1))),
            tool_speed_max=0.4,
            tool_acceleration_max=3.0,
            tool_jerk_max=40.0,
            tool_force=(14, 15, 16),
            tool_force_max=20.0,
            action_rate_max=(0.03, 0.03, 0.03, 0.08),
        ),
        neutral=(0.0, 0.0, 0.0, 0.08),
        tool_delta=(0, 1, 2),
        gripper=3,
    )


def joint_arm() -> RobotSpec:
    """Seven joints with position targets."""
    joints = tuple(range(7))
    labels = tuple(f"q{i}" for i in joints)
    bounds: dict[str, tuple[float, ...]] = {"low": (-9.0,) * 7, "high": (9.0,) * 7}
    return RobotSpec(
        model="joint_arm",
        rate_hz=10.0,
        observation=(ArraySpec(name=STATE, labels=labels, units=("rad",) * 7, **bounds),),
        action=ArraySpec(name="action", labels=labels, units=("rad",) * 7, **bounds),
        limits=SafetyLimits(
            joint_position=joints,
            joint_low=(-3.0,) * 7,
            joint_high=(3.0,) * 7,
            joint_velocity_max=(2.0,) * 7,
            joint_acceleration_max=(15.0,) * 7,
            joint_jerk_max=(150.0,) * 7,
        ),
        neutral=(0.0,) * 7,
        joint_target=joints,
    )


class Clock:
    """A clock in nanoseconds that a caller advances."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


def hostile_action(rng: np.random.Generator, number: int, size: int = 4) -> Any:
    """NaN, infinite, huge, of another dtype or shape, or merely far too large: by turns."""
    action: Any = (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    if number % 8 == 0:
        action[rng.integers(size)] = HOSTILE[rng.integers(len(HOSTILE))]
    elif number % 8 == 1:
        action = action.astype(("f8", "f2", "i4", "O", "U8", "?")[rng.integers(6)])
    elif number % 8 == 2:
        action = np.resize(action, ((0,), (3,), (5,), (4, 1), (1, 4), ())[rng.integers(6)])
    return action


def tool_robot(rate_hz: float) -> FakeRobot:
    """The fake robot above its table, with every limit on a tool."""
    robot = FakeRobot(FakeRobotConfig(rate_hz=rate_hz, table=FakeTable(height_m=-0.2)))
    limits = msgspec.structs.replace(
        robot.spec.limits,
        workspace_low=(-0.4,) * 3,
        workspace_high=(0.4,) * 3,
        keep_out=arm().limits.keep_out,
        tool_speed_max=0.4,
        tool_acceleration_max=3.0,
        tool_jerk_max=40.0,
        action_rate_max=(1.0, 1.0, 1.0, 0.04),
    )
    robot.spec = msgspec.structs.replace(robot.spec, limits=limits)
    robot.connect()
    return robot


class Attacker:
    """Proposes constant actions for a while, noise of all sizes, leaps from bound to bound, and no actions at all."""

    def __init__(self, rng: np.random.Generator, reach: Array) -> None:
        """`reach` (a,) is the size of an action that leads far."""
        self._rng, self._reach = rng, reach
        self._left, self._mode, self._wish = 0, 0, reach

    def propose(self, number: int) -> Any:
        rng, size = self._rng, len(self._reach)
        if number % 8 == 0 and rng.random() < 0.5:
            return hostile_action(rng, int(rng.integers(0, 3)), size)
        if self._left == 0:
            self._left, self._mode = int(rng.integers(1, 80)), int(rng.integers(4))
            self._wish = rng.uniform(-1.5, 1.5, size) * self._reach
        self._left -= 1
        if self._mode == 0:
            return (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
        if self._mode == 1:
            return (np.sign(rng.standard_normal(size)) * 9 * self._reach).astype(np.float32)
        return (self._wish * (1 + 0.01 * (self._mode == 2) * rng.standard_normal(size))).astype(np.float32)


@dataclass
class Attack:
    """What became of proposed actions.

    Attributes:
        limits: the second implementation, with its findings.
        tokens: how many old tokens were admitted.
    """

    limits: Limits
    proposed: int = 0
    tokens: int = 0


def attack_tool(rounds: int, rate_hz: float, seed: int) -> Attack:
    """Hostile actions, stale and broken readings, pushes and old tokens, on the fake robot."""
    rng, clock, fence, robot = np.random.default_rng(seed), Clock(), Fence(None), tool_robot(rate_hz)
    spec, kernel = robot.spec, SafetyKernel(robot.spec, clock)
    found, attacker = Attack(Limits(spec), rounds), Attacker(rng, np.array(spec.action.high))
    fence.check_token(1_000)
    for number in range(rounds):
        state = robot.observe().arrays[STATE]
        if number % 1024 == 3:
            state = state.copy()
            state[rng.integers(len(state))] = HOSTILE[rng.integers(3)]
        observation = Observation({STATE: state}, clock.now_ns)
        clock.now_ns += 10**9 if number % 1024 == 4 else 10**6  # stale at times
        found.tokens += number % 16 == 5 and _admitted(fence, int(rng.integers(-5, 1_000)))
        kernel.is_speed_reduced = number % 2048 < 256
        verdict = kernel.filter(attacker.propose(number), observation)
        if verdict.applied is None:
            found.limits.stopped()
        else:
            found.limits.check(verdict.applied, state)
            kernel.set_applied(robot.command(verdict.applied))
        if number % 512 == 511:  # a push from outside
            robot.set_state(rng.uniform(-0.5, 0.5, 3), np.zeros(3))
    return found


def _admitted(fence: Fence, token: int) -> bool:
    try:
        fence.check_token(token)
    except LeaseError:
        return False
    return True


def attack_joints(rounds: int, rate_hz: float, seed: int) -> Attack:
    """As `attack_tool`, by targets of joints, of which each is held up now and then."""
    rng, clock = np.random.default_rng(seed), Clock()
    spec = msgspec.structs.replace(joint_arm(), rate_hz=rate_hz)
    kernel, joints = SafetyKernel(spec, clock), len(spec.joint_target)
    found, attacker = Attack(Limits(spec), rounds), Attacker(rng, np.full(joints, 3.0))
    measured, held_up = np.zeros(joints), np.zeros(joints, bool)
    for number in range(rounds):
        if number % 128 == 0:
            held_up = rng.random(joints) < 0.2
        state = measured.astype(np.float32)
        kernel.is_speed_reduced = number % 2048 < 256
        verdict = kernel.filter(attacker.propose(number), Observation({STATE: state}, clock.now_ns))
        if verdict.applied is None:
            found.limits.stopped()
            continue
        found.limits.check(verdict.applied, state)
        measured = np.where(held_up, measured, verdict.applied)
    return found


def attack_rows(rounds: int) -> list[Row]:
    """Half of the actions are steps of a tool and half joint targets, each at 10 and at 100 Hz."""
    attacks = {
        f"{name} at {rate_hz:g} Hz": attack(rounds // 4, rate_hz, seed)
        for seed, (name, attack, rate_hz) in enumerate(
            [("tool", attack_tool, 10.0), ("tool", attack_tool, 100.0)]
            + [("joints", attack_joints, 10.0), ("joints", attack_joints, 100.0)]
        )
    }
    rows = []
    for limit in (
        "bounds",
        "position",
        "workspace",
        "forbidden box",
        "velocity",
        "acceleration",
        "jerk",
        "force",
        "lead",
    ):
        broken = sum(attack.limits.broken[limit] for attack in attacks.values())
        reached = {
            f"reached by {name}, %": round(100 * attack.limits.reached[limit] / max(1, attack.limits.checked), 2)
            for name, attack in attacks.items()
            if attack.limits.reached[limit]
        }
        binds = bool(reached) or limit in ("bounds", "lead")
        rows.append(
            Row(
                21,
                f"hostile actions: commands beyond {limit}",
                "commands",
                broken,
                0,
                None,
                0.0,
                not broken and binds,
                reached,
            )
        )
    tokens = sum(attack.tokens for attack in attacks.values())
    rows.append(Row(21, "hostile actions under an old token", "commands", tokens, 0, None, 0.0, not tokens))
    exceeded = {
        f"{name}, % of {attack.limits.checked:,}": round(
            100 * attack.limits.exceeded / max(1, attack.limits.checked), 3
        )
        for name, attack in attacks.items()
    }
    total = sum(attack.limits.exceeded for attack in attacks.values())
    name = f"of {rounds:,} actions, commands that had to exceed acceleration or jerk to keep an axis in its place"
    return [*rows, Row(21, name, "commands", total, None, None, None, None, exceeded)]


# Processes that fail --------------------------------------------------------------------------------------------------


def command_for_ever(robot: str) -> None:
    """The commander: a session that asks for the neutral action in every control period."""
    with DriverClient(robot, token=1) as driver:
        driver.attach(DEADLINE_S)
        driver.real_time = True
        tick = driver.reset(0)
        for count in itertools.count():
            tick = driver.step(driver.spec.rest_action(tick.observation))
            if count == PERIODS_BEFORE:
                print("driving", flush=True)


@contextmanager
def driven(config: RobotConfig, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A driver process and a commander that it obeys; gives the commander and the driver's log."""
    save(config, folder / "robot.yaml")
    log = folder / "driver.log"
    argv = [sys.executable, "-m", "user_sys.edge.driver_server", str(folder / "robot.yaml"), str(folder)]
    with log.open("ab") as output:
        driver = subprocess.Popen(argv, stdout=output, stderr=output)
    argv = [sys.executable, "-m", "benchmarks.hal", "--command", config.name]
    commander = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert commander.stdout is not None and commander.stdout.readline() == b"driving\n"
        yield commander, log
    finally:
        for process in (commander, driver):
            process.kill()
            process.wait()
        commander.stdout.close()


def time_to_hold(config: RobotConfig, number: int, folder: Path) -> float:
    """Seconds from the signal to the commander until the driver process has held the robot."""
    with driven(config, folder) as (commander, log):
        held = log.read_text().count("watchdog.hold")
        sent = time.time()
        commander.send_signal(number)
        _until(lambda: log.read_text().count("watchdog.hold") > held)
        line = [line for line in log.read_text().splitlines() if "watchdog.hold" in line][held]
        return datetime.datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() - sent


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the driver process did not answer")
        time.sleep(0.005)


def hold_rows(name: str) -> list[Row]:
    task, options = DRIVERS[name]
    config = RobotConfig(name=f"bench-{name}", driver=name, task=task, real_time=True, options=dict(options))
    period_s = build_robot_setup(config, cameras=False).robot.spec.period_s
    rows = []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        figures = []
        for _ in range(PAIRS):
            with tempfile.TemporaryDirectory(dir="/tmp") as folder:
                figures.append(time_to_hold(config, number, Path(folder)) / period_s)
        what = f"{name}: control periods from {number.name} of the policy process to hold, worst of {PAIRS}"
        rows.append(at_most(21, what, "periods", max(figures), 2.0, {"median": statistics.median(figures)}))
    return rows


# Devices that fail ----------------------------------------------------------------------------------------------------


def periods_until_noticed(faults: dict[str, int], kind: type[Exception]) -> float:
    """Control periods from a fault of the fake robot until the driver reports the robot as lost, or holds it."""
    fails_at = next(iter(faults.values()))
    options = {"rate_hz": 50.0, "faults": faults}
    station = build_robot_setup(RobotConfig(name="bench-fault", driver="fake", task="reach", options=options))
    driver = RobotEnvironment(station.robot, station.task, SafetyKernel(station.robot.spec))
    driver.connect()
    driver.reset(0)
    action = np.array(station.robot.spec.neutral, np.float32)
    for count in range(1, 200):
        try:
            driver.step(action)
        except kind:
            return float(count - fails_at + 1)
        time.sleep(station.robot.spec.period_s)
    raise TimeoutError(f"the fault {faults} was never noticed")


def fault_rows() -> list[Row]:
    rows = []
    for name, faults, kind, allowed in (
        ("cable out", {"drop_out_at": 20}, HardwareLost, 2.0),
        ("readings that freeze (stale after 0.5 s = 25 periods)", {"stale_at": 20}, StaleObservation, 27.0),
    ):
        what = f"fake: control periods from {name} until the driver says so"
        rows.append(at_most(21, what, "periods", periods_until_noticed(faults, kind), allowed))
    return rows


# Costs ---------------------------------------------------------------------------------------------------------------


def call_us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds that one call takes, on average over `repeats`."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def kernel_rows() -> list[Row]:
    tool, joints = SafetyKernel(arm()), SafetyKernel(joint_arm())
    good = np.array([0.01, 0.0, 0.01, 0.04], np.float32)
    broken = np.array([np.nan, 0.0, 0.0, 0.0], np.float32)
    far = np.full(7, 9.0, np.float32)

    def propose(kernel: SafetyKernel, action: object) -> Callable[[], object]:
        state = np.zeros(kernel.spec.feature(STATE).shape, np.float32)
        return lambda: kernel.filter(action, Observation({STATE: state}, time.monotonic_ns()))

    rows = []
    for name, kernel, action in (
        ("an action within limits", tool, good),
        ("one that is reduced", tool, good * 99),
        ("a NaN", tool, broken),
        ("targets of joints that are held up", joints, far),
    ):
        median = statistics.median(call_us(propose(kernel, action), 500) for _ in range(BATCHES))
        rows.append(at_most(21, f"safety kernel: {name}; bound: its budget", "µs", median, KERNEL_BUDGET_US))
    return rows


def lease_rows(folder: Path) -> list[Row]:
    table, fence, tokens = (
        LeaseTable(StateDatabase(folder / STATE_FILE)),
        Fence(folder / "fence"),
        iter(range(1, 1_000_000)),
    )
    content = b"x" * 60

    def raw() -> None:
        with (folder / "raw.new").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        (folder / "raw.new").replace(folder / "raw")
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    def bound() -> float:
        return call_us(raw, 50)

    def acquire() -> float:
        return call_us(lambda: table.acquire("arm-0", "bench"), 50)

    def admit() -> float:
        return call_us(lambda: fence.check_token(next(tokens)), 50)

    written = "bound: raw write, sync, rename, sync"
    return [
        compare(f"lease: acquire; {written}", acquire, bound, unit="µs", more_is_better=False),
        compare(f"fence: a newer token; {written}", admit, bound, unit="µs", more_is_better=False),
    ]


def ray_row() -> Row:
    start = time.perf_counter()
    with start_local_cluster({"robot:arm-0": 1.0}, num_cpus=1):
        took_s = time.perf_counter() - start
    return at_most(0, "Ray: start of a local cluster; bound: its budget", "s", took_s, RAY_BUDGET_S)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--command", metavar="ROBOT", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.command:
        command_for_ever(args.command)
    with tempfile.TemporaryDirectory(prefix="us-", dir="/tmp") as runtime:
        os.environ["USER_SYS_TEST_FOLDER"] = runtime
        rows = [*kernel_rows(), *fault_rows(), *attack_rows(args.rounds), ray_row()]
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
            rows += lease_rows(Path(folder))
        for name in DRIVERS:
            rows += hold_rows(name) if name in ("fake", "sim", *installed_drivers()) else []
    report("hal", rows, reduced="" if args.rounds >= ROUNDS else f"{args.rounds:,} actions of {ROUNDS:,}")


if __name__ == "__main__":
    main()
