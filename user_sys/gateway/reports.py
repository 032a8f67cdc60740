"""Validates the reports of peers, and writes operator commands to the audit log.

The gateway drops a report with an impossible value, and metrics that are not finite or too many. It counts and logs
them at a limited rate; the session continues.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from hal.audit import AuditEntry, AuditSink
from hal.discovery import DEVICE_KINDS
from hal.resource import Health, ResourceRecord
from user_sys.edge.control_authority import ControlState
from user_sys.episode import EpisodeSource, Phase
from user_sys.messages import NO_VERSION, EpisodeReport, MetricsReport, OperatorCommand, OperatorReply, RobotStatus
from user_sys.tunnel.keys import Role
from user_sys.tunnel.session import RateLimitedLog

REPLY_TIMEOUT_S = 5.0
MAX_PENDING = 1024
ACCEPTED_OUTCOME = "done"
MAX_PRESSES = 256

MAX_COUNT = 1 << 53
MAX_STEPS = 10_000_000  # of an episode
MAX_HZ = 10_000.0
MAX_VALUE = 1e15
MAX_METRICS = 256  # names of one robot, in the lifetime of a gateway
MAX_DEVICES = 256  # names of one peer, in the lifetime of a gateway
MAX_DEVICE_FIELDS = 64
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 1000

_AUTHORITIES = frozenset(str(state) for state in ControlState)
_PHASES = frozenset(phase.name.lower() for phase in Phase)
_SOURCES = frozenset(str(source) for source in EpisodeSource)

Report = RobotStatus | EpisodeReport | MetricsReport
_Key = tuple[str, str, str, int]  # robot, person, command, press of the e-stop


class OperatorAudit:
    """Writes one audit entry for each operator command, with the robot's reply. Any thread may call it.

    It ignores ``drive`` inputs. Repeats of one press of the e-stop are one command, with an entry for each new outcome.
    """

    def __init__(self, audit: AuditSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit, self._clock = audit, clock
        self._lock = threading.Lock()
        self._pending: dict[_Key, tuple[float, str]] = {}  # since when, and from which address
        self._presses: dict[_Key, str] = {}  # the last outcome
        self._authority: dict[str, tuple[str, str]] = {}

    def on_command(self, command: OperatorCommand, address: str) -> None:
        """A console at `address` sent a command, which may contain the address of the person's browser."""
        if command.order == "drive":
            return
        key, address = (command.robot, command.operator, command.order, command.press), command.address or address
        with self._lock:
            if awaits_reply := len(self._pending) < MAX_PENDING:
                self._pending.setdefault(key, (self._clock(), address))
        if not awaits_reply:
            self._write(key, address, "passed on")

    def on_reply(self, reply: OperatorReply) -> None:
        """A robot accepted or refused an order."""
        key = (reply.robot, reply.operator, reply.order, reply.press)
        if reply.order != "drive":
            with self._lock:
                _, address = self._pending.pop(key, (0.0, ""))
            self._write(key, address, ACCEPTED_OUTCOME if reply.accepted else f"refused: {reply.reason}")

    def on_status(self, status: RobotStatus) -> None:
        """Audits a change of the control authority over a robot, also by a device at the robot."""
        now = (status.authority, status.operator)
        if now == self._authority.get(status.robot, ("policy", "")):
            return
        self._authority[status.robot] = now
        self._audit(AuditEntry(event="authority", robot=status.robot, person=status.operator, order=status.authority))

    def expire(self) -> None:
        """Audits the commands without a reply within `REPLY_TIMEOUT_S`."""
        now = self._clock()
        with self._lock:
            late = {
                key: address for key, (since_s, address) in self._pending.items() if now - since_s > REPLY_TIMEOUT_S
            }
            for key in late:
                del self._pending[key]
        for key, address in late.items():
            self._write(key, address, f"no answer within {REPLY_TIMEOUT_S:g} s")

    def _write(self, key: _Key, address: str, outcome: str) -> None:
        robot, person, order, press = key
        if press:
            with self._lock:
                before, self._presses[key] = self._presses.get(key), outcome
                if len(self._presses) > MAX_PRESSES:
                    del self._presses[next(iter(self._presses))]
            if before == outcome:
                return
        self._audit(
            AuditEntry(event="order", robot=robot, person=person, address=address, order=order, outcome=outcome)
        )


class ReportValidator:
    """Drops impossible values from the reports of peers. One thread calls it.

    Attributes:
        rejected: the number of dropped reports and values.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self._names: dict[str, set[str]] = {}
        self._devices: dict[str, set[str]] = {}
        self._log = RateLimitedLog()

    def validate(self, report: Report, role: Role) -> Report | None:
        """The report without invalid values; None if nothing remains. A learner may report any metric."""
        match report:
            case RobotStatus():
                return self._unless(_status_error(report), report.robot, report)
            case EpisodeReport():
                return self._unless(_episode_error(report), report.robot, report)
            case MetricsReport():
                return report if role == "learner" else self._metrics(report)

    def validate_devices(self, peer: str, records: Iterable[ResourceRecord]) -> tuple[ResourceRecord, ...]:
        """The valid devices in `records`: of a device kind, and named after the peer's computer."""
        names, found = self._devices.setdefault(peer, set()), []
        for record in records:
            if record.name not in names and (len(names) >= MAX_DEVICES or not _is_device(record)):
                self._refuse(peer, f"device {record.name[:80]!r}: at most {MAX_DEVICES}, named NODE/DEVICE, are kept")
            elif _is_device(record):
                names.add(record.name)
                found.append(record)
        return tuple(found)

    def _unless(self, objection: str, robot: str, report: Report) -> Report | None:
        if not objection:
            return report
        self._refuse(robot, f"{type(report).__name__} with {objection}")
        return None

    def _metrics(self, report: MetricsReport) -> MetricsReport | None:
        if not 0 <= report.count <= MAX_COUNT:
            self._refuse(report.node, f"MetricsReport with count {report.count}")
            return None
        names = self._names.setdefault(report.node, set())
        scalars = {}
        for name, value in report.scalars.items():
            if not abs(value) <= MAX_VALUE:  # nor is a NaN
                self._refuse(report.node, f"metric {name[:80]!r} with value {value}")
            elif name not in names and (len(names) >= MAX_METRICS or not _is_short_text(name)):
                self._refuse(report.node, f"metric {name[:80]!r}: at most {MAX_METRICS} printable names are kept")
            else:
                names.add(name)
                scalars[name] = value
        return msgspec.structs.replace(report, scalars=scalars) if scalars else None

    def _refuse(self, robot: str, what: str) -> None:
        self.rejected += 1
        self._log.warn(f"report:{robot}", f"gateway.report_refused robot={robot} {what}")


def _is_device(record: ResourceRecord) -> bool:
    words = (record.name, record.model, record.node, record.found_by, *record.capabilities, *record.labels)
    notes = (record.trouble, record.note, *record.labels.values())
    return (
        record.kind in DEVICE_KINDS
        and record.name.startswith(f"{record.node}/")
        and len(words) <= MAX_DEVICE_FIELDS
        and all(map(_is_short_text, words))
        and all(len(note) <= MAX_TEXT_CHARS for note in notes)
        and min(record.memory_bytes, record.sm_count, record.cores) >= 0
        and math.isfinite(record.load)
        and record.health is Health.READY
    )


def _status_error(status: RobotStatus) -> str:
    counts = {
        name: getattr(status, name)
        for name in ("step", "outbox_chunks", "safety_interventions", "dropped_episodes", "faults")
    }
    return (
        _count_error(counts, MAX_COUNT)
        or _count_error({"policy_version": status.policy_version - NO_VERSION}, MAX_COUNT)
        or _choice_error("authority", status.authority, _AUTHORITIES)
        or _choice_error("phase", status.phase, _PHASES)
        or ("" if 0 <= status.control_hz <= MAX_HZ else f"control_hz {status.control_hz}")
        or _text_error(operator=status.operator, episode=status.episode)
        or ("" if len(status.note) <= MAX_TEXT_CHARS else f"a note of {len(status.note)} characters")
        or ("" if len(status.refused_realtime) <= MAX_TEXT_CHARS else "too long a refused_realtime")
    )


def _episode_error(report: EpisodeReport) -> str:
    return (
        _count_error({"steps": report.steps}, MAX_STEPS)
        or _count_error({"intervention_steps": report.intervention_steps}, report.steps)
        or _count_error({"policy_version": report.policy_version - NO_VERSION}, MAX_COUNT)
        or ("" if abs(report.episode_return) <= MAX_VALUE else f"episode_return {report.episode_return}")
        or _choice_error("source", report.source, _SOURCES)
        or _text_error(episode=report.episode)
    )


def _count_error(counts: dict[str, int], most: int) -> str:
    return next((f"{name} {count}" for name, count in counts.items() if not 0 <= count <= most), "")


def _choice_error(name: str, value: str, known: frozenset[str]) -> str:
    return "" if value in known else f"{name} {value[:80]!r}"


def _text_error(**words: str) -> str:
    return next((f"{name} {word[:80]!r}" for name, word in words.items() if word and not _is_short_text(word)), "")


def _is_short_text(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()
