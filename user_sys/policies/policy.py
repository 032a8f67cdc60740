"""The interface of a policy: observations and an instruction in, a chunk of actions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from hal.spec import Array
from user_sys.messages import Precision


@dataclass(frozen=True)
class ActionChunk:
    """The actions of the next H control periods; H is 1 for policies that act on each observation.

    Attributes:
        actions: float32 (H, a), in the action spec's units and within its bounds.
        log_prob: float32 (H,), natural log of the density from which each action was drawn, over actions scaled to
            [-1, 1]; NaN if the action is deterministic or the policy has no density.
    """

    actions: Array
    log_prob: Array


class Policy(ABC):
    """A policy: numpy in, numpy out. One thread calls a policy object. `act` blocks only for its own computation, which
    may run in another process.

    Attributes:
        precisions: accepted precisions of weights, the most exact first; `load` gets rounded weights as float32.
    """

    precisions: tuple[Precision, ...] = ("exact",)

    @abstractmethod
    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        """Selects the next actions.

        Args:
            observation: feature name to array, one unbatched observation by the robot's spec; may hold further
                features.
            sentence: the task's instruction; a policy of one task ignores it.
            deterministic: return the most likely action instead of a draw, for example in evaluation.

        Raises:
            SpecError: a feature that the policy reads is missing or has another shape.
            PolicyUnavailable: the policy runs in another process and gives no action now.
        """

    @abstractmethod
    def load(self, weights: Mapping[str, Array]) -> None:
        """Loads all of `weights` or none; later calls of `act` use them.

        Raises:
            WireError: names or shapes do not fit this policy; the previous weights stay.
        """
