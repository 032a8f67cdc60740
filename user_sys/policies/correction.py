"""The network of A2C2 that corrects the actions of a chunk, in numpy: it travels with the chunk to the robot.

See `edge.chunk_executor.A2c2`, and `policies.a2c2` for its training. With o' the newest vectors, o those of the
chunk's observation, both scaled, and a_k action k of H, scaled to [-1, 1]::

    a' = clip(a_k + f(o', o, a_k, k / H), -1, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from hal.spec import Array
from user_sys.errors import WireError

INPUT_CLIP = 5.0  # of scaled observations


@dataclass(frozen=True)
class ChunkCorrection:
    """See the module. All arrays are float32.

    Attributes:
        features: names of the vectors that it reads.
        offset, scale: (k,), scale the vectors, one after the other: ``(vectors - offset) * scale``.
        observed: (k,), the scaled vectors of the chunk's observation.
        centre, half: (a,), map an action from [-1, 1] to its units.
        length: H, actions of the chunk.
        layers: weight (outputs, inputs) and bias (outputs,) of each layer; rectifiers are between them.
    """

    features: tuple[str, ...]
    offset: Array
    scale: Array
    observed: Array
    centre: Array
    half: Array
    length: int
    layers: tuple[tuple[Array, Array], ...]

    def correct(self, action: Array, place: int, observation: Mapping[str, Array]) -> Array:
        """Returns the corrected `action`, float32 (a,) in its units, for `place` of the chunk."""
        scaled = np.clip((action - self.centre) / self.half, -1.0, 1.0)
        newest = self.scaled(observation)
        x = np.concatenate([newest, self.observed, scaled, np.array([place / self.length], np.float32)])
        for number, (weight, bias) in enumerate(self.layers):
            x = weight @ (np.maximum(x, 0.0) if number else x) + bias
        corrected: Array = (self.centre + self.half * np.clip(scaled + x, -1.0, 1.0)).astype(np.float32)
        return corrected

    def scaled(self, observation: Mapping[str, Array]) -> Array:
        """Returns the vectors of an observation, scaled, float32 (k,)."""
        vectors = np.concatenate([observation[name] for name in self.features])
        return np.asarray(np.clip((vectors - self.offset) * self.scale, -INPUT_CLIP, INPUT_CLIP), np.float32)

    def arrays(self) -> dict[str, Array]:
        """Its arrays by name, for a message; see `from_arrays`."""
        found = {"offset": self.offset, "scale": self.scale, "observed": self.observed}
        for number, (weight, bias) in enumerate(self.layers):
            found |= {f"{number}.weight": weight, f"{number}.bias": bias}
        return found | {"centre": self.centre, "half": self.half}

    @classmethod
    def from_arrays(cls, sizes: Mapping[str, int], a: int, length: int, arrays: Mapping[str, Array]) -> Self:
        """The inverse of `arrays`; the arrays are copied. `sizes`: of the features, in order. `a`: of an action.

        Raises:
            WireError: an array is missing, or their shapes do not fit.
        """
        try:
            count = sum(name.endswith(".weight") for name in arrays)
            layers = tuple((arrays[f"{n}.weight"].copy(), arrays[f"{n}.bias"].copy()) for n in range(count))
            rest = {name: arrays[name].copy() for name in ("offset", "scale", "observed", "centre", "half")}
        except KeyError as error:
            raise WireError(f"a correction of a chunk lacks the array {error}") from None
        k = sum(sizes.values())
        width = 2 * k + a + 1
        for weight, bias in layers:
            if bias.ndim != 1 or weight.shape != (len(bias), width):
                raise WireError(f"a correction of a chunk has a layer {weight.shape} for {width} inputs")
            width = len(bias)
        shapes = {name: rest[name].shape for name in rest}
        if not layers or width != a or shapes != {**dict.fromkeys(shapes, (k,)), "centre": (a,), "half": (a,)}:
            raise WireError(f"a correction of a chunk gives {width} numbers for {a} of an action")
        return cls(features=tuple(sizes), length=length, layers=layers, **rest)
