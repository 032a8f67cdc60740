"""Exports episodes as MCAP recordings, for Foxglove and other viewers of robot logs.

One file per episode, ``<robot>/<episode>.mcap``, with these topics, in Unix time:

=================================== =====================================================================
``/<robot>/<feature>``              `foxglove.CompressedImage` (protobuf): new frames with capture times
``/<robot>/<feature>``              JSON: an observation or action, elements by name if known
``/<robot>/step``                   JSON: numbers of a step: reward, phase, policy version, delays, ...
=================================== =====================================================================

A file is written under a temporary name and renamed. A repeated export writes missing files, and files whose number of
steps or labels in the metadata ``episode`` differs from the store's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from mcap.reader import make_reader
from mcap.well_known import MessageEncoding, SchemaEncoding
from mcap.writer import CompressionType, Writer
from mcap_protobuf.schema import register_schema

from hal.durable import sync_folder
from hal.spec import RobotSpec
from user_sys.episode import IMAGE_PREFIX
from user_sys.interchange.episodes import UNFINISHED_SUFFIX, EpisodeReader, StoredEpisode
from user_sys.interchange.frames import Frame
from user_sys.interchange.viewers import Viewer, finite, image_file, json_schema, show_episode
from user_sys.store.index import EpisodeSummary


def export_mcap(
    reader: EpisodeReader,
    episodes: Sequence[EpisodeSummary],
    output: Path,
    specs: Mapping[str, RobotSpec],
    advance: Callable[[int], object],
) -> int:
    """Writes the missing and outdated files of `episodes`; returns their number.

    Raises:
        StoreError: the store cannot be read. OSError: the output cannot be written.
    """
    written = 0
    for summary in episodes:
        path = output / summary.robot / f"{summary.episode}.mcap"
        steps, labels = reader.steps(summary.episode), reader.label_count(summary.episode)
        if _steps_and_labels(path) != (str(steps), str(labels)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_mcap(reader.read(summary.episode), labels, specs.get(summary.embodiment), path)
            written += 1
        advance(steps)
    return written


def _steps_and_labels(path: Path) -> tuple[str, str] | None:
    """From the metadata of a recording; None if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            found = {each.name: each.metadata for each in make_reader(file).iter_metadata()}.get("episode", {})
    except Exception:  # of any kind: the library raises many for a damaged file
        return None
    return found.get("steps", ""), found.get("labels", "")


def write_mcap(episode: StoredEpisode, labels: int, spec: RobotSpec | None, path: Path) -> None:
    """Writes `episode`, to which so many labels were applied, to `path` durably."""
    aside = path.with_name(path.name + UNFINISHED_SUFFIX)
    with aside.open("wb") as file:
        writer = Writer(file, compression=CompressionType.ZSTD)
        writer.start(profile="", library="user-sys")
        writer.add_metadata("episode", {**_episode_metadata(episode), "labels": str(labels)})
        show_episode(_McapViewer(writer), episode, spec)
        writer.finish()  # type: ignore[no-untyped-call]  # the library leaves it untyped
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def _episode_metadata(episode: StoredEpisode) -> dict[str, str]:
    header = episode.header
    success = None if header.end is None else header.end.success
    return {
        "episode": episode.exported_id,
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


class _McapViewer(Viewer):
    """Writes the messages of one episode, in order of time."""

    number_prefix = "value_"

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._channels: dict[str, int] = {}
        self._image_schema = register_schema(writer, CompressedImage)

    def show_picture(self, topic: str, image: Frame, at_ns: int, captured_ns: int | None = None) -> None:
        robot, _, camera = topic.partition("/")
        content, kind = image_file(image)
        message = CompressedImage(frame_id=camera, data=content, format=kind)
        message.timestamp.FromNanoseconds(captured_ns or at_ns)
        channel = self._channel(f"{robot}/{IMAGE_PREFIX}{camera}", MessageEncoding.Protobuf, self._image_schema)
        self._add(channel, at_ns, message.SerializeToString())

    def show_numbers(self, topic: str, numbers: Mapping[str, float], at_ns: int) -> None:
        if topic not in self._channels:
            schema = json.dumps(json_schema(topic, numbers)).encode()
            number = self._writer.register_schema(topic.replace("/", "."), SchemaEncoding.JSONSchema, schema)
            self._channel(topic, MessageEncoding.JSON, number)
        self._add(self._channels[topic], at_ns, json.dumps(finite(numbers)).encode())

    def _channel(self, topic: str, encoding: str, schema: int) -> int:
        if topic not in self._channels:
            self._channels[topic] = self._writer.register_channel(f"/{topic}", encoding, schema)
        return self._channels[topic]

    def _add(self, channel: int, at_ns: int, content: bytes) -> None:
        self._writer.add_message(channel, log_time=at_ns, publish_time=at_ns, data=content)
