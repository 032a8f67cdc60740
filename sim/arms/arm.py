"""What the simulation knows of an arm: constants only, one `Arm` in a file of its own for each that there is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hal.spec import Box


@dataclass(frozen=True)
class GripperModel:
    """Two fingers, their distance and the coordinate that drives them (its actuator's length), which are one here.

    Attributes:
        joints: the fingers' joints, each with its angle or way as a share of the drive's.
        width_max_m: the widest opening that can be commanded.
        speed_max: of the drive, per second.
    """

    joints: tuple[tuple[str, float], ...]
    width_max_m: float
    speed_max: float

    def width_from_drive(self, drive: float) -> float:
        """The distance of the fingers when the drive stands at `drive_from_width`."""
        return drive

    def drive_from_width(self, width_m: float) -> float:
        """Where the drive stands for that distance, or the nearest that there is."""
        return width_m


@dataclass(frozen=True)
class CrankGripperModel(GripperModel):
    """Fingers on a crank: their distance is ``offset_m + radius_m * cos(phase_rad + drive)``, the drive in rad.

    A positive phase closes as the drive grows, a negative one opens.
    """

    offset_m: float
    radius_m: float
    phase_rad: float

    def width_from_drive(self, drive: float) -> float:
        return self.offset_m + self.radius_m * math.cos(self.phase_rad + drive)

    def drive_from_width(self, width_m: float) -> float:
        cosine = min(1.0, max(-1.0, (width_m - self.offset_m) / self.radius_m))
        return math.copysign(math.acos(cosine), self.phase_rad) - self.phase_rad


@dataclass(frozen=True)
class ArmModel:
    """An arm with its gripper, and the part of the table that it works on; angles in rad, lengths in m, base frame.

    In the model of that `name`, the arm's joints, coordinates and actuators come first and in this order, the gripper's
    actuator next. The model has a site ``tool``: z out of the gripper, fingers apart along y, between the fingertips.

    Attributes:
        name: of the model's file in ``assets``, and of a robot's option ``model``.
        home_rad: the posture that a spare degree of freedom is drawn to; the gripper points straight down.
        rotation_damping: how readily the gripper's direction gives way to its position; 0.01 where an arm can hold
            both.
        speed_share: joint targets move at this share of the maker's speeds at most, so that what the joints overshoot
            stays below them.
        step_max_m: the longest step of the tool along each axis in a control period; a robot's config may have its own.
        workspace: of the tool, likewise; the table's top is z = 0.
        tool_start_box: where the tool stands at an episode's start.
        cube_edge_m: edge of the cube to be lifted.
        cube_start_area: where its centre lies at the start, x and y.
        cube_reachable_area: where it is still within reach, x and y.
        target_box: the places to be reached.
        tracked, tracked_from_tool_m: where the tracker sees the object, in the base frame, and from the tool, along
            each axis.
    """

    name: str
    joints: tuple[str, ...]
    joint_low_rad: tuple[float, ...]
    joint_high_rad: tuple[float, ...]
    joint_speed_max_rad_s: tuple[float, ...]
    joint_torque_max_nm: tuple[float, ...]
    home_rad: tuple[float, ...]
    gripper: GripperModel
    step_max_m: float
    workspace: Box
    tool_start_box: Box
    cube_edge_m: float
    cube_start_area: tuple[tuple[float, float], tuple[float, float]]
    cube_reachable_area: tuple[tuple[float, float], tuple[float, float]]
    target_box: Box
    tracker_box: Box
    tracker_range_m: float
    rotation_damping: float = 0.01
    speed_share: float = 0.8
