"""What a chunk's columns are called and measured in."""

from __future__ import annotations

from collections.abc import Sequence

from hal.spec import ACTION, ArraySpec, RobotSpec
from user_sys.episode import BESIDE_FRAMES, IMAGES

VECTORS = (ACTION, "observation.")  # what the names of a robot's vectors begin with


def is_camera_column(name: str) -> bool:
    """Whether a column holds a camera's frames, or what belongs to them."""
    return name.startswith(IMAGES)


def is_camera(name: str) -> bool:
    """Whether a column holds a camera's frames."""
    return name.startswith(IMAGES) and not name.endswith(BESIDE_FRAMES)


def element_names(feature: str, size: int, spec: RobotSpec | None) -> tuple[Sequence[str], Sequence[str]]:
    """Names and units of a vector's `size` elements; numbers where no spec tells."""
    described: ArraySpec | None = None
    if spec is not None:
        known = {each.name: each for each in (*spec.observation, spec.action)}
        described = spec.action if feature.startswith(ACTION) else known.get(feature)
    if described is None or len(described.labels) != size:
        return [str(n) for n in range(size)], [""] * size
    return described.labels, described.units
