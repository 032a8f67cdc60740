"""Backups of a store: incremental, verified, during writes; to a folder and to moto's S3 server."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import chunk, stored
from test_store_commands import Run, fill

from hal import durable
from user_sys.commands.main import main
from user_sys.errors import StoreError
from user_sys.store import backup
from user_sys.store.labels import SuccessLabel, queue_labels, queued_files
from user_sys.store.maintenance import add_labels
from user_sys.store.record_format import SegmentName, list_segments
from user_sys.store.store import StoreReader, StoreWriter

LOOP = Path(__file__).with_name("backup_kill_loop.py")
BUCKET = "lab"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else requests are in the output of commands
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path / "backup")
    endpoint = request.getfixturevalue("server")
    for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def order(capsys: pytest.CaptureFixture[str]) -> Run:
    def order(*argv: str | Path) -> tuple[int, str]:
        status = main(["store", *map(str, argv)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return order


def chunks_of(path: Path) -> list[tuple[str, int]]:
    with StoreReader.open(path) as reader:
        reader.refresh()
        assert not reader.damaged
        return stored(reader)


def test_backup_beside_a_writer_copies_only_what_is_new(
    order: Run,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backup, "PART_BYTES", 5000)
    path = fill(tmp_path / "store", sealed=True)
    queue_labels(path, [SuccessLabel(episode="e1", success=True, labeller="ada", at_unix_ns=1)])
    with StoreWriter.open(path, segment_bytes=1 << 14) as writer:
        first = json.loads(order("backup", path, url, "--json")[1])
        assert first["copied_bytes"] > 0.9 * first["size_bytes"]
        writer.append(chunk("late", 0, end=True).encode())
        writer.sync()
        second = json.loads(order("backup", path, url, "--json")[1])
        assert 0 < second["copied_bytes"] < 12_000
        assert order("restore", url, tmp_path / "new")[0] == 0
        assert order("restore", url, tmp_path / "old", "--snapshot", first["snapshot"])[0] == 0
        assert chunks_of(tmp_path / "new") == chunks_of(path) == [*chunks_of(tmp_path / "old"), ("late", 0)]
    assert len(queued_files(tmp_path / "new")) == 1
    assert order("restore", url, "--list")[1].count("UTC") == 2
    assert order("verify", tmp_path / "new")[0] == 0
    third = json.loads(order("backup", tmp_path / "new", url, "--json")[1])
    assert third["copied_bytes"] < 12_000


def test_old_snapshots_are_deleted_with_the_parts_that_only_they_have(
    order: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PART_BYTES", 5000)
    path = fill(tmp_path / "store")
    for number in range(4):
        with StoreWriter.open(path) as writer:
            writer.append(chunk(f"late{number}", 0, end=True).encode())
        assert order("backup", path, url)[0] == 0
    before = backup.BackupFolder(url).sizes("objects")
    listed = json.loads(order("backup", path, url, "--keep", "2", "--json")[1])
    folder = backup.BackupFolder(url)
    names = backup.list_snapshots(folder)
    assert len(names) == 2 and names[-1] == listed["snapshot"]
    used = {part for name in names for file in backup.read_snapshot(folder, name).files for part in file.parts}
    assert set(folder.sizes("objects")) == used < set(before)
    for name in names:
        assert order("restore", url, tmp_path / name, "--snapshot", name)[0] == 0
        assert chunks_of(tmp_path / name) == chunks_of(path)
    monkeypatch.setattr("time.time_ns", lambda: 1)  # the clock is set back
    early = json.loads(order("backup", path, url, "--keep", "1", "--json")[1])["snapshot"]
    assert backup.list_snapshots(folder) == [early] and early > names[-1]
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another backup of" in one_line(order("backup", path, url))
    os.close(lock)


def test_newest_backup_is_last_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, path = str(tmp_path / "backup"), fill(tmp_path / "store")
    backup.back_up(path, url)
    with StoreWriter.open(path) as writer:
        writer.append(chunk("late", 0, end=True).encode())
    with monkeypatch.context() as patch:
        patch.setattr("time.time_ns", lambda: 1)
        report = backup.back_up(path, url)
    assert backup.restore(url, tmp_path / "new").snapshot == report.snapshot
    assert ("late", 0) in chunks_of(tmp_path / "new")


def test_backup_skips_a_torn_snapshot(tmp_path: Path) -> None:
    url, path = tmp_path / "backup", fill(tmp_path / "store", sealed=True)
    first = backup.back_up(path, str(url)).snapshot
    torn = url / "snapshots" / backup.back_up(path, str(url)).snapshot
    torn.write_bytes(torn.read_bytes()[:50])
    report = backup.back_up(path, str(url), keep=2)
    assert report.copied_bytes == 0
    assert backup.list_snapshots(backup.BackupFolder(str(url))) == [first, report.snapshot]


def test_list_marks_unusable_snapshots_and_goes_on(order: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, path = tmp_path / "backup", fill(tmp_path / "store")
    first, torn = (backup.back_up(path, str(url)).snapshot for _ in range(2))
    (url / "snapshots" / torn).write_bytes(b"{")
    last = backup.back_up(path, str(url)).snapshot
    with monkeypatch.context() as patch:
        patch.setattr(backup, "BACKUP_FORMAT", 2)
        newer = backup.back_up(path, str(url)).snapshot
    status, text = order("restore", url, "--list")
    lines = text.splitlines()
    assert status == 1 and [line.split()[0] for line in lines] == [first, torn, last, newer]
    assert "UTC" in lines[0] and "unusable: " in lines[1] and "is damaged" in lines[1] and "UTC" in lines[2]
    assert "unusable: " in lines[3] and "has backup format 2" in lines[3]
    listed = [json.loads(line) for line in order("restore", url, "--list", "--json")[1].splitlines()]
    assert ["error" in each for each in listed] == [False, True, False, True]


def test_backup_of_another_history_copies_segments_of_equal_name_and_size(tmp_path: Path) -> None:
    url = str(tmp_path / "backup")

    def add(path: Path, episode: str) -> str:
        with StoreWriter.open(path) as writer:
            writer.append(chunk(episode, 0, end=True).encode())
            writer.rotate()
        return backup.back_up(path, url).snapshot

    before = add(tmp_path / "a", "episode-0")
    add(tmp_path / "a", "episode-1")
    backup.restore(url, tmp_path / "b", before)
    add(tmp_path / "b", "episode-2")
    backup.restore(url, tmp_path / "c")
    assert chunks_of(tmp_path / "c") == [("episode-0", 0), ("episode-2", 0)]


def test_backup_makes_objects_of_a_killed_backup_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, path = tmp_path / "backup", fill(tmp_path / "store")
    backup.back_up(path, str(url))
    (snapshot,) = (url / "snapshots").iterdir()
    snapshot.unlink()  # killed before it
    events: list[Path] = []
    real = durable.sync_folder

    def sync_folder(folder: Path) -> None:
        events.append(folder)
        real(folder)

    monkeypatch.setattr(durable, "sync_folder", sync_folder)
    monkeypatch.setattr(backup, "sync_folder", sync_folder)
    assert backup.back_up(path, str(url)).copied_bytes == 0
    written = events.index(url / "snapshots")
    assert {url, url / "objects", *(url / "objects").iterdir()} <= set(events[:written])


def test_label_stored_during_the_backup_does_not_override_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = tmp_path / "store", str(tmp_path / "backup")
    with StoreWriter.open(store) as writer:
        writer.append(chunk("ep", 0, end=True).encode())
    queue_labels(store, [SuccessLabel(episode="ep", labeller="first", at_unix_ns=1, success=True)])
    newer = [SuccessLabel(episode="ep", labeller="second", at_unix_ns=2, success=False)]

    def list_after_a_gateway(path: Path) -> list[SegmentName]:
        add_labels(path, [newer.pop()] if newer else [])  # stores the queued label, then the newer one
        return list_segments(path)

    monkeypatch.setattr(backup, "list_segments", list_after_a_gateway)
    backup.back_up(store, url)
    backup.restore(url, tmp_path / "restored")
    add_labels(tmp_path / "restored", [])
    with StoreReader.open(tmp_path / "restored") as reader:
        reader.refresh()
        assert [label.labeller for label in reader.index.labels("ep")] == ["first", "second"]


def test_second_restore_to_one_folder_is_refused(tmp_path: Path) -> None:
    url, path = str(tmp_path / "backup"), fill(tmp_path / "store", sealed=True)
    backup.back_up(path, url)
    (tmp_path / "new.restoring").mkdir()  # of a killed restore
    (tmp_path / "new.restoring" / "left").touch()
    refused: list[StoreError] = []

    def restore_again(_: int) -> None:
        try:
            backup.restore(url, tmp_path / "new")
        except StoreError as error:
            refused.append(error)

    backup.restore(url, tmp_path / "new", advance=restore_again)
    assert refused and all("another restore to" in str(error) for error in refused)
    assert chunks_of(tmp_path / "new") == chunks_of(path) and not (tmp_path / "new" / "left").exists()
    assert not (tmp_path / "new.restoring").exists()


def one_line(result: tuple[int, str]) -> str:
    status, text = result
    assert status == 2 and text.startswith("user-sys: error: ") and text.count("\n") == 1, text
    return text


def test_damaged_and_missing_objects_are_named(order: Run, tmp_path: Path) -> None:
    url, path = tmp_path / "backup", fill(tmp_path / "store")
    assert order("backup", path, url)[0] == 0
    victim = max((url / "objects").glob("*/*"), key=lambda file: file.stat().st_size)
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1] + b"!")
    assert f"{victim.name}, a part of 0000000000.seg, is damaged" in one_line(order("restore", url, tmp_path / "a"))
    victim.unlink()
    assert f"{victim.name} is missing" in one_line(order("restore", url, tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    assert order("backup", path, url)[0] == 0  # copies it again
    assert order("restore", url, tmp_path / "a")[0] == 0
    assert "exists; restore into a new folder" in one_line(order("restore", url, tmp_path / "a"))
    (snapshot,) = list((url / "snapshots").glob("*"))[:1]
    snapshot.write_bytes(snapshot.read_bytes().replace(b'"format":1', b'"format":9'))
    assert "is damaged" in one_line(order("restore", url, tmp_path / "b", "--snapshot", snapshot.name))


def test_wrong_targets_are_refused(order: Run, tmp_path: Path) -> None:
    url, path = tmp_path / "backup", fill(tmp_path / "store")
    assert "has no backup" in one_line(order("restore", url, tmp_path / "a"))
    assert order("backup", path, url)[0] == 0
    assert "backups of another store" in one_line(order("backup", fill(tmp_path / "other"), url))
    assert "no snapshot 'x'" in one_line(order("restore", url, tmp_path / "a", "--snapshot", "x"))
    assert "Protocol not known: nope" in one_line(order("backup", path, "nope://user:secret@host/a"))
    assert "is not a store" in one_line(order("backup", tmp_path / "missing", url))


def test_newer_backup_format_is_refused(order: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, path = tmp_path / "backup", fill(tmp_path / "store")
    monkeypatch.setattr(backup, "BACKUP_FORMAT", 2)
    assert order("backup", path, url)[0] == 0
    monkeypatch.undo()
    text = one_line(order("restore", url, tmp_path / "a"))
    assert "has backup format 2" in text and "reads format 1" in text


def test_full_disk_is_one_line(order: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "store")
    assert order("backup", path, tmp_path / "whole")[0] == 0
    for argv in (["backup", path, tmp_path / "b"], ["restore", tmp_path / "whole", tmp_path / "c"]):
        command = [sys.executable, "-m", "user_sys.commands.main", "store", *map(str, argv)]
        limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=300)
        assert "disk is full" in one_line((done.returncode, done.stderr))
    assert order("backup", path, tmp_path / "b")[0] == 0 and not (tmp_path / "c").exists()


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_bucket_that_refuses_is_one_line(order: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fill(tmp_path / "store")
    assert "s3://no-such-bucket/x" in one_line(order("backup", path, "s3://no-such-bucket/x"))
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)  # moto then knows no key
    assert "check the credentials" in one_line(order("backup", path, url))


def kills(tmp_path: Path, url: str, count: int, seed: int) -> str:
    command = [sys.executable, str(LOOP), str(tmp_path), url, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_kills_of_writer_and_backup_lose_nothing(tmp_path: Path) -> None:
    assert "kills of the writer" in kills(tmp_path, str(tmp_path / "backup"), 2, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_fifty_kills_of_writer_and_backup_lose_nothing(url: str, tmp_path: Path, seed: int) -> None:
    assert "kills of the writer" in kills(tmp_path, url, 50, seed)
