"""What people have ordered about resources: who may not be used, since when, why and on whose word. A file of its own.

Whoever may write the file gives orders, whether or not a registry runs: a registry that runs obeys within a second, one
that starts later obeys from the start. Orders stand until a person lifts them, whatever the resource does meanwhile.

The registry: which resources there are now, how they fare, and who has them. It survives its own restart.

The health of a resource follows from three facts, each kept where it belongs; the first that applies counts:

============= ==================================================================================================
QUARANTINED   a person ordered it (`hal.registry`), or it failed too often. Its lease ends. Only a person lifts it
LOST          it was silent for too long. Its lease lapses: its holder may have it back where nobody took it since
DRAINING      a person ordered it. The lease in force goes on; no other is given
LEASED        a lease is in force (`hal.lease`)
READY         none of these
============= ==================================================================================================
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
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
MAX_TEXT_CHARS = 500  # of a reason: it goes to terminals, pages and robots, as one line

OverrideKind = Literal["quarantined", "draining"]


def operator_name(given: str | None) -> str:
    """Who gives an order: the one who is named, else who is logged in; a container may know no name of its user."""
    with contextlib.suppress(KeyError, OSError):  # which of them, depends on Python's version
        return given or getpass.getuser()
    return f"uid {os.getuid()}"


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """A resource is quarantined: not used at all; or draining: the session at work may finish, no other gets it."""

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
    """What the file says.

    Attributes:
        orders: those that stand, by resource.
        lifted: who put a resource back into use last.
    """

    version: int = VERSION
    orders: dict[str, Override] = {}
    lifted: dict[str, str] = {}


_OVERRIDES_DECODER = msgspec.json.Decoder(OverrideFile)


class OperatorOverrides:
    """Any process and thread may use it at any time; each change is on the disk before a method returns."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self.path = path
        self._clock = clock

    def read(self) -> OverrideFile:
        """Raises RegistryError: the file is damaged, or of another version; a person has to look."""
        try:
            page = _OVERRIDES_DECODER.decode(self.path.read_bytes())
        except FileNotFoundError:
            return OverrideFile()
        except (OSError, *DECODE_ERRORS) as error:
            raise RegistryError(
                f"the orders in {self.path} cannot be read ({error}); look, mend or delete it"
            ) from None
        if page.version != VERSION:
            raise RegistryError(f"the orders in {self.path} have version {page.version}; this program knows {VERSION}")
        return page

    def set_override(self, name: str, kind: OverrideKind, by: str, why: str = "") -> Override:
        """Quarantines or drains `name`; of two orders about it the newer stands. Raises RegistryError: no person."""
        order = Override(
            what=kind, by=_require_person(by), why=shorten(why, MAX_TEXT_CHARS), since_unix_s=self._clock()
        )
        with self._locked():
            page = self.read()
            self._write(OverrideFile(orders={**page.orders, name: order}, lifted=page.lifted))
        logger.warning("resource.ordered name=%s %s %s", name, kind, order.note)
        return order

    def clear_override(self, name: str, by: str) -> Override:
        """Puts `name` back into use and returns the order that stood. Raises RegistryError: none stands; no person."""
        person = _require_person(by)
        with self._locked():
            page = self.read()
            orders = dict(page.orders)
            if name not in orders:
                raise RegistryError(f"{name} is neither quarantined nor draining: there is nothing to lift")
            order = orders.pop(name)
            self._write(OverrideFile(orders=orders, lifted={**page.lifted, name: person}))
        logger.warning("resource.restored name=%s by %s; it was %s %s", name, person, order.what, order.note)
        return order

    def _write(self, page: OverrideFile) -> None:
        replace_durably(self.path, msgspec.json.encode(page))

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
                raise RegistryError("the file of orders is held by another process; try again") from None
            time.sleep(0.01)


def _require_person(name: str) -> str:
    if not (person := shorten(name, MAX_TEXT_CHARS)):
        raise RegistryError("only a named person can quarantine, drain or restore a resource: give the name")
    return person


LOSS_TIMEOUT_S = 5.0
FAULT_WINDOW_S = 60.0
MAX_FAULTS = 10  # within that time; one more is a quarantine
_NS = 1_000_000_000
_REGISTRY_NAME = "the registry"
_OVERRIDDEN = (Health.QUARANTINED, Health.DRAINING)


class Registry:
    """The resources of a run. One thread calls it and calls `poll` at least once a second."""

    def __init__(
        self,
        leases: LeaseTable,
        folder: Path,
        clock: Callable[[], int] = time.monotonic_ns,
        lost_after_s: float = LOSS_TIMEOUT_S,
        wall_clock: Callable[[], float] = time.time,
        audit: AuditLog | None = None,
    ) -> None:
        """Knows again what it knew before a restart; what does not announce itself then is lost.

        Args:
            leases: who drives what; the registry is the only one to change it.
            folder: of ``registry.json`` (what is known) and ``orders.json`` (`hal.registry`).
            clock: nanoseconds that only grow.
            lost_after_s: a resource that is silent for longer is lost and its lease ends.
            wall: seconds since 1970, for people.
            audit: by default that of `folder`.

        Raises:
            RegistryError: a file there is damaged.
        """
        self._leases, self._clock = leases, clock
        self._path = folder / "registry.json"
        self._book = OperatorOverrides(folder / "orders.json")
        self._audit = audit or AuditLog(folder / AUDIT_FILE)
        self._lost_after_ns = round(lost_after_s * _NS)
        self._known = {record.name: record for record in read_registry(folder)}
        self._seen_ns = dict.fromkeys(self._known, clock())
        self._wall = wall_clock
        self._seen_unix_s = {record.name: record.seen_unix_s for record in self._known.values()}
        self._lost: set[str] = set()
        self._faults: dict[str, deque[tuple[int, str]]] = {}
        self._orders: dict[str, Override] = {}
        self._told = {r.name: (r.health, r.note) for r in self._known.values() if r.health in _OVERRIDDEN}
        self._held = {name: lease for name in self._known if (lease := leases.lease(name)) is not None}
        self._revoked: list[tuple[Lease, str]] = []
        self._shown: tuple[ResourceRecord, ...] = ()
        self._settled_ns = clock() + self._lost_after_ns
        self._there: set[str] = set()  # announced in this registry's life, and not lost since
        self._news: list[str] = []
        self._obey()

    def announce(self, record: ResourceRecord) -> ResourceRecord:
        """Enters a resource, or takes one back that was lost, or says that it is there; returns it as it is now.

        What is described may have changed; a quarantine outlives a reconnection, and so does a lease that is in force,
        e.g. from before the registry's restart.
        """
        name = record.name
        if name not in self._known or name in self._lost:
            logger.info(
                "resource.found name=%s model=%s node=%s by=%s", name, record.model, record.node, record.found_by
            )
        if name in self._lost and name in self._known:
            self._audit.write(AuditEntry(event="returned", robot=name))
        if name not in self._there and (name in self._lost or self._clock() > self._settled_ns):
            self._news.append(name)
        self._there.add(name)
        self._lost.discard(name)
        self._known[name] = record
        self._seen_ns[name] = self._clock()
        self._seen_unix_s[name] = round(self._wall(), 3)
        return self.record(name)

    def report_fault(self, name: str, text: str) -> None:
        """The resource failed: it dropped out, or a camera froze. One that does so too often is quarantined.

        In quarantine its failures count no more: whoever reports them without end costs no writes to the disk.

        Raises:
            RegistryError: never announced.
        """
        self._require(name)
        if self._health(name)[0] is Health.QUARANTINED:
            return
        faults = self._faults.setdefault(name, deque(maxlen=MAX_FAULTS + 1))
        faults.append((self._clock(), text))
        logger.warning("resource.fault name=%s: %s", name, text)
        if len(self._recent(name)) > MAX_FAULTS:
            why = f"{len(faults)} faults within {FAULT_WINDOW_S:g} s, the last: {text}"
            self._book.set_override(name, "quarantined", _REGISTRY_NAME, why)
            faults.clear()
            self._obey()

    def poll(self) -> tuple[str, ...]:
        """Ends leases that ran out, obeys new orders, and finds what fell silent; returns that by name."""
        try:
            for robot in self._leases.expire():
                self._ended(robot, "lapsed", "it was not renewed in time")
        except OSError as error:  # they count as over all the same; the next look tries again
            logger.error("registry.lapse_not_kept %s", error)
        try:
            self._obey()
        except RegistryError as error:  # found while it runs: what stood before goes on standing
            logger.error("registry.orders_unreadable %s", error)
        silent_since = self._clock() - self._lost_after_ns
        silent = tuple(
            name for name in sorted(self._known) if name not in self._lost and self._seen_ns[name] < silent_since
        )
        self._lost.update(silent)
        for name in silent:
            self._lapse(name)
            if name in self._there:
                self._there.discard(name)
                self._news.append(name)
                self._audit.write(AuditEntry(event="lost", robot=name))
        self._keep()
        return silent

    def pop_changes(self) -> list[ResourceRecord]:
        """The resources that were lost, have returned or are new since this was asked last, as they are now.

        What is announced in the first `lost_after_s` is no news.
        """
        names, self._news = dict.fromkeys(self._news), []
        return [self.record(name) for name in names]

    def pop_revoked(self) -> list[tuple[Lease, str]]:
        """The leases that a quarantine ended since this was asked last, and why: their sessions do not know yet."""
        revoked, self._revoked = self._revoked, []
        return revoked

    def acquire(self, name: str, holder: str, min_token: int = 0) -> Lease:
        """Gives the resource to `holder`, under a token greater than every one before it and than `floor`.

        Raises:
            LeaseHeld: another session has it; names the holder.
            LeaseError: its health does not allow that; says why.
            RegistryError: never announced.
        """
        self.poll()
        record = self.record(name)
        if record.health not in (Health.READY, Health.LEASED):
            note = f" {record.note}" if record.note else ""
            raise LeaseError(f"{name} is {record.health}{note}; it cannot be leased")
        return self._granted(self._leases.acquire(name, holder, min_token), "granted")

    def renew(self, name: str, token: int) -> Lease:
        """Extends a lease, or gives one that ran out back to its holder where the robot is free still.

        Raises:
            StaleToken: another session has had it since.
            LeaseError: the lease was given back or taken away, or the resource is not in use.
            RegistryError: never announced.
        """
        self.poll()
        record = self.record(name)
        if self._leases.lease(name) is None and record.health is not Health.READY:
            raise LeaseError(f"{name} is {record.health}; its lease has ended and cannot be renewed")
        return self._granted(self._leases.renew(name, token), "reinstated")

    def release(self, name: str, token: int) -> None:
        """Gives the resource back. Raises as `renew` does."""
        self.poll()
        self._require(name)
        self._leases.release(name, token)
        self._ended(name, "released")
        self._keep()

    def record(self, name: str) -> ResourceRecord:
        """The resource as it is now. Raises RegistryError and lists the names there are."""
        known = self._require(name)
        health, note = self._health(name)
        faults = self._recent(name)
        trouble = f"{len(faults)} fault(s) of late, the last: {faults[-1]}" if faults else known.trouble
        seen = self._seen_unix_s[name] if health is Health.LOST else 0.0
        return msgspec.structs.replace(known, health=health, note=note, trouble=trouble, seen_unix_s=seen)

    def snapshot(self) -> tuple[ResourceRecord, ...]:
        """Every resource that was ever announced, by name."""
        return tuple(self.record(name) for name in sorted(self._known))

    def _health(self, name: str) -> tuple[Health, str]:
        order, lease = self._orders.get(name), self._leases.lease(name)
        if order is not None and order.health is Health.QUARANTINED:
            return Health.QUARANTINED, order.note
        if name in self._lost:
            return Health.LOST, ""
        if order is not None:
            return Health.DRAINING, order.note
        return (Health.READY, "") if lease is None else (Health.LEASED, f"by {lease.holder}")

    def _recent(self, name: str) -> list[str]:
        since = self._clock() - round(FAULT_WINDOW_S * _NS)
        return [text for when, text in self._faults.get(name, ()) if when >= since]

    def _require(self, name: str) -> ResourceRecord:
        if name not in self._known:
            raise RegistryError(f"no resource {name!r}; there are {sorted(self._known)}")
        return self._known[name]

    def _lapse(self, name: str) -> None:
        try:
            self._leases.lapse(name)
        except OSError as error:  # its time runs out anyway, since the robot is silent
            logger.error("registry.lapse_not_kept %s", error)
            return
        self._ended(name, "lapsed", "the robot is silent")

    def _obey(self) -> None:
        """Takes in what people have ordered since the last time, or since the registry that was there before."""
        page = self._book.read()
        before, self._orders = self._told, page.orders
        self._told = {name: (order.health, order.note) for name, order in self._orders.items()}
        for name, order in self._orders.items():
            if before.get(name) != self._told[name]:
                self._audit.write(AuditEntry(event=order.what, robot=name, person=order.by, reason=order.why))
            if order.health is Health.QUARANTINED:
                self._revoke(name, order.note)
        for name in sorted(before.keys() - self._orders.keys()):
            self._faults.pop(name, None)
            self._audit.write(AuditEntry(event="restored", robot=name, person=page.lifted.get(name, "")))

    def _revoke(self, name: str, why: str) -> None:
        try:
            self._leases.revoke(name)
        except OSError as error:  # the next look tries again
            logger.error("registry.not_revoked name=%s: %s", name, error)
            return
        self._ended(name, "revoked", why)

    def _granted(self, lease: Lease, what: AuditEvent) -> Lease:
        if self._held.get(lease.robot) != lease:
            self._audit.write(AuditEntry(event=what, robot=lease.robot, peer=lease.holder, token=lease.token))
        self._held[lease.robot] = lease
        self._keep()
        return lease

    def _ended(self, name: str, what: AuditEvent, why: str = "") -> None:
        lease = self._held.pop(name, None)
        if lease is not None:
            self._audit.write(AuditEntry(event=what, robot=name, peer=lease.holder, token=lease.token, reason=why))
            if what == "revoked":
                self._revoked.append((lease, why))

    def _keep(self) -> None:
        """Writes down what has changed. A full disk costs the list its freshness, not the robots their leases."""
        now = tuple(msgspec.structs.replace(record, load=0.0) for record in self.snapshot())
        if now == self._shown:
            return
        for record in now:
            before = next((old for old in self._shown if old.name == record.name), None)
            if before is not None and before.health is not record.health:
                logger.info(
                    "resource.health name=%s was=%s is=%s %s", record.name, before.health, record.health, record.note
                )
        self._shown = now
        try:
            replace_durably(self._path, msgspec.json.encode(now))
        except OSError as error:
            logger.error("registry.not_kept %s", error)


_RECORDS = msgspec.json.Decoder(tuple[ResourceRecord, ...])  # at import: reading a file evaluates no annotation


def read_registry(folder: Path) -> tuple[ResourceRecord, ...]:
    """What a registry of that folder knows, or knew last. Raises RegistryError: the file is damaged."""
    path = folder / "registry.json"
    try:
        return _RECORDS.decode(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, *DECODE_ERRORS) as error:
        raise RegistryError(
            f"the registry's file {path} cannot be read ({error}); delete it: robots enter anew"
        ) from None
