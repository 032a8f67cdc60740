"""The registry of a run: its resources, their health and their leases. It survives its own restart.

A resource has one health; the first row that applies counts:

============= ==================================================================================================
QUARANTINED   by an operator, or after too many faults. Its lease ends. Only an operator restores the resource
LOST          silent for too long. Its lease lapses: its holder may renew it until another session acquires it
DRAINING      by an operator. The lease in force continues; no other is given
LEASED        a lease is in force (`hal.lease`)
READY         none of these
============= ==================================================================================================

Operators' overrides are in a file of their own (`OperatorOverrides`). A registry applies it at its start and within a
second of each change. An override stays in force until an operator clears it.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import Literal

import msgspec

from hal.audit import AUDIT_FILE, AuditEntry, AuditEvent, AuditLog
from hal.decode_errors import DECODE_ERRORS
from hal.durable import replace_durably
from hal.errors import LeaseError, RegistryError
from hal.lease import Lease, LeaseTable
from hal.resource import Health, ResourceRecord

logger = logging.getLogger(__name__)

VERSION = 1
LOCK_TIMEOUT_S = 5.0
MAX_TEXT_CHARS = 500  # of a reason, which terminals, pages and robots show as one line
LOSS_TIMEOUT_S = 5.0
FAULT_WINDOW_S = 60.0
MAX_FAULTS = 10  # within the window; one more leads to a quarantine
_NS = 1_000_000_000
_REGISTRY_NAME = "the registry"
_OVERRIDDEN = (Health.QUARANTINED, Health.DRAINING)

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


class OverrideFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    Attributes:
        orders: the overrides in force, by resource.
        lifted: the operator who last cleared an override, by resource.
    """

    version: int = VERSION
    orders: dict[str, Override] = {}
    lifted: dict[str, str] = {}


# Decoders are made at import: making one evaluates annotations.
_OVERRIDES_DECODER = msgspec.json.Decoder(OverrideFile)
_RECORDS_DECODER = msgspec.json.Decoder(tuple[ResourceRecord, ...])


class OperatorOverrides:
    """The overrides in one file. Any process and thread may use it; each change is synced before a method returns."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970."""
        self.path = path
        self._clock = clock

    def read(self) -> OverrideFile:
        """Raises RegistryError: the file is damaged or has another version; a person has to repair it."""
        try:
            content = _OVERRIDES_DECODER.decode(self.path.read_bytes())
        except FileNotFoundError:
            return OverrideFile()
        except (OSError, *DECODE_ERRORS) as error:
            raise RegistryError(f"the overrides in {self.path} cannot be read ({error}): repair or delete it") from None
        if content.version != VERSION:
            raise RegistryError(
                f"the overrides in {self.path} have version {content.version}; this program reads version {VERSION}"
            )
        return content

    def set_override(self, name: str, kind: OverrideKind, by: str, why: str = "") -> Override:
        """Quarantines or drains `name`, in place of an earlier override. Raises RegistryError if `by` is empty."""
        override = Override(
            what=kind, by=_require_person(by), why=shorten(why, MAX_TEXT_CHARS), since_unix_s=self._clock()
        )
        with self._locked():
            content = self.read()
            self._write(OverrideFile(orders={**content.orders, name: override}, lifted=content.lifted))
        logger.warning("resource.override_set name=%s %s %s", name, kind, override.note)
        return override

    def clear_override(self, name: str, by: str) -> Override:
        """Restores `name` and returns its override. Raises RegistryError if it has none, or if `by` is empty."""
        person = _require_person(by)
        with self._locked():
            content = self.read()
            overrides = dict(content.orders)
            if name not in overrides:
                raise RegistryError(f"{name} is neither quarantined nor draining: there is no override to clear")
            override = overrides.pop(name)
            self._write(OverrideFile(orders=overrides, lifted={**content.lifted, name: person}))
        logger.warning(
            "resource.override_cleared name=%s by %s; it was %s %s", name, person, override.what, override.note
        )
        return override

    def _write(self, content: OverrideFile) -> None:
        replace_durably(self.path, msgspec.json.encode(content))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock_before(handle, time.monotonic() + LOCK_TIMEOUT_S)
            yield
        finally:
            os.close(handle)


def _lock_before(handle: int, deadline_s: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise RegistryError("the file of overrides is locked by another process: try again") from None
            time.sleep(0.01)


def _require_person(name: str) -> str:
    if not (person := shorten(name, MAX_TEXT_CHARS)):
        raise RegistryError("quarantine, drain and restore need the name of a person: give it")
    return person


class _Presence:
    """The last announcement of each resource, and the resources that are lost."""

    def __init__(
        self,
        known: Iterable[ResourceRecord],
        clock: Callable[[], int],
        wall_clock: Callable[[], float],
        lost_after_s: float,
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._lost_after_ns = round(lost_after_s * _NS)
        self._settled_ns = clock() + self._lost_after_ns
        self._seen_unix_s = {record.name: record.seen_unix_s for record in known}
        self._seen_ns = dict.fromkeys(self._seen_unix_s, clock())
        self._announced: set[str] = set()  # since this registry's start, and not lost since
        self._changed: list[str] = []
        self.lost: set[str] = set()

    def announce(self, name: str) -> None:
        """The resource is present now."""
        if name not in self._announced and (name in self.lost or self._clock() > self._settled_ns):
            self._changed.append(name)
        self._announced.add(name)
        self.lost.discard(name)
        self._seen_ns[name] = self._clock()
        self._seen_unix_s[name] = round(self._wall_clock(), 3)

    def find_lost(self) -> dict[str, bool]:
        """The newly lost resources by name, each with whether it was announced since this registry's start."""
        silent_since = self._clock() - self._lost_after_ns
        silent = [name for name in sorted(self._seen_ns) if name not in self.lost]
        found = {name: name in self._announced for name in silent if self._seen_ns[name] < silent_since}
        self.lost.update(found)
        self._changed += [name for name, was_announced in found.items() if was_announced]
        self._announced -= found.keys()
        return found

    def seen_unix_s(self, name: str) -> float:
        """When a lost resource was last present, in seconds since 1970; 0 for one that is not lost."""
        return self._seen_unix_s[name] if name in self.lost else 0.0

    def pop_changed(self) -> list[str]:
        """The resources that were lost, have returned or are new since the last call."""
        names, self._changed = dict.fromkeys(self._changed), []
        return list(names)


class _FaultHistory:
    """The recent faults of each resource."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._faults: dict[str, deque[tuple[int, str]]] = {}

    def add(self, name: str, text: str) -> None:
        self._faults.setdefault(name, deque(maxlen=MAX_FAULTS + 1)).append((self._clock(), text))

    def recent(self, name: str) -> list[str]:
        """The faults within `FAULT_WINDOW_S`, oldest first."""
        since_ns = self._clock() - round(FAULT_WINDOW_S * _NS)
        return [text for at_ns, text in self._faults.get(name, ()) if at_ns >= since_ns]

    def clear(self, name: str) -> None:
        self._faults.pop(name, None)


class _LeaseAudit:
    """Writes the changes of leases to the audit log, and collects the revoked leases."""

    def __init__(self, audit: AuditLog, held: dict[str, Lease]) -> None:
        self._audit, self._held = audit, held
        self._revoked: list[tuple[Lease, str]] = []

    def granted(self, lease: Lease, event: AuditEvent) -> None:
        if self._held.get(lease.robot) != lease:
            self._audit.write(AuditEntry(event=event, robot=lease.robot, peer=lease.holder, token=lease.token))
        self._held[lease.robot] = lease

    def ended(self, name: str, event: AuditEvent, why: str = "") -> None:
        lease = self._held.pop(name, None)
        if lease is not None:
            self._audit.write(AuditEntry(event=event, robot=name, peer=lease.holder, token=lease.token, reason=why))
            if event == "revoked":
                self._revoked.append((lease, why))

    def pop_revoked(self) -> list[tuple[Lease, str]]:
        revoked, self._revoked = self._revoked, []
        return revoked


class Registry:
    """The resources of a run. One thread calls it, and calls `poll` at least once a second."""

    def __init__(
        self,
        leases: LeaseTable,
        folder: Path,
        clock: Callable[[], int] = time.monotonic_ns,
        lost_after_s: float = LOSS_TIMEOUT_S,
        wall_clock: Callable[[], float] = time.time,
        audit: AuditLog | None = None,
    ) -> None:
        """Loads the records from before a restart. Those that do not announce themselves again are lost.

        Args:
            leases: the table of leases, which only this registry changes.
            folder: of ``registry.json`` (the records) and ``orders.json`` (the overrides).
            clock: monotonic nanoseconds.
            lost_after_s: a resource that is silent for longer is lost, and its lease lapses.
            wall_clock: seconds since 1970, for people.
            audit: by default that of `folder`.

        Raises:
            RegistryError: a file in `folder` is damaged.
        """
        self._leases = leases
        self._path = folder / "registry.json"
        self._overrides = OperatorOverrides(folder / "orders.json")
        self._audit = audit or AuditLog(folder / AUDIT_FILE)
        self._known = {record.name: record for record in read_registry(folder)}
        self._presence = _Presence(self._known.values(), clock, wall_clock, lost_after_s)
        self._faults = _FaultHistory(clock)
        held = {name: lease for name in self._known if (lease := leases.lease(name)) is not None}
        self._lease_audit = _LeaseAudit(self._audit, held)
        self._in_force: dict[str, Override] = {}
        self._audited = {r.name: (r.health, r.note) for r in self._known.values() if r.health in _OVERRIDDEN}
        self._written: tuple[ResourceRecord, ...] = ()
        self._apply_overrides()

    def announce(self, record: ResourceRecord) -> ResourceRecord:
        """Adds a resource, restores a lost one, or confirms its presence. Returns its present record.

        Its description may change. A quarantine outlives a reconnection, and so does a lease in force, also from before
        the registry's restart.
        """
        name, was_lost = record.name, record.name in self._presence.lost
        if name not in self._known or was_lost:
            logger.info(
                "resource.found name=%s model=%s node=%s by=%s", name, record.model, record.node, record.found_by
            )
        if was_lost:
            self._audit.write(AuditEntry(event="returned", robot=name))
        self._presence.announce(name)
        self._known[name] = record
        return self.record(name)

    def report_fault(self, name: str, text: str) -> None:
        """Counts a failure of the resource, such as a frozen camera. More than `MAX_FAULTS` lead to a quarantine.

        Failures in quarantine do not count, so that endless reports cause no writes to the disk.

        Raises:
            RegistryError: the resource was never announced.
        """
        self._require(name)
        if self._health(name)[0] is Health.QUARANTINED:
            return
        self._faults.add(name, text)
        logger.warning("resource.fault name=%s: %s", name, text)
        if (count := len(self._faults.recent(name))) > MAX_FAULTS:
            why = f"{count} faults within {FAULT_WINDOW_S:g} s, the last: {text}"
            self._overrides.set_override(name, "quarantined", _REGISTRY_NAME, why)
            self._faults.clear(name)
            self._apply_overrides()

    def poll(self) -> tuple[str, ...]:
        """Ends expired leases, applies new overrides, and finds silent resources; returns the latter by name."""
        try:
            for robot in self._leases.expire():
                self._lease_audit.ended(robot, "lapsed", "it was not renewed in time")
        except OSError as error:  # the leases count as ended; the next call tries again
            logger.error("registry.lease_write_failed %s", error)
        try:
            self._apply_overrides()
        except RegistryError as error:  # the earlier overrides stay in force
            logger.error("registry.overrides_unreadable %s", error)
        lost = self._presence.find_lost()
        for name, was_announced in lost.items():
            self._lapse(name)
            if was_announced:
                self._audit.write(AuditEntry(event="lost", robot=name))
        self._save()
        return tuple(lost)

    def pop_changes(self) -> list[ResourceRecord]:
        """The present records of resources that were lost, have returned or are new since the last call.

        An announcement in the first `lost_after_s` is no change.
        """
        return [self.record(name) for name in self._presence.pop_changed()]

    def pop_revoked(self) -> list[tuple[Lease, str]]:
        """The leases that a quarantine ended since the last call, and why: their sessions must be notified."""
        return self._lease_audit.pop_revoked()

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
        if self._leases.lease(name) is None and record.health is not Health.READY:
            raise LeaseError(f"{name} is {record.health}; its lease has ended and cannot be renewed")
        return self._granted(self._leases.renew(name, token), "reinstated")

    def release(self, name: str, token: int) -> None:
        """Ends the lease. Raises as `renew` does."""
        self.poll()
        self._require(name)
        self._leases.release(name, token)
        self._lease_audit.ended(name, "released")
        self._save()

    def record(self, name: str) -> ResourceRecord:
        """The resource's present record. Raises RegistryError with the known names."""
        known = self._require(name)
        health, note = self._health(name)
        faults = self._faults.recent(name)
        trouble = f"{len(faults)} recent fault(s), the last: {faults[-1]}" if faults else known.trouble
        seen = self._presence.seen_unix_s(name) if health is Health.LOST else 0.0
        return msgspec.structs.replace(known, health=health, note=note, trouble=trouble, seen_unix_s=seen)

    def snapshot(self) -> tuple[ResourceRecord, ...]:
        """The present records of all resources that were ever announced, by name."""
        return tuple(self.record(name) for name in sorted(self._known))

    def _health(self, name: str) -> tuple[Health, str]:
        override, lease = self._in_force.get(name), self._leases.lease(name)
        if override is not None and override.health is Health.QUARANTINED:
            return Health.QUARANTINED, override.note
        if name in self._presence.lost:
            return Health.LOST, ""
        if override is not None:
            return Health.DRAINING, override.note
        return (Health.READY, "") if lease is None else (Health.LEASED, f"by {lease.holder}")

    def _require(self, name: str) -> ResourceRecord:
        if name not in self._known:
            raise RegistryError(f"no resource {name!r}; there are {sorted(self._known)}")
        return self._known[name]

    def _lapse(self, name: str) -> None:
        try:
            self._leases.lapse(name)
        except OSError as error:  # the lease expires anyway, since the robot is silent
            logger.error("registry.lease_write_failed %s", error)
            return
        self._lease_audit.ended(name, "lapsed", "the robot is silent")

    def _apply_overrides(self) -> None:
        """Applies and audits the changes since the last call, or since the registry before this one."""
        content = self._overrides.read()
        before, self._in_force = self._audited, content.orders
        self._audited = {name: (override.health, override.note) for name, override in self._in_force.items()}
        for name, override in self._in_force.items():
            if before.get(name) != self._audited[name]:
                entry = AuditEntry(event=override.what, robot=name, person=override.by, reason=override.why)
                self._audit.write(entry)
            if override.health is Health.QUARANTINED:
                self._revoke(name, override.note)
        for name in sorted(before.keys() - self._in_force.keys()):
            self._faults.clear(name)
            self._audit.write(AuditEntry(event="restored", robot=name, person=content.lifted.get(name, "")))

    def _revoke(self, name: str, why: str) -> None:
        try:
            self._leases.revoke(name)
        except OSError as error:  # the next call of `poll` tries again
            logger.error("registry.lease_write_failed name=%s: %s", name, error)
            return
        self._lease_audit.ended(name, "revoked", why)

    def _granted(self, lease: Lease, event: AuditEvent) -> Lease:
        self._lease_audit.granted(lease, event)
        self._save()
        return lease

    def _save(self) -> None:
        """Writes changed records to the file. On a full disk the file becomes stale; leases are not affected."""
        now = tuple(msgspec.structs.replace(record, load=0.0) for record in self.snapshot())
        if now == self._written:
            return
        for record in now:
            before = next((old for old in self._written if old.name == record.name), None)
            if before is not None and before.health is not record.health:
                logger.info(
                    "resource.health name=%s was=%s is=%s %s", record.name, before.health, record.health, record.note
                )
        self._written = now
        try:
            replace_durably(self._path, msgspec.json.encode(now))
        except OSError as error:
            logger.error("registry.write_failed %s", error)


def read_registry(folder: Path) -> tuple[ResourceRecord, ...]:
    """The last records of that folder's registry. Raises RegistryError: the file is damaged."""
    path = folder / "registry.json"
    try:
        return _RECORDS_DECODER.decode(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, *DECODE_ERRORS) as error:
        raise RegistryError(
            f"the registry's file {path} cannot be read ({error}): delete it; robots announce themselves again"
        ) from None
