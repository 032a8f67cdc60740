"""The safety of the hardware layer: hostile actions by the million, the kernel's cost, and how soon a robot is safe.

``python -m benchmarks.hal [--rounds N]``. Who fails is a process of its own where that matters: a commander that is
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hardware import arm, joint_arm, kernel_rows
from benchmarks.harness import Row, report
from hal.errors import HardwareLost, LeaseError, StaleObservation
from hal.lease import Fence
from hal.robot import Observation
from hal.safety import SafetyKernel
from hal.spec import STATE, Array, RobotSpec
from hal.station import installed_drivers
from user_sys.compose import RobotConfig, build_station
from user_sys.config import save
from user_sys.edge.driver import Driver
from user_sys.edge.driver_client import RemoteDriver

ROUNDS = 1_000_000
PAIRS = 7
PERIODS_BEFORE = 20  # the commander drives before it is stopped
DEADLINE_S = 120.0
ROUNDING = 1e-6  # of a value to float32
LEAD_S = 0.5  # how far a joint target may be ahead, at the joint's greatest speed
HOSTILE = (np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, 1e-45)
TOOL = slice(14, 17)
DRIVERS = {"fake": ("reach", {}), "sim": ("reach", {"cameras": []}), "point": ("upright", {})}
"""Driver -> task and options; ``point`` is docs/template, where it is installed."""


class Clock:
    """Nanoseconds that pass only when told to."""

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


def broken_limits(spec: RobotSpec, applied: Array, before: Array, tool: Array) -> bool:
    """Whether `applied` breaks a limit of the arm: each is written down a second time here."""
    limits, step = spec.limits, applied[:3].astype(np.float64)
    if applied.dtype != np.float32 or applied.shape != (4,) or not np.isfinite(applied).all():
        return True
    if (applied < np.float32(spec.action.low)).any() or (applied > np.float32(spec.action.high)).any():
        return True
    goal = tool + step
    low, high = np.minimum(limits.workspace_low, tool), np.maximum(limits.workspace_high, tool)
    outside = (goal < low - ROUNDING).any() or (goal > high + ROUNDING).any()
    too_fast = np.linalg.norm(step) * spec.rate_hz > (limits.tool_speed_max or np.inf) + ROUNDING
    braking = (step * before >= 0) & (np.abs(step) <= np.abs(before) + ROUNDING)
    too_hasty = ~braking & (np.abs(step - before) > np.array(limits.action_rate_max[:3]) + ROUNDING)
    entered = any(
        ((goal > np.array(box.low) + ROUNDING) & (goal < np.array(box.high) - ROUNDING)).all()
        and not ((tool > np.array(box.low)) & (tool < np.array(box.high))).all()
        for box in limits.keep_out
    )
    return bool(outside or too_fast or too_hasty.any() or entered)


def attack(rounds: int) -> tuple[int, int]:
    """How many hostile actions became commands, and how many of those broke a limit or came under an old token."""
    rng, spec, clock, fence = np.random.default_rng(0), arm(), Clock(), Fence(None)
    kernel = SafetyKernel(spec, clock)
    fence.admit(1_000)
    before, admitted, violations = np.zeros(3), 0, 0
    for number in range(rounds):
        state = np.zeros(18, np.float32)
        state[TOOL] = rng.uniform(-0.55, 0.55, 3)
        if number % 16 == 3:
            state[rng.integers(18)] = HOSTILE[rng.integers(len(HOSTILE))]
        observation = Observation({STATE: state}, clock.now_ns)
        clock.now_ns += 10**9 if number % 16 == 4 else 10**8  # stale at times
        if number % 16 == 5 and _admitted(fence, int(rng.integers(-5, 1_000))):
            violations += 1
        verdict = kernel.filter(hostile_action(rng, number), observation)
        if verdict.applied is None:
            before = np.zeros(3)
            continue
        admitted += 1
        violations += broken_limits(spec, verdict.applied, before, state[TOOL].astype(np.float64))
        before = verdict.applied[:3].astype(np.float64)
    return admitted, violations


def _admitted(fence: Fence, token: int) -> bool:
    try:
        fence.admit(token)
    except LeaseError:
        return False
    return True


def broken_targets(spec: RobotSpec, applied: Array, base: Array, measured: Array) -> bool:
    """Whether joint targets break a limit: each is written down a second time here. `base` are the targets before."""
    limits = spec.limits
    if applied.dtype != np.float32 or not np.isfinite(applied).all():
        return True
    fastest = np.array(limits.joint_velocity_max)
    low, high = np.minimum(limits.joint_low, base), np.maximum(limits.joint_high, base)
    outside = (applied < low - ROUNDING) | (applied > high + ROUNDING)
    too_fast = np.abs(applied - base) > fastest * spec.period_s + ROUNDING
    run_away = np.abs(applied - measured) > np.maximum(LEAD_S * fastest, np.abs(base - measured)) + ROUNDING
    return bool((outside | too_fast | run_away).any())


def attack_joints(rounds: int) -> tuple[int, int]:
    """As `attack`, by targets of joints of which one never moves and each other one is held up half of the time."""
    rng, spec, clock = np.random.default_rng(1), joint_arm(), Clock()
    kernel, joints = SafetyKernel(spec, clock), len(spec.joint_target)
    measured, target, admitted, violations = np.zeros(joints), None, 0, 0
    for number in range(rounds):
        observation = Observation({STATE: measured.astype(np.float32)}, clock.now_ns)
        clock.now_ns += 10**8
        verdict = kernel.filter(hostile_action(rng, number, joints), observation)
        if verdict.applied is None:
            target = None
            continue
        admitted += 1
        violations += broken_targets(spec, verdict.applied, measured if target is None else target, measured)
        target = verdict.applied.astype(np.float64)
        moved = rng.random(joints) < 0.5
        moved[0] = False
        measured = np.where(moved, target, measured)
    return admitted, violations


def attack_rows(rounds: int) -> list[Row]:
    """A quarter of the actions are joint targets, the others steps of a tool."""
    found = attack(rounds - rounds // 4), attack_joints(rounds // 4)
    admitted, violations = (sum(counts) for counts in zip(*found, strict=True))
    peers: Mapping[str, float | str] = {"proposed": float(rounds), "became commands": float(admitted)}
    name = "hostile actions: commands beyond a limit or under an old token"
    return [Row(21, name, "commands", float(violations), 0.0, None, 0.0, violations == 0, dict(peers))]


# Processes that fail --------------------------------------------------------------------------------------------------


def command_for_ever(robot: str) -> None:
    """The commander: a session that asks for the neutral action in every control period."""
    with RemoteDriver(robot, token=1) as driver:
        driver.attach(DEADLINE_S)
        driver.real_time = True
        tick = driver.reset(0)
        for count in itertools.count():
            tick = driver.command(driver.spec.rest_action(tick.observation))
            if count == PERIODS_BEFORE:
                print("driving", flush=True)


@contextmanager
def driven(config: RobotConfig, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A driver process and a commander that it obeys; gives the commander and the driver's log."""
    save(config, folder / "robot.yaml")
    log = folder / "driver.log"
    argv = [sys.executable, "-m", "user_sys.edge.driver_process", str(folder / "robot.yaml"), str(folder)]
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
    period_s = build_station(config, cameras=False).robot.spec.period_s
    rows = []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        figures = []
        for _ in range(PAIRS):
            with tempfile.TemporaryDirectory(dir="/tmp") as folder:
                figures.append(time_to_hold(config, number, Path(folder)) / period_s)
        what = f"{name}: control periods from {number.name} of the policy process to hold, worst of {PAIRS}"
        rows.append(_periods(what, max(figures), 2.0, {"median": statistics.median(figures)}))
    return rows


# Devices that fail ----------------------------------------------------------------------------------------------------


def periods_until_noticed(faults: dict[str, int], kind: type[Exception]) -> float:
    """Control periods from a fault of the fake robot until the driver says that the robot is lost, or holds it."""
    fails_at = next(iter(faults.values()))
    options = {"rate_hz": 50.0, "faults": faults}
    station = build_station(RobotConfig(name="bench-fault", driver="fake", task="reach", options=options))
    driver = Driver(station.robot, station.task, SafetyKernel(station.robot.spec))
    driver.connect()
    driver.reset(0)
    action = np.array(station.robot.spec.neutral, np.float32)
    for count in range(1, 200):
        try:
            driver.command(action)
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
        rows.append(_periods(what, periods_until_noticed(faults, kind), allowed, {}))
    return rows


def _periods(name: str, figure: float, allowed: float, peers: dict[str, float | str]) -> Row:
    return Row(21, name, "periods", figure, allowed, allowed / figure, 1.0, figure <= allowed, peers)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--command", metavar="ROBOT", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.command:
        command_for_ever(args.command)
    with tempfile.TemporaryDirectory(prefix="us-", dir="/tmp") as runtime:
        os.environ["USER_SYS_TEST_FOLDER"] = runtime
        rows = [*kernel_rows(), *fault_rows(), *attack_rows(args.rounds)]
        for name in DRIVERS:
            rows += hold_rows(name) if name in ("fake", "sim", *installed_drivers()) else []
    report("hal", rows, reduced="" if args.rounds >= ROUNDS else f"{args.rounds:,} actions of {ROUNDS:,}")


if __name__ == "__main__":
    main()
