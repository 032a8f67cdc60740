"""The report of a run: its numbers and files."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hal.camera import CameraFrame as CameraFrame
from hal.spec import Array
from user_sys.compose import RobotConfig
from user_sys.edge.environment import NO_OUTCOME, TimeStep
from user_sys.errors import RunError
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder
from user_sys.run.evaluate import evaluate_and_report, video_listener
from user_sys.run.report import (
    EpisodePoint,
    RunSummary,
    link_latest,
    moving_success,
    read_summary,
    wilson_interval,
    write_report,
    write_video,
)

Frame = np.ndarray[Any, np.dtype[np.uint8]]


def _summary(successes: int = 98, episodes: int = 100) -> RunSummary:
    return RunSummary("demo-1", successes, episodes, 300.04, 18_000, 9_000, 3, seed=1)


def _frames(count: int, height: int = 64, width: int = 96) -> Iterator[Frame]:
    for i in range(count):
        yield np.full((height, width, 3), i, np.uint8)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_interval_matches_published_values() -> None:
    assert wilson_interval(98, 100) == pytest.approx((0.9300, 0.9945), abs=1e-4)
    assert wilson_interval(100, 100) == pytest.approx((0.9630, 1.0), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson_interval(5, 4)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_contains_the_share(case: tuple[int, int]) -> None:
    low, high = wilson_interval(*case)
    assert 0.0 <= low <= case[0] / case[1] <= high <= 1.0


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 60))
def test_moving_success_is_the_mean_of_the_last_episodes(outcomes: list[bool], window: int) -> None:
    moving = moving_success([EpisodePoint(float(i), ok) for i, ok in enumerate(outcomes)], window)
    assert moving == pytest.approx([np.mean(outcomes[max(0, i + 1 - window) : i + 1]) for i in range(len(outcomes))])


def test_report_is_written_and_printed(tmp_path: Path, console: Console) -> None:
    points = [EpisodePoint(3.0 * i, i > 40, intervened=i % 30 == 0) for i in range(100)]
    write_report(tmp_path, _summary(), points, console)
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {"success": 0.98, "episodes": 100, "ci95": [0.93, 0.9945], "training_s": 300.0, "env_steps": 18_000}
    assert summary.items() >= {**expected, "updates": 9_000, "interventions": 3, "seed": 1}.items()
    assert summary["version"] and read_summary(tmp_path) == summary
    png = (tmp_path / "success.png").read_bytes()
    assert png.startswith(b"\x89PNG") and struct.unpack(">II", png[16:24]) == (1200, 675)
    assert isinstance(console.file, io.StringIO)
    assert "98.0% (95% interval 93.0% to 99.4%)" in console.file.getvalue()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["success.png", "summary.json"]  # nothing half-written


def test_run_that_ended_early_has_a_report(tmp_path: Path, console: Console) -> None:
    write_report(tmp_path, _summary(0, 0), [], console)
    assert read_summary(tmp_path)["success"] is None
    assert math.isnan(_summary(0, 0).success)


def test_missing_summary_raises(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="summary.json"):
        read_summary(tmp_path)


def test_unwritable_report_raises(tmp_path: Path, console: Console) -> None:
    with pytest.raises(RunError, match="cannot be written"):
        write_report(tmp_path / "absent", _summary(), [], console)


@pytest.mark.parametrize("size", [(64, 96), (65, 97)])
def test_video_is_playable_in_browsers(tmp_path: Path, size: tuple[int, int]) -> None:
    from imageio_ffmpeg import count_frames_and_secs, read_frames

    path = tmp_path / "evaluation.mp4"
    assert write_video(path, _frames(25, *size), fps=10) == 25
    reader = read_frames(str(path))
    about = next(reader)
    reader.close()
    assert (about["codec"], about["size"]) == ("h264", (size[1] + size[1] % 2, size[0] + size[0] % 2))
    assert about["pix_fmt"].startswith("yuv420p")
    assert count_frames_and_secs(str(path))[0] == 25
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # plays while it is still loading
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.mp4"]


def test_failed_video_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.mp4"
    path.write_bytes(b"old")
    unlike = [np.zeros((64, 96, 3), np.uint8), np.zeros((32, 96, 3), np.uint8)]
    for frames, message in (([], "no frames"), (unlike, "frame 2"), ([np.zeros((4, 4), np.uint8)], "uint8")):
        with pytest.raises(RunError, match=message):
            write_video(path, frames, fps=10)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.mp4"]


def test_run_without_evaluation_reports_its_counts(tmp_path: Path, console: Console) -> None:
    """Also without a policy: a real robot is not to be let go alone when its training is over."""
    robot = RobotConfig(name="left", driver="fake", task="reach")
    config = RunConfig(robots=(robot,), evaluation=EvaluationConfig(episodes=0))
    assert evaluate_and_report(config, RunFolder(tmp_path), [], _summary(0, 0), console) == _summary(0, 0)
    assert read_summary(tmp_path)["success"] is None


def test_real_robot_is_not_evaluated_without_a_person(tmp_path: Path) -> None:
    message = io.StringIO()
    config = RunConfig(robots=(RobotConfig(name="arm", driver="ur", task="tidy", real_time=True),))
    folder = RunFolder(tmp_path)
    assert evaluate_and_report(config, folder, [], _summary(0, 0), Console(file=message, width=500)) == _summary(0, 0)
    assert "not evaluated without a person who stands by: arm; with an e-stop within reach: " in message.getvalue()
    assert f"user-sys evaluate {tmp_path} --robot NAME" in message.getvalue()


def test_video_frame_joins_the_newest_picture_of_each_camera() -> None:
    film: list[Array] = []
    show = video_listener(film.append, 2)
    red, blue = (CameraFrame(np.full((2, 2, 3), grey, np.uint8), 0) for grey in (9, 5))
    for frames in ({"a": red}, {"b": blue}, {}, {"a": blue}):
        show(TimeStep({}, frames, 0, None, 0, 0, NO_OUTCOME, 0, False), None)
    assert [(picture[0, 0, 0], picture[0, 2, 0]) for picture in film] == [(9, 5), (5, 5)]


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
