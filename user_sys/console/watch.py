"""Watches one robot through a running console, as a page that gives no orders."""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
import threading
import time
import urllib.error
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Origin

from user_sys.errors import RunError
from user_sys.interchange.viewers import named

POLL_S = 0.5
PING_PERIOD_S = 5.0
SEEN_PERIOD_S = 0.02  # one acknowledgement for all pictures of this time: the console closes a flood of messages
SIGN_IN_TIMEOUT_S = 30.0
NAME = "view"


class WatchedRobot(Protocol):
    """Where a robot is shown; see `user_sys.interchange.viewers.Viewer`."""

    def show_picture(self, topic: str, image: bytes, at_ns: int) -> None: ...

    def show_numbers(self, topic: str, numbers: dict[str, float], at_ns: int) -> None: ...


@dataclass(frozen=True)
class PersonSignIn:
    """A person's account at a console.

    Attributes:
        certificate: PEM file of the console's own certificate; None if a public authority has signed it.
    """

    name: str
    password: str = field(repr=False)
    certificate: Path | None = None


def watch_robot(
    address: str, robot: str, into: WatchedRobot, stop: threading.Event, person: PersonSignIn | None = None
) -> None:
    """Shows the robot's pictures, state and control periods until `stop` is set or the console ends.

    Args:
        address: of the console's page, with its token.
        person: who signs in to a console with accounts.

    Raises:
        RunError: the console does not answer or refuses the sign-in, or its run has no such robot.
    """
    parts = urlsplit(address)
    options: dict[str, Any] = {} if person is None else _sign_in(f"https://{parts.netloc}", person)
    url = f"{'ws' if person is None else 'wss'}://{parts.netloc}/ws?{parts.query}"
    try:
        asyncio.run(_watch(url, options, robot, into, stop))
    except (OSError, WebSocketException) as error:
        raise RunError(f"the console at {parts.netloc} ended the connection or does not answer: {error}") from None


async def _watch(url: str, options: dict[str, Any], robot: str, into: WatchedRobot, stop: threading.Event) -> None:
    # Not websockets.sync: its two threads share one TLS connection, which loses one handshake in a hundred.
    async with connect(url, proxy=None, max_size=None, **options) as socket:
        hello = {"type": "hello", "operator": NAME}
        look = {"type": "look", "on": True, "large": [robot]}
        for request in (hello, look, {"type": "trace", "robot": robot, "pose": True}):
            await socket.send(json.dumps(request))
        labels: dict[str, list[str]] = {}
        seen: list[tuple[str, str]] = []
        pinged_s = seen_s = time.monotonic()
        while not stop.is_set():
            now_s = time.monotonic()
            if now_s - pinged_s > PING_PERIOD_S:  # the console closes a silent page
                pinged_s = now_s
                await socket.send(json.dumps({"type": "ping", "sent_ms": 0.0}))
            if seen and now_s - seen_s > SEEN_PERIOD_S:
                await socket.send(json.dumps({"type": "seen", "pictures": seen}))
                seen, seen_s = [], now_s
            try:
                async with asyncio.timeout(SEEN_PERIOD_S if seen else POLL_S):
                    message = await socket.recv()
            except TimeoutError:
                continue
            if isinstance(message, bytes):
                length = struct.unpack_from("<I", message)[0]
                header = json.loads(message[4 : 4 + length])
                seen.append((header["robot"], header["camera"]))
                if header["robot"] == robot:
                    into.show_picture(f"{robot}/{header['camera']}", message[4 + length :], time.time_ns())
                continue
            _show(json.loads(message), robot, into, labels)


def _sign_in(origin: str, person: PersonSignIn) -> dict[str, Any]:
    """The options of a signed-in WebSocket. Raises RunError."""
    try:
        context = ssl.create_default_context()
        if person.certificate is not None:
            context.load_verify_locations(person.certificate)
        entered = json.dumps({"name": person.name, "password": person.password}).encode()
        request = Request(f"{origin}/sign-in", entered, {"Origin": origin, "Content-Type": "application/json"})
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        with opener.open(request, timeout=SIGN_IN_TIMEOUT_S) as reply:
            cookie = reply.headers["set-cookie"].partition(";")[0]
    except urllib.error.HTTPError as error:
        raise RunError(
            f"{origin} refuses {person.name!r}: {error.read(200).decode(errors='replace').strip()}"
        ) from None
    except OSError as error:
        raise RunError(f"{origin} does not answer: {error}") from None
    return {"ssl": context, "origin": Origin(origin), "additional_headers": {"Cookie": cookie}}


def _show(message: dict[str, Any], robot: str, into: WatchedRobot, labels: dict[str, list[str]]) -> None:
    """Shows one message of the console. Keeps the labels of the elements of action and state in `labels`."""
    if message["type"] == "state" and robot not in (known := [each["name"] for each in message["view"]["robots"]]):
        raise RunError(f"the run has no robot {robot!r}; there are {known}")
    if message["type"] != "trace":
        return
    labels["action"] = [signal["label"] for signal in message["signals"]] or labels.get("action", [])
    labels["state"] = message["state_labels"] or labels.get("state", [])
    if message["state"]:
        numbers = named(message["state"], labels["state"])
        into.show_numbers(f"{robot}/observation.state", numbers, time.time_ns())
    newest_s = message["periods"][-1][0] if message["periods"] else 0.0
    for t_s, requested, applied, limits, act_ms, apply_ms in message["periods"]:
        at_ns = time.time_ns() - round((newest_s - t_s) * 1e9)
        for topic, values in (("action", requested), ("applied_action", applied)):
            if values:
                into.show_numbers(f"{robot}/{topic}", named(values, labels["action"]), at_ns)
        into.show_numbers(f"{robot}/step", {"limits": limits, "act_ms": act_ms, "apply_ms": apply_ms}, at_ns)
