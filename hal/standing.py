"""What people have ordered about resources: who may not be used, since when, why and on whose word. A file of its own.

Whoever may write the file gives orders, whether or not a registry runs: a registry that runs obeys within a second, one
that starts later obeys from the start. Orders stand until a person lifts them, whatever the resource does meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import Literal

import msgspec

from hal.durable import replace_durably
from hal.errors import RegistryError
from hal.resource import Health
from hal.undecodable import UNDECODABLE

logger = logging.getLogger(__name__)

VERSION = 1
LOCK_WITHIN_S = 5.0
MAX_WORDS_CHARS = 500  # of a reason: it goes to terminals, pages and robots, as one line

What = Literal["quarantined", "draining"]


def who_orders(given: str | None) -> str:
    """Who gives an order: the one who is named, else who is logged in; a container may know no name of its user."""
    with contextlib.suppress(KeyError, OSError):  # which of them, depends on Python's version
        return given or getpass.getuser()
    return f"uid {os.getuid()}"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A resource is quarantined: not used at all; or draining: the session at work may finish, no other gets it."""

    what: What
    by: str
    why: str = ""
    since_unix_s: float = 0.0

    @property
    def health(self) -> Health:
        return Health(self.what)

    @property
    def note(self) -> str:
        """E.g. ``by ana: the gripper sticks``."""
        return f"by {self.by}: {self.why}" if self.why else f"by {self.by}"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says.

    Attributes:
        orders: those that stand, by resource.
        lifted: who put a resource back into use last.
    """

    version: int = VERSION
    orders: dict[str, Order] = {}
    lifted: dict[str, str] = {}


_PAGE = msgspec.json.Decoder(Page)


class OrderBook:
    """Any process and thread may use it at any time; each change is on the disk before a method returns."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self.path = path
        self._clock = clock

    def read(self) -> Page:
        """Raises RegistryError: the file is damaged, or of another version; a person has to look."""
        try:
            page = _PAGE.decode(self.path.read_bytes())
        except FileNotFoundError:
            return Page()
        except (OSError, *UNDECODABLE) as error:
            raise RegistryError(
                f"the orders in {self.path} cannot be read ({error}); look, mend or delete it"
            ) from None
        if page.version != VERSION:
            raise RegistryError(f"the orders in {self.path} have version {page.version}; this program knows {VERSION}")
        return page

    def give(self, name: str, what: What, by: str, why: str = "") -> Order:
        """Quarantines or drains `name`; of two orders about it the newer stands. Raises RegistryError: no person."""
        order = Order(what=what, by=_person(by), why=shorten(why, MAX_WORDS_CHARS), since_unix_s=self._clock())
        with self._locked():
            page = self.read()
            self._write(Page(orders={**page.orders, name: order}, lifted=page.lifted))
        logger.warning("resource.ordered name=%s %s %s", name, what, order.note)
        return order

    def lift(self, name: str, by: str) -> Order:
        """Puts `name` back into use and returns the order that stood. Raises RegistryError: none stands; no person."""
        person = _person(by)
        with self._locked():
            page = self.read()
            orders = dict(page.orders)
            if name not in orders:
                raise RegistryError(f"{name} is neither quarantined nor draining: there is nothing to lift")
            order = orders.pop(name)
            self._write(Page(orders=orders, lifted={**page.lifted, name: person}))
        logger.warning("resource.restored name=%s by %s; it was %s %s", name, person, order.what, order.note)
        return order

    def _write(self, page: Page) -> None:
        replace_durably(self.path, msgspec.json.encode(page))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(handle, time.monotonic() + LOCK_WITHIN_S)
            yield
        finally:
            os.close(handle)


def _lock(handle: int, deadline_s: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise RegistryError("the file of orders is held by another process; try again") from None
            time.sleep(0.01)


def _person(name: str) -> str:
    if not (person := shorten(name, MAX_WORDS_CHARS)):
        raise RegistryError("only a named person can quarantine, drain or restore a resource: give the name")
    return person
