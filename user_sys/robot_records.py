"""The robots of a run or store, one small file each, and the learner of each robot: one for each embodiment.

A record is written when a run's configuration names the robot, or when the robot connects. Learners are named so that a
resumed run finds their files.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import replace_durably
from hal.errors import SpecError
from hal.spec import RobotSpec

log = logging.getLogger(__name__)

ROBOTS_FOLDER = "robots"  # in a run's folder, or in a store that belongs to no run
CONFIG_FILE = "config.yaml"  # in a run's folder
SIMULATED_DRIVERS = ("sim", "fake", "gym")
MAX_RECORD_BYTES = 1 << 20
_SUFFIX = ".json"


class RobotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A robot of a run.

    Attributes:
        known_since_unix_ns: stays when the spec changes. That of a new robot is the greatest, whatever the clock.
        first_fingerprints: by embodiment that the robot has been, the oldest first, of the embodiment's first spec in
            this folder.
    """

    robot: str
    spec: RobotSpec
    known_since_unix_ns: int
    first_fingerprints: dict[str, str] = {}

    @property
    def embodiments(self) -> tuple[str, str]:
        """The embodiment's names in stores: its own, and the first fingerprint, by which earlier versions recorded."""
        return self.spec.embodiment, self.first_fingerprints.get(self.spec.embodiment, self.spec.fingerprint)


def save_robot_record(folder: Path, robot: str, spec: RobotSpec) -> bool:
    """Saves `robot`'s spec durably; True if it has changed. `robot` is safe as a file name. Raises OSError.

    A change of the embodiment is logged: no learner draws the robot's earlier steps any more.
    """
    known = _read_record(folder / f"{robot}{_SUFFIX}")
    if known is not None and known.spec == spec:
        return False
    if known is not None and known.spec.embodiment != spec.embodiment:
        log.warning("robots.embodiment_changed robot=%s: %s", robot, first_difference(known.spec, spec))
    records = read_robot_records(folder)
    newest_ns = max((record.known_since_unix_ns for record in records), default=0)
    since = max(time.time_ns(), newest_ns + 1) if known is None else known.known_since_unix_ns
    others = [record.first_fingerprints for record in records]
    first = next((each[spec.embodiment] for each in others if spec.embodiment in each), spec.fingerprint)
    firsts = {} if known is None else {**known.first_fingerprints, known.embodiments[0]: known.embodiments[1]}
    firsts.setdefault(spec.embodiment, first)
    _write_record(folder, RobotRecord(robot=robot, spec=spec, known_since_unix_ns=since, first_fingerprints=firsts))
    return True


def _write_record(folder: Path, record: RobotRecord) -> None:
    content = msgspec.json.encode(_with_infinities_as_text(msgspec.to_builtins(record)))
    replace_durably(folder / f"{record.robot}{_SUFFIX}", content)


def first_difference(before: RobotSpec, after: RobotSpec) -> str:
    """The first field in which two embodiments differ, with both values; empty if they are equal."""
    as_safe = msgspec.structs.replace(before, limits=after.limits, safe_stop=after.safe_stop)
    return _first_difference("", msgspec.to_builtins(as_safe), msgspec.to_builtins(after))


def _first_difference(name: str, before: Any, after: Any) -> str:
    """The same of plain values."""
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)) and len(before) != len(after):
        return f"{name} has {len(after)} elements instead of {len(before)}"
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return f"{name} is {after} instead of {before}" if before != after else ""
    found = (_first_difference(f"{name}.{key}".lstrip("."), before[key], after.get(key)) for key in before)
    return next(filter(None, found), "")


def _with_infinities_as_text(value: Any) -> Any:
    """Plain values for JSON, which has no infinity: the bounds of an unbounded element become ``"inf"``."""
    if isinstance(value, dict):
        return {name: _with_infinities_as_text(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_infinities_as_text(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def read_robot_records(folder: Path) -> tuple[RobotRecord, ...]:
    """The robots of a run, those known longest first. Damaged records are logged and skipped."""
    records = [record for path in folder.glob(f"*{_SUFFIX}") if (record := _read_record(path)) is not None]
    return tuple(sorted(records, key=lambda record: (record.known_since_unix_ns, record.robot)))


def copy_robot_records(records: Iterable[RobotRecord], store: Path) -> None:
    """Saves in `store` the records of which it lacks a name of the embodiment. A robot's name that is taken gets a
    suffix.
    """
    known = {name for record in robot_records_of_store(store) for name in record.embodiments}
    names = {record.robot for record in read_robot_records(store / ROBOTS_FOLDER)}
    for record in records:
        if not known.issuperset(record.embodiments):
            name = record.robot if record.robot not in names else f"{record.robot}-{record.embodiments[1]}"
            _write_record(store / ROBOTS_FOLDER, msgspec.structs.replace(record, robot=name))
            known.update(record.embodiments)
            names.add(name)


def robot_records_of_store(store: Path) -> tuple[RobotRecord, ...]:
    """The robots of the run folder that contains `store`, and those whose records are in the store itself."""
    return (
        *read_robot_records(store.resolve().parent / ROBOTS_FOLDER),
        *read_robot_records(store / ROBOTS_FOLDER),
    )


def embodiment_names(store: Path, spec: RobotSpec) -> tuple[str, ...]:
    """The names under which `store` has the episodes of the embodiment of `spec`."""
    records = [record for record in robot_records_of_store(store) if record.spec.embodiment == spec.embodiment]
    return tuple(sorted({spec.embodiment, spec.fingerprint}.union(*(record.embodiments for record in records))))


def _read_record(path: Path) -> RobotRecord | None:
    try:
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=RobotRecord, strict=False)
    except FileNotFoundError:
        return None
    except (*DECODE_ERRORS, SpecError) as error:
        log.warning("robots.record_damaged file=%s: %s", path, error)
        return None
    if record.robot != path.name.removesuffix(_SUFFIX):  # its name becomes a file name when the record is copied
        log.warning("robots.record_misnamed file=%s robot=%r", path, record.robot[:80])
        return None
    return record


# Learners -------------------------------------------------------------------------------------------------------------

LEARNER = "learner"
EXIT_ORPHANED = 3
"""The exit status of a learner's process after another process of that learner has ended."""
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9]+")


def assign_learners(records: Iterable[RobotRecord]) -> dict[str, RobotSpec]:
    """The name of each learner, and the spec of its embodiment: of those embodiments that a robot has now.

    An embodiment keeps its learner's name for the whole run. `LEARNER` is that of the first embodiment of the robot
    known longest, also while no robot has it: it has that embodiment's training. The other names begin with `LEARNER`.
    They are in the order in which the records had the embodiments.
    """
    records = tuple(records)
    first = {record.spec.embodiment: record for record in reversed(records)}
    learners: dict[str, RobotSpec] = {}
    embodiments = dict.fromkeys(each for r in records for each in (*r.first_fingerprints, r.spec.embodiment))
    for number, embodiment in enumerate(embodiments):
        if (record := first.get(embodiment)) is not None:
            model = _UNSAFE_CHARACTERS.sub("-", record.spec.model)
            learners[f"{LEARNER}-{model}-{record.embodiments[1][:6]}" if number else LEARNER] = record.spec
    return learners


def learner_from_embodiment(records: Iterable[RobotRecord]) -> dict[str, str]:
    """The name of each embodiment's learner."""
    return {spec.embodiment: name for name, spec in assign_learners(records).items()}


def learner_from_robot(records: Sequence[RobotRecord]) -> dict[str, str]:
    """The name of each robot's learner, in the order of `assign_learners`."""
    names = learner_from_embodiment(records)
    return {record.robot: name for e, name in names.items() for record in records if record.spec.embodiment == e}


def first_learner(learners: Iterable[str]) -> str:
    """The run's first learner, of names in the order of `assign_learners`: the next while no robot has `learner`."""
    return next(iter(learners), LEARNER)


def learner_process_name(learner: str, rank: int) -> str:
    """The name of one of a learner's processes; rank 0 has the learner's name."""
    return f"{learner}-rank-{rank}" if rank else learner


def is_learner_name(name: str) -> bool:
    """Whether `assign_learners` could have made this name, so that it is safe for a folder."""
    return name == LEARNER or bool(re.fullmatch(rf"{LEARNER}-[A-Za-z0-9-]{{1,200}}", name))


def learner_folder(parent: Path, learner: str) -> Path:
    """The folder of a learner's files: `parent` itself for the run's first, a folder of its name for the others."""
    return parent if learner == LEARNER else parent / learner
