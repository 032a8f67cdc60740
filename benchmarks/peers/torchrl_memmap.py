"""TorchRL's replay buffer over its memory-mapped storage: ``ROWS CAMERAS FOLDER``."""

import tempfile

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from benchmarks.peers.rounds import ACTIONS, BATCH, FLOATS, arguments, frames, rate, serve

SLICE = 250


def main() -> None:
    rows, cameras, folder = (kind(text) for kind, text in zip((int, int, str), arguments(), strict=True))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        storage = LazyMemmapStorage(rows, scratch_dir=scratch)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
        pictures = torch.from_numpy(frames(SLICE + 1))

        def observation(first: int) -> TensorDict:
            images = {f"image{camera}": pictures[first : first + SLICE] for camera in range(cameras)}
            return TensorDict({**images, "state": torch.zeros(SLICE, FLOATS)}, [SLICE])

        for _ in range(0, rows, SLICE):
            both = {"observation": observation(0), "next": observation(1)}
            rest = {"action": torch.zeros(SLICE, ACTIONS), "reward": torch.zeros(SLICE)}
            buffer.extend(TensorDict({**both, **rest}, [SLICE]))
        serve(lambda: rate(buffer.sample))


if __name__ == "__main__":
    main()
