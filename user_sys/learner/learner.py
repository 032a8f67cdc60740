"""The learner: reads new experience, samples, updates, publishes weights and writes checkpoints, each at its own rate.

Training and acting never wait for each other, except for one bound: `LearnerConfig.utd_max` updates per online step.
Checkpoints and the store hold everything that a resumed learner needs. On a CPU, with one seed and the same store, a
resumed run makes bit-identical updates.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from user_sys.errors import ConfigError, DiskFull, WireError
from user_sys.learner.checkpoint import Checkpoint, CheckpointWriter, Scalars, load_latest_checkpoint, scan_checkpoints
from user_sys.learner.config import LearnerConfig
from user_sys.learner.trainer import PROCESS_COUNT_KEY, RankTrainer
from user_sys.store.files import free_bytes
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.snapshot import PolicySnapshot
from user_sys.weights.state import NotFinite, build_tensor_set

KL_INTERVAL_UPDATES = 10  # measuring the KL divergence costs a forward pass
REFRESH_INTERVAL_S = 0.05
IDLE_WAIT_S = 0.01
DISK_RETRY_S = 1.0
MAX_STEP_SAMPLES = 4096
VERSIONS_PER_CHECKPOINT = 1000
"""Maximum number of versions from one checkpoint to the next; the next one is written early if more are due. A resumed
learner skips twice as many numbers, because the last checkpoint may not have been completed. So it never reuses a
number: robots accept only growing ones."""

ReportScalars = Callable[[int, dict[str, float]], None]
log = logging.getLogger(__name__)


class PublishSchedule:
    """Decides when the next version is due. One thread calls it."""

    def __init__(self, config: PublishConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._next_s = clock()
        self._updates = self._measured = 0
        self._episode_ended = False

    def on_episode_end(self) -> None:
        self._episode_ended = True

    def is_due(self, updates: int, kl: Callable[[], float]) -> bool:
        """Whether to publish after `updates` updates in total.

        Args:
            kl: measures how far the policy has moved since the last version; called only if the settings need it.
        """
        config, since = self._config, updates - self._updates
        if since <= 0:
            return False
        return (
            (config.every_s > 0 and self._clock() >= self._next_s)
            or 0 < config.every_updates <= since
            or (config.at_episode_ends and self._episode_ended)
            or (config.kl > 0 and self._is_kl_due(updates) and kl() >= config.kl)
        )

    def on_published(self, updates: int) -> None:
        self._updates = self._measured = updates
        self._next_s = self._clock() + self._config.every_s
        self._episode_ended = False

    def _is_kl_due(self, updates: int) -> bool:
        if updates - self._measured < KL_INTERVAL_UPDATES:
            return False
        self._measured = updates
        return True


class WeightsPublisher(Protocol):
    """Publishes versions, such as `user_sys.learner.publisher_client.PublisherClient`."""

    def publish(self, weights: PolicySnapshot, version: int, updates: int) -> None:
        """Copies arrays in host memory, starts to fetch weights on a device, and returns at once.

        Raises:
            NotFinite: an earlier version held NaN or infinity.
        """

    def observe(self, seconds: float) -> None:
        """Reports the time of an update, publishing included, to the governor."""

    @property
    def is_busy(self) -> bool:
        """The version before is not ready, or the governor has pushes pause."""

    @property
    def versions_ahead(self) -> int:
        """How many versions the slowest robot is behind."""

    def scalars(self) -> dict[str, float]:
        """Returns the metrics."""


class VersionPublisher:
    """Numbers versions and publishes them when they are due. One thread calls it.

    Attributes:
        version: number of the newest version.
        version_limit: the greatest number that the last checkpoint has reserved.
    """

    def __init__(self, config: PublishConfig, publisher: WeightsPublisher, clock: Callable[[], float]) -> None:
        self.version = self.version_limit = 0
        self._config, self._publisher = config, publisher
        self._schedule = PublishSchedule(config, clock)
        self._reference: PolicySnapshot | None = None  # for the KL divergence
        self._episodes = 0

    @property
    def needs_checkpoint(self) -> bool:
        """No number is left before the next checkpoint."""
        return self.version >= self.version_limit

    @property
    def is_too_far_ahead(self) -> bool:
        """The learner must wait for the robots."""
        return 0 < self._config.max_versions_ahead < self._publisher.versions_ahead

    def update_episode_count(self, count: Callable[[], int]) -> None:
        """`count` returns the number of finished episodes; called only if the settings need it."""
        if self._config.at_episode_ends and (episodes := count()) > self._episodes:
            self._episodes = episodes
            self._schedule.on_episode_end()

    def publish_if_due(
        self, updates: int, weights: Callable[[], PolicySnapshot], kl: Callable[[PolicySnapshot], float]
    ) -> None:
        """Publishes if a version is due after `updates` updates and the version before is ready.

        Args:
            weights: returns a snapshot. It may be the trained arrays, which are copied at once.
            kl: measures how far the policy has moved from an earlier snapshot or a copy of it.

        Raises:
            NotFinite: an earlier version held NaN or infinity.
        """

        def moved() -> float:
            return float("inf") if self._reference is None else kl(self._reference)

        if not self._publisher.is_busy and self._schedule.is_due(updates, moved):
            self.publish(updates, weights)

    def publish(self, updates: int, weights: Callable[[], PolicySnapshot]) -> None:
        """Publishes now, unless no update was made or no number is left. Raises as `publish_if_due`."""
        if not updates or self.needs_checkpoint:
            return
        self.version += 1
        snapshot = weights()
        if self._config.kl > 0:
            self._reference = _copy_arrays(snapshot)
        self._publisher.publish(snapshot, self.version, updates)
        self._schedule.on_published(updates)


def _copy_arrays(snapshot: PolicySnapshot) -> PolicySnapshot:
    """Returns a snapshot that the next update does not change."""
    if isinstance(snapshot, Mapping):
        return {name: array.copy() for name, array in snapshot.items()}
    return snapshot


@dataclass
class _Counters:
    """Totals of a run, resumptions included; saved in checkpoints.

    Attributes:
        online_seen: online steps in the store at the last refresh.
        waited_s: time in which the staleness bound or the robots held up training.
    """

    updates: int = 0
    online_steps: int = 0
    online_seen: int = 0
    training_s: float = 0.0
    waited_s: float = 0.0

    def refresh_online(self, online_in_store: int) -> None:
        self.online_steps += max(0, online_in_store - self.online_seen)
        self.online_seen = online_in_store


class _StepStatistics:
    """The times of updates since the last report, publishing included."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MAX_STEP_SAMPLES)
        self._updates, self._training_s = 0, 0.0  # at the last report

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def report(self, counters: _Counters) -> dict[str, float]:
        """Returns the median time and the rate of updates since the last report."""
        updates, elapsed_s = counters.updates - self._updates, counters.training_s - self._training_s
        median_s = statistics.median(self._seconds) if self._seconds else 0.0
        self._updates, self._training_s = counters.updates, counters.training_s
        self._seconds.clear()
        return {"step_ms": 1e3 * median_s, "updates_per_s": updates / elapsed_s if elapsed_s > 0 else 0.0}


class Learner:
    """Trains one policy for one embodiment. One thread constructs and runs it."""

    def __init__(
        self,
        config: LearnerConfig,
        trainer: RankTrainer,
        *,
        publisher: WeightsPublisher,
        report: ReportScalars,
        checkpoint_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Resumes from the newest checkpoint of `checkpoint_dir`, if there is one. Closes `trainer` in the end.

        Args:
            trainer: that of rank 0.
            report: takes the number of updates and scalars; must return at once.
            clock: monotonic seconds.

        Raises:
            ConfigError: the checkpoint is of another store.
            RunError: there are checkpoints, but none can be read.
            WireError: the checkpoint is of other settings or another robot.
        """
        self._config, self._trainer, self._publisher = config, trainer, publisher
        self._report_scalars, self._clock = report, clock
        self._versions = VersionPublisher(config.publish, publisher, clock)
        self._writer = CheckpointWriter(checkpoint_dir, config.checkpoints_kept)
        self._counters, self._steps = _Counters(), _StepStatistics()
        self._has_warned = False  # that no stored step passes the sampler's filter
        self._disk_full: DiskFull | None = None
        self._unreadable_checkpoints = 0
        try:
            self._resume(checkpoint_dir)
        except BaseException:
            self.close()
            raise

    @property
    def updates(self) -> int:
        """Updates so far, including those before a resumption."""
        return self._counters.updates

    @property
    def training_s(self) -> float:
        """Seconds of training so far, including those before a resumption."""
        return self._counters.training_s

    def run(self, stop: threading.Event, stop_now: threading.Event | None = None) -> None:
        """Trains until the limit of time or updates, or until `stop` is set; then publishes and writes a checkpoint.

        With `stop_now` set it only writes the checkpoint. Blocks. Training pauses while the disk has no room for a
        checkpoint. If there is still no room when `stop` is set, the checkpoint is skipped and logged. After a crash a
        new `Learner` resumes from the newest checkpoint.

        Raises:
            NotFinite: training has diverged; the weights were neither published nor saved.
            RunError: a checkpoint could not be written.
            StoreError: the store cannot be read.
        """
        log.info("learner.started updates=%d training_s=%.1f", self.updates, self.training_s)
        try:
            self._run(stop, stop_now or threading.Event())
        finally:
            self.close()
        log.info("learner.stopped updates=%d training_s=%.1f", self.updates, self.training_s)

    def close(self) -> None:
        """Closes the trainer. `run` does it too; a second call has no effect."""
        self._trainer.close()

    def _run(self, stop: threading.Event, stop_now: threading.Event) -> None:
        self._checkpoint(stop, wait=True)  # shows an unwritable disk, and reserves version numbers
        config, clock = self._config, self._clock
        refresh = _IntervalTimer(REFRESH_INTERVAL_S, clock)
        checkpoint = _IntervalTimer(config.checkpoint_interval_s, clock)
        report = _IntervalTimer(config.report_interval_s, clock)
        while not (stop.is_set() or self._is_finished()):
            started_s = clock()
            if refresh.is_due():
                self._refresh()
            if has_trained := self._may_update():
                self._update()
            else:
                stop.wait(IDLE_WAIT_S)
            self._versions.publish_if_due(self.updates, self._trainer.policy_snapshot, self._trainer.policy_kl)
            if checkpoint.is_due() or self._versions.needs_checkpoint or self._writer.has_failed:
                self._checkpoint(stop)
            if report.is_due():
                self._report()
            self._count_time(has_trained, clock() - started_s)
        if not stop_now.is_set():
            if self._versions.needs_checkpoint:
                self._checkpoint(stop, wait=True)
            self._versions.publish(self.updates, self._trainer.policy_snapshot)
        self._report()
        self._checkpoint(stop, wait=True)

    def _is_finished(self) -> bool:
        config = self._config
        return self.training_s >= config.max_training_s or 0 < config.max_updates <= self.updates

    def _may_update(self) -> bool:
        allowed = self._config.warmup_updates + self._config.utd_max * self._counters.online_steps
        return self._trainer.can_sample and self.updates < allowed and not self._versions.is_too_far_ahead

    def _update(self) -> None:
        self._trainer.update()
        self._counters.updates += 1

    def _count_time(self, has_trained: bool, seconds: float) -> None:
        if has_trained:
            self._counters.training_s += seconds
            self._steps.add(seconds)
            self._publisher.observe(seconds)
        else:
            self._counters.waited_s += seconds

    def _refresh(self) -> None:
        """Reads new steps from the store."""
        trainer = self._trainer
        trainer.refresh()
        self._counters.refresh_online(len(trainer.demo_online.online))
        if len(trainer.demo_online) and not trainer.can_sample and not self._has_warned:
            log.warning("learner.nothing_to_sample no stored step passes learner.sampler.only: training waits")
            self._has_warned = True
        self._versions.update_episode_count(trainer.finished_episodes)

    def _checkpoint(self, stop: threading.Event, wait: bool = False) -> None:
        """Copies the state and starts to write it. Training continues unless `wait` is set or the disk is full.

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
        not_finite = [name for name, value in checkpoint.arrays.items() if not np.isfinite(value).all()]
        if not_finite:
            raise NotFinite(f"training diverged by update {self.updates}: {not_finite[:3]} are not finite")
        self._writer.write(checkpoint)
        self._versions.version_limit = self._versions.version + VERSIONS_PER_CHECKPOINT
        if wait:
            self._writer.finish()

    def _wait_for_room(self, error: DiskFull, stop: threading.Event) -> None:
        """Returns when a checkpoint is written, or if `stop` is set and there is still no room."""
        log.error("checkpoint.disk_full %s; training pauses", error)
        while True:
            self._disk_full = error
            self._report()
            is_stopped = stop.wait(DISK_RETRY_S)
            self._refresh()  # the learner's other processes would time out otherwise
            if not is_stopped and (free := free_bytes(error.path)) < error.needed_bytes:
                error = DiskFull(error.path, error.needed_bytes, free)
                continue
            try:
                self._write(wait=True)
                break
            except DiskFull as repeated:
                error = repeated
                if is_stopped:
                    log.error("checkpoint.not_written updates=%d %s; the previous one is kept", self.updates, error)
                    return
        self._disk_full = None
        self._report()
        log.warning("checkpoint.disk_has_room training continues")

    def _snapshot(self) -> Checkpoint:
        counters = self._counters
        scalars: Scalars = {
            "position": self._trainer.position(),
            "online_steps": counters.online_steps,
            "online_seen": counters.online_seen,
            "version": self._versions.version,
            "policy": self._policy_digest(),
            "training_s": counters.training_s,
            "waited_s": counters.waited_s,
            PROCESS_COUNT_KEY: self._trainer.processes,
        }
        return Checkpoint(counters.updates, scalars, self._trainer.state_dict())

    def _policy_digest(self) -> str:
        """Returns the digest of the current weights: a checkpoint and a version of one update agree bit for bit."""
        return build_tensor_set(self._trainer.policy_weights()).digest.hex()

    def _resume(self, folder: Path) -> None:
        self._trainer.refresh()
        self._unreadable_checkpoints = len(scan_checkpoints(folder).unreadable)
        checkpoint = load_latest_checkpoint(folder)
        if checkpoint is None:
            return
        position, policy = self._restore_scalars(folder, checkpoint)
        if position > self._trainer.position():
            raise ConfigError(
                f"the checkpoint of update {checkpoint.updates} in {folder} has read record {position} of its store, "
                f"but this store ends at record {self._trainer.position()}: it is another store, or has lost its "
                "newest records. Restore the right store, or move this checkpoint out of the folder to resume from "
                "the one before it"
            )
        if not self._trainer.load_checkpoint(checkpoint):
            before, now = checkpoint.scalars.get(PROCESS_COUNT_KEY, 1), self._trainer.processes
            log.warning("learner.process_count_changed before=%s now=%d: the sampler starts from its seed", before, now)
        if self._policy_digest() != policy:
            raise WireError(f"the checkpoint in {folder} does not give the policy that was published from it")
        self._counters.updates = checkpoint.updates
        log.info("learner.resumed updates=%d training_s=%.1f", self.updates, self.training_s)

    def _restore_scalars(self, folder: Path, checkpoint: Checkpoint) -> tuple[int, str]:
        """Restores the counters. Returns the position in the store and the digest of the policy."""
        scalars, counters = checkpoint.scalars, self._counters
        try:
            position, policy = int(scalars["position"]), str(scalars["policy"])
            counters.online_steps, counters.online_seen = int(scalars["online_steps"]), int(scalars["online_seen"])
            self._versions.version = int(scalars["version"]) + 2 * VERSIONS_PER_CHECKPOINT
            counters.training_s, counters.waited_s = float(scalars["training_s"]), float(scalars["waited_s"])
        except (KeyError, ValueError) as error:
            raise WireError(
                f"the checkpoint of update {checkpoint.updates} in {folder} lacks {error}: another version of user-sys "
                "wrote it; resume with that version, or move the checkpoint out of the folder"
            ) from None
        return position, policy

    def _report(self) -> None:
        counters, trainer, cache = self._counters, self._trainer, self._trainer.replay.report()
        self._report_scalars(
            counters.updates,
            {
                **trainer.algorithm.scalars(),
                "training_s": counters.training_s,
                "waited_s": counters.waited_s,
                **self._steps.report(counters),
                "online_steps": float(counters.online_steps),
                "updates_per_step": counters.updates / max(1, counters.online_steps),
                "demo_transitions": float(len(trainer.demo_online.demo)),
                "online_transitions": float(len(trainer.demo_online.online)),
                "cold_share": cache.misses / max(1, cache.observations),
                "damaged": float(cache.damaged),
                "policy_version": float(self._versions.version),
                "checkpoints_unreadable": float(self._unreadable_checkpoints),
                **_disk_scalars(self._disk_full),
                **self._publisher.scalars(),
            },
        )


def _disk_scalars(full: DiskFull | None) -> dict[str, float]:
    needed, free = (0, 0) if full is None else (full.needed_bytes, full.free_bytes)
    return {"disk_needed_bytes": float(needed), "disk_free_bytes": float(free)}


class _IntervalTimer:
    """A periodic event; due at once at first."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._next_s = clock()

    def is_due(self) -> bool:
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        return True
