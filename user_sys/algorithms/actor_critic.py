"""Parts that several algorithms share: an ensemble of critics, a value network, and moving averages of networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAST_LAYER_GAIN = 0.01


class CriticEnsemble(nn.Module):
    """E critics in one set of tensors, the ensemble first: weights (E, in, out), biases (E, 1, out)."""

    def __init__(self, inputs: int, hidden: Sequence[int], critics: int, *, layer_norm: bool = True) -> None:
        super().__init__()
        self._layer_norm = layer_norm
        widths = (inputs, *hidden, 1)
        pairs = list(zip(widths, widths[1:], strict=False))
        self.weights = nn.ParameterList(xavier_uniform((critics, *pair)) for pair in pairs)
        self.biases = nn.ParameterList(torch.zeros(critics, 1, out) for _, out in pairs)
        # Values start near 0. Thousands of updates would be needed to raise a random pessimistic minimum by sparse
        # rewards.
        self.weights[-1].data.mul_(LAST_LAYER_GAIN)
        self._layers: list[tuple[Tensor, Tensor]] = list(zip(self.weights, self.biases, strict=True))

    def forward(self, x: Tensor, *, subset: Tensor | None = None, frozen: bool = False) -> Tensor:
        """Returns Q of every critic, (E, n), for `x` (n, in): linear, layer norm, relu; the last layer is linear.

        The layer norm has no gain and bias: the next linear layer has them.

        Args:
            subset: indices of the critics to evaluate.
            frozen: the critics get no gradient.
        """
        layers = self._layers
        if frozen:
            layers = [(weight.detach(), bias.detach()) for weight, bias in layers]
        if subset is not None:
            layers = [(weight[subset], bias[subset]) for weight, bias in layers]
        h = x.expand(len(layers[0][0]), -1, -1)
        for weight, bias in layers[:-1]:
            h = torch.baddbmm(bias, h, weight)
            h = F.relu(F.layer_norm(h, h.shape[-1:]) if self._layer_norm else h)
        weight, bias = layers[-1]
        return torch.baddbmm(bias, h, weight).squeeze(-1)


def critic_input(policy: Any, context: Tensor, action: Tensor | None = None) -> Tensor:
    """Returns what a critic reads of `ObservationEncoder.encode`'s result, followed by `action` (n, a), if given."""
    summary = context[:, : policy.observation_size]
    return summary if action is None else torch.cat([summary, action], -1)


def mean_errors(q: Tensor, target: Tensor, used: Tensor) -> Tensor:
    """Returns |y - Q_i|, (n,), averaged over the critics: of `q` (critics, n) and y, `target` (n,).

    A sample that trains no critic, with `used` (n,) of 0, gets the mean of the others: a sampler neither prefers it nor
    loses it, as the rest of its chunk may arrive. NaN if none trains.
    """
    errors, trains = (q - target).abs().mean(0), used > 0
    return torch.where(trains, errors, (errors * trains).sum() / trains.sum())


def value_network(inputs: int, hidden: Sequence[int], outputs: int = 1) -> nn.Sequential:
    """Returns V: linear layers with layer norm and relu between them; its outputs start near 0."""
    widths = (inputs, *hidden)
    layers: list[nn.Module] = []
    for pair in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(*pair), nn.LayerNorm(pair[1]), nn.ReLU()]
    last = nn.Linear(widths[-1], outputs)
    last.weight.data.mul_(LAST_LAYER_GAIN)
    last.bias.data.zero_()
    return nn.Sequential(*layers, last)


class MovingAverage:
    """Makes a network the moving average of another one: target critics, or the policy that acts."""

    def __init__(self, slow: nn.Module, fast: nn.Module) -> None:
        """`slow`: a copy of `fast`, which may share parameters with it (`shared_copy`), or `fast` itself."""
        pairs = zip(slow.parameters(), fast.parameters(), strict=True)
        self._parameters = [pair for pair in pairs if pair[0] is not pair[1]]
        buffers = dict(fast.named_buffers(remove_duplicate=False))
        places = [name.rpartition(".")[::2] for name in fast.state_dict() if name in buffers]
        # A move to a device replaces the buffers, so their owners are kept.
        self._buffers = [(slow.get_submodule(owner), fast.get_submodule(owner), leaf) for owner, leaf in places]

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Moves `slow` towards `fast` by a share of `rate`, after an optimizer's step of `fast`.

        It takes the buffers as they are: statistics of batch norms are averages already.

        Parameters without a gradient stay, as the optimizer left them: part of a batch was seen
        (`ComputeConfig.parts`), or they are of an encoder that is frozen. Batches are encoded by the slow one then,
        which must not change any more.
        """
        stepped = [pair for pair in self._parameters if pair[1].grad is not None]
        if not stepped:
            return
        torch._foreach_lerp_([each for each, _ in stepped], [each for _, each in stepped], rate)
        for slow, fast, leaf in self._buffers:
            getattr(slow, leaf).copy_(getattr(fast, leaf))


def xavier_uniform(shape: tuple[int, ...]) -> Tensor:
    """Draws weights (..., in, out)."""
    bound = math.sqrt(6.0 / (shape[-2] + shape[-1]))
    return torch.empty(shape).uniform_(-bound, bound)
