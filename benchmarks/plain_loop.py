"""A plain loop in one process, without tunnel or fleet: acting and training take turns.

All settings are those of a run's configuration: robot, demonstrations, algorithm, policy, sampler, the rule by which
training ends, its time limit, and the evaluation. Robot, safety kernel, episode loop, recorder, store and replay buffer
are the product's. Cameras are off unless the policy reads them. A plain loop chooses only how many steps it takes for
each update.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from user_sys.algorithms.algorithm import policy_arrays
from user_sys.compose import build_robot_setup, make_policy, select_cameras
from user_sys.edge.agents import LoadedPolicy, PolicyAgent
from user_sys.edge.demonstrations import generate_demonstrations
from user_sys.edge.environment import TimeStep
from user_sys.edge.local_environment import open_local_environment
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import Recorder, SelectedAction
from user_sys.episode import EpisodeSource
from user_sys.learner.trainer import Trainer
from user_sys.messages import EpisodeReport
from user_sys.run.config import RunConfig
from user_sys.run.evaluate import EvaluationConfig, evaluate
from user_sys.store.store import StoreReader, StoreWriter


@dataclass(frozen=True)
class Result:
    """`successes` of `episodes` evaluations after `seconds` of acting and training; `done`: the rule ended it."""

    seconds: float
    steps: int
    updates: int
    successes: int
    episodes: int
    done: bool

    @property
    def words(self) -> str:
        end = "" if self.done else "at the limit, "
        return f"{end}{self.successes} of {self.episodes} after {self.seconds:.0f} s"


class PlainLoop:
    """Acting and training in turns, in one thread. A context manager."""

    def __init__(self, config: RunConfig, seed: int, steps_per_update: float) -> None:
        torch.set_num_threads(config.learner.threads)
        torch.set_flush_denormal(True)
        robot = config.robots[0]
        blind = replace(robot, options={**robot.options, "cameras": []})
        self._robot = robot if select_cameras(config.policy, robot) else blind
        self._config, self._seed, self._owed_a_step = config, seed, 1 / steps_per_update
        self._steps = self._updates = 0
        self._owed, self._published_s = 0.0, 0.0

    def __enter__(self) -> PlainLoop:
        config = self._config
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._store = stack.enter_context(StoreWriter.open(folder))
            reader = stack.enter_context(StoreReader.open(folder))
            self._station = build_robot_setup(self._robot)
            spec = self._station.robot.spec
            self._share = Trainer(config.learner, spec, reader, policy=config.policy, seed=self._seed)
            stack.callback(self._share.close)
            self._policy = make_policy(config.policy, spec, self._seed)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, limit_s: float) -> Result:
        """Trains by the demo's rule, for `limit_s` at most, and evaluates."""
        for _ in self._demonstrations():
            pass
        self._share.refresh()
        began_s, target = time.monotonic(), self._config.target
        outcomes: deque[bool] = deque(maxlen=target.episodes)
        done = False
        while self._updates < self._config.learner.warmup_updates:
            self._update()
        for success in self._episodes():
            outcomes.append(success)
            done = len(outcomes) == target.episodes and sum(outcomes) >= target.success * target.episodes
            if done or time.monotonic() - began_s > limit_s:
                break
        seconds = time.monotonic() - began_s
        judged = EvaluationConfig(episodes=self._config.evaluation.episodes, video_episodes=0)
        weights = policy_arrays(self._share.policy)
        found = [
            bool(summary.success)
            for summary in evaluate(
                self._robot, self._config.policy, weights, judged, lambda picture: None, seed=self._seed
            )
        ]
        return Result(seconds, self._steps, self._updates, sum(found), len(found), done)

    def _demonstrations(self) -> Iterator[EpisodeReport]:
        config = self._config
        return generate_demonstrations(
            self._robot, config.demonstrations, {}, self._keep, config.recorder, seed=self._seed
        )

    def _episodes(self) -> Iterator[bool]:
        """Without end: whether each succeeded."""
        station, chunks = self._station, list[bytes]()
        record = Recorder(station.robot.spec, station.name, chunks.append)
        agent = PolicyAgent(LoadedPolicy(self._policy), station.robot.spec, deterministic=False)
        with open_local_environment(station, self._robot) as driver:
            for number in itertools.count():
                start = 1_000_000 * self._seed + number
                summary = run_episode(
                    driver, agent, record, source=EpisodeSource.ONLINE, seed=start, listeners=[self._train]
                )
                self._keep(chunks)
                chunks.clear()
                self._share.refresh()
                yield bool(summary.success)

    def _keep(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            self._store.append(chunk)
        self._store.sync()

    def _train(self, tick: TimeStep, decision: SelectedAction | None) -> None:
        self._steps += 1
        self._owed += self._owed_a_step
        while self._owed >= 1.0:
            self._owed -= 1.0
            self._update()

    def _update(self) -> None:
        self._share.update(self._updates)
        self._updates += 1
        if (now_s := time.monotonic()) - self._published_s >= self._config.learner.publish.every_s:
            self._published_s = now_s
            self._policy.load(policy_arrays(self._share.policy))
