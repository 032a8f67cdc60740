"""``user-sys store label``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from hal.audit import audit_order
from hal.standing import who_orders
from user_sys.episode import Phase
from user_sys.errors import StoreError, StoreLocked
from user_sys.store.inbox import await_taken, post
from user_sys.store.index import Index
from user_sys.store.labels import (
    DeleteLabel,
    Label,
    NoteLabel,
    PhaseLabel,
    RewardLabel,
    SuccessLabel,
    UndoLabel,
    in_effect,
)
from user_sys.store.store import StoreReader
from user_sys.store.upkeep import RETENTION, label
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
        _check(args)
        labels = [said for name in args.episodes for said in _labels(args, name, reader.index)]
        open_ended = [] if args.success is None or args.keep_reward else _open_ended(reader.index, args.episodes)
    if not labels:
        raise StoreError("nothing to say: give --success, --reward, --phase, --delete, --restore, --note or --undo")
    by_gateway = _store(args.path, labels)
    count = len(args.episodes)
    episodes = f"{count} episodes" if count > 1 else args.episodes[0]
    tell(f"{episodes}: {len(labels)} labels stored" + (" by the process that writes the store" if by_gateway else ""))
    run, said = args.path.resolve().parent, ", ".join(f"{key} {value}" for key, value in _said(args))
    for name in args.episodes:
        order = f"label {name}: {said}"
        audit_order(who_orders(args.by), order, run=run if (run / "config.yaml").exists() else None)
    for name in open_ended:
        tell(f"{name}: its end is not stored; the last reward changes once it is")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises StoreError: orders that contradict one another."""
    if args.keep_reward and args.success is None:
        raise StoreError("--keep-reward goes with --success")
    if args.undo and (
        args.success or args.reward is not None or args.phase or args.delete or args.restore or args.steps
    ):
        raise StoreError("--undo takes back the newest labels; give new ones in a command of their own")


def _labels(args: argparse.Namespace, episode: str, index: Index) -> list[Label]:
    steps, labels = _steps(index, episode, args), list[Label]()
    said = {"episode": episode, "labeller": who_orders(args.by), "at_unix_ns": time.time_ns(), "note": args.note}
    if args.undo:
        return [UndoLabel(undone_at_unix_ns=_newest(index, episode), **said)]
    if args.success is not None:
        labels.append(SuccessLabel(success=_KNOWN[args.success], keep_reward=args.keep_reward, **said))
    if args.reward is not None:
        labels.append(RewardLabel(first_step=steps.start, rewards=(args.reward,) * len(steps), **said))
    if args.phase is not None:
        labels.append(PhaseLabel(first_step=steps.start, steps=len(steps), phase=Phase[args.phase.upper()], **said))
    if args.delete or args.restore:
        labels.append(DeleteLabel(deleted=args.delete, **said))
    return labels or ([NoteLabel(**said)] if args.note else [])


def _said(args: argparse.Namespace) -> list[tuple[str, object]]:
    """What was asked for, as option and value."""
    names = ("success", "keep_reward", "reward", "phase", "steps", "delete", "restore", "undo", "note")
    given = {name: getattr(args, name) for name in names}
    return [(name, value) for name, value in given.items() if value not in (None, False, "")]


def _newest(index: Index, episode: str) -> int:
    """When the labels that --undo takes back were given. Raises StoreError: there are none."""
    valid = [label for label in in_effect(index.labels(episode)) if label.labeller != RETENTION]
    if not valid:
        raise StoreError(f"{episode} has no label to take back; `user-sys store inspect --episode` shows its labels")
    return valid[-1].at_unix_ns


def _open_ended(index: Index, episodes: Sequence[str]) -> list[str]:
    return [name for name in episodes if index.episodes.end_index[index.episodes.find(name)] < 0]


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
