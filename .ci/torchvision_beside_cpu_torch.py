"""Lets torchvision's CUDA build be imported beside a torch without CUDA, which lacks two operators that it names.

`.ci/set-up --lerobot` copies it into an environment in which torchvision cannot be imported otherwise, as where only
CUDA builds of it are at hand; the ``.pth`` file beside it loads it when Python starts. It imports torch only when
torchvision is imported.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing: declares the operators' signatures at the first import of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                with contextlib.suppress(RuntimeError):  # known by now
                    self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(self)
        return None


KEPT: list[DeclareOperators] = []  # operators are forgotten when their library is collected
sys.meta_path.insert(0, DeclareOperators())
