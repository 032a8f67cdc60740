"""A session's status reports, safety counts and camera previews."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edge_kit import until

from hal.camera import CameraFrame
from hal.safety import SafetyReason
from hal.spec import STATE
from user_sys.compose import RobotConfig, robot_spec
from user_sys.edge import status as status_module
from user_sys.edge.control_authority import ControlAuthority
from user_sys.edge.driver_client import LIVENESS_POLL_S
from user_sys.edge.environment import NO_OUTCOME, TimeStep
from user_sys.edge.outbox import Outbox
from user_sys.edge.recorder import SelectedAction
from user_sys.edge.session import LateCommandLog
from user_sys.edge.status import (
    MAX_PROMISED,
    PreviewSender,
    SessionReporter,
    StatusPublisher,
    read_session_report,
    session_report_path,
)
from user_sys.episode import Phase
from user_sys.gateway.ingest import ReportValidator
from user_sys.messages import (
    FOREIGN_RUN,
    PROTOCOL_VERSION,
    ControlMessage,
    ControlPeriod,
    Hello,
    MetricsReport,
    Preview,
    PreviewRequest,
    RobotStatus,
)
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import new_keypair

FRAME = CameraFrame(np.zeros((16, 16, 3), np.uint8), 0)


def pictures(*cameras: str) -> TimeStep:
    return replace(NO_INTERVENTION, frames=dict.fromkeys(cameras, FRAME))


def test_previews_keep_the_newest_image_of_each_camera() -> None:
    sent: list[tuple[str, int]] = []
    release = threading.Event()

    def send(preview: Preview, jpeg: bytes) -> None:
        assert jpeg.startswith(b"\xff\xd8")
        sent.append((preview.camera, preview.step))
        assert release.wait(60)

    with PreviewSender("r", send) as previews:
        previews.on_step(pictures("front"), 0, 0.0)
        assert not sent, "no console has requested previews"
        previews.enable(PreviewRequest(robot="r", rate_hz=10.0, ttl_s=30.0))
        previews.on_step(pictures("front"), 0, 1.0)
        until(lambda: sent, "the first is being encoded")
        previews.on_step(pictures("front"), 1, 1.05)  # faster than requested
        for step in (2, 3):
            previews.on_step(pictures("front", "wrist"), step, float(step))
        release.set()
        until(lambda: len(sent) == 3, "the newest ones follow")
    assert sent == [("front", 0), ("front", 3), ("wrist", 3)]


def test_previews_have_the_requested_rate_and_cameras() -> None:
    frames = {name: CameraFrame(np.zeros((16, 16, 3), np.uint8), 0) for name in ("front", "wrist")}
    step = replace(NO_INTERVENTION, frames=frames)
    due = [0, 2, 4, 5, 7, 9, 10, 12, 14, 16, 17, 19, 21, 22, 24]  # of half a second of a control loop at 50 Hz
    sent: list[tuple[str, int]] = []
    with PreviewSender("r", lambda preview, _: sent.append((preview.camera, preview.step))) as previews:
        previews.enable(PreviewRequest(robot="r", rate_hz=30.0, ttl_s=30.0, cameras=("front",)))
        for number in range(25):
            previews.on_step(step, number, 0.001 + 0.02 * number)
            if number in due:
                until(lambda number=number: ("front", number) in sent, "it is sent")  # type: ignore[misc]
    assert sent == [("front", number) for number in due]


def test_preview_has_the_time_of_its_capture_by_the_receivers_clock() -> None:
    frame, sent = CameraFrame(np.zeros((16, 16, 3), np.uint8), 7 * 10**9), list[Preview]()
    with PreviewSender("r", lambda preview, _: sent.append(preview), lambda t_ns: t_ns + 10**18) as previews:
        previews.enable(PreviewRequest(robot="r", rate_hz=30.0, ttl_s=30.0))
        previews.on_step(replace(NO_INTERVENTION, frames={"front": frame}), 0, 0.0)
        until(lambda: sent, "it is sent")
    assert sent[0].age_s(10**18 + 9_500_000_000) == 2.5
    assert Preview(robot="r", camera="front", step=0).age_s(10**18) == 0.0, "of an older robot"


def test_frame_is_encoded_once_for_previews_and_store() -> None:
    frame, sent = CameraFrame(np.zeros((16, 16, 3), np.uint8), 0), list[bytes]()
    with PreviewSender("r", lambda _, jpeg: sent.append(jpeg)) as previews:
        previews.enable(PreviewRequest(robot="r", rate_hz=30.0, ttl_s=30.0))
        previews.on_step(replace(NO_INTERVENTION, frames={"front": frame}), 0, 0.0)
        until(lambda: sent, "it is sent")
    assert sent[0] is frame.jpeg


def test_encoding_error_is_raised_at_the_next_step() -> None:
    with PreviewSender("r", lambda *_: None) as previews:
        previews.enable(PreviewRequest(robot="r", rate_hz=60.0, ttl_s=30.0))
        broken = replace(NO_INTERVENTION, frames={"front": CameraFrame(np.zeros(3, np.uint8), 0)})

        def refused() -> bool:
            try:
                previews.on_step(broken, 0, time.monotonic())
            except ValueError:
                return True
            return False

        until(refused, "it raises what the encoder raised")


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
    promised = np.full((100, 4), 0.25, np.float32)
    task = "lift"

    def status_note(self) -> str:
        return ""

    def weights_scalars(self) -> dict[str, float]:
        return {}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def status(client: FakeClient, tmp_path: Path) -> Iterator[StatusPublisher]:
    spec = robot_spec(RobotConfig(name="fake-0", driver="fake"))
    with Outbox.open(tmp_path) as outbox:
        authority = ControlAuthority("fake-0", spec)
        yield StatusPublisher("fake-0", client, outbox, authority, FakeSource(), "")  # type: ignore[arg-type]


def test_safety_interventions_are_counted_by_reason(status: StatusPublisher, client: FakeClient) -> None:
    for reasons in (SafetyReason.WORKSPACE | SafetyReason.SPEED, SafetyReason.WORKSPACE, SafetyReason.ESTOP):
        status.on_step(replace(NO_INTERVENTION, safety_reasons=int(reasons), held_periods=2), None)
    status.on_step(NO_INTERVENTION, None)
    first = next(message for message in client.sent if isinstance(message, MetricsReport))
    assert {name: value for name, value in first.scalars.items() if name.startswith("safety_")} == {
        "safety_speed": 1.0,
        "safety_watchdog": 2.0,
        "safety_workspace": 1.0,
    }


def test_status_names_the_limits_since_the_last_status(status: StatusPublisher, client: FakeClient) -> None:
    status.on_step(NO_INTERVENTION, None)
    for reasons in (SafetyReason.WORKSPACE, SafetyReason.SPEED, SafetyReason(0)):
        status.on_step(replace(NO_INTERVENTION, safety_reasons=int(reasons)), None)
    status.publish()
    status.publish()
    *_, first, second = (message for message in client.sent if isinstance(message, RobotStatus))
    assert (first.limits, second.limits) == (("workspace", "speed"), ())


def test_control_periods_are_reported_while_a_console_watches(status: StatusPublisher, client: FakeClient) -> None:
    selected = SelectedAction(np.full(4, 0.25, np.float32), Phase.POLICY, t_inference_ns=7_000_000)
    after = replace(
        NO_INTERVENTION, applied=np.full(4, 0.125, np.float32), safety_reasons=int(SafetyReason.WORKSPACE),
        t_capture_ns=4_000_000, t_command_ns=9_000_000,
    )  # fmt: skip
    status.on_step(after, selected)
    status.previews.enable(PreviewRequest(robot="r", rate_hz=10.0, ttl_s=30.0))
    status.on_step(after, selected)
    status.publish()
    status.publish()
    *_, first, second = (message for message in client.sent if isinstance(message, RobotStatus))
    assert first.periods == (ControlPeriod(0.009, (0.25,) * 4, (0.125,) * 4, int(SafetyReason.WORKSPACE), 3.0, 2.0),)
    assert second.periods == ()


def test_status_shows_the_version_that_acted_last(status: StatusPublisher, client: FakeClient) -> None:
    action = np.zeros(4, np.float32)
    shown = []
    for version, phase in ((10, Phase.POLICY), (-1, Phase.TELEOP), (FOREIGN_RUN, Phase.POLICY), (5, Phase.POLICY)):
        status.on_step(NO_INTERVENTION, SelectedAction(action, phase, policy_version=version))
        status.publish()
        newest = client.sent[-1]
        assert isinstance(newest, RobotStatus)
        shown.append(newest.policy_version)
    assert shown == [10, 10, 10, 5], "an operator's steps have no version, and another run's none of this run"


def test_long_note_is_cut_to_what_the_gateway_accepts(
    status: StatusPublisher, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSource, "status_note", lambda self: "the robot is lost: " + "x" * 2000)
    status.publish()
    last = client.sent[-1]
    assert isinstance(last, RobotStatus) and ReportValidator().validate(last, "robot") is last


def test_robot_that_resets_for_long_is_reported(
    status: StatusPublisher, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    status.on_step(NO_INTERVENTION, None)
    for _ in range(35):  # of 0.2 s
        now_s += LIVENESS_POLL_S
        status.on_reset_wait()
    assert sum(isinstance(message, RobotStatus) and message.resets for message in client.sent) >= 7
    status.publish()
    newest = client.sent[-1]
    assert isinstance(newest, RobotStatus) and not newest.resets


def test_retries_of_an_outage_count_as_one_fault(status: StatusPublisher, client: FakeClient) -> None:
    shown = []
    for retries in (15, 15, 1):
        status.on_step(NO_INTERVENTION, None)
        for _ in range(retries):
            status.on_fault()
            newest = client.sent[-1]
            assert isinstance(newest, RobotStatus)
            shown.append(newest.faults)
    assert shown == [1] * 15 + [2] * 15 + [3]


def test_late_command_is_logged_with_its_times_from_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    late = replace(NO_INTERVENTION, t_capture_ns=90_000_000, t_command_ns=87_000_000, held_periods=1)
    action = SelectedAction(np.zeros(2, np.float32), Phase.POLICY, t_inference_ns=80_000_000)
    for first in (action, replace(action, t_observation_ns=50_000_000)):
        LateCommandLog("r")(late, first)
    listener = LateCommandLog("r")
    listener(late, None)
    listener(replace(late, t_command_ns=102_000_000), replace(action, t_inference_ns=101_000_000))
    times = [record.getMessage().partition("robot=r: ")[2] for record in caplog.records]
    assert [text.split(" ms", 1)[0] for text in times] == ["0.0", "30.0", "11.0"]
    assert [text.partition("then ")[2].split(" ms")[0] for text in times] == ["7.0", "7.0", "1.0"]


def test_pose_and_promised_actions_are_sent_on_request(status: StatusPublisher, client: FakeClient) -> None:
    observed = replace(NO_INTERVENTION, observation={STATE: np.array([0.5, 1 / 3], np.float32)})
    status.on_step(observed, None)
    status.previews.enable(PreviewRequest(robot="r", rate_hz=0.0, ttl_s=30.0, pose=True))
    status.on_step(observed, None)
    status.publish()
    first, last = (m for m in (client.sent[0], client.sent[-1]) if isinstance(m, RobotStatus))
    assert first.state == first.promised == () and last.state == (0.5, 0.3333)
    assert last.promised == ((0.25,) * 4,) * MAX_PROMISED
    assert not status.previews.is_watched(time.monotonic())


def test_pose_from_before_a_fault_or_a_reset_is_not_sent_as_the_present_one(
    status: StatusPublisher, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = replace(NO_INTERVENTION, observation={STATE: np.array([0.5], np.float32)})
    status.previews.enable(PreviewRequest(robot="r", rate_hz=0.0, ttl_s=30.0, pose=True))
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for event in (status.on_fault, status.on_reset_wait):
        for report, pose in ((lambda: status.on_step(observed, None), (0.5,)), (event, ()), (status.publish, ())):
            now_s += 1.0
            report()
            *_, newest = (each for each in client.sent if isinstance(each, RobotStatus))
            assert newest.state == pose


@pytest.mark.parametrize(("elements", "sent"), [(7, MAX_PROMISED), (63, 63), (256, 14)])
def test_pose_of_a_robot_with_many_joints_is_one_that_the_gateway_accepts(
    status: StatusPublisher, client: FakeClient, monkeypatch: pytest.MonkeyPatch, elements: int, sent: int
) -> None:
    monkeypatch.setattr(FakeSource, "promised", np.zeros((100, elements), np.float32))
    status.previews.enable(PreviewRequest(robot="r", rate_hz=0.0, ttl_s=30.0, pose=True))
    status.on_step(replace(NO_INTERVENTION, observation={STATE: np.zeros(elements, np.float32)}), None)
    status.publish()
    last = client.sent[-1]
    assert isinstance(last, RobotStatus) and len(last.promised) == sent
    assert ReportValidator().validate(last, "robot") is last


def test_report_continues_after_a_failed_write(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status_module, "REPORT_PERIOD_S", 0.01)
    keys, hello = new_keypair(), Hello(protocol=PROTOCOL_VERSION, role="robot", name="r")
    obstacle = session_report_path("r").with_suffix(".fresh")
    with Outbox.open(tmp_path) as outbox, caplog.at_level(logging.WARNING):
        client = TunnelClient("tcp://127.0.0.1:9", keys, keys.public, hello, outbox=outbox)
        with SessionReporter("r", client, outbox) as reporter:
            until(lambda: read_session_report("r", os.getpid()), "it is written")
            obstacle.mkdir()  # in place of a full disk
            until(lambda: "session.report_failed" in caplog.text, "the failure is logged")
            reporter.activity = "driving"
            obstacle.rmdir()

            def is_current() -> bool:
                report = read_session_report("r", os.getpid())
                return report is not None and report.doing == "driving"

            until(is_current, "it is written again")
        client.close()
    assert caplog.text.count("session.report_failed") == 1
