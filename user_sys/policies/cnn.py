"""A squashed Gaussian policy over state vectors and pictures of the robot's cameras.

Each camera has an encoder of its own. Actor-critics train it by the loss of their critics, as DrQ-v2 (Yarats et al.
2021, arXiv 2107.09645). With `pretrain_updates`, learning starts with updates that clone the demonstrations; with
`encoder: frozen` these alone train the encoder, and the learner encodes each stored picture once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from hal.settings import Count, Limit
from hal.spec import CameraSpec, RobotSpec
from user_sys.errors import ConfigError
from user_sys.policies.scaling import Gripper, camera_specs, discrete_gripper, feature_specs
from user_sys.policies.torch_policy import PromisedActions, TorchPolicy
from user_sys.policies.trainable import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from user_sys.policies.networks import PictureEncoder


@dataclass(frozen=True)
class PictureSettings:
    """How a policy reads pictures.

    Attributes:
        cameras: that it reads; empty for all of the robot.
        backbone: small (four convolutions), resnet10 (with group norm, for pictures of 128 pixels and more), or timm
            (a pretrained model of that library, which stays as it is).
        timm_model, timm_file: its name, and its weights as a .safetensors file; policy servers read the file too.
        pooling: softmax (places of features) or embedding (learned maps of places).
        picture_size: length of an encoded picture.
        shift: pixels by which pictures move at random in training; 0 for none.
        encoder: trained, or frozen after `pretrain_updates`.
        pretrain_updates: updates at the start that clone the demonstrations.
        train: which parameters train.
    """

    cameras: tuple[str, ...] = ()
    backbone: Literal["small", "resnet10", "timm"] = "small"
    timm_model: str = ""
    timm_file: Path | None = None
    pooling: Literal["softmax", "embedding"] = "softmax"
    picture_size: Count = 32
    shift: Annotated[int, Meta(ge=0, le=64)] = 2
    encoder: Literal["trained", "frozen"] = "trained"
    pretrain_updates: Limit = 0
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        if self.encoder == "frozen" and not self.pretrain_updates:
            raise ConfigError(
                "encoder is frozen, and nothing trains it: set pretrain_updates above 0, or leave out encoder"
            )
        if {bool(self.timm_model), bool(self.timm_file)} != {self.backbone == "timm"}:
            raise ConfigError(f"backbone is {self.backbone}; timm_model and timm_file belong to timm, which needs both")

    @property
    def frozen_from(self) -> int:
        """Number of the update from which the encoders never change; -1: always trained."""
        return self.pretrain_updates if self.encoder == "frozen" else -1

    def make_encoders(self, spec: RobotSpec, cameras: Sequence[str]) -> dict[str, PictureEncoder]:
        """Builds an encoder for each of `cameras`. Raises ConfigError as `PictureEncoder` and `TimmBackbone`."""
        from user_sys.policies.networks import PictureEncoder

        return {
            camera.name: PictureEncoder(
                camera.height,
                camera.width,
                backbone=self._make_backbone(camera),
                pooling=self.pooling,
                size=self.picture_size,
                shift=self.shift,
            )
            for camera in camera_specs(spec, cameras)
        }

    def _make_backbone(self, camera: CameraSpec) -> nn.Module:
        from user_sys.policies.networks import resnet10, small_backbone

        if self.timm_file is not None:
            from user_sys.policies.timm_backbone import TimmBackbone

            return TimmBackbone(self.timm_model, self.timm_file, camera.height, camera.width)
        return small_backbone() if self.backbone == "small" else resnet10()


@dataclass(frozen=True)
class CnnSettings(PictureSettings):
    """`hidden`: widths of the layers after the encoders. `gripper`: as in `policies.mlp.MlpSettings`."""

    hidden: tuple[int, ...] = (256, 256)
    gripper: Gripper = "continuous"


class CnnPolicy(TorchPolicy):
    """See the module."""

    settings = CnnSettings

    @classmethod
    def make_module(
        cls, spec: RobotSpec, *, settings: CnnSettings | None = None, features: Sequence[str] = ()
    ) -> nn.Module:
        """See `TrainablePolicy.make_module`; a `user_sys.algorithms.algorithm.GaussianPolicy`."""
        from user_sys.policies.networks import GaussianNetwork

        options = settings or CnnSettings()
        return GaussianNetwork(
            feature_specs(spec, features),
            spec.action,
            options.hidden,
            options.make_encoders(spec, cls.select_cameras(spec, options)),
            pretrain_updates=options.pretrain_updates,
            frozen_from=options.frozen_from,
            gripper=discrete_gripper(spec, options.gripper),
        )

    def draw(
        self, observation: Mapping[str, Tensor], *, deterministic: bool, promised: PromisedActions | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `TorchPolicy.draw`; a chunk has one action."""
        x = self.module.encode(observation)
        noise = self.noise((len(x), self.module.action_size), deterministic=deterministic)
        scaled, log_prob = self.module.draw(x, noise)
        if deterministic:
            log_prob = log_prob.fill_(float("nan"))
        return self.module.unscale_action(scaled)[:, None], log_prob[:, None]
