"""Details of one episode, for `inspect` and for pictures."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.motion_limits import SafetyReason
from hal.spec import ACTION, ArraySpec, RobotSpec
from user_sys.codec import Array
from user_sys.commands.output import print_line, size_text
from user_sys.episode import Phase
from user_sys.errors import StoreCorrupt, StoreRecordGone
from user_sys.interchange.episodes import is_camera_column
from user_sys.store.damage_report import MissingChunks, find_missing_chunks
from user_sys.store.index import EpisodeSummary
from user_sys.store.labels import (
    DeleteLabel,
    Label,
    NoteLabel,
    PhaseLabel,
    RewardLabel,
    SuccessLabel,
    UndoLabel,
    effective_labels,
)
from user_sys.store.store import StoreReader

VECTORS = (ACTION, "observation.")  # prefixes of vector names


def element_names(feature: str, size: int, spec: RobotSpec | None) -> tuple[Sequence[str], Sequence[str]]:
    """Names and units of a vector's `size` elements; numbers without a matching spec."""
    described: ArraySpec | None = None
    if spec is not None:
        by_name = {each.name: each for each in (*spec.observation, spec.action)}
        described = spec.action if feature.startswith(ACTION) else by_name.get(feature)
    if described is None or len(described.labels) != size:
        return [str(n) for n in range(size)], [""] * size
    return described.labels, described.units


class ChunkLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Location of a chunk. `state`: ``whole``, ``damaged``, or ``gone`` if it was dropped."""

    index: int
    first_step: int
    steps: int
    segment: int
    offset: int
    size_bytes: int
    state: str


class PhaseSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps `first_step` to `last_step`, in one phase."""

    phase: str
    first_step: int
    last_step: int


class EpisodeDetail(msgspec.Struct, frozen=True, kw_only=True):
    """All metadata of an episode.

    Attributes:
        rate_hz: of its steps, from the median of their distances; 0 without any.
        longest_pause_s: between two steps.
        columns: name, dtype and shape of each column of its first readable chunk.
        limited: steps in which the safety kernel changed the action, by reason.
        missing: missing chunks.
    """

    summary: EpisodeSummary
    sentence: str
    seed: int
    rate_hz: float
    longest_pause_s: float
    columns: tuple[tuple[str, str, tuple[int, ...]], ...]
    phases: tuple[PhaseSpan, ...]
    limited: dict[str, int]
    labels: tuple[Label, ...]
    chunks: tuple[ChunkLocation, ...]
    missing: tuple[MissingChunks, ...]


def describe_episode(reader: StoreReader, summary: EpisodeSummary) -> EpisodeDetail:
    """Reads all of the episode's chunks. Raises StoreError: its file cannot be read."""
    index = reader.index
    row = index.episodes.find(summary.episode)
    rows = np.flatnonzero(index.chunks.episode == row)
    rows = rows[np.argsort(index.chunks.index[rows], kind="stable")]
    counts = index.chunks.steps[rows]
    steps = np.concatenate(
        [np.arange(n) + first for first, n in zip(index.chunks.first_row[rows], counts, strict=True)]
    )
    chunks, columns = _chunks(reader, rows)
    pauses = np.diff(np.sort(index.steps.time_unix_ns[steps])) / 1e9
    return EpisodeDetail(
        summary=summary,
        sentence=index.episodes.sentences.names[index.episodes.sentence[row]],
        seed=int(index.episodes.seed[row]),
        rate_hz=float(1 / np.median(pauses)) if len(pauses) and np.median(pauses) > 0 else 0.0,
        longest_pause_s=float(pauses.max()) if len(pauses) else 0.0,
        columns=columns,
        phases=tuple(phase_spans(index.steps.phase[steps], index.step_of(steps))),
        limited=_limited_steps(index.steps.safety[steps]),
        labels=index.labels(summary.episode),
        chunks=chunks,
        missing=tuple(gap for gap in find_missing_chunks(index) if gap.episode == summary.episode),
    )


def _chunks(
    reader: StoreReader, rows: Array
) -> tuple[tuple[ChunkLocation, ...], tuple[tuple[str, str, tuple[int, ...]], ...]]:
    chunks = reader.index.chunks
    places: list[ChunkLocation] = []
    columns: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    for row in rows.tolist():
        state = "whole"
        try:
            found = reader.read(row)
            columns = columns or tuple((name, a.dtype.name, a.shape) for name, a in found.columns.items())
        except StoreRecordGone:
            state = "gone"
        except StoreCorrupt:
            state = "damaged"
        numbers = {
            name: int(getattr(chunks, name)[row]) for name in ("index", "first_step", "steps", "segment", "offset")
        }
        places.append(ChunkLocation(**numbers, size_bytes=int(chunks.length[row]), state=state))
    return tuple(places), columns


def phase_spans(phase: Array, number: Array) -> Iterator[PhaseSpan]:
    """The runs of equal phases; `number` is each step's number."""
    starts = np.flatnonzero(np.r_[True, phase[1:] != phase[:-1]])
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(phase)], strict=True):
        name = phase_name(int(phase[start]))
        yield PhaseSpan(phase=name, first_step=int(number[start]), last_step=int(number[stop - 1]))


def phase_name(phase: int) -> str:
    names = {each.value: each.name.lower() for each in Phase}
    return names.get(phase, f"phase {phase}")


def _limited_steps(safety: Array) -> dict[str, int]:
    counts = {reason.name: int(((safety & reason) != 0).sum()) for reason in SafetyReason if reason.name}
    return {name.lower(): n for name, n in counts.items() if name and n}


def show_episode(detail: EpisodeDetail) -> None:
    """Prints the details."""
    summary = detail.summary
    table = Table(show_header=False, box=None, title=Text(summary.episode), title_justify="left")
    for name, text in _facts(detail):
        table.add_row(name, Text(text))
    Console().print(table)
    valid = effective_labels(detail.labels)
    for label in detail.labels:
        undone = "" if label in valid or isinstance(label, UndoLabel) else " (undone)"
        print_line(f"label: {_label_text(label)}{undone}")
    for gap in detail.missing:
        print_line(f"missing: steps {gap.first_step} to {gap.first_step + gap.steps - 1}")
    Console().print(_chunk_table(detail.chunks))


def _facts(detail: EpisodeDetail) -> Iterator[tuple[str, str]]:
    summary = detail.summary
    started = datetime.datetime.fromtimestamp(summary.started_unix_ns / 1e9).isoformat(" ", "seconds")
    yield "robot", f"{summary.robot} (embodiment {summary.embodiment})"
    yield "task", f"{summary.task}: {detail.sentence}" if detail.sentence else summary.task
    yield "source", f"{summary.source}, started {started}, seed {detail.seed}"
    verdict = {True: "succeeded", False: "failed", None: "success unknown"}[summary.success]
    by = f" (label by {summary.labelled_by})" if summary.labelled_by else ""
    state = "deleted" if summary.deleted else "complete" if summary.complete else "not ended"
    yield "outcome", f"{verdict}{by}, {state}, return {summary.episode_return:.3g}"
    yield "steps", f"{summary.steps} at {detail.rate_hz:.3g} Hz; longest pause {detail.longest_pause_s:.3g} s"
    low, high = summary.policy_versions
    yield "policy", "none acted" if high < 0 else f"versions {low} to {high}"
    yield "in control", ", ".join(f"{s.phase} {s.first_step} to {s.last_step}" for s in detail.phases)
    yield "limited", ", ".join(f"{name} in {n} steps" for name, n in detail.limited.items()) or "never"
    yield "vectors", ", ".join(f"{name} {dtype}{list(shape[1:])}" for name, dtype, shape in _vectors(detail))
    cameras = [name for name, _, _ in detail.columns if is_camera_column(name) and f"{name}.length" in _names(detail)]
    yield "cameras", ", ".join(name.rpartition(".")[2] for name in cameras) or "none"
    yield "size", f"{size_text(summary.size_bytes)} in {summary.chunks} chunks"


def _names(detail: EpisodeDetail) -> set[str]:
    return {name for name, _, _ in detail.columns}


def _vectors(detail: EpisodeDetail) -> list[tuple[str, str, tuple[int, ...]]]:
    return [each for each in detail.columns if len(each[2]) == 2 and not is_camera_column(each[0])]


def _label_text(label: Label) -> str:
    match label:
        case SuccessLabel():
            what = {True: "succeeded", False: "failed", None: "success unknown"}[label.success]
            what += ", reward kept" if label.keep_reward else ""
        case RewardLabel():
            what = f"rewards of steps {label.first_step} to {label.first_step + len(label.rewards) - 1}"
        case PhaseLabel():
            what = f"{label.phase.name.lower()} in steps {label.first_step} to {label.first_step + label.steps - 1}"
        case DeleteLabel():
            what = "deleted" if label.deleted else "restored"
        case NoteLabel():
            what = "note"
        case UndoLabel():
            what = "undo"
    at = datetime.datetime.fromtimestamp(label.at_unix_ns / 1e9).isoformat(" ", "seconds")
    return f"{what}, by {label.labeller}, {at}" + (f": {label.note}" if label.note else "")


def _chunk_table(chunks: Sequence[ChunkLocation]) -> Table:
    table = Table("chunk", "steps", "segment", "offset", "bytes", "state", box=None, header_style="bold")
    for each in chunks:
        steps = f"{each.first_step} to {each.first_step + each.steps - 1}"
        table.add_row(str(each.index), steps, str(each.segment), str(each.offset), str(each.size_bytes), each.state)
    return table
