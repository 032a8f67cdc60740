"""Launches a run: starts its processes, shows its progress in the terminal and on the console, and ends it cleanly."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

from rich.console import Console

from hal.process_supervisor import ProcessState, ProcessStatus, exit_reason
from hal.resource import Health, ResourceRecord
from hal.signals import TerminationRequest, bounded_shutdown
from hal.spec import RobotSpec
from user_sys.console.hub import ConsoleHub, HubMessage
from user_sys.console.progress import describe_device
from user_sys.edge.driver_client import WAITING_LOG_PREFIX
from user_sys.errors import EXIT_DEADLINE_S, ExitStatus, RunError, WireError, exit_now
from user_sys.logs import LogFile, last_log_message
from user_sys.messages import (
    EpisodeReport,
    MetricsReport,
    ResourceUpdate,
    RobotStatus,
    StopRun,
)
from user_sys.robot_records import LEARNER, assign_learners, first_learner, learner_from_robot, read_robot_records
from user_sys.run.allocation import Allocation, out_of_use
from user_sys.run.cluster_allocation import acquire_resources
from user_sys.run.config import RunConfig, RunFolder, RunMetadata
from user_sys.run.evaluate import evaluate_and_report, exit_status
from user_sys.run.exporter import RunExporter
from user_sys.run.metrics import RUN, RunLogger
from user_sys.run.pins import SuccessGuards, release_automatic_pins
from user_sys.run.prepare import (
    LAUNCHER,
    LaunchRequest,
    gateway_client,
    load_run,
    open_or_create_folder,
    prepare_run_folder,
    print_join_instructions,
    record_all_demonstrations,
    report_unreadable_checkpoints,
)
from user_sys.run.processes import PrintedReasons, RunProcesses
from user_sys.run.progress import ProgressDisplay, previous_elapsed_s, previous_episodes, previous_outcomes, run_scalars
from user_sys.run.report import RunSummary, link_latest, run_episodes, set_aside_results
from user_sys.run.status import StatusFile, ended_processes
from user_sys.trace import merge_trace, prepare_trace
from user_sys.tunnel.client import TunnelState
from user_sys.tunnel.keys import GATEWAY_NAME

log = logging.getLogger(__name__)

MESSAGE_WAIT_S = 0.1
DISPLAY_INTERVAL_S = 0.25
SCALARS_INTERVAL_S = 2.0
STATUS_INTERVAL_S = 2.0
LEAVE_DEADLINE_S = 60.0  # sessions deliver their outbox and the learner writes its checkpoint before they leave
# The same after Ctrl-C, in seconds from the signal. Robots come first; the processes left by then are killed.
SAVE_DEADLINE_S, PROCESS_DEADLINE_S, GATEWAY_DEADLINE_S = 5.0, 6.0, 7.0
REMOTE_DEADLINE_S = 2.0  # robots on other computers keep what they have not delivered; one that left is noticed late
INTERRUPTED = "interrupted by a person"
MAX_ROBOT_STARTS = 3  # after so many failed starts of its driver, a robot that has sent no status is missing


def launch_run(request: LaunchRequest) -> int:
    """Runs ``user-sys train`` or ``user-sys cloud`` to its end. Returns an `ExitStatus`."""
    console = Console()

    def abort() -> None:
        """Drivers stop their robots; the other processes are killed."""
        exit_now(f"ended at once; unsaved progress is lost{request.resume_hint()}")

    with bounded_shutdown(EXIT_DEADLINE_S, abort) as end:
        config, home = load_run(request)
        with (
            acquire_resources(config, home, console) as allocation,
            open_or_create_folder(request, allocation.config, home) as (folder, metadata),
        ):
            return _run(request, folder, metadata, allocation, console, end)


def _run(
    request: LaunchRequest,
    folder: RunFolder,
    metadata: RunMetadata,
    allocation: Allocation,
    console: Console,
    end: TerminationRequest,
) -> ExitStatus:
    config = allocation.config
    request.folder = folder.path
    report_unreadable_checkpoints(folder, console)
    on_other_nodes, address = allocation.robots_on_other_nodes()
    specs = prepare_run_folder(config, folder, metadata, on_other_nodes, address)
    prepare_trace(folder.trace, wanted=request.profile)
    folder.console_address.unlink(missing_ok=True)  # each launch has a secret of its own
    link_latest(folder.path)
    held = out_of_use((*config.robots, *config.remote_robots), folder.path)
    for text in held.values():
        console.print(text, markup=False, soft_wrap=True)
    record_all_demonstrations(config, folder.store, console, on_other_nodes, held)
    if request.verb == "cloud":
        print_join_instructions(config, folder, metadata, console)
    log_file = LogFile(folder.log("launcher"), run=metadata.name, process="launcher")
    with log_file, RunLogger(folder.path, config, config.logging) as logger:
        link = GatewayLink(config, folder, metadata, specs)
        with RunSupervisor(config, folder, metadata, allocation, link, logger, console, end) as run:
            run.train()
        if request.profile:
            target = folder.path / "trace.json"
            events = merge_trace(folder.trace, target)
            console.print(
                f"{target}: {events} events; open it at https://ui.perfetto.dev", markup=False, soft_wrap=True
            )
        if end.requested.is_set():
            run.status.set_stage("interrupted")
            console.print(f"stopped{request.resume_hint()}")
            return ExitStatus.INTERRUPTED
        run.status.set_stage("evaluating")
        summary = evaluate_and_report(config, folder, run.summary(), console)
        run.status.set_stage("ended")
        logger.close(summary.as_json())
    console.print(f"the files of this run are in {folder.path}")
    return exit_status(config, summary, request.any_result, console)


def _fails_at_each_start(status: ProcessStatus) -> bool:
    return status.restarts >= MAX_ROBOT_STARTS - 1 and status.last_exit not in (None, 0)


class GatewayLink:
    """The launcher's connection to the gateway, and the state of the run that it shows in the terminal.

    Attributes:
        client: the connection, in the role of a console.
        hub: the state of the run.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, metadata: RunMetadata, specs: Mapping[str, RobotSpec]
    ) -> None:
        self.client = gateway_client(folder, metadata, LAUNCHER)
        budget_s = config.learner.max_training_s
        self.hub = ConsoleHub(metadata.name, self.client.send, dict(specs), budget_s, folder=folder.path)
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Connects, and starts the thread that takes the replies to e-stops, which only the console's process shows."""
        self.client.start()
        threading.Thread(target=self._drop_stop_replies, name="e-stops", daemon=True).start()

    def _drop_stop_replies(self) -> None:
        while not self._is_closed.is_set():
            self.client.receive_stop(0.5)

    def show(self, feed: Callable[..., None], *report: object) -> None:
        """Feeds the hub. A report that it cannot show is logged and does not end the run."""
        try:
            feed(*report)
        except WireError as error:
            log.warning("console.report_rejected %s", error)

    def close(self) -> None:
        self._is_closed.set()
        self.client.close()


class RunSupervisor:
    """Supervises a run from its first process to its last. A context manager: leaving it ends every process.

    Attributes:
        status: the file that `user-sys status` reads.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        metadata: RunMetadata,
        allocation: Allocation,
        link: GatewayLink,
        logger: RunLogger,
        console: Console,
        end: TerminationRequest,
    ) -> None:
        """`end` is set when a signal asks for the end of the run."""
        self._config, self._folder, self._link, self._console = config, folder, link, console
        self._processes = RunProcesses(config, folder, metadata, allocation)
        self._logger = logger
        self._end = end
        self._is_target_reached: bool | None = None  # None without a target
        self._missing: dict[str, str] = {}  # robots that never started, with the reason
        self._reasons = PrintedReasons()
        self._seen: set[str] = set()  # robots that have reported in this launch
        self._guards = SuccessGuards(folder.path) if config.learner.publish.on_success_drop == "best" else None
        for line in () if self._guards else release_automatic_pins(folder.path):
            console.print(line, markup=False, soft_wrap=True)
        self.status = StatusFile(folder.path)
        self._exporter = RunExporter(
            config.logging.prometheus_port, folder.path, lambda: self.status.newest, is_local=not config.ray.address
        )
        self._hub = link.hub
        stored = run_episodes(folder)
        self._hub.progress.restore_history(*previous_episodes(folder, stored), previous_elapsed_s(logger.run.path))
        self._hub.progress.restore_curves(previous_outcomes(folder, stored), ())
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
        try:
            self._processes.shutdown(self._left_s(PROCESS_DEADLINE_S))
        finally:
            self._end.resume()
            self._link.close()
            self._exporter.close()

    def train(self) -> None:
        """Blocks until the learner is done, the target is reached, or a signal asks for the end.

        Raises:
            RunError: a process of the run cannot be kept running, or no robot can be driven; names its log.
        """
        set_aside_results(self._folder.path)
        with ProgressDisplay(self._console) as display:
            reason = self._follow(display)
            self._is_target_reached = self._target_reached() if self._config.target.success else None
            self._leave(reason, display)

    def summary(self) -> RunSummary:
        """The run's counts, without its evaluation.

        Episodes whose reports were lost, such as while the gateway restarted, count by the store.
        """
        run, learners = self._hub.view(), assign_learners(read_robot_records(self._folder.robots))
        _, env_steps, interventions = previous_episodes(self._folder, run_episodes(self._folder))
        return RunSummary(
            run=self._folder.path.name,
            successes=0,
            episodes=0,
            training_s=run.training_s + run.metrics.get(first_learner(learners), {}).get("waited_s", 0.0),
            env_steps=max(run.env_steps, env_steps),
            updates=run.updates,
            interventions=max(run.interventions, interventions),
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
                if not display.address and self._folder.console_address.exists():
                    display.show_address(self._folder.console_address.read_text())
                run = self._hub.view()
                display.show(run, "training" if run.updates else "starting")
            if now >= scalars_at:
                scalars_at = now + SCALARS_INTERVAL_S
                run = self._hub.view()
                guarded = self._guards.scalars(self._seen) if self._guards else {}
                self._log_scalars(run.env_steps, run_scalars(run) | guarded)
            if now >= status_at:
                status_at = now + STATUS_INTERVAL_S
                for line in self._guards.apply() if self._guards else ():
                    display.print_line(line)
                if self._check_processes(display):
                    return "the learner is done"
            if self._target_reached():
                return "the target is reached"
        return INTERRUPTED

    def _receive(self, wait_s: float) -> None:
        """Processes all messages that have arrived. Blocks for the first one only."""
        message = self._link.client.receive(wait_s)
        while message is not None:
            if isinstance(message, RobotStatus) and message.robot not in self._seen:
                self._introduce(message.robot)
            if isinstance(message, HubMessage):
                self._link.show(self._hub.update, message)
            if self._guards and isinstance(message, EpisodeReport):
                self._guards.add(message)
            match message:
                case MetricsReport():
                    self._exporter.add_report(message)
                    self.status.on_report(message.node)
                    is_learner = message.node.startswith(LEARNER)
                    count = message.count if is_learner else self._hub.progress.env_steps
                    self._logger.log(message.node, count, message.scalars)
                case ResourceUpdate(record=record):
                    self._hub.update_resource(record)
                    if message.is_change or record.health not in (Health.READY, Health.LEASED):
                        self._print_resource(record)
            message = self._link.client.receive(0.0)

    def _print_resource(self, record: ResourceRecord) -> None:
        is_available = record.health in (Health.READY, Health.LEASED)
        state = "available" if is_available else f"{record.health} {record.note}".strip()
        self._console.print(f"{describe_device(record)} is {state}", markup=False, soft_wrap=True)
        known = self._hub.robot_spec(record.name) if record.name in self._seen else None
        if is_available and known is not None and record.embodiment not in ("", known.embodiment):
            specs = [self._hub.robot_spec(robot.name) for robot in self._hub.view().robots]
            if any(spec is not None and spec.embodiment == record.embodiment for spec in specs):
                self._seen.discard(record.name)  # its next status introduces it with this spec and that learner
                return
            self._console.print(
                f"{record.name} has another spec than before (logs/gateway.log names the difference): no learner of "
                "this launch trains for it. Restart it with the options that it had, or end the run and continue with "
                f"`user-sys train --resume {self._folder.path}`",
                markup=False,
                soft_wrap=True,
            )

    def _introduce(self, robot: str) -> None:
        """On a robot's first status in this launch: starts its embodiment's learner, and shows its spec."""
        self._seen.add(robot)
        self._processes.start_new_learners()
        records = read_robot_records(self._folder.robots)
        learners = learner_from_robot(records)
        self._hub.progress.set_learners(learners)
        if self._guards:
            self._guards.set_learners(learners)
        spec = next((record.spec for record in records if record.robot == robot), None)
        if spec is not None:
            self._link.show(self._hub.set_robot_spec, robot, spec)

    def _log_scalars(self, count: int, scalars: dict[str, float]) -> None:
        self._logger.log(RUN, count, scalars)
        self._hub.progress.set_scalars(RUN, scalars)

    def _check_processes(self, display: ProgressDisplay) -> bool:
        """Returns whether the learners are done. A robot that fails for good leaves the run to the others.

        Raises:
            RunError: the run cannot continue.
        """
        processes, client = self._processes, self._link.client
        if client.state is TunnelState.REFUSED:  # it would neither see robots nor end the run for them
            raise RunError(
                f"the gateway refuses the launcher: {client.reason}; continue with --resume {self._folder.path}"
            )
        processes.poll_compute(display.print_line)
        statuses = processes.cluster.statuses()
        self._check_robots(statuses, display)
        processes.report_failures(statuses, display.print_line, self._seen)
        self._report_unreadable_checkpoints(display)
        self._hub.progress.set_ended(ended_processes(statuses))
        run = self._hub.view()
        self.status.write("training" if run.updates else "starting", run, statuses, self._missing)
        processes.require_running(has_other_robots=bool(self._active_remote_robots()))
        return processes.are_learners_done(statuses)

    def _report_unreadable_checkpoints(self, display: ProgressDisplay) -> None:
        for name, scalars in self._hub.view().metrics.items():
            if count := int(scalars.get("checkpoints_unreadable", 0)):
                files = "1 newer checkpoint" if count == 1 else f"{count} newer checkpoints"
                text = f"continued from an older state: {files} cannot be read; see {self._folder.log(name)}"
                self._reasons.print(f"checkpoints of {name}", f"{name} {text}", display.print_line)

    def _check_robots(self, statuses: Mapping[str, ProcessStatus], display: ProgressDisplay) -> None:
        """Prints robots whose driver or session fails at each start. Raises RunError if none can be driven."""
        for number, robot in enumerate(self._config.robots):
            driver = f"{robot.name}-driver"
            path, status = self._folder.log(driver), statuses[driver]
            message = last_log_message(path)
            failed, session = _fails_at_each_start(status), statuses.get(f"{robot.name}-session")
            if robot.name in self._seen:
                self._missing.pop(robot.name, None)
            elif message.startswith(WAITING_LOG_PREFIX):
                reason = f"{robot.name} waits: {message.removeprefix(WAITING_LOG_PREFIX)}"
                if robot.simulated:
                    reason += f"; --robots.{number}.name=NAME simulates another robot, which need not wait"
                self._reasons.print(robot.name, reason, display.print_line)
            elif failed and robot.name not in self._missing:
                ends = f"its driver ends {exit_reason(status.last_exit or 0)}"
                why = f"{ends}: {message or 'its log is empty'}; see {path}"
                self._missing[robot.name] = f"{robot.name} cannot be driven: {why}"
                display.print_line(self._missing[robot.name])
            elif session and not failed and session.state is ProcessState.WAITING and _fails_at_each_start(session):
                path = self._folder.log(f"{robot.name}-session")  # its last line is the reason while it waits
                ends = f"its session ends {exit_reason(session.last_exit or 0)} at each start"
                reason = f"{robot.name} holds: {ends}: {last_log_message(path) or 'its log is empty'}; see {path}"
                self._reasons.print(robot.name, reason, display.print_line)
        if self._missing and len(self._missing) == len(self._config.robots) and not self._active_remote_robots():
            raise RunError("; ".join(self._missing.values()))

    def _active_remote_robots(self) -> frozenset[str]:
        own = {robot.name for robot in self._config.robots}
        return frozenset(r.name for r in self._hub.view().robots if r.status is not None and not r.lost) - own

    def _connected_remote_robots(self) -> int:
        """How many robots are connected, if any was seen that the run does not drive itself."""
        own = {robot.name for robot in self._config.robots}
        connected = self._hub.view().metrics.get(GATEWAY_NAME, {}).get("robots", 0)
        return int(connected) if self._seen - own else 0

    def _target_reached(self) -> bool:
        target = self._config.target
        share = self._hub.progress.success_rate(target.episodes) if target.success else None
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

    def _is_delivering(self, names: Collection[str]) -> bool:
        """Whether a learner has trained, and waits until the gateway has its last version, for a bounded time."""
        metrics = self._hub.view().metrics
        return any(metrics.get(name, {}).get("finished") for name in names)

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
        while leaving or (self._left_s(REMOTE_DEADLINE_S) and self._connected_remote_robots()):
            is_late = time.monotonic() >= deadline and not self._is_delivering(leaving)
            if is_late or not self._left_s(SAVE_DEADLINE_S):
                log.warning("run.left_behind nodes=%s robots=%d", sorted(leaving), self._connected_remote_robots())
                break
            self._receive(MESSAGE_WAIT_S)
            display.show(self._hub.view(), "stopping")
            leaving = processes.still_running(leaving)
        if warning := self._hub.progress.disk_warning:
            display.print_line(f"not everything could be written: {warning}")
        others = [name for name in processes.names if name != GATEWAY_NAME]
        processes.cluster.stop(*others, within_s=self._left_s(PROCESS_DEADLINE_S))
        processes.cluster.stop(GATEWAY_NAME, within_s=self._left_s(GATEWAY_DEADLINE_S))
