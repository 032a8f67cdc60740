"""The interface of a learning algorithm: batches in, policy weights out. The learner knows nothing else of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from hal.spec import Array
from user_sys.weights.snapshot import PolicySnapshot


class TransitionArrays(Protocol):
    """What an algorithm reads of a batch of n transitions; `user_sys.replay.batches.TransitionBatch` is one.

    Attributes:
        observation, next_observation: feature name to float32 (n, d); images uint8 (n, height, width, 3).
        action: float32 (n, a), the applied action in the action spec's units.
        reward: float32 (n,), of all the transition's steps, discounted to the first.
        discount: float32 (n,), what the next observation's value is multiplied by, `terminated` left aside.
        terminated: bool (n,), where the next observation's value is not bootstrapped.
        weight: float32 (n,), by what its loss is multiplied.
    """

    @property
    def observation(self) -> Mapping[str, Array]: ...
    @property
    def next_observation(self) -> Mapping[str, Array]: ...
    @property
    def action(self) -> Array: ...
    @property
    def reward(self) -> Array: ...
    @property
    def discount(self) -> Array: ...
    @property
    def terminated(self) -> Array: ...
    @property
    def weight(self) -> Array: ...


class Algorithm(ABC):
    """One thread calls it. Every method computes to its end before it returns, but for what a snapshot's says, and but
    for an `update` on a GPU: what is read after it waits for it."""

    @abstractmethod
    def update(self, batch: TransitionArrays) -> None:
        """One gradient update of the value functions (and of the policy as often as the algorithm says).

        The batch's arrays are read only during the call, so that the caller may reuse them.
        """

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """Losses and statistics of the newest update, for curves; computed when asked for. Empty before the first."""

    @abstractmethod
    def policy_weights(self) -> dict[str, Array]:
        """Copies, in host memory, of what the policy's `load` takes; not checked for finiteness."""

    def policy_snapshot(self) -> PolicySnapshot:
        """The weights of this moment, to be published; names and order as in `policy_weights`. Does not wait.

        Where they lie in host memory: the arrays themselves, which hold them until the next update only. Else what is
        fetched later, by another thread, and then gives what `policy_weights` would have given now.
        """
        return self.policy_weights()

    @abstractmethod
    def state_dict(self) -> dict[str, Array]:
        """Copies of everything that determines later updates, random generators included."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Takes up where `state` was taken: later updates on the same batches are bit-identical on the same machine.

        Raises:
            WireError: the names or shapes are not this algorithm's; nothing was changed.
        """
