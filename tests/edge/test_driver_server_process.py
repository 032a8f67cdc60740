"""The driver process keeps its robot safe when sessions fail, and serves the newest session."""

from __future__ import annotations

import getpass
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from edge_kit import END_S, RIGHT, STILL, NodeProcess, driver_process, error_lines, until

from hal.errors import HalError, HardwareLost, LeaseHeld, SpecError, StaleToken
from hal.safety import SafetyReason
from user_sys.codec import encode_packet
from user_sys.compose import RobotConfig
from user_sys.edge.driver_client import RESET_DEADLINE_S, DriverClient, DriverRequest, driver_endpoint
from user_sys.edge.driver_server import EXIT_FATAL, EXIT_ROBOT_LOST, MAX_REQUEST_BYTES

pytestmark = pytest.mark.usefixtures("runtime")

PERIOD_S = 0.1
FAKE = RobotConfig(name="fake-0", driver="fake")


@contextmanager
def session(token: int, robot: str = "fake-0", real_time: bool = False) -> Iterator[DriverClient]:
    with DriverClient(robot, token=token) as driver:
        driver.real_time = real_time
        driver.attach(END_S)
        yield driver


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[NodeProcess]:
    with driver_process(tmp_path, FAKE) as running:
        yield running


def test_newest_token_drives_after_a_restart(tmp_path: Path) -> None:
    with driver_process(tmp_path, FAKE) as running, session(2) as first:
        assert first.spec.model == "fake" and first.episode_task.name == "reach"
        first.reset(seed=1)
        np.testing.assert_array_equal(first.step(RIGHT).applied, RIGHT)
        with DriverClient("fake-0", token=1) as older:
            for call in (older.attach, older.hold, lambda: older.step(RIGHT), lambda: older.reset(0)):
                with pytest.raises(StaleToken, match="token 1 is too old"):
                    call()
        with session(3) as newer:
            newer.step(RIGHT)
            with pytest.raises(StaleToken, match="driven under token 3"):
                first.step(RIGHT)
        assert running.end() == 0
    with driver_process(tmp_path, FAKE), DriverClient("fake-0", token=2) as late:
        with pytest.raises(StaleToken):
            late.attach()
        with session(3) as same:
            assert same.step(STILL).applied is not None


def test_robot_is_slower_while_a_person_drives(driver: NodeProcess) -> None:
    with session(1) as client:
        client.reset(seed=0)
        client.reduced_speed = True
        slow = client.step(RIGHT)
        np.testing.assert_allclose(slow.applied[:3], RIGHT[:3] * 0.5, atol=1e-6)
        assert slow.safety_reasons == SafetyReason.SPEED
        client.reduced_speed = False
        np.testing.assert_array_equal(client.step(RIGHT).applied, RIGHT)


SESSION = """
import sys, numpy as np
from user_sys.edge.environment import TimeStep
from user_sys.edge.driver_client import REPLY_DEADLINE_S, DriverClient
driver = DriverClient("fake-0", token=int(sys.argv[1]))
driver.attach()
driver.real_time = True
while True:
    print(driver.step(np.array([0.01, 0, 0, 0.08], np.float32)).held_periods, flush=True)
"""


@contextmanager
def session_process(token: int, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    with out.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", SESSION, str(token)], stdout=file, stderr=file)
    try:
        until(lambda: out.read_text().count("\n") >= 3, "the session drives")
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(END_S)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_killed_session_is_held_until_its_successor_attaches(
    driver: NodeProcess, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "session.out"
    with session_process(1, out) as process:
        before = driver.log.count("watchdog.hold")
        process.send_signal(number)
        driver.wait_for_log("watchdog.hold", times=before + 1)
        if number is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            until(
                lambda: any(line.isdigit() and int(line) for line in out.read_text().split()[-20:]),
                "the hold is printed",
            )
        with session(2) as successor:
            assert successor.step(STILL).applied is not None


def test_e_stop_survives_a_restart_until_a_person_re_arms(tmp_path: Path) -> None:
    with driver_process(tmp_path, FAKE) as running:
        with session(1, real_time=True) as client, DriverClient("fake-0") as anyone:
            anyone.emergency_stop("ada")
            assert (tmp_path / "e-stop.json").exists()
            time_step = client.hold()
            assert time_step.stopped and time_step.safety_reasons == SafetyReason.ESTOP
        assert running.end() == 0
    with driver_process(tmp_path, FAKE), session(1) as client:
        still = client.reset(seed=4).observation["observation.state"][:3]
        assert client.step(RIGHT).stopped
        with pytest.raises(SpecError, match="name of a person"):
            client.rearm("")
        with DriverClient("fake-0", token=0) as stranger, pytest.raises(StaleToken):
            stranger.rearm("eve")
        client.rearm("ada")
        moved = client.step(RIGHT).observation["observation.state"][:3]
        assert moved[0] > still[0]


def raw(send: Callable[[Any], None]) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(driver_endpoint("fake-0"))
    try:
        send(socket)
    finally:
        socket.close()


GARBAGE = [
    [b"hello"],
    [b""],
    [b"", b""],
    [b"", b"USP1garbage"],
    [b"a", b"b"],
    [b"", b"a", b"b", b"c", b"d"],
    [b"", encode_packet(DriverRequest(order="describe", session="x"), {})[:20]],
    [b"", bytes(MAX_REQUEST_BYTES + 1)],
]


def test_malformed_requests_do_not_end_the_driver(driver: NodeProcess) -> None:
    with session(1) as client:
        for frames in GARBAGE:
            raw(lambda socket, frames=frames: socket.send_multipart(frames))  # type: ignore[misc]
        with pytest.raises(HalError, match="seed"):
            client.reset(seed=-1)
        client.real_time = True
        for frames in GARBAGE:
            raw(lambda socket, frames=frames: socket.send_multipart(frames))  # type: ignore[misc]
            assert client.step(STILL).applied is not None
    assert driver.process.poll() is None
    assert "Traceback" not in driver.log


def test_requests_without_a_command_do_not_delay_the_hold(driver: NodeProcess) -> None:
    with session(1) as client, DriverClient("fake-0") as chatty:
        client.step(RIGHT)
        before = driver.log.count("watchdog.hold")
        until(lambda: chatty.describe() or driver.log.count("watchdog.hold") > before, "it holds while somebody talks")


def test_second_run_waits_for_the_arm_and_refuses_the_first_ones_token(driver: NodeProcess, tmp_path: Path) -> None:
    driver.wait_for_log("watchdog.hold")
    with (
        DriverClient("fake-0", token=5) as zombie,
        DriverClient("fake-0", owner=str(tmp_path / "other")) as waiting,
        driver_process(tmp_path / "other", FAKE) as second,
    ):
        zombie.attach()
        assert zombie.step(STILL).applied is not None
        owner = f"pid {driver.process.pid} of {getpass.getuser()} for {tmp_path}"
        second.wait_for_log(f"robot.waiting fake-0 is driven on this machine by {owner}")
        with pytest.raises(LeaseHeld, match=f"fake-0 is driven on this machine for {tmp_path}"):
            waiting.describe()
        waiting.token = 6
        with pytest.raises(LeaseHeld):
            waiting.attach()
        assert zombie.step(STILL).applied is not None, "who waits disturbs nobody"
        driver.process.send_signal(signal.SIGTERM)
        assert driver.process.wait(60) == 0
        second.wait_for_log("watchdog.hold")
        until(lambda: _described(waiting), "the second run has its turn", 60)
        assert waiting.newest_token == 5, "the first run's token is known to the second one's driver"
        waiting.attach()
        with pytest.raises(StaleToken, match="token 5 is too old: this robot has been driven under token 6"):
            zombie.step(RIGHT)
        assert waiting.step(STILL).applied is not None


def _described(driver: DriverClient) -> bool:
    try:
        driver.describe(1.0)
        return True
    except (HardwareLost, LeaseHeld):
        return False


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"rate_hzz": 5}, "rate_hzz: unknown key; did you mean 'rate_hz'?"),
        ({"faults": {"drop_out": 5}}, "did you mean 'faults.drop_out_at'?"),
    ],
)
def test_invalid_option_is_logged_in_one_line(options: dict[str, Any], output: str, tmp_path: Path) -> None:
    with driver_process(tmp_path, RobotConfig(name="fake-0", driver="fake", options=options)) as running:
        assert running.process.wait(END_S) == EXIT_FATAL
        (line,) = error_lines(running.log)
        assert output in line


def test_lost_robot_ends_the_process_after_the_reply(tmp_path: Path) -> None:
    config = RobotConfig(name="fake-0", driver="fake", options={"faults": {"drop_out_at": 300}})
    with driver_process(tmp_path, config) as running:
        with session(1) as client, pytest.raises(HardwareLost, match="dropped out"):
            for _ in range(400):
                client.step(STILL)
        assert running.process.wait(END_S) == EXIT_ROBOT_LOST
        assert error_lines(running.log)[-1].endswith("robot.lost the fake robot dropped out")
    with driver_process(tmp_path, config, log="again.log"), session(1) as client:  # a restart connects again
        assert client.step(STILL).applied is not None


def test_killed_driver_is_detected_and_its_successor_serves(tmp_path: Path) -> None:
    with driver_process(tmp_path, FAKE) as running, session(1) as client:
        client.step(STILL)
        running.end(signal.SIGKILL)
        asked = time.monotonic()
        with pytest.raises(HardwareLost, match="ended before it answered"):
            client.reset(0)
        assert time.monotonic() - asked < RESET_DEADLINE_S, "it is not waited for as if it lived"
        with driver_process(tmp_path, FAKE, log="again.log"):
            client.attach()
            assert client.step(STILL).applied is not None
