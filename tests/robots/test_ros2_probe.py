from __future__ import annotations

from hal.resource import Kind
from robots.ros2_probe import graph_records


def test_graph_records_have_controllers_and_cameras() -> None:
    published = {
        "/joint_states": ["sensor_msgs/msg/JointState"],
        "/wrench": ["geometry_msgs/msg/WrenchStamped"],
        "/camera/image_raw": ["sensor_msgs/msg/Image"],
        "/rosout": ["rcl_interfaces/msg/Log"],
    }
    subscribed = {
        "/left/arm/joint_trajectory": ["trajectory_msgs/msg/JointTrajectory"],
        "/forward/commands": ["std_msgs/msg/Float64MultiArray"],
        "/unrelated": ["std_msgs/msg/Float64MultiArray"],
    }
    camera, arm = graph_records(published, subscribed, 7)
    assert (camera.kind, camera.name) == (Kind.CAMERA, "ros2/7/camera/image_raw")
    assert (arm.kind, arm.labels) == (Kind.BUS, {"domain": "7", "topic": "/joint_states"})
    assert arm.capabilities == ("position:/forward", "trajectory:/left/arm", "wrench:/wrench")
