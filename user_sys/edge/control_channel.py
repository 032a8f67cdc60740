"""A session's control messages: its lease, operators' e-stops and commands, and preview requests."""

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
from user_sys.edge.agents import OperatorCommandQueue
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.local_estop import MAX_CONFIRMED
from user_sys.edge.status import StatusPublisher
from user_sys.errors import SessionRefused
from user_sys.messages import (
    LeaseGrant,
    LeaseRefusal,
    LeaseRelease,
    LeaseRequest,
    OperatorCommand,
    PreviewRequest,
    StopRun,
)
from user_sys.threads import ThreadedService
from user_sys.tunnel.client import TunnelClient, TunnelState

REQUEST_PERIOD_S = 1.0
RENEWALS_PER_TTL = 3
RECEIVE_WAIT_S = 0.25  # bounds how long `EmergencyStopForwarder.close` waits; an e-stop ends the wait at once
ESTOP_RETRY_S = 0.05
ESTOP_CLOSE_TIMEOUT_S = 10.0  # longer than the driver's deadline for a reply
INBOX_WAIT_S = 0.02
INBOX_CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class LeaseClient:
    """The lease of one robot. Call `acquire` first. Afterwards one thread passes it messages and renews.

    The session continues while the tunnel is down and ends if the gateway refuses the lease. The driver holds the robot
    from `until_ns` on, until a renewal is granted.

    Attributes:
        token: the newest granted one; 0 before the first.
        until_ns: when the lease expires, by `lease_clock_ns`.
    """

    def __init__(self, robot: str, holder: str, client: TunnelClient, min_token: int = 0) -> None:
        """`min_token`: the newest token that the robot's driver has seen, possibly of another run."""
        self._robot, self._holder, self._client, self._min_token = robot, holder, client, min_token
        self.token = 0
        self._renew_at = 0.0
        self._ttl_s = 0.0
        self.until_ns = 0

    def acquire(self, shutdown: threading.Event) -> int:
        """Requests the lease until it is granted. Blocks. Logs once who holds the robot meanwhile.

        Returns:
            The token; 0 if `shutdown` is set or the run ends first.

        Raises:
            SessionRefused: the gateway rejects the connection.
        """
        last_reason = ""
        while not shutdown.is_set():
            self._check_tunnel()
            self._client.send(
                LeaseRequest(robot=self._robot, holder=self._holder, floor=self._min_token, asked_ns=lease_clock_ns())
            )
            reply = self._receive_reply(REQUEST_PERIOD_S)
            if isinstance(reply, LeaseGrant):
                self._take(reply)
                log.info("lease.granted robot=%s token=%d", self._robot, reply.token)
                return reply.token
            if isinstance(reply, LeaseRefusal) and reply.reason != last_reason:
                last_reason = reply.reason
                log.warning("lease.waiting %s", last_reason)
            if isinstance(reply, StopRun):
                log.info("run.stopped %s", reply.reason)
                return 0
            if isinstance(reply, LeaseRefusal):
                shutdown.wait(REQUEST_PERIOD_S)
        return 0

    def _receive_reply(self, timeout_s: float) -> LeaseGrant | LeaseRefusal | StopRun | None:
        end = time.monotonic() + timeout_s
        while (left_s := end - time.monotonic()) > 0:
            message = self._client.receive(left_s)
            if isinstance(message, LeaseGrant | LeaseRefusal | StopRun):
                return message
        return None

    def _check_tunnel(self) -> None:
        if self._client.state is TunnelState.REFUSED:
            raise SessionRefused(self._client.reason)

    def is_expired(self) -> bool:
        """Whether the lease has expired, so that the driver holds the robot."""
        return lease_clock_ns() >= self.until_ns

    def on_message(self, message: LeaseGrant | LeaseRefusal) -> None:
        """Processes a reply.

        If the gateway was slow, `acquire` has sent two requests. The second reply then brings a newer token, which
        replaces the first; a refusal of the older token is ignored.

        Raises:
            LeaseError: another session has the robot now.
        """
        if isinstance(message, LeaseGrant):
            if message.token >= self.token:
                self._take(message)
        elif message.token == self.token:
            raise LeaseError(f"the lease of {self._robot} has ended: {message.reason}")

    def renew_if_due(self) -> None:
        """Sends a renewal when a third of the time to live has passed. Never blocks.

        Raises:
            SessionRefused: the gateway rejects the connection.
        """
        self._check_tunnel()
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + self._ttl_s / RENEWALS_PER_TTL
            self._client.send(
                LeaseRequest(robot=self._robot, holder=self._holder, token=self.token, asked_ns=lease_clock_ns())
            )

    def release(self) -> None:
        """Releases the lease. Never blocks."""
        if self.token:
            self._client.send(LeaseRelease(robot=self._robot, token=self.token))

    def _take(self, grant: LeaseGrant) -> None:
        until_ns = min(grant.asked_ns, lease_clock_ns()) + round(grant.ttl_s * 1e9)
        self.until_ns = until_ns if grant.token > self.token else max(self.until_ns, until_ns)
        self.token, self._ttl_s = grant.token, grant.ttl_s
        self._renew_at = time.monotonic() + self._ttl_s / RENEWALS_PER_TTL


class EmergencyStopForwarder(ThreadedService):
    """Forwards e-stops from the tunnel to the driver, in its own thread and on its own channel and local socket.

    It needs no lease. Without its thread no operator can stop the robot, so the session ends with it. It repeats an
    e-stop until the driver confirms it. It writes an e-stop for an unreachable driver to the latch file, which the
    driver reads at its start, even after this session has ended. A repeat of a confirmed press is confirmed again and
    does not stop the robot again, so a repeat that arrives after a re-arm does nothing. The number of a press
    identifies it: after a reconnection a page may repeat it under another operator's name.

    Attributes:
        on_press: called with each new press before it goes to the driver; must return at once.
    """

    def __init__(self, robot: str, client: TunnelClient, latch_path: Path) -> None:
        """`latch_path`: the latch file that an unreachable driver reads at its start."""
        super().__init__("e-stop", ESTOP_CLOSE_TIMEOUT_S, "the driver does not answer")
        self.on_press: Callable[[OperatorCommand], object] = lambda press: None
        self._robot, self._client, self._latch_path = robot, client, latch_path
        self._sequence = itertools.count(1)
        self._confirmed: deque[int] = deque(maxlen=MAX_CONFIRMED)
        self._unconfirmed: tuple[OperatorCommand, int] | None = None  # a press and its e-stop sequence

    def next_sequence(self) -> int:
        """Numbers e-stops and re-arms in the order of their arrival. Any thread may call it."""
        return next(self._sequence)

    def _work(self) -> None:
        with DriverClient(self._robot) as driver:
            while not self._stopping.is_set():
                message = self._client.receive_stop(ESTOP_RETRY_S if self._unconfirmed else RECEIVE_WAIT_S)
                if isinstance(message, OperatorCommand):
                    self._on_command(driver, message)
                elif self._unconfirmed is not None:
                    self._forward(driver, *self._unconfirmed)

    def _on_command(self, driver: DriverClient, press: OperatorCommand) -> None:
        if press.press and press.press in self._confirmed:
            self._client.send(press.reply(accepted=True))
            return
        waiting = self._unconfirmed
        if waiting is not None and press.press and waiting[0].press == press.press:
            self._forward(driver, *waiting)
            return
        self.on_press(press)
        self._forward(driver, press, self.next_sequence())

    def _forward(self, driver: DriverClient, press: OperatorCommand, estop_sequence: int) -> None:
        try:
            driver.emergency_stop(press.issuer, estop_sequence)
        except HalError as error:
            is_first_attempt = self._unconfirmed is None or self._unconfirmed[0].press != press.press
            self._unconfirmed = press, estop_sequence
            if is_first_attempt:
                log.error("e-stop.undelivered %s; trying again", error)
                self._write_latch(press.issuer)
            self._client.send(press.reply(accepted=False, reason=str(error)))
            return
        self._unconfirmed = None
        self._confirmed.append(press.press)
        self._client.send(press.reply(accepted=True))

    def _write_latch(self, person: str) -> None:
        try:
            EstopLatch(self._latch_path).press(new_emergency_stop(person, "pressed while the driver was unreachable"))
        except (OSError, HalError) as error:  # the forwarder goes on trying to reach the driver
            log.error("e-stop.latch_write_failed %s", error)


class ControlInbox:
    """Receives a session's control messages in a thread, and renews its lease. A context manager.

    The session ends when the thread ends: without it no operator reaches the robot. `__exit__` raises the thread's
    error if the body raised none.

    Attributes:
        is_run_over: a `StopRun` message has arrived.
    """

    def __init__(
        self,
        client: TunnelClient,
        driver: DriverClient,
        lease: LeaseClient,
        estops: EmergencyStopForwarder,
        commands: OperatorCommandQueue,
        status: StatusPublisher,
        shutdown: threading.Event,
        on_poll: Callable[[], object],
    ) -> None:
        """Args:
        shutdown: set by a `StopRun` message, and when the thread ends.
        on_poll: called after each message or wait, in the thread. An error that it raises ends the session.
        """
        self._client, self._driver, self._lease, self._estops = client, driver, lease, estops
        self._commands, self._status, self._shutdown, self._on_poll = commands, status, shutdown, on_poll
        self._renewals = DriverClient(driver.robot)  # a socket for this thread
        self.is_run_over = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._shutdown.set()
        self._thread.join(INBOX_CLOSE_TIMEOUT_S)
        if kind is None and self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._shutdown.is_set():
                self._receive()
                self._lease.renew_if_due()
                self._on_poll()
        except Exception as error:  # of any kind: `__exit__` raises it
            self._failure = error
        finally:
            self._shutdown.set()
            self._renewals.close()

    def _receive(self) -> None:
        message = self._client.receive(INBOX_WAIT_S)
        match message:
            case OperatorCommand():
                self._commands.submit(message, self._estops.next_sequence(), self._waited_s(message))
            case LeaseGrant() | LeaseRefusal():
                self._lease.on_message(message)
                self._driver.token, self._driver.lease_until_ns = self._lease.token, self._lease.until_ns
                self._renew_at_driver()
            case PreviewRequest():
                self._status.previews.enable(message)
            case StopRun():
                log.info("run.stopped %s", message.reason)
                self.is_run_over = True
                self._shutdown.set()

    def _waited_s(self, command: OperatorCommand) -> float:
        """How long the command was on its way from the gateway; 0 if that is unknown."""
        clock = self._client.clock
        if clock is None or not command.forwarded_unix_ns:
            return 0.0
        return max(0, clock.gateway_unix_ns(time.monotonic_ns()) - command.forwarded_unix_ns) / 1e9

    def _renew_at_driver(self) -> None:
        """Renews on a socket of its own: the control loop's may be busy with a reset that outlasts the lease."""
        try:
            self._renewals.renew_lease(self._lease.token, self._lease.until_ns)
        except LeaseError:
            raise
        except HalError as error:
            log.debug("lease.renewal_not_delivered %s", error)  # the control loop's next request carries it
