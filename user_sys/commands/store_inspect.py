"""``user-sys store inspect``: the episodes of a store as a table, one of them in detail, or as pictures."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hal.motion_limits import SafetyReason
from hal.spec import ACTION, RobotSpec
from user_sys.codec import Array
from user_sys.commands.options import COUNT, PATH, episode_filter_options, json_option, store_argument
from user_sys.commands.output import EXIT_DAMAGED, print_json, print_line, print_table, progress_bar, size_text
from user_sys.episode import APPLIED_ACTION, EpisodeSource, Phase
from user_sys.errors import StoreError
from user_sys.interchange.episodes import ControlledBy, EpisodeFilter, EpisodeReader, StoredEpisode, load_robot_specs
from user_sys.interchange.frames import Frame, decode_frame
from user_sys.store.index import EpisodeSummary
from user_sys.store.labels import OUTCOMES, Label, UndoLabel, describe_label, effective_labels
from user_sys.store.maintenance import disk_bytes
from user_sys.store.record_format import segment_numbers
from user_sys.store.store import StoreReader
from user_sys.store.verify import find_missing_chunks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDE_COLUMNS = 120
LAST_EPISODES = 20
LAST_PICTURES = 5
PHASE_COLOURS = {"policy": "#1f5fa8", "teleop": "#d9662b", "correction": "#c0392b", "recovery": "#7d3c98"}
OTHER_COLOUR = "#6b7280"
REPEAT_COLOUR = "#b45309"  # of the title of a frame that an earlier step captured
REWARD_COLOUR = "#2e7d5b"
FRAMES = 8  # per row of pictures
MAX_ELEMENTS = 16  # of an action; more would be illegible
WIDTH_IN, FRAME_IN, CURVE_IN, HEAD_IN = 13.0, 1.8, 1.3, 0.6
DPI = 100


@click.command()
@store_argument
@episode_filter_options
@click.option("--last", type=COUNT, metavar="N", help="number of newest episodes (default: 20; pictures: 5)")
@click.option("--pictures", type=PATH, metavar="DIR", help="draw each chosen episode: frames, rewards, actions")
@json_option
def inspect(path: Path, last: int | None, pictures: Path | None, as_json: bool, **chosen: Any) -> int:
    """Show the newest episodes of the store PATH, or one of them (--episode ID) in detail.

    Another process may write at the same time. Exit status 1: damage found; `store verify` finds all of it.
    """
    if as_json and pictures:
        raise StoreError("--json cannot be combined with --pictures")
    episode_filter = make_filter(incomplete=True, **chosen)
    if pictures:
        return _draw(path, episode_filter, last or LAST_PICTURES, pictures)
    with StoreReader.open(path) as reader:
        reader.refresh()
        matching = _matching(reader, path, episode_filter)
        if len(episode_filter.episodes) == 1:
            detail = _describe(reader, matching[0])
            print_json(detail) if as_json else _show_episode(detail)
        else:
            summary = _summarise(reader, path, matching, last or LAST_EPISODES)
            print_json(summary) if as_json else _show(summary)
        return EXIT_DAMAGED if reader.damaged else 0


def make_filter(
    *,
    incomplete: bool,
    episode: Sequence[str],
    source: Sequence[str],
    task: Sequence[str],
    driven: Sequence[str],
    success: str | None,
) -> EpisodeFilter:
    """The filter of `episode_filter_options`; `incomplete` includes episodes that never ended."""
    return EpisodeFilter(
        episodes=tuple(episode),
        sources=tuple(map(EpisodeSource, source)),
        tasks=tuple(task),
        driven=tuple(map(ControlledBy, driven)),
        success=None if success is None else success == "yes",
        incomplete=incomplete,
    )


def _matching(reader: StoreReader, path: Path, episode_filter: EpisodeFilter) -> list[EpisodeSummary]:
    """The filtered episodes. Raises StoreError: a named one is unknown."""
    episodes = reader.episodes()
    if missing := set(episode_filter.episodes) - {episode.episode for episode in episodes}:
        raise StoreError(f"{path} has no episode {min(missing)!r}; `user-sys store inspect {path}` lists them")
    return [episode for episode in episodes if episode_filter.matches(episode)]


def _summarise(reader: StoreReader, path: Path, episodes: Sequence[EpisodeSummary], last: int) -> dict[str, Any]:
    """Totals of the store: `segments`, `size_bytes` and `damaged` of all of it, the rest of the filtered episodes."""
    return {
        "path": str(path),
        "episodes": len(episodes),
        "complete": sum(episode.complete for episode in episodes),
        "successes": sum(episode.success is True for episode in episodes),
        "failures": sum(episode.success is False for episode in episodes),
        "steps": sum(episode.steps for episode in episodes),
        "intervention_steps": sum(episode.intervention_steps for episode in episodes),
        "chunks": sum(episode.chunks for episode in episodes),
        "segments": len(segment_numbers(path)),
        "size_bytes": disk_bytes(path),
        "sources": Counter(sorted(str(episode.source) for episode in episodes)),
        "embodiments": Counter(sorted(episode.embodiment for episode in episodes)),
        "damaged": reader.damaged,
        "last": list(episodes[-last:]),
    }


def _show(summary: dict[str, Any]) -> None:
    print_line("{path}: {episodes} ({successes} succeeded, {failures} failed, {complete} complete)".format(**summary))
    print_line("steps: {steps} ({intervention_steps} by a person), in {chunks} chunks".format(**summary))
    print_line(f"size: {size_text(summary['size_bytes'])} in {summary['segments']} segments")
    for name in ("sources", "embodiments"):
        print_line(f"{name}: {', '.join(f'{each} {count}' for each, count in summary[name].items()) or 'none'}")
    if summary["damaged"]:
        print_line(f"damaged: {len(summary['damaged'])} records; `user-sys store verify` lists them")
    console = Console()
    columns = ["episode", "source", "steps", "success", "by hand", "state"]
    columns += ["task", "return", "policy versions", "robot"] if console.width >= WIDE_COLUMNS else []
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, header_style="bold")
    for episode in summary["last"]:
        row = _row(episode)
        table.add_row(*(Text(row[name]) for name in columns))
    if summary["last"]:
        print_table(table)


def _row(episode: EpisodeSummary) -> dict[str, str]:
    success = {None: "?", True: "yes", False: "no"}[episode.success]
    return {
        "episode": episode.episode,
        "source": str(episode.source),
        "steps": str(episode.steps),
        "success": success + (f" ({episode.labelled_by})" if episode.labelled_by else ""),
        "by hand": str(episode.intervention_steps),
        "state": _state(episode),
        "task": episode.task,
        "return": f"{episode.episode_return:.2f}",
        "policy versions": _versions(episode),
        "robot": episode.robot,
    }


def _state(episode: EpisodeSummary) -> str:
    return "deleted" if episode.deleted else "complete" if episode.complete else "open"


def _versions(episode: EpisodeSummary) -> str:
    low, high = episode.policy_versions
    return "" if high < 0 else f"{low} to {high}"


# One episode ----------------------------------------------------------------------------------------------------------


def _describe(reader: StoreReader, summary: EpisodeSummary) -> dict[str, Any]:
    """What the index knows of an episode.

    Phases have their first and last steps; `limited` counts the steps in which the safety kernel changed the action.
    """
    index = reader.index
    row = index.episodes.find(summary.episode)
    rows = np.flatnonzero(index.chunks.episode == row)
    rows = rows[np.argsort(index.chunks.index[rows], kind="stable")]
    counts = index.chunks.steps[rows]
    steps = np.concatenate(
        [np.arange(n) + first for first, n in zip(index.chunks.first_row[rows], counts, strict=True)]
    )
    pauses = np.diff(np.sort(index.steps.time_unix_ns[steps])) / 1e9
    return {
        "summary": summary,
        "sentence": index.episodes.sentences.names[index.episodes.sentence[row]],
        "seed": int(index.episodes.seed[row]),
        "rate_hz": float(1 / np.median(pauses)) if len(pauses) and np.median(pauses) > 0 else 0.0,
        "longest_pause_s": float(pauses.max()) if len(pauses) else 0.0,
        "phases": list(phase_spans(index.steps.phase[steps], index.step_of(steps))),
        "limited": _limited_steps(index.steps.safety[steps]),
        "labels": index.labels(summary.episode),
        "missing": [gap for gap in find_missing_chunks(index) if gap.episode == summary.episode],
    }


def _limited_steps(safety: Array) -> dict[str, int]:
    counts = {reason.name.lower(): int(((safety & reason) != 0).sum()) for reason in SafetyReason if reason.name}
    return {name: n for name, n in counts.items() if n}


def _show_episode(detail: dict[str, Any]) -> None:
    summary: EpisodeSummary = detail["summary"]
    print_line(summary.episode)
    by = f" (label by {summary.labelled_by})" if summary.labelled_by else ""
    for name, text in {
        "robot": f"{summary.robot} (embodiment {summary.embodiment})",
        "task": f"{summary.task}: {detail['sentence']}",
        "source": f"{summary.source}, started {_time(summary.started_unix_ns)}, seed {detail['seed']}",
        "outcome": f"{OUTCOMES[summary.success]}{by}, {_state(summary)}, return {summary.episode_return:.3g}",
        "steps": f"{summary.steps} at {detail['rate_hz']:.3g} Hz; longest pause {detail['longest_pause_s']:.3g} s",
        "policy versions": _versions(summary) or "none acted",
        "in control": ", ".join(f"{phase} {first} to {last}" for phase, first, last in detail["phases"]),
        "limited": ", ".join(f"{reason} in {n} steps" for reason, n in detail["limited"].items()) or "never",
        "size": f"{size_text(summary.size_bytes)} in {summary.chunks} chunks",
    }.items():
        print_line(f"  {name}: {text}")
    valid = effective_labels(detail["labels"])
    for label in detail["labels"]:
        undone = "" if label in valid or isinstance(label, UndoLabel) else " (undone)"
        print_line(f"  label: {_label_text(label)}{undone}")
    for gap in detail["missing"]:
        print_line(f"  missing: steps {gap.first_step} to {gap.first_step + gap.steps - 1}")


def _time(unix_ns: int) -> str:
    return datetime.datetime.fromtimestamp(unix_ns / 1e9).isoformat(" ", "seconds")


def _label_text(label: Label) -> str:
    note = f": {label.note}" if label.note else ""
    return f"{describe_label(label)}, by {label.labeller}, {_time(label.at_unix_ns)}{note}"


# Pictures -------------------------------------------------------------------------------------------------------------


def _draw(path: Path, episode_filter: EpisodeFilter, last: int, folder: Path) -> int:
    specs = load_robot_specs(path)
    with StoreReader.open(path) as store:
        reader = EpisodeReader(store)
        matching = _matching(store, path, episode_filter)
        if not matching:
            raise StoreError(f"no episode of {path} matches; change the filters")
        episodes = [each for each in matching[-last:] if reader.steps(each.episode)]
        with progress_bar("drawing episodes", len(episodes)) as advance:
            for each in episodes:
                draw_episode(each, reader.read(each.episode), specs.get(each.embodiment), folder)
                advance(1)
        if len(episodes) > 1:
            draw_overview([(each, reader.read(each.episode)) for each in episodes], folder)
        damaged = bool(store.damaged)
    print_line(f"{len(episodes)} episodes drawn into {folder}")
    return EXIT_DAMAGED if damaged else 0


def draw_episode(summary: EpisodeSummary, episode: StoredEpisode, spec: RobotSpec | None, folder: Path) -> Path:
    """Writes ``<episode>.png`` into `folder`: frames of every camera, rewards, and each element of the action.

    Raises:
        DataSetError: a frame cannot be decoded.
        OSError: the folder cannot be written.
    """
    cameras = {name: frames for name, frames in episode.frames.items() if any(f is not None for f in frames)}
    action = episode.columns.get(ACTION, np.zeros((episode.steps, 0), np.float32))
    applied = episode.columns.get(APPLIED_ACTION, action)
    elements = min(action.shape[1], MAX_ELEMENTS)
    heights = [FRAME_IN] * len(cameras) + [CURVE_IN] * (1 + -(-elements // 2))
    figure = _figure(sum(heights))
    grid = figure.add_gridspec(len(heights), FRAMES, height_ratios=heights)
    for row, (name, frames) in enumerate(cameras.items()):
        places = [figure.add_subplot(grid[row, n]) for n in range(FRAMES)]
        _draw_frames(places, frames, _phases(episode), name.rpartition(".")[2])
    _draw_rewards(figure.add_subplot(grid[len(cameras), :]), episode)
    labels = spec.action.labels if spec is not None and len(spec.action.labels) == action.shape[1] else None
    for n in range(elements):
        half = slice(0, FRAMES // 2) if n % 2 == 0 else slice(FRAMES // 2, FRAMES)
        axes = figure.add_subplot(grid[len(cameras) + 1 + n // 2, half])
        steps = np.arange(episode.steps)
        axes.plot(steps, action[:, n], color="#9ca3af", lw=2.2, drawstyle="steps-mid", label="requested")
        axes.plot(steps, applied[:, n], color="#111827", lw=0.9, drawstyle="steps-mid", label="applied")
        axes.set_title(labels[n] if labels else f"action {n}", fontsize=8, loc="left")
        _finish(axes, episode, legend=n == 0)
    title = f"{summary.episode}   {summary.robot}: {episode.header.sentence or summary.task}   {_outcome(summary)}"
    _add_title(figure, title, np.unique(_phases(episode)).tolist())
    return _save(figure, folder / f"{summary.episode}.png")


def draw_overview(episodes: Sequence[tuple[EpisodeSummary, StoredEpisode]], folder: Path) -> Path | None:
    """Writes ``episodes.png``: one row of frames per episode, of its first camera; None if no episode has a camera.

    Raises as `draw_episode`.
    """
    rows = [(summary, episode, frames) for summary, episode in episodes if (frames := _first_camera(episode))]
    if not rows:
        return None
    figure = _figure(len(rows) * FRAME_IN)
    grid = figure.add_gridspec(len(rows), FRAMES)
    phases: set[int] = set()
    for row, (summary, episode, frames) in enumerate(rows):
        places = [figure.add_subplot(grid[row, n]) for n in range(FRAMES)]
        _draw_frames(places, frames, _phases(episode), f"{summary.episode}\n{_outcome(summary)}")
        phases |= set(np.unique(_phases(episode)).tolist())
    _add_title(figure, f"{len(rows)} episodes", sorted(phases))
    return _save(figure, folder / "episodes.png")


def phase_spans(phase: Array, number: Array) -> Iterator[tuple[str, int, int]]:
    """The runs of equal phases, each with its first and last step; `number` is each step's number."""
    starts = np.flatnonzero(np.r_[True, phase[1:] != phase[:-1]])
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(phase)], strict=True):
        yield _phase_name(int(phase[start])), int(number[start]), int(number[stop - 1])


def _phase_name(phase: int) -> str:
    return {each.value: each.name.lower() for each in Phase}.get(phase, f"phase {phase}")


def _colour(phase: str) -> str:
    return PHASE_COLOURS.get(phase, OTHER_COLOUR)


def _phases(episode: StoredEpisode) -> Array:
    return episode.columns.get("phase", np.full(episode.steps, Phase.POLICY, np.uint8))


def _first_camera(episode: StoredEpisode) -> list[Frame | None] | None:
    return next((frames for frames in episode.frames.values() if any(f is not None for f in frames)), None)


def _draw_frames(places: Sequence[Axes], frames: Sequence[Frame | None], phase: Array, name: str) -> None:
    """Draws evenly spaced steps, including the first and the last, each with its newest frame and the step of that."""
    newest: list[tuple[int, Frame] | None] = []
    for step, frame in enumerate(frames):
        newest.append((step, frame) if frame is not None else newest[-1] if newest else None)
    steps = np.unique(np.linspace(0, len(newest) - 1, len(places)).round().astype(int)).tolist()
    for axes in places:
        axes.set_xticks([])
        axes.set_yticks([])
    for axes, step in zip(places, steps, strict=False):
        captured = step
        if (shown := newest[step]) is not None:
            captured, frame = shown
            axes.imshow(decode_frame(frame), aspect="equal")
        repeats = captured < step
        title = f"step {step}, frame of {captured}" if repeats else f"step {step}"
        axes.set_title(title, fontsize=8, color=REPEAT_COLOUR if repeats else OTHER_COLOUR)
        for spine in axes.spines.values():
            spine.set_color(_colour(_phase_name(int(phase[step]))))
            spine.set_linewidth(3.5)
    places[0].set_ylabel(name, fontsize=8)


def _draw_rewards(axes: Axes, episode: StoredEpisode) -> None:
    reward = episode.columns.get("reward", np.zeros(episode.steps, np.float32))
    steps = np.arange(episode.steps)
    axes.bar(steps, reward, width=0.9, color=REWARD_COLOUR, label="reward")
    axes.plot(steps, np.cumsum(reward), color="#111827", lw=1.2, drawstyle="steps-mid", label="sum so far")
    _finish(axes, episode, legend=True)


def _finish(axes: Axes, episode: StoredEpisode, *, legend: bool) -> None:
    """Marks the phases behind the curves."""
    for phase, first, last in phase_spans(_phases(episode), np.arange(episode.steps)):
        axes.axvspan(first - 0.5, last + 0.5, color=_colour(phase), alpha=0.10, lw=0, zorder=0)
    axes.set_xlim(-0.5, episode.steps - 0.5)
    axes.tick_params(labelsize=7, colors=OTHER_COLOUR)
    if legend:
        axes.legend(fontsize=7, loc="upper left", frameon=False, ncols=2)


def _add_title(figure: Figure, title: str, phases: Sequence[int]) -> None:
    from matplotlib.patches import Patch

    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    patches = [Patch(color=_colour(name), label=name) for name in map(_phase_name, phases)]
    figure.legend(handles=patches, loc="outside upper right", fontsize=8, frameon=False, ncols=len(patches))


def _outcome(summary: EpisodeSummary) -> str:
    deleted = ", deleted" if summary.deleted else ""
    return f"{summary.source}, {OUTCOMES[summary.success]}, return {summary.episode_return:.3g}{deleted}"


def _figure(height_in: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in + HEAD_IN), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white")
    return path
