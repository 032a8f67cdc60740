"""Per-episode statistics of features, as in LeRobot datasets.

For each feature: ``min``, ``max``, ``mean``, ``std``, ``count`` and quantiles ``q01`` to ``q99``, per element; for
frames per colour channel, scaled to 0..1, with shape (3, 1, 1). Quantiles of several episodes are count-weighted
means, as in LeRobot; the other statistics are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from user_sys.codec import Array
from user_sys.interchange.frames import Frame, decode_frame

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STATISTIC_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
MAX_FRAMES = 24  # per episode
MAX_PIXELS = 96  # per side of a frame

Statistics = Mapping[str, Array]


def column_statistics(column: Array) -> Statistics | None:
    """Of a column (T, d) or (T,); None if a value is not finite, such as a missing log-probability."""
    values = np.ascontiguousarray(column.reshape(len(column), -1).T, np.float64)  # contiguous sums
    if not np.isfinite(values).all():
        return None
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=1)
    return {
        "min": values.min(axis=1),
        "max": values.max(axis=1),
        "mean": values.mean(axis=1),
        "std": values.std(axis=1),
        "count": np.array([len(column)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def frame_statistics(frames: Sequence[Frame]) -> Statistics:
    """Of evenly spaced, subsampled `frames`; needs at least one."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, MAX_FRAMES).round().astype(int))
    thinned = []
    for number in chosen:
        picture = decode_frame(frames[number])
        stride = -(-max(picture.shape[:2]) // MAX_PIXELS)
        thinned.append(picture[::stride, ::stride].reshape(-1, 3))
    statistics = column_statistics(np.concatenate(thinned))
    assert statistics is not None  # bytes are finite
    shaped = {name: (value / 255.0).reshape(3, 1, 1) for name, value in statistics.items() if name != "count"}
    return {**shaped, "count": np.array([len(chosen)])}


class RunningStatistics:
    """One feature's statistics over many episodes; their order affects only the last bits."""

    def __init__(self) -> None:
        self._count = 0
        self._low: Array = np.array(np.inf)
        self._high: Array = np.array(-np.inf)
        self._mean: Array = np.array(0.0)
        self._squares: Array = np.array(0.0)  # sum of squared distances from the mean
        self._quantiles: dict[str, Array] = {}

    def add(self, new: Statistics) -> None:
        """Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983."""
        count = int(new["count"][0])
        total = self._count + count
        share = count / total
        away = new["mean"] - self._mean
        self._squares = self._squares + new["std"] ** 2 * count + away**2 * (self._count * share)
        self._mean = self._mean + away * share
        self._low, self._high = np.minimum(self._low, new["min"]), np.maximum(self._high, new["max"])
        for name in QUANTILES:
            before = self._quantiles.get(name, new[name])
            self._quantiles[name] = before + (new[name] - before) * share
        self._count = total

    def result(self) -> dict[str, Array]:
        return {
            "min": self._low,
            "max": self._high,
            "mean": self._mean,
            "std": np.sqrt(self._squares / self._count),
            "count": np.array([self._count]),
            **self._quantiles,
        }
