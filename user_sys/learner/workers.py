"""The worker group of a learner: processes that train together, on one computer or several of a cluster.

The learner's process is rank 0. It listens, and leaves its address and a fresh secret in a file next to its
checkpoints. Each worker connects and both prove that they know the secret, which is never sent. Later messages are
plain text. Rank 0 then sends each worker its `TrainingSpec`.

A worker that ends unexpectedly ends the learner with the reason; its supervisor restarts all from the checkpoint. A
worker ends at once with its learner. TCP keep-alive closes a connection within `KEEPALIVE_TIMEOUT_S` if a computer
vanishes, however busy the processes are.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import PRIVATE_FILE_MODE, replace_durably
from hal.spec import RobotSpec
from user_sys.algorithms.distributed import COLLECTIVE_TIMEOUT_S, TrainingGroup, create_rendezvous
from user_sys.errors import LinkDown, RunError, WireError
from user_sys.learner.config import LearnerConfig
from user_sys.learner.trainer import RankCommand

log = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")
RENDEZVOUS_FILE = "meeting.json"
MAX_RENDEZVOUS_BYTES = 1 << 10
KEEPALIVE_TIMEOUT_S = 20
KEEPALIVE_PROBES = 4
MAX_HANDSHAKE_BYTES = 256
HANDSHAKE_TIMEOUT_S = 10.0
MAX_PENDING_HANDSHAKES = 16
"""Maximum number of handshakes in progress."""
CONNECT_TIMEOUT_S = 5.0
ACCEPT_POLL_S = 0.1
RETRY_INTERVAL_S = 0.25
SECRET_BYTES = 32
_SIZE = struct.Struct(">I")


class RendezvousInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The address and secret of a learner's rank 0, valid while that process runs."""

    address: str
    port: int
    secret: bytes


class AuthChallenge(msgspec.Struct, frozen=True, tag=True):
    """The first message of the listener."""

    nonce: bytes


class AuthResponse(msgspec.Struct, frozen=True, tag=True):
    """The worker's reply to the challenge."""

    rank: int
    nonce: bytes
    proof: bytes


class AuthAccepted(msgspec.Struct, frozen=True, tag=True):
    """The listener's reply to a valid response."""

    proof: bytes


class PeerConnection:
    """A connection between ranks: whole messages in order. One thread at a time sends, one receives; any closes it."""

    def __init__(self, link: socket.socket) -> None:
        """Takes ownership of the connected TCP socket `link`."""
        self._link = link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause_s = max(1, KEEPALIVE_TIMEOUT_S // (KEEPALIVE_PROBES + 1))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIMEOUT_S * 1000)

    def send(self, message: msgspec.Struct) -> None:
        """Blocks for at most `KEEPALIVE_TIMEOUT_S`. Raises LinkDown if the connection has ended."""
        content = msgspec.msgpack.encode(message)
        try:
            self._link.sendall(_SIZE.pack(len(content)) + content)
        except OSError as error:
            raise LinkDown(f"the connection has ended: {error}") from error

    def receive(self, kind: type[MessageT], max_bytes: int, until: float | None = None) -> MessageT:
        """Blocks for the next message.

        Args:
            until: deadline on the monotonic clock; None waits while the connection is open.

        Raises:
            LinkDown: the connection has ended, or no complete message arrived in time.
            WireError: the message cannot be decoded, or exceeds `max_bytes`.
        """
        (size,) = _SIZE.unpack(self._exactly(_SIZE.size, until))
        if size > max_bytes:
            raise WireError(f"a message has {size} bytes, more than the limit of {max_bytes}")
        try:
            return msgspec.msgpack.decode(self._exactly(size, until), type=kind)
        except DECODE_ERRORS as error:
            raise WireError(f"a message cannot be decoded as {kind.__name__}: {error}") from error

    def _exactly(self, size: int, until: float | None) -> bytes:
        content = b""
        try:
            while len(content) < size:
                self._link.settimeout(None if until is None else max(0.001, until - time.monotonic()))
                if not (piece := self._link.recv(size - len(content))):
                    raise LinkDown("the connection has ended")
                content += piece
            self._link.settimeout(None)
        except OSError as error:
            raise LinkDown(f"the connection has ended: {error}") from error
        return content

    def close(self) -> None:
        """Closes the connection, also for a thread that waits in `receive`. A second call has no effect."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()


class RendezvousServer:
    """Accepts the workers of a learner until `close`. One thread calls it."""

    def __init__(self, checkpoints: Path, address: str, ranks: Collection[int]) -> None:
        """Listens on `address` only, and writes the rendezvous file.

        Args:
            ranks: the ranks to accept.

        Raises:
            RunError: this computer lacks the address, or the file cannot be written.
        """
        self._file, self._ranks = checkpoints / RENDEZVOUS_FILE, frozenset(ranks)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()
        self._connections: dict[int, PeerConnection] = {}
        self._open = True
        self._handshakes = threading.BoundedSemaphore(MAX_PENDING_HANDSHAKES)
        try:
            self._server = socket.create_server((address, 0))
        except OSError as error:
            raise RunError(f"the learner's processes cannot meet at {address}: {error.strerror or error}") from error
        self._server.settimeout(ACCEPT_POLL_S)
        info = RendezvousInfo(address=address, port=self._server.getsockname()[1], secret=self._secret)
        try:
            replace_durably(self._file, msgspec.json.encode(info), PRIVATE_FILE_MODE)
        except OSError as error:
            self._server.close()
            raise RunError(f"{self._file} cannot be written: {error.strerror or error}") from error

    def accept_all(self, within_s: float, stop: threading.Event) -> dict[int, PeerConnection]:
        """Blocks until all ranks have joined; of two with one rank, the later counts. The caller owns the connections.

        Returns:
            An empty dict if `stop` was set before.

        Raises:
            RunError: not all ranks joined in time.
        """
        until = time.monotonic() + within_s
        while not stop.is_set():
            with self._lock:
                missing = sorted(self._ranks - self._connections.keys())
                if not missing:
                    connections, self._connections = self._connections, {}
                    return connections
            if time.monotonic() > until:
                raise RunError(
                    f"of the {len(self._ranks) + 1} processes that train together, these ranks did not join within "
                    f"{within_s:.0f} s: {', '.join(map(str, missing))}; see their logs"
                )
            self._take_next()
        return {}

    def close(self) -> None:
        """Accepts no more workers. A second call has no effect."""
        self._server.close()
        with self._lock:
            self._open = False
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _take_next(self) -> None:
        try:
            link, (host, *_) = self._server.accept()
        except TimeoutError:
            return
        if not self._handshakes.acquire(blocking=False):
            link.close()
            return
        threading.Thread(target=self._handshake, args=(PeerConnection(link), host), name="server", daemon=True).start()

    def _handshake(self, connection: PeerConnection, host: str) -> None:
        """Accepts a worker that knows the secret, and closes other connections."""
        try:
            self._register(_authenticate(connection, self._secret, self._ranks), connection)
        except (LinkDown, WireError) as error:
            connection.close()
            log.warning("worker.refused host=%s: %s", host, error)
        finally:
            self._handshakes.release()

    def _register(self, rank: int, connection: PeerConnection) -> None:
        with self._lock:
            previous = self._connections.get(rank) if self._open else connection
            if self._open:
                self._connections[rank] = connection
        if previous is not None:
            previous.close()


def join_learner(checkpoints: Path, rank: int) -> PeerConnection:
    """Connects to the learner of `checkpoints` as `rank`. Blocks until a learner accepts this process.

    A learner that has ended leaves its file behind, so this retries.
    """
    last_error = ""
    while True:
        info = read_rendezvous(checkpoints)
        try:
            if info is not None:
                return connect_to_learner(info, rank)
        except (LinkDown, WireError, OSError, OverflowError) as error:  # OverflowError: the port is out of range
            if str(error) != last_error:
                last_error = str(error)
                log.info("worker.waits %s", last_error)
        time.sleep(RETRY_INTERVAL_S)


def read_rendezvous(checkpoints: Path) -> RendezvousInfo | None:
    """Returns the rendezvous file of the newest learner; None if there is none that can be read."""
    try:
        with (checkpoints / RENDEZVOUS_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_RENDEZVOUS_BYTES), type=RendezvousInfo)
    except (OSError, *DECODE_ERRORS):
        return None


def connect_to_learner(info: RendezvousInfo, rank: int) -> PeerConnection:
    """Connects and authenticates.

    Raises:
        OSError, OverflowError: nothing listens at the address.
        LinkDown: the connection was refused, or no reply arrived in time.
        WireError: the listener does not know the secret.
    """
    until = time.monotonic() + HANDSHAKE_TIMEOUT_S
    connection = PeerConnection(socket.create_connection((info.address, info.port), timeout=CONNECT_TIMEOUT_S))
    try:
        theirs = connection.receive(AuthChallenge, MAX_HANDSHAKE_BYTES, until).nonce
        ours = secrets.token_bytes(SECRET_BYTES)
        connection.send(AuthResponse(rank, ours, _proof(info.secret, "follower", rank, theirs, ours)))
        proof = connection.receive(AuthAccepted, MAX_HANDSHAKE_BYTES, until).proof
        if not hmac.compare_digest(proof, _proof(info.secret, "learner", rank, theirs, ours)):
            raise WireError(f"the process at {info.address}:{info.port} does not know the secret of this learner")
    except BaseException:
        connection.close()
        raise
    return connection


def _authenticate(connection: PeerConnection, secret: bytes, ranks: Collection[int]) -> int:
    """Authenticates a worker and returns its rank. Raises LinkDown, WireError."""
    until = time.monotonic() + HANDSHAKE_TIMEOUT_S
    ours = secrets.token_bytes(SECRET_BYTES)
    connection.send(AuthChallenge(ours))
    response = connection.receive(AuthResponse, MAX_HANDSHAKE_BYTES, until)
    if not hmac.compare_digest(response.proof, _proof(secret, "follower", response.rank, ours, response.nonce)):
        raise WireError("it does not know this learner's secret; it belongs to another run")
    if response.rank not in ranks:
        raise WireError(f"rank {response.rank} is not part of this learner")
    connection.send(AuthAccepted(_proof(secret, "learner", response.rank, ours, response.nonce)))
    return response.rank


def _proof(secret: bytes, role: str, rank: int, listener: bytes, comer: bytes) -> bytes:
    """Computes a proof over both nonces, so that it is valid on one connection only."""
    last_error = msgspec.msgpack.encode((role, rank, listener, comer))
    return hmac.digest(secret, last_error, hashlib.sha256)


JOIN_TIMEOUT_S = COLLECTIVE_TIMEOUT_S
"""From the learner's start until all workers have joined; their computers may start processes slowly."""
EXIT_TIMEOUT_S = 30.0
FAILURE_DETECTION_S = 5.0
"""A collective fails soon after a process ends, but may not on GPUs. This limits the wait."""
EXIT_STATUS = 2
MAX_SPEC_BYTES = 200 << 10
MAX_EXIT_BYTES = 8 << 10


class TrainingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a worker receives.

    Attributes:
        checkpoints: the learner's folder.
        device: ``cpu`` or ``cuda``.
        host, port: see `distributed.join_rendezvous`.
    """

    config: LearnerConfig
    spec: RobotSpec
    store: str
    checkpoints: str
    features: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class RankAddress:
    """The address of a rank.

    Attributes:
        address: IP address at which the other ranks reach it.
        gpu: index of its GPU among the visible ones.
    """

    address: str
    gpu: int = 0


class WorkerExit(msgspec.Struct, frozen=True):
    """The last message of a worker: it ends because of `error`, or on request if that is empty."""

    error: str = ""


class WorkerGroup:
    """The workers of a learner, as a context. Entering blocks until all have joined, and returns the group of rank 0.

    It returns None if `stop` was set before.
    """

    def __init__(self, training: TrainingSpec, address: RankAddress, stop: threading.Event) -> None:
        """`stop` ends the wait for workers."""
        self._spec, self._address, self._stop = training, address, stop
        self._ranks: TrainingGroup | None = None
        self._connections: dict[int, PeerConnection] = {}
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._ended_ranks: set[int] = set()
        self._changed = threading.Condition()
        self._reason_text = ""

    def __enter__(self) -> TrainingGroup | None:
        try:
            self._ranks = self._start()
        except BaseException as error:
            reason = self._cause(error)
            self._close(clean=False)
            if reason is error:
                raise
            raise reason from error
        return self._ranks

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._ranks is None:
            return
        clean = error is None and self._end_workers(self._ranks)
        reason = error
        if not clean:
            reason = self._cause(error or RunError("the learner's workers did not end on request; see their logs"))
        self._close(clean)
        if reason is not None and reason is not error:
            raise reason from error

    def _start(self) -> TrainingGroup | None:
        spec = self._spec
        processes = spec.config.processes
        log.info("learner.waits_for_workers count=%d address=%s", processes - 1, self._address.address)
        server = RendezvousServer(Path(spec.checkpoints), self._address.address, range(1, processes))
        try:
            self._connections = server.accept_all(JOIN_TIMEOUT_S, self._stop)
        finally:
            server.close()
        if not self._connections:
            return None
        store = create_rendezvous(self._address.address, processes)
        spec = msgspec.structs.replace(spec, host=self._address.address, port=store.port)
        for rank, connection in self._connections.items():
            threading.Thread(target=self._watch, args=(rank, connection), name=f"rank-{rank}", daemon=True).start()
            connection.send(spec)
        device = f"cuda:{self._address.gpu}" if spec.device == "cuda" else spec.device
        return TrainingGroup(0, processes, device, store, self._address.address, spec.config.publish.collective_ctas)

    def _watch(self, rank: int, connection: PeerConnection) -> None:
        """Waits for the end of a worker. Ends the learner if the worker ended unexpectedly and a collective hangs."""
        try:
            error = connection.receive(WorkerExit, MAX_EXIT_BYTES).error
            if not error:
                with self._changed:
                    self._ended_ranks.add(rank)
                    self._changed.notify_all()
                return
            how = f"failed: {error}"
        except (LinkDown, WireError) as gone:
            how = f"is gone ({gone}); see its log"
        if self._closing.is_set():
            return
        self._on_worker_ended(f"process {rank} of the {self._spec.config.processes} that train together {how}")
        if not self._closing.wait(FAILURE_DETECTION_S):
            os._exit(EXIT_STATUS)  # the learner waits in a collective for this worker

    def _on_worker_ended(self, why: str) -> None:
        with self._changed:
            if not self._ended.is_set():  # otherwise this failure follows from the first
                self._reason_text = why
                self._ended.set()
                log.error("learner.worker_ended %s", why)
            self._changed.notify_all()

    def _end_workers(self, ranks: TrainingGroup) -> bool:
        """Returns whether all workers have ended on request."""
        try:
            ranks.broadcast_command(RankCommand.END)
        except RuntimeError:
            log.exception("learner.workers_gone")
            return False
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended_ranks == self._connections.keys() or self._ended.is_set(), EXIT_TIMEOUT_S
            )
            return self._ended_ranks == self._connections.keys()

    def _cause(self, error: BaseException) -> BaseException:
        """Returns the cause of `error`: a worker's end, if a collective failed."""
        if (
            isinstance(error, RuntimeError | RunError | LinkDown)
            and self._connections
            and self._ended.wait(FAILURE_DETECTION_S / 2)
        ):
            return RunError(self._reason_text)
        return error

    def _close(self, clean: bool) -> None:
        self._closing.set()
        for connection in self._connections.values():
            connection.close()
        if self._ranks is not None and (clean or self._spec.device == "cpu"):
            self._ranks.destroy()  # with its workers; on GPUs this would wait for workers that are gone
