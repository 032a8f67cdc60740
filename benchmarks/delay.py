"""Execution methods of action chunks under a delay of the policy (goal 15, and the issue on asynchronous fine-tuning).

    python -m benchmarks.delay                 # every method, 0 to 400 ms, on `lift`, and on `follow`'s moving target
    python -m benchmarks.delay --episodes 3 --updates 200 --seconds 10       # short, to see whether it works

Three flow policies of the state are cloned from demonstrations for each task: as usual (with a correction for A2C2),
with given prefixes (training-time RTC), and with offsets (VLASH). Each method then acts on the same starts with a
delay of 0, 1, 2 and 4 control periods of 100 ms, counted in simulated time. The columns: success with its 95% interval;
control periods without an action after the first chunk, an episode; the root mean square of the commanded tool's jerk;
the share of actions that the safety kernel changed; and how soon the tool turns when the target jumps away.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import OUT, Row, report
from hal.spec import ENVIRONMENT_STATE, STATE, Array
from sim.robot import TOOL_POSITION
from sim.scene import Motion
from sim.tasks import FollowTask
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.compose import PolicyConfig, RobotConfig, build_robot_setup, check_execution, make_policy
from user_sys.edge.agents import HoldingAgent, LoadedPolicy
from user_sys.edge.demonstrations import DemonstrationConfig, generate_demonstrations
from user_sys.edge.environment import TimeStep
from user_sys.edge.local_environment import open_local_environment
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import RecorderConfig, SelectedAction
from user_sys.episode import EpisodeSource
from user_sys.learner.config import LearnerConfig
from user_sys.learner.trainer import Trainer
from user_sys.policies.policy import ActionChunk, ExecutionConfig
from user_sys.run.evaluate import EVALUATION_SEED
from user_sys.run.report import wilson_interval
from user_sys.store.store import StoreReader, StoreWriter

PERIOD_S = 0.1
INFERENCE_S = 0.2
DELAYS = (0, 1, 2, 4)  # control periods
CHUNK = {"chunk_length": 16, "execute": 4, "flow_steps": 5}
TRAINED: dict[str, dict[str, Any]] = {
    "usual": {**CHUNK, "correction_hidden": [128, 128]},
    "prefix": {**CHUNK, "prefix_max": 8},
    "offset": {**CHUNK, "offset_max": 6},
}
METHODS = {
    "switch": "usual",
    "ensemble": "usual",
    "rtc": "usual",
    "training_rtc": "prefix",
    "vlash": "offset",
    "a2c2": "usual",
}
JUMP_S, JUMP_PERIODS = 2.0, 20
TURNED = 0.7  # cosine of the angle to the target


@dataclass(frozen=True)
class Cell:
    """What one method does at one delay. `reaction_ms` is NaN for a task whose object does not move."""

    task: str
    method: str
    delay: int
    successes: int
    episodes: int
    stalls: float
    jerk: float
    limited: float
    reaction_ms: float

    @property
    def success(self) -> float:
        return self.successes / self.episodes


class JumpTask(FollowTask):
    """The target stands still, and jumps once."""

    max_steps = 60

    def draw_motion(self, rng: np.random.Generator, poses: Any) -> Motion:
        """See `TableTask.draw_motion`."""
        first, box = np.array(poses["target"][:3]), self.arm.target_box
        second = np.array(box.low) + np.array(box.high) - first  # as far on the other side
        return lambda t_s: {"target": first if t_s < JUMP_S else second}

    def succeeds(self, places: Any, tool: Array) -> bool:
        return False


def robot_of(task: str) -> RobotConfig:
    return RobotConfig(name="panda-0", driver="sim", task=task, options={"cameras": []})


@contextmanager
def opened_trainer(task: str, options: dict[str, Any], demonstrations: int, seed: int) -> Iterator[Trainer]:
    """A trainer that clones demonstrations of the scripted expert."""
    torch.manual_seed(seed)
    robot, policy = robot_of(task), PolicyConfig(kind="flow", options=options)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = StoreWriter.open(folder)
        stack.callback(store.close)

        def keep(chunks: Sequence[bytes]) -> None:
            for chunk in chunks:
                store.append(chunk)
            store.sync()

        requested = DemonstrationConfig(episodes=demonstrations)
        for _ in generate_demonstrations(robot, requested, {}, keep, RecorderConfig(), seed=seed):
            pass
        reader = StoreReader.open(folder)
        stack.callback(reader.close)
        config = LearnerConfig(algorithm="bc", options={"acting_rate": 0.005}, cache_bytes=256 << 20)
        trainer = Trainer(config, build_robot_setup(robot).robot.spec, reader, policy=policy)
        stack.callback(trainer.close)
        trainer.refresh()
        yield trainer


def train(task: str, options: dict[str, Any], demonstrations: int, updates: int, seed: int) -> dict[str, Array]:
    """Clones demonstrations of the scripted expert; returns the weights."""
    with opened_trainer(task, options, demonstrations, seed) as trainer:
        for number in range(updates):
            trainer.update(number)
        return policy_arrays(trainer.policy)


def measure(
    task: str, method: Any, delay: int, options: dict[str, Any], weights: dict[str, Array], episodes: int, seed: int
) -> Cell:
    """Runs the episodes of one cell."""
    execution = ExecutionConfig(mode="async", method=method, delay_periods=delay)
    policy = PolicyConfig(kind="flow", options=options, execution=execution)
    check_execution(policy)
    robot = robot_of(task)
    setup = build_robot_setup(robot)
    spec = setup.robot.spec
    trained = make_policy(policy, spec, seed)
    trained.load(weights)
    agent = HoldingAgent(LoadedPolicy(trained), spec, execution, deterministic=True)
    commanded: list[Array] = []
    changed = jerks = count = 0.0

    def watch(time_step: TimeStep, selected: SelectedAction | None) -> None:
        nonlocal changed
        if selected is not None and time_step.applied is not None:
            commanded.append(time_step.applied[:3])
            changed += bool(np.abs(time_step.applied - selected.action).max() > 1e-4)

    successes = 0
    with open_local_environment(setup, robot) as environment:
        for number in range(episodes):
            commanded.clear()
            start = EVALUATION_SEED + 10_000 * seed + number
            done = run_episode(environment, agent, None, source=EpisodeSource.EVALUATION, seed=start, listeners=[watch])
            successes += bool(done.success)
            third = np.diff(commanded, n=2, axis=0) / PERIOD_S**3  # of the place, as an action is a step
            jerks, count = jerks + float(np.square(third).sum()), count + len(third)
    stalls = agent.chunks.counters.scalars()["chunk_stalls"] / episodes
    reaction_ms = float("nan")
    if task == "follow":
        reaction_ms = 1e3 * PERIOD_S * float(np.mean(list(reactions(robot, agent, seed))))
    steps = count + 2 * episodes
    return Cell(
        task, method, delay, successes, episodes, stalls, (jerks / max(1, count)) ** 0.5, changed / steps, reaction_ms
    )


def reactions(robot: RobotConfig, agent: HoldingAgent, seed: int, episodes: int = 8) -> Iterator[int]:
    """Control periods from a jump of the target until the tool is commanded towards its new place."""
    setup = build_robot_setup(robot)
    arm = setup.robot.config.arm  # type: ignore[attr-defined]  # it is simulated
    setup = replace(setup, task=JumpTask(arm))
    for number in range(episodes):
        period, turned = 0, JUMP_PERIODS

        def watch(time_step: TimeStep, selected: SelectedAction | None) -> None:
            nonlocal period, turned
            period += 1
            since = period - 1 - round(JUMP_S / PERIOD_S)  # the action of the period in which the jump was observed: 0
            if since < 0 or turned < JUMP_PERIODS or selected is None:
                return
            way = time_step.observation[ENVIRONMENT_STATE][:3] - time_step.observation[STATE][TOOL_POSITION]
            step = selected.action[:3]
            size = float(np.linalg.norm(way) * np.linalg.norm(step))
            if np.linalg.norm(step) > 0.005 and float(way @ step) > TURNED * size:
                turned = since

        with open_local_environment(setup, robot) as environment:
            run_episode(
                environment, agent, None, source=EpisodeSource.EVALUATION, seed=seed + number, listeners=[watch]
            )
        yield turned


def table(cells: Sequence[Cell]) -> Table:
    """All cells, a row for each method of a task."""
    shown = Table(title="success [95%] · stalls an episode · jerk m/s³ · limited · reaction ms")
    for column in ("task", "method", *(f"{1e3 * PERIOD_S * delay:.0f} ms" for delay in DELAYS)):
        shown.add_column(column)
    for task, method in dict.fromkeys((cell.task, cell.method) for cell in cells):
        row = []
        for cell in (each for each in cells if (each.task, each.method) == (task, method)):
            low, high = wilson_interval(cell.successes, cell.episodes)
            reaction = "" if np.isnan(cell.reaction_ms) else f" · {cell.reaction_ms:.0f}"
            row.append(
                f"{cell.success:.0%} [{low:.0%}, {high:.0%}] · {cell.stalls:.1f} · {cell.jerk:.1f} · "
                f"{cell.limited:.1%}{reaction}"
            )
        shown.add_row(task, method, *row)
    return shown


def rows(cells: Sequence[Cell]) -> Iterator[Row]:
    """The goals: the best method keeps 95% of its own success at 200 ms, and 85% at 400."""
    for task in dict.fromkeys(cell.task for cell in cells):
        of = {(cell.method, cell.delay): cell for cell in cells if cell.task == task}
        methods = list(dict.fromkeys(cell.method for cell in cells if cell.task == task))
        best = max(methods, key=lambda method: of[method, 2].success + of[method, 4].success)
        for delay, target in ((2, 0.95), (4, 0.85)):
            cell, own = of[best, delay], of[best, 0].success
            kept = cell.success / max(own, 1e-9)
            met = kept >= target and cell.stalls == 0 and cell.limited <= of[best, 0].limited
            limited = f"limited {cell.limited:.1%}, without delay {of[best, 0].limited:.1%}"
            note = f"{best}; stalls {cell.stalls:.1f}; {limited}"
            name = f"{task}: success at {1e3 * PERIOD_S * delay:.0f} ms, bound: without delay"
            yield Row(15, name, "share", cell.success, own, kept, target, met, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="lift,follow")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--demonstrations", type=int, default=100)
    parser.add_argument("--updates", type=int, default=6000)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--seconds", type=float, default=120, help="of each half of the comparison with taking turns")
    options = parser.parse_args()
    cells: list[Cell] = []
    methods, seeds = options.methods.split(","), [int(seed) for seed in options.seeds.split(",")]
    for task in filter(None, options.tasks.split(",")):
        found: dict[tuple[str, int], list[Cell]] = {}
        for seed in seeds:
            weights = {}
            for kind in dict.fromkeys(METHODS[method] for method in methods):
                started_s = time.perf_counter()
                weights[kind] = train(task, TRAINED[kind], options.demonstrations, options.updates, seed)
                print(f"{task} seed {seed}: {kind} trained in {time.perf_counter() - started_s:.0f} s", flush=True)
            for method in methods:
                kind = METHODS[method]
                for delay in DELAYS:
                    cell = measure(task, method, delay, TRAINED[kind], weights[kind], options.episodes, seed)
                    found.setdefault((method, delay), []).append(cell)
                    print(json.dumps(asdict(cell)), flush=True)
        cells += [pooled(each) for each in found.values()]
    Console(width=220).print(table(cells))
    OUT.mkdir(exist_ok=True, parents=True)
    (OUT / "delay-cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    compared = rates(options.seconds, options.demonstrations, options.updates, 0) if options.seconds else ()
    found_rows = [*rows(cells), *compared]
    complete = options.seconds >= 120 and options.episodes >= 100 and set(methods) == set(METHODS)
    report("delay", found_rows, reduced="" if complete else "fewer methods or episodes")


class SlowPolicy(LoadedPolicy):
    """A policy whose inference takes `INFERENCE_S`."""

    def act(self, *arguments: Any, **settings: Any) -> ActionChunk:
        time.sleep(INFERENCE_S)
        return super().act(*arguments, **settings)


class BackgroundPolicy:
    """A `SlowPolicy` in a thread of its own; a `chunk_executor.AsyncPolicy`."""

    cameras: tuple[str, ...] = ()

    def __init__(self, policy: SlowPolicy) -> None:
        self._policy, self.version, self._thread = policy, 0, ThreadPoolExecutor(1)

    def request(self, *arguments: Any, **settings: Any) -> None:
        self._chunk = self._thread.submit(self._policy.act, *arguments, **settings)

    def response(self, *, wait: bool) -> ActionChunk | None:
        return self._chunk.result() if wait or self._chunk.done() else None


def rates(seconds: float, demonstrations: int, updates: int, seed: int) -> Iterator[Row]:
    """Episodes and updates an hour on `lift` in real time, with 200 ms of inference: asynchronous, and taking turns."""
    found: dict[str, tuple[int, int, int]] = {}
    hours: dict[str, float] = {}
    for mode in ("wait", "async"):
        execution = ExecutionConfig(mode=mode, method="rtc" if mode == "async" else "switch")
        robot = robot_of("lift")
        setup = build_robot_setup(robot)
        spec = setup.robot.spec
        with opened_trainer("lift", CHUNK, demonstrations, seed) as trainer, ExitStack() as stack:
            for number in range(updates):
                trainer.update(number)
            trained = make_policy(PolicyConfig(kind="flow", options=CHUNK, execution=execution), spec, seed)
            trained.load(policy_arrays(trainer.policy))
            slow = SlowPolicy(trained)
            acting: Any = BackgroundPolicy(slow) if mode == "async" else slow
            agent = HoldingAgent(acting, spec, execution, deterministic=True, follows_clock=True)
            environment = stack.enter_context(open_local_environment(setup, robot))
            environment.real_time = True
            episodes, successes, made, over = 0, 0, 0, threading.Event()

            def learn(trainer: Trainer = trainer, over: threading.Event = over) -> int:
                count = 0
                while not over.is_set():
                    trainer.update(updates + count)
                    count += 1
                return count

            learning = ThreadPoolExecutor(1).submit(learn) if mode == "async" else None
            started_s = time.monotonic()
            while time.monotonic() < started_s + seconds:
                start = EVALUATION_SEED + 10_000 * seed + episodes
                done = run_episode(environment, agent, None, source=EpisodeSource.EVALUATION, seed=start)
                episodes, successes = episodes + 1, successes + bool(done.success)
                for _ in range(done.steps if learning is None else 0):  # they take turns: an update for each step
                    trainer.update(updates + made)
                    made += 1
            over.set()
            found[mode] = episodes, successes, learning.result() if learning else made
            hours[mode] = (time.monotonic() - started_s) / 3600
        print(f"{mode}: {found[mode]} episodes, successes, updates in {seconds:.0f} s", flush=True)
    (episodes, successes, made), (bound, succeeded, taken) = found["async"], found["wait"]
    for name, ours, theirs, target in (("episodes", episodes, bound, 1.5), ("updates", made, taken, 5.0)):
        rate, own_rate = ours / hours["async"], max(theirs, 1) / hours["wait"]
        ratio = rate / own_rate
        yield Row(
            13,
            f"{name} an hour with 200 ms of inference, bound: taking turns",
            "1/h",
            rate,
            own_rate,
            ratio,
            target,
            ratio >= target,
        )
    share, own = successes / episodes, succeeded / max(bound, 1)
    yield Row(13, "success with 200 ms of inference", "share", share, own, share / max(own, 1e-9), 1.0, share >= own)


def pooled(cells: Sequence[Cell]) -> Cell:
    """One cell of all seeds."""
    means = ("stalls", "jerk", "limited", "reaction_ms")
    mean = {name: float(np.mean([getattr(cell, name) for cell in cells])) for name in means}
    totals = {name: sum(getattr(cell, name) for cell in cells) for name in ("successes", "episodes")}
    return replace(cells[0], **mean, **totals)


if __name__ == "__main__":
    main()
