"""GOALS row 12's peer: plain RLPD in one process, without tunnel, store or fleet: acting and training take turns.

    python benchmarks/learning.py --task lift --seeds 0 1 2

It says what the algorithm needs by itself: seconds, environment steps and updates until 95 of 100 evaluation episodes
succeed. Evaluations are not counted as training time. `bound` is the goal: five minutes.

A Gymnasium environment does not say which action was applied, so that the action that was asked for is learned from
here; the system learns from the applied one.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import numpy as np
import torch
from harness import Row, report

import sim  # noqa: F401  registers the environments
from hal.robot import Observation
from hal.spec import ENVIRONMENT_STATE, STATE, Array, RobotSpec
from sim.environments import KEYS
from sim.experts import make_expert
from sim.robot import SimRobotConfig, robot_spec
from user_sys.algorithms.rlpd import Rlpd
from user_sys.episode import APPLIED, Chunk, ChunkHeader, EpisodeEnd, Source
from user_sys.learner.service import LearnerConfig
from user_sys.policies.mlp import MlpPolicy, action_affine
from user_sys.replay.mix import ReplayMix
from user_sys.replay.rows import Features

GOAL, GOAL_S = 12, 300.0
DEMONSTRATIONS, DEMONSTRATION_NOISE = 20, 0.1
STEPS_PER_UPDATE = 1.75  # what the asynchronous demo shows: acting is faster than training
PUBLISH_EVERY, EVALUATE_EVERY = 100, 500
GLANCE, EPISODES, WANTED = 20, 100, 95


@dataclass
class Steps:
    """One episode as it is recorded."""

    observations: list[dict[str, Array]] = field(default_factory=list)
    actions: list[Array] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False
    success: bool = False

    def chunk(self, name: str, spec: RobotSpec, source: Source) -> Chunk:
        n = len(self.actions)
        columns: dict[str, Array] = {
            feature: np.stack([o[feature] for o in self.observations[:n]]) for feature in (STATE, ENVIRONMENT_STATE)
        }
        columns |= {APPLIED: np.stack(self.actions), "reward": np.array(self.rewards, np.float32)}
        columns |= {"terminated": np.arange(n) == (n - 1 if self.terminated else n)}
        columns |= {"phase": np.zeros(n, np.uint8), "policy_version": np.zeros(n, np.int64)}
        header = ChunkHeader(
            episode=name, index=0, first_step=0, steps=n, robot="plain", embodiment=spec.embodiment, task="t",
            sentence="", source=source, seed=0, started_unix_ns=0, end=EpisodeEnd(steps=n, success=self.success),
        )  # fmt: skip
        return Chunk(header, columns, {k: v[None] for k, v in self.observations[n].items()})


class Arm:
    """A Gymnasium environment seen as a robot: features by their names, actions in the spec's units."""

    def __init__(self, task: str, seed: int) -> None:
        self.spec = robot_spec(SimRobotConfig(scene=task, cameras=()))
        self.environment = gymnasium.make(f"user_sim/Panda{task.title()}-v0")
        self._centre, self._scale = action_affine(self.spec.action)
        self._seed: int | None = seed
        self.reset()

    def reset(self) -> None:
        observation, _ = self.environment.reset(seed=self._seed)
        self._seed = None
        self.episode = Steps([_named(observation)])

    @property
    def observation(self) -> dict[str, Array]:
        return self.episode.observations[-1]

    def step(self, action: Array) -> bool:
        """Whether the episode is over."""
        observation, reward, terminated, truncated, facts = self.environment.step((action - self._centre) / self._scale)
        self.episode.observations.append(_named(observation))
        self.episode.actions.append(action)
        self.episode.rewards.append(float(reward))
        self.episode.terminated, self.episode.success = terminated, bool(facts["is_success"])
        return terminated or truncated


@dataclass(frozen=True)
class Result:
    """`seconds` of training, evaluations not counted, at which `successes` of 100 episodes succeeded."""

    seconds: float
    steps: int
    updates: int
    successes: int


class PlainLoop:
    """Acting and training in turns, in one thread."""

    def __init__(self, task: str, seed: int, config: LearnerConfig) -> None:
        self._config, self._arm, self._test = config, Arm(task, seed), Arm(task, 10_000 + seed)
        spec = self._arm.spec
        self._learner, self._policy, self._judge = Rlpd(config.algorithm, spec, seed=seed), *_policies(spec, seed)
        self._replay = ReplayMix(Features.of(spec), spec.embodiment, online_rows=config.online_rows, seed=seed)
        self._batch = self._replay.empty_batch(config.batch_size)
        self._steps, self._owed, self._count = 0, 0.0, 0
        self._demonstrate(task, seed)

    def run(self, limit_s: float) -> Result:
        """Trains until the goal or `limit_s`."""
        spent, updates = 0.0, 0
        while True:
            started = time.perf_counter()
            self._train(updates, EVALUATE_EVERY)
            updates += EVALUATE_EVERY
            spent += time.perf_counter() - started
            glance = self._evaluate(GLANCE)
            print(f"  {spent:6.1f} s  {self._steps:6d} steps  {updates:6d} updates  {glance}/{GLANCE}", flush=True)
            successes = self._evaluate(EPISODES) if glance >= GLANCE * WANTED / EPISODES else 0
            if successes >= WANTED or spent >= limit_s:
                return Result(spent, self._steps, updates, successes)

    def _train(self, done: int, updates: int) -> None:
        for update in range(done, done + updates):
            self._replay.sample(self._config.batch_size, out=self._batch)
            self._learner.update(self._batch)
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
            self._replay.online.add(self._arm.episode.chunk(f"online-{self._count}", self._arm.spec, Source.ONLINE))
            self._arm.reset()

    def _evaluate(self, episodes: int) -> int:
        self._judge.load(self._learner.policy_weights())
        successes = 0
        for _ in range(episodes):
            self._test.reset()
            while not self._test.step(self._judge.act(self._test.observation, "", deterministic=True).actions[0]):
                pass
            successes += self._test.episode.success
        return successes

    def _demonstrate(self, task: str, seed: int) -> None:
        expert, arm, kept = make_expert(task, self._arm.spec, DEMONSTRATION_NOISE, seed), self._arm, 0
        while kept < DEMONSTRATIONS:
            arm.reset()
            while not arm.step(expert(Observation(arm.observation, 0))):
                pass
            if arm.episode.success:
                self._replay.demo.add(arm.episode.chunk(f"demo-{kept}", arm.spec, Source.DEMO))
                kept += 1
        arm.reset()


def _policies(spec: RobotSpec, seed: int) -> tuple[MlpPolicy, MlpPolicy]:
    return MlpPolicy(spec, seed=seed), MlpPolicy(spec, seed=seed)


def _named(observation: dict[str, Array]) -> dict[str, Array]:
    return {name: observation[key] for key, name in KEYS.items()}


def rows_of(task: str, seed: int, result: Result) -> list[Row]:
    met = result.successes >= WANTED and result.seconds <= GOAL_S
    name = f"plain RLPD, {task}, seed {seed}"
    return [
        Row(GOAL, f"{name}: training to 95%", "s", result.seconds, GOAL_S, GOAL_S / result.seconds, 1.0, met),
        Row(GOAL, f"{name}: environment steps", "steps", result.steps, result.steps, 1.0, None, None),
        Row(GOAL, f"{name}: updates", "updates", result.updates, result.updates, 1.0, None, None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="lift", choices=["lift", "reach"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit-s", type=float, default=GOAL_S)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    rows: list[Row] = []
    for seed in options.seeds:
        print(f"seed {seed}", flush=True)
        rows += rows_of(options.task, seed, PlainLoop(options.task, seed, LearnerConfig()).run(options.limit_s))
    report("learning", rows)


if __name__ == "__main__":
    main()
