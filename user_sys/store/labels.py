"""Labels: statements about an episode made after it was recorded, by people or programs. They are records of the log.

A label never changes recorded data. Readers apply the effective labels to the index, those of rewards before those of
people, each in storage order; the last one wins. A label may precede the chunks of its episode.

While another process writes the store, labels are queued as small files in the store's folder, and that process
adds them. A queued file is durable when `queue_labels` returns, and is deleted when its labels are durable in the
log. A crash in between stores them again. That has no effect if the writer stores no other label before it deletes the
file. Any process may queue; only the writer takes.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from hal.decode_errors import DECODE_ERRORS
from hal.durable import remove_durably, replace_durably
from user_sys.codec import Array
from user_sys.episode import MAX_STEPS_PER_CHUNK, SCALAR_DTYPES, Phase
from user_sys.errors import StoreError, WireError

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
ALL_STEPS = (1 << 31) - 1  # number of steps of a label that has no end: also those that are not stored yet
MAX_REWARD = 3.4e38  # the index stores rewards as float32
Reward = Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Rewards = Annotated[tuple[Reward, ...], msgspec.Meta(max_length=64 * MAX_STEPS_PER_CHUNK)]
ColumnName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,127}\Z")]
ColumnBytes = Annotated[bytes, msgspec.Meta(max_length=4 * 64 * MAX_STEPS_PER_CHUNK)]
FIXED_COLUMNS = SCALAR_DTYPES.keys() - {"log_prob"}
FIXED_PREFIXES = ("observation.", "action")
REWARD_PREFIX = "reward:"  # of the labellers that are rewards
RETENTION_LABELLER = "retention"  # labeller of retention's deletions
QUEUE_FOLDER = "inbox"
QUEUE_SUFFIX = ".labels"
QUEUE_DIGITS = 20  # of a file's number, its time or the one behind the newest
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

    A success terminates the episode. Unless `keep_reward`, the reward of the last step becomes 1 for a success and 0
    for a failure. This applies once the episode's end is stored.
    """

    success: bool | None
    keep_reward: bool = False


class RewardLabel(_Label, frozen=True, kw_only=True, tag="reward"):
    """The rewards of the steps from `first_step` on, one each."""

    first_step: Count
    rewards: Rewards


class PhaseLabel(_Label, frozen=True, kw_only=True, tag="phase"):
    """The phase of `steps` steps from `first_step` on; `ALL_STEPS`: of all."""

    first_step: Count
    steps: Count
    phase: Phase


class TrimLabel(_Label, frozen=True, kw_only=True, tag="trim"):
    """Excludes all but `steps` steps from `first_step` on from sampling; with `ALL_STEPS` only those before.

    The last of them becomes truncated; of a success it takes the end and the reward of the recorded last step.
    The newest trim applies to the recorded episode, so that a wider one brings steps back.
    """

    first_step: Count
    steps: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class ColumnLabel(_Label, frozen=True, kw_only=True, tag="column"):
    """Values of the column `name` for the steps from `first_step` on, such as ``advantage``; see `column_labels`.

    Batches have them in place of a recorded column of that name (`TrainingData.extras`).

    Attributes:
        values: finite float32, little-endian, one each.
    """

    name: ColumnName
    first_step: Count
    values: ColumnBytes

    def __post_init__(self) -> None:
        if self.name in FIXED_COLUMNS or self.name.startswith(FIXED_PREFIXES):
            raise ValueError(f"{self.name!r} is a column of the robot or has labels of its own; choose another name")
        if len(self.values) % 4:
            raise ValueError(f"the column {self.name!r} of {self.episode} has {len(self.values)} bytes; a step has 4")
        finite = np.isfinite(self.array())
        if not finite.all():
            step = self.first_step + int(np.argmin(finite))
            raise ValueError(f"the column {self.name!r} of {self.episode} is not finite at step {step}")

    def array(self) -> Array:
        """The values, float32 (steps,)."""
        return np.frombuffer(self.values, "<f4")


class DeleteLabel(_Label, frozen=True, kw_only=True, tag="delete"):
    """Excludes the episode from use. `deleted` False reverts this until compaction has freed the space."""

    deleted: bool = True


class NoteLabel(_Label, frozen=True, kw_only=True, tag="note"):
    """A remark without effect on the data."""


class UndoLabel(_Label, frozen=True, kw_only=True, tag="undo"):
    """Reverts the labels of this episode that have the time `undone_at_unix_ns`. An undo cannot be undone."""

    undone_at_unix_ns: int


Label = SuccessLabel | RewardLabel | PhaseLabel | TrimLabel | ColumnLabel | DeleteLabel | NoteLabel | UndoLabel

OUTCOMES = {True: "succeeded", False: "failed", None: "success unknown"}


def describe_label(label: Label) -> str:
    """What the label states, such as ``trimmed to steps 2 to 8``; without its labeller, time and note."""
    match label:
        case SuccessLabel():
            return OUTCOMES[label.success] + (", reward kept" if label.keep_reward else "")
        case RewardLabel():
            return f"rewards of {_steps(label.first_step, len(label.rewards))}"
        case PhaseLabel():
            return f"{label.phase.name.lower()} in {_steps(label.first_step, label.steps)}"
        case ColumnLabel():
            return f"{label.name} of {_steps(label.first_step, len(label.array()))}"
        case TrimLabel():
            return f"trimmed to {_steps(label.first_step, label.steps)}"
        case DeleteLabel():
            return "deleted" if label.deleted else "restored"
        case NoteLabel():
            return "note"
        case UndoLabel():
            return "undo"


def _steps(first: int, count: int) -> str:
    return f"steps {first} to {'the end' if count == ALL_STEPS else first + count - 1}"


def column_labels(
    episode: str, columns: Mapping[str, Array], labeller: str, *, first_step: int = 0, note: str = ""
) -> list[ColumnLabel]:
    """The labels of numeric columns of an episode that a program has computed, one value for each step.

    `user_sys.store.maintenance.add_labels` or `queue_labels` makes them durable; they take effect at the next refresh.

    Args:
        columns: such as ``value``, ``progress`` or ``advantage``, to float (steps,).
        first_step: of the values.

    Raises:
        ValueError: a value is not finite as float32, or the name is that of a recorded column with another meaning.
    """
    at_unix_ns = time.time_ns()
    with np.errstate(over="ignore"):
        encoded = {name: np.asarray(values).astype("<f4").tobytes() for name, values in columns.items()}
    return [
        ColumnLabel(
            episode=episode,
            labeller=labeller,
            at_unix_ns=at_unix_ns,
            note=note,
            name=name,
            first_step=first_step,
            values=values,
        )
        for name, values in encoded.items()
    ]


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


def by_precedence(labels: Sequence[Label]) -> list[Label]:
    """The effective labels of one episode in the order in which they apply: those of rewards, then those of people."""
    return sorted(effective_labels(labels), key=lambda label: not label.labeller.startswith(REWARD_PREFIX))


def label_to_undo(labels: Sequence[Label], episode: str) -> Label:
    """The label that an undo reverts: the newest of a person, or the newest of a reward if there is no other.

    It skips columns, which programs add and storage does not keep in order with other labels.

    Args:
        labels: of the episode, stored or queued, in that order.

    Raises:
        StoreError: there is none.
    """
    applied = [
        each
        for each in by_precedence(labels)
        if each.labeller != RETENTION_LABELLER and not isinstance(each, ColumnLabel)
    ]
    if not applied:
        raise StoreError(f"{episode} has no label to undo; `user-sys store inspect --episode` shows its labels")
    return applied[-1]


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
    numbers = (file.name[:QUEUE_DIGITS] for file in queued_files(store))
    newest = max((int(number) for number in numbers if number.isdigit()), default=0)
    number = max(time.time_ns(), newest + 1)  # behind the others, also if the clock was set back
    file = store / QUEUE_FOLDER / f"{number:0{QUEUE_DIGITS}d}-{secrets.token_hex(4)}{QUEUE_SUFFIX}"
    replace_durably(file, raw)
    return file


def queued_files(store: Path) -> list[Path]:
    """Queued files, oldest first."""
    return sorted((store / QUEUE_FOLDER).glob(f"[0-9]*{QUEUE_SUFFIX}"))


def read_queued_labels(file: Path) -> tuple[Label, ...]:
    """The labels in a queued file.

    Raises:
        StoreError: it holds none, or cannot be read.
        FileNotFoundError: it is gone.
    """
    try:
        with file.open("rb") as stream:
            labels: tuple[Label, ...] = _QUEUE_DECODER.decode(stream.read(MAX_QUEUED_BYTES + 1))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(
            f"{file} cannot be read: {error.strerror}; give it to the gateway's user and restart the gateway, "
            "or delete it"
        ) from None
    except DECODE_ERRORS as error:
        raise StoreError(f"{file} holds no labels: {error}; delete it") from None
    return labels


def queued_labels(store: Path, episode: str) -> list[Label]:
    """The labels of `episode` in the queue of `store`, oldest first. Read them before the store's own: a label that the
    writer takes meanwhile is then in one of both."""
    found: list[Label] = []
    for file in queued_files(store):
        with contextlib.suppress(FileNotFoundError, StoreError):  # stored meanwhile; or invalid, which its writer logs
            found += (label for label in read_queued_labels(file) if label.episode == episode)
    return found


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
