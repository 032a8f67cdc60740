"""The published constants of the SO-101; tests compare them with the compiled model.

Sources: The Robot Studio, SO-ARM100 repository, the SO-101's URDF made from its CAD (links, ranges about the middle of
each joint's travel, masses and inertias); Feetech, STS3215-C018 data sheet at 12 V (stall torque 30 kg cm, no-load
speed 0.222 s per 60 degrees). Angles in rad, lengths in m, frame: the base, x ahead, z up.
"""

from __future__ import annotations

from hal.spec import Box
from sim.arms.arm import ArmModel, CrankGripperModel

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")

JOINT_LOW_RAD = (-1.91986, -1.74533, -1.69, -1.65806, -2.74385)
JOINT_HIGH_RAD = (1.91986, 1.74533, 1.69, 1.65806, 2.84121)
JOINT_SPEED_MAX_RAD_S = (4.71,) * 5
JOINT_TORQUE_MAX_NM = (2.94,) * 5

HOME_RAD = (0.0, 0.0, 0.0, 1.5708, -1.5221)
"""Forearm level, the gripper straight down and opening along the base's y axis."""

JAW_LOW_RAD, JAW_HIGH_RAD = -0.174533, 1.74533
JAW_TORQUE_MAX_NM = 1.47
"""Half of the servo's torque: LeRobot's limit, so that a grip does not overheat it."""

GRIPPER = CrankGripperModel(
    joints=(("gripper", 1.0),),
    width_max_m=0.07,
    speed_max=1.5,
    offset_m=0.0217,
    radius_m=0.0765,
    phase_rad=-1.6839,
)
"""One jaw swings, the other is fixed. The speed is a driver's slow jaw: a grip survives one stray opening command."""

ARM = ArmModel(
    name="so101",
    joints=JOINTS,
    joint_low_rad=JOINT_LOW_RAD,
    joint_high_rad=JOINT_HIGH_RAD,
    joint_speed_max_rad_s=JOINT_SPEED_MAX_RAD_S,
    joint_torque_max_nm=JOINT_TORQUE_MAX_NM,
    home_rad=HOME_RAD,
    gripper=GRIPPER,
    step_max_m=0.025,
    workspace=Box((0.15, -0.12, 0.016), (0.28, 0.12, 0.16)),
    tool_start_box=Box((0.18, -0.04, 0.09), (0.23, 0.04, 0.13)),
    cube_edge_m=0.03,
    cube_start_area=((0.18, -0.08), (0.25, 0.08)),
    cube_reachable_area=((0.12, -0.16), (0.32, 0.16)),
    target_box=Box((0.16, -0.10, 0.03), (0.25, 0.10, 0.14)),
    tracker_box=Box((0.05, -0.25, -0.05), (0.4, 0.25, 0.25)),
    tracker_range_m=0.25,
    rotation_damping=0.6,
    speed_share=0.6,
)
