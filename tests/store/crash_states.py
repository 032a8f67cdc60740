"""Power cuts at every moment of a store's scenario: ``python crash_states.py [KILLS CHANCES]``.

`test_crash_states.py` runs a part of it and ``make chaos-store`` all. One in KILLS of the moments at which a process
can be killed is tried before the power cut (0: only those before a sync). CHANCES random outcomes of each power cut
are tried in addition to the extreme ones.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from crash_scenarios import (
    Execution,
    Violation,
    appending,
    compacting,
    execute,
    filling,
    repair_story,
)
from disk_model import Event, crash_states

from user_sys.errors import StoreError

SCENARIOS = {"appending": appending, "compacting": compacting, "filling": filling}
NAMES = (*SCENARIOS, "repairing")


@dataclass
class Result:
    """`states`: number of different states; `first`: the first violation; `sites`: the executed syncs."""

    states: int = 0
    violations: int = 0
    first: str = ""
    sites: frozenset[str] = frozenset()


def executions(name: str, kill_every: int, forget: str = "") -> Iterator[Execution]:
    """A scenario without a kill, and with kills at some of its moments."""
    if name == "repairing":
        yield repair_story(forget)
        return
    whole = execute(SCENARIOS[name], forget)
    yield whole
    for at in kill_moments(whole.disk.trace, kill_every):
        yield execute(SCENARIOS[name], forget, kill_at=at)


def kill_moments(trace: Sequence[Event], every: int) -> list[int]:
    """Before the first and the last sync of each place in the code, and at regular distances."""
    syncs = [(event.site, at) for at, event in enumerate(trace) if event.site and at]
    moments = {*dict(syncs).values(), *dict(reversed(syncs)).values()}
    if every:
        moments |= set(range(2, len(trace), every))
    return sorted(moments)


def examine(
    name: str, *, kill_every: int, chances: int, forget: str = "", seed: int = 0, check_every: int = 1
) -> Result:
    """Checks the crash states of one scenario; with `forget`, without that sync, until a violation is found.

    Args:
        check_every: of so many different states one is checked.
    """
    result, seen, rng = Result(), set[int](), random.Random(seed)
    for executed in executions(name, kill_every, forget):
        trace, first = executed.disk.trace, executed.first
        if forget:
            first = max(first, next((at for at, event in enumerate(trace) if event.kind == "forgotten"), len(trace)))
        result.sites |= {event.site for event in trace if event.site}
        for state in crash_states(executed.disk.start, trace, rng, chances if not executed.first else 0, first):
            files = frozenset(item for item in state.content.items() if item[0] != "LOCK")
            if (key := hash((state.notes[-1:], files))) in seen:
                continue
            seen.add(key)
            if len(seen) % check_every:
                continue
            result.states += 1
            if why := _broken(executed, state, forget):
                result.violations += 1
                result.first = result.first or f"event {state.at} of {executed.first}+ ({trace[state.at].kind}): {why}"
                if forget:
                    return result
    return result


def _broken(executed: Execution, state: object, forget: str) -> str:
    try:
        executed.check(state, forget)  # type: ignore[arg-type]
    except (Violation, StoreError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Verdict(NamedTuple):
    """`scenarios`: a result for each; `caught`: for each sync, the violation without it, or an empty string."""

    scenarios: dict[str, Result]
    caught: dict[str, str]

    @property
    def states(self) -> int:
        return sum(result.states for result in self.scenarios.values())


def judge(kill_every: int, chances: int, scenarios: Iterable[str] = NAMES) -> Verdict:
    """Some scenarios, and all of them again without each sync."""
    verdict = Verdict({}, {})
    for name in scenarios:
        result = verdict.scenarios[name] = examine(name, kill_every=kill_every, chances=chances)
        for site in sorted(result.sites):
            if not verdict.caught.get(site):
                mutant = examine(name, kill_every=kill_every, chances=chances, forget=site)
                verdict.caught[site] = f"in {name}, {mutant.first}" if mutant.violations else ""
    return verdict


def main(kill_every: int, chances: int) -> int:
    logging.disable(logging.CRITICAL)
    verdict = judge(kill_every, chances)
    for name, result in verdict.scenarios.items():
        print(f"{name}: {result.states} crash states, {result.violations} violations {result.first}")
    for site, how in verdict.caught.items():
        print(f"without {site}: {how or 'NOT CAUGHT'}")
    print(f"{verdict.states} crash states, {len(verdict.caught)} syncs")
    return int(any(result.violations for result in verdict.scenarios.values()) or not all(verdict.caught.values()))


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in (sys.argv[1:] or ["1", "2"]))))
