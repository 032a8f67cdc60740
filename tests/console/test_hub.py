"""The hub: state of a run, bounded curves, and orders."""

from __future__ import annotations

import functools
import struct
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from wait_kit import Clock

from hal.registry import LOSS_TIMEOUT_S
from hal.resource import Health, Kind, ResourceRecord
from hal.spec import ArraySpec, CameraSpec, RobotSpec, SafetyLimits
from user_sys.console.hub import (
    MAX_CAMERAS_PER_ROBOT,
    MAX_JPEG_BYTES,
    MAX_ROBOTS,
    ConsoleHub,
    ShownCameras,
)
from user_sys.console.progress import MAX_CURVES, Curve, RunProgress
from user_sys.console.protocol import encode_preview
from user_sys.errors import AuthorityError, WireError
from user_sys.messages import (
    ControlPeriod,
    EpisodeReport,
    MetricsReport,
    OperatorCommand,
    Preview,
    PreviewRequest,
    RobotStatus,
)
from user_sys.run.progress import plain_line, run_scalars


def status(robot: str = "panda-0", **changes: Any) -> RobotStatus:
    values: dict[str, Any] = {
        "robot": robot, "authority": "policy", "operator": "", "phase": "policy", "episode": "e-1", "step": 3,
        "policy_version": 7, "real_time": False, "outbox_chunks": 0, "control_hz": 40.0, "safety_interventions": 0,
    }  # fmt: skip
    return RobotStatus(**{**values, **changes})


def episode(
    success: bool | None, source: str = "online", touched: int = 0, steps: int = 40, task: str = "lift"
) -> EpisodeReport:
    return EpisodeReport(
        robot="panda-0", episode="e", source=source, steps=steps, success=success, intervention_steps=touched,
        episode_return=1.0, policy_version=1, task=task,
    )  # fmt: skip


def bus(labels: str, **changes: Any) -> RobotSpec:
    names = tuple(labels.split())
    ends = (1.0,) * len(names)
    action = ArraySpec(name="action", labels=names, units=("1",) * len(names), low=tuple(-e for e in ends), high=ends)
    return RobotSpec(model="bus", rate_hz=10.0, observation=(), action=action, **changes)


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def sent() -> list[OperatorCommand | PreviewRequest]:
    return []


@pytest.fixture
def hub(sent: list[OperatorCommand | PreviewRequest], clock: Clock) -> ConsoleHub:
    return ConsoleHub("demo", sent.append, {"panda-0": bus("x y z g", tool_delta=(0, 1, 2), gripper=3)}, 300.0, clock)


def test_phases_of_the_running_episode_are_kept(hub: ConsoleHub) -> None:
    for step, phase in ((3, "policy"), (9, "policy"), (10, "correction"), (20, "correction"), (21, "policy")):
        hub.update(status(step=step, phase=phase))
    assert hub.view().robots[0].phases == ((0, "policy"), (10, "correction"), (21, "policy"))
    hub.update(status(step=1, episode="e-2"))
    assert hub.view().robots[0].phases == ((0, "policy"),)


def test_silent_learner_is_a_warning(hub: ConsoleHub, clock: Clock) -> None:
    hub.update(MetricsReport(node="learner", count=5, scalars={}))
    clock.now_s += 59.0
    assert not hub.view().warning and hub.view().updates == 5
    clock.now_s += 2.0
    assert hub.view().warning == "training stands still: no report from learner; read logs/learner.log"
    hub.update(MetricsReport(node="learner", count=6, scalars={}))
    assert not hub.view().warning


def test_learner_that_has_finished_is_not_missed(hub: ConsoleHub, clock: Clock) -> None:
    hub.update(MetricsReport(node="learner", count=5, scalars={"finished": 1.0}))
    clock.now_s += 61.0
    assert not hub.view().warning
    hub.update(MetricsReport(node="learner", count=5, scalars={"finished": 0.0}))  # it was started again elsewhere
    clock.now_s += 61.0
    assert hub.view().warning == "training stands still: no report from learner; read logs/learner.log"


def test_learner_that_has_ended_for_good_is_not_missed(hub: ConsoleHub, clock: Clock) -> None:
    for node in ("learner", "learner-b"):
        hub.update(MetricsReport(node=node, count=5, scalars={}))
    hub.progress.set_ended({"learner-b", "camera"})
    clock.now_s += 61.0
    assert hub.view().warning == "training stands still: no report from learner; read logs/learner.log"
    assert hub.view().updates == 10
    for node in ("learner", "learner-b"):
        hub.update(MetricsReport(node=node, count=5, scalars={}))
    clock.now_s += 61.0
    assert "no report from learner, learner-b; " in hub.view().warning, "it works again"


def test_robot_is_expected_then_seen_then_lost(hub: ConsoleHub, clock: Clock) -> None:
    assert hub.view().robots[0].status is None and not hub.view().robots[0].lost
    hub.update(status(step=9))
    seen = hub.view().robots[0]
    assert seen.status is not None and seen.status.step == 9 and not seen.lost
    clock.now_s += LOSS_TIMEOUT_S + 0.1
    assert hub.view().robots[0].lost


def test_remote_robot_is_shown_before_it_reports(hub: ConsoleHub, clock: Clock) -> None:
    hub.add_robot("far-0")
    clock.now_s += 60
    (remote,) = [robot for robot in hub.view().robots if robot.name == "far-0"]
    assert remote.status is None and remote.silent_s == 60
    hub.update(status(robot="far-0"))
    assert hub.view().robots[1].silent_s == 0
    clock.now_s += 90
    assert hub.view().robots[1].lost and hub.view().robots[1].silent_s == 90


def test_robot_that_was_lost_before_the_console_started_is_lost(hub: ConsoleHub, clock: Clock) -> None:
    clock.now_s += 2.0
    arm = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk")
    hub.update_resource(arm)
    assert not hub.view().robots[0].lost
    hub.update_resource(msgspec.structs.replace(arm, health=Health.LOST))
    assert not hub.view().robots[0].lost, "it has not come in since the gateway started"
    hub.update_resource(msgspec.structs.replace(arm, health=Health.LOST, seen_unix_s=time.time() - 3600))
    view = hub.view()
    assert view.robots[0].lost and view.robots[0].silent_s == pytest.approx(3600, abs=60)
    assert view.alarms == ("no report from panda-0: check the robot's computer and its network",)
    assert "panda-0 lost (silent for 1:00:00)" in plain_line(view, "training")
    hub.update(status())
    assert not hub.view().robots[0].lost and not hub.view().alarms


def test_success_counts_episodes_without_help(hub: ConsoleHub, clock: Clock) -> None:
    assert hub.view().success is None
    for report in (episode(True), episode(False), episode(True, touched=5), episode(None), episode(True, "demo")):
        clock.now_s += 10
        hub.update(report)
    view = hub.view()
    assert (view.episodes, view.env_steps, view.interventions) == (4, 160, 1)
    assert (view.success, view.helped) == (0.5, 0.25), "neither with help nor without a label is a success or a failure"
    success, helped = (next(c for c in hub.progress.curves() if c.name == name) for name in ("success", "helped"))
    assert success.x == (10.0, 20.0) and success.y == (1.0, 0.5)
    assert helped.x == (10.0, 20.0, 30.0, 40.0) and helped.y == (0.0, 0.0, 1 / 3, 0.25)


def test_resumed_run_continues_its_counts(hub: ConsoleHub, clock: Clock) -> None:
    hub.progress.restore_history(episodes=10, env_steps=500, interventions=2, elapsed_s=100.0)
    clock.now_s += 5.0
    hub.update(episode(True, touched=5))
    hub.update(MetricsReport(node="learner", count=10, scalars={"training_s": 40.0}))
    hub.update(MetricsReport(node="learner-ur5e", count=10, scalars={"training_s": 7.0}))
    view = hub.view()
    assert (view.episodes, view.interventions, view.elapsed_s, view.budget_s) == (11, 3, 105.0, 300.0)
    assert (view.training_s, view.updates) == (40.0, 20)


def test_success_rate_is_of_so_many_autonomous_episodes(hub: ConsoleHub) -> None:
    for report in (episode(True), episode(False), episode(None), episode(True, touched=3), episode(True)):
        hub.update(report)
    assert [hub.progress.success_rate(count) for count in (3, 2, 4)] == [2 / 3, 0.5, None]


def test_rates_follow_the_reports(hub: ConsoleHub, clock: Clock) -> None:
    for second in range(5):
        clock.now_s += 1
        hub.update(episode(True, steps=20))
        hub.update(MetricsReport(node="learner", count=100 * second, scalars={"policy_version": 6.0}))
    hub.update(MetricsReport(node="gateway", count=9, scalars={"training_s": 99.0}))
    view = hub.view()
    assert (view.env_steps_per_s, view.updates_per_s, view.updates, view.policy_version) == (20.0, 100.0, 400, 6)


def test_rates_of_rare_reports_are_known_and_fall_in_silence(hub: ConsoleHub, clock: Clock) -> None:
    for _ in range(4):
        clock.now_s += 30
        hub.update(episode(True, steps=600))
    assert hub.view().env_steps_per_s == 20.0
    clock.now_s += 10
    assert hub.view().env_steps_per_s == 20.0
    clock.now_s += 3600
    assert 0.0 < hub.view().env_steps_per_s < 0.2


def test_view_leaves_out_scalars_that_are_not_finite(hub: ConsoleHub) -> None:
    hub.update(MetricsReport(node="learner", count=1, scalars={"policy_version": 6.0}))
    hub.update(MetricsReport(node="learner", count=2, scalars={"policy_version": float("nan")}))
    assert hub.view().policy_version == 6


def test_staleness_is_relative_to_the_robots_own_learner(hub: ConsoleHub) -> None:
    hub.update(MetricsReport(node="learner", count=9, scalars={"policy_version": 90.0}))
    hub.update(MetricsReport(node="learner-arm-1", count=9, scalars={"policy_version": 4.0}))
    hub.update(status("left", policy_version=89))
    hub.update(status("right", policy_version=2))
    hub.progress.set_learners({"left": "learner", "right": "learner-arm-1"})
    assert hub.view().staleness == 2
    hub.progress.set_learners({"left": "learner", "right": "learner-that-is-silent"})
    assert hub.view().staleness == 1


def test_training_is_of_the_next_learner_while_no_robot_has_the_first(hub: ConsoleHub) -> None:
    for node, number in (("learner", 9.0), ("learner-arm-1", 4.0)):
        hub.update(MetricsReport(node=node, count=9, scalars={"policy_version": number, "training_s": number}))
    assert (hub.view().policy_version, hub.view().training_s) == (9, 9.0)
    hub.progress.set_learners({"left": "learner-arm-1", "right": "learner-arm-1"})
    assert (hub.view().policy_version, hub.view().training_s) == (4, 4.0)


def test_full_disk_and_pinned_version_warn_until_they_end(hub: ConsoleHub) -> None:
    for node, folder in (("gateway", "store"), ("learner-ur5e-1", "checkpoints/learner-ur5e-1")):
        full = {"disk_needed_bytes": 5e6, "disk_free_bytes": 4096.0}
        hub.update(MetricsReport(node=node, count=9, scalars=full))
        assert f"waiting for disk space in {folder}: needs 5 MB, 0.0041 MB free; " in hub.view().warning
        hub.update(MetricsReport(node=node, count=9, scalars=dict.fromkeys(full, 0.0)))
    hub.update(MetricsReport(node="learner", count=9, scalars={"held_by_pin": 1.0}))
    assert "training waits" in hub.view().warning
    hub.update(MetricsReport(node="learner", count=9, scalars={"held_by_pin": 0.0}))
    assert not hub.view().warning


def test_lack_of_steps_to_train_on_warns_until_it_ends(hub: ConsoleHub) -> None:
    hub.update(MetricsReport(node="learner", count=0, scalars={"nothing_to_sample": 1.0}))
    run = hub.view()
    assert "learner finds no stored step that its algorithm trains on" in run.warning
    assert "learner.options (such as steps)" in run.warning and "learner.sampler" in run.warning
    assert run.warning in plain_line(run, "starting")
    hub.update(MetricsReport(node="learner", count=1, scalars={"nothing_to_sample": 0.0}))
    assert not hub.view().warning


def test_learners_that_wait_for_demonstrations_are_shown_until_they_train(hub: ConsoleHub) -> None:
    for name, have in (("learner", 7.0), ("learner-b", 0.0)):
        waits = {"demonstrations": have, "demonstrations_needed": 10.0}
        hub.update(MetricsReport(node=name, count=0, scalars=waits))
    run = hub.view()
    assert "waits: learner has 7 of 10, learner-b has 0 of 10 demonstrations; show the task" in run.warning
    assert run.warning in plain_line(run, "training")
    for name in ("learner", "learner-b"):
        trains = {"demonstrations": 10.0, "demonstrations_needed": 0.0}
        hub.update(MetricsReport(node=name, count=1, scalars=trains))
    assert not hub.view().warning


def test_learner_that_has_ended_or_that_no_robot_has_lacks_no_steps(hub: ConsoleHub) -> None:
    hub.progress.set_learners({"panda-0": "learner", "panda-1": "learner-b"})
    for name in ("learner", "learner-b", "learner-c"):
        hub.update(MetricsReport(node=name, count=0, scalars={"nothing_to_sample": 1.0}))
    assert "learner, learner-b finds no stored step" in hub.view().warning
    hub.progress.set_ended(["learner-b"])
    assert "waits: learner finds no stored step" in hub.view().warning


def test_lost_device_warns_until_it_returns(hub: ConsoleHub) -> None:
    gpu = ResourceRecord(kind=Kind.GPU, name="desk/gpu-0", model="L4", node="desk", health=Health.LOST)
    hub.update_resource(gpu)
    assert hub.view().warning == "lost: desk/gpu-0 (gpu L4)"
    hub.update_resource(msgspec.structs.replace(gpu, health=Health.READY))
    assert not hub.view().warning


def test_quarantined_robot_shows_reason_and_person_until_it_is_restored(hub: ConsoleHub) -> None:
    arm = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk", health=Health.QUARANTINED)
    hub.update_resource(msgspec.structs.replace(arm, note="by ana: oil"))
    robot = hub.view().robots[0]
    assert (robot.health, robot.health_note, hub.view().warning) == (Health.QUARANTINED, "by ana: oil", "")
    hub.update_resource(msgspec.structs.replace(arm, health=Health.READY))
    assert hub.view().robots[0].health is Health.READY


def test_success_far_below_its_best_warns_until_it_is_back(hub: ConsoleHub) -> None:
    for success in [True] * 50 + [False] * 9:
        hub.update(episode(success))
    assert not hub.view().warning
    hub.update(episode(False))
    assert "success fell to 80% of the newest 50 autonomous episodes, from 100%" in hub.view().warning
    for _ in range(50):
        hub.update(episode(True))
    assert not hub.view().warning


def test_old_task_that_gets_worse_warns_by_its_name(hub: ConsoleHub) -> None:
    for task in ["reach"] * 50 + ["lift"] * 200:
        hub.update(episode(True, task=task))
    for _ in range(10):
        hub.update(episode(False, task="reach"))
        for _ in range(9):
            hub.update(episode(True, task="lift"))
    assert hub.view().warning.startswith("success of reach fell to 80% of the newest 50 autonomous episodes, from 100%")


def test_evaluated_task_that_gets_worse_warns_after_fewer_episodes(hub: ConsoleHub) -> None:
    for success in [True] * 20 + [False] * 5:
        hub.update(episode(success, task="reach", source="evaluation"))
        hub.update(episode(True, task="lift"))
    assert not hub.view().warning
    hub.update(episode(None, task="reach", source="evaluation"))  # an e-stop cut it off
    hub.update(episode(False, task="reach", source="evaluation"))
    view = hub.view()
    assert view.tasks == {"evaluation/reach": 0.7, "lift": 1.0} and view.episodes == 25
    assert view.warning.startswith(
        "success of evaluation/reach fell to 70% of the newest 20 autonomous episodes, from 100%"
    )


def test_evaluated_task_warns_though_no_other_has_an_autonomous_episode(hub: ConsoleHub) -> None:
    for success in [True] * 20 + [False] * 6:
        hub.update(episode(success, task="reach", source="evaluation"))
    view = hub.view()
    assert view.tasks == {"evaluation/reach": 0.7}
    assert view.warning.startswith("success of evaluation/reach fell to 70%")


def test_camera_of_a_robot_that_resets_for_long_is_not_missed(hub: ConsoleHub, clock: Clock) -> None:
    def pass_s(seconds: int, *, resets: bool) -> tuple[str, ...]:
        for _ in range(seconds):
            clock.now_s += 1.0
            hub.update(status(resets=resets))
            hub.request_previews([ShownCameras()], ttl_s=3.0)
        return hub.view().alarms

    hub.update(status())
    hub.update_preview(Preview(robot="panda-0", camera="front", step=1), jpeg(1))
    assert not pass_s(1, resets=False) and not pass_s(20, resets=True) and not pass_s(4, resets=False)
    assert not pass_s(20, resets=True), "the next one"
    assert pass_s(2, resets=False) == ("no new picture of panda-0's camera front for 7 s",), "1, 4 and 2 s"


def test_lost_robot_and_stale_camera_are_alarms(hub: ConsoleHub, clock: Clock) -> None:
    hub.update(status())
    hub.update_preview(Preview(robot="panda-0", camera="front", step=1), jpeg(1))
    for _ in range(8):  # a page is open
        clock.now_s += 1.0
        hub.update(status())
        hub.request_previews([ShownCameras()], ttl_s=3.0)
    assert hub.view().alarms == ("no new picture of panda-0's camera front for 7 s",)
    hub.update_preview(Preview(robot="panda-0", camera="front", step=2), jpeg(1))
    assert not hub.view().alarms
    clock.now_s += 60.0
    hub.request_previews([ShownCameras()], ttl_s=3.0)
    hub.update(status())
    assert not hub.view().alarms, "the page was away"
    for _ in range(8):
        clock.now_s += 1.0
        hub.update(status())
        hub.request_previews([ShownCameras(frozenset())], ttl_s=3.0)
    assert not hub.view().alarms, "no page shows it"
    clock.now_s += 60.0
    assert hub.view().alarms == ("no report from panda-0: check the robot's computer and its network",)


@pytest.mark.parametrize("health", [Health.QUARANTINED, Health.DRAINING])
def test_silent_robot_that_a_person_took_out_of_use_is_no_alarm(hub: ConsoleHub, clock: Clock, health: Health) -> None:
    hub.update(status())
    arm = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk", health=health)
    hub.update_resource(arm)
    clock.now_s += 60.0
    assert not hub.view().alarms, "its session waits for a lease"
    hub.update_resource(msgspec.structs.replace(arm, health=Health.LOST))
    assert hub.view().alarms == ("no report from panda-0: check the robot's computer and its network",)


def test_pose_is_known_until_the_robot_is_lost(hub: ConsoleHub, clock: Clock) -> None:
    assert hub.pose("panda-0") is None
    hub.update(status(state=(0.5,), promised=((1.0,),)))
    clock.now_s += LOSS_TIMEOUT_S
    pose = hub.pose("panda-0")
    assert pose is not None and (pose.state, pose.promised) == ((0.5,), ((1.0,),))
    clock.now_s += 0.1
    assert hub.pose("panda-0") is None
    hub.update(status())
    assert hub.pose("panda-0") is None, "it reports no pose"
    hub.update(status(state=(0.6,)))
    assert hub.pose("panda-0") is not None


def test_cameras_have_the_order_of_the_spec(hub: ConsoleHub) -> None:
    cameras = tuple(CameraSpec(name=name, height=8, width=8, rate_hz=10.0) for name in ("wrist", "front"))
    hub.set_robot_spec("panda-0", msgspec.structs.replace(bus("x y z g"), cameras=cameras))
    for name in ("side", "front", "wrist"):
        hub.update_preview(Preview(robot="panda-0", camera=name, step=1), jpeg(1))
    assert hub.view().robots[0].cameras == ("wrist", "front", "side")


def test_view_has_the_latency_of_a_robot(hub: ConsoleHub) -> None:
    assert hub.view().robots[0].latency_ms is None
    hub.update(status(periods=(ControlPeriod(1.0, (0.1,), (0.1,), 0, 4.0, 1.5),)))
    assert hub.view().robots[0].latency_ms == 5.5


def test_view_has_the_last_episode_of_a_robot(hub: ConsoleHub) -> None:
    assert hub.view().robots[0].last is None
    hub.update(episode(True, touched=5))
    hub.update(episode(False, "demo"))
    last = hub.view().robots[0].last
    assert last is not None and last.success and last.intervention_steps == 5


def test_curves_have_losses_without_non_finite_values(hub: ConsoleHub) -> None:
    hub.update(MetricsReport(node="learner", count=10, scalars={"critic_loss": 2.0}))
    hub.update(MetricsReport(node="learner", count=20, scalars={"critic_loss": float("nan")}))
    hub.update(MetricsReport(node="learner", count=30, scalars={"critic_loss": 1.0}))
    assert hub.view().updates == 30 and hub.view().metrics["learner"]["critic_loss"] == 1.0
    (curve,) = hub.progress.curves()
    assert curve.name == "learner/critic_loss" and curve.x == (10.0, 30.0) and curve.y == (2.0, 1.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500))
def test_curve_is_bounded_and_in_order(values: list[float]) -> None:
    curve = Curve("c", max_points=16)
    for x, value in enumerate(values):
        curve.add(float(x), value)
    view = curve.view()
    assert len(view.x) == len(view.y) <= 17
    assert list(view.x) == sorted(view.x)
    assert min(values) - 1e-6 <= min(view.y) and max(view.y) <= max(values) + 1e-6
    assert view.x[-1] >= len(values) - 1 - len(values) / 8  # up to the newest point


def jpeg(shade: int) -> bytes:
    return bytes(simplejpeg.encode_jpeg(np.full((8, 8, 3), 16 * shade, np.uint8)))


def claiming(height: int, width: int) -> bytes:
    """A small valid JPEG file whose header declares another size."""
    file = bytearray(jpeg(1))
    struct.pack_into(">HH", file, file.index(b"\xff\xc0") + 5, height, width)
    return bytes(file)


def with_odd_colours() -> bytes:
    """A JPEG file with a chroma subsampling that simplejpeg does not support."""
    file = bytearray(jpeg(1))
    file[file.index(b"\xff\xc0") + 11] = 0x14
    return bytes(file)


@pytest.mark.parametrize(
    "picture",
    [b"", b"no picture", claiming(65_000, 65_000), with_odd_colours()],
    ids=["nothing", "noise", "bomb", "colours"],
)
def test_too_large_pictures_are_refused(hub: ConsoleHub, picture: bytes) -> None:
    with pytest.raises(WireError, match="frame"):
        hub.update_preview(Preview(robot="panda-0", camera="front", step=0), picture)
    assert not hub.previews(ShownCameras())


def test_picture_replaces_the_previous_one(hub: ConsoleHub) -> None:
    for step in range(3):
        hub.update_preview(Preview(robot="panda-0", camera="front", step=step), jpeg(step))
    (picture,) = hub.previews(ShownCameras())
    assert (picture.step, picture.serial, picture.jpeg) == (2, 3, jpeg(2))
    assert hub.view().robots[0].cameras == ("front",)


def test_page_gets_the_age_of_a_picture_since_its_capture(hub: ConsoleHub, clock: Clock) -> None:
    sent = Preview(robot="panda-0", camera="front", step=0, captured_unix_ns=10**18)
    hub.update_preview(sent, jpeg(0), sent.age_s(10**18 + 2_500_000_000))
    (picture,) = hub.previews(ShownCameras())
    clock.now_s += 60.0  # a page that is opened later
    assert b'"age_s":62.5' in encode_preview(picture, hub.age_s(picture))


def test_robots_nodes_and_cameras_are_bounded(hub: ConsoleHub) -> None:
    with pytest.raises(WireError, match="bytes"):
        hub.update_preview(Preview(robot="panda-0", camera="front", step=0), bytes(MAX_JPEG_BYTES + 1))
    with pytest.raises(WireError, match="cameras"):
        for i in range(MAX_CAMERAS_PER_ROBOT + 1):
            hub.update_preview(Preview(robot="panda-0", camera=str(i), step=0), jpeg(i))
    with pytest.raises(WireError, match="robot too many"):
        for i in range(MAX_ROBOTS + 1):
            hub.update(status(f"r-{i}"))
    hub.update(MetricsReport(node="learner", count=0, scalars={f"loss_{i}": 0.0 for i in range(MAX_CURVES * 2)}))
    assert len(hub.progress.curves()) == MAX_CURVES


def test_many_scalars_leave_room_for_success_and_losses(hub: ConsoleHub) -> None:
    hub.update(MetricsReport(node="gateway", count=1, scalars={f"wait_{i}": 0.0 for i in range(MAX_CURVES * 2)}))
    hub.update(MetricsReport(node="learner", count=1, scalars={f"time_{i}": 0.0 for i in range(MAX_CURVES * 2)}))
    hub.update(MetricsReport(node="learner", count=2, scalars={"critic_loss": 2.0}))
    hub.update(episode(True))
    assert {curve.name for curve in hub.progress.curves()} == {"learner/critic_loss", "success", "helped"}


def test_re_arm_after_an_e_stop_of_another_console_is_newer(
    hub: ConsoleHub, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ConsoleHub("demo", sent.append, {"panda-0": bus("x y z g")})
    now_ns = time.time_ns()
    orders: list[tuple[int, ConsoleHub, Any]] = [
        (0, hub, "pause"),
        (60, other, "e-stop"),
        (90, hub, "re-arm"),
        (5, hub, "pause"),
    ]
    for later_ns, console, order in orders:
        monkeypatch.setattr(time, "time_ns", functools.partial(int, now_ns + later_ns))
        console.send_order("panda-0", "ada", order)
    pause, press, rearm, after = (order.sequence for order in sent)
    assert pause < press < rearm < after, "and a clock that is set back changes no order"


def test_orders_have_ascending_sequences(hub: ConsoleHub, sent: list[Any]) -> None:
    hub.send_order("panda-0", "alice", "take-over")
    hub.send_drive("panda-0", "alice", (1.0, 0.0, -0.5), -1.0)
    first, second = sent
    assert (first.robot, first.operator, first.order) == ("panda-0", "alice", "take-over")
    assert second.order == "drive" and second.twist == (1.0, 0.0, -0.5, -1.0)
    assert second.sequence > first.sequence
    with pytest.raises(AuthorityError, match="panda-0"):
        hub.send_order("panda-9", "alice", "e-stop")


def test_move_sets_the_tool_elements_of_the_spec(sent: list[Any]) -> None:
    odd = bus("grip roll x y z", tool_delta=(2, 3, 4), gripper=0)
    hub = ConsoleHub("demo", sent.append, {"odd": odd, "base": bus("left right")})
    hub.send_drive("odd", "alice", (0.1, 0.2, 0.3), 1.0)
    assert sent[-1].twist == (1.0, 0.0, 0.1, 0.2, 0.3)
    with pytest.raises(AuthorityError, match="no tool"):
        hub.send_drive("base", "alice", (0.1, 0.2, 0.3), 1.0)
    hub.update(status("stranger"))
    hub.send_drive("stranger", "alice", (0.1, 0.2, 0.3), 1.0)
    assert sent[-1].twist == (0.1, 0.2, 0.3, 1.0)


def test_tool_speed_is_the_one_that_a_person_reaches() -> None:
    arm = bus("x y z", tool_delta=(0, 1, 2), limits=SafetyLimits(reduced_speed=0.25))
    hub = ConsoleHub("demo", lambda message: None, {"arm": arm, "joints": bus("a b", joint_delta=(0, 1))})
    hub.update(status("joints", tool_speed=0.07))
    assert [robot.tool_speed for robot in hub.view().robots] == [2.5, 0.07]


def test_preview_request_goes_to_each_robot(hub: ConsoleHub, sent: list[Any]) -> None:
    hub.update(status("panda-1"))
    hub.request_previews([ShownCameras()], ttl_s=3.0)
    assert [(request.robot, request.rate_hz, request.ttl_s) for request in sent] == [
        ("panda-0", 30.0, 3.0), ("panda-1", 30.0, 3.0),
    ]  # fmt: skip


def test_only_cameras_that_a_page_shows_are_requested(hub: ConsoleHub, sent: list[Any]) -> None:
    cameras = tuple(CameraSpec(name=name, height=8, width=8, rate_hz=10.0) for name in ("wrist", "front"))
    for robot in ("panda-0", "panda-1"):
        hub.update(status(robot))
        hub.set_robot_spec(robot, msgspec.structs.replace(bus("x y z g"), cameras=cameras))
    alone, fleet = ShownCameras(frozenset({"panda-1"})), ShownCameras(frozenset(), thumbnails=True)
    hub.request_previews([], ttl_s=3.0)
    assert not sent
    hub.request_previews([alone], ttl_s=3.0)
    assert [(request.robot, request.cameras) for request in sent] == [("panda-1", ())]
    sent.clear()
    hub.request_previews([fleet, alone], ttl_s=3.0)
    assert [(request.robot, request.rate_hz, request.cameras) for request in sent] == [
        ("panda-0", 10.0, ("wrist",)), ("panda-1", 30.0, ()),
    ]  # fmt: skip


def test_listener_gets_messages_until_it_unsubscribes(hub: ConsoleHub) -> None:
    received: list[Any] = []
    end = hub.subscribe(received.append)
    hub.update(status())
    hub.update_preview(Preview(robot="panda-0", camera="front", step=0), jpeg(0))
    end()
    hub.update(status())
    assert len(received) == 2


def test_threads_may_update_and_read_at_once(hub: ConsoleHub) -> None:
    def feed() -> None:
        for count in range(300):
            hub.update(MetricsReport(node="learner", count=count, scalars={"loss": float(count)}))
            hub.update(episode(True))

    threads = [threading.Thread(target=feed) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        hub.view()
        hub.progress.curves()
    for thread in threads:
        thread.join(timeout=120)
    assert hub.view().episodes == 900 and hub.view().updates == 299


def test_success_of_several_tasks_is_counted_apart() -> None:
    progress = RunProgress()
    for success, task in ((True, "lift"), (False, "peg"), (False, "lift")):
        progress.add_episode(episode(success, task=task))
    progress.add_episode(episode(True, touched=1, task="peg"))
    view = progress.view("run", 1.0, ())
    assert view.tasks == {"lift": 0.5, "peg": 0.0}, "an episode with help does not count"
    assert run_scalars(view)["success/lift"] == 0.5 and "lift 50%, peg 0%" in plain_line(view, "training")
