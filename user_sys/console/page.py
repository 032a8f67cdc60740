"""One open page: what it asks for, and what it is sent. Everything here runs in the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from fastapi import WebSocket, WebSocketDisconnect
from fastapi.websockets import WebSocketState

from user_sys.console import wire
from user_sys.console.hub import ConsoleHub
from user_sys.errors import UserSysError, WireError

STATE_PERIOD_S = 0.25
STATE_PERIOD_MIN_S = 0.08
CURVES_PERIOD_S = 2.0
SEND_TIMEOUT_S = 5.0
SILENT_TIMEOUT_S = 150.0  # a hidden page's timers may run once a minute
MAX_REPLIES = 64
MAX_REASON_BYTES = 120  # of 123 that a close frame holds
BAD_MESSAGE = 1008

_log = logging.getLogger(__name__)


class Page:
    """One WebSocket and the person behind it.

    Args:
        socket: accepted already.
        hub: the run.
        claim_name: given the name that the page wishes, returns the one it gets.
        watch: called a few times a second while somebody sees the page.
    """

    def __init__(
        self, socket: WebSocket, hub: ConsoleHub, claim_name: Callable[[Page, str], str], watch: Callable[[], None]
    ) -> None:
        self.operator = ""
        self._socket = socket
        self._hub = hub
        self._claim_name = claim_name
        self._watch = watch
        self._looking = True
        self._wake = asyncio.Event()
        self._out: deque[wire.ToPage] = deque(maxlen=MAX_REPLIES)
        self._in_flight: set[tuple[str, str]] = set()
        self._sent_serial: dict[tuple[str, str], int] = {}
        self._state_at_s = self._curves_at_s = 0.0

    def wake(self) -> None:
        """There may be something to send."""
        self._wake.set()

    def push(self, message: wire.ToPage) -> None:
        """Sends `message` soon. Where 64 wait already, the oldest is dropped: it answered an order long past."""
        self._out.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Serves the page until it closes, is silent for too long, reads too slowly or talks nonsense."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, reading):
                task.cancel()
            results = await asyncio.gather(writing, reading, return_exceptions=True)
        failures = [e for e in results if isinstance(e, Exception) and not isinstance(e, WebSocketDisconnect)]
        await self._answer(failures)

    async def _answer(self, failures: list[Exception]) -> None:
        for failure in failures:
            match failure:
                case WireError():
                    return await self._close(BAD_MESSAGE, str(failure))
                case TimeoutError():
                    return await self._close(BAD_MESSAGE, "too slow: nothing was read or said in time")
                case _:
                    raise failure

    async def _close(self, code: int, reason: str) -> None:
        _log.warning("console.closed operator=%r: %s", self.operator, reason)
        if self._socket.application_state is not WebSocketState.CONNECTED:
            return  # sending failed already: there is nobody to tell
        short = reason.encode()[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        with contextlib.suppress(WebSocketDisconnect):  # gone before it heard why
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._socket.close(code, short)

    async def _read(self) -> None:
        while True:
            async with asyncio.timeout(SILENT_TIMEOUT_S):
                frame = await self._socket.receive()
            if frame["type"] == "websocket.disconnect":
                return
            text = frame.get("text")
            if text is None:
                raise WireError("the page sends text only")
            self._take(wire.decode(text))

    def _take(self, message: wire.FromPage) -> None:
        if not self.operator and not isinstance(message, wire.Hello):
            raise WireError("the first message is `hello`")
        match message:
            case wire.Hello(operator=wish):
                self.operator = self._claim_name(self, wish.strip())
                self.push(wire.Welcome(self.operator))
            case wire.Order(robot=robot, order=order):
                self._attempt(robot, order, lambda: self._hub.order(robot, self.operator, order))
            case wire.Drive(robot=robot, move=move, gripper=gripper):
                self._attempt(robot, "drive", lambda: self._hub.drive(robot, self.operator, move, gripper))
            case wire.Seen(robot=robot, camera=camera):
                self._in_flight.discard((robot, camera))
                self.wake()
            case wire.Look(on=on):
                self._looking = on
                self.wake()
            case wire.Ping(sent_ms=sent_ms):
                self.push(wire.Pong(sent_ms))

    def _attempt(self, robot: str, order: str, send: Callable[[], None]) -> None:
        try:
            send()
        except UserSysError as error:
            self.push(wire.Reply(robot, order, False, str(error)))

    async def _write(self) -> None:
        while True:
            while self._out:
                await self._send_text(wire.encode(self._out.popleft()))
            await self._write_state()
            if self._looking:
                self._watch()
                await self._write_pictures()
            await self._sleep()

    async def _sleep(self) -> None:
        # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):  # which says that it is time for the next state
            async with asyncio.timeout(STATE_PERIOD_S):
                await self._wake.wait()
        self._wake.clear()

    async def _write_state(self) -> None:
        now_s = time.monotonic()
        if now_s - self._state_at_s >= STATE_PERIOD_MIN_S:
            self._state_at_s = now_s
            await self._send_text(wire.encode(wire.State(self._hub.view())))
        if now_s - self._curves_at_s >= CURVES_PERIOD_S:
            self._curves_at_s = now_s
            await self._send_text(wire.encode(wire.Curves(self._hub.curves())))

    async def _write_pictures(self) -> None:
        for robot in self._hub.view().robots:
            for camera in robot.cameras:
                await self._write_picture(robot.name, camera)

    async def _write_picture(self, robot: str, camera: str) -> None:
        key = (robot, camera)
        picture = self._hub.picture(robot, camera)
        if picture is None or key in self._in_flight or picture.serial <= self._sent_serial.get(key, 0):
            return
        self._in_flight.add(key)
        self._sent_serial[key] = picture.serial
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._socket.send_bytes(wire.encode_picture(picture))

    async def _send_text(self, text: str) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._socket.send_text(text)
