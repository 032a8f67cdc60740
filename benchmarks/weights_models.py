"""Weights with the tensors of real models: an MLP, a CNN, and a transformer of 450 million parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from user_sys.codec import BF16, Array

Weights = Mapping[str, Array]
Shapes = Mapping[str, tuple[int, ...]]

LORA_RANK = 16


def mlp_shapes() -> Shapes:
    """An actor of two hidden layers of 512, of 1.1 MB."""
    widths = (26, 512, 512, 14)
    shapes: dict[str, tuple[int, ...]] = {}
    for n, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
        shapes |= {f"layers.{n}.weight": (before, after), f"layers.{n}.bias": (after,)}
    return shapes


def cnn_shapes() -> Shapes:
    """ResNet-18 without its classifier, of 45 MB."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}
    channels = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            for n, given in ((1, channels), (2, width)):
                name = f"layer{stage + 1}.{block}"
                shapes |= {f"{name}.conv{n}.weight": (width, given, 3, 3)}
                shapes |= {f"{name}.bn{n}.{part}": (width,) for part in ("weight", "bias", "mean", "var")}
            channels = width
    return shapes


def transformer_shapes() -> Shapes:
    """The shapes of SmolVLA: a vision tower, a language model and an action expert; 450 million parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (49_280, 960)}
    for part, layers, width, hidden, values in (
        ("vision", 12, 768, 3072, 768), ("text", 20, 960, 2560, 320), ("expert", 16, 720, 2048, 320)
    ):  # fmt: skip
        for n in range(layers):
            name = f"{part}.layers.{n:02}"
            shapes |= {f"{name}.{norm}.weight": (width,) for norm in ("norm1", "norm2")}
            shapes |= {f"{name}.attention.{side}.weight": (width, width) for side in ("q", "o")}
            shapes |= {f"{name}.attention.{side}.weight": (values, width) for side in ("k", "v")}
            shapes |= {f"{name}.mlp.{side}.weight": (hidden, width) for side in ("gate", "up")}
            shapes |= {f"{name}.mlp.down.weight": (width, hidden)}
    return shapes


def floats(shapes: Shapes, seed: int) -> dict[str, Array]:
    """Normal values with a standard deviation of 0.02, float32."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(scale=0.02, size=shape).astype(np.float32) for name, shape in shapes.items()}


def bfloats(shapes: Shapes, seed: int) -> dict[str, Array]:
    """The same in bfloat16; drawn once and repeated."""
    drawn = np.random.default_rng(seed).normal(scale=0.02, size=50_000_000).astype(np.float32)
    bits, start, found = (drawn.view(np.uint32) >> 16).astype(np.uint16), 0, {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        start = start + 1001 if start + 1001 + count <= bits.size else 0
        found[name] = np.ascontiguousarray(bits[start : start + count]).reshape(shape).view(BF16)
    return found


def unrelated(shapes: Shapes) -> tuple[Weights, Weights]:
    """Two versions without a relation: all of each has to travel."""
    return floats(shapes, 0), floats(shapes, 1)


def unrelated_bfloats(shapes: Shapes) -> tuple[Weights, Weights]:
    return bfloats(shapes, 0), bfloats(shapes, 1)


def stepped(shapes: Shapes) -> tuple[Weights, Weights]:
    """A step of an optimizer: all values change by a thousandth."""
    before, rng = floats(shapes, 0), np.random.default_rng(1)
    after = {
        name: (array * (1 + 1e-3 * rng.normal(size=array.shape))).astype(np.float32) for name, array in before.items()
    }
    return before, after


def moved(shapes: Shapes, share: float) -> tuple[Weights, Weights]:
    """That share of bfloat16 values moves to its neighbour, up or down, as by a small step."""
    before, rng = bfloats(shapes, 0), np.random.default_rng(2)
    after: dict[str, Array] = {}
    for name, array in before.items():
        bits = array.reshape(-1).view(np.uint16).copy()
        chosen = np.flatnonzero(rng.random(bits.size, np.float32) < share)
        bits[chosen] += rng.integers(0, 2, chosen.size, np.uint16) * np.uint16(2) - np.uint16(1)
        after[name] = bits.view(BF16).reshape(array.shape)
    return before, after


def adapted(shapes: Shapes) -> tuple[Weights, Weights]:
    """LoRA on the queries and values next to frozen weights."""
    frozen, adapters = bfloats(shapes, 0), dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        if name.endswith(("q.weight", "v.weight")):
            adapters |= {f"{name}.lora_a": (LORA_RANK, shape[1]), f"{name}.lora_b": (shape[0], LORA_RANK)}
    before, after = stepped(adapters)
    return {**frozen, **before}, {**frozen, **after}
