"""The gateway: one process next to the store, to which all robots, learners and consoles connect.

It survives ``kill -9`` at any time. The store holds every acknowledged chunk, ``leases.json`` the leases and their
tokens, ``weights/`` the newest weights, and ``gateway.json`` the gateway's address. Peers reconnect by themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import msgspec

from hal.audit import AUDIT_FILE, AuditEntry, AuditLog
from hal.decode_errors import DECODE_ERRORS
from hal.discovery import DeviceMonitor, Probe
from hal.durable import replace_durably
from hal.errors import HalError, LeaseError
from hal.lease import Lease, LeaseTable
from hal.registry import MAX_FAULTS, Registry
from hal.resource import Kind, ResourceRecord
from user_sys.errors import RunError
from user_sys.gateway.announcer import SendMessage
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.ingest import ChunkIngester, StoreService
from user_sys.gateway.reports import OperatorAudit, Report, ReportValidator
from user_sys.gateway.weights_router import WeightsRouter
from user_sys.messages import (
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
    WeightsBlocks,
    WeightsGone,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.robot_records import save_robot_record
from user_sys.store.store import StoreWriter
from user_sys.tunnel.endpoint import is_loopback
from user_sys.tunnel.flow_control import KeyedTokenBucket
from user_sys.tunnel.keys import GATEWAY_NAME, KeyPair, Keyring, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer, TunnelServer

logger = logging.getLogger(__name__)

LEASE_BURST, LEASE_REFILL_S = 10, 0.5  # new leases of one robot; each needs a disk write

CameraKey = tuple[str, str]  # robot, camera


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``gateway.json`` in a run folder: the current or last address of its gateway."""

    endpoint: str
    public_key: str


class PreviewForwarder:
    """Forwards pictures to consoles, one in flight for each console and camera; a newer one replaces a waiting one.

    One thread calls it.
    """

    def __init__(self, send: SendMessage) -> None:
        self._send = send
        self._in_flight: dict[str, set[CameraKey]] = {}
        self._waiting: dict[tuple[str, CameraKey], tuple[Preview, Payload]] = {}

    def on_console_opened(self, console: str) -> None:
        self._in_flight[console] = set()

    def on_console_closed(self, console: str) -> None:
        self._in_flight.pop(console, None)
        for key in [key for key in self._waiting if key[0] == console]:
            del self._waiting[key]

    def forward(self, preview: Preview, jpeg: Payload) -> None:
        """Sends a picture to every console, or stores it until the console acknowledges the camera's last one."""
        camera = (preview.robot, preview.camera)
        for console, in_flight in self._in_flight.items():
            if camera in in_flight:
                self._waiting[console, camera] = (preview, jpeg)
            elif self._send(console, preview, jpeg):
                in_flight.add(camera)

    def on_ack(self, console: str, camera: CameraKey) -> None:
        """A console has acknowledged the last picture of this camera."""
        in_flight = self._in_flight.get(console)
        if in_flight is None:
            return
        in_flight.discard(camera)
        waiting = self._waiting.pop((console, camera), None)
        if waiting is not None and self._send(console, *waiting):
            in_flight.add(camera)


class ResourceService:
    """Leases, faults and devices of a run: the messages of peers on one side, the registry on the other.

    Any thread may call it.
    """

    def __init__(self, leases: LeaseTable, registry: Registry, lease_limit: KeyedTokenBucket | None = None) -> None:
        self.registry = registry
        self._leases = leases
        self._lease_limit = lease_limit or KeyedTokenBucket(LEASE_BURST, LEASE_REFILL_S)
        self._lock = threading.Lock()
        self._granted: dict[str, tuple[bytes, Lease]] = {}  # by robot: its newest lease, and the session that holds it
        self._faults: dict[str, int] = {}  # by robot: hardware faults, as its session counts them
        self._devices: dict[str, tuple[ResourceRecord, ...]] = {}  # by peer: its last report

    def refusal_reason(self, hello: Hello) -> str:
        """Refuses a robot session that does not hold the robot's lease: a rival with the same key must not cut it."""
        if hello.role != "robot":
            return ""
        with self._lock:
            lease = self._leases.lease(hello.name)
        return f"{hello.name} is driven by {lease.holder}" if lease and lease.holder != hello.holder else ""

    def announce(self, peer: Peer) -> None:
        with self._lock:
            self.registry.announce(_robot_resource(peer))

    def set_devices(self, name: str, records: tuple[ResourceRecord, ...]) -> None:
        """Replaces the devices at the computer of the peer called `name`."""
        with self._lock:
            self._devices[name] = records

    def poll(
        self, robots: Iterable[Peer], connected: Container[str]
    ) -> tuple[list[ResourceRecord], list[LeaseRefusal]]:
        """Announces `robots` and the devices of `connected` peers to the registry, and expires the others.

        Returns the changed resources, and a refusal for each lease that the registry has revoked.
        """
        with self._lock:
            for peer in robots:
                self.registry.announce(_robot_resource(peer))  # `on_peer_opened` may not have announced it yet
            for record in [r for name, records in self._devices.items() if name in connected for r in records]:
                self.registry.announce(record)
            self.registry.poll()
            changes, revoked = self.registry.pop_changes(), self.registry.pop_revoked()
        refusals = [
            LeaseRefusal(robot=lease.robot, reason=f"{lease.robot} is quarantined {reason}", token=lease.token)
            for lease, reason in revoked
        ]
        return list(changes), refusals

    def on_lease_request(self, peer: Peer, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        try:
            with self._lock:
                if request.token:
                    lease = self.registry.renew(request.robot, request.token)
                else:
                    lease = self._acquire(peer, request)
        except (HalError, OSError) as error:
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
        if (wait_s := self._lease_limit.wait_s(request.robot)) > 0:
            raise LeaseError(f"too many new leases of {request.robot}; retry in {wait_s:.1f} s")
        lease = self.registry.acquire(request.robot, request.holder, request.floor)
        self._lease_limit.consume(request.robot)
        self._granted[request.robot] = (peer.session, lease)
        return lease

    def on_lease_release(self, message: LeaseRelease) -> None:
        try:
            with self._lock:
                self.registry.release(message.robot, message.token)
        except (HalError, OSError) as error:  # the lease expires
            logger.info("gateway.lease_release_failed robot=%s: %s", message.robot, error)

    def on_status(self, status: RobotStatus, is_connected: bool) -> None:
        """Reports the hardware faults since the robot's last status to the registry."""
        before = self._faults.get(status.robot, 0)
        self._faults[status.robot] = status.faults
        if status.faults == before or not is_connected:
            return
        count = status.faults - before if status.faults > before else status.faults
        try:
            with self._lock:
                for _ in range(min(count, MAX_FAULTS + 1)):
                    self.registry.report_fault(status.robot, status.note or "its hardware failed")
        except (HalError, OSError) as error:
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
        lease_limit: KeyedTokenBucket | None = None,
    ) -> None:
        """Opens the store.

        Args:
            probes: find the devices of this computer; by default the installed ones.
            lease_limit: rate limit of new leases of one robot.

        Raises:
            StoreError: another gateway writes the store, or it cannot be used.
            RunError: no key pair on an address beyond loopback, or a damaged ``gateway.json``.
            LeaseError: the lease table is damaged.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self.config, self.run_dir = config, run_dir
        self._keys = _load_or_create_keys(run_dir / "keys", config.endpoint)
        endpoint = _endpoint(config.endpoint, run_dir)
        writer = StoreWriter.open(run_dir / "store")  # first: its lock also protects the files next to it
        self._audit = AuditLog(run_dir / AUDIT_FILE)
        try:
            leases = LeaseTable(run_dir / "leases.json", config.lease_ttl_s)
            self.resources = ResourceService(leases, Registry(leases, run_dir, audit=self._audit), lease_limit)
        except HalError:
            writer.close()
            raise
        keyring = Keyring(run_dir / "keys")
        self.server = TunnelServer(endpoint, self._keys, keyring, self, config.tunnel, GATEWAY_NAME, self._audit.write)
        ingester = ChunkIngester(writer, self.server.reply, self.server.release, config)
        self.store = StoreService(run_dir / "store", writer, ingester, config)
        self.weights = WeightsRouter(run_dir / "weights", self.server.send, config.weights_kept, self._robots)
        self._previews = PreviewForwarder(self.server.send)
        self._operator_audit, self._report_validator = OperatorAudit(self._audit.write), ReportValidator()
        self._probes = probes
        self._stop_run: StopRun | None = None

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set, then commits the received chunks and closes. Blocks.

        Raises:
            RunError: the port is in use.
            StoreError: the disk failed; every acknowledged chunk is durable. Start the gateway again.
        """
        try:
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
        if self.weights.started:
            self.weights.close()
        self.server.close()
        self.store.close()
        self._audit.close()

    def _write_address(self) -> None:
        address = GatewayAddress(endpoint=self.server.endpoint, public_key=self._keys.public)
        replace_durably(self.run_dir / "gateway.json", msgspec.json.encode(address) + b"\n")

    def _raise_failures(self) -> None:
        for part in (self.server, self.store, self.weights):
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
        self.store.import_labels()
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
            node=GATEWAY_NAME, count=self.store.steps, scalars={key: float(value) for key, value in scalars.items()}
        )

    # Methods of TunnelHandler, in the server's thread

    def refusal_reason(self, hello: Hello) -> str:
        return self.resources.refusal_reason(hello)

    def on_peer_opened(self, peer: Peer) -> None:
        if peer.role == "robot":
            self.resources.announce(peer)
            self._save_robot_record(peer)
        if peer.role == "console":
            self._previews.on_console_opened(peer.name)
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
        self._previews.on_console_closed(peer.name)

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        match message:
            case ChunkOffer() if payload is not None:
                self.store.ingester.put_chunk(peer, message, payload)
            case LeaseRequest():
                self.server.reply(peer, self.resources.on_lease_request(peer, message))
            case LeaseRelease():
                self.resources.on_lease_release(message)
            case Preview() if payload is not None:
                self.server.send(peer.name, PreviewAck(robot=message.robot, camera=message.camera))
                self._previews.forward(message, payload)
            case PreviewAck():
                self._previews.on_ack(peer.name, (message.robot, message.camera))
            case WeightsOffer() | WeightsBlocks() | WeightsGone() | WeightsRequest():
                self.weights.on_message(peer.name, message, payload)
            case WeightsApplied():
                self.weights.on_message(peer.name, message, payload)
                self._send_to_consoles(message)
            case OperatorCommand():
                self._forward_command(peer, message)
            case PreviewRequest():
                self.server.send(message.robot, message)
            case StopRun():
                self._audit.write(
                    AuditEntry(
                        event="order", order="end the run", peer=peer.name, address=peer.address, reason=message.reason
                    )
                )
                self._stop(message)
            case DevicesReport():
                records = self._report_validator.validate_devices(peer.name, message.records)
                self.resources.set_devices(peer.name, records)
            case RobotStatus() | EpisodeReport() | MetricsReport():
                if (report := self._report_validator.validate(message, peer.role)) is not None:
                    self._on_report(report)
            case OperatorReply():
                self._operator_audit.on_reply(message)
                self._send_to_consoles(message)

    def _set_own_devices(self, records: tuple[ResourceRecord, ...]) -> None:
        self.resources.set_devices(GATEWAY_NAME, records)

    def _on_report(self, report: Report) -> None:
        if isinstance(report, RobotStatus):
            self.resources.on_status(report, self._is_connected(report.robot))
            self._operator_audit.on_status(report)
        self._send_to_consoles(report)

    def _send_to_consoles(self, message: AnyMessage) -> None:
        for console in self.server.peers("console"):
            self.server.send(console.name, message)

    def _forward_command(self, console: Peer, command: OperatorCommand) -> None:
        self._operator_audit.on_command(command, console.address)
        if not self._is_connected(command.robot) or not self.server.send(command.robot, command):
            reply = OperatorReply(
                robot=command.robot,
                operator=command.operator,
                order=command.order,
                accepted=False,
                reason=f"{command.robot} is not connected",
                press=command.press,
            )
            self._operator_audit.on_reply(reply)
            self.server.send(console.name, reply)

    def _robots(self) -> list[Peer]:
        return list(self.server.peers("robot"))

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
