"""Each built-in algorithm trains, publishes and resumes on a device; its policy acts there with what it published."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from test_learner import CONFIG, SPEC, LearnerBench, RecordingPublisher, bench, episode

from user_sys.compose import PolicyConfig, make_policy
from user_sys.episode import EpisodeSource
from user_sys.plugins import ALGORITHMS
from user_sys.policies.conformance import example_observation
from user_sys.store.store import StoreWriter
from user_sys.weights.gpu_copy import PolicySnapshot

__all__ = ["bench"]

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
FLOW = {"hidden": [16], "chunk_length": 4, "flow_steps": 2}
POLICIES = {
    "q_chunking": PolicyConfig(kind="flow", options={**FLOW, "flow_steps": 1}),
    "dsrl": PolicyConfig(kind="steered", options={"base": "flow"}),
    "recap": PolicyConfig(kind="flow", options={**FLOW, "conditions": 2, "condition": 1, "guidance": 1.5}),
    "sac_flow": PolicyConfig(kind="gated_flow", options=FLOW),
}
MLP = PolicyConfig(options={"hidden": [16]})
LORA = PolicyConfig(kind="flow", options={**FLOW, "train": {"mode": "lora", "targets": ["layers"], "rank": 2}})
CASES = [pytest.param(name, POLICIES.get(name, MLP), id=name) for name in sorted(ALGORITHMS)]
BATCH = 3


@dataclass
class RecordingRobot(RecordingPublisher):
    """A robot that records so many episodes with each version that they are a batch, also of windows."""

    writer: StoreWriter | None = None

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        super().publish(weights, version, updates)
        assert self.writer is not None
        for n in range(BATCH):
            self.writer.append(episode(f"online-{version}-{n}", EpisodeSource.ONLINE, n, version=version))
        self.writer.sync()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("algorithm", "policy"), [*CASES, pytest.param("bc", LORA, id="bc-lora")])
def test_algorithm_trains_resumes_and_acts(
    bench: LearnerBench, algorithm: str, policy: PolicyConfig, device: str
) -> None:
    bench.fill(EpisodeSource.DEMO, 3)
    robot = RecordingRobot(bench.published, writer=bench.writer)
    config = replace(CONFIG, algorithm=algorithm, options={}, batch_size=BATCH)
    for updates, on in ((3, device), (5, device), (6, "cpu"), (7, device)):
        learner = bench.learner(replace(config, max_updates=updates), device=on, policy=policy, sink=robot)
        learner.run(threading.Event())
        assert learner.updates == updates == bench.published[-1].updates
        assert {each.device.type for each in bench.trainer.algorithm.state_dict().values()} == {on}
    acting, rng = make_policy(policy, SPEC, 0, device), np.random.default_rng(0)
    acting.load(bench.published[-1].state.tensors)
    chosen = acting.act(example_observation(rng), "", deterministic=True).actions
    assert np.isfinite(chosen).all()
    assert np.isfinite([value for _, scalars in bench.reported for value in scalars.values()]).all()
