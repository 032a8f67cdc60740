"""The registry: which resources there are now, how they fare, and who has them.

Health is a state machine; a change that is not listed here raises:

============= ==================================================================================================
READY         -> LEASED (`lease`), DRAINING (`drain`), QUARANTINED (`quarantine`), LOST (no heartbeat)
LEASED        -> READY (`release`, or the lease ends), DRAINING, QUARANTINED and LOST (both end the lease)
DRAINING      -> READY (`restore`), QUARANTINED, LOST. A lease in force goes on; no new one is given
QUARANTINED   -> READY (`restore`), by a person only. It stays quarantined however often it comes and goes
LOST          -> READY (a heartbeat, or it announces itself again), QUARANTINED
============= ==================================================================================================
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from hal.errors import LeaseError, RegistryError
from hal.lease import Lease, LeaseTable
from hal.resource import Health, ResourceRecord

logger = logging.getLogger(__name__)

LOST_AFTER_S = 5.0
_NS = 1_000_000_000

_LEGAL = {
    Health.READY: {Health.LEASED, Health.DRAINING, Health.QUARANTINED, Health.LOST},
    Health.LEASED: {Health.READY, Health.DRAINING, Health.QUARANTINED, Health.LOST},
    Health.DRAINING: {Health.READY, Health.QUARANTINED, Health.LOST},
    Health.QUARANTINED: {Health.READY},
    Health.LOST: {Health.READY, Health.QUARANTINED},
}


class Registry:
    """The resources of a run. One thread calls it and calls `expire` at least once a second."""

    def __init__(
        self, leases: LeaseTable, clock: Callable[[], int] = time.monotonic_ns, lost_after_s: float = LOST_AFTER_S
    ) -> None:
        """Args:
        leases: who drives what; the registry is the only one to change it.
        clock: nanoseconds that only grow.
        lost_after_s: a resource that is silent for longer is lost and its lease ends.
        """
        self._leases = leases
        self._clock = clock
        self._lost_after_ns = round(lost_after_s * _NS)
        self._records: dict[str, ResourceRecord] = {}
        self._seen_ns: dict[str, int] = {}

    def announce(self, record: ResourceRecord) -> ResourceRecord:
        """Enters a resource, or takes one back that was lost; returns it with its present health.

        What is described may have changed, health and note stay: a quarantine outlives a reconnection, and so does a
        lease that is in force, e.g. from before the registry's restart.
        """
        known = self._records.get(record.name)
        leased = self._leases.lease(record.name) is not None
        if known is None or known.health is Health.LOST:
            health = Health.LEASED if leased else Health.READY
            entered = msgspec.structs.replace(record, health=health, note="")
            logger.info("resource.found name=%s model=%s node=%s by=%s", *_identity(record), record.found_by)
        else:
            entered = msgspec.structs.replace(record, health=known.health, note=known.note)
        self._records[record.name] = entered
        self._seen_ns[record.name] = self._clock()
        return entered

    def heartbeat(self, name: str) -> None:
        """Says that the resource is there; one that was lost is ready again. Raises RegistryError: never announced."""
        if self.record(name).health is Health.LOST:
            self._move(name, Health.READY)
        self._seen_ns[name] = self._clock()

    def lost(self, name: str) -> None:
        """The resource is gone and its lease lapses; a quarantined one stays quarantined. Harmless where it is lost."""
        record = self.record(name)
        self._leases.lapse(name)
        if record.health not in (Health.LOST, Health.QUARANTINED):
            self._move(name, Health.LOST)

    def expire(self) -> tuple[str, ...]:
        """Ends leases that ran out and finds the resources that fell silent; returns those lost now, by name."""
        for robot in self._leases.expire():
            self._freed(robot)
        silent_since = self._clock() - self._lost_after_ns
        silent = tuple(
            name
            for name, record in sorted(self._records.items())
            if self._seen_ns[name] < silent_since and record.health not in (Health.LOST, Health.QUARANTINED)
        )
        for name in silent:
            self.lost(name)
        return silent

    def drain(self, name: str, person: str, why: str = "") -> None:
        """Lets the lease in force end in its own time and gives no other. Raises RegistryError."""
        self._move(name, Health.DRAINING, _note(person, why))

    def quarantine(self, name: str, person: str, why: str = "") -> None:
        """Takes the resource out of use at once; a lease in force ends. Raises RegistryError."""
        self._move(name, Health.QUARANTINED, _note(person, why))
        self._leases.revoke(name)

    def restore(self, name: str, person: str) -> None:
        """Puts a resource that was drained or quarantined back into use.

        Raises:
            RegistryError: it is neither, or no person is named.
        """
        if self.record(name).health not in (Health.DRAINING, Health.QUARANTINED):
            raise RegistryError(f"{name} is {self.record(name).health}: there is nothing to restore")
        logger.info("resource.restored name=%s %s", name, _note(person, ""))
        self._move(name, Health.READY)
        if self._leases.lease(name) is not None:
            self._move(name, Health.LEASED)

    def lease(self, name: str, holder: str) -> Lease:
        """Gives the resource to `holder`.

        Raises:
            LeaseHeld: another session has it; names the holder.
            LeaseError: its health does not allow that; says why.
            RegistryError: never announced.
        """
        self.expire()
        record = self.record(name)
        if record.health not in (Health.READY, Health.LEASED):
            raise LeaseError(
                f"{name} is {record.health}{': ' + record.note if record.note else ''}; it cannot be leased"
            )
        lease = self._leases.acquire(name, holder)
        if record.health is Health.READY:
            self._move(name, Health.LEASED)
        return lease

    def renew(self, name: str, token: int) -> Lease:
        """Extends a lease, or gives one that ran out back to its holder where the robot is free still.

        Raises:
            StaleToken: another session has had it since.
            LeaseError: the lease was given back or taken away, or the resource is not in use.
            RegistryError: never announced.
        """
        self.expire()
        record = self.record(name)
        if self._leases.lease(name) is None and record.health is not Health.READY:
            raise LeaseError(f"{name} is {record.health}; its lease has ended and cannot be renewed")
        lease = self._leases.renew(name, token)
        if record.health is Health.READY:
            self._move(name, Health.LEASED)
        return lease

    def release(self, name: str, token: int) -> None:
        """Gives the resource back. Raises as `renew` does."""
        self.expire()
        self.record(name)
        self._leases.release(name, token)
        self._freed(name)

    def record(self, name: str) -> ResourceRecord:
        """The resource as it is now. Raises RegistryError and lists the names there are."""
        if name not in self._records:
            raise RegistryError(f"no resource {name!r}; there are {sorted(self._records)}")
        return self._records[name]

    def snapshot(self) -> tuple[ResourceRecord, ...]:
        """All resources, lost ones too, by name."""
        return tuple(self._records[name] for name in sorted(self._records))

    def _freed(self, name: str) -> None:
        record = self._records.get(name)
        if record is not None and record.health is Health.LEASED:
            self._move(name, Health.READY)

    def _move(self, name: str, health: Health, note: str = "") -> None:
        record = self.record(name)
        if health not in _LEGAL[record.health]:
            raise RegistryError(f"{name} is {record.health}; it cannot become {health}")
        self._records[name] = msgspec.structs.replace(record, health=health, note=note)
        logger.info("resource.health name=%s was=%s is=%s %s", name, record.health, health, note)


def _identity(record: ResourceRecord) -> tuple[str, str, str]:
    return record.name, record.model, record.node


def _note(person: str, why: str) -> str:
    if not person.strip():
        raise RegistryError("only a named person can drain, quarantine or restore a resource: give the name")
    return f"by {person}: {why}" if why else f"by {person}"
