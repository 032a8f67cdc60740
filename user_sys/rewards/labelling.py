"""Labels the episodes of a store by a reward, at ingestion or afterwards."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from user_sys.episode import EpisodeSource
from user_sys.errors import DataSetError, LinkDown, StoreError, WireError
from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader
from user_sys.rewards.reward import EpisodeReward, Reward
from user_sys.store.index import PERSON, EpisodeSummary, newest_trim
from user_sys.store.labels import (
    REWARD_PREFIX,
    Label,
    RewardLabel,
    SuccessLabel,
    TrimLabel,
    UndoLabel,
    effective_labels,
    encode_label,
)
from user_sys.store.store import StoreReader

ONLINE = EpisodeFilter(sources=(EpisodeSource.ONLINE,))
log = logging.getLogger(__name__)


class EpisodeLabeller:
    """Evaluates each complete episode of a store once; of a trimmed one, the steps that are kept, again for a new trim.

    Of episodes whose success a person has judged, only a dense reward labels steps, all but the last.

    Attributes:
        unusable: episodes that lack what the reward reads, or get an invalid reward.
    """

    def __init__(
        self, store: StoreReader, reward: Reward, kind: str, selection: EpisodeFilter = ONLINE, *, again: bool = False
    ) -> None:
        """Args:
        kind: of the reward; part of the labeller's name.
        again: replace earlier labels of this reward; else such episodes stay as they are, also if these are undone.
        """
        self._store, self._reward, self._selection, self._again = store, reward, selection, again
        self.labeller = REWARD_PREFIX + kind
        self.unusable = 0
        self._done: dict[str, TrimLabel | None] = {}  # the trim with which an episode was evaluated
        self._failures: Counter[str] = Counter()  # of the server, by episode
        self._seen_updates = 0  # of the store's index
        self._waiting: set[int] = set()  # rows of the episodes to evaluate

    def new_labels(self) -> Iterator[tuple[EpisodeSummary, EpisodeReward, list[Label]]]:
        """Reads new records of the store, and yields the labels of each episode that has to be evaluated.

        Raises:
            LinkDown: the reward asks a server that does not answer; a later call evaluates this episode after those
                at which the server has failed less often.
        """
        waiting = self._due_episodes()
        reader = EpisodeReader(self._store, trimmed=True) if waiting else None
        for episode in waiting:
            assert reader is not None
            row = self._store.index.episodes.find(episode.episode)
            self._done[episode.episode] = newest_trim(effective_labels(self._store.index.labels(episode.episode)))
            self._waiting.discard(row)
            try:
                recorded = reader.read(episode.episode)
                found = self._reward.evaluate(recorded)
            except (DataSetError, StoreError) as error:
                self.unusable += 1
                log.warning("reward.unusable %s", error)
                continue
            except LinkDown:
                self._failures[episode.episode] += 1
                del self._done[episode.episode]
                self._waiting.add(row)
                raise
            if episode.reward_source == PERSON:
                found = replace(found, success=None, rewards=None if found.rewards is None else found.rewards[:-1])
            labels = self._labels(episode, found, recorded.first_step or 0)
            try:
                for label in labels:
                    encode_label(label)
            except WireError as error:
                self.unusable += 1
                log.warning("reward.unusable episode=%s %s", episode.episode, error)
                continue
            if labels:
                yield episode, found, labels

    def _due_episodes(self) -> list[EpisodeSummary]:
        """Reads new records. The episodes to evaluate, of those that wait or have changed; after failures the last."""
        self._store.refresh()
        index = self._store.index
        self._waiting.update(index.updated_episodes(self._seen_updates).tolist())
        self._seen_updates = index.updates
        if not self._waiting:
            return []
        episodes = self._store.episodes()
        self._waiting = {row for row in self._waiting if self._is_due(episodes[row])}
        return sorted((episodes[row] for row in sorted(self._waiting)), key=lambda each: self._failures[each.episode])

    def _is_due(self, episode: EpisodeSummary) -> bool:
        if episode.deleted or not self._selection.matches(episode):
            return False
        if episode.reward_source == PERSON and not self._reward.is_dense:
            return False
        labels = self._store.index.labels(episode.episode)
        own, valid = self._own(labels), effective_labels(labels)
        if episode.episode in self._done:
            evaluated = self._done[episode.episode]
        elif self._again or not own:
            return True
        else:
            evaluated = newest_trim(effective_labels(labels[: labels.index(own[-1])]))
        undone = {each.undone_at_unix_ns for each in labels if isinstance(each, UndoLabel) and each not in own}
        is_undone = not self._own(valid) and any(each.at_unix_ns in undone for each in own)  # by a person
        return newest_trim(valid) != evaluated and not is_undone

    def _own(self, labels: Sequence[Label]) -> list[Label]:
        return [label for label in labels if label.labeller == self.labeller]

    def _labels(self, episode: EpisodeSummary, found: EpisodeReward, first_step: int) -> list[Label]:
        """The labels of an episode of which the steps from `first_step` on were evaluated."""
        now = time.time_ns()
        common = {"episode": episode.episode, "labeller": self.labeller}
        valid = effective_labels(self._store.index.labels(episode.episode))
        times = dict.fromkeys(label.at_unix_ns for label in self._own(valid))
        labels: list[Label] = [UndoLabel(at_unix_ns=now - 1, undone_at_unix_ns=each, **common) for each in times]
        note = "" if found.probability is None else f"probability {found.probability:.3f}"
        if found.success is not None:
            keep = found.rewards is not None
            labels.append(SuccessLabel(success=found.success, keep_reward=keep, at_unix_ns=now, note=note, **common))
        if found.rewards is not None:
            rewards = tuple(float(value) for value in found.rewards)
            parts = {first_step: rewards}
            success = episode.success if found.success is None else found.success
            if success and episode.reward_source != PERSON and first_step + len(rewards) < episode.steps:
                parts = {first_step: rewards[:-1], episode.steps - 1: rewards[-1:]}  # see `TrimLabel`
            for first, values in parts.items():
                labels.append(RewardLabel(first_step=first, rewards=values, at_unix_ns=now, note=note, **common))
        return labels


def store_of(path: Path) -> Path:
    """The store in a run's folder, or `path` itself."""
    return path / "store" if (path / "config.yaml").exists() else path
