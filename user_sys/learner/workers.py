"""The line between a learner's first process and another of its processes, be that on another computer of the cluster.

The first listens, and leaves a note of where among its checkpoints, with a secret that is new each time. Who comes
shows that it has read the note, and the first that it wrote it; the secret itself never crosses the line. What follows
is plain text, as between the nodes of the cluster.

A line ends at once with the process at its other end, however that ends, and within `KEEPALIVE_TIMEOUT_S` of a computer
that vanishes or a cable that is pulled: the kernels of both computers look after that, however busy the processes are.

A learner's followers: processes that train with it, on its computer or others of the cluster.

The learner's own process is rank 0. The others are started by whoever starts that one, come in to it over a `line`, and
are told what to train. A follower that ends unasked ends the learner, with the reason; whoever looks after them
starts them all again, from the learner's checkpoint. A follower whose learner ends, by SIGKILL too, ends at once, and
within `line.SILENT_S` where the learner's computer vanishes.
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
"""So many may be asked for their proof at a time."""
CONNECT_TIMEOUT_S = 5.0
ACCEPT_POLL_S = 0.1
RETRY_INTERVAL_S = 0.25
SECRET_BYTES = 32
_SIZE = struct.Struct(">I")


class RendezvousInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a learner's first process is to be found, for as long as it is the same process."""

    address: str
    port: int
    secret: bytes


class AuthChallenge(msgspec.Struct, frozen=True, tag=True):
    """The first word of the one that listens."""

    nonce: bytes


class AuthResponse(msgspec.Struct, frozen=True, tag=True):
    """The answer of the one that comes, as the learner's process of number `rank`."""

    rank: int
    nonce: bytes
    proof: bytes


class AuthAccepted(msgspec.Struct, frozen=True, tag=True):
    """The one that listens has found the greeting right."""

    proof: bytes


class PeerConnection:
    """One end of a line: whole messages, in order. One thread at a time sends, one receives; any closes it."""

    def __init__(self, link: socket.socket) -> None:
        """`link` is a connected TCP socket, the line's from now on."""
        self._link = link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause_s = max(1, KEEPALIVE_TIMEOUT_S // (KEEPALIVE_PROBES + 1))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIMEOUT_S * 1000)

    def send(self, message: msgspec.Struct) -> None:
        """Blocks for `KEEPALIVE_TIMEOUT_S` at most. Raises LinkDown: the line has ended."""
        content = msgspec.msgpack.encode(message)
        try:
            self._link.sendall(_SIZE.pack(len(content)) + content)
        except OSError as error:
            raise LinkDown(f"the line has ended: {error}") from error

    def receive(self, kind: type[MessageT], most_bytes: int, until: float | None = None) -> MessageT:
        """Blocks for the next message.

        Args:
            until: on the monotonic clock; None waits for as long as there is somebody at the other end.

        Raises:
            LinkDown: the line has ended, or nothing whole came in time.
            WireError: what came is no such message, or longer than `most_bytes`.
        """
        (size,) = _SIZE.unpack(self._exactly(_SIZE.size, until))
        if size > most_bytes:
            raise WireError(f"a message of {size} bytes, of {most_bytes} at most")
        try:
            return msgspec.msgpack.decode(self._exactly(size, until), type=kind)
        except DECODE_ERRORS as error:
            raise WireError(f"no {kind.__name__}: {error}") from error

    def _exactly(self, size: int, until: float | None) -> bytes:
        content = b""
        try:
            while len(content) < size:
                self._link.settimeout(None if until is None else max(0.001, until - time.monotonic()))
                if not (piece := self._link.recv(size - len(content))):
                    raise LinkDown("the line has ended")
                content += piece
            self._link.settimeout(None)
        except OSError as error:
            raise LinkDown(f"the line has ended: {error}") from error
        return content

    def close(self) -> None:
        """Ends the line, for a thread that waits for its next message too. Calling it twice is harmless."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()


class RendezvousServer:
    """Where the others come in to a learner's first process, from making it to `close`. One thread calls it."""

    def __init__(self, checkpoints: Path, address: str, ranks: Collection[int]) -> None:
        """Listens on `address` alone, and leaves the note.

        Args:
            ranks: the numbers of those that are to come.

        Raises:
            RunError: this computer has no such address, or the note cannot be written.
        """
        self._note, self._ranks = checkpoints / RENDEZVOUS_FILE, frozenset(ranks)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()
        self._lines: dict[int, PeerConnection] = {}
        self._open = True
        self._strangers = threading.BoundedSemaphore(MAX_PENDING_HANDSHAKES)
        try:
            self._server = socket.create_server((address, 0))
        except OSError as error:
            raise RunError(f"the learner's processes cannot meet at {address}: {error.strerror or error}") from error
        self._server.settimeout(ACCEPT_POLL_S)
        note = RendezvousInfo(address=address, port=self._server.getsockname()[1], secret=self._secret)
        try:
            replace_durably(self._note, msgspec.json.encode(note), PRIVATE_FILE_MODE)
        except OSError as error:
            self._server.close()
            raise RunError(f"{self._note} cannot be written: {error.strerror or error}") from error

    def accept_all(self, within_s: float, stop: threading.Event) -> dict[int, PeerConnection]:
        """Blocks until all have come, one line for each number: of two with the same, the later. The lines are the
        caller's from then on.

        Returns:
            None of them where `stop` was set first.

        Raises:
            RunError: not all came in time.
        """
        until = time.monotonic() + within_s
        while not stop.is_set():
            with self._lock:
                missing = sorted(self._ranks - self._lines.keys())
                if not missing:
                    lines, self._lines = self._lines, {}
                    return lines
            if time.monotonic() > until:
                raise RunError(
                    f"of the {len(self._ranks) + 1} processes that train together these did not come within "
                    f"{within_s:.0f} s: {', '.join(map(str, missing))}; their own logs say why"
                )
            self._take_next()
        return {}

    def close(self) -> None:
        """Lets nobody in from now on. Calling it twice is harmless."""
        self._server.close()
        with self._lock:
            self._open = False
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()

    def _take_next(self) -> None:
        try:
            link, (host, *_) = self._server.accept()
        except TimeoutError:
            return
        if not self._strangers.acquire(blocking=False):
            link.close()
            return
        threading.Thread(target=self._ask, args=(PeerConnection(link), host), name="entrance", daemon=True).start()

    def _ask(self, line: PeerConnection, host: str) -> None:
        """Keeps who shows that it knows the secret; sends away who does not."""
        try:
            self._keep(_authenticate(line, self._secret, self._ranks), line)
        except (LinkDown, WireError) as error:
            line.close()
            log.warning("follower.refused host=%s: %s", host, error)
        finally:
            self._strangers.release()

    def _keep(self, rank: int, line: PeerConnection) -> None:
        with self._lock:
            former = self._lines.get(rank) if self._open else line
            if self._open:
                self._lines[rank] = line
        if former is not None:
            former.close()


def join_learner(checkpoints: Path, rank: int) -> PeerConnection:
    """The line to the learner whose note lies in `checkpoints`, as its process of number `rank`.

    Blocks for as long as there is no learner that lets this process in: one that has ended has left its note.
    """
    said = ""
    while True:
        note = read_rendezvous(checkpoints)
        try:
            if note is not None:
                return connect_to_learner(note, rank)
        except (LinkDown, WireError, OSError, OverflowError) as error:  # the last: no port
            if str(error) != said:
                said = str(error)
                log.info("follower.waits %s", said)
        time.sleep(RETRY_INTERVAL_S)


def read_rendezvous(checkpoints: Path) -> RendezvousInfo | None:
    """What the newest learner of `checkpoints` has left there; None where there is none that can be read."""
    try:
        with (checkpoints / RENDEZVOUS_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_RENDEZVOUS_BYTES), type=RendezvousInfo)
    except (OSError, *DECODE_ERRORS):
        return None


def connect_to_learner(note: RendezvousInfo, rank: int) -> PeerConnection:
    """Connects, and is let in.

    Raises:
        OSError, OverflowError: nobody listens there.
        LinkDown: it was refused, or nothing came in time.
        WireError: who listens is not the one that wrote the note.
    """
    until = time.monotonic() + HANDSHAKE_TIMEOUT_S
    line = PeerConnection(socket.create_connection((note.address, note.port), timeout=CONNECT_TIMEOUT_S))
    try:
        theirs = line.receive(AuthChallenge, MAX_HANDSHAKE_BYTES, until).nonce
        ours = secrets.token_bytes(SECRET_BYTES)
        line.send(AuthResponse(rank, ours, _proof(note.secret, "follower", rank, theirs, ours)))
        proof = line.receive(AuthAccepted, MAX_HANDSHAKE_BYTES, until).proof
        if not hmac.compare_digest(proof, _proof(note.secret, "learner", rank, theirs, ours)):
            raise WireError(f"who listens at {note.address}:{note.port} is not the learner")
    except BaseException:
        line.close()
        raise
    return line


def _authenticate(line: PeerConnection, secret: bytes, ranks: Collection[int]) -> int:
    """Which of `ranks` is at the other end, having told it so. Raises LinkDown, WireError: it is none of them."""
    until = time.monotonic() + HANDSHAKE_TIMEOUT_S
    ours = secrets.token_bytes(SECRET_BYTES)
    line.send(AuthChallenge(ours))
    greeting = line.receive(AuthResponse, MAX_HANDSHAKE_BYTES, until)
    if not hmac.compare_digest(greeting.proof, _proof(secret, "follower", greeting.rank, ours, greeting.nonce)):
        raise WireError("it does not know this learner's secret")
    if greeting.rank not in ranks:
        raise WireError(f"no process of number {greeting.rank} is awaited")
    line.send(AuthAccepted(_proof(secret, "learner", greeting.rank, ours, greeting.nonce)))
    return greeting.rank


def _proof(secret: bytes, role: str, rank: int, listener: bytes, comer: bytes) -> bytes:
    """Both nonces are part of it, each with its length: what one end has shown means nothing on another line."""
    said = msgspec.msgpack.encode((role, rank, listener, comer))
    return hmac.digest(secret, said, hashlib.sha256)


JOIN_TIMEOUT_S = COLLECTIVE_TIMEOUT_S
"""From the learner's start until all of its followers have come: their computers may be slow to start a process."""
EXIT_TIMEOUT_S = 30.0
FAILURE_DETECTION_S = 5.0
"""A collective fails soon after a process of it has ended; on GPUs it may not. Nobody waits for longer than this."""
EXIT_STATUS = 2
MAX_SPEC_BYTES = 200 << 10
MAX_EXIT_BYTES = 8 << 10


class TrainingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a follower is told: the learner's settings, what it learns for and from, and where all of them meet.

    Attributes:
        checkpoints: folder of the learner's.
        device: ``cpu`` or ``cuda``.
        host, port: see `ranks.find_meeting`.
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
    """Of a process among the learner's.

    Attributes:
        address: where the others find it; of its computer.
        gpu: which of the GPUs that it sees is its own, where it trains on one.
    """

    address: str
    gpu: int = 0


class WorkerExit(msgspec.Struct, frozen=True):
    """A follower's last word: it has ended the training because of `error`, or as it was told, and will now leave."""

    error: str = ""


class WorkerGroup:
    """A learner's followers, from entering to leaving. Entering blocks until all of them have come, and gives this
    process, as rank 0; None where it was told to stop before."""

    def __init__(self, assignment: TrainingSpec, place: RankAddress, stop: threading.Event) -> None:
        """`stop` ends the wait for the followers."""
        self._assignment, self._place, self._stop = assignment, place, stop
        self._ranks: TrainingGroup | None = None
        self._lines: dict[int, PeerConnection] = {}
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._left: set[int] = set()
        self._changed = threading.Condition()
        self._why = ""

    def __enter__(self) -> TrainingGroup | None:
        try:
            self._ranks = self._start()
        except BaseException as error:
            reason = self._reason(error)
            self._close(clean=False)
            if reason is error:
                raise
            raise reason from error
        return self._ranks

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._ranks is None:
            return
        clean = error is None and self._dismiss(self._ranks)
        reason = error
        if not clean:
            reason = self._reason(error or RunError("the learner's followers did not end as they were told"))
        self._close(clean)
        if reason is not None and reason is not error:
            raise reason from error

    def _start(self) -> TrainingGroup | None:
        told = self._assignment
        processes = told.config.processes
        log.info("learner.awaits_followers count=%d address=%s", processes - 1, self._place.address)
        entrance = RendezvousServer(Path(told.checkpoints), self._place.address, range(1, processes))
        try:
            self._lines = entrance.accept_all(JOIN_TIMEOUT_S, self._stop)
        finally:
            entrance.close()
        if not self._lines:
            return None
        meeting = create_rendezvous(self._place.address, processes)
        told = msgspec.structs.replace(told, host=self._place.address, port=meeting.port)
        for rank, line in self._lines.items():
            threading.Thread(target=self._watch, args=(rank, line), name=f"rank-{rank}", daemon=True).start()
            line.send(told)
        device = f"cuda:{self._place.gpu}" if told.device == "cuda" else told.device
        return TrainingGroup(0, processes, device, meeting, self._place.address, told.config.publish.collective_ctas)

    def _watch(self, rank: int, line: PeerConnection) -> None:
        """Waits for the end of a follower; ends the learner where that came unasked and is not noticed otherwise."""
        try:
            error = line.receive(WorkerExit, MAX_EXIT_BYTES).error
            if not error:
                with self._changed:
                    self._left.add(rank)
                    self._changed.notify_all()
                return
            how = f"failed: {error}"
        except (LinkDown, WireError) as gone:
            how = f"is gone ({gone}); its own log may say why"
        if self._closing.is_set():
            return
        self._gone_because(f"process {rank} of the {self._assignment.config.processes} that train together {how}")
        if not self._closing.wait(FAILURE_DETECTION_S):
            os._exit(EXIT_STATUS)  # the learner waits for one that is no more

    def _gone_because(self, why: str) -> None:
        with self._changed:
            if not self._ended.is_set():  # else this one failed because of the first that did
                self._why = why
                self._ended.set()
                log.error("learner.follower_ended %s", why)
            self._changed.notify_all()

    def _dismiss(self, ranks: TrainingGroup) -> bool:
        """Whether all followers have ended as they were told."""
        try:
            ranks.broadcast_command(RankCommand.END)
        except RuntimeError:
            log.exception("learner.followers_gone")
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._left == self._lines.keys() or self._ended.is_set(), EXIT_TIMEOUT_S)
            return self._left == self._lines.keys()

    def _reason(self, error: BaseException) -> BaseException:
        """Why training failed with `error`: where a collective did, because a follower has ended."""
        if (
            isinstance(error, RuntimeError | RunError | LinkDown)
            and self._lines
            and self._ended.wait(FAILURE_DETECTION_S / 2)
        ):
            return RunError(self._why)
        return error

    def _close(self, clean: bool) -> None:
        self._closing.set()
        for line in self._lines.values():
            line.close()
        if self._ranks is not None and (clean or self._assignment.device == "cpu"):
            self._ranks.destroy()  # as its followers do now; among GPUs this would wait for those that are gone
