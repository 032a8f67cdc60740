"""A flow whose velocity is gated, with noise between its steps: the policy that SAC-Flow trains.

Zhang et al., "SAC Flow", ICLR 2026 (arXiv 2509.25756): K Euler steps of a flow are a residual recurrent network, so
that the gradient of the last action explodes or vanishes as in any other. Flow-G gates the velocity like a gated
recurrent unit, with gate g and candidate h:

    v(x, t, s) = g(x, t, s) (h(x, t, s) - x),      0 < g < 1

A rollout adds noise between the steps, so that its density is known. The drift b keeps the distribution of x at every
t, because for straight paths from x_0 ~ N(0, 1) the score is (t v - x) / (1 - t):

    x_{k+1} = x_k + b / K + sigma(s) e_k / sqrt(K),     e_k ~ N(0, 1),  t = k / K
    b       = v + sigma^2 / 2 (t v - x) / (1 - t)
    log p   = log N(x_0) + sum_k log N(x_{k+1}; x_k + b / K, sigma^2 / K) - sum log(1 - tanh(x_K)^2)

The chunk is tanh(x_K), scaled to the bounds of the action. A deterministic chunk has x_0 = e_k = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hal.settings import Count
from hal.spec import ArraySpec
from user_sys.errors import ConfigError
from user_sys.policies.flow import FlowMatching, FlowNetwork, FlowPolicy, FlowSettings, Velocity
from user_sys.policies.networks import IMITATED_MAX, PictureEncoder, squash
from user_sys.policies.scaling import LOG_STD_MIN
from user_sys.policies.torch_policy import PromisedActions, TorchPolicy
from user_sys.policies.vlash import StateForecast

GATE_BIAS = 5.0  # the gate starts nearly open, as in the authors' code
LOG_STD_MAX = 0.0  # the variance of x_0 is 1
INITIAL_LOG_STD = -1.0


@dataclass(frozen=True)
class GatedFlowSettings(FlowSettings):
    """The settings of the policy `gated_flow`: those of `flow` with other defaults."""

    chunk_length: Count = 1
    flow_steps: Count = 4
    hidden: tuple[int, ...] = (256, 256)


class GatedFlow(FlowMatching):
    """What the modules of gated flows share, and `sac_flow` trains.

    `velocity` and `imitation_loss` are before tanh, `sample` and `rollout` after it.
    """

    def deviation(self, context: Tensor) -> Tensor:
        """Returns log sigma, (n, H, a); abstract."""
        raise NotImplementedError

    def transition(self, x: Tensor, step: int, context: Tensor, log_std: Tensor) -> Tensor:
        """Returns the mean of x after step number `step`, (n, H, a)."""
        t = step / self.flow_steps
        velocity = self.velocity(x, torch.full((len(x),), t, device=x.device), context)
        drift = velocity + 0.5 * (2 * log_std).exp() * (t * velocity - x) / (1 - t)
        return x + drift / self.flow_steps

    def rollout(self, context: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns chunks (n, H, a), scaled to [-1, 1], and the log density of their paths, (n,). Differentiable.

        Args:
            noise: x_0, e_0, e_1, ..., (flow_steps + 1, n, H, a), standard normal.
        """
        x, log_std = noise[0], self.deviation(context)
        log_prob = standard_log_density(noise[0])
        step_std = log_std - 0.5 * math.log(self.flow_steps)
        for step in range(self.flow_steps - 1):
            x = self.transition(x, step, context, log_std) + step_std.exp() * noise[step + 1]
            log_prob = log_prob + standard_log_density(noise[step + 1]) - step_std.sum((1, 2))
        mean = self.transition(x, self.flow_steps - 1, context, log_std)
        chunk, last = squash(mean.flatten(1), step_std.flatten(1), noise[-1].flatten(1))
        return chunk.view(x.shape), log_prob + last

    def sample(
        self,
        context: Tensor,
        noise: Tensor,
        steps: int | None = None,
        condition: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """See `FlowMatching.sample`; without noise between the steps."""
        return torch.tanh(self.integrate(context, noise, steps, condition, guidance))

    def imitation_loss(
        self, context: Tensor, action: Tensor, mask: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """See `FlowMatching.imitation_loss`; actions count as at most `IMITATED_MAX` from the centre."""
        x = torch.atanh(action.clamp(-IMITATED_MAX, IMITATED_MAX))
        return super().imitation_loss(context, x, mask, condition)


def refuse_gated(policy: nn.Module, algorithm: str) -> None:
    """Raises ConfigError: robots act by rollouts, without a condition and guidance, and `algorithm` trains others."""
    if isinstance(policy, GatedFlow):
        raise ConfigError(
            f"policy: {algorithm} does not train a gated flow: set policy.kind to flow in place of gated_flow, or "
            "policy.options.gated of vla to false, or learner.algorithm to sac_flow"
        )


class GatedFlowNetwork(GatedFlow, FlowNetwork):
    """See the module."""

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        action: ArraySpec,
        settings: FlowSettings,
        encoders: Mapping[str, PictureEncoder] | None = None,
        forecast: StateForecast | None = None,
    ) -> None:
        """See `FlowNetwork`."""
        super().__init__(specs, action, settings, encoders, forecast)
        width = self.chunk_length * self.action_size
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        self.gate = constant_head(last.in_features, width, GATE_BIAS)
        self.log_std = constant_head(self.observation_size, width, INITIAL_LOG_STD)

    def velocity_given(self, context: Tensor) -> Velocity:
        """See `FlowMatching.velocity_given`."""

        def velocity(x_t: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
            h = self.layers[:-1](self.inputs(x_t, t, context, condition))
            gate, candidate = self.gate(h).sigmoid(), self.layers[-1](h)
            gated: Tensor = (gate * (candidate - x_t.flatten(1))).view(x_t.shape)
            return gated

        return velocity

    def deviation(self, context: Tensor) -> Tensor:
        """See `GatedFlow.deviation`."""
        log_std: Tensor = self.log_std(context).clamp(LOG_STD_MIN, LOG_STD_MAX)
        return log_std.view(-1, self.chunk_length, self.action_size)


def constant_head(inputs: int, outputs: int, value: float) -> nn.Linear:
    """Returns a linear layer whose output is `value` until it is trained."""
    head = nn.Linear(inputs, outputs)
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, value)
    return head


def standard_log_density(noise: Tensor) -> Tensor:
    """Returns the log density of standard normal `noise` (n, H, a), (n,)."""
    return (-0.5 * noise.square() - 0.5 * math.log(2 * math.pi)).sum((1, 2))


def draw_rollout(
    policy: TorchPolicy,
    observation: Mapping[str, Tensor],
    *,
    deterministic: bool,
    promised: PromisedActions | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws chunks of a `policy` whose module is a `GatedFlow`; see `TorchPolicy.draw`."""
    module = policy.module
    context = module.encode(observation)
    shape = (module.flow_steps + 1, len(context), module.chunk_length, module.action_size)
    chunk, _ = module.rollout(context, policy.noise(shape, deterministic=deterministic))
    actions = module.unscale_action(chunk)
    return actions, torch.full(actions.shape[:2], float("nan"))


class GatedFlowPolicy(FlowPolicy):
    """See the module. Its density is that of a path, not of an action, so log_prob is NaN."""

    settings = GatedFlowSettings
    network = GatedFlowNetwork
    is_gated = True
    draw = draw_rollout
