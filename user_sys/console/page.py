"""The two WebSockets of an open page. All code runs in the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from fastapi import WebSocket, WebSocketDisconnect
from fastapi.websockets import WebSocketState

from user_sys.console import protocol
from user_sys.console.hub import ConsoleHub
from user_sys.errors import UserSysError, WireError
from user_sys.messages import OperatorReply
from user_sys.tunnel.flow_control import KeyedTokenBucket

STATE_PERIOD_S = 0.25
STATE_PERIOD_MIN_S = 0.08
CURVES_PERIOD_S = 2.0
SEND_TIMEOUT_S = 5.0
RECEIVE_TIMEOUT_S = 150.0  # a hidden page's timers may run once a minute
MAX_QUEUED_MESSAGES = 64
MAX_REASON_BYTES = 120  # of 123 that a close frame holds
MAX_MESSAGES_HZ = 60
FLOOD_PAUSE_S = 1.0  # the pause before a flooding page is closed, in which its messages are not read
MAX_ESTOPS_HZ = 20
MAX_PENDING_ESTOPS = 1024
POLICY_VIOLATION = 1008

_log = logging.getLogger(__name__)


class _Socket(ABC):
    """One accepted WebSocket with its two tasks: one reads, one writes."""

    def __init__(self, socket: WebSocket, hub: ConsoleHub) -> None:
        self.address = socket.client.host if socket.client else ""
        self._socket = socket
        self._hub = hub
        self._wake = asyncio.Event()
        self._out: deque[protocol.ToPage] = deque(maxlen=MAX_QUEUED_MESSAGES)

    def wake(self) -> None:
        """Checks for messages to send."""
        self._wake.set()

    def push(self, message: protocol.ToPage) -> None:
        """Queues `message`. A full queue drops its oldest message."""
        self._out.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Serves the page until it closes, times out, reads too slowly, or sends too much or an invalid message."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, reading):
                task.cancel()
            results = await asyncio.gather(writing, reading, return_exceptions=True)
        failures = [e for e in results if isinstance(e, Exception) and not isinstance(e, WebSocketDisconnect)]
        await self._report(failures)

    async def _report(self, failures: list[Exception]) -> None:
        for failure in failures:
            match failure:
                case WireError():
                    return await self._close(str(failure))
                case TimeoutError():
                    return await self._close("too slow: the page read or sent nothing in time")
                case _:
                    raise failure

    async def _close(self, reason: str) -> None:
        _log.warning("console.closed %s: %s", self._peer(), reason)
        if self._socket.application_state is not WebSocketState.CONNECTED:
            return  # sending has failed already
        short = reason.encode()[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        with contextlib.suppress(WebSocketDisconnect):  # the page has gone
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._socket.close(POLICY_VIOLATION, short)

    async def _read(self) -> None:
        while True:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                frame = await self._socket.receive()
            if frame["type"] == "websocket.disconnect":
                return
            text = frame.get("text")
            if text is None:
                raise WireError("the page sends text only")
            await self._on_message(text)

    async def _write(self) -> None:
        while True:
            while self._out:
                await self._send_text(protocol.encode(self._out.popleft()))
            await self._write_more()
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):  # the next state is due
                async with asyncio.timeout(STATE_PERIOD_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _send_text(self, text: str) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._socket.send_text(text)

    @abstractmethod
    def _peer(self) -> str:
        """The peer, for the log."""

    @abstractmethod
    async def _on_message(self, text: str) -> None:
        """Handles one message of the page. Raises WireError."""

    async def _write_more(self) -> None:
        """Sends messages that are due in addition to the pushed ones."""
        return


class PageSocket(_Socket):
    """The WebSocket of one operator's page, for all messages except e-stops.

    A page that sends more than `MAX_MESSAGES_HZ` messages a second, after a burst of one second's worth, is closed: its
    later messages could only be dropped or be late. A page that closes, or is hidden, releases the robots it drives.

    Args:
        socket: accepted already.
        hub: of the run.
        claim_name: assigns an operator's name, given the wished one.
        watch: called a few times a second while the page is visible.
    """

    def __init__(
        self,
        socket: WebSocket,
        hub: ConsoleHub,
        claim_name: Callable[[PageSocket, str], str],
        watch: Callable[[], None],
    ) -> None:
        super().__init__(socket, hub)
        self.operator = ""
        self._claim_name = claim_name
        self._watch = watch
        self._is_visible = True
        self._rate_limit = KeyedTokenBucket(MAX_MESSAGES_HZ, 1 / MAX_MESSAGES_HZ)
        self._driven: set[str] = set()
        self._in_flight: set[tuple[str, str]] = set()
        self._sent_serial: dict[tuple[str, str], int] = {}
        self._state_at_s = self._curves_at_s = 0.0

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._release()

    def _peer(self) -> str:
        return f"operator={self.operator!r}"

    async def _on_message(self, text: str) -> None:
        if self._rate_limit.wait_s("") > 0:
            self._release()
            await asyncio.sleep(FLOOD_PAUSE_S)
            raise WireError(f"more than {MAX_MESSAGES_HZ} messages a second; the page may be opened again")
        self._rate_limit.consume("")
        message = protocol.decode(text)
        if not self.operator and not isinstance(message, protocol.PageHello):
            raise WireError("the first message is `hello`")
        match message:
            case protocol.PageHello(operator=wished):
                self.operator = self._claim_name(self, wished.strip())
                self.push(protocol.OperatorAssigned(self.operator))
            case protocol.PageOrder(robot=robot, order=order):
                if order == "take-over":
                    self._driven.add(robot)
                self._attempt(
                    robot, order, lambda: self._hub.send_order(robot, self.operator, order, address=self.address)
                )
            case protocol.DriveInput(robot=robot, move=move, gripper=gripper):
                self._attempt(robot, "drive", lambda: self._hub.send_drive(robot, self.operator, move, gripper))
            case protocol.PreviewsShown(pictures=pictures):
                self._in_flight.difference_update(pictures)
                self.wake()
            case protocol.PageVisibility(on=on):
                self._is_visible = on
                if not on:
                    self._release()
                self.wake()
            case protocol.Ping(sent_ms=sent_ms):
                self.push(protocol.Pong(sent_ms))

    def _attempt(self, robot: str, order: str, send: Callable[[], None]) -> None:
        try:
            send()
        except UserSysError as error:
            self.push(protocol.OrderReply(robot, order, False, str(error)))

    def _release(self) -> None:
        """Releases the robots that the page drives, which then hold. An unreachable robot holds at its timeout."""
        for robot in self._driven:
            with contextlib.suppress(UserSysError):
                self._hub.send_order(robot, self.operator, "release")
        self._driven.clear()

    async def _write_more(self) -> None:
        await self._write_state()
        if self._is_visible:
            self._watch()
            await self._write_pictures()

    async def _write_state(self) -> None:
        now_s = time.monotonic()
        if now_s - self._state_at_s >= STATE_PERIOD_MIN_S:
            self._state_at_s = now_s
            await self._send_text(protocol.encode(protocol.StateUpdate(self._hub.view())))
        if now_s - self._curves_at_s >= CURVES_PERIOD_S:
            self._curves_at_s = now_s
            await self._send_text(protocol.encode(protocol.CurvesUpdate(self._hub.curves())))

    async def _write_pictures(self) -> None:
        for robot in self._hub.view().robots:
            for camera in robot.cameras:
                await self._write_picture(robot.name, camera)

    async def _write_picture(self, robot: str, camera: str) -> None:
        key = (robot, camera)
        picture = self._hub.preview(robot, camera)
        if picture is None or key in self._in_flight or picture.serial <= self._sent_serial.get(key, 0):
            return
        self._in_flight.add(key)
        self._sent_serial[key] = picture.serial
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._socket.send_bytes(protocol.encode_preview(picture))


class EstopSocket(_Socket):
    """The WebSocket for a page's e-stops. None is dropped; a flood is read at `MAX_ESTOPS_HZ`."""

    def __init__(self, socket: WebSocket, hub: ConsoleHub) -> None:
        super().__init__(socket, hub)
        self._rate_limit = KeyedTokenBucket(MAX_ESTOPS_HZ, 1 / MAX_ESTOPS_HZ)
        self._pending: dict[tuple[str, int], None] = {}  # robot and press, until confirmed

    def _peer(self) -> str:
        return "e-stops"

    def confirm(self, reply: OperatorReply) -> None:
        """Sends the page the result of an e-stop of its own."""
        key = (reply.robot, reply.press)
        if key not in self._pending:
            return
        if reply.accepted:
            del self._pending[key]
        self.push(protocol.EstopStatus(*key, reply.accepted, reply.reason))

    async def _on_message(self, text: str) -> None:
        match protocol.decode_estop(text):
            case protocol.EstopRequest(operator=operator, presses=presses):
                for robot, press in presses.items():
                    self._press(robot, operator, press)
            case protocol.Ping(sent_ms=sent_ms):
                self.push(protocol.Pong(sent_ms))
        self._rate_limit.consume("")
        await asyncio.sleep(self._rate_limit.wait_s(""))

    def _press(self, robot: str, operator: str, press: int) -> None:
        if (robot, press) not in self._pending:
            _log.warning("console.e-stop robot=%s operator=%r press=%d", robot[:80], operator, press)
            while len(self._pending) >= MAX_PENDING_ESTOPS:
                del self._pending[next(iter(self._pending))]
            self._pending[robot, press] = None
        try:
            self._hub.send_order(robot, operator, "e-stop", press=press, address=self.address)
        except UserSysError as error:
            self.push(protocol.EstopStatus(robot, press, False, str(error)))
