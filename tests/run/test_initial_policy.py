"""The policy that the learners of a run start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_spec

from robots.fake import FakeRobot
from user_sys.errors import RunError, WireError
from user_sys.learner.checkpoint import Checkpoint, save_checkpoint
from user_sys.learner.config import LearnerConfig
from user_sys.policies.conformance import example_spec
from user_sys.robot_records import (
    LEARNER,
    RobotRecord,
    learner_folder,
    learner_from_embodiment,
    read_robot_records,
    save_robot_record,
)
from user_sys.run.config import RunConfig, RunFolder
from user_sys.run.learner_process import initial_state, make_trainer

SPECS = FakeRobot().spec, example_spec()
RECORDS = [RobotRecord(robot=spec.model, spec=spec, known_since_unix_ns=number) for number, spec in enumerate(SPECS)]
LEARNERS = learner_from_embodiment(RECORDS)
SECOND = LEARNERS[SPECS[1].embodiment]


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
    for spec in SPECS[: len(trained)]:
        save_robot_record(old.robots, spec.model, spec)
    embodiment = next(embodiment for embodiment, each in LEARNERS.items() if each == name)
    is_other, found = initial_state(config, name, embodiment, learner_folder(new.checkpoints, name))
    assert found is not None and found["network.policy.x"].item() == trained.index(expected)
    assert is_other == (expected != name)


def test_learner_starts_from_the_policy_of_its_embodiment_whatever_the_names(tmp_path: Path) -> None:
    first, spec = SPECS
    gentle = replace_spec(spec, limits=replace_spec(spec.limits, reduced_speed=0.1))
    old, new = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "new")
    for robots, robot, its_spec in (
        (old.robots, "first", first),
        (old.robots, "second", spec),
        (new.robots, "first", first),
        (new.robots, "second", gentle),
    ):
        save_robot_record(robots, robot, its_spec)
    before, after = (
        learner_from_embodiment(read_robot_records(folder.robots))[spec.embodiment] for folder in (old, new)
    )
    for number, each in enumerate((LEARNER, before)):
        arrays = {"network.policy.x": np.full(1, number)}
        save_checkpoint(learner_folder(old.checkpoints, each), Checkpoint(5, {}, arrays), keep=1)
    config = RunConfig()
    config = replace(config, learner=replace(config.learner, initial_policy=str(old.path)))
    for name in (after, LEARNER):  # LEARNER in a run with other robots
        is_other, found = initial_state(config, name, spec.embodiment, learner_folder(new.checkpoints, name))
        assert found is not None and found["network.policy.x"].item() == 1 and not is_other
    assert before != after


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
        make_trainer(config, LEARNER, SPECS[0], new.checkpoints, make)  # type: ignore[arg-type]
    own = learner_folder(new.checkpoints, SECOND)
    assert make_trainer(config, SECOND, SPECS[1], own, make) == "" and "learner.starts_untrained" in caplog.text  # type: ignore[arg-type,comparison-overlap]
    caplog.clear()
    save_checkpoint(own, Checkpoint(updates, {}, {}), keep=1)
    made = make_trainer(config, SECOND, SPECS[1], own, make)  # type: ignore[arg-type]
    assert (made == "") == ("learner.starts_untrained" in caplog.text) == (updates == 0), "robots may act if it trained"  # type: ignore[comparison-overlap]


def test_run_without_a_checkpoint_is_no_initial_policy(tmp_path: Path) -> None:
    config = RunConfig()
    config = replace(config, learner=replace(config.learner, initial_policy=str(tmp_path / "old")))
    with pytest.raises(RunError, match="has no checkpoint"):
        initial_state(config, SECOND, SPECS[1].embodiment, tmp_path / "new")
