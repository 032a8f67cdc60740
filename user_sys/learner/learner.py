"""When the learner publishes.

When a learner publishes, under which number, and whether it is too far ahead of the robots.

The learner: follows the store, samples, updates, publishes and checkpoints, each at its own pace.

Training never waits for acting, nor acting for training, but for one bound: `LearnerConfig.utd_max` updates for each
online step. Whatever a resumed learner needs is in its checkpoints and the store; on CPU, with one seed and the same
store, a run that was stopped and resumed makes bit-identical updates.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hal.spec import RobotSpec
from user_sys.errors import ConfigError, DiskFull, WireError
from user_sys.learner.checkpoint import Checkpoint, CheckpointWriter, Scalars, load_latest_checkpoint, scan_checkpoints
from user_sys.learner.config import CPU, LearnerConfig
from user_sys.learner.trainer import PROCESS_COUNT_KEY, RankTrainer
from user_sys.store.files import free_bytes
from user_sys.store.store import StoreReader
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.snapshot import PolicySnapshot
from user_sys.weights.state import NotFinite, build_tensor_set

if TYPE_CHECKING:
    from user_sys.algorithms.distributed import TrainingGroup


KL_INTERVAL_UPDATES = 10  # measuring how far the policy has moved costs a forward pass


class PublishSchedule:
    """Says when the next version is due. One thread calls it."""

    def __init__(self, config: PublishConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._next_s = clock()
        self._updates = self._measured = 0
        self._episode_ended = False

    def on_episode_end(self) -> None:
        self._episode_ended = True

    def is_due(self, updates: int, moved: Callable[[], float]) -> bool:
        """Whether to publish after `updates` updates in all.

        Args:
            moved: measures how far the policy has moved since the last version; called now and then, where it matters.
        """
        config, since = self._config, updates - self._updates
        if since <= 0:
            return False
        return (
            (config.every_s > 0 and self._clock() >= self._next_s)
            or 0 < config.every_updates <= since
            or (config.at_episode_ends and self._episode_ended)
            or (config.kl > 0 and self._kl_due(updates) and moved() >= config.kl)
        )

    def on_published(self, updates: int) -> None:
        self._updates = self._measured = updates
        self._next_s = self._clock() + self._config.every_s
        self._episode_ended = False

    def _kl_due(self, updates: int) -> bool:
        if updates - self._measured < KL_INTERVAL_UPDATES:
            return False
        self._measured = updates
        return True


class WeightsPublisher(Protocol):
    """Where versions go. `user_sys.learner.publisher_client.PublisherClient` is one."""

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        """Copies what is in host memory, has fetched what is not, and returns at once. Raises NotFinite: an earlier
        version was not.
        """

    def observe(self, seconds: float) -> None:
        """How long an update took with all that was done beside it, publishing included, for the governor."""

    @property
    def is_busy(self) -> bool:
        """Not now: the version before is still being made ready, or the governor has pushes pause."""

    @property
    def versions_ahead(self) -> int:
        """How many versions the slowest robot is behind."""

    def scalars(self) -> dict[str, float]:
        """For the metrics."""


class VersionPublisher:
    """One thread calls it.

    Attributes:
        version: number of the newest version; each one gets the next.
        version_limit: no version gets a greater number, until a checkpoint has reserved more.
    """

    def __init__(self, config: PublishConfig, sink: WeightsPublisher, clock: Callable[[], float]) -> None:
        self.version = self.version_limit = 0
        self._config, self._sink = config, sink
        self._pace = PublishSchedule(config, clock)
        self._former: PolicySnapshot | None = None
        self._episodes = 0

    @property
    def needs_checkpoint(self) -> bool:
        """Nothing is published before the next checkpoint."""
        return self.version >= self.version_limit

    @property
    def is_too_far_ahead(self) -> bool:
        """The learner is to wait for the robots."""
        return 0 < self._config.max_versions_ahead < self._sink.versions_ahead

    def update_episode_count(self, count: Callable[[], int]) -> None:
        """`count` tells how many episodes have ended so far; it is asked only where that matters."""
        if self._config.at_episode_ends and (episodes := count()) > self._episodes:
            self._episodes = episodes
            self._pace.on_episode_end()

    def publish_if_due(
        self, updates: int, weights: Callable[[], PolicySnapshot], kl: Callable[[PolicySnapshot], float]
    ) -> None:
        """Publishes what `weights` gives, if that is due after `updates` updates and the version before is ready.

        Args:
            weights: may give the arrays that are trained: they are copied at once. A version's are asked for once.
            kl: how far the policy has moved from earlier weights: copies of such arrays, or what it gave.

        Raises:
            NotFinite: an earlier version was not.
        """

        def moved() -> float:
            return float("inf") if self._former is None else kl(self._former)

        if not self._sink.is_busy and self._pace.is_due(updates, moved):
            self.publish(updates, weights)

    def publish(self, updates: int, weights: Callable[[], PolicySnapshot]) -> None:
        """Publishes now, unless nothing was learned yet or no number is left. Raises as `publish_if_due`."""
        if not updates or self.needs_checkpoint:
            return
        self.version += 1
        snapshot = weights()
        if self._config.kl > 0:
            self._former = _frozen_snapshot(snapshot)
        self._sink.publish(snapshot, self.version, updates)
        self._pace.on_published(updates)


def _frozen_snapshot(snapshot: PolicySnapshot) -> PolicySnapshot:
    """What the next update does not change."""
    if isinstance(snapshot, Mapping):
        return {name: array.copy() for name, array in snapshot.items()}
    return snapshot


REFRESH_INTERVAL_S = 0.05
IDLE_WAIT_S = 0.01
DISK_RETRY_S = 1.0
MAX_STEP_SAMPLES = 4096  # whose median is reported: an update with all that is done beside it, publishing included
VERSIONS_PER_CHECKPOINT = 1000
"""At most so many versions are published from one checkpoint to the next, which is brought forward where more are due.
A resumed learner skips twice as many, since the next checkpoint may have been begun and not finished: so it never gives
a number that was used before, as robots take only numbers that grow."""


ReportScalars = Callable[[int, dict[str, float]], None]
log = logging.getLogger(__name__)


class Learner:
    """Trains one policy for one embodiment. One thread constructs and runs it."""

    def __init__(
        self,
        config: LearnerConfig,
        spec: RobotSpec,
        reader: StoreReader,
        *,
        publisher: WeightsPublisher,
        report: ReportScalars,
        checkpoint_dir: Path,
        features: Sequence[str] = (),
        seed: int = 0,
        device: str = CPU,
        group: TrainingGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes up the newest checkpoint of `checkpoint_dir`, where there is one.

        Args:
            reader: of the store, used from the learner's thread only.
            publish: takes versions of the policy's weights.
            report: takes the count of updates and scalars to show; must return at once.
            features: the observations that the policy reads; empty for all vectors.
            device: torch's name of what trains; for a GPU, batches lie in page-locked memory.
            ranks: the processes that train it together, of which this is the first (`followers.Followers`).
            clock: monotonic seconds.

        Raises:
            ConfigError: settings that do not fit the robot or the device.
            RunError: there are checkpoints, and none can be read.
            WireError: the checkpoint is of other settings or another robot.
        """
        self._config, self._reader, self._clock = config, reader, clock
        self._sink, self._report_scalars = publisher, report
        self._publishing = VersionPublisher(config.publish, publisher, clock)
        self._share = RankTrainer(config, spec, reader, features=features, seed=seed, device=device, group=group)
        self._processes = 1 if group is None else group.world
        self._writer = CheckpointWriter(checkpoint_dir, config.checkpoints_kept)
        self._updates, self._online_steps, self._online_seen = 0, 0, 0
        self._told = False  # that there is nothing to draw
        self._disk_full: DiskFull | None = None
        self._training_s, self._waited_s = 0.0, 0.0
        self._reported = (0, 0.0)
        self._steps_s: deque[float] = deque(maxlen=MAX_STEP_SAMPLES)
        try:
            self._resume(checkpoint_dir)
        except BaseException:
            self.close()
            raise

    @property
    def updates(self) -> int:
        """Updates made so far, those before a resumption included."""
        return self._updates

    @property
    def training_s(self) -> float:
        """Seconds trained so far, those before a resumption included."""
        return self._training_s

    def run(self, stop: threading.Event, stop_now: threading.Event | None = None) -> None:
        """Trains until the time or the updates are used up or `stop` is set; then publishes and checkpoints once more.
        With `hurried` set it only checkpoints.

        Blocks. Training pauses while the disk has no room for a checkpoint; one that has none when `stop` is set is not
        written, which is logged and reported. After a crash a new `Learner` goes on from
        the newest checkpoint.

        Raises:
            NotFinite: training has diverged; nothing of it was published or written.
            RunError: a checkpoint could not be written.
            StoreError: the store cannot be read.
        """
        log.info("learner.started updates=%d training_s=%.1f", self._updates, self._training_s)
        try:
            self._run(stop, stop_now or threading.Event())
        finally:
            self.close()
        log.info("learner.stopped updates=%d training_s=%.1f", self._updates, self._training_s)

    def close(self) -> None:
        """Ends the replay buffer's threads. `run` does it too; calling it twice is harmless."""
        self._share.close()

    def _run(self, stop: threading.Event, hurried: threading.Event) -> None:
        self._checkpoint(stop, wait=True)  # an unwritable disk shows now, and the versions to come are reserved
        follow, checkpoint, report = (
            _IntervalTimer(seconds, self._clock)
            for seconds in (
                REFRESH_INTERVAL_S,
                self._config.checkpoint_interval_s,
                self._config.report_interval_s,
            )
        )
        while not (stop.is_set() or self._finished()):
            started = self._clock()
            if follow.due():
                self._follow()
            if trained := self._may_update():
                self._update()
            else:
                stop.wait(IDLE_WAIT_S)
            self._publishing.publish_if_due(self._updates, self._share.policy_snapshot, self._share.policy_kl)
            if checkpoint.due() or self._publishing.needs_checkpoint or self._writer.has_failed:
                self._checkpoint(stop)
            if report.due():
                self._report()
            self._count_time(trained, self._clock() - started)
        if not hurried.is_set():
            if self._publishing.needs_checkpoint:
                self._checkpoint(stop, wait=True)
            self._publishing.publish(self._updates, self._share.policy_snapshot)
        self._report()
        self._checkpoint(stop, wait=True)

    def _finished(self) -> bool:
        config = self._config
        return self._training_s >= config.max_training_s or 0 < config.max_updates <= self._updates

    def _update(self) -> None:
        self._share.update()
        self._updates += 1

    def _count_time(self, trained: bool, seconds: float) -> None:
        if trained:
            self._training_s += seconds
            self._steps_s.append(seconds)
            self._sink.observe(seconds)
        else:
            self._waited_s += seconds

    def _may_update(self) -> bool:
        allowed = self._config.warmup_updates + self._config.utd_max * self._online_steps
        return self._share.can_sample and self._updates < allowed and not self._publishing.is_too_far_ahead

    def _follow(self) -> None:
        """Takes in what is new in the store."""
        self._share.refresh()
        self._online_steps += max(0, len(self._share.demo_online.online) - self._online_seen)
        self._online_seen = len(self._share.demo_online.online)
        if len(self._share.demo_online) and not self._share.can_sample and not self._told:
            log.warning("learner.nothing_to_draw none of what is stored meets learner.sampler.only: training waits")
            self._told = True
        self._publishing.update_episode_count(lambda: int(self._reader.index.episodes.complete.sum()))

    def _checkpoint(self, stop: threading.Event, wait: bool = False) -> None:
        """Copies the state and has it written; training goes on meanwhile, unless it is to `wait` or the disk is full.

        Raises as `run`.
        """
        try:
            if wait or self._writer.has_failed:
                self._writer.finish()
            self._write(wait)
        except DiskFull as error:
            self._wait_for_room(error, stop)

    def _write(self, wait: bool) -> None:
        if self._writer.is_busy:
            return
        checkpoint = self._snapshot()
        spoiled = [name for name, value in checkpoint.arrays.items() if not np.isfinite(value).all()]
        if spoiled:
            raise NotFinite(f"training diverged by update {self._updates}: {spoiled[:3]} are not finite")
        self._writer.write(checkpoint)
        self._publishing.version_limit = self._publishing.version + VERSIONS_PER_CHECKPOINT
        if wait:
            self._writer.finish()

    def _wait_for_room(self, error: DiskFull, stop: threading.Event) -> None:
        """Returns when a checkpoint is written, or if `stop` is set and there is no room still."""
        log.error("checkpoint.disk_full %s; training pauses", error)
        while True:
            self._disk_full = error
            self._report()
            stopped = stop.wait(DISK_RETRY_S)
            self._follow()  # also keeps the learner's other processes from giving up
            if not stopped and (free := free_bytes(error.path)) < error.needed_bytes:
                error = DiskFull(error.path, error.needed_bytes, free)
                continue
            try:
                self._write(wait=True)
                break
            except DiskFull as again:
                error = again
                if stopped:
                    log.error("checkpoint.not_written updates=%d %s; the one before is kept", self._updates, error)
                    return
        self._disk_full = None
        self._report()
        log.warning("checkpoint.space_again training goes on")

    def _snapshot(self) -> Checkpoint:
        scalars: Scalars = {
            "position": self._position(),
            "online_steps": self._online_steps,
            "online_seen": self._online_seen,
            "version": self._publishing.version,
            "policy": self._policy_digest(),
            "training_s": self._training_s,
            "waited_s": self._waited_s,
            PROCESS_COUNT_KEY: self._processes,
        }
        return Checkpoint(self._updates, scalars, self._share.state_dict())

    def _position(self) -> int:
        """How far into the store the learner has seen: the sequence number of the newest chunk's record."""
        sequence = self._share.replay.observation_index.index.chunks.sequence
        return int(sequence.max()) if len(sequence) else -1

    def _policy_digest(self) -> str:
        """Of what would be published now: a checkpoint and a version of the same update agree bit for bit."""
        return build_tensor_set(self._share.policy_weights()).digest.hex()

    def _resume(self, folder: Path) -> None:
        self._share.refresh()
        self._unreadable = len(scan_checkpoints(folder).unreadable)
        checkpoint = load_latest_checkpoint(folder)
        if checkpoint is None:
            return
        scalars = checkpoint.scalars
        try:
            position = int(scalars["position"])
            self._online_steps, self._online_seen = int(scalars["online_steps"]), int(scalars["online_seen"])
            self._publishing.version = int(scalars["version"]) + 2 * VERSIONS_PER_CHECKPOINT
            policy = str(scalars["policy"])
            self._training_s, self._waited_s = float(scalars["training_s"]), float(scalars["waited_s"])
        except (KeyError, ValueError) as error:
            raise WireError(
                f"the checkpoint of update {checkpoint.updates} in {folder} lacks {error}: another version of user-sys "
                "wrote it; resume with that version, or move the checkpoint out of the folder"
            ) from None
        if position > self._position():
            raise ConfigError(
                f"the checkpoint of update {checkpoint.updates} in {folder} has seen record {position} of its store, "
                f"and this store ends at record {self._position()}: it is another store, or lost its newest records. "
                "Put the right store back; or move this checkpoint out of the folder, to go on from the one before it"
            )
        if not self._share.load_checkpoint(checkpoint):
            before = scalars.get(PROCESS_COUNT_KEY, 1)
            log.warning("learner.other_processes before=%s now=%d: the sampler begins anew", before, self._processes)
        if self._policy_digest() != policy:
            raise WireError(f"the checkpoint in {folder} does not give the policy that was published from it")
        self._updates = checkpoint.updates
        log.info("learner.resumed updates=%d training_s=%.1f", self._updates, self._training_s)

    def _report(self) -> None:
        updates, seconds = self._reported
        elapsed = self._training_s - seconds
        self._reported = (self._updates, self._training_s)
        steps_s, cache = list(self._steps_s), self._share.replay.report()
        self._steps_s.clear()
        self._report_scalars(
            self._updates,
            {
                **self._share.algorithm.scalars(),
                "training_s": self._training_s,
                "waited_s": self._waited_s,
                "step_ms": 1e3 * statistics.median(steps_s) if steps_s else 0.0,
                "updates_per_s": (self._updates - updates) / elapsed if elapsed > 0 else 0.0,
                "online_steps": float(self._online_steps),
                "updates_per_step": self._updates / max(1, self._online_steps),
                "demo_transitions": float(len(self._share.demo_online.demo)),
                "online_transitions": float(len(self._share.demo_online.online)),
                "cold_share": cache.misses / max(1, cache.observations),
                "damaged": float(cache.damaged),
                "policy_version": float(self._publishing.version),
                "checkpoints_unreadable": float(self._unreadable),
                **_disk_scalars(self._disk_full),
                **self._sink.scalars(),
            },
        )


def _disk_scalars(full: DiskFull | None) -> dict[str, float]:
    needed, free = (0, 0) if full is None else (full.needed_bytes, full.free_bytes)
    return {"disk_needed_bytes": float(needed), "disk_free_bytes": float(free)}


class _IntervalTimer:
    """Says when something is due again; due at once at first."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._next_s = clock()

    def due(self) -> bool:
        now = self._clock()
        if now < self._next_s:
            return False
        self._next_s = now + self._interval_s
        return True
