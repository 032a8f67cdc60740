"""``user-sys store label`` and ``relabel``: labels of recorded episodes by people and by rewards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hal.registry import operator_name
from hal.state_database import audit_operator_action
from user_sys.commands.options import (
    SUCCESS,
    ConfiguredVerb,
    Number,
    by_option,
    episode_filter_options,
    parse_steps,
    store_argument,
)
from user_sys.commands.output import print_line, progress_bar
from user_sys.commands.store_inspect import make_filter
from user_sys.config import build
from user_sys.episode import Phase
from user_sys.errors import StoreError, StoreLocked
from user_sys.plugins import load_reward
from user_sys.rewards.labelling import EpisodeLabeller
from user_sys.rewards.reward import RewardConfig
from user_sys.store.index import Index
from user_sys.store.labels import (
    ALL_STEPS,
    MAX_REWARD,
    QUEUE_FOLDER,
    DeleteLabel,
    Label,
    NoteLabel,
    PhaseLabel,
    RewardLabel,
    SuccessLabel,
    UndoLabel,
    label_to_undo,
    queue_labels,
    queued_labels,
    wait_until_stored,
)
from user_sys.store.maintenance import add_labels
from user_sys.store.store import StoreReader

STORE_TIMEOUT_S = 30.0  # a gateway polls every few seconds
LABELS_AT_ONCE = 200
_WORDS = {True: "success", False: "failure", None: "unknown"}


@click.command()
@store_argument
@click.argument("episodes", nargs=-1, required=True, metavar="EPISODE...")
@click.option(
    "--success",
    type=click.Choice(tuple(SUCCESS)),
    help="success of the episodes; the last reward becomes 1 or 0, or the recorded one for unknown",
)
@click.option("--keep-reward", is_flag=True, help="with --success: keep the last reward")
@click.option("--reward", type=Number(-MAX_REWARD, MAX_REWARD), metavar="R", help="of each step of --steps")
@click.option("--phase", type=click.Choice([each.name.lower() for each in Phase]), help="phase of --steps")
@click.option("--steps", type=parse_steps, metavar="FIRST-LAST", help="steps from 0, such as 10-19 (default: all)")
@click.option("--delete", is_flag=True, help="exclude the episodes; `compact` frees their space")
@click.option("--restore", is_flag=True, help="revert a deletion before `compact`")
@click.option("--undo", is_flag=True, help="revert each episode's newest label of a person, or else of a reward")
@click.option("--note", default="", metavar="TEXT", help="a remark")
@by_option
def label(path: Path, episodes: Sequence[str], by: str | None, **given: Any) -> None:
    """Add labels to EPISODEs of the store PATH; `store inspect` lists their ids.

    Recorded data stays unchanged; of two labels on the same steps the later one counts. If a gateway writes the store,
    the gateway stores them.
    """
    changes = {name: value for name, value in given.items() if value not in (None, False, "")}
    _check_options(set(changes))
    person = operator_name(by)
    queued = [each for name in episodes for each in queued_labels(path, name)] if "undo" in changes else []
    with StoreReader.open(path) as reader:
        reader.refresh()
        labels = [each for name in episodes for each in _labels(name, reader.index, path, person, changes, queued)]
        ends = reader.index.episodes
        is_open = [name for name in episodes if "success" in changes and ends.end_index[ends.find(name)] < 0]
    by_gateway = store_labels(path, labels)
    subject = f"{len(episodes)} episodes" if len(episodes) > 1 else episodes[0]
    print_line(
        f"{subject}: {len(labels)} labels stored" + (" by the process that writes the store" if by_gateway else "")
    )
    run, text = path.resolve().parent, ", ".join(f"{name} {value}" for name, value in changes.items())
    for name in episodes:
        audit_operator_action(person, f"label {name}: {text}", run=run if (run / "config.yaml").exists() else None)
    for name in is_open if "keep_reward" not in changes else ():
        print_line(f"{name}: its end is not stored yet; the last reward changes when it arrives")


def _check_options(given: set[str]) -> None:
    """Raises StoreError: options conflict, or one is missing."""
    if not given - {"steps", "keep_reward"}:
        raise StoreError("no label given: use --success, --reward, --phase, --delete, --restore, --note or --undo")
    if "keep_reward" in given and "success" not in given:
        raise StoreError("--keep-reward requires --success")
    if "undo" in given and given - {"undo", "note"}:
        raise StoreError("--undo cannot be combined with other labels; use two commands")
    if {"delete", "restore"} <= given:
        raise StoreError("--delete and --restore exclude each other")
    if "steps" in given and not given & {"reward", "phase"}:
        raise StoreError("--steps requires --reward or --phase; other labels cover the episode")


def _labels(
    episode: str, index: Index, path: Path, person: str, changes: dict[str, Any], queued: Sequence[Label]
) -> list[Label]:
    """The labels for `changes`. Raises StoreError: the store has no such episode or steps, or nothing to undo."""
    steps, labels = _steps(episode, index, path, changes.get("steps")), list[Label]()
    note = changes.get("note", "")
    common = {"episode": episode, "labeller": person, "at_unix_ns": time.time_ns(), "note": note}
    if "undo" in changes:
        found = [*index.labels(episode), *(each for each in queued if each.episode == episode)]
        return [UndoLabel(undone_at_unix_ns=label_to_undo(found, episode).at_unix_ns, **common)]
    if "success" in changes:
        success, keep = SUCCESS[changes["success"]], "keep_reward" in changes
        labels.append(SuccessLabel(success=success, keep_reward=keep, **common))
    if "reward" in changes:
        labels.append(RewardLabel(first_step=steps.start, rewards=(changes["reward"],) * len(steps), **common))
    if "phase" in changes:
        phase, count = Phase[changes["phase"].upper()], len(steps) if "steps" in changes else ALL_STEPS
        labels.append(PhaseLabel(first_step=steps.start, steps=count, phase=phase, **common))
    if changes.keys() & {"delete", "restore"}:
        labels.append(DeleteLabel(deleted="delete" in changes, **common))
    return labels or [NoteLabel(**common)]


def _steps(episode: str, index: Index, path: Path, chosen: range | None) -> range:
    row = index.episodes.find(episode)
    if row < 0:
        raise StoreError(f"{path} has no episode {episode!r}; `user-sys store inspect {path}` lists them")
    own = index.chunks.episode == row
    total = int((index.chunks.first_step[own] + index.chunks.steps[own]).max())
    steps = range(total) if chosen is None else chosen
    if steps.stop > total:
        raise StoreError(f"{episode} has steps 0 to {total - 1}; {steps.start}-{steps.stop - 1} exceeds that")
    return steps


def store_labels(path: Path, labels: Sequence[Label]) -> bool:
    """Stores `labels` durably; True if the process that writes the store did so.

    Raises:
        StoreError: that process does not take them in time; they stay queued.
    """
    try:
        add_labels(path, labels)
    except StoreLocked as locked:
        if wait_until_stored(queue_labels(path, labels), STORE_TIMEOUT_S):
            return True
        raise StoreError(
            f"{locked}. It does not store labels, so it may not be a running gateway; "
            f"they stay queued in {path / QUEUE_FOLDER} for the next gateway"
        ) from None
    return False


@click.command(cls=ConfiguredVerb)
@store_argument
@click.option(
    "--reward", "kind", required=True, metavar="NAME", help="classifier, progress, rule, vlm, or that of a package"
)
@click.option("--again", is_flag=True, help="also episodes that this reward has labelled before")
@click.option("--dry-run", is_flag=True, help="store nothing; print what would change")
@episode_filter_options
def relabel(path: Path, kind: str, again: bool, dry_run: bool, overrides: list[str], **chosen: Any) -> None:
    """Label episodes of the store PATH by a reward. Recorded data stays unchanged; a running learner follows.

    The success that a person has judged stays as it is. Settings of the reward are --options.key=value.
    `store label EPISODE --undo` reverts the labels of an episode that has none of a person.
    """
    reward = load_reward(build(RewardConfig, {"kind": kind}, "rewards", overrides))
    selection = make_filter(incomplete=False, **chosen)
    labels, changed, episodes = list[Label](), 0, 0
    with StoreReader.open(path) as store:
        labeller = EpisodeLabeller(store, reward, kind, selection, again=again)
        with progress_bar("evaluating", None) as advance:
            try:
                for episode, found, new in labeller.new_labels():
                    episodes += 1
                    if found.success is not None and found.success is not episode.success:
                        changed += 1
                        print_line(f"{episode.episode}: {_WORDS[episode.success]} becomes {_WORDS[found.success]}")
                    labels += [] if dry_run else new
                    if len(labels) >= LABELS_AT_ONCE:
                        full, labels = labels, []
                        store_labels(path, full)
                    advance(1)
            finally:  # also if the reward's server fails
                if labels:
                    store_labels(path, labels)
    verb = "would be labelled" if dry_run else "labelled"
    unusable = f", {labeller.unusable} could not be evaluated" if labeller.unusable else ""
    print_line(f"{episodes} episodes {verb} by {labeller.labeller}, {changed} with another success{unusable}")
