"""The session process: ``python -m user_sys.edge.session SESSION.yaml``.

A session controls one robot: it holds the robot's lease, runs the policy, records each step into the outbox, and
executes operators' commands. It may be killed at any time. The driver process keeps the robot safe, the outbox keeps
the steps, and the next session takes over with a newer token.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from hal.discovery import DeviceMonitor
from hal.durable import remove_durably, sync_folder
from hal.errors import HalError, HardwareLost, LeaseError
from hal.signals import stop_on_signals
from hal.spec import Array, RobotSpec
from hal.task import drawn_task
from user_sys.compose import PolicyConfig, RobotConfig, make_policy, policy_location
from user_sys.config import load
from user_sys.edge.agents import OperatorCommandQueue, SharedControlAgent
from user_sys.edge.control_authority import LOCAL_OPERATOR, ControlAuthority, ToolDrive
from user_sys.edge.control_channel import ControlInbox, EmergencyStopForwarder, LeaseClient
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.environment import TimeStep
from user_sys.edge.help_requests import InterventionConfig
from user_sys.edge.local_link import LocalLink
from user_sys.edge.loop import derived_seed, run_episode
from user_sys.edge.outbox import OUTBOX_RETRY_S, Outbox, OutboxConfig
from user_sys.edge.realtime import (
    CONTROL_LOOP_PRIORITY,
    THREAD_SWITCH_INTERVAL_S,
    start_with_realtime_priority,
)
from user_sys.edge.recorder import Recorder, RecorderConfig, SelectedAction, WriterThread
from user_sys.edge.status import SessionReporter, StatusPublisher
from user_sys.episode import EpisodeSource
from user_sys.errors import StoreFull, UserSysError
from user_sys.inference.live_policy import LivePolicy
from user_sys.inference.protocol import POLICY_NODE, PolicyDescription
from user_sys.inference.remote_policy import RemotePolicy, action_timeout_s, read_server_address
from user_sys.logs import add_log_ids, configure_logging
from user_sys.messages import (
    PROTOCOL_VERSION,
    DevicesReport,
    Hello,
    OperatorCommand,
    PreviewRequest,
    WeightsApplied,
)
from user_sys.threads import ThreadedService
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.connection import request_short_time_slice
from user_sys.tunnel.keys import GATEWAY_NAME, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig

log = logging.getLogger(__name__)

DRIVER_DEADLINE_S = 60.0  # a driver process may have to start first
DRAIN_DEADLINE_S = 20.0
URGENT_DRAIN_S, DRAIN_POLL_S = 2.0, 0.1  # after a signal
DRIVER_RETRY_S = 1.0
LEASE_EXPIRED = "holds: its lease has expired, and the gateway cannot be reached"
HOLDS_FOR_PERSON = "the robot holds until a person hands back or resets, after: "
NOT_RESET = "the e-stop prevented the reset: no step is recorded until a person hands back or resets"
LEASE_RETRY_S = 0.1
HOLD_RETRY_S, HOLD_STOP_TIMEOUT_S = 0.5, 10.0
EXIT_FAILED, EXIT_LEASE_LOST = 2, 3


@dataclass(frozen=True)
class EpisodeStarts:
    """The starts of a session's episodes.

    Attributes:
        seed: of the starts, together with the robot's name and a count that survives restarts.
        evaluated: of each of the robot's tasks, whether it is evaluated and not practised.
        evaluate_every: each so-many-th episode evaluates such a task.
    """

    seed: int = 0
    evaluated: tuple[bool, ...] = ()
    evaluate_every: int = 4

    @classmethod
    def of(cls, robot: RobotConfig, seed: int) -> Self:
        return cls(seed, tuple(task.evaluated for task in robot.tasks), robot.evaluate_every)

    def draw(self, robot: str, sessions: int) -> Iterator[tuple[EpisodeSource, int]]:
        """The source and the seed of each episode. Seeds differ between robots and sessions, and from those of demos.

        A seed decides which task is drawn (`hal.task.TaskMix`), so seeds of the wrong tasks are left out.

        Args:
            sessions: the number of earlier sessions.
        """
        seeds = (derived_seed(self.seed, robot, sessions, count) for count in itertools.count())
        for number in itertools.count(1):
            evaluates = all(self.evaluated) or number % self.evaluate_every == 0
            if not any(self.evaluated):
                yield EpisodeSource.ONLINE, next(seeds)
                continue
            wanted = (seed for seed in seeds if self.evaluated[drawn_task(seed, len(self.evaluated))] is evaluates)
            yield EpisodeSource.EVALUATION if evaluates else EpisodeSource.ONLINE, next(wanted)

    def exploration_seeds(self, robot: str, sessions: int) -> Iterator[int]:
        """The seeds of the random numbers by which copies of the policy explore; arguments as of `draw`."""
        return (derived_seed("exploration", self.seed, robot, sessions, count) for count in itertools.count())


@dataclass(frozen=True)
class SessionConfig:
    """A session's settings. The process that starts the session writes them.

    Attributes:
        robot: name of the robot; its driver process runs on this machine.
        holder: identifies this session in leases; the same after a restart.
        endpoint: the gateway's address.
        keys: folder with ``<robot>.key`` and ``gateway.pub``.
        state: folder of the outbox.
        starts: of the episodes.
        real_time: control periods follow the clock while the policy drives, too.
        realtime_scheduling: with `real_time`, request SCHED_FIFO for the control loop; ``off`` does not.
        explore: a policy without weights acts at random; otherwise the robot holds until the first weights arrive.
        policy_address: file with the address of the policy server that the run started.
        description: see `RobotConfig.description`.
        console: socket of a console on this computer (`local_console_endpoint`); empty for none.
    """

    robot: str = "panda-0"
    holder: str = "session"
    endpoint: str = "tcp://127.0.0.1:5555"
    keys: Path = Path("keys")
    state: Path = Path("edge")
    starts: EpisodeStarts = field(default_factory=EpisodeStarts)
    real_time: bool = False
    realtime_scheduling: Literal["auto", "off"] = "auto"
    explore: bool = False
    policy_address: Path = Path("policy.address")
    description: str = ""
    console: str = ""
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)


class RobotSession:
    """Runs episodes on a robot, from a granted lease until the run ends. `run` blocks until then.

    It is the `agents.SessionControl` of its agent and the `status.StatusSource` of its status.

    After an error of the driver, an expired lease or the death of the session before it, it holds a robot that a
    person has, until the person hands back or requests a reset: a reset may move the robot far.
    """

    def __init__(
        self,
        config: SessionConfig,
        client: TunnelClient,
        outbox: Outbox,
        driver: DriverClient,
        shutdown: threading.Event,
        reporter: SessionReporter,
        estops: EmergencyStopForwarder,
        lease: LeaseClient,
    ) -> None:
        self._config, self._driver, self._lease = config, driver, lease
        self._shutdown, self._reporter = shutdown, reporter
        spec = driver.spec
        sessions = outbox.count_session()
        self._policy = _make_policy(config, client, spec, sessions)
        if isinstance(self._policy, RemotePolicy):
            driver.max_gap_s = 0.0 if config.real_time else self._policy.timeout_s
        tool_drive = ToolDrive(spec, config.description)
        authority = ControlAuthority(config.robot, spec, tool_drive=tool_drive)
        commands = OperatorCommandQueue(authority.clock, lambda reply: self._status.send(reply))
        self._agent = SharedControlAgent(
            spec,
            authority,
            self._policy,
            commands,
            self,
            config.intervention,
            config.policy.execution,
            follows_clock=config.real_time,
        )
        estops.on_press = commands.note_estop
        self._starts = config.starts.draw(config.robot, sessions)
        self._writer_thread = WriterThread(on_blocked=lambda: self._status.publish())
        self._outbox = outbox
        outbox.allocate_reserve()
        self._recorder = Recorder(
            spec,
            config.robot,
            lambda packet: outbox.append_when_free(packet, shutdown),
            config.recorder,
            self._writer_thread.put,
        )
        add_log_ids(lambda: {"episode": self._recorder.episode})

        def on_local_message(message: AnyMessage, payload: Payload | None) -> None:
            if isinstance(message, OperatorCommand):
                commands.submit(message, estops.next_sequence(), is_local=True)
            elif isinstance(message, PreviewRequest):
                self._status.local_previews.enable(message)

        local = LocalLink(config.console, on_local_message, config.robot)
        self._status = StatusPublisher(config.robot, client, outbox, authority, self, driver.refused_realtime, local)
        driver.on_reset_wait = self._status.on_reset_wait
        self._interruption = self._logged_policy_error = ""  # the first: why no episode runs
        self._hold = HoldRecord(config.state / "held")
        if self._hold.is_set:
            authority.hold_after_restart()
            self._interruption = "the session was restarted"

        def check_threads() -> None:
            self._policy.raise_failure()
            estops.raise_failure()
            self._report_activity()

        self._inbox = ControlInbox(client, driver, lease, estops, commands, self._status, shutdown, check_threads)

    def run(self) -> None:
        """Runs episode after episode until the run ends.

        Raises:
            LeaseError: another session has the robot now.
            HardwareLost: the driver process ended and did not come back.
            UserSysError: the outbox or the tunnel failed.
        """
        with self._hold, self._inbox, self._policy, self._writer_thread, self._status:
            while not self._shutdown.is_set():
                self._run_episode()
            if self._inbox.is_run_over:
                self._hold.set(False)

    def _run_episode(self) -> None:
        if self._lease.is_expired():  # the driver holds the robot and refuses a reset
            self._interruption = self._interruption or LEASE_EXPIRED
            self._agent.answer_orders(LEASE_EXPIRED)
            self._status.publish()
            self._shutdown.wait(LEASE_RETRY_S)
            return
        try:
            if self._interruption and self._hold_for_person():
                return
            self._interruption = ""
            self._play_episode()
        except LeaseError:
            raise
        except HalError as error:
            self._on_driver_error(error)

    def _play_episode(self) -> None:
        source, seed = next(self._starts)
        self._agent.chunks.deterministic = source is EpisodeSource.EVALUATION
        self._agent.authority.begin_episode()  # a long reset has no note that no episode runs
        report = run_episode(
            self._driver,
            self._agent,
            self._recorder,
            source=source,
            seed=seed,
            listeners=[LateCommandLog(self._config.robot), self._status.on_step],
        )
        if report.episode:
            self._status.send(report)

    def _hold_for_person(self) -> bool:
        """Holds the robot for one control period, without an episode. False if an episode may begin."""
        time_step = self._driver.hold()
        self._status.on_step(time_step, None)
        if not self._agent.awaits_person(time_step):
            return False
        self._interruption = HOLDS_FOR_PERSON + self._interruption.removeprefix(HOLDS_FOR_PERSON)
        return True

    def _on_driver_error(self, error: HalError) -> None:
        self._interruption = str(error)
        if self._lease.is_expired() and not isinstance(error, HardwareLost):  # since the last look at it
            log.warning("lease.expired %s; the episode %s ends here", error, self._recorder.episode)
            return
        log.warning("driver.lost %s; the episode %s ends here", error, self._recorder.episode)
        self._interruption = f"the robot is lost: {error}"
        self._status.on_fault()
        self._attach_again()

    def _attach_again(self) -> None:
        """Waits for the driver process, which may be restarting. Raises HardwareLost after `DRIVER_DEADLINE_S`."""
        deadline = time.monotonic() + DRIVER_DEADLINE_S
        while not self._shutdown.wait(DRIVER_RETRY_S):
            self._agent.answer_orders(self._interruption)
            self._status.publish()
            try:
                self._driver.attach(DRIVER_RETRY_S)
                return
            except HardwareLost:
                if time.monotonic() > deadline:
                    raise

    def _report_activity(self) -> None:
        if self._lease.is_expired():
            self._reporter.activity = "held without a lease"
        else:
            self._reporter.activity = "waiting for weights" if self._policy.awaits_weights else "driving"

    # agents.SessionControl

    def rearm(self, person: str, estop_sequence: int) -> bool:
        return self._driver.rearm(person, estop_sequence)

    def is_stopping(self) -> bool:
        return self._shutdown.is_set()

    def has_lease(self) -> bool:
        return not self._lease.is_expired()

    def set_driver_mode(self, *, suspended: bool, policy_error: str) -> None:
        self._driver.real_time = self._config.real_time or suspended or bool(policy_error)
        self._driver.reduced_speed = suspended
        authority = self._agent.authority
        is_scripted = authority.operator == LOCAL_OPERATOR and not self._config.real_time  # it hands nothing back
        self._hold.set(authority.is_held_by_person and not is_scripted)
        if bool(policy_error) != bool(self._logged_policy_error):
            state = "unavailable" if policy_error else "available"
            log.info("session.policy_%s robot=%s %s", state, self._config.robot, policy_error)
        self._logged_policy_error = policy_error

    # status.StatusSource

    @property
    def episode(self) -> str:
        return self._recorder.episode

    @property
    def task(self) -> str:
        return self._driver.episode_task.name

    def weights_scalars(self) -> dict[str, float]:
        return self._policy.scalars() | self._agent.chunks.counters.scalars()

    @property
    def promised(self) -> Array:
        return self._agent.chunks.promised

    def status_note(self) -> str:
        if reason := self._outbox.paused_reason:
            return f"recording paused: {reason}"
        if self._interruption:
            return self._interruption
        if self._lease.is_expired():
            return LEASE_EXPIRED
        not_reset = "" if self._agent.authority.runs_episode else NOT_RESET
        if stopped := "; ".join(filter(None, (self._agent.stopped_why, not_reset))):
            return stopped
        if note := self._agent.policy_error or self._agent.chunks.delay_note:
            return note
        if not (dropped := self._outbox.newly_dropped_episodes):
            return ""
        return f"the outbox was full: it dropped the {dropped} oldest autonomous episodes during this session"


class HoldRecord(ThreadedService):
    """Whether a person has the robot, as an empty file, for the session after a killed one or a power cut.

    A thread writes it, because a disk may take longer than a control period.

    Attributes:
        is_set: a person has it, by the file, durably. None after a failed write: the file may have changed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("hold-record", HOLD_STOP_TIMEOUT_S)
        self._path = path
        self._is_held = path.exists()
        self.is_set: bool | None = self._is_held
        self._changed = threading.Event()

    def set(self, is_held: bool) -> None:
        """Has a change written, and never blocks. A failed write is logged and repeated: the robot goes on."""
        if is_held is not self._is_held:
            self._is_held = is_held
            self._changed.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._changed.wait(HOLD_RETRY_S if self.is_set is None else None)
            self._changed.clear()
            self._write(self._is_held)
        self._write(self._is_held)

    def _wake(self) -> None:
        self._changed.set()

    def _write(self, is_held: bool) -> None:
        if is_held is self.is_set:
            return
        was_known, self.is_set = self.is_set is not None, None
        try:
            if is_held:
                self._path.touch()
                sync_folder(self._path.parent)
            else:
                remove_durably(self._path)
            self.is_set = is_held
        except OSError as error:
            if was_known:
                log.error("session.hold_not_recorded %s: %s; it is tried again", self._path, error)


class LateCommandLog:
    """A listener that logs where the time went if the watchdog held the robot before an action."""

    def __init__(self, robot: str) -> None:
        self._robot = robot
        self._captured_ns = 0  # of the newest observation; unknown at an episode's first step

    def __call__(self, time_step: TimeStep, selected: SelectedAction | None) -> None:
        if time_step.held_periods and selected is not None:
            captured_ns = self._captured_ns or selected.t_observation_ns or selected.t_inference_ns
            log.warning(
                "command.late robot=%s: %.1f ms from the observation to the action, then %.1f ms until it was applied",
                self._robot,
                (selected.t_inference_ns - captured_ns) / 1e6,
                (time_step.t_command_ns - selected.t_inference_ns) / 1e6,
            )
        self._captured_ns = time_step.t_capture_ns


def main(argv: list[str]) -> int:
    """Runs one session. The exit status is 0 after the run ended. Undelivered chunks stay in the outbox."""
    configure_logging()
    try:
        _run(load(SessionConfig, Path(argv[0])))
    except LeaseError as error:
        log.error("session.refused %s", error)
        return EXIT_LEASE_LOST
    except (UserSysError, HalError, OSError) as error:
        log.error("session.failed %s: %s", type(error).__name__, error)
        return EXIT_FAILED
    return 0


def _run(config: SessionConfig) -> None:
    keys = load_keypair(config.keys / f"{config.robot}.key")
    gateway_key = load_public_key(config.keys / f"{GATEWAY_NAME}.pub")
    shutdown, urgent = threading.Event(), threading.Event()
    stop_on_signals(shutdown, urgent)
    with DriverClient(config.robot, owner=str(config.state.resolve()), shutdown=shutdown) as driver:
        _set_priority(config, driver)
        if (
            not driver.wait_until_free(shutdown, DRIVER_DEADLINE_S)
            or (outbox := _open_outbox(config, shutdown)) is None
        ):
            return
        hello = Hello(
            protocol=PROTOCOL_VERSION, role="robot", name=config.robot, holder=config.holder, spec=driver.spec
        )
        tunnel = TunnelClient(config.endpoint, keys, gateway_key, hello, outbox=outbox, limits=config.tunnel)
        with outbox, tunnel as client:
            lease = LeaseClient(config.robot, config.holder, client, driver.newest_token)
            with (
                EmergencyStopForwarder(config.robot, client, driver.latch_path) as estops,
                SessionReporter(config.robot, client, outbox) as reporter,
                DeviceMonitor(lambda records: client.send(DevicesReport(records=records))),
            ):
                driver.token = lease.acquire(shutdown)
                try:
                    if driver.token and not shutdown.is_set():
                        driver.lease_until_ns = lease.until_ns
                        driver.attach(DRIVER_DEADLINE_S)
                        reporter.activity = "driving"
                        sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
                        gc.collect()
                        gc.freeze()  # a full collection of the objects so far stops the control loop for 10 ms
                        RobotSession(config, client, outbox, driver, shutdown, reporter, estops, lease).run()
                finally:
                    reporter.activity = "delivering"
                    drain_outbox(client, urgent)
                    lease.release()


def _set_priority(config: SessionConfig, driver: DriverClient) -> None:
    """Runs the control loop's thread with real-time priority if permitted, below the priority of its driver.

    libzmq's thread for the driver's socket gets the same priority: if it waits for a CPU, so does the robot.
    """
    if not config.real_time or config.realtime_scheduling == "off":
        request_short_time_slice()
    elif refused := start_with_realtime_priority(CONTROL_LOOP_PRIORITY, driver.open):
        log.warning("realtime.refused robot=%s: %s; commands may be late under load", config.robot, refused)
        request_short_time_slice()
    driver.open()


def _make_policy(
    config: SessionConfig, client: TunnelClient, spec: RobotSpec, sessions: int
) -> LivePolicy | RemotePolicy:
    """The policy, in this process or in a policy server. `sessions`: see `EpisodeStarts.draw`.

    Raises:
        ConfigError: the server's timeout is too short for any network, or the policy cannot act in this process.
        RunError: the server's public key is missing.
    """
    policy = config.policy
    if policy_location(policy) == "edge":
        seeds = config.starts.exploration_seeds(config.robot, sessions)
        return LivePolicy(
            DoubleBufferedPolicy(lambda: make_policy(policy, spec, next(seeds))),
            client,
            config.robot,
            config.weights,
            config.keys,
            config.state / "weights",
            explore=config.explore,
        )
    return RemotePolicy(
        PolicyDescription(kind=policy.kind, options=policy.options, features=policy.features, spec=spec),
        load_keypair(config.keys / f"{config.robot}.key"),
        load_public_key(config.keys / f"{POLICY_NODE}.pub"),
        lambda: policy.endpoint or read_server_address(config.policy_address),
        action_timeout_s(
            spec,
            policy.timeout_fraction,
            may_take_long=not config.real_time or policy.execution.mode == "async",
            patience_s=policy.patience_s,
        ),
        explore=config.explore,
        on_version=lambda version, delay_s: client.send(
            WeightsApplied(robot=config.robot, version=version, seconds=delay_s)
        ),
    )


def _open_outbox(config: SessionConfig, shutdown: threading.Event) -> Outbox | None:
    """Opens the outbox as soon as its disk has room; None if `shutdown` is set first. Raises as `Outbox.open`."""
    last_message = ""
    while not shutdown.is_set():
        try:
            bounds = config.outbox
            return Outbox.open(config.state / "outbox", max_bytes=bounds.max_bytes, when_full=bounds.when_full)
        except StoreFull as error:
            if str(error) != last_message:
                last_message = str(error)
                log.error("session.waiting %s", last_message)
            shutdown.wait(OUTBOX_RETRY_S)
    return None


def drain_outbox(client: TunnelClient, urgent: threading.Event) -> None:
    """Delivers the outbox's chunks, for `DRAIN_DEADLINE_S` at most, or `URGENT_DRAIN_S` after a signal.

    A tunnel that is down has the same time to reconnect.
    """
    if (waiting := client.chunks_pending) and (down := client.reason):
        log.info("outbox.waiting chunks=%d, %g s at most for the link: %s", waiting, DRAIN_DEADLINE_S, down)
    deadline = time.monotonic() + DRAIN_DEADLINE_S
    refused = TunnelState.REFUSED
    while (left := client.drain(DRAIN_POLL_S)) and time.monotonic() < deadline and client.state is not refused:
        if urgent.is_set():
            urgent.clear()
            deadline = min(deadline, time.monotonic() + URGENT_DRAIN_S)
    if left:
        log.warning("outbox.undelivered chunks=%d: kept, and sent when the session starts again", left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
