"""RTC and training-time RTC: chunks of a flow that go on where the promised actions end.

Real-time chunking (Black, Galliker and Levine, "Real-Time Execution of Action Chunking Flow Policies", 2025, arXiv
2506.07339) takes the promised actions A as the known part of a picture that is to be painted in. While a chunk x is
integrated, the guess of its end, x_1 = x + (1 - t) v, is drawn to A (pseudoinverse guidance)::

    v' = v + min(beta, (1 - t) / t  r^-2) (W (A - x_1))^T dx_1/dx,     r^2 = (1 - t)^2 / (t^2 + (1 - t)^2)

With d the delay and k the number of promised actions, the weights W are 1 for the first d actions, which are executed
whatever happens, and fall to 0 at k::

    W_i = c_i (e^c_i - 1) / (e - 1),     c_i = (k - i) / (k - d + 1),     d <= i < k

Training-time RTC (Black et al., "Training-Time Action Conditioning for Efficient Real-Time Chunking", 2025, arXiv
2512.05964) teaches the flow to continue given actions instead: in training the first d actions are the true ones, at
time 1, with d drawn at random, and only the others have a loss. Acting then costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from hal.settings import Limit
from user_sys.errors import ConfigError


@dataclass(frozen=True)
class RtcSettings:
    """How a flow policy draws chunks: in training episodes, and by the methods rtc and training_rtc.

    Attributes:
        noise_scale: of the noise from which training episodes draw chunks; below 1 they stay nearer to the likely ones.
        exploration: standard deviation of what training episodes add to a chunk, alike to all its actions, scaled to
            [-1, 1]. Noise that differs from action to action averages out. By rtc and training_rtc it fades in over the
            promised actions. Both have no effect on a gated flow.
        rtc_guidance_max: greatest weight of the guidance.
        rtc_through_network: the guidance passes back through the network, as in the paper; without, an action takes
            half the time, and chunks equal those of LeRobot.
        prefix_max: most promised actions that training_rtc learns to continue; 0 for not.
    """

    noise_scale: Annotated[float, Meta(ge=0, le=1)] = 1.0
    exploration: Annotated[float, Meta(ge=0)] = 0.0
    rtc_guidance_max: Annotated[float, Meta(gt=0)] = 5.0
    rtc_through_network: bool = True
    prefix_max: Limit = 0

    def check_prefix(self, chunk_length: int) -> None:
        """Raises ConfigError: a chunk has no action after the longest prefix."""
        if self.prefix_max >= chunk_length:
            raise ConfigError(f"prefix_max is {self.prefix_max}; set it below chunk_length={chunk_length}")


@dataclass(frozen=True)
class ChunkPrefix:
    """The promised actions of n robots, for chunks of H actions.

    Attributes:
        actions: (n, H, a), scaled to [-1, 1]; zero from `count` on.
        count, delay: int64 (n,), how many are promised, and how many of them will be executed whatever happens.
    """

    actions: Tensor
    count: Tensor
    delay: Tensor

    @classmethod
    def of(cls, scaled: Tensor, count: Tensor, delay: Tensor, length: int) -> ChunkPrefix:
        """Cuts or pads promised actions (n, K, a) to `length`."""
        n, _, size = scaled.shape
        actions, used = scaled.new_zeros(n, length, size), scaled[:, :length]
        actions[:, : used.shape[1]] = used
        count = count.clamp(max=length)
        exists = torch.arange(length, device=count.device) < count[:, None]
        return cls(actions * exists[..., None], count, torch.minimum(delay, count))

    def weights(self) -> Tensor:
        """Returns W, (n, H)."""
        place = torch.arange(self.actions.shape[1], device=self.count.device)
        left, width = self.count[:, None] - place, self.count - self.delay + 1
        c = (left / width[:, None]).clamp(0.0, 1.0)
        return torch.where(place < self.delay[:, None], 1.0, c * torch.expm1(c) / (math.e - 1))


def guided_velocity(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    t: float,
    prefix: ChunkPrefix,
    guidance_max: float,
    *,
    through_network: bool = True,
) -> Tensor:
    """Returns v', (n, H, a), at the chunks `x` (n, H, a) and time `t` in [0, 1).

    Args:
        velocity: v as a function of x, without gradients of its own. Its inputs are no inference tensors.
        guidance_max: beta.
        through_network: False takes dx_1/dx as the identity, as LeRobot does: no backward pass, a rougher guess.
    """
    if through_network:
        with torch.enable_grad():
            at = x.detach().clone().requires_grad_(True)
            v = velocity(at)
            end = at + (1 - t) * v
            error = (prefix.weights()[..., None] * (prefix.actions - end)).detach()
            (correction,) = torch.autograd.grad(end, at, error)
            v = v.detach()
    else:
        v = velocity(x)
        correction = prefix.weights()[..., None] * (prefix.actions - x - (1 - t) * v)
    strength = guidance_max if t == 0 else min(guidance_max, (t**2 + (1 - t) ** 2) / (t * (1 - t)))
    return v + strength * correction


def sample_guided(
    velocity: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    steps: int,
    prefix: ChunkPrefix,
    settings: RtcSettings,
) -> Tensor:
    """Returns RTC's chunks (n, H, a) from `noise` (n, H, a). `velocity`: as a function of x and times (n,)."""
    x = noise
    for step in range(steps):
        t = torch.full((len(x),), step / steps, device=x.device)
        guided = guided_velocity(
            partial(_swapped, velocity, t),
            x,
            step / steps,
            prefix,
            settings.rtc_guidance_max,
            through_network=settings.rtc_through_network,
        )
        x = x + guided / steps
    return x


def _swapped(velocity: Callable[[Tensor, Tensor], Tensor], t: Tensor, x: Tensor) -> Tensor:
    return velocity(x, t)


def sample_given(
    velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int, prefix: ChunkPrefix, longest: int
) -> Tensor:
    """Returns training-time RTC's chunks (n, H, a), of which the first `delay` actions, `longest` at most, are given.

    `velocity`: as a function of x and times (n, H), 1 for a given action.
    """
    given = torch.arange(noise.shape[1], device=noise.device) < prefix.delay.clamp(max=longest)[:, None]
    x = torch.where(given[..., None], prefix.actions, noise)
    for step in range(steps):
        v = velocity(x, torch.where(given, 1.0, step / steps))
        x = torch.where(given[..., None], x, x + v / steps)
    return x


def draw_prefix_lengths(exists: Tensor, longest: int) -> Tensor:
    """Draws delays in {0, ..., `longest`}, int64 (n,), that leave one of the actions in `exists`, bool (n, H)."""
    drawn = torch.randint(0, longest + 1, (len(exists),), device=exists.device)
    return torch.minimum(drawn, exists.sum(-1) - 1).clamp(min=0)
