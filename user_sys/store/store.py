"""The experience store: every chunk of every episode, once, and what people said about it afterwards.

Durability is the log's (`user_sys.store.log`): a chunk is acknowledged when `StoreWriter.sync` has returned, and
survives kills and power cuts from then on. Ingestion is idempotent by (episode, index): a chunk that is sent again is
recognised, also by a writer that was started anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np

from user_sys.codec import Array
from user_sys.episode import Chunk, ChunkHeader, EpisodeEnd, Phase, Source, decode_chunk
from user_sys.errors import StoreCorrupt, WireError
from user_sys.store.log import SEGMENT_BYTES, Damage, LogReader, LogWriter, RecordRef, segment_numbers

CHUNK = 1  # record kinds
LABEL = 2
POLL_S = 0.05

_logger = logging.getLogger(__name__)


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """What a person said about an episode after the fact; the newest label of an episode wins."""

    episode: str
    success: bool
    labeller: str
    at_unix_ns: int
    note: str = ""


class ChunkRef(NamedTuple):
    """A stored chunk: where it is and what its header says."""

    record: RecordRef
    header: ChunkHeader


class EpisodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as far as it is stored.

    Attributes:
        success: what a person said last, else what the episode's end says; None where nobody knows.
        episode_return: sum of the rewards stored.
        intervention_steps: steps in phase TELEOP or CORRECTION.
        policy_versions: lowest and highest version that acted; (-1, -1) where no policy did.
        complete: its end and all chunks before it are stored.
        labelled_by: the person whose label decided `success`; empty where none did.
    """

    episode: str
    robot: str
    embodiment: str
    task: str
    source: Source
    started_unix_ns: int
    steps: int
    chunks: int
    size_bytes: int
    success: bool | None
    episode_return: float
    intervention_steps: int
    policy_versions: tuple[int, int]
    complete: bool
    labelled_by: str = ""


class StoreWriter:
    """The one writer of a store. One thread calls it. Obtain it with `open`."""

    def __init__(self, log: LogWriter, known: set[tuple[str, int]]) -> None:
        self._log, self._known = log, known

    @classmethod
    def open(cls, path: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """Opens or creates the store at `path`; reads all of it once to know which chunks it has.

        Raises:
            StoreLocked: another process writes it.
            StoreFull, StoreVersion, StoreError: as `LogWriter.open`.
        """
        log = LogWriter.open(path, segment_bytes=segment_bytes)
        try:
            with StoreReader.open(path) as reader:
                known = {(ref.header.episode, ref.header.index) for ref in reader.refresh()}
        except BaseException:
            log.close()
            raise
        return cls(log, known)

    @property
    def chunks(self) -> int:
        """How many chunks the store has, those not yet synced included."""
        return len(self._known)

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        return self._log.pending_bytes

    def has(self, episode: str, index: int) -> bool:
        """Whether that chunk was appended; durable only if `sync` has returned since."""
        return (episode, index) in self._known

    def append(self, packet: bytes | memoryview, chunk: Chunk | None = None) -> bool:
        """Adds an encoded chunk; False where the store has it already, which costs nothing.

        It is acknowledged by the next `sync`. That holds for False too: what is known may still wait for its sync.

        Args:
            packet: the chunk's bytes, which are stored as they are.
            chunk: what `decode_chunk` made of this very `packet`, if the caller has called it; saves doing so again.

        Raises:
            WireError: the packet is no valid chunk; nothing was stored.
            StoreFull: no space; this chunk was not taken, those before it are kept.
            StoreError: the disk failed.
        """
        header = (decode_chunk(packet) if chunk is None else chunk).header
        key = (header.episode, header.index)
        if key in self._known:
            return False
        self._log.append(CHUNK, packet)
        self._known.add(key)
        return True

    def append_label(self, label: Label) -> None:
        """Adds a label, of an episode that may still be unknown. Raises as `append`."""
        self._log.append(LABEL, msgspec.msgpack.encode(label))

    def sync(self) -> None:
        """Makes all that was appended durable: one fdatasync, however many chunks. Raises as `LogWriter.sync`."""
        self._log.sync()

    def close(self) -> None:
        """Syncs and lets go of the store. Calling it twice is harmless."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Tally:
    """What the chunks of one episode add up to so far."""

    def __init__(self, header: ChunkHeader) -> None:
        self.header = header
        self.end: EpisodeEnd | None = None
        self.end_index = -1
        self.steps = self.chunks = self.size_bytes = self.intervention_steps = 0
        self.episode_return = 0.0
        self.versions: tuple[int, int] = (-1, -1)

    def add(self, header: ChunkHeader, columns: Mapping[str, Array], size_bytes: int) -> None:
        self.steps += header.steps
        self.chunks += 1
        self.size_bytes += size_bytes
        if "reward" in columns:
            self.episode_return += float(columns["reward"].sum(dtype=np.float64))
        if "phase" in columns:
            phase = columns["phase"]
            self.intervention_steps += int(((phase == Phase.TELEOP) | (phase == Phase.CORRECTION)).sum())
        if "policy_version" in columns:
            self._add_versions(columns["policy_version"])
        if header.end is not None:
            self.end, self.end_index = header.end, header.index

    def _add_versions(self, column: Array) -> None:
        acted = column[column >= 0]
        if acted.size:
            low, high = int(acted.min()), int(acted.max())
            self.versions = (low if self.versions[0] < 0 else min(low, self.versions[0]), max(high, self.versions[1]))

    def summary(self, label: Label | None) -> EpisodeSummary:
        h = self.header
        return EpisodeSummary(
            episode=h.episode,
            robot=h.robot,
            embodiment=h.embodiment,
            task=h.task,
            source=h.source,
            started_unix_ns=h.started_unix_ns,
            steps=self.steps,
            chunks=self.chunks,
            size_bytes=self.size_bytes,
            success=label.success if label else (self.end.success if self.end else None),
            episode_return=self.episode_return,
            intervention_steps=self.intervention_steps,
            policy_versions=self.versions,
            complete=self.end is not None and self.chunks == self.end_index + 1,
            labelled_by=label.labeller if label else "",
        )


class StoreReader:
    """Reads a store, in any process, also while it is written. Not for several threads at once. Obtain it with `open`.

    Attributes:
        chunks: every chunk found so far, in the order in which they were stored, each (episode, index) once.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._known: set[tuple[str, int]] = set()
        self._tallies: dict[str, _Tally] = {}
        self._labels: dict[str, Label] = {}
        self.chunks: list[ChunkRef] = []

    @classmethod
    def open(cls, path: Path, *, wait_s: float = 0.0) -> Self:
        """A reader that has read nothing yet; waits at most `wait_s` seconds for a writer to create the store.

        Raises:
            StoreError: there is no store at `path`.
            StoreVersion: another format version wrote it.
        """
        deadline = time.monotonic() + wait_s
        while not segment_numbers(path) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return cls(LogReader.open(path))

    def refresh(self) -> list[ChunkRef]:
        """Takes in what was stored since the last call and returns its new chunks, in order. Never waits.

        Raises:
            StoreVersion, StoreError: as `LogReader.refresh`.
        """
        before = len(self.chunks)
        for record in self._log.refresh():
            self._take(record)
        return self.chunks[before:]

    def _take(self, record: RecordRef) -> None:
        try:
            payload = self._log.read(record)
            if record.kind == CHUNK:
                self._take_chunk(record, decode_chunk(payload))
            elif record.kind == LABEL:
                label = msgspec.msgpack.decode(payload, type=Label)
                self._labels[label.episode] = label
        except (WireError, StoreCorrupt, msgspec.MsgspecError) as error:
            self._log.damaged.append(Damage(record.segment, record.offset, record.length, f"does not decode: {error}"))
            _logger.warning("store.undecodable %s: %s", record, error)

    def _take_chunk(self, record: RecordRef, chunk: Chunk) -> None:
        header = chunk.header
        key = (header.episode, header.index)
        if key in self._known:
            return
        self._known.add(key)
        self.chunks.append(ChunkRef(record, header))
        tally = self._tallies.setdefault(header.episode, _Tally(header))
        tally.add(header, chunk.columns, record.length)

    def read(self, ref: ChunkRef) -> Chunk:
        """The chunk; its arrays are read-only views of the file, its checksum is verified.

        A label that was read by then stands in ``header.end``.

        Raises:
            StoreCorrupt: the bytes are no longer what was stored.
            StoreError: the segment is gone.
        """
        chunk = decode_chunk(self._log.read(ref.record))
        label = self._labels.get(chunk.header.episode)
        if label is None or chunk.header.end is None:
            return chunk
        end = EpisodeEnd(steps=chunk.header.end.steps, success=label.success, reward_source="person")
        return Chunk(msgspec.structs.replace(chunk.header, end=end), chunk.columns, chunk.final)

    def episodes(self) -> list[EpisodeSummary]:
        """Every episode found so far, in the order of their first chunks."""
        return [tally.summary(self._labels.get(name)) for name, tally in self._tallies.items()]

    @property
    def damaged(self) -> list[Damage]:
        """What was found so far that cannot be read."""
        return list(self._log.damaged)

    def close(self) -> None:
        """Lets go of the files; chunks that were read stay valid. Calling it twice is harmless."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
