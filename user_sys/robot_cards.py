"""What a run or a store knows of its robots: one small file each, written when the robot is named or comes in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hal.durable import replace_durably
from hal.errors import SpecError
from hal.spec import RobotSpec
from hal.undecodable import UNDECODABLE

log = logging.getLogger(__name__)

POLL_S = 0.5
CARDS = "robots"  # the folder of a run, or of a store that belongs to none, in which the cards lie
MAX_CARD_BYTES = 1 << 20
_SUFFIX = ".json"


class RobotCard(msgspec.Struct, frozen=True, kw_only=True):
    """A robot of a run. `known_since_unix_ns` stays when its spec changes."""

    robot: str
    spec: RobotSpec
    known_since_unix_ns: int


def keep_card(folder: Path, robot: str, spec: RobotSpec) -> bool:
    """Keeps `robot`'s spec, durably; True where that was news. `robot` is safe as a file name. Raises OSError."""
    path = folder / f"{robot}{_SUFFIX}"
    known = _read(path)
    if known is not None and known.spec == spec:
        return False
    since = known.known_since_unix_ns if known is not None else time.time_ns()
    replace_durably(path, msgspec.json.encode(RobotCard(robot=robot, spec=spec, known_since_unix_ns=since)))
    return True


def read_cards(folder: Path) -> tuple[RobotCard, ...]:
    """The robots of a run, those known longest first. A damaged card is reported and left out."""
    cards = [card for path in folder.glob(f"*{_SUFFIX}") if (card := _read(path)) is not None]
    return tuple(sorted(cards, key=lambda card: (card.known_since_unix_ns, card.robot)))


def copy_cards(cards: Iterable[RobotCard], store: Path) -> None:
    """Leaves in `store` what is not known beside it; of unlike robots of one name the later ones get a suffix."""
    known = {card.spec.embodiment for card in cards_beside(store)}
    names = {card.robot for card in read_cards(store / CARDS)}
    for card in cards:
        if card.spec.embodiment not in known:
            name = card.robot if card.robot not in names else f"{card.robot}-{card.spec.embodiment}"
            keep_card(store / CARDS, name, card.spec)
            known.add(card.spec.embodiment)
            names.add(name)


def cards_beside(store: Path) -> tuple[RobotCard, ...]:
    """The robots of the run folder that `store` lies in, and those whose cards were left in the store itself."""
    return (*read_cards(store.resolve().parent / CARDS), *read_cards(store / CARDS))


def await_first_card(folder: Path, stop: threading.Event) -> RobotCard | None:
    """Blocks until a robot is known, and returns the one known longest; None where `stop` was set first."""
    said = False
    while not (cards := read_cards(folder)):
        if not said:
            log.info("robots.awaited folder=%s", folder)
            said = True
        if stop.wait(POLL_S):
            return None
    return cards[0]


def _read(path: Path) -> RobotCard | None:
    try:
        with path.open("rb") as file:
            card = msgspec.json.decode(file.read(MAX_CARD_BYTES), type=RobotCard)
    except FileNotFoundError:
        return None
    except (*UNDECODABLE, SpecError) as error:
        log.warning("robots.damaged_card file=%s: %s", path, error)
        return None
    if card.robot != path.name.removesuffix(_SUFFIX):  # its name becomes that of a file where the card is copied
        log.warning("robots.misnamed_card file=%s robot=%r", path, card.robot[:80])
        return None
    return card
