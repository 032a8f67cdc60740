"""Costs of the hardware layer: the safety kernel in each control period, a durable lease, the start of Ray."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, compare, report
from hal.lease import Fence, LeaseTable
from hal.ray_cluster import start_local_cluster
from hal.robot import Observation
from hal.safety import SafetyKernel
from hal.spec import STATE, ArraySpec, Box, RobotSpec, SafetyLimits
from hal.state_database import STATE_FILE, StateDatabase

KERNEL_BUDGET_US = 100.0
RAY_BUDGET_S = 30.0
BATCHES = 15


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


def call_us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds that one call takes, on average over `repeats`."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def against_budget(name: str, unit: str, figures: list[float], budget: float, goal: int = 0) -> Row:
    ours = statistics.median(figures)
    return Row(goal, name, unit, ours, budget, budget / ours, 1.0, ours <= budget)


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
        figures = [call_us(propose(kernel, action), 500) for _ in range(BATCHES)]
        rows.append(against_budget(f"safety kernel: {name}; bound: its budget", "µs", figures, KERNEL_BUDGET_US, 21))
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
    return against_budget("Ray: start of a local cluster; bound: its budget", "s", [took_s], RAY_BUDGET_S)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        rows = [*kernel_rows(), *lease_rows(Path(folder)), ray_row()]
    report("hardware", rows)


if __name__ == "__main__":
    main()
