"""How a learner's other processes come in to its first one, who does not, and how their line ends."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from user_sys.errors import LinkDown, RunError, WireError
from user_sys.learner.workers import (
    MAX_HANDSHAKE_BYTES,
    MAX_PENDING_HANDSHAKES,
    RENDEZVOUS_FILE,
    AuthAccepted,
    AuthChallenge,
    AuthResponse,
    PeerConnection,
    RendezvousInfo,
    RendezvousServer,
    connect_to_learner,
    join_learner,
    read_rendezvous,
)

HERE = "127.0.0.1"
WITHIN_S = 60.0


class TextMessage(msgspec.Struct):
    """Anything."""

    text: str


@pytest.fixture
def entrance(tmp_path: Path) -> Iterator[RendezvousServer]:
    with closing(RendezvousServer(tmp_path, HERE, [1, 2])) as found:
        yield found


class WorkerThreads:
    """Those that come in, each in a thread of its own; and the learner's ends of their lines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lines: dict[int, PeerConnection] = {}
        self.ours: dict[int, PeerConnection] = {}
        self._threads: list[threading.Thread] = []

    def come(self, *ranks: int) -> None:
        for rank in ranks:
            self._threads.append(threading.Thread(target=self._come, args=(rank,), daemon=True))
            self._threads[-1].start()

    def _come(self, rank: int) -> None:
        self.lines[rank] = join_learner(self._folder, rank)

    def are_let_in(self, entrance: RendezvousServer) -> None:
        """Waits until all that the entrance is for are there; each of them is to be started before or meanwhile."""
        self.ours = entrance.accept_all(WITHIN_S, threading.Event())
        for thread in self._threads:
            thread.join(WITHIN_S)
        assert self.ours.keys() == self.lines.keys()

    def close(self) -> None:
        for line in (*self.lines.values(), *self.ours.values()):
            line.close()


@pytest.fixture
def followers(tmp_path: Path) -> Iterator[WorkerThreads]:
    with closing(WorkerThreads(tmp_path)) as found:
        yield found


def raw(note: RendezvousInfo) -> socket.socket:
    return socket.create_connection((note.address, note.port), timeout=WITHIN_S)


def the_note(folder: Path) -> RendezvousInfo:
    note = read_rendezvous(folder)
    assert note is not None
    return note


def test_those_that_have_read_the_note_come_in_and_each_has_a_line_of_its_own(
    entrance: RendezvousServer, tmp_path: Path, followers: WorkerThreads
) -> None:
    assert stat.S_IMODE((tmp_path / RENDEZVOUS_FILE).stat().st_mode) == 0o600
    followers.come(1, 2)
    followers.are_let_in(entrance)
    ours, theirs = followers.ours, followers.lines
    for rank in (1, 2):
        ours[rank].send(TextMessage(f"to {rank}"))
        assert theirs[rank].receive(TextMessage, 100).text == f"to {rank}"
        theirs[rank].send(TextMessage(f"from {rank}"))
        assert ours[rank].receive(TextMessage, 100).text == f"from {rank}"
    ours[1].send(TextMessage("x" * 96))
    with pytest.raises(WireError, match="a message has 104 bytes, more than the limit of 100"):
        theirs[1].receive(TextMessage, 100)
    theirs[2].close()
    with pytest.raises(LinkDown):
        ours[2].receive(TextMessage, 100)


def test_who_does_not_know_the_secret_is_sent_away_and_others_come_in(
    entrance: RendezvousServer, tmp_path: Path, followers: WorkerThreads, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = msgspec.structs.replace(the_note(tmp_path), secret=bytes(32))

    def knock() -> None:
        with pytest.raises(LinkDown):
            connect_to_learner(wrong, 2)
        followers.come(2)

    followers.come(1)
    threading.Thread(target=knock, daemon=True).start()
    followers.are_let_in(entrance)
    assert "it does not know this learner's secret" in caplog.text


def test_a_follower_of_an_earlier_start_is_refused_until_it_has_read_the_new_note(
    tmp_path: Path, followers: WorkerThreads
) -> None:
    with closing(RendezvousServer(tmp_path, HERE, [1])):
        earlier = the_note(tmp_path)
    with closing(RendezvousServer(tmp_path, HERE, [1])) as entrance:
        note = the_note(tmp_path)
        assert note.secret != earlier.secret

        def knock() -> None:
            with pytest.raises(LinkDown):
                connect_to_learner(msgspec.structs.replace(earlier, port=note.port), 1)
            followers.come(1)

        threading.Thread(target=knock, daemon=True).start()
        followers.are_let_in(entrance)


def framed(message: object) -> bytes:
    content = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(content)) + content


HOSTILE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 16,
    "half a size": b"\0\0",
    "endless": b"\xff\xff\xff\xff" + b"x" * 4096,
    "longer than a greeting": struct.pack(">I", MAX_HANDSHAKE_BYTES + 1) + bytes(MAX_HANDSHAKE_BYTES + 1),
    "deep": framed(b"")[:4] + b"\x91" * 200,
    "nested without end": struct.pack(">I", MAX_HANDSHAKE_BYTES) + b"\x91" * MAX_HANDSHAKE_BYTES,
    "another message": framed(AuthAccepted(b"proof")),
    "no proof": framed(AuthResponse(1, b"", b"")),
    "a rank that is none": framed(AuthResponse(2**63 - 1, bytes(32), bytes(32))),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bytes_let_nobody_in_and_keep_nobody_out(
    what: str, entrance: RendezvousServer, tmp_path: Path, followers: WorkerThreads
) -> None:
    stranger = raw(the_note(tmp_path))

    def molest() -> None:
        with stranger, suppress(OSError):  # it may be sent away with its bytes unread
            stranger.sendall(HOSTILE[what])
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
        followers.come(2)  # only when the stranger was sent away

    followers.come(1)
    threading.Thread(target=molest, daemon=True).start()
    followers.are_let_in(entrance)


def test_strangers_that_say_nothing_are_few_at_a_time(
    entrance: RendezvousServer, tmp_path: Path, followers: WorkerThreads
) -> None:
    note = the_note(tmp_path)

    def crowd() -> None:
        silent = [PeerConnection(raw(note)) for _ in range(MAX_PENDING_HANDSHAKES)]
        heard = {line.receive(AuthChallenge, MAX_HANDSHAKE_BYTES).nonce for line in silent}
        with raw(note) as one_more:
            assert len(heard) == MAX_PENDING_HANDSHAKES and one_more.recv(1) == b""
        for line in silent:
            line.close()
        followers.come(1, 2)

    threading.Thread(target=crowd, daemon=True).start()
    followers.are_let_in(entrance)


def test_who_only_says_that_it_is_the_learner_is_told_nothing(tmp_path: Path) -> None:
    with socket.create_server((HERE, 0)) as server:
        note = RendezvousInfo(address=HERE, port=server.getsockname()[1], secret=os.urandom(32))

        def pretend() -> None:
            with closing(PeerConnection(server.accept()[0])) as line:
                line.send(AuthChallenge(bytes(32)))
                line.receive(AuthResponse, MAX_HANDSHAKE_BYTES)
                line.send(AuthAccepted(bytes(32)))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(WireError, match="does not know the secret of this learner"):
            connect_to_learner(note, 1)


def test_of_two_with_one_number_the_later_is_taken(
    entrance: RendezvousServer, tmp_path: Path, followers: WorkerThreads
) -> None:
    def come_twice() -> None:
        with closing(join_learner(tmp_path, 1)) as former:
            followers.lines[1] = join_learner(tmp_path, 1)
            with pytest.raises(LinkDown):
                former.receive(TextMessage, 100)
        followers.come(2)

    threading.Thread(target=come_twice, daemon=True).start()
    followers.are_let_in(entrance)
    followers.ours[1].send(TextMessage("to the later"))
    assert followers.lines[1].receive(TextMessage, 100).text == "to the later"


def test_an_address_of_another_computer_and_a_folder_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the learner's processes cannot meet at 192\.0\.2\.77: Cannot assign"):
        RendezvousServer(tmp_path, "192.0.2.77", [1])
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"meeting\.json cannot be written: "):
        RendezvousServer(tmp_path / "file", HERE, [1])


CABLE = """
import fcntl, socket, struct, sys, threading
from pathlib import Path
from user_sys.errors import LinkDown
from user_sys.learner import workers

def loopback(up):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", int(up)))  # SIOCSIFFLAGS, IFF_UP

workers.KEEPALIVE_TIMEOUT_S = 2
loopback(True)
server = workers.RendezvousServer(Path(sys.argv[1]), "127.0.0.1", [1])
theirs = []
comer = threading.Thread(target=lambda: theirs.append(workers.join_learner(Path(sys.argv[1]), 1)))
comer.start()
ours = server.accept_all(60, threading.Event())[1]
comer.join()
loopback(False)
for end in (ours, *theirs):
    try:
        end.receive(workers.AuthAccepted, 100)
    except LinkDown as gone:
        print(gone)
"""


def test_pulled_cable_ends_the_connection_at_both_ends(tmp_path: Path) -> None:
    apart = ["unshare", "-rn"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to have a network of its own")
    argv = [*apart, sys.executable, "-c", CABLE, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["the connection has ended: [Errno 110] Connection timed out"] * 2, done.stderr
