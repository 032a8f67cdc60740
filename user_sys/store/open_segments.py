"""The segment files that a reader has open: the ones used last, mapped and by descriptor."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

from user_sys.errors import StoreCorrupt
from user_sys.store.files import Files
from user_sys.store.segments import SegmentName

MAX_OPEN_SEGMENTS = 64  # each holds two file descriptors, one of them for its mapping


class OpenedSegment:
    """A segment's file: its bytes as a mapping, and a descriptor that is closed with the last reference to this."""

    def __init__(self, files: Files, fd: int, view: memoryview) -> None:
        self.fd, self.view = fd, view
        weakref.finalize(self, files.close, fd)


class OpenSegments:
    """At most `MAX_OPEN_SEGMENTS` of a log's files. Any thread may call it."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files
        self._lock = threading.Lock()
        self._opened: OrderedDict[SegmentName, OpenedSegment] = OrderedDict()

    def get(self, name: SegmentName, end: int) -> OpenedSegment:
        """The segment's file, of which at least the bytes up to `end` are mapped.

        Raises:
            StoreCorrupt: it is shorter than that.
            OSError: it cannot be opened.
        """
        with self._lock:
            opened = self._opened.get(name)
            if opened is None or len(opened.view) < end:
                opened = self._opened[name] = self._map(name, end)
            self._opened.move_to_end(name)
            if len(self._opened) > MAX_OPEN_SEGMENTS:
                self._opened.popitem(last=False)  # unmapped once the last view of it is gone
            return opened

    def _map(self, name: SegmentName, end: int) -> OpenedSegment:
        fd = self._files.open(self._path / str(name), os.O_RDONLY)
        try:
            size = self._files.size(fd)
            if size < end:
                raise StoreCorrupt(f"{self._path / str(name)} is cut off at byte {size}")
            return OpenedSegment(self._files, fd, self._files.map(fd, size))
        except BaseException:
            self._files.close(fd)
            raise

    def clear(self) -> None:
        """Lets go of all of them; what was handed out stays valid."""
        with self._lock:
            self._opened.clear()
