"""The process that serves a run's console: ``python -m user_sys.run.console_process RUN``.

It follows the run through the gateway. A restarted one keeps its address and the browsers' access, and reads the run's
earlier episodes and curves from its folder. It may be killed at any time: a robot whose driver is at its page holds.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from hal.durable import replace_durably
from hal.signals import stop_on_signals
from hal.state_database import STATE_FILE, AuditLog
from user_sys.compose import drawing_source
from user_sys.console.config import ADDRESS_MODE, as_before
from user_sys.console.hub import ConsoleHub, HubMessage
from user_sys.console.server import ConsoleServer
from user_sys.edge.local_estop import with_local_estop
from user_sys.errors import RunError, SessionRefused, WireError
from user_sys.logs import LogFile, run_process
from user_sys.messages import EpisodeReport, MetricsReport, OperatorReply, ResourceUpdate, RobotStatus
from user_sys.robot_records import learner_from_robot, read_robot_records
from user_sys.run.config import RunConfig, RunFolder, RunMetadata, open_run_folder
from user_sys.run.metrics import METRICS, RUN
from user_sys.run.prepare import gateway_client
from user_sys.run.progress import previous_elapsed_s, previous_episodes, previous_losses, previous_outcomes
from user_sys.run.report import run_episodes
from user_sys.run.status import ended_processes, read_status
from user_sys.run.topology import CONSOLE
from user_sys.tunnel.protocol import TunnelState

log = logging.getLogger(__name__)

POLL_S = 0.1
FORWARD_POLL_S = 0.5
STATUS_POLL_S = 2.0


class _History:
    """Holds reports of episodes and metrics back until the run's earlier ones are shown, and those shown with them."""

    def __init__(self) -> None:
        self._waiting: list[EpisodeReport | MetricsReport] = []
        self._known: set[str] | None = None

    def restored(self, known: set[str]) -> None:
        """The earlier ones are shown, with the episodes `known`. Another thread than that of `pass_on` may call it."""
        self._known = known

    def pass_on(self, message: object) -> list[HubMessage]:
        """The messages to show now that `message` has arrived, or None has for a while."""
        shown: list[HubMessage] = [message] if isinstance(message, RobotStatus | OperatorReply) else []
        if isinstance(message, EpisodeReport | MetricsReport):
            self._waiting.append(message)
        if (known := self._known) is not None:
            shown += [each for each in self._waiting if not (isinstance(each, EpisodeReport) and each.episode in known)]
            self._waiting.clear()
        return shown


class ConsoleProcess:
    """A hub that the gateway's messages update, and its page. `serve` blocks.

    Threads forward previews and replies to e-stops, and show the run's history, independently of the main thread.

    Attributes:
        address: of the page.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, metadata: RunMetadata, *, is_restart: bool = True) -> None:
        """Listens, and writes the address to the run's folder.

        Args:
            is_restart: keep the address in the folder, with its secret, if there is one.

        Raises:
            RunError: the port is in use, or a key is missing.
            ConfigError: the console needs accounts, and there is none.
        """
        self._folder, self._seen, self._read_status_at_s = folder, set[str](), 0.0
        self._client = gateway_client(folder, metadata, CONSOLE)
        robots = (*config.robots, *config.remote_robots)
        drivers = {robot.name: f"for {folder.edge(robot.name).resolve()}" for robot in robots}
        simulated = {robot.name for robot in robots if robot.simulated}
        elsewhere = {robot.name for robot in (robots if config.ray.address else config.remote_robots)}
        send = with_local_estop(self._client.send, drivers, lambda reply: self._hub.update(reply), simulated, elsewhere)
        self._hub = ConsoleHub(metadata.name, send, {}, config.learner.max_training_s, folder=folder.path)
        self._history = _History()
        for robot in robots:
            self._hub.add_robot(robot.name)
        self._read_robot_records()
        self._audit = AuditLog(folder.path / STATE_FILE)
        console, token = config.console, ""
        if is_restart:
            console, token = as_before(config.console, folder.console_address)
        sources = {robot.name: drawing_source(robot) for robot in robots}
        self._server = ConsoleServer(
            self._hub, console, token, self._audit.write, folder.store, drawing_sources=sources
        )
        self.address = self._server.start()
        replace_durably(folder.console_address, self.address.encode(), ADDRESS_MODE)

    def serve(self, stop: threading.Event) -> None:
        """Updates the page until `stop` is set.

        Raises:
            SessionRefused: the page can no longer reach the robots, such as after another console of the run started.
        """
        with ExitStack() as stack:
            stack.callback(self._client.close)
            stack.callback(self._audit.close)
            stack.callback(self._server.stop)
            self._client.start()
            for forward in (self._forward_previews, self._forward_stop_replies, self._restore):
                threading.Thread(target=forward, args=(stop,), name=forward.__name__, daemon=True).start()
            while not stop.is_set():
                self._receive()
                if self._client.state is TunnelState.REFUSED:
                    raise SessionRefused(self._client.reason)

    def _receive(self) -> None:
        message = self._client.receive(POLL_S)
        if isinstance(message, RobotStatus) and message.robot not in self._seen:
            self._seen.add(message.robot)
            self._read_robot_records()
        for report in self._history.pass_on(message):
            self._show(self._hub.update, report)
        if isinstance(message, ResourceUpdate):
            self._hub.update_resource(message.record)
        if (now_s := time.monotonic()) >= self._read_status_at_s:
            self._read_status_at_s = now_s + STATUS_POLL_S
            self._read_status()

    def _restore(self, stop: threading.Event) -> None:
        """Shows the run's earlier episodes and curves, which takes long after weeks."""
        folder, known = self._folder, set[str]()
        try:
            elapsed_s = previous_elapsed_s(folder.path / METRICS / f"{RUN}.jsonl")
            stored = run_episodes(folder)
            self._hub.progress.restore_history(*previous_episodes(folder, stored), elapsed_s)
            losses = list(previous_losses(folder))  # read before the hub is locked
            self._hub.progress.restore_curves(previous_outcomes(folder, stored), losses)
            known = {each.episode for each in stored if each.complete}
        except Exception as error:  # of any kind: people need the page, with or without the history
            log.warning("console.history_unreadable: the page shows the run from now on: %s", error)
        finally:
            self._history.restored(known)

    def _read_status(self) -> None:
        """The run's scalars and the processes that have ended, from the launcher's file, if it has written one."""
        with suppress(RunError):
            status = read_status(self._folder.path)
            self._hub.progress.set_scalars(RUN, status.run.metrics.get(RUN, {}))
            self._hub.progress.set_ended(ended_processes({each.name: each for each in status.processes}))

    def _read_robot_records(self) -> None:
        """The specs of the robots that have connected, and their learners."""
        records = read_robot_records(self._folder.robots)
        self._hub.progress.set_learners(learner_from_robot(records))
        for record in records:
            self._show(self._hub.set_robot_spec, record.robot, record.spec)

    def _forward_previews(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if (shown := self._client.receive_preview(FORWARD_POLL_S)) is not None:
                preview, jpeg = shown
                clock = self._client.clock
                age_s = 0.0 if clock is None else preview.age_s(clock.gateway_unix_ns(time.monotonic_ns()))
                self._show(self._hub.update_preview, preview, bytes(jpeg), age_s)

    def _forward_stop_replies(self, stop: threading.Event) -> None:
        while not stop.is_set():
            reply = self._client.receive_stop(FORWARD_POLL_S)
            if isinstance(reply, HubMessage):
                self._hub.update(reply)

    def _show(self, feed: Callable[..., None], *report: object) -> None:
        """Feeds the page. A report that the page cannot show is logged."""
        try:
            feed(*report)
        except WireError as error:
            log.warning("console.report_rejected %s", error)


def serve_console(run: Path, port: int | None, on_address: Callable[[str], None]) -> None:
    """Serves the console of a run that has none of its own, until SIGTERM or Ctrl-C.

    Args:
        port: in place of the configured one; 0 takes a free one.
        on_address: called with the address when the page can be opened.

    Raises:
        RunError: there is no run, it has a console of its own, or the port is in use.
        ConfigError: the console needs accounts, and there is none.
    """
    folder, config, metadata = open_run_folder(run)
    if config.console.enabled:
        raise RunError(f"{run} has a console of its own, whose address it printed; start it with console.enabled=false")
    stop = threading.Event()
    stop_on_signals(stop)
    console = config.console if port is None else replace(config.console, port=port)
    with LogFile(folder.log(CONSOLE), run=metadata.name, process=CONSOLE):
        process = ConsoleProcess(folder, replace(config, console=console), metadata, is_restart=False)
        on_address(process.address)
        process.serve(stop)


def main(argv: list[str]) -> int:
    """Serves the console of the run in the folder `argv[0]` until it is stopped."""
    return run_process("console", lambda stop: ConsoleProcess(*open_run_folder(Path(argv[0]))).serve(stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
