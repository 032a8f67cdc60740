"""Reads observations from the store, for cache misses and for filling the cache.

All bytes are verified. A chunk's record is verified as a whole when it is first read; the location and CRC-32C of
each frame (16 bytes per observation and camera) and the CRC-32C of its vectors (8 bytes per chunk) are kept. Later
reads touch and verify only the bytes that they need.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c

from hal.spec import ACTION
from user_sys.codec import Array, ArrayEntry, checksum, jpeg_size
from user_sys.episode import APPLIED_ACTION, FINAL_PREFIX, LENGTH_SUFFIX, PackedChunk
from user_sys.errors import StoreCorrupt, StoreError, WireError
from user_sys.replay.batches import ObservationFeatures, ObservationIndex
from user_sys.replay.cache import HotCache
from user_sys.store.store import StoreReader

FRAME_DTYPE = np.dtype([("chunk", "i4"), ("start", "u4"), ("bytes", "i4"), ("crc", "u4")])
"""Location of a frame: row of its chunk, first byte in the chunk's record, number of bytes (negative for raw pixels, 0
for no frame), CRC-32C."""
UNREAD, READ, BAD = 0, 1, 2  # states of a chunk
ADMIT_ONE_IN = 8  # with a full cache, one in so many missed frames is cached; caching all would not help
MAX_RUN = 256  # frames per read
CORES = os.cpu_count() or 1
UNUSABLE_ERRORS = (StoreError, WireError)
Item = TypeVar("Item")
Result = TypeVar("Result")
_logger = logging.getLogger(__name__)


class VerifiedChunk:
    """The rows of one verified chunk: its T steps, then its final observation if it has one."""

    def __init__(self, chunk: PackedChunk, features: ObservationFeatures) -> None:
        """Raises WireError: a feature is missing or has another shape or dtype."""
        self._packet, self._features = chunk.packet, features
        self.steps = chunk.header.steps
        self.count = self.steps + (chunk.header.end is not None)
        self._places = {place.name: place for place in chunk.packet.layout.arrays}
        for name, size in features.vectors.items():
            self._check(name, (self.steps, size))
            if self.count > self.steps:
                self._check(FINAL_PREFIX + name, (size,))
        self._check(APPLIED_ACTION, (self.steps, features.action_size))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        place = self._places.get(name)
        if place is None or place.dtype != np.float32 or place.shape not in (shape, (1, *shape)):
            raise WireError(f"{name!r} is absent or not float32 of shape {shape}")

    def require_finite(self) -> None:
        """Raises WireError: a value is not finite; training on one such step would spoil the networks."""
        for name in (*self._features.vectors, APPLIED_ACTION):
            for place in filter(None, map(self._places.get, (name, FINAL_PREFIX + name))):
                if not np.isfinite(self._packet.array(place)).all():
                    raise WireError(f"{place.name!r} holds values that are not finite")

    def vectors(self) -> dict[str, Array]:
        """Observation vectors and the applied action, float32 (count, d); zero action at the final observation."""
        tables = self._features.vector_tables(self.count)
        for name, table in tables.items():
            table[: self.steps] = self._array(APPLIED_ACTION if name == ACTION else name)
            if self.count > self.steps:
                table[self.steps] = 0.0 if name == ACTION else self._array(FINAL_PREFIX + name).reshape(-1)
        return tables

    def _array(self, name: str) -> Array:
        return self._packet.array(self._places[name])

    def frames(self, camera: str, chunk: int, before: Callable[[], Array]) -> Array:
        """`FRAME_DTYPE` (count,): the frame that each row shows; a row without a new frame shows the previous row's.

        Frames that are neither a JPEG file nor raw pixels of the camera's size count as absent.

        Args:
            chunk: the row of this chunk.
            before: returns `FRAME_DTYPE` (), the frame of the row before this chunk; called if the first row has none.

        Raises:
            WireError: the chunk has no such camera.
        """
        if camera not in self._places or camera + LENGTH_SUFFIX not in self._places:
            raise WireError(f"{camera!r} is absent")
        own = np.zeros(self.count, FRAME_DTYPE)
        own["chunk"] = chunk
        lengths = self._array(camera + LENGTH_SUFFIX).astype(np.int64)
        place = self._places[camera]
        own["bytes"][: self.steps] = lengths
        own["start"][: self.steps] = self._packet.arrays_offset + place.offset + np.cumsum(lengths) - lengths
        new = own["bytes"] != 0
        self._describe(own[: self.steps], place, camera)
        final = self._places.get(FINAL_PREFIX + camera)
        if self.count > self.steps and final is not None and final.shape[0]:
            size = int(np.prod(final.shape))
            own[-1] = (chunk, self._packet.arrays_offset + final.offset, size, 0)
            new[-1] = True
            self._describe(own[-1:], final, camera)
        shown = np.maximum.accumulate(np.where(new, np.arange(self.count), -1))
        if shown[0] >= 0:
            return own[shown]
        found: Array = np.where(shown >= 0, own[shown], before())
        return found

    def _describe(self, frames: Array, place: ArrayEntry, camera: str) -> None:
        """Fills in checksums; marks undecodable frames as absent and raw ones as raw."""
        shape = self._features.cameras[camera]
        raw = len(place.shape) >= len(shape)
        for at in np.flatnonzero(frames["bytes"]):
            start, size = int(frames["start"][at]), int(frames["bytes"][at])
            view = self._packet.view[start : start + size]
            frames["crc"][at] = crc32c(view)
            sound = size == int(np.prod(shape)) and place.shape[-3:] == shape if raw else _jpeg_shape(view) == shape
            frames["bytes"][at] = 0 if not sound else -size if raw else size


def _jpeg_shape(view: memoryview) -> tuple[int, int, int] | None:
    try:
        return (*jpeg_size(view), 3)
    except WireError:
        return None


class CacheMiss(NamedTuple):
    """Uncached observations of one read, int64 (n,) each, to be read into ``out[...][places]``."""

    numbers: Array
    places: Array
    out: dict[str, Array]


class DiskReader:
    """See the module. The thread that refreshes the store reader calls `extend`; the other methods are thread-safe.

    Attributes:
        damaged: unusable chunks and frames so far.
    """

    def __init__(
        self,
        reader: StoreReader,
        observations: ObservationIndex,
        features: ObservationFeatures,
        vectors: HotCache,
        frames: HotCache | None,
        threads: int,
    ) -> None:
        """Reads with its own `threads` threads into and past the two caches; `frames` is None without cameras."""
        self._reader, self._observations, self._features = reader, observations, features
        self._vectors, self._frames = vectors, frames
        self._states = np.zeros(1024, np.uint8)
        self._vector_checksums = np.zeros(1024, np.uint32)  # CRC32C of a chunk's vectors
        self._frame_table = {name: np.zeros(1024, FRAME_DTYPE) for name in features.cameras}
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="replay-cold")
        self._admit_phase = 0
        self._lock = threading.Lock()  # guards the chunk tables and the count of damage
        self.damaged = 0

    def extend(self) -> None:
        """Allocates room for new chunks and observations."""
        chunks, count = len(self._observations.index.chunks), self._observations.observation_count
        with self._lock:
            self._states, self._vector_checksums = _grown(self._states, chunks), _grown(self._vector_checksums, chunks)
            self._frame_table = {name: _grown(table, count) for name, table in self._frame_table.items()}

    def close(self) -> None:
        """Stops the threads after their current work."""
        self._pool.shutdown(cancel_futures=True)

    # Whole chunks

    def load(self, chunk: int, *, fresh: bool) -> int:
        """Loads a chunk's observations into the caches; old experience displaces nothing.

        Returns the number of cached observations (with frames, if there are cameras).

        Raises:
            StoreError, WireError: the chunk is unusable.
        """
        rows, span = self._verify_chunk(chunk), self._observations.observation_range(chunk)
        numbers = np.arange(span.start, span.stop)
        kept = self._cache_vectors(rows.vectors(), numbers, fresh, only_empty=not fresh)
        if self._frames is None:
            return kept
        numbers = numbers[
            np.all([self._frame_table[name][numbers]["bytes"] != 0 for name in self._frame_table], axis=0)
        ]
        with self._frames.filling(numbers, fresh=fresh, only_empty=not fresh) as claim:
            for name, table in self._frames.tables.items():
                shown = self._frame_table[name][numbers[claim.taken]]
                outs, runs = [table[slot] for slot in claim.slots.tolist()], _runs(shown, np.arange(len(shown)))
                if self._read_runs(name, shown, outs, runs):
                    raise StoreCorrupt(f"a frame of {name} in chunk {chunk} does not decode")
        return len(claim.slots)

    def _cache_vectors(self, rows: dict[str, Array], numbers: Array, fresh: bool, only_empty: bool = False) -> int:
        with self._vectors.filling(numbers, fresh=fresh, only_empty=only_empty) as claim:
            for name, table in self._vectors.tables.items():
                table[claim.slots] = rows[name][claim.taken]
        return len(claim.slots)

    def _verify_chunk(self, chunk: int) -> VerifiedChunk:
        """Verifies a chunk and records its checksums and frame locations. Raises as `load`."""
        if self._states[chunk] == BAD:
            raise StoreCorrupt(f"chunk {chunk} was unusable before")
        try:
            rows = VerifiedChunk(self._reader.read_packed(chunk), self._features)
            rows.require_finite()
            shown = {
                name: rows.frames(name, chunk, partial(self._previous_frame, name, chunk)) for name in self._frame_table
            }
        except UNUSABLE_ERRORS as error:
            self._set_state(chunk, BAD, 0, {})
            self._count_damage(f"chunk {chunk}", error)
            raise
        self._set_state(chunk, READ, _checksum(rows.vectors()), shown)
        return rows

    def _set_state(self, chunk: int, state: int, checksum: int, shown: Mapping[str, Array]) -> None:
        """Records the results for a chunk under the lock, because the tables may be growing."""
        span = self._observations.observation_range(chunk)
        with self._lock:
            for name, frames in shown.items():
                self._frame_table[name][span.start : span.stop] = frames
            self._vector_checksums[chunk] = checksum
            self._states[chunk] = state

    def _previous_frame(self, camera: str, chunk: int) -> Array:
        """The frame shown just before a chunk, `FRAME_DTYPE` (); absent if the previous chunk is unusable."""
        unread = []
        earlier = before = self._preceding(chunk)
        while earlier is not None and self._states[earlier] == UNREAD:
            unread.append(earlier)
            earlier = self._preceding(earlier)
        for each in reversed(unread):  # iterative, because an episode may have more chunks than the recursion limit
            self._try_verify_chunk(each)
        if before is None:
            return np.zeros((), FRAME_DTYPE)
        return self._frame_table[camera][self._observations.observation_range(before).stop - 1]  # type: ignore[no-any-return]

    def _preceding(self, chunk: int) -> int | None:
        """The previous chunk of the episode, if stored."""
        found = np.flatnonzero(self._observations.index.chunks.next_chunk == chunk)
        return int(found[0]) if len(found) else None

    def _count_damage(self, what: str, error: Exception) -> None:
        with self._lock:
            self.damaged += 1
        _logger.warning("replay.unusable %s: %s", what, error)

    # Single rows

    def vectors(self, missing: CacheMiss) -> Array:
        """Reads vectors of observations; returns the unreadable places."""
        numbers, places, out = missing
        chunk, step = self._observations.locate(numbers)
        groups = _groups(chunk)

        def read(group: Array) -> bool:
            try:
                number = int(chunk[group[0]])
                rows = self._vectors_of(number)
                span = self._observations.observation_range(number)
                self._cache_vectors(rows, np.arange(span.start, span.stop), fresh=False)
            except UNUSABLE_ERRORS:
                return False
            for name, target in out.items():
                target[places[group]] = rows[name][step[group]]
            return True

        done = self._map(read, groups)
        bad = [places[group] for group, sound in zip(groups, done, strict=True) if not sound]
        return np.concatenate(bad) if bad else places[:0]

    def _vectors_of(self, chunk: int) -> dict[str, Array]:
        """A chunk's verified vectors. Raises as `load`."""
        if self._states[chunk] != READ:
            return self._verify_chunk(chunk).vectors()
        rows = VerifiedChunk(self._reader.read_packed(chunk, verify=False), self._features).vectors()
        if _checksum(rows) != self._vector_checksums[chunk]:
            self._states[chunk] = BAD
            error = StoreCorrupt(f"the vectors of chunk {chunk} have changed since they were stored")
            self._count_damage(f"chunk {chunk}", error)
            raise error
        return rows

    def frames(self, missing: Sequence[CacheMiss]) -> list[Array]:
        """Reads frames of all cameras for several misses; adjacent frames are one read.

        Returns the unreadable places of each miss.
        """
        numbers = np.concatenate([each.numbers for each in missing])
        chunk = self._observations.locate(numbers).chunk
        self._map(self._try_verify_chunk, [int(c) for c in np.unique(chunk[self._states[chunk] == UNREAD])])
        bad = self._states[chunk] != READ
        for name, table in self._frame_table.items():
            sound = np.flatnonzero(~bad)
            shown = table[numbers[sound]]
            outs = [each.out[name][place] for each in missing for place in each.places.tolist()]
            bad[sound[self._read_frames(name, shown, [outs[at] for at in sound.tolist()])]] = True
        found = []
        for each, lost in zip(missing, np.split(bad, np.cumsum([len(each.places) for each in missing])), strict=False):
            self._cache_frames(each.numbers[~lost], each.places[~lost], each.out)
            found.append(each.places[lost])
        return found

    def _try_verify_chunk(self, chunk: int) -> None:
        try:
            self._verify_chunk(chunk)
        except UNUSABLE_ERRORS:
            _logger.debug("replay.unusable chunk %d, counted", chunk)

    def _read_frames(self, camera: str, frames: Array, outs: Sequence[Array]) -> list[int]:
        """Reads each of `frames`, `FRAME_DTYPE` (n,), into its array of `outs`; returns the unreadable ones.

        Raw frames in the page cache are copied here, because a thread switch takes longer; the disk reads the others
        meanwhile. At most one thread per core waits or decodes.
        """
        runs = _runs(frames, np.lexsort((frames["start"], frames["chunk"])))
        failed: list[int] = []
        if not (frames["bytes"] > 0).any():
            results = [self._read_run(camera, frames, outs, run, wait=False) for run in runs]
            failed = [at for bad in results for at in bad or ()]
            runs = [run for run, bad in zip(runs, results, strict=True) if bad is None]
        ways = min(self._threads, CORES)
        parts = [part for part in (runs[n::ways] for n in range(ways)) if part]
        return sum(self._map(lambda part: self._read_runs(camera, frames, outs, part), parts), failed)

    def _read_runs(self, camera: str, frames: Array, outs: Sequence[Array], runs: Sequence[list[int]]) -> list[int]:
        """As `_read_frames`, one run after the other."""
        return [at for run in runs for at in self._read_run(camera, frames, outs, run) or ()]

    def _read_run(
        self, camera: str, frames: Array, outs: Sequence[Array], run: list[int], *, wait: bool = True
    ) -> list[int] | None:
        """As `_read_frames`, for the adjacent frames at the places `run`.

        Unreadable outputs are undefined. Returns None if the read would block and `wait` is false.
        """
        import simplejpeg  # lazy: learners without cameras need no codec

        records = frames[run].tolist()
        chunk, start = records[0][:2]
        found = [
            outs[at].data.cast("B") if size < 0 else memoryview(bytearray(size))
            for at, (_, _, size, _) in zip(run, records, strict=True)
        ]
        failed = []
        try:
            if not self._reader.read_into(chunk, start, found, wait=wait):
                return None
        except StoreError as error:
            self._count_damage(f"{camera} chunk {chunk} byte {start}", error)
            return run
        for at, (_, start, size, crc), body in zip(run, records, found, strict=True):
            try:
                if not size or checksum(body) != crc:
                    raise StoreCorrupt("the frame is absent or has changed since it was stored")
                if size > 0:
                    simplejpeg.decode_jpeg(body, buffer=outs[at])
            except (StoreCorrupt, ValueError) as error:
                self._count_damage(f"{camera} chunk {chunk} byte {start}", error)
                failed.append(at)
        return failed

    def _cache_frames(self, numbers: Array, places: Array, out: dict[str, Array]) -> None:
        """Adds frames just read to the cache: all while it has room, then one in `ADMIT_ONE_IN`."""
        if self._frames is None:
            return
        only_empty = len(self._frames) < self._frames.capacity
        if not only_empty:
            self._admit_phase = (self._admit_phase + 1) % ADMIT_ONE_IN
            numbers, places = numbers[self._admit_phase :: ADMIT_ONE_IN], places[self._admit_phase :: ADMIT_ONE_IN]
        if not len(places):
            return
        with self._frames.filling(numbers, fresh=False, only_empty=only_empty) as claim:
            for name, table in self._frames.tables.items():
                for slot, place in zip(claim.slots.tolist(), places[claim.taken].tolist(), strict=True):
                    table[slot] = out[name][place]

    def _map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Applies `work` to `items` in the pool; a single item in this thread."""
        return [work(item) for item in items] if len(items) < 2 else list(self._pool.map(work, items))


def _grown(table: Array, rows: int) -> Array:
    """`table`, or a longer zero-padded copy."""
    if rows <= len(table):
        return table
    grown = np.zeros(max(rows, 2 * len(table)), table.dtype)
    grown[: len(table)] = table
    return grown


def _groups(keys: Array) -> list[Array]:
    """The places of equal `keys`, one array per key."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _runs(frames: Array, order: Array) -> list[list[int]]:
    """The places of `frames` (`FRAME_DTYPE` (n,)) in `order`, grouped into runs without gaps in one record."""
    frames = frames[order]
    stops = frames["start"].astype(np.int64) + np.abs(frames["bytes"])
    joined = (frames["chunk"][1:] == frames["chunk"][:-1]) & (frames["start"][1:] == stops[:-1])
    joined &= (frames["bytes"][1:] != 0) & (frames["bytes"][:-1] != 0)
    joined[MAX_RUN - 1 :: MAX_RUN] = False
    bounds, places = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(frames)], order.tolist()
    return [places[first:stop] for first, stop in itertools.pairwise(bounds) if stop > first]


def _checksum(rows: dict[str, Array]) -> int:
    crc = 0
    for table in rows.values():
        crc = crc32c(table.tobytes(), crc)
    return crc
