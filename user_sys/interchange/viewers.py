"""Streams steps and pictures to other viewers on this computer: Rerun, or Foxglove by its WebSocket.

Both are read-only: nothing that a viewer sends is handled. `user_sys.interchange.mcap_export` writes files in the same
way.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hal.errors import install_hint
from hal.spec import RobotSpec
from user_sys.codec import Array
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StoredEpisode, element_labels
from user_sys.interchange.frames import Frame, encode_png

LOOPBACK = "127.0.0.1"
RERUN_PORT, FOXGLOVE_PORT = 9876, 8765
FLUSH_TIMEOUT_S = 30.0

JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}
JSON_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Viewer(ABC):
    """Where a robot's steps and pictures are shown. Times are Unix times in ns; a topic is ``ROBOT/NAME``.

    Attributes:
        number_prefix: of the names of values without labels.
    """

    number_prefix = ""

    @abstractmethod
    def show_picture(self, topic: str, image: Frame, at_ns: int, captured_ns: int | None = None) -> None:
        """`image` is a JPEG file, or uint8 (h, w, 3) RGB. It was captured at `at_ns` unless `captured_ns` is given."""

    @abstractmethod
    def show_numbers(self, topic: str, numbers: Mapping[str, float], at_ns: int) -> None:
        """One value for each label."""


class RerunViewer(Viewer):
    """A Rerun recording."""

    def __init__(self, name: str) -> None:
        import rerun

        self._rerun, self.recording = rerun, rerun.RecordingStream(name)

    def show_picture(self, topic: str, image: Frame, at_ns: int, captured_ns: int | None = None) -> None:
        kind = self._rerun
        shown = (
            kind.Image(image)
            if isinstance(image, np.ndarray)
            else kind.EncodedImage(contents=bytes(image), media_type="image/jpeg")
        )
        self.recording.set_time("time", timestamp=np.datetime64(at_ns, "ns"))
        self.recording.log(topic, shown)

    def show_numbers(self, topic: str, numbers: Mapping[str, float], at_ns: int) -> None:
        self.recording.set_time("time", timestamp=np.datetime64(at_ns, "ns"))
        for label, value in numbers.items():
            self.recording.log([*topic.split("/"), label], self._rerun.Scalars(float(value)))


class FoxgloveViewer(Viewer):
    """Topics of a Foxglove WebSocket server."""

    def __init__(self) -> None:
        import foxglove
        from foxglove.channels import CompressedImageChannel

        self._foxglove, self._picture_channel = foxglove, CompressedImageChannel
        self._channels: dict[str, object] = {}

    def show_picture(self, topic: str, image: Frame, at_ns: int, captured_ns: int | None = None) -> None:
        from foxglove.messages import CompressedImage, Timestamp

        channel = self._channels.setdefault(topic, self._picture_channel(f"/{topic}"))
        content, kind = image_file(image)
        stamp = Timestamp(*divmod(captured_ns or at_ns, 10**9))
        message = CompressedImage(timestamp=stamp, frame_id=topic, data=content, format=kind)
        channel.log(message, log_time=at_ns)  # type: ignore[attr-defined]

    def show_numbers(self, topic: str, numbers: Mapping[str, float], at_ns: int) -> None:
        if topic not in self._channels:
            self._channels[topic] = self._foxglove.Channel(f"/{topic}", schema=json_schema(topic, numbers))
        self._channels[topic].log(finite(numbers), log_time=at_ns)  # type: ignore[attr-defined]


def image_file(image: Frame) -> tuple[bytes, str]:
    """The content of a JPEG or lossless PNG file, and which of the two it is."""
    return (encode_png(image), "png") if isinstance(image, np.ndarray) else (bytes(image), "jpeg")


def json_schema(topic: str, numbers: Mapping[str, float]) -> dict[str, object]:
    """The JSON schema of a topic's messages; no value is required."""
    properties = {label: {"type": JSON_TYPES[type(value)]} for label, value in numbers.items()}
    return {"$schema": JSON_DIALECT, "title": topic.replace("/", "."), "type": "object", "properties": properties}


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that JSON can express."""
    return {label: value for label, value in numbers.items() if math.isfinite(value)}


@contextmanager
def rerun_viewer(name: str, save: Path | None) -> Iterator[Viewer]:
    """A Rerun viewer on this computer that listens on loopback, or the file `save` without one.

    Raises:
        DataSetError: the extra is not installed.
    """
    _require("rerun", "rerun")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="user-sys-rerun-"))
        os.environ["XDG_CONFIG_HOME"] = folder  # of the analytics' settings, before rerun reads them
        program = (sys.executable, "-m", "rerun_cli")
        subprocess.run((*program, "analytics", "disable"), check=True, capture_output=True)
        viewer = RerunViewer(name)
        if save is not None:
            viewer.recording.save(save)
        else:
            shown = subprocess.Popen((*program, "--bind", LOOPBACK, "--port", str(RERUN_PORT), "--expect-data-soon"))
            stack.callback(shown.wait)  # until the person closes it
            viewer.recording.connect_grpc(f"rerun+http://{LOOPBACK}:{RERUN_PORT}/proxy")
        yield viewer
        viewer.recording.flush(timeout_sec=FLUSH_TIMEOUT_S)
        viewer.recording.disconnect()


@contextmanager
def foxglove_viewer(name: str, port: int) -> Iterator[tuple[Viewer, str]]:
    """A Foxglove WebSocket server on loopback, and its address; 0 takes a free port.

    Raises:
        DataSetError: the extra is not installed, or the port is in use.
    """
    _require("foxglove", "foxglove")
    import foxglove

    try:
        server = foxglove.start_server(name=name, host=LOOPBACK, port=port, capabilities=[])
    except RuntimeError as error:
        raise DataSetError(f"port {port} cannot be opened ({error}); choose another with --port") from None
    try:
        yield FoxgloveViewer(), f"ws://{LOOPBACK}:{server.port}"
    finally:
        server.stop()


def _require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise DataSetError(f"--{extra} needs its viewer's library: {install_hint(extra)}")


def show_episode(
    viewer: Viewer, episode: StoredEpisode, spec: RobotSpec | None, stop: threading.Event | None = None
) -> None:
    """Shows all steps: at once, or with `stop` at their recorded pace, until it is set."""
    labels, robot = element_labels(spec), episode.header.robot
    vectors = [n for n in episode.columns if n.startswith("observation.") or n in ("action", APPLIED_ACTION)]
    fields = _step_fields({n: c for n, c in episode.columns.items() if n not in vectors and c.ndim == 1})
    captured_ns = {name: _unix_ns(times, episode) for name, times in episode.captured_ns.items()}
    times_ns = _step_times_ns(episode)
    for step, at_ns in enumerate(times_ns):
        if stop is not None and stop.wait(max(0, at_ns - times_ns[max(0, step - 1)]) / 1e9):
            return
        for camera, frames in episode.frames.items():
            if (frame := frames[step]) is not None:
                topic = f"{robot}/{camera.removeprefix(IMAGE_PREFIX)}"
                viewer.show_picture(topic, frame, at_ns, captured_ns[camera][step])
        for name in vectors:
            values = episode.columns[name][step].reshape(-1).tolist()
            viewer.show_numbers(f"{robot}/{name}", named(values, labels.get(name), viewer.number_prefix), at_ns)
        numbers = {"step": step} | {name: column[step].item() for name, column in fields.items()}
        viewer.show_numbers(f"{robot}/step", numbers, at_ns)


def _step_fields(scalars: Mapping[str, Array]) -> dict[str, Array]:
    """The numbers of a step; times become delays after the capture, in milliseconds."""
    fields = {n: c for n, c in scalars.items() if not n.startswith("t_")}
    captured = scalars.get("t_capture_ns")
    for name, column in scalars.items():
        if name.startswith("t_") and name != "t_capture_ns" and captured is not None:
            fields[name.removeprefix("t_").removesuffix("_ns") + "_delay_ms"] = (column - captured) / 1e6
    return fields


def _step_times_ns(episode: StoredEpisode) -> list[int]:
    """Capture time of each step; without them, the episode's start."""
    captured = episode.columns.get("t_capture_ns")
    return [max(0, episode.header.started_unix_ns)] * episode.steps if captured is None else _unix_ns(captured, episode)


def _unix_ns(monotonic_ns: Array, episode: StoredEpisode) -> list[int]:
    """Unix times, at least 0 because MCAP's times are unsigned."""
    times: list[int] = np.maximum(monotonic_ns + episode.header.unix_offset_ns, 0).tolist()
    return times


def named(values: Sequence[float], labels: Sequence[str] | None, prefix: str = "") -> dict[str, float]:
    """The values by their labels; if these do not fit, by their numbers after `prefix`."""
    fits = labels is not None and len(labels) == len(values)
    names = labels if labels and fits else [f"{prefix}{number}" for number in range(len(values))]
    return dict(zip(names, values, strict=True))
