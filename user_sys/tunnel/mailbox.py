"""A bounded queue between threads in which state is coalesced and events are not."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """First in, first out, except that an item with a key replaces a waiting one with the same key: newest wins.

    Never holds more than `capacity` items; an item that finds it full is refused and counted, never lost silently.
    Any thread may call it; only `wait` blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.refused = 0
        self._items: OrderedDict[Hashable, Item] = OrderedDict()
        self._serial = 0
        self._changed = threading.Condition(threading.Lock())
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, key: Hashable = None) -> bool:
        """Adds `item` at the end; False when the mailbox is full."""
        with self._changed:
            if key is not None:
                self._items.pop(key, None)
            if len(self._items) >= self.capacity:
                self.refused += 1
                return False
            self._serial += 1
            self._items[self._serial if key is None else key] = item
            if self._waiting:
                self._changed.notify()
            return True

    def take(self) -> Item | None:
        """Removes and returns the oldest item, or None."""
        if not self._items:
            return None
        with self._changed:
            return self._items.popitem(last=False)[1] if self._items else None

    def peek(self) -> Item | None:
        """The oldest item, left where it is. Only for a thread that alone takes."""
        if not self._items:
            return None
        with self._changed:
            return next(iter(self._items.values())) if self._items else None

    def discard(self, item: Item) -> None:
        """Removes `item` if it is still there: what a thread calls when the item that it peeked at is away."""
        with self._changed:
            for key, present in self._items.items():
                if present is item:
                    del self._items[key]
                    return

    def drop(self, unwanted: Callable[[Item], bool]) -> int:
        """Removes the items that are unwanted and says how many they were."""
        with self._changed:
            keys = [key for key, item in self._items.items() if unwanted(item)]
            for key in keys:
                del self._items[key]
            return len(keys)

    def wait(self, timeout_s: float) -> Item | None:
        """Removes and returns the oldest item, waiting for one at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiting += 1
            while not self._items:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            self._waiting -= 1
            return self._items.popitem(last=False)[1] if self._items else None
