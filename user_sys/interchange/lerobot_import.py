"""A LeRobot data set into a store.

What we exported comes back step by step as it was, under the same names. A foreign data set becomes demonstrations:
what it does not say is filled in as `ImportOptions` tells. An episode's identifier is the one it had, or is made of its
content; so importing again, or going on after a kill, adds nothing twice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from user_sys.codec import Array
from user_sys.episode import APPLIED, IMAGES, SCALARS, Chunk, ChunkHeader, EpisodeEnd, Phase, Source, frame_columns
from user_sys.errors import DataSetError
from user_sys.interchange.frames import Frame, decode, encode_jpeg, same_frame
from user_sys.interchange.lerobot_format import (
    COUNTERS,
    DONE,
    FINAL_PREFIX,
    INFO,
    ORIGINAL,
    OURS,
    SUCCESS,
    TEXTS,
    Info,
    capture_feature,
)
from user_sys.interchange.lerobot_read import ForeignEpisode, LerobotDataSet
from user_sys.interchange.progress import Advance
from user_sys.store.store import StoreReader, StoreWriter

CHUNK_STEPS = 32  # of episodes that do not say how they were divided

# What stands in for a column that a data set does not have and nothing else says; 0 otherwise.
UNKNOWN: Mapping[str, float] = {"policy_version": -1, "log_prob": float("nan")}


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to make of a data set.

    Attributes:
        source: of every episode; None: as recorded, and ``demo`` where it is not.
        robot, task, embodiment: names where the data set has none; empty: made from what it says.
        success: whether episodes succeeded that do not say so; None: nobody knows.
        frames: ``auto`` keeps JPEG files, makes JPEG of videos and raw frames of lossless images; ``jpeg`` and ``raw``
            make all frames the one or the other, save that JPEG files stay.
    """

    source: Source | None = None
    robot: str = ""
    task: str = ""
    embodiment: str = ""
    success: bool | None = True
    frames: str = "auto"


class Imported(msgspec.Struct, kw_only=True):
    """What an import did; `left_out` are features that a store has no column for."""

    episodes: int = 0
    steps: int = 0
    known: int = 0
    left_out: tuple[str, ...] = ()


def import_lerobot(
    data_set: LerobotDataSet, root: Path, store: Path, options: ImportOptions, advance: Advance
) -> Imported:
    """Adds the episodes of `data_set`, which lies in `root`, to the store at `store`, each durable before the next.

    Raises:
        DataSetError: the data set is broken; what came before stays in the store, and a later call goes on behind it.
        WireError: it claims an episode that the store has of another robot.
        StoreError: the store cannot be written.
    """
    convert = _Converter(data_set.info, options, (root / INFO).stat().st_mtime_ns)
    done = Imported(left_out=convert.left_out)
    with StoreWriter.open(store) as writer:
        complete = _complete_episodes(store)
        for episode in data_set.episodes():
            header = convert.header(episode)
            if header.episode in complete:
                done.known += 1
            else:
                for chunk in convert.chunks(episode, header):
                    writer.append(chunk.encode())
                writer.sync()
                done.episodes += 1
                done.steps += episode.steps
            advance(episode.steps)
    return done


def _complete_episodes(store: Path) -> set[str]:
    with StoreReader.open(store) as reader:
        reader.refresh()
        return {episode.episode for episode in reader.episodes() if episode.complete}


class _Converter:
    """Makes chunks of a data set's episodes."""

    def __init__(self, info: Info, options: ImportOptions, written_unix_ns: int) -> None:
        self._info, self._options, self._written_unix_ns = info, options, written_unix_ns
        described = {name: [f.dtype, f.shape] for name, f in info.features.items() if name not in COUNTERS}
        told = msgspec.json.encode([info.robot_type, info.fps, described], order="deterministic")
        self._fingerprint = hashlib.blake2b(told, digest_size=8).hexdigest()
        self._ours = info.features.keys() >= {*TEXTS, "phase"}  # otherwise such names may mean anything
        kept = {SUCCESS, DONE, *COUNTERS, *ORIGINAL, "reward", "action"}
        self._observations = [n for n, f in info.features.items() if n.startswith("observation.") and not f.visual]
        self._cameras = {n: IMAGES + _camera_name(n) for n, f in info.features.items() if f.visual}
        if self._ours:
            kept |= {*TEXTS, *SCALARS, *map(capture_feature, self._cameras.values())}
        self.left_out = tuple(n for n in info.features if n not in {*kept, *self._observations, *self._cameras})
        if "action" not in info.features:
            raise DataSetError("the data set has no feature 'action'; a store's steps need one")

    def header(self, episode: ForeignEpisode) -> ChunkHeader:
        """The header of the episode's first chunk."""
        facts, options = episode.facts, self._options
        texts = episode.texts if self._ours else {}
        robot = _first(texts, "robot") or _name(options.robot or self._info.robot_type or "imported")
        return ChunkHeader(
            episode=facts.get(OURS + "episode") or f"{robot}-{episode.index:06d}-{_digest(episode)}",
            index=0,
            first_step=0,
            steps=episode.steps,
            robot=robot,
            embodiment=_first(texts, "embodiment") or options.embodiment or self._fingerprint,
            task=facts.get(OURS + "task") or _name(options.task or episode.sentence),
            sentence=facts.get(OURS + "sentence", episode.sentence),
            source=options.source or _source(_first(texts, "source") or Source.DEMO),
            seed=facts.get(OURS + "seed", 0),
            started_unix_ns=facts.get(OURS + "started_unix_ns", self._written_unix_ns),
            unix_offset_ns=facts.get(OURS + "unix_offset_ns", self._written_unix_ns),
        )

    def chunks(self, episode: ForeignEpisode, header: ChunkHeader) -> Iterator[Chunk]:
        """The episode as chunks, divided as it was recorded or else into `CHUNK_STEPS`."""
        end = self._end(episode)
        columns = self._columns(episode, end, header.source)
        frames = {ours: self._frames(episode, theirs) for theirs, ours in self._cameras.items()}
        captured_ns = {ours: self._captured_ns(episode, ours, columns) for ours in frames}
        division = episode.facts.get(OURS + "chunk_steps") or _even(episode.steps)
        if sum(division) != episode.steps:
            raise DataSetError(f"episode {episode.index}: its chunks {division} do not add up to {episode.steps} steps")
        first = 0
        for index, steps in enumerate(division):
            rows = slice(first, first + steps)
            last = index == len(division) - 1
            part = {name: column[rows] for name, column in columns.items()}
            for name, all_frames in frames.items():
                part |= frame_columns(name, _new_ones(all_frames[rows]), captured_ns[name][rows])
            yield Chunk(
                msgspec.structs.replace(header, index=index, first_step=first, steps=steps, end=end if last else None),
                part,
                self._final(episode) if last and end else {},
            )
            first += steps

    def _end(self, episode: ForeignEpisode) -> EpisodeEnd | None:
        facts = episode.facts
        if OURS + "complete" in facts:
            if not facts[OURS + "complete"]:
                return None
            return EpisodeEnd(
                steps=episode.steps, success=facts[OURS + "success"], reward_source=facts[OURS + "reward_source"]
            )
        told = episode.columns.get(SUCCESS)
        success = self._options.success if told is None else bool(told.any())
        return EpisodeEnd(steps=episode.steps, success=success, reward_source="import")

    def _columns(self, episode: ForeignEpisode, end: EpisodeEnd | None, source: Source) -> dict[str, Array]:
        found = {ORIGINAL.get(n, n): column for n, column in episode.columns.items() if n not in self.left_out}
        columns = {name: _as_vectors(found[name]) for name in (*self._observations, "action")}
        columns[APPLIED] = _as_vectors(found.get(APPLIED, found["action"]))
        known = _filled_in(episode, found, end, source)
        for name, dtype in SCALARS.items():
            column = found.get(name, known.get(name))
            if column is None:
                column = np.full(episode.steps, UNKNOWN.get(name, 0))
            columns[name] = column.astype(dtype)
        return columns

    def _final(self, episode: ForeignEpisode) -> dict[str, Array]:
        """The observation after the last step; where the data set has none, the last one stands in."""
        told = {n: v for n, v in episode.facts.items() if n.startswith(FINAL_PREFIX) and v is not None}
        if told:
            return {name.removeprefix(FINAL_PREFIX): np.array(value, np.float32) for name, value in told.items()}
        return {name: _as_vectors(episode.columns[name])[-1] for name in self._observations}

    def _captured_ns(self, episode: ForeignEpisode, camera: str, columns: Mapping[str, Array]) -> Array:
        """When the frames were captured: with the rest of the observation, where the data set does not say."""
        told = episode.columns.get(capture_feature(camera)) if self._ours else None
        return columns["t_capture_ns"] if told is None else told

    def _frames(self, episode: ForeignEpisode, feature: str) -> list[Frame]:
        wanted = self._options.frames
        if wanted == "auto":
            wanted = "jpeg" if self._info.features[feature].dtype == "video" else "raw"
        if wanted == "jpeg":
            return [_as_jpeg(frame) for frame in episode.frames(feature)]
        frames = list(episode.frames(feature))
        if any(isinstance(frame, bytes) for frame in frames) and not all(isinstance(f, bytes) for f in frames):
            return [decode(frame) for frame in frames]  # a camera is of one kind
        return frames


def _filled_in(
    episode: ForeignEpisode, found: Mapping[str, Array], end: EpisodeEnd | None, source: Source
) -> dict[str, Array]:
    """What follows for a foreign data set: times by its frame rate, an end, a reward for a success at the end."""
    last = np.arange(episode.steps) == episode.steps - 1
    success = end is not None and end.success is True
    times = np.round(found["timestamp"].astype(np.float64) * 1e9) if "timestamp" in found else np.zeros(episode.steps)
    phase = Phase.TELEOP if source is Source.DEMO else Phase.POLICY
    ended = end is not None
    return {
        "reward": last * np.float32(success),
        "terminated": last & success,
        "truncated": last & (ended and not success),
        "phase": np.full(episode.steps, phase),
        "t_capture_ns": times,
        "t_inference_ns": times,
        "t_command_ns": times,
    }


def _first(texts: Mapping[str, Sequence[str]], name: str) -> str:
    return texts[name][0] if name in texts else ""


def _source(text: str) -> Source:
    try:
        return Source(text)
    except ValueError:
        raise DataSetError(f"the data set says its source is {text!r}; give --source {'|'.join(Source)}") from None


def _name(text: str) -> str:
    """`text` as a name that a store takes: letters, digits and hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:60] or "imported"


def _camera_name(feature: str) -> str:
    return feature.removeprefix(IMAGES).removeprefix("observation.")


def _digest(episode: ForeignEpisode) -> str:
    """Of what the episode holds, wherever it lies and whatever number its steps have."""
    content = hashlib.blake2b(episode.sentence.encode(), digest_size=6)
    for name, column in sorted(episode.columns.items()):
        if name not in COUNTERS:
            content.update(name.encode() + np.ascontiguousarray(column).tobytes())
    return content.hexdigest()


def _as_vectors(column: Array) -> Array:
    """float32 with at least one element a step."""
    return (column[:, None] if column.ndim == 1 else column).astype(np.float32)


def _as_jpeg(frame: Frame) -> Frame:
    return frame if isinstance(frame, bytes) else encode_jpeg(frame)


def _even(steps: int) -> list[int]:
    return [min(CHUNK_STEPS, steps - first) for first in range(0, steps, CHUNK_STEPS)]


def _new_ones(frames: Sequence[Frame]) -> list[Frame | None]:
    """A chunk's frames; None in place of one that only repeats the frame before."""
    return [None if n and same_frame(frame, frames[n - 1]) else frame for n, frame in enumerate(frames)]
