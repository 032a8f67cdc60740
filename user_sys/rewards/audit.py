"""Audits a reward against labelled episodes: the calibration of its probabilities, false positives and negatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from user_sys.codec import Array
from user_sys.interchange.episodes import StoredEpisode
from user_sys.interchange.frames import Frame
from user_sys.rewards.reward import Reward

BINS = 10
SHEET_COLUMNS, SHEET_MAX = 6, 36  # pictures of false positives
CLIPS_MAX = 50  # successes whose progress is audited
_PICTURE_IN, _DPI = 2.0, 100


@dataclass(frozen=True)
class AuditedEpisode:
    """One labelled episode and what the reward found.

    Attributes:
        success: by its label.
        found: by the reward; None if it left the episode as it is.
        probability: of success, by the reward; None if it gives none.
    """

    episode: str
    success: bool
    found: bool | None
    probability: float | None


@dataclass(frozen=True)
class ReliabilityBin:
    """Episodes whose probability lies between `low` and `high`: their mean probability and their share of successes."""

    low: float
    high: float
    episodes: int
    probability: float
    success: float


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        episodes: all that were evaluated.
        bins: the reliability table; empty bins are left out.
    """

    episodes: tuple[AuditedEpisode, ...]
    bins: tuple[ReliabilityBin, ...]

    @property
    def calibration_error(self) -> float | None:
        """The expected calibration error (Naeini et al., 2015): mean distance of probability and share of successes."""
        total = sum(each.episodes for each in self.bins)
        return sum(b.episodes * abs(b.probability - b.success) for b in self.bins) / total if total else None

    @property
    def false_positives(self) -> list[AuditedEpisode]:
        """Labelled failures in which it found a success, the most probable first."""
        wrong = [each for each in self.episodes if each.found and not each.success]
        return sorted(wrong, key=lambda each: -(each.probability or 0.0))

    @property
    def false_negatives(self) -> list[AuditedEpisode]:
        return [each for each in self.episodes if each.found is False and each.success]

    @property
    def failures(self) -> int:
        """Labelled failures."""
        return sum(not each.success for each in self.episodes)

    @property
    def unsure(self) -> int:
        """Episodes that it leaves as they are."""
        return sum(each.found is None for each in self.episodes)


def audit(episodes: Sequence[AuditedEpisode]) -> Audit:
    """Counts, and the reliability table in `BINS` equal bins."""
    known = [each for each in episodes if each.probability is not None]
    probability = np.array([each.probability for each in known], np.float64)
    success = np.array([each.success for each in known], bool)
    place = np.minimum((probability * BINS).astype(int), BINS - 1)
    bins = [
        ReliabilityBin(
            number / BINS,
            (number + 1) / BINS,
            int(inside.sum()),
            float(probability[inside].mean()),
            float(success[inside].mean()),
        )
        for number in range(BINS)
        if (inside := place == number).any()
    ]
    return Audit(tuple(episodes), tuple(bins))


# Progress -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClipProgress:
    """The progress that a reward finds in clips of one kind, means over the clips.

    Attributes:
        clips: how many.
        rank_correlation: of progress and time, by Spearman; 1 if it always rises.
        at_end: progress at the end of the clip.
        success: share of the clips in which the reward finds a success.
    """

    clips: int
    rank_correlation: float
    at_end: float
    success: float


def audit_progress(
    reward: Reward, episodes: Sequence[StoredEpisode], sentences: Mapping[str, str]
) -> dict[str, ClipProgress]:
    """Evaluates successful episodes as recorded, in reverse, and with the sentence of another task.

    Args:
        sentences: of each task, by its name.

    Returns:
        By kind: ``recorded``, ``reversed`` and ``wrong sentence``; empty if the reward estimates no progress.

    Raises:
        DataSetError: as `Reward.evaluate`.
    """
    clips: dict[str, list[tuple[float, float, bool]]] = {"recorded": [], "reversed": [], "wrong sentence": []}
    for episode in episodes:
        header = episode.header
        others = sorted({text for task, text in sentences.items() if task != header.task} - {header.sentence})
        changed = [replace(episode, header=msgspec.structs.replace(header, sentence=text)) for text in others]
        for kind, chosen in (
            ("recorded", [episode]),
            ("reversed", [reversed_clip(episode)]),
            ("wrong sentence", changed),
        ):
            for clip in chosen:
                found = reward.evaluate(clip)
                if found.progress is not None:
                    correlation = rank_correlation(found.progress, np.arange(len(found.progress)))
                    clips[kind].append((correlation, float(found.progress[-1]), bool(found.success)))
    return {
        kind: ClipProgress(len(found), *(float(mean) for mean in np.mean(found, axis=0)))
        for kind, found in clips.items()
        if found
    }


def reversed_clip(episode: StoredEpisode) -> StoredEpisode:
    """`episode` with its pictures, the final one included, in reverse order."""
    frames: dict[str, list[Frame | None]] = {}
    final = dict(episode.final)
    for name, recorded in episode.frames.items():
        newest: list[Frame | None] = []
        for frame in recorded:
            newest.append(frame if frame is not None or not newest else newest[-1])
        last = final.get(name)
        whole = [*newest, newest[-1] if last is None else last.tobytes() if last.ndim == 1 else last][::-1]
        frames[name] = whole[:-1]
        if (first := whole[-1]) is not None:
            final[name] = np.frombuffer(first, np.uint8) if isinstance(first, bytes) else first
    return replace(episode, frames=frames, final=final)


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman's rank correlation of two columns; equal values share their mean rank. 0 if one column is constant."""
    a, b = _ranks(x), _ranks(y)
    deviation = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / deviation if deviation else 0.0


def _ranks(values: Array) -> Array:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def draw_sheet(path: Path, pictures: Sequence[tuple[str, Array]]) -> None:
    """Writes a PNG with the first `SHEET_MAX` pictures, uint8 (h, w, 3), each under its title. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = pictures[:SHEET_MAX]
    columns = min(SHEET_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(columns * _PICTURE_IN, rows * (_PICTURE_IN + 0.3)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for axes in (places := figure.subplots(rows, columns, squeeze=False).ravel()):
        axes.set_axis_off()
    for axes, (title, picture) in zip(places, shown, strict=False):
        axes.imshow(picture)
        axes.set_title(title, fontsize=6)
    figure.savefig(path, format="png", facecolor="white")
