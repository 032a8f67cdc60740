"""Pictures for people, made beside the control loop: the newest of each camera, never an older one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from hal.spec import Array
from user_sys.edge.recorder import encode_jpeg
from user_sys.messages import Preview
from user_sys.tunnel.mailbox import Mailbox

MAX_CAMERAS = 64
LOOK_EVERY_S = 0.5
CLOSE_TIMEOUT_S = 5.0


class Previews:
    """Encodes in a thread of its own and offers what it made. The control loop's thread alone calls `show`.

    Args:
        offer: sends a JPEG picture or drops it; never blocks.
    """

    def __init__(self, offer: Callable[[Preview, bytes], object]) -> None:
        self._offer = offer
        self._waiting: Mailbox[tuple[Preview, Array]] = Mailbox(MAX_CAMERAS)
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="previews", daemon=True)

    def show(self, preview: Preview, image: Array) -> None:
        """Takes a picture over, copied; one of its camera that still waits is dropped. Raises what went wrong."""
        if self._failure is not None:
            raise self._failure
        self._waiting.put((preview, image.copy()), key=preview.camera)

    def _run(self) -> None:
        while not self._stopping.is_set() and self._failure is None:
            if (found := self._waiting.wait(LOOK_EVERY_S)) is None:
                continue
            preview, image = found
            try:
                self._offer(preview, encode_jpeg(image))
            except Exception as error:  # of any kind: the next `show` raises it
                self._failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """What still waits is dropped."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)
