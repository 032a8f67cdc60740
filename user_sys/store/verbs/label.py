"""``user-sys store label``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hal.standing import who_orders
from user_sys.episode import Phase
from user_sys.errors import StoreError, StoreLocked
from user_sys.store.inbox import await_taken, post
from user_sys.store.index import Index
from user_sys.store.labels import DeleteLabel, Label, NoteLabel, PhaseLabel, RewardLabel, SuccessLabel
from user_sys.store.store import StoreReader
from user_sys.store.upkeep import label
from user_sys.store.verbs.words import tell

TAKEN_S = 30.0  # a gateway looks every few seconds
_KNOWN = {"yes": True, "no": False, "unknown": None}


def label_main(args: argparse.Namespace) -> int:
    """Runs ``label``.

    Raises:
        StoreError: no such store, episode or steps, or nothing to say.
    """
    with StoreReader.open(args.path) as reader:
        reader.refresh()
        labels = [said for name in args.episodes for said in _labels(args, name, _steps(reader.index, name, args))]
    if not labels:
        raise StoreError("nothing to say: give --success, --reward, --phase, --delete, --restore or --note")
    by_gateway = _store(args.path, labels)
    count = len(args.episodes)
    episodes = f"{count} episodes" if count > 1 else args.episodes[0]
    tell(f"{episodes}: {len(labels)} labels stored" + (" by the process that writes the store" if by_gateway else ""))
    return 0


def _labels(args: argparse.Namespace, episode: str, steps: range) -> Iterator[Label]:
    labeller, now, note = who_orders(args.by), time.time_ns(), args.note
    said = {"episode": episode, "labeller": labeller, "at_unix_ns": now, "note": note}
    if args.success is not None:
        yield SuccessLabel(success=_KNOWN[args.success], **said)
    if args.reward is not None:
        yield RewardLabel(first_step=steps.start, rewards=(args.reward,) * len(steps), **said)
    if args.phase is not None:
        yield PhaseLabel(first_step=steps.start, steps=len(steps), phase=Phase[args.phase.upper()], **said)
    if args.delete or args.restore:
        yield DeleteLabel(deleted=args.delete, **said)
    if (
        note
        and args.success is None
        and args.reward is None
        and args.phase is None
        and not (args.delete or args.restore)
    ):
        yield NoteLabel(**said)


def _steps(index: Index, episode: str, args: argparse.Namespace) -> range:
    """The steps that are meant. Raises StoreError: the store has no such episode, or it no such steps."""
    row = index.episodes.find(episode)
    if row < 0:
        raise StoreError(f"{args.path} has no episode {episode!r}; `user-sys store inspect {args.path}` lists them")
    mine = index.chunks.episode == row
    total = int((index.chunks.first_step[mine] + index.chunks.steps[mine]).max())
    if args.steps is None:
        return range(total)
    if args.reward is None and args.phase is None:
        raise StoreError("--steps goes with --reward or --phase; success, deletion and notes are an episode's")
    if args.steps.stop > total:
        raise StoreError(f"{episode} has steps 0 to {total - 1}; {args.steps.start}-{args.steps.stop - 1} goes beyond")
    steps: range = args.steps
    return steps


def _store(path: Path, labels: Sequence[Label]) -> bool:
    """Stores `labels` durably; True where the process that writes the store did so.

    Raises:
        StoreError: that process does not take them; they stay posted.
    """
    try:
        label(path, labels)
    except StoreLocked as locked:
        if await_taken(post(path, labels), TAKEN_S):
            return True
        raise StoreError(
            f"{locked}. It takes no labels, so it is no gateway, or a stopped one; "
            f"they wait in {path / 'inbox'} for the next gateway"
        ) from None
    return False
