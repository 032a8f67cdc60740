"""Labels: what people and programs say about an episode after the fact. They are records of the log, as chunks are.

A label never changes what was recorded. Readers lay the labels in effect over the index, in the order of storage: of
two that name the same thing the later one decides. A label may come before the chunks that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from hal.undecodable import UNDECODABLE
from user_sys.episode import MAX_STEPS_PER_CHUNK, Phase
from user_sys.errors import WireError

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
    except UNDECODABLE as error:
        raise WireError(f"not a label: {error}") from None
    return label


def in_effect(labels: Sequence[Label]) -> list[Label]:
    """Those of one episode's labels that no `UndoLabel` takes back, in the same order."""
    undone = {label.undone_at_unix_ns for label in labels if isinstance(label, UndoLabel)}
    return [label for label in labels if not isinstance(label, UndoLabel) and label.at_unix_ns not in undone]
