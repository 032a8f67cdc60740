"""The published constants of the UR5e with a Robotiq 2F-85; tests compare them with the compiled model.

Sources: Universal Robots, "DH parameters for calculations of kinematics and dynamics" and "Max. joint torques"; UR5e
User Manual (ranges, speeds); Universal Robots' ROS description, which keeps the elbow within half a turn. Robotiq,
2F-85 Instruction Manual (stroke 85 mm, speed 20 to 150 mm/s, force 20 to 235 N). Angles in rad, lengths in m, frame:
ROS's ``base_link``, x ahead, z up (the controller's own base frame is turned by half a turn about z).
"""

from __future__ import annotations

from math import pi

from hal.spec import Box
from sim.arms.arm import ArmModel, CrankGripperModel

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")

DH_D_M = (0.1625, 0.0, 0.0, 0.1333, 0.0997, 0.0996)
DH_A_M = (0.0, -0.425, -0.3922, 0.0, 0.0, 0.0)
DH_ALPHA_RAD = (pi / 2, 0.0, 0.0, pi / 2, -pi / 2, 0.0)

JOINT_LOW_RAD = (-2 * pi, -2 * pi, -pi, -2 * pi, -2 * pi, -2 * pi)
JOINT_HIGH_RAD = (2 * pi, 2 * pi, pi, 2 * pi, 2 * pi, 2 * pi)
JOINT_SPEED_MAX_RAD_S = (pi, pi, pi, pi, pi, pi)
JOINT_TORQUE_MAX_NM = (150.0, 150.0, 150.0, 28.0, 28.0, 28.0)

HOME_RAD = (-0.2649, -pi / 2, pi / 2, -pi / 2, -pi / 2, -0.2649 - pi / 2)
"""Upper arm upright, forearm level, the gripper straight down and opening along the base's y axis."""

CRANK_HIGH_RAD = 0.8
GRIPPER_WIDTH_MAX_M = 0.085
GRIPPER_SPEED_MAX_RAD_S = 1.5
"""Of the crank: the fingertips close at up to 0.15 m/s."""

GRIPPER = CrankGripperModel(
    joints=(("knuckle_left", 1.0), ("finger_left", 1.0), ("knuckle_right", 1.0), ("finger_right", 1.0)),
    width_max_m=GRIPPER_WIDTH_MAX_M,
    speed_max=GRIPPER_SPEED_MAX_RAD_S,
    offset_m=2 * 0.0051011,
    radius_m=2 * 0.0574940,
    phase_rad=0.857968,
)
"""The parallel linkage: a fingertip moves on a circle of 57 mm and stays upright, so that the fingers extend by 14 mm
as they close."""

ARM = ArmModel(
    name="ur5e",
    joints=JOINTS,
    joint_low_rad=JOINT_LOW_RAD,
    joint_high_rad=JOINT_HIGH_RAD,
    joint_speed_max_rad_s=JOINT_SPEED_MAX_RAD_S,
    joint_torque_max_nm=JOINT_TORQUE_MAX_NM,
    home_rad=HOME_RAD,
    gripper=GRIPPER,
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
