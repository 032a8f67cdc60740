"""Faults that robots report, of which some count towards a quarantine, and what consoles get of lost robots."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hal.lease import LeaseTable
from hal.registry import MAX_FAULTS, Registry, read_registry
from hal.resource import Health, Kind, ResourceRecord
from hal.state_database import STATE_FILE, StateDatabase
from user_sys.gateway.gateway import STARTING_S, ResourceService
from user_sys.messages import RobotStatus

ARM = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk")
STATUS = RobotStatus(
    robot="panda-0", authority="policy", operator="", phase="policy", episode="e0", step=1, policy_version=-1,
    real_time=True, outbox_chunks=0, control_hz=10.0, safety_interventions=0,
)  # fmt: skip
MANY = MAX_FAULTS + 1


@pytest.fixture
def resources(tmp_path: Path) -> ResourceService:
    """Of a gateway that has just started."""
    database = StateDatabase(tmp_path / STATE_FILE)
    leases = LeaseTable(database, 30.0)
    resources = ResourceService(leases, Registry(leases, database))
    resources.registry.announce(ARM)
    return resources


def report(resources: ResourceService, faults: int, is_connected: bool = True) -> None:
    status = msgspec.structs.replace(STATUS, faults=faults)
    if resources.has_new_faults(status):
        resources.on_status(status, is_connected)


def health(resources: ResourceService) -> Health:
    return resources.registry.record("panda-0").health


def test_faults_in_a_minute_quarantine_the_robot(resources: ResourceService) -> None:
    for faults in range(MANY):
        report(resources, faults)
    assert health(resources) is Health.READY
    report(resources, MANY)
    assert health(resources) is Health.QUARANTINED


def test_faults_before_the_gateways_start_do_not_quarantine_the_robot(resources: ResourceService) -> None:
    report(resources, 5 * MANY)
    assert health(resources) is Health.READY and not resources.registry.record("panda-0").trouble


def test_faults_of_an_outage_count_as_one(resources: ResourceService) -> None:
    report(resources, 0)
    report(resources, MANY)
    assert resources.registry.record("panda-0").trouble.startswith("1 recent fault(s)")


def test_faults_of_a_restarted_session_count(resources: ResourceService) -> None:
    report(resources, 3)
    report(resources, 0)
    assert not resources.registry.record("panda-0").trouble
    report(resources, 1)
    assert resources.registry.record("panda-0").trouble.startswith("1 recent fault(s)")


def test_console_gets_the_time_of_a_loss_once_sessions_have_had_time_to_start(tmp_path: Path) -> None:
    now_s, database = [0.0], StateDatabase(tmp_path / STATE_FILE)

    def started() -> ResourceService:
        leases = LeaseTable(database, 30.0)
        registry = Registry(leases, database, lambda: round(now_s[0] * 1e9))
        return ResourceService(leases, registry, lambda: now_s[0])

    def changed_after(resources: ResourceService, seconds: float) -> list[ResourceRecord]:
        now_s[0] += seconds
        return resources.poll((), ())[0]

    earlier = started()
    earlier.registry.announce(ARM)
    assert all(each.seen_unix_s > 0 for each in changed_after(earlier, STARTING_S))
    resumed = started()
    assert not changed_after(resumed, STARTING_S / 2)
    (record,) = resumed.present()
    assert record.health is Health.LOST and not record.seen_unix_s, "its session may be starting"
    assert read_registry(database)[0].seen_unix_s > 0, "the database keeps it for people"
    (record,) = changed_after(resumed, STARTING_S / 2)
    assert record.health is Health.LOST and record.seen_unix_s > 0 and resumed.present() == [record]
    assert not changed_after(resumed, 1.0), "once"
