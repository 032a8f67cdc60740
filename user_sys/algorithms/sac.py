"""SAC: soft actor-critic with a learned temperature, after Haarnoja et al., "Soft Actor-Critic Algorithms and
Applications", 2018 (arXiv 1812.05905), algorithm 1.

    y        = r + gamma (1 - terminated) (min_{i in Z} Q_theta'_i(s', a') - alpha log pi(a'|s')),   a' ~ pi(.|s')
    L(theta) = sum_i w (y - Q_theta_i(s, a))^2
    L(phi)   = alpha log pi_phi(a|s) - mean_i Q_theta_i(s, a),   a ~ pi_phi(.|s)
    L(alpha) = -alpha (log pi_phi(a|s) + target entropy)
    theta'  <- theta' + rho (theta - theta')

In a task of precision, new critics lead a cloned actor astray. With c above 0, L(phi) also has the imitation loss of
the steps of people in the batch, c mean_i 1[by a person] l(s_i, a_i), as TD3+BC has that of all steps (Fujimoto and Gu
2021, arXiv 2106.06860, equation 3).

The actor's loss uses the mean of the critics, and the paper the minimum; `user_sys.algorithms.rlpd` differs from this
file by its settings. Over n steps r is the discounted sum of rewards, and gamma^n replaces gamma. The batch holds both,
and the weights w, which are 1 unless the sampler corrects for its priorities. Actions are scaled to [-1, 1] and
observations to the bounds of their spec.

An encoder of pictures is trained by L(theta) only, as in DrQ-v2 (Yarats et al. 2021, arXiv 2107.09645, section 3.1). If
the policy asks for `pretrain_updates`, learning starts by cloning the steps of people.

Batches are drawn evenly from demonstrations and online steps. Without demonstrations it learns from its own steps only.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hal.settings import Amount, Limit
from hal.spec import RobotSpec
from user_sys.algorithms.actor_critic import CriticEnsemble, MovingAverage, critic_input, mean_errors
from user_sys.algorithms.algorithm import (
    Algorithm,
    GaussianPolicy,
    TensorBatch,
    TrainingData,
    imitation_loss,
    refuse_steered,
)
from user_sys.algorithms.distributed import mean_over_processes
from user_sys.episode import EpisodeSource, Phase
from user_sys.errors import ConfigError
from user_sys.policies.trainable import shared_copy
from user_sys.replay.batches import BatchSpec
from user_sys.replay.selectors import MixturePart, StepFilter


@dataclass(frozen=True)
class SacSettings:
    """The settings of SAC.

    Attributes:
        critic_hidden: widths of the critics' hidden layers.
        critics: E, the size of the ensemble.
        target_critics: number of critics in a target, Z.
        layer_norm: of the critics.
        discount: gamma per control period.
        target_rate: rho, the rate at which target critics follow.
        learning_rate: of actor, critics and temperature (Adam).
        actor_period: G, critic updates per actor update.
        initial_temperature: initial alpha.
        entropy_per_action: target entropy in nats, per element of the action scaled to [-1, 1].
        acting_rate: rate at which the published weights follow the actor. Single actors are sometimes bad, so robots
            get the mean of about the last hundred (Polyak and Juditsky, 1992). 1 publishes the actor itself.
        backup_entropy: y includes the entropy of the next action.
        gradient_norm_max: maximum norm of each network's gradient.
        critics_first: updates that train only the critics, and no encoder, after those that clone the demonstrations
            (`policy.options.pretrain_updates`). New critics would spoil the cloned actor. No effect without cloning.
        cloning: c, the weight of cloning the steps of people in the actor's loss.
    """

    critic_hidden: tuple[int, ...] = (256, 256)
    critics: int = 2
    target_critics: int = 2
    layer_norm: bool = False
    discount: float = 0.97
    target_rate: float = 0.005
    learning_rate: float = 1e-3
    actor_period: int = 1
    initial_temperature: float = 0.01
    entropy_per_action: float = -1.0
    acting_rate: float = 1.0
    backup_entropy: bool = True
    gradient_norm_max: float = 10.0
    critics_first: Limit = 500
    cloning: Amount = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.target_critics <= self.critics:
            raise ConfigError(f"target_critics is {self.target_critics}; set it between 1 and critics={self.critics}")
        if not 0 < self.discount < 1:
            raise ConfigError(f"discount is {self.discount}; set it between 0 and 1, both excluded")
        if not self.critic_hidden or min(self.critic_hidden) < 1 or self.actor_period < 1:
            raise ConfigError(
                f"critic_hidden is {self.critic_hidden} and actor_period {self.actor_period}; set both above 0"
            )


class Sac(Algorithm):
    """See the module. It trains policies that are a `GaussianPolicy`."""

    settings = SacSettings
    actor: Any  # a `GaussianPolicy`, and a submodule

    def __init__(self, settings: SacSettings, policy: nn.Module, spec: RobotSpec) -> None:
        """See `Algorithm`."""
        super().__init__(settings, policy, spec)
        actions = self._require(policy)
        self._settings = settings
        self.actor = policy
        self.policy = shared_copy(policy).requires_grad_(False)
        inputs = self.actor.observation_size + actions
        self.critics = CriticEnsemble(inputs, settings.critic_hidden, settings.critics, layer_norm=settings.layer_norm)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(settings.initial_temperature)))
        self._target_entropy = settings.entropy_per_action * actions
        adam = partial(torch.optim.Adam, lr=settings.learning_rate, fused=True)
        encoder = [each for each in self.actor.encoder.parameters() if each.requires_grad]
        of_encoder = set(map(id, encoder))
        self._trained: dict[str, list[Tensor]] = {
            "actor": [p for p in self.actor.parameters() if p.requires_grad and id(p) not in of_encoder],
            "critics": [*self.critics.parameters(), *encoder],
            "temperature": [self.log_alpha],
        }
        if self.actor.pretrain_updates:
            self._trained["imitation"] = [each for each in self.actor.parameters() if each.requires_grad]
        self.optimizers = {name: adam(parameters) for name, parameters in self._trained.items()}
        self._averages = {
            "targets": MovingAverage(self.targets, self.critics),
            "policy": MovingAverage(self.policy, self.actor),
        }
        self._newest: dict[str, Tensor] = {}
        self._unknown_errors = self._used = torch.empty(0)

    def _require(self, policy: nn.Module) -> int:
        """Returns the number of elements of an action. Raises ConfigError if it cannot train `policy`."""
        name = type(self).__name__.lower()
        refuse_steered(policy, name)
        if not isinstance(policy, GaussianPolicy):
            raise ConfigError(f"learner.algorithm: {name} needs a policy with a squashed Gaussian density, such as mlp")
        return policy.action_size

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`."""
        both = MixturePart((StepFilter(sources=(EpisodeSource.DEMO, EpisodeSource.ONLINE)),))
        batches = partial(BatchSpec, discount=self._settings.discount)
        cloned = self.actor.pretrain_updates
        return TrainingData(batches, self.actor.features, self.actor.cameras, mixture=(both,), cloned_updates=cloned)

    def update(self, batch: TensorBatch, number: int) -> None:
        """See `Algorithm.update`."""
        cloned = self.actor.pretrain_updates
        if number < cloned:
            self._imitate(batch)
            return
        actor_waits = bool(cloned) and number < cloned + self._settings.critics_first
        x = self.actor.encode(batch.observation)
        if actor_waits or 0 <= self.actor.frozen_from <= number:
            x = x.detach()
        target = self._target(batch)
        self._update_critics(x, self.actor.scale_action(batch.action).flatten(1), target, self._critic_weight(batch))
        if actor_waits:
            return
        if number % self._settings.actor_period == 0:
            log_prob = self._update_actor(x.detach(), batch)
            self._step("temperature", -self.log_alpha.exp() * (log_prob.mean() + self._target_entropy))

    def _critic_weight(self, batch: TensorBatch) -> Tensor:
        return batch.weight

    def _imitate(self, batch: TensorBatch) -> None:
        """Makes an update that clones the steps of people; see `ObservationEncoder.pretrain_updates`."""
        is_example = is_cloned(batch)
        rows = is_example if is_example.any() else slice(1)  # a loss of 0 passes the parameters that others pass
        losses = imitation_loss(self.actor, replace(batch, mask=cloned_steps(batch)).rows(rows))
        count = mean_over_processes(is_example.float().sum()).clamp(min=1e-6)  # their parts are one batch
        loss = (losses * is_example[rows]).sum() / count
        self._step("imitation", loss)
        self._averages["policy"].update(1.0)
        self._newest |= {"imitation_loss": loss.detach()}
        self._unknown_errors = torch.full_like(batch.weight, math.nan)

    @torch.no_grad()
    def _target(self, batch: TensorBatch) -> Tensor:
        """Returns y, shape (n,)."""
        following = self.actor.encode(batch.next_observation)
        action, log_prob = self._draw(following)
        subset = torch.randperm(self._settings.critics, device=following.device)[: self._settings.target_critics]
        q: Tensor = self.targets(critic_input(self.actor, following, action), subset=subset).amin(0)
        if self._settings.backup_entropy:
            q = q - self.log_alpha.exp() * log_prob
        return batch.reward + batch.discount * ~batch.terminated * q

    def _update_critics(self, x: Tensor, action: Tensor, target: Tensor, weight: Tensor) -> None:
        q = self.critics(critic_input(self.actor, x, action))
        loss = ((q - target).square() * weight).mean(-1)
        self._step("critics", loss.sum())  # the critics share no parameters, so a sum trains each on its own
        self._averages["targets"].update(self._settings.target_rate)
        self._newest |= {"critic_loss": loss.detach(), "q": q.detach(), "target": target}
        self._used = weight

    def _update_actor(self, x: Tensor, batch: TensorBatch) -> Tensor:
        """Returns log pi of the drawn actions, shape (n,), without gradient."""
        action, log_prob = self._draw(x)
        q = self.critics(critic_input(self.actor, x, action), frozen=True).mean(0)
        loss = (self.log_alpha.detach().exp() * log_prob - q).mean()
        if self._settings.cloning:
            imitation = self.actor.imitation_loss(x, self.actor.scale_action(batch.action), cloned_steps(batch))
            loss = loss + self._settings.cloning * (imitation * is_cloned(batch)).mean()
        self._step("actor", loss)
        self._averages["policy"].update(self._settings.acting_rate)
        self._newest |= {"actor_loss": loss.detach(), "log_prob": log_prob.detach()}
        return log_prob.detach()

    def _step(self, name: str, loss: Tensor) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self._trained[name], self._settings.gradient_norm_max)
        optimizer.step()

    def _draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drawn: tuple[Tensor, Tensor] = self.actor.draw(x, torch.randn(len(x), self.actor.action_size, device=x.device))
        return drawn

    def scalars(self) -> dict[str, float]:
        """See `Algorithm.scalars`."""
        means = {name: float(value.mean()) for name, value in self._newest.items()}
        if "log_prob" in means:
            means["entropy"] = -means.pop("log_prob")
        return means | {"temperature": float(self.log_alpha.detach().exp())} if means else {}

    def td_errors(self) -> Tensor:
        """See `TdErrors`: `mean_errors`; NaN while updates clone."""
        if "q" not in self._newest:
            return self._unknown_errors
        return mean_errors(self._newest["q"], self._newest["target"], self._used)


def is_cloned(batch: TensorBatch) -> Tensor:
    """Returns which samples of `batch` people acted in with a recorded action, bool (n,); films have no weight."""
    return by_people(batch) & (batch.weight > 0)


def by_people(batch: TensorBatch) -> Tensor:
    """Returns in which samples of `batch` people showed what to do, bool (n,); of chunks, the first step counts.

    A way back along the path, by a person or the robot itself, is no example of the task, nor is a failure by hand.
    """
    if batch.phase is None:
        return torch.ones_like(batch.terminated)
    shown = _is_shown(batch, batch.phase)
    return shown[:, 0] if shown.dim() > 1 else shown


def cloned_steps(batch: TensorBatch) -> Tensor | None:
    """Returns which steps of chunks are cloned, bool (n, H): those before the person hands back; else `batch.mask`."""
    if batch.mask is None or batch.phase is None or batch.phase.dim() == 1:
        return batch.mask
    return (batch.mask & _is_shown(batch, batch.phase)).cumprod(1).bool()


def _is_shown(batch: TensorBatch, phase: Tensor) -> Tensor:
    by_people = (phase == Phase.TELEOP) | (phase == Phase.CORRECTION)
    return by_people if batch.failed_by_hand is None else by_people & ~batch.failed_by_hand
