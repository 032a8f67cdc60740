"""RECAP: a policy conditioned on its advantage, after Physical Intelligence, "pi*0.6: a VLA That Learns From
Experience", 2025 (arXiv 2511.14759), section IV.

A value network predicts the distribution of the return of an episode over B bins, by cross-entropy (equation 1). The
advantage of a step is its return less the expected one. Steps in the top share of advantages among the policy's own
get the indicator I = 1, and those in which people show the task always do. A flow policy imitates all steps, each under
its indicator. The indicator is dropped at random, so that guidance can exceed the recorded actions (equation 3). A way
back along the path (phase RECOVERY) is no example of the task: it trains the value network alone.

    L(theta) = -sum_b p_b(R_t) log p_theta(b | s_t),     V(s) = sum_b p_theta(b | s) centre_b
    A_t      = R_t - V(s_t)
    I_t      = 1 if A_t > max(epsilon_l, 0) or a person shows it; epsilon_l is the quantile of A for the instruction l
    L(phi)   = flow matching of a_t given (s_t, I_t), with I_t dropped in a share of the samples
    acting   : v = v(.|s) + beta (v(.|s, I = 1) - v(.|s))

The paper has no bound of 0. With few successes the quantile lies among the failures, which are no example. For the same
reason a third of each batch is from demonstrations, a third from successes, and a third from failures: drawn together,
few demonstrations soon are a small part of the positive steps.

p_b(R) divides R between the two nearest bins in proportion. R_t is the discounted sum of rewards up to the end of the
episode, so that of two successes the faster one is better; the paper counts steps. Only finished episodes train.

Advantages are computed here, from the newest value network, and not stored as label columns: no pass over the store is
needed, labels are never older than the network, and a resumption needs no more than the networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hal.spec import RobotSpec
from user_sys.algorithms.actor_critic import MovingAverage, critic_input, value_network
from user_sys.algorithms.algorithm import Algorithm, ChunkPolicy, TensorBatch, TrainingData, refuse_delay_training
from user_sys.algorithms.sac import by_people
from user_sys.episode import Phase
from user_sys.errors import ConfigError
from user_sys.policies.gated_flow import refuse_gated
from user_sys.policies.trainable import shared_copy
from user_sys.replay.batches import BatchSpec
from user_sys.replay.selectors import ROLES, MixturePart, Role

NONE, POSITIVE, NEGATIVE = 0, 1, 2
"""Conditions of the policy: the indicator was dropped, is 1, is 0."""
DRAWN: tuple[Role, ...] = ("demonstrations", "successes", "failures")
"""What a batch has in equal parts."""


@dataclass(frozen=True)
class RecapSettings:
    """The settings of RECAP.

    Attributes:
        bins: B.
        return_min, return_max: the centres of the first and the last bin.
        discount: gamma per control period.
        horizon: steps of the longest episode; a return ends there.
        positive_share: share of the policy's own steps with I = 1, for each instruction.
        dropped_share: share of the samples in which the indicator is dropped.
        value_hidden: widths of the hidden layers of the value network.
        learning_rate: of policy and value network (Adam).
        acting_rate: rate at which the published weights follow the trained ones; 1 publishes these.
        gradient_norm_max: maximum norm of each network's gradient.
    """

    bins: int = 201
    return_min: float = 0.0
    return_max: float = 1.0
    discount: float = 0.97
    horizon: int = 200
    positive_share: float = 0.3
    dropped_share: float = 0.1
    value_hidden: tuple[int, ...] = (256, 256)
    learning_rate: float = 1e-3
    acting_rate: float = 0.01
    gradient_norm_max: float = 10.0

    def __post_init__(self) -> None:
        if self.bins < 2 or self.horizon < 1 or self.return_min >= self.return_max:
            raise ConfigError(
                f"bins is {self.bins}, horizon {self.horizon}, return_min {self.return_min}, return_max "
                f"{self.return_max}; set at least 2 bins, 1 step, and return_min below return_max"
            )
        if not (0 < self.positive_share < 1 and 0 < self.dropped_share < 1 and 0 < self.discount < 1):
            raise ConfigError(
                f"positive_share is {self.positive_share}, dropped_share {self.dropped_share}, discount "
                f"{self.discount}; set them between 0 and 1, both excluded"
            )


class Recap(Algorithm):
    """See the module. It trains a `ChunkPolicy` with conditions: ``policy.options: {conditions: 2, condition: 1}``."""

    settings = RecapSettings
    actor: Any  # a `ChunkPolicy`, and a submodule

    def __init__(self, settings: RecapSettings, policy: nn.Module, spec: RobotSpec) -> None:
        """See `Algorithm`."""
        super().__init__(settings, policy, spec)
        refuse_delay_training(policy, "recap")
        refuse_gated(policy, "recap")
        conditions = getattr(policy, "conditions", None)
        if not isinstance(policy, ChunkPolicy) or conditions is None or conditions.num_embeddings <= NEGATIVE:
            raise ConfigError(
                "learner.algorithm: recap needs a policy with two conditions, such as "
                "policy: {kind: flow, options: {conditions: 2, condition: 1, guidance: 1.5}}"
            )
        if (condition := getattr(policy, "condition", POSITIVE)) != POSITIVE:
            raise ConfigError(
                f"policy.options.condition is {condition}, so robots would act without the indicator that recap "
                f"trains: set it to {POSITIVE}"
            )
        self._settings = settings
        self.actor = policy
        self.policy = shared_copy(policy).requires_grad_(False)
        self.value = value_network(self.actor.observation_size, settings.value_hidden, settings.bins)
        self.register_buffer("centres", torch.linspace(settings.return_min, settings.return_max, settings.bins))
        self._trained: dict[str, list[Tensor]] = {
            "actor": [each for each in self.actor.parameters() if each.requires_grad],
            "value": list(self.value.parameters()),
        }
        self.optimizers = {
            name: torch.optim.Adam(parameters, settings.learning_rate, fused=True)
            for name, parameters in self._trained.items()
        }
        self._average = MovingAverage(self.policy, self.actor)
        self._newest: dict[str, Tensor] = {}

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`."""
        settings = self._settings
        chunks = BatchSpec(settings.horizon, settings.discount, self.actor.chunk_length)
        return TrainingData(
            lambda n_step: chunks,
            self.actor.features,
            self.actor.cameras,
            mixture=tuple(MixturePart((ROLES[each],), 1 / len(DRAWN)) for each in DRAWN),
            finished=True,
        )

    def update(self, batch: TensorBatch, number: int) -> None:
        """See `Algorithm.update`. `batch` holds chunks with the return of their first step."""
        assert batch.mask is not None and batch.phase is not None  # a batch of the learner has them
        x = self.actor.encode(batch.observation)
        logits = self.value(critic_input(self.actor, x.detach()))
        value_loss = F.cross_entropy(logits, self.bins_of(batch.reward))
        advantage = batch.reward - (logits.detach().softmax(-1) * self.centres).sum(-1)
        positive = self.is_positive(advantage, by_people(batch), batch.phase[:, 0] == Phase.POLICY, batch.sentence)
        condition = torch.where(positive, POSITIVE, NEGATIVE)
        dropped = torch.rand(len(condition), device=condition.device) < self._settings.dropped_share
        condition = torch.where(dropped, NONE, condition)
        imitated = (batch.phase == batch.phase[:, :1]) & batch.mask & (batch.phase != Phase.RECOVERY)
        imitated = imitated.cumprod(1).bool()  # a chunk ends where control changes
        action = self.actor.scale_action(batch.action)
        flow_loss = (self.actor.imitation_loss(x, action, imitated, condition) * batch.weight).mean()
        self._step(flow_loss + value_loss)
        is_mean = number >= self.actor.frozen_from  # before, both encoders must be equal
        self._average.update(self._settings.acting_rate if is_mean else 1.0)
        self._newest = {
            "flow_loss": flow_loss.detach(),
            "value_loss": value_loss.detach(),
            "advantage": advantage.mean(),
            "positive_share": positive.float().mean(),
        }

    def bins_of(self, returns: Tensor) -> Tensor:
        """Returns p_b(R) for `returns` (n,), (n, B); returns beyond the bins count as in the first or last one."""
        settings = self._settings
        share = (returns - settings.return_min) / (settings.return_max - settings.return_min)
        place = share.clamp(0.0, 1.0) * (settings.bins - 1)
        bins = torch.arange(settings.bins, device=returns.device)
        return (1 - (place[:, None] - bins).abs()).clamp(min=0.0)

    def is_positive(self, advantage: Tensor, by_person: Tensor, own: Tensor, sentence: Tensor | None) -> Tensor:
        """Returns I for each sample, bool (n,); the quantile is that of the policy's `own` steps in the batch."""
        positive = by_person.clone()
        groups = torch.zeros_like(by_person, dtype=torch.int64) if sentence is None else sentence
        for group in torch.unique(groups):
            among = (groups == group) & own
            if among.any():
                threshold = advantage[among].quantile(1.0 - self._settings.positive_share)
                positive |= among & (advantage > threshold.clamp(min=0.0))
        return positive

    def _step(self, loss: Tensor) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name, optimizer in self.optimizers.items():
            torch.nn.utils.clip_grad_norm_(self._trained[name], self._settings.gradient_norm_max)
            optimizer.step()

    def scalars(self) -> dict[str, float]:
        """See `Algorithm.scalars`."""
        return {name: float(value) for name, value in self._newest.items()}
