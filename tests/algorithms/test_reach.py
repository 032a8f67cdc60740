"""Algorithms on the simulated arm, from a recorded store: slow, and the benchmark `learning` has the whole runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

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
        for _ in generate_demonstrations(self.robot, requested, {}, self._keep, RecorderConfig(), seed=0):
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


pytestmark = pytest.mark.slow
torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
SMALL: dict[str, Any] = {"hidden": [128, 128]}


def clone(folder: Path, kind: str, noise: float = 0.0, **kwargs: Any) -> tuple[float, dict[str, Array]]:
    """Trains BC on 20 demonstrations; returns its success and its state."""
    learner = {"options": {"action_noise": noise}}
    with reach_loop(folder, "bc", kind, SMALL, learner=learner, demonstrations=20, **kwargs) as loop:
        loop.update(1500)
        return loop.success(), loop.state()


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_behaviour_cloning_reaches(tmp_path: Path, kind: str) -> None:
    assert clone(tmp_path, kind)[0] >= 0.95


def test_ppo_from_behaviour_cloning_stays_good(tmp_path: Path) -> None:
    before, state = clone(tmp_path / "bc", "mlp", noise=0.2)
    learner = {"batch_size": 16, "staleness": 0, "options": {"window": 30}}
    with reach_loop(
        tmp_path / "ppo", "ppo", "mlp", SMALL, learner=learner, demonstrations=0, initial_state=state
    ) as loop:
        assert loop.success() == before, "it starts from that policy"
        run(loop, updates=40)
        assert loop.success() >= 0.95
        assert loop.trainer.batches.scalars() == {"windows_used": 640, "windows_stale": 0}


def run(loop: ReachLoop, updates: int) -> None:
    """Acts with the newest weights, and updates and publishes as soon as a batch of new windows is there."""
    loop.publish()
    for _ in loop.episodes():
        if loop.trainer.can_sample:
            loop.update(1)
            loop.publish()
        if loop.updates == updates:
            break


def test_dsrl_improves_a_mediocre_flow(tmp_path: Path) -> None:
    """Cloned from six demonstrations, the frozen flow succeeds in about half of the episodes."""
    flow = {"chunk_length": 4, "flow_steps": 4, **SMALL}
    kwargs: dict[str, Any] = {"demonstrations": 6}
    with reach_loop(tmp_path / "bc", "bc", "flow", flow, learner={"batch_size": 64}, **kwargs) as loop:
        loop.update(1500)
        before, state = loop.success(60), loop.state()
    learner = {"batch_size": 64, "options": {"critic_hidden": [128, 128], "critics": 5, "acting_rate": 0.02}}
    with reach_loop(
        tmp_path / "dsrl", "dsrl", "steered", {"base_options": flow}, learner=learner, initial_state=state, **kwargs
    ) as loop:
        for steps in loop.episodes():
            loop.update(int(0.3 * steps))
            loop.publish()
            if loop.updates >= 4000:
                break
        after = loop.success(60)
    assert before < 0.8 and after >= before + 0.1, (before, after)


def test_recap_exceeds_equal_updates_on_the_demonstrations(tmp_path: Path) -> None:
    """Cloned from four demonstrations of `lift`, the flow succeeds in about six of ten episodes."""
    flow = {"chunk_length": 4, "flow_steps": 4, "conditions": 2, **SMALL}
    explores = {"condition": 1, "guidance": 1.5, "noise_scale": 0.3, "exploration": 0.1}
    kwargs: dict[str, Any] = {"task": "lift", "demonstrations": 4, "learner": {"batch_size": 64}}
    with reach_loop(tmp_path / "bc", "bc", "flow", flow, **kwargs) as loop:
        loop.update(1500)
        state = loop.state()
        loop.update(2700)
        control = loop.success(60)
    with reach_loop(tmp_path / "recap", "recap", "flow", {**flow, **explores}, initial_state=state, **kwargs) as loop:
        loop.publish()
        for number, _ in enumerate(loop.episodes()):
            if number >= 20:
                loop.update(15)
                loop.publish()
            if loop.updates >= 2700:
                break
        after = loop.success(60)
    assert control < 0.8 and after >= control + 0.15, (control, after)
