"""The protocol of a peer's process on its standard streams, and the rows that all peers store."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

BATCH, SIDE, FLOATS, ACTIONS = 256, 128, 16, 4  # FLOATS: of each of the two observations
RUN_S = 0.5


def arguments() -> list[str]:
    """What `benchmarks.peers.start` was given."""
    return sys.argv[2:]


def serve(measure: Callable[[], float]) -> None:
    """Reports the peer as ready, then measures once for each line of standard input."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        answers.write("0\n")
        for _ in sys.stdin:
            answers.write(f"{measure()}\n")


def say(line: str) -> None:
    """To the peer's log, flushed."""
    print(line, flush=True)


def rate(sample: Callable[[], object]) -> float:
    """Transitions a second, when one call gives a batch."""
    start, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < RUN_S:
        sample()
        calls += 1
    return calls * BATCH / elapsed


def frames(rows: int) -> np.ndarray:
    """Pictures of smooth scenes with a little noise, uint8 (rows, SIDE, SIDE, 3), as a camera's are."""
    rng, ramp = np.random.default_rng(0), np.linspace(0, 200, SIDE)
    scenes = [ramp[:, None, None] * rng.random(3) + ramp[None, :, None] * rng.random(3) / 4 for _ in range(32)]
    noisy = [np.clip(scene + rng.normal(0, 6, scene.shape), 0, 255).astype(np.uint8) for scene in scenes]
    return np.stack([noisy[row % len(noisy)] for row in range(rows)])
