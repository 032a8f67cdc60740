"""The client of a robot's driver process, and the messages of their local socket. None of them crosses a network."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import zmq

from hal.camera import CameraFrame
from hal.context import ClosedAtExit
from hal.errors import (
    EmergencyStopped,
    HalError,
    HardwareLost,
    LeaseHeld,
    SpecError,
    StaleObservation,
    StaleToken,
    StoppedAtRobot,
)
from hal.lease import driver_process_of
from hal.machine_folder import runtime_folder
from hal.spec import Array, RobotSpec
from hal.teleoperator import TeleopInput
from user_sys.codec import decode_packet, encode_packet
from user_sys.edge.environment import TaskInfo, TimeStep
from user_sys.errors import RunError

MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108, ZeroMQ appends a few

WAITING_LOG_PREFIX = "robot.waiting "
"""Prefix of a driver's log line that names the run which drives the robot, while the driver waits for it."""

LATCH_FILE = "e-stop.json"
"""The e-stop's latch file in the state folder of a simulated robot. A real robot's latch belongs to the computer
(`hal.machine_folder.RobotFiles.latch_path`)."""

REPLY_DEADLINE_S = 30.0
ATTACH_RETRY_S = 1.0
RESET_DEADLINE_S = 300.0  # the robot moves; a driver gives it a minute more than the path takes
LIVENESS_POLL_S = 0.2  # a killed driver process is detected within this time
RENEW_DEADLINE_S = 1.0  # a driver answers at once, during a control period too
LATCH_DEADLINE_S = 5.0  # the e-stop's latch is on disk before the reply
PERIOD_DEADLINE_S = 10.0  # longer than a control period; a driver process that hangs is detected within it
NEVER_NS = (1 << 63) - 1
_PROCESS_ID = secrets.token_hex(8)  # a later session may get the same pid
FRAME_PREFIX = "frame:"
OBSERVATION_PREFIX = "observation"

log = logging.getLogger(__name__)

DriverCommand = Literal["describe", "attach", "reset", "command", "hold", "e-stop", "re-arm", "renew"]

ERRORS_BY_NAME: dict[str, type[HalError]] = {
    kind.__name__: kind
    for kind in (
        StaleToken,
        LeaseHeld,
        SpecError,
        HardwareLost,
        StoppedAtRobot,
        StaleObservation,
        EmergencyStopped,
        HalError,
    )
}


class DriverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `order` ``command`` carries the array ``action``.

    Attributes:
        session: the sending process; the same for all its clients, and never used again.
        token: the session's fencing token; ``e-stop`` and ``describe`` need none.
        owner: state folder of the session's robot; the driver of another run refuses the request.
        reduced: apply the reduced speed limit, as while a person drives or is near.
        estop_sequence: counts a session's e-stops and re-arms; a re-arm never undoes a later e-stop.
        until_ns: when the sender stops waiting, by ``time.monotonic_ns()``; 0 is never. Later the driver refuses to
            move or re-arm the robot.
        max_gap_s: how long the session may take until its next request. A robot that does not follow the clock stands
            still meanwhile, so that its watchdog waits for as long.
        lease_until_ns: when the lease of `token` expires, by `hal.lease.lease_clock_ns`. The driver then holds until a
            request brings a later time. ``renew`` does only that, and is answered at once.
    """

    order: DriverCommand
    session: str
    token: int = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    real_time: bool = False
    reduced: bool = False
    person: str = ""
    owner: str = ""
    estop_sequence: int = msgspec.field(default=0, name="turn")
    until_ns: int = 0
    max_gap_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    lease_until_ns: int = 0


class DriverReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to one request: an error by name, a description, or a `TimeStep`.

    Attributes:
        newest_token: the newest that the driver has seen, of any run.
        latch: the e-stop's latch file that the driver reads at its next start.
        task: of a description, and of a ``reset``: that of the episode.
        stopped: of a ``re-arm``: a newer e-stop stands.
        step: without its arrays, which follow the record: the observation, ``frame:`` and a camera's name, ``applied``.
        t_frames_ns: capture time of each frame, by camera.
        hand: meaning of the array ``hand``, the local input; empty without one.
    """

    error: str = ""
    message: str = ""
    spec: RobotSpec | None = None
    task: TaskInfo | None = None
    refused_realtime: str = ""
    newest_token: int = 0
    latch: str = ""
    stopped: bool = False
    step: TimeStep | None = None
    t_frames_ns: dict[str, int] = {}
    hand: Literal["", "twist", "target", "hand-back"] = ""


def encode_time_step(time_step: TimeStep) -> tuple[DriverReply, dict[str, Array]]:
    """The reply with a time step, and its arrays."""
    local = time_step.local_input
    reply = DriverReply(
        step=replace(time_step, observation={}, frames={}, applied=None, local_input=None),
        t_frames_ns={name: frame.t_capture_ns for name, frame in time_step.frames.items()},
        hand=_meaning(local),
    )
    arrays = {**time_step.observation, **{FRAME_PREFIX + name: f.image for name, f in time_step.frames.items()}}
    if time_step.applied is not None:
        arrays["applied"] = time_step.applied
    if local is not None:
        arrays["hand"] = local.twist if local.target is None else local.target
    return reply, arrays


def _meaning(local: TeleopInput | None) -> Literal["", "twist", "target", "hand-back"]:
    if local is None:
        return ""
    return "hand-back" if local.hands_back else "twist" if local.target is None else "target"


def decode_time_step(reply: DriverReply, arrays: dict[str, Array]) -> TimeStep:
    """The time step of a reply. Raises HardwareLost: the reply has none."""
    if reply.step is None:
        raise HardwareLost("the driver sent no time step")
    local = None
    if reply.hand:
        values = arrays["hand"]
        target = values if reply.hand == "target" else None
        local = TeleopInput(
            values if target is None else np.zeros_like(values), True, target, reply.hand == "hand-back"
        )
    return replace(
        reply.step,
        observation={name: array for name, array in arrays.items() if name.startswith(OBSERVATION_PREFIX)},
        frames={name: CameraFrame(arrays[FRAME_PREFIX + name], at_ns) for name, at_ns in reply.t_frames_ns.items()},
        applied=arrays.get("applied"),
        local_input=local,
    )


def driver_endpoint(robot: str) -> str:
    """The local socket of `robot`'s driver process on this machine. Raises as `socket_endpoint`."""
    return socket_endpoint(f"{robot}.sock", "give the robot a shorter name")


def socket_endpoint(name: str, fix: str) -> str:
    """The socket `name` in this user's runtime folder. Raises RunError, with `fix`: its path is too long for one."""
    path = str(runtime_folder() / name)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise RunError(f"socket path is too long: {path}; {fix}")
    return f"ipc://{path}"


class DriverClient(ClosedAtExit):
    """The environment of a driver process. One thread uses an instance; a second thread opens its own.

    Attributes:
        spec, episode_task, latch_path: set by `describe` and `attach`; the task by `reset` too. `latch_path` is the
            e-stop's latch file that the driver reads at its next start.
        refused_realtime: the real-time settings that the system refused the driver process; empty if it refused none.
        newest_token: the newest token that the driver has seen.
        real_time: control periods follow the clock; otherwise a simulated robot runs as fast as it can.
        reduced_speed: the safety kernel limits speeds to ``limits.reduced_speed``, as while a person drives or is near.
        max_gap_s: see `DriverRequest`.
        lease_until_ns: see `DriverRequest`. It stays as it is without a lease of a gateway.
        on_reset_wait: called several times a second while `reset` waits for the driver, in the thread that calls it.
    """

    spec: RobotSpec
    episode_task: TaskInfo
    latch_path: Path

    def __init__(self, robot: str, *, token: int = 0, owner: str = "", shutdown: threading.Event | None = None) -> None:
        """Args:
        owner: the state folder of the robot; a driver of another owner refuses `attach`.
        shutdown: when it is set, `attach` and `describe` stop waiting.
        """
        self.robot, self.token, self._owner = robot, token, owner
        self.session = f"pid {os.getpid()} {_PROCESS_ID}"
        self.real_time = self.reduced_speed = False
        self.refused_realtime = ""
        self.newest_token = 0
        self.lease_until_ns, self.max_gap_s = NEVER_NS, 0.0
        self._socket: zmq.Socket[bytes] | None = None
        self._shutdown = shutdown or threading.Event()
        self.on_reset_wait: Callable[[], object] = lambda: None

    def open(self) -> None:
        """Opens the socket. A process's first socket starts libzmq's threads, with the scheduling of the caller."""
        self._connect()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def attach(self, deadline_s: float = REPLY_DEADLINE_S) -> None:
        """Registers the session's token. The driver then refuses every older token.

        Raises:
            StaleToken: a newer session has the robot.
            LeaseHeld: another run drives the robot.
            HardwareLost: no driver process answers within the deadline.
        """
        self._read_description("attach", deadline_s)

    def describe(self, deadline_s: float = REPLY_DEADLINE_S) -> None:
        """Reads spec and task. Needs no token. Raises LeaseHeld and HardwareLost as `attach` does."""
        self._read_description("describe", deadline_s)

    def wait_until_free(self, shutdown: threading.Event, deadline_s: float) -> bool:
        """Waits until no other run drives the robot, then calls `describe`. False: `shutdown` was set first.

        Raises:
            HardwareLost: no driver process answers within the deadline.
        """
        last_message = ""
        while not shutdown.is_set():
            try:
                self.describe(deadline_s)
                return True
            except LeaseHeld as error:
                if str(error) != last_message:
                    last_message = str(error)
                    log.warning("session.waiting %s", last_message)
                shutdown.wait(ATTACH_RETRY_S)
            except HardwareLost:
                if not shutdown.is_set():
                    raise
        return False

    def _read_description(self, order: DriverCommand, deadline_s: float) -> None:
        reply, _ = self._request(order, deadline_s=deadline_s)
        if reply.spec is None or reply.task is None:
            raise HardwareLost(f"the driver of {self.robot} sent no spec or no task")
        self.spec, self.episode_task, self.refused_realtime = reply.spec, reply.task, reply.refused_realtime
        self.newest_token, self.latch_path = reply.newest_token, Path(reply.latch)

    def reset(self, seed: int) -> TimeStep:
        reply, arrays = self._request("reset", seed=seed, deadline_s=RESET_DEADLINE_S)
        self.episode_task = reply.task or self.episode_task
        return decode_time_step(reply, arrays)

    def step(self, action: Array) -> TimeStep:
        return decode_time_step(*self._request("command", {"action": action}, deadline_s=PERIOD_DEADLINE_S))

    def hold(self) -> TimeStep:
        return decode_time_step(*self._request("hold", deadline_s=PERIOD_DEADLINE_S))

    def renew_lease(self, token: int, lease_until_ns: int) -> None:
        """Sends the driver the expiry of the lease, even while it executes a request of another client.

        Raises:
            StaleToken: a newer session has the robot.
            HardwareLost: no driver process answers.
        """
        self.token, self.lease_until_ns = token, lease_until_ns
        self._request("renew", deadline_s=RENEW_DEADLINE_S)

    def emergency_stop(self, person: str, estop_sequence: int = 0) -> None:
        """Latches the e-stop. Needs no token. `estop_sequence`: see `DriverRequest`."""
        self._request("e-stop", person=person, estop_sequence=estop_sequence, deadline_s=LATCH_DEADLINE_S)

    def rearm(self, person: str, estop_sequence: int = 0) -> bool:
        """Releases the e-stop on behalf of a person. False: it was pressed again after `estop_sequence`, and stands."""
        reply, _ = self._request("re-arm", person=person, estop_sequence=estop_sequence, deadline_s=LATCH_DEADLINE_S)
        return not reply.stopped

    def _connect(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.REQ)
            self._socket.connect(driver_endpoint(self.robot))
        return self._socket

    def _request(
        self,
        order: DriverCommand,
        arrays: dict[str, Array] | None = None,
        *,
        seed: int = 0,
        person: str = "",
        estop_sequence: int = 0,
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
            estop_sequence=estop_sequence,
            until_ns=time.monotonic_ns() + int(deadline_s * 1e9),
            max_gap_s=self.max_gap_s,
            lease_until_ns=self.lease_until_ns,
        )
        socket.send(encode_packet(request, arrays or {}))
        self._await_reply(socket, order, deadline_s)
        reply, received = decode_packet(socket.recv(), DriverReply)
        if reply.error:
            raise ERRORS_BY_NAME.get(reply.error, HalError)(reply.message)
        return reply, received

    def _await_reply(self, socket: zmq.Socket[bytes], order: DriverCommand, deadline_s: float) -> None:
        """Waits for the reply. Detects the death of the driver process before the deadline."""
        end, has_ended = time.monotonic() + deadline_s, False
        while not has_ended and (left_s := end - time.monotonic()) > 0:
            if socket.poll(int(min(left_s, LIVENESS_POLL_S) * 1000)):
                return
            if order == "reset":
                self.on_reset_wait()
            if order not in ("attach", "describe"):
                has_ended = not driver_process_of(self.robot)
            elif self._shutdown.is_set():
                break
        self.close()  # a REQ socket without its reply cannot be used again
        why = "ended before it answered" if has_ended else f"did not answer {order!r} within {deadline_s:g} s"
        raise HardwareLost(f"the driver of {self.robot} {why}")
