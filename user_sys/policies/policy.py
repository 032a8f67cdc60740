"""The interface of a policy: observations and a sentence in, a chunk of actions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from hal.spec import Array
from user_sys.messages import Precision


@dataclass(frozen=True)
class ActionChunk:
    """The actions of the next H control periods; H is 1 for policies that decide anew at each step.

    Attributes:
        actions: float32 (H, a), in the action spec's units and within its bounds.
        log_prob: float32 (H,), natural log of the density from which each action was drawn, over actions scaled to
            [-1, 1]; NaN where the action was not drawn (deterministic) or the policy has no density.
    """

    actions: Array
    log_prob: Array


class Policy(ABC):
    """Numpy in, numpy out. One thread calls one policy object; `act` waits for nothing but its own arithmetic, be that
    in another process.

    Attributes:
        precisions: of weights that it acts well with, the most exact first; rounded ones come to `load` as float32.
    """

    precisions: tuple[Precision, ...] = ("exact",)

    @abstractmethod
    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        """Decides what to do next.

        Args:
            observation: feature name to array, one unbatched observation as the robot's spec says; more is ignored.
            sentence: the task's instruction; a policy of one task ignores it.
            deterministic: the most likely action instead of a draw, e.g. in evaluation.

        Raises:
            SpecError: a feature that the policy reads is missing or has another shape.
            PolicyAway: it acts in another process, and there is no action now.
        """

    @abstractmethod
    def load(self, weights: Mapping[str, Array]) -> None:
        """Takes `weights` in, all or nothing; later `act`s use them.

        Raises:
            WireError: the names or shapes are not this policy's; the former weights stay.
        """
