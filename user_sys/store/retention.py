"""Which episodes to give up when a store has grown too large. A pure function of the index; nothing is deleted here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from user_sys.codec import Array
from user_sys.episode import Source
from user_sys.errors import ConfigError
from user_sys.store.frame import ALIGN_BYTES, RECORD_HEADER_BYTES
from user_sys.store.index import Index
from user_sys.store.summary import intervened

NO_LIMIT = 0


@dataclass(frozen=True)
class Retention:
    """How much is kept, and what before all else.

    Attributes:
        max_bytes: the store should take no more on disk; 0 for no limit.
        slack: when it takes more, it is brought below ``(1 - slack) * max_bytes``, lest it be full again at once.
        keep_sources: episodes of these sources are never chosen.
        keep_interventions: neither are episodes in which a person showed how it is done.
        failure_share: unsuccessful autonomous episodes may hold this share of the steps of all that are left; where
            they hold more they go first.
    """

    max_bytes: int = NO_LIMIT
    slack: float = 0.1
    keep_sources: tuple[Source, ...] = (Source.DEMO,)
    keep_interventions: bool = True
    failure_share: float = 0.5

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or not 0 <= self.slack < 1 or not 0 <= self.failure_share <= 1:
            raise ConfigError(
                f"retention: max_bytes {self.max_bytes} must not be negative, slack {self.slack} and failure_share "
                f"{self.failure_share} must be shares of 1"
            )


@dataclass(frozen=True)
class Choice:
    """Episodes to give up, by name, in the order in which they lose their place.

    Attributes:
        freed_bytes: what they take on disk.
        shortfall_bytes: what would have to go besides, had it not to be kept.
    """

    episodes: tuple[str, ...]
    freed_bytes: int
    shortfall_bytes: int


def choose(index: Index, retention: Retention, disk_bytes: int) -> Choice:
    """The least useful episodes, as many as must go.

    First evaluations, then episodes that broke off, then autonomous ones: of the unsuccessful and the successful
    whichever hold more than their share, so that the learner goes on seeing both. Within each of these the oldest go
    first. Episodes that may still be running are left alone.

    Args:
        disk_bytes: what the store takes on disk now; what is deleted and not yet compacted away counts as gone.
    """
    sizes = _episode_bytes(index, disk_bytes)
    excess = int(sizes.sum()) - retention.max_bytes if retention.max_bytes else 0
    if excess <= 0:
        return Choice((), 0, 0)
    wanted = int(sizes.sum() - (1 - retention.slack) * retention.max_bytes)
    chosen: list[str] = []
    freed = 0
    for row in _candidates(index, retention):
        if freed >= wanted:
            break
        chosen.append(index.episodes.ids.names[row])
        freed += int(sizes[row])
    return Choice(tuple(chosen), freed, max(0, excess - freed))


def _episode_bytes(index: Index, disk_bytes: int) -> Array:
    """What each episode takes on disk, its share of indexes and headers included: int64."""
    chunks = index.chunks
    sizes = record_bytes_of(index) * ~chunks.gone
    alive = np.bincount(chunks.episode, sizes * chunks.alive, len(index.episodes))
    total: Array = (alive * (disk_bytes / max(1, int(sizes.sum())))).astype(np.int64)
    return total


def record_bytes_of(index: Index) -> Array:
    """What the record of each chunk row takes in its segment: int64."""
    taken: Array = RECORD_HEADER_BYTES + -(-index.chunks.length // ALIGN_BYTES) * ALIGN_BYTES
    return taken


def _candidates(index: Index, retention: Retention) -> Iterator[int]:
    """Episode rows that may go, least useful first."""
    episodes = index.episodes
    age_order = np.argsort(episodes.started_unix_ns, kind="stable")
    eligible = age_order[_may_go(index, retention)[age_order]]
    evaluation = episodes.source[eligible] == episodes.sources.find(Source.EVALUATION)
    broken = ~evaluation & ~episodes.complete[eligible]
    yield from eligible[evaluation].tolist()
    yield from eligible[broken].tolist()
    rest = eligible[~evaluation & ~broken]
    good = episodes.success[rest] == 1
    yield from _balanced(rest[~good], rest[good], episodes.steps, retention.failure_share)


def _may_go(index: Index, retention: Retention) -> Array:
    episodes, chunks = index.episodes, index.chunks
    kept = np.isin(episodes.source, [episodes.sources.find(source) for source in retention.keep_sources])
    if retention.keep_interventions:
        by_hand = index.episode_of(np.flatnonzero(intervened(index.steps.phase)))
        kept[by_hand] = True
    alive = np.zeros(len(episodes), bool)
    alive[chunks.episode[chunks.alive]] = True
    newest = np.zeros(len(episodes.robots), np.int64)
    np.maximum.at(newest, episodes.robot, episodes.started_unix_ns)
    running = ~episodes.complete & (episodes.started_unix_ns >= newest[episodes.robot])
    may_go: Array = alive & ~kept & ~running
    return may_go


def _balanced(failures: Array, successes: Array, steps: Array, failure_share: float) -> Iterator[int]:
    """Both in turn, oldest first, from the side that holds more than its share of the steps that are left."""
    bad, good = deque(failures.tolist()), deque(successes.tolist())
    bad_steps, good_steps = int(steps[failures].sum()), int(steps[successes].sum())
    while bad or good:
        if bad and (not good or bad_steps >= failure_share * (bad_steps + good_steps)):
            row = bad.popleft()
            bad_steps -= int(steps[row])
        else:
            row = good.popleft()
            good_steps -= int(steps[row])
        yield row
