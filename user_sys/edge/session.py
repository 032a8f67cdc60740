"""The session process: ``python -m user_sys.edge.session SESSION.yaml``.

A session controls one robot: it holds the robot's lease, runs the policy, records each step into the outbox, and
executes operators' commands. It may be killed at any time. The driver process keeps the robot safe, the outbox keeps
the steps, and the next session takes over with a newer token.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from hal.discovery import DeviceMonitor
from hal.errors import HalError, HardwareLost, LeaseError
from hal.signals import stop_on_signals
from hal.spec import RobotSpec
from user_sys.compose import PolicyConfig, make_policy, policy_precisions
from user_sys.config import load
from user_sys.edge.agents import OperatorCommandQueue, SharedControlAgent, UpdatingPolicyAgent
from user_sys.edge.control_authority import ControlAuthority
from user_sys.edge.control_channel import ControlInbox, EmergencyStopForwarder, LeaseClient
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.environment import LateCommandLogger, TimeStep
from user_sys.edge.loop import EpisodeResult, run_episode
from user_sys.edge.outbox import Outbox, OutboxConfig, OutboxFull
from user_sys.edge.realtime import (
    CONTROL_LOOP_PRIORITY,
    THREAD_SWITCH_INTERVAL_S,
    start_with_realtime_priority,
)
from user_sys.edge.recorder import Recorder, RecorderConfig, SelectedAction, WriterThread
from user_sys.edge.status import SessionReporter, StatusPublisher
from user_sys.episode import EpisodeSource
from user_sys.errors import StoreFull, UserSysError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import PolicyClient, read_server_address
from user_sys.logs import configure_logging
from user_sys.messages import NO_VERSION, PROTOCOL_VERSION, DevicesReport, EpisodeReport, Hello, OperatorReply
from user_sys.policies.policy import Policy
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import GATEWAY_NAME, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.sockets import request_short_time_slice
from user_sys.weights.double_buffer import DoubleBufferedPolicy
from user_sys.weights.governor import Governor
from user_sys.weights.receiver import ReceiverConfig, WeightsReceiver

log = logging.getLogger(__name__)

DRIVER_DEADLINE_S = 60.0  # a driver process may have to start first
DRAIN_DEADLINE_S = 20.0
URGENT_DRAIN_S, DRAIN_POLL_S = 2.0, 0.1  # after a signal
SEEDS_PER_RUN = 1_000_003
OUTBOX_RETRY_S = 0.5
DRIVER_RETRY_S = 1.0
LEASE_RETRY_S = 0.1
WAITING_FOR_WEIGHTS = "waiting for weights: holds until the first version; take over to demonstrate the task"
EXIT_FAILED, EXIT_LEASE_LOST = 2, 3


@dataclass(frozen=True)
class SessionConfig:
    """A session's settings. The process that starts the session writes them.

    Attributes:
        robot: name of the robot; its driver process runs on this machine.
        holder: identifies this session in leases; the same after a restart.
        endpoint: the gateway's address.
        keys: folder with ``<robot>.key`` and ``gateway.pub``.
        state: folder of the outbox.
        seed: of the episodes' starts, together with the robot's name and a count that survives restarts.
        real_time: control periods follow the clock while the policy drives, too.
        realtime_scheduling: with `real_time`, request SCHED_FIFO for the control loop; ``off`` does not.
        explore: a policy without weights acts at random; otherwise the robot holds until the first weights arrive.
        policy_address: file with the address of the policy server that the run started.
    """

    robot: str = "panda-0"
    holder: str = "session"
    endpoint: str = "tcp://127.0.0.1:5555"
    keys: Path = Path("keys")
    state: Path = Path("edge")
    seed: int = 0
    real_time: bool = False
    realtime_scheduling: Literal["auto", "off"] = "auto"
    explore: bool = False
    policy_address: Path = Path("policy.address")
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)


class SessionWeights:
    """The two copies of the policy, and the thread that receives weights for them. A context manager.

    It is the `agents.WeightsMonitor` of the session's policy.
    """

    def __init__(self, config: SessionConfig, client: TunnelClient, spec: RobotSpec) -> None:
        self._robot, self._client = config.robot, client
        seeds = itertools.count(config.seed * SEEDS_PER_RUN)  # each version explores with its own random numbers
        self._policy_client = _policy_client(config, spec)
        make: Callable[[int], Policy] = partial(make_policy, config.policy, spec)
        if self._policy_client is not None:
            make = self._policy_client.make_policy
        self.policies = DoubleBufferedPolicy(lambda: make(next(seeds)))
        self._governor = Governor(config.weights.governor)
        self._report_lock = threading.Lock()  # the last report must name the version that acts
        self._receiver = WeightsReceiver(
            client,
            self.policies,
            config.weights,
            config.keys,
            config.state / "weights",
            self._governor,
            self._report_version,
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._policy_client is not None:
                stack.enter_context(self._policy_client)
            stack.enter_context(self._receiver)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def stop_loading(self) -> None:
        """Ends a wait for the policy server, so that no thread waits for it at the end of the session."""
        if self._policy_client is not None:
            self._policy_client.stop_loading()

    def raise_failure(self) -> None:
        """Raises what ended the receiver's or the policy client's thread. Any thread may call it."""
        self._receiver.raise_failure()
        if self._policy_client is not None:
            self._policy_client.raise_failure()

    def scalars(self) -> dict[str, float]:
        return self._receiver.scalars()

    def is_too_stale(self) -> bool:
        return self._receiver.is_too_stale()

    def on_swap(self, version: int) -> None:
        self._report_version()

    def on_inference(self, seconds: float) -> None:
        self._governor.observe(seconds)

    def _report_version(self) -> None:
        """Reports the acting version to the gateway: at a swap, and at the start of a tunnel session."""
        with self._report_lock:
            if self.policies.version != NO_VERSION:
                self._client.send(self._receiver.applied_report(self._robot))


class OutboxWriter:
    """Appends chunks to the outbox, in the writer thread.

    If the outbox is full it waits for room. The writer thread's queue then fills up and the robot holds. A session that
    ends writes the remaining chunks into the outbox's reserve.

    Attributes:
        paused_reason: why recording is paused; empty if it is not.
    """

    def __init__(self, robot: str, outbox: Outbox, shutdown: threading.Event) -> None:
        self._robot, self._outbox, self._shutdown = robot, outbox, shutdown
        self.paused_reason = ""
        self._reserve_released = False
        self._dropped_before = outbox.dropped.episodes
        outbox.allocate_reserve()

    @property
    def dropped_episodes(self) -> int:
        """Episodes that the outbox dropped in this session."""
        return self._outbox.dropped.episodes - self._dropped_before

    def append(self, packet: bytes) -> None:
        """Makes a chunk durable. Raises OutboxFull: the session ends and the reserve is full too."""
        while True:
            try:
                self._outbox.append(packet)
                break
            except OutboxFull as error:
                if self.paused_reason != str(error):
                    log.error("recording.paused robot=%s %s", self._robot, error)
                self.paused_reason = str(error)
                if self._shutdown.wait(OUTBOX_RETRY_S):
                    if self._reserve_released:
                        raise
                    self._reserve_released = True
                    self._outbox.release_reserve()
        if self.paused_reason:
            self.paused_reason = ""
            self._outbox.allocate_reserve()
            log.warning("recording.resumed robot=%s", self._robot)


class _DriverMode:
    """Sets the driver's speed limit and pace after each control period. A listener of the episode loop."""

    def __init__(self, robot: str, driver: DriverClient, agent: SharedControlAgent, real_time: bool) -> None:
        self._robot, self._driver, self._agent, self._real_time = robot, driver, agent, real_time
        self.awaits_weights = False  # as logged last
        self._is_policy_unavailable = False  # as logged last

    def on_step(self, time_step: TimeStep, selected: SelectedAction | None) -> None:
        waits, error, suspended = self._agent.awaits_weights, self._agent.policy_error, self._agent.is_policy_suspended
        self._driver.real_time = self._real_time or suspended or waits or bool(error)
        self._driver.reduced_speed = suspended
        if waits != self.awaits_weights:
            self.awaits_weights = waits
            log.info("session.%s robot=%s", "awaits_weights" if waits else "has_weights", self._robot)
        if bool(error) != self._is_policy_unavailable:
            self._is_policy_unavailable = bool(error)
            log.info("session.policy_%s robot=%s %s", "unavailable" if error else "available", self._robot, error)


class RobotSession:
    """Runs episodes on a robot, from a granted lease until the run ends. `run` blocks until then.

    It is the `agents.SessionControl` of its agent and the `status.StatusSource` of its status.
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
        self._config, self._client, self._driver, self._lease = config, client, driver, lease
        self._shutdown, self._reporter = shutdown, reporter
        spec, task = driver.spec, driver.task
        self._weights = SessionWeights(config, client, spec)
        authority = ControlAuthority(config.robot, spec)
        commands = OperatorCommandQueue(authority.clock, self.send_reply)
        policy = UpdatingPolicyAgent(
            self._weights.policies,
            task.sentence,
            task.max_steps,
            self._weights,
            swap_at=config.weights.swap_at,
            explore=config.explore,
        )
        self._agent = SharedControlAgent(spec, authority, policy, commands, self, task.max_steps)
        estops.on_press = commands.note_estop
        self._seeds = _episode_seeds(config, outbox.next_sequence)
        self._writer_thread = WriterThread(on_blocked=lambda: self._status.publish())
        self._outbox_writer = OutboxWriter(config.robot, outbox, shutdown)
        self._recorder = Recorder(
            spec,
            config.robot,
            task.name,
            task.sentence,
            self._outbox_writer.append,
            config.recorder,
            self._writer_thread.put,
        )
        self._status = StatusPublisher(config.robot, client, outbox, authority, self, driver.refused_realtime)
        self._mode = _DriverMode(config.robot, driver, self._agent, config.real_time)
        self._driver_error = ""

        def check_threads() -> None:
            self._weights.raise_failure()
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
        with self._inbox, ExitStack() as stack:
            for part in (self._weights, self._writer_thread, self._status.encoder):
                stack.enter_context(part)
            stack.callback(self._weights.stop_loading)  # before the rest: a load in progress would delay it
            while not self._shutdown.is_set():
                self._run_episode()

    def _run_episode(self) -> None:
        if self._lease.is_expired():  # the driver holds the robot and refuses a reset
            self._status.publish()
            self._shutdown.wait(LEASE_RETRY_S)
            return
        try:
            result = run_episode(
                LateCommandLogger(self._driver, self._config.robot),
                self._agent,
                self._recorder,
                source=EpisodeSource.ONLINE,
                seed=next(self._seeds),
                listeners=[self._mode.on_step, self._status.on_step],
            )
        except LeaseError:
            raise
        except HalError as error:
            self._on_driver_error(error)
            return
        self._driver_error = ""
        self._client.send(self._episode_report(result))

    def _on_driver_error(self, error: HalError) -> None:
        log.warning("driver.lost %s; the episode %s ends here", error, self._recorder.episode)
        if self._lease.is_expired():
            return
        self._driver_error = f"the robot is lost: {error}"
        self._status.faults += 1
        self._status.publish()
        self._attach_again()

    def _attach_again(self) -> None:
        """Waits for the driver process, which may be restarting. Raises HardwareLost after `DRIVER_DEADLINE_S`."""
        deadline = time.monotonic() + DRIVER_DEADLINE_S
        while not self._shutdown.wait(DRIVER_RETRY_S):
            try:
                self._driver.attach(DRIVER_RETRY_S)
                return
            except HardwareLost:
                if time.monotonic() > deadline:
                    raise

    def _episode_report(self, result: EpisodeResult) -> EpisodeReport:
        return EpisodeReport(
            robot=self._config.robot,
            episode=result.episode,
            source=EpisodeSource.ONLINE.value,
            steps=result.steps,
            success=result.success,
            intervention_steps=result.intervention_steps,
            episode_return=result.episode_return,
            policy_version=result.policy_version,
        )

    def _report_activity(self) -> None:
        if self._lease.is_expired():
            self._reporter.activity = "held without a lease"
        else:
            self._reporter.activity = "waiting for weights" if self._mode.awaits_weights else "driving"

    # agents.SessionControl

    def send_reply(self, reply: OperatorReply) -> None:
        self._client.send(reply)

    def rearm(self, person: str, estop_sequence: int) -> bool:
        return self._driver.rearm(person, estop_sequence)

    def is_stopping(self) -> bool:
        return self._shutdown.is_set()

    def has_lease(self) -> bool:
        return not self._lease.is_expired()

    # status.StatusSource

    @property
    def episode(self) -> str:
        return self._recorder.episode

    def weights_scalars(self) -> dict[str, float]:
        return self._weights.scalars()

    def status_note(self) -> str:
        if self._outbox_writer.paused_reason:
            return f"recording paused: {self._outbox_writer.paused_reason}"
        if self._driver_error:
            return self._driver_error
        if self._lease.is_expired():
            return "holds: its lease has expired, and the gateway cannot be reached"
        if not self._agent.is_policy_suspended and self._agent.awaits_weights:
            return WAITING_FOR_WEIGHTS
        if not self._agent.is_policy_suspended and self._weights.is_too_stale():
            return "holds: its weights are older than weights.max_staleness_versions allows; waiting for newer ones"
        if error := self._agent.policy_error:
            return error
        if dropped := self._outbox_writer.dropped_episodes:
            return f"the outbox was full: it dropped the {dropped} oldest autonomous episodes during this session"
        return ""


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
                    _drain(client, urgent)
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


def _policy_client(config: SessionConfig, spec: RobotSpec) -> PolicyClient | None:
    """The client of the policy server; None if the policy runs in this process.

    Raises:
        ConfigError: the timeout is too short for any network.
        RunError: the server's public key is missing.
    """
    policy = config.policy
    if policy.location == "edge":
        return None
    return PolicyClient(
        spec,
        policy.kind,
        policy.features,
        policy_precisions(policy),
        load_keypair(config.keys / f"{config.robot}.key"),
        load_public_key(config.keys / f"{POLICY_NODE}.pub"),
        lambda: policy.endpoint or read_server_address(config.policy_address),
        policy.timeout_fraction,
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


def _episode_seeds(config: SessionConfig, recorded_chunks: int) -> Iterator[int]:
    """Seeds of the session's episodes. They differ between robots and sessions, and from those of evaluation.

    Args:
        recorded_chunks: chunks before this session, a number that tells it from earlier sessions.
    """
    for count in itertools.count():
        text = f"{config.seed} {config.robot} {recorded_chunks} {count}".encode()
        yield int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())


def _drain(client: TunnelClient, urgent: threading.Event) -> None:
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
