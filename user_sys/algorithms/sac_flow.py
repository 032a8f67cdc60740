"""SAC-Flow: soft actor-critic on a flow policy, after Zhang et al., "SAC Flow: Sample-Efficient Reinforcement Learning
of Flow-Based Policies via Velocity-Reparameterized Sequential Modeling", ICLR 2026 (arXiv 2509.25756).

It is SAC (`user_sys.algorithms.sac`) with another policy: a flow with a gated velocity, so that the gradient of the
critic passes all of its steps, and with noise between the steps, so that the density of its path is known
(`user_sys.policies.gated_flow`). A path x_0, ..., x_K draws a chunk of H actions, a = tanh(x_K):

    L(phi)   = alpha log p_phi(x_0, ..., x_K | s) - mean_i Q_theta_i(s, a)
    L(alpha) = -alpha (log p_phi(x_0, ..., x_K | s) + target entropy)

A chunk that is cut off by other than the episode's termination does not train the critics, as in
`user_sys.algorithms.q_chunking`.

The entropy is that of the path: with K = 4, 0 nats per element of the action let x_K vary by 0.17 around the last mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from user_sys.algorithms.algorithm import ChunkPolicy, TensorBatch, TrainingData
from user_sys.algorithms.sac import Sac, SacSettings
from user_sys.errors import ConfigError
from user_sys.policies.gated_flow import GatedFlow
from user_sys.replay.batches import BatchSpec


@dataclass(frozen=True)
class SacFlowSettings(SacSettings):
    """The settings of SAC-Flow: those of SAC with other defaults."""

    critics: int = 10
    layer_norm: bool = True
    actor_period: int = 2
    initial_temperature: float = 0.001  # the entropy of a path has K + 1 parts
    entropy_per_action: float = 0.0
    acting_rate: float = 0.01
    backup_entropy: bool = False


class SacFlow(Sac):
    """See the module. It trains the policies `gated_flow` and, with the option `gated`, `vla`."""

    settings = SacFlowSettings

    def _require(self, policy: nn.Module) -> int:
        if not (isinstance(policy, GatedFlow) and isinstance(policy, ChunkPolicy)):
            raise ConfigError(
                "learner.algorithm: sac_flow needs a gated flow; set policy.kind: gated_flow, or for vla "
                "policy.options.gated: true"
            )
        return policy.chunk_length * policy.action_size

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`. The shares of demonstrations and online steps are by `learner.demo_fraction`."""
        length, discount = self.actor.chunk_length, self._settings.discount
        return replace(
            super().data,
            batches=lambda n_step: BatchSpec(length if length > 1 else n_step, discount, length),
            mixture=(),
        )

    def _critic_weight(self, batch: TensorBatch) -> Tensor:
        assert batch.mask is not None  # a batch of chunks has it
        return batch.weight * (batch.mask[:, -1] | batch.terminated)

    def _draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chunk, log_prob = self.actor.rollout(x, self._noise(x))
        return chunk.flatten(1), log_prob

    def _noise(self, x: Tensor) -> Tensor:
        shape = (self.actor.flow_steps + 1, len(x), self.actor.chunk_length, self.actor.action_size)
        return torch.randn(shape, device=x.device)
