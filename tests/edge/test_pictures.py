"""Policies that read pictures: in a session, in a policy server next to it, and in an evaluation."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_kit import END_S, error_lines, until
from session_kit import ROBOT, Site

from hal.camera import CameraFrame
from hal.spec import ENVIRONMENT_STATE, STATE, Array
from robots.fake import FakeRobotConfig, fake_spec
from user_sys.compose import PolicyConfig, RobotConfig, check_pictures, policy_location
from user_sys.edge.agents import NewestFrames
from user_sys.edge.environment import NO_OUTCOME, TimeStep
from user_sys.errors import ConfigError, PolicyUnavailable
from user_sys.messages import StopRun
from user_sys.run.config import EvaluationConfig
from user_sys.run.evaluate import evaluate
from user_sys.run.prepare import CONSOLE

MODULE = """
import time
from dataclasses import dataclass

import numpy as np

from hal.spec import IMAGES
from robots.fake import GRIPPER_M, HALF_RANGE_M, STEP_M
from user_sys.policies.policy import AGE_SUFFIX, ActionChunk, TrainablePolicy

@dataclass(frozen=True)
class Settings:
    cameras: tuple[str, ...] = ()
    delay_s: float = 0.0
    shape: tuple[int, ...] = ()

class Pixels(TrainablePolicy):
    "Acts without weights: towards the goal in the picture, at its height."
    settings = Settings
    acts_without_torch = True

    def __init__(self, spec, *, settings=None, features=(), seed=0, device="cpu"):
        self._settings = settings or Settings()
        self.cameras = self.select_cameras(spec, self._settings)

    def act(self, observation, sentence, *, deterministic, context=None):
        time.sleep(self._settings.delay_s)
        picture = observation[IMAGES + self.cameras[0]]
        age_s = observation[IMAGES + self.cameras[0] + AGE_SUFFIX]
        assert age_s.shape == (1,) and age_s.dtype == np.float32 and age_s[0] >= 0
        assert self._settings.shape in ((), picture.shape), picture.shape
        places = [np.argwhere(picture[:, :, channel] == 255) for channel in (0, 1)]
        point, goal = (place.mean(0)[::-1] if len(place) else np.zeros(2) for place in places)
        step = np.clip((goal - point) / (picture.shape[0] - 1) * 2 * HALF_RANGE_M, -STEP_M, STEP_M)
        return ActionChunk(np.array([[*step, 0, GRIPPER_M]], np.float32), np.full(1, np.nan, np.float32))

    def load(self, weights):
        pass

    @classmethod
    def make_module(cls, spec, *, settings=None, features=()):
        raise NotImplementedError

class TorchPixels(Pixels):
    acts_without_torch = False

    def act(self, observation, sentence, *, deterministic, context=None):
        import torch
        return super().act(observation, sentence, deterministic=deterministic, context=context)
"""
ENTRY_POINTS = "[user_sys.policies]\npixels = pixels_package:Pixels\ntorch_pixels = pixels_package:TorchPixels\n"


def install_pixel_policies(folder: Path) -> None:
    """Makes `folder`, on the path of modules, offer the policies ``pixels`` and ``torch_pixels``."""
    installed = folder / "pixels_package-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pixels-package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "pixels_package.py").write_text(MODULE)


SPEC = fake_spec(FakeRobotConfig(cameras=("front", "wrist"), image_size=8))
SEEING = replace(ROBOT, frame_stride=1, options={"cameras": ["front"], "image_size": 64})


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    install_pixel_policies(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def time_step(captured_ms: int, **frames_ms: int) -> TimeStep:
    frames = {name: CameraFrame(np.full((8, 8, 3), ms % 256, np.uint8), ms * 10**6) for name, ms in frames_ms.items()}
    return TimeStep({STATE: np.zeros(7, np.float32)}, frames, captured_ms * 10**6, None, 0, 0, NO_OUTCOME, 0, False)


def test_policy_sees_the_newest_frame_of_its_cameras_and_its_age() -> None:
    frames = NewestFrames(SPEC)
    for step in (time_step(100, front=90, wrist=80), time_step(200, wrist=210)):
        frames.update(step)
    seen = frames.observation(step, ("front", "wrist"))
    assert (seen["observation.images.front"] == 90).all() and (seen["observation.images.wrist"] == 210).all()
    assert seen["observation.images.front.age"].dtype == np.float32
    assert seen["observation.images.front.age"] == pytest.approx([0.11])
    assert seen["observation.images.wrist.age"] == [0.0], "it was captured after the other sensors"
    assert set(frames.observation(step, ())) == {STATE}


def test_robot_holds_without_a_frame_or_with_an_old_one() -> None:
    frames = NewestFrames(SPEC)
    frames.update(time_step(0, front=0))
    with pytest.raises(PolicyUnavailable, match="^camera wrist has delivered no frame in this episode; the"):
        frames.observation(time_step(10), ("front", "wrist"))
    assert frames.observation(time_step(500), ("front",))
    with pytest.raises(PolicyUnavailable, match="camera front is 0.501 s old, and 0.5 s is the limit; the"):
        frames.observation(time_step(501), ("front",))
    frames.begin_episode()
    with pytest.raises(PolicyUnavailable, match="front has delivered no frame"):
        frames.observation(time_step(501), ("front",))


@pytest.mark.parametrize(
    ("robot", "policy", "problem"),
    [
        ({"frame_stride": 5}, {}, "robot fake-0: frame_stride is 5, but the policy pixels reads pictures in each"),
        ({}, {"options": {"cameras": ["frnt"]}}, "robot fake-0: .* has no camera 'frnt'; did you mean 'front'"),
        ({"options": {}}, {}, "robot fake-0: the policy reads pictures, and fake has no camera; add one"),
        ({"options": {"cameras": ["front"], "image_size": 1500}}, {"location": "server"}, "have 6750000 bytes, and a"),
        ({}, {"kind": "pixel"}, "policy.kind: no policy 'pixel'; did you mean 'pixels'"),
    ],
)
def test_robot_that_cannot_give_the_pictures_is_refused(
    robot: dict[str, Any], policy: dict[str, Any], problem: str
) -> None:
    check_pictures(PolicyConfig(kind="pixels"), SEEING)
    with pytest.raises(ConfigError, match=problem) as caught:
        check_pictures(PolicyConfig(**{"kind": "pixels", **policy}), replace(SEEING, **robot))
    assert "\n" not in str(caught.value)


def test_robot_that_follows_the_clock_takes_each_picture() -> None:
    check_pictures(PolicyConfig(kind="pixels"), replace(SEEING, frame_stride=5, real_time=True))


def test_policy_without_torch_acts_in_the_session_and_any_other_in_a_server() -> None:
    for settings, location in (
        ({}, "edge"),
        ({"kind": "pixels"}, "edge"),
        ({"kind": "pixels", "location": "server"}, "server"),
        ({"kind": "torch_pixels"}, "server"),
        ({"device": "cuda"}, "server"),
        ({"kind": "not_installed_here", "endpoint": "tcp://a:1"}, "server"),
    ):
        assert policy_location(PolicyConfig(**settings)) == location  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="policy.location is edge, but the policy torch_pixels acts with torch"):
        policy_location(PolicyConfig(kind="torch_pixels", location="edge"))


def test_evaluation_shows_the_pictures_of_training_and_films_others() -> None:
    """The policy refuses pictures of another shape."""
    pytest.importorskip("mujoco")
    film: list[Array] = []
    size = {"cameras": ["front"], "image_height": 32, "image_width": 48}
    robot = RobotConfig(name="arm", task="reach", frame_stride=1, options=size)
    policy = PolicyConfig(kind="pixels", options={"shape": [32, 48, 3]})
    results = list(evaluate(robot, policy, {}, EvaluationConfig(episodes=2, video_episodes=1), film.append))
    assert [result.steps for result in results] == [30, 30]
    assert {picture.shape for picture in film} == {(256, 256, 3)} and len(film) == 30


@pytest.mark.usefixtures("runtime")
def test_session_and_slow_policy_server_act_on_pictures(tmp_path: Path) -> None:
    """The server takes two and a half control periods for an action, and no session of a simulated robot minds."""
    policy = PolicyConfig(kind="torch_pixels", device="cpu", options={"delay_s": 0.25})
    with ExitStack() as stack:
        site = Site(tmp_path, stack, robots=(SEEING,), policy=policy)
        site.gateway()
        driver, server, session = site.driver(), site.policy(), site.session()
        console = site.client(CONSOLE)
        until(lambda: sum(chunk.header.steps for chunk in site.chunks()) > 0, "experience arrives")
        assert "libtorch" in Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{session.process.pid}/maps").read_text()
        console.send(StopRun(reason="the test is over"))
        assert session.process.wait(END_S) == 0
        assert error_lines(session.log) == []
        after_start = session.log.partition("session.policy_available")[2]
        assert "session.policy_unavailable" not in after_start
    for chunk in site.chunks():
        way = chunk.columns[ENVIRONMENT_STATE][:, 3:5]
        moved = chunk.columns["action"][:, :2]
        assert (np.abs(moved - np.clip(way, -0.1, 0.1)) < 0.03).all(), "towards the goal, as the picture shows it"
        assert not chunk.columns["truncated"][:-1].any() and driver.log.count("watchdog.hold") <= 1
