"""Runs LeRobot in its own environment: ``lerobot_peer.py read ROOT OUT.npz`` and ``write ROOT KIND``.

It shares only files with our code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ["HF_HUB_OFFLINE"] = "1"


def declare_operators() -> None:
    """Declares the operators that torchvision's CUDA build needs to import with a torch without CUDA."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # must stay referenced


def read(root: Path, target: Path) -> None:
    """Every item of the dataset by LeRobot's reader, each feature stacked, and the queries of a policy."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.datasets.utils import dataset_to_policy_features

    data_set = LeRobotDataset("local/peer", root=root)
    items = [data_set[number] for number in range(len(data_set))]
    found = {name: np.stack([np.asarray(item[name]) for item in items]) for name in items[0]}
    fps = data_set.fps
    windows = LeRobotDataset("local/peer", root=root, delta_timestamps={"action": [0.0, 1 / fps, 2 / fps]})
    batches = list(torch.utils.data.DataLoader(windows, batch_size=4))
    found["windows"] = np.concatenate([batch["action"].numpy() for batch in batches])
    found["policy_features"] = np.array(
        [f"{name}={each.type.name}" for name, each in dataset_to_policy_features(data_set.features).items()]
    )
    found["state_mean"] = np.asarray(data_set.meta.stats["observation.state"]["mean"])
    found["second_episode_only"] = np.array(len(LeRobotDataset("local/peer", root=root, episodes=[1])))
    np.savez(target, **found)


def write(root: Path, kind: str) -> None:
    """A dataset of two episodes, of 5 and 40 steps, with frames as `kind` (``image`` or ``video``)."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": kind, "shape": (48, 64, 3), "names": ["height", "width", "channels"]},
    }
    data_set = LeRobotDataset.create(
        "local/peer",
        fps=10,
        features=features,
        root=root,
        robot_type="so101",
        use_videos=kind == "video",
        vcodec="h264",
    )
    for episode, steps in enumerate((5, 40)):
        for step in range(steps):
            data_set.add_frame(
                {
                    "observation.state": np.array([episode, step, 0.5], np.float32),
                    "action": np.array([step, -step], np.float32),
                    "next.reward": np.array([step / 10], np.float32),
                    "observation.images.top": np.full((48, 64, 3), (5 * step, 100, 40 * episode), np.uint8),
                    "task": f"task {episode}",
                }
            )
        data_set.save_episode()
    data_set.finalize()


if __name__ == "__main__":
    declare_operators()
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        write(Path(sys.argv[2]), sys.argv[3])
