"""``user-sys store merge``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from user_sys.robot_cards import CARDS, cards_beside, keep_card, read_cards
from user_sys.store.merging import merge
from user_sys.store.upkeep import require_store
from user_sys.store.verbs.words import EXIT_DAMAGED, count_bar, tell, tell_json


def merge_main(args: argparse.Namespace) -> int:
    """Runs ``merge``; status 1 where something damaged was left out. Raises as `merge`."""
    for path in args.paths:
        require_store(path)
    with count_bar("merging chunks", None) as advance:
        report = merge(args.paths, args.into, advance=advance)
    _copy_cards(args.paths, args.into)
    if args.json:
        tell_json(report)
    else:
        known = f", {report.duplicates} were there already" if report.duplicates else ""
        tell(f"{args.into}: {report.chunks} chunks and {report.labels} labels added{known}")
        for name in report.renamed:
            tell(f"{name}: renamed, since another episode has the name")
        if report.damaged:
            tell(f"{report.damaged} chunks are damaged and were left out; `user-sys store verify` names them")
    return EXIT_DAMAGED if report.damaged else 0


def _copy_cards(paths: Sequence[Path], into: Path) -> None:
    """Brings what is known of the robots along; of unlike robots of one name the later ones' cards get a suffix."""
    known = {card.spec.embodiment for card in cards_beside(into)}
    names = {card.robot for card in read_cards(into / CARDS)}
    for card in (card for path in paths for card in cards_beside(path)):
        if card.spec.embodiment not in known:
            name = card.robot if card.robot not in names else f"{card.robot}-{card.spec.embodiment}"
            keep_card(into / CARDS, name, card.spec)
            known.add(card.spec.embodiment)
            names.add(name)
