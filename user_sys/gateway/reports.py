"""What a robot reports about itself, bounded before people and programs use it.

A report with a value that no robot can have is left out. A metric that is not finite, or one too many, is left out of
its report. What is left out is counted and logged sparingly; the session goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from hal.resource import Health, ResourceRecord
from user_sys.edge.authority import State
from user_sys.episode import Phase, Source
from user_sys.hardware.devices import KINDS
from user_sys.messages import EpisodeReport, MetricsReport, RobotStatus
from user_sys.tunnel.gatekeeper import SparingLog
from user_sys.tunnel.keys import Role
from user_sys.weights.records import NO_VERSION

MAX_COUNT = 1 << 53
MAX_STEPS = 10_000_000  # of an episode
MAX_HZ = 10_000.0
MAX_VALUE = 1e15
MAX_METRICS = 256  # names of one robot, in a gateway's life
MAX_DEVICES = 256  # names of one peer, in a gateway's life
MAX_DEVICE_WORDS = 64
MAX_NAME_CHARS = 256
MAX_WORDS_CHARS = 1000

_AUTHORITIES = frozenset(str(state) for state in State)
_PHASES = frozenset(phase.name.lower() for phase in Phase)
_SOURCES = frozenset(str(source) for source in Source)

Report = RobotStatus | EpisodeReport | MetricsReport


class ReportBounds:
    """One thread calls it.

    Attributes:
        refused: reports and values that were left out.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._names: dict[str, set[str]] = {}
        self._devices: dict[str, set[str]] = {}
        self._log = SparingLog()

    def bounded(self, report: Report, role: Role) -> Report | None:
        """The report without what is out of bounds; None if nothing is left. A learner may report any metric."""
        match report:
            case RobotStatus():
                return self._unless(_status_objection(report), report.robot, report)
            case EpisodeReport():
                return self._unless(_episode_objection(report), report.robot, report)
            case MetricsReport():
                return report if role == "learner" else self._metrics(report)

    def devices(self, peer: str, records: Iterable[ResourceRecord]) -> tuple[ResourceRecord, ...]:
        """Those of `records` that can be devices of a computer, named after it. Robots report themselves."""
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
            elif name not in names and (len(names) >= MAX_METRICS or not _is_word(name)):
                self._refuse(report.node, f"metric {name[:80]!r}: at most {MAX_METRICS} printable names are kept")
            else:
                names.add(name)
                scalars[name] = value
        return msgspec.structs.replace(report, scalars=scalars) if scalars else None

    def _refuse(self, robot: str, what: str) -> None:
        self.refused += 1
        self._log.warn(f"report:{robot}", f"gateway.report_refused robot={robot} {what}")


def _is_device(record: ResourceRecord) -> bool:
    words = (record.name, record.model, record.node, record.found_by, *record.capabilities, *record.labels)
    notes = (record.trouble, record.note, *record.labels.values())
    return (
        record.kind in KINDS
        and record.name.startswith(f"{record.node}/")
        and len(words) <= MAX_DEVICE_WORDS
        and all(map(_is_word, words))
        and all(len(note) <= MAX_WORDS_CHARS for note in notes)
        and min(record.memory_bytes, record.sm_count, record.cores) >= 0
        and math.isfinite(record.load)
        and record.health is Health.READY
    )


def _status_objection(status: RobotStatus) -> str:
    counts = {
        name: getattr(status, name)
        for name in ("step", "outbox_chunks", "safety_interventions", "dropped_episodes", "faults")
    }
    return (
        _count_objection(counts, MAX_COUNT)
        or _count_objection({"policy_version": status.policy_version - NO_VERSION}, MAX_COUNT)
        or _unless_in("authority", status.authority, _AUTHORITIES)
        or _unless_in("phase", status.phase, _PHASES)
        or ("" if 0 <= status.control_hz <= MAX_HZ else f"control_hz {status.control_hz}")
        or _words_objection(operator=status.operator, episode=status.episode)
        or ("" if len(status.note) <= MAX_WORDS_CHARS else f"a note of {len(status.note)} characters")
        or ("" if len(status.refused_realtime) <= MAX_WORDS_CHARS else "too long a refused_realtime")
    )


def _episode_objection(report: EpisodeReport) -> str:
    return (
        _count_objection({"steps": report.steps}, MAX_STEPS)
        or _count_objection({"intervention_steps": report.intervention_steps}, report.steps)
        or _count_objection({"policy_version": report.policy_version - NO_VERSION}, MAX_COUNT)
        or ("" if abs(report.episode_return) <= MAX_VALUE else f"episode_return {report.episode_return}")
        or _unless_in("source", report.source, _SOURCES)
        or _words_objection(episode=report.episode)
    )


def _count_objection(counts: dict[str, int], most: int) -> str:
    return next((f"{name} {count}" for name, count in counts.items() if not 0 <= count <= most), "")


def _unless_in(name: str, value: str, known: frozenset[str]) -> str:
    return "" if value in known else f"{name} {value[:80]!r}"


def _words_objection(**words: str) -> str:
    return next((f"{name} {word[:80]!r}" for name, word in words.items() if word and not _is_word(word)), "")


def _is_word(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()
