"""Simulates edges, gateway, store and learner: ``python tests/tunnel/simulate.py [--seeds N | --seed N -v]``.

A seed determines its run. A failed seed is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from sim_world import SimWorld


@dataclass
class Tally:
    """The results of some seeds; `failed`: each failed seed and its reason."""

    seeds: int = 0
    chunks: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)


def simulate(seed: int, tally: Tally, verbose: bool = False) -> bool:
    """Runs one seed. Returns whether every invariant held."""
    world = SimWorld(seed, verbose)
    tally.seeds += 1
    try:
        world.run()
    except Exception as error:
        if verbose:
            traceback.print_exc()
        tally.failed.append((seed, f"{type(error).__name__}: {error}"))
    tally.chunks += sum(map(len, world.promised.values()))
    tally.events += world.runtime.events
    tally.faults += world.faults
    return not tally.failed


def simulate_all(seeds: Iterable[int], most_failures: int = 1) -> Tally:
    """Runs seeds until so many have failed."""
    tally = Tally()
    for seed in seeds:
        if not simulate(seed, tally) and len(tally.failed) >= most_failures:
            break
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what happens")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="           %(message)s")
    logging.disable(logging.NOTSET if asked.verbose else logging.CRITICAL)
    start_s = time.monotonic()
    if asked.seed is not None:
        tally = Tally()
        simulate(asked.seed, tally, asked.verbose)
    else:
        tally = simulate_all(range(asked.first, asked.first + asked.seeds), most_failures=5)
    faults = ", ".join(f"{count} {name}" for name, count in sorted(tally.faults.items()))
    print(f"{tally.seeds} seeds, {tally.events} events, {tally.chunks} chunks recorded; {faults}")
    print(f"{len(tally.failed)} failed, {time.monotonic() - start_s:.1f} s")
    for seed, why in tally.failed:
        print(f"seed {seed} failed: {why}\n  again: python tests/tunnel/simulate.py --seed {seed} -v")
    return bool(tally.failed)


if __name__ == "__main__":
    sys.exit(main())
