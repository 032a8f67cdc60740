"""The Franka Emika Panda's published constants; tests compare them with the compiled model.

Source: Franka Control Interface documentation, "Robot and interface specifications" (limits) and franka_description
(hand). Angles in rad, lengths in m, frame: the base, x ahead, z up.
"""

from __future__ import annotations

JOINTS = tuple(f"joint{i}" for i in range(1, 8))

JOINT_LOW_RAD = (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973)
JOINT_HIGH_RAD = (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973)
JOINT_SPEED_MAX_RAD_S = (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61)
JOINT_TORQUE_MAX_NM = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)

HOME_RAD = (0.0, -0.7854, 0.0, -2.3562, 0.0, 1.5708, 0.7854)
"""The maker's ready pose: elbow up, the gripper straight down and opening along the base's y axis."""

GRIPPER_WIDTH_MAX_M = 0.08
GRIPPER_SPEED_MAX_M_S = 0.1
