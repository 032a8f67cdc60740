"""The batches of one process: the stored steps that it trains on, drawn and put on its device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm, SentenceReader, TdErrors, TensorBatch, TrainingData
from user_sys.algorithms.distributed import TrainingGroup
from user_sys.codec import Array
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX, EpisodeSource
from user_sys.errors import ConfigError, StoreCorrupt
from user_sys.learner.config import CPU, DEMO_FRACTION, LearnerConfig
from user_sys.messages import NO_VERSION
from user_sys.plugins import load_algorithm
from user_sys.policies.policy import AGE_SUFFIX
from user_sys.policies.scaling import encoded_feature
from user_sys.replay.batches import EncodedColumn, ObservationFeatures
from user_sys.replay.buffer import UNUSABLE_ERRORS, ReplayBuffer
from user_sys.replay.once import OnceSelector
from user_sys.replay.sampler import Prefetcher, Sampler, SamplerConfig
from user_sys.replay.selectors import INTERVENTION_PHASES, DemoOnlineSelector, MixtureSelector, Selector, StepFilter
from user_sys.robot_records import embodiment_names
from user_sys.store.index import is_intervention
from user_sys.store.labels import DeleteLabel
from user_sys.store.store import StoreReader

log = logging.getLogger(__name__)


class BatchSource:
    """Reads the replay buffer and draws one process's part of each batch. One thread constructs it and calls it.

    Attributes:
        replay: the buffer that batches are drawn from.
        demo_online: the demonstrations and the online steps in the store, whatever the sampler draws.
        once: selects the steps of an algorithm that uses each step once; None for others.
        cloned_updates: see `TrainingData`.
        demonstrations_needed: before the first update.
        drawn: the newest batch, in host memory.
    """

    def __init__(
        self,
        config: LearnerConfig,
        spec: RobotSpec,
        reader: StoreReader,
        algorithm: Algorithm,
        *,
        seed: int,
        device: torch.device,
        group: TrainingGroup,
    ) -> None:
        """Builds the replay buffer and the sampler.

        Args:
            reader: the store, used from this thread only.
            device: for a GPU, batches lie in page-locked memory.
            group: the processes that train together.

        Raises:
            ConfigError: the settings do not fit the robot or what the algorithm trains on.
        """
        require_suitable(config, algorithm.data)
        self._config, self._algorithm, self._device, self._reader = config, algorithm, device, reader
        self._embodiments, self._action = embodiment_names(reader.path, spec), spec.action
        self._sentences = torch.empty(0)  # what the policy reads of each sentence in the store
        data = algorithm.data
        self.cloned_updates, wanted = data.cloned_updates, config.min_demonstrations
        has_pretraining = getattr(algorithm.policy, "pretrain_updates", 0) > 0
        self.demonstrations_needed = int(has_pretraining) if wanted is None else wanted
        ages = getattr(algorithm.policy, "reads_ages", False)
        features = ObservationFeatures.of(spec, data.cameras, columns=data.features, extras=data.extras, ages=ages)
        self.replay = ReplayBuffer(reader, features, cache_bytes=config.cache_bytes // group.world)
        self.demo_online = DemoOnlineSelector(self._embodiments, config.demo_fraction)
        batches = data.batches(config.sampler.n_step)
        selector: Selector = self.demo_online
        self.once: OnceSelector | None = None
        if data.once:
            only = replace(config.sampler.only, embodiments=self._embodiments, sources=(EpisodeSource.ONLINE,))
            length = max(1, batches.chunk_length)
            within = batches.within_phase
            selector = self.once = OnceSelector(
                only, config.staleness, length, group.rank, group.world, within_phase=within
            )
        elif not config.sampler.is_unfiltered_mixture or data.mixture or data.finished or data.phases:
            selector = config.sampler.make_selector(
                self._embodiments,
                config.demo_fraction,
                data.mixture,
                finished=data.finished,
                phases=data.phases,
                interventions=data.interventions,
            )
        self._selector, self._logged_parts = selector, set[int]()
        if selector is not self.demo_online:
            self.replay.subscribe(self.demo_online.update)
        sampler = Sampler(
            self.replay,
            selector,
            batches,
            config.batch_size // (group.world * config.compute.parts),
            seed=seed,
            rank=group.rank,
            world=group.world,
            pin=device.type != CPU,
        )
        self._batches = Prefetcher(sampler, 0 if data.once else config.batches_ahead)

    def require_columns(self) -> None:
        """Checks the newest stored chunk, and the newest in which a policy acted, after the first refresh.

        Raises:
            ConfigError: it lacks what the algorithm trains on.
        """
        index, features = self.replay.index, self.replay.features
        rows = np.flatnonzero(StepFilter(embodiments=self._embodiments).matches(index, 0))
        by_policy = rows[index.steps.policy_version[rows] >= 0]
        unlabelled = [name for name in features.extras if index.labelled_column(name, rows[:1]) is None]
        # Only a policy records extras, such as its noise; experts and people have none.
        recorded = [name for name in (*features.vectors, *features.cameras) if not name.endswith(AGE_SUFFIX)]
        for chosen, wanted in ((rows, recorded), (by_policy, unlabelled)):
            for row in chosen[-1:].tolist():
                chunk = int(index.steps.chunk[row])
                try:
                    found = self.replay.columns_of(chunk)
                except UNUSABLE_ERRORS:  # the replay buffer reports damage
                    continue
                if missing := [name for name in wanted if name not in found]:
                    episode = index.episodes.ids.names[int(index.chunks.episode[chunk])]
                    raise ConfigError(
                        f"{self._config.algorithm} trains on {missing[0]!r}, and {episode} lacks it: record it "
                        "(recorder, policy), add the column as labels, or train without it"
                    )

    def require_angles(self) -> None:
        """Checks the action of the newest stored demonstration, after the first refresh.

        Raises:
            ConfigError: an angle is far beyond its bounds, as of a dataset that was imported in degrees.
        """
        index, demonstrations = self.replay.index, (EpisodeSource.DEMO,)
        only = StepFilter(embodiments=self._embodiments, sources=demonstrations)
        for row in np.flatnonzero(only.matches(index, 0))[-1:].tolist():
            try:
                chunk = self._reader.read(int(index.steps.chunk[row]))
            except UNUSABLE_ERRORS:  # the replay buffer reports damage
                continue
            action = chunk.columns.get(APPLIED_ACTION)
            if action is None or action.shape[1:] != self._action.shape:
                continue
            if far := self._action.find_far_angle(action.min(0), action.max(0)):
                raise ConfigError(
                    f"demonstration {chunk.header.episode}: {far}; if its dataset is in degrees, delete its episodes, "
                    "and import them with --use-degrees"
                )

    def close(self) -> None:
        """Ends the threads. A second call has no effect."""
        self._batches.close()
        self.replay.close()

    @property
    def is_ready(self) -> bool:
        """Whether there are steps to draw, as of the last refresh of `replay`."""
        return self._batches.sampler.is_ready

    @property
    def demonstrations(self) -> int:
        """The number of finished episodes with steps of `demo_online.demo` that did not fail by hand."""
        index, rows = self.replay.index, self.demo_online.demo.rows
        is_shown = np.zeros(len(index.episodes), bool)
        is_shown[index.episode_of(rows[~index.failed_by_hand(rows)])] = True
        return int((is_shown & index.episodes.complete).sum())

    @property
    def has_example(self) -> bool:
        """Whether the newest batch has a step of a person with an action, which an actor-critic clones."""
        shown = is_intervention(self.drawn.phase) & ~self.drawn.failed_by_hand
        first = shown.reshape(len(self.drawn), -1)[:, 0]  # of chunks, the first step counts
        return bool((first & (self.drawn.weight > 0)).any())

    def add_version(self, version: int) -> None:
        """Makes `version` the newest, for an algorithm that uses each step once. A refresh must follow."""
        assert self.once is not None  # as the caller knows
        self.once.add_version(version, self.replay.index)

    def scalars(self) -> dict[str, float]:
        """Returns the metrics of the sampler."""
        return {} if self.once is None else {"windows_used": self.once.used, "windows_stale": self.once.stale}

    def next(self, number: int) -> TensorBatch | None:
        """Draws the batch of update `number`; None if none of the windows of `once` can be read, which are dropped."""
        self._encode_pictures_from(number)
        self._log_empty_parts()
        try:
            self.drawn = self._batches.next()
        except StoreCorrupt as error:
            if self.once is None:
                raise
            log.warning("learner.batch_unreadable %s", error)
            return None
        sentences = tuple(self.replay.index.episodes.sentences.names)
        return self._with_sentences(TensorBatch.of(self.drawn, sentences, self._device))

    def _log_empty_parts(self) -> None:
        """Logs each part of the settings' mixture that has no steps, once."""
        mixture = self._config.sampler.mixture
        empty = self._selector.empty_parts if mixture and isinstance(self._selector, MixtureSelector) else []
        for place in {*empty} - self._logged_parts:
            self._logged_parts.add(place)
            log.warning(
                "learner.mixture_part_empty part=%d roles=%s tasks=%s: no stored step matches, so the other parts of "
                "learner.sampler.mixture replace it; check its names, or merge a store that has its steps",
                place + 1,
                list(mixture[place].roles),
                list(mixture[place].tasks),
            )

    def note_update(self) -> None:
        """The algorithm was updated with the newest batch; a prioritized sampler gets its TD errors."""
        if self._batches.sampler.uses_feedback:
            assert isinstance(self._algorithm, TdErrors)  # as checked at the start
            self._batches.sampler.feedback(self.drawn, self._algorithm.td_errors().float().cpu().numpy())

    def _with_sentences(self, batch: TensorBatch) -> TensorBatch:
        """`batch` with what the policy reads of sentences; each sentence is encoded once."""
        policy = self._algorithm.policy
        if not isinstance(policy, SentenceReader):
            return batch
        if new := batch.sentences[len(self._sentences) :]:
            encoded = policy.encode_sentences(new).to(self._device)
            self._sentences = torch.cat([self._sentences, encoded]) if len(self._sentences) else encoded
        return batch.with_sentences(self._sentences)

    def _encode_pictures_from(self, number: int) -> None:
        """From the update on that freezes the policy's encoder, batches have the encoded pictures."""
        policy, features = self._algorithm.policy, self.replay.features
        frozen_from = getattr(policy, "frozen_from", -1)
        if not 0 <= frozen_from <= number or not features.cameras or features.encoded:
            return
        columns = {}
        for feature, shape in features.cameras.items():
            camera = feature.removeprefix(IMAGE_PREFIX)
            encode = partial(self._encode_images, camera)
            size = encode(np.zeros((1, *shape), np.uint8)).shape[1]
            columns[feature] = EncodedColumn(encoded_feature(camera), size, encode)
        self.replay.encode_pictures(columns)
        self._batches.replan()

    @torch.no_grad()
    def _encode_images(self, camera: str, images: Array) -> Array:
        policy: Any = self._algorithm.policy
        encoded: Array = policy.encode_images(camera, torch.from_numpy(images).to(self._device)).cpu().numpy()
        return encoded

    def finished_episodes(self) -> int:
        """Returns the number of complete episodes in the store."""
        return int(self.replay.index.episodes.complete.sum())

    def online_steps(self, *, first_row: int = 0, after: int = -1) -> int:
        """Returns the number of online steps that are not deleted or trimmed, after a refresh.

        Args:
            first_row: of the index; those before it do not count.
            after: sequence number of a record; steps of chunks up to it do not count.
        """
        index = self.replay.index
        online = StepFilter(embodiments=self._embodiments, sources=(EpisodeSource.ONLINE,)).matches(index, first_row)
        return int((online & (index.chunks.sequence[index.steps.chunk[first_row:]] > after)).sum())

    def newest_version(self) -> int:
        """Returns the newest version in stored steps of the learner's embodiment; `NO_VERSION` if there is none."""
        index = self.replay.index
        rows = StepFilter(embodiments=self._embodiments).matches(index, 0)
        return int(index.steps.policy_version[rows].max(initial=NO_VERSION))

    def position(self) -> int:
        """Returns the sequence number of the newest chunk that was read from the store; -1 if there is none."""
        sequence = self.replay.index.chunks.sequence
        return int(sequence.max()) if len(sequence) else -1

    def record_at(self, sequence: int) -> str:
        """Returns what distinguishes the chunk of this sequence number, after a refresh; empty if it is not here."""
        index = self.replay.index
        for chunk in np.flatnonzero(index.chunks.sequence == sequence).tolist():
            episode = index.episodes.ids.names[index.chunks.episode[chunk]]
            return f"{episode} {index.chunks.index[chunk]} {index.chunks.steps[chunk]}"
        return ""

    def was_deleted(self, record: str) -> bool:
        """Returns whether a label has deleted the episode of a chunk, which is named as by `record_at`."""
        return any(isinstance(label, DeleteLabel) for label in self.replay.index.labels(record.rsplit(" ", 2)[0]))

    def not_finite_inputs(self) -> Iterator[str]:
        """Names extra columns of the newest batch that are not finite; its other columns always are."""
        index = self.replay.index
        for name, column in self.drawn.extras.items():
            at = np.argwhere(~np.isfinite(column))
            if len(at):
                row = self.drawn.row[at[:1, 0]]
                step = int(index.step_of(row)[0]) + (int(at[0, 1]) if self.drawn.mask.shape[1] > 1 else 0)
                episode = index.episodes.ids.names[int(index.episode_of(row)[0])]
                yield f"{name!r} of {episode} is {column[tuple(at[0])]} at step {step}"

    def log_id(self) -> str:
        """Returns what is equal in the store and its backups, after a refresh."""
        return self._reader.log_id

    def state_dict(self) -> dict[str, Array]:
        """Returns copies of the sampler's state."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restores the sampler from `state_dict`, after a refresh. Raises WireError: the state is of other settings."""
        self._batches.load_state_dict(state)


def require_suitable(config: LearnerConfig, data: TrainingData) -> None:
    """Raises ConfigError: the settings do not fit what the algorithm trains on, `data`."""
    name = config.algorithm
    for key in ("kind", "mixture") if data.once else ():
        if getattr(config.sampler, key) != getattr(SamplerConfig(), key):
            raise ConfigError(f"learner.sampler.{key} has no effect with {name}, which uses each step once: remove it")
    if data.once and config.min_demonstrations:
        raise ConfigError(f"learner.min_demonstrations has no effect with {name}, which trains on none: remove it")
    if data.cloned_updates and (phases := config.sampler.only.phases) and not {*INTERVENTION_PHASES} & {*phases}:
        raise ConfigError(
            f"learner.sampler.only.phases is {list(phases)}, and policy.options.pretrain_updates clones steps in "
            f"{' and '.join(INTERVENTION_PHASES)}: add one of them, or leave out pretrain_updates"
        )
    if data.once and config.compute.parts > 1:
        raise ConfigError(f"learner.compute.parts has no effect with {name}, which draws parts itself: remove it")
    _, settings = load_algorithm(name, config.options)
    for key in data.mixture_settings if config.sampler.replaced_by else ():
        if getattr(settings, key) != getattr(type(settings)(), key):
            raise ConfigError(f"learner.options.{key} has no effect with {config.sampler.replaced_by}: remove it")
    if data.mixture and config.demo_fraction != DEMO_FRACTION:
        raise ConfigError(f"learner.demo_fraction has no effect with {name}, which has its own shares: remove it")
