"""Updates a second and memory of a learner on pictures: two cameras of 128x128, ResNet-10, compiled and not (goal 23).

``python -m benchmarks.gpu_learning`` needs a GPU and takes under three minutes. Without one it trains on a few small
pictures on the CPU through the same code, which measures nothing. The trainer is the product's: it samples pictures
from a store, moves them to the device and updates RLPD with a policy `cnn`. `torch.compile` compiles the encoders.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import simplejpeg
import torch

from benchmarks.harness import Row, report
from benchmarks.store import chunk
from hal.spec import ACTION, STATE, ArraySpec, CameraSpec, RobotSpec
from user_sys.compose import PolicyConfig
from user_sys.episode import Chunk, EpisodeSource, Phase
from user_sys.learner.config import LearnerConfig, training_stream
from user_sys.learner.trainer import Trainer
from user_sys.store.store import StoreReader, StoreWriter

STATE_SIZE, CAMERAS = 24, 2
EPISODE_STEPS = 50
PRETRAIN = 5  # updates before an encoder freezes
WARM_UP = 10  # updates that do not count


@dataclass(frozen=True)
class Scale:
    """How much is trained, and for how long each variant is measured."""

    side: int
    batch: int
    episodes: int
    seconds: float


FULL = Scale(side=128, batch=256, episodes=40, seconds=25.0)
SMOKE = Scale(side=32, batch=4, episodes=2, seconds=0.5)


def robot(side: int, state: int, action: int) -> RobotSpec:
    """A robot with vectors of these sizes, and two cameras of `side` pixels."""

    def vector(name: str, size: int) -> ArraySpec:
        labels = tuple(f"x{number}" for number in range(size))
        return ArraySpec(name=name, labels=labels, units=("m",) * size, low=(-1.0,) * size, high=(1.0,) * size)

    return RobotSpec(
        model="benchmark",
        rate_hz=10.0,
        observation=(vector(STATE, state),),
        action=vector(ACTION, action),
        cameras=tuple(CameraSpec(name=str(n), height=side, width=side, rate_hz=10.0) for n in range(CAMERAS)),
        neutral=(0.0,) * action,
    )


def fill(folder: Path, spec: RobotSpec, scale: Scale) -> None:
    """Demonstrations and online episodes of noise."""
    rng = np.random.default_rng(0)
    jpegs = [
        simplejpeg.encode_jpeg(rng.integers(0, 255, (scale.side, scale.side, 3), np.uint8), quality=90)
        for _ in range(32)
    ]
    with StoreWriter.open(folder) as writer:
        for number in range(2 * scale.episodes):
            plain = chunk(number, EPISODE_STEPS, CAMERAS, jpegs, state=STATE_SIZE)
            source, phase = (EpisodeSource.DEMO, Phase.TELEOP) if number % 2 else (EpisodeSource.ONLINE, Phase.POLICY)
            header = msgspec.structs.replace(plain.header, embodiment=spec.embodiment, source=source)
            columns = {**plain.columns, "phase": np.full(EPISODE_STEPS, phase, np.uint8)}
            writer.append(Chunk(header, columns, plain.final).encode())


@contextmanager
def training(folder: Path, spec: RobotSpec, scale: Scale, device: str, encoder: str) -> Iterator[Trainer]:
    learner = LearnerConfig(batch_size=scale.batch, cache_bytes=1 << 30, batches_ahead=2)
    options = {
        "backbone": "resnet10",
        "pooling": "embedding",
        "encoder": encoder,
        "pretrain_updates": PRETRAIN,
        "shift": 4,
    }
    with StoreReader.open(folder) as reader:
        trainer = Trainer(learner, spec, reader, policy=PolicyConfig(kind="cnn", options=options), device=device)
        trainer.refresh()
        try:
            yield trainer
        finally:
            trainer.close()


def measure(trainer: Trainer, scale: Scale, device: str, is_compiled: bool) -> Iterator[tuple[str, str, float]]:
    """Yields what was measured, its unit, and the figure."""

    def update(number: int) -> None:
        trainer.update(number)
        if device != "cpu":
            torch.cuda.synchronize()

    if is_compiled:
        # The compiler expects gradients of contiguous convolutions, and cuDNN returns those of its input's layout
        # (pytorch issue 171622). So channels come first here; on an H200 torch 2.11 then reads a misaligned address.
        how: dict[str, Any] = {"options": {"layout_optimization": False}}
        for encoder in trainer.algorithm.actor.encoder.values():
            encoder.backbone.register_forward_pre_hook(lambda _, inputs: tuple(each.contiguous() for each in inputs))
            encoder.compile(**{"backend": "eager"} if device == "cpu" else how)  # no C++ compiler for the short form
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    number, began_s = WARM_UP, time.perf_counter()
    for early in range(WARM_UP):
        update(early)
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < scale.seconds:
        update(number)
        number += 1
    yield "updates", "1/s", (number - WARM_UP) / (time.perf_counter() - started_s)
    yield f"first {WARM_UP} updates", "s", started_s - began_s
    if device != "cpu":
        yield "memory", "MB", torch.cuda.max_memory_allocated() / 1e6


def rows(device: str, scale: Scale) -> Iterator[Row]:
    spec = robot(scale.side, STATE_SIZE, 4)
    with tempfile.TemporaryDirectory(prefix="user-sys-gpu-learning-") as temporary, training_stream(device):
        fill(folder := Path(temporary), spec, scale)
        for encoder, is_compiled in (("trained", False), ("frozen", False), ("trained", True)):
            name = f"{scale.side}x{scale.side}, {encoder}{', compiled' if is_compiled else ''}"
            with training(folder, spec, scale, device, encoder) as trainer:
                try:
                    for what, unit, figure in measure(trainer, scale, device, is_compiled):
                        yield Row(23, f"{name}: {what}", unit, figure)
                except Exception as error:  # of any kind: from torch's compiler
                    if not is_compiled:
                        raise
                    yield Row(
                        23, f"{name}: updates", "1/s", None, note=f"torch.compile fails: {str(error).splitlines()[0]}"
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few small pictures, also on a GPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_small = options.smoke or device == "cpu"
    reduced = "no GPU" if device == "cpu" else "a few small pictures" if options.smoke else ""
    found: list[Row] = []
    for row in rows(device, SMOKE if is_small else FULL):
        found.append(row)
        report("gpu_learning", found, reduced=reduced)


if __name__ == "__main__":
    main()
