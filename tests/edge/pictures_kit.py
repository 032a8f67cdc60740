"""An installed package with policies that read pictures: each moves the fake robot's red point to the green goal."""

from __future__ import annotations

from pathlib import Path

MODULE = """
import time
from dataclasses import dataclass

import numpy as np

from hal.spec import IMAGES
from robots.fake import GRIPPER_M, HALF_RANGE_M, STEP_M
from user_sys.policies.policy import AGE_SUFFIX, ActionChunk, TrainablePolicy

@dataclass(frozen=True)
class Settings:
    cameras: tuple[str, ...] = ()
    delay_s: float = 0.0
    shape: tuple[int, ...] = ()

class Pixels(TrainablePolicy):
    "Acts without weights: towards the goal in the picture, at its height."
    settings = Settings
    acts_without_torch = True

    def __init__(self, spec, *, settings=None, features=(), seed=0, device="cpu"):
        self._settings = settings or Settings()
        self.cameras = self.select_cameras(spec, self._settings)

    def act(self, observation, sentence, *, deterministic, context=None):
        time.sleep(self._settings.delay_s)
        picture = observation[IMAGES + self.cameras[0]]
        age_s = observation[IMAGES + self.cameras[0] + AGE_SUFFIX]
        assert age_s.shape == (1,) and age_s.dtype == np.float32 and age_s[0] >= 0
        assert self._settings.shape in ((), picture.shape), picture.shape
        places = [np.argwhere(picture[:, :, channel] == 255) for channel in (0, 1)]
        point, goal = (place.mean(0)[::-1] if len(place) else np.zeros(2) for place in places)
        step = np.clip((goal - point) / (picture.shape[0] - 1) * 2 * HALF_RANGE_M, -STEP_M, STEP_M)
        return ActionChunk(np.array([[*step, 0, GRIPPER_M]], np.float32), np.full(1, np.nan, np.float32))

    def load(self, weights):
        pass

    @classmethod
    def make_module(cls, spec, *, settings=None, features=()):
        raise NotImplementedError

class TorchPixels(Pixels):
    acts_without_torch = False

    def act(self, observation, sentence, *, deterministic, context=None):
        import torch
        return super().act(observation, sentence, deterministic=deterministic, context=context)
"""
ENTRY_POINTS = "[user_sys.policies]\npixels = pixels_package:Pixels\ntorch_pixels = pixels_package:TorchPixels\n"


def install_pixel_policies(folder: Path) -> None:
    """Makes `folder`, on the path of modules, offer the policies ``pixels`` and ``torch_pixels``."""
    installed = folder / "pixels_package-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pixels-package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "pixels_package.py").write_text(MODULE)
