"""Keeps a session's lease alive over the tunnel."""

from __future__ import annotations

import logging
import threading
import time

from hal.errors import LeaseError
from hal.lease import lease_clock_ns
from user_sys.errors import Refused
from user_sys.messages import LeaseGrant, LeaseRefusal, LeaseRelease, LeaseRequest, StopRun
from user_sys.tunnel.client import TunnelClient, TunnelState

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
RENEWALS_PER_TTL = 3


class LeaseKeeper:
    """The lease of one robot. `acquire` comes first; afterwards one thread feeds it messages and asks it to renew.

    A link that is down does not end the session: a refusal does. The robot goes on until `until_ns`, after which its
    driver holds it; a renewal that is granted later lets it go on.
    """

    def __init__(self, robot: str, holder: str, client: TunnelClient, floor: int = 0) -> None:
        """`floor`: the newest token that the robot's driver has seen, of another run perhaps."""
        self._robot, self._holder, self._client, self._floor = robot, holder, client, floor
        self._token = 0
        self._renew_at = 0.0
        self._ttl_s = 0.0
        self._until_ns = 0

    def acquire(self, leaving: threading.Event) -> int:
        """Asks until the lease is granted, and returns its token. Blocks; says once who holds the robot meanwhile.

        Returns:
            The token; 0 where `leaving` was set, or the run ended, first.

        Raises:
            Refused: the gateway does not let us in.
        """
        said = ""
        while not leaving.is_set():
            self._require_tunnel()
            asked_ns = lease_clock_ns()
            request = LeaseRequest(robot=self._robot, holder=self._holder, floor=self._floor, asked_ns=asked_ns)
            self._client.send(request)
            answer = self._answer(ASK_EVERY_S)
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
                leaving.wait(ASK_EVERY_S)
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
            raise Refused(self._client.reason)

    @property
    def token(self) -> int:
        """The newest token that was granted; 0 before the first."""
        return self._token

    @property
    def until_ns(self) -> int:
        """When the lease runs out, by `lease_clock_ns`."""
        return self._until_ns

    def is_over(self) -> bool:
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

    def renew_when_due(self) -> None:
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
