"""A session's end of the local socket to its robot's driver process."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from hal.camera import Frame
from hal.errors import HalError, HardwareLost, LeaseHeld
from hal.lease import driver_of
from hal.spec import Array, RobotSpec
from hal.teleoperator import TeleopInput
from user_sys.codec import decode_packet, encode_packet
from user_sys.edge.driver import Tick
from user_sys.edge.driver_wire import ERRORS, Order, Reply, Request, TaskCard, endpoint

log = logging.getLogger(__name__)

REPLY_DEADLINE_S = 30.0
TURN_EVERY_S = 1.0
RESET_DEADLINE_S = 300.0  # the robot moves to its start; a driver gives it a minute more than the way takes
LIFE_SIGN_S = 0.2  # one that was killed shows within this
RENEW_DEADLINE_S = 1.0  # a driver answers it at once, in the middle of a control period too
LATCH_DEADLINE_S = 5.0  # the e-stop's latch is on the disk before it is said to be pressed or released
PERIOD_DEADLINE_S = 10.0  # beyond a control period; a driver process that hangs shows within it
NO_END_NS = (1 << 63) - 1
FRAME = "frame:"
OBSERVATION = "observation"


class RemoteDriver:
    """A `DriverPort` over the local socket. One thread uses an instance; a second thread opens its own.

    Attributes:
        spec, task: known after `describe` or `attach`.
        refused_realtime: what the driver process asked of the system in vain; empty where it has all that it wants.
        newest_token: the newest token that the driver has seen.
        real_time: the driver paces by the clock; otherwise a simulated robot runs as fast as it can.
        reduced: a person drives or is near: the safety kernel allows ``limits.reduced_speed`` of each speed only.
        lease_until_ns: see `Request`; who drives without a lease of a gateway's leaves it as it is.
        latch: the file of the e-stop's latch that the driver finds at its next start; known as `spec` is.
    """

    spec: RobotSpec
    task: TaskCard
    latch: Path

    def __init__(self, robot: str, *, token: int = 0, owner: str = "", leaving: threading.Event | None = None) -> None:
        """Args:
        owner: the state folder of the robot; a driver that drives it for another is not attached to.
        leaving: once it is set, `attach` and `describe` wait no longer.
        """
        self.robot, self.token, self._owner = robot, token, owner
        self.session = f"pid {os.getpid()}"
        self.real_time = self.reduced = False
        self.refused_realtime = ""
        self.newest_token = 0
        self.lease_until_ns = NO_END_NS
        self._socket: zmq.Socket[bytes] | None = None
        self._leaving = leaving or threading.Event()
        self._address = endpoint(robot)

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

    def await_turn(self, leaving: threading.Event, deadline_s: float) -> bool:
        """`describe`, once the driver does not work for another run. False: `leaving` was set first.

        Raises:
            HardwareLost: no driver process answers within the deadline.
        """
        said = ""
        while not leaving.is_set():
            try:
                self.describe(deadline_s)
                return True
            except LeaseHeld as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("session.waiting %s", said)
                leaving.wait(TURN_EVERY_S)
            except HardwareLost:
                if not leaving.is_set():
                    raise
        return False

    def _introduce(self, order: Order, deadline_s: float) -> None:
        reply, _ = self._ask(order, deadline_s=deadline_s)
        if reply.spec is None or reply.task is None:
            raise HardwareLost(f"the driver of {self.robot} did not say what it drives")
        self.spec, self.task, self.refused_realtime = reply.spec, reply.task, reply.refused_realtime
        self.newest_token, self.latch = reply.newest_token, Path(reply.latch)

    def reset(self, seed: int) -> Tick:
        return self._tick(*self._ask("reset", seed=seed, deadline_s=RESET_DEADLINE_S))

    def command(self, action: Array) -> Tick:
        return self._tick(*self._ask("command", {"action": action}, deadline_s=PERIOD_DEADLINE_S))

    def hold(self) -> Tick:
        return self._tick(*self._ask("hold", deadline_s=PERIOD_DEADLINE_S))

    def renew(self, token: int, lease_until_ns: int) -> None:
        """Tells the driver how long the lease is valid, also while it is busy with an order of another `RemoteDriver`.

        Raises:
            StaleToken: a newer session has the robot.
            HardwareLost: no driver process answers.
        """
        self.token, self.lease_until_ns = token, lease_until_ns
        self._ask("renew", deadline_s=RENEW_DEADLINE_S)

    def emergency_stop(self, person: str, turn: int = 0) -> None:
        """Latches the e-stop. Needs no token. `turn`: see `Request`."""
        self._ask("e-stop", person=person, turn=turn, deadline_s=LATCH_DEADLINE_S)

    def rearm(self, person: str, turn: int = 0) -> bool:
        """Releases the e-stop in the name of a person; False where it was pressed again after `turn`, and stands."""
        return not self._ask("re-arm", person=person, turn=turn, deadline_s=LATCH_DEADLINE_S)[0].stopped

    def _connect(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.REQ)
            self._socket.connect(self._address)
        return self._socket

    def _ask(
        self,
        order: Order,
        arrays: dict[str, Array] | None = None,
        *,
        seed: int = 0,
        person: str = "",
        turn: int = 0,
        deadline_s: float = REPLY_DEADLINE_S,
    ) -> tuple[Reply, dict[str, Array]]:
        socket = self._connect()
        request = Request(
            order=order,
            session=self.session,
            token=self.token,
            seed=seed,
            real_time=self.real_time,
            reduced=self.reduced,
            person=person,
            owner=self._owner if order in ("describe", "attach") else "",
            turn=turn,
            until_ns=time.monotonic_ns() + int(deadline_s * 1e9),
            lease_until_ns=self.lease_until_ns,
        )
        socket.send(encode_packet(request, arrays or {}))
        self._await_reply(socket, order, deadline_s)
        reply, received = decode_packet(socket.recv(), Reply)
        if reply.error:
            raise ERRORS.get(reply.error, HalError)(reply.message)
        return reply, received

    def _await_reply(self, socket: zmq.Socket[bytes], order: Order, deadline_s: float) -> None:
        """A driver process that dies with our order in hand is noticed at once, however long the order may take."""
        end = time.monotonic() + deadline_s
        while (left_s := end - time.monotonic()) > 0:
            if socket.poll(int(min(left_s, LIFE_SIGN_S) * 1000)):
                return
            introduces = order in ("attach", "describe")
            if self._leaving.is_set() if introduces else not driver_of(self.robot):
                break
        self.close()  # a REQ socket without its reply cannot be used again
        raise HardwareLost(f"the driver of {self.robot} did not answer {order!r} within {deadline_s:g} s")

    def _tick(self, reply: Reply, arrays: dict[str, Array]) -> Tick:
        return Tick(
            observation={name: array for name, array in arrays.items() if name.startswith(OBSERVATION)},
            frames={name: Frame(arrays[FRAME + name], at_ns) for name, at_ns in reply.t_frames_ns.items()},
            t_capture_ns=reply.t_capture_ns,
            applied=arrays.get("applied"),
            reasons=reply.reasons,
            t_command_ns=reply.t_command_ns,
            outcome=reply.outcome,
            held=reply.held,
            stopped=reply.stopped,
            stopped_by=reply.stopped_by,
            hand=_hand(reply, arrays),
        )


def _hand(reply: Reply, arrays: dict[str, Array]) -> TeleopInput | None:
    if not reply.hand:
        return None
    told = arrays["hand"]
    return TeleopInput(told, True) if reply.hand == "twist" else TeleopInput(np.zeros_like(told), True, told)
