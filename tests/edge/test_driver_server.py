"""The driver server under a test clock: watchdog, control periods, e-stops and leases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from edge_kit import END_S, RIGHT, STILL, RecordingRobot, until

from hal.camera import CameraFrame
from hal.driver import RobotSetup
from hal.errors import HalError, StaleObservation, StaleToken
from hal.estop import EmergencyStop, EstopLatch, new_emergency_stop
from hal.lease import Fence, robot_lock
from hal.robot import Observation, Robot, StopLevel
from hal.safety import WATCHDOG_LEAD_S, SafetyKernel, SafetyReason
from hal.spec import ACTION, CameraSpec
from hal.task import TaskMix
from robots.fake import FakeCamera, FakeTask
from user_sys.codec import decode_packet, encode_packet
from user_sys.edge.driver_client import (
    NEVER_NS,
    DriverClient,
    DriverCommand,
    DriverReply,
    DriverRequest,
    driver_endpoint,
)
from user_sys.edge.driver_server import DriverServer
from user_sys.edge.environment import RobotEnvironment, TimeStep

PERIOD_NS = 100_000_000


class MovingTask(FakeTask):
    """A reset in which the robot moves until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = threading.Event()

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        until_s = time.monotonic() + END_S
        while time.monotonic() < until_s:
            robot.check_stop()
            self.under_way.set()
            time.sleep(1e-3)


class Site:
    """A served robot of 10 Hz and its clients; time stands still until `pass_ns`."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        clock = lambda: self.now_ns  # noqa: E731
        self.robot = RecordingRobot(clock=clock)
        self.moving_task = MovingTask()
        self.driver = RobotEnvironment(self.robot, FakeTask(), SafetyKernel(self.robot.spec, clock=clock))
        setup = RobotSetup(name="fake-0", robot=self.robot, cameras=(), task=FakeTask())
        self.lease_ns = 0
        self.server = DriverServer(
            self.driver, setup, Fence(None), driver_endpoint("fake-0"), clock, lease_clock=lambda: self.lease_ns
        )
        self.client, self.anyone = DriverClient("fake-0", token=1), DriverClient("fake-0")

    def pass_ns(self, ns: int) -> list[StopLevel]:
        """Advances the clock during two requests; returns all stops. The second reply follows the watchdog's check."""
        self.now_ns += ns
        self.anyone.describe()
        self.anyone.describe()
        return self.robot.stops


@pytest.fixture
def site(runtime: Path) -> Iterator[Site]:
    with robot_lock("fake-0", simulated=True):
        made = Site()
        made.driver.connect()
        serving = threading.Thread(target=made.server.run)
        serving.start()
        try:
            made.client.attach()
            yield made
        finally:
            made.server.stop.set()
            made.now_ns += 10 * PERIOD_NS
            serving.join(60)
            made.client.close()
            made.anyone.close()
            assert not serving.is_alive()


def test_silent_session_is_held_after_two_control_periods(site: Site) -> None:
    time_step = site.client.step(RIGHT)
    assert time_step.held_periods == 0 and time_step.observation["observation.state"][4] > 0
    for _ in range(9):
        assert site.pass_ns(2 * PERIOD_NS // 10) == []
    assert site.pass_ns(2 * PERIOD_NS // 10 - 1) == []
    assert site.pass_ns(1) == [StopLevel.HOLD]
    assert site.pass_ns(PERIOD_NS - 1) == [StopLevel.HOLD]
    assert site.pass_ns(1) == [StopLevel.HOLD] * 2, "and in each control period from then on"
    time_step = site.client.step(STILL)
    assert time_step.held_periods == 2 and time_step.observation["observation.state"][4:].tolist() == [0, 0, 0]
    assert site.client.step(STILL).held_periods == 0


def test_command_after_a_stall_of_the_driver_follows_the_overdue_hold(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.client.step(RIGHT)
    waiting, stop_if_latched = threading.Event(), site.driver.stop_if_latched

    def poll() -> None:
        waiting.set()
        stop_if_latched()

    monkeypatch.setattr(site.driver, "stop_if_latched", poll)
    assert waiting.wait(END_S), "the server waits for a request"
    site.now_ns += 10 * PERIOD_NS
    time_step = site.client.step(RIGHT)
    assert site.robot.stops and time_step.held_periods == 1 and time_step.applied is not None
    assert site.client.step(RIGHT).held_periods == 0


@pytest.fixture
def slow_to_see(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A real-time robot at the end of a control period, whose observation takes half a period."""
    site.server.real_time, site.now_ns = True, site.now_ns + PERIOD_NS
    observe = site.robot.observe

    def late() -> Observation:
        site.now_ns += PERIOD_NS // 2
        return observe()

    monkeypatch.setattr(site.robot, "observe", late)
    return site


def test_real_time_robot_holds_within_two_periods_of_its_last_command(slow_to_see: Site) -> None:
    site, early_ns = slow_to_see, round(WATCHDOG_LEAD_S * 1e9)
    assert site.client.step(RIGHT).applied is not None
    assert site.pass_ns(3 * PERIOD_NS // 2 - early_ns - 1) == []
    assert site.driver.kernel.reason_counts["watchdog"] == 0
    assert site.pass_ns(1) == [StopLevel.HOLD]
    assert site.driver.kernel.reason_counts["watchdog"] == 1, "the kernel counts alike"


def test_watchdog_of_a_standing_robot_counts_from_the_reply(slow_to_see: Site) -> None:
    site = slow_to_see
    site.client.hold()
    assert site.pass_ns(2 * PERIOD_NS - 1) == [StopLevel.HOLD], "the requested hold"
    assert site.pass_ns(1) == [StopLevel.HOLD] * 2


class FrozenCamera(FakeCamera):
    """A camera whose newest frame is stale."""

    def read(self) -> CameraFrame:
        raise StaleObservation("the newest frame is 0.201 s old")


def test_frozen_camera_holds_the_robot_within_the_next_period(slow_to_see: Site) -> None:
    site, early_ns = slow_to_see, round(WATCHDOG_LEAD_S * 1e9)
    site.client.step(RIGHT)
    site.now_ns += PERIOD_NS // 2
    site.driver.cameras = (FrozenCamera(site.robot, CameraSpec(name="front", height=4, width=4, rate_hz=10)),)
    with pytest.raises(StaleObservation, match="the newest frame is"):
        site.client.step(RIGHT)
    assert len(site.robot.commands) == 2
    assert site.pass_ns(PERIOD_NS // 2 - early_ns - 1) == []
    assert site.pass_ns(1) == [StopLevel.HOLD], "two periods after the last command that was answered"


def during(site: Site, call: Callable[[], TimeStep]) -> tuple[threading.Thread, list[TimeStep]]:
    """A real-time control period in progress, which lasts until the clock advances."""
    time_steps: list[TimeStep] = []
    site.client.real_time = True
    before = len(site.robot.commands)
    driving = threading.Thread(target=lambda: time_steps.append(call()))
    driving.start()
    until(lambda: len(site.robot.commands) > before, "the period has begun")
    return driving, time_steps


def test_real_time_robot_follows_the_clock_for_every_session(site: Site) -> None:
    site.server.real_time = True
    asked = threading.Thread(target=lambda: site.client.reset(0))  # on a busy machine too
    asked.start()
    until(lambda: site.driver.real_time, "the clock is followed")
    assert not site.client.real_time

    def over() -> bool:
        site.now_ns += PERIOD_NS
        return not asked.is_alive()

    until(over, "the control period is over")


def test_command_after_a_late_one_waits_for_a_whole_period(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, wait = threading.Event(), site.driver.wait_for_command
    driving, _ = during(site, lambda: site.client.step(RIGHT))
    for late_ns in (8 * PERIOD_NS // 10, 0):
        site.now_ns += PERIOD_NS - site.now_ns % PERIOD_NS  # the end of the control period, on the grid
        driving.join(END_S)
        site.now_ns += late_ns
        if late_ns:
            driving, _ = during(site, lambda: site.client.step(RIGHT))

    def arrive() -> None:
        arrived.set()
        wait()

    monkeypatch.setattr(site.driver, "wait_for_command", arrive)
    driving = threading.Thread(target=lambda: site.client.step(RIGHT))
    driving.start()
    assert arrived.wait(END_S)
    site.anyone.renew_lease(1, NEVER_NS)  # is answered during the wait
    assert len(site.robot.commands) == 2
    site.now_ns += 7 * PERIOD_NS // 10
    until(lambda: len(site.robot.commands) == 3, "the command is applied")
    site.now_ns += PERIOD_NS
    driving.join(END_S)


def test_e_stop_is_executed_during_a_control_period(site: Site) -> None:
    driving, time_steps = during(site, lambda: site.client.step(RIGHT))
    site.anyone.emergency_stop("ada")
    assert not time_steps and driving.is_alive()
    assert site.robot.stops and set(site.robot.stops) == {StopLevel.SAFE}
    site.now_ns += PERIOD_NS
    driving.join(60)
    site.client.real_time = False
    time_step = site.client.hold()
    assert time_step.stopped and time_step.safety_reasons == SafetyReason.ESTOP
    time_step = site.client.step(RIGHT)
    assert time_step.stopped and time_step.applied is None and len(site.robot.commands) == 1


def test_reset_returns_the_task_that_its_seed_draws(site: Site) -> None:
    near, far = FakeTask(), FakeTask(max_steps=7)
    far.name, far.instruction = "far", "go far"
    site.driver.task = TaskMix((near, far))
    drawn = []
    for seed in range(6):
        site.client.reset(seed)
        drawn.append(site.client.episode_task)
        assert drawn[-1] == site.driver.episode_task
    assert {(task.name, task.sentence, task.max_steps) for task in drawn} == {
        ("reach", "move to the goal", 50),
        ("far", "go far", 7),
    }


def test_standing_robot_waits_for_its_policy_server(site: Site) -> None:
    site.client.max_gap_s = 2.0
    site.client.step(RIGHT)
    assert site.pass_ns(2 * PERIOD_NS + 2 * 10**9 - 1) == []
    assert site.pass_ns(1) == [StopLevel.HOLD]


def resetting(site: Site) -> tuple[threading.Thread, list[Any]]:
    """A reset in progress, which lasts until the robot is stopped; and its result."""
    ended: list[Any] = []
    site.driver.task = site.moving_task

    def reset() -> None:
        try:
            ended.append(site.client.reset(0))
        except HalError as error:
            ended.append(error)

    thread = threading.Thread(target=reset)
    thread.start()
    assert site.moving_task.under_way.wait(END_S)
    return thread, ended


def test_long_reset_tells_its_caller_that_it_goes_on(site: Site) -> None:
    waited = threading.Event()
    site.client.on_reset_wait = waited.set
    thread, _ = resetting(site)
    assert waited.wait(END_S)
    site.anyone.emergency_stop("ada")
    thread.join(END_S)


def test_e_stop_is_executed_during_a_reset(site: Site) -> None:
    thread, ended = resetting(site)
    site.anyone.emergency_stop("ada")
    assert site.robot.stops and set(site.robot.stops) == {StopLevel.SAFE}
    thread.join(END_S)
    (time_step,) = ended
    assert time_step.stopped and site.robot.commands == []
    assert site.client.step(RIGHT).applied is None


def test_stopping_driver_ends_a_reset(site: Site) -> None:
    thread, ended = resetting(site)
    site.server.stop.set()
    thread.join(END_S)
    (error,) = ended
    assert isinstance(error, HalError) and "the driver of fake-0 is stopping" in str(error)


def test_e_stops_and_re_arms_take_effect_in_their_order(site: Site) -> None:
    site.anyone.emergency_stop("ada", estop_sequence=1)
    site.anyone.emergency_stop("bob", estop_sequence=3)  # it arrived first, on its own channel
    assert not site.client.rearm("ada", estop_sequence=2) and site.client.hold().stopped
    assert site.client.rearm("ada", estop_sequence=4) and not site.client.hold().stopped
    site.anyone.emergency_stop("bob", estop_sequence=3)  # said twice
    assert not site.client.hold().stopped
    site.anyone.emergency_stop("ada", estop_sequence=5)
    assert site.client.hold().stopped


def test_e_stop_of_a_new_session_with_an_earlier_ones_pid_is_executed(site: Site) -> None:
    script = f"import os; os.getpid = lambda: {os.getpid()}; " + (
        "from user_sys.edge.driver_client import DriverClient; print(DriverClient('fake-0').session)"
    )
    assert site.client.session == site.anyone.session, "the clients of one process"
    site.anyone.emergency_stop("ada", estop_sequence=1)
    assert site.client.rearm("ada", estop_sequence=2)
    site.anyone.session = subprocess.check_output([sys.executable, "-c", script], text=True).strip()
    site.anyone.emergency_stop("ada", estop_sequence=1)
    assert site.client.hold().stopped


def test_request_past_its_deadline_is_refused(site: Site) -> None:
    site.client.step(STILL)
    orders: tuple[DriverCommand, ...] = ("command", "reset", "hold", "re-arm")
    for order in orders:
        request = DriverRequest(order=order, session="late", token=1, person="ada", until_ns=1)
        with zmq.Context.instance().socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(driver_endpoint("fake-0"))
            socket.send(encode_packet(request, {ACTION: RIGHT}))
            assert socket.poll(END_S * 1000)
            assert "is too late" in decode_packet(socket.recv(), DriverReply)[0].message
    assert len(site.robot.commands) == 1


def test_driver_stops_for_a_latch_that_a_session_wrote(site: Site, tmp_path: Path) -> None:
    site.driver.kernel = SafetyKernel(site.robot.spec, lambda: site.now_ns, tmp_path / "e-stop.json")
    EstopLatch(tmp_path / "e-stop.json").press(new_emergency_stop("ada", "the driver did not answer"))
    assert not site.client.hold().stopped
    site.client.attach()
    assert site.client.hold().stopped
    assert site.client.rearm("ada") and EstopLatch(tmp_path / "e-stop.json").read() is None


def test_press_of_another_program_stops_the_robot_in_the_next_period(site: Site, tmp_path: Path) -> None:
    shared = tmp_path / "shared.json"
    site.driver.kernel = SafetyKernel(site.robot.spec, lambda: site.now_ns, shared_latch=shared)
    assert site.client.step(RIGHT).applied is not None
    EstopLatch(shared).press(new_emergency_stop("ada", "from another terminal"))
    time_step = site.client.step(RIGHT)
    assert time_step.stopped and time_step.applied is None and len(site.robot.commands) == 1
    assert site.client.rearm("ada") and EstopLatch(shared).read() is None
    site.robot.stops.clear()
    EstopLatch(shared).press(new_emergency_stop("ada", "while the session is silent"))
    assert set(site.pass_ns(2 * PERIOD_NS)) == {StopLevel.SAFE}


def test_press_before_a_session_attaches_stops_the_robot_at_once(site: Site, tmp_path: Path) -> None:
    shared = EstopLatch(tmp_path / "shared.json")
    kernel = site.driver.kernel = SafetyKernel(site.robot.spec, lambda: site.now_ns, shared_latch=shared.path)
    kernel.has_new_press = lambda: False  # type: ignore[method-assign]  # no look at the file before the request
    shared.press(new_emergency_stop("ada", "from another terminal"))
    site.client.attach()
    found = shared.read()
    assert site.robot.stops == [StopLevel.SAFE] and found is not None and found.acknowledged


def test_press_while_the_robot_is_re_armed_is_acknowledged(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = EstopLatch(tmp_path / "shared.json")
    kernel = site.driver.kernel = SafetyKernel(site.robot.spec, lambda: site.now_ns, shared_latch=shared.path)
    site.anyone.emergency_stop("ada")
    site.robot.stops.clear()
    clear = EstopLatch.clear

    def press_afterwards(self: EstopLatch, expected: EmergencyStop | None) -> bool:
        done = clear(self, expected)
        shared.press(new_emergency_stop("bob"))
        return done

    monkeypatch.setattr(EstopLatch, "clear", press_afterwards)
    assert not site.client.rearm("ada") and kernel.latched_estop is not None
    found = shared.read()
    assert site.robot.stops[0] is StopLevel.SAFE and found is not None and found.acknowledged


def test_other_requests_wait_for_the_end_of_the_control_period(site: Site) -> None:
    driving, time_steps = during(site, lambda: site.client.step(RIGHT))
    replies: list[Any] = []
    requesting = threading.Thread(target=lambda: replies.append(site.anyone.describe()))
    requesting.start()
    site.now_ns += PERIOD_NS - 1
    requesting.join(0.2)
    assert not time_steps and not replies
    site.now_ns += 1
    driving.join(60)
    requesting.join(60)
    assert len(time_steps) == len(replies) == 1


def test_request_with_an_older_token_is_refused_and_counted(site: Site) -> None:
    with DriverClient("fake-0", token=2) as newer:
        newer.attach()
    with pytest.raises(StaleToken, match="token 1 is too old"):
        site.client.hold()
    assert site.driver.kernel.reason_counts["token"] == 1 and site.robot.commands == []


def test_expired_lease_holds_the_robot_until_renewal(site: Site) -> None:
    site.client.token, site.client.lease_until_ns = 2, 100
    first = site.client.step(RIGHT)
    assert first.applied is not None and not first.safety_reasons
    site.lease_ns = 100
    time_step = site.client.step(RIGHT)
    assert time_step.safety_reasons == SafetyReason.TOKEN, "it tells the step from one that was applied"
    assert time_step.applied is None and len(site.robot.commands) == 1 and site.robot.stops[-1] is StopLevel.HOLD
    with pytest.raises(HalError, match="the lease of fake-0 has expired"):
        site.client.reset(0)
    site.anyone.renew_lease(2, 200)
    assert site.client.step(RIGHT).applied is not None, "no successor came, and the holder goes on"


def test_command_without_a_lease_does_not_move_the_robot(site: Site) -> None:
    with DriverClient("fake-0", token=2) as newer:
        newer.lease_until_ns = 0
        assert newer.step(RIGHT).applied is None and site.robot.commands == []


def test_lease_of_an_older_token_is_not_renewed(site: Site) -> None:
    with DriverClient("fake-0") as newer:
        newer.renew_lease(2, 100)
        with pytest.raises(StaleToken):
            site.anyone.renew_lease(1, 10**18)
        site.lease_ns = 100
        assert newer.step(RIGHT).applied is None and site.robot.commands == []


def test_reset_accepts_renewals_and_ends_with_the_lease(site: Site) -> None:
    site.client.token, site.client.lease_until_ns = 2, 100
    thread, ended = resetting(site)
    site.anyone.renew_lease(2, 200)
    site.lease_ns = 150
    site.moving_task.under_way.clear()
    assert site.moving_task.under_way.wait(END_S) and thread.is_alive()
    site.lease_ns = 200
    thread.join(END_S)
    (error,) = ended
    assert isinstance(error, HalError) and "before the motion was over" in str(error)
    until(lambda: StopLevel.HOLD in site.pass_ns(2 * PERIOD_NS), "it is held")
