"""Pictures from robots to consoles: newest wins, one under way a console and camera.

The gateway: one process beside the store that all robots, the learner and the consoles talk to.

It survives ``kill -9`` at any moment: what it acknowledged is in the store, leases and their tokens are in
``leases.json``, the newest weights in ``weights/``, its address in ``gateway.json``; peers reconnect by themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

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
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.ingest import ChunkIngester, LabelImporter, RetentionWorker
from user_sys.gateway.reports import OperatorAudit, Report, ReportValidator
from user_sys.gateway.weights import SendMessage
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
from user_sys.tunnel.flow_control import KeyedTokenBucket
from user_sys.tunnel.keys import KeyPair, Keyring, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer, TunnelServer

CameraKey = tuple[str, str]


class PreviewForwarder:
    """Holds at most one waiting picture a console and camera. One thread calls it."""

    def __init__(self, send: SendMessage) -> None:
        self._send = send
        self._under_way: dict[str, set[CameraKey]] = {}
        self._waiting: dict[tuple[str, CameraKey], tuple[Preview, Payload]] = {}

    def on_console_opened(self, console: str) -> None:
        self._under_way[console] = set()

    def on_console_closed(self, console: str) -> None:
        self._under_way.pop(console, None)
        for key in [key for key in self._waiting if key[0] == console]:
            del self._waiting[key]

    def forward(self, preview: Preview, jpeg: Payload) -> None:
        """Sends a picture to every console; keeps it instead of an older one while the camera's last is under way."""
        camera = (preview.robot, preview.camera)
        for console, under_way in self._under_way.items():
            if camera in under_way:
                self._waiting[console, camera] = (preview, jpeg)
            elif self._send(console, preview, jpeg):
                under_way.add(camera)

    def on_ack(self, console: str, camera: CameraKey) -> None:
        """A console has taken its last picture of this camera over."""
        under_way = self._under_way.get(console)
        if under_way is None:
            return
        under_way.discard(camera)
        waiting = self._waiting.pop((console, camera), None)
        if waiting is not None and self._send(console, *waiting):
            under_way.add(camera)


logger = logging.getLogger(__name__)

GATEWAY_NAME = "gateway"
LEASE_BURST, LEASE_REFILL_S = 10, 0.5  # of one robot: each new lease waits for the disk
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What ``gateway.json`` in a run folder says: where a gateway listens, or listened last."""

    endpoint: str
    public_key: str


class Gateway:
    """Serves one run folder; see `run`. `keys/gateway.key` and the ring in `keys/allowed` say who is who.

    On loopback a missing key pair is made; beyond it the gateway does not start without one.
    """

    def __init__(self, config: GatewayConfig, run_dir: Path, probes: Mapping[str, Probe] | None = None) -> None:
        """Opens the store.

        Args:
            probes: find this computer's devices; by default the installed ones.

        Raises:
            StoreError: another gateway writes the store, or it cannot be used.
            RunError: no key pair, beyond loopback, or a damaged ``gateway.json``.
            LeaseError: the lease table is damaged.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.run_dir = run_dir
        self._keys = _load_or_make_keys(run_dir / "keys", config.endpoint)
        endpoint = _endpoint(config.endpoint, run_dir)
        self._lock = threading.Lock()
        self._writer = StoreWriter.open(run_dir / "store")  # first: who gets it is alone with the files beside it too
        self._audit = AuditLog(run_dir / AUDIT_FILE)
        try:
            self._leases = LeaseTable(run_dir / "leases.json", config.lease_ttl_s)
            self._registry = Registry(self._leases, run_dir, audit=self._audit)
        except HalError:
            self._writer.close()
            raise
        self._steps_before = self._writer.steps
        ring = Keyring(run_dir / "keys")
        self.server = TunnelServer(endpoint, self._keys, ring, self, config.tunnel, GATEWAY_NAME, self._audit.write)
        self._committer = ChunkIngester(self._writer, self.server.reply, self.server.release, config)
        self._keeper = RetentionWorker(
            run_dir / "store", self._writer, self._committer, config.retention, config.upkeep_s
        )
        self._postman = LabelImporter(run_dir / "store", self._committer.append_labels)
        self._weights = WeightsRouter(run_dir / "weights", self.server.send, config.weights_kept, self._robots)
        self._previews = PreviewForwarder(self.server.send)
        self._stop_run: StopRun | None = None
        self._probes = probes
        self._devices: dict[str, tuple[ResourceRecord, ...]] = {}  # as each peer reported them last
        self._orders, self._bounds = OperatorAudit(self._audit.write), ReportValidator()
        self._faults: dict[str, int] = {}  # the hardware's, as its session counts them
        self._turns = KeyedTokenBucket(LEASE_BURST, LEASE_REFILL_S)
        self._granted: dict[str, tuple[bytes, Lease]] = {}  # each robot's newest lease, and the session that has it

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set, then commits what has arrived and closes. Blocks.

        Raises:
            RunError: the port is in use.
            StoreError: the disk failed; nothing unsafe was acknowledged. Start the gateway again to go on.
        """
        try:
            self.server.start()
            self._committer.start()
            self._keeper.start()
            self._weights.start()
            self._write_address()
            with DeviceMonitor(self._take_own_devices, self._probes):
                while not stop.wait(self.config.report_s):
                    self._raise_failures()
                    self._keep_watch()
        finally:
            self._close()

    def _close(self) -> None:
        for part in (self._keeper, self._committer, self._weights):
            if part.started:
                part.close()
        self.server.close()
        self._writer.close()
        self._audit.close()

    def _write_address(self) -> None:
        address = GatewayAddress(endpoint=self.server.endpoint, public_key=self._keys.public)
        replace_durably(self.run_dir / "gateway.json", msgspec.json.encode(address) + b"\n")

    def _raise_failures(self) -> None:
        for part in (self.server, self._committer, self._keeper, self._weights):
            if part.failure is not None:
                raise part.failure

    def _keep_watch(self) -> None:
        with self._lock:
            for peer in self.server.peers("robot"):
                self._registry.announce(_robot_resource(peer))  # also one that is not announced by `on_peer_opened` yet
            here = {GATEWAY_NAME, *(peer.name for peer in self.server.peers())}
            for record in [r for name, records in self._devices.items() if name in here for r in records]:
                self._registry.announce(record)
            self._registry.poll()
            news = self._registry.pop_changes()
            revoked = self._registry.pop_revoked()
        for record in news:
            logger.warning("gateway.resource name=%s kind=%s is=%s", record.name, record.kind, record.health)
            self._tell_consoles(ResourceUpdate(record=record))
        for lease, why in revoked:
            reason = f"{lease.robot} is quarantined {why}"
            self.server.send(lease.robot, LeaseRefusal(robot=lease.robot, reason=reason, token=lease.token))
        self._weights.poll_pin()
        self._postman.poll()
        self._orders.expire()
        self._audit.flush()
        self._tell_consoles(self._report())

    def _report(self) -> MetricsReport:
        totals = self._committer.totals
        scalars: dict[str, float] = {
            "chunks": totals.chunks,
            "bytes": totals.size_bytes,
            "duplicates": totals.duplicates,
            "chunks_refused": totals.rejected,
            "queued_bytes": self._committer.queued_bytes,
            **self._committer.disk_shortage(),
            "store_bytes": self._keeper.totals.store_bytes,
            "store_shortfall_bytes": self._keeper.totals.shortfall_bytes,
            "episodes_dropped": self._keeper.totals.episodes_dropped,
            "robots": len(self.server.peers("robot")),
            **self._weights.scalars(),
            "peers_refused": sum(self.server.counters[key] for key in ("keys_refused", "hellos_refused", "malformed")),
        }
        scalars |= {"reports_refused": self._bounds.rejected, **self.server.scalars()}
        steps = self._steps_before + totals.steps
        return MetricsReport(
            node=GATEWAY_NAME, count=steps, scalars={key: float(value) for key, value in scalars.items()}
        )

    # What the tunnel hands over (its thread; see TunnelHandler)

    def refusal_reason(self, hello: Hello) -> str:
        """A robot's connection belongs to whoever holds its lease; a rival with the same key must not cut it."""
        if hello.role != "robot":
            return ""
        with self._lock:
            lease = self._leases.lease(hello.name)
        return f"{hello.name} is driven by {lease.holder}" if lease and lease.holder != hello.holder else ""

    def on_peer_opened(self, peer: Peer) -> None:
        if peer.role == "robot":
            with self._lock:
                self._registry.announce(_robot_resource(peer))
            self._keep_card(peer)
        if peer.role == "console":
            self._previews.on_console_opened(peer.name)
        else:
            self._weights.on_peer_opened(peer)
        if self._stop_run is not None:
            self.server.send(peer.name, self._stop_run)

    def _keep_card(self, peer: Peer) -> None:
        try:
            if peer.spec is not None and save_robot_record(self.run_dir / "robots", peer.name, peer.spec):
                logger.info("gateway.robot_known robot=%s model=%s", peer.name, peer.spec.model)
        except OSError as error:
            logger.error("gateway.card_not_kept robot=%s: %s", peer.name, error)

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        self._committer.discard_session(peer)
        self._weights.on_peer_closed(peer.name)
        self._previews.on_console_closed(peer.name)

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        match message:
            case ChunkOffer() if payload is not None:
                self._committer.put_chunk(peer, message, payload)
            case LeaseRequest():
                self.server.reply(peer, self._answer_lease(peer, message))
            case LeaseRelease():
                self._release(message)
            case Preview() if payload is not None:
                self.server.send(peer.name, PreviewAck(robot=message.robot, camera=message.camera))
                self._previews.forward(message, payload)
            case PreviewAck():
                self._previews.on_ack(peer.name, (message.robot, message.camera))
            case WeightsOffer() | WeightsBlocks() | WeightsGone() | WeightsRequest():
                self._weights.on_message(peer.name, message, payload)
            case WeightsApplied():
                self._weights.on_message(peer.name, message, payload)
                self._tell_consoles(message)
            case OperatorCommand():
                self._pass_order(peer, message)
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
                with self._lock:
                    self._devices[peer.name] = self._bounds.validate_devices(peer.name, message.records)
            case RobotStatus() | EpisodeReport() | MetricsReport():
                if (report := self._bounds.validate(message, peer.role)) is not None:
                    self._take_report(report)
            case OperatorReply():
                self._orders.on_reply(message)
                self._tell_consoles(message)

    def _take_own_devices(self, records: tuple[ResourceRecord, ...]) -> None:
        with self._lock:
            self._devices[GATEWAY_NAME] = records

    def _take_report(self, report: Report) -> None:
        if isinstance(report, RobotStatus):
            self._count_faults(report)
            self._orders.on_status(report)
        self._tell_consoles(report)

    def _count_faults(self, status: RobotStatus) -> None:
        before = self._faults.get(status.robot, 0)
        self._faults[status.robot] = status.faults
        if status.faults == before or not self._is_robot(status.robot):
            return
        try:
            with self._lock:
                for _ in range(
                    min(status.faults - before if status.faults > before else status.faults, MAX_FAULTS + 1)
                ):
                    self._registry.report_fault(status.robot, status.note or "its hardware failed")
        except (HalError, OSError) as error:
            logger.error("gateway.fault_not_kept robot=%s: %s", status.robot, error)

    def _tell_consoles(self, message: AnyMessage) -> None:
        for console in self.server.peers("console"):
            self.server.send(console.name, message)

    def _pass_order(self, console: Peer, order: OperatorCommand) -> None:
        self._orders.on_command(order, console.address)
        if not self._is_robot(order.robot) or not self.server.send(order.robot, order):
            reason = f"{order.robot} is not connected"
            reply = OperatorReply(
                robot=order.robot,
                operator=order.operator,
                order=order.order,
                accepted=False,
                reason=reason,
                press=order.press,
            )
            self._orders.on_reply(reply)
            self.server.send(console.name, reply)

    def _robots(self) -> list[Peer]:
        return list(self.server.peers("robot"))

    def _is_robot(self, name: str) -> bool:
        return any(peer.name == name for peer in self.server.peers("robot"))

    def _stop(self, message: StopRun) -> None:
        logger.info("gateway.stop_run reason=%s", message.reason)
        self._stop_run = message
        for peer in self.server.peers():
            self.server.send(peer.name, message)

    def _answer_lease(self, peer: Peer, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        try:
            with self._lock:
                if request.token:
                    lease = self._registry.renew(request.robot, request.token)
                else:
                    lease = self._lease(peer, request)
        except (HalError, OSError) as error:
            return LeaseRefusal(robot=request.robot, reason=str(error), token=request.token)
        return LeaseGrant(
            robot=lease.robot, holder=lease.holder, token=lease.token, ttl_s=lease.ttl_s, asked_ns=request.asked_ns
        )

    def _lease(self, peer: Peer, request: LeaseRequest) -> Lease:
        """A session that asks again before it has heard the answer gets the same token: a newer one would be taken for
        its successor's, and end it.

        A new lease is written to the disk, and all robots' messages wait for that: whoever takes one after the other,
        giving them back or asking for greater tokens, has to wait between them.
        """
        session, granted = self._granted.get(request.robot, (b"", None))
        if granted is not None and session == peer.session and self._leases.lease(request.robot) == granted:
            if granted.holder == request.holder and granted.token > request.floor:
                return self._registry.renew(request.robot, granted.token)
        if (wait_s := self._turns.wait_s(request.robot)) > 0:
            raise LeaseError(f"{request.robot} was leased too often just now; ask again in {wait_s:.1f} s")
        fresh = self._registry.acquire(request.robot, request.holder, request.floor)
        self._turns.consume(request.robot)
        self._granted[request.robot] = (peer.session, fresh)
        return fresh

    def _release(self, message: LeaseRelease) -> None:
        try:
            with self._lock:
                self._registry.release(message.robot, message.token)
        except (HalError, OSError) as error:  # a lease that cannot be given back runs out
            logger.info("gateway.release robot=%s: %s", message.robot, error)


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


def _load_or_make_keys(folder: Path, endpoint: str) -> KeyPair:
    path = folder / f"{GATEWAY_NAME}.key"
    if not path.exists():
        if not is_loopback(endpoint):
            raise RunError(
                f"no key at {path}, and {endpoint} is not loopback: "
                f"`user-sys keys new {GATEWAY_NAME} --folder {folder}`"
            )
        save_keypair(new_keypair(), folder, GATEWAY_NAME)
    return load_keypair(path)


def is_loopback(endpoint: str) -> bool:
    """Whether nothing outside this machine can reach `endpoint`."""
    return urlsplit(endpoint).hostname in _LOOPBACK


def read_gateway_address(run_dir: Path) -> GatewayAddress | None:
    """Where the run's gateway listens, or listened last; None before its first start. Raises RunError: damaged."""
    path = run_dir / "gateway.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=GatewayAddress)
    except FileNotFoundError:
        return None
    except (OSError, *DECODE_ERRORS) as error:
        raise RunError(f"{path} cannot be read ({error}); delete it and start again") from None


def _endpoint(configured: str, run_dir: Path) -> str:
    """The configured endpoint; where it leaves the port open, the one that the last start of this run had."""
    if not configured.endswith((":0", ":*")):
        return configured
    before = read_gateway_address(run_dir)
    return before.endpoint if before is not None else configured
