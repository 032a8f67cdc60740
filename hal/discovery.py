"""Discovery: probes that look for resources on this computer, once (`discover`) or all the time (`Discoverer`).

An installed package adds a probe with an entry point of the group ``user_sys.probes``; the entry point names a callable
without arguments that returns resource records::

    def probe() -> tuple[ResourceRecord, ...]: ...

A probe does not open what it finds. What it yields is there (`Health.READY`), there with a flaw (`trouble` says which),
or known and not there now (`Health.LOST`). Each runs in a thread of its own at its own pace: one that hangs is told of
and stops no other. `Paced` gives a probe another pace than the default.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from hal.probes import probe_compute, probe_gpus
from hal.resource import Health, ResourceRecord
from hal.usb import probe_usb

logger = logging.getLogger(__name__)

PROBE_GROUP = "user_sys.probes"
DEFAULT_EVERY_S = 2.0
DEFAULT_WITHIN_S = 5.0
MAX_EVENTS = 10_000  # that nobody has taken
MAX_RECORDS = 10_000  # of one look
MAX_VANISHED = 1_000  # that are remembered, and told as LOST


class Probe(Protocol):
    """Looks for resources of one sort. An exception means that it found nothing now; the others go on."""

    def __call__(self) -> Iterable[ResourceRecord]: ...


@dataclass(frozen=True)
class Paced:
    """A probe with a pace of its own: a pause of `every_s` after each look, which may take `within_s`."""

    look: Probe
    every_s: float = DEFAULT_EVERY_S
    within_s: float = DEFAULT_WITHIN_S

    def __call__(self) -> Iterable[ResourceRecord]:
        return self.look()


@dataclass(frozen=True)
class Discovery:
    """What was found, by name, and what each probe that failed said."""

    records: tuple[ResourceRecord, ...]
    failures: Mapping[str, str]


class Change(enum.StrEnum):
    """What became of a resource, or (the last two) of a probe."""

    APPEARED = "appeared"
    ABSENT = "absent"
    CHANGED = "changed"
    DEGRADED = "degraded"
    RECOVERED = "recovered"
    VANISHED = "vanished"
    RETURNED = "returned"
    PROBE_FAILED = "probe failed"
    PROBE_WORKS = "probe works"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`record` is the resource as it is now; None where the event is the probe's. `text` is for people."""

    change: Change
    probe: str
    record: ResourceRecord | None = None
    text: str = ""


def discover(probes: Mapping[str, Probe]) -> Discovery:
    """Runs every probe once, all at the same time, each within its own limit of time.

    Where two find the same name, the one that is named first in `probes` prevails.
    """
    looks = {source: _Look(source, probe) for source, probe in probes.items()}
    found: dict[str, ResourceRecord] = {}
    failures: dict[str, str] = {}
    for source, look in looks.items():
        records, failure = look.result()
        if failure:
            failures[source] = failure
        for record in records:
            if found.setdefault(record.name, record) is not record:
                logger.warning("discovery.duplicate name=%s probe=%s", record.name, source)
    return Discovery(tuple(found[name] for name in sorted(found)), failures)


def installed_probes() -> dict[str, Probe]:
    """The built-in probes and those of installed packages; the latter are imported when they are first called."""
    probes: dict[str, Probe] = {"compute": probe_compute, "nvml": probe_gpus, "usb": probe_usb}
    for entry in entry_points(group=PROBE_GROUP):
        probes[entry.name] = lazily(entry.load)
    return probes


def lazily(load: Callable[[], Any]) -> Probe:
    """The probe that `load` gives, imported when it is first called, in its own thread; its pace counts from then."""
    return _Lazy(load)


class _Lazy:
    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self.probe: Probe | None = None

    def __call__(self) -> Iterable[ResourceRecord]:
        if self.probe is None:
            self.probe = self._load()
        return self.probe()


def _pace(probe: Probe) -> Paced:
    found = probe.probe if isinstance(probe, _Lazy) else probe
    return found if isinstance(found, Paced) else Paced(probe)


class _Look:
    """One call of one probe, in a thread of its own. What it found before it failed counts."""

    def __init__(self, source: str, probe: Probe) -> None:
        self._source, self._probe = source, probe
        self._began_s = time.monotonic()
        self._records: list[ResourceRecord] = []
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name=f"probe-{source}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def _left_s(self) -> float:
        return max(0.0, self._began_s + _pace(self._probe).within_s - time.monotonic())

    def wait(self, stop: threading.Event) -> None:
        """Blocks until the look is over, its time is up, or `stop` is set."""
        while self.running and self._left_s and not stop.is_set():
            self._thread.join(0.05)

    def result(self) -> tuple[tuple[ResourceRecord, ...], str]:
        """What it found, and how it failed; blocks until then, at most for the probe's own limit of time."""
        while self.running and (left_s := self._left_s):  # which changes once a probe is imported
            self._thread.join(min(left_s, 0.05))
        if self.running:
            return tuple(self._records), f"it has not answered within {_pace(self._probe).within_s:g} s"
        return tuple(self._records), self._failure

    def _run(self) -> None:
        try:
            found: Iterable[object] = self._probe()  # a foreign one may yield anything
            for record in found:
                if not isinstance(record, ResourceRecord):
                    raise TypeError(f"it yields {type(record).__name__}, not ResourceRecord")
                if len(self._records) == MAX_RECORDS:
                    raise ValueError(f"it yields more than {MAX_RECORDS} records")
                self._records.append(record)
        except BaseException as error:  # a foreign probe may fail in any way, by sys.exit too; the others go on
            logger.debug("discovery.probe_failed probe=%s error=%r", self._source, error)
            self._failure = f"{type(error).__name__}: {error}"


class Discoverer:
    """Looks all the time and tells what changes. A context manager: within it, each probe has a thread.

    A probe that fails or hangs says nothing about what it found before: that stays, and is degraded until the probe
    answers again. A hanging look is not called a second time before it returns. Of what vanished the newest
    `MAX_VANISHED` are remembered; what was there before that appears anew.
    """

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        self._probes = dict(probes)
        self._events: queue.Queue[Event] = queue.Queue(MAX_EVENTS)
        self._lock = threading.Lock()
        self._known: dict[str, ResourceRecord] = {}
        self._owner: dict[str, str] = {}
        self._vanished: dict[str, None] = {}  # in that order
        self._failures: dict[str, str] = {}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_looking, args=(source,), name=f"discovery-{source}", daemon=True)
            for source in self._probes
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(1.0)

    def now(self) -> Discovery:
        """Everything that is or was found, what vanished as LOST. Never blocks."""
        with self._lock:
            return Discovery(tuple(self._known[name] for name in sorted(self._known)), dict(self._failures))

    def next_event(self, wait_s: float) -> Event | None:
        """The oldest event that was not taken yet; None where there is none within `wait_s`."""
        try:
            return self._events.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _keep_looking(self, source: str) -> None:
        probe = self._probes[source]
        look: _Look | None = None
        while not self._stop.is_set():
            look = look if look is not None and look.running else _Look(source, probe)
            look.wait(self._stop)
            if not self._stop.is_set():
                self._take_in(source, *look.result())
            self._stop.wait(_pace(probe).every_s)

    def _take_in(self, source: str, records: Iterable[ResourceRecord], failure: str) -> None:
        with self._lock:
            self._note_failure(source, failure)
            seen: set[str] = set()
            for record in records:
                if record.name not in seen and self._may_tell(source, record.name):
                    self._owner[record.name] = source
                    self._vanished.pop(record.name, None)
                    seen.add(record.name)
                    self._compare(source, record)
            for name in [n for n, owner in self._owner.items() if owner == source and n not in seen]:
                record = self._known[name]
                gone = {"trouble": f"{source}: {failure}"} if failure else {"health": Health.LOST}
                self._compare(source, msgspec.structs.replace(record, **gone))
                if not failure:
                    self._vanished.setdefault(name)
            self._forget()

    def _forget(self) -> None:
        for name in [*self._vanished][: max(0, len(self._vanished) - MAX_VANISHED)]:
            del self._vanished[name], self._known[name], self._owner[name]

    def _may_tell(self, source: str, name: str) -> bool:
        """Of two probes that find the same name, the first is believed for as long as it finds it."""
        known = self._known.get(name)
        return known is None or known.health is Health.LOST or self._owner[name] == source

    def _note_failure(self, source: str, failure: str) -> None:
        if failure == self._failures.get(source, ""):
            return
        self._failures[source] = failure
        if failure:
            self._tell(Event(change=Change.PROBE_FAILED, probe=source, text=failure))
        else:
            del self._failures[source]
            self._tell(Event(change=Change.PROBE_WORKS, probe=source))

    def _compare(self, source: str, record: ResourceRecord) -> None:
        before, self._known[record.name] = self._known.get(record.name), record
        change = what_changed(before, record)
        if change is not None:
            self._tell(Event(change=change, probe=source, record=record, text=record.trouble))

    def _tell(self, event: Event) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            logger.warning("discovery.event_dropped change=%s probe=%s", event.change, event.probe)


def what_changed(before: ResourceRecord | None, now: ResourceRecord) -> Change | None:
    """The news in `now`; None where there is none. ABSENT is what is known and was not there from the start."""
    lost = now.health is Health.LOST
    if before is None:
        return Change.ABSENT if lost else Change.APPEARED
    if before.health is Health.LOST:
        return None if lost else Change.RETURNED
    if lost:
        return Change.VANISHED
    if now.trouble != before.trouble:
        return Change.DEGRADED if now.trouble else Change.RECOVERED
    return None if msgspec.structs.replace(now, load=before.load) == before else Change.CHANGED
