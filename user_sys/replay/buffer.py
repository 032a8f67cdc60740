"""The replay buffer: all observations of a store, from the hot cache or from disk.

Reading: all bytes are verified. Vectors are read with their whole record, whose checksum covers them. The first read of
a chunk also notes where each frame lies and its CRC-32C; a later read of a frame touches its own bytes only.

Cache: an observation enters it when it is first read, if its place is free. Of frames that would replace others, some
do. Observation k can only be in slot k mod capacity, so a lookup is one comparison, and memory is fixed for any size of
store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from hal.context import ClosedAtExit
from user_sys.codec import Array, checksum, jpeg_size
from user_sys.episode import (
    APPLIED_ACTION,
    CAPTURE_TIME_SUFFIX,
    CRC_SUFFIX,
    FINAL_PREFIX,
    LENGTH_SUFFIX,
    Chunk,
    PackedChunk,
)
from user_sys.errors import ConfigError, StoreCorrupt, StoreError, StoreRecordGone, WireError
from user_sys.policies.policy import AGE_SUFFIX
from user_sys.replay.batches import EncodedColumn, ObservationFeatures, ReadPlan
from user_sys.store.index import Index, IndexChange
from user_sys.store.store import StoreReader

FRAME_DTYPE = np.dtype([("chunk", "i4"), ("start", "u4"), ("bytes", "i4"), ("crc", "u4")])
"""Location of a frame: row of its chunk, first byte in the chunk's record, number of bytes (negative for raw pixels, 0
for no usable frame), CRC-32C. Chunk -1: the frame of the last step before this chunk is still valid."""
EARLIER = -1
UNREAD, READ, BAD = 0, 1, 2  # states of a chunk; after an error that may pass it stays as it was
MAX_RUN = 256  # frames per read
UNUSABLE_ERRORS = (StoreError, WireError)
LASTING_ERRORS = (StoreCorrupt, StoreRecordGone, WireError)  # others may pass, as of a file server
Item = TypeVar("Item")
Result = TypeVar("Result")
_logger = logging.getLogger(__name__)

TAG_BYTES = 8

COLD_THREADS = 16
VECTORS_SHARE = 0.25  # of the cache, with cameras; vectors are much smaller than frames
ADMIT_ONE_IN = 8  # one in so many missed frames replaces another: to copy all costs more than it saves

ENCODED_BLOCK = 8  # pictures that are encoded together

ChangeListener = Callable[[Index, IndexChange], object]


class DiskReader:
    """See the module. The thread that refreshes the store reader calls `extend`; the other methods are thread-safe."""

    def __init__(self, reader: StoreReader, features: ObservationFeatures, threads: int) -> None:
        self._reader, self._index, self._features = reader, reader.index, features
        self._states = np.zeros(1024, np.uint8)
        self._frames = {name: np.zeros(1024, FRAME_DTYPE) for name in features.cameras}
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="replay-cold")
        self._lock = threading.Lock()  # guards the tables and the places of damage
        self._damaged: set[str] = set()

    @property
    def damaged(self) -> int:
        """Unusable chunks, and frames. Several threads may read one at once; it counts once, until it can be read."""
        return len(self._damaged)

    def extend(self) -> None:
        """Allocates room for new chunks and observations."""
        with self._lock:
            self._states = _grown(self._states, len(self._index.chunks))
            self._frames = {n: _grown(table, self._index.observation_count) for n, table in self._frames.items()}

    def close(self) -> None:
        """Stops the threads after their current work."""
        self._pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Applies `work` to `items` in the threads; a single item in this thread."""
        return [work(item) for item in items] if len(items) < 2 else list(self._pool.map(work, items))

    # Vectors

    def vectors(self, chunk: int) -> dict[str, Array]:
        """The float32 columns of a chunk's observations; those of a step are zero at the final observation.

        Raises:
            StoreError, WireError: the chunk is unusable: damaged, dropped, without a feature, or not finite. Of these,
                a plain StoreError may pass: the file cannot be read now.
        """
        if chunk < 0:
            raise StoreError("an observation is not stored")
        if self._states[chunk] == BAD:
            raise StoreCorrupt(f"chunk {chunk} was unusable before")
        try:
            packed = self._reader.read_packed(chunk)
            rows = chunk_vectors(packed.unpack(), self._features)
            cameras = {} if self._states[chunk] == READ else self._features.cameras
            frames = locate_frames(packed, chunk, cameras)
        except UNUSABLE_ERRORS as error:
            if isinstance(error, LASTING_ERRORS):
                self._states[chunk] = BAD
            self._count_damage([f"chunk {chunk}"], error)
            raise
        span = self._index.observation_range(chunk)
        with self._lock:
            for name, located in frames.items():
                self._frames[name][span.start : span.stop] = located
            self._states[chunk] = READ
            self._damaged.discard(f"chunk {chunk}")
        return rows

    def _count_damage(self, places: Sequence[str], error: Exception) -> None:
        """Counts `places`, which failed together. Logs the first one if none of them has failed before."""
        with self._lock:
            is_new = self._damaged.isdisjoint(places)
            self._damaged.update(places)
        if is_new:
            _logger.warning("replay.unusable %s: %s", places[0], error)

    # Frames

    def frames(self, numbers: Array, outs: Mapping[str, Sequence[Array]]) -> Array:
        """Reads the frames of observations `numbers`, int64 (n,), into the n arrays of each camera.

        Adjacent frames are one read. Returns which observations are complete, bool (n,).
        """
        chunks = np.unique(self._index.locate_observations(numbers)[0])
        self.map(self._try_read, chunks[self._states[chunks] == UNREAD].tolist())
        stored = numbers >= 0
        complete = stored.copy()
        for camera, out in outs.items():
            located = self._frames[camera][numbers]
            for at in np.flatnonzero((located["chunk"] == EARLIER) & stored).tolist():
                located[at] = self._earlier_frame(camera, int(numbers[at]))
            complete[located["bytes"] == 0] = False
            runs = _runs(located, np.flatnonzero(complete))
            parts = [part for part in (runs[n :: self._threads] for n in range(self._threads)) if part]
            for bad in self.map(partial(self._read_runs, located, out), parts):
                complete[bad] = False
        return complete

    def _try_read(self, chunk: int) -> None:
        try:
            self.vectors(chunk)
        except UNUSABLE_ERRORS:
            _logger.debug("replay.unusable chunk %d, counted", chunk)

    def _earlier_frame(self, camera: str, number: int) -> Array:
        """The frame that was valid before the chunk of observation `number`, `FRAME_DTYPE` ()."""
        passed = []
        while (found := self._frames[camera][number])["chunk"] == EARLIER:
            passed.append(number)
            chunk = int(self._index.locate_observations(np.array([number]))[0][0])
            before = np.flatnonzero(self._index.chunks.next_chunk == chunk)
            if not len(before):
                found = np.zeros((), FRAME_DTYPE)
                break
            if self._states[before[0]] == UNREAD:
                self._try_read(int(before[0]))
                if self._states[before[0]] == UNREAD:  # it may be readable later
                    return np.zeros((), FRAME_DTYPE)
            number = self._index.observation_range(int(before[0])).stop - 1
        with self._lock:
            self._frames[camera][passed] = found
        return np.array(found, FRAME_DTYPE)

    def _read_runs(self, located: Array, out: Sequence[Array], runs: Sequence[list[int]]) -> list[int]:
        """Reads runs of adjacent frames at the places of `located`; returns the unusable places."""
        failed: list[int] = []
        for run in runs:
            chunk, start = int(located["chunk"][run[0]]), int(located["start"][run[0]])
            stop = int(located["start"][run[-1]]) + abs(int(located["bytes"][run[-1]]))
            try:
                content = memoryview(self._reader.read_range(chunk, start, stop))
            except StoreError as error:
                self._count_damage([f"chunk {chunk} byte {first}" for first in located["start"][run].tolist()], error)
                failed += run
                continue
            for at in run:
                _, first, size, crc = located[at].item()
                try:
                    _decode(content[first - start : first - start + abs(size)], size < 0, crc, out[at])
                except (StoreCorrupt, WireError, ValueError) as error:
                    self._count_damage([f"chunk {chunk} byte {first}"], error)
                    failed.append(at)
                    continue
                if self._damaged:
                    with self._lock:
                        self._damaged.discard(f"chunk {chunk} byte {first}")
        return failed


def chunk_vectors(chunk: Chunk, features: ObservationFeatures) -> dict[str, Array]:
    """The float32 columns of a chunk's observations; those of a step are zero at the final observation.

    Raises:
        WireError: a feature is missing, of another shape, or not finite. Training on one such step would spoil the
            networks. The actions of a chunk without any are NaN.
    """
    steps, has_final = chunk.header.steps, chunk.header.end is not None
    rows = {}
    for name, shape in features.vector_shapes().items():
        table = rows[name] = np.zeros((steps + has_final, *shape), np.float32)
        if name.endswith(AGE_SUFFIX):
            table[:steps, 0] = _ages_s(chunk, name.removesuffix(AGE_SUFFIX))
            continue
        column = chunk.columns.get(name)
        if column is None and (name in features.extras or name == APPLIED_ACTION):
            table[:steps] = np.nan
            continue
        table[:steps] = _shaped(name, column, (steps, *shape))
        if has_final and name in features.vectors:
            table[steps] = _shaped(name, chunk.final.get(name), shape)
        if name not in features.extras and not (finite := np.isfinite(table.reshape(len(table), -1))).all():
            step = chunk.header.first_step + int(np.argmin(finite.all(1)))
            raise WireError(f"{name!r} of {chunk.header.episode} is not finite at step {step}: its steps are left out")
    return rows


def _ages_s(chunk: Chunk, camera: str) -> Array | float:
    """The age of the valid frame of `camera` at each step, s; 0 without a frame or times, as in imported episodes."""
    sensed, captured = (chunk.columns.get(name) for name in ("t_capture_ns", camera + CAPTURE_TIME_SUFFIX))
    if sensed is None or captured is None:
        return 0.0
    ages_s: Array = np.where(captured > 0, np.maximum(sensed - captured, 0) / 1e9, 0.0)
    return ages_s


def _shaped(name: str, column: Array | None, shape: tuple[int, ...]) -> Array:
    if column is None or column.shape not in (shape, (1, *shape)):
        raise WireError(f"{name!r} is absent or not of shape {shape}")
    return column.reshape(shape)


def locate_frames(packed: PackedChunk, chunk: int, cameras: Mapping[str, tuple[int, int, int]]) -> dict[str, Array]:
    """`FRAME_DTYPE` of each camera and observation: its own frame, or that of the last step with one.

    Args:
        chunk: row of this chunk.

    Raises:
        WireError: the chunk has no such camera.
    """
    packet, steps = packed.packet, packed.header.steps
    places = {entry.name: entry for entry in packet.layout.arrays}
    count, located = steps + (packed.header.end is not None), {}
    for camera, shape in cameras.items():
        if camera not in places or camera + LENGTH_SUFFIX not in places:
            raise WireError(f"{camera!r} is absent")
        own, lengths = np.zeros(count, FRAME_DTYPE), packet.array(places[camera + LENGTH_SUFFIX]).astype(np.int64)
        own["chunk"], own["bytes"][:steps] = chunk, lengths
        own["start"][:steps] = packet.arrays_offset + places[camera].offset + np.cumsum(lengths) - lengths
        own["crc"][:steps] = packet.array(places[camera + CRC_SUFFIX])
        is_raw = np.full(count, len(places[camera].shape) == 4)
        final = places.get(FINAL_PREFIX + camera)
        if count > steps and final is not None:
            body = packet.array_bytes(final)
            own[-1] = (chunk, packet.arrays_offset + final.offset, len(body), checksum(body))
            is_raw[-1] = len(final.shape) > 1
        is_new = own["bytes"] > 0
        sound = own["bytes"][is_raw] == np.prod(shape)
        own["bytes"][is_raw] = np.where(sound, -own["bytes"][is_raw], 0)
        last_new = np.maximum.accumulate(np.where(is_new, np.arange(count), -1))
        located[camera] = own[last_new]
        located[camera]["chunk"][last_new < 0] = EARLIER
    return located


def _decode(content: memoryview, raw: bool, crc: int, out: Array) -> None:
    import simplejpeg  # lazy: learners without cameras need no codec

    if checksum(content) != crc:
        raise StoreCorrupt("the frame has changed since it was stored")
    if raw:
        out[...] = np.frombuffer(content, np.uint8).reshape(out.shape)
    elif jpeg_size(content) != out.shape[:2]:
        raise WireError(f"the frame is not of shape {out.shape}")
    else:
        simplejpeg.decode_jpeg(content, buffer=out)


def _grown(table: Array, rows: int) -> Array:
    """`table`, or a longer zero-padded copy."""
    if rows <= len(table):
        return table
    grown = np.zeros(max(rows, 2 * len(table)), table.dtype)
    grown[: len(table)] = table
    return grown


def _runs(frames: Array, places: Array) -> list[list[int]]:
    """The `places` of `frames` (`FRAME_DTYPE` (n,)), in runs without gaps in one record."""
    places = places[np.lexsort((frames["start"][places], frames["chunk"][places]))]
    chosen = frames[places]
    stops = chosen["start"].astype(np.int64) + np.abs(chosen["bytes"])
    joined = (chosen["chunk"][1:] == chosen["chunk"][:-1]) & (chosen["start"][1:] == stops[:-1])
    joined[MAX_RUN - 1 :: MAX_RUN] = False
    return [run.tolist() for run in np.split(places, np.flatnonzero(~joined) + 1) if len(run)]


class HotCache:
    """Rows of some columns for a part of the observations. Thread-safe.

    Attributes:
        size_bytes: its budget of memory.
        capacity: number of rows.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str, budget_bytes: int) -> None:
        """Takes at most `budget_bytes` of memory; untouched pages are not resident yet.

        Args:
            shapes: column to the shape of a row.

        Raises:
            ConfigError: the budget is too small for one row.
        """
        row = TAG_BYTES + sum(int(np.prod(shape)) for shape in shapes.values()) * np.dtype(dtype).itemsize
        self.size_bytes, self.capacity = budget_bytes, budget_bytes // row
        if self.capacity < 1:
            raise ConfigError(
                f"a cache of {budget_bytes} bytes is too small for a row of {row} bytes; increase cache_bytes"
            )
        self._tables = {name: np.empty((self.capacity, *shape), dtype) for name, shape in shapes.items()}
        self._tags = np.zeros(self.capacity, np.int64)  # an observation's number plus one; 0 for an empty slot
        self._lock = threading.Lock()

    def copy(self, numbers: Array, out: Mapping[str, Array]) -> Array:
        """Copies the rows of observations `numbers`, int64 (n,), into the arrays of `out`, each (n, ...).

        Returns the misses, bool (n,); their places in `out` are undefined.
        """
        slots = numbers % self.capacity
        with self._lock:
            hit = (self._tags[slots] == numbers + 1) & (numbers >= 0)
            hits = np.flatnonzero(hit)
            for name, target in out.items():
                if len(hits) == len(numbers):
                    # With mode="raise", numpy fills a copy of `out` first; every slot is in range.
                    np.take(self._tables[name], slots, axis=0, out=target, mode="clip")
                else:
                    for place, slot in zip(hits.tolist(), slots[hits].tolist(), strict=True):
                        target[place] = self._tables[name][slot]
        missed: Array = ~hit
        return missed

    def is_free(self, numbers: Array) -> Array:
        """Whether the slot of each of `numbers` is empty, bool (n,)."""
        free: Array = self._tags[numbers % self.capacity] == 0
        return free

    def put(self, numbers: Array, rows: Mapping[str, Array]) -> None:
        """Caches the rows of `numbers`, each (n, ...), in place of the observations in their slots."""
        slots = numbers % self.capacity
        with self._lock:
            for name, array in rows.items():
                self._tables[name][slots] = array
            self._tags[slots] = numbers + 1  # of equal slots, the last counts in each column


class CacheReport(NamedTuple):
    """Cache statistics.

    Attributes:
        observations, misses: observations read so far; those of them that were not cached.
        damaged: unusable chunks and frames.
    """

    observations: int
    misses: int
    damaged: int


class ReplayBuffer(ClosedAtExit):
    """A store's experience for learners: follows the store, caches it, and reads observations.

    One thread refreshes and closes it; `read` is thread-safe. Memory: `cache_bytes`, a byte per chunk and, with
    cameras, 16 bytes per observation and camera, in addition to the index and the selectors.

    Attributes:
        features: contents of an observation.
        index: the stored steps as of the last refresh.
    """

    def __init__(
        self,
        reader: StoreReader,
        features: ObservationFeatures,
        *,
        cache_bytes: int,
        cold_threads: int = COLD_THREADS,
    ) -> None:
        """Follows `reader`, which no other object may refresh; the caller closes it.

        Args:
            cache_bytes: memory of the hot cache, allocated here.
            cold_threads: threads that read misses.

        Raises:
            ConfigError: the cache is too small for a row, or there is no thread.
        """
        if cold_threads < 1:
            raise ConfigError("cold_threads must be at least 1")
        self.features, self.index, self._reader = features, reader.index, reader
        of_vectors = int(cache_bytes * VECTORS_SHARE) if features.cameras else cache_bytes
        self._vectors = HotCache(features.vector_shapes(), "float32", of_vectors)
        self._frames = HotCache(features.cameras, "uint8", cache_bytes - of_vectors) if features.cameras else None
        self._disk = DiskReader(reader, features, cold_threads)
        self._columns = features.vector_shapes()
        self._encoded: HotCache | None = None
        self._listeners: list[ChangeListener] = []
        self._read_count = self._missed = 0
        self._count_lock = threading.Lock()

    def subscribe(self, listener: ChangeListener) -> None:
        """Calls `listener` with all current content, and then with each change."""
        nothing = np.empty(0, np.int64)
        content = IndexChange(range(len(self.index.steps)), range(len(self.index.chunks)), *[nothing] * 4)
        listener(self.index, content)
        self._listeners.append(listener)

    def refresh(self) -> IndexChange:
        """Adds new content of the store; never waits.

        Raises:
            StoreError: the store cannot be read.
        """
        change = self._reader.refresh()
        self._disk.extend()
        for listener in self._listeners:
            listener(self.index, change)
        return change

    def columns_of(self, chunk: int) -> set[str]:
        """The names of the recorded columns of a chunk row. Raises StoreError, WireError: it is unusable."""
        return {entry.name for entry in self._reader.read_packed(chunk).packet.layout.arrays}

    def encode_pictures(self, columns: Mapping[str, EncodedColumn]) -> None:
        """Replaces the pictures of all cameras by encoded `columns` in later batches, and their cache by that of these.

        Each picture is encoded when it is first read, in blocks of one size, so that the result depends on the picture
        alone.
        """
        assert self._frames is not None and columns.keys() == self.features.cameras.keys()  # as the caller knows
        self.features = replace(self.features, encoded=columns)
        shapes = {column.name: (column.size,) for column in columns.values()}
        self._encoded = HotCache(shapes, "float32", self._frames.size_bytes)
        self._frames = None

    def read(self, plans: Sequence[ReadPlan]) -> list[Array]:
        """Reads observations; blocks for misses. Thread-safe.

        Returns the unreadable places of each plan: damaged, dropped, without the features, or of number -1.
        """
        bad = [np.zeros(len(plan.numbers), bool) for plan in plans]
        missed = [np.zeros(len(plan.numbers), bool) for plan in plans]
        for plan, unreadable, misses in zip(plans, bad, missed, strict=True):
            vectors = {name: out for name, out in plan.out.items() if name in self._columns}
            if vectors:
                misses |= self._vectors.copy(plan.numbers, vectors)
                unreadable[self._read_vectors(plan.numbers, np.flatnonzero(misses), vectors)] = True
        for plan in plans:
            for name, values in plan.labelled.items():
                np.copyto(plan.out[name], values, where=~np.isnan(values))
        if self._frames is not None:
            self._read_frames(self._frames, plans, bad, missed)
        if self._encoded is not None:
            self._read_encoded(self._encoded, plans, bad, missed)
        with self._count_lock:
            self._read_count += sum(map(len, missed))
            self._missed += sum(int(misses.sum()) for misses in missed)
        return [np.flatnonzero(unreadable) for unreadable in bad]

    def _read_vectors(self, numbers: Array, places: Array, out: dict[str, Array]) -> Array:
        """Reads the vectors at `places` from disk, and caches their chunks; returns the unreadable places."""
        chunk, step = self.index.locate_observations(numbers[places])
        order = np.argsort(chunk, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(chunk[order])) + 1) if len(order) else []

        def read(group: Array) -> Array:
            span = self.index.observation_range(int(chunk[group[0]]))
            try:
                rows = self._disk.vectors(int(chunk[group[0]]))
            except UNUSABLE_ERRORS:
                return places[group]
            self._vectors.put(np.arange(span.start, span.stop), rows)
            for name, target in out.items():
                target[places[group]] = rows[name][step[group]]
            return places[:0]

        return np.concatenate([places[:0], *self._disk.map(read, groups)])

    def _read_frames(
        self, cache: HotCache, plans: Sequence[ReadPlan], bad: Sequence[Array], missed: Sequence[Array]
    ) -> None:
        """Copies frames, and reads the missing ones of all plans at once, because many are adjacent."""
        wanted: list[tuple[int, int]] = []  # plan, place in it
        for which, plan in enumerate(plans):
            out = {name: array for name, array in plan.out.items() if name in self.features.cameras}
            if out:
                misses = cache.copy(plan.numbers, out)
                missed[which][misses] = True
                wanted += [(which, place) for place in np.flatnonzero(misses).tolist()]
        if not wanted:
            return
        numbers = np.array([plans[which].numbers[place] for which, place in wanted])
        outs = {name: [plans[which].out[name][place] for which, place in wanted] for name in self.features.cameras}
        complete = self._disk.frames(numbers, outs)
        for at in np.flatnonzero(~complete).tolist():
            bad[wanted[at][0]][wanted[at][1]] = True
        kept = np.flatnonzero(complete & (cache.is_free(numbers) | (np.arange(len(numbers)) % ADMIT_ONE_IN == 0)))
        rows = {name: np.array([each[at] for at in kept.tolist()]) for name, each in outs.items() if len(kept)}
        cache.put(numbers[kept], rows)

    def _read_encoded(
        self, cache: HotCache, plans: Sequence[ReadPlan], bad: Sequence[Array], missed: Sequence[Array]
    ) -> None:
        """Copies encoded pictures, and encodes the missing ones of all plans at once."""
        columns, nowhere = self.features.encoded, np.empty(0, np.int64)
        names = [column.name for column in columns.values()]
        outs = [{name: plan.out[name] for name in names if name in plan.out} for plan in plans]
        places = [
            np.flatnonzero(cache.copy(plan.numbers, out)) if out else nowhere
            for plan, out in zip(plans, outs, strict=True)
        ]
        numbers = np.unique(np.concatenate([plan.numbers[at] for plan, at in zip(plans, places, strict=True)]))
        if not len(numbers):
            return
        pictures = {name: np.empty((len(numbers), *shape), np.uint8) for name, shape in self.features.cameras.items()}
        complete = self._disk.frames(numbers, {name: list(each) for name, each in pictures.items()})
        rows = {column.name: _encode_blocks(column, pictures[name]) for name, column in columns.items()}
        cache.put(numbers[complete], {name: each[complete] for name, each in rows.items()})
        for plan, out, at, unreadable, misses in zip(plans, outs, places, bad, missed, strict=True):
            row = np.searchsorted(numbers, plan.numbers[at])
            misses[at] = True
            unreadable[at[~complete[row]]] = True
            for name, target in out.items():
                target[at] = rows[name][row]

    def report(self) -> CacheReport:
        """Current cache statistics."""
        return CacheReport(self._read_count, self._missed, self._disk.damaged)

    def close(self) -> None:
        """Stops the threads. Idempotent."""
        self._disk.close()


def _encode_blocks(column: EncodedColumn, pictures: Array) -> Array:
    """Encodes pictures (n, h, w, 3) in blocks of `ENCODED_BLOCK`, the last one filled up with black pictures."""
    encoded = np.empty((len(pictures), column.size), np.float32)
    for start in range(0, len(pictures), ENCODED_BLOCK):
        block = pictures[start : start + ENCODED_BLOCK]
        filled = np.zeros((ENCODED_BLOCK, *block.shape[1:]), np.uint8)
        filled[: len(block)] = block
        encoded[start : start + len(block)] = column.encode(filled)[: len(block)]
    return encoded
