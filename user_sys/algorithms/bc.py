"""BC: behaviour cloning. The policy imitates recorded actions by supervised learning (Pomerleau, "ALVINN", 1988).

The policy defines the loss l(phi; s, a) of an action or a chunk of actions, scaled to [-1, 1]
(`user_sys.policies.networks`, `user_sys.policies.flow`):

    L(phi) = mean w l(phi; s, a + noise)
    l      = |tanh mu(s) - a|^2, and the negative log-likelihood of the deviation             squashed Gaussian
    l      = |v(x_t, t, s) - (a - x_0)|^2,   x_0 ~ N(0, 1), t ~ U(0, 1), x_t = (1 - t) x_0 + t a    flow matching

A chunk ends with the episode, and where the source of control changes. The setting `steps` selects the imitated steps;
by default those of experts and people, in demonstrations and online episodes. "successes" is filtered behaviour
cloning. A way back along the path (phase RECOVERY) is no example of the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hal.spec import RobotSpec
from user_sys.algorithms.actor_critic import MovingAverage
from user_sys.algorithms.algorithm import (
    Algorithm,
    ChunkPolicy,
    GaussianPolicy,
    ImitationPolicy,
    TensorBatch,
    TrainingData,
    refuse_steered,
)
from user_sys.algorithms.distributed import clip_gradients, is_divided
from user_sys.errors import ConfigError
from user_sys.policies.flow import FlowNetwork
from user_sys.policies.trainable import shared_copy
from user_sys.replay.batches import BatchSpec
from user_sys.replay.selectors import INTERVENTION_PHASES, ROLES, MixturePart, PhaseName

ImitatedSteps = Literal["demonstrations", "interventions", "successes"]
IMITATED_PHASES: tuple[PhaseName, ...] = ("policy", *INTERVENTION_PHASES)


@dataclass(frozen=True)
class BcSettings:
    """The settings of behaviour cloning.

    Attributes:
        steps: which steps are imitated: demonstrations, interventions of people, and successes (successful online
            episodes).
        learning_rate: of Adam.
        acting_rate: rate at which the published weights follow the trained ones; 1 publishes these, without a copy.
        action_noise: standard deviation of noise on the imitated actions, scaled to [-1, 1]. Reinforcement learning
            that starts from this policy needs some spread.
        gradient_norm_max: maximum norm of the gradient.
    """

    steps: tuple[ImitatedSteps, ...] = ("demonstrations", "interventions")
    learning_rate: float = 1e-3
    acting_rate: float = 0.01
    action_noise: float = 0.0
    gradient_norm_max: float = 10.0

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError(f"steps is empty; list some of {', '.join(get_args(ImitatedSteps))}")
        if not 0 < self.acting_rate <= 1 or self.learning_rate <= 0 or self.action_noise < 0:
            raise ConfigError(
                f"acting_rate is {self.acting_rate}, learning_rate {self.learning_rate}, action_noise "
                f"{self.action_noise}; set them within (0, 1], above 0, and not below 0"
            )


class Bc(Algorithm):
    """See the module. It trains a `GaussianPolicy`, a `ChunkPolicy` or an `ImitationPolicy`, which has its own loss."""

    settings = BcSettings
    actor: Any  # a `GaussianPolicy`, `ChunkPolicy` or `ImitationPolicy`, and a submodule

    def __init__(self, settings: BcSettings, policy: nn.Module, spec: RobotSpec) -> None:
        """See `Algorithm`."""
        super().__init__(settings, policy, spec)
        refuse_steered(policy, "bc and hg_dagger")
        if not isinstance(policy, (GaussianPolicy, ChunkPolicy, ImitationPolicy)):
            raise ConfigError("learner.algorithm: this policy cannot imitate; use mlp, cnn, flow or lerobot")
        if isinstance(policy, ImitationPolicy) and settings.action_noise:
            raise ConfigError("learner.options.action_noise has no effect on a policy with its own loss; remove it")
        self._settings = settings
        self.actor = policy
        self.policy = policy if settings.acting_rate == 1 else shared_copy(policy).requires_grad_(False)
        self._trained = [each for each in self.actor.parameters() if each.requires_grad]
        self._average = MovingAverage(self.policy, self.actor)
        fused = not any(map(is_divided, self._trained))  # torch fuses no divided tensors with others
        self.optimizers = {"actor": torch.optim.Adam(self._trained, settings.learning_rate, fused=fused)}
        self._loss: Tensor | None = None

    @property
    def _delayed(self) -> FlowNetwork | None:
        return self.actor if isinstance(self.actor, FlowNetwork) else None

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`."""
        length = getattr(self.actor, "chunk_length", 0)
        length = self._delayed.window_length if self._delayed else length
        vectors = self._delayed is not None and self._delayed.correction is not None
        return TrainingData(
            lambda n_step: BatchSpec(chunk_length=length, within_phase=True, step_vectors=vectors),
            self.actor.features,
            self.actor.cameras,
            mixture=self.mixture(),
            mixture_settings=("steps",),
            phases=IMITATED_PHASES,
        )

    def mixture(self) -> tuple[MixturePart, ...]:
        """See `TrainingData.mixture`."""
        return (MixturePart(tuple(ROLES[each] for each in self._settings.steps)),)

    def update(self, batch: TensorBatch, number: int) -> None:
        """See `Algorithm.update`."""
        loss, added = self._imitation_losses(batch)
        optimizer = self.optimizers["actor"]
        optimizer.zero_grad()
        ((loss * batch.weight).mean() + added).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        clip_gradients(self._trained, self._settings.gradient_norm_max)
        optimizer.step()
        is_mean = number >= self.actor.frozen_from  # before, both encoders must be equal
        self._average.update(self._settings.acting_rate if is_mean else 1.0)
        self._loss = loss.detach()

    def _imitation_losses(self, batch: TensorBatch) -> tuple[Tensor, Tensor | float]:
        """Returns l, (n,), and the loss of what corrects chunks on the robot, if the policy has that."""
        action, mask, delayed = batch.action, batch.mask, self._delayed
        if isinstance(self.actor, ImitationPolicy):
            assert mask is not None  # a batch of chunks has it
            return self.actor.batch_loss(batch.observation, batch.instructions(), action, mask), 0.0
        observation: Mapping[str, Tensor] = batch.observation
        if delayed is not None and mask is not None:
            observation, action, mask = delayed.imitated(observation, action, mask)
        exact = self.actor.scale_action(action)
        context = self.actor.encode(observation)
        noisy = exact + self._settings.action_noise * torch.randn_like(exact)
        loss: Tensor = self.actor.imitation_loss(context, noisy, mask)
        if delayed is None or delayed.correction is None or mask is None:
            return loss, 0.0
        return loss, delayed.correction_loss(batch.steps, context, exact, mask).mean()

    def scalars(self) -> dict[str, float]:
        """See `Algorithm.scalars`."""
        return {} if self._loss is None else {"imitation_loss": float(self._loss.mean())}
