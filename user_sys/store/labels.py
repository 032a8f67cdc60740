"""Labels: statements about an episode made after it was recorded, by people or programs. They are records of the log.

A label never changes recorded data. Readers apply the effective labels to the index in storage order, so the last
one wins. A label may precede the chunks of its episode.

While another process writes the store, labels are queued as small files in the store's folder, and that process
adds them. A queued file is durable when `queue_labels` returns, and is deleted when its labels are durable in the
log. A crash in between stores them twice, which has no effect. Any process may queue; only the writer takes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import remove_durably, replace_durably
from user_sys.episode import MAX_STEPS_PER_CHUNK, Phase
from user_sys.errors import StoreError, WireError

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
MAX_REWARD = 3.4e38  # the index stores rewards as float32
Reward = Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Rewards = Annotated[tuple[Reward, ...], msgspec.Meta(max_length=64 * MAX_STEPS_PER_CHUNK)]
QUEUE_FOLDER = "inbox"
QUEUE_SUFFIX = ".labels"
MAX_QUEUED_BYTES = 8 << 20
QUEUE_POLL_S = 0.1


class _Label(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields: episode, labeller (a person's name or a program's), time, and note."""

    episode: str
    labeller: str
    at_unix_ns: int
    note: str = ""


class SuccessLabel(_Label, frozen=True, kw_only=True, tag="success"):
    """Whether the episode succeeded; None resets it to unknown, with its last step as recorded.

    Unless `keep_reward`, the reward of the last step becomes 1 for a success and 0 for a failure, and a success
    terminates the episode. This applies once the episode's end is stored.
    """

    success: bool | None
    keep_reward: bool = False


class RewardLabel(_Label, frozen=True, kw_only=True, tag="reward"):
    """The rewards of the steps from `first_step` on, one each."""

    first_step: Count
    rewards: Rewards


class PhaseLabel(_Label, frozen=True, kw_only=True, tag="phase"):
    """The phase of `steps` steps from `first_step` on."""

    first_step: Count
    steps: Count
    phase: Phase


class DeleteLabel(_Label, frozen=True, kw_only=True, tag="delete"):
    """Excludes the episode from use. `deleted` False reverts this until compaction has freed the space."""

    deleted: bool = True


class NoteLabel(_Label, frozen=True, kw_only=True, tag="note"):
    """A remark without effect on the data."""


class UndoLabel(_Label, frozen=True, kw_only=True, tag="undo"):
    """Reverts the labels of this episode that have the time `undone_at_unix_ns`. An undo cannot be undone."""

    undone_at_unix_ns: int


Label = SuccessLabel | RewardLabel | PhaseLabel | DeleteLabel | NoteLabel | UndoLabel

_DECODER = msgspec.msgpack.Decoder(Label)


def encode_label(label: Label) -> bytes:
    """Raises WireError: a field is out of range, such as a reward that is not finite."""
    raw = msgspec.msgpack.encode(label)
    decode_label(raw)
    return raw


def decode_label(raw: bytes | memoryview) -> Label:
    """The label in `raw`. Raises WireError if it is invalid."""
    try:
        label: Label = _DECODER.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError(f"not a label: {error}") from None
    return label


def effective_labels(labels: Sequence[Label]) -> list[Label]:
    """The labels of one episode that no `UndoLabel` reverts, in the same order."""
    undone = {label.undone_at_unix_ns for label in labels if isinstance(label, UndoLabel)}
    return [label for label in labels if not isinstance(label, UndoLabel) and label.at_unix_ns not in undone]


_QUEUE_DECODER = msgspec.msgpack.Decoder(tuple[Label, ...])


def queue_labels(store: Path, labels: Sequence[Label]) -> Path:
    """Queues `labels` for the writer of `store`; returns the file, which disappears once they are stored.

    Raises:
        StoreError: they exceed `MAX_QUEUED_BYTES`.
        WireError: a label is invalid.
        OSError: the folder cannot be written.
    """
    for each in labels:
        encode_label(each)
    raw = msgspec.msgpack.encode(tuple(labels))
    if len(raw) > MAX_QUEUED_BYTES:
        raise StoreError(
            f"labels of {len(raw)} bytes at once; at most {MAX_QUEUED_BYTES}: label fewer episodes or steps at once"
        )
    file = store / QUEUE_FOLDER / f"{time.time_ns():020d}-{secrets.token_hex(4)}{QUEUE_SUFFIX}"
    replace_durably(file, raw)
    return file


def queued_files(store: Path) -> list[Path]:
    """Queued files, oldest first."""
    return sorted((store / QUEUE_FOLDER).glob(f"[0-9]*{QUEUE_SUFFIX}"))


def read_queued_labels(file: Path) -> tuple[Label, ...]:
    """The labels in a queued file. Raises StoreError if it holds none."""
    try:
        with file.open("rb") as stream:
            labels: tuple[Label, ...] = _QUEUE_DECODER.decode(stream.read(MAX_QUEUED_BYTES + 1))
    except DECODE_ERRORS as error:
        raise StoreError(f"{file} holds no labels: {error}; delete it") from None
    return labels


def remove_queued(file: Path) -> None:
    """Deletes a queued file durably, after its labels were stored."""
    remove_durably(file)


def wait_until_stored(file: Path, timeout_s: float) -> bool:
    """Blocks until the queued file disappears; False after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(QUEUE_POLL_S)
    return True
