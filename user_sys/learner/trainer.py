"""The trainer of one process: it reads the replay buffer, draws its part of each batch, and updates the algorithm.

A learner with one process has one trainer. With several, each process is a rank with a trainer of its own. Rank 0
belongs to the learner; it broadcasts a `RankCommand` before each collective operation, and the others follow it in
`RankTrainer.run_worker_loop`.
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
"""Rank 0 gathers at the rate of its governor."""
SAMPLER_PREFIX = "sampler."  # prefix of the sampler's arrays in a checkpoint
RANK_PREFIX = "rank."  # prefix of other ranks' arrays, before their number
PROCESS_COUNT_KEY = "processes"  # how many processes wrote a checkpoint


class RankCommand(IntEnum):
    """The next operation of all processes."""

    REFRESH = 0
    UPDATE = 1
    WEIGHTS = 2
    SNAPSHOT = 3
    STATE = 4
    LOAD = 5
    END = 6


class RankTrainer:
    """Trains in one process. One thread constructs it and calls it.

    Attributes:
        algorithm: the algorithm with its networks.
        replay: the buffer that batches are drawn from.
        demo_online: the demonstrations and the online steps in the store, whatever the sampler draws.
        batch: the newest batch.
        can_sample: every process has steps to draw, as of the last `refresh`.
        processes: number of processes that train together.
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
        """Builds the algorithm, the replay buffer and the sampler.

        Args:
            reader: the store, used from this thread only.
            features: the observations that the policy reads; empty for all vectors.
            device: a torch device; for a GPU, batches lie in page-locked memory.
            group: the processes that train together; None for a single process.

        Raises:
            ConfigError: the settings do not fit the robot or the device.
        """
        from user_sys.algorithms.rlpd import Rlpd  # imports torch, which only the learner's processes need
        from user_sys.weights.gpu_copy import make_host_copier

        rank, processes = (0, 1) if group is None else (group.rank, group.world)
        self._reader, self._group, self._rank, self.processes, self._publish = (
            reader,
            group,
            rank,
            processes,
            config.publish,
        )
        self._gather_executor = ThreadPoolExecutor(1, thread_name_prefix="weights-give")
        self._gathering: Future[None] | None = None
        self.can_sample = False
        copier = make_host_copier(device, config.publish)
        self.algorithm = Rlpd(
            config.algorithm, spec, features=features, seed=seed, device=device, copier=copier, group=group
        )
        step_filter = StepFilter(embodiments=frozenset({spec.embodiment}))
        self.replay = ReplayBuffer(
            reader, ObservationFeatures.of(spec), cache_bytes=config.cache_bytes // processes, step_filter=step_filter
        )
        self.demo_online = DemoOnlineSelector(spec.embodiment, config.demo_fraction)
        selector = (
            self.demo_online
            if config.sampler.is_unfiltered_mixture
            else config.sampler.make_selector(spec.embodiment, config.demo_fraction)
        )
        if selector is not self.demo_online:
            self.replay.subscribe(self.demo_online.update)
        steps = TransitionBuilder(config.sampler.n_step, config.algorithm.discount)
        size, pin = config.batch_size // processes, device != CPU
        self._sampler = Sampler(self.replay, selector, steps, size, seed=seed, rank=rank, world=processes, pin=pin)
        self._batches = Prefetcher(self._sampler, config.batches_ahead)

    def close(self) -> None:
        """Ends the threads. A second call has no effect."""
        self._gather_executor.shutdown(wait=False)
        self._batches.close()
        self.replay.close()

    def run_worker_loop(self, checkpoints: Path) -> None:
        """Follows the commands of rank 0 until training ends; for other ranks. `checkpoints` is rank 0's folder.

        Raises:
            RunError: the checkpoint that rank 0 loads is not there.
            StoreError: the store cannot be read.
        """
        assert self._group is not None  # a single process has no commands
        while (received := self._group.receive_command())[0] != RankCommand.END:
            match received:
                case RankCommand.REFRESH, _:
                    self.refresh()
                case RankCommand.UPDATE, _:
                    self.update()
                case RankCommand.WEIGHTS, _:
                    self.policy_weights()
                case RankCommand.SNAPSHOT, _:
                    self._gather(self.policy_snapshot())
                case RankCommand.STATE, _:
                    self.state_dict()
                case RankCommand.LOAD, updates:
                    checkpoint = load_latest_checkpoint(checkpoints)
                    if checkpoint is None or checkpoint.updates != updates:
                        raise RunError(f"the checkpoint of update {updates} in {checkpoints} has vanished")
                    self.load_checkpoint(checkpoint)
        if self._gathering is not None:
            self._gathering.result(GATHER_TIMEOUT_S)

    def refresh(self) -> None:
        """Reads new steps from the store."""
        self._broadcast(RankCommand.REFRESH)
        self.replay.refresh()
        self.can_sample = len(self._sampler) > 0
        if self._group is not None:
            self.can_sample = self._group.all_true(self.can_sample)

    def update(self) -> None:
        """Makes one update of all processes together; each draws its part of the batch."""
        self._broadcast(RankCommand.UPDATE)
        self.batch = self._batches.next()
        self.algorithm.update(self.batch)
        if self._sampler.uses_feedback:
            self._sampler.feedback(self.batch, self.algorithm.td_errors())

    def finished_episodes(self) -> int:
        """Returns the number of complete episodes in the store."""
        return int(self._reader.index.episodes.complete.sum())

    def position(self) -> int:
        """Returns the sequence number of the newest chunk that was read from the store; -1 if there is none."""
        sequence = self.replay.observation_index.index.chunks.sequence
        return int(sequence.max()) if len(sequence) else -1

    def policy_weights(self) -> dict[str, Array]:
        """See `Algorithm.policy_weights`. With several processes rank 0 gets them, the others an empty dict."""
        self._broadcast(RankCommand.WEIGHTS)
        return self.algorithm.policy_weights()

    def policy_snapshot(self) -> PolicySnapshot:
        """See `Algorithm.policy_snapshot`. Several processes that measure the KL divergence wait for the weights."""
        self._broadcast(RankCommand.SNAPSHOT)
        is_compared = self._group is not None and self._publish.kl > 0
        return self.algorithm.policy_weights() if is_compared else self.algorithm.policy_snapshot()

    def policy_kl(self, reference: PolicySnapshot) -> float:
        """Returns the mean KL divergence of the policy from `reference`, over this process's newest batch, in nats."""
        newest = None if self._group is None else self.policy_weights()
        return self.algorithm.policy_kl(reference, self.batch, newest)

    def state_dict(self) -> dict[str, Array]:
        """Returns copies of the state that determines later updates and is not in the store.

        With several processes rank 0 gets the state of all, the others an empty dict.
        """
        self._broadcast(RankCommand.STATE)
        own = {SAMPLER_PREFIX + name: value for name, value in self._batches.state_dict().items()}
        state = self.algorithm.state_dict()
        return {**state, **own} if self._group is None else {**state, **_gather_sampler_states(own, self._group)}

    def load_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Continues from `checkpoint`, after a `refresh`.

        Returns False if another number of processes wrote it: networks and optimizers are loaded, and the sampler
        starts from its seed.

        Raises:
            WireError: the checkpoint is of other settings or another robot.
        """
        self._broadcast(RankCommand.LOAD, checkpoint.updates)
        arrays = checkpoint.arrays
        algorithm = {k: v for k, v in arrays.items() if not k.startswith((SAMPLER_PREFIX, RANK_PREFIX))}
        self.algorithm.load_state_dict(algorithm)
        if checkpoint.scalars.get(PROCESS_COUNT_KEY, 1) != self.processes:
            return False
        prefix = f"{RANK_PREFIX}{self._rank}.{SAMPLER_PREFIX}" if self._rank else SAMPLER_PREFIX
        own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        self._batches.load_state_dict(own)
        return True

    def _broadcast(self, command: RankCommand, argument: int = 0) -> None:
        if self._group is not None and self._rank == 0:
            self._group.broadcast_command(command, argument)

    def _gather(self, snapshot: PolicySnapshot) -> None:
        """Sends this rank's part of a snapshot to rank 0 in another thread; rank 0's publisher client receives it."""
        if isinstance(snapshot, Mapping):
            return
        if self._gathering is not None:
            self._gathering.result(GATHER_TIMEOUT_S)
        self._gathering = self._gather_executor.submit(_fetch_shard, snapshot)


def _fetch_shard(weights: DeviceWeights) -> None:
    weights.wait()
    weights.fetch({}, UnlimitedBudget())


def _gather_sampler_states(own: Mapping[str, Array], ranks: TrainingGroup) -> dict[str, Array]:
    """Returns the arrays of all ranks at rank 0, with a prefix for the others; an empty dict elsewhere."""
    import numpy as np
    from safetensors.numpy import load, save

    states = ranks.gather_bytes(save({name: np.asarray(value, order="C") for name, value in own.items()}))
    if not states:
        return {}
    found = dict(own)
    for rank, raw in enumerate(states[1:], 1):
        found |= {f"{RANK_PREFIX}{rank}.{name}": value for name, value in load(raw).items()}
    return found
