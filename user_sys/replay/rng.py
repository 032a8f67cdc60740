"""The random generator of a sampler."""

from __future__ import annotations

import json

import numpy as np

from user_sys.errors import ConfigError


class SamplerRng:
    """A seeded generator whose state is part of a checkpoint."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.PCG64(seed))

    def state_dict(self) -> dict[str, str]:
        """The state as text (its 128-bit integers fit no msgpack integer)."""
        return {"rng": json.dumps(self.generator.bit_generator.state)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continues where `state` was taken. Raises ConfigError when it is no such state."""
        try:
            self.generator.bit_generator.state = json.loads(state["rng"])
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"this is no state of a sampler: {error!r}") from error
