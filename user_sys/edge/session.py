"""The session process: ``python -m user_sys.edge.session SESSION.yaml``.

One session drives one robot: it holds the robot's lease, runs the policy, records every step into the outbox, and
listens to people. It may be killed at any time: the driver process keeps the robot safe, the outbox keeps the steps,
and its successor takes over with a newer token.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from hal.discovery import DeviceMonitor
from hal.errors import HalError, HardwareLost, LeaseError
from hal.signals import stop_on_signals
from hal.spec import RobotSpec
from user_sys.compose import PolicyConfig, make_policy, policy_precisions
from user_sys.config import load
from user_sys.edge.agents import SharedControlAgent
from user_sys.edge.control_authority import ControlAuthority
from user_sys.edge.control_channel import EmergencyStopForwarder, LeaseClient
from user_sys.edge.driver_client import DriverClient
from user_sys.edge.environment import LateCommandLogger, TimeStep
from user_sys.edge.loop import EpisodeResult, run_episode
from user_sys.edge.outbox import Outbox, OutboxConfig, OutboxFull
from user_sys.edge.realtime import CONTROL_LOOP_PRIORITY, THREAD_SWITCH_INTERVAL_S, start_with_realtime_priority
from user_sys.edge.recorder import Recorder, RecorderConfig, SelectedAction, WriterThread
from user_sys.edge.status import SessionReporter, StatusPublisher
from user_sys.episode import EpisodeSource
from user_sys.errors import StoreFull, UserSysError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import PolicyClient, read_server_address
from user_sys.logs import configure_logging
from user_sys.messages import (
    NO_VERSION,
    PROTOCOL_VERSION,
    DevicesReport,
    EpisodeReport,
    Hello,
    LeaseGrant,
    LeaseRefusal,
    OperatorCommand,
    PreviewRequest,
    StopRun,
)
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import load_keypair, load_public_key
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
INBOX_WAIT_S = 0.02
OUTBOX_RETRY_S = 0.5
DRIVER_RETRY_S = 1.0
LEASE_RETRY_S = 0.1
WAITING_FOR_WEIGHTS = "waiting for weights, and holds: nothing was learned yet; take over to show the task"


@dataclass(frozen=True)
class SessionConfig:
    """What a session needs to know; written by whoever starts it.

    Attributes:
        robot: name of the robot; its driver process runs on this machine.
        holder: names this session in leases; the same after a restart.
        endpoint: the gateway's address.
        keys: folder with ``<robot>.key`` and ``gateway.pub``.
        state: folder of the outbox.
        seed: of the episodes' starts, together with the robot's name and a count that survives restarts.
        real_time: obey the clock also while the policy drives.
        realtime: with `real_time`, ask for SCHED_FIFO for the control loop; ``off`` does not ask.
        explore: a policy without weights acts, at random; without this the robot holds until the first have come.
        policy_address: file in which a policy process that the run has started says where it listens.
    """

    robot: str = "panda-0"
    holder: str = "session"
    endpoint: str = "tcp://127.0.0.1:5555"
    keys: Path = Path("keys")
    state: Path = Path("edge")
    seed: int = 0
    real_time: bool = False
    realtime: Literal["auto", "off"] = "auto"
    explore: bool = False
    policy_address: Path = Path("policy.address")
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)


class RobotSession:
    """Everything of one session between a connected tunnel and a robot. `run` blocks until the run is over."""

    def __init__(
        self,
        config: SessionConfig,
        client: TunnelClient,
        outbox: Outbox,
        driver: DriverClient,
        shutdown: threading.Event,
        reporter: SessionReporter,
        stops: EmergencyStopForwarder,
        lease: LeaseClient,
    ) -> None:
        self._lease, self._renewals = lease, DriverClient(config.robot)
        self._config, self._client, self._outbox, self._driver = config, client, outbox, driver
        self.shutdown = shutdown
        self._fatal: Exception | None = None
        self._stops = stops
        spec, task = driver.spec, driver.task
        seeds = itertools.count(config.seed * SEEDS_PER_RUN)  # each version explores by draws of its own
        self._link = _policy_client(config, spec)
        make = partial(make_policy, config.policy, spec) if self._link is None else self._link.make_policy
        self._swapper = DoubleBufferedPolicy(lambda: make(next(seeds)))
        self._governor = Governor(config.weights.governor)
        self._saying = threading.Lock()  # so that the last version that is said is the one that acts
        self._weights = WeightsReceiver(
            client,
            self._swapper,
            config.weights,
            config.keys,
            config.state / "weights",
            self._governor,
            self._say_version,
        )
        self._authority = ControlAuthority(config.robot, spec)
        self._pilot = SharedControlAgent(
            spec,
            self._authority,
            self._swapper,
            task.sentence,
            task.max_steps,
            reply=client.send,
            rearm=driver.rearm,
            leaving=self.shutdown.is_set,
            swapped=lambda version: self._say_version(),
            swap_at=config.weights.swap_at,
            too_old=self._weights.is_too_stale,
            observe=self._governor.observe,
            explore=config.explore,
            may_drive=lambda: not lease.is_expired(),
        )
        stops.on_press = self._pilot.note_estop
        self._scribe = WriterThread(on_blocked=lambda: self._publisher.publish())
        self._starts = (_episode_seed(config, outbox.next_sequence, count) for count in itertools.count())
        self._recorder = Recorder(
            spec, config.robot, task.name, task.sentence, self._keep, config.recorder, self._scribe.put
        )
        self._publisher = StatusPublisher(
            config.robot,
            client,
            outbox,
            self._authority,
            lambda: self._recorder.episode,
            self._said,
            driver.refused_realtime,
            self._weights.scalars,
        )
        self._note = ""
        self._recording = ""  # why it is paused
        self._reserve_used = False
        outbox.allocate_reserve()
        self._waits, self._reporter = False, reporter  # for its first weights, as was told
        self._away = False  # the policy, as was told
        self._dropped_before = outbox.dropped.episodes

    def run(self) -> None:
        """Episode after episode until the run is stopped.

        Raises:
            LeaseError: another session has the robot now.
            HardwareLost: the driver process went away and did not come back.
            UserSysError: the outbox or the tunnel cannot be used any more.
        """
        inbox = threading.Thread(target=self._listen, name="inbox", daemon=True)
        inbox.start()
        try:
            with ExitStack() as stack:
                for part in (self._link or nullcontext(), self._weights, self._scribe, self._publisher.previews):
                    stack.enter_context(part)
                if self._link is not None:
                    stack.callback(self._link.stop_loading)  # first: what waits to be loaded there keeps nobody waiting
                while not self.shutdown.is_set():
                    self._episode()
        finally:
            self.shutdown.set()
            inbox.join(timeout=5)
        if self._fatal is not None:
            raise self._fatal

    def _episode(self) -> None:
        if self._lease.is_expired():  # the driver holds the robot, and would not bring it to a start
            self._publisher.publish()
            self.shutdown.wait(LEASE_RETRY_S)
            return
        try:
            summary = run_episode(
                LateCommandLogger(self._driver, self._config.robot),
                self._pilot,
                self._recorder,
                source=EpisodeSource.ONLINE,
                seed=next(self._starts),
                listeners=[self._pace, self._publisher.on_step],
            )
        except LeaseError:
            raise
        except HalError as error:
            log.warning("driver.lost %s; the episode %s ends here", error, self._recorder.episode)
            if self._lease.is_expired():
                return
            self._note = f"the robot is lost: {error}"
            self._publisher.faults += 1
            self._publisher.publish()
            self._attach_again()
            return
        self._note = ""
        self._client.send(self._report(summary))

    def _attach_again(self) -> None:
        """Waits for the driver process, which may be starting again. Raises HardwareLost: it did not, in time."""
        deadline = time.monotonic() + DRIVER_DEADLINE_S
        while not self.shutdown.wait(DRIVER_RETRY_S):
            try:
                self._driver.attach(DRIVER_RETRY_S)
                return
            except HardwareLost:
                if time.monotonic() > deadline:
                    raise

    def _report(self, summary: EpisodeResult) -> EpisodeReport:
        return EpisodeReport(
            robot=self._config.robot,
            episode=summary.episode,
            source=EpisodeSource.ONLINE.value,
            steps=summary.steps,
            success=summary.success,
            intervention_steps=summary.intervention_steps,
            episode_return=summary.episode_return,
            policy_version=summary.policy_version,
        )

    def _pace(self, tick: TimeStep, decision: SelectedAction | None) -> None:
        waits = self._pilot.awaits_weights
        away = self._pilot.policy_error
        self._driver.real_time = self._config.real_time or self._pilot.is_policy_suspended or waits or bool(away)
        self._driver.reduced_speed = self._pilot.is_policy_suspended
        if waits != self._waits:
            self._waits = waits
            log.info("session.%s robot=%s", "awaits_weights" if waits else "has_weights", self._config.robot)
        if bool(away) != self._away:
            self._away = bool(away)
            log.info("session.policy_%s robot=%s %s", "away" if away else "back", self._config.robot, away)

    def _keep(self, packet: bytes) -> None:
        """Makes a chunk durable, in the scribe's thread.

        With a full outbox it waits for room; once the scribe takes no more the robot holds, which people see. A session
        that is to end writes what waits into the outbox's reserve.
        """
        while True:
            try:
                self._outbox.append(packet)
                break
            except OutboxFull as error:
                if self._recording != str(error):
                    log.error("recording.paused robot=%s %s", self._config.robot, error)
                self._recording = str(error)
                if self.shutdown.wait(OUTBOX_RETRY_S):
                    if self._reserve_used:
                        raise
                    self._reserve_used = True
                    self._outbox.release_reserve()
        if self._recording:
            self._recording = ""
            self._outbox.allocate_reserve()
            log.warning("recording.goes_on robot=%s", self._config.robot)

    def _said(self) -> str:
        if self._recording:
            return f"recording paused: {self._recording}"
        if self._note:
            return self._note
        if self._lease.is_expired():
            return "holds: its lease has run out, and the run is out of reach"
        if not self._pilot.is_policy_suspended and self._pilot.awaits_weights:
            return WAITING_FOR_WEIGHTS
        if not self._pilot.is_policy_suspended and self._weights.is_too_stale():
            return "holds: its weights are older than weights.max_staleness_versions allows, and newer ones are awaited"
        if away := self._pilot.policy_error:
            return away
        if not (dropped := self._outbox.dropped.episodes - self._dropped_before):
            return ""
        return f"the outbox was full: the {dropped} oldest autonomous episodes of this session's time were dropped"

    # The inbox thread: orders, leases

    def _listen(self) -> None:
        try:
            while not self.shutdown.is_set():
                self._take_messages()
                self._weights.raise_failure()
                if self._link is not None:
                    self._link.raise_failure()
                self._lease.renew_if_due()
                self._report_doing()
                self._stops.raise_failure()
        except Exception as error:  # of any kind: without this thread nobody could stop the robot; `run` raises it
            self._fatal = error
        finally:
            self.shutdown.set()
            self._renewals.close()

    def _report_doing(self) -> None:
        if self._lease.is_expired():
            self._reporter.activity = "held without a lease"
        else:
            self._reporter.activity = "waiting for weights" if self._waits else "driving"

    def _take_messages(self) -> None:
        message = self._client.receive(INBOX_WAIT_S)
        match message:
            case OperatorCommand():
                self._pilot.submit(message, self._stops.next_sequence())
            case LeaseGrant() | LeaseRefusal():
                self._lease.on_message(message)
                self._driver.token, self._driver.lease_until_ns = self._lease.token, self._lease.until_ns
                self._renew_at_driver()
            case PreviewRequest():
                self._publisher.enable_previews(message)
            case StopRun():
                log.info("run.stopped %s", message.reason)
                self.shutdown.set()

    def _renew_at_driver(self) -> None:
        """On a socket of its own: the loop may be busy with a reset, which lasts longer than a lease."""
        try:
            self._renewals.renew_lease(self._lease.token, self._lease.until_ns)
        except LeaseError:
            raise
        except HalError as error:
            log.debug("lease.not_told %s", error)  # the loop tells it at its next attempt

    def _say_version(self) -> None:
        """Tells the gateway with which version the robot acts: at a swap, and when a session has begun."""
        with self._saying:
            if self._swapper.version != NO_VERSION:
                self._client.send(self._weights.applied_report(self._config.robot))


def main(argv: list[str]) -> int:
    """Runs one session; the exit status is 0 once the run was stopped. What was not delivered stays in the outbox."""
    configure_logging()
    try:
        _run(load(SessionConfig, Path(argv[0])))
    except LeaseError as error:
        log.error("session.refused %s", error)
        return 3
    except (UserSysError, HalError, OSError) as error:
        log.error("session.failed %s: %s", type(error).__name__, error)
        return 2
    return 0


def _run(config: SessionConfig) -> None:
    keys, gateway_key = load_keypair(config.keys / f"{config.robot}.key"), load_public_key(config.keys / "gateway.pub")
    leaving, hurried = threading.Event(), threading.Event()
    stop_on_signals(leaving, hurried)
    with DriverClient(config.robot, owner=str(config.state.resolve()), shutdown=leaving) as driver:
        _set_priority(config, driver)
        if not driver.wait_until_free(leaving, DRIVER_DEADLINE_S) or (outbox := _open_outbox(config, leaving)) is None:
            return
        hello = Hello(
            protocol=PROTOCOL_VERSION, role="robot", name=config.robot, holder=config.holder, spec=driver.spec
        )
        tunnel = TunnelClient(config.endpoint, keys, gateway_key, hello, outbox=outbox, limits=config.tunnel)
        with outbox, tunnel as client:
            lease = LeaseClient(config.robot, config.holder, client, driver.newest_token)
            with (
                EmergencyStopForwarder(config.robot, client, driver.latch_path) as stops,
                SessionReporter(config.robot, client, outbox) as reporter,
                DeviceMonitor(lambda records: client.send(DevicesReport(records=records))),
            ):
                driver.token = lease.acquire(leaving)
                try:
                    if driver.token and not leaving.is_set():
                        driver.lease_until_ns = lease.until_ns
                        driver.attach(DRIVER_DEADLINE_S)
                        reporter.activity = "driving"
                        sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
                        gc.collect()
                        gc.freeze()  # to look through all that is there by now stops the loop for 10 ms
                        RobotSession(config, client, outbox, driver, leaving, reporter, stops, lease).run()
                finally:
                    reporter.activity = "delivering"
                    _drain(client, hurried)
                    lease.release()


def _set_priority(config: SessionConfig, driver: DriverClient) -> None:
    """The control loop's thread goes before all that is not in real time, if it may; but not before its driver.

    So does libzmq's thread between the two: where it waits for its turn beside a learner, so does the robot.
    """
    if not config.real_time or config.realtime == "off":
        request_short_time_slice()
    elif refused := start_with_realtime_priority(CONTROL_LOOP_PRIORITY, driver.open):
        log.warning("realtime.refused robot=%s: %s; commands may come late under load", config.robot, refused)
        request_short_time_slice()
    driver.open()


def _policy_client(config: SessionConfig, spec: RobotSpec) -> PolicyClient | None:
    """The way to the policy process where the policy acts in one; None where it acts here.

    Raises:
        ConfigError: no answer could come in the share of the control period that it has.
        RunError: no key of the process is known here.
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


def _open_outbox(config: SessionConfig, leaving: threading.Event) -> Outbox | None:
    """Opens the outbox as soon as its disk has room; None: `shutdown` was set first. Raises as `Outbox.open`."""
    said = ""
    while not leaving.is_set():
        try:
            bounds = config.outbox
            return Outbox.open(config.state / "outbox", max_bytes=bounds.max_bytes, when_full=bounds.when_full)
        except StoreFull as error:
            if str(error) != said:
                said = str(error)
                log.error("session.waiting %s", said)
            leaving.wait(OUTBOX_RETRY_S)
    return None


def _episode_seed(config: SessionConfig, recorded: int, count: int) -> int:
    """The seed of an episode's start: every robot has starts of its own, apart from those of evaluation.

    Args:
        recorded: chunks before this session's first, which tells it from the sessions before it.
        count: of this session's episodes.
    """
    text = f"{config.seed} {config.robot} {recorded} {count}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())


def _drain(client: TunnelClient, hurried: threading.Event) -> None:
    """Delivers what is in the outbox; a link that is down has the same time to come back, and less after a signal."""
    if (waiting := client.chunks_pending) and (down := client.reason):
        log.info("outbox.waiting chunks=%d, %g s at most for the link: %s", waiting, DRAIN_DEADLINE_S, down)
    deadline = time.monotonic() + DRAIN_DEADLINE_S
    refused = TunnelState.REFUSED
    while (left := client.drain(DRAIN_POLL_S)) and time.monotonic() < deadline and client.state is not refused:
        if hurried.is_set():
            hurried.clear()
            deadline = min(deadline, time.monotonic() + URGENT_DRAIN_S)
    if left:
        log.warning("outbox.undelivered chunks=%d: they are kept and sent when the session starts again", left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
