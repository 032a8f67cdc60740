"""The policy that the learners of a run start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from user_sys.errors import RunError
from user_sys.learner.checkpoint import Checkpoint, save_checkpoint
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.run.config import RunConfig, RunFolder
from user_sys.run.learner_process import initial_state

SECOND = "learner-so101-abc123"


@pytest.mark.parametrize(
    ("trained", "name", "expected"),
    [
        ([LEARNER], LEARNER, LEARNER),
        ([LEARNER, SECOND], SECOND, SECOND),
        ([LEARNER], SECOND, LEARNER),  # the other run had one embodiment
    ],
)
def test_learner_starts_from_its_namesake_or_the_first(
    tmp_path: Path, trained: list[str], name: str, expected: str
) -> None:
    old, new = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "new")
    for number, each in enumerate(trained):
        arrays = {"network.policy.x": np.full(1, number)}
        save_checkpoint(learner_folder(old.checkpoints, each), Checkpoint(5, {}, arrays), keep=1)
    config = RunConfig()
    config = replace(config, learner=replace(config.learner, initial_policy=str(old.path)))
    found = initial_state(config, name, learner_folder(new.checkpoints, name))
    assert found is not None and found["network.policy.x"].item() == trained.index(expected)


def test_run_without_a_checkpoint_is_no_initial_policy(tmp_path: Path) -> None:
    config = RunConfig()
    config = replace(config, learner=replace(config.learner, initial_policy=str(tmp_path / "old")))
    with pytest.raises(RunError, match="has no checkpoint"):
        initial_state(config, SECOND, tmp_path / "new")
