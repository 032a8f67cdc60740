"""Messages between a learner and its publisher process: records over a socket pair, and weights in shared memory.

Both run on one machine from one installation. The end of either process closes the socket.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import time
from typing import TypeAlias

import msgspec
import numpy as np

from hal.decode_errors import DECODE_ERRORS
from user_sys.codec import ALIGN_BYTES, Array
from user_sys.errors import LinkDown, RunError, WireError
from user_sys.messages import Hello, MetricsReport
from user_sys.weights.publisher import PublishConfig, PublisherProgress
from user_sys.weights.state import TensorLayout, dtype_name, dtype_of

MAX_RECORD_BYTES = 128 << 10  # a socket's buffer holds 200 KiB


class PublisherSettings(msgspec.Struct, frozen=True, tag=True):
    """The first record: the settings of the process.

    Attributes:
        tunnel_key: path of the learner's key pair for the tunnel.
        signing_folder: folder of the signing key, which only this process reads.
        run: the id of the run.
        waits_for_robots: training waits for robots with old versions, so that each change is reported at once.
    """

    endpoint: str
    tunnel_key: str
    gateway_key: str
    hello: Hello
    signing_folder: str
    publish: PublishConfig
    run: bytes = b""
    waits_for_robots: bool = False


class SharedMemoryInfo(msgspec.Struct, frozen=True, tag=True):
    """Comes with the descriptor of the shared memory, before the first snapshot. See `SharedTensors`."""

    layout_bytes: int
    tensor_bytes: int


class DeviceCopyStarted(msgspec.Struct, frozen=True, tag=True):
    """The copy of the next snapshot from a device has begun: a push is in progress, and its share may change."""


class SnapshotReady(msgspec.Struct, frozen=True, tag=True):
    """A version to publish lies in the shared memory.

    Attributes:
        frozen: positions of the tensors that are equal in all versions, so that the memory's content stays.
        fetch_s: work of the copy from the device, without rests.
    """

    version: int
    updates: int
    frozen: tuple[int, ...] = ()
    fetch_s: float = 0.0


class StepTimes(msgspec.Struct, frozen=True, tag=True):
    """Training steps for the governor: end on the monotonic clock, and seconds."""

    steps: tuple[tuple[float, float], ...]


class TrainingEnded(msgspec.Struct, frozen=True, tag=True):
    """No step follows, so that the governor has nothing to protect."""


class ScalarReport(msgspec.Struct, frozen=True, tag=True):
    report: MetricsReport


class ShutdownRequest(msgspec.Struct, frozen=True, tag=True):
    """Requests the process to send waiting messages for at most `flush_s`, and to end."""

    flush_s: float


class PublishFailure(msgspec.Struct, frozen=True, tag=True):
    """Why weights could not be published; `kind` is the class of the error."""

    kind: str
    text: str


class PublisherStatus(msgspec.Struct, frozen=True, tag=True):
    """Sent at once if `progress.ready_version` or `failure` changes, otherwise soon: each message interrupts the
    learner.

    Attributes:
        progress: the shared memory is free again once the version in it is ready.
        scalars: of the governor.
        failure: the error that ended publishing.
        share: the governor's share; sent at each change during a copy from a device.
    """

    progress: PublisherProgress = msgspec.field(default_factory=PublisherProgress)
    scalars: dict[str, float] = {}
    failure: PublishFailure | None = None
    share: float = 1.0


class RunStopped(msgspec.Struct, frozen=True, tag=True):
    """The gateway has ended the run."""

    reason: str


PublisherMessage: TypeAlias = (
    PublisherSettings
    | SharedMemoryInfo
    | DeviceCopyStarted
    | SnapshotReady
    | StepTimes
    | TrainingEnded
    | ScalarReport
    | ShutdownRequest
    | PublisherStatus
    | RunStopped
)


class MessageSocket:
    """One end of the socket pair. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(PublisherMessage)

    def close(self) -> None:
        self._end.close()

    def send(self, message: PublisherMessage, wait_s: float = 0.0, descriptor: int | None = None) -> bool:
        """Returns False if there is no room within `wait_s`, or the other end has closed."""
        raw, deadline = msgspec.msgpack.encode(message), time.monotonic() + wait_s
        while True:
            try:
                socket.send_fds(self._end, [raw], [] if descriptor is None else [descriptor])
                return True
            except BlockingIOError:
                if not self._wait_for(select.POLLOUT, deadline - time.monotonic()):
                    return False
            except (BrokenPipeError, ConnectionResetError):
                return False

    def receive(self, wait_s: float) -> tuple[PublisherMessage, int | None] | None:
        """Returns the next record with its descriptor, or None after `wait_s`.

        Raises:
            LinkDown: the other end has closed.
            WireError: the record cannot be decoded.
        """
        if not self._wait_for(select.POLLIN, wait_s):
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
            raise WireError(f"a message between learner and publisher process cannot be decoded: {error}") from None

    def _wait_for(self, event: int, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self._end, event)
        return bool(waiting.poll(max(0.0, 1e3 * seconds)))


class SharedTensors:
    """Shared memory for one snapshot: the encoded layout, then the tensors. The system frees it after both processes.

    Attributes:
        views: name to array in the order of the layout.
        info: the description that the other end needs besides the `descriptor`.
    """

    def __init__(self, descriptor: int, info: SharedMemoryInfo) -> None:
        """Maps existing memory. Raises RunError if it has another size or cannot be mapped."""
        self.descriptor, self.info = descriptor, info
        offset = _pad(info.layout_bytes)
        try:
            content = mmap.mmap(descriptor, offset + info.tensor_bytes)
        except (OSError, ValueError) as error:
            raise RunError(f"the shared memory for weights cannot be mapped: {error}; free some memory") from None
        self.views: dict[str, Array] = {}
        specs = msgspec.msgpack.decode(content[: info.layout_bytes], type=list[tuple[str, str, tuple[int, ...]]])
        for name, dtype, shape in specs:
            kind, count = dtype_of(dtype), math.prod(shape)
            self.views[name] = np.frombuffer(content, kind, count, offset).reshape(shape)
            offset += _pad(count * kind.itemsize)

    @classmethod
    def from_layout(cls, layout: TensorLayout) -> SharedTensors:
        """Allocates memory for snapshots of `layout`. Raises WireError for an unsupported dtype, OSError without
        memory.
        """
        encoded = msgspec.msgpack.encode([(name, dtype_name(dtype), shape) for name, (dtype, shape) in layout.items()])
        size = sum(_pad(math.prod(shape) * dtype.itemsize) for dtype, shape in layout.values())
        info = SharedMemoryInfo(len(encoded), max(1, size))
        descriptor = os.memfd_create("weights")
        os.truncate(descriptor, _pad(len(encoded)) + info.tensor_bytes)
        os.pwrite(descriptor, encoded, 0)
        return cls(descriptor, info)

    def close(self) -> None:
        """Closes the descriptor; the mapped memory stays while arrays use it."""
        os.close(self.descriptor)


def _pad(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
