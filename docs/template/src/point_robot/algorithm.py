"""An algorithm: behaviour cloning by least squares, in full."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hal.spec import RobotSpec
from point_robot.network import TanhNetwork
from user_sys.algorithms.algorithm import Algorithm, TensorBatch, TrainingData
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError
from user_sys.replay.batches import BatchSpec
from user_sys.replay.selectors import MixturePart, StepFilter


@dataclass(frozen=True)
class CloningSettings:
    """`learning_rate`: of Adam."""

    learning_rate: float = 3e-3


class Cloning(Algorithm):
    """Minimises the mean of |policy(s) - a|^2 over the steps of demonstrations, with scaled actions."""

    settings = CloningSettings

    def __init__(self, settings: CloningSettings, policy: nn.Module, spec: RobotSpec) -> None:
        super().__init__(settings, policy, spec)
        if not isinstance(policy, TanhNetwork):
            raise ConfigError("learner.algorithm: point-cloning trains the policy point-tanh only; set policy.kind")
        self._network = policy
        self.optimizers = {"policy": torch.optim.Adam(policy.parameters(), settings.learning_rate)}
        self._loss: Tensor | None = None

    @property
    def data(self) -> TrainingData:
        demonstrations = MixturePart((StepFilter(sources=(EpisodeSource.DEMO,)),))
        return TrainingData(lambda n_step: BatchSpec(), self._network.features, mixture=(demonstrations,))

    def update(self, batch: TensorBatch, number: int) -> None:
        error = self._network(batch.observation) - self._network.scale_action(batch.action)
        loss = (batch.weight * error.square().mean(-1)).mean()
        self.optimizers["policy"].zero_grad()
        loss.backward()
        self.optimizers["policy"].step()
        self._loss = loss.detach()

    def scalars(self) -> dict[str, float]:
        return {} if self._loss is None else {"cloning_loss": float(self._loss)}
