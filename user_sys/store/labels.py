"""Labels: what people and programs say about an episode after the fact. They are records of the log, as chunks are.

A label never changes what was recorded. Readers lay the labels in effect over the index, in the order of storage: of
two that name the same thing the later one decides. A label may come before the chunks that it names.

Labels for a store that another process writes: small files in the store's folder, which that process takes in.

A post is durable before `queue_labels` returns, and is removed once its labels are durable in the log. A crash in
between stores them twice, which changes nothing: a label says the same again. Several processes may post; the writer
alone takes.
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
MAX_REWARD = 3.4e38  # the index keeps rewards as float32
Reward = Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Rewards = Annotated[tuple[Reward, ...], msgspec.Meta(max_length=64 * MAX_STEPS_PER_CHUNK)]


class _Label(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all labels: which episode, who says so (a person's name or a program's), when, and why."""

    episode: str
    labeller: str
    at_unix_ns: int
    note: str = ""


class SuccessLabel(_Label, frozen=True, kw_only=True, tag="success"):
    """Whether the episode succeeded; None: unknown, with its last step as recorded.

    Unless `keep_reward`, the reward of the episode's last step becomes 1 for a success and 0 for a failure, and a
    success terminates the episode there. This applies once the episode's end is stored.
    """

    success: bool | None
    keep_reward: bool = False


class RewardLabel(_Label, frozen=True, kw_only=True, tag="reward"):
    """The rewards of the steps from `first_step` on, one each."""

    first_step: Count
    rewards: Rewards


class PhaseLabel(_Label, frozen=True, kw_only=True, tag="phase"):
    """Who was in control of `steps` steps from `first_step` on."""

    first_step: Count
    steps: Count
    phase: Phase


class DeleteLabel(_Label, frozen=True, kw_only=True, tag="delete"):
    """The episode is not to be used. `deleted` False takes that back, as long as no compaction has taken its space."""

    deleted: bool = True


class NoteLabel(_Label, frozen=True, kw_only=True, tag="note"):
    """A remark, nothing else."""


class UndoLabel(_Label, frozen=True, kw_only=True, tag="undo"):
    """Takes back the labels of this episode that were given at `undone_at_unix_ns`. It cannot be taken back itself."""

    undone_at_unix_ns: int


Label = SuccessLabel | RewardLabel | PhaseLabel | DeleteLabel | NoteLabel | UndoLabel

_DECODER = msgspec.msgpack.Decoder(Label)


def encode_label(label: Label) -> bytes:
    """Raises WireError: it says what no label may, such as a reward that is no finite number."""
    raw = msgspec.msgpack.encode(label)
    decode_label(raw)
    return raw


def decode_label(raw: bytes | memoryview) -> Label:
    """The label in `raw`. Raises WireError: it is none."""
    try:
        label: Label = _DECODER.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError(f"not a label: {error}") from None
    return label


def effective_labels(labels: Sequence[Label]) -> list[Label]:
    """Those of one episode's labels that no `UndoLabel` takes back, in the same order."""
    undone = {label.undone_at_unix_ns for label in labels if isinstance(label, UndoLabel)}
    return [label for label in labels if not isinstance(label, UndoLabel) and label.at_unix_ns not in undone]


QUEUE_FOLDER = "inbox"
QUEUE_SUFFIX = ".labels"
MAX_QUEUED_BYTES = 8 << 20
QUEUE_POLL_S = 0.1

_QUEUE_DECODER = msgspec.msgpack.Decoder(tuple[Label, ...])


def queue_labels(store: Path, labels: Sequence[Label]) -> Path:
    """Leaves `labels` for the writer of `store`; returns the file, which is gone once they are stored.

    Raises:
        StoreError: they are more than `MAX_QUEUED_BYTES`.
        WireError: one of them says what no label may.
        OSError: the folder cannot be written.
    """
    for each in labels:
        encode_label(each)
    raw = msgspec.msgpack.encode(tuple(labels))
    if len(raw) > MAX_QUEUED_BYTES:
        raise StoreError(
            f"labels of {len(raw)} bytes at once; at most {MAX_QUEUED_BYTES}: label fewer episodes or steps"
        )
    file = store / QUEUE_FOLDER / f"{time.time_ns():020d}-{secrets.token_hex(4)}{QUEUE_SUFFIX}"
    replace_durably(file, raw)
    return file


def queued_files(store: Path) -> list[Path]:
    """What waits to be taken in, oldest first."""
    return sorted((store / QUEUE_FOLDER).glob(f"[0-9]*{QUEUE_SUFFIX}"))


def read_queued_labels(file: Path) -> tuple[Label, ...]:
    """The labels in a post. Raises StoreError: it holds none."""
    try:
        with file.open("rb") as stream:
            labels: tuple[Label, ...] = _QUEUE_DECODER.decode(stream.read(MAX_QUEUED_BYTES + 1))
    except DECODE_ERRORS as error:
        raise StoreError(f"{file} holds no labels: {error}; delete it") from None
    return labels


def remove_queued(file: Path) -> None:
    """Removes a post, durably: its labels are stored."""
    remove_durably(file)


def wait_until_stored(file: Path, timeout_s: float) -> bool:
    """Blocks until the post at `file` is taken in; False where that takes longer than `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(QUEUE_POLL_S)
    return True
