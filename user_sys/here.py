"""What a run gets of this computer, where it is on no cluster but one of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hal.cards import UUID, VISIBLE
from hal.discovery import Discovery, discover
from hal.errors import PlacementError
from hal.placement import Placement
from hal.resource import Kind, ResourceRecord
from user_sys.candidates import (
    QUICKER,
    Claims,
    Patience,
    available,
    claim_on,
    failures,
    narrowed,
    not_built,
    place_run,
)
from user_sys.compose import probes
from user_sys.topology import RunConfig


class Here:
    """A run's robots and GPUs. One thread calls it; after leaving it other runs may have them.

    Attributes:
        config: the run, with the robots alone that it drives.
        gpus: the UUIDs of the GPUs that meet its learners' needs; none where whoever started the run has said himself
            which it is to see.
        policy_gpus: likewise, of its policy process.
    """

    def __init__(self, config: RunConfig, run: str, runs: Path | None = None) -> None:
        """Args:
            runs: the folder that has the run's, and others' whose orders count; None is the config's.

        Raises:
            ConfigError: a robot cannot be built; one that the run may choose is passed over then.
        """
        self.config, self._runs = config, runs
        self.gpus: tuple[str, ...] = ()
        self.policy_gpus: tuple[str, ...] = ()
        self._run = f"run {run}"
        self._claims = Claims(self._run)
        robots = config.robot_requests() if config.chooses_robots else ()
        self._requests = (*robots, *config.compute_requests(), *config.policy_requests())
        self._looks = probes(config.robots, lenient=config.chooses_robots) if self._requests else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._claims.release()

    def take(self, say: Callable[[str], None]) -> None:
        """Blocks until the run has what it needs; says, once each time that it changes, what it waits for.

        A run that drives all of its `robots` does not wait for them: the driver process of each does.

        Raises:
            PlacementError: this computer would not have all of it even if nobody used any of it.
        """
        found = discover(self._looks)
        for text in not_built(found):
            say(text)
        self._place(found, unused=True)
        patience = Patience(self._run, say)
        while why := self._try(found):
            patience.wait(why)
            found = discover(self._looks)
        if not self.config.chooses_robots:
            self._claims.take_each(robot.name for robot in self.config.robots)

    def _try(self, found: Discovery) -> str:
        """Why the run cannot have what it needs, or empty; nothing is held in the first case."""
        try:
            placement = self._place(found)
        except PlacementError as error:
            return str(error)
        split = len(placement.assigned) - len(self.config.policy_requests())
        chosen, policy = _flat(placement.assigned[:split]), _flat(placement.assigned[split:])
        robots = {record.name for record in chosen if record.kind is Kind.ROBOT}
        if not self._claims.take(filter(None, map(claim_on, (*chosen, *policy)))):
            return QUICKER
        self.config = narrowed(self.config, robots)
        self.gpus, self.policy_gpus = _visible(chosen), _visible(policy)
        return ""

    def _place(self, found: Discovery, *, unused: bool = False) -> Placement:
        records = available(self.config, found.records, runs=self._runs, unused=unused)
        return place_run(self.config, self._requests, records, remarks=failures(found))


def _flat(assigned: Sequence[Sequence[ResourceRecord]]) -> list[ResourceRecord]:
    return [record for records in assigned for record in records]


def _visible(chosen: Iterable[ResourceRecord]) -> tuple[str, ...]:
    uuids = [record.labels.get(UUID, "") for record in chosen if record.kind is Kind.GPU]
    return () if VISIBLE in os.environ else tuple(uuid for uuid in uuids if uuid)
