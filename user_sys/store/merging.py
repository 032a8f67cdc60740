"""Several stores into one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from crc32c import crc32c

from user_sys.episode import Chunk, PackedChunk
from user_sys.errors import StoreCorrupt, StoreError, StoreGone, WireError
from user_sys.store.index import Index
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.upkeep import require_store

SYNC_BYTES = 8 << 20
MAX_NAME = 128 - 9  # of an episode that gets a suffix

_logger = logging.getLogger(__name__)


class MergeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a merge brought.

    Attributes:
        chunks, labels: that were new.
        duplicates: chunks that were there already.
        damaged: chunks that could not be read, or lay in an episode of another robot, and were left out.
        renamed: the new names of episodes whose names other episodes have.
    """

    chunks: int
    duplicates: int
    labels: int
    damaged: int
    renamed: tuple[str, ...]


def merge(paths: Sequence[Path], into: Path, *, advance: Callable[[int], object] | None = None) -> MergeReport:
    """Copies what other stores hold into the store at `into`, which is created if need be. May be repeated.

    Chunks that `into` has are left out, and so are deleted episodes; labels come with their episodes. An episode whose
    name belongs to another one in `into` (another robot, start or seed) gets a suffix that depends on what it is alone,
    so that repeating the merge recognises it. Blocks. The others may be written meanwhile.

    Args:
        advance: told 1 for each chunk that was looked at.

    Raises:
        StoreLocked: another process writes `into`.
        StoreFull, StoreError: `into` cannot be written or is among `paths`, or there is no store at one of them.
    """
    for path in paths:
        require_store(path)
        if into.exists() and into.samefile(path):
            raise StoreError(f"{path} cannot be merged into itself")
    counts: Counter[str] = Counter()
    renamed: list[str] = []
    with StoreWriter.open(into) as writer, StoreReader.open(into) as present:
        for path in paths:
            present.refresh()
            with StoreReader.open(path) as source:
                source.refresh()
                counts["damaged"] += len(source.damaged)
                names = _names(source.index, present.index)
                _copy_chunks(source, writer, names, counts, advance)
                _copy_labels(source, present, writer, names, counts)
            writer.sync()
            renamed += names.values()
    counted = {name: counts[name] for name in ("chunks", "duplicates", "labels", "damaged")}
    return MergeReport(**counted, renamed=tuple(renamed))


def _names(source: Index, present: Index) -> dict[str, str]:
    """New names for episodes of `source` whose names other episodes of `present` have."""
    new = {}
    for row, name in enumerate(source.episodes.ids.names):
        there = present.episodes.find(name)
        if there >= 0 and _identity(source, row) != _identity(present, there):
            new[name] = f"{name[:MAX_NAME]}.{crc32c(repr(_identity(source, row)).encode()):08x}"
    return new


def _identity(index: Index, row: int) -> tuple[str, str, str, int, int]:
    e = index.episodes
    names = (e.robots.names[e.robot[row]], e.embodiments.names[e.embodiment[row]], e.tasks.names[e.task[row]])
    return (*names, int(e.seed[row]), int(e.started_unix_ns[row]))


def _copy_chunks(
    source: StoreReader,
    writer: StoreWriter,
    names: Mapping[str, str],
    counts: Counter[str],
    advance: Callable[[int], object] | None,
) -> None:
    for row in np.flatnonzero(source.index.chunks.alive).tolist():
        if advance is not None:
            advance(1)
        try:
            counts["chunks" if _append(writer, source.packed(row), names) else "duplicates"] += 1
        except StoreGone:
            continue  # given up meanwhile by the source's own writer
        except (StoreCorrupt, WireError) as error:
            _logger.warning("store.merge-skipped %s", error)
            counts["damaged"] += 1
            continue
        if writer.pending_bytes > SYNC_BYTES:
            writer.sync()


def _append(writer: StoreWriter, found: PackedChunk, names: Mapping[str, str]) -> bool:
    name = names.get(found.header.episode)
    if name is None:
        return writer.append(found.packet.view, found)
    chunk = found.unpack()
    return writer.append(
        Chunk(msgspec.structs.replace(chunk.header, episode=name), chunk.columns, chunk.final).encode()
    )


def _copy_labels(
    source: StoreReader, present: StoreReader, writer: StoreWriter, names: Mapping[str, str], counts: Counter[str]
) -> None:
    episodes = source.index.episodes
    for row in np.flatnonzero(~episodes.deleted).tolist():
        old = episodes.ids.names[row]
        name = names.get(old, old)
        known = present.index.labels(name)
        for said in source.index.labels(old):
            if (said := msgspec.structs.replace(said, episode=name)) not in known:
                writer.append_label(said)
                counts["labels"] += 1
