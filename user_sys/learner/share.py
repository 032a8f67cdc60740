"""One process's share of the training: it follows the store, draws its part of each batch, and updates with the others.

A learner of one process has all of it. Of several, each has a `Share`; rank 0's is the learner's own, and whatever
is done with that the others do at the same time (`Share.obey`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.errors import RunError
from user_sys.learner.checkpoint import Checkpoint, latest
from user_sys.learner.device import CPU
from user_sys.learner.learner_config import LearnerConfig
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.features import Features
from user_sys.replay.mix import DemoOnline
from user_sys.replay.prefetch import Prefetcher
from user_sys.replay.sampler import Sampler
from user_sys.replay.shapes import Transitions
from user_sys.replay.where import Where
from user_sys.store.store import StoreReader
from user_sys.weights.snapshot import DeviceWeights, PolicySnapshot, Unbounded

if TYPE_CHECKING:
    from user_sys.algorithms.ranks import Ranks

GIVE_S = 300.0
"""Rank 0 fetches a share at the governor's pace."""
SAMPLER = "sampler."  # before the names of the sampler's arrays in a checkpoint
RANK = "rank."  # ... and before that and the number of its process, where that is not 0
PROCESSES = "processes"  # how many made a checkpoint


class Turn(IntEnum):
    """What all processes do next."""

    FOLLOW = 0
    UPDATE = 1
    WEIGHTS = 2
    SNAPSHOT = 3
    STATE = 4
    LOAD = 5
    END = 6


class Share:
    """One thread constructs it and calls it.

    Attributes:
        mix: the demonstrations and the online steps there are, whatever is drawn from.
        ready: every process has something to draw, as of the newest `follow`.
    """

    def __init__(
        self,
        config: LearnerConfig,
        spec: RobotSpec,
        reader: StoreReader,
        *,
        features: Sequence[str],
        seed: int,
        device: str,
        ranks: Ranks | None,
    ) -> None:
        """Args:
        device: torch's name of what trains; for a GPU, batches lie in page-locked memory.
        ranks: this process among others; None where it is alone.

        Raises:
            ConfigError: settings that do not fit the robot or the device.
        """
        from user_sys.algorithms.rlpd import Rlpd  # torch: the learner's processes alone need it
        from user_sys.weights.gpu.device import host_copies

        rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
        self._ranks, self._rank, self._world, self._publish = ranks, rank, world, config.publish
        self._giver = ThreadPoolExecutor(1, thread_name_prefix="weights-give")  # its thread starts when it is needed
        self._giving: Future[None] | None = None
        self.ready = False
        copies = host_copies(device, config.publish)
        self.algorithm = Rlpd(
            config.algorithm, spec, features=features, seed=seed, device=device, copies=copies, ranks=ranks
        )
        here = Where(embodiments=frozenset({spec.embodiment}))
        self.replay = ReplayBuffer(reader, Features.of(spec), cache_bytes=config.cache_bytes // world, where=here)
        self.mix = DemoOnline(spec.embodiment, config.demo_fraction)
        chooser = self.mix if config.sampler.plain else config.sampler.chooser(spec.embodiment, config.demo_fraction)
        if chooser is not self.mix:
            self.replay.listen(self.mix.update)
        steps = Transitions(config.sampler.n_step, config.algorithm.discount)
        size, pin = config.batch_size // world, device != CPU
        self._sampler = Sampler(self.replay, chooser, steps, size, seed=seed, rank=rank, world=world, pin=pin)
        self._batches = Prefetcher(self._sampler, config.batches_ahead)

    def close(self) -> None:
        """Ends the threads. Calling it twice is harmless."""
        self._giver.shutdown(wait=False)
        self._batches.close()
        self.replay.close()

    def obey(self, checkpoints: Path) -> None:
        """Does what rank 0 does, until that ends the training; `checkpoints` is its folder. Not for rank 0.

        Raises:
            RunError: there is not the checkpoint there that rank 0 has found.
            StoreError: the store cannot be read.
        """
        assert self._ranks is not None  # one process has nobody to obey
        while (heard := self._ranks.hear())[0] != Turn.END:
            match heard:
                case Turn.FOLLOW, _:
                    self.follow()
                case Turn.UPDATE, _:
                    self.update()
                case Turn.WEIGHTS, _:
                    self.weights()
                case Turn.SNAPSHOT, _:
                    self._give(self.snapshot())
                case Turn.STATE, _:
                    self.state()
                case Turn.LOAD, updates:
                    checkpoint = latest(checkpoints)
                    if checkpoint is None or checkpoint.updates != updates:
                        raise RunError(f"the checkpoint of update {updates} in {checkpoints} has vanished")
                    self.load(checkpoint)
        if self._giving is not None:
            self._giving.result(GIVE_S)

    def _tell(self, turn: Turn, detail: int = 0) -> None:
        if self._ranks is not None and self._rank == 0:
            self._ranks.tell(turn, detail)

    def follow(self) -> None:
        """Takes in what is new in the store."""
        self._tell(Turn.FOLLOW)
        self.replay.refresh()
        self.ready = len(self._sampler) > 0
        if self._ranks is not None:
            self.ready = self._ranks.agree(self.ready)

    def update(self) -> None:
        """Makes one update, of all processes together, with a batch that each draws its part of."""
        self._tell(Turn.UPDATE)
        self.batch = self._batches.next()
        self.algorithm.update(self.batch)
        if self._sampler.hears:
            self._sampler.feedback(self.batch, self.algorithm.td_errors())

    def weights(self) -> dict[str, Array]:
        """See `Algorithm.policy_weights`; of several processes rank 0 has them, the others nothing."""
        self._tell(Turn.WEIGHTS)
        return self.algorithm.policy_weights()

    def snapshot(self) -> PolicySnapshot:
        """See `Algorithm.policy_snapshot`; likewise. Where the next ones are to be compared with it, several processes
        wait until it is there."""
        self._tell(Turn.SNAPSHOT)
        compared = self._ranks is not None and self._publish.kl > 0
        return self.algorithm.policy_weights() if compared else self.algorithm.policy_snapshot()

    def _give(self, snapshot: PolicySnapshot) -> None:
        """Has another thread fetch it, which ends when rank 0 has it, one after the other. Not for rank 0, whose envoy
        does it."""
        if isinstance(snapshot, Mapping):
            return
        if self._giving is not None:
            self._giving.result(GIVE_S)
        self._giving = self._giver.submit(_fetch, snapshot)

    def moved(self, former: PolicySnapshot) -> float:
        """How far the policy has moved from `former` weights: a mean over this process's newest batch, in nats."""
        newest = None if self._ranks is None else self.weights()
        return self.algorithm.policy_kl(former, self.batch, newest)

    def state(self) -> dict[str, Array]:
        """Copies of all that determines later updates and is not in the store; of several processes rank 0 has the
        state of them all, the others nothing."""
        self._tell(Turn.STATE)
        own = {SAMPLER + name: value for name, value in self._batches.state_dict().items()}
        state = self.algorithm.state_dict()
        return {**state, **own} if self._ranks is None else {**state, **_of_all(own, self._ranks)}

    def load(self, checkpoint: Checkpoint) -> bool:
        """Takes up where `checkpoint` was made; the store is to have been followed.

        False where another number of processes made it: networks and optimizers are taken then, and the sampler begins
        anew.

        Raises:
            WireError: it is of other settings or another robot.
        """
        self._tell(Turn.LOAD, checkpoint.updates)
        arrays = checkpoint.arrays
        self.algorithm.load_state_dict({k: v for k, v in arrays.items() if not k.startswith((SAMPLER, RANK))})
        if checkpoint.scalars.get(PROCESSES, 1) != self._world:
            return False
        prefix = f"{RANK}{self._rank}.{SAMPLER}" if self._rank else SAMPLER
        own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        self._batches.load_state_dict(own)
        return True


def _fetch(weights: DeviceWeights) -> None:
    weights.wait()
    weights.fetch({}, Unbounded())


def _of_all(own: Mapping[str, Array], ranks: Ranks) -> dict[str, Array]:
    """Everybody's arrays at rank 0, its own under their names; nothing elsewhere."""
    import numpy as np
    from safetensors.numpy import load, save

    everybody = ranks.collect(save({name: np.asarray(value, order="C") for name, value in own.items()}))
    if not everybody:
        return {}
    found = dict(own)
    for rank, raw in enumerate(everybody[1:], 1):
        found |= {f"{RANK}{rank}.{name}": value for name, value in load(raw).items()}
    return found
