"""Robot records in a folder that may hold damaged files."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from hal.spec import RobotSpec
from robots.fake import FakeRobot
from user_sys.errors import RunError
from user_sys.policies.conformance import example_spec
from user_sys.robot_records import (
    LEARNER,
    ROBOTS_FOLDER,
    assign_learners,
    copy_robot_records,
    embodiment_names,
    first_difference,
    learner_from_robot,
    read_robot_records,
    robot_records_of_store,
    save_robot_record,
)
from user_sys.run.learner_process import wait_for_spec

NESTED = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", NESTED, b" " * (2 << 20)], ids=len)
def test_damaged_record_is_skipped(content: bytes, tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "right.json").write_bytes(content)
    assert [record.robot for record in read_robot_records(tmp_path)] == ["left"]


@pytest.mark.parametrize("rate", [b"0.0", b"-5.0"])
def test_record_with_invalid_spec_is_skipped(rate: bytes, tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    card = tmp_path / "left.json"
    sound = card.read_bytes()
    card.write_bytes(sound.replace(b'"rate_hz":10.0', b'"rate_hz":' + rate))
    assert card.read_bytes() != sound and read_robot_records(tmp_path) == ()


def test_misnamed_record_is_skipped(tmp_path: Path) -> None:
    save_robot_record(tmp_path, "left", FakeRobot().spec)
    (tmp_path / "left.json").rename(tmp_path / "right.json")
    assert read_robot_records(tmp_path) == ()


def test_robot_with_unbounded_elements_comes_back_as_it_was(tmp_path: Path) -> None:
    spec = example_spec()
    assert not all(np.isfinite(spec.observation[0].low)) and save_robot_record(tmp_path, "r", spec)
    (record,) = read_robot_records(tmp_path)
    assert record.spec == spec and not save_robot_record(tmp_path, "r", spec)


def test_name_of_a_learner_stays_when_the_limits_of_its_robot_change(tmp_path: Path) -> None:
    spec = FakeRobot().spec
    save_robot_record(tmp_path, "first", example_spec())
    names = []
    for reduced_speed in (0.5, 0.25, 0.1):
        save_robot_record(tmp_path, "second", replace(spec, gripper=-1))  # another embodiment in between
        save_robot_record(tmp_path, "second", replace(spec, limits=replace(spec.limits, reduced_speed=reduced_speed)))
        names.append([*assign_learners(read_robot_records(tmp_path))])
    assert names[0] == names[1] == names[2] and len(names[0]) == 2


def test_name_of_a_learner_stays_when_the_robot_that_it_is_named_by_becomes_another_embodiment(tmp_path: Path) -> None:
    spec = FakeRobot().spec
    gentle, other = replace(spec, limits=replace(spec.limits, reduced_speed=0.1)), replace(spec, gripper=-1)
    for name, its_spec in (("first", example_spec()), ("second", spec), ("third", gentle)):
        save_robot_record(tmp_path, name, its_spec)
    names = learner_from_robot(read_robot_records(tmp_path))
    save_robot_record(tmp_path, "second", other)
    later = learner_from_robot(read_robot_records(tmp_path))
    assert later["third"] == names["third"] == names["second"] != later["second"]


def test_first_learner_stays_with_the_other_robots_when_the_oldest_becomes_another_embodiment(tmp_path: Path) -> None:
    spec, other = FakeRobot().spec, replace(FakeRobot().spec, gripper=-1)
    for number in range(4):
        save_robot_record(tmp_path, f"arm-{number}", spec)
    save_robot_record(tmp_path, "arm-0", other)
    learners = learner_from_robot(read_robot_records(tmp_path))
    assert {learners[f"arm-{number}"] for number in (1, 2, 3)} == {"learner"} and learners["arm-0"] != "learner"
    save_robot_record(tmp_path, "arm-0", spec)
    assert set(learner_from_robot(read_robot_records(tmp_path)).values()) == {"learner"}


X, Y, Z = (replace(FakeRobot().spec, gripper=gripper) for gripper in (-1, 2, 3))


@pytest.mark.parametrize(
    "joined",
    [
        [("A", X), ("C", X), ("A", Z), ("A", X)],
        [("A", X), ("A", Z), ("C", X)],  # the first option was wrong, and another robot has it later
        [("A", X), ("B", Y), ("A", Y), ("C", Z), ("A", X)],  # corrected to the embodiment of others
    ],
)
def test_embodiment_keeps_its_learner_whatever_the_robots_become(
    tmp_path: Path, joined: list[tuple[str, RobotSpec]]
) -> None:
    name_of = dict[str, str]()
    for robot, spec in joined:
        save_robot_record(tmp_path, robot, spec)
        for name, its_spec in assign_learners(read_robot_records(tmp_path)).items():
            assert name_of.setdefault(its_spec.embodiment, name) == name
            assert wait_for_spec(tmp_path, name, threading.Event()) == its_spec, "of the process of that name"
    assert name_of[joined[0][1].embodiment] == LEARNER and len({*name_of.values()}) == len(name_of)


def test_first_learner_waits_while_no_robot_has_its_embodiment(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert wait_for_spec(tmp_path, LEARNER, stop) is None
    for spec in (X, Z):
        save_robot_record(tmp_path, "A", spec)
    assert wait_for_spec(tmp_path, LEARNER, stop) is None
    with pytest.raises(RunError, match="no robot for learner-b"):
        wait_for_spec(tmp_path, "learner-b", stop)


def test_first_learner_stays_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_robot_record(tmp_path, "B", X)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    save_robot_record(tmp_path, "A", Y)
    assert learner_from_robot(read_robot_records(tmp_path))["B"] == LEARNER


def test_robot_that_becomes_another_embodiment_is_logged_with_the_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = FakeRobot().spec
    save_robot_record(tmp_path, "arm", spec)
    save_robot_record(tmp_path, "arm", replace(spec, limits=replace(spec.limits, reduced_speed=0.1)))
    assert not caplog.messages
    save_robot_record(tmp_path, "arm", replace(spec, gripper=-1))
    assert caplog.messages == ["robots.embodiment_changed robot=arm: gripper is -1 instead of 3"]


def test_difference_of_specs_names_the_element_and_both_values() -> None:
    spec = FakeRobot().spec
    gentle = replace(spec, limits=replace(spec.limits, reduced_speed=0.1))
    faster = replace(gentle, action=replace(spec.action, high=(1.0, *spec.action.high[1:])))
    assert first_difference(spec, faster) == f"action.high.0 is 1.0 instead of {spec.action.high[0]}"
    assert first_difference(spec, replace(spec, neutral=())) == "neutral has 0 elements instead of 4"
    assert first_difference(spec, gentle) == ""


def test_copied_records_keep_the_names_of_episodes_of_earlier_versions(tmp_path: Path) -> None:
    first = FakeRobot().spec
    second, third = (replace(first, limits=replace(first.limits, reduced_speed=speed)) for speed in (0.5, 0.1))
    for spec in (first, second):
        save_robot_record(tmp_path / "run" / ROBOTS_FOLDER, "arm", spec)
    save_robot_record(tmp_path / "other" / ROBOTS_FOLDER, "arm", third)
    for _ in range(2):
        for name in ("run", "other"):
            copy_robot_records(robot_records_of_store(tmp_path / name), tmp_path / "into")
    assert len(robot_records_of_store(tmp_path / "into")) == 2
    names = {first.embodiment, first.fingerprint, second.fingerprint, third.fingerprint}
    assert {*embodiment_names(tmp_path / "into", second)} == names
