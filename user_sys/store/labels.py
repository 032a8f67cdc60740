"""Labels: what people and programs say about an episode after the fact. They are records of the log, as chunks are.

A label never changes what was recorded. Readers lay it over the index: of two labels that speak of the same thing the
one that was stored later decides. A label may come before the chunks that it speaks of.
"""

from __future__ import annotations

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
    """The episode succeeded or failed; None takes back what was said before, the episode's own end included."""

    success: bool | None


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


Label = SuccessLabel | RewardLabel | PhaseLabel | DeleteLabel | NoteLabel

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
