"""Pictures from robots to consoles: newest wins, one under way a console and camera."""

from __future__ import annotations

from user_sys.gateway.weights import Send
from user_sys.messages import Preview
from user_sys.tunnel.wire import Payload

Camera = tuple[str, str]


class PreviewRelay:
    """Holds at most one waiting picture a console and camera. One thread calls it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._under_way: dict[str, set[Camera]] = {}
        self._waiting: dict[tuple[str, Camera], tuple[Preview, Payload]] = {}

    def console_opened(self, console: str) -> None:
        self._under_way[console] = set()

    def console_closed(self, console: str) -> None:
        self._under_way.pop(console, None)
        for key in [key for key in self._waiting if key[0] == console]:
            del self._waiting[key]

    def show(self, preview: Preview, jpeg: Payload) -> None:
        """Sends a picture to every console; keeps it instead of an older one while the camera's last is under way."""
        camera = (preview.robot, preview.camera)
        for console, under_way in self._under_way.items():
            if camera in under_way:
                self._waiting[console, camera] = (preview, jpeg)
            elif self._send(console, preview, jpeg):
                under_way.add(camera)

    def taken(self, console: str, camera: Camera) -> None:
        """A console has taken its last picture of this camera over."""
        under_way = self._under_way.get(console)
        if under_way is None:
            return
        under_way.discard(camera)
        waiting = self._waiting.pop((console, camera), None)
        if waiting is not None and self._send(console, *waiting):
            under_way.add(camera)
