"""A convolutional network or vision transformer of the library timm, with pretrained weights that never train."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from hal.errors import install_hint
from user_sys.errors import ConfigError

SUFFIX = ".safetensors"  # a pickled file could run code


class TimmBackbone(nn.Module):
    """Pictures (n, 3, h, w) in [-1, 1] to the model's last map of features (n, c, h', w'); see the module."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: str, file: Path, height: int, width: int) -> None:
        """Args:
            model: name of timm's, such as ``resnet18``.
            file: its weights.

        Raises:
            ConfigError: timm is not installed, has no such model, or the file or the picture's size does not fit it.
        """
        super().__init__()
        if file.suffix != SUFFIX or not file.is_file():
            raise ConfigError(f"policy.options.timm_file: {file} is not a {SUFFIX} file")
        try:
            import timm
        except ImportError:
            raise ConfigError(
                f"policy.options.backbone is timm, and it is not installed: {install_hint('timm')}"
            ) from None
        if not timm.is_model(model):
            raise ConfigError(f"policy.options.timm_model: timm {timm.__version__} has no model {model!r}")
        known = timm.get_pretrained_cfg(model)
        fixed = {"img_size": (height, width)} if known is not None and known.fixed_input_size else {}
        try:
            self.model = timm.create_model(
                model,
                pretrained=True,
                pretrained_cfg_overlay={"file": str(file)},
                features_only=True,
                out_indices=(-1,),
                **fixed,
            )
            self.eval().requires_grad_(False)
            self.model(torch.zeros(1, 3, height, width))
        except Exception as error:  # timm passes on what its models and the file's reader raise
            reason = (str(error).splitlines() or [""])[0][:200]
            raise ConfigError(
                f"policy.options: the timm model {model} cannot read {file}, or pictures of {width}x{height}: {reason}"
            ) from None
        mean, std = (torch.tensor(self.model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        self.register_buffer("mean", 2 * mean - 1, persistent=False)
        self.register_buffer("std", 2 * std, persistent=False)

    def train(self, mode: bool = True) -> Self:
        """Stays in evaluation mode, so that its batch norms keep their statistics."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.model((x - self.mean) / self.std)[-1]
        return features
