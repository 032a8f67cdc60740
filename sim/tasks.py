"""The tasks of the simulation. Each rewards its success only.

The areas of an episode are those of the arm (`sim.arms.ArmModel`). A task that fails for good ends without reward: its
object is out of the arm's reach, or lies on its side.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
import numpy as np

from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError
from hal.robot import Observation, Robot
from hal.spec import STATE, Array
from hal.task import ExpertPolicy, Task, TaskOutcome, build_task, load_task
from sim.arms import PANDA, ArmModel
from sim.experts import EXPERTS, make_expert
from sim.objects import CUBE_COLOURS, TASK_OBJECTS, SceneObject, is_in_bin, make_objects, scene_objects
from sim.robot import EGL_MISSING, TOOL_POSITION, SimRobot, SimRobotConfig, require_objects, tracked_places

if TYPE_CHECKING:
    from sim.scene import Motion, Pose

YAW_RAD = 0.25  # an object is rotated by up to this much either way; the fingers straighten it
LIFT_HEIGHT_M = 0.10  # the cube counts as lifted at this height above its place on the table
GRASP_M = 0.04  # greatest distance of the tool from the cube's centre, so that a throw does not count
REACHED_M = 0.02
FOLLOWED_M_S = 0.03  # speed of a target that moves
FOLLOWED_PERIODS = 30  # in a row that the tool must be at it
FOLLOWED_TURNS = 20  # more than an episode takes
ALIGNED_EDGES, SEATED_EDGES = 0.15, 0.12  # greatest distances of an inserted object from its seat, across and above
TOPPLED_EDGES = 0.3  # an object this much below its place on the table lies on its side

FILM_PIXELS = 256
"""Height and width of the film cameras' images."""


class TableTask(Task):
    """A task with objects on the table, of a simulated arm.

    An installed package may subclass it, and then overrides `needed_objects`.

    Attributes:
        sentences: ways to name the task; the first is the instruction.
        joints_min: of the arm; with fewer than six it cannot keep its gripper upright.
    """

    joints_min: ClassVar[int] = 0

    def __init__(self, arm: ArmModel = PANDA, scene: tuple[str, ...] = ()) -> None:
        """`scene`: the objects that the robot tracks; default: the task's. Raises SpecError if the arm lacks joints."""
        if len(arm.joints) < self.joints_min:
            raise SpecError(
                f"the task {self.name!r} needs an arm with {self.joints_min} joints or more; {arm.name} has "
                f"{len(arm.joints)}"
            )
        self.arm, self.has_expert = arm, self.has_expert or self.name in EXPERTS
        self._scene = scene or scene_objects(self.needed_objects())

    @classmethod
    def for_robot(cls, robot: Robot, settings: Any) -> Self:
        """See `hal.task.Task.for_robot`. Raises SpecError if the robot is not simulated, or has too few joints."""
        if not isinstance(robot, SimRobot):
            raise SpecError(f"the task {cls.name!r} needs a simulated arm, not {robot.spec.model}")
        return cls(robot.config.arm, robot.config.objects)

    @classmethod
    def needed_objects(cls) -> tuple[str, ...]:
        """The objects that the task places, of `sim.objects.make_objects`."""
        return TASK_OBJECTS[cls.name]

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        """Draw the tool's position, then the objects' poses. Raises SpecError if the robot is not simulated, is another
        arm, or lacks an object."""
        sim = require_objects(robot, self.name, self.needed_objects(), self.arm)
        self._scene = sim.config.objects
        tool = rng.uniform(self.arm.tool_start_box.low, self.arm.tool_start_box.high)
        poses = self.draw_poses(rng)
        sim.reset(rng, tool, poses, self.draw_motion(rng, poses))

    def evaluate(self, observation: Observation) -> TaskOutcome:
        places = tracked_places(observation, self._scene)
        if self.succeeds(places, observation.arrays[STATE][TOOL_POSITION].astype(float)):
            return TaskOutcome(reward=1.0, terminated=True, success=True)
        lost = self.has_failed(places)
        return TaskOutcome(reward=0.0, terminated=lost, success=False if lost else None)

    def make_expert(self, robot: Robot, seed: int, noise: float) -> ExpertPolicy:
        """See `hal.task.Task`; it reads the observation only."""
        assert isinstance(robot, SimRobot)  # the task was built for it
        scripted = make_expert(self.name, robot, noise, seed)
        return lambda arrays: scripted(Observation(arrays=arrays, t_capture_ns=0))

    @abstractmethod
    def draw_poses(self, rng: np.random.Generator) -> dict[str, Pose]:
        """The objects' poses at the start of an episode."""

    def draw_motion(self, rng: np.random.Generator, poses: Mapping[str, Pose]) -> Motion | None:
        """How objects move by themselves in an episode; None if they do not."""
        return None

    @abstractmethod
    def succeeds(self, places: Mapping[str, Array], tool: Array) -> bool:
        """Whether the objects are where they should be; all positions (3,), m."""

    def has_failed(self, places: Mapping[str, Array]) -> bool:
        """Whether the task can no longer be done."""
        return False

    def _out_of_reach(self, place: Array) -> bool:
        low, high = self.arm.cube_reachable_area
        return bool((place[:2] < low).any() or (place[:2] > high).any() or place[2] < 0.0)

    def _draw_apart(
        self, rng: np.random.Generator, count: int, low: tuple[float, float], high: tuple[float, float]
    ) -> Array:
        """Draw places (count, 2), m, between which there is room for the fingers."""
        edge = self.arm.cube_edge_m
        for _ in range(1000):
            spots = rng.uniform(low, high, (count, 2))
            apart = np.abs(spots[:, None] - spots) / (1.2 * edge, 2.0 * edge)  # the fingers open along y
            if (apart.max(axis=-1) + 2 * np.eye(len(spots)) >= 1.0).all():
                break
        return spots

    def _pose(self, rng: np.random.Generator, thing: SceneObject, x: float, y: float) -> Pose:
        return (x, y, thing.rest_m, rng.uniform(-YAW_RAD, YAW_RAD))


class SimReachTask(TableTask):
    """Bring the tool to a target in the air."""

    name, max_steps = "reach", 30
    sentences = ("reach the green target", "move the gripper to the green ball", "go to the green sphere")
    instruction = sentences[0]

    def draw_poses(self, rng: np.random.Generator) -> dict[str, Pose]:
        return {"target": (*rng.uniform(self.arm.target_box.low, self.arm.target_box.high), 0.0)}

    def succeeds(self, places: Mapping[str, Array], tool: Array) -> bool:
        return float(np.linalg.norm(places["target"] - tool)) <= REACHED_M


class FollowTask(SimReachTask):
    """Keep the tool at a target that moves through the air along straight lines, with sudden turns."""

    name, max_steps = "follow", 60
    sentences = ("follow the green target", "keep the gripper on the green ball", "stay with the green sphere")
    instruction = sentences[0]

    def __init__(self, arm: ArmModel = PANDA, scene: tuple[str, ...] = ()) -> None:
        super().__init__(arm, scene)
        self._held_periods = 0

    def draw_motion(self, rng: np.random.Generator, poses: Mapping[str, Pose]) -> Motion:
        """See `TableTask.draw_motion`; the speed is `FOLLOWED_M_S`."""
        self._held_periods = 0
        box = self.arm.target_box
        turns = np.array([poses["target"][:3], *rng.uniform(box.low, box.high, (FOLLOWED_TURNS, 3))])
        times_s = np.cumsum([0.0, *np.linalg.norm(np.diff(turns, axis=0), axis=1) / FOLLOWED_M_S])
        return lambda t_s: {"target": np.array([np.interp(t_s, times_s, axis) for axis in turns.T])}

    def succeeds(self, places: Mapping[str, Array], tool: Array) -> bool:
        self._held_periods = self._held_periods + 1 if super().succeeds(places, tool) else 0
        return self._held_periods >= FOLLOWED_PERIODS


class LiftTask(TableTask):
    """Lift a cube by 10 cm."""

    name, max_steps = "lift", 50
    sentences = ("lift the cube", "pick up the orange cube", "raise the orange block off the table")
    instruction = sentences[0]

    def draw_poses(self, rng: np.random.Generator) -> dict[str, Pose]:
        cubes = sorted(self.needed_objects())
        spots = self._draw_apart(rng, len(cubes), *self.arm.cube_start_area)
        objects = make_objects(self.arm.cube_edge_m)
        return {cube: self._pose(rng, objects[cube], *spot) for cube, spot in zip(cubes, spots, strict=True)}

    def succeeds(self, places: Mapping[str, Array], tool: Array) -> bool:
        cube = places[self.needed_objects()[0]]
        lifted = float(cube[2]) >= self.arm.cube_edge_m / 2 + LIFT_HEIGHT_M
        return lifted and float(np.linalg.norm(cube - tool)) <= GRASP_M

    def has_failed(self, places: Mapping[str, Array]) -> bool:
        return self._out_of_reach(places[self.needed_objects()[0]])


class LiftColourTask(LiftTask):
    """Lift one of four cubes. All tasks of this kind draw the same starts, so that only the sentence tells them apart.

    Attributes:
        unseen_sentences: paraphrases that are not among `sentences`, for evaluation.
    """

    unseen_sentences: ClassVar[tuple[str, ...]] = ()


def _lift_colour_task(colour: str) -> type[LiftColourTask]:
    sentences = (
        f"lift the {colour} cube",
        f"pick up the {colour} cube",
        f"raise the {colour} block off the table",
        f"grasp the {colour} block and lift it",
    )
    unseen = (
        f"pick the {colour} block up",
        f"take the {colour} cube",
        f"please lift up the {colour} box",
        f"grab the {colour} one and raise it",
        f"bring the {colour} cube up into the air",
    )
    attributes = {
        "__doc__": f"Lift the {colour} cube; see `LiftColourTask`.",
        "name": f"lift_{colour}",
        "sentences": sentences,
        "instruction": sentences[0],
        "unseen_sentences": unseen,
    }
    return type(f"Lift{colour.capitalize()}Task", (LiftColourTask,), attributes)


class TidyTask(TableTask):
    """Put all objects into the bin, which is on one side of the table."""

    name, max_steps = "tidy", 160
    sentences = ("tidy up", "put everything into the bin", "clear the table into the blue bin")
    instruction = sentences[0]

    @property
    def pieces(self) -> tuple[str, ...]:
        """The objects that belong into the bin."""
        return self.needed_objects()[:-1]

    def draw_poses(self, rng: np.random.Generator) -> dict[str, Pose]:
        arm, edge, objects = self.arm, self.arm.cube_edge_m, make_objects(self.arm.cube_edge_m)
        side, ((near, _), (far, most)) = rng.choice((-1.0, 1.0)), arm.cube_start_area
        goal: Pose = (rng.uniform(near, far), side * (arm.workspace.high[1] - 0.03), 0.0, 0.0)
        low, high = (near, 0.3 * most), (far, most)
        if len(self.pieces) > 1:
            low, high = (arm.workspace.low[0] + edge / 2, 0.15 * most), (arm.workspace.high[0] - edge / 2, most)
        spots = self._draw_apart(rng, len(self.pieces), low, high) * (1.0, -side)
        poses = {piece: self._pose(rng, objects[piece], *spot) for piece, spot in zip(self.pieces, spots, strict=True)}
        return {**poses, "bin": goal}

    def succeeds(self, places: Mapping[str, Array], tool: Array) -> bool:
        edge = self.arm.cube_edge_m
        return all(
            is_in_bin(places[piece], places["bin"], edge) and np.linalg.norm(places[piece] - tool) > edge
            for piece in self.pieces
        )

    def has_failed(self, places: Mapping[str, Array]) -> bool:
        return any(
            self._out_of_reach(places[piece]) and not is_in_bin(places[piece], places["bin"], self.arm.cube_edge_m)
            for piece in self.pieces
        )


class PlaceTask(TidyTask):
    """Put the cube into the bin."""

    name, max_steps = "place", 80
    sentences = ("put the cube into the bin", "place the orange cube in the blue bin", "drop the cube in the box")
    instruction = sentences[0]


class InsertTask(TableTask):
    """Put one object into, or onto, another that is fixed to the table. The clearance is 1 mm."""

    max_steps = 80

    @property
    def pieces(self) -> tuple[str, str]:
        """The object to be moved, and the fixed one."""
        piece, fixture = self.needed_objects()
        return piece, fixture

    def draw_poses(self, rng: np.random.Generator) -> dict[str, Pose]:
        piece, fixture = self.pieces
        (near, low), (far, high) = self.arm.cube_start_area
        third, middle = (far - near) / 3, (low + high) / 2
        x, goal_x = rng.uniform(near + 0.5 * third, far - 0.5 * third, 2)
        y, goal_y = rng.uniform((low, middle + 0.7 * (high - middle)), (middle + 0.5 * (low - middle), high + 0.02))
        thing = make_objects(self.arm.cube_edge_m)[piece]
        return {piece: self._pose(rng, thing, x, y), fixture: (goal_x, goal_y, 0.0, 0.0)}

    def succeeds(self, places: Mapping[str, Array], tool: Array) -> bool:
        piece, fixture = self.pieces
        edge, off = self.arm.cube_edge_m, np.abs(places[piece] - places[fixture])
        seat = make_objects(edge)[piece].seat_m
        return bool((off[:2] < ALIGNED_EDGES * edge).all() and off[2] < seat + SEATED_EDGES * edge)

    def has_failed(self, places: Mapping[str, Array]) -> bool:
        piece, edge = self.pieces[0], self.arm.cube_edge_m
        toppled = places[piece][2] < make_objects(edge)[piece].rest_m - TOPPLED_EDGES * edge
        return bool(toppled) or self._out_of_reach(places[piece])


class PegTask(InsertTask):
    """With `InsertTask`'s clearance, a gripper that leans gets stuck."""

    name, joints_min = "peg", 6
    sentences = ("insert the peg into the hole", "put the yellow peg in the hole", "push the peg into its block")
    instruction = sentences[0]


class PlugTask(InsertTask):
    """With `InsertTask`'s clearance, a gripper that leans gets stuck."""

    name, joints_min = "plug", 6
    sentences = ("plug the plug into the socket", "push the white plug into the socket", "connect the plug")
    instruction = sentences[0]


class CapTask(InsertTask):
    """The bottle's neck is round, and the cap need not turn."""

    name = "cap"
    sentences = ("put the cap onto the bottle", "close the bottle with the pink cap", "cap the bottle")
    instruction = sentences[0]


_ALL: tuple[type[TableTask], ...] = (
    *(LiftTask, SimReachTask, FollowTask, PlaceTask, TidyTask, PegTask, PlugTask, CapTask),
    *map(_lift_colour_task, CUBE_COLOURS),
)
TASKS = {task.name: task for task in _ALL}


def make_task(name: str, arm: ArmModel = PANDA) -> TableTask:
    """Make the task called `name` for `arm`; it needs its objects in the scene. Raises SpecError."""
    if name not in TASKS:
        raise SpecError(f"no task {name!r}; choose one of {sorted(TASKS)}")
    return TASKS[name](arm)


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `sim.robot.SimRobotConfig`. The scene has the objects of its tasks."""
    kinds = [load_task(each.name, TASKS) for each in request.tasks]
    needed = {name: None for kind in kinds if issubclass(kind, TableTask) for name in kind.needed_objects()}
    scene = {"scene": tuple(needed)} if needed else {}
    options = read_options(SimRobotConfig, replace(request, options={**scene, **request.options}))
    robot = SimRobot(options)
    setup = RobotSetup(request.name, robot, build_task(request.tasks, robot, TASKS))
    if not (request.cameras or request.film):
        return setup
    try:
        from sim.rendering import SimCamera, make_cameras  # here, because it needs EGL
    except ModuleNotFoundError:
        raise
    except (ImportError, AttributeError, OSError) as error:  # with MUJOCO_GL=egl, mujoco loads EGL when it is imported
        raise HardwareLost(EGL_MISSING.format(cause=str(error).splitlines()[0])) from error

    views = [msgspec.structs.replace(spec, height=FILM_PIXELS, width=FILM_PIXELS) for spec in robot.spec.cameras]
    return replace(
        setup,
        cameras=tuple(make_cameras(robot).values()) if request.cameras else (),
        film_cameras=tuple(SimCamera(robot, view) for view in views) if request.film else (),
    )
