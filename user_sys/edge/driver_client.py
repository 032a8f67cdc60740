"""What a session and its driver process say to each other, over one local socket. Nothing here crosses a network.

A session's end of the local socket to its robot's driver process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

import msgspec
import numpy as np
import zmq

from hal.camera import CameraFrame
from hal.errors import EmergencyStopped, HalError, HardwareLost, LeaseHeld, SpecError, StaleObservation, StaleToken
from hal.lease import driver_process_of
from hal.machine_folder import runtime_folder
from hal.spec import Array, RobotSpec
from hal.task import TaskOutcome
from hal.teleoperator import TeleopInput
from user_sys.codec import decode_packet, encode_packet
from user_sys.edge.environment import TimeStep
from user_sys.errors import RunError

MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108, ZeroMQ appends a few

WAITING_LOG_PREFIX = "robot.waiting "
"""How a driver's log line starts whose words say for whom the robot is driven while it waits for its turn."""

LATCH_FILE = "e-stop.json"
"""Where in a run's folder of a simulated robot its e-stop's latch is kept. That of a real one is the computer's
(`hal.machine_folder.RobotFiles.latch`)."""


DriverCommand = Literal["describe", "attach", "reset", "command", "hold", "e-stop", "re-arm", "renew"]

ERRORS_BY_NAME: dict[str, type[HalError]] = {
    kind.__name__: kind
    for kind in (StaleToken, LeaseHeld, SpecError, HardwareLost, StaleObservation, EmergencyStopped, HalError)
}


class DriverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One order. `token` fences it; ``e-stop`` is obeyed from anyone. ``command`` carries the array ``action``.

    `owner` is the state folder of the session's robot: the driver of another run refuses to be attached to.
    `reduced` asks for the speed that is allowed while a person drives or is near.
    `estop_sequence` counts a session's e-stops and re-arms as people gave them: a re-arm lifts no e-stop of a later
    turn. `until_ns`, where it is not 0, is when the sender stops waiting, by ``time.monotonic_ns()``: what would move
    or arm the robot after that is refused.
    `lease_until_ns` is when the lease under `token` runs out, by `hal.lease.lease_clock_ns`. After that the driver
    holds, unless a request has brought a later time: ``renew`` does nothing else, and is answered at once.
    """

    order: DriverCommand
    session: str
    token: int = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    real_time: bool = False
    reduced: bool = False
    person: str = ""
    owner: str = ""
    estop_sequence: int = 0
    until_ns: int = 0
    lease_until_ns: int = 0


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a session must know of the task."""

    name: str
    sentence: str
    max_steps: int


class DriverReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request: an error by name, or what a `driver.Tick` holds (its arrays travel beside it).

    `newest_token` is the newest that the driver has seen, under whichever run.
    `latch` is the file of the e-stop's latch that the driver finds at its next start.
    `hand` says what the array ``hand`` is, where a person's hand is on an input device.
    `t_frames_ns` tells by camera when each picture that travels along was captured.
    """

    error: str = ""
    message: str = ""
    spec: RobotSpec | None = None
    task: TaskInfo | None = None
    refused_realtime: str = ""
    newest_token: int = 0
    latch: str = ""
    t_capture_ns: int = 0
    t_frames_ns: dict[str, int] = {}
    t_command_ns: int = 0
    reasons: int = 0
    reward: float = 0.0
    terminated: bool = False
    success: bool | None = None
    source: str = "rule"
    held: int = 0
    stopped: bool = False
    stopped_by: str = ""
    hand: Literal["", "twist", "target"] = ""

    @property
    def outcome(self) -> TaskOutcome:
        return TaskOutcome(reward=self.reward, terminated=self.terminated, success=self.success, source=self.source)


def driver_endpoint(robot: str) -> str:
    """The local socket of `robot`'s driver process on this machine.

    Raises:
        RunError: the path is too long for a Unix socket.
    """
    path = str(runtime_folder() / f"{robot}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise RunError(f"socket path is too long: {path}; give the robot a shorter name")
    return f"ipc://{path}"


log = logging.getLogger(__name__)

REPLY_DEADLINE_S = 30.0
ATTACH_RETRY_S = 1.0
RESET_DEADLINE_S = 300.0  # the robot moves to its start; a driver gives it a minute more than the way takes
LIVENESS_POLL_S = 0.2  # one that was killed shows within this
RENEW_DEADLINE_S = 1.0  # a driver answers it at once, in the middle of a control period too
LATCH_DEADLINE_S = 5.0  # the e-stop's latch is on the disk before it is said to be pressed or released
PERIOD_DEADLINE_S = 10.0  # beyond a control period; a driver process that hangs shows within it
NEVER_NS = (1 << 63) - 1
FRAME_PREFIX = "frame:"
OBSERVATION_PREFIX = "observation"


class DriverClient:
    """A `Environment` over the local socket. One thread uses an instance; a second thread opens its own.

    Attributes:
        spec, task: known after `describe` or `attach`.
        refused_realtime: what the driver process asked of the system in vain; empty where it has all that it wants.
        newest_token: the newest token that the driver has seen.
        real_time: the driver paces by the clock; otherwise a simulated robot runs as fast as it can.
        reduced_speed: a person drives or is near: the safety kernel allows ``limits.reduced_speed`` of each speed only.
        lease_until_ns: see `Request`; who drives without a lease of a gateway's leaves it as it is.
        latch_path: the file of the e-stop's latch that the driver finds at its next start; known as `spec` is.
    """

    spec: RobotSpec
    task: TaskInfo
    latch_path: Path

    def __init__(self, robot: str, *, token: int = 0, owner: str = "", shutdown: threading.Event | None = None) -> None:
        """Args:
        owner: the state folder of the robot; a driver that drives it for another is not attached to.
        leaving: once it is set, `attach` and `describe` wait no longer.
        """
        self.robot, self.token, self._owner = robot, token, owner
        self.session = f"pid {os.getpid()}"
        self.real_time = self.reduced_speed = False
        self.refused_realtime = ""
        self.newest_token = 0
        self.lease_until_ns = NEVER_NS
        self._socket: zmq.Socket[bytes] | None = None
        self._leaving = shutdown or threading.Event()
        self._address = driver_endpoint(robot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def open(self) -> None:
        """Opens its socket, and with the first of a process libzmq's threads, which are scheduled as the caller is."""
        self._connect()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def attach(self, deadline_s: float = REPLY_DEADLINE_S) -> None:
        """Announces the session and its token; from then on the driver refuses every older one.

        Raises:
            StaleToken: a newer session has the robot.
            LeaseHeld: the robot is driven for another run.
            HardwareLost: no driver process answers within the deadline.
        """
        self._introduce("attach", deadline_s)

    def describe(self, deadline_s: float = REPLY_DEADLINE_S) -> None:
        """Learns spec and task without a token. Raises LeaseHeld and HardwareLost as `attach` does."""
        self._introduce("describe", deadline_s)

    def wait_until_free(self, shutdown: threading.Event, deadline_s: float) -> bool:
        """`describe`, once the driver does not work for another run. False: `leaving` was set first.

        Raises:
            HardwareLost: no driver process answers within the deadline.
        """
        said = ""
        while not shutdown.is_set():
            try:
                self.describe(deadline_s)
                return True
            except LeaseHeld as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("session.waiting %s", said)
                shutdown.wait(ATTACH_RETRY_S)
            except HardwareLost:
                if not shutdown.is_set():
                    raise
        return False

    def _introduce(self, order: DriverCommand, deadline_s: float) -> None:
        reply, _ = self._ask(order, deadline_s=deadline_s)
        if reply.spec is None or reply.task is None:
            raise HardwareLost(f"the driver of {self.robot} did not say what it drives")
        self.spec, self.task, self.refused_realtime = reply.spec, reply.task, reply.refused_realtime
        self.newest_token, self.latch_path = reply.newest_token, Path(reply.latch)

    def reset(self, seed: int) -> TimeStep:
        return self._tick(*self._ask("reset", seed=seed, deadline_s=RESET_DEADLINE_S))

    def step(self, action: Array) -> TimeStep:
        return self._tick(*self._ask("command", {"action": action}, deadline_s=PERIOD_DEADLINE_S))

    def hold(self) -> TimeStep:
        return self._tick(*self._ask("hold", deadline_s=PERIOD_DEADLINE_S))

    def renew_lease(self, token: int, lease_until_ns: int) -> None:
        """Tells the driver how long the lease is valid, also while it is busy with an order of another `DriverClient`.

        Raises:
            StaleToken: a newer session has the robot.
            HardwareLost: no driver process answers.
        """
        self.token, self.lease_until_ns = token, lease_until_ns
        self._ask("renew", deadline_s=RENEW_DEADLINE_S)

    def emergency_stop(self, person: str, estop_sequence: int = 0) -> None:
        """Latches the e-stop. Needs no token. `turn`: see `Request`."""
        self._ask("e-stop", person=person, turn=estop_sequence, deadline_s=LATCH_DEADLINE_S)

    def rearm(self, person: str, estop_sequence: int = 0) -> bool:
        """Releases the e-stop in the name of a person; False where it was pressed again after `turn`, and stands."""
        return not self._ask("re-arm", person=person, turn=estop_sequence, deadline_s=LATCH_DEADLINE_S)[0].stopped

    def _connect(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.REQ)
            self._socket.connect(self._address)
        return self._socket

    def _ask(
        self,
        order: DriverCommand,
        arrays: dict[str, Array] | None = None,
        *,
        seed: int = 0,
        person: str = "",
        turn: int = 0,
        deadline_s: float = REPLY_DEADLINE_S,
    ) -> tuple[DriverReply, dict[str, Array]]:
        socket = self._connect()
        request = DriverRequest(
            order=order,
            session=self.session,
            token=self.token,
            seed=seed,
            real_time=self.real_time,
            reduced=self.reduced_speed,
            person=person,
            owner=self._owner if order in ("describe", "attach") else "",
            estop_sequence=turn,
            until_ns=time.monotonic_ns() + int(deadline_s * 1e9),
            lease_until_ns=self.lease_until_ns,
        )
        socket.send(encode_packet(request, arrays or {}))
        self._await_reply(socket, order, deadline_s)
        reply, received = decode_packet(socket.recv(), DriverReply)
        if reply.error:
            raise ERRORS_BY_NAME.get(reply.error, HalError)(reply.message)
        return reply, received

    def _await_reply(self, socket: zmq.Socket[bytes], order: DriverCommand, deadline_s: float) -> None:
        """A driver process that dies with our order in hand is noticed at once, however long the order may take."""
        end = time.monotonic() + deadline_s
        while (left_s := end - time.monotonic()) > 0:
            if socket.poll(int(min(left_s, LIVENESS_POLL_S) * 1000)):
                return
            introduces = order in ("attach", "describe")
            if self._leaving.is_set() if introduces else not driver_process_of(self.robot):
                break
        self.close()  # a REQ socket without its reply cannot be used again
        raise HardwareLost(f"the driver of {self.robot} did not answer {order!r} within {deadline_s:g} s")

    def _tick(self, reply: DriverReply, arrays: dict[str, Array]) -> TimeStep:
        return TimeStep(
            observation={name: array for name, array in arrays.items() if name.startswith(OBSERVATION_PREFIX)},
            frames={name: CameraFrame(arrays[FRAME_PREFIX + name], at_ns) for name, at_ns in reply.t_frames_ns.items()},
            t_capture_ns=reply.t_capture_ns,
            applied=arrays.get("applied"),
            safety_reasons=reply.reasons,
            t_command_ns=reply.t_command_ns,
            outcome=reply.outcome,
            held_periods=reply.held,
            stopped=reply.stopped,
            stopped_by=reply.stopped_by,
            local_input=_local_input(reply, arrays),
        )


def _local_input(reply: DriverReply, arrays: dict[str, Array]) -> TeleopInput | None:
    if not reply.hand:
        return None
    told = arrays["hand"]
    return TeleopInput(told, True) if reply.hand == "twist" else TeleopInput(np.zeros_like(told), True, told)
