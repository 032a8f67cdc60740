from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from wait_kit import ClockNs

from hal.errors import LeaseError, RegistryError, StaleToken, StateError
from hal.lease import LeaseTable
from hal.registry import FAULT_WINDOW_S, MAX_FAULTS, OperatorOverrides, Registry, read_registry
from hal.resource import Health, Kind, ResourceRecord
from hal.state_database import STATE_FILE, StateDatabase, read_audit_log

GPU = ResourceRecord(kind=Kind.GPU, name="gpu", model="x", node="desk")
ARM = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk")


@pytest.fixture
def clock() -> ClockNs:
    return ClockNs()


@pytest.fixture
def registry(clock: ClockNs, tmp_path: Path) -> Registry:
    registry = started(StateDatabase(tmp_path / STATE_FILE), clock)
    registry.announce(ARM)
    return registry


def started(database: StateDatabase, clock: ClockNs) -> Registry:
    """With leases that a restart forgets."""
    leases = LeaseTable(StateDatabase(None), ttl_s=10, clock=clock)
    return Registry(leases, database, clock, lost_after_s=5, wall_clock=lambda: clock.now_s)


@pytest.fixture
def book(tmp_path: Path) -> OperatorOverrides:
    """The overrides as another process writes them."""
    return OperatorOverrides(StateDatabase(tmp_path / STATE_FILE))


def health(registry: Registry) -> Health:
    return registry.record("panda-0").health


def test_silent_robot_is_lost_and_may_return(registry: Registry, clock: ClockNs) -> None:
    lease = registry.acquire("panda-0", "alice")
    registry.announce(GPU)
    clock.now_s += 4
    registry.announce(GPU)
    clock.now_s += 2
    assert registry.poll() == ("panda-0",)
    assert registry.poll() == ()
    assert [(r.name, r.health) for r in registry.snapshot()] == [("gpu", Health.READY), ("panda-0", Health.LOST)]
    with pytest.raises(LeaseError, match="panda-0 is lost"):
        registry.renew("panda-0", lease.token)
    with pytest.raises(LeaseError, match="panda-0 is lost"):
        registry.acquire("panda-0", "alice")
    registry.announce(ARM)
    assert health(registry) is Health.READY
    assert registry.acquire("panda-0", "alice").token > lease.token


def test_time_of_loss_survives_restart(tmp_path: Path, clock: ClockNs) -> None:
    database = StateDatabase(tmp_path / STATE_FILE)
    registry, there_s = started(database, clock), clock.now_s
    assert registry.announce(ARM).seen_unix_s == 0.0
    for _ in range(2):
        clock.now_s += 60
        assert registry.poll() == ("panda-0",)
        assert registry.record("panda-0").seen_unix_s == there_s
        registry = started(database, clock)
    assert registry.announce(ARM).seen_unix_s == 0.0


def test_returned_robot_keeps_token_unless_another_session_acquired_it(registry: Registry, clock: ClockNs) -> None:
    lease = registry.acquire("panda-0", "alice")
    clock.now_s += 3600
    assert registry.poll() == ("panda-0",)
    registry.announce(ARM)
    assert registry.renew("panda-0", lease.token) == lease
    assert health(registry) is Health.LEASED
    clock.now_s += 3600
    registry.poll()
    registry.announce(ARM)
    newer = registry.acquire("panda-0", "bob")
    clock.now_s += 3600
    registry.poll()
    registry.announce(ARM)
    with pytest.raises(StaleToken):
        registry.renew("panda-0", lease.token)
    assert registry.renew("panda-0", newer.token) == newer


def test_leases_and_records_survive_restart(tmp_path: Path, clock: ClockNs) -> None:
    database = StateDatabase(tmp_path / STATE_FILE)
    registry = Registry(LeaseTable(database, clock=clock), database, clock)
    registry.announce(ARM)
    registry.announce(GPU)
    lease = registry.acquire("panda-0", "alice")
    registry = Registry(LeaseTable(database, clock=clock), database, clock)
    assert [(r.name, r.health, r.note) for r in registry.snapshot()] == [
        ("gpu", Health.READY, ""),
        ("panda-0", Health.LEASED, "by alice"),
    ]
    assert registry.renew("panda-0", lease.token) == lease
    clock.now_s += 6
    registry.announce(ARM)
    assert registry.poll() == ("gpu",), "it has not announced itself again"
    assert registry.renew("panda-0", lease.token) == lease


def test_quarantine_ends_lease_and_lasts_until_operator_clears_it(
    registry: Registry, book: OperatorOverrides, clock: ClockNs, tmp_path: Path
) -> None:
    lease = registry.acquire("panda-0", "alice")
    book.set_override("panda-0", "quarantined", "carol", "oil on the floor")
    for step in (registry.poll, lambda: registry.announce(ARM), registry.poll):
        step()
        clock.now_s += 60
        assert health(registry) is Health.QUARANTINED
    restarted = started(StateDatabase(tmp_path / STATE_FILE), clock)
    assert health(restarted) is Health.QUARANTINED
    with pytest.raises(LeaseError, match="panda-0 is quarantined by carol: oil on the floor"):
        registry.acquire("panda-0", "alice")
    with pytest.raises(LeaseError):
        registry.renew("panda-0", lease.token)
    book.clear_override("panda-0", "carol")
    registry.announce(ARM)
    assert registry.acquire("panda-0", "alice").token > lease.token


def test_drained_robot_keeps_session_and_refuses_others(registry: Registry, book: OperatorOverrides) -> None:
    lease = registry.acquire("panda-0", "alice")
    book.set_override("panda-0", "draining", "carol", "maintenance")
    registry.renew("panda-0", lease.token)
    registry.release("panda-0", lease.token)
    assert health(registry) is Health.DRAINING
    with pytest.raises(LeaseError, match="draining by carol: maintenance"):
        registry.acquire("panda-0", "bob")
    book.clear_override("panda-0", "carol")
    registry.poll()
    assert health(registry) is Health.READY


def test_drained_robot_keeps_session_after_a_loss(registry: Registry, book: OperatorOverrides, clock: ClockNs) -> None:
    lease = registry.acquire("panda-0", "alice")
    book.set_override("panda-0", "draining", "carol", "maintenance")
    clock.now_s += 6
    assert registry.poll() == ("panda-0",)
    registry.announce(ARM)
    assert registry.renew("panda-0", lease.token) == lease
    registry.release("panda-0", lease.token)
    with pytest.raises(LeaseError, match="has ended"):
        registry.renew("panda-0", lease.token)


def test_override_needs_person_and_clearing_needs_override(book: OperatorOverrides) -> None:
    with pytest.raises(RegistryError, match="no override to clear"):
        book.clear_override("panda-0", "carol")
    with pytest.raises(RegistryError, match="name of a person"):
        book.set_override("panda-0", "draining", " ")
    book.set_override("panda-0", "draining", "carol")
    with pytest.raises(RegistryError, match="name of a person"):
        book.clear_override("panda-0", "")


def test_damaged_overrides_prevent_start_and_keep_running_registry(
    registry: Registry, book: OperatorOverrides, clock: ClockNs, tmp_path: Path
) -> None:
    book.set_override("panda-0", "quarantined", "carol")
    registry.poll()
    with StateDatabase(tmp_path / STATE_FILE).change() as connection:
        connection.execute("UPDATE override SET content = ?", (b"{",))
    registry.poll()
    assert health(registry) is Health.QUARANTINED
    with pytest.raises(StateError, match="cannot be read"):
        started(StateDatabase(tmp_path / STATE_FILE), clock)


def test_record_that_could_not_be_written_is_written_later(clock: ClockNs, tmp_path: Path) -> None:
    database = StateDatabase(tmp_path / STATE_FILE)
    registry = started(database, clock)
    registry.announce(GPU)
    registry.poll()
    database.rows("PRAGMA query_only=ON")  # as on a full disk
    registry.announce(ARM)
    registry.poll()
    assert [record.name for record in read_registry(database)] == ["gpu"]
    database.rows("PRAGMA query_only=OFF")
    registry.poll()
    assert [record.name for record in read_registry(database)] == ["gpu", "panda-0"]


def test_frequent_faults_quarantine_robot_and_rare_faults_do_not(
    registry: Registry, book: OperatorOverrides, clock: ClockNs, tmp_path: Path
) -> None:
    for _ in range(MAX_FAULTS):
        registry.report_fault("panda-0", "camera front froze")
        clock.now_s += 1
    assert (health(registry), registry.record("panda-0").trouble) == (
        Health.READY,
        "10 recent fault(s), the last: camera front froze",
    )
    clock.now_s += FAULT_WINDOW_S
    registry.announce(ARM)
    assert registry.record("panda-0").trouble == ""
    for _ in range(MAX_FAULTS + 1):
        registry.report_fault("panda-0", "it dropped out")
    assert health(registry) is Health.QUARANTINED
    assert registry.record("panda-0").note == "by the registry: 11 faults within 60 s, the last: it dropped out"
    written = book.read()
    for _ in range(3 * MAX_FAULTS):
        registry.report_fault("panda-0", "it dropped out once more")
    assert (book.read(), len(read_audit_log(tmp_path / STATE_FILE))) == (written, 1)
    book.clear_override("panda-0", "carol")
    registry.poll()
    assert (health(registry), registry.record("panda-0").trouble) == (Health.READY, "")


def test_loss_and_return_are_changes_and_first_announcement_is_not(registry: Registry, clock: ClockNs) -> None:
    gpu = ResourceRecord(kind=Kind.GPU, name="desk/gpu-0", model="H200", node="desk")
    registry.announce(gpu)
    assert registry.pop_changes() == []
    lease = registry.acquire("panda-0", "alice")
    for _ in range(3):
        clock.now_s += 3
        registry.announce(ARM)
        registry.renew("panda-0", lease.token)
    assert [(r.name, r.health) for r in registry.pop_changes()] == [("desk/gpu-0", Health.LOST)]
    assert health(registry) is Health.LEASED, "nothing else stops"
    registry.announce(gpu)
    registry.announce(msgspec.structs.replace(gpu, name="desk/gpu-1"))
    assert [(r.name, r.health) for r in registry.pop_changes()] == [
        ("desk/gpu-0", Health.READY),
        ("desk/gpu-1", Health.READY),
    ]
    assert registry.pop_changes() == []


def test_quarantine_and_restore_are_changes(registry: Registry, book: OperatorOverrides) -> None:
    book.set_override("panda-0", "quarantined", "carol", "oil")
    book.set_override("ur-9", "quarantined", "carol", "never announced")
    registry.poll()
    assert [(r.name, r.health, r.note) for r in registry.pop_changes()] == [
        ("panda-0", Health.QUARANTINED, "by carol: oil")
    ]
    book.clear_override("panda-0", "carol")
    registry.poll()
    assert [(r.name, r.health) for r in registry.pop_changes()] == [("panda-0", Health.READY)]


def test_leases_are_audited(registry: Registry, book: OperatorOverrides, clock: ClockNs, tmp_path: Path) -> None:
    first = registry.acquire("panda-0", "alice")
    registry.renew("panda-0", first.token)
    registry.release("panda-0", first.token)
    second = registry.acquire("panda-0", "bob")
    clock.now_s += 3600
    registry.poll()
    registry.announce(ARM)
    registry.renew("panda-0", second.token)
    book.set_override("panda-0", "quarantined", "carol", "oil")
    registry.poll()
    book.clear_override("panda-0", "carol")
    registry.poll()
    entries = read_audit_log(tmp_path / STATE_FILE)
    assert [(e.event, e.peer, e.token, e.reason) for e in entries] == [
        ("granted", "alice", 1, ""),
        ("released", "alice", 1, ""),
        ("granted", "bob", 2, ""),
        ("lapsed", "bob", 2, "it was not renewed in time"),
        ("lost", "", 0, ""),
        ("returned", "", 0, ""),
        ("reinstated", "bob", 2, ""),
        ("quarantined", "", 0, "oil"),
        ("revoked", "bob", 2, "by carol: oil"),
        ("restored", "", 0, ""),
    ]
    assert all(entry.robot == "panda-0" for entry in entries)
    assert [e.person for e in entries if e.person] == ["carol", "carol"]


def test_override_is_audited_once_over_restarts(
    registry: Registry, book: OperatorOverrides, clock: ClockNs, tmp_path: Path
) -> None:
    book.set_override("panda-0", "quarantined", "carol", "oil")
    registry.poll()
    for _ in range(2):
        started(StateDatabase(tmp_path / STATE_FILE), clock)
    book.clear_override("panda-0", "dora")
    started(StateDatabase(tmp_path / STATE_FILE), clock).poll()
    started(StateDatabase(tmp_path / STATE_FILE), clock)
    entries = read_audit_log(tmp_path / STATE_FILE)
    found = [(e.event, e.person, e.reason) for e in entries]
    assert found == [("quarantined", "carol", "oil"), ("restored", "dora", "")]


def test_override_of_a_resource_of_other_registries_is_not_audited(
    registry: Registry, book: OperatorOverrides, tmp_path: Path
) -> None:
    book.set_override("gpu", "quarantined", "carol", "hot")
    registry.poll()
    assert read_audit_log(tmp_path / STATE_FILE) == []
    assert registry.announce(GPU).health is Health.QUARANTINED
    registry.poll()
    assert [(e.event, e.robot, e.person) for e in read_audit_log(tmp_path / STATE_FILE)] == [
        ("quarantined", "gpu", "carol")
    ]


def test_unknown_resource_error_lists_known_ones(registry: Registry) -> None:
    for call in (
        lambda: registry.report_fault("ur-0", "it froze"),
        lambda: registry.acquire("ur-0", "alice"),
        lambda: registry.renew("ur-0", 1),
        lambda: registry.release("ur-0", 1),
    ):
        with pytest.raises(RegistryError, match=r"no resource 'ur-0'; there are \['panda-0'\]"):
            call()
