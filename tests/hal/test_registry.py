from __future__ import annotations

import json
from pathlib import Path

import pytest

from hal.errors import LeaseError, LeaseHeld, RegistryError, StaleToken
from hal.lease import LeaseTable
from hal.registry import Registry
from hal.resource import Health, Kind, ResourceRecord

ARM = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk")


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    registry = Registry(LeaseTable(None, ttl_s=10, clock=clock), clock, lost_after_s=5)
    registry.announce(ARM)
    return registry


def health(registry: Registry) -> Health:
    return registry.record("panda-0").health


def test_a_robot_is_leased_to_one_session_and_given_back(registry: Registry) -> None:
    lease = registry.lease("panda-0", "alice")
    assert health(registry) is Health.LEASED
    with pytest.raises(LeaseHeld, match="alice"):
        registry.lease("panda-0", "bob")
    registry.release("panda-0", lease.token)
    assert health(registry) is Health.READY


def test_a_lease_that_runs_out_makes_the_robot_ready(registry: Registry, clock: Clock) -> None:
    registry.lease("panda-0", "alice")
    for _ in range(3):
        clock.now_s += 4
        registry.heartbeat("panda-0")
        registry.expire()
    assert health(registry) is Health.READY
    assert registry.lease("panda-0", "bob").token == 2


def test_renewal_keeps_the_lease(registry: Registry, clock: Clock) -> None:
    lease = registry.lease("panda-0", "alice")
    for _ in range(5):
        clock.now_s += 4
        registry.heartbeat("panda-0")
        assert registry.renew("panda-0", lease.token) == lease


def test_a_silent_robot_is_lost_its_lease_ends_and_it_may_return(registry: Registry, clock: Clock) -> None:
    lease = registry.lease("panda-0", "alice")
    registry.announce(ResourceRecord(kind=Kind.GPU, name="gpu", model="x", node="desk"))
    clock.now_s += 4
    registry.heartbeat("gpu")
    clock.now_s += 2
    assert registry.expire() == ("panda-0",)
    assert registry.expire() == ()
    assert [(r.name, r.health) for r in registry.snapshot()] == [("gpu", Health.READY), ("panda-0", Health.LOST)]
    with pytest.raises(LeaseError, match="panda-0 is lost"):
        registry.renew("panda-0", lease.token)
    with pytest.raises(LeaseError, match="panda-0 is lost"):
        registry.lease("panda-0", "alice")
    registry.heartbeat("panda-0")
    assert health(registry) is Health.READY
    assert registry.lease("panda-0", "alice").token > lease.token


def test_a_lost_robot_that_announces_itself_is_ready_with_its_new_description(registry: Registry) -> None:
    registry.lost("panda-0")
    registry.lost("panda-0")
    moved = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="bench")
    assert registry.announce(moved).health is Health.READY
    assert registry.record("panda-0").node == "bench"


def test_a_robot_that_was_cut_off_goes_on_under_its_token_unless_another_had_it(
    registry: Registry, clock: Clock
) -> None:
    lease = registry.lease("panda-0", "alice")
    clock.now_s += 3600
    assert registry.expire() == ("panda-0",)
    registry.heartbeat("panda-0")
    assert registry.renew("panda-0", lease.token) == lease
    assert health(registry) is Health.LEASED
    clock.now_s += 3600
    registry.expire()
    registry.heartbeat("panda-0")
    newer = registry.lease("panda-0", "bob")
    clock.now_s += 3600
    registry.expire()
    registry.heartbeat("panda-0")
    with pytest.raises(StaleToken):
        registry.renew("panda-0", lease.token)
    assert registry.renew("panda-0", newer.token) == newer


def test_a_reconnection_keeps_the_lease(registry: Registry) -> None:
    lease = registry.lease("panda-0", "alice")
    assert registry.announce(ARM).health is Health.LEASED
    registry.renew("panda-0", lease.token)


def test_a_lease_survives_the_registrys_restart(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "leases.json"
    registry = Registry(LeaseTable(path, clock=clock), clock)
    registry.announce(ARM)
    lease = registry.lease("panda-0", "alice")
    registry = Registry(LeaseTable(path, clock=clock), clock)
    assert registry.announce(ARM).health is Health.LEASED
    assert registry.renew("panda-0", lease.token) == lease


def test_a_quarantine_ends_the_lease_and_lasts_until_a_person_lifts_it(registry: Registry, clock: Clock) -> None:
    lease = registry.lease("panda-0", "alice")
    registry.quarantine("panda-0", "carol", "oil on the floor")
    for step in (lambda: registry.lost("panda-0"), lambda: registry.announce(ARM), registry.expire):
        step()
        clock.now_s += 60
        assert health(registry) is Health.QUARANTINED
    with pytest.raises(LeaseError, match="quarantined: by carol: oil on the floor"):
        registry.lease("panda-0", "alice")
    with pytest.raises(LeaseError):
        registry.renew("panda-0", lease.token)
    registry.restore("panda-0", "carol")
    registry.heartbeat("panda-0")
    assert registry.lease("panda-0", "alice").token > lease.token


def test_draining_lets_the_session_finish_and_admits_no_other(registry: Registry) -> None:
    lease = registry.lease("panda-0", "alice")
    registry.drain("panda-0", "carol", "maintenance")
    registry.renew("panda-0", lease.token)
    registry.release("panda-0", lease.token)
    assert health(registry) is Health.DRAINING
    with pytest.raises(LeaseError, match="draining"):
        registry.lease("panda-0", "bob")
    registry.restore("panda-0", "carol")
    assert health(registry) is Health.READY


def test_lifting_a_drain_gives_the_running_session_its_lease_back(registry: Registry) -> None:
    lease = registry.lease("panda-0", "alice")
    registry.drain("panda-0", "carol")
    registry.restore("panda-0", "carol")
    assert health(registry) is Health.LEASED
    registry.release("panda-0", lease.token)


def test_steps_that_the_health_does_not_allow_raise(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="nothing to restore"):
        registry.restore("panda-0", "carol")
    registry.quarantine("panda-0", "carol")
    for step in (registry.drain, registry.quarantine):
        with pytest.raises(RegistryError, match="cannot become"):
            step("panda-0", "carol")
    with pytest.raises(RegistryError, match="named person"):
        registry.restore("panda-0", " ")


def test_an_unknown_resource_raises_and_names_those_that_there_are(registry: Registry) -> None:
    for call in (
        lambda: registry.heartbeat("ur-0"),
        lambda: registry.lost("ur-0"),
        lambda: registry.lease("ur-0", "alice"),
        lambda: registry.renew("ur-0", 1),
        lambda: registry.release("ur-0", 1),
    ):
        with pytest.raises(RegistryError, match=r"no resource 'ur-0'; there are \['panda-0'\]"):
            call()


def test_a_record_is_one_line_of_json() -> None:
    record = json.loads(ARM.to_json())
    assert (record["name"], record["kind"], record["health"]) == ("panda-0", "robot", "ready")
    assert "\n" not in ARM.to_json()
