"""A2C2's training: a small network that corrects each action of a chunk by the newest observation.

See `edge.chunk_executor.A2c2` for the method and `policies.correction` for the network's function f. The policy
stays as it is. f learns by least squares the difference from the executed action, at a random place k of the chunk::

    L(f) = | a_k + f(o_{t+k}, o_t, a_k, k / H) - a*_{t+k} |^2,     a = chunk of the policy at o_t
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hal.spec import Array
from user_sys.policies.correction import ChunkCorrection
from user_sys.policies.networks import ObservationNetwork
from user_sys.policies.trainable import merged_state

TRAINED_ROWS = 64  # of a batch: a chunk of the policy is drawn for each


class CorrectionNetwork(nn.Module):
    """f; see the module."""

    def __init__(self, vectors: int, action_size: int, hidden: Sequence[int]) -> None:
        """`vectors`: elements of the observation's vectors."""
        super().__init__()
        widths = (2 * vectors + action_size + 1, *hidden, action_size)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip(widths, widths[1:], strict=False))
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, newest: Tensor, observed: Tensor, action: Tensor, place: Tensor) -> Tensor:
        """Returns the difference, (n, a), for scaled vectors (n, k), scaled actions (n, a) and k / H (n,)."""
        first, *others = self.layers
        x: Tensor = first(torch.cat([newest, observed, action, place[:, None]], -1))
        for layer in others:
            x = layer(x.relu())
        difference: Tensor = x
        return difference

    def loss(self, newest: Tensor, observed: Tensor, chunk: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        """Returns the loss (n,).

        Args:
            newest: scaled vectors at each step of the chunk, (n, H, k).
            observed: scaled vectors of the chunk's observation, (n, k).
            chunk, action: the policy's and the executed chunk, (n, H, a), scaled.
            mask: bool (n, H), which steps exist.
        """
        rows, length = torch.arange(len(chunk), device=chunk.device), chunk.shape[1]
        place = (torch.rand(len(chunk), device=chunk.device) * mask.sum(-1)).long()
        base = chunk[rows, place]
        found = base + self(newest[rows, place], observed, base, place / length)
        loss: Tensor = (found - action[rows, place]).square().mean(-1) * mask.any(-1)
        return loss

    def corrections(
        self,
        policy: ObservationNetwork,
        observations: Sequence[Mapping[str, Array]],
        length: int,
    ) -> list[ChunkCorrection]:
        """Returns f for chunks of `length` actions of `policy`, one for each of `observations`."""
        state = merged_state(self)  # a layer may have adapters
        layers = tuple(
            (_numpy(state[f"layers.{n}.weight"]), _numpy(state[f"layers.{n}.bias"])) for n in range(len(self.layers))
        )
        offset, scale = _numpy(policy.input.offset), _numpy(policy.input.scale)
        centre, half = _numpy(policy.action.centre), _numpy(policy.action.scale)
        found = []
        for observation in observations:
            each = ChunkCorrection(policy.features, offset, scale, offset, centre, half, length, layers)
            found.append(replace(each, observed=each.scaled(observation)))
        return found


def _numpy(tensor: Any) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array
