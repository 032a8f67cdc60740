"""What the learner and its envoy say to each other: small records over a pair of sockets, and weights in shared memory.

Both ends run on one machine, from one installation, and the end of either closes the line.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import time
from typing import Self, TypeAlias

import msgspec
import numpy as np

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import ALIGN_BYTES, Array
from user_sys.errors import LinkDown, RunError, WireError
from user_sys.messages import Hello, MetricsReport
from user_sys.weights.precision import NO_ROUNDING, RoundingStats
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.snapshot import TensorLayout, layout_of
from user_sys.weights.state import dtype_name, dtype_of

SLOT_COUNT = 2
"""One to write to while the other is read."""
MAX_RECORD_BYTES = 128 << 10  # a socket's buffer holds 200 KiB


class PublisherSettings(msgspec.Struct, frozen=True, tag=True):
    """The first record: as whom the envoy connects, and how it publishes.

    Attributes:
        tunnel_key: path of the learner's key pair of the tunnel.
        signing_folder: folder of the learner's signing key, which the envoy alone reads.
        run: identifies the numbers of its versions.
    """

    endpoint: str
    tunnel_key: str
    gateway_key: str
    hello: Hello
    signing_folder: str
    publish: PublishConfig
    run: bytes = b""


class SharedMemoryInfo(msgspec.Struct, frozen=True, tag=True):
    """Comes with the descriptor of the shared memory, before the first snapshot. See `SharedTensorSlots`."""

    layout_bytes: int
    slot_bytes: int


class DeviceCopyStarted(msgspec.Struct, frozen=True, tag=True):
    """The next snapshot is being fetched from a device: a push is under way, and the governor's share is wanted."""


class SnapshotReady(msgspec.Struct, frozen=True, tag=True):
    """A version to publish lies in `slot`, but for the tensors (by their place in the layout) that are `unchanged`.

    Attributes:
        rounding: what was done to tensors on the device that they come from.
        fetch_s: how long fetching it from there took, without rests.
    """

    slot: int
    version: int
    updates: int
    unchanged: tuple[int, ...] = ()
    rounding: RoundingStats = NO_ROUNDING
    fetch_s: float = 0.0


class StepTimes(msgspec.Struct, frozen=True, tag=True):
    """Training steps, for the governor: when each ended, by the monotonic clock, and how many seconds it took."""

    steps: tuple[tuple[float, float], ...]


class ScalarReport(msgspec.Struct, frozen=True, tag=True):
    report: MetricsReport


class ShutdownRequest(msgspec.Struct, frozen=True, tag=True):
    """The envoy is to send what waits, for `flush_s` at most, and end."""

    flush_s: float


class PublishFailure(msgspec.Struct, frozen=True, tag=True):
    """Why weights could not be published; `kind` is the error's class."""

    kind: str
    text: str


class PublisherStatus(msgspec.Struct, frozen=True, tag=True):
    """Sent at once when `ready_version` or `failure` changes, else soon: each word takes the learner's interpreter.

    Attributes:
        ready_version: the newest version that is made ready; the slots of this and of earlier ones are free again.
        stored_version: the newest that the gateway has on its disk.
        oldest_in_use: with which a connected robot acts; -1 where none acts with any.
        published: how many were made ready.
        next_allowed_s: when another may follow, by the monotonic clock that all processes of a machine share.
        failure: what ended publishing.
        pinned_version: the version that a person ordered; -1 where none is.
        share: the governor's; while weights are being fetched each change is told.
    """

    ready_version: int
    stored_version: int
    oldest_in_use: int
    published: int
    next_allowed_s: float
    scalars: dict[str, float]
    failure: PublishFailure | None = None
    pinned_version: int = -1
    share: float = 1.0


class RunStopped(msgspec.Struct, frozen=True, tag=True):
    """The gateway says that the run is over."""

    reason: str


PublisherMessage: TypeAlias = (
    PublisherSettings
    | SharedMemoryInfo
    | DeviceCopyStarted
    | SnapshotReady
    | StepTimes
    | ScalarReport
    | ShutdownRequest
    | PublisherStatus
    | RunStopped
)


class MessageSocket:
    """One end of the pair. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(PublisherMessage)

    def close(self) -> None:
        self._end.close()

    def send(self, word: PublisherMessage, wait_s: float = 0.0, descriptor: int | None = None) -> bool:
        """False where there is no room within `wait_s`, or the other end has closed."""
        raw, deadline = msgspec.msgpack.encode(word), time.monotonic() + wait_s
        while True:
            try:
                socket.send_fds(self._end, [raw], [] if descriptor is None else [descriptor])
                return True
            except BlockingIOError:
                if not self._await(select.POLLOUT, deadline - time.monotonic()):
                    return False
            except (BrokenPipeError, ConnectionResetError):
                return False

    def receive(self, wait_s: float) -> tuple[PublisherMessage, int | None] | None:
        """The next record, and the descriptor that came with it; None after `wait_s`.

        Raises:
            LinkDown: the other end has closed.
            WireError: no record.
        """
        if not self._await(select.POLLIN, wait_s):
            return None
        try:
            raw, descriptors, _, _ = socket.recv_fds(self._end, MAX_RECORD_BYTES, 1)
        except ConnectionResetError:
            raw, descriptors = b"", []
        if not raw:
            raise LinkDown("the other end has closed")
        try:
            return self._decoder.decode(raw), descriptors[0] if descriptors else None
        except DECODE_ERRORS as error:
            raise WireError(f"not a word between learner and envoy: {error}") from None

    def _await(self, event: int, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self._end, event)
        return bool(waiting.poll(max(0.0, 1e3 * seconds)))


class _TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class SharedTensorSlots:
    """Shared memory for snapshots of weights of one layout: the layout itself, then `SLOT_COUNT` times room for them
    all.

    It goes with the last of the two processes that have it, however they end.

    Attributes:
        views: name to array, for each slot, in the order of the layout.
        memory: what the other end needs besides the `descriptor`.
    """

    def __init__(self, descriptor: int, memory: SharedMemoryInfo) -> None:
        """Of memory that is there. Raises RunError: it is not of this size, or cannot be mapped."""
        self.descriptor, self.memory = descriptor, memory
        try:
            content = mmap.mmap(descriptor, _pad_to_alignment(memory.layout_bytes) + SLOT_COUNT * memory.slot_bytes)
        except (OSError, ValueError) as error:
            raise RunError(f"no memory to hand weights over: {error}") from None
        tensors = msgspec.msgpack.decode(content[: memory.layout_bytes], type=tuple[_TensorSpec, ...])
        first = _pad_to_alignment(memory.layout_bytes)
        self.views = tuple(_views(content, tensors, first + slot * memory.slot_bytes) for slot in range(SLOT_COUNT))
        self._kinds = list(layout_of(self.views[0]).items())

    @classmethod
    def from_layout(cls, layout: TensorLayout) -> Self:
        """New memory for snapshots like this. Raises WireError: a dtype does not travel; OSError: no memory."""
        tensors = tuple(_TensorSpec(name, dtype_name(dtype), shape) for name, (dtype, shape) in layout.items())
        encoded = msgspec.msgpack.encode(tensors)
        size = sum(_pad_to_alignment(math.prod(shape) * dtype.itemsize) for dtype, shape in layout.values())
        memory = SharedMemoryInfo(len(encoded), size)
        descriptor = os.memfd_create("weights")
        os.truncate(descriptor, _pad_to_alignment(len(encoded)) + SLOT_COUNT * memory.slot_bytes)
        os.pwrite(descriptor, encoded, 0)
        return cls(descriptor, memory)

    def close(self) -> None:
        """Gives the descriptor back; the memory goes when nobody looks at it any more."""
        os.close(self.descriptor)

    def has_layout(self, layout: TensorLayout) -> bool:
        """Whether it is the one that this memory is for, in its order."""
        return list(layout.items()) == self._kinds


def _views(content: mmap.mmap, tensors: tuple[_TensorSpec, ...], offset: int) -> dict[str, Array]:
    views: dict[str, Array] = {}
    for tensor in tensors:
        kind, count = dtype_of(tensor.dtype), math.prod(tensor.shape)
        views[tensor.name] = np.frombuffer(content, kind, count, offset).reshape(tensor.shape)
        offset += _pad_to_alignment(count * kind.itemsize)
    return views


def _pad_to_alignment(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
