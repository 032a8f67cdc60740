"""The model of an arm as constants; each arm has one `ArmModel` in a file of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hal.spec import Box


@dataclass(frozen=True)
class GripperModel:
    """Two parallel fingers, driven by one coordinate (the actuator's length) that equals their distance.

    Attributes:
        joints: the fingers' joints, each with its position as a share of the drive.
        width_max_m: the widest opening that can be commanded.
        speed_max: of the drive, per second.
    """

    joints: tuple[tuple[str, float], ...]
    width_max_m: float
    speed_max: float

    def width_from_drive(self, drive: float) -> float:
        """The distance of the fingers at the position `drive`."""
        return drive

    def drive_from_width(self, width_m: float) -> float:
        """The drive's position for that distance, or the nearest possible one."""
        return width_m


@dataclass(frozen=True)
class CrankGripperModel(GripperModel):
    """Fingers on a crank: their distance is ``offset_m + radius_m * cos(phase_rad + drive)``, the drive in rad.

    With a positive phase a growing drive closes, with a negative one it opens.
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
    """An arm with its gripper, and its area on the table; angles in rad, lengths in m, base frame.

    In the MuJoCo model called `name`, the arm's joints, coordinates and actuators come first and in this order, then
    the gripper's actuator. The model has a site ``tool`` between the fingertips: z out of the gripper, fingers apart
    along y.

    Attributes:
        name: of the model's file in ``assets``, and of a robot's option ``model``.
        home_rad: the posture that attracts a redundant degree of freedom; the gripper points straight down.
        rotation_damping: how readily the gripper's direction yields to its position; 0.01 if an arm can hold both.
        speed_share: limit of the joint targets' speeds, as a share of the maker's, so that overshoot stays below those.
        step_max_m: the longest step of the tool along each axis per control period; a robot's config may override it.
        workspace: of the tool, likewise; the table's top is z = 0.
        tool_start_box: the tool's positions at an episode's start.
        cube_edge_m: edge of the cube to be lifted.
        cube_start_area: positions of its centre at the start, x and y.
        cube_reachable_area: positions that are still within reach, x and y.
        target_box: the positions of the target.
        tracker_box, tracker_range_m: where the tracker sees the object: in the base frame, and from the tool along each
            axis.
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
