"""The line between a learner's first process and another of its processes, be that on another computer of the cluster.

The first listens, and leaves a note of where among its checkpoints, with a secret that is new each time. Who comes
shows that it has read the note, and the first that it wrote it; the secret itself never crosses the line. What follows
is plain text, as between the nodes of the cluster.

A line ends at once with the process at its other end, however that ends, and within `SILENT_S` of a computer that
vanishes or a cable that is pulled: the kernels of both computers look after that, however busy the processes are.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from hal.durable import PRIVATE, replace_durably
from hal.undecodable import UNDECODABLE
from user_sys.errors import LinkDown, RunError, WireError

log = logging.getLogger(__name__)

T = TypeVar("T")
NOTE = "meeting.json"
MAX_NOTE_BYTES = 1 << 10
SILENT_S = 20
PROBES = 4
MAX_GREETING_BYTES = 256
GREETING_S = 10.0
MOST_STRANGERS = 16
"""So many may be asked for their proof at a time."""
CONNECT_S = 5.0
LOOK_EVERY_S = 0.1
TRY_EVERY_S = 0.25
SECRET_BYTES = 32
_SIZE = struct.Struct(">I")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Where a learner's first process is to be found, for as long as it is the same process."""

    address: str
    port: int
    secret: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The first word of the one that listens."""

    nonce: bytes


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """The answer of the one that comes, as the learner's process of number `rank`."""

    rank: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The one that listens has found the greeting right."""

    proof: bytes


class Line:
    """One end of a line: whole messages, in order. One thread at a time sends, one receives; any closes it."""

    def __init__(self, link: socket.socket) -> None:
        """`link` is a connected TCP socket, the line's from now on."""
        self._link = link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause_s = max(1, SILENT_S // (PROBES + 1))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)

    def send(self, message: msgspec.Struct) -> None:
        """Blocks for `SILENT_S` at most. Raises LinkDown: the line has ended."""
        content = msgspec.msgpack.encode(message)
        try:
            self._link.sendall(_SIZE.pack(len(content)) + content)
        except OSError as error:
            raise LinkDown(f"the line has ended: {error}") from error

    def receive(self, kind: type[T], most_bytes: int, until: float | None = None) -> T:
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
        except UNDECODABLE as error:
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


class Entrance:
    """Where the others come in to a learner's first process, from making it to `close`. One thread calls it."""

    def __init__(self, checkpoints: Path, address: str, ranks: Collection[int]) -> None:
        """Listens on `address` alone, and leaves the note.

        Args:
            ranks: the numbers of those that are to come.

        Raises:
            RunError: this computer has no such address, or the note cannot be written.
        """
        self._note, self._ranks = checkpoints / NOTE, frozenset(ranks)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()
        self._lines: dict[int, Line] = {}
        self._open = True
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        try:
            self._server = socket.create_server((address, 0))
        except OSError as error:
            raise RunError(f"the learner's processes cannot meet at {address}: {error.strerror or error}") from error
        self._server.settimeout(LOOK_EVERY_S)
        note = Note(address=address, port=self._server.getsockname()[1], secret=self._secret)
        try:
            replace_durably(self._note, msgspec.json.encode(note), PRIVATE)
        except OSError as error:
            self._server.close()
            raise RunError(f"{self._note} cannot be written: {error.strerror or error}") from error

    def await_all(self, within_s: float, stop: threading.Event) -> dict[int, Line]:
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
        threading.Thread(target=self._ask, args=(Line(link), host), name="entrance", daemon=True).start()

    def _ask(self, line: Line, host: str) -> None:
        """Keeps who shows that it knows the secret; sends away who does not."""
        try:
            self._keep(_welcome(line, self._secret, self._ranks), line)
        except (LinkDown, WireError) as error:
            line.close()
            log.warning("follower.refused host=%s: %s", host, error)
        finally:
            self._strangers.release()

    def _keep(self, rank: int, line: Line) -> None:
        with self._lock:
            former = self._lines.get(rank) if self._open else line
            if self._open:
                self._lines[rank] = line
        if former is not None:
            former.close()


def come_in(checkpoints: Path, rank: int) -> Line:
    """The line to the learner whose note lies in `checkpoints`, as its process of number `rank`.

    Blocks for as long as there is no learner that lets this process in: one that has ended has left its note.
    """
    said = ""
    while True:
        note = read_note(checkpoints)
        try:
            if note is not None:
                return greet(note, rank)
        except (LinkDown, WireError, OSError, OverflowError) as error:  # the last: no port
            if str(error) != said:
                said = str(error)
                log.info("follower.waits %s", said)
        time.sleep(TRY_EVERY_S)


def read_note(checkpoints: Path) -> Note | None:
    """What the newest learner of `checkpoints` has left there; None where there is none that can be read."""
    try:
        with (checkpoints / NOTE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_NOTE_BYTES), type=Note)
    except (OSError, *UNDECODABLE):
        return None


def greet(note: Note, rank: int) -> Line:
    """Connects, and is let in.

    Raises:
        OSError, OverflowError: nobody listens there.
        LinkDown: it was refused, or nothing came in time.
        WireError: who listens is not the one that wrote the note.
    """
    until = time.monotonic() + GREETING_S
    line = Line(socket.create_connection((note.address, note.port), timeout=CONNECT_S))
    try:
        theirs = line.receive(Challenge, MAX_GREETING_BYTES, until).nonce
        ours = secrets.token_bytes(SECRET_BYTES)
        line.send(Greeting(rank, ours, _proof(note.secret, "follower", rank, theirs, ours)))
        proof = line.receive(Welcome, MAX_GREETING_BYTES, until).proof
        if not hmac.compare_digest(proof, _proof(note.secret, "learner", rank, theirs, ours)):
            raise WireError(f"who listens at {note.address}:{note.port} is not the learner")
    except BaseException:
        line.close()
        raise
    return line


def _welcome(line: Line, secret: bytes, ranks: Collection[int]) -> int:
    """Which of `ranks` is at the other end, having told it so. Raises LinkDown, WireError: it is none of them."""
    until = time.monotonic() + GREETING_S
    ours = secrets.token_bytes(SECRET_BYTES)
    line.send(Challenge(ours))
    greeting = line.receive(Greeting, MAX_GREETING_BYTES, until)
    if not hmac.compare_digest(greeting.proof, _proof(secret, "follower", greeting.rank, ours, greeting.nonce)):
        raise WireError("it does not know this learner's secret")
    if greeting.rank not in ranks:
        raise WireError(f"no process of number {greeting.rank} is awaited")
    line.send(Welcome(_proof(secret, "learner", greeting.rank, ours, greeting.nonce)))
    return greeting.rank


def _proof(secret: bytes, role: str, rank: int, listener: bytes, comer: bytes) -> bytes:
    """Both nonces are part of it, each with its length: what one end has shown means nothing on another line."""
    said = msgspec.msgpack.encode((role, rank, listener, comer))
    return hmac.digest(secret, said, hashlib.sha256)
