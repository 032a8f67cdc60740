"""The SQLite file of leases, overrides and audit log: what survives, and what a damaged or unwritable file does."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hal.errors import StateError
from hal.lease import LeaseTable
from hal.registry import OperatorOverrides, Registry, read_registry
from hal.resource import Kind, ResourceRecord
from hal.state_database import STATE_FILE, AuditEntry, AuditLog, StateDatabase, read_audit_log

_ACQUIRE = """
import itertools, sys, time; from pathlib import Path; from hal.lease import LeaseTable
from hal.state_database import StateDatabase
table = LeaseTable(StateDatabase(Path(sys.argv[1])))
for _ in itertools.count():
    print(table.acquire("panda-0", "alice").token, flush=True)
    time.sleep(0.005)  # SQLite's writers do not take turns
"""

_READ_AS_NOBODY = """
import os, sys; from pathlib import Path; from hal.errors import StateError; from hal.registry import OperatorOverrides
from hal.state_database import StateDatabase
os.setgroups([]), os.setgid(65534), os.setuid(65534)
overrides = OperatorOverrides(StateDatabase(Path(sys.argv[1])))
print([*overrides.read()])
try:
    overrides.set_override("panda-1", "draining", "ben")
except StateError as error:
    print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / STATE_FILE


def test_tokens_grow_over_kills(path: Path) -> None:
    newest = 0
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", _ACQUIRE, str(path)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            tokens = [int(child.stdout.readline()) for _ in range(20)]
            child.send_signal(signal.SIGKILL)
            tokens += [int(line) for line in child.stdout if line.endswith("\n")]
        assert tokens[0] > newest and tokens == sorted(set(tokens))
        newest = tokens[-1]
    assert LeaseTable(StateDatabase(path)).acquire("panda-0", "alice").token > newest


def test_changes_are_synced_in_a_write_ahead_log(path: Path) -> None:
    """The setting with which SQLite promises that a change survives a power cut."""
    database = StateDatabase(path)
    with database.change() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_token_never_shrinks_and_is_never_removed(path: Path) -> None:
    database = StateDatabase(path)
    LeaseTable(database).acquire("panda-0", "alice", min_token=41)
    for statement in ("UPDATE lease SET token = 7", "DELETE FROM lease"):
        with pytest.raises(StateError, match="a token must not"), database.change() as connection:
            connection.execute(statement)
    assert LeaseTable(StateDatabase(path)).acquire("panda-0", "alice").token == 43


@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o755, 0o600), (0o2770, 0o660), (0o1777, 0o666)])
def test_those_who_may_write_the_folder_share_the_file(folder: int, file: int, path: Path) -> None:
    path.parent.chmod(folder)
    before = os.umask(0o077)
    try:
        StateDatabase(path).rows("SELECT 1")
        log = AuditLog(path)
        log.write(AuditEntry(event="sign-in", person="ana"))
        assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {file}
        log.close()
    finally:
        os.umask(before)


READERS = (
    lambda path: LeaseTable(StateDatabase(path)),
    lambda path: OperatorOverrides(StateDatabase(path)).read(),
    lambda path: read_registry(StateDatabase(path)),
    read_audit_log,
)


@pytest.mark.parametrize(
    "content", [b"{" * 200, b"SQLite format 3\0" + bytes(84), b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_damaged_file_is_refused_and_not_replaced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in READERS:
        with pytest.raises(StateError, match=STATE_FILE):
            read(path)
    assert path.read_bytes() == content


def test_file_of_another_version_is_refused(path: Path) -> None:
    LeaseTable(StateDatabase(path)).acquire("panda-0", "alice")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StateError, match="has version 7; this program reads version 1"):
        LeaseTable(StateDatabase(path))


def test_missing_file_is_empty_and_is_not_created(path: Path) -> None:
    assert read_audit_log(path) == [] and read_registry(StateDatabase(path)) == ()
    assert not path.exists()


def test_processes_write_at_the_same_time(path: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", _ACQUIRE, str(path)], stdout=subprocess.PIPE) for _ in range(2)]
    log, overrides = AuditLog(path), OperatorOverrides(StateDatabase(path))
    for number in range(100):
        log.write(AuditEntry(event="order", person="ana", order=str(number)))
        overrides.set_override(f"arm-{number % 7}", "draining", "ana")
    for child in children:
        child.kill()
        child.communicate()
    assert [entry.order for entry in read_audit_log(path)] == [str(number) for number in range(100)]
    assert len(overrides.read()) == 7


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_full_disk_gives_no_lease_and_keeps_those_in_force(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = StateDatabase(small_disk / STATE_FILE)
    registry = Registry(LeaseTable(database), database)
    for name in ("panda-0", "ur-0"):
        registry.announce(ResourceRecord(kind=Kind.ROBOT, name=name, model="m", node="desk"))
    lease = registry.acquire("panda-0", "alice")
    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(4096))
    with pytest.raises(StateError, match=r"state.db cannot be written: .*(full|disk I/O)"):
        for _ in range(50):  # the journal may have room for some
            registry.acquire("ur-0", "bob")
    assert registry.renew("panda-0", lease.token) == lease
    (small_disk / "filler").unlink()
    newest = registry.acquire("ur-0", "bob").token
    assert LeaseTable(StateDatabase(small_disk / STATE_FILE)).acquire("ur-0", "bob").token == newest + 1


def test_read_only_file_is_read_and_not_written(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes read-only files")
    LeaseTable(StateDatabase(path)).acquire("panda-0", "alice")
    path.chmod(0o400)
    with pytest.raises(StateError, match="cannot be written"):
        LeaseTable(StateDatabase(path)).acquire("panda-0", "alice")


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_closed_file_in_folder_of_another_user_is_read_and_not_written() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "of ana #1" / STATE_FILE
        with StateDatabase(path) as database:
            OperatorOverrides(database).set_override("panda-0", "draining", "ana")
        for opened, mode in ((folder, 0o755), (path.parent, 0o755), (path, 0o644)):
            os.chmod(opened, mode)
        child = [sys.executable, "-c", _READ_AS_NOBODY, str(path)]
        done = subprocess.run(child, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"['panda-0']\n{path} cannot be written: attempt to write a readonly database\n"
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_file_that_root_creates_belongs_to_the_owner_of_its_folder(path: Path) -> None:
    """The command may run with sudo, and the run's gateway as another user."""
    os.chown(path.parent, 1000, 1001)
    with StateDatabase(path) as database:
        OperatorOverrides(database).set_override("panda-0", "draining", "ana")
        assert {(file.stat().st_uid, file.stat().st_gid) for file in path.parent.iterdir()} == {(1000, 1001)}
    os.chown(path, 1002, 1001)
    with StateDatabase(path) as database:
        OperatorOverrides(database).set_override("panda-0", "draining", "ana")
    assert path.stat().st_uid == 1002, "a file that was there keeps its owner"
