"""A policy: a small network over the observation vectors, with noise when it explores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal.spec import RobotSpec
from user_sys.policies.scaling import feature_specs
from user_sys.policies.torch_policy import PromisedActions, TorchPolicy

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class TanhSettings:
    """`hidden`: width of the hidden layer. `noise`: standard deviation of exploration, in scaled actions."""

    hidden: int = 32
    noise: float = 0.01


class TanhPolicy(TorchPolicy):
    """The base class acts with `make_module`'s module, refuses weights that do not fit, and explores before any."""

    settings = TanhSettings

    @classmethod
    def make_module(
        cls, spec: RobotSpec, *, settings: TanhSettings | None = None, features: Sequence[str] = ()
    ) -> nn.Module:
        from point_robot.network import TanhNetwork  # torch, which a robot's session does not import

        return TanhNetwork(feature_specs(spec, features), spec.action, (settings or TanhSettings()).hidden)

    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        mean = self.module(observation)
        noise = self.options.noise * self.noise(tuple(mean.shape), deterministic=deterministic)
        actions = self.module.unscale_action((mean + noise).clamp(-1, 1))
        return actions[:, None], mean.new_full((len(mean), 1), float("nan"))  # chunks of one action; no density
