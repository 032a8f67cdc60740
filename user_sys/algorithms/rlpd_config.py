"""What can be set about RLPD, apart from `rlpd` so that reading a run's configuration imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from user_sys.errors import ConfigError


@dataclass(frozen=True)
class RlpdConfig:
    """RLPD's settings.

    Attributes:
        actor_hidden, critic_hidden: widths of their hidden layers.
        critics: E, the size of the ensemble.
        target_critics: Z, how many of them make a target.
        discount: gamma, of one control period; batches are made with it.
        target_rate: rho, how fast target critics follow.
        learning_rate: of actor, critics and temperature (Adam).
        actor_period: G, critic updates for each actor update.
        initial_temperature: alpha at the start.
        entropy_per_action: the target entropy, in nats, for each element of the action scaled to [-1, 1].
        acting_rate: how fast the weights that act follow the actor. One actor is good on average and bad now and then;
            robots get the mean of the last hundred or so (Polyak and Juditsky, 1992). 1 publishes the actor itself.
        backup_entropy: whether y includes the entropy of the next action.
        gradient_norm_max: each network's gradient is scaled down to this norm.
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
            raise ConfigError(f"target_critics is {self.target_critics}; it must lie in 1..critics={self.critics}")
        if not 0 < self.discount < 1:
            raise ConfigError(f"discount is {self.discount}; it must lie between 0 and 1")
        if not self.critic_hidden or min(self.critic_hidden) < 1 or self.actor_period < 1:
            raise ConfigError(
                f"critic_hidden {self.critic_hidden} and actor_period {self.actor_period} must be positive"
            )
