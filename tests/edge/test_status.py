"""A session's status reports, safety counts and camera previews."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edge_kit import until

from hal.safety import SafetyReason
from hal.task import TaskOutcome
from user_sys.compose import RobotConfig, robot_spec
from user_sys.edge.control_authority import ControlAuthority
from user_sys.edge.environment import NO_OUTCOME, TimeStep
from user_sys.edge.outbox import Outbox
from user_sys.edge.recorder import SelectedAction
from user_sys.edge.status import PreviewEncoder, SafetyCounter, StatusPublisher
from user_sys.episode import Phase
from user_sys.messages import ControlMessage, Preview, RobotStatus


def picture(camera: str, step: int) -> Preview:
    return Preview(robot="r", camera=camera, step=step)


def test_preview_encoder_keeps_the_newest_image_of_each_camera() -> None:
    sent: list[tuple[str, int]] = []
    release = threading.Event()

    def send(preview: Preview, jpeg: bytes) -> None:
        assert jpeg.startswith(b"\xff\xd8")
        sent.append((preview.camera, preview.step))
        assert release.wait(60)

    frame = np.zeros((16, 16, 3), np.uint8)
    with PreviewEncoder(send) as previews:
        previews.submit(picture("front", 0), frame)
        until(lambda: sent, "the first is being encoded")
        for step in (1, 2):
            for camera in ("front", "wrist"):
                previews.submit(picture(camera, step), frame)
        release.set()
        until(lambda: len(sent) == 3, "the newest ones follow")
    assert sent == [("front", 0), ("front", 2), ("wrist", 2)]


def test_encoding_error_is_raised_at_the_next_submit() -> None:
    with PreviewEncoder(lambda *_: None) as previews:
        previews.submit(picture("front", 0), np.zeros(3, np.uint8))

        def refused() -> bool:
            try:
                previews.submit(picture("wrist", 1), np.zeros((16, 16, 3), np.uint8))
            except ValueError:
                return True
            return False

        until(refused, "it raises what the encoder raised")
        with pytest.raises(ValueError):
            previews.submit(picture("front", 2), np.zeros((16, 16, 3), np.uint8))


NO_INTERVENTION = TimeStep(
    observation={},
    frames={},
    t_capture_ns=0,
    applied=None,
    safety_reasons=0,
    t_command_ns=0,
    outcome=NO_OUTCOME,
    held_periods=0,
    stopped=False,
)


def test_safety_interventions_are_counted_by_reason() -> None:
    counts = SafetyCounter()
    counts.add(NO_INTERVENTION)
    assert counts.scalars() == {}
    for reasons in (SafetyReason.WORKSPACE | SafetyReason.SPEED, SafetyReason.WORKSPACE, SafetyReason.ESTOP):
        counts.add(replace(NO_INTERVENTION, safety_reasons=int(reasons)))
    counts.add(replace(NO_INTERVENTION, held_periods=7))
    assert counts.scalars() == {
        "safety_estop": 1.0,
        "safety_speed": 1.0,
        "safety_watchdog": 7.0,
        "safety_workspace": 2.0,
    }


class FakeClient:
    """A tunnel client that records its messages."""

    def __init__(self) -> None:
        self.sent: list[ControlMessage] = []

    def send(self, message: ControlMessage) -> bool:
        self.sent.append(message)
        return True

    def send_preview(self, preview: object, jpeg: bytes) -> bool:
        return False

    def scalars(self) -> dict[str, float]:
        return {}


class FakeSource:
    """A session without notes and weights metrics."""

    episode = "e"

    def status_note(self) -> str:
        return ""

    def weights_scalars(self) -> dict[str, float]:
        return {}


def test_status_shows_the_version_that_acted_last(tmp_path: Path) -> None:
    spec, client = robot_spec(RobotConfig(name="fake-0", driver="fake")), FakeClient()
    time_step = TimeStep({}, {}, 0, None, 0, 0, TaskOutcome(0.0, False), 0, False)
    action = np.zeros(len(spec.action.labels), np.float32)
    with Outbox.open(tmp_path) as outbox:
        status = StatusPublisher(
            "fake-0",
            client,  # type: ignore[arg-type]
            outbox,
            ControlAuthority("fake-0", spec),
            FakeSource(),
            "",
        )
        shown = []
        for version, phase in ((10, Phase.POLICY), (-1, Phase.TELEOP), (5, Phase.POLICY)):
            status.on_step(time_step, SelectedAction(action, phase, policy_version=version))
            status.publish()
            newest = client.sent[-1]
            assert isinstance(newest, RobotStatus)
            shown.append(newest.policy_version)
    assert shown == [10, 10, 5], "an operator's steps have no version"
