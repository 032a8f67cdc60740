"""The interface of a learning algorithm: batches in, policy weights out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from hal.spec import Array
from user_sys.weights.snapshot import PolicySnapshot


class TransitionArrays(Protocol):
    """The arrays of a batch of n transitions, such as a `user_sys.replay.batches.TransitionBatch`.

    Attributes:
        observation, next_observation: feature name to float32 (n, d); images uint8 (n, height, width, 3).
        action: float32 (n, a), the applied action in the action spec's units.
        reward: float32 (n,), summed over the steps of the transition, discounted to the first.
        discount: float32 (n,), factor of the next observation's value, without regard to `terminated`.
        terminated: bool (n,), true if the next observation's value is not bootstrapped.
        weight: float32 (n,), factor of the loss.
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
    """A learning algorithm. One thread calls it.

    Every method completes before it returns, except a snapshot on a device, and an `update` on a GPU: later reads wait.
    """

    @abstractmethod
    def update(self, batch: TransitionArrays) -> None:
        """Makes one gradient update of the value functions, and of the policy if it is due.

        The batch's arrays are read only during the call, so that the caller may reuse them.
        """

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """Computes losses and statistics of the newest update. Empty before the first."""

    @abstractmethod
    def policy_weights(self) -> dict[str, Array]:
        """Returns copies in host memory of the arrays that the policy's `load` takes; they may be non-finite."""

    def policy_snapshot(self) -> PolicySnapshot:
        """Returns the current weights for publishing, in the order of `policy_weights`, without blocking.

        In host memory these are the arrays themselves, valid until the next update. On a device they are a copy that
        another
        thread fetches later, with the values of this moment.
        """
        return self.policy_weights()

    @abstractmethod
    def state_dict(self) -> dict[str, Array]:
        """Returns copies of all state that determines later updates, random generators included."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restores `state`: later updates on the same batches are bit-identical on the same machine.

        Raises:
            WireError: names or shapes differ from this algorithm's; nothing was changed.
        """
