"""Which learners a run has: one for each embodiment that it knows a robot of, named so that a resumed run agrees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hal.spec import RobotSpec
from user_sys.robot_cards import RobotCard

LEARNER = "learner"
ORPHANED = 3
"""The exit status of a learner's process that has ended because the learner's first one had."""
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class LearnerPlan:
    """One learner: its name, which begins with `LEARNER`, and what it learns for."""

    name: str
    spec: RobotSpec


def learners_of(cards: Iterable[RobotCard]) -> tuple[LearnerPlan, ...]:
    """One learner an embodiment, in the order in which `cards` name their first robots. The first is `LEARNER`."""
    plans: dict[str, LearnerPlan] = {}
    for card in cards:
        embodiment = card.spec.embodiment
        if embodiment not in plans:
            name = f"{LEARNER}-{_UNSAFE.sub('-', card.spec.model)}-{embodiment[:6]}" if plans else LEARNER
            plans[embodiment] = LearnerPlan(name, card.spec)
    return tuple(plans.values())


def learner_from_robot(cards: Sequence[RobotCard]) -> dict[str, str]:
    """The name of each robot's learner."""
    names = {plan.spec.embodiment: plan.name for plan in learners_of(cards)}
    return {card.robot: names[card.spec.embodiment] for card in cards}


def process_name(learner: str, rank: int) -> str:
    """What one of a learner's processes is called as a node; the first has the learner's name."""
    return f"{learner}-rank-{rank}" if rank else learner


def is_learner(name: str) -> bool:
    """Whether `learners_of` could have named a learner so: a name that is safe for a folder."""
    return name == LEARNER or bool(re.fullmatch(rf"{LEARNER}-[A-Za-z0-9-]{{1,200}}", name))


def folder_of(parent: Path, learner: str) -> Path:
    """Where a learner's files lie: in `parent` itself for the run's first, in a folder of its name for the others."""
    return parent if learner == LEARNER else parent / learner
