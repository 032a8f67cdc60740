"""A chunk whose record was verified, as the rows that the learner wants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from crc32c import crc32c

from user_sys.codec import Array, ArrayPlace
from user_sys.episode import APPLIED, FINAL, LENGTH, PackedChunk
from user_sys.errors import WireError
from user_sys.jpeg import jpeg_size
from user_sys.replay.features import ACTION, Features

FRAME = np.dtype([("chunk", "i4"), ("start", "u4"), ("bytes", "i4"), ("crc", "u4")])
"""Where a frame lies: the row of its chunk, its first byte in that chunk's record, how many there are (below 0: raw
pixels; 0: there is no frame) and their CRC32C."""


class ChunkRows:
    """The rows of one chunk: its T steps, then its final observation where it has one."""

    def __init__(self, chunk: PackedChunk, features: Features) -> None:
        """Raises WireError: the chunk lacks a feature or has it in another shape or dtype."""
        self._packet, self._features = chunk.packet, features
        self.steps = chunk.header.steps
        self.count = self.steps + (chunk.header.end is not None)
        self._places = {place.name: place for place in chunk.packet.layout.arrays}
        for name, size in features.vectors.items():
            self._check(name, (self.steps, size))
            if self.count > self.steps:
                self._check(FINAL + name, (size,))
        self._check(APPLIED, (self.steps, features.action_size))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        place = self._places.get(name)
        if place is None or place.dtype != np.float32 or place.shape not in (shape, (1, *shape)):
            raise WireError(f"{name!r} is absent or not float32 of shape {shape}")

    def require_finite(self) -> None:
        """Raises WireError: something is no finite number; one such step would spoil all that was learned."""
        for name in (*self._features.vectors, APPLIED):
            for place in filter(None, map(self._places.get, (name, FINAL + name))):
                if not np.isfinite(self._packet.array(place)).all():
                    raise WireError(f"{place.name!r} holds values that are not finite")

    def vectors(self) -> dict[str, Array]:
        """Observation vectors and the applied action, float32 (count, d); the final observation's action is zero."""
        tables = self._features.vector_tables(self.count)
        for name, table in tables.items():
            table[: self.steps] = self._array(APPLIED if name == ACTION else name)
            if self.count > self.steps:
                table[self.steps] = 0.0 if name == ACTION else self._array(FINAL + name).reshape(-1)
        return tables

    def _array(self, name: str) -> Array:
        return self._packet.array(self._places[name])

    def frames(self, camera: str, chunk: int, before: Callable[[], Array]) -> Array:
        """`FRAME` (count,): the frame that each row shows; a row without a new one shows that of the row before it.

        Frames that are no JPEG file of the camera's size, nor raw pixels of it, count as absent.

        Args:
            chunk: the row of this chunk.
            before: gives `FRAME` (), what the row before this chunk shows; asked where that still stands.

        Raises:
            WireError: the chunk has no such camera.
        """
        if camera not in self._places or camera + LENGTH not in self._places:
            raise WireError(f"{camera!r} is absent")
        own = np.zeros(self.count, FRAME)
        own["chunk"] = chunk
        lengths = self._array(camera + LENGTH).astype(np.int64)
        place = self._places[camera]
        own["bytes"][: self.steps] = lengths
        own["start"][: self.steps] = self._packet.start + place.offset + np.cumsum(lengths) - lengths
        new = own["bytes"] != 0
        self._describe(own[: self.steps], place, camera)
        final = self._places.get(FINAL + camera)
        if self.count > self.steps and final is not None and final.shape[0]:
            size = int(np.prod(final.shape))
            own[-1] = (chunk, self._packet.start + final.offset, size, 0)
            new[-1] = True
            self._describe(own[-1:], final, camera)
        shown = np.maximum.accumulate(np.where(new, np.arange(self.count), -1))
        if shown[0] >= 0:
            return own[shown]
        found: Array = np.where(shown >= 0, own[shown], before())
        return found

    def _describe(self, frames: Array, place: ArrayPlace, camera: str) -> None:
        """Fills in checksums; frames that cannot be shown become absent, raw ones are marked as such."""
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
