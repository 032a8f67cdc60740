"""Pictures for people are made beside the control loop."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from edge_kit import until

from user_sys.edge.previews import Previews
from user_sys.messages import Preview


def picture(camera: str, step: int) -> Preview:
    return Preview(robot="r", camera=camera, step=step)


def test_while_one_picture_is_made_only_the_newest_of_each_camera_waits() -> None:
    offered: list[tuple[str, int]] = []
    go_on = threading.Event()

    def offer(preview: Preview, jpeg: bytes) -> None:
        assert jpeg.startswith(b"\xff\xd8")
        offered.append((preview.camera, preview.step))
        assert go_on.wait(60)

    frame = np.zeros((16, 16, 3), np.uint8)
    with Previews(offer) as previews:
        previews.show(picture("front", 0), frame)
        until(lambda: offered, "the first is under way")
        for step in (1, 2):
            for camera in ("front", "wrist"):
                previews.show(picture(camera, step), frame)
        go_on.set()
        until(lambda: len(offered) == 3, "the newest ones follow")
    assert offered == [("front", 0), ("front", 2), ("wrist", 2)]


def test_what_cannot_be_encoded_is_said_by_the_next_picture() -> None:
    with Previews(lambda *_: None) as previews:
        previews.show(picture("front", 0), np.zeros(3, np.uint8))

        def refused() -> bool:
            try:
                previews.show(picture("wrist", 1), np.zeros((16, 16, 3), np.uint8))
            except ValueError:
                return True
            return False

        until(refused, "it raises what the encoder raised")
        with pytest.raises(ValueError):
            previews.show(picture("front", 2), np.zeros((16, 16, 3), np.uint8))
