"""Takes labels that people post while the gateway writes the store (`user_sys.store.inbox`) into it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from user_sys.errors import StoreError
from user_sys.store.inbox import posts, read_post, withdraw
from user_sys.store.labels import Label

logger = logging.getLogger(__name__)

Say = Callable[[Sequence[Label]], Future[None]]


class Postman:
    """One thread calls `round`, which never waits for the disk's syncs of the log."""

    def __init__(self, store: Path, say: Say) -> None:
        self._store, self._say = store, say
        self._said: dict[Path, Future[None]] = {}
        self._refused: set[Path] = set()

    def round(self) -> None:
        """Hands on what is new, and removes what is durable by now. Raises OSError."""
        for file in posts(self._store):
            if file not in self._said and file not in self._refused:
                self._take(file)
        for file in [file for file, said in self._said.items() if said.done()]:
            self._said.pop(file).result()
            withdraw(file)

    def _take(self, file: Path) -> None:
        try:
            labels = read_post(file)
        except StoreError as error:
            self._refused.add(file)
            logger.warning("gateway.post_refused %s", error)
            return
        self._said[file] = self._say(labels)
        logger.info("gateway.labels_taken labels=%d by=%s", len(labels), labels[0].labeller if labels else "nobody")
