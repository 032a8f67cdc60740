"""The policy that the learners of a run start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from user_sys.errors import RunError, WireError
from user_sys.learner.checkpoint import Checkpoint, save_checkpoint
from user_sys.learner.config import LearnerConfig
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.run.config import RunConfig, RunFolder
from user_sys.run.learner_process import initial_state, make_trainer

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
    is_other, found = initial_state(config, name, learner_folder(new.checkpoints, name))
    assert found is not None and found["network.policy.x"].item() == trained.index(expected)
    assert is_other == (expected != name)


@pytest.mark.parametrize("updates", [0, 5])
def test_learner_of_another_embodiment_starts_untrained_if_the_policy_does_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, updates: int
) -> None:
    old, new = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "new")
    save_checkpoint(old.checkpoints, Checkpoint(5, {}, {"network.policy.x": np.zeros(1)}), keep=1)
    config = RunConfig()
    config = replace(config, learner=replace(config.learner, initial_policy=str(old.path)))

    def make(learner: LearnerConfig, initial_state: object = None) -> object:
        if initial_state is not None:
            raise WireError("learner.initial_policy is of another robot")
        return learner.initial_policy

    with pytest.raises(WireError, match="of another robot"):
        make_trainer(config, LEARNER, new.checkpoints, make)  # type: ignore[arg-type]
    own = learner_folder(new.checkpoints, SECOND)
    assert make_trainer(config, SECOND, own, make) == "" and "learner.starts_untrained" in caplog.text  # type: ignore[arg-type,comparison-overlap]
    caplog.clear()
    save_checkpoint(own, Checkpoint(updates, {}, {}), keep=1)
    made = make_trainer(config, SECOND, own, make)  # type: ignore[arg-type]
    assert (made == "") == ("learner.starts_untrained" in caplog.text) == (updates == 0), "robots may act if it trained"  # type: ignore[comparison-overlap]


def test_run_without_a_checkpoint_is_no_initial_policy(tmp_path: Path) -> None:
    config = RunConfig()
    config = replace(config, learner=replace(config.learner, initial_policy=str(tmp_path / "old")))
    with pytest.raises(RunError, match="has no checkpoint"):
        initial_state(config, SECOND, tmp_path / "new")
