"""Two processes that train together: the test's own is rank 0, another one does the same at the same time."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from hal.spec import Array, RobotSpec
from user_sys.algorithms.algorithm import Algorithm, Transitions
from user_sys.algorithms.conformance import ExampleBatch
from user_sys.algorithms.network import Network
from user_sys.algorithms.ranks import Ranks, find_meeting, open_meeting
from user_sys.algorithms.rlpd import Rlpd
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.errors import WireError
from user_sys.weights.gpu.device import HostCopies
from user_sys.weights.snapshot import PolicySnapshot, Unbounded

WORLD = 2
END_S = 60.0
HERE = "127.0.0.1"
_made: dict[int, Rlpd] = {}


class Crew:
    """Both processes; `together` runs a function of a module in each, and returns what it gives here."""

    def __init__(self, ranks: Ranks, line: Connection) -> None:
        self._ranks, self._line = ranks, line

    def together(self, work: Callable[..., Any], *args: Any) -> Any:
        self._line.send((work, args))
        return work(self._ranks, *args)

    def make(
        self, config: RlpdConfig, spec: RobotSpec, seed: int, kind: type[Rlpd] = Rlpd, fetched: bool = False
    ) -> Together:
        """`fetched`: snapshots are fetched later, as from a GPU."""
        number = len(_made)
        self.together(_make, number, kind, config, spec, seed, fetched)
        return Together(self, number)


@contextmanager
def crew() -> Iterator[Crew]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    meeting = open_meeting(HERE, WORLD)
    other = context.Process(target=_serve, args=(meeting.port, theirs), daemon=True)
    other.start()
    ranks = Ranks(0, WORLD, "cpu", meeting, HERE, 1)
    try:
        yield Crew(ranks, ours)
        ours.send(None)
        other.join(END_S)
        assert other.exitcode == 0
    finally:
        other.kill()
        ranks.leave()


def _serve(port: int, line: Connection) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(1, WORLD, "cpu", find_meeting(HERE, port, WORLD), HERE, 1)
    while (told := line.recv()) is not None:
        work, args = told
        try:
            work(ranks, *args)
        except WireError:
            pass  # rank 0 raises the same, and the test looks at that
    ranks.leave()
    os._exit(0)  # as a follower's process ends


class Together(Algorithm):
    """One algorithm of both processes; each gets its part of a batch."""

    def __init__(self, crew: Crew, number: int) -> None:
        self._crew, self._number = crew, number

    def _call(self, method: str, *args: Any) -> Any:
        return self._crew.together(_call, self._number, method, *args)

    def update(self, batch: Transitions) -> None:
        self._crew.together(_update, self._number, batch)

    def scalars(self) -> dict[str, float]:
        return _made[self._number].scalars()

    def policy_weights(self) -> dict[str, Array]:
        weights: dict[str, Array] = self._call("policy_weights")
        return weights

    def policy_snapshot(self) -> PolicySnapshot:
        snapshot: PolicySnapshot = self._crew.together(_snapshot, self._number)
        return snapshot

    def state_dict(self) -> dict[str, Array]:
        state: dict[str, Array] = self._call("state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._call("load_state_dict", state)


class Scripted(Rlpd):
    """Draws the noise of a whole batch, the same everywhere, and takes its part of it."""

    def _draw_noise(self, mean: torch.Tensor) -> torch.Tensor:
        rank, world = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.world)
        if not hasattr(self, "_script"):
            self._script = torch.Generator().manual_seed(7)
        whole = torch.empty(len(mean) * world, mean.shape[1]).normal_(generator=self._script)
        return whole[rank * len(mean) : (rank + 1) * len(mean)]


def _make(
    ranks: Ranks, number: int, kind: type[Rlpd], config: RlpdConfig, spec: RobotSpec, seed: int, fetched: bool
) -> None:
    copies = HostCopies(ranks.device) if fetched else None
    _made[number] = kind(config, spec, seed=seed, copies=copies, ranks=ranks)


def _snapshot(ranks: Ranks, number: int) -> PolicySnapshot:
    snapshot = _made[number].policy_snapshot()
    if ranks.rank and not isinstance(snapshot, Mapping):
        threading.Thread(target=snapshot.fetch, args=({}, Unbounded())).start()
    return snapshot


def _call(ranks: Ranks, number: int, method: str, *args: Any) -> Any:
    return getattr(_made[number], method)(*args)


def _update(ranks: Ranks, number: int, batch: ExampleBatch) -> None:
    each = len(batch.reward) // ranks.world
    part = slice(ranks.rank * each, (ranks.rank + 1) * each)
    _made[number].update(
        ExampleBatch(
            {name: value[part].copy() for name, value in batch.observation.items()},
            {name: value[part].copy() for name, value in batch.next_observation.items()},
            *(column[part].copy() for column in (batch.action, batch.reward, batch.terminated)),
        )
    )


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


def shard_and_gather(ranks: Ranks, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, int], dict[str, Array]]:
    """Shards a network of `numbered` parameters: the rows that this process keeps, and what is gathered of all."""
    network = Network({name: numbered(shape) for name, shape in shapes.items()}, compute=dict)
    ranks.shard(network)
    shares = network.shares()
    return {name: len(share) for name, share in shares.items()}, ranks.gather(shares, network.shapes)


def agreeing(ranks: Ranks, answers: tuple[bool, ...]) -> bool:
    return ranks.agree(answers[ranks.rank])


def collected(ranks: Ranks, contents: tuple[bytes, ...]) -> list[bytes]:
    return ranks.collect(contents[ranks.rank])
