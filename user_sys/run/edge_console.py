"""The console of the robots on one computer: ``python -m user_sys.run.edge_console CONSOLE.yaml``.

``user-sys edge --console`` starts it. It reaches the sessions by a local socket, so that it works while the run's
computer cannot be reached. It may be killed at any time: a robot whose driver is at its page holds.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hal.durable import replace_durably
from hal.errors import HalError
from hal.resource import local_node
from hal.state_database import STATE_FILE, AuditLog
from user_sys.config import load
from user_sys.console.config import ADDRESS_MODE, ConsoleConfig, as_before
from user_sys.console.hub import ConsoleHub, HubMessage, OverrideOrder
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.local_estop import LocalEstops
from user_sys.edge.local_link import LocalLink
from user_sys.errors import AuthorityError, WireError
from user_sys.gateway.ingest import OperatorAudit
from user_sys.logs import run_process
from user_sys.messages import OperatorCommand, OperatorReply, Preview, PreviewRequest
from user_sys.tunnel.protocol import AnyMessage, Payload

DESCRIBE_DEADLINE_S = 1.0
POLL_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeConsoleConfig:
    """Settings that ``user-sys edge`` writes for this process.

    Attributes:
        robots, simulated: names of all robots of this computer, and of the simulated ones.
        drawing_sources: by robot, see `user_sys.compose.drawing_source`.
        endpoint: of the sessions' socket.
        folder: of the address file and the audit log.
    """

    robots: tuple[str, ...] = ()
    simulated: tuple[str, ...] = ()
    drawing_sources: dict[str, str] = field(default_factory=dict)
    endpoint: str = ""
    folder: Path = Path("edge")
    console: ConsoleConfig = field(default_factory=ConsoleConfig)

    @property
    def address(self) -> Path:
        """The file with the page's address, which has the secret."""
        return self.folder / "console.address"


class EdgeHub(ConsoleHub):
    """A hub without a run, whose registry alone takes robots out of use."""

    def override(self, robot: str, order: OverrideOrder, person: str, reason: str = "") -> None:
        """Raises AuthorityError: always."""
        raise AuthorityError(f"{robot}: only the run's console can {order} a robot; this one serves its computer")


class EdgeConsole:
    """Connects a hub with the sessions and e-stops of this computer."""

    def __init__(self, config: EdgeConsoleConfig) -> None:
        self._config = config
        self._link = LocalLink(config.endpoint, self._on_message)
        self._hub = EdgeHub(f"robots of {local_node()}", self._send, folder=config.folder)
        self._estops = LocalEstops(self._on_reply, config.simulated)
        self._audit = AuditLog(config.folder / STATE_FILE)
        self._orders = OperatorAudit(self._audit.write)
        for robot in config.robots:
            self._hub.add_robot(robot)

    def serve(self, stop: threading.Event) -> None:
        """Serves the page until `stop` is set. Raises as `ConsoleServer` does."""
        from user_sys.console.server import ConsoleServer  # needs the extra `console`

        config, audit = self._config, self._audit
        console, token = as_before(config.console, config.address)
        with ExitStack() as stack:
            stack.callback(audit.close)
            stack.enter_context(self._link)
            server = ConsoleServer(self._hub, console, token, audit.write, drawing_sources=config.drawing_sources)
            replace_durably(config.address, server.start().encode(), ADDRESS_MODE)
            stack.callback(server.stop)
            missing = set(config.robots)
            while not stop.is_set():
                missing -= {robot for robot in missing if not stop.is_set() and self._read_spec(robot)}
                self._orders.expire()
                audit.flush()
                stop.wait(POLL_S)

    def _read_spec(self, robot: str) -> bool:
        try:
            with DriverClient(robot) as driver:
                driver.describe(DESCRIBE_DEADLINE_S)
                self._hub.set_robot_spec(robot, driver.spec)
        except HalError:
            return False  # its driver starts
        return True

    def _on_message(self, message: AnyMessage, payload: Payload | None) -> None:
        try:
            if isinstance(message, OperatorReply):
                self._on_reply(message)
            elif isinstance(message, HubMessage):
                self._hub.update(message)
            elif isinstance(message, Preview) and payload is not None:
                self._hub.update_preview(message, bytes(payload), message.age_s(time.time_ns()))
        except WireError as error:
            log.warning("console.report_rejected %s", error)

    def _on_reply(self, reply: OperatorReply) -> None:
        self._hub.update(reply)
        self._orders.on_reply(reply)

    def _send(self, message: OperatorCommand | PreviewRequest) -> bool:
        if not isinstance(message, OperatorCommand):
            return self._link.send(message, robot=message.robot)
        self._orders.on_command(message, "")
        if message.order != "e-stop":
            return self._link.send(message, robot=message.robot)
        if not self._estops.confirms(message):
            self._estops.press(message)
        return True


def main(argv: list[str]) -> int:
    """Serves the console that the file `argv[0]` describes until it is stopped."""
    return run_process("console", lambda stop: EdgeConsole(load(EdgeConsoleConfig, Path(argv[0]))).serve(stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
