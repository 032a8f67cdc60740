"""RLPD: online reinforcement learning with prior data, after Ball, Smith, Kostrikov and Levine, "Efficient Online
Reinforcement Learning with Offline Data", ICML 2023 (arXiv 2302.02948), algorithm 1.

It is soft actor-critic (`user_sys.algorithms.sac`) with three changes. Batches are half demonstrations and half online
experience. Critics have layer norm. There are E critics, and a random subset of Z makes the target:

    y        = r + gamma (1 - terminated) min_{i in Z} Q_theta'_i(s', a'),   a' ~ pi_phi(.|s')
    L(theta) = sum_i w (y - Q_theta_i(s, a))^2

By default y has no entropy term, as the paper advises for sparse rewards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from user_sys.algorithms.algorithm import TrainingData
from user_sys.algorithms.sac import Sac, SacSettings


@dataclass(frozen=True)
class RlpdSettings(SacSettings):
    """The settings of RLPD: those of SAC with other defaults."""

    critic_hidden: tuple[int, ...] = (128, 128)
    critics: int = 10
    layer_norm: bool = True
    actor_period: int = 2
    initial_temperature: float = 0.01
    entropy_per_action: float = -0.5
    acting_rate: float = 0.01
    backup_entropy: bool = False


class Rlpd(Sac):
    """See the module. It trains policies that are a `GaussianPolicy`."""

    settings = RlpdSettings

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`: the shares of demonstrations and online steps are by `learner.demo_fraction`."""
        return replace(super().data, mixture=())
