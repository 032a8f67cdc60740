"""The registry of a run: its resources, their health and their leases. It survives its own restart.

A resource has one health; the first row that applies counts:

============= ==================================================================================================
QUARANTINED   by an operator, or after too many faults. Its lease ends. Only an operator restores the resource
LOST          silent for too long. Its lease lapses: its holder may renew it until another session acquires it
DRAINING      by an operator. Its session continues, also after a loss; no other lease is given
LEASED        a lease is in force (`hal.lease`)
READY         none of these
============= ==================================================================================================

Records and leases are in one database (`hal.state_database`); several registries may share one of operators' overrides.
A registry applies these at its start and within a second of each change, until an operator clears them.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Literal

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.errors import LeaseError, RegistryError, StateError
from hal.lease import Lease, LeaseTable
from hal.resource import Health, ResourceRecord
from hal.state_database import AuditEntry, AuditEvent, AuditLog, StateDatabase

logger = logging.getLogger(__name__)

MAX_TEXT_CHARS = 500  # of a reason, which terminals, pages and robots show as one line
LOSS_TIMEOUT_S = 5.0
FAULT_WINDOW_S = 60.0
MAX_FAULTS = 10  # within the window; one more leads to a quarantine
_NS = 1_000_000_000
_REGISTRY_NAME = "the registry"
OVERRIDDEN = (Health.QUARANTINED, Health.DRAINING)

OverrideKind = Literal["quarantined", "draining"]


def operator_name(given: str | None) -> str:
    """The given name, else the name of the logged-in user, else the user's id."""
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name; the error depends on Python
        return given or getpass.getuser()
    return f"uid {os.getuid()}"


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's override: quarantined (not used) or draining (only the current session may finish)."""

    what: OverrideKind
    by: str
    why: str = ""
    since_unix_s: float = 0.0

    @property
    def health(self) -> Health:
        return Health(self.what)

    @property
    def note(self) -> str:
        """E.g. ``by ana: the gripper sticks``."""
        return f"by {self.by}: {self.why}" if self.why else f"by {self.by}"


# Decoders are made at import: making one evaluates annotations.
_OVERRIDE_DECODER = msgspec.json.Decoder(Override)
_RECORD_DECODER = msgspec.json.Decoder(ResourceRecord)


class OperatorOverrides:
    """The overrides in a database. Any process and thread may use it; each change is synced before a method returns."""

    def __init__(self, database: StateDatabase, others: Mapping[str, StateDatabase] | None = None) -> None:
        """Args:
        others: the databases of those resources whose overrides are not in `database`, by resource.
        """
        self._database, self._others = database, dict(others or {})
        self._databases = {database, *self._others.values()}

    def close(self) -> None:
        """Closes the files; a later use opens them again."""
        for database in self._databases:
            database.close()

    def _database_of(self, name: str) -> StateDatabase:
        return self._others.get(name, self._database)

    def read(self) -> dict[str, Override]:
        """The overrides in force, by resource. Raises StateError: a database cannot be read."""
        found: dict[str, Override] = {}
        for database in self._databases:
            rows = database.rows("SELECT resource, content FROM override WHERE cleared_by IS NULL")
            try:
                found |= {n: _OVERRIDE_DECODER.decode(each) for n, each in rows if self._database_of(n) is database}
            except DECODE_ERRORS as error:
                raise StateError(f"an override in {database.path} cannot be read ({error}): restore it") from None
        return found

    def has_record(self, name: str) -> bool:
        """Whether the resource has or had an override. Raises StateError: a database cannot be read."""
        return bool(self._database_of(name).rows("SELECT 1 FROM override WHERE resource = ?", name))

    def cleared_by(self, name: str) -> str:
        """The operator who has cleared the last override of the resource; empty if there was none."""
        rows = self._database_of(name).rows("SELECT cleared_by FROM override WHERE resource = ?", name)
        return rows[0][0] or "" if rows else ""

    def set_override(self, name: str, kind: OverrideKind, by: str, why: str = "") -> Override:
        """Quarantines or drains `name`, in place of an earlier override. Raises RegistryError if `by` is empty."""
        person, reason = _require_person(by), shorten(why, MAX_TEXT_CHARS)
        override = Override(what=kind, by=person, why=reason, since_unix_s=time.time())
        with self._database_of(name).change() as connection:
            content = msgspec.json.encode(override)
            connection.execute("INSERT OR REPLACE INTO override VALUES (?, ?, NULL)", (name, content))
        logger.warning("resource.override_set name=%s %s %s", name, kind, override.note)
        return override

    def clear_override(self, name: str, by: str) -> Override:
        """Restores `name` and returns its override. Raises RegistryError if it has none, or if `by` is empty."""
        person = _require_person(by)
        if (override := self.read().get(name)) is None:
            raise RegistryError(f"{name} is neither quarantined nor draining: there is no override to clear")
        with self._database_of(name).change() as connection:
            connection.execute("UPDATE override SET cleared_by = ? WHERE resource = ?", (person, name))
        logger.warning(
            "resource.override_cleared name=%s by %s; it was %s %s", name, person, override.what, override.note
        )
        return override


def _require_person(name: str) -> str:
    if not (person := shorten(name, MAX_TEXT_CHARS)):
        raise RegistryError("quarantine, drain and restore need the name of a person: give it")
    return person


@dataclass
class _Resource:
    """A resource that was ever announced.

    Attributes:
        seen_ns, seen_unix_s: its last announcement, by both clocks.
        is_announced: since this registry's start.
        faults: the newest ones, with their times in nanoseconds.
        lease: as it was last audited.
    """

    record: ResourceRecord
    seen_ns: int
    seen_unix_s: float
    is_announced: bool = False
    is_lost: bool = False
    faults: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MAX_FAULTS + 1))
    lease: Lease | None = None


class Registry:
    """The resources of a run. One thread calls it, and calls `poll` at least once a second."""

    def __init__(
        self,
        leases: LeaseTable,
        database: StateDatabase,
        clock: Callable[[], int] = time.monotonic_ns,
        lost_after_s: float = LOSS_TIMEOUT_S,
        wall_clock: Callable[[], float] = time.time,
        audit: AuditLog | None = None,
        overrides: OperatorOverrides | None = None,
    ) -> None:
        """Loads the records from before a restart. Those that do not announce themselves again are lost.

        Args:
            leases: the table of leases, which only this registry changes.
            database: of the records.
            clock: monotonic nanoseconds.
            lost_after_s: a resource that is silent for longer is lost, and its lease lapses.
            wall_clock: seconds since 1970, for people.
            audit: by default that of the database's file.
            overrides: by default those in the database.

        Raises:
            StateError: a database is damaged.
        """
        self._leases, self._clock, self._wall_clock = leases, clock, wall_clock
        self._database, self._overrides = database, overrides or OperatorOverrides(database)
        self._audit = audit or AuditLog(database.path)
        self._lost_after_ns = round(lost_after_s * _NS)
        self._settled_ns = clock() + self._lost_after_ns  # before it, an announcement is no change
        self._resources = {
            record.name: _Resource(record, clock(), record.seen_unix_s, lease=leases.lease(record.name))
            for record in read_registry(database)
        }
        self._changed: list[str] = []
        self._revoked: list[tuple[Lease, str]] = []
        self._in_force: dict[str, Override] = {}
        saved = {name: resource.record for name, resource in self._resources.items()}
        self._shown = {n: (r.health, r.note) for n, r in saved.items() if r.health in OVERRIDDEN}
        self._written: dict[str, ResourceRecord] = {}
        self._apply_overrides()

    def close(self) -> None:
        """Closes the databases; a later use opens them again."""
        self._database.close()
        self._overrides.close()

    def announce(self, record: ResourceRecord) -> ResourceRecord:
        """Adds a resource, restores a lost one, or confirms its presence. Returns its present record.

        Its description may change. A quarantine outlives a reconnection, and so does a lease in force, also from before
        the registry's restart.
        """
        name, now_ns = record.name, self._clock()
        known = self._resources.get(name)
        was_lost = known is not None and known.is_lost
        if known is None or was_lost:
            logger.info(
                "resource.found name=%s model=%s node=%s by=%s", name, record.model, record.node, record.found_by
            )
        if was_lost:
            self._audit.write(AuditEntry(event="returned", robot=name))
        if known is None:
            known = self._resources[name] = _Resource(record, now_ns, 0.0)
        if was_lost or (not known.is_announced and now_ns > self._settled_ns):
            self._changed.append(name)
        known.record, known.is_announced, known.is_lost = record, True, False
        known.seen_ns, known.seen_unix_s = now_ns, round(self._wall_clock(), 3)
        return self.record(name)

    def report_fault(self, name: str, text: str) -> None:
        """Counts a failure of the resource, such as a frozen camera. More than `MAX_FAULTS` lead to a quarantine.

        Failures in quarantine do not count, so that endless reports cause no writes to the disk.

        Raises:
            RegistryError: the resource was never announced.
        """
        known = self._require(name)
        if self._health(name)[0] is Health.QUARANTINED:
            return
        known.faults.append((self._clock(), text))
        logger.warning("resource.fault name=%s: %s", name, text)
        if (count := len(self._recent_faults(known))) > MAX_FAULTS:
            why = f"{count} faults within {FAULT_WINDOW_S:g} s, the last: {text}"
            self._overrides.set_override(name, "quarantined", _REGISTRY_NAME, why)
            known.faults.clear()
            self._apply_overrides()

    def poll(self) -> tuple[str, ...]:
        """Ends expired leases, applies new overrides, and finds silent resources; returns the latter by name."""
        try:
            for robot in self._leases.expire():
                self._audit_end(robot, "lapsed", "it was not renewed in time")
        except StateError as error:  # the leases count as ended; the next call tries again
            logger.error("registry.lease_write_failed %s", error)
        try:
            self._apply_overrides()
        except StateError as error:  # the earlier overrides stay in force
            logger.error("registry.overrides_unreadable %s", error)
        silent_since = self._clock() - self._lost_after_ns
        lost = {n: r for n, r in sorted(self._resources.items()) if not r.is_lost and r.seen_ns < silent_since}
        for name, resource in lost.items():
            resource.is_lost = True
            self._end_lease(self._leases.lapse, name, "lapsed", "the robot is silent")
            if resource.is_announced:
                self._changed.append(name)
                self._audit.write(AuditEntry(event="lost", robot=name))
        self._save()
        return tuple(lost)

    def pop_changes(self) -> list[ResourceRecord]:
        """The present records of resources that were lost, have returned or are new since the last call, or whose
        override has changed.

        An announcement in the first `lost_after_s` is no change.
        """
        names, self._changed = dict.fromkeys(self._changed), []
        return [self.record(name) for name in names]

    def pop_revoked(self) -> list[tuple[Lease, str]]:
        """The leases that a quarantine ended since the last call, and why: their sessions must be notified."""
        revoked, self._revoked = self._revoked, []
        return revoked

    def acquire(self, name: str, holder: str, min_token: int = 0) -> Lease:
        """Gives the resource to `holder`, under a token greater than every earlier one and than `min_token`.

        Raises:
            LeaseHeld: another session holds the lease; the message names it.
            LeaseError: its health does not allow that; the message has the reason.
            RegistryError: the resource was never announced.
        """
        self.poll()
        record = self.record(name)
        if record.health not in (Health.READY, Health.LEASED):
            note = f" {record.note}" if record.note else ""
            raise LeaseError(f"{name} is {record.health}{note}; it cannot be leased")
        return self._granted(self._leases.acquire(name, holder, min_token), "granted")

    def renew(self, name: str, token: int) -> Lease:
        """Extends a lease. Restores a lapsed lease if no other session has acquired the resource.

        Raises:
            StaleToken: another session has acquired it since.
            LeaseError: the lease was released or revoked, or the resource is not in use.
            RegistryError: the resource was never announced.
        """
        self.poll()
        record = self.record(name)
        if self._leases.lease(name) is None and record.health not in (Health.READY, Health.DRAINING):
            raise LeaseError(f"{name} is {record.health}; its lease has ended and cannot be renewed")
        return self._granted(self._leases.renew(name, token), "reinstated")

    def release(self, name: str, token: int) -> None:
        """Ends the lease. Raises as `renew` does."""
        self.poll()
        self._require(name)
        self._leases.release(name, token)
        self._audit_end(name, "released")
        self._save()

    def record(self, name: str) -> ResourceRecord:
        """The resource's present record. Raises RegistryError with the known names."""
        known, (health, note) = self._require(name), self._health(name)
        faults = self._recent_faults(known)
        trouble = f"{len(faults)} recent fault(s), the last: {faults[-1]}" if faults else known.record.trouble
        seen = known.seen_unix_s if health is Health.LOST else 0.0
        return msgspec.structs.replace(known.record, health=health, note=note, trouble=trouble, seen_unix_s=seen)

    def snapshot(self) -> tuple[ResourceRecord, ...]:
        """The present records of all resources that were ever announced, by name."""
        return tuple(self.record(name) for name in sorted(self._resources))

    def _health(self, name: str) -> tuple[Health, str]:
        override, lease = self._in_force.get(name), self._leases.lease(name)
        if override is not None and override.health is Health.QUARANTINED:
            return Health.QUARANTINED, override.note
        if name in self._resources and self._resources[name].is_lost:
            return Health.LOST, ""
        if override is not None:
            return Health.DRAINING, override.note
        return (Health.READY, "") if lease is None else (Health.LEASED, f"by {lease.holder}")

    def _require(self, name: str) -> _Resource:
        if name not in self._resources:
            raise RegistryError(f"no resource {name!r}; there are {sorted(self._resources)}")
        return self._resources[name]

    def _recent_faults(self, resource: _Resource) -> list[str]:
        """Those within `FAULT_WINDOW_S`, oldest first."""
        since_ns = self._clock() - round(FAULT_WINDOW_S * _NS)
        return [text for at_ns, text in resource.faults if at_ns >= since_ns]

    def _apply_overrides(self) -> None:
        """Applies and audits the changes since the last call, or since those that the registry before it has saved."""
        self._in_force = self._overrides.read()
        known = {name: each for name, each in self._in_force.items() if name in self._resources}
        before, self._shown = self._shown, {name: (each.health, each.note) for name, each in known.items()}
        for name in sorted(before.keys() | self._shown.keys()):
            if before.get(name) != self._shown.get(name):
                self._changed.append(name)
                self._audit_override(name)
        for name, override in self._in_force.items():
            if override.health is Health.QUARANTINED:
                self._end_lease(self._leases.revoke, name, "revoked", override.note)

    def _audit_override(self, name: str) -> None:
        if (override := self._in_force.get(name)) is not None:
            self._audit.write(AuditEntry(event=override.what, robot=name, person=override.by, reason=override.why))
        else:
            self._resources[name].faults.clear()
            self._audit.write(AuditEntry(event="restored", robot=name, person=self._overrides.cleared_by(name)))

    def _end_lease(self, end: Callable[[str], None], name: str, event: AuditEvent, why: str) -> None:
        try:
            end(name)
        except StateError as error:  # a silent robot's lease expires anyway; a revocation is tried again by `poll`
            logger.error("registry.lease_write_failed name=%s: %s", name, error)
            return
        self._audit_end(name, event, why)

    def _audit_end(self, name: str, event: AuditEvent, why: str = "") -> None:
        resource = self._resources.get(name)
        if resource is None or (lease := resource.lease) is None:
            return
        resource.lease = None
        self._audit.write(AuditEntry(event=event, robot=name, peer=lease.holder, token=lease.token, reason=why))
        if event == "revoked":
            self._revoked.append((lease, why))

    def _granted(self, lease: Lease, event: AuditEvent) -> Lease:
        resource = self._resources[lease.robot]
        if resource.lease != lease:
            self._audit.write(AuditEntry(event=event, robot=lease.robot, peer=lease.holder, token=lease.token))
        resource.lease = lease
        self._save()
        return lease

    def _save(self) -> None:
        """Writes changed records. On a full disk those in the database are stale until a later call can write them.

        Leases are not affected.
        """
        now = {name: msgspec.structs.replace(self.record(name), load=0.0) for name in self._resources}
        changed = [record for name, record in now.items() if self._written.get(name) != record]
        if not changed:
            return
        try:
            with self._database.change() as connection:
                rows = [(record.name, msgspec.json.encode(record)) for record in changed]
                connection.executemany("INSERT OR REPLACE INTO resource VALUES (?, ?)", rows)
        except StateError as error:
            logger.error("registry.write_failed %s", error)
            return
        for record in changed:
            before = self._written.get(record.name)
            if before is not None and before.health is not record.health:
                logger.info(
                    "resource.health name=%s was=%s is=%s %s", record.name, before.health, record.health, record.note
                )
        self._written = now


def read_registry(database: StateDatabase) -> tuple[ResourceRecord, ...]:
    """The last records of a registry, by name. Raises StateError: they cannot be read."""
    try:
        rows = database.rows("SELECT record FROM resource ORDER BY name")
        return tuple(_RECORD_DECODER.decode(record) for (record,) in rows)
    except DECODE_ERRORS as error:
        raise StateError(f"a record in {database.path} cannot be read: {error}") from None
