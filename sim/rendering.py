"""Render images of a simulated robot's world without a screen (EGL).

``python -m sim.rendering`` checks whether that works here: status 0, or 1 with the reason.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import mujoco
import numpy as np

from hal.camera import Camera, CameraFrame
from hal.errors import HardwareLost, SpecError
from hal.spec import Array, CameraSpec
from sim.robot import EGL_MISSING, SimRobot
from sim.world import MujocoWorld

TIME_TOLERANCE_S = 1e-6  # of simulated time
REAL_TIME_WAIT_SHARE = 0.1  # of a control period, for an image
NO_REQUEST = (-1, 0.0, 0)
_FLAGS_OFF = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX")


class SimCamera(Camera):
    """One camera of a simulated robot. The cameras of one robot share a renderer, which the last to close frees.

    The thread that connects a camera also reads it, closes it, and moves the robot.
    """

    def __init__(self, robot: SimRobot, spec: CameraSpec) -> None:
        self.spec = spec
        self._robot = robot
        self._renderer: SceneRenderer | None = None
        self._world_copy: mujoco.MjData | None = None  # copy of the world to render from while the world moves on
        self._request = (
            NO_REQUEST  # of the newest image: the world's reset count and time (s), and the time of the request (ns)
        )
        self._pending: Future[Array] | None = None
        self._newest: CameraFrame | None = None

    def connect(self) -> None:
        """Open the rendering context (0.2 s, once per robot).

        Raises:
            HardwareLost: the robot is not connected, or EGL is missing; the message says what to install.
            SpecError: the scene has no such camera, or the image is larger than 1280 by 960.
        """
        if self._renderer is None:
            _require_renderable(self.spec, self._robot.world)
            self._renderer = SceneRenderer.acquire(self._robot.world, self)

    def read(self) -> CameraFrame:
        """Render the current world (a few ms), or return the last frame until the next is due in simulated time.

        A `real_time` camera waits at most a tenth of a control period; a later call returns the image. The first image
        after a reset is always waited for.

        Raises HardwareLost unless connected.
        """
        if self._renderer is None:
            raise HardwareLost(f"camera {self.spec.name!r} is not connected; call connect() first")
        resets, request_s, _ = self._request
        first = resets != self._robot.world.reset_count
        self._take_frame(None if first else 0.0)
        passed_s = self._robot.world.data.time - request_s
        if self._pending is None and (first or not 0 < passed_s < 1 / self.spec.rate_hz - TIME_TOLERANCE_S):
            self._draw(self._renderer, self._robot.world)
        frame = self._take_frame(
            REAL_TIME_WAIT_SHARE * self._robot.spec.period_s if self.real_time and not first else None
        )
        assert frame is not None  # the first image was waited for
        return frame

    def _draw(self, renderer: SceneRenderer, world: MujocoWorld) -> None:
        data = world.data
        if self.real_time:
            self._world_copy = self._world_copy or mujoco.MjData(world.model)
            mujoco.mj_copyData(self._world_copy, world.model, data)
            data = self._world_copy
        self._request = world.reset_count, world.data.time, time.monotonic_ns()
        self._pending = renderer.render(data, self.spec)

    def _take_frame(self, wait_s: float | None) -> CameraFrame | None:
        """The newest frame that is finished within `wait_s`; None waits for the pending one."""
        if self._pending is not None:
            with suppress(TimeoutError):
                image = self._pending.result(wait_s)
                self._pending, self._newest = None, CameraFrame(image=image, t_capture_ns=self._request[2])
        return self._newest

    def close(self) -> None:
        if self._renderer is not None:
            renderer, self._renderer = self._renderer, None
            renderer.release(self)
            self._request, self._pending, self._world_copy = NO_REQUEST, None, None


def make_cameras(robot: SimRobot) -> Mapping[str, SimCamera]:
    """Make the robot's cameras by name, in the order of its spec, not connected."""
    return {spec.name: SimCamera(robot, spec) for spec in robot.spec.cameras}


class SceneRenderer:
    """An EGL context with one world's scene, in a thread of its own; the scene's cameras are its owners."""

    def __init__(self, world: MujocoWorld) -> None:
        """Raises HardwareLost if EGL is missing."""
        self._world, self._owners = world, set[object]()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="draw")
        try:
            self._executor.submit(self._open).result()
        except HardwareLost:
            self._executor.shutdown()
            raise

    @staticmethod
    def acquire(world: MujocoWorld, owner: object) -> SceneRenderer:
        """The renderer of `world`, made on first use; `owner` must `release` it."""
        renderer = _RENDERERS.get(world)
        if renderer is None:
            renderer = _RENDERERS[world] = SceneRenderer(world)
        renderer._owners.add(owner)
        return renderer

    def release(self, owner: object) -> None:
        """End `owner`'s use. The last owner frees the context after the pending images."""
        self._owners.discard(owner)
        if not self._owners:
            _RENDERERS.pop(self._world, None)
            self._executor.submit(self._free).result()
            self._executor.shutdown()

    def render(self, data: mujoco.MjData, camera: CameraSpec) -> Future[Array]:
        """Render uint8 (height, width, 3) RGB, a new array. `data` must not change until then."""
        return self._executor.submit(self._draw, data, camera)

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


def _require_renderable(spec: CameraSpec, world: MujocoWorld) -> None:
    names = [world.model.camera(i).name for i in range(world.model.ncam)]
    if spec.name not in names:
        raise SpecError(f"no camera {spec.name!r} in the scene; choose one of {names}")
    most = world.model.vis.global_
    if not (0 < spec.height <= most.offheight and 0 < spec.width <= most.offwidth):
        fits = f"{most.offwidth}x{most.offheight}"
        raise SpecError(f"an image of {spec.width}x{spec.height} is too large; the maximum is {fits}")


_RENDERERS: dict[MujocoWorld, SceneRenderer] = {}


def _gl_context(width: int, height: int) -> Any:
    """EGL unless ``MUJOCO_GL`` names another; MuJoCo's default needs a screen."""
    try:
        if os.environ.get("MUJOCO_GL", "egl") == "egl":
            from mujoco.egl import GLContext
        else:
            from mujoco import GLContext
        return GLContext(width, height)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # raised by PyOpenGL without EGL
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
