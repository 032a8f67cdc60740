"""The network of `point_robot.policy`, in torch: it is trained by an algorithm, and acts in a policy server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hal.spec import ArraySpec
from user_sys.policies.scaling import action_affine


class TanhNetwork(nn.Module):
    """Observation vectors to an action scaled to [-1, 1], float32 (n, a)."""

    centre: Tensor
    half_range: Tensor

    def __init__(self, observation: Sequence[ArraySpec], action: ArraySpec, hidden: int) -> None:
        super().__init__()
        self.features = tuple(spec.name for spec in observation)
        inputs = sum(len(spec.labels) for spec in observation)
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, len(action.labels)))
        for name, value in zip(("centre", "half_range"), action_affine(action), strict=True):
            self.register_buffer(name, torch.from_numpy(value))

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        scaled: Tensor = self.layers(torch.cat([observation[name] for name in self.features], -1))
        return torch.tanh(scaled)

    def scale_action(self, action: Tensor) -> Tensor:
        return (action - self.centre) / self.half_range

    def unscale_action(self, scaled: Tensor) -> Tensor:
        return self.centre + self.half_range * scaled
