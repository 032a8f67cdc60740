"""The report of a run, its numbers and files; and the comparison of runs."""

from __future__ import annotations

import io
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_folder_kit import STARTED_S, episode, make_run, merge_earlier_run

import user_sys.run.evaluate
from hal.camera import CameraFrame as CameraFrame
from hal.errors import HardwareLost
from hal.spec import Array
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.commands.main import main
from user_sys.compose import PolicyConfig, RobotConfig, robot_spec
from user_sys.edge.environment import NO_OUTCOME, TimeStep
from user_sys.errors import ConfigError, RunError
from user_sys.messages import EpisodeReport
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.robot_records import LEARNER, save_robot_record
from user_sys.run.compare import read_variants, success_band
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder, create_run_folder
from user_sys.run.evaluate import (
    evaluate,
    evaluate_and_report,
    load_acting_weights,
    success_by_task,
    video_listener,
)
from user_sys.run.metrics import MetricsWriter
from user_sys.run.report import (
    EpisodePoint,
    RunSummary,
    link_latest,
    moving_success,
    reached,
    training_history,
    wilson_interval,
    write_report,
    write_video,
)
from user_sys.store.labels import DeleteLabel, SuccessLabel
from user_sys.store.store import StoreWriter

Frame = np.ndarray[Any, np.dtype[np.uint8]]
ACTED = SimpleNamespace(version=880, updates=8_800)  # the manifest of the version that acted


def _summary(successes: int = 98, episodes: int = 100) -> RunSummary:
    return RunSummary("demo-1", successes, episodes, 300.04, 18_000, 9_000, 3, seed=1, control_s=360.0)


def _frames(count: int, height: int = 64, width: int = 96) -> list[Frame]:
    return [np.full((height, width, 3), i, np.uint8) for i in range(count)]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_interval_matches_published_values() -> None:
    assert wilson_interval(98, 100) == pytest.approx((0.9300, 0.9945), abs=1e-4)
    assert wilson_interval(100, 100) == pytest.approx((0.9630, 1.0), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson_interval(5, 4)


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 60))
def test_moving_success_is_the_mean_of_the_last_episodes(outcomes: list[bool], window: int) -> None:
    moving = moving_success([EpisodePoint(float(i), ok) for i, ok in enumerate(outcomes)], window)
    assert moving == pytest.approx([np.mean(outcomes[max(0, i + 1 - window) : i + 1]) for i in range(len(outcomes))])


def test_report_is_written_and_printed(tmp_path: Path, console: Console) -> None:
    points = [EpisodePoint(3.0 * i, i > 40, assisted=i % 30 == 0) for i in range(100)]
    write_report(tmp_path, _summary(), points, console)
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {"success": 0.98, "episodes": 100, "ci95": [0.93, 0.9945], "training_s": 300.0, "env_steps": 18_000}
    assert summary.items() >= {**expected, "updates": 9_000, "interventions": 3, "seed": 1}.items()
    assert summary["version"] and summary["successes_per_hour"] == 980.0
    assert summary["autonomous"] == {"episodes": 96, "successes": 57, "ci95": [0.4937, 0.6865]}
    assert summary["assisted"] == {"episodes": 4, "successes": 2}
    cut_off = [EpisodePoint(301.0, None), EpisodePoint(302.0, None, assisted=True)]
    write_report(tmp_path, _summary(), [*points, *cut_off], console)
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again["autonomous"] == summary["autonomous"] and again["assisted"] == {"episodes": 5, "successes": 2}
    png = (tmp_path / "success.png").read_bytes()
    assert png.startswith(b"\x89PNG") and struct.unpack(">II", png[16:24]) == (1200, 675)
    assert isinstance(console.file, io.StringIO)
    printed = " ".join(console.file.getvalue().split())
    assert "98.0% (95% interval 93.0% to 99.4%)" in printed and "2 of 4 succeeded" in printed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["success.png", "summary.json"]  # nothing half-written


def test_run_that_ended_early_has_a_report(tmp_path: Path, console: Console) -> None:
    write_report(tmp_path, _summary(0, 0), [], console)
    assert json.loads((tmp_path / "summary.json").read_text())["success"] is None
    assert math.isnan(_summary(0, 0).success)


@pytest.mark.parametrize("size", [(64, 96), (65, 97)])
def test_video_is_playable_in_browsers(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "evaluation.mp4"
    write_video(path, _frames(25, *size), fps=10)
    with av.open(str(path)) as video:
        stream = video.streams.video[0]
        shades = [float(frame.to_ndarray(format="rgb24").mean()) for frame in video.decode(stream)]
        assert (stream.codec.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 10)
        assert (stream.height, stream.width) == (size[0] + size[0] % 2, size[1] + size[1] % 2)
    assert shades == pytest.approx(list(range(25)), abs=2)
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # plays while it is still loading
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.mp4"]


def test_failed_video_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.mp4"
    path.write_bytes(b"old")
    with pytest.raises(ValueError):
        write_video(path, [np.zeros((64, 96, 3), np.uint8), np.zeros((4, 4), np.uint8)], fps=10)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.mp4"]


def test_run_without_evaluation_reports_its_counts(tmp_path: Path, console: Console) -> None:
    """Also without a policy: a real robot is not to be let go alone when its training is over."""
    robot = RobotConfig(name="left", driver="fake", task="reach")
    config = RunConfig(robots=(robot,), evaluation=EvaluationConfig(episodes=0))
    assert evaluate_and_report(config, RunFolder(tmp_path), _summary(0, 0), console) == _summary(0, 0)
    assert json.loads((tmp_path / "summary.json").read_text())["success"] is None


@pytest.mark.parametrize("broken", ["filming", "writing", "interrupted"])
def test_evaluation_counts_without_its_films(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    robot = RobotConfig(name="left", driver="fake", task="reach")
    message = io.StringIO()
    report = EpisodeReport(
        robot="left", episode="", source="evaluation", steps=10, success=True, intervention_steps=0, policy_version=1
    )

    def run_evaluation(*args: object) -> tuple[list[EpisodeReport], list[Frame], SimpleNamespace]:
        if broken == "filming" and args[-1] == [2]:  # the failure again
            raise HardwareLost("the camera cannot be opened")
        if broken == "interrupted" and args[-1] == [2]:
            raise KeyboardInterrupt
        reports = [msgspec.structs.replace(report, success=each) for each in (True, True, False)]
        return reports, _frames(1, 64, 64), ACTED

    def write_video(*args: object) -> None:
        if broken == "writing":
            raise RunError("the disk is full")

    monkeypatch.setattr(user_sys.run.evaluate, "robots_to_evaluate", lambda config, folder: {LEARNER: robot})
    monkeypatch.setattr(user_sys.run.evaluate, "run_evaluation", run_evaluation)
    monkeypatch.setattr(user_sys.run.evaluate, "write_video", write_video)
    config, console = RunConfig(robots=(robot,)), Console(file=message, width=500)
    summary = evaluate_and_report(config, RunFolder(tmp_path), _summary(0, 0), console)
    assert (summary.successes, summary.episodes) == (2, 3)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["episodes"], written["policy_version"], written["policy_updates"]) == (3, 880, 8_800)
    assert "880 (after 8,800 updates)" in message.getvalue()
    reason = {"filming": "the camera cannot", "writing": "the disk", "interrupted": "interrupted"}[broken]
    assert f"the films of left are incomplete: {reason}" in message.getvalue()


@pytest.mark.parametrize("interrupted", ["films", "second", "first"])
def test_interrupt_ends_the_evaluation_and_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    robot, asked = RobotConfig(name="left", driver="fake", task="reach"), list[str]()
    report = EpisodeReport(
        robot="left", episode="", source="evaluation", steps=10, success=False, intervention_steps=0, policy_version=1
    )

    def run_evaluation(
        config: RunConfig, folder: RunFolder, total: int, console: Console, learner: str, robot: object, *failed: object
    ) -> tuple[list[EpisodeReport], list[Frame], SimpleNamespace]:
        asked.append("films" if failed else {LEARNER: "first", "learner-b": "second"}.get(learner, "third"))
        if asked[-1] == interrupted:
            raise KeyboardInterrupt
        return [report] * 3, [], ACTED

    learners = {LEARNER: robot, "learner-b": robot, "learner-c": robot}
    monkeypatch.setattr(user_sys.run.evaluate, "robots_to_evaluate", lambda config, folder: learners)
    monkeypatch.setattr(user_sys.run.evaluate, "run_evaluation", run_evaluation)
    config, console = RunConfig(robots=(robot,)), Console(file=io.StringIO())
    if interrupted == "first":
        with pytest.raises(KeyboardInterrupt):
            evaluate_and_report(config, RunFolder(tmp_path), _summary(0, 0), console)
        return
    assert evaluate_and_report(config, RunFolder(tmp_path), _summary(0, 0), console).episodes == 3
    assert json.loads((tmp_path / "summary.json").read_text())["episodes"] == 3 and asked[-1] == interrupted


def test_evaluation_of_the_next_learner_counts_while_no_robot_has_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot, folder = RobotConfig(name="left", driver="fake", task="reach"), RunFolder(tmp_path)
    for spec in (msgspec.structs.replace(robot_spec(robot), gripper=-1), robot_spec(robot)):
        save_robot_record(folder.robots, "left", spec)  # it was corrected
    report = EpisodeReport(
        robot="left", episode="", source="evaluation", steps=10, success=True, intervention_steps=0, policy_version=1
    )
    monkeypatch.setattr(user_sys.run.evaluate, "run_evaluation", lambda *args: ([report] * 3, [], ACTED))
    config, console = RunConfig(robots=(robot,)), Console(file=io.StringIO())
    summary = evaluate_and_report(config, folder, _summary(0, 0), console)
    assert (summary.successes, summary.episodes) == (3, 3)


def test_learner_without_weights_leaves_the_summary_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robots = [RobotConfig(name=name, driver="fake", task="reach") for name in ("left", "right")]
    report = EpisodeReport(
        robot="left", episode="", source="evaluation", steps=10, success=True, intervention_steps=0, policy_version=1
    )

    def run_evaluation(
        config: RunConfig, folder: RunFolder, total: int, console: Console, learner: str, robot: object, *failed: object
    ) -> tuple[list[EpisodeReport], list[Frame], SimpleNamespace]:
        if learner != LEARNER or first_fails:
            load_acting_weights(folder, learner)
        return [report] * 3, [], ACTED

    learners = dict(zip((LEARNER, "learner-b"), robots, strict=True))
    monkeypatch.setattr(user_sys.run.evaluate, "robots_to_evaluate", lambda config, folder: learners)
    monkeypatch.setattr(user_sys.run.evaluate, "run_evaluation", run_evaluation)
    config, message, first_fails = RunConfig(robots=tuple(robots)), io.StringIO(), False
    console = Console(file=message, width=500)
    assert evaluate_and_report(config, RunFolder(tmp_path), _summary(0, 0), console).episodes == 3
    assert json.loads((tmp_path / "summary.json").read_text())["episodes"] == 3
    assert "right is not evaluated: " in message.getvalue()
    assert "learner-b has published no weights" in message.getvalue()
    first_fails = True
    with pytest.raises(RunError, match="learner has published no weights"):
        evaluate_and_report(config, RunFolder(tmp_path), _summary(0, 0), console)


def test_task_that_a_person_judges_needs_a_person() -> None:
    """Nobody else can judge its episodes: all of them would count as failures."""
    robot = RobotConfig(name="arm", driver="ur", task="tidy", options={"host": "192.0.2.1"})
    for judged in (robot, replace(robot, task=("sort", "tidy"))):
        with pytest.raises(ConfigError, match="^robot arm: a person judges its task: "):
            next(evaluate(judged, PolicyConfig(), {}, EvaluationConfig(), lambda _: None))


def test_real_robot_is_not_evaluated_without_a_person(tmp_path: Path) -> None:
    message = io.StringIO()
    config = RunConfig(robots=(RobotConfig(name="arm", driver="ur", task="tidy", real_time=True),))
    folder = RunFolder(tmp_path)
    assert evaluate_and_report(config, folder, _summary(0, 0), Console(file=message, width=500)) == _summary(0, 0)
    assert "not evaluated without a person who stands by: arm; with an e-stop within reach: " in message.getvalue()
    assert f"user-sys evaluate {tmp_path} --robot NAME" in message.getvalue()


def test_simulated_robot_whose_task_is_not_evaluated_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"a": "reach", "b": "far", "c": "reach"}
    robots = [RobotConfig(name=name, driver="fake", task=task) for name, task in tasks.items()]
    report = EpisodeReport(
        robot="a", episode="", source="evaluation", steps=10, success=True, intervention_steps=0, policy_version=1
    )
    save_robot_record(RunFolder(tmp_path).robots, "a", robot_spec(robots[0]))
    monkeypatch.setattr(user_sys.run.evaluate, "run_evaluation", lambda *args: ([report] * 3, [], ACTED))
    config, message = RunConfig(robots=tuple(robots)), io.StringIO()
    evaluate_and_report(config, RunFolder(tmp_path), _summary(0, 0), Console(file=message, width=500))
    assert f"not evaluated: b (far); user-sys evaluate {tmp_path} --robot NAME" in message.getvalue()


def test_video_frame_joins_the_newest_picture_of_each_camera() -> None:
    film: list[Array] = []
    show = video_listener(film.append, 2)
    red, blue = (CameraFrame(np.full((2, 2, 3), grey, np.uint8), 0) for grey in (9, 5))
    for frames in ({"a": red}, {"b": blue}, {}, {"a": blue}):
        show(TimeStep({}, frames, 0, None, 0, 0, NO_OUTCOME, 0, False), None)
    assert [(picture[0, 0, 0], picture[0, 2, 0]) for picture in film] == [(9, 5), (5, 5)]


def test_film_lasts_as_long_as_its_episodes() -> None:
    robot, film = RobotConfig(name="left", driver="fake", task="reach", options={"cameras": ["front"]}), list[Array]()
    policy = MlpPolicy.make_module(robot_spec(robot), settings=MlpSettings((8,)))
    config = EvaluationConfig(episodes=3, video_episodes=2)
    reports = list(evaluate(robot, PolicyConfig(), policy_arrays(policy), config, film.append))
    assert robot.picture_stride > 1 and len(film) == sum(report.steps for report in reports[:2])


def test_video_frame_of_cameras_of_other_heights_shows_all_of_each() -> None:
    film: list[Array] = []
    show = video_listener(film.append, 2)
    low, high = (CameraFrame(np.full((height, 3, 3), 9, np.uint8), 0) for height in (2, 4))
    show(TimeStep({}, {"a": low, "b": high}, 0, None, 0, 0, NO_OUTCOME, 0, False), None)
    assert film[0].shape == (4, 6, 3) and film[0][:, 3:].all() and film[0][:2].all() and not film[0][2:, :3].any()


def test_latest_links_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link = link_latest(tmp_path / name)
        assert link.resolve() == (tmp_path / name).resolve()
    assert link.readlink() == Path("b")  # relative: the runs folder can be moved


def test_latest_does_not_replace_a_folder(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(RunError, match="not a link"):
        link_latest(tmp_path / "a")


def test_evaluation_of_several_tasks_reports_each(tmp_path: Path, console: Console) -> None:
    base = EpisodeReport(
        robot="",
        episode="",
        source="evaluation",
        steps=9,
        success=True,
        intervention_steps=0,
        episode_return=0.0,
        policy_version=1,
    )
    outcomes = (("lift", True), ("lift", False), ("peg", True))
    done = [msgspec.structs.replace(base, success=won, task=task) for task, won in outcomes]
    assert success_by_task(done[2:]) == {}
    summary = replace(_summary(2, 3), tasks=success_by_task(done))
    write_report(tmp_path, summary, [], console)
    assert json.loads((tmp_path / "summary.json").read_text())["tasks"] == {"lift": [1, 2], "peg": [1, 1]}
    assert "success, lift" in console.file.getvalue() and "50.0%" in console.file.getvalue()  # type: ignore[attr-defined]


def test_history_places_episodes_in_training_time_and_follows_labels(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [False] * 30 + [True] * 70)
    with StoreWriter.open(folder.store) as writer:
        writer.append(episode("9999", 150.0, True, assisted=True))
        writer.append_label(SuccessLabel(episode="0099", labeller="ann", at_unix_ns=1, success=False))
        writer.append_label(DeleteLabel(episode="0000", labeller="ann", at_unix_ns=2))
        writer.sync()
    history = training_history(folder)
    assert len(history) == 100 and history[0] == EpisodePoint(0.0, False)
    assert history[58].training_s == 0.0 and history[58].updates <= 1, "before the learner began"
    assert history[79] == EpisodePoint(pytest.approx(20.0), True, updates=201)
    assert history[98].success is False, "the label counts"
    assert history[99] == EpisodePoint(pytest.approx(90.0), True, assisted=True, updates=901)


def test_history_of_a_learner_that_began_again_adds_up(tmp_path: Path, console: Console) -> None:
    folder, _ = create_run_folder(RunConfig(runs=tmp_path), "run", "tcp://127.0.0.1:5000")
    with StoreWriter.open(folder.store) as writer:
        for second in range(160):
            writer.append(episode(f"{second:04d}", second, second < 110))
        writer.sync()
    with MetricsWriter(folder.path, "run") as run, MetricsWriter(folder.path, "learner") as learner:
        for second in range(0, 161, 10):
            run.write(0, {"elapsed_s": second}, STARTED_S + second)
            trained_s = second if second <= 100 else second - 110
            learner.write(2 * trained_s, {"training_s": trained_s, "waited_s": 0.0}, STARTED_S + second)
    history = training_history(folder)
    write_report(folder.path, _summary(), history, console)
    counted = json.loads((folder.path / "summary.json").read_text())["autonomous"]
    assert (counted["episodes"], counted["successes"]) == (100, 50), "the newest by time"
    assert [point.success for point in history] == [True] * 110 + [False] * 50
    assert history[-1].training_s == pytest.approx(149.0) and history[-1].updates == 298


def test_newest_episodes_are_those_of_a_learner_that_joined_late(tmp_path: Path, console: Console) -> None:
    early = [EpisodePoint(100.0 + number, True, number=number) for number in range(100)]
    late = [EpisodePoint(number, False, number=100 + number) for number in range(100)]
    write_report(tmp_path, _summary(), [*late, *early], console)
    assert json.loads((tmp_path / "summary.json").read_text())["autonomous"]["successes"] == 0


def test_history_keeps_its_order_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """An hour back after 100 s of training, and 2 s back after 160 s."""
    folder, _ = create_run_folder(RunConfig(runs=tmp_path), "run", "tcp://127.0.0.1:5000")

    def clock_s(second: int) -> int:
        return second - 3600 * (second > 100) - 2 * (second > 160)

    seconds = (50, 90, 110, 150, 170, 199)
    with StoreWriter.open(folder.store) as writer:
        for second in seconds:
            writer.append(episode(f"{second:04d}", clock_s(second), second > 100))
        writer.sync()
    with MetricsWriter(folder.path, "run") as metrics:
        for second in range(0, 201, 5):
            metrics.write(0, {"elapsed_s": second}, STARTED_S + clock_s(second))
    with MetricsWriter(folder.path, "learner") as metrics:
        for second in range(0, 201, 5):
            metrics.write(2 * second, {"training_s": second, "waited_s": 0.0}, STARTED_S + clock_s(second))
    history = training_history(folder)
    assert [point.training_s for point in history] == pytest.approx(seconds)
    assert [point.updates for point in history] == [2 * second for second in seconds]


def test_history_leaves_out_episodes_that_were_merged_from_an_earlier_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [False] * 90 + [True] * 10)
    merge_earlier_run(folder)
    history = training_history(folder)
    assert len(history) == 100 and reached(history, 0.9, 50) is None
    assert read_variants([folder.path])[0].as_json(0.9)["reached"]["runs"] == 0


def test_history_has_the_episodes_of_a_robot_whose_clock_is_behind(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [True])
    with StoreWriter.open(folder.store) as writer:
        writer.append(episode("behind", -120.0, True))
        writer.sync()
    assert len(training_history(folder)) == 2


def test_history_of_a_run_that_has_recorded_nothing_is_empty(tmp_path: Path) -> None:
    folder, _ = create_run_folder(RunConfig(runs=tmp_path), "run", "tcp://127.0.0.1:5000")
    assert training_history(folder) == []


def test_success_is_reached_by_whole_windows_of_autonomous_episodes() -> None:
    points = [EpisodePoint(float(n), n >= 10, assisted=n == 12, updates=2 * n) for n in range(40)]
    found = reached(points, 0.9, 10)
    assert found is not None and (found.training_s, found.episodes, found.updates) == (19.0, 20, 38)
    assert reached(points[:5], 0.1, 10) is None and reached(points[10:20], 0.9, 10) is None
    cut_off = reached([EpisodePoint(0.0, None), *points], 0.9, 10)
    assert cut_off is not None and (cut_off.training_s, cut_off.episodes) == (19.0, 21)


def test_compare_groups_seeds_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = [make_run(tmp_path, f"fast-seed{n}", [False] * (30 + 10 * n) + [True] * 70, seed=n) for n in range(3)]
    other = make_run(tmp_path, "slow", [False] * 100, utd=1.0)
    plot = tmp_path / "plot.png"
    argv = ["compare", *(str(run.path) for run in (*seeds, other)), "--output", str(plot)]
    assert main([*argv, "--json"]) == 0
    fast, slow = json.loads(capsys.readouterr().out)["variants"]
    assert (fast["name"], len(fast["runs"]), fast["success"], fast["episodes"]) == ("fast", 3, 1.0, 60)
    assert fast["successes_per_hour"] == 2000.0 and fast["ci95"][0] == pytest.approx(0.94, abs=0.01)
    assert fast["reached"]["episodes"] == [75, 85, 95] and fast["reached"]["training_s"] == [14.0, 24.0, 34.0]
    assert fast["reached"]["updates"] == [141, 241, 341]
    assert (slow["name"], slow["success"], slow["reached"]["runs"]) == ("slow", 0.0, 0)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(argv) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 of 3" in text and "0 of 1" in text and str(plot.name) in text


def test_compare_groups_seeds_that_ran_side_by_side_with_robots_of_other_names(tmp_path: Path) -> None:
    robots = [(RobotConfig(name=f"panda-{n}"),) for n in range(4)]
    seeds = [RunConfig(name=f"a-{n}", seed=n, robots=robots[n], remote_robots=robots[n + 2]) for n in range(2)]
    other = replace(seeds[0], robots=(RobotConfig(name="panda-0", task="reach"),))
    runs = [create_run_folder(replace(c, runs=tmp_path), f"{n}", "tcp://h:1")[0] for n, c in enumerate((*seeds, other))]
    assert [len(variant.runs) for variant in read_variants([run.path for run in runs])] == [2, 1]


def test_compare_names_a_run_whose_store_lacks_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "run", [False] * 30 + [True] * 70)
    with StoreWriter.open(run.store) as writer:
        for number in range(30):
            writer.append_label(DeleteLabel(episode=f"{number:04d}", labeller="retention", at_unix_ns=1))
        writer.sync()
    with MetricsWriter(run.path, "run") as metrics:
        metrics.write(0, {"elapsed_s": 100.0, "episodes": 100}, STARTED_S + 100)
    argv = ["compare", str(run.path), "--output", str(tmp_path / "plot.png")]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variants"][0]["missing_episodes"] == [30]
    assert main(argv) == 0
    assert "30 of its 100 episodes are not in its store" in " ".join(capsys.readouterr().out.split())


def test_compare_refuses_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    run = make_run(tmp_path, "run", [True])
    (run.path / "summary.json").write_text("{")
    assert main(["compare", str(run.path), "--output", str(tmp_path / "x.png")]) == 2
    assert "summary.json cannot be read" in capsys.readouterr().err


def test_run_that_has_ended_counts_with_its_last_success_in_the_band() -> None:
    done = np.array([0.0, 1.0]), np.array([0.0, 1.0]), np.array([1, 2])
    slow = np.array([0.0, 3.0]), np.array([0.0, 0.5]), np.array([1, 2])
    minutes, low, middle, high = success_band([done, slow])
    assert minutes[-1] == 3.0 and (low[-1], middle[-1], high[-1]) == (50.0, 75.0, 100.0)
