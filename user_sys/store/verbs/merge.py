"""``user-sys store merge``."""

from __future__ import annotations

import argparse

from user_sys.robot_cards import cards_beside, copy_cards
from user_sys.store.merging import merge
from user_sys.store.upkeep import require_store
from user_sys.store.verbs.words import EXIT_DAMAGED, count_bar, tell, tell_json


def merge_main(args: argparse.Namespace) -> int:
    """Runs ``merge``; status 1 where something damaged was left out. Raises as `merge`."""
    for path in args.paths:
        require_store(path)
    with count_bar("merging chunks", None) as advance:
        report = merge(args.paths, args.into, advance=advance)
    copy_cards((card for path in args.paths for card in cards_beside(path)), args.into)
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
