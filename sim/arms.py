"""The simulated arms: published constants and areas on the table. Tests compare them with the compiled models.

Angles in rad, lengths in m, frame: the base, x ahead, z up. Sources:

- Panda: Franka Control Interface documentation, "Robot and interface specifications"; franka_description (hand).
- SO-101: The Robot Studio, SO-ARM100 repository, the SO-101's URDF made from its CAD (links, ranges about the middle of
  each joint's travel, masses and inertias); Feetech, STS3215-C018 data sheet at 12 V (stall torque 30 kg cm, no-load
  speed 0.222 s per 60 degrees).
- UR5e: Universal Robots, "DH parameters for calculations of kinematics and dynamics", "Max. joint torques", UR5e User
  Manual (ranges, speeds), ROS description (elbow within half a turn, frame ``base_link``; the controller's own frame is
  turned by half a turn about z). Robotiq, 2F-85 Instruction Manual (stroke 85 mm, 20 to 150 mm/s, 20 to 235 N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import pi

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
        force_max_n: the safety kernel's limit of the force on the tool, in scenes whose tasks measure it.
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
    force_max_n: float
    rotation_damping: float = 0.01
    speed_share: float = 0.8


PANDA = ArmModel(
    name="panda",
    joints=tuple(f"joint{i}" for i in range(1, 8)),
    joint_low_rad=(-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
    joint_high_rad=(2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
    joint_speed_max_rad_s=(2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61),
    joint_torque_max_nm=(87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0),
    home_rad=(0.0, -0.7854, 0.0, -2.3562, 0.0, 1.5708, 0.7854),  # the maker's ready pose
    gripper=GripperModel((("finger_left", 0.5), ("finger_right", 0.5)), width_max_m=0.08, speed_max=0.1),
    step_max_m=0.04,
    workspace=Box((0.34, -0.20, 0.015), (0.64, 0.20, 0.30)),
    tool_start_box=Box((0.43, -0.06, 0.15), (0.53, 0.06, 0.21)),
    cube_edge_m=0.04,
    cube_start_area=((0.40, -0.10), (0.60, 0.10)),
    cube_reachable_area=((0.32, -0.22), (0.66, 0.22)),
    target_box=Box((0.38, -0.16, 0.05), (0.60, 0.16, 0.26)),
    tracker_box=Box((0.2, -0.4, -0.1), (0.8, 0.4, 0.4)),
    tracker_range_m=0.4,
    force_max_n=60.0,
)

SO101_JAW_RAD = (-0.174533, 1.74533)
SO101_JAW_TORQUE_MAX_NM = 1.47  # half of the servo's: LeRobot's limit, so that a grip does not overheat it

SO101 = ArmModel(
    name="so101",
    joints=("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll"),
    joint_low_rad=(-1.91986, -1.74533, -1.69, -1.65806, -2.74385),
    joint_high_rad=(1.91986, 1.74533, 1.69, 1.65806, 2.84121),
    joint_speed_max_rad_s=(4.71,) * 5,
    joint_torque_max_nm=(2.94,) * 5,
    home_rad=(0.0, 0.0, 0.0, 1.5708, -1.5221),  # forearm level
    gripper=CrankGripperModel(  # one jaw swings; it is as slow as a driver's, so a grip survives one stray opening
        joints=(("gripper", 1.0),),
        width_max_m=0.07,
        speed_max=1.5,
        offset_m=0.0217,
        radius_m=0.0765,
        phase_rad=-1.6839,
    ),
    step_max_m=0.025,
    workspace=Box((0.15, -0.12, 0.016), (0.28, 0.12, 0.16)),
    tool_start_box=Box((0.18, -0.04, 0.09), (0.23, 0.04, 0.13)),
    cube_edge_m=0.03,
    cube_start_area=((0.18, -0.08), (0.25, 0.08)),
    cube_reachable_area=((0.12, -0.16), (0.32, 0.16)),
    target_box=Box((0.16, -0.10, 0.03), (0.25, 0.10, 0.14)),
    tracker_box=Box((0.05, -0.25, -0.05), (0.4, 0.25, 0.25)),
    tracker_range_m=0.25,
    force_max_n=15.0,
    rotation_damping=0.6,
    speed_share=0.6,
)

UR5E_CRANK_HIGH_RAD = 0.8

UR5E = replace(  # its areas on the table are the Panda's
    PANDA,
    name="ur5e",
    joints=("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3"),
    joint_low_rad=(-2 * pi, -2 * pi, -pi, -2 * pi, -2 * pi, -2 * pi),
    joint_high_rad=(2 * pi, 2 * pi, pi, 2 * pi, 2 * pi, 2 * pi),
    joint_speed_max_rad_s=(pi,) * 6,
    joint_torque_max_nm=(150.0, 150.0, 150.0, 28.0, 28.0, 28.0),
    home_rad=(-0.2649, -pi / 2, pi / 2, -pi / 2, -pi / 2, -0.2649 - pi / 2),  # upper arm upright, forearm level
    gripper=CrankGripperModel(  # a fingertip moves on a circle of 57 mm and stays upright, at up to 0.15 m/s
        joints=(("knuckle_left", 1.0), ("finger_left", 1.0), ("knuckle_right", 1.0), ("finger_right", 1.0)),
        width_max_m=0.085,
        speed_max=1.5,
        offset_m=2 * 0.0051011,
        radius_m=2 * 0.0574940,
        phase_rad=0.857968,
    ),
)

ARMS = {arm.name: arm for arm in (PANDA, SO101, UR5E)}
