"""Stable-Baselines3's SAC on the demo's robot, with the demo's demonstrations in its replay buffer.

``benchmarks.peers.start("sb3_sac", CONFIG, SEED, LIMIT_S)``: a round trains by the demo's rule, evaluates, and gives
the seconds of training; negative if the time limit ended it. The peer's log says how many evaluations succeeded.
SAC has its own settings, but for the batch, the discount and the start of training, which are the demo's.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.peers import rounds
from hal.safety import SafetyKernel
from hal.spec import Array
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.config import load
from user_sys.edge.demonstrations import demonstration_seeds
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.plugins import load_algorithm
from user_sys.run.config import RunConfig
from user_sys.run.evaluate import EVALUATION_SEED


class ArmEnv(gymnasium.Env[Array, Array]):
    """A robot behind its safety kernel; actions lie in [-1, 1]."""

    def __init__(self, robot: RobotConfig, seed: int) -> None:
        station = build_robot_setup(robot, cameras=False)
        spec, self._task, self.expert = (
            station.robot.spec,
            station.task,
            partial(station.task.make_expert, station.robot),
        )
        self._tick: TimeStep | None = None
        self._driver = RobotEnvironment(station.robot, station.task, SafetyKernel(spec, self._world_ns))
        self._driver.connect()
        self._starts = iter(range(1_000_000 * seed, 1_000_000 * (seed + 1)))
        self._names = [feature.name for feature in spec.observation]
        low, high = np.asarray(spec.action.low, np.float32), np.asarray(spec.action.high, np.float32)
        self._centre, self._scale = (low + high) / 2, (high - low) / 2
        size = sum(len(feature.labels) for feature in spec.observation)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, low.shape, np.float32)
        self.steps = 0

    def _world_ns(self) -> int:
        """The world stands still while SAC trains: an observation does not grow stale by that."""
        return self._tick.t_capture_ns if self._tick else 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        start = (options or {}).get("start")
        self._tick, self.steps = self._driver.reset(next(self._starts) if start is None else start), 0
        return self.seen, {}

    @property
    def seen(self) -> Array:
        assert self._tick is not None
        return np.concatenate([np.ravel(self._tick.observation[name]) for name in self._names]).astype(np.float32)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._tick = self._driver.step(np.asarray(self._centre + self._scale * action, np.float32))
        self.steps += 1
        outcome = self._tick.outcome
        late = self.steps >= self._task.max_steps
        told = {"is_success": bool(outcome.success), "TimeLimit.truncated": late and not outcome.terminated}
        return self.seen, float(outcome.reward), outcome.terminated, late and not outcome.terminated, told

    def shown(self, start: int, noise: float) -> list[tuple[Array, Array, Array, float, bool, dict[str, Any]]]:
        """The transitions of one scripted episode; none if it failed."""
        self.reset(options={"start": start})
        expert, found = self.expert(start, noise), []
        while True:
            assert self._tick is not None
            before = self.seen
            action = np.clip((expert(self._tick.observation) - self._centre) / self._scale, -1, 1).astype(np.float32)
            after, reward, terminated, truncated, told = self.step(action)
            found.append((before, after, action, reward, terminated or truncated, told))
            if terminated or truncated:
                return found if told["is_success"] else []


class Rule(BaseCallback):
    """Ends training as the demo's target does, or at the limit."""

    def __init__(self, share: float, episodes: int, limit_s: float) -> None:
        super().__init__()
        self._share, self._limit_s, self._begun_s = share, limit_s, time.monotonic()
        self._outcomes: deque[bool] = deque(maxlen=episodes)
        self.done = False

    def _on_step(self) -> bool:
        for told, over in zip(self.locals["infos"], self.locals["dones"], strict=True):
            if over:
                self._outcomes.append(told["is_success"])
        whole = len(self._outcomes) == self._outcomes.maxlen
        self.done = whole and sum(self._outcomes) >= self._share * len(self._outcomes)
        return not self.done and time.monotonic() - self._begun_s < self._limit_s


def train(config: RunConfig, seed: int, limit_s: float) -> float:
    torch.set_num_threads(config.learner.threads)
    env = ArmEnv(config.robots[0], seed)
    model = SAC(
        "MlpPolicy",
        env,
        seed=seed,
        batch_size=config.learner.batch_size,
        gamma=load_algorithm(config.learner.algorithm, config.learner.options)[1].discount,
        learning_starts=0,
        device="cpu",
    )
    for number in range(config.demonstrations.episodes):
        starts = demonstration_seeds(config.robots[0].name, seed, number)
        shown = (env.shown(start, config.demonstrations.noise) for start in starts)
        for before, after, action, reward, done, told in next(each for each in shown if each):
            model.replay_buffer.add(before, after, action, np.array([reward]), np.array([done]), [told])
    rule, begun_s = Rule(config.target.success, config.target.episodes, limit_s), time.monotonic()
    model.learn(10**9, callback=rule)
    seconds = time.monotonic() - begun_s
    successes = sum(
        evaluated(model, env, EVALUATION_SEED + 10_000 * seed + n) for n in range(config.evaluation.episodes)
    )
    rounds.say(
        f"{successes} of {config.evaluation.episodes} succeeded after {seconds:.0f} s, {model.num_timesteps} steps"
    )
    return seconds if rule.done else -seconds


def evaluated(model: SAC, env: ArmEnv, start: int) -> bool:
    seen, _ = env.reset(options={"start": start})
    while True:
        action, _ = model.predict(seen, deterministic=True)
        seen, _, terminated, truncated, told = env.step(action)
        if terminated or truncated:
            return bool(told["is_success"])


if __name__ == "__main__":
    path, seed, limit_s = rounds.arguments()
    config = load(RunConfig, Path(path))
    rounds.serve(lambda: train(config, int(seed), float(limit_s)))
