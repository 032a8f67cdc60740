"""LeRobot's replay buffer, which keeps frames as float32 in memory: ``ROWS CAMERAS``."""

import importlib.metadata

import torch

from benchmarks.peers.rounds import ACTIONS, BATCH, FLOATS, arguments, frames, rate, serve


def declare_operators() -> torch.library.Library | None:
    """Declares the operators of a torchvision built for CUDA, which cannot load its own next to a CPU torch."""
    if torch.version.cuda or "+cpu" in importlib.metadata.version("torchvision"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def main() -> None:
    rows, cameras = map(int, arguments())
    library = declare_operators()
    from lerobot.rl.buffer import ReplayBuffer  # only now: it imports torchvision

    names = [f"observation.images.{camera}" for camera in range(cameras)]
    buffer = ReplayBuffer(rows, "cpu", [*names, "observation.state"], use_drq=False, optimize_memory=True)
    pictures = torch.from_numpy(frames(256)).permute(0, 3, 1, 2).float() / 255

    def observation(row: int) -> dict[str, torch.Tensor]:
        images = {name: pictures[(row + camera) % len(pictures)][None] for camera, name in enumerate(names)}
        return {**images, "observation.state": torch.zeros(1, FLOATS)}

    for row in range(rows):
        buffer.add(observation(row), torch.zeros(1, ACTIONS), 0.0, observation(row + 1), False, False)
    serve(lambda: rate(lambda: buffer.sample(BATCH)))
    del library


if __name__ == "__main__":
    main()
