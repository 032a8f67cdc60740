"""PPO on recorded windows, asynchronous: Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv
1707.06347), with the decoupled objective of Hilton, Cobbe and Schulman, "Batch size-invariance for policy
optimization", NeurIPS 2022 (arXiv 2110.00641), section 3.

Robots act with older versions of the policy, pi_b, and each window of their steps is used in one update. The proximal
policy pi_p is the policy before the update. The importance weight w corrects for the age of the data, and the clipped
ratio r bounds the step of the update, whatever that age:

    w        = min(pi_p(a|s) / pi_b(a|s), c)                                    without gradient
    r        = pi_phi(a|s) / pi_p(a|s)
    L(phi)   = -mean w min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) - eta H(pi_phi(.|s))
    L(theta) = mean (V_theta(s) - R)^2

c truncates the weights, as in IMPALA (Espeholt et al. 2018, arXiv 1802.01561, section 4.1). The effective sample size
of the n weights scales the step, by the square root because Adam normalises gradients (Huang et al., "Stable
Asynchrony", 2026, arXiv 2602.17616):

    learning rate of phi  =  base sqrt((sum u)^2 / (n sum u^2)),     u = pi_p / pi_b

A and R are generalised advantage estimates within each window (Schulman et al. 2016, arXiv 1506.02438, equation 16),
with delta_t = r_t + gamma V(s_{t+1}) - V(s_t):

    A_t = delta_t + gamma lambda A_{t+1},      R_t = A_t + V(s_t)

A window ends after H steps, with the episode, or where the source of control changes. The value of the observation
after it is bootstrapped unless the episode terminated there. Steps of people, steps without a density, and steps whose
action the safety kernel changed do not train. The action a is the requested one: a robot that rounds or clips it is
part of the environment. If a window ends just before the step of an operator's label, in which the robot rests, that
step's reward and end count for the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hal.spec import ACTION, RobotSpec
from user_sys.algorithms.actor_critic import value_network
from user_sys.algorithms.algorithm import (
    Algorithm,
    GaussianPolicy,
    TensorBatch,
    TrainingData,
    refuse_cloning,
    refuse_steered,
)
from user_sys.algorithms.distributed import mean_over_processes
from user_sys.episode import Phase
from user_sys.errors import ConfigError
from user_sys.replay.batches import BatchSpec

MAX_LOG_RATIO = 20.0  # keeps the ratio of two densities finite


@dataclass(frozen=True)
class PpoSettings:
    """The settings of PPO. A batch is `learner.batch_size` windows.

    Attributes:
        window: H, steps of a window.
        epochs: passes over a batch.
        minibatches: optimizer steps of a pass.
        discount: gamma per control period.
        gae_lambda: lambda of the advantages.
        clip: epsilon.
        importance_max: c.
        divergence_max: an update ends early if mean KL(pi_p || pi_phi) exceeds this, in nats.
        entropy_bonus: eta.
        learning_rate: of the policy (Adam).
        value_hidden: widths of the hidden layers of V.
        value_learning_rate: of V (Adam).
        value_warmup: updates at the start that train V only, for a policy that was trained before.
        gradient_norm_max: maximum norm of each network's gradient.
    """

    window: int = 32
    epochs: int = 4
    minibatches: int = 4
    discount: float = 0.97
    gae_lambda: float = 0.95
    clip: float = 0.2
    importance_max: float = 2.0
    divergence_max: float = 0.05
    entropy_bonus: float = 0.0
    learning_rate: float = 3e-4
    value_hidden: tuple[int, ...] = (128, 128)
    value_learning_rate: float = 1e-3
    value_warmup: int = 5
    gradient_norm_max: float = 1.0

    def __post_init__(self) -> None:
        for name in ("window", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; set it to at least 1")
        if not (0 < self.discount < 1 and 0 <= self.gae_lambda <= 1 and 0 < self.clip < 1):
            raise ConfigError(
                f"discount is {self.discount}, gae_lambda {self.gae_lambda}, clip {self.clip}; set them between 0 and 1"
            )
        if self.importance_max < 1 or not self.value_hidden or min(self.value_hidden) < 1:
            raise ConfigError(
                f"importance_max is {self.importance_max} and value_hidden {list(self.value_hidden)}; set the first to "
                "at least 1, and list one or more widths above 0"
            )


class Ppo(Algorithm):
    """See the module. It trains policies that are a `GaussianPolicy`."""

    settings = PpoSettings
    actor: Any  # a `GaussianPolicy`, and a submodule: also the policy that acts

    def __init__(self, settings: PpoSettings, policy: nn.Module, spec: RobotSpec) -> None:
        """See `Algorithm`."""
        super().__init__(settings, policy, spec)
        refuse_steered(policy, "ppo")
        if not isinstance(policy, GaussianPolicy):
            raise ConfigError("learner.algorithm: ppo needs a policy with a squashed Gaussian density, such as mlp")
        refuse_cloning(policy, "ppo")
        self._settings = settings
        self.actor = policy.eval()  # a random shift of pictures would change the ratio of the densities
        self.value = value_network(self.actor.observation_size, settings.value_hidden)
        self._trained = {
            "actor": [each for each in self.actor.parameters() if each.requires_grad],
            "value": list(self.value.parameters()),
        }
        rates = {"actor": settings.learning_rate, "value": settings.value_learning_rate}
        self.optimizers = {
            name: torch.optim.Adam(parameters, rates[name], fused=True) for name, parameters in self._trained.items()
        }
        self._newest: dict[str, Tensor] = {}

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`."""
        length = self._settings.window
        windows = BatchSpec(
            n_step=length, discount=self._settings.discount, chunk_length=length, sequence=True, within_phase=True
        )
        return TrainingData(
            lambda n_step: windows,
            self.actor.features,
            self.actor.cameras,
            extras={ACTION: (self.actor.action_size,), "log_prob": (), "safety": ()},
            once=True,
        )

    def update(self, batch: TensorBatch, number: int) -> None:
        """See `Algorithm.update`. `batch` holds windows: `BatchSpec.sequence`."""
        settings = self._settings
        steps = self._steps(batch)
        effective = float(effective_share(steps.ratio, steps.usable))
        for group in self.optimizers["actor"].param_groups:
            group["lr"] = settings.learning_rate * math.sqrt(effective)
        used = steps.usable.float()
        self._newest = {
            "effective_share": torch.tensor(effective),
            "usable_share": used.mean(),
            "importance": (steps.ratio * used).sum() / used.sum().clamp(min=1),
        }
        parameters = ("actor", "value") if number >= settings.value_warmup else ("value",)
        for _ in range(settings.epochs):
            order = torch.randperm(len(steps.usable), device=steps.usable.device)
            divergences = [self._update_part(steps, rows, parameters) for rows in order.chunk(settings.minibatches)]
            if float(mean_over_processes(torch.stack(divergences).mean())) > settings.divergence_max:
                break

    @torch.no_grad()
    def _steps(self, batch: TensorBatch) -> _Steps:
        """Computes what stays the same over all passes."""
        settings, mask = self._settings, batch.mask
        assert mask is not None and batch.phase is not None  # a batch of the learner has them
        observation = {name: value.flatten(0, 1) for name, value in batch.observation.items()}
        requested = batch.extras[ACTION]  # what the policy drew: the robot may have rounded it
        requested = torch.where(requested.isfinite(), requested, batch.action)  # of a refused step it may be anything
        action = self.actor.scale_action(requested).flatten(0, 1)
        x = self.actor.encode(observation)
        behaviour, log_prob = batch.extras["log_prob"].flatten(), self.actor.log_prob(x, action)
        usable = mask & (batch.phase == Phase.POLICY) & (batch.extras["safety"] == 0)
        usable = usable.flatten() & behaviour.isfinite()
        values = self.value(x).view(mask.shape)
        following = self.value(self.actor.encode(batch.next_observation))[:, 0] * ~batch.terminated
        advantage = advantages(batch.reward, values, following, mask, settings.discount, settings.gae_lambda)
        return _Steps(
            observation,
            action,
            log_prob,
            ratio=torch.where(usable, log_prob - behaviour, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
            advantage=normalized(advantage.flatten(), usable),
            returns=(advantage + values).flatten(),
            usable=usable,
        )

    def _update_part(self, steps: _Steps, rows: Tensor, trained: Sequence[str]) -> Tensor:
        """Makes one optimizer step with `rows` of the steps; returns mean KL(pi_p || pi_phi)."""
        settings, usable = self._settings, steps.usable[rows].float()
        count = mean_over_processes(usable.sum()).clamp(min=1e-6)  # the parts of all processes are one batch
        x = self.actor.encode({name: value[rows] for name, value in steps.observation.items()})
        log_ratio = self.actor.log_prob(x, steps.action[rows]) - steps.log_prob[rows]
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight, advantage = steps.ratio[rows].clamp(max=settings.importance_max), steps.advantage[rows]
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = weight * torch.minimum(ratio * advantage, clipped * advantage)
        entropy = self.actor.entropy(x) if settings.entropy_bonus else torch.zeros_like(gain)
        policy_loss = -((gain + settings.entropy_bonus * entropy) * usable).sum() / count
        value_loss = ((self.value(x)[:, 0] - steps.returns[rows]).square() * usable).sum() / count
        for name in trained:
            self.optimizers[name].zero_grad()
        loss = policy_loss + value_loss if "actor" in trained else value_loss
        loss.backward()
        for name in trained:
            torch.nn.utils.clip_grad_norm_(self._trained[name], settings.gradient_norm_max)
            self.optimizers[name].step()
        divergence: Tensor = (
            ((ratio - 1) - log_ratio) * usable
        ).sum().detach() / count  # of KL, unbiased and not negative
        self._newest |= {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "divergence": divergence,
        }
        return divergence

    def scalars(self) -> dict[str, float]:
        """See `Algorithm.scalars`."""
        return {name: float(value) for name, value in self._newest.items()}


@dataclass(frozen=True)
class _Steps:
    """The m = n H steps of n windows.

    Attributes:
        observation: feature to (m, ...).
        action: (m, a), requested and scaled.
        log_prob: log pi_p, (m,).
        ratio: u, (m,); 1 for a step that does not train.
        advantage, returns: A, normalized, and R, (m,).
        usable: the step trains, bool (m,).
    """

    observation: dict[str, Tensor]
    action: Tensor
    log_prob: Tensor
    ratio: Tensor
    advantage: Tensor
    returns: Tensor
    usable: Tensor


def advantages(
    reward: Tensor, values: Tensor, following: Tensor, mask: Tensor, discount: float, gae_lambda: float
) -> Tensor:
    """Returns the generalised advantage estimates of windows, (n, H); 0 where `mask` is false.

    Args:
        reward: of each step, (n, H).
        values: V of the observation before each step, (n, H).
        following: V of the observation after each window, (n,); 0 if it is not bootstrapped.
        mask: which steps exist, bool (n, H): the first ones of each window.
    """
    estimates, later = torch.zeros_like(values), torch.zeros_like(following)
    for t in reversed(range(values.shape[1])):
        goes_on = mask[:, t + 1] if t + 1 < values.shape[1] else torch.zeros_like(mask[:, t])
        after = torch.where(goes_on, values[:, min(t + 1, values.shape[1] - 1)], following)
        later = (reward[:, t] + discount * after - values[:, t] + discount * gae_lambda * later * goes_on) * mask[:, t]
        estimates[:, t] = later
    return estimates


def normalized(values: Tensor, usable: Tensor) -> Tensor:
    """Returns `values` (m,) with mean 0 and variance 1 over the `usable` ones of all processes."""
    used = usable.float()
    moments = torch.stack([used.mean(), (values * used).mean(), (values.square() * used).mean()])
    share, first, second = mean_over_processes(moments)
    mean = first / share.clamp(min=1e-6)
    variance = second / share.clamp(min=1e-6) - mean.square()
    result: Tensor = (values - mean) / (variance.clamp(min=0.0).sqrt() + 1e-6)
    return result


def effective_share(ratio: Tensor, usable: Tensor) -> Tensor:
    """Returns the effective sample size of the weights `ratio` (m,) as a share of the `usable` steps.

    It counts the steps of all processes.
    """
    used = usable.float()
    share, first, second = mean_over_processes(
        torch.stack([used.mean(), (ratio * used).mean(), (ratio.square() * used).mean()])
    )
    return torch.where(share > 0, first.square() / (share * second).clamp(min=1e-12), 1.0)
