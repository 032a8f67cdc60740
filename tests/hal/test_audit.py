"""The audit log: its lines, its bounds under a flood, and its readers."""

from __future__ import annotations

import json
import multiprocessing
import stat
import time
from pathlib import Path

import pytest

from hal.audit import (
    MAX_OLD_FILES,
    REFUSED_RATE_LIMIT,
    REPEAT_WINDOW_S,
    AuditEntry,
    AuditLog,
    audit_operator_action,
    machine_audit_path,
    read_audit_log,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_line_has_time_person_address_robot_order_and_outcome(path: Path) -> None:
    AuditLog(path).write(
        AuditEntry(event="order", person="ana", address="10.0.0.7", robot="panda-0", order="e-stop", outcome="done")
    )
    AuditLog(path).write(AuditEntry(event="opened", key="ab-cd", peer="panda-0", role="robot", address="10.0.0.8"))
    order, opened = lines(path)
    when = time.mktime(time.strptime(str(order.pop("time"))[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone
    assert abs(when - time.time()) < 60
    assert order == {
        "event": "order",
        "person": "ana",
        "address": "10.0.0.7",
        "robot": "panda-0",
        "order": "e-stop",
        "outcome": "done",
    }
    assert (opened["peer"], opened["role"], opened["key"]) == ("panda-0", "robot", "ab-cd")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_equal_events_become_one_line_with_count(path: Path) -> None:
    clock = Clock()
    log = AuditLog(path, clock=clock)
    for _ in range(30_000):
        log.write(AuditEntry(event="order", person="ana", robot="panda-0", order="reset", outcome="refused: busy"))
    log.write(AuditEntry(event="order", person="bob", robot="panda-0", order="e-stop", outcome="done"))
    assert [line["person"] for line in lines(path)] == ["ana", "bob"]
    clock.now_s += REPEAT_WINDOW_S
    log.flush()
    assert [(line["person"], line.get("count", 1)) for line in lines(path)] == [("ana", 1), ("bob", 1), ("ana", 29_999)]
    log.write(AuditEntry(event="order", person="bob", robot="panda-0", order="e-stop", outcome="done"))
    log.close()
    assert len(lines(path)) == 4, "bob's repetitions have ended: a new event is written at once"


def test_flood_of_different_refusals_is_counted_and_displaces_no_event(path: Path) -> None:
    clock = Clock()
    log = AuditLog(path, clock=clock)
    log.write(AuditEntry(event="opened", peer="panda-0", role="robot"))
    for number in range(10_000):
        log.write(
            AuditEntry(
                event="refused", address=f"10.0.{number // 256}.{number % 256}", reason="this key is not allowed"
            )
        )
    log.write(AuditEntry(event="closed", peer="panda-0", role="robot"))
    log.write(AuditEntry(event="order", person="ana", robot="panda-0", order="e-stop", outcome="done"))
    clock.now_s += 60
    log.close()
    written = lines(path)
    assert [line["event"] for line in written if line["event"] != "refused"] == ["opened", "closed", "order"]
    refused = [int(str(line.get("count", 1))) for line in written if line["event"] == "refused"]
    assert len(refused) == REFUSED_RATE_LIMIT.burst + 1 and sum(refused) == 10_000


def test_files_are_bounded_and_keep_newest_entries(path: Path) -> None:
    clock = Clock()
    log = AuditLog(path, clock=clock, max_bytes=2_000)
    for token in range(1, 1001):
        clock.now_s += 1
        log.write(AuditEntry(event="granted", robot="panda-0", peer="alice", token=token, reason="x" * 200))
    sizes = [file.stat().st_size for file in path.parent.iterdir()]
    assert len(sizes) == 1 + MAX_OLD_FILES and max(sizes) <= 2_000
    kept = [entry.token for entry in read_audit_log(path)]
    assert kept == [*range(1001 - len(kept), 1001)] and len(kept) > 3 * MAX_OLD_FILES


def _write_many(path: Path, who: str) -> None:
    log = AuditLog(path, max_bytes=20_000)
    for number in range(200):
        log.write(AuditEntry(event="order", person=who, order=str(number)))


def test_processes_share_file_and_lose_no_line(path: Path) -> None:
    writers = [multiprocessing.Process(target=_write_many, args=(path, who)) for who in ("ana", "bob", "eve")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found = sorted((entry.person, int(entry.order)) for entry in read_audit_log(path))
    assert found == [(who, number) for who in ("ana", "bob", "eve") for number in range(200)]


def test_damaged_line_is_skipped(path: Path) -> None:
    log = AuditLog(path)
    log.write(AuditEntry(event="sign-in", person="ana"))
    with path.open("ab") as file:
        file.write(b'{"time": 1, "ev\n\xff\n')  # as after a power cut
    log.write(AuditEntry(event="sign-out", person="ana"))
    assert [entry.event for entry in read_audit_log(path)] == ["sign-in", "sign-out"]


def test_unwritable_file_is_logged_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    log = AuditLog(Path("/dev/full"))
    log.write(AuditEntry(event="opened", peer="panda-0"))
    log.close()
    assert "audit.write_failed" in caplog.text


def test_operator_action_is_written_to_its_run_or_to_machine_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SSH_CONNECTION", "10.1.2.3 55555 10.0.0.1 22")
    audit_operator_action("ana", "e-stop", "no answer", robot="panda-0")
    (entry,) = read_audit_log(machine_audit_path())
    assert (entry.person, entry.address, entry.robot, entry.outcome) == ("ana", "10.1.2.3", "panda-0", "no answer")
    monkeypatch.delenv("SSH_CONNECTION")
    audit_operator_action("ana", "label e0: success no", run=tmp_path)
    assert [(e.address, e.order) for e in read_audit_log(tmp_path / "audit.jsonl")] == [
        ("this computer", "label e0: success no")
    ]
