"""Streams steps and pictures to other viewers on this computer: Rerun, or Foxglove by its WebSocket.

Both are read-only: nothing that a viewer sends is handled.
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
from user_sys.episode import APPLIED_ACTION, IMAGE_PREFIX
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import StoredEpisode, element_labels
from user_sys.interchange.frames import Frame, encode_png

LOOPBACK = "127.0.0.1"
RERUN_PORT, FOXGLOVE_PORT = 9876, 8765
FLUSH_TIMEOUT_S = 30.0
STEP_COLUMNS = ("reward", "phase", "policy_version")


class Viewer(ABC):
    """Where a robot's steps and pictures are shown. Times are Unix times in ns."""

    @abstractmethod
    def show_picture(self, topic: str, image: Frame, at_ns: int) -> None:
        """`image` is a JPEG file, or uint8 (h, w, 3) RGB."""

    @abstractmethod
    def show_numbers(self, topic: str, numbers: Mapping[str, float], at_ns: int) -> None:
        """One value for each label."""


class RerunViewer(Viewer):
    """A Rerun recording."""

    def __init__(self, name: str) -> None:
        import rerun

        self._rerun, self.recording = rerun, rerun.RecordingStream(name)

    def show_picture(self, topic: str, image: Frame, at_ns: int) -> None:
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
            self.recording.log([*topic.split("/"), label], self._rerun.Scalars(value))


class FoxgloveViewer(Viewer):
    """Topics of a Foxglove WebSocket server."""

    def __init__(self) -> None:
        import foxglove
        from foxglove.channels import CompressedImageChannel

        self._foxglove, self._picture_channel = foxglove, CompressedImageChannel
        self._channels: dict[str, object] = {}

    def show_picture(self, topic: str, image: Frame, at_ns: int) -> None:
        from foxglove.messages import CompressedImage, Timestamp

        channel = self._channels.setdefault(topic, self._picture_channel(f"/{topic}"))
        content, kind = (encode_png(image), "png") if isinstance(image, np.ndarray) else (image, "jpeg")
        stamp = Timestamp(*divmod(at_ns, 10**9))
        message = CompressedImage(timestamp=stamp, frame_id=topic, data=bytes(content), format=kind)
        channel.log(message, log_time=at_ns)  # type: ignore[attr-defined]

    def show_numbers(self, topic: str, numbers: Mapping[str, float], at_ns: int) -> None:
        if topic not in self._channels:
            properties = {label: {"type": "number"} for label in numbers}
            schema = {"type": "object", "title": topic.replace("/", "."), "properties": properties}
            self._channels[topic] = self._foxglove.Channel(f"/{topic}", schema=schema)
        finite = {label: value for label, value in numbers.items() if math.isfinite(value)}
        self._channels[topic].log(finite, log_time=at_ns)  # type: ignore[attr-defined]


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
    times_ns = episode.columns.get("t_capture_ns", np.zeros(episode.steps, np.int64))
    vectors = [n for n in episode.columns if n.startswith("observation.") or n in ("action", APPLIED_ACTION)]
    for step, at_ns in enumerate(int(each) + episode.header.unix_offset_ns for each in times_ns):
        if stop is not None and stop.wait(max(0, times_ns[step] - times_ns[max(0, step - 1)]) / 1e9):
            return
        for camera, frames in episode.frames.items():
            if (frame := frames[step]) is not None:
                viewer.show_picture(f"{robot}/{camera.removeprefix(IMAGE_PREFIX)}", frame, at_ns)
        for name in vectors:
            values = episode.columns[name][step].reshape(-1).tolist()
            viewer.show_numbers(f"{robot}/{name}", named(values, labels.get(name)), at_ns)
        numbers = {name: float(episode.columns[name][step]) for name in STEP_COLUMNS if name in episode.columns}
        viewer.show_numbers(f"{robot}/step", numbers, at_ns)


def named(values: Sequence[float], labels: Sequence[str] | None) -> dict[str, float]:
    """The values by their labels, or by their numbers if these do not fit."""
    fits = labels is not None and len(labels) == len(values)
    return dict(zip(labels if labels and fits else map(str, range(len(values))), values, strict=True))
