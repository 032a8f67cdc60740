"""The settings of RLPD, in a module without torch so that reading a configuration stays fast."""

from __future__ import annotations

from dataclasses import dataclass

from user_sys.errors import ConfigError


@dataclass(frozen=True)
class RlpdConfig:
    """The settings of RLPD.

    Attributes:
        actor_hidden, critic_hidden: widths of the hidden layers.
        critics: E, the size of the ensemble.
        target_critics: Z, the number of critics in a target.
        discount: gamma per control period.
        target_rate: rho, the rate at which target critics follow.
        learning_rate: of actor, critics and temperature (Adam).
        actor_period: G, critic updates per actor update.
        initial_temperature: initial alpha.
        entropy_per_action: target entropy in nats, per element of the action scaled to [-1, 1].
        acting_rate: rate at which the published weights follow the actor. Single actors are sometimes bad, so robots
            get
            the mean of about the last hundred (Polyak and Juditsky, 1992). 1 publishes the actor itself.
        backup_entropy: y includes the entropy of the next action.
        gradient_norm_max: maximum norm of each network's gradient.
    """

    actor_hidden: tuple[int, ...] = (256, 256)
    critic_hidden: tuple[int, ...] = (128, 128)
    critics: int = 10
    target_critics: int = 2
    discount: float = 0.97
    target_rate: float = 0.005
    learning_rate: float = 1e-3
    actor_period: int = 2
    initial_temperature: float = 0.01
    entropy_per_action: float = -0.5
    acting_rate: float = 0.01
    backup_entropy: bool = False
    gradient_norm_max: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.target_critics <= self.critics:
            raise ConfigError(f"target_critics is {self.target_critics}; set it between 1 and critics={self.critics}")
        if not 0 < self.discount < 1:
            raise ConfigError(f"discount is {self.discount}; set it between 0 and 1, both excluded")
        if not self.critic_hidden or min(self.critic_hidden) < 1 or self.actor_period < 1:
            raise ConfigError(
                f"critic_hidden is {self.critic_hidden} and actor_period {self.actor_period}; set both above 0"
            )
