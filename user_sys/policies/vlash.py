"""VLASH: chunks that begin in the state where the promised actions end.

Tang et al., "VLASH: Real-Time VLAs via Future-State-Aware Asynchronous Inference", 2025 (arXiv 2512.01031): the robot's
state is rolled forward by its promised actions, while pictures and objects stay those of the observation. Training does
the same with the actions that were executed after a step: with an offset d drawn at random, the chunk that begins d
control periods later is learned from the state rolled forward by d actions. The policy reads d, as it tells how old the
rest of the observation is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hal.spec import STATE, RobotSpec
from user_sys.policies.rtc import draw_prefix_lengths

OFFSET = "observation.offset"
"""Feature of a rolled observation, float32 (n, 1): by how many actions the state is ahead of the rest."""


class StateForecast:
    """Rolls the state of a robot forward by actions, as far as its spec says what they move: joints and tool.

    Velocities, and joints that follow a Cartesian step, stay as they were observed.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self._targets = (spec.joint_target, spec.limits.joint_position)
        steps = [(spec.joint_delta, spec.limits.joint_position), (spec.tool_delta, spec.limits.tool_position)]
        self._steps = [(moved, places) for moved, places in steps if moved and len(moved) == len(places)]

    @property
    def is_possible(self) -> bool:
        """Whether the actions move anything that the state has."""
        return bool(self._steps) or bool(self._targets[0])

    def roll(self, observation: Mapping[str, Tensor], actions: Tensor, count: Tensor) -> dict[str, Tensor]:
        """Returns the observation of n robots with the state after the first `count` (n,) of `actions` (n, K, a)."""
        state = observation[STATE].clone()
        used = (torch.arange(actions.shape[1], device=count.device) < count[:, None])[..., None]
        for moved, places in self._steps:
            state[:, list(places)] += (actions[..., list(moved)] * used).sum(1)
        moved, places = self._targets
        if moved and actions.shape[1]:
            last = actions[torch.arange(len(count)), (count - 1).clamp(min=0)]
            state[:, list(places)] = torch.where(count[:, None] > 0, last[:, list(moved)], state[:, list(places)])
        return {**observation, STATE: state, OFFSET: count[:, None].float()}

    def offset(
        self, observation: Mapping[str, Tensor], action: Tensor, mask: Tensor, length: int
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Draws an offset for each sample of a batch, and applies it.

        Args:
            action: (n, H + D, a) in the action spec's units; D is the longest offset.
            mask: bool (n, H + D), which of them exist.
            length: H.

        Returns:
            The observation, `action` (n, H, a) and `mask` (n, H) of the chunk that begins later.
        """
        offset = draw_prefix_lengths(mask, action.shape[1] - length)
        place = offset[:, None] + torch.arange(length, device=offset.device)
        chunk = action.gather(1, place[..., None].expand(-1, -1, action.shape[-1]))
        return self.roll(observation, action, offset), chunk, mask.gather(1, place)
