"""The Franka Emika Panda's published constants; tests compare them with the compiled model.

Source: Franka Control Interface documentation, "Robot and interface specifications" (limits) and franka_description
(hand). Angles in rad, lengths in m, frame: the base, x ahead, z up.
"""

from __future__ import annotations

from hal.spec import Box
from sim.arms.arm import ArmModel, GripperModel

JOINTS = tuple(f"joint{i}" for i in range(1, 8))

JOINT_LOW_RAD = (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973)
JOINT_HIGH_RAD = (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973)
JOINT_SPEED_MAX_RAD_S = (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61)
JOINT_TORQUE_MAX_NM = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)

HOME_RAD = (0.0, -0.7854, 0.0, -2.3562, 0.0, 1.5708, 0.7854)
"""The maker's ready pose: elbow up, the gripper straight down and opening along the base's y axis."""

GRIPPER_WIDTH_MAX_M = 0.08
GRIPPER_SPEED_MAX_M_S = 0.1

ARM = ArmModel(
    name="panda",
    joints=JOINTS,
    joint_low_rad=JOINT_LOW_RAD,
    joint_high_rad=JOINT_HIGH_RAD,
    joint_speed_max_rad_s=JOINT_SPEED_MAX_RAD_S,
    joint_torque_max_nm=JOINT_TORQUE_MAX_NM,
    home_rad=HOME_RAD,
    gripper=GripperModel((("finger_left", 0.5), ("finger_right", 0.5)), GRIPPER_WIDTH_MAX_M, GRIPPER_SPEED_MAX_M_S),
    step_max_m=0.04,
    workspace=Box((0.34, -0.20, 0.015), (0.64, 0.20, 0.30)),
    tool_start_box=Box((0.43, -0.06, 0.15), (0.53, 0.06, 0.21)),
    cube_edge_m=0.04,
    cube_start_area=((0.40, -0.10), (0.60, 0.10)),
    cube_reachable_area=((0.32, -0.22), (0.66, 0.22)),
    target_box=Box((0.38, -0.16, 0.05), (0.60, 0.16, 0.26)),
    tracker_box=Box((0.2, -0.4, -0.1), (0.8, 0.4, 0.4)),
    tracker_range_m=0.4,
)
