"""One process's share of the training: it follows the store, draws its part of each batch, and updates with the others.

A learner of one process has all of it. Of several, each has a `RankTrainer`; rank 0's is the learner's own, and
whatever is done with that the others do at the same time (`RankTrainer.obey`).
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
from user_sys.learner.checkpoint import Checkpoint, load_latest_checkpoint
from user_sys.learner.config import CPU, LearnerConfig
from user_sys.replay.batches import ObservationFeatures, TransitionBuilder
from user_sys.replay.buffer import ReplayBuffer
from user_sys.replay.sampler import Prefetcher, Sampler
from user_sys.replay.selectors import DemoOnlineSelector, StepFilter
from user_sys.store.store import StoreReader
from user_sys.weights.snapshot import DeviceWeights, PolicySnapshot, UnlimitedBudget

if TYPE_CHECKING:
    from user_sys.algorithms.distributed import TrainingGroup

GATHER_TIMEOUT_S = 300.0
"""Rank 0 fetches a share at the governor's pace."""
SAMPLER_PREFIX = "sampler."  # before the names of the sampler's arrays in a checkpoint
RANK_PREFIX = "rank."  # ... and before that and the number of its process, where that is not 0
PROCESS_COUNT_KEY = "processes"  # how many made a checkpoint


class RankCommand(IntEnum):
    """What all processes do next."""

    REFRESH = 0
    UPDATE = 1
    WEIGHTS = 2
    SNAPSHOT = 3
    STATE = 4
    LOAD = 5
    END = 6


class RankTrainer:
    """One thread constructs it and calls it.

    Attributes:
        demo_online: the demonstrations and the online steps there are, whatever is drawn from.
        can_sample: every process has something to draw, as of the newest `refresh`.
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
        group: TrainingGroup | None,
    ) -> None:
        """Args:
        device: torch's name of what trains; for a GPU, batches lie in page-locked memory.
        ranks: this process among others; None where it is alone.

        Raises:
            ConfigError: settings that do not fit the robot or the device.
        """
        from user_sys.algorithms.rlpd import Rlpd  # torch: the learner's processes alone need it
        from user_sys.weights.gpu_copy import make_host_copier

        rank, world = (0, 1) if group is None else (group.rank, group.world)
        self._ranks, self._rank, self._world, self._publish = group, rank, world, config.publish
        self._giver = ThreadPoolExecutor(1, thread_name_prefix="weights-give")  # its thread starts when it is needed
        self._giving: Future[None] | None = None
        self.can_sample = False
        copies = make_host_copier(device, config.publish)
        self.algorithm = Rlpd(
            config.algorithm, spec, features=features, seed=seed, device=device, copier=copies, group=group
        )
        here = StepFilter(embodiments=frozenset({spec.embodiment}))
        self.replay = ReplayBuffer(
            reader, ObservationFeatures.of(spec), cache_bytes=config.cache_bytes // world, step_filter=here
        )
        self.demo_online = DemoOnlineSelector(spec.embodiment, config.demo_fraction)
        chooser = (
            self.demo_online
            if config.sampler.is_unfiltered_mixture
            else config.sampler.make_selector(spec.embodiment, config.demo_fraction)
        )
        if chooser is not self.demo_online:
            self.replay.subscribe(self.demo_online.update)
        steps = TransitionBuilder(config.sampler.n_step, config.algorithm.discount)
        size, pin = config.batch_size // world, device != CPU
        self._sampler = Sampler(self.replay, chooser, steps, size, seed=seed, rank=rank, world=world, pin=pin)
        self._batches = Prefetcher(self._sampler, config.batches_ahead)

    def close(self) -> None:
        """Ends the threads. Calling it twice is harmless."""
        self._giver.shutdown(wait=False)
        self._batches.close()
        self.replay.close()

    def run_worker_loop(self, checkpoints: Path) -> None:
        """Does what rank 0 does, until that ends the training; `checkpoints` is its folder. Not for rank 0.

        Raises:
            RunError: there is not the checkpoint there that rank 0 has found.
            StoreError: the store cannot be read.
        """
        assert self._ranks is not None  # one process has nobody to obey
        while (heard := self._ranks.receive_command())[0] != RankCommand.END:
            match heard:
                case [RankCommand.REFRESH, _]:
                    self.refresh()
                case [RankCommand.UPDATE, _]:
                    self.update()
                case [RankCommand.WEIGHTS, _]:
                    self.policy_weights()
                case [RankCommand.SNAPSHOT, _]:
                    self._give(self.policy_snapshot())
                case [RankCommand.STATE, _]:
                    self.state_dict()
                case [RankCommand.LOAD, updates]:
                    checkpoint = load_latest_checkpoint(checkpoints)
                    if checkpoint is None or checkpoint.updates != updates:
                        raise RunError(f"the checkpoint of update {updates} in {checkpoints} has vanished")
                    self.load_checkpoint(checkpoint)
        if self._giving is not None:
            self._giving.result(GATHER_TIMEOUT_S)

    def _tell(self, turn: RankCommand, detail: int = 0) -> None:
        if self._ranks is not None and self._rank == 0:
            self._ranks.broadcast_command(turn, detail)

    def refresh(self) -> None:
        """Takes in what is new in the store."""
        self._tell(RankCommand.REFRESH)
        self.replay.refresh()
        self.can_sample = len(self._sampler) > 0
        if self._ranks is not None:
            self.can_sample = self._ranks.all_true(self.can_sample)

    def update(self) -> None:
        """Makes one update, of all processes together, with a batch that each draws its part of."""
        self._tell(RankCommand.UPDATE)
        self.batch = self._batches.next()
        self.algorithm.update(self.batch)
        if self._sampler.uses_feedback:
            self._sampler.feedback(self.batch, self.algorithm.td_errors())

    def policy_weights(self) -> dict[str, Array]:
        """See `Algorithm.policy_weights`; of several processes rank 0 has them, the others nothing."""
        self._tell(RankCommand.WEIGHTS)
        return self.algorithm.policy_weights()

    def policy_snapshot(self) -> PolicySnapshot:
        """See `Algorithm.policy_snapshot`; likewise. Where the next ones are to be compared with it, several processes
        wait until it is there."""
        self._tell(RankCommand.SNAPSHOT)
        compared = self._ranks is not None and self._publish.kl > 0
        return self.algorithm.policy_weights() if compared else self.algorithm.policy_snapshot()

    def _give(self, snapshot: PolicySnapshot) -> None:
        """Has another thread fetch it, which ends when rank 0 has it, one after the other. Not for rank 0, whose envoy
        does it."""
        if isinstance(snapshot, Mapping):
            return
        if self._giving is not None:
            self._giving.result(GATHER_TIMEOUT_S)
        self._giving = self._giver.submit(_fetch, snapshot)

    def policy_kl(self, former: PolicySnapshot) -> float:
        """How far the policy has moved from `former` weights: a mean over this process's newest batch, in nats."""
        newest = None if self._ranks is None else self.policy_weights()
        return self.algorithm.policy_kl(former, self.batch, newest)

    def state_dict(self) -> dict[str, Array]:
        """Copies of all that determines later updates and is not in the store; of several processes rank 0 has the
        state of them all, the others nothing."""
        self._tell(RankCommand.STATE)
        own = {SAMPLER_PREFIX + name: value for name, value in self._batches.state_dict().items()}
        state = self.algorithm.state_dict()
        return {**state, **own} if self._ranks is None else {**state, **_gather_sampler_states(own, self._ranks)}

    def load_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Takes up where `checkpoint` was made; the store is to have been followed.

        False where another number of processes made it: networks and optimizers are taken then, and the sampler begins
        anew.

        Raises:
            WireError: it is of other settings or another robot.
        """
        self._tell(RankCommand.LOAD, checkpoint.updates)
        arrays = checkpoint.arrays
        self.algorithm.load_state_dict(
            {k: v for k, v in arrays.items() if not k.startswith((SAMPLER_PREFIX, RANK_PREFIX))}
        )
        if checkpoint.scalars.get(PROCESS_COUNT_KEY, 1) != self._world:
            return False
        prefix = f"{RANK_PREFIX}{self._rank}.{SAMPLER_PREFIX}" if self._rank else SAMPLER_PREFIX
        own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        self._batches.load_state_dict(own)
        return True


def _fetch(weights: DeviceWeights) -> None:
    weights.wait()
    weights.fetch({}, UnlimitedBudget())


def _gather_sampler_states(own: Mapping[str, Array], ranks: TrainingGroup) -> dict[str, Array]:
    """Everybody's arrays at rank 0, its own under their names; nothing elsewhere."""
    import numpy as np
    from safetensors.numpy import load, save

    everybody = ranks.gather_bytes(save({name: np.asarray(value, order="C") for name, value in own.items()}))
    if not everybody:
        return {}
    found = dict(own)
    for rank, raw in enumerate(everybody[1:], 1):
        found |= {f"{RANK_PREFIX}{rank}.{name}": value for name, value in load(raw).items()}
    return found
