"""The demo's peer: plain RLPD in one process, without tunnel or fleet: acting and training take turns.

    python -m benchmarks.learning --model panda --task lift --seeds 0 1 2

It says what the algorithm needs by itself: seconds, environment steps and updates until 95 of 100 evaluation episodes
succeed, each deterministic and from a start not trained on. Evaluations are not counted as training time. Robot,
safety kernel, algorithm, its settings and the replay buffer are the demo's; applied actions are learned from.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.harness import Row, report
from hal.safety import SafetyKernel
from hal.spec import Array
from user_sys.algorithms.rlpd import Rlpd
from user_sys.compose import RobotConfig, build_station
from user_sys.edge.driver import Driver, Tick
from user_sys.episode import APPLIED, Chunk, ChunkHeader, EpisodeEnd, Phase, Source
from user_sys.learner.learner_config import LearnerConfig
from user_sys.policies.mlp import MlpPolicy
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.features import Features
from user_sys.replay.mix import DemoOnline
from user_sys.replay.sampler import Sampler
from user_sys.replay.shapes import Transitions
from user_sys.store.store import StoreReader, StoreWriter

GOAL, LIMIT_S = 12, 300.0
DEMONSTRATIONS, DEMONSTRATION_NOISE = 20, 0.1
DEMONSTRATION_SEED, EVALUATION_SEED = 7_000_000, 9_000_000
STEPS_PER_UPDATE = 1.75  # what the asynchronous demo shows: acting is faster than training
PUBLISH_EVERY, EVALUATE_EVERY = 100, 500
GLANCE, EPISODES, WANTED = 20, 100, 95


class Arm:
    """A robot behind its safety kernel, and the episode that it is in."""

    def __init__(self, model: str, task: str) -> None:
        station = build_station(RobotConfig(name="plain", task=task, options={"model": model}), cameras=False)
        assert station.expert is not None
        self.spec, self.expert, self._task = station.robot.spec, station.expert, station.task
        self._ticks: list[Tick] = []
        self._driver = Driver(station.robot, station.task, SafetyKernel(self.spec, self._world_ns))
        self._driver.connect()

    def _world_ns(self) -> int:
        """The world stands still while the loop trains: an observation does not grow stale by that."""
        return self._ticks[-1].t_capture_ns if self._ticks else 0

    def reset(self, seed: int) -> None:
        self._ticks = [self._driver.reset(seed)]

    @property
    def observation(self) -> dict[str, Array]:
        return dict(self._ticks[-1].observation)

    @property
    def success(self) -> bool:
        return bool(self._ticks[-1].outcome.success)

    def step(self, action: Array) -> bool:
        """Whether the episode is over."""
        self._ticks.append(self._driver.command(action))
        return self._ticks[-1].outcome.terminated or len(self._ticks) > self._task.max_steps

    def chunk(self, name: str, source: Source) -> Chunk:
        """The episode so far, as a store would give it back."""
        before, after = self._ticks[:-1], self._ticks[1:]
        n, neutral = len(after), np.array(self.spec.neutral, np.float32)
        columns: dict[str, Array] = {
            feature: np.stack([tick.observation[feature] for tick in before]) for feature in before[0].observation
        }
        columns[APPLIED] = np.stack([neutral if tick.applied is None else tick.applied for tick in after])
        columns["reward"] = np.array([tick.outcome.reward for tick in after], np.float32)
        columns["terminated"] = np.array([tick.outcome.terminated for tick in after])
        columns |= {"phase": np.full(n, Phase.POLICY, np.uint8), "policy_version": np.zeros(n, np.int64)}
        header = ChunkHeader(
            episode=name, index=0, first_step=0, steps=n, robot="plain", embodiment=self.spec.embodiment, task="t",
            sentence="", source=source, seed=0, started_unix_ns=0, end=EpisodeEnd(steps=n, success=self.success),
        )  # fmt: skip
        return Chunk(header, columns, dict(after[-1].observation))

    def close(self) -> None:
        self._driver.close()


@dataclass(frozen=True)
class Result:
    """`successes` of 100 episodes after `seconds` of training, evaluations not counted."""

    seconds: float
    steps: int
    updates: int
    successes: int


class PlainLoop:
    """Acting and training in turns, in one thread."""

    def __init__(self, model: str, task: str, seed: int, config: LearnerConfig) -> None:
        self._config, self._seed = config, 1_000 * seed
        self._arm, self._test = Arm(model, task), Arm(model, task)
        spec = self._arm.spec
        self._learner = Rlpd(config.algorithm, spec, seed=seed)
        self._policy, self._judge = MlpPolicy(spec, seed=seed), MlpPolicy(spec, seed=seed)
        self._experience = contextlib.ExitStack()
        folder = Path(self._experience.enter_context(tempfile.TemporaryDirectory()))
        self._store = self._experience.enter_context(StoreWriter.open(folder))
        reader = self._experience.enter_context(StoreReader.open(folder))
        self._replay = self._experience.enter_context(
            ReplayBuffer(reader, Features.of(spec), cache_bytes=config.cache_bytes)
        )
        mix = DemoOnline(spec.embodiment, config.demo_fraction)
        steps = Transitions(discount=config.algorithm.discount)
        self._sampler = Sampler(self._replay, mix, steps, config.batch_size, seed=seed)
        self._batch = self._sampler.empty_batch()
        self._steps, self._owed, self._count = 0, 0.0, 0
        self._demonstrate()
        self._arm.reset(self._seed)

    def run(self, limit_s: float) -> Result:
        """Trains until the goal or `limit_s`."""
        spent, updates = 0.0, 0
        while True:
            started = time.perf_counter()
            self._train(updates, EVALUATE_EVERY)
            updates += EVALUATE_EVERY
            spent += time.perf_counter() - started
            glance, last = self._evaluate(GLANCE), spent >= limit_s
            print(f"  {spent:6.1f} s  {self._steps:6d} steps  {updates:6d} updates  {glance}/{GLANCE}", flush=True)
            successes = self._evaluate(EPISODES) if last or glance >= GLANCE * WANTED / EPISODES else 0
            if last or successes >= WANTED:
                return Result(spent, self._steps, updates, successes)

    def close(self) -> None:
        self._arm.close()
        self._test.close()
        self._experience.close()

    def _train(self, done: int, updates: int) -> None:
        for update in range(done, done + updates):
            self._learner.update(self._sampler.sample(self._batch))
            if update % PUBLISH_EVERY == 0:
                self._policy.load(self._learner.policy_weights())
            self._owed += STEPS_PER_UPDATE * (update >= self._config.warmup_updates)
            while self._owed >= 1.0:
                self._act()

    def _act(self) -> None:
        self._owed -= 1.0
        self._steps += 1
        if self._arm.step(self._policy.act(self._arm.observation, "", deterministic=False).actions[0]):
            self._count += 1
            self._keep(self._arm.chunk(f"online-{self._count}", Source.ONLINE))
            self._arm.reset(self._seed + self._count)

    def _keep(self, chunk: Chunk) -> None:
        self._store.append(chunk.encode())
        self._store.sync()
        self._replay.refresh()

    def _evaluate(self, episodes: int) -> int:
        self._judge.load(self._learner.policy_weights())
        successes = 0
        for episode in range(episodes):
            self._test.reset(EVALUATION_SEED + self._seed + episode)
            while not self._test.step(self._judge.act(self._test.observation, "", deterministic=True).actions[0]):
                pass
            successes += self._test.success
        return successes

    def _demonstrate(self) -> None:
        kept, start = 0, DEMONSTRATION_SEED + self._seed
        while kept < DEMONSTRATIONS:
            expert = self._arm.expert(start, DEMONSTRATION_NOISE)
            self._arm.reset(start)
            while not self._arm.step(expert(self._arm.observation)):
                pass
            if self._arm.success:
                self._keep(self._arm.chunk(f"demo-{kept}", Source.DEMO))
                kept += 1
            start += 1


def rows_of(model: str, task: str, seed: int, result: Result) -> list[Row]:
    """The cost of the goal; where it was not reached, how far the loop came, and no time."""
    name = f"plain RLPD, {model}, {task}, seed {seed}"
    share = Row(
        GOAL,
        f"{name}: success after {result.seconds:.0f} s of training",
        "share",
        result.successes / EPISODES,
        None,
        None,
    )
    reached = result.successes >= WANTED
    end = "to 95%" if reached else "until the limit, 95% not reached"
    return [
        share,
        *([Row(GOAL, f"{name}: training to 95%", "s", result.seconds, None, None)] if reached else []),
        Row(GOAL, f"{name}: environment steps {end}", "steps", result.steps, None, None),
        Row(GOAL, f"{name}: updates {end}", "updates", result.updates, None, None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="panda", choices=["panda", "so101", "ur5e"])
    parser.add_argument("--task", default="lift", choices=["lift", "reach"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    rows: list[Row] = []
    for seed in options.seeds:
        print(f"seed {seed}", flush=True)
        loop = PlainLoop(options.model, options.task, seed, LearnerConfig())
        rows += rows_of(options.model, options.task, seed, loop.run(options.limit_s))
        loop.close()
    report("learning", rows)


if __name__ == "__main__":
    main()
