"""A store's upkeep after the fact: labels, retention, compaction. For a store that nobody writes at the time.

A running gateway does the same from inside (`user_sys.gateway.upkeep`), with the same functions.

Giving up an episode takes two steps. First it is deleted by a label, which is durable and which every reader sees; then
compaction rewrites the segments that it lay in. The label stays for ever, so that a chunk of the episode that a robot
sends once more is recognised. A crash in between leaves an episode that is deleted and still takes space.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from user_sys.errors import StoreCorrupt, StoreError
from user_sys.store.block import CHUNK
from user_sys.store.inbox import posts, read_post, withdraw
from user_sys.store.index import Index
from user_sys.store.labels import DeleteLabel, Label
from user_sys.store.log import SEGMENT_BYTES, segment_numbers
from user_sys.store.retention import Choice, Retention, choose, record_bytes_of
from user_sys.store.store import StoreReader, StoreWriter

RETENTION = "retention"  # the labeller of what retention gives up
DEAD_SHARE = 0.25  # a segment is rewritten once so much of it is not wanted any more
SMALL_SHARE = 0.25  # neighbours that fill less than this share of a segment are put together
NO_BOUND = Retention()

_logger = logging.getLogger(__name__)


class CompactionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction did.

    Attributes:
        dropped: episodes that retention gave up.
        freed_bytes, size_bytes: how much smaller the store's files became, and what they take now.
        shortfall_bytes: how much more than allowed is left, because all of it must be kept.
        damaged: why a segment could not be rewritten, one line each; its bytes are as they were.
    """

    dropped: tuple[str, ...]
    freed_bytes: int
    size_bytes: int
    shortfall_bytes: int
    damaged: tuple[str, ...]


def label(path: Path, labels: Iterable[Label]) -> None:
    """Adds labels to the store at `path`, durably, behind those that wait in its inbox (`user_sys.store.inbox`).

    Raises:
        StoreLocked: a gateway writes the store; ask that one.
        StoreError: there is no store, or it cannot be written.
        WireError: one of them says what no label may.
    """
    require_store(path)
    with StoreWriter.open(path) as writer:
        taken = list(_take_posts(path, writer))
        for each in labels:
            writer.append_label(each)
    for file in taken:
        withdraw(file)


def _take_posts(path: Path, writer: StoreWriter) -> Iterator[Path]:
    """Appends the labels that wait for a writer; yields each file that held them, once they are appended."""
    for file in posts(path):
        try:
            waiting = read_post(file)
        except StoreError as error:
            _logger.warning("store.post-refused %s", error)
            continue
        for each in waiting:
            writer.append_label(each)
        yield file


def compact(
    path: Path, retention: Retention = NO_BOUND, *, advance: Callable[[int], object] | None = None
) -> CompactionReport:
    """Gives back what deleted episodes take, after giving up those that `retention` does not keep. Blocks.

    Args:
        advance: told 1 for each file that was rewritten.

    Raises:
        StoreLocked: a gateway writes the store; it compacts by itself.
        StoreFull: no space to rewrite a segment; nothing is lost.
        StoreError: there is no store, or it cannot be written.
    """
    require_store(path)
    before = disk_bytes(path)
    with StoreWriter.open(path) as writer, StoreReader.open(path) as reader:
        reader.refresh()
        choice = choose(reader.index, retention, before)
        for name in deletion_labels(choice):
            writer.append_label(name)
        if not reader.index.chunks.alive.all() or choice.episodes:
            writer.rotate()
    with StoreWriter.open(path) as writer, StoreReader.open(path) as reader:
        reader.refresh()
        damaged = []
        for reason in reclaim(writer, reader.index, least_share=0.0):
            damaged += [reason] if reason else []
            if advance is not None:
                advance(1)
    after = disk_bytes(path)
    return CompactionReport(
        dropped=choice.episodes,
        freed_bytes=before - after,
        size_bytes=after,
        shortfall_bytes=max(0, after - retention.max_bytes) if retention.max_bytes else 0,
        damaged=tuple(damaged),
    )


# What a gateway shares


def deletion_labels(choice: Choice) -> list[Label]:
    """The labels that give up what was chosen."""
    now = time.time_ns()
    return [DeleteLabel(episode=name, labeller=RETENTION, at_unix_ns=now) for name in choice.episodes]


def disk_bytes(path: Path) -> int:
    """What the store's segments take on disk; those that another process just replaced count as gone."""
    total = 0
    for file in path.glob("*.seg"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            _logger.debug("store.replaced %s", file)
    return total


class SegmentLoad(NamedTuple):
    """A sealed segment: its number, its size, and how much of that nobody wants any more, in bytes."""

    number: int
    size_bytes: int
    dead_bytes: int


def reclaim(writer: StoreWriter, index: Index, *, least_share: float = DEAD_SHARE) -> Iterator[str]:
    """Rewrites the sealed segments in which deleted episodes take at least `least_share`, and joins small ones.

    Call it only once the deletions in `index` are durable. It goes on as it is iterated, and blocks for as long as it
    copies; appends go on meanwhile, and readers find what moved.

    Yields after each rewriting: nothing, or why it could not be done and the segments are as they were.

    Raises:
        StoreFull: no space for a new segment; what was rewritten until then stays so.
        StoreError: the disk failed.
    """
    chunks = index.chunks
    dead = ~chunks.alive & ~chunks.gone
    sequences = chunks.sequence[dead]
    unwanted = frozenset(sequences.tolist())
    taken = np.r_[0, np.cumsum(record_bytes_of(index)[dead])]
    loads = []
    for entry in writer.sealed():
        low, high = np.searchsorted(sequences, [entry.first_sequence, entry.next_sequence])
        loads.append(SegmentLoad(entry.number, entry.size_bytes, int(taken[high] - taken[low])))
    for numbers in plan(loads, SEGMENT_BYTES, least_share):
        try:
            writer.rewrite(numbers, lambda ref: ref.kind != CHUNK or ref.sequence not in unwanted)
        except StoreCorrupt as error:
            _logger.warning("store.not-compacted segments=%s: %s", numbers, error)
            yield str(error)
        else:
            yield ""


def plan(loads: Sequence[SegmentLoad], full_bytes: int, least_share: float) -> list[list[int]]:
    """Which segments to rewrite, each list into one segment: neighbours, of at most `full_bytes` together.

    Every segment in which at least `least_share` is dead (and not nothing) is among them; of the others those that are
    small and have a small or dead neighbour.
    """
    groups: list[list[SegmentLoad]] = [[]]
    for load in loads:
        alive = load.size_bytes - load.dead_bytes
        held = sum(each.size_bytes - each.dead_bytes for each in groups[-1])
        if groups[-1] and held + alive > full_bytes:
            groups.append([])
        if _is_dead(load, least_share) or alive < SMALL_SHARE * full_bytes:
            groups[-1].append(load)
        elif groups[-1]:
            groups.append([])
    return [
        [load.number for load in group]
        for group in groups
        if len(group) > 1 or any(_is_dead(load, least_share) for load in group)
    ]


def _is_dead(load: SegmentLoad, least_share: float) -> bool:
    return load.dead_bytes > 0 and load.dead_bytes >= least_share * load.size_bytes


def require_store(path: Path) -> None:
    """Raises StoreError where there is no store at `path`; none is made."""
    if not segment_numbers(path):
        raise StoreError(f"{path} is no store: it has no segment")
