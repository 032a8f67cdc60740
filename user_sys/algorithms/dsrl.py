"""DSRL: reinforcement learning over the noise of a frozen policy, after Wagenmaker et al., "Steering Your Diffusion
Policy with Latent Space Reinforcement Learning", CoRL 2025 (arXiv 2506.15799), algorithm 1 (DSRL-NA).

A frozen flow or diffusion policy f maps noise w to a chunk of actions. A critic Q^A of actions learns from any recorded
step, those of people included. A critic Q^W of noise learns from Q^A, at noise that need not have been executed ("noise
aliasing"). The policy pi(w|s) is trained by SAC on Q^W:

    y        = R + gamma^H (1 - terminated) min_{i in Z} Q^A_theta'_i(s', f(s', w')),     w' ~ pi(.|s')
    L(theta) = sum_i (y - Q^A_theta_i(s, a))^2
    L(psi)   = sum_i (mean_j Q^A_theta_j(s, f(s, w)) - Q^W_psi_i(s, w))^2,     w ~ N(0, 1) or w ~ pi(.|s), half of each
    L(phi)   = alpha log pi_phi(w|s) - mean_i Q^W_psi_i(s, w),   w ~ pi_phi(.|s)

H are the executed actions of a chunk, and R their discounted rewards. The noise is bounded (`policies.steered`), and a
Gaussian is cut off at the bound. f gets no gradient. No noise is recorded: the paper's other form, DSRL-SAC, would
learn from its own steps only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hal.spec import RobotSpec
from user_sys.algorithms.actor_critic import CriticEnsemble, critic_input
from user_sys.algorithms.algorithm import TensorBatch, TrainingData
from user_sys.algorithms.sac import Sac, SacSettings
from user_sys.errors import ConfigError
from user_sys.policies.steered import SteeredNetwork
from user_sys.replay.batches import BatchSpec


@dataclass(frozen=True)
class DsrlSettings(SacSettings):
    """The settings of DSRL: those of SAC with other defaults. `cloning` has no effect.

    In the first `critics_first` updates only the critics train, and robots act about as the frozen policy does: critics
    that know demonstrations alone value every action.
    """

    critics: int = 10
    layer_norm: bool = True
    initial_temperature: float = 0.01
    entropy_per_action: float = -0.5
    acting_rate: float = 0.01
    backup_entropy: bool = False


class Dsrl(Sac):
    """See the module. It trains the policy `steered`."""

    settings = DsrlSettings

    def __init__(self, settings: DsrlSettings, policy: nn.Module, spec: RobotSpec) -> None:
        """See `Algorithm`."""
        super().__init__(settings, policy, spec)
        noise = self.actor.action_size
        self._target_entropy = settings.entropy_per_action * noise
        inputs = self.actor.observation_size + noise
        self.noise_critics = CriticEnsemble(
            inputs, settings.critic_hidden, settings.critics, layer_norm=settings.layer_norm
        )
        self._trained["noise_critics"] = list(self.noise_critics.parameters())
        self.optimizers["noise_critics"] = torch.optim.Adam(
            self._trained["noise_critics"], settings.learning_rate, fused=True
        )

    def _require(self, policy: nn.Module) -> int:
        if not isinstance(policy, SteeredNetwork):
            raise ConfigError(
                "learner.algorithm: dsrl needs the policy steered, such as "
                "policy: {kind: steered, options: {base: flow}} with learner.initial_policy: RUN"
            )
        return policy.executed * len(policy.robot_action.centre)

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`. The shares of demonstrations and online steps are by `learner.demo_fraction`."""
        length, (features, cameras) = self.actor.executed, self.actor.reads
        chunks = BatchSpec(n_step=length, discount=self._settings.discount, chunk_length=length)
        return replace(super().data, batches=lambda n_step: chunks, features=features, cameras=cameras, mixture=())

    def update(self, batch: TensorBatch, number: int) -> None:
        """See `Algorithm.update`. `batch` holds chunks."""
        assert batch.mask is not None  # a batch of chunks has it
        x = self.actor.encode(batch.observation)
        used = batch.weight * (batch.mask[:, -1] | batch.terminated)
        executed = self.actor.scale_executed(batch.action).flatten(1)
        self._update_critics(x, executed, self._target(batch), used)
        x = x.detach()
        if number % self._settings.actor_period == 0:
            self._distil(x, batch)
            if number >= self._settings.critics_first:
                log_prob = self._update_actor(x, batch)
                self._step("temperature", -self.log_alpha.exp() * (log_prob.mean() + self._target_entropy))

    @torch.no_grad()
    def _target(self, batch: TensorBatch) -> Tensor:
        following = self.actor.encode(batch.next_observation)
        noise, _ = self._draw(following)
        action = self._executed(batch.next_observation, batch, noise, following)
        subset = torch.randperm(self._settings.critics, device=following.device)[: self._settings.target_critics]
        q: Tensor = self.targets(critic_input(self.actor, following, action), subset=subset).amin(0)
        return batch.reward + batch.discount * ~batch.terminated * q

    def _executed(self, observation: dict[str, Tensor], batch: TensorBatch, noise: Tensor, x: Tensor) -> Tensor:
        """Returns f(s, w), scaled to [-1, 1], (n, H a). `x`: the encoded observation."""
        chunks = self.actor.chunks(observation, batch.instructions(), noise, x)
        return self.actor.scale_executed(chunks).flatten(1)  # type: ignore[no-any-return]  # the actor is Any

    def _distil(self, x: Tensor, batch: TensorBatch) -> None:
        """Makes an update of Q^W."""
        with torch.no_grad():
            noise, _ = self._draw(x)
            # Every second sample: demonstrations and online steps lie one after the other in a batch.
            noise[::2] = self.actor.scale_action(torch.randn_like(noise[::2]))
            action = self._executed(batch.observation, batch, noise, x)
            target = self.critics(critic_input(self.actor, x, action)).mean(0)
        error = self.noise_critics(critic_input(self.actor, x, noise)) - target
        loss = error.square().mean(-1)
        self._step("noise_critics", loss.sum())
        self._newest |= {"noise_critic_loss": loss.detach()}

    def _update_actor(self, x: Tensor, batch: TensorBatch) -> Tensor:
        noise, log_prob = self._draw(x)
        q = self.noise_critics(critic_input(self.actor, x, noise), frozen=True).mean(0)
        loss = (self.log_alpha.detach().exp() * log_prob - q).mean()
        self._step("actor", loss)
        self._averages["policy"].update(self._settings.acting_rate)
        self._newest |= {"actor_loss": loss.detach(), "log_prob": log_prob.detach(), "noise": noise.detach().abs()}
        return log_prob.detach()
