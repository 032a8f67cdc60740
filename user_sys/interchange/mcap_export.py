"""Exports episodes as MCAP recordings, for Foxglove and other viewers of robot logs.

One file per episode, ``<robot>/<episode>.mcap``, with these topics, in Unix time:

=================================== =====================================================================
``/<robot>/<feature>``              `foxglove.CompressedImage` (protobuf): new frames with capture times
``/<robot>/<feature>``              JSON: an observation or action, elements by name if known
``/<robot>/step``                   JSON: numbers of a step: reward, phase, policy version, delays, ...
=================================== =====================================================================

A file is written under a temporary name and renamed; a killed export repeats missing files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from mcap.well_known import MessageEncoding, SchemaEncoding
from mcap.writer import CompressionType, Writer
from mcap_protobuf.schema import register_schema

from hal.durable import sync_folder
from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX
from user_sys.interchange.episodes import UNFINISHED_SUFFIX, EpisodeReader, StoredEpisode, element_labels
from user_sys.interchange.frames import Frame, encode_png
from user_sys.store.index import EpisodeSummary

_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def export_mcap(
    reader: EpisodeReader,
    episodes: Sequence[EpisodeSummary],
    output: Path,
    specs: Mapping[str, RobotSpec],
    advance: Callable[[int], object],
) -> int:
    """Writes the missing files of `episodes`; returns their number.

    Raises:
        StoreError: the store cannot be read. OSError: the output cannot be written.
    """
    written = 0
    for summary in episodes:
        path = output / summary.robot / f"{summary.episode}.mcap"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_mcap(reader.read(summary.episode), specs.get(summary.embodiment), path)
            written += 1
        advance(reader.steps(summary.episode))
    return written


def write_mcap(episode: StoredEpisode, spec: RobotSpec | None, path: Path) -> None:
    """Writes `episode` to `path` durably."""
    aside = path.with_name(path.name + UNFINISHED_SUFFIX)
    with aside.open("wb") as file:
        writer = Writer(file, compression=CompressionType.ZSTD)
        writer.start(profile="", library="user-sys")
        writer.add_metadata("episode", _episode_metadata(episode))
        _EpisodeWriter(writer, episode, spec).write()
        writer.finish()  # type: ignore[no-untyped-call]  # the library leaves it untyped
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def _episode_metadata(episode: StoredEpisode) -> dict[str, str]:
    header = episode.header
    success = None if header.end is None else header.end.success
    return {
        "episode": header.episode,
        "robot": header.robot,
        "embodiment": header.embodiment,
        "task": header.task,
        "sentence": header.sentence,
        "source": str(header.source),
        "seed": str(header.seed),
        "steps": str(episode.steps),
        "complete": str(header.end is not None).lower(),
        "success": {None: "unknown", True: "yes", False: "no"}[success],
    }


class _EpisodeWriter:
    """Writes the messages of one episode in order of time."""

    def __init__(self, writer: Writer, episode: StoredEpisode, spec: RobotSpec | None) -> None:
        self._writer, self._episode = writer, episode
        self._labels = element_labels(spec)

    def write(self) -> None:
        episode = self._episode
        times_ns = _unix_times_ns(episode)
        captured_ns = {name: _unix(times, episode) for name, times in episode.captured_ns.items()}
        vectors = {
            n: c for n, c in episode.columns.items() if n.startswith("observation.") or n in ("action", APPLIED_ACTION)
        }
        fields = _step_fields({n: c for n, c in episode.columns.items() if n not in vectors and c.ndim == 1})
        names = {name: _element_names(column, self._labels.get(name)) for name, column in vectors.items()}
        images = register_schema(self._writer, CompressedImage)
        channels = {camera: self._channel(camera, MessageEncoding.Protobuf, images) for camera in episode.frames}
        for name, elements in names.items():
            channels[name] = self._json_channel(name, {each: {"type": "number"} for each in elements})
        channels["step"] = self._json_channel("step", {name: _json_type(column) for name, column in fields.items()})
        for step, at_ns in enumerate(times_ns):
            for camera, frames in episode.frames.items():
                if (frame := frames[step]) is not None:
                    message = _image(frame, camera, captured_ns[camera][step]).SerializeToString()
                    self._add(channels[camera], at_ns, message)
            for name, column in vectors.items():
                values = column[step].reshape(-1).tolist()
                self._add(channels[name], at_ns, _json(dict(zip(names[name], values, strict=True))))
            numbers = {name: column[step].item() for name, column in fields.items()}
            self._add(channels["step"], at_ns, _json(numbers))

    def _json_channel(self, name: str, properties: Mapping[str, Any]) -> int:
        title = f"{self._episode.header.robot}.{name}"
        schema = {"$schema": _SCHEMA_DIALECT, "title": title, "type": "object", "properties": dict(properties)}
        number = self._writer.register_schema(title, SchemaEncoding.JSONSchema, json.dumps(schema).encode())
        return self._channel(name, MessageEncoding.JSON, number)

    def _channel(self, name: str, encoding: str, schema: int) -> int:
        return self._writer.register_channel(f"/{self._episode.header.robot}/{name}", encoding, schema)

    def _add(self, channel: int, at_ns: int, content: bytes) -> None:
        self._writer.add_message(channel, log_time=at_ns, publish_time=at_ns, data=content)


def _json(fields: Mapping[str, float]) -> bytes:
    return json.dumps({key: value for key, value in fields.items() if math.isfinite(value)}).encode()  # no NaN in JSON


def _step_fields(scalars: Mapping[str, Array]) -> dict[str, Array]:
    """The numbers of a step; times become delays after the capture, in milliseconds."""
    fields = {n: c for n, c in scalars.items() if not n.startswith("t_")}
    captured = scalars.get("t_capture_ns")
    for name, column in scalars.items():
        if name.startswith("t_") and name != "t_capture_ns" and captured is not None:
            fields[name.removeprefix("t_").removesuffix("_ns") + "_delay_ms"] = (column - captured) / 1e6
    steps = len(next(iter(scalars.values()))) if scalars else 0
    return {"step": np.arange(steps), **fields}


def _unix_times_ns(episode: StoredEpisode) -> list[int]:
    """Capture time of each step, at least 0 because MCAP times are unsigned; without them, the episode's start."""
    captured, header = episode.columns.get("t_capture_ns"), episode.header
    if captured is None:
        return [max(0, header.started_unix_ns)] * episode.steps
    return _unix(captured, episode)


def _unix(monotonic_ns: Array, episode: StoredEpisode) -> list[int]:
    times: list[int] = np.maximum(monotonic_ns + episode.header.unix_offset_ns, 0).tolist()
    return times


def _image(frame: Frame, camera: str, captured_ns: int) -> CompressedImage:
    content, kind = (frame, "jpeg") if isinstance(frame, bytes) else (encode_png(frame), "png")
    message = CompressedImage(frame_id=camera.removeprefix(IMAGE_PREFIX), data=content, format=kind)
    message.timestamp.FromNanoseconds(captured_ns)
    return message


def _element_names(column: Array, labels: Sequence[str] | None) -> Sequence[str]:
    width = column.size // len(column)
    return labels if labels and len(labels) == width else [f"value_{number}" for number in range(width)]


def _json_type(column: Array) -> dict[str, str]:
    return {"type": "boolean" if column.dtype == np.bool_ else "number" if column.dtype.kind == "f" else "integer"}
