"""Keeps the store within its bound while robots write to it: labels what goes, then rewrites segments."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from user_sys.errors import StoreFull, TunnelError
from user_sys.gateway.commit import Committer
from user_sys.store.retention import Retention, choose
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.upkeep import DEAD_SHARE, deletion_labels, disk_bytes, reclaim

logger = logging.getLogger(__name__)

DURABLE_TIMEOUT_S = 60.0  # a full disk delays labels; the next round tries again
STOP_TIMEOUT_S = 60.0
WAIT_S = 0.2


@dataclass
class UpkeepTotals:
    """What was given up since the start, and how the store stands.

    Attributes:
        shortfall_bytes: how much it is above its bound although all of it is to be kept.
    """

    episodes_dropped: int = 0
    store_bytes: int = 0
    shortfall_bytes: int = 0


class StoreKeeper:
    """One thread that looks after the store every `interval_s`. It follows the store only where there is work to do."""

    def __init__(
        self, path: Path, writer: StoreWriter, committer: Committer, retention: Retention, interval_s: float
    ) -> None:
        self.totals = UpkeepTotals()
        self.failure: BaseException | None = None
        self._path, self._writer, self._committer = path, writer, committer
        self._retention, self._interval_s = retention, interval_s
        self._reader: StoreReader | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def close(self) -> None:
        """Ends after the round under way. Raises TunnelError when that takes longer than `STOP_TIMEOUT_S`."""
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TunnelError(f"the upkeep of {self._path} did not end within {STOP_TIMEOUT_S} s")
        if self._reader is not None:
            self._reader.close()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._interval_s):
                self._round()
        except Exception as error:
            logger.exception("upkeep.failed")
            self.failure = error

    def _round(self) -> None:
        self.totals.store_bytes = size = disk_bytes(self._path)
        too_large = 0 < self._retention.max_bytes < size
        if not too_large:
            self.totals.shortfall_bytes = 0
            if not self._writer.deletions:
                return
        if self._reader is None:
            self._reader = StoreReader.open(self._path)
        self._reader.refresh()
        if not too_large or self._give_up(self._reader, size):
            self._compact(self._reader, 0.0 if too_large else DEAD_SHARE)

    def _give_up(self, reader: StoreReader, size: int) -> bool:
        """Deletes what retention does not keep; False while the labels are not durable."""
        choice = choose(reader.index, self._retention, size)
        if choice.shortfall_bytes and not self.totals.shortfall_bytes:
            missing = choice.shortfall_bytes
            logger.warning("upkeep.too_large bytes=%d above=%d: all that is left is to be kept", size, missing)
        self.totals.shortfall_bytes = choice.shortfall_bytes
        if not choice.episodes:
            return True
        if not self._is_durable(self._committer.say(deletion_labels(choice))):
            logger.warning("upkeep.not_durable episodes=%d", len(choice.episodes))
            return False
        self.totals.episodes_dropped += len(choice.episodes)
        logger.info("upkeep.gave_up episodes=%d bytes=%d", len(choice.episodes), choice.freed_bytes)
        reader.refresh()
        return True

    def _is_durable(self, said: Future[None]) -> bool:
        deadline = time.monotonic() + DURABLE_TIMEOUT_S
        while time.monotonic() < deadline and not self._stopping.is_set():
            if wait([said], WAIT_S).done:
                return True
        return False

    def _compact(self, reader: StoreReader, least_share: float) -> None:
        started = time.monotonic()
        try:
            for _ in reclaim(self._writer, reader.index, least_share=least_share):
                if self._stopping.wait(time.monotonic() - started):  # half of the time the disk is left to ingestion
                    break
                started = time.monotonic()
        except StoreFull as error:
            logger.warning("upkeep.no_room_to_compact %s", error)
        reader.refresh()
        self.totals.store_bytes = disk_bytes(self._path)
