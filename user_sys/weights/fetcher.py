"""The receiver's side of a transfer: fetches the blobs of the newest version that it can complete.

The robot, the gateway and a relay share it. It is independent of the transport, and one thread calls it. It leaves a
version for a newer one only if the newer one completes sooner, so a link that is slower than the learner still
completes versions. Blobs that have arrived are never requested again, and an interrupted blob goes on at its byte.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from user_sys.errors import WireError
from user_sys.messages import (
    BLOB_BYTES,
    MAX_WANTS,
    BlobPart,
    BlobWant,
    Digest,
    SignedRecord,
    WeightsBlobs,
    WeightsGone,
    WeightsManifest,
    WeightsRequest,
)
from user_sys.weights.catalog import (
    BlobCache,
    BlobCacheFull,
    EncodedBlob,
    StoredVersion,
    decode_blob,
    version_id,
)
from user_sys.weights.state import Entries, YieldHook, decode_table, dtype_of, entry_bytes, no_yield

STALL_TIMEOUT_S = 2.0
MAX_MESSAGE_S = 10.0  # of one message over the slowest link
RETRY_S = 0.05  # after a request that could not be sent
INITIAL_RATE_BYTES_PER_S = 4e6  # before the first measurement
RATE_SMOOTHING = 0.7
RATE_SAMPLE_S = 0.002
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 32 << 10, 8 << 20
WINDOW_S = 0.25  # in flight at the link's rate, or two round trips if these are longer
MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES = 16 << 10, 512 << 10
MESSAGE_S = 0.03  # of one message, at the link's rate
_log = logging.getLogger(__name__)

Position = tuple[str, str, int]
"""Precision, tensor and index of a blob; the table of tensors has an empty name."""


_Blob = tuple[bytes, int, int, Position]
"""Digest, size in bytes, bytes of one value, and position of a blob."""


class _Table(NamedTuple):
    """A table of tensors, and the blobs that they need."""

    entries: Entries
    blobs: tuple[_Blob, ...]


@dataclass(frozen=True)
class Candidate:
    """A version in one precision that can be fetched."""

    id: bytes
    manifest: WeightsManifest
    signed: SignedRecord

    @classmethod
    def of(cls, manifest: WeightsManifest, signed: SignedRecord) -> Candidate:
        return cls(version_id(signed), manifest, signed)


@dataclass
class _Transfer:
    """A blob in transfer, from `base` if the receiver holds one."""

    digest: bytes
    size_bytes: int
    width: int
    position: Position
    base: Digest = b""
    base_content: memoryview | None = None
    first: BlobPart | None = None
    encoded: memoryview = field(default_factory=lambda: memoryview(b""))
    received_bytes: int = 0

    def want(self) -> BlobWant:
        check = 0 if self.first is None else self.first.check
        return BlobWant(self.digest, self.base, self.width, self.received_bytes, check)

    def write(self, part: BlobPart, piece: memoryview) -> bool:
        """Stores a part that continues the received bytes; ignores another one. Returns whether the blob is complete.

        Raises WireError if the description is not plausible.
        """
        if self.first is None or (part.offset == 0 and part.check != self.first.check):
            if part.offset:
                return False
            if part.encoded_bytes > self.size_bytes or part.base not in (b"", self.base):
                raise WireError(f"a blob of {self.size_bytes} bytes is announced with {part.encoded_bytes}")
            self.first, self.received_bytes = part, 0
            self.encoded = np.empty(part.encoded_bytes, np.uint8).data
        end = part.offset + len(piece)
        if part.check != self.first.check or part.offset != self.received_bytes or end > len(self.encoded):
            return False
        self.encoded[part.offset : end] = piece
        self.received_bytes = end
        return end == len(self.encoded)

    def restart_whole(self) -> None:
        """Prepares to fetch the blob again, without a base."""
        self.base, self.base_content = b"", None
        self.first, self.received_bytes = None, 0

    def remaining_bytes(self, ratio: float) -> float:
        if self.first is not None:
            return len(self.encoded) - self.received_bytes
        return self.size_bytes * (ratio if self.base else 1.0)


class LinkMeter:
    """Measures the rate and the round trip of a link, and from them the bytes that may be in flight."""

    def __init__(self, clock: Callable[[], float], limit: Callable[[], float]) -> None:
        self.bytes_per_s, self.is_measured = INITIAL_RATE_BYTES_PER_S, False
        self._clock, self._limit = clock, limit
        self._round_trips_s: deque[float] = deque(maxlen=8)
        self._asked_s: float | None = None  # when a request was sent on an idle link, until a reply arrives
        self._sampled_s, self._sampled_bytes = math.inf, 0

    def on_idle_request(self) -> None:
        self._asked_s = self._clock()

    def on_stall(self) -> None:
        """The time until the next reply says nothing about the rate."""
        self._sampled_s = math.inf

    def on_received(self, size: int) -> None:
        now = self._clock()
        if self._asked_s is not None:
            self._round_trips_s.append(now - self._asked_s)
            self._asked_s, self._sampled_s = None, math.inf
        if self._sampled_s == math.inf:
            self._sampled_s, self._sampled_bytes = now, 0
            return
        self._sampled_bytes += size
        if now - self._sampled_s >= RATE_SAMPLE_S:
            weight = RATE_SMOOTHING if self.is_measured else 0.0
            sample = self._sampled_bytes / (now - self._sampled_s)
            self.bytes_per_s, self.is_measured = weight * self.bytes_per_s + (1 - weight) * sample, True
            self._sampled_s, self._sampled_bytes = now, 0

    @property
    def window_bytes(self) -> int:
        rate = min(self.bytes_per_s, self._limit())
        seconds = max(WINDOW_S, 2 * min(self._round_trips_s, default=0.0))
        return int(min(MAX_WINDOW_BYTES, max(MIN_WINDOW_BYTES, rate * seconds)))

    @property
    def message_s(self) -> float:
        """Seconds that one message takes."""
        return self.message_bytes / max(1.0, min(self.bytes_per_s, self._limit()))

    @property
    def message_bytes(self) -> int:
        rate = min(self.bytes_per_s, self._limit()) if self.is_measured else 0.5 * INITIAL_RATE_BYTES_PER_S
        return int(min(MAX_MESSAGE_BYTES, max(MIN_MESSAGE_BYTES, rate * MESSAGE_S)))


class RequestWindow:
    """Requests the missing blobs of a version, so many bytes at a time that the link stays busy.

    Attributes:
        listed: digests that were requested with the current serial number, and are not complete.
    """

    def __init__(
        self, send: Callable[[WeightsRequest], bool], clock: Callable[[], float], limit: Callable[[], float]
    ) -> None:
        """See `VersionFetcher`."""
        self.link = LinkMeter(clock, limit)
        self.listed: set[bytes] = set()
        self._send, self._clock, self._limit = send, clock, limit
        self._serial = self._received_bytes = self._limit_bytes = 0
        self._is_outdated = False
        self._heard_s = self._next_request_s = clock()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that were requested and have not arrived."""
        return self._limit_bytes - self._received_bytes

    def repeat(self) -> None:
        """Has the next step request the missing blobs again."""
        self._is_outdated = True

    def on_received(self, size: int) -> None:
        self._heard_s = self._clock()
        self._received_bytes += size
        self.link.on_received(size)

    def step(self, version: bytes, missing: Collection[_Transfer]) -> float:
        """Sends a request if one is due. Returns the seconds after which to call it again at the latest."""
        now = self._clock()
        if now < self._next_request_s:
            return self._next_request_s - now
        if now - self._heard_s > STALL_TIMEOUT_S + min(MAX_MESSAGE_S, 4 * self.link.message_s):
            self._is_outdated = True
            self.link.on_stall()
        if self._is_outdated or not self.listed:
            self._request(version, list(islice(missing, MAX_WANTS)))
        elif self.in_flight_bytes < self.link.window_bytes / 2:
            self._grant(version, ())
        return RETRY_S if self._is_outdated else STALL_TIMEOUT_S

    def _request(self, version: bytes, transfers: Sequence[_Transfer]) -> None:
        if not self.listed:
            self.link.on_idle_request()
        self._serial += 1
        self._received_bytes = self._limit_bytes = 0
        self.listed = {transfer.digest for transfer in transfers}
        self._is_outdated = not self._grant(version, tuple(transfer.want() for transfer in transfers))

    def _grant(self, version: bytes, wants: tuple[BlobWant, ...]) -> bool:
        """Raises the limit of bytes in flight."""
        request = WeightsRequest(
            version=version,
            serial=self._serial,
            limit_bytes=self._received_bytes + self.link.window_bytes,
            message_bytes=self.link.message_bytes,
            wants=wants,
        )
        if not self._send(request):
            return False
        now, added = self._clock(), request.limit_bytes - self._limit_bytes
        self._limit_bytes = request.limit_bytes
        self._heard_s = now if wants else self._heard_s
        if math.isfinite(limit := self._limit()):
            self._next_request_s = max(now, self._next_request_s) + added / limit
        return True


class TransferPlanner:
    """Compares versions with the blobs in `cache`: which are missing, and which ones are bases of differences."""

    def __init__(self, cache: BlobCache) -> None:
        self._cache = cache
        self._tables: dict[bytes, _Table] = {}  # by digest
        self._positions: dict[Position, bytes] = {}  # the newest blob at each position, a base for the next one
        self._transfers: dict[bytes, _Transfer] = {}
        self._ratio = 1.0  # of the encoded size of a blob with a base to its size

    def plan(self, candidate: Candidate) -> dict[bytes, _Transfer]:
        """The transfers that a version still needs: its table, and then its blobs. Raises WireError."""
        manifest = candidate.manifest
        if manifest.digest not in self._cache:
            position = (manifest.precision, "", 0)
            return {manifest.digest: self._transfer(manifest.digest, manifest.table_bytes, 1, position)}
        table = self._tables.get(manifest.digest) or self._decode_table(manifest)
        return {blob[0]: self._transfer(*blob) for blob in table.blobs if blob[0] not in self._cache}

    def begin(self, plan: dict[bytes, _Transfer]) -> None:
        """Keeps these transfers, and no others: what they have received is not requested again."""
        self._transfers = dict(plan)

    def missing_bytes(self, version: Sequence[Candidate]) -> float:
        """Estimates how many bytes have to arrive until a version is complete. Raises WireError."""
        total = 0.0
        for candidate in version:
            if candidate.manifest.digest not in self._cache:
                total += candidate.manifest.size_bytes
            total += sum(t.remaining_bytes(self._ratio) for t in self.plan(candidate).values())
        return total

    def complete_blob(self, transfer: _Transfer) -> None:
        """Decodes a blob that has arrived into the cache. Raises WireError and BlobCacheFull."""
        part = transfer.first
        assert part is not None
        encoded = EncodedBlob(part.base, part.codec, part.planes, transfer.encoded, part.check)
        content = decode_blob(encoded, transfer.size_bytes, transfer.base_content)
        if blake3(content).digest() != transfer.digest:
            raise WireError("a blob has another digest than its version names")
        if transfer.base:
            self._ratio = 0.5 * self._ratio + 0.5 * len(encoded.payload) / max(1, transfer.size_bytes)
        self._cache.put(transfer.digest, content)
        if part.codec == "xor":
            self._cache.put_encoded(transfer.digest, transfer.base, transfer.width, encoded)
        self._positions[transfer.position] = transfer.digest
        self._transfers.pop(transfer.digest, None)

    def complete_version(self, target: Sequence[Candidate], newest: Sequence[Candidate]) -> tuple[StoredVersion, ...]:
        """The version whose blobs are all in the cache. Forgets the tables of versions other than it and `newest`."""
        versions = tuple(
            StoredVersion(c.id, c.manifest, c.signed, self._tables[c.manifest.digest].entries) for c in target
        )
        for version in versions:
            self.hold(version)
        self._transfers.clear()
        known = {candidate.manifest.digest for candidate in (*target, *newest)}
        self._tables = {digest: table for digest, table in self._tables.items() if digest in known}
        return versions

    def hold(self, version: StoredVersion) -> None:
        """The version's blobs are bases for the next ones."""
        precision = version.manifest.precision
        self._positions = {position: d for position, d in self._positions.items() if position[0] != precision}
        self._positions[precision, "", 0] = version.manifest.digest
        for entry in version.entries:
            self._positions |= {(precision, entry.name, index): digest for index, digest in enumerate(entry.blobs)}

    def needed_digests(self, candidates: Sequence[Candidate]) -> set[bytes]:
        """The digests of `candidates`, as far as their tables are known."""
        found = set[bytes]()
        for candidate in candidates:
            found.add(candidate.manifest.digest)
            if (table := self._tables.get(candidate.manifest.digest)) is not None:
                found |= {digest for digest, *_ in table.blobs}
        return found

    def _transfer(self, digest: bytes, size: int, width: int, position: Position) -> _Transfer:
        if (known := self._transfers.get(digest)) is not None:
            return known
        base = self._positions.get(position, b"")
        content = self._cache.get(base)
        if content is None or len(content) != size:
            base, content = b"", None
        return _Transfer(digest, size, width, position, base, content)

    def _decode_table(self, manifest: WeightsManifest) -> _Table:
        content = self._cache.get(manifest.digest)
        assert content is not None
        entries, blobs = decode_table(manifest, content), dict[bytes, _Blob]()
        for entry in entries:
            size, width = entry_bytes(entry), dtype_of(entry.dtype).itemsize
            for index, digest in enumerate(entry.blobs):
                position = (manifest.precision, entry.name, index)
                blobs[digest] = digest, min(size - index * BLOB_BYTES, BLOB_BYTES), width, position
        table = self._tables[manifest.digest] = _Table(entries, tuple(blobs.values()))
        return table


@dataclass
class Rejections:
    """What a receiver did not take. Another thread may read it.

    Attributes:
        count: offers and versions.
        newest: why the newest one was rejected; the owner clears it when a version has loaded.
    """

    count: int = 0
    newest: str = ""

    def add(self, why: str) -> None:
        self.count, self.newest = self.count + 1, why


class VersionFetcher:
    """Fetches versions into `cache`.

    Args:
        send: sends a request; returns False if it cannot be sent now.
        limit: bytes/s that the governor allows; infinite without a governor.
        yield_cpu: called during bulk work.
        make_room: called when `cache` is full; drops blobs, but not `needed_digests`.

    Attributes:
        rejections: versions that could not be completed, and what the owner adds; each is logged.
        abandoned: number of versions that were left for a newer one.
        damaged: number of blobs that arrived damaged.
    """

    def __init__(
        self,
        cache: BlobCache,
        send: Callable[[WeightsRequest], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        limit: Callable[[], float] = lambda: math.inf,
        yield_cpu: YieldHook = no_yield,
        make_room: Callable[[], object] = lambda: None,
    ) -> None:
        self.rejections, self.abandoned, self.damaged = Rejections(), 0, 0
        self._cache, self._yield_cpu, self._make_room = cache, yield_cpu, make_room
        self._planner, self._requests = TransferPlanner(cache), RequestWindow(send, clock, limit)
        self._newest: tuple[Candidate, ...] = ()
        self._target: tuple[Candidate, ...] = ()
        self._done: tuple[bytes, ...] = ()  # ids of the last completed version
        self._bad: set[bytes] = set()  # ids of versions that could not be completed
        self._completed: deque[tuple[StoredVersion, ...]] = deque()
        self._current = b""  # id of the candidate in transfer
        self._missing: dict[bytes, _Transfer] = {}  # of that candidate
        self._retried: set[bytes] = set()

    @property
    def link(self) -> LinkMeter:
        return self._requests.link

    @property
    def is_fetching(self) -> bool:
        return bool(self._target)

    @property
    def target(self) -> tuple[Candidate, ...]:
        """The version that is being fetched, or that will be fetched next."""
        return self._target or self._newest

    def set_newest(self, version: Sequence[Candidate], tables: Sequence[bytes] = ()) -> None:
        """Offers a version, in the precisions to fetch; it replaces the one before if it completes sooner.

        Raises BlobCacheFull if its table of tensors does not fit.
        """
        self._newest = tuple(version)
        for candidate in version:
            if candidate.manifest.size_bytes + candidate.manifest.table_bytes > self._cache.max_bytes:
                self._newest = ()
                self._reject(
                    version,
                    f"it has {candidate.manifest.size_bytes:,} bytes, and the cache is bound to "
                    f"{self._cache.max_bytes:,}",
                )
                return
            for table in tables:
                if blake3(table).digest() == candidate.manifest.digest:
                    self._with_room(partial(self._cache.put, candidate.manifest.digest, memoryview(table)))
        self._choose()

    def hold(self, version: StoredVersion) -> None:
        """Records a version whose blobs are in the cache: they are bases for the next ones."""
        self._planner.hold(version)
        self._done = (version.id,)

    def abandon(self) -> None:
        """Drops the version in transfer; received bytes stay while there is room."""
        self._target, self._missing = (), {}

    def reset_requests(self) -> None:
        """Repeats outstanding requests, after a reconnect, and allows versions that failed."""
        self._requests.repeat()
        self._bad.clear()
        self._retried.clear()
        self._choose()

    def needed_digests(self) -> set[bytes]:
        """Returns the digests that must stay in the cache: of versions in transfer, and of completed ones that wait."""
        queued = (version.digests for versions in self._completed for version in versions)
        return self._planner.needed_digests((*self._target, *self._newest)).union(*queued)

    def on_blobs(self, message: WeightsBlobs, payload: memoryview) -> None:
        """Stores parts of blobs. Ignores those that are not needed."""
        self._requests.on_received(len(payload))
        start = 0
        for part in message.parts:
            piece, start = payload[start : start + part.size_bytes], start + part.size_bytes
            transfer = self._missing.get(part.digest)
            if transfer is None or len(piece) != part.size_bytes:
                continue
            try:
                if transfer.write(part, piece):
                    self._complete_blob(transfer)
            except BlobCacheFull as error:
                self._give_up(str(error))
            except WireError as error:
                self._on_damaged(transfer, str(error))
        if self._target and not self._missing:
            self._advance()

    def on_gone(self, message: WeightsGone) -> None:
        """The sender no longer has a version; another offer has arrived before, or will follow."""
        if message.version in {candidate.id for candidate in self._target}:
            if self._ids(self._newest) == self._ids(self._target):
                self._newest = ()
            self.abandon()
            self._choose()

    def step(self) -> float:
        """Sends requests. Returns the seconds after which to call it again at the latest."""
        return self._requests.step(self._current, self._missing.values()) if self._missing else STALL_TIMEOUT_S

    def pop_completed(self) -> tuple[StoredVersion, ...]:
        """Returns the next completed version, in all its precisions; empty if there is none."""
        return self._completed.popleft() if self._completed else ()

    def _choose(self) -> None:
        """Switches to the newest version if it completes before the one in transfer."""
        newest, target = self._ids(self._newest), self._ids(self._target)
        if not newest or newest in (self._done, target) or self._bad.intersection(newest):
            return
        if target:
            try:
                is_sooner = self._is_newest_sooner()
            except WireError as error:
                self._reject(self._newest, str(error))
                self._newest = ()
                return
            if not is_sooner:
                return
            self.abandoned += 1
        self._target = self._newest
        self._advance()

    def _is_newest_sooner(self) -> bool:
        """Whether less is missing of the newest version than of the target, with what would arrive in vain."""
        plans = map(self._planner.plan, self._newest)
        is_shared = any(digest in plan for plan in plans for digest in self._requests.listed)
        in_flight = 0 if is_shared else max(0, self._requests.in_flight_bytes)
        remaining = self._planner.missing_bytes(self._target)
        return self._planner.missing_bytes(self._newest) + min(in_flight, remaining) <= remaining

    def _advance(self) -> None:
        """Plans the next transfers of the target, or completes it."""
        try:
            plans = {candidate.id: self._planner.plan(candidate) for candidate in self._target}
        except WireError as error:
            self._give_up(str(error))
            return
        self._current, self._missing = next(((id, plan) for id, plan in plans.items() if plan), (b"", {}))
        if self._missing:
            self._requests.repeat()
            self._planner.begin(self._missing)
            return
        self._completed.append(self._planner.complete_version(self._target, self._newest))
        self._done = self._ids(self._target)
        self.abandon()
        self._retried.clear()
        self._choose()

    def _complete_blob(self, transfer: _Transfer) -> None:
        self._with_room(partial(self._planner.complete_blob, transfer))
        self._missing.pop(transfer.digest, None)
        self._requests.listed.discard(transfer.digest)
        self._yield_cpu(transfer.size_bytes)

    def _with_room(self, put: Callable[[], None]) -> None:
        """Calls `put`, and once more with room if the cache is full. Raises BlobCacheFull."""
        try:
            put()
        except BlobCacheFull:
            self._make_room()
            put()

    def _on_damaged(self, transfer: _Transfer, why: str) -> None:
        """Requests a blob whole that arrived damaged; the second time its version is given up."""
        self.damaged += 1
        if transfer.digest in self._retried:
            self._give_up(why)
            return
        self._retried.add(transfer.digest)
        transfer.restart_whole()
        self._requests.repeat()

    def _give_up(self, why: str) -> None:
        self._reject(self._target, why)
        if self._ids(self._newest) == self._ids(self._target):
            self._newest = ()
        self.abandon()
        self._choose()

    def _reject(self, version: Sequence[Candidate], why: str) -> None:
        number = version[0].manifest.version
        self.rejections.add(f"version {number}: {why}")
        self._bad |= {candidate.id for candidate in version}
        _log.error("weights.rejected version=%d: %s", number, why)

    @staticmethod
    def _ids(version: Sequence[Candidate]) -> tuple[bytes, ...]:
        return tuple(candidate.id for candidate in version)
