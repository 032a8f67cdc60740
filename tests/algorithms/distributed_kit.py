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
from user_sys.algorithms.algorithm import Algorithm, TransitionArrays
from user_sys.algorithms.conformance import ExampleBatch
from user_sys.algorithms.distributed import FunctionalModule, TrainingGroup, create_rendezvous, join_rendezvous
from user_sys.algorithms.rlpd import Rlpd
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.errors import WireError
from user_sys.weights.gpu_copy import HostCopier
from user_sys.weights.snapshot import PolicySnapshot, UnlimitedBudget

WORLD = 2
END_S = 60.0
HERE = "127.0.0.1"
_made: dict[int, Rlpd] = {}


class RankProcesses:
    """Both processes; `run` runs a function of a module in each, and returns what it gives here."""

    def __init__(self, ranks: TrainingGroup, line: Connection) -> None:
        self._group, self._line = ranks, line

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        self._line.send((work, args))
        return work(self._group, *args)

    def make(
        self, config: RlpdConfig, spec: RobotSpec, seed: int, kind: type[Rlpd] = Rlpd, fetched: bool = False
    ) -> GroupAlgorithm:
        """`fetched`: snapshots are fetched later, as from a GPU."""
        number = len(_made)
        self.run(_make, number, kind, config, spec, seed, fetched)
        return GroupAlgorithm(self, number)


@contextmanager
def rank_processes() -> Iterator[RankProcesses]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    meeting = create_rendezvous(HERE, WORLD)
    other = context.Process(target=_serve, args=(meeting.port, theirs), daemon=True)
    other.start()
    ranks = TrainingGroup(0, WORLD, "cpu", meeting, HERE, 1)
    try:
        yield RankProcesses(ranks, ours)
        ours.send(None)
        other.join(END_S)
        assert other.exitcode == 0
    finally:
        other.kill()
        ranks.destroy()


def _serve(port: int, line: Connection) -> None:
    torch.set_num_threads(1)
    ranks = TrainingGroup(1, WORLD, "cpu", join_rendezvous(HERE, port, WORLD), HERE, 1)
    while (told := line.recv()) is not None:
        work, args = told
        try:
            work(ranks, *args)
        except WireError:
            pass  # rank 0 raises the same, and the test looks at that
    ranks.destroy()
    os._exit(0)  # as a follower's process ends


class GroupAlgorithm(Algorithm):
    """One algorithm of both processes; each gets its part of a batch."""

    def __init__(self, crew: RankProcesses, number: int) -> None:
        self._crew, self._number = crew, number

    def _call(self, method: str, *args: Any) -> Any:
        return self._crew.run(_call, self._number, method, *args)

    def update(self, batch: TransitionArrays) -> None:
        self._crew.run(_update, self._number, batch)

    def scalars(self) -> dict[str, float]:
        return _made[self._number].scalars()

    def policy_weights(self) -> dict[str, Array]:
        weights: dict[str, Array] = self._call("policy_weights")
        return weights

    def policy_snapshot(self) -> PolicySnapshot:
        snapshot: PolicySnapshot = self._crew.run(_snapshot, self._number)
        return snapshot

    def state_dict(self) -> dict[str, Array]:
        state: dict[str, Array] = self._call("state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._call("load_state_dict", state)


class ScriptedRlpd(Rlpd):
    """Draws the noise of a whole batch, the same everywhere, and takes its part of it."""

    def _draw_noise(self, mean: torch.Tensor) -> torch.Tensor:
        rank, world = (0, 1) if self._group is None else (self._group.rank, self._group.world)
        if not hasattr(self, "_script"):
            self._script = torch.Generator().manual_seed(7)
        whole = torch.empty(len(mean) * world, mean.shape[1]).normal_(generator=self._script)
        return whole[rank * len(mean) : (rank + 1) * len(mean)]


def _make(
    ranks: TrainingGroup, number: int, kind: type[Rlpd], config: RlpdConfig, spec: RobotSpec, seed: int, fetched: bool
) -> None:
    copies = HostCopier(ranks.device) if fetched else None
    _made[number] = kind(config, spec, seed=seed, copier=copies, group=ranks)


def _snapshot(ranks: TrainingGroup, number: int) -> PolicySnapshot:
    snapshot = _made[number].policy_snapshot()
    if ranks.rank and not isinstance(snapshot, Mapping):
        threading.Thread(target=snapshot.fetch, args=({}, UnlimitedBudget())).start()
    return snapshot


def _call(ranks: TrainingGroup, number: int, method: str, *args: Any) -> Any:
    return getattr(_made[number], method)(*args)


def _update(ranks: TrainingGroup, number: int, batch: ExampleBatch) -> None:
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


def shard_and_gather(
    ranks: TrainingGroup, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, int], dict[str, Array]]:
    """Shards a network of `numbered` parameters: the rows that this process keeps, and what is gathered of all."""
    network = FunctionalModule({name: numbered(shape) for name, shape in shapes.items()}, compute=dict)
    ranks.shard(network)
    shares = network.local_parameters()
    return {name: len(share) for name, share in shares.items()}, ranks.gather_tensors(shares, network.shapes)


def run_all_true(ranks: TrainingGroup, answers: tuple[bool, ...]) -> bool:
    return ranks.all_true(answers[ranks.rank])


def run_gather_bytes(ranks: TrainingGroup, contents: tuple[bytes, ...]) -> list[bytes]:
    return ranks.gather_bytes(contents[ranks.rank])
