"""Algorithms on the simulated arm, from a recorded store: slow, and the benchmark `learning` has the whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reach_kit import ReachLoop, reach_loop

from user_sys.codec import Array

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
        run(loop, updates=16)
        assert loop.success() >= 0.95
        assert loop.trainer.batches.scalars() == {"windows_used": 256, "windows_stale": 0}


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
    """Cloned from ten demonstrations, the frozen flow succeeds in about six of ten episodes."""
    flow = {"chunk_length": 4, "flow_steps": 4, **SMALL}
    kwargs: dict[str, Any] = {"demonstrations": 10}
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
