"""Versions and their blobs in memory, and the sender's side of a transfer: offers and replies to requests.

The publisher, the gateway and a relay share it. It is independent of the transport, and one thread calls it. Each peer
requests the blobs that it lacks and grants the bytes that may be in flight, so a slow peer delays no other.

A blob travels raw, compressed with zstd, or as a compressed XOR difference from a blob of the same size that the
receiver holds, whichever is smallest. A sample of the blob decides. The values of a dense difference are grouped by
the significance of their bytes, because their high bytes are mostly zero.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import zstandard
from blake3 import blake3
from msgspec.structs import replace

from user_sys.codec import Array, checksum
from user_sys.errors import UserSysError, WireError
from user_sys.messages import (
    INLINE_TABLE_BYTES,
    MAX_WANTS,
    BlobCodec,
    BlobPart,
    BlobWant,
    SignedRecord,
    WeightsBlobs,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.weights.state import Entries, TensorSet, YieldHook, no_yield

ZSTD_LEVEL = 1
MAX_ENCODED_FRACTION = 0.65
"""A blob that compression does not make smaller than this fraction travels raw: on a fast link that is sooner."""
SAMPLE_BYTES = 64 << 10
RAW_CHECK = 1  # a raw blob has one encoding only
MAX_ENCODED_CACHE_BYTES = 256 << 20
DEFAULT_CACHE_BYTES = 16 << 30

Key = tuple[bytes, bytes, int]
"""Digest, digest of the base or empty, and bytes of one value."""

REQUEST_TIMEOUT_S = 120.0  # a peer without a request has given up
MAX_GRANT_BYTES = 16 << 20  # that one request may add to the send queue
MIN_REPLY_BYTES = 512  # of one message: a request for single bytes would cost millions of messages
OFFER_PIN_S = 3.0  # so long an offered version stays, until a request for it arrives
MAX_UNANSWERED_OFFERS = 2
"""Maximum number of offers to a peer that does not reply: many offers per second would fill a slow link."""
UNANSWERED_TIMEOUT_S = 1.0
"""A peer without a reply gets the next offer after this time."""

SendMessage = Callable[[str, AnyMessage, Payload | None], bool]
"""Queues a message for the peer of this name; see `user_sys.tunnel.server.TunnelServer.send`."""


class BlobCacheFull(UserSysError):
    """The blobs that must stay leave no room for another one."""


@dataclass(frozen=True)
class EncodedBlob:
    """A blob on its way: see `messages.BlobPart`."""

    base: bytes
    codec: BlobCodec
    planes: int
    payload: memoryview
    check: int

    @property
    def own_bytes(self) -> int:
        """Memory besides the blob itself."""
        return 0 if self.codec == "raw" else len(self.payload)


class BlobCache:
    """Blobs by digest, and encoded blobs by target and base. Any thread may call it.

    An encoded blob is computed once for all receivers with that base, and dropped first when room is needed.
    """

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self.max_bytes, self.size_bytes = max_bytes, 0
        self._blobs: dict[bytes, memoryview] = {}
        self._encoded: OrderedDict[Key, EncodedBlob] = OrderedDict()
        self._encoded_bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._blobs)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blobs

    def get(self, digest: bytes) -> memoryview | None:
        return self._blobs.get(digest)

    def put(self, digest: bytes, content: memoryview) -> None:
        """Keeps a verified blob. Raises BlobCacheFull if it does not fit."""
        with self._lock:
            size = self.size_bytes - len(self._blobs.get(digest, b"")) + len(content)
            if size > self.max_bytes:
                raise BlobCacheFull(
                    f"the cache of weights is full: it holds {self.size_bytes:,} of {self.max_bytes:,} bytes, and a "
                    f"blob of {len(content):,} does not fit; free memory, or keep fewer versions"
                )
            self._blobs[digest] = content
            self.size_bytes = size
            self._trim_encoded()

    def retain(self, digests: Collection[bytes]) -> None:
        """Drops all other blobs, and their encoded forms."""
        with self._lock:
            for digest in self._blobs.keys() - digests:
                self._remove(digest)
            self._drop_encoded([key for key in self._encoded if key[0] not in digests])

    def encoded(self, digest: bytes, base: bytes, width: int) -> EncodedBlob | None:
        """Returns a blob in its smallest encoding for a receiver that has `base`; None if the blob is not here."""
        content = self._blobs.get(digest)
        if content is None:
            return None
        key = digest, base if base in self._blobs else b"", width
        found = self._encoded.get(key)
        if found is None:
            found = encode_blob(content, key[1], self._blobs.get(key[1]), width)
            self.put_encoded(digest, key[1], width, found)
        return found

    def put_encoded(self, digest: bytes, base: bytes, width: int, encoded: EncodedBlob) -> None:
        """Keeps an encoded blob, for example one that a peer has encoded."""
        with self._lock:
            if (digest, base, width) not in self._encoded:
                self._encoded[digest, base, width] = encoded
                self._encoded_bytes += encoded.own_bytes
                self._trim_encoded()

    def _trim_encoded(self) -> None:
        room = min(MAX_ENCODED_CACHE_BYTES, self.max_bytes - self.size_bytes)
        while self._encoded and self._encoded_bytes > room:
            self._drop_encoded([next(iter(self._encoded))])

    def _drop_encoded(self, keys: Collection[Key]) -> None:
        for key in keys:
            self._encoded_bytes -= self._encoded.pop(key).own_bytes

    def _remove(self, digest: bytes) -> None:
        self.size_bytes -= len(self._blobs.pop(digest))


def encode_blob(content: memoryview, base_digest: bytes, base: memoryview | None, width: int) -> EncodedBlob:
    """Encodes `content` for a receiver that holds `base`; `width` is the size of a value in bytes."""
    new = np.frombuffer(content, np.uint8)
    choices: list[tuple[BlobCodec, int]] = [("zstd", 1)]
    old = None if base is None or len(base) != len(content) else np.frombuffer(base, np.uint8)
    if old is not None:
        choices += [("xor", 1), ("xor", width)] if width > 1 and len(content) % width == 0 else [("xor", 1)]
    start = max(0, new.size - SAMPLE_BYTES) // 2 // width * width
    sample = slice(start, start + SAMPLE_BYTES)
    sizes = {choice: len(_compress(new[sample], None if old is None else old[sample], *choice)) for choice in choices}
    codec, planes = min(choices, key=sizes.__getitem__)
    limit = MAX_ENCODED_FRACTION * new.size
    if sizes[codec, planes] < MAX_ENCODED_FRACTION * new[sample].size:
        payload = _compress(new, old, codec, planes)
        if len(payload) < limit:
            base_digest = base_digest if codec == "xor" else b""
            return EncodedBlob(base_digest, codec, planes, memoryview(payload), checksum(payload))
    return EncodedBlob(b"", "raw", 1, content, RAW_CHECK)


def decode_blob(encoded: EncodedBlob, size: int, base: memoryview | None) -> memoryview:
    """Returns the blob of `size` bytes; of a ``xor`` from `base`. The caller verifies its digest.

    Raises:
        WireError: the encoding is damaged, or contradicts `size` or `base`. No allocation exceeds `size`.
    """
    if encoded.codec == "raw":
        if len(encoded.payload) != size:
            raise WireError(f"a blob has {len(encoded.payload)} bytes, expected {size}")
        return encoded.payload
    content = _decompress(encoded.payload, size)
    if encoded.codec == "xor":
        if base is None or len(base) != size or size % encoded.planes:
            raise WireError("a difference of weights has a base that is not here")
        if encoded.planes > 1:
            content = np.ascontiguousarray(content.reshape(encoded.planes, -1).T).reshape(-1)
        return np.bitwise_xor(content, np.frombuffer(base, np.uint8)).data
    return content.data


def _compress(new: Array, old: Array | None, codec: BlobCodec, planes: int) -> bytes:
    content = new
    if codec == "xor" and old is not None:
        content = new ^ old
        if planes > 1:
            content = np.ascontiguousarray(content[: content.size // planes * planes].reshape(-1, planes).T)
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(content.data)


def _decompress(payload: memoryview, size: int) -> Array:
    try:
        # zstandard allocates the size that a frame states, even beyond max_output_size.
        stated = zstandard.frame_content_size(payload)
        if stated != size:
            raise WireError(f"a blob states {stated} bytes, expected {size}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(payload, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise WireError(f"a blob is damaged: {error}") from None


def version_id(signed: SignedRecord) -> bytes:
    """Returns the id of a version in one precision: the BLAKE3 of its manifest."""
    return blake3(signed.body).digest()


@dataclass(frozen=True, eq=False)
class StoredVersion:
    """A version in one precision whose blobs are in the cache."""

    id: bytes
    manifest: WeightsManifest
    signed: SignedRecord
    entries: Entries

    @cached_property
    def digests(self) -> frozenset[bytes]:
        """The digests of all blobs, and of the table of tensors."""
        return frozenset({self.manifest.digest, *(digest for entry in self.entries for digest in entry.blobs)})


class VersionCatalog:
    """Complete versions, in the order in which they were added, and the cache of their blobs."""

    def __init__(self, cache: BlobCache) -> None:
        self.cache = cache
        self.versions: dict[bytes, StoredVersion] = {}

    def add(self, version: StoredVersion) -> None:
        """Adds a version whose blobs are in the cache."""
        self.versions[version.id] = version

    def add_tensors(self, manifest: WeightsManifest, signed: SignedRecord, state: TensorSet) -> StoredVersion:
        """Adds a version with its blobs. Raises BlobCacheFull."""
        for digest, content in (*state.blobs(), (state.digest, memoryview(state.table))):
            if digest not in self.cache:
                self.cache.put(digest, content)
        version = StoredVersion(version_id(signed), manifest, signed, state.entries)
        self.add(version)
        return version

    def numbers(self) -> list[int]:
        """Returns the version numbers, ascending."""
        return sorted({version.manifest.version for version in self.versions.values()})

    def of_number(self, number: int) -> list[StoredVersion]:
        """Returns a version in all precisions that are complete."""
        return [each for each in self.versions.values() if each.manifest.version == number]

    def retain(
        self, pinned: Iterable[bytes], fetching: Iterable[bytes], recent: int, extra: Iterable[bytes] = ()
    ) -> None:
        """Drops the versions that no receiver needs.

        Args:
            pinned: ids that stay in any case.
            fetching: ids that peers fetch, the most important first; they stay while they leave room for another
                version.
            recent: so do the newest versions, at most so many.
            extra: digests that stay.
        """
        kept, digests = dict[bytes, StoredVersion](), set(extra)
        size = self._size_bytes(digests)
        newest = list(self.versions)[: -recent - 1 : -1]
        must, candidates = set(pinned), dict.fromkeys([*pinned, *fetching, *newest])
        for id in candidates:
            version = self.versions.get(id)
            if version is None:
                continue
            fresh = version.digests - digests
            added = self._size_bytes(fresh)
            if id in must or size + added + version.manifest.size_bytes <= self.cache.max_bytes:
                kept[id], size = version, size + added
                digests |= fresh
        self.versions = {id: version for id, version in self.versions.items() if id in kept}
        self.cache.retain(digests)

    def _size_bytes(self, digests: Iterable[bytes]) -> int:
        return sum(len(self.cache.get(digest) or b"") for digest in digests)


def thin_versions(numbers: Sequence[int], max_count: int) -> list[int]:
    """Returns at most `max_count` of the ascending version numbers: dense at the newest, sparse at the oldest.

    So a person can return to a version of an hour ago, although the learner publishes each second.
    """
    left = list(numbers)
    while len(left) > max(1, max_count):
        spans = [(left[i + 1] - left[i - 1]) / (left[-1] - left[i] + 1) for i in range(1, len(left) - 1)]
        left.pop(1 + spans.index(min(spans)) if max_count > 2 else 0)
    return left


@dataclass
class _Peer:
    """The newest request of a peer, and its unanswered offers."""

    version: bytes = b""
    serial: int = -1
    sent_bytes: int = 0
    limit_bytes: int = 0
    message_bytes: int = 1
    requested_s: float = 0.0
    wants: deque[BlobWant] = field(default_factory=deque)
    is_offer_pending: bool = True
    is_greeted: bool = False
    unanswered_offers: int = 0
    offered_s: float = 0.0

    def is_offer_due(self, now_s: float) -> bool:
        return self.is_offer_pending and (
            self.unanswered_offers < MAX_UNANSWERED_OFFERS or now_s - self.offered_s >= UNANSWERED_TIMEOUT_S
        )


class WeightsServer:
    """Offers versions to peers, and sends them the blobs that they request.

    Args:
        make_offer: returns the offer of the version to use, or None.
    """

    def __init__(
        self,
        cache: BlobCache,
        send: SendMessage,
        make_offer: Callable[[], WeightsOffer | None],
        clock: Callable[[], float] = time.monotonic,
        yield_cpu: YieldHook = no_yield,
    ) -> None:
        self._cache, self._send, self._make_offer = cache, send, make_offer
        self._clock, self._yield_cpu = clock, yield_cpu
        self._peers: dict[str, _Peer] = {}
        self._offered_s: dict[bytes, float] = {}  # by id of the version

    def add_peer(self, name: str) -> None:
        """Adds a peer whose session has begun, and offers it the version to use."""
        self._peers[name] = _Peer()
        self._offer(name)

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)

    def offer_to_all(self) -> None:
        """Offers the version to use to each peer; one that has not replied gets it later."""
        for name, peer in self._peers.items():
            peer.is_offer_pending = True
            self._offer_if_due(name)

    def step(self) -> None:
        """Sends the offers that are due, and goes on with replies that could not be sent."""
        for name in list(self._peers):
            self._offer_if_due(name)
            self._reply(name)

    def on_peer_message(self, name: str) -> None:
        """A peer has sent a message, so its last offer has arrived."""
        if (peer := self._peers.get(name)) is not None:
            peer.unanswered_offers = 0
            self._offer_if_due(name)

    def on_request(self, name: str, request: WeightsRequest) -> None:
        """Replies to a request, as far as it allows."""
        if (peer := self._peers.get(name)) is None or request.serial < peer.serial:
            return
        peer.requested_s = self._clock()
        if request.serial > peer.serial:
            if not request.wants:
                return  # the first request of this serial number is lost; the peer repeats it
            peer.version, peer.serial, peer.wants = request.version, request.serial, deque(request.wants)
            peer.sent_bytes = peer.limit_bytes = 0
        peer.limit_bytes = max(peer.limit_bytes, min(request.limit_bytes, peer.sent_bytes + MAX_GRANT_BYTES))
        peer.message_bytes = max(MIN_REPLY_BYTES, request.message_bytes)
        self._reply(name)

    def fetching(self) -> list[bytes]:
        """Returns the ids of the versions that peers are fetching, and of those that were just offered."""
        now = self._clock()
        self._offered_s = {id: at_s for id, at_s in self._offered_s.items() if at_s >= now - OFFER_PIN_S}
        peers = self._peers.values()
        found = [each.version for each in peers if each.version and each.requested_s >= now - REQUEST_TIMEOUT_S]
        return [*found, *self._offered_s]

    def needed_digests(self) -> set[bytes]:
        """Returns the digests of the blobs that peers have requested, and of their bases."""
        wants = [want for peer in self._peers.values() for want in peer.wants]
        return {digest for want in wants for digest in (want.digest, want.base)}

    def _offer_if_due(self, name: str) -> None:
        if self._peers[name].is_offer_due(self._clock()):
            self._offer(name)

    def _offer(self, name: str) -> None:
        peer, offer = self._peers[name], self._make_offer()
        if offer is None:
            return
        offer = replace(offer, greeting=not peer.is_greeted)
        peer.offered_s = self._clock()
        self._offered_s |= {version_id(signed): peer.offered_s for signed in offer.manifests}
        peer.unanswered_offers += 1
        is_sent = self._send(name, offer, None)
        peer.is_offer_pending, peer.is_greeted = not is_sent, peer.is_greeted or is_sent  # `step` tries again

    def _reply(self, name: str) -> None:
        peer = self._peers[name]
        while peer.wants and peer.sent_bytes < peer.limit_bytes:
            taken, parts, pieces = 0, list[BlobPart](), list[memoryview]()
            room = min(peer.message_bytes, peer.limit_bytes - peer.sent_bytes)
            rest = deque(peer.wants)
            while rest and taken < room and len(parts) < MAX_WANTS:
                want = rest.popleft()
                found = self._part(want, room - taken)
                if found is None:
                    self._gone(name, peer)
                    return
                part, piece = found
                parts.append(part)
                pieces.append(piece)
                taken += len(piece)
                if (end := part.offset + part.size_bytes) < part.encoded_bytes:
                    rest.appendleft(BlobWant(want.digest, want.base, want.width, end, part.check))
            payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if not self._send(name, WeightsBlobs(version=peer.version, parts=tuple(parts)), payload):
                return  # the queue is full; `step` tries again
            peer.wants = rest
            peer.sent_bytes += max(1, taken)

    def _part(self, want: BlobWant, room: int) -> tuple[BlobPart, memoryview] | None:
        """Returns the next part of a blob; None if it is not here."""
        encoded = self._cache.encoded(want.digest, want.base, want.width)
        if encoded is None:
            return None
        total = len(encoded.payload)
        start = want.offset if want.check == encoded.check and want.offset <= total else 0
        if start == 0:
            self._yield_cpu(total)
        piece = encoded.payload[start : start + room]
        of, base = encoded, encoded.base
        return BlobPart(want.digest, base, of.codec, of.planes, total, of.check, start, len(piece)), piece

    def _gone(self, name: str, peer: _Peer) -> None:
        """Tells a peer that its version is gone. The offer goes first, so the peer switches at once."""
        version, peer.version = peer.version, b""
        peer.wants.clear()
        self._offer(name)
        self._send(name, WeightsGone(version=version), None)


def build_offer(
    versions: Iterable[StoredVersion], cache: BlobCache, signer: bytes, pin: SignedRecord | None = None
) -> WeightsOffer | None:
    """Builds the offer of a version in these precisions, with the tables that fit; None without a version."""
    found = list(versions)
    if not found:
        return None
    short = [v.manifest.digest for v in found if v.manifest.table_bytes <= INLINE_TABLE_BYTES]
    tables = tuple(bytes(table) for digest in short if (table := cache.get(digest)) is not None)
    return WeightsOffer(manifests=tuple(v.signed for v in found), signer=signer, tables=tables, pin=pin)
