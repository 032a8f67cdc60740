"""A 3D view of one robot: ``python -m user_sys.console.scene_process SOCKET``, which the console starts and ends.

It serves viser on a Unix socket in a folder of this user, so that no other user and no browser reaches it. Standard
input has one JSON line each: first a `SceneSetup`, then `RobotPose`s, or null if the robot reports none. It prints one
line when it serves, or why not, and ends with its input.
"""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hal.errors import HalError
from hal.spec import RobotSpec
from user_sys.compose import draw_arm
from user_sys.console.hub import RobotPose

if TYPE_CHECKING:
    import viser

    from user_sys.compose import ArmDrawing, Shape

SERVING = "serving"
PROMISED_RGB = (230, 80, 20)
POINT_SIZE_M = 0.008
NO_POSE = "no present pose of the robot"
CAMERA_M, LOOK_AT_M = (1.3, -0.9, 0.8), (0.3, 0.0, 0.2)


class SceneSetup(msgspec.Struct, frozen=True):
    """What is drawn.

    Attributes:
        source: see `sim.kinematics.ArmDrawing`.
        spec: of the robot.
    """

    source: str
    spec: RobotSpec


class ArmScene:
    """The arm in a viser scene, with a label while there is no pose."""

    def __init__(self, server: viser.ViserServer, drawing: ArmDrawing) -> None:
        self._server, self._drawing = server, drawing
        server.gui.configure_theme(show_logo=False, show_share_button=False)
        server.initial_camera.position, server.initial_camera.look_at = CAMERA_M, LOOK_AT_M
        self._bodies = [server.scene.add_frame(f"/body{n}", show_axes=False) for n in range(drawing.bodies)]
        for number, shape in enumerate(drawing.shapes()):
            mesh = _mesh(shape)
            server.scene.add_mesh_simple(
                f"/body{shape.body}/{number}",
                mesh.vertices.astype(np.float32),
                mesh.faces.astype(np.uint32),
                color=(255 * shape.rgba[:3]).astype(np.uint8),
                opacity=float(shape.rgba[3]) if shape.rgba[3] < 1 else None,
                flat_shading=shape.kind == "box",
                position=shape.position,
                wxyz=shape.wxyz,
            )
        self._label = server.scene.add_label("/no-pose", NO_POSE, anchor="top-center")

    def show(self, pose: RobotPose | None) -> None:
        """With None, the arm stays and the promised path goes. Raises SpecError: the pose does not fit the robot."""
        points = np.zeros((0, 3))
        with self._server.atomic():
            self._label.visible = pose is None
            if pose is not None:
                state, promised = np.array(pose.state), np.array(pose.promised)
                points = self._drawing.path(state, promised) if len(promised) else points
                for body, position, wxyz in zip(self._bodies, *self._drawing.move(state), strict=True):
                    body.position, body.wxyz = position, wxyz
            self._server.scene.add_point_cloud(
                "/promised", points.astype(np.float32), PROMISED_RGB, point_size=POINT_SIZE_M, point_shape="circle"
            )


def _mesh(shape: Shape) -> Any:
    """Its surface as a `trimesh.Trimesh`, in the geom's frame. `Shape.size` has radius or half lengths, as in MJCF."""
    import trimesh

    x, y, z = shape.size
    match shape.kind:
        case "sphere":
            return trimesh.creation.icosphere(2, x)
        case "capsule":
            return trimesh.creation.capsule(2 * y, x, (16, 16))
        case "cylinder":
            return trimesh.creation.cylinder(x, 2 * y, 24)
        case "ellipsoid":
            return trimesh.creation.icosphere(2).apply_scale((x, y, z))
        case "box":
            return trimesh.creation.box((2 * x, 2 * y, 2 * z))
        case "mesh":
            return trimesh.Trimesh(shape.vertices, shape.faces, process=False)


def _serve(path: Path) -> viser.ViserServer:
    """A viser server on the Unix socket `path`. viser itself listens on ports only, which any user could open."""
    import viser
    from websockets.asyncio import server

    serve_anywhere = server.serve

    def serve(handler: Any, host: str, port: int, **options: Any) -> Any:
        return serve_anywhere(handler, unix=True, path=str(path), **options)

    vars(server)["serve"] = serve  # viser looks it up when it starts
    return viser.ViserServer(host="", port=0, verbose=False)


def main(argv: list[str]) -> int:
    """Serves the scene on the socket `argv[0]` until standard input ends."""
    lines = iter(partial(sys.stdin.buffer.readline), b"")
    answer = sys.stdout
    sys.stdout = io.StringIO()  # viser prints an address with a port, which it does not have
    try:
        setup = msgspec.json.decode(next(lines), type=SceneSetup)
        drawing = draw_arm(setup.source, setup.spec)
        scene = ArmScene(_serve(Path(argv[0])), drawing)
    except (HalError, ImportError) as error:
        answer.write(f"{error}\n")
        return 2
    answer.write(f"{SERVING}\n")
    answer.flush()
    decoder = msgspec.json.Decoder(RobotPose | None)
    for line in lines:
        scene.show(decoder.decode(line))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
