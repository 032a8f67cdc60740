"""The learner: reads new experience, samples, updates, publishes weights and writes checkpoints, each at its own rate.

One setting bounds how far training and acting may drift apart: `LearnerConfig.staleness`, in versions of the weights.
None is free-running: neither waits for the other.

An algorithm that replays steps draws old ones as well. With a staleness of s, training waits while the slowest robot
acts with a version more than s behind the newest. `LearnerConfig.utd_max` bounds something else, how often the same
data are used: updates per online step.

An algorithm that uses each step once (`TrainingData.once`) alternates with the robots, which never stop:

1. The learner publishes version v, also before its first update and after a resumption.
2. Robots act with v. Steps of the newest s + 1 versions wait in order; older ones are dropped and counted.
3. A batch of them is there: one update, while the robots go on with v.
4. The learner publishes v + 1. The steps that robots made with v meanwhile are one version behind now: s = 0 drops
   them, and each batch is of the newest version alone; s >= 1 uses them first. What s = 0 costs is the experience of
   one update and one push.

Checkpoints and the store hold everything that a resumed learner needs, steps used once included. On a CPU, with one
seed and the same store, a resumed run makes bit-identical updates. Steps of versions that were published after the
checkpoint are of a lost course of training: an algorithm with a finite staleness drops them. If the store was restored
from a backup that is older than the checkpoint, one that uses each step once leaves out the versions before the
checkpoint's.

A learner of several processes runs the same loop in each. Rank 0 decides what to do in each iteration and broadcasts
it; it alone publishes, reports and writes checkpoints.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

import numpy as np

from user_sys.errors import ConfigError, DiskFull, RunError, WireError
from user_sys.learner.checkpoint import Checkpoint, CheckpointWriter, Scalars, load_latest_checkpoint, scan_checkpoints
from user_sys.learner.config import LearnerConfig
from user_sys.learner.frozen_weights import FROZEN_KEY, frozen_digest, restore_frozen, save_frozen
from user_sys.learner.publisher_client import PublisherClient
from user_sys.learner.trainer import ALGORITHM_KEY, LOG_ID_KEY, POLICY_KEY, PROCESS_COUNT_KEY, RECORD_KEY, Trainer
from user_sys.messages import NO_VERSION
from user_sys.store.files import free_bytes
from user_sys.trace import span
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.state import NotFinite

REFRESH_INTERVAL_S = 0.05
IDLE_WAIT_S = 0.01
DISK_RETRY_S = 1.0
MAX_STEP_SAMPLES = 4096
MAX_SKIPPED = 100  # batches without a step to clone before the learner reports that it finds none
VERSIONS_PER_CHECKPOINT = 1000
"""Maximum number of versions from one checkpoint to the next; the next one is written early if more are due. A resumed
learner skips twice as many numbers, because the last checkpoint may not have been completed. So it never reuses a
number: robots accept only growing ones."""

ReportScalars = Callable[[int, dict[str, float]], None]
log = logging.getLogger(__name__)


class VersionPublisher:
    """Numbers versions and publishes them when they are due. One thread calls it.

    Attributes:
        version: number of the newest version.
        version_limit: the greatest number that the last checkpoint has reserved.
        publish_s: seconds for which the newest version held up training.
    """

    def __init__(
        self,
        config: PublishConfig,
        publisher: PublisherClient,
        clock: Callable[[], float],
        staleness: int | None = None,
        after_each_update: bool = False,
        is_pretrained: bool = False,
    ) -> None:
        """Args:
        after_each_update: publishes the initial weights and those of each update, instead of by `config`.
        is_pretrained: publishes the initial weights too, so that robots act with them before the first update.
        """
        self.version = self.version_limit = 0
        self.publish_s = 0.0
        self._config, self._publisher, self._clock = config, publisher, clock
        self._staleness, self._after_each_update = staleness, after_each_update
        self._next_s = clock()
        self._published_updates = -1 if after_each_update or is_pretrained else 0
        self._episodes, self._has_episode_ended = 0, False

    @property
    def needs_checkpoint(self) -> bool:
        """No number is left before the next checkpoint."""
        return self.version >= self.version_limit

    @property
    def is_too_far_ahead(self) -> bool:
        """The slowest robot is more versions behind than the staleness allows."""
        return self._staleness is not None and self._publisher.versions_ahead > self._staleness

    @property
    def is_held_by_pin(self) -> bool:
        """Training waits for robots whose version is pinned."""
        return self._publisher.pinned_version != NO_VERSION and self.is_too_far_ahead

    def is_published(self, updates: int) -> bool:
        """Whether the newest version has the weights after `updates` updates."""
        return self._published_updates == updates

    def published_version(self, updates: int) -> int:
        """The newest version if it has the weights after `updates` updates, else `NO_VERSION`."""
        return self.version if self.is_published(updates) else NO_VERSION

    def update_episode_count(self, count: Callable[[], int]) -> None:
        """`count` returns the number of finished episodes; called only if the settings need it."""
        if self._config.at_episode_ends and (episodes := count()) > self._episodes:
            self._episodes, self._has_episode_ended = episodes, True

    def is_due(self, updates: int) -> bool:
        """Whether a version is due after `updates` updates and the version before is ready.

        After each update one is due at once: training waits for it, so that the governor has nothing to protect.
        """
        return (self._after_each_update or not self._publisher.is_busy) and self._is_due(updates)

    def publish(self, updates: int, trainer: Trainer) -> None:
        """Publishes now, unless no update was made since the last version or no number is left.

        Raises:
            NotFinite: an earlier version held NaN or infinity.
        """
        if self.is_published(updates) or self.needs_checkpoint:
            return
        self.version += 1
        started_s = time.perf_counter()
        with span("publish"):
            self._publisher.publish(trainer.policy_snapshot(), self.version, updates)
        self.publish_s = time.perf_counter() - started_s
        self._published_updates = updates
        self._next_s = self._clock() + self._config.every_s
        self._has_episode_ended = False

    def _is_due(self, updates: int) -> bool:
        config, since = self._config, updates - self._published_updates
        if self._after_each_update or since <= 0 or updates < config.after_updates:
            return self._after_each_update and since > 0
        return (
            self._published_updates < 0
            or (config.every_s > 0 and self._clock() >= self._next_s)
            or 0 < config.every_updates <= since
            or (config.at_episode_ends and self._has_episode_ended)
        )


@dataclass
class _Counters:
    """Totals of a run, resumptions included; saved in checkpoints.

    Attributes:
        online_steps: that were stored so far; one that a label takes away and brings back counts once.
        waited_s: time in which the staleness bound or the robots held up training.
    """

    updates: int = 0
    online_steps: int = 0
    training_s: float = 0.0
    waited_s: float = 0.0


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


class _Due(IntFlag):
    """What all processes do together in an iteration of the loop."""

    NOTHING = 0
    REFRESH = 1
    UPDATE = 2
    CHECKPOINT = 4
    END = 8


class Learner:
    """Trains one policy for one embodiment, as one of the processes of `trainer.group`. One thread calls it."""

    def __init__(
        self,
        config: LearnerConfig,
        trainer: Trainer,
        *,
        publisher: PublisherClient | None,
        report: ReportScalars,
        checkpoint_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Resumes from the newest checkpoint of `checkpoint_dir`, if there is one. Closes `trainer` in the end.

        Args:
            publisher: None in other processes than that of rank 0, which use no `report` either.
            report: takes the number of updates and scalars; must return at once.
            clock: monotonic seconds.

        Raises:
            ConfigError: the checkpoint is of another store, or the store lacks what the algorithm trains on.
            RunError: there are checkpoints, but none can be read.
            WireError: the checkpoint is of another algorithm, other settings or another robot.
        """
        self._config, self._publisher = config, publisher
        self._trainer, self._batches = trainer, trainer.batches
        self._report_scalars, self._clock, self._folder = report, clock, checkpoint_dir
        self._versions = (
            None
            if publisher is None
            else VersionPublisher(
                config.publish,
                publisher,
                clock,
                config.staleness,
                self._batches.once is not None,
                trainer.is_pretrained,
            )
        )
        self._writer = CheckpointWriter(checkpoint_dir, config.checkpoints_kept)
        self._counters, self._steps = _Counters(), _StepStatistics()
        self._timers = _Timers(config, clock)
        self._has_warned = False  # that it has nothing to sample
        self._disk_full: DiskFull | None = None  # training pauses
        self._unreadable_checkpoints = 0
        self._frozen_digest = ""  # of the policy's frozen weights, which checkpoints name
        try:
            self._resume()
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

    def close(self) -> None:
        """Closes the trainer. `run` does it too; a second call has no effect."""
        self._trainer.close()

    def run(self, stop: threading.Event, stop_now: threading.Event | None = None) -> None:
        """Trains until the limit of time or updates, or until `stop` is set; then writes a checkpoint and publishes.

        With `stop_now` set it only writes the checkpoint. The events of rank 0 count for all processes. Blocks.
        Training pauses while the disk has no room for a checkpoint. If there is still no room when `stop` is set, the
        checkpoint is skipped and logged. After a crash a new `Learner` resumes from the newest checkpoint.

        Raises:
            LinkDown: another process of this learner has ended.
            NotFinite: training has diverged; the weights were neither published nor saved.
            RunError: a checkpoint could not be written, or the publisher process has ended.
            StoreError: the store cannot be read.
        """
        log.info("learner.started updates=%d training_s=%.1f", self.updates, self.training_s)
        if self._lacks_demonstrations:
            have, needed = self._batches.demonstrations, self._batches.demonstrations_needed
            log.info("learner.waits_for_demonstrations have=%d learner.min_demonstrations=%d", have, needed)
        try:
            if self._versions is not None:
                save_frozen(self._folder, self._trainer.frozen, self._frozen_digest)
            self._save(wait=True)  # shows an unwritable disk, and reserves version numbers
            while not self._iterate(stop):
                pass
            self._save(wait=True)
            if self._publisher is not None:
                self._publisher.end_training()
            self._publish_if(self._versions is not None and not (stop_now and stop_now.is_set()))
            self._report(finished=True)
        finally:
            self.close()
        log.info("learner.stopped updates=%d training_s=%.1f", self.updates, self.training_s)

    def _iterate(self, stop: threading.Event) -> bool:
        """Runs one iteration. Returns whether training has ended."""
        started_s = self._clock()
        due = _Due(self._trainer.group.broadcast(self._due(stop)))
        if _Due.REFRESH in due:
            self._refresh()
        has_trained = _Due.UPDATE in due and self._trainer.update(self.updates)
        self._counters.updates += has_trained
        if not has_trained and self._publisher is not None:  # the others wait for its next decision
            stop.wait(IDLE_WAIT_S)
        is_publishing = self._disk_full is None and not stop.is_set()  # the last version follows the last checkpoint
        versions = self._versions if is_publishing else None
        self._publish_if(versions is not None and versions.is_due(self.updates))
        if self._timers.report.is_due():
            self._report()
        if _Due.CHECKPOINT in due:
            self._save(wait=self._disk_full is not None)
        self._count_time(has_trained, self._clock() - started_s)
        return _Due.END in due

    def _publish_if(self, wanted: bool) -> None:
        """Publishes if rank 0 wants it. All processes call it together."""
        self._trainer.gather(wanted)
        if self._versions is not None and wanted:
            self._versions.publish(self.updates, self._trainer)

    def _due(self, stop: threading.Event) -> _Due:
        """Decides for all processes what to do; only the decision of rank 0 counts."""
        if self._versions is None:
            return _Due.NOTHING
        if stop.is_set() or self._is_finished():
            return _Due.END
        published = self._versions.published_version(self.updates)
        is_new = self._batches.once is not None and published not in (NO_VERSION, self._batches.once.newest_version)
        due = _Due.REFRESH if self._timers.refresh.is_due() or is_new else _Due.NOTHING
        if self._writer.has_failed:
            self._finish_writing()
        if self._disk_full is not None:
            return due | _Due.CHECKPOINT if self._has_room() else due
        is_possible = self._trainer.can_sample and not self._lacks_demonstrations
        if is_possible and self._is_update_allowed(self._versions):
            due |= _Due.UPDATE
        if not self._writer.is_busy and (self._timers.checkpoint.is_due() or self._versions.needs_checkpoint):
            due |= _Due.CHECKPOINT
        return due

    def _is_update_allowed(self, versions: VersionPublisher) -> bool:
        """Whether the staleness allows an update now; see the module."""
        if self._batches.once is not None:
            return versions.is_published(self.updates) and self._batches.once.newest_version == versions.version
        allowed = self._config.warmup_updates + self._config.utd_max * self._counters.online_steps
        return self.updates < allowed and not versions.is_too_far_ahead

    @property
    def _lacks_demonstrations(self) -> bool:
        """Whether the first update waits for demonstrations."""
        return self.updates == 0 and self._batches.demonstrations < self._batches.demonstrations_needed

    def _is_finished(self) -> bool:
        config = self._config
        return self.training_s >= config.max_training_s or 0 < config.max_updates <= self.updates

    def _count_time(self, has_trained: bool, seconds: float) -> None:
        if has_trained:
            self._counters.training_s += seconds
            self._steps.add(seconds)
            if self._publisher is not None:
                self._publisher.observe(seconds)
        else:
            self._counters.waited_s += seconds

    def _refresh(self) -> None:
        """Reads new steps from the store."""
        trainer = self._trainer
        if self._batches.once is not None:
            newest = NO_VERSION if self._versions is None else self._versions.published_version(self.updates)
            self._add_version(trainer.group.broadcast(newest))
        known = len(self._batches.replay.index.steps)
        trainer.refresh()
        self._counters.online_steps += self._batches.online_steps(first_row=known)
        if self._has_nothing_to_sample and not self._has_warned:
            log.warning(
                "learner.nothing_to_sample %s trains on no stored step: give demonstrations or corrections, or check "
                "learner.options, learner.sampler.only, learner.sampler.mixture and policy.options.pretrain_updates",
                self._config.algorithm,
            )
            self._has_warned = True
        if self._versions is not None:
            self._versions.update_episode_count(self._batches.finished_episodes)

    @property
    def _has_nothing_to_sample(self) -> bool:
        """Whether the store has steps, and none that this learner trains on."""
        has_steps = self._trainer.can_sample and self._trainer.skipped < MAX_SKIPPED
        is_possible = self._batches.once is not None or has_steps
        return not is_possible and len(self._batches.demo_online) > 0

    def _add_version(self, version: int) -> None:
        if self._batches.once is not None and version != NO_VERSION:
            self._batches.add_version(version)

    # Checkpoints

    def _save(self, wait: bool) -> None:
        """Copies the state and starts to write it; with `wait` it blocks until that is done. Raises as `run`."""
        with span("copy checkpoint"):
            state = self._trainer.state_dict()
        if self._versions is None:
            return
        self._trainer.require_finite()
        not_finite = [name for name, value in state.items() if not np.isfinite(value).all()]
        if not_finite:
            raise NotFinite(f"training diverged by update {self.updates}: {not_finite[:3]} are not finite")
        counters, position = self._counters, self._batches.position()
        scalars: Scalars = {
            ALGORITHM_KEY: self._config.algorithm,
            POLICY_KEY: self._trainer.policy_kind,
            PROCESS_COUNT_KEY: self._trainer.group.world,
            FROZEN_KEY: self._frozen_digest,
            "position": position,
            RECORD_KEY: self._batches.record_at(position),
            LOG_ID_KEY: self._batches.log_id(),
            "online_steps": counters.online_steps,
            "version": self._versions.version,
            "published": self._versions.published_version(counters.updates),
            "training_s": counters.training_s,
            "waited_s": counters.waited_s,
        }
        if wait:
            self._finish_writing()
        self._writer.write(Checkpoint(counters.updates, scalars, state))
        if wait and not self._finish_writing():
            return
        self._versions.version_limit = self._versions.version + VERSIONS_PER_CHECKPOINT
        if self._disk_full is not None:
            log.warning("checkpoint.disk_has_room training continues")
            self._disk_full = None

    def _finish_writing(self) -> bool:
        """Waits for the checkpoint that is being written. Returns False if the disk is full: training pauses."""
        try:
            self._writer.finish()
        except DiskFull as error:
            log.error("checkpoint.disk_full updates=%d %s; the previous one is kept", self.updates, error)
            self._disk_full = error
            self._report()
            return False
        return True

    def _has_room(self) -> bool:
        """Whether a checkpoint may fit on the disk now."""
        full = self._disk_full
        if full is None or not self._timers.retry.is_due():
            return False
        self._disk_full = DiskFull(full.path, full.needed_bytes, free_bytes(full.path))
        return self._disk_full.free_bytes >= full.needed_bytes

    def _resume(self) -> None:
        self._trainer.refresh()
        self._batches.require_columns()
        self._batches.require_angles()
        checkpoint = None
        if self._versions is not None:
            self._unreadable_checkpoints = len(scan_checkpoints(self._folder).unreadable)
            checkpoint = load_latest_checkpoint(self._folder)
            self._trainer.group.broadcast(-1 if checkpoint is None else checkpoint.updates)
        elif (updates := self._trainer.group.broadcast(0)) >= 0:
            checkpoint = load_latest_checkpoint(self._folder)
            if checkpoint is None or checkpoint.updates != updates:
                raise RunError(f"the checkpoint of update {updates} in {self._folder} has vanished")
        if checkpoint is None:
            self._frozen_digest = frozen_digest(self._trainer.frozen)
            self._counters.online_steps = self._batches.online_steps()
            self._skip_stored_versions()
            return
        self._restore_scalars(checkpoint)
        self._skip_stored_versions()
        self._frozen_digest = str(checkpoint.scalars.get(FROZEN_KEY, ""))
        restore_frozen(self._folder, self._trainer.frozen, self._frozen_digest)
        # The sampler's state may lack this version, and drops the windows of versions that it lacks.
        self._add_version(int(checkpoint.scalars.get("published", NO_VERSION)))
        before, now = checkpoint.scalars.get(PROCESS_COUNT_KEY, 1), self._trainer.group.world
        if not self._trainer.load_checkpoint(checkpoint) and before != now:
            log.warning("learner.process_count_changed before=%s now=%d: the sampler starts from its seed", before, now)
        self._steps.report(self._counters)  # later rates are of this process
        log.info("learner.resumed updates=%d training_s=%.1f", self.updates, self.training_s)

    def _skip_stored_versions(self) -> None:
        """Numbers versions from above those of stored steps, such as of a training whose checkpoints are lost.

        At a resumption they are lower than the number that it skips to, unless the newest checkpoints are lost.
        """
        newest = self._batches.newest_version()
        if self._versions is not None and newest > self._versions.version:
            self._versions.version = newest + 2 * VERSIONS_PER_CHECKPOINT

    def _restore_scalars(self, checkpoint: Checkpoint) -> None:
        scalars, counters = checkpoint.scalars, self._counters
        where = f"the checkpoint of update {checkpoint.updates} in {self._folder}"
        try:
            algorithm, position = scalars[ALGORITHM_KEY], int(scalars["position"])
            counters.online_steps = int(scalars["online_steps"]) + self._batches.online_steps(after=position)
            counters.training_s, counters.waited_s = float(scalars["training_s"]), float(scalars["waited_s"])
            version = int(scalars["version"]) + 2 * VERSIONS_PER_CHECKPOINT
        except (KeyError, ValueError) as error:
            raise WireError(
                f"{where} lacks {error}: another version of user-sys wrote it; resume with that version, or move the "
                "checkpoint out of the folder"
            ) from None
        kind = self._trainer.policy_kind
        for what, setting, saved, own in (
            ("algorithm", "learner.algorithm", algorithm, self._config.algorithm),
            ("policy", "policy.kind", scalars.get(POLICY_KEY, kind), kind),
        ):
            if saved != own:
                raise WireError(
                    f"{where} is of the {what} {saved}, and {setting} is {own}: resume with --{setting}={saved}, or "
                    "start a new run"
                )
        if self._trainer.lacks_records(checkpoint):
            end = self._batches.position()
            if scalars.get(LOG_ID_KEY) != self._batches.log_id():
                raise ConfigError(
                    f"{where} has read record {position} of its store, and this store, which ends at record {end}, "
                    "lacks it: it is another store. Restore the right one, or move the checkpoints out of the folder "
                    "to train anew"
                )
            log.warning("learner.store_is_older read=%d end=%d: the sampler starts from its seed", position, end)
        counters.updates = checkpoint.updates
        if self._versions is not None:
            self._versions.version = version

    def _report(self, *, finished: bool = False) -> None:
        """Reports scalars. Raises NotFinite if a loss is not finite."""
        if self._publisher is None or self._versions is None:
            return
        counters, trainer, cache = self._counters, self._trainer, self._batches.replay.report()
        losses = trainer.require_finite()
        full = self._disk_full
        self._report_scalars(
            counters.updates,
            {
                **losses,
                "training_s": counters.training_s,
                "waited_s": counters.waited_s,
                **self._steps.report(counters),
                "online_steps": float(counters.online_steps),
                "updates_per_step": counters.updates / max(1, counters.online_steps),
                "demo_transitions": float(len(self._batches.demo_online.demo)),
                "online_transitions": float(len(self._batches.demo_online.online)),
                "demonstrations": float(self._batches.demonstrations),
                "demonstrations_needed": float(self._lacks_demonstrations and self._batches.demonstrations_needed),
                "cold_share": cache.misses / max(1, cache.observations),
                "damaged": float(cache.damaged),
                **self._batches.scalars(),
                "policy_version": float(self._versions.version),
                "publish_ms": 1e3 * self._versions.publish_s,
                "held_by_pin": float(self._versions.is_held_by_pin),
                "nothing_to_sample": float(self._has_nothing_to_sample),
                "checkpoints_unreadable": float(self._unreadable_checkpoints),
                "disk_needed_bytes": float(full.needed_bytes if full else 0),
                "disk_free_bytes": float(full.free_bytes if full else 0),
                "finished": float(finished),
                **self._publisher.scalars(),
            },
        )


class _Timers:
    """When the store is read, a checkpoint and a report are due, and a full disk is tried again."""

    def __init__(self, config: LearnerConfig, clock: Callable[[], float]) -> None:
        self.refresh = _IntervalTimer(REFRESH_INTERVAL_S, clock)
        self.checkpoint = _IntervalTimer(config.checkpoint_interval_s, clock)
        self.report = _IntervalTimer(config.report_interval_s, clock)
        self.retry = _IntervalTimer(DISK_RETRY_S, clock)


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
