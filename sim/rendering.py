"""Pictures of a simulated robot's world, drawn without a screen (EGL).

``python -m sim.rendering`` tries whether that works here: status 0, or 1 with the reason.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeVar

import mujoco
import numpy as np

from hal.camera import Camera, CameraFrame
from hal.errors import HardwareLost, SpecError
from hal.spec import Array, CameraSpec
from sim.robot import SimRobot
from sim.world import MujocoWorld

EGL_MISSING = (
    "cannot draw without a screen, because EGL is missing or broken ({cause}); "
    "on Debian or Ubuntu: apt-get install libegl1 libegl-mesa0"
)

TIME_TOLERANCE_S = 1e-6  # of simulated time
REAL_TIME_WAIT_SHARE = 0.1  # of a control period, for a picture
T = TypeVar("T")
NO_REQUEST = (-1, 0.0, 0)
_FLAGS_OFF = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX")


class SimCamera(Camera):
    """One camera of a simulated robot. Cameras of one robot share a canvas, which the last to close frees.

    The thread that connects a camera reads and closes it, and moves the robot.
    """

    def __init__(self, robot: SimRobot, spec: CameraSpec) -> None:
        self.spec = spec
        self._robot = robot
        self._canvas: SceneRenderer | None = None
        self._still: mujoco.MjData | None = None  # what a live picture is drawn of while the world moves on
        self._asked = NO_REQUEST  # of the newest picture: its world's resets and time, s, and when that was, ns
        self._drawing: Future[Array] | None = None
        self._newest: CameraFrame | None = None

    def connect(self) -> None:
        """Opens the drawing context (0.2 s, once a robot).

        Raises:
            HardwareLost: the robot is not connected, or EGL is missing; the message says what to install.
            SpecError: the scene has no such camera, or the picture is larger than 1280 by 960.
        """
        if self._canvas is None:
            _require_renderable(self.spec, self._robot.world)
            self._canvas = SceneRenderer.acquire(self._robot.world, self, own_thread=self.real_time)

    def read(self) -> CameraFrame:
        """The world as it is now (a few milliseconds), or the frame before while simulated time asks for no other.

        A `live` camera waits for a picture a tenth of a control period at most. What is not finished then comes with a
        later call; only the first picture after a reset is waited for.

        Raises HardwareLost unless connected.
        """
        if self._canvas is None:
            raise HardwareLost(f"camera {self.spec.name!r} is not connected; call connect() first")
        resets, asked_s, _ = self._asked
        first = resets != self._robot.world.reset_count
        self._take(None if first else 0.0)
        passed_s = self._robot.world.data.time - asked_s
        if self._drawing is None and (first or not 0 < passed_s < 1 / self.spec.rate_hz - TIME_TOLERANCE_S):
            self._draw(self._canvas, self._robot.world)
        frame = self._take(REAL_TIME_WAIT_SHARE * self._robot.spec.period_s if self.real_time and not first else None)
        assert frame is not None  # the first one was waited for
        return frame

    def _draw(self, canvas: SceneRenderer, world: MujocoWorld) -> None:
        data = world.data
        if self.real_time:
            self._still = self._still or mujoco.MjData(world.model)
            mujoco.mj_copyData(self._still, world.model, data)
            data = self._still
        self._asked = world.reset_count, world.data.time, time.monotonic_ns()
        self._drawing = canvas.render(data, self.spec)

    def _take(self, wait_s: float | None) -> CameraFrame | None:
        """The newest frame that is finished within `wait_s`; None waits for what is being drawn."""
        if self._drawing is not None:
            with suppress(TimeoutError):
                image = self._drawing.result(wait_s)
                self._drawing, self._newest = None, CameraFrame(image=image, t_capture_ns=self._asked[2])
        return self._newest

    def close(self) -> None:
        if self._canvas is not None:
            canvas, self._canvas = self._canvas, None
            canvas.release(self)
            self._asked, self._drawing, self._still = NO_REQUEST, None, None


def make_cameras(robot: SimRobot) -> Mapping[str, SimCamera]:
    """The robot's cameras by name, in the order of its spec, not yet connected."""
    return MappingProxyType({spec.name: SimCamera(robot, spec) for spec in robot.spec.cameras})


class SceneRenderer:
    """An EGL context with one world's scene on it; the cameras that use it count as its owners."""

    def __init__(self, world: MujocoWorld, own_thread: bool) -> None:
        """`beside`: a thread of its own draws, else who calls. Raises HardwareLost when EGL is missing."""
        self._world, self._owners = world, set[object]()
        self._hand: Executor = ThreadPoolExecutor(1, thread_name_prefix="draw") if own_thread else _InlineExecutor()
        try:
            self._hand.submit(self._open).result()
        except HardwareLost:
            self._hand.shutdown()
            raise

    @staticmethod
    def acquire(world: MujocoWorld, owner: object, own_thread: bool) -> SceneRenderer:
        """The canvas of `world`, made where there is none; `owner` must `release` of it."""
        canvas = _RENDERERS.get(world)
        if canvas is None:
            canvas = _RENDERERS[world] = SceneRenderer(world, own_thread)
        canvas._owners.add(owner)
        return canvas

    def release(self, owner: object) -> None:
        """Ends `owner`'s use; the last one frees the context, once what was asked for is drawn."""
        self._owners.discard(owner)
        if not self._owners:
            _RENDERERS.pop(self._world, None)
            self._hand.submit(self._free).result()
            self._hand.shutdown()

    def render(self, data: mujoco.MjData, camera: CameraSpec) -> Future[Array]:
        """Will be uint8 (height, width, 3) RGB, a new array. `data` must not change before."""
        return self._hand.submit(self._draw, data, camera)

    def _open(self) -> None:
        model = self._world.model
        self._gl = _gl_context(model.vis.global_.offwidth, model.vis.global_.offheight)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=200)
        for name in _FLAGS_OFF:
            self._scene.flags[getattr(mujoco.mjtRndFlag, name)] = False
        self._option = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def _free(self) -> None:
        self._gl.make_current()
        self._context.free()
        self._gl.free()

    def _draw(self, data: mujoco.MjData, camera: CameraSpec) -> Array:
        model, rect = self._world.model, mujoco.MjrRect(0, 0, camera.width, camera.height)
        self._gl.make_current()
        self._camera.fixedcamid = model.camera(camera.name).id
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._option, None, self._camera, everything, self._scene)
        mujoco.mjr_render(rect, self._scene, self._context)
        upside_down = np.empty(camera.shape, np.uint8)
        mujoco.mjr_readPixels(upside_down, None, rect, self._context)
        return np.ascontiguousarray(upside_down[::-1])


class _InlineExecutor(Executor):
    """Whoever submits something does it."""

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        done = Future[T]()
        try:
            done.set_result(work(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


def _require_renderable(spec: CameraSpec, world: MujocoWorld) -> None:
    names = [world.model.camera(i).name for i in range(world.model.ncam)]
    if spec.name not in names:
        raise SpecError(f"no camera {spec.name!r} in the scene; there are {names}")
    most = world.model.vis.global_
    if not (0 < spec.height <= most.offheight and 0 < spec.width <= most.offwidth):
        fits = f"{most.offwidth}x{most.offheight}"
        raise SpecError(f"a picture of {spec.width}x{spec.height} does not fit; the most is {fits}")


_RENDERERS: dict[MujocoWorld, SceneRenderer] = {}


def _gl_context(width: int, height: int) -> Any:
    """EGL where ``MUJOCO_GL`` does not ask for another; MuJoCo's own choice would want a screen."""
    try:
        if os.environ.get("MUJOCO_GL", "egl") == "egl":
            from mujoco.egl import GLContext
        else:
            from mujoco import GLContext
        return GLContext(width, height)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # PyOpenGL's ways to say that EGL is absent
        raise HardwareLost(EGL_MISSING.format(cause=str(error).splitlines()[0])) from error


def main() -> int:
    try:
        context = _gl_context(64, 64)
        context.make_current()
        context.free()
    except HardwareLost as error:
        sys.stdout.write(f"{str(error.__cause__).splitlines()[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
