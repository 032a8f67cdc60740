"""3D views of robots: a process with viser for each watched robot, behind the console's access control.

The console serves viser's page, and forwards what viser sends to a page. Nothing that a page sends reaches viser: a
view is read-only, and viser's own sharing through an outside server cannot be reached. A process starts with the first
page and ends with the last; one that fails disturbs neither console nor robots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from hal.errors import install_hint
from hal.machine_folder import make_runtime_folder, runtime_folder
from hal.pacing import TokenBucket
from user_sys.console.accounts import SignIn
from user_sys.console.hub import ConsoleHub
from user_sys.console.scene_process import SERVING, SceneSetup
from user_sys.errors import RunError, UserSysError

MAX_SCENES = 4  # processes of 110 MB
MAX_WATCHERS = 8  # pages of one robot
FRAME_PERIOD_S = 0.04  # between looks for a new pose; a robot sends 12 a second at most
POSE_PERIOD_S, POSE_TTL_S = 1.0, 3.0
START_TIMEOUT_S = 120.0  # it takes 3 s of a core
UNWATCHED_S = 10.0  # a process ends after so long without a page
RETRY_S = 5.0  # after a failure; viser's page connects again each second
SEND_TIMEOUT_S = 5.0
SIGN_IN_CHECK_S = 2.0
MAX_SCENE_BYTES = 64 << 20  # of one message of viser, with meshes
MAX_READ_HZ = 60.0  # messages of a page, which are dropped
TRY_AGAIN_LATER, POLICY_VIOLATION = 1013, 1008

_log = logging.getLogger(__name__)


class SceneViews:
    """The 3D views of a console. All code runs in the server's event loop.

    Args:
        hub: of the run.
        sources: what each robot is drawn from, see `user_sys.compose.drawing_source`.
        is_valid: whether a sign-in is still valid.
    """

    def __init__(self, hub: ConsoleHub, sources: Mapping[str, str], is_valid: Callable[[SignIn], bool]) -> None:
        self._hub, self._sources, self._is_valid = hub, sources, is_valid
        self._scenes: dict[str, _Scene] = {}

    def missing(self, robot: str) -> str:
        """Why there is no 3D view of the robot, in one line; empty if there can be one."""
        if not self._sources.get(robot):
            return "No 3D view: set the robot's `description` to its MJCF or URDF file."
        absent = [name for name in ("viser", "mujoco") if find_spec(name) is None]
        return f"No 3D view: {install_hint('scene')}." if absent else ""

    async def start(self, robot: str) -> Path:
        """The socket of the robot's process, which is started if need be. Raises RunError: it cannot be."""
        if why := self.missing(robot):
            raise RunError(why)
        self._scenes = {name: scene for name, scene in self._scenes.items() if scene.is_running}
        if robot not in self._scenes:
            if len(self._scenes) >= MAX_SCENES:
                raise RunError(f"{MAX_SCENES} robots are shown in 3D already; close a view")
            self._scenes[robot] = _Scene(self._hub, robot, self._sources[robot])
        return await self._scenes[robot].wait_until_serving()

    async def serve(self, robot: str, page: WebSocket) -> None:
        """Shows the robot to a page until it closes."""
        try:
            path = await self.start(robot)
        except UserSysError as error:
            await page.close(TRY_AGAIN_LATER, str(error)[:120])
            return
        scene = self._scenes[robot]
        if scene.watchers >= MAX_WATCHERS:
            await page.close(TRY_AGAIN_LATER, f"{MAX_WATCHERS} pages show this robot already")
            return
        scene.watchers += 1
        try:
            offered = [Subprotocol(each) for each in page.scope.get("subprotocols", ())]
            async with unix_connect(
                str(path), "ws://scene/", subprotocols=offered, compression=None, max_size=MAX_SCENE_BYTES
            ) as viser:
                await page.accept(viser.subprotocol)
                await _first_of(self._forward(viser, page), _drop_messages(page))
        except (OSError, TimeoutError, WebSocketException, WebSocketDisconnect) as error:
            _log.info("scene.closed robot=%s: %s", robot, error)
        finally:
            scene.watchers -= 1
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it is closed already
                await page.close(TRY_AGAIN_LATER)

    async def _forward(self, viser: ClientConnection, page: WebSocket) -> None:
        checked_s = 0.0
        async for message in viser:
            if (now_s := time.monotonic()) - checked_s > SIGN_IN_CHECK_S:
                checked_s = now_s
                if not self._is_valid(page.scope["sign_in"]):
                    await page.close(POLICY_VIOLATION, "the sign-in has ended; sign in again")
                    return
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await (page.send_bytes(message) if isinstance(message, bytes) else page.send_text(message))


async def _first_of(*works: Coroutine[None, None, None]) -> None:
    """Runs all until one ends, and raises its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drop_messages(page: WebSocket) -> None:
    rate_limit = TokenBucket(MAX_READ_HZ, MAX_READ_HZ)
    while (await page.receive())["type"] != "websocket.disconnect":
        rate_limit.consume()
        await asyncio.sleep(rate_limit.wait_s(1))


class _Scene:
    """The process of one robot.

    Attributes:
        watchers: pages that show it.
    """

    def __init__(self, hub: ConsoleHub, robot: str, source: str) -> None:
        self._hub, self._robot, self._source = hub, robot, source
        self.watchers = 0
        self._serving: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    @property
    def is_running(self) -> bool:
        """Also for a while after a failure, so that it is not repeated at once."""
        return not self._task.done()

    async def wait_until_serving(self) -> Path:
        """Raises RunError: the process failed."""
        return await asyncio.shield(self._serving)

    async def _run(self) -> None:
        try:
            make_runtime_folder()
            with TemporaryDirectory(prefix="scene-", dir=runtime_folder()) as folder:
                await self._serve(Path(folder) / "viser")
        except (OSError, TimeoutError, UserSysError) as error:
            why = str(error) or f"viser did not start within {START_TIMEOUT_S:.0f} s"
            _log.warning("scene.failed robot=%s: %s", self._robot, why)
            if not self._serving.done():
                self._serving.set_exception(RunError(f"No 3D view of {self._robot}: {why}"))
                self._serving.exception()  # a page may not have waited for it
            await asyncio.sleep(RETRY_S)

    async def _serve(self, path: Path) -> None:
        if (spec := self._hub.robot_spec(self._robot)) is None:
            raise RunError("it has not reported yet")
        program = (sys.executable, "-m", "user_sys.console.scene_process", str(path))
        process = await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(SceneSetup(self._source, spec)) + b"\n")
            async with asyncio.timeout(START_TIMEOUT_S):
                said = (await process.stdout.readline()).decode(errors="replace").strip()
            if said != SERVING:
                raise RunError(said or "viser ended; read the console's log")
            self._serving.set_result(path)
            await self._feed(process, process.stdin)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _feed(self, process: Process, into: asyncio.StreamWriter) -> None:
        """Passes poses on, and that there is none any more, until no page shows them. Raises RunError: it ended."""
        shown, watched_s, asked_s = None, time.monotonic(), 0.0
        while process.returncode is None:
            now_s = time.monotonic()
            watched_s = now_s if self.watchers else watched_s
            if now_s - watched_s > UNWATCHED_S:
                return
            if now_s - asked_s > POSE_PERIOD_S:
                asked_s = now_s
                with contextlib.suppress(UserSysError):  # the gateway is away
                    self._hub.request_pose(self._robot, POSE_TTL_S)
            if (pose := self._hub.pose(self._robot)) is not shown:
                shown = pose
                into.write(msgspec.json.encode(pose) + b"\n")
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await into.drain()
            await asyncio.sleep(FRAME_PERIOD_S)
        raise RunError("viser ended; read the console's log")


def scene_routes(views: SceneViews) -> APIRouter:
    """The page and the WebSocket of each robot's view, and whether there is one."""
    router = APIRouter()

    @router.get("/scene/{robot}/")
    async def page(robot: str) -> Response:
        try:
            await views.start(robot)
        except UserSysError as error:
            return PlainTextResponse(f"{error}\n", 503)
        found = find_spec("viser")
        assert found is not None and found.origin is not None
        return FileResponse(Path(found.origin).parent / "client" / "build" / "index.html")

    @router.get("/api/scene/{robot}")
    async def missing(robot: str) -> Response:
        return JSONResponse(views.missing(robot))

    @router.websocket("/scene/{robot}")
    async def show(socket: WebSocket, robot: str) -> None:
        await views.serve(robot, socket)

    return router
