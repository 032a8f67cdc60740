"""A simulated arm, a store and a trainer in one process: acting and training take turns, without the learner loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from user_sys.algorithms.algorithm import policy_arrays, save_state
from user_sys.codec import Array
from user_sys.compose import PolicyConfig, RobotConfig, build_robot_setup, make_policy
from user_sys.edge.agents import LoadedPolicy, PolicyAgent
from user_sys.edge.demonstrations import DemonstrationConfig, generate_demonstrations
from user_sys.edge.local_environment import open_local_environment
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import Recorder, RecorderConfig
from user_sys.episode import EpisodeSource
from user_sys.learner.config import LearnerConfig
from user_sys.learner.trainer import Trainer
from user_sys.run.config import EvaluationConfig
from user_sys.run.evaluate import evaluate
from user_sys.store.store import StoreReader, StoreWriter


class CountedPolicy(LoadedPolicy):
    """A policy whose version grows."""

    def load(self, weights: dict[str, Array]) -> None:
        self.policy.load(weights)
        object.__setattr__(self, "version", self.version + 1)


class ReachLoop:
    """Trains `algorithm` on `task`, after `demonstrations` of the scripted expert."""

    def __init__(
        self,
        folder: Path,
        learner: LearnerConfig,
        policy: PolicyConfig,
        *,
        task: str = "reach",
        demonstrations: int = 5,
        initial_state: dict[str, Array] | None = None,
    ) -> None:
        self.robot = RobotConfig(name="panda-0", driver="sim", task=task, options={"cameras": []})
        self.policy, self.updates = policy, 0
        self.store, self.reader = StoreWriter.open(folder), StoreReader.open(folder)
        self.setup = build_robot_setup(self.robot)
        spec = self.setup.robot.spec
        self.trainer = Trainer(learner, spec, self.reader, policy=policy, initial_state=initial_state)
        self.acting = CountedPolicy(make_policy(policy, spec, 0))
        requested = DemonstrationConfig(episodes=demonstrations)
        for _ in generate_demonstrations(self.robot, requested, 0, self._keep, RecorderConfig(), seed=0):
            pass
        self.trainer.refresh()

    def _keep(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            self.store.append(chunk)
        self.store.sync()

    def update(self, count: int) -> None:
        for _ in range(count):
            self.trainer.update(self.updates)
            self.updates += 1

    def publish(self) -> None:
        self.acting.load(policy_arrays(self.trainer.policy))
        if self.trainer.batches.once is not None:
            self.trainer.batches.add_version(self.acting.version)

    def episodes(self) -> Iterator[int]:
        """Runs online episodes without end; yields the steps of each."""
        spec, chunks = self.setup.robot.spec, list[bytes]()
        record = Recorder(spec, self.setup.name, chunks.append)
        agent = PolicyAgent(self.acting, spec, self.policy.execution, deterministic=False)
        with open_local_environment(self.setup, self.robot) as environment:
            for number in itertools.count():
                result = run_episode(environment, agent, record, source=EpisodeSource.ONLINE, seed=number)
                self._keep(chunks)
                chunks.clear()
                self.trainer.refresh()
                yield result.steps

    def success(self, episodes: int = 40) -> float:
        """The share of successes of the newest policy on new starts."""
        weights, config = policy_arrays(self.trainer.policy), EvaluationConfig(episodes=episodes, video_episodes=0)
        results = list(evaluate(self.robot, self.policy, weights, config, lambda picture: None))
        return sum(bool(result.success) for result in results) / len(results)

    def state(self) -> dict[str, Array]:
        return save_state(self.trainer.algorithm)

    def close(self) -> None:
        self.trainer.close()
        self.reader.close()
        self.store.close()


@contextmanager
def reach_loop(folder: Path, algorithm: str, kind: str, options: dict[str, Any], **kwargs: Any) -> Iterator[ReachLoop]:
    """`options`: of the policy; `learner`: further settings of the learner; others: see `ReachLoop`."""
    learner = LearnerConfig(algorithm=algorithm, cache_bytes=64 << 20, **kwargs.pop("learner", {}))
    loop = ReachLoop(folder, learner, PolicyConfig(kind=kind, options=options), **kwargs)
    try:
        yield loop
    finally:
        loop.close()
