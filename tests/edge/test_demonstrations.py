from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

import user_sys.commands.edge
from user_sys.commands.edge import EdgeConfig, record_missing_demonstrations
from user_sys.commands.main import main
from user_sys.compose import RobotConfig, robot_spec
from user_sys.config import build, load, save
from user_sys.edge.demonstrations import DemonstrationConfig, demonstration_seeds
from user_sys.edge.outbox import BLOCK_BYTES, MAX_BYTES, Outbox
from user_sys.edge.recorder import RecorderConfig
from user_sys.episode import parse_chunk
from user_sys.errors import ConfigError
from user_sys.run.config import RunConfig
from user_sys.run.prepare import record_demonstrations
from user_sys.store.index import Index
from user_sys.store.labels import DeleteLabel, SuccessLabel
from user_sys.store.maintenance import add_labels, compact_store
from user_sys.store.store import StoreReader


def test_lost_robot_continues_its_demonstrations_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_sys.commands.edge, "ROBOT_RETRY_S", 0.0)
    monkeypatch.setenv("USER_SYS_TEST_FOLDER", str(tmp_path / "r"))
    robot = RobotConfig(name="fake-0", driver="fake", task="reach", options={"faults": {"drop_out_at": 30}})
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=12))
    lines: list[str] = []
    record_missing_demonstrations(config, robot, tmp_path, lines.append, threading.Event())
    assert lines == [
        "fake-0: recording 12 demonstrations of the scripted expert",
        "fake-0: waiting for the robot: the fake robot dropped out",
    ]
    with Outbox.open(tmp_path / "outbox") as outbox:
        assert len(outbox) >= 12
    record_missing_demonstrations(config, robot, tmp_path, lines.append, threading.Event())
    assert lines[2:] == [
        "fake-0: 12 demonstrations were recorded before, for this run or another one; to record them again, remove the "
        f"file {tmp_path / 'demonstrations'}"
    ]


def test_stop_ends_the_wait_for_a_lost_robot(tmp_path: Path) -> None:
    robot = RobotConfig(name="fake-0", driver="fake", task="reach", options={"faults": {"drop_out_at": 1}})
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=1))
    stop = threading.Event()
    record_missing_demonstrations(
        config, robot, tmp_path, lambda line: stop.set() if "waiting for" in line else None, stop
    )
    assert stop.is_set()


class Countdown(threading.Event):
    """An event that is set after `times` checks."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_stop_discards_the_demonstration_in_progress(tmp_path: Path) -> None:
    robot = RobotConfig(name="fake-0", driver="fake", task="reach")
    config = EdgeConfig(robots=(robot,), demonstrations=DemonstrationConfig(episodes=50))
    record_missing_demonstrations(config, robot, tmp_path, lambda line: None, Countdown(3))
    with Outbox.open(tmp_path / "outbox") as outbox:
        assert len(outbox) == 0, "a discarded demonstration leaves no chunks"


def test_demonstrations_beyond_the_outbox_are_recorded_at_a_later_start(tmp_path: Path) -> None:
    robot = RobotConfig(name="fake-0", driver="fake", task="reach")
    lines: list[str] = []

    def start(episodes: int, max_bytes: int = MAX_BYTES) -> list[tuple[str, bool]]:
        """Records into the outbox; episode of each of its chunks, and whether it is the last."""
        wanted, recorder = DemonstrationConfig(episodes=episodes), RecorderConfig(chunk_steps=1)
        config = EdgeConfig(robots=(robot,), demonstrations=wanted, recorder=recorder)
        object.__setattr__(config.outbox, "max_bytes", max_bytes)  # below the limit of the setting
        record_missing_demonstrations(config, robot, tmp_path, lines.append, threading.Event())
        with Outbox.open(tmp_path / "outbox") as outbox:
            headers = [parse_chunk(each.packet).header for each in outbox.pending()]
        return [(header.episode, header.end is not None) for header in headers]

    two = start(2)
    assert start(3, (len(two) + 1) * BLOCK_BYTES) == two, "no part of the third, of two chunks or more"
    assert lines[-1] == (
        "fake-0: its outbox or the disk is full: 2 of 3 demonstrations are recorded; the next start records the others"
    )
    three = start(3)
    assert three[: len(two)] == two and sum(is_last for _, is_last in three) == 3


def tidying(**settings: object) -> RobotConfig:
    return build(RobotConfig, {"name": "arm", "options": {"cameras": []}, **settings}, "robots.0")


def test_expert_demonstrates_each_of_the_tasks_with_its_sentence(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    robot = tidying(task=["reach", {"name": "lift", "sentence": "take the cube"}])
    recorded = list(record_demonstrations(robot, tmp_path, DemonstrationConfig(8), RecorderConfig(), seed=0))
    assert {episode.task for episode in recorded} == {"reach", "lift"} and all(e.success for e in recorded)
    with StoreReader.open(tmp_path) as reader:
        reader.refresh()
        assert [each.task for each in reader.episodes()] == [each.task for each in recorded]
        texts = set(reader.index.episodes.sentences.names)
    assert texts == {"reach the green target", "take the cube"}


def test_task_that_is_new_at_a_resume_gets_its_share_of_demonstrations(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    recorded: list[str] = []
    for task in ("reach", ["reach", "lift"], ["reach", "lift"]):
        episodes = record_demonstrations(tidying(task=task), tmp_path, DemonstrationConfig(4), RecorderConfig(), seed=0)
        recorded += [episode.task for episode in episodes]
    assert recorded == ["reach"] * 4 + ["lift"] * 2
    seeds = stored(tmp_path).episodes.seed.tolist()
    assert len({*seeds}) == len(seeds) == 6


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("lfit", "robot arm: no task 'lfit'; did you mean 'lift'"),
        (["lift", "lift"], "robot arm: task: 'lift' is named twice"),
        ([], "robot arm: task: the list is empty"),
        ({"name": "lift", "options": {"height": 1}}, "robot arm: the task 'lift': options: height: unknown key"),
        ({"name": "lift", "sentense": "go"}, "robots.0: task.sentense: unknown key; did you mean 'task.sentence'"),
        (["lift", 3], r"robots.0: task.1: expected text, got 3"),
    ],
)
def test_unusable_task_of_a_robot_is_refused_in_one_line(task: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        robot_spec(tidying(task=task))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["reach the goal", "lift/red", "-lift"])
def test_task_whose_episodes_could_not_be_stored_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"robot arm: task: '{name}' is not a name: use letters, .* its sentence"):
        robot_spec(RobotConfig(name="arm", driver="ur", task=name, options={"host": "127.0.0.1"}))


def test_tasks_survive_saving(tmp_path: Path) -> None:
    robot = tidying(task=["lift", {"name": "place", "paraphrase": True}])
    save(robot, tmp_path / "robot.yaml")
    assert load(RobotConfig, tmp_path / "robot.yaml") == robot


def test_demonstrations_are_shared_evenly_among_tasks(tmp_path: Path) -> None:
    robot = RobotConfig(name="panda-0", task=("lift_red", "reach"), options={"cameras": []})
    for episodes in (3, 5):  # the second call continues
        requested = DemonstrationConfig(episodes=episodes)
        list(record_demonstrations(robot, tmp_path, requested, RecorderConfig(), seed=0))
    with StoreReader.open(tmp_path) as reader:
        reader.refresh()
        tasks = [episode.task for episode in reader.episodes()]
    assert sorted(tasks) == ["lift_red"] * 3 + ["reach"] * 2


def test_continued_demonstrations_after_failed_attempts_are_others_than_before(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    for episodes in (4, 8):
        requested = DemonstrationConfig(episodes, noise=0.3)
        list(record_demonstrations(tidying(task="lift"), tmp_path, requested, RecorderConfig(), seed=0))
    with StoreReader.open(tmp_path) as reader:
        reader.refresh()
        seeds = reader.index.episodes.seed
    assert len(seeds) == len({*seeds.tolist()}) >= 8


def test_robots_of_one_run_demonstrate_different_starts() -> None:
    starts = {name: list(itertools.islice(demonstration_seeds(name, 0, 0), 50)) for name in ("left", "right")}
    assert not {*starts["left"]} & {*starts["right"]}


FAKE = RobotConfig(name="arm", driver="fake", task="reach")


def stored(store: Path) -> Index:
    with StoreReader.open(store) as reader:
        reader.refresh()
        return reader.index


@pytest.mark.parametrize("outcome", ["failed", "deleted"])
def test_demonstration_that_no_longer_counts_is_replaced_by_one_from_another_start(
    outcome: str, tmp_path: Path
) -> None:
    for _ in range(2):
        list(record_demonstrations(FAKE, tmp_path, DemonstrationConfig(4), RecorderConfig(), seed=0))
    first, labeller = stored(tmp_path).episodes.ids.names[0], "person"
    if outcome == "failed":
        add_labels(tmp_path, [SuccessLabel(episode=first, labeller=labeller, at_unix_ns=1, success=False)])
    else:
        add_labels(tmp_path, [DeleteLabel(episode=first, labeller=labeller, at_unix_ns=1)])
        compact_store(tmp_path)
    assert len(list(record_demonstrations(FAKE, tmp_path, DemonstrationConfig(4), RecorderConfig(), seed=0))) == 1
    seeds = stored(tmp_path).episodes.seed.tolist()
    assert len({*seeds}) == len(seeds) == (5 if outcome == "failed" else 4)


def test_demonstrations_recorded_apart_are_none_of_the_runs(tmp_path: Path) -> None:
    list(record_demonstrations(FAKE, tmp_path / "run", DemonstrationConfig(2), RecorderConfig(), seed=0))
    save(RunConfig(robots=(FAKE,)), tmp_path / "run.yaml")
    command = ["record", str(tmp_path / "run.yaml"), "--episodes", "2", "--output", str(tmp_path / "apart")]
    assert main(command) == 0
    seeds = [{*stored(tmp_path / name).episodes.seed.tolist()} for name in ("run", "apart")]
    assert len(seeds[0] | seeds[1]) == 4
