"""The audit log: its lines, its bounds under a flood, and its readers."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from wait_kit import Clock

from hal.state_database import (
    DEFAULT_RATE_LIMIT,
    MAX_SOURCES,
    REFUSED_RATE_LIMIT,
    REPEAT_WINDOW_S,
    STATE_FILE,
    AuditEntry,
    AuditLog,
    StateDatabase,
    audit_operator_action,
    machine_state_path,
    read_audit_log,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / STATE_FILE


def test_entry_has_time_person_address_robot_order_and_outcome(path: Path) -> None:
    given = AuditEntry(event="order", person="ana", address="10.0.0.7", robot="panda-0", order="e-stop", outcome="done")
    AuditLog(path).write(given)
    (entry,) = read_audit_log(path)
    when = time.mktime(time.strptime(entry.time[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone
    assert abs(when - time.time()) < 60 and msgspec.structs.replace(entry, time="") == given


def test_equal_events_become_one_line_with_count(path: Path) -> None:
    clock = Clock()
    log = AuditLog(path, clock=clock)
    for _ in range(30_000):
        log.write(AuditEntry(event="order", person="ana", robot="panda-0", order="reset", outcome="refused: busy"))
    log.write(AuditEntry(event="order", person="bob", robot="panda-0", order="e-stop", outcome="done"))
    assert [entry.person for entry in read_audit_log(path)] == ["ana", "bob"]
    clock.now_s += REPEAT_WINDOW_S
    log.flush()
    counted = [(entry.person, entry.count) for entry in read_audit_log(path)]
    assert counted == [("ana", 1), ("bob", 1), ("ana", 29_999)]
    log.write(AuditEntry(event="order", person="bob", robot="panda-0", order="e-stop", outcome="done"))
    log.close()
    assert len(read_audit_log(path)) == 4, "bob's repetitions have ended: a new event is written at once"


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
    written = read_audit_log(path)
    assert [entry.event for entry in written if entry.event != "refused"] == ["opened", "closed", "order"]
    refused = [entry.count for entry in written if entry.event == "refused"]
    assert len(refused) == REFUSED_RATE_LIMIT[1] + 1 and sum(refused) == 10_000


def test_flood_of_one_source_displaces_no_event_of_another(path: Path) -> None:
    clock = Clock()
    log = AuditLog(path, clock=clock)
    for number in range(2_000):
        log.write(AuditEntry(event="order", person=f"x{number}", robot="panda-0", order="re-arm", outcome="done"))
        log.write(AuditEntry(event="sign-in", person=f"x{number}", address="10.0.0.66", outcome="done"))
    others = [
        AuditEntry(event="order", person="bob", robot="panda-1", order="re-arm", outcome="done"),
        AuditEntry(event="sign-in", person="bob", address="10.0.0.7", outcome="done"),
    ]
    for entry in others:
        log.write(entry)
    clock.now_s += 60
    log.close()
    written = read_audit_log(path)
    assert [msgspec.structs.replace(each, time="") for each in written if each.person == "bob"] == others
    beyond = [(each.event, each.robot, each.address, each.count) for each in written if "rate limit" in each.reason]
    assert beyond == [("order", "panda-0", "", 1000), ("sign-in", "", "10.0.0.66", 1000)]


def test_flood_of_many_sources_shares_one_allowance(path: Path) -> None:
    clock = Clock()
    log = AuditLog(path, clock=clock)
    for number in range(3_000):
        log.write(AuditEntry(event="sign-in", person="x", address=f"10.0.{number // 256}.{number % 256}"))
    log.write(AuditEntry(event="order", person="bob", robot="panda-1", order="re-arm", outcome="done"))
    clock.now_s += 60
    log.write(AuditEntry(event="sign-in", person="bob", address="10.0.0.7", outcome="done"))
    log.close()
    written = read_audit_log(path)
    assert [(each.event, each.person) for each in written if each.person == "bob"] == [
        ("order", "bob"),
        ("sign-in", "bob"),
    ]
    flood = [each.count for each in written if each.event == "sign-in" and each.person != "bob"]
    assert sum(flood) == 3_000 and len(flood) == MAX_SOURCES + DEFAULT_RATE_LIMIT[1] + 1


def test_log_is_bounded_and_keeps_newest_entries(path: Path) -> None:
    clock = Clock()
    log = AuditLog(path, clock=clock, max_bytes=20_000)
    for token in range(1, 1001):
        clock.now_s += 1
        log.write(AuditEntry(event="granted", robot="panda-0", peer="alice", token=token, reason="x" * 200))
    kept = [entry.token for entry in read_audit_log(path)]
    assert kept == [*range(1001 - len(kept), 1001)] and 40 < len(kept) < 80


def test_damaged_entry_is_skipped(path: Path) -> None:
    log = AuditLog(path)
    log.write(AuditEntry(event="sign-in", person="ana"))
    with StateDatabase(path).change() as connection:
        connection.execute("INSERT INTO audit VALUES (9999, ?)", (b"{\xff",))
    log.write(AuditEntry(event="sign-out", person="ana"))
    assert [entry.event for entry in read_audit_log(path)] == ["sign-in", "sign-out"]


def test_unwritable_file_is_logged_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    log = AuditLog(tmp_path / "file" / STATE_FILE)
    log.write(AuditEntry(event="opened", peer="panda-0"))
    log.close()
    assert "audit.write_failed" in caplog.text


def test_operator_action_is_written_to_its_run_or_to_machine_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SSH_CONNECTION", "10.1.2.3 55555 10.0.0.1 22")
    audit_operator_action("ana", "e-stop", "no answer", robot="panda-0")
    (entry,) = read_audit_log(machine_state_path())
    assert (entry.person, entry.address, entry.robot, entry.outcome) == ("ana", "10.1.2.3", "panda-0", "no answer")
    monkeypatch.delenv("SSH_CONNECTION")
    audit_operator_action("ana", "label e0: success no", run=tmp_path)
    assert [(e.address, e.order) for e in read_audit_log(tmp_path / STATE_FILE)] == [
        ("this computer", "label e0: success no")
    ]
