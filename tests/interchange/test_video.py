"""Videos, and the effects of their encoders on the process."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from user_sys.errors import DataSetError
from user_sys.interchange.video import ENCODERS, VideoReader, VideoWriter


@pytest.mark.parametrize("codec", ENCODERS)
def test_video_frames_round_trip(tmp_path: Path, codec: str) -> None:
    writer = VideoWriter(tmp_path / "v.mp4", 64, 96, 10.0, codec)
    for shade in (20, 120, 220):
        writer.write(np.full((64, 96, 3), shade, np.uint8))
    writer.close()
    reader = VideoReader(tmp_path / "v.mp4")
    assert [round(float(frame.mean()), -1) for frame in reader.read(0.0, 3, 10.0)] == [20, 120, 220]
    reader.close()


def test_unsupported_video_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataSetError, match="refuses frames of"):
        VideoWriter(tmp_path / "v.mp4", 64, 1_000_000, 10.0, "av1")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such priorities")
@pytest.mark.parametrize("codec", ENCODERS)
def test_encoder_restores_process_priority(tmp_path: Path, codec: str) -> None:
    """With permission, SVT-AV1 gives its caller real-time priority, which child processes would inherit."""
    writer = VideoWriter(tmp_path / "v.mp4", 64, 64, 10.0, codec)
    writer.write(np.zeros((64, 64, 3), np.uint8))
    assert schedulers() <= {os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE}
    writer.close()


def schedulers() -> set[int]:
    """Of all threads of this process; threads of other tests may be ending."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            found.add(os.sched_getscheduler(int(thread)))
    return found
