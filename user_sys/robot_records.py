"""What a run or a store knows of its robots: one small file each, written when the robot is named or comes in.

Which learners a run has: one for each embodiment that it knows a robot of, named so that a resumed run agrees.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import replace_durably
from hal.errors import SpecError
from hal.spec import RobotSpec

log = logging.getLogger(__name__)

POLL_S = 0.5
ROBOTS_FOLDER = "robots"  # the folder of a run, or of a store that belongs to none, in which the cards lie
MAX_RECORD_BYTES = 1 << 20
_SUFFIX = ".json"


class RobotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A robot of a run. `known_since_unix_ns` stays when its spec changes."""

    robot: str
    spec: RobotSpec
    known_since_unix_ns: int


def save_robot_record(folder: Path, robot: str, spec: RobotSpec) -> bool:
    """Keeps `robot`'s spec, durably; True where that was news. `robot` is safe as a file name. Raises OSError."""
    path = folder / f"{robot}{_SUFFIX}"
    known = _read_record(path)
    if known is not None and known.spec == spec:
        return False
    since = known.known_since_unix_ns if known is not None else time.time_ns()
    replace_durably(path, msgspec.json.encode(RobotRecord(robot=robot, spec=spec, known_since_unix_ns=since)))
    return True


def read_robot_records(folder: Path) -> tuple[RobotRecord, ...]:
    """The robots of a run, those known longest first. A damaged card is reported and left out."""
    cards = [card for path in folder.glob(f"*{_SUFFIX}") if (card := _read_record(path)) is not None]
    return tuple(sorted(cards, key=lambda card: (card.known_since_unix_ns, card.robot)))


def copy_robot_records(records: Iterable[RobotRecord], store: Path) -> None:
    """Leaves in `store` what is not known beside it; of unlike robots of one name the later ones get a suffix."""
    known = {card.spec.embodiment for card in robot_records_of_store(store)}
    names = {card.robot for card in read_robot_records(store / ROBOTS_FOLDER)}
    for card in records:
        if card.spec.embodiment not in known:
            name = card.robot if card.robot not in names else f"{card.robot}-{card.spec.embodiment}"
            save_robot_record(store / ROBOTS_FOLDER, name, card.spec)
            known.add(card.spec.embodiment)
            names.add(name)


def robot_records_of_store(store: Path) -> tuple[RobotRecord, ...]:
    """The robots of the run folder that `store` lies in, and those whose cards were left in the store itself."""
    return (*read_robot_records(store.resolve().parent / ROBOTS_FOLDER), *read_robot_records(store / ROBOTS_FOLDER))


def wait_for_robot_record(folder: Path, stop: threading.Event) -> RobotRecord | None:
    """Blocks until a robot is known, and returns the one known longest; None where `stop` was set first."""
    said = False
    while not (cards := read_robot_records(folder)):
        if not said:
            log.info("robots.awaited folder=%s", folder)
            said = True
        if stop.wait(POLL_S):
            return None
    return cards[0]


def _read_record(path: Path) -> RobotRecord | None:
    try:
        with path.open("rb") as file:
            card = msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=RobotRecord)
    except FileNotFoundError:
        return None
    except (*DECODE_ERRORS, SpecError) as error:
        log.warning("robots.damaged_card file=%s: %s", path, error)
        return None
    if card.robot != path.name.removesuffix(_SUFFIX):  # its name becomes that of a file where the card is copied
        log.warning("robots.misnamed_card file=%s robot=%r", path, card.robot[:80])
        return None
    return card


LEARNER = "learner"
EXIT_ORPHANED = 3
"""The exit status of a learner's process that has ended because the learner's first one had."""
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class LearnerAssignment:
    """One learner: its name, which begins with `LEARNER`, and what it learns for."""

    name: str
    spec: RobotSpec


def assign_learners(records: Iterable[RobotRecord]) -> tuple[LearnerAssignment, ...]:
    """One learner an embodiment, in the order in which `cards` name their first robots. The first is `LEARNER`."""
    plans: dict[str, LearnerAssignment] = {}
    for card in records:
        embodiment = card.spec.embodiment
        if embodiment not in plans:
            name = f"{LEARNER}-{_UNSAFE_CHARACTERS.sub('-', card.spec.model)}-{embodiment[:6]}" if plans else LEARNER
            plans[embodiment] = LearnerAssignment(name, card.spec)
    return tuple(plans.values())


def learner_from_robot(records: Sequence[RobotRecord]) -> dict[str, str]:
    """The name of each robot's learner."""
    names = {plan.spec.embodiment: plan.name for plan in assign_learners(records)}
    return {card.robot: names[card.spec.embodiment] for card in records}


def learner_process_name(learner: str, rank: int) -> str:
    """What one of a learner's processes is called as a node; the first has the learner's name."""
    return f"{learner}-rank-{rank}" if rank else learner


def is_learner_name(name: str) -> bool:
    """Whether `assign_learners` could have named a learner so: a name that is safe for a folder."""
    return name == LEARNER or bool(re.fullmatch(rf"{LEARNER}-[A-Za-z0-9-]{{1,200}}", name))


def learner_folder(parent: Path, learner: str) -> Path:
    """Where a learner's files lie: in `parent` itself for the run's first, in a folder of its name for the others."""
    return parent if learner == LEARNER else parent / learner
