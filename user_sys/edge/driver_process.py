"""The driver process: ``python -m user_sys.edge.driver_process ROBOT.yaml``.

It owns the robot for as long as it lives, obeys the session with the newest token, and keeps the robot safe when
nobody speaks: after ``watchdog_periods`` control periods without a command it holds, ``safe_stop_after_s`` later it
safe-stops. A session may be killed, stopped or replaced at any time without the robot noticing more than a hold.

It imports no torch, opens no network connection, and listens on one socket in a folder that only its user can enter.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path

import zmq

from hal.errors import HalError, SpecError
from hal.lease import Fence, MachineLock
from hal.safety import SafetyKernel
from hal.spec import ACTION, Array
from user_sys.codec import decode_packet, encode_packet
from user_sys.compose import RobotConfig, Station, build_station
from user_sys.config import load
from user_sys.edge.driver import Driver, Tick
from user_sys.edge.driver_client import FRAME
from user_sys.edge.driver_wire import Reply, Request, TaskCard, endpoint
from user_sys.errors import WireError
from user_sys.logs import configure_logging

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20


class DriverServer:
    """Serves one robot on its local socket. `run` blocks; `stop` may be set from any thread or signal."""

    def __init__(self, driver: Driver, station: Station, fence: Fence, address: str) -> None:
        self._driver, self._station, self._fence, self._address = driver, station, fence, address
        self._period_ns = int(driver.spec.period_s * 1e9)
        self._next_ns = time.monotonic_ns()
        self._held = 0
        self.stop = threading.Event()

    def run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self._address)
        self._last_order_ns = time.monotonic_ns()
        try:
            while not self.stop.is_set():
                self._serve(socket)
        finally:
            socket.close()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        """Waits for one request until the watchdog is due, and answers it or holds."""
        wait_ns = self._watchdog_due_ns() - time.monotonic_ns()
        if not socket.poll(max(0, -(-wait_ns // 1_000_000))):
            self._guard()
            return
        identity, _, packet = socket.recv_multipart()[:3]
        reply, arrays = self._answer(packet, socket)
        socket.send_multipart([identity, b"", encode_packet(reply, arrays)])

    def _watchdog_due_ns(self) -> int:
        """Two control periods after the last command, then once a period."""
        patience = self._driver.spec.limits.watchdog_periods
        return self._last_order_ns + (patience + self._held) * self._period_ns

    def _guard(self) -> None:
        if self._held == 0:
            log.info("watchdog.hold robot=%s: no command for two control periods", self._station.name)
        self._held += 1
        self._driver.guard()

    def _answer(self, packet: bytes, socket: zmq.Socket[bytes]) -> tuple[Reply, dict[str, Array]]:
        try:
            request, arrays = decode_packet(packet, Request)
            return self._obey(request, arrays, socket)
        except (HalError, WireError) as error:
            log.warning("order.refused %s: %s", type(error).__name__, error)
            return Reply(error=type(error).__name__, message=str(error)), {}

    def _obey(
        self, request: Request, arrays: dict[str, Array], socket: zmq.Socket[bytes]
    ) -> tuple[Reply, dict[str, Array]]:
        kernel = self._driver.kernel
        if request.order == "e-stop":
            kernel.emergency_stop(request.person)
            self._driver.guard()
            return Reply(), {}
        if request.order == "describe":
            return self._card(), {}
        self._fence.admit(request.token)
        if request.order == "re-arm":
            kernel.rearm(request.person)
            return Reply(), {}
        if request.order == "attach":
            log.info("session.attached robot=%s %s token=%d", self._station.name, request.session, request.token)
            return self._card(), {}
        return self._advance(request, arrays, socket)

    def _card(self) -> Reply:
        task = self._station.task
        card = TaskCard(name=task.name, sentence=task.sentence, max_steps=task.max_steps)
        return Reply(spec=self._driver.spec, task=card)

    def _advance(
        self, request: Request, arrays: dict[str, Array], socket: zmq.Socket[bytes]
    ) -> tuple[Reply, dict[str, Array]]:
        self._driver.real_time = request.real_time
        held, self._held = self._held, 0
        if request.order == "reset":
            tick = self._driver.reset(request.seed)
        elif request.order == "hold":
            tick = self._driver.hold()
        else:
            if ACTION not in arrays:
                raise SpecError("a command without an action")
            tick = self._driver.command(arrays[ACTION])
        if request.real_time:
            self._await_period(socket)
        self._last_order_ns = time.monotonic_ns()
        return _reply(tick, held)

    def _await_period(self, socket: zmq.Socket[bytes]) -> None:
        """Sleeps to the end of the control period, on a fixed grid; obeys an e-stop meanwhile.

        The grid starts anew when a period was missed, so that lateness is never made up by haste.
        """
        now = time.monotonic_ns()
        self._next_ns += self._period_ns
        if not now <= self._next_ns <= now + 2 * self._period_ns:
            self._next_ns = now + self._period_ns
        while (left_ns := self._next_ns - time.monotonic_ns()) > 0 and not self.stop.is_set():
            if socket.poll(left_ns // 1_000_000):
                identity, _, packet = socket.recv_multipart()[:3]
                reply = self._while_waiting(packet)
                socket.send_multipart([identity, b"", encode_packet(reply, {})])
            elif left_ns < 2_000_000:
                time.sleep(max(0, self._next_ns - time.monotonic_ns()) / 1e9)

    def _while_waiting(self, packet: bytes) -> Reply:
        try:
            request, _ = decode_packet(packet, Request)
        except WireError as error:
            return Reply(error="WireError", message=str(error))
        if request.order != "e-stop":
            return Reply(error="HalError", message="the robot is in the middle of another session's control period")
        self._driver.kernel.emergency_stop(request.person)
        self._driver.guard()
        return Reply()


def _reply(tick: Tick, held: int) -> tuple[Reply, dict[str, Array]]:
    outcome = tick.outcome
    reply = Reply(
        t_capture_ns=tick.t_capture_ns,
        t_command_ns=tick.t_command_ns,
        reasons=tick.reasons,
        reward=outcome.reward,
        terminated=outcome.terminated,
        success=outcome.success,
        source=outcome.source,
        held=held,
        stopped=tick.stopped,
    )
    arrays = {**tick.observation, **{FRAME + name: frame for name, frame in tick.frames.items()}}
    if tick.applied is not None:
        arrays["applied"] = tick.applied
    return reply, arrays


def main(argv: list[str]) -> int:
    """Runs one robot's driver until SIGTERM. `argv`: the robot's YAML file and its state folder."""
    config = load(RobotConfig, Path(argv[0]), [])
    state = Path(argv[1])
    state.mkdir(parents=True, exist_ok=True)
    configure_logging()
    with MachineLock(config.name, holder=f"driver process of {state.resolve()}"):
        station = build_station(config)
        kernel = SafetyKernel(station.robot.spec, latch_path=state / "e-stop.json")
        driver = Driver(station.robot, station.task, kernel, station.cameras, frame_stride=config.frame_stride)
        driver.connect()
        server = DriverServer(driver, station, Fence(state / "fence.json"), endpoint(config.name))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop.set())
        try:
            server.run()
        finally:
            driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
