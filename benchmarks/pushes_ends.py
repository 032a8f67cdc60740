"""The ends of `benchmarks.pushes`: the command line, and a learner that pushes and leaves off in turn.

``python -m benchmarks.pushes_ends ON_S OFF_S FROM_S train ...`` is ``user-sys train ...``, whose learner is started as
``... ON_S OFF_S FROM_S learner RUN ...``: the product's own, but that from `FROM_S` seconds of training on nothing is
published for `OFF_S` seconds before each `ON_S`, and that each step is noted in `STEPS` in the run's folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from user_sys.commands import main as commands
from user_sys.run import topology

LEARNER, PRODUCTS = "learner", "user_sys.run.learner_process"
STEPS = "steps.npy"
ENDED, SECONDS, PUSHING, VERSION = range(4)
"""Columns of `STEPS`, float64: unix time at its end; how long it took; 1.0 if pushes were on; versions so far."""


def main(argv: list[str]) -> int:
    phases, (command, *rest) = argv[:3], argv[3:]
    if command == LEARNER:
        return learner(*map(float, phases), rest)
    as_it_was = topology.module_argv

    def module_argv(name: str, *args: object) -> tuple[str, ...]:
        if name != PRODUCTS:
            return as_it_was(name, *args)
        return as_it_was("benchmarks.pushes_ends", *phases, LEARNER, *args)

    topology.module_argv = module_argv  # type: ignore[attr-defined]
    return commands.main([command, *rest])


def learner(on_s: float, off_s: float, from_s: float, argv: list[str]) -> int:
    from user_sys.learner.learner import VersionPublisher
    from user_sys.learner.publisher_client import PublisherClient
    from user_sys.run import learner_process

    observe, is_due = PublisherClient.observe, VersionPublisher.is_due
    steps = list[tuple[float, float, float, float]]()
    pushing, training_s = True, 0.0

    def observe_and_record(client: PublisherClient, seconds: float) -> None:
        nonlocal pushing, training_s
        observe(client, seconds)
        steps.append((time.time(), seconds, float(pushing), float(max(0, client.version))))
        training_s += seconds
        into_s = training_s - from_s
        pushing = into_s < 0 or into_s % (on_s + off_s) >= off_s

    def is_due_in_turns(versions: VersionPublisher, updates: int) -> bool:
        return pushing and is_due(versions, updates)

    PublisherClient.observe = observe_and_record  # type: ignore[method-assign]
    VersionPublisher.is_due = is_due_in_turns  # type: ignore[method-assign]
    try:
        return learner_process.main(argv)
    finally:
        np.save(Path(argv[0]) / STEPS, np.array(steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
