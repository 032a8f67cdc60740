"""The gateway: one process next to the store, to which all robots, learners and consoles connect.

It survives ``kill -9`` at any time. The store holds every acknowledged chunk, ``state.db`` the leases and
their tokens, ``weights/`` the newest weights, and ``gateway.json`` the gateway's address. Peers reconnect alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.discovery import DeviceMonitor, Probe
from hal.durable import replace_durably
from hal.errors import HalError, LeaseError, install_hint
from hal.lease import Lease, LeaseTable
from hal.pacing import TokenBucket
from hal.registry import Registry
from hal.resource import Health, Kind, ResourceRecord
from hal.state_database import STATE_FILE, AuditEntry, AuditLog, StateDatabase
from user_sys.errors import RunError
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.ingest import ChunkIngester, OperatorAudit, Report, ReportValidator, StoreService
from user_sys.gateway.weights import WeightsRouter
from user_sys.messages import (
    FIRST_PROTOCOL_OF_ORDER,
    ChunkOffer,
    DevicesReport,
    EpisodeReport,
    Hello,
    LeaseGrant,
    LeaseRefusal,
    LeaseRelease,
    LeaseRequest,
    MetricsReport,
    OperatorCommand,
    OperatorReply,
    Preview,
    PreviewAck,
    PreviewRequest,
    ResourceUpdate,
    RobotStatus,
    StopRun,
    WeightsApplied,
    WeightsBlobs,
    WeightsGone,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.operator_overrides import overrides_of_run
from user_sys.robot_records import save_robot_record
from user_sys.store.store import StoreWriter
from user_sys.threads import ThreadedService
from user_sys.tunnel.keys import GATEWAY_NAME, KeyPair, Keyring, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.limits import is_loopback
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer, TunnelServer
from user_sys.weights.catalog import SendMessage

if TYPE_CHECKING:
    from user_sys.gateway.traces import EpisodeTraces

logger = logging.getLogger(__name__)

MAX_WAITING_TASKS = 4096
MAX_CAMERAS, MAX_WAITING_BYTES = 64, 32 << 20  # of one robot's pictures for one console
STOP_TIMEOUT_S = 30.0

LEASE_BURST, LEASE_REFILL_S = 10, 0.5  # new leases of one robot; each needs a disk write
STARTING_S = 120.0  # after the gateway's start, in which sessions may be starting


class DiskThread(ThreadedService):
    """Runs tasks one after the other, in the order of `run`. Any thread may call it.

    Before `start` and after `close`, `run` runs the task in the calling thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, STOP_TIMEOUT_S)
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue(MAX_WAITING_TASKS)

    def run(self, task: Callable[[], object]) -> bool:
        """Queues a task; never blocks. Returns False if too many tasks wait: the disk has been stuck for long."""
        if not self.started or self._stopping.is_set():
            task()
            return True
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            logger.error("disk.stuck thread=%s: %d tasks wait", self._name, MAX_WAITING_TASKS)
            return False
        return True

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):
            self._tasks.put(None, timeout=STOP_TIMEOUT_S)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``gateway.json`` in a run folder: the current or last address of its gateway."""

    endpoint: str
    public_key: str


def _episode_traces(config: GatewayConfig, run: str) -> EpisodeTraces | None:
    """Raises RunError: OpenTelemetry's packages are missing."""
    if not config.traces:
        return None
    try:
        from user_sys.gateway.traces import EpisodeTraces
    except ImportError as error:
        raise RunError(f"gateway.traces needs OpenTelemetry ({error}): {install_hint('otel')}") from None
    return EpisodeTraces(config.traces, run)


class PreviewForwarder:
    """Forwards pictures to consoles, one in flight for each console and camera; a newer one replaces a waiting one.

    For each console and robot, it drops the pictures of further cameras than `MAX_CAMERAS`, and those beyond
    `MAX_WAITING_BYTES`. One thread calls it.
    """

    def __init__(self, send: SendMessage) -> None:
        self._send = send
        # By console, robot and camera: the picture that waits for the acknowledgement of the one in flight, or None.
        self._in_flight: dict[tuple[str, str, str], tuple[Preview, Payload] | None] = {}

    def forward(self, console: str, preview: Preview, jpeg: Payload) -> None:
        """Sends a picture, or stores it until the console acknowledges the camera's last one."""
        key = (console, preview.robot, preview.camera)
        others = {each: waiting for each, waiting in self._in_flight.items() if each[:2] == key[:2] and each != key}
        waiting_bytes = sum(len(waiting[1]) for waiting in others.values() if waiting is not None)
        if len(others) >= MAX_CAMERAS or waiting_bytes + len(jpeg) > MAX_WAITING_BYTES:
            return
        if key in self._in_flight:
            self._in_flight[key] = (preview, jpeg)
        elif self._send(console, preview, jpeg):
            self._in_flight[key] = None

    def on_ack(self, console: str, ack: PreviewAck) -> None:
        """A console has acknowledged the last picture of this camera."""
        if (waiting := self._in_flight.pop((console, ack.robot, ack.camera), None)) is not None:
            self.forward(console, *waiting)

    def on_peer_closed(self, name: str) -> None:
        """A console or a robot has disconnected."""
        self._in_flight = {key: waiting for key, waiting in self._in_flight.items() if name not in key[:2]}


class ResourceService:
    """Leases, faults and devices of a run: the messages of peers on one side, the registry on the other.

    Any thread may call it. Methods wait for the disk, except `refusal_reason` and `set_devices`.
    """

    def __init__(self, leases: LeaseTable, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry, self._leases = registry, leases
        self._lease_limits: dict[str, TokenBucket] = defaultdict(
            lambda: TokenBucket(1 / LEASE_REFILL_S, LEASE_BURST, clock)
        )  # by robot
        self._clock, self._starting_until_s = clock, clock() + STARTING_S
        self._lock = threading.Lock()
        self._granted: dict[str, tuple[bytes, Lease]] = {}  # by robot: its newest lease, and the session that holds it
        self._faults: dict[str, int] = {}  # by robot: hardware faults, as its session counts them
        self._devices: dict[str, tuple[ResourceRecord, ...]] = {}  # by peer: its last report

    def refusal_reason(self, hello: Hello) -> str:
        """Refuses a robot session that does not hold the robot's lease: a rival with the same key must not cut it."""
        if hello.role != "robot":
            return ""
        lease = self._leases.lease(hello.name)
        return f"{hello.name} is driven by {lease.holder}" if lease and lease.holder != hello.holder else ""

    def announce(self, peer: Peer) -> None:
        with self._lock:
            self.registry.announce(_robot_resource(peer))

    def set_devices(self, name: str, records: tuple[ResourceRecord, ...]) -> None:
        """Replaces the devices at the computer of the peer called `name`."""
        self._devices[name] = records

    def poll(
        self, robots: Iterable[Peer], connected: Container[str]
    ) -> tuple[list[ResourceRecord], list[LeaseRefusal]]:
        """Announces `robots` and the devices of `connected` peers to the registry, and expires the others.

        Returns the changed resources, and a refusal for each lease that the registry has revoked. After `STARTING_S`
        all lost robots count as changed once.
        """
        with self._lock:
            for peer in robots:
                self.registry.announce(_robot_resource(peer))  # `on_peer_opened` may not have announced it yet
            for record in [r for name, records in list(self._devices.items()) if name in connected for r in records]:
                self.registry.announce(record)
            self.registry.poll()
            changes, revoked = self.registry.pop_changes(), self.registry.pop_revoked()
            if self._clock() >= self._starting_until_s:
                self._starting_until_s = math.inf
                changes += [each for each in self.registry.snapshot() if each.kind is Kind.ROBOT and each.seen_unix_s]
        refusals = [
            LeaseRefusal(robot=lease.robot, reason=f"{lease.robot} is quarantined {reason}", token=lease.token)
            for lease, reason in revoked
        ]
        return [self._for_consoles(each) for each in changes], refusals

    def present(self) -> list[ResourceRecord]:
        """The present records of all robots, and of the devices that are lost, quarantined or draining."""
        with self._lock:
            records = self.registry.snapshot()
        usable = (Health.READY, Health.LEASED)
        return [self._for_consoles(each) for each in records if each.kind is Kind.ROBOT or each.health not in usable]

    def _for_consoles(self, record: ResourceRecord) -> ResourceRecord:
        """Without the time at which it was present if its session may be starting: it is not lost for a console."""
        is_starting = self._starting_until_s < math.inf
        return msgspec.structs.replace(record, seen_unix_s=0.0) if is_starting else record

    def on_lease_request(self, peer: Peer, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        try:
            with self._lock:
                if request.token:
                    lease = self.registry.renew(request.robot, request.token)
                else:
                    lease = self._acquire(peer, request)
        except HalError as error:
            return LeaseRefusal(robot=request.robot, reason=str(error), token=request.token)
        return LeaseGrant(
            robot=lease.robot, holder=lease.holder, token=lease.token, ttl_s=lease.ttl_s, asked_ns=request.asked_ns
        )

    def _acquire(self, peer: Peer, request: LeaseRequest) -> Lease:
        """Grants a lease. A session that repeats its request before the reply arrives gets the same token again.

        A newer token would end the session that holds the older one. A new lease needs a disk write, which delays the
        messages of all robots. So new leases of one robot are rate-limited.
        """
        session, granted = self._granted.get(request.robot, (b"", None))
        if granted is not None and session == peer.session and self._leases.lease(request.robot) == granted:
            if granted.holder == request.holder and granted.token > request.floor:
                return self.registry.renew(request.robot, granted.token)
        limit = self._lease_limits[peer.name]
        if (wait_s := limit.wait_s(1)) > 0:
            raise LeaseError(f"too many new leases of {request.robot}; retry in {wait_s:.1f} s")
        lease = self.registry.acquire(request.robot, request.holder, request.floor)
        limit.consume()
        self._granted[request.robot] = (peer.session, lease)
        return lease

    def on_lease_release(self, message: LeaseRelease) -> None:
        try:
            with self._lock:
                self.registry.release(message.robot, message.token)
        except HalError as error:  # the lease expires
            logger.info("gateway.lease_release_failed robot=%s: %s", message.robot, error)

    def has_new_faults(self, status: RobotStatus) -> bool:
        """Whether `on_status` has to be called."""
        return status.faults != self._faults.get(status.robot)

    def on_status(self, status: RobotStatus, is_connected: bool) -> None:
        """Reports a hardware fault since the robot's last status to the registry.

        A connected session sends a status at each fault. So several faults in one status are those of an outage, and
        count as one. Those in the first status since the gateway's start do not count: they may be hours old.
        """
        before = self._faults.get(status.robot, status.faults)
        self._faults[status.robot] = status.faults
        if status.faults in (0, before) or not is_connected:
            return
        try:
            with self._lock:
                self.registry.report_fault(status.robot, status.note or "its hardware failed")
        except HalError as error:
            logger.error("gateway.fault_write_failed robot=%s: %s", status.robot, error)


class Gateway:
    """Serves one run folder; see `run`. `keys/gateway.key` and the keyring in `keys/allowed` authenticate its peers.

    On loopback the gateway generates a missing key pair. On another address it needs one.
    """

    def __init__(
        self,
        config: GatewayConfig,
        run_dir: Path,
        probes: Mapping[str, Probe] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the store.

        Args:
            probes: find the devices of this computer; by default the installed ones.
            clock: in seconds, of the rate limit of new leases, and of the time since the start.

        Raises:
            StoreError: another gateway writes the store, or it cannot be used.
            RunError: no key pair on an address beyond loopback, or a damaged ``gateway.json``.
            HalError: a state database is damaged.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self.config, self.run_dir = config, run_dir
        self._keys = _load_or_create_keys(run_dir / "keys", config.endpoint)
        endpoint = _endpoint(config.endpoint, run_dir)
        writer = StoreWriter.open(run_dir / "store")  # first: its lock also protects the files next to it
        self._audit = AuditLog(run_dir / STATE_FILE)
        try:
            state = StateDatabase(run_dir / STATE_FILE)
            leases = LeaseTable(state, config.lease_ttl_s)
            registry = Registry(leases, state, audit=self._audit, overrides=overrides_of_run(run_dir))
            self.resources = ResourceService(leases, registry, clock)
        except HalError:
            writer.close()
            raise
        keyring = Keyring(run_dir / "keys")
        self._audit_thread, self._resources_thread = DiskThread("audit"), DiskThread("resources")
        self.server = TunnelServer(endpoint, self._keys, keyring, self, config.tunnel, self._write_audit)
        ingester = ChunkIngester(writer, self.server.reply, self.server.release, config)
        ingester.latencies.traces = _episode_traces(config, run_dir.name)
        self.store = StoreService(run_dir / "store", writer, ingester, config)
        self.weights = WeightsRouter(run_dir / "weights", self.server.send, config.weights_kept, self._weights_users)
        self._previews = PreviewForwarder(self.server.send)
        self._operator_audit, self._report_validator = OperatorAudit(self._write_audit), ReportValidator()
        self._probes = probes
        self._stop_run: StopRun | None = None

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set, then commits the received chunks and closes. Blocks.

        Raises:
            RunError: the port is in use.
            StoreError: the disk failed; every acknowledged chunk is durable. Start the gateway again.
        """
        try:
            self._audit_thread.start()
            self._resources_thread.start()
            self.server.start()
            self.store.start()
            self.weights.start()
            self._write_address()
            with DeviceMonitor(self._set_own_devices, self._probes):
                while not stop.wait(self.config.report_s):
                    self._raise_failures()
                    self._poll()
        finally:
            self._close()

    def _close(self) -> None:
        self.store.stop()
        self.weights.close()
        self.server.close()
        self.store.close()
        if self.store.ingester.latencies.traces is not None:
            self.store.ingester.latencies.traces.close()
        self._resources_thread.close()
        self._audit_thread.close()
        self._audit.close()
        self.resources.registry.close()

    def _write_address(self) -> None:
        address = GatewayAddress(endpoint=self.server.endpoint, public_key=self._keys.public)
        replace_durably(self.run_dir / "gateway.json", msgspec.json.encode(address) + b"\n")

    def _raise_failures(self) -> None:
        for part in (self.server, self.store, self.weights, self._audit_thread, self._resources_thread):
            if part.failure is not None:
                raise part.failure

    def _poll(self) -> None:
        connected = {GATEWAY_NAME, *(peer.name for peer in self.server.peers())}
        changes, refusals = self.resources.poll(self.server.peers("robot"), connected)
        for record in changes:
            logger.warning("gateway.resource name=%s kind=%s health=%s", record.name, record.kind, record.health)
            self._send_to_consoles(ResourceUpdate(record=record))
        for refusal in refusals:
            self.server.send(refusal.robot, refusal)
        self.weights.poll_pin()
        self._operator_audit.expire()
        self._audit.flush()
        self._send_to_consoles(self._report())

    def _report(self) -> MetricsReport:
        scalars: dict[str, float] = {
            **self.store.scalars(),
            "robots": len(self.server.peers("robot")),
            **self.weights.scalars(),
            "peers_refused": sum(self.server.counters[key] for key in ("keys_refused", "hellos_refused", "malformed")),
            "reports_refused": self._report_validator.rejected,
            **self.server.scalars(),
        }
        return MetricsReport(
            node=GATEWAY_NAME,
            scalars={key: float(value) for key, value in scalars.items()},
            histograms=self.store.ingester.latencies.report(),
        )

    # Methods of TunnelHandler, in the server's thread

    def refusal_reason(self, hello: Hello) -> str:
        return self.resources.refusal_reason(hello)

    def on_peer_opened(self, peer: Peer) -> None:
        if peer.role == "robot":
            self._resources_thread.run(lambda: self.resources.announce(peer))
            self._resources_thread.run(lambda: self._save_robot_record(peer))
        if peer.role == "console":
            for record in self.resources.present():  # changes while it was away were not reported to it
                self.server.send(peer.name, ResourceUpdate(record=record, is_change=False))
        else:
            self.weights.on_peer_opened(peer)
        if self._stop_run is not None:
            self.server.send(peer.name, self._stop_run)

    def _save_robot_record(self, peer: Peer) -> None:
        try:
            if peer.spec is not None and save_robot_record(self.run_dir / "robots", peer.name, peer.spec):
                logger.info("gateway.robot_saved robot=%s model=%s", peer.name, peer.spec.model)
        except OSError as error:
            logger.error("gateway.robot_write_failed robot=%s: %s", peer.name, error)

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        self.store.ingester.discard_session(peer)
        self.weights.on_peer_closed(peer.name)
        self._previews.on_peer_closed(peer.name)

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        match message:
            case ChunkOffer() if payload is not None:
                self.store.ingester.put_chunk(peer, message, payload)
            case LeaseRequest():
                self._resources_thread.run(lambda: self._reply_to_lease_request(peer, message))
            case LeaseRelease():
                self._resources_thread.run(lambda: self.resources.on_lease_release(message))
            case Preview() if payload is not None:
                self.server.send(peer.name, PreviewAck(robot=message.robot, camera=message.camera))
                for console in self.server.peers("console"):
                    self._previews.forward(console.name, message, payload)
            case PreviewAck():
                self._previews.on_ack(peer.name, message)
            case WeightsOffer() | WeightsBlobs() | WeightsGone() | WeightsRequest():
                self.weights.on_message(peer.name, message, payload)
            case WeightsApplied():
                if self._report_validator.validate(message, peer.role) is None:
                    return
                self.weights.on_message(peer.name, message, payload)
                if peer.role == "robot":
                    self.store.ingester.latencies.on_applied(peer.name, message.version, message.seconds)
                    self._send_to_consoles(message)
            case OperatorCommand():
                self._forward_command(peer, message)
            case PreviewRequest():
                self.server.send(message.robot, message)
            case StopRun():
                self._write_audit(
                    AuditEntry(
                        event="order", order="end the run", peer=peer.name, address=peer.address, reason=message.reason
                    )
                )
                self._stop(message)
            case DevicesReport():
                records = self._report_validator.validate_devices(peer.name, message.records)
                self.resources.set_devices(peer.name, records)
            case RobotStatus() | EpisodeReport() | MetricsReport() | OperatorReply():
                if (report := self._report_validator.validate(message, peer.role)) is not None:
                    self._on_report(report)

    def _reply_to_lease_request(self, peer: Peer, request: LeaseRequest) -> None:
        self.server.reply(peer, self.resources.on_lease_request(peer, request))

    def _write_audit(self, entry: AuditEntry) -> None:
        """An `AuditSink` that does not wait for the disk. An entry that cannot be queued is logged."""
        if not self._audit_thread.run(lambda: self._audit.write(entry)):
            logger.error("gateway.audit_lost %s", entry)

    def _set_own_devices(self, records: tuple[ResourceRecord, ...]) -> None:
        self.resources.set_devices(GATEWAY_NAME, records)

    def _on_report(self, report: Report) -> None:
        if isinstance(report, RobotStatus):
            if self.resources.has_new_faults(report):
                is_connected = self._is_connected(report.robot)
                self._resources_thread.run(lambda: self.resources.on_status(report, is_connected))
            self._operator_audit.on_status(report)
        elif isinstance(report, OperatorReply):
            self._operator_audit.on_reply(report)
        self._send_to_consoles(report)

    def _send_to_consoles(self, message: AnyMessage) -> None:
        for console in self.server.peers("console"):
            self.server.send(console.name, message)

    def _forward_command(self, console: Peer, command: OperatorCommand) -> None:
        self._operator_audit.on_command(command, console.address)
        if command.order != "e-stop":  # one is never too old
            command = msgspec.structs.replace(command, forwarded_unix_ns=time.time_ns())
        robot = next((peer for peer in self.server.peers("robot") if peer.name == command.robot), None)
        reason = ""
        if robot is not None and robot.protocol < FIRST_PROTOCOL_OF_ORDER.get(command.order, 0):
            reason = f"{robot.name} runs an older release, without {command.order!r}; upgrade its computer"
        elif robot is None or not self.server.send(command.robot, command):
            reason = f"{command.robot} is not connected"
        if reason:
            reply = command.reply(accepted=False, reason=reason)
            self._operator_audit.on_reply(reply)
            self.server.send(console.name, reply)

    def _weights_users(self) -> list[Peer]:
        return [*self.server.peers("robot"), *self.server.peers("policy")]

    def _is_connected(self, robot: str) -> bool:
        return any(peer.name == robot for peer in self.server.peers("robot"))

    def _stop(self, message: StopRun) -> None:
        logger.info("gateway.stop_run reason=%s", message.reason)
        self._stop_run = message
        for peer in self.server.peers():
            self.server.send(peer.name, message)


def _robot_resource(peer: Peer) -> ResourceRecord:
    spec = peer.spec
    return ResourceRecord(
        kind=Kind.ROBOT,
        name=peer.name,
        model=spec.model if spec else "unknown",
        node=peer.address,
        capabilities=tuple(f"camera:{camera.name}" for camera in spec.cameras) if spec else (),
        found_by="tunnel",
        embodiment=spec.embodiment if spec else "",
        labels={"via": peer.via} if peer.via else {},
    )


def _load_or_create_keys(folder: Path, endpoint: str) -> KeyPair:
    path = folder / f"{GATEWAY_NAME}.key"
    if not path.exists():
        if not is_loopback(endpoint):
            raise RunError(
                f"{path} does not exist, and {endpoint} is not a loopback address; create the key with "
                f"`user-sys keys new {GATEWAY_NAME} --folder {folder}`"
            )
        save_keypair(new_keypair(), folder, GATEWAY_NAME)
    return load_keypair(path)


def read_gateway_address(run_dir: Path) -> GatewayAddress | None:
    """The current or last address of the run's gateway; None before its first start. Raises RunError if damaged."""
    path = run_dir / "gateway.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=GatewayAddress)
    except FileNotFoundError:
        return None
    except (OSError, *DECODE_ERRORS) as error:
        raise RunError(f"{path} cannot be read ({error}); delete it and start again") from None


def _endpoint(configured: str, run_dir: Path) -> str:
    """The configured endpoint. If its port is open, the endpoint of the run's last start."""
    if not configured.endswith((":0", ":*")):
        return configured
    last = read_gateway_address(run_dir)
    return last.endpoint if last is not None else configured
