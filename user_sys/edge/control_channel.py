"""Keeps a session's lease alive over the tunnel.

People's e-stops on their way through a session: from the tunnel to the robot's driver, and its confirmation back.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from hal.errors import HalError, LeaseError
from hal.estop import EstopLatch, new_emergency_stop
from hal.lease import lease_clock_ns
from user_sys.edge.driver_client import DriverClient
from user_sys.errors import SessionRefused
from user_sys.messages import (
    LeaseGrant,
    LeaseRefusal,
    LeaseRelease,
    LeaseRequest,
    OperatorCommand,
    OperatorReply,
    StopRun,
)
from user_sys.tunnel.client import TunnelClient, TunnelState

log = logging.getLogger(__name__)

REQUEST_PERIOD_S = 1.0
RENEWALS_PER_TTL = 3


class LeaseClient:
    """The lease of one robot. `acquire` comes first; afterwards one thread feeds it messages and asks it to renew.

    A link that is down does not end the session: a refusal does. The robot goes on until `until_ns`, after which its
    driver holds it; a renewal that is granted later lets it go on.
    """

    def __init__(self, robot: str, holder: str, client: TunnelClient, min_token: int = 0) -> None:
        """`floor`: the newest token that the robot's driver has seen, of another run perhaps."""
        self._robot, self._holder, self._client, self._floor = robot, holder, client, min_token
        self._token = 0
        self._renew_at = 0.0
        self._ttl_s = 0.0
        self._until_ns = 0

    def acquire(self, shutdown: threading.Event) -> int:
        """Asks until the lease is granted, and returns its token. Blocks; says once who holds the robot meanwhile.

        Returns:
            The token; 0 where `leaving` was set, or the run ended, first.

        Raises:
            Refused: the gateway does not let us in.
        """
        said = ""
        while not shutdown.is_set():
            self._require_tunnel()
            asked_ns = lease_clock_ns()
            request = LeaseRequest(robot=self._robot, holder=self._holder, floor=self._floor, asked_ns=asked_ns)
            self._client.send(request)
            answer = self._answer(REQUEST_PERIOD_S)
            if isinstance(answer, LeaseGrant):
                self._take(answer)
                log.info("lease.granted robot=%s token=%d", self._robot, answer.token)
                return answer.token
            if isinstance(answer, LeaseRefusal) and answer.reason != said:
                said = answer.reason
                log.warning("lease.waiting %s", said)
            if isinstance(answer, StopRun):
                log.info("run.stopped %s", answer.reason)
                return 0
            if isinstance(answer, LeaseRefusal):
                shutdown.wait(REQUEST_PERIOD_S)
        return 0

    def _answer(self, within_s: float) -> LeaseGrant | LeaseRefusal | StopRun | None:
        end = time.monotonic() + within_s
        while (left_s := end - time.monotonic()) > 0:
            message = self._client.receive(left_s)
            if isinstance(message, LeaseGrant | LeaseRefusal | StopRun):
                return message
        return None

    def _require_tunnel(self) -> None:
        if self._client.state is TunnelState.REFUSED:
            raise SessionRefused(self._client.reason)

    @property
    def token(self) -> int:
        """The newest token that was granted; 0 before the first."""
        return self._token

    @property
    def until_ns(self) -> int:
        """When the lease runs out, by `lease_clock_ns`."""
        return self._until_ns

    def is_expired(self) -> bool:
        """Whether the lease has run out, so that the driver holds the robot."""
        return lease_clock_ns() >= self._until_ns

    def on_message(self, message: LeaseGrant | LeaseRefusal) -> None:
        """Takes an answer. Where `acquire` asked twice, as a gateway that is slow makes it do, the second answer brings
        a newer token, under which the robot is driven from then on, and what was said of the older one is void.

        Raises:
            LeaseError: another session has the robot now.
        """
        if isinstance(message, LeaseGrant):
            if message.token >= self._token:
                self._take(message)
        elif message.token == self._token:
            raise LeaseError(f"the lease of {self._robot} has ended: {message.reason}")

    def renew_if_due(self) -> None:
        """Sends a renewal when a third of the time to live has passed; never blocks.

        Raises:
            Refused: the gateway does not let us in any more.
        """
        self._require_tunnel()
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + self._ttl_s / RENEWALS_PER_TTL
            asked_ns = lease_clock_ns()
            request = LeaseRequest(robot=self._robot, holder=self._holder, token=self._token, asked_ns=asked_ns)
            self._client.send(request)

    def release(self) -> None:
        """Gives the robot back; never blocks."""
        if self._token:
            self._client.send(LeaseRelease(robot=self._robot, token=self._token))

    def _take(self, grant: LeaseGrant) -> None:
        until_ns = min(grant.asked_ns, lease_clock_ns()) + round(grant.ttl_s * 1e9)
        self._until_ns = until_ns if grant.token > self._token else max(self._until_ns, until_ns)
        self._token, self._ttl_s = grant.token, grant.ttl_s
        self._renew_at = time.monotonic() + self._ttl_s / RENEWALS_PER_TTL


RECEIVE_WAIT_S = 0.25  # bounds how long `__exit__` waits; an e-stop ends the wait at once
RETRY_S = 0.05
MAX_CONFIRMED = 256
CLOSE_TIMEOUT_S = 10.0  # longer than the driver has to answer


class EmergencyStopForwarder:
    """Carries e-stops to the driver in a thread of its own, on a channel and a local socket of their own.

    It runs from `__enter__` to `__exit__` and needs no lease. An e-stop that the driver has not confirmed is sent
    again until it is; a driver that is away finds it on the disk, even if this session has ended by then. A press that
    was confirmed is confirmed again without another stop, so a repeat that comes after a re-arm does nothing.

    Attributes:
        on_press: called with each new press before the driver is asked; must return at once.
    """

    def __init__(self, robot: str, client: TunnelClient, latch: Path) -> None:
        """`latch`: the file in which a driver that is away finds the e-stop at its start."""
        self.on_press: Callable[[OperatorCommand], object] = lambda press: None
        self._robot, self._client, self._latch = robot, client, latch
        self._turns = itertools.count(1)
        self._confirmed: deque[tuple[str, int]] = deque(maxlen=MAX_CONFIRMED)
        self._waiting: tuple[OperatorCommand, int] | None = None  # a press that the driver has not confirmed; its turn
        self._ending = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="e-stop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def next_sequence(self) -> int:
        """Numbers e-stops and re-arms in the order in which they came. See `driver_wire.Request`. Any thread."""
        return next(self._turns)

    def raise_failure(self) -> None:
        """Raises what ended the thread: without it no person could stop the robot."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        with DriverClient(self._robot) as driver:
            try:
                while not self._ending.is_set():
                    message = self._client.receive_stop(RETRY_S if self._waiting else RECEIVE_WAIT_S)
                    if isinstance(message, OperatorCommand):
                        self._take(driver, message)
                    elif self._waiting is not None:
                        self._stop(driver, *self._waiting)
            except Exception as error:  # of any kind: `raise_failure` tells
                log.exception("e-stop.failed")
                self._failure = error

    def _take(self, driver: DriverClient, press: OperatorCommand) -> None:
        if press.press and (press.operator, press.press) in self._confirmed:
            self._reply(press, accepted=True)
            return
        waiting = self._waiting
        repeated = waiting is not None and press.press and _key(waiting[0]) == _key(press)
        if waiting is not None and repeated:
            self._stop(driver, *waiting)
            return
        self.on_press(press)
        self._stop(driver, press, self.next_sequence())

    def _stop(self, driver: DriverClient, press: OperatorCommand, turn: int) -> None:
        try:
            driver.emergency_stop(press.issuer, turn)
        except HalError as error:
            first = self._waiting is None or _key(self._waiting[0]) != _key(press)
            self._waiting = press, turn
            if first:
                log.error("e-stop.undelivered %s; trying again", error)
                self._write_latch(press.issuer)
            self._reply(press, accepted=False, reason=str(error))
            return
        self._waiting = None
        self._confirmed.append(_key(press))
        self._reply(press, accepted=True)

    def _write_latch(self, person: str) -> None:
        try:
            EstopLatch(self._latch).press(new_emergency_stop(person, "pressed while the robot was away"))
        except (OSError, HalError) as error:  # it is tried on while this session lives
            log.error("e-stop.not_persisted %s", error)

    def _reply(self, press: OperatorCommand, accepted: bool, reason: str = "") -> None:
        self._client.send(
            OperatorReply(
                robot=self._robot,
                operator=press.operator,
                order=press.order,
                accepted=accepted,
                reason=reason,
                press=press.press,
            )
        )


def _key(press: OperatorCommand) -> tuple[str, int]:
    return press.operator, press.press
