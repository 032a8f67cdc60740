"""Launches a run: starts its processes, shows its progress in the terminal and on the console, and ends it cleanly."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hal.audit import AUDIT_FILE, AuditLog
from hal.process_supervisor import ProcessStatus
from hal.signals import TerminationRequest, bounded_shutdown
from hal.spec import RobotSpec
from user_sys.console.hub import ConsoleHub, HubMessage
from user_sys.edge.driver_client import WAITING_LOG_PREFIX
from user_sys.edge.local_estop import with_local_estop
from user_sys.errors import RunError, WireError
from user_sys.logs import last_log_message
from user_sys.messages import (
    PROTOCOL_VERSION,
    EpisodeReport,
    Hello,
    MetricsReport,
    ResourceUpdate,
    RobotStatus,
    StopRun,
)
from user_sys.process_exit import EXIT_DEADLINE_S, ExitStatus, abort_run
from user_sys.robot_records import LEARNER, learner_from_robot, read_robot_records
from user_sys.run.cluster_allocation import Allocation, acquire_resources
from user_sys.run.config import ConsoleConfig, RunConfig, RunFolder, RunMetadata
from user_sys.run.demonstrations import record_all_demonstrations
from user_sys.run.evaluate import evaluate_and_report, exit_status
from user_sys.run.metrics import MetricsWriter, RunLogger
from user_sys.run.prepare import (
    CONSOLE,
    load_run,
    local_endpoint,
    open_or_create_folder,
    prepare_run_folder,
    print_join_instructions,
    report_unreadable_checkpoints,
)
from user_sys.run.processes import RunProcesses
from user_sys.run.progress import ProgressDisplay, ProgressTracker, previous_elapsed_s, previous_episodes
from user_sys.run.report import RunSummary, link_latest
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import GATEWAY_NAME, load_keypair, load_public_key

if TYPE_CHECKING:
    from user_sys.console.server import ConsoleServer

log = logging.getLogger(__name__)

MESSAGE_WAIT_S = 0.1
DISPLAY_INTERVAL_S = 0.25
SCALARS_INTERVAL_S = 2.0
STATUS_INTERVAL_S = 2.0
LEAVE_DEADLINE_S = 60.0  # sessions deliver their outbox and the learner writes its checkpoint before they leave
# The same after Ctrl-C, in seconds from the signal. Robots come first; what is not done by then is killed.
SAVE_DEADLINE_S, PROCESS_DEADLINE_S, GATEWAY_DEADLINE_S = 5.0, 6.0, 7.0
INTERRUPTED = "interrupted by a person"
MAX_ROBOT_STARTS = 3  # after so many failed starts, a robot that has sent no status is missing


def launch_run(args: Namespace, verb: str) -> int:
    """Runs ``user-sys train`` or ``user-sys cloud`` to its end. Returns an `ExitStatus`."""
    console = Console()
    with bounded_shutdown(EXIT_DEADLINE_S, partial(abort_run, args)) as end:
        config, home = load_run(args, verb)
        with acquire_resources(config, home, console) as allocation:
            return _run(args, verb, home, allocation, console, end)


def _run(
    args: Namespace, verb: str, home: Path, allocation: Allocation, console: Console, end: TerminationRequest
) -> ExitStatus:
    config = allocation.config
    folder, metadata = open_or_create_folder(args, config, home)
    args.run_dir = folder.path
    report_unreadable_checkpoints(folder, console)
    cluster = allocation.cluster
    specs = prepare_run_folder(config, folder, metadata, *(cluster.robots_on_other_nodes() if cluster else ()))
    link_latest(folder.path)
    locked = frozenset(cluster.slot_from_robot) if cluster else frozenset[str]()
    record_all_demonstrations(config, folder.store, console, locked)
    if verb == "cloud":
        print_join_instructions(folder, metadata, console)
    with RunLogger(folder.path, config, config.logging) as logger:
        link = ConsoleLink(config, folder, metadata, specs)
        with RunSupervisor(config, folder, metadata, allocation, link, logger, console, end) as run:
            run.train()
        if end.requested.is_set():
            console.print(f"stopped; continue with: user-sys {verb} --resume {folder.path}")
            return ExitStatus.INTERRUPTED
        summary = evaluate_and_report(config, folder, run.progress.episodes.points, run.summary(), console)
        logger.close(summary.as_json())
    console.print(f"the files of this run are in {folder.path}")
    return exit_status(config, summary, args.any_result, console)


class ConsoleLink:
    """The launcher's connection to the gateway, and the console page that it feeds.

    Two threads forward previews and replies to e-stops, whatever the main thread does.

    Attributes:
        client: the connection, in the role of a console.
        hub: the state that the page shows.
        address: of the page; empty if it is switched off.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, metadata: RunMetadata, specs: Mapping[str, RobotSpec]
    ) -> None:
        self.client = _console_client(folder, metadata)
        real = [robot.name for robot in (*config.robots, *config.remote_robots) if not robot.simulated]
        drivers = {name: f"for {folder.edge(name).resolve()}" for name in real}
        send_order = with_local_estop(self.client.send, drivers, lambda reply: self.hub.update(reply))
        self.hub = ConsoleHub(metadata.name, send_order, dict(specs), budget_s=config.learner.max_training_s)
        self._audit = AuditLog(folder.path / AUDIT_FILE)
        self._server = _console_server(self.hub, config.console, self._audit)
        self._is_closed = threading.Event()
        self.address = self._server.start() if self._server else ""

    def start(self) -> None:
        """Connects, and starts the two threads."""
        self.client.start()
        threading.Thread(target=self._forward_previews, name="previews", daemon=True).start()
        threading.Thread(target=self._forward_stop_replies, name="e-stops", daemon=True).start()

    def _forward_previews(self) -> None:
        while not self._is_closed.is_set():
            if (shown := self.client.receive_preview(0.5)) is not None:
                preview, jpeg = shown
                self.show(self.hub.update_preview, preview, bytes(jpeg))

    def _forward_stop_replies(self) -> None:
        while not self._is_closed.is_set():
            reply = self.client.receive_stop(0.5)
            if isinstance(reply, HubMessage):
                self.hub.update(reply)

    def show(self, feed: Callable[..., None], *report: object) -> None:
        """Feeds the page. A report that the page cannot show is logged and does not end the run."""
        try:
            feed(*report)
        except WireError as error:
            log.warning("console.report_rejected %s", error)

    def stop_threads(self) -> None:
        self._is_closed.set()

    def close(self) -> None:
        self._is_closed.set()
        if self._server is not None:
            self._server.stop()
        self._audit.close()
        self.client.close()


class RunSupervisor:
    """Supervises a run from its first process to its last. A context manager: leaving it ends every process.

    Attributes:
        progress: counts of the run so far.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        metadata: RunMetadata,
        allocation: Allocation,
        link: ConsoleLink,
        logger: RunLogger,
        console: Console,
        end: TerminationRequest,
    ) -> None:
        """`end` is set when a signal asks for the end of the run."""
        self._config, self._folder, self._link, self._console = config, folder, link, console
        self._processes = RunProcesses(config, folder, metadata, allocation)
        self._logger, self._metrics = logger, MetricsWriter(folder.path, "run")
        self._end = end
        self._is_target_reached: bool | None = None  # None without a target
        self._missing: dict[str, str] = {}  # robots that never started, with the reason
        self._wait_reasons: dict[str, str] = {}  # the last printed reason why a robot or the learner waits
        self._unreadable: dict[str, int] = {}  # the last printed count of unreadable checkpoints of each learner
        self.progress = ProgressTracker(metadata.name, link.address, config.learner.max_training_s, folder=folder.path)
        before = (*previous_episodes(folder.store), previous_elapsed_s(self._metrics.path))
        self.progress.seed_history(*before)
        link.hub.restore_history(*before)
        self.progress.robots.expect(robot.name for robot in config.remote_robots)
        for robot in config.remote_robots:
            link.show(link.hub.add_robot, robot.name)

    def __enter__(self) -> RunSupervisor:
        try:
            self._link.start()
            self._processes.connect()
            self._end.defer(self._hold_robots)
            self._processes.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs. Harmless if called twice."""
        self._link.stop_threads()
        try:
            self._processes.shutdown(self._left_s(PROCESS_DEADLINE_S))
        finally:
            self._end.resume()
            self._link.close()
            self._metrics.close()

    def train(self) -> None:
        """Blocks until the learner is done, the target is reached, or a signal asks for the end.

        Raises:
            RunError: a process of the run cannot be kept running, or no robot can be driven; names its log.
        """
        with ProgressDisplay(self._console) as display:
            reason = self._follow(display)
            self._is_target_reached = self._target_reached() if self._config.target.success else None
            self._leave(reason, display)

    def summary(self) -> RunSummary:
        """The run's counts, without its evaluation."""
        episodes, learners = self.progress.episodes, self.progress.learners
        return RunSummary(
            run=self._folder.path.name,
            successes=0,
            episodes=0,
            training_s=learners.training_s,
            env_steps=episodes.env_steps,
            updates=learners.updates,
            interventions=episodes.interventions,
            seed=self._config.seed,
            target_reached=self._is_target_reached,
        )

    def _follow(self, display: ProgressDisplay) -> str:
        """Processes messages until the run is over. Returns the reason."""
        show_at = scalars_at = status_at = 0.0
        while not self._end.requested.is_set():
            self._receive(MESSAGE_WAIT_S)
            now = time.monotonic()
            if now >= show_at:
                show_at = now + DISPLAY_INTERVAL_S
                self._link.hub.set_warning(self.progress.warning)
                display.show(self.progress.snapshot("training" if self.progress.learners.updates else "starting"))
            if now >= scalars_at:
                scalars_at = now + SCALARS_INTERVAL_S
                self._log_scalars("run", self.progress.episodes.env_steps, self.progress.scalars())
            if now >= status_at:
                status_at = now + STATUS_INTERVAL_S
                if self._check_processes(display):
                    return "the learner is done"
            if self._target_reached():
                return "the target is reached"
        return INTERRUPTED

    def _receive(self, wait_s: float) -> None:
        """Processes all messages that have arrived. Blocks for the first one only."""
        message = self._link.client.receive(wait_s)
        while message is not None:
            if isinstance(message, RobotStatus) and message.robot not in self.progress.robots.seen:
                self._introduce(message.robot)
            if isinstance(message, HubMessage):
                self._link.show(self._link.hub.update, message)
            match message:
                case RobotStatus():
                    self.progress.on_status(message)
                case EpisodeReport():
                    self.progress.on_episode(message)
                case MetricsReport():
                    self.progress.on_metrics(message)
                    self._processes.mark_healthy(message.node)
                    self._logger.log(message.node, message.count, message.scalars)
                case ResourceUpdate():
                    self._console.print(self.progress.on_resource(message.record), markup=False, soft_wrap=True)
            message = self._link.client.receive(0.0)

    def _introduce(self, robot: str) -> None:
        """On a robot's first status in this launch: starts its embodiment's learner, and shows its spec."""
        self._processes.start_new_learners()
        records = read_robot_records(self._folder.robots)
        self.progress.robots.set_learners(learner_from_robot(records))
        spec = next((record.spec for record in records if record.robot == robot), None)
        if spec is not None:
            self._link.show(self._link.hub.set_robot_spec, robot, spec)

    def _log_scalars(self, node: str, count: int, scalars: dict[str, float]) -> None:
        self._metrics.write(count, scalars)
        self._logger.log(node, count, scalars)
        self._link.hub.update(MetricsReport(node=node, count=count, scalars=scalars))

    def _check_processes(self, display: ProgressDisplay) -> bool:
        """Returns whether the learners are done. A robot that fails for good leaves the run to the others.

        Raises:
            RunError: the run cannot continue.
        """
        processes = self._processes
        processes.poll_compute(display.print_line, lambda why: self._print_wait(LEARNER, why, display))
        statuses = processes.cluster.statuses()
        self._check_robots(statuses, display)
        processes.report_failures(statuses, display.print_line)
        self._report_unreadable_checkpoints(display)
        processes.require_running(has_other_robots=bool(self._active_remote_robots()))
        return processes.are_learners_done(statuses)

    def _report_unreadable_checkpoints(self, display: ProgressDisplay) -> None:
        for name, count in self.progress.learners.unreadable_checkpoints.items():
            if count and count != self._unreadable.get(name):
                files = "1 newer checkpoint" if count == 1 else f"{count} newer checkpoints"
                display.print_line(
                    f"{name} continued from an older state: {files} cannot be read; see {self._folder.log(name)}"
                )
            self._unreadable[name] = count

    def _check_robots(self, statuses: Mapping[str, ProcessStatus], display: ProgressDisplay) -> None:
        """Prints robots whose driver fails at each start. Raises RunError if there is no other robot."""
        for robot in self._config.robots:
            driver = f"{robot.name}-driver"
            path, status = self._folder.log(driver), statuses[driver]
            message = last_log_message(path)
            failed = status.restarts >= MAX_ROBOT_STARTS - 1 and (status.last_exit or 0) > 0
            if robot.name in self.progress.robots.seen:
                self._missing.pop(robot.name, None)
            elif message.startswith(WAITING_LOG_PREFIX):
                self._print_wait(robot.name, f"{robot.name} waits: {message.removeprefix(WAITING_LOG_PREFIX)}", display)
            elif failed and robot.name not in self._missing:
                why = f"{message or 'its log is empty'}; see {path}"
                self._missing[robot.name] = f"{robot.name} cannot be driven: {why}"
                display.print_line(self._missing[robot.name])
        if self._missing and len(self._missing) == len(self._config.robots) and not self._active_remote_robots():
            raise RunError("; ".join(self._missing.values()))

    def _print_wait(self, name: str, text: str, display: ProgressDisplay) -> None:
        """Prints each reason once; an empty text forgets the last one."""
        if text and self._wait_reasons.get(name) != text:
            display.print_line(text)
        self._wait_reasons[name] = text

    def _active_remote_robots(self) -> frozenset[str]:
        return self.progress.robots.active - {robot.name for robot in self._config.robots}

    def _connected_remote_robots(self) -> int:
        """How many robots are connected, if any was seen that the run does not drive itself."""
        own = {robot.name for robot in self._config.robots}
        return self.progress.robots_connected if self.progress.robots.seen - own else 0

    def _target_reached(self) -> bool:
        target = self._config.target
        share = self.progress.episodes.success_rate(target.episodes) if target.success else None
        return share is not None and share >= target.success

    def _hold_robots(self) -> None:
        """Runs in a thread of its own after a signal, since the main thread may wait for Ray.

        Sessions learn of the end by a message and by a signal; then the drivers stop the robots.
        """
        self._link.client.send(StopRun(reason=INTERRUPTED))
        self._processes.stop_robots()

    def _left_s(self, by_s: float) -> float:
        """Time left until `by_s` seconds after the signal; infinite without a signal."""
        return max(0.0, self._end.requested_s + by_s - time.monotonic())

    def _leave(self, reason: str, display: ProgressDisplay) -> None:
        """Lets sessions deliver their outbox and learners save; then stops the other processes, the gateway last."""
        processes = self._processes
        if reason == INTERRUPTED:
            display.print_line("stopping: the robots hold, and the run is saved; Ctrl-C again exits immediately")
        self._link.client.send(StopRun(reason=reason))
        leaving = processes.leaving() - {f"{robot}-session" for robot in self._missing}
        if self._end.requested.is_set():
            processes.cluster.request_stop(*leaving)
        deadline = time.monotonic() + LEAVE_DEADLINE_S
        while leaving or self._connected_remote_robots():
            if time.monotonic() >= deadline or not self._left_s(SAVE_DEADLINE_S):
                log.warning("run.left_behind nodes=%s robots=%d", sorted(leaving), self._connected_remote_robots())
                break
            self._receive(MESSAGE_WAIT_S)
            display.show(self.progress.snapshot("stopping"))
            leaving = processes.still_running(leaving)
        if self.progress.disk_warning:
            display.print_line(f"not everything could be written: {self.progress.disk_warning}")
        others = [name for name in processes.names if name != GATEWAY_NAME]
        processes.cluster.stop(*others, within_s=self._left_s(PROCESS_DEADLINE_S))
        processes.cluster.stop(GATEWAY_NAME, within_s=self._left_s(GATEWAY_DEADLINE_S))


def _console_server(hub: ConsoleHub, config: ConsoleConfig, audit: AuditLog) -> ConsoleServer | None:
    if not config.enabled:
        return None
    from user_sys.console.server import ConsoleServer  # imports FastAPI, which takes half a second

    return ConsoleServer(hub, port=config.port, audit=audit.write)


def _console_client(folder: RunFolder, metadata: RunMetadata) -> TunnelClient:
    keys = load_keypair(folder.keys / f"{CONSOLE}.key")
    hello = Hello(protocol=PROTOCOL_VERSION, role="console", name=CONSOLE)
    return TunnelClient(
        local_endpoint(metadata.endpoint), keys, load_public_key(folder.keys / f"{GATEWAY_NAME}.pub"), hello
    )
