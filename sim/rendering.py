"""Pictures of a simulated robot's world, drawn without a screen (EGL)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mujoco
import numpy as np

from hal.camera import Camera, Frame
from hal.errors import HardwareLost, SpecError
from hal.spec import Array, CameraSpec
from sim.robot import SimRobot
from sim.world import World

EGL_MISSING = (
    "cannot draw without a screen, because EGL is missing or broken ({cause}); "
    "on Debian or Ubuntu: apt-get install libegl1 libegl-mesa0"
)

ROUNDING_S = 1e-6  # of simulated time
_FLAGS_OFF = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX")


class SimCamera(Camera):
    """One camera of a simulated robot. Cameras of one robot share a drawing context, which the last to close frees.

    The thread that connects a camera reads and closes it, and moves the robot.
    """

    def __init__(self, robot: SimRobot, spec: CameraSpec) -> None:
        self.spec = spec
        self._robot = robot
        self._canvas: Canvas | None = None
        self._newest: tuple[int, float, Frame] | None = None  # with its world's resets and time, s

    def connect(self) -> None:
        """Opens the drawing context (0.2 s, once a robot).

        Raises:
            HardwareLost: the robot is not connected, or EGL is missing; the message says what to install.
            SpecError: the scene has no such camera, or the picture is larger than 1280 by 960.
        """
        if self._canvas is None:
            _check(self.spec, self._robot.world)
            self._canvas = Canvas.shared(self._robot.world, self)

    def read(self) -> Frame:
        """The world as it is now (about a millisecond), or the frame before while simulated time asks for no other.

        Raises HardwareLost unless connected.
        """
        if self._canvas is None:
            raise HardwareLost(f"camera {self.spec.name!r} is not connected; call connect() first")
        resets, now_s = self._robot.world.resets, self._robot.world.data.time
        if self._newest is not None:
            same, drawn_s, newest = self._newest
            if same == resets and 0 < now_s - drawn_s < 1 / self.spec.rate_hz - ROUNDING_S:
                return newest
        image = self._canvas.draw(self.spec.name, self.spec.height, self.spec.width)
        frame = Frame(image=image, t_capture_ns=time.monotonic_ns())
        self._newest = resets, now_s, frame
        return frame

    def close(self) -> None:
        if self._canvas is not None:
            canvas, self._canvas = self._canvas, None
            canvas.let_go(self)


def make_cameras(robot: SimRobot) -> Mapping[str, SimCamera]:
    """The robot's cameras by name, in the order of its spec, not yet connected."""
    return MappingProxyType({spec.name: SimCamera(robot, spec) for spec in robot.spec.cameras})


@dataclass(eq=False)
class Canvas:
    """An EGL context with one world's scene on it; the cameras that use it count as its owners.

    One thread draws. Raises HardwareLost when EGL is missing.
    """

    world: World
    _owners: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        model = self.world.model
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

    @staticmethod
    def shared(world: World, owner: object) -> Canvas:
        """The canvas of `world`, made where there is none; `owner` must `let_go` of it."""
        canvas = _CANVASES.get(world)
        if canvas is None:
            canvas = _CANVASES[world] = Canvas(world)
        canvas._owners.add(owner)
        return canvas

    def let_go(self, owner: object) -> None:
        """Ends `owner`'s use; the last one frees the context."""
        self._owners.discard(owner)
        if not self._owners:
            _CANVASES.pop(self.world, None)
            self._gl.make_current()
            self._context.free()
            self._gl.free()

    def draw(self, camera: str, height: int, width: int) -> Array:
        """uint8 (height, width, 3) RGB, a new array."""
        world, rect = self.world, mujoco.MjrRect(0, 0, width, height)
        self._camera.fixedcamid = world.model.camera(camera).id
        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(world.model, world.data, self._option, None, self._camera, everything, self._scene)
        mujoco.mjr_render(rect, self._scene, self._context)
        upside_down = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(upside_down, None, rect, self._context)
        return np.ascontiguousarray(upside_down[::-1])


def _check(spec: CameraSpec, world: World) -> None:
    names = [world.model.camera(i).name for i in range(world.model.ncam)]
    if spec.name not in names:
        raise SpecError(f"no camera {spec.name!r} in the scene; there are {names}")
    most = world.model.vis.global_
    if not (0 < spec.height <= most.offheight and 0 < spec.width <= most.offwidth):
        fits = f"{most.offwidth}x{most.offheight}"
        raise SpecError(f"a picture of {spec.width}x{spec.height} does not fit; the most is {fits}")


_CANVASES: dict[World, Canvas] = {}


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
