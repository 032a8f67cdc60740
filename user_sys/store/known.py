"""Which chunks a store has and whose its episodes are: all that its writer must remember."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from user_sys.episode import ChunkHeader
from user_sys.store.block import Block
from user_sys.store.labels import DeleteLabel, Label


class KnownChunks:
    """The (episode, index) of each chunk: a count for each episode, and single ones only behind a gap.

    Attributes:
        chunks, steps: how many there are.
        deleted: episodes that a label deletes.
    """

    def __init__(self) -> None:
        self.chunks = self.steps = 0
        self.deleted: set[str] = set()
        self._next: dict[str, int] = {}  # all below are there
        self._robots: dict[str, str] = {}
        self._strays: set[tuple[str, int]] = set()

    def has(self, episode: str, index: int) -> bool:
        """Whether that chunk is there."""
        return index < self._next.get(episode, 0) or (episode, index) in self._strays

    def has_some(self, episode: str) -> bool:
        """Whether any chunk of that episode is there."""
        return episode in self._next

    def robot_of(self, episode: str) -> str | None:
        """Whose chunk was the first of that episode to come; None while there is none."""
        return self._robots.get(episode)

    def add(self, header: ChunkHeader) -> None:
        """Takes note of a chunk that is not there yet."""
        if header.episode not in self._robots:
            self._robots[header.episode] = sys.intern(header.robot)
        self._add(header.episode, header.index, header.steps)

    def _add(self, episode: str, index: int, steps: int) -> None:
        self.chunks += 1
        self.steps += steps
        following = self._next.setdefault(episode, 0)
        if index != following:
            self._strays.add((episode, index))
            return
        following += 1
        while self._strays and (episode, following) in self._strays:
            self._strays.remove((episode, following))
            following += 1
        self._next[episode] = following

    def add_label(self, label: Label) -> None:
        """Takes note of what is deleted."""
        if isinstance(label, DeleteLabel):
            (self.deleted.add if label.deleted else self.deleted.discard)(label.episode)

    def take(self, blocks: Iterable[Block]) -> None:
        """Takes note of all that is in `blocks`; what was there already counts once."""
        for block in blocks:
            names = [record.episode for record in block.episodes]
            for record in block.episodes:
                self._robots.setdefault(record.episode, sys.intern(record.robot))
            columns = (block.chunks[name].tolist() for name in ("episode", "index", "steps"))
            for episode, index, steps in zip(*columns, strict=True):
                if not self.has(names[episode], index):
                    self._add(names[episode], index, steps)
            for label in block.labels:
                self.add_label(label)
