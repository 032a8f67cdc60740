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
from msgspec.structs import replace

from hal.errors import HalError
from hal.pacing import TokenBucket
from hal.spec import STATE
from hal.state_database import AuditEntry, AuditSink
from user_sys.console import protocol
from user_sys.console.accounts import SignIn
from user_sys.console.hub import ConsoleHub, PreviewImage, ShownCameras
from user_sys.errors import UserSysError, WireError
from user_sys.interchange.episodes import element_labels
from user_sys.messages import OperatorReply

STATE_PERIOD_S = 0.25
STATE_PERIOD_MIN_S = 0.08
CURVES_PERIOD_S = 2.0
SIGN_IN_PERIOD_S = 2.0
POSE_TTL_S = 3 * CURVES_PERIOD_S
SEND_TIMEOUT_S = 5.0
RECEIVE_TIMEOUT_S = 150.0  # a hidden page's timers may run once a minute
MAX_QUEUED_MESSAGES = 64
MAX_REASON_BYTES = 120  # of 123 that a close frame holds
MAX_MESSAGES_HZ = 60
SEEN_COST = 0.5  # of a `PreviewsShown`, in messages: a page that drives sends 50 of them, 25 inputs and 5 pings
FLOOD_PAUSE_S = 1.0  # the pause before a flooding page is closed, in which its messages are not read
MAX_ORDER_AGE_S = 1.5  # the page sends orders while the last reply is at most 0.75 s old, plus the network's delay
MAX_ESTOPS_HZ = 20
MAX_PENDING_ESTOPS = 1024
POLICY_VIOLATION = 1008
TOO_OLD = "it came too late, as the network was interrupted; give it again if it still applies"
VIEWER = "a viewer may watch, and press the e-stop"

_log = logging.getLogger(__name__)


class _Socket(ABC):
    """One accepted WebSocket: one task reads, one writes, and one waits until another connection takes its place."""

    def __init__(
        self, socket: WebSocket, hub: ConsoleHub, audit: AuditSink, is_valid: Callable[[SignIn], bool]
    ) -> None:
        """`audit` receives refusals. `is_valid`: whether the person's sign-in is still valid; if not, it is closed."""
        self.address = socket.client.host if socket.client else ""
        self._audit, self._is_valid = audit, is_valid
        self._sign_in: SignIn = socket.scope["sign_in"]
        self._checked_s = time.monotonic()
        self._socket = socket
        self._hub = hub
        self._wake, self._replaced = asyncio.Event(), asyncio.Event()
        self._heard_s = time.monotonic()
        self._out: deque[protocol.ToPage] = deque(maxlen=MAX_QUEUED_MESSAGES)

    @property
    def person(self) -> str:
        """The name of the account; empty on loopback."""
        return self._sign_in.name

    def wake(self) -> None:
        """Checks for messages to send."""
        self._wake.set()

    @property
    def silent_s(self) -> float:
        """Seconds since the page's last message. A page that is not hidden sends several a second."""
        return time.monotonic() - self._heard_s

    def make_way(self) -> None:
        """Closes the connection soon, for another one of the same person."""
        self._replaced.set()

    def push(self, message: protocol.ToPage) -> None:
        """Queues `message`. A full queue drops its oldest message."""
        self._out.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Serves the page until it closes, times out, reads too slowly, or sends too much or an invalid message."""
        tasks = [asyncio.create_task(each) for each in (self._write(), self._read(), self._wait_until_replaced())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
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
        self._audit_refusal(reason)
        if self._socket.application_state is not WebSocketState.CONNECTED:
            return  # sending has failed already
        short = reason.encode()[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        with contextlib.suppress(WebSocketDisconnect):  # the page has gone
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._socket.close(POLICY_VIOLATION, short)

    def _audit_refusal(self, reason: str, robot: str = "", order: str = "") -> None:
        who = AuditEntry(event="refused", role="console", person=self._sign_in.name, address=self.address)
        self._audit(replace(who, robot=robot, order=order, reason=reason))

    async def _read(self) -> None:
        while True:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                frame = await self._socket.receive()
            self._heard_s = time.monotonic()
            if frame["type"] == "websocket.disconnect":
                return
            text = frame.get("text")
            if text is None:
                raise WireError("the page sends text only")
            await self._on_message(text)

    async def _wait_until_replaced(self) -> None:
        await self._replaced.wait()
        raise WireError("silent: another page of the same person takes its place")

    async def _write(self) -> None:
        while True:
            while self._out:
                await self._send_text(protocol.encode(self._out.popleft()))
            if time.monotonic() - self._checked_s >= SIGN_IN_PERIOD_S:
                self._checked_s = time.monotonic()
                if not self._is_valid(self._sign_in):
                    raise WireError("the sign-in has ended; sign in again")
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
        watch: requests pictures; called often while the page is visible. With True it does so soon.
        is_valid: whether the person's sign-in is still valid; if not, the page is closed.
        audit: receives refusals.
    """

    def __init__(
        self,
        socket: WebSocket,
        hub: ConsoleHub,
        claim_name: Callable[[PageSocket, str], str],
        watch: Callable[[bool], None],
        is_valid: Callable[[SignIn], bool],
        audit: AuditSink,
    ) -> None:
        super().__init__(socket, hub, audit, is_valid)
        self.operator = ""
        self._claim_name = claim_name
        self._watch = watch
        self.shown: ShownCameras | None = ShownCameras()  # None while it is hidden
        self._rate_limit = TokenBucket(MAX_MESSAGES_HZ, MAX_MESSAGES_HZ)
        self._driven: set[str] = set()
        self._in_flight: set[tuple[str, str]] = set()
        self._sent_serial: dict[tuple[str, str], int] = {}
        self._traced, self._traced_periods = "", -1  # the robot whose traces are shown, and how many it has got
        self._traces_pose = False
        self._state_at_s = self._curves_at_s = 0.0

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._release()

    def make_way(self) -> None:
        self._release()  # before another page drives under the same name
        super().make_way()

    def _peer(self) -> str:
        return f"operator={self.operator!r}"

    async def _on_message(self, text: str) -> None:
        if self._rate_limit.wait_s(1) > 0:
            self._release()
            await asyncio.sleep(FLOOD_PAUSE_S)
            raise WireError(f"more than {MAX_MESSAGES_HZ} messages a second; the page may be opened again")
        message = protocol.decode(text)
        self._rate_limit.consume(SEEN_COST if isinstance(message, protocol.PreviewsShown) else 1)
        if not self.operator and not isinstance(message, protocol.PageHello):
            raise WireError("the first message is `hello`")
        match message:
            case protocol.PageHello(operator=wished):
                self.operator = self._claim_name(self, self._sign_in.name or wished.strip())
                self.push(protocol.OperatorAssigned(self.operator, self._sign_in.role, bool(self._sign_in.name)))
            case protocol.PageOrder(robot=robot, order=order) if self._sign_in.role == "viewer":
                self._refuse(robot, order, VIEWER)
            case protocol.DriveInput(robot=robot) if self._sign_in.role == "viewer":
                self._refuse(robot, "drive", VIEWER)
            case protocol.PageOrder(robot=robot, order=order, server_s=float(server_s)) if (
                time.monotonic() - server_s > MAX_ORDER_AGE_S
            ):
                self.push(protocol.OrderReply(robot, order, False, TOO_OLD))
            case protocol.PageOrder(robot=robot, order="pause") if self._sign_in.role != "admin":
                self._refuse(robot, "pause", "only an admin pauses robots")
            case protocol.PageOverride():
                await self._override(message)
            case protocol.PageOrder(robot=robot, order=order, episode=episode):
                is_sent = self._attempt(
                    robot,
                    order,
                    lambda: self._hub.send_order(robot, self.operator, order, address=self.address, episode=episode),
                )
                if is_sent and order in ("take-over", "request-control"):
                    self._driven.add(robot)
            case protocol.DriveInput():
                self._attempt(message.robot, "drive", lambda: self._drive(message))
            case protocol.PreviewsShown(pictures=pictures):
                self._in_flight.difference_update(pictures)
                self.wake()
            case protocol.PageVisibility(on=on, large=large, thumbnails=thumbnails):
                self.shown = ShownCameras(large, thumbnails) if on else None
                if on:
                    self._watch(True)
                else:
                    self._release()
                self.wake()
            case protocol.TraceRequest(robot=robot, pose=pose):
                self._traced, self._traced_periods, self._traces_pose = robot, -1, pose
                self.wake()
            case protocol.Ping(sent_ms=sent_ms):
                self.push(protocol.Pong(sent_ms, time.monotonic()))

    def _refuse(self, robot: str, order: str, reason: str) -> None:
        """Refuses an order that the person's role does not permit."""
        self._audit_refusal(reason, robot, order)
        self.push(protocol.OrderReply(robot, order, False, reason))

    def _drive(self, message: protocol.DriveInput) -> None:
        self._hub.send_drive(
            message.robot, self.operator, message.move, message.gripper, rewind=message.rewind, joint=message.joint
        )

    def _attempt(self, robot: str, order: str, send: Callable[[], None]) -> bool:
        """Returns whether it was sent; the page gets the reason if it was not."""
        try:
            send()
        except UserSysError as error:
            self.push(protocol.OrderReply(robot, order, False, str(error)))
            return False
        return True

    async def _override(self, message: protocol.PageOverride) -> None:
        robot, order = message.robot, message.order
        if self._sign_in.role != "admin":
            return self._refuse(robot, order, "only an admin takes robots out of use")
        try:
            await asyncio.to_thread(self._hub.override, robot, order, self.operator, message.reason)
        except (UserSysError, HalError) as error:
            self.push(protocol.OrderReply(robot, order, False, str(error)))
        else:
            self.push(protocol.OrderReply(robot, order, True, ""))

    def _release(self) -> None:
        """Releases the robots that the page drives, which then hold. An unreachable robot holds at its timeout."""
        for robot in self._driven:
            with contextlib.suppress(UserSysError):
                self._hub.send_order(robot, self.operator, "release")
        self._driven.clear()

    async def _write_more(self) -> None:
        await self._write_state()
        if self.shown is not None:
            self._watch(False)
            for picture in self._hub.previews(self.shown):
                await self._write_picture(self._hub.newest(picture))  # sending the one before may take long

    async def _write_state(self) -> None:
        now_s = time.monotonic()
        if now_s - self._state_at_s >= STATE_PERIOD_MIN_S:
            self._state_at_s = now_s
            await self._send_text(protocol.encode(protocol.StateUpdate(self._hub.view())))
            if self._traced and self.shown is not None:
                await self._write_trace()
        if now_s - self._curves_at_s >= CURVES_PERIOD_S:
            self._curves_at_s = now_s
            if self._traces_pose:
                self._attempt(self._traced, "pose", lambda: self._hub.request_pose(self._traced, POSE_TTL_S))
            await self._send_text(protocol.encode(protocol.CurvesUpdate(self._hub.progress.curves())))

    async def _write_trace(self) -> None:
        robot, known = self._traced, self._traced_periods
        try:
            self._traced_periods, periods = self._hub.periods(robot, max(0, known))
            spec = self._hub.robot_spec(robot)
            pose = self._hub.pose(robot) if self._traces_pose else None
        except UserSysError:
            return  # it has not reported yet
        update = protocol.TraceUpdate(robot, (), periods, state=() if pose is None else pose.state)
        if known < 0:
            update = replace(update, limits=protocol.LIMIT_NAMES)
        if known < 0 and spec is not None:
            action = spec.action
            signals = tuple(map(protocol.Signal, action.labels, action.units, action.low, action.high))
            update = replace(update, signals=signals, state_labels=element_labels(spec).get(STATE, ()))
        if update.limits or update.periods or update.state:
            await self._send_text(protocol.encode(update))

    async def _write_picture(self, picture: PreviewImage) -> None:
        key = (picture.robot, picture.camera)
        if key in self._in_flight or picture.serial <= self._sent_serial.get(key, 0):
            return
        self._in_flight.add(key)
        self._sent_serial[key] = picture.serial
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._socket.send_bytes(protocol.encode_preview(picture, self._hub.age_s(picture)))


class EstopSocket(_Socket):
    """The WebSocket for a page's e-stops. None is dropped; a flood is read at `MAX_ESTOPS_HZ`."""

    def __init__(
        self, socket: WebSocket, hub: ConsoleHub, audit: AuditSink, is_valid: Callable[[SignIn], bool]
    ) -> None:
        super().__init__(socket, hub, audit, is_valid)
        self._rate_limit = TokenBucket(MAX_ESTOPS_HZ, MAX_ESTOPS_HZ)
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
                    self._press(robot, self._sign_in.name or operator, press)
            case protocol.Ping(sent_ms=sent_ms):
                self.push(protocol.Pong(sent_ms, time.monotonic()))
        self._rate_limit.consume()
        await asyncio.sleep(self._rate_limit.wait_s(1))

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
