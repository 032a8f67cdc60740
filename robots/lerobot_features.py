"""Convert LeRobot's features (named numbers in a robot's units) to vectors in stated units, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from hal.errors import HardwareLost, SpecError
from hal.spec import Array, ArraySpec

_SI_UNITS = {"deg": ("rad", math.pi / 180), "deg/s": ("rad/s", math.pi / 180), "mm": ("m", 1e-3)}
_MISSPELT_UNITS = {"degree", "degrees", "°", "radian", "radians", "millimetres", "millimeters", "metres", "meters"}
POSITION_SUFFIX = ".pos"


@dataclass(frozen=True)
class FeatureConfig:
    """The unit and bounds of a feature.

    Attributes:
        unit: of LeRobot's values. ``deg``, ``deg/s`` and ``mm`` become rad, rad/s and m; the spec keeps any other unit,
            e.g. ``%`` of a calibrated range.
        low, high: bounds, in `unit`.
        speed_max: limit of a commanded position's speed, in `unit` per second; default: a quarter of the range.
    """

    unit: str
    low: float
    high: float
    speed_max: float | None = None

    def __post_init__(self) -> None:
        if self.unit.lower() in _MISSPELT_UNITS:
            raise ValueError(
                f"unit: {self.unit!r} is not known; use deg, rad, mm, m, the same with /s, or a unit of your own"
            )


_CONFIG_FROM_NORM_MODE = {
    "degrees": FeatureConfig("deg", -180, 180),
    "range_m100_100": FeatureConfig("%", -100, 100),
    "range_0_100": FeatureConfig("%", 0, 100),
}
"""By the normalization mode of a motor in LeRobot's motor bus."""


@dataclass(frozen=True)
class LerobotFeature:
    """One number of a robot, in our unit (`speed_max` per second). LeRobot's value times `scale` is ours."""

    name: str
    unit: str
    scale: float
    low: float
    high: float
    speed_max: float

    @property
    def is_position(self) -> bool:
        return self.name.endswith(POSITION_SUFFIX)


class LerobotFeatures:
    """Some features in a fixed order; converts LeRobot's dictionaries to vectors and back."""

    def __init__(self, names: Mapping[str, Any], configs: Mapping[str, FeatureConfig], device: Any) -> None:
        """Select the numeric features in `names` (LeRobot's ``observation_features`` or ``action_features``), in order.

        A feature's unit comes from the first matching pattern of `configs`, else from the device's motor bus.

        Raises:
            SpecError: a feature without a unit.
        """
        self.names = tuple(name for name, kind in names.items() if kind in (float, int, "float32", "float"))
        modes = {f"{motor}{POSITION_SUFFIX}": mode for motor, mode in _norm_modes(device)}
        found = {
            name: _declared_config(name, configs) or _CONFIG_FROM_NORM_MODE.get(modes.get(name, ""))
            for name in self.names
        }
        if unknown := [name for name, config in found.items() if config is None]:
            raise SpecError(
                f"the units of {unknown} are not known; set them by name or pattern: "
                f"`features: {{'{unknown[0]}': {{unit: deg, low: -180, high: 180}}}}`"
            )
        self.features = tuple(_feature(name, config) for name, config in found.items() if config is not None)
        self._scale = np.array([each.scale for each in self.features])

    def spec(self, feature: str) -> ArraySpec:
        return ArraySpec(
            name=feature,
            labels=self.names,
            units=tuple(each.unit for each in self.features),
            low=tuple(each.low for each in self.features),
            high=tuple(each.high for each in self.features),
        )

    def to_vector(self, values: Mapping[str, Any], fallback: Array | None = None) -> Array:
        """Convert LeRobot's values to ours: float32 (n,).

        Args:
            fallback: replaces features that `values` lacks.

        Raises:
            HardwareLost: a feature is missing, and there is no fallback.
        """
        missing = [name for name in self.names if name not in values]
        if missing and fallback is None:
            raise HardwareLost(f"LeRobot's robot returned no {missing}; it returned {sorted(values)}")
        ours = [
            float(values[name]) * scale if name in values else float(fallback[index])  # type: ignore[index]
            for index, (name, scale) in enumerate(zip(self.names, self._scale, strict=True))
        ]
        return np.array(ours, np.float32)

    def to_values(self, vector: Array) -> dict[str, float]:
        """Convert our vector to LeRobot's values."""
        return dict(zip(self.names, (vector / self._scale).tolist(), strict=True))

    def index(self, name: str) -> int:
        return self.names.index(name)


def _declared_config(name: str, declared: Mapping[str, FeatureConfig]) -> FeatureConfig | None:
    return next((config for pattern, config in declared.items() if fnmatchcase(name, pattern)), None)


def _feature(name: str, config: FeatureConfig) -> LerobotFeature:
    unit, scale = _SI_UNITS.get(config.unit, (config.unit, 1.0))
    speed_max = (config.high - config.low) / 4 if config.speed_max is None else config.speed_max
    return LerobotFeature(name, unit, scale, config.low * scale, config.high * scale, speed_max * scale)


def _norm_modes(device: Any) -> Iterator[tuple[str, str]]:
    bus = getattr(device, "bus", None)
    for motor, described in getattr(bus, "motors", {}).items():
        yield motor, getattr(described.norm_mode, "value", "")


def calibrated_bounds(device: Any, features: LerobotFeatures) -> tuple[Array, Array]:
    """The lowest and highest position of each feature by the device's calibration, in our units: float64 (n,).

    Infinite without a calibration, and for values that are a share of the calibrated range.
    """
    low, high = np.full(len(features.features), -np.inf), np.full(len(features.features), np.inf)
    bus = getattr(device, "bus", None)
    for motor, mode in _norm_modes(device):
        name = f"{motor}{POSITION_SUFFIX}"
        calibration = getattr(bus, "calibration", {}).get(motor)
        if mode == "degrees" and calibration is not None and name in features.names:
            steps = bus.model_resolution_table[bus.motors[motor].model] - 1  # type: ignore[union-attr]
            half = (
                (calibration.range_max - calibration.range_min) / 2 * 2 * math.pi / steps
            )  # LeRobot's zero is mid-range
            low[features.index(name)], high[features.index(name)] = -half, half
    return low, high
