"""Compares runs: success with its interval, what a success rate took, and success over training time.

Runs that differ in seed, name and place only are one *variant*: a row of the table, and a line with a band.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hal.spec import Array
from user_sys.config import as_dict
from user_sys.errors import RunError
from user_sys.run.config import RunConfig, RunFolder, open_run_folder
from user_sys.run.report import (
    SUMMARY,
    EpisodePoint,
    Reached,
    autonomous,
    moving_success,
    new_figure,
    reached,
    reported_episodes,
    save_figure,
    style_axes,
    training_history,
    wilson_interval,
)

WINDOW = 50  # autonomous episodes in a success rate
COLOURS = ("#1f5fa8", "#d9662b", "#2e7d5b", "#7d3c98", "#c0392b", "#6b7280", "#b8860b", "#0e7490")
GRID = 400  # points of a band
OF_ONE_RUN = ("name", "seed", "runs", "console", "logging", "ray")  # settings in which runs of a variant may differ


@dataclass(frozen=True)
class RunResult:
    """One run: its training episodes, and its ``summary.json``, which is empty while it trains.

    Attributes:
        reported: see `reported_episodes`.
    """

    name: str
    folder: Path
    episodes: list[EpisodePoint]
    summary: dict[str, Any]
    reported: int = 0

    @property
    def missing(self) -> int:
        """How many of its episodes `episodes` does not have: deleted, lost to retention, or still on robots."""
        return max(0, self.reported - len(self.episodes))

    def reached(self, share: float) -> Reached | None:
        return reached(self.episodes, share, WINDOW)


@dataclass(frozen=True)
class Variant:
    """Runs with the same settings."""

    name: str
    runs: tuple[RunResult, ...]

    def total(self, count: str) -> float:
        """The sum of a count of the runs' evaluations."""
        return float(sum(run.summary.get(count, 0) for run in self.runs))

    def as_json(self, share: float) -> dict[str, Any]:
        """`share`: of successes that the runs reach."""
        successes, episodes, control_s = (
            int(self.total("successes")),
            int(self.total("episodes")),
            self.total("control_s"),
        )
        found = [each for run in self.runs if (each := run.reached(share)) is not None]
        return {
            "name": self.name,
            "runs": [run.name for run in self.runs],
            "missing_episodes": [run.missing for run in self.runs],
            "success": successes / episodes if episodes else None,
            "episodes": episodes,
            "ci95": [round(bound, 4) for bound in wilson_interval(successes, episodes)],
            "successes_per_hour": round(3600 * successes / control_s, 1) if control_s else None,
            "reached": {
                "success": share,
                "runs": len(found),
                "training_s": [round(each.training_s, 1) for each in found],
                "episodes": [each.episodes for each in found],
                "updates": [each.updates for each in found],
            },
        }


def read_variants(paths: Sequence[Path]) -> list[Variant]:
    """The runs in these folders, by variant, in the order given.

    Raises:
        RunError: a path is not a run folder, or its summary is damaged.
    """
    groups: dict[str, list[RunResult]] = {}
    for path in paths:
        folder, config, metadata = open_run_folder(path)
        groups.setdefault(_settings(config), []).append(
            RunResult(metadata.name, path, training_history(folder), _summary(folder), reported_episodes(folder))
        )
    labels = [_label([run.name for run in runs]) for runs in groups.values()]
    return [
        Variant(label if labels.count(label) == 1 else ", ".join(str(run.folder) for run in runs), tuple(runs))
        for label, runs in zip(labels, groups.values(), strict=True)
    ]


def _settings(config: RunConfig) -> str:
    plain = {name: value for name, value in as_dict(config).items() if name not in OF_ONE_RUN}
    for robot in (*plain["robots"], *plain["remote_robots"]):
        del robot["name"]  # robots of runs side by side have different ones
    plain["gateway"] = {name: value for name, value in plain["gateway"].items() if name != "endpoint"}
    return json.dumps(plain, sort_keys=True, default=str)


def _summary(folder: RunFolder) -> dict[str, Any]:
    path = folder.path / SUMMARY
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise RunError(
            f"{path} cannot be read: {error}; write it again: user-sys train --resume {folder.path}"
        ) from None


def _label(names: Sequence[str]) -> str:
    """The beginning that the names share, without digits and separators at its end."""
    if len(names) == 1:
        return names[0]
    return re.sub(r"([-_.]?seed)?[-_.\d]*\Z", "", os.path.commonprefix(list(names))) or names[0]


def comparison_table(variants: Sequence[Variant], share: float) -> Table:
    """One row for each variant; ranges are those of its runs."""
    table = Table("variant", "runs", "success", "per hour", f"reached {share:.0%}", "minutes", "episodes", "updates")
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for variant in variants:
        row = variant.as_json(share)
        to = row["reached"]
        table.add_row(
            variant.name,
            str(len(variant.runs)),
            _share(row),
            "-" if row["successes_per_hour"] is None else f"{row['successes_per_hour']:,.0f}",
            f"{to['runs']} of {len(variant.runs)}",
            _range([seconds / 60 for seconds in to["training_s"]], ".1f"),
            _range(to["episodes"], ",.0f"),
            _range(to["updates"], ",.0f"),
        )
    return table


def _share(row: dict[str, Any]) -> str:
    """The share of successes with its 95% interval, such as ``98% (93-99%)``."""
    low, high = row["ci95"]
    return f"{row['success']:.0%} ({100 * low:.0f}-{high:.0%})" if row["episodes"] else "-"


def _range(values: Sequence[float], form: str) -> str:
    """The median, and least and greatest if they differ."""
    if not values:
        return "-"
    text = f"{statistics.median(values):{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}}-{max(values):{form}})"


def draw_comparison(path: Path, variants: Sequence[Variant]) -> None:
    """Writes a plot of the newest episodes' success over training time.

    The band is between the least and the greatest of several runs; of one run, the 95% interval.

    Raises:
        RunError: the file could not be written.
    """
    figure = new_figure()
    axes = figure.subplots()
    for number, variant in enumerate(variants):
        colour = COLOURS[number % len(COLOURS)]
        curves = [curve for run in variant.runs if (curve := _curve(run)) is not None]
        if not curves:
            continue
        minutes, low, middle, high = success_band(curves)
        axes.fill_between(minutes, low, high, color=colour, alpha=0.18, lw=0)
        runs = f" ({len(curves)} runs)" if len(curves) > 1 else ""
        axes.plot(minutes, middle, color=colour, lw=2.2, label=f"{variant.name}{runs}")
    style_axes(axes, f"success of the newest {WINDOW} autonomous episodes")
    axes.get_legend().remove()
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)


def _curve(run: RunResult) -> tuple[Array, Array, Array] | None:
    """Minutes, shares of success, and the number of episodes in each; None without an episode."""
    alone = autonomous(run.episodes)
    if not alone:
        return None
    minutes = np.maximum.accumulate([episode.training_s / 60 for episode in alone])
    count = np.minimum(np.arange(1, len(alone) + 1), WINDOW)
    return minutes, np.array(moving_success(alone, WINDOW)), count


def success_band(curves: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array, Array]:
    """Minutes, lower edge, middle and upper edge, in percent. After its end a run counts with its last share."""
    if len(curves) == 1:
        minutes, share, count = curves[0]
        edges = np.array([wilson_interval(round(s * n), int(n)) for s, n in zip(share, count, strict=True)])
        return minutes, 100 * edges[:, 0], 100 * share, 100 * edges[:, 1]
    grid = np.linspace(0.0, max(minutes[-1] for minutes, _, _ in curves), GRID)
    shares = np.array([np.interp(grid, minutes, share, left=np.nan) for minutes, share, _ in curves])
    measured = ~np.isnan(shares).all(0)
    grid, shares = grid[measured], 100 * shares[:, measured]
    return grid, np.nanmin(shares, 0), np.nanmean(shares, 0), np.nanmax(shares, 0)
