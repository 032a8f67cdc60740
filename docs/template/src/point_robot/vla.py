"""A vision-language-action policy: `bc` and `hg_dagger` train it by its own loss, and it acts in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hal.spec import RobotSpec
from user_sys.policies.scaling import camera_specs, feature_specs
from user_sys.policies.torch_policy import PromisedActions, TorchPolicy
from user_sys.policies.trainable import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class VlaSettings:
    """`cameras`: empty for all. `execute`: actions of a chunk before the next one; 0: all. `train`: such as LoRA."""

    cameras: tuple[str, ...] = ()
    chunk_length: int = 8
    execute: int = 0
    width: int = 64
    train: TrainSettings = field(default_factory=TrainSettings)


class VlaPolicy(TorchPolicy):
    """The base class sends it the pictures of `cameras`, and knows by `train` what is published."""

    settings = VlaSettings

    @classmethod
    def make_module(
        cls, spec: RobotSpec, *, settings: VlaSettings | None = None, features: Sequence[str] = ()
    ) -> nn.Module:
        from point_robot.network import VlaNetwork

        options = settings or VlaSettings()
        cameras = camera_specs(spec, cls.select_cameras(spec, options))
        return VlaNetwork(feature_specs(spec, features), cameras, spec.action, options.chunk_length, options.width)

    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        actions = self.module.unscale_action(self.module(observation, self.sentences))
        return actions, actions.new_full(actions.shape[:2], float("nan"))
