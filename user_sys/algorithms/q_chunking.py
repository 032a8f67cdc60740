"""Q-chunking: actor-critic learning over chunks of actions, after Li, Zhou and Levine, "Reinforcement Learning with
Action Chunking", NeurIPS 2025 (arXiv 2507.07969), section 4, in the variant QC-FQL. Its policy is that of Park, Li and
Levine, "Flow Q-Learning", ICML 2025 (arXiv 2502.02538), algorithm 1.

The critic values a chunk a = (a_t, ..., a_{t+H-1}), so that its backup over H steps is unbiased. A behaviour flow v_xi
imitates the recorded chunks. The policy mu_psi maps noise to a chunk in one step. It maximises the critic and stays
close to the behaviour flow, which keeps its exploration coherent in time:

    y        = sum_{k<H} gamma^k r_{t+k} + gamma^H (1 - terminated) mean_i Q_theta'_i(s_{t+H}, mu_psi(s_{t+H}, z))
    L(theta) = sum_i w (y - Q_theta_i(s_t, a))^2
    L(xi)    = |v_xi(x_u, u, s_t) - (a - z)|^2,   u ~ U(0, 1),  x_u = (1 - u) z + u a
    L(psi)   = -lambda mean_i Q_theta_i(s_t, mu_psi(s_t, z)) + alpha |mu_psi(s_t, z) - f_xi(s_t, z)|^2
    theta'  <- theta' + rho (theta - theta')

z ~ N(0, 1); f_xi integrates v_xi from z in `behaviour_steps` Euler steps; lambda = 1 / mean |Q|. The best-of-N variant
would need the critic at the robot and N chunks for each target; one distilled step needs neither. A chunk that ends
with the episode's termination counts; a chunk that is cut off otherwise does not train the critic.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hal.spec import RobotSpec
from user_sys.algorithms.actor_critic import CriticEnsemble, MovingAverage, critic_input, mean_errors
from user_sys.algorithms.algorithm import (
    Algorithm,
    ChunkPolicy,
    TensorBatch,
    TrainingData,
    refuse_cloning,
    refuse_delay_training,
)
from user_sys.errors import ConfigError
from user_sys.policies.gated_flow import refuse_gated
from user_sys.policies.trainable import shared_copy
from user_sys.replay.batches import BatchSpec


@dataclass(frozen=True)
class QChunkingSettings:
    """The settings of Q-chunking. The policy's `chunk_length` is H.

    Attributes:
        critic_hidden: widths of the critics' hidden layers.
        critics: size of the ensemble.
        discount: gamma per control period.
        target_rate: rho, the rate at which target critics follow.
        learning_rate: of policy, behaviour flow and critics (Adam).
        behaviour_steps: Euler steps of the behaviour flow.
        distillation: alpha, the weight of staying close to the behaviour flow.
        acting_rate: rate at which the published weights follow the policy; 1 publishes the policy itself.
        gradient_norm_max: maximum norm of each network's gradient.
    """

    critic_hidden: tuple[int, ...] = (256, 256)
    critics: int = 4
    discount: float = 0.97
    target_rate: float = 0.005
    learning_rate: float = 1e-3
    behaviour_steps: int = 8
    distillation: float = 3.0
    acting_rate: float = 0.01
    gradient_norm_max: float = 10.0

    def __post_init__(self) -> None:
        if self.critics < 1 or self.behaviour_steps < 1 or self.distillation < 0:
            raise ConfigError(
                f"critics is {self.critics}, behaviour_steps {self.behaviour_steps}, distillation {self.distillation}; "
                "set the first two to at least 1 and the last not below 0"
            )
        if not 0 < self.discount < 1 or not self.critic_hidden or min(self.critic_hidden) < 1:
            raise ConfigError(
                f"discount is {self.discount} and critic_hidden {list(self.critic_hidden)}; set the first between 0 "
                "and 1, and list one or more widths above 0"
            )


class QChunking(Algorithm):
    """See the module. It trains a `ChunkPolicy` that acts in one step: ``policy.options: {flow_steps: 1}``."""

    settings = QChunkingSettings
    actor: Any  # mu, a `ChunkPolicy` and a submodule; its encoder serves all networks
    behaviour: Any  # v, a `ChunkPolicy` and a submodule

    def __init__(self, settings: QChunkingSettings, policy: nn.Module, spec: RobotSpec) -> None:
        """See `Algorithm`."""
        super().__init__(settings, policy, spec)
        refuse_delay_training(policy, "q_chunking")
        refuse_gated(policy, "q_chunking")
        if getattr(policy, "prefix_max", 0):  # the policy imitates no chunks, so it would not learn to continue them
            raise ConfigError(
                "policy.options: q_chunking does not train prefix_max: leave it out, or use bc, hg_dagger or recap"
            )
        if not isinstance(policy, ChunkPolicy) or policy.flow_steps != 1:
            raise ConfigError(
                "learner.algorithm: q_chunking needs a policy that draws chunks in one step, such as "
                "policy: {kind: flow, options: {flow_steps: 1}}"
            )
        if policy.frozen_from < 0:  # else they train the encoder, by the critics' loss
            refuse_cloning(policy, "q_chunking")
        self._settings = settings
        self.actor = policy
        self.policy = shared_copy(policy).requires_grad_(False)
        self.behaviour = shared_copy(policy)
        self.behaviour.encoder.requires_grad_(False)  # not used
        self._shape = (self.actor.chunk_length, self.actor.action_size)
        inputs = self.actor.observation_size + self._shape[0] * self._shape[1]
        self.critics = CriticEnsemble(inputs, settings.critic_hidden, settings.critics)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        encoder = [each for each in self.actor.encoder.parameters() if each.requires_grad]
        of_encoder = set(map(id, encoder))
        self._trained: dict[str, list[Tensor]] = {
            "actor": [p for p in self.actor.parameters() if p.requires_grad and id(p) not in of_encoder],
            "behaviour": [each for each in self.behaviour.parameters() if each.requires_grad],
            "critics": [*self.critics.parameters(), *encoder],
        }
        self.optimizers = {
            name: torch.optim.Adam(parameters, settings.learning_rate, fused=True)
            for name, parameters in self._trained.items()
        }
        self._averages = {
            "targets": MovingAverage(self.targets, self.critics),
            "policy": MovingAverage(self.policy, self.actor),
        }
        self._newest: dict[str, Tensor] = {}
        self._used = torch.empty(0)

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`: shares of demonstrations and online steps are by `learner.demo_fraction`."""
        length = self.actor.chunk_length
        chunks = BatchSpec(n_step=length, discount=self._settings.discount, chunk_length=length)
        return TrainingData(lambda n_step: chunks, self.actor.features, self.actor.cameras)

    def update(self, batch: TensorBatch, number: int) -> None:
        """See `Algorithm.update`. `batch` holds chunks."""
        assert batch.mask is not None  # a batch with chunks has one
        x, chunk = self.actor.encode(batch.observation), self.actor.scale_action(batch.action)
        self._update_critics(x, chunk, batch)
        x = x.detach()
        flow_loss = (self.behaviour.imitation_loss(x, chunk, batch.mask) * batch.weight).mean()
        self._step("behaviour", flow_loss)
        self._update_actor(x)
        is_mean = number >= self.actor.frozen_from  # before, both encoders must be equal
        self._averages["policy"].update(self._settings.acting_rate if is_mean else 1.0)
        self._newest["flow_loss"] = flow_loss.detach()

    def _update_critics(self, x: Tensor, chunk: Tensor, batch: TensorBatch) -> None:
        assert batch.mask is not None  # as checked
        with torch.no_grad():
            following = self.actor.encode(batch.next_observation)
            after = self._act(following).clamp(-1.0, 1.0)
            value = self.targets(critic_input(self.actor, following, after.flatten(1))).mean(0)
            target = batch.reward + batch.discount * ~batch.terminated * value
            used = batch.weight * (batch.mask[:, -1] | batch.terminated)
        q = self.critics(critic_input(self.actor, x, chunk.flatten(1)))
        loss = ((q - target).square() * used).mean(-1)
        self._step("critics", loss.sum())  # the critics share no parameters, so a sum trains each on its own
        self._averages["targets"].update(self._settings.target_rate)
        self._newest |= {"critic_loss": loss.detach(), "q": q.detach(), "target": target}
        self._used = used

    def _update_actor(self, x: Tensor) -> None:
        noise = torch.randn(len(x), *self._shape, device=x.device)
        with torch.no_grad():
            behaviour = self.behaviour.sample(x, noise, steps=self._settings.behaviour_steps)
        chunk = self._act(x, noise)
        q = self.critics(critic_input(self.actor, x, chunk.clamp(-1.0, 1.0).flatten(1)), frozen=True).mean(0)
        distance = (chunk - behaviour).square().mean((1, 2))
        scale = q.detach().abs().mean().clamp(min=1e-3)
        self._step("actor", (self._settings.distillation * distance - q / scale).mean())
        self._newest |= {"distance": distance.detach(), "actor_q": q.detach()}

    def _act(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns mu(s, z), (n, H, a), before it is clamped: `ChunkPolicy.sample` in one step."""
        noise = torch.randn(len(x), *self._shape, device=x.device) if noise is None else noise
        chunk: Tensor = noise + self.actor.velocity(noise, torch.zeros(len(x), device=x.device), x)
        return chunk

    def _step(self, name: str, loss: Tensor) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self._trained[name], self._settings.gradient_norm_max)
        optimizer.step()

    def scalars(self) -> dict[str, float]:
        """See `Algorithm.scalars`."""
        return {name: float(value.mean()) for name, value in self._newest.items()}

    def td_errors(self) -> Tensor:
        """See `TdErrors`: `mean_errors`. Raises KeyError before the first update."""
        return mean_errors(self._newest["q"], self._newest["target"], self._used)
