"""An operator drives the tool of a robot whose actions move its joints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import mujoco
import numpy as np
import pytest
from joint_arm_kit import joint_spec
from msgspec.structs import replace

from hal.robot import Observation
from hal.safety import SafetyKernel
from hal.spec import STATE, Array
from sim.arms import UR5E
from sim.scene import Scene
from user_sys.edge.control_authority import TOOL_SPEED, ControlAuthority, ToolDrive
from user_sys.messages import OperatorCommand

STEPS = 20


class Bench:
    """An operator, the control authority and the safety kernel of an arm that moves exactly as commanded."""

    def __init__(
        self, kind: Literal["joint_delta", "joint_target"], description: str = "ur5e", reduced_speed: float = 1.0
    ) -> None:
        spec = joint_spec(kind)
        self.spec = replace(spec, limits=replace(spec.limits, reduced_speed=reduced_speed))
        self.now_s = 100.0
        drive = ToolDrive(self.spec, description)
        self.authority = ControlAuthority("arm-0", self.spec, lambda: self.now_s, tool_drive=drive)
        self.kernel = SafetyKernel(self.spec, clock=lambda: int(self.now_s * 1e9))
        self.kernel.is_speed_reduced = True
        self.joints = np.array(UR5E.home_rad)
        self.applied = self.spec.rest_action(self.observation)
        self.sequence = 0
        self.order("take-over")

    @property
    def observation(self) -> Mapping[str, Array]:
        return {STATE: self.joints.astype(np.float32)}

    @property
    def tool(self) -> Array:
        model = Scene(UR5E, ()).model
        data = mujoco.MjData(model)
        data.qpos[:6] = self.joints
        mujoco.mj_kinematics(model, data)
        return np.array(data.site("tool").xpos)

    def order(self, order: Literal["take-over", "drive"], tool: tuple[float, ...] = ()) -> str:
        self.sequence += 1
        twist = (0.0,) * 6 if order == "drive" else ()
        command = OperatorCommand(
            robot="arm-0", operator="ana", order=order, twist=twist, tool=tool, sequence=self.sequence
        )
        return self.authority.apply(command).reason

    def step(self) -> None:
        action = self.authority.action(self.applied, self.observation)
        decision = self.kernel.filter(action, Observation(self.observation, int(self.now_s * 1e9)))
        assert decision.applied is not None, decision.text
        self.applied = decision.applied
        self.kernel.set_applied(self.applied)
        self.joints = self.joints + self.applied if self.spec.joint_delta else self.applied.astype(float)
        self.now_s += self.spec.period_s


@pytest.mark.parametrize("kind", ["joint_delta", "joint_target"])
def test_tool_moves_in_the_wanted_direction(kind: Literal["joint_delta", "joint_target"]) -> None:
    bench = Bench(kind)
    start = bench.tool
    for _ in range(STEPS):
        assert not bench.order("drive", (0.0, 0.0, -0.5))
        bench.step()
    moved = STEPS * bench.spec.period_s * 0.5 * TOOL_SPEED
    np.testing.assert_allclose(bench.tool - start, [0, 0, -moved], atol=0.1 * moved)
    bench.now_s += 1.0
    rest = bench.authority.action(bench.applied, bench.observation)
    expected = np.zeros(6) if kind == "joint_delta" else bench.applied
    np.testing.assert_allclose(rest, expected, atol=1e-6)  # without input the joints rest


@pytest.mark.parametrize("direction", [(1.0, 0.0, 0.0), (0.6, 0.8, 0.0)])
@pytest.mark.parametrize("kind", ["joint_delta", "joint_target"])
def test_joints_keep_their_reduced_speed_and_the_direction(
    kind: Literal["joint_delta", "joint_target"], direction: tuple[float, float, float]
) -> None:
    speeds, ahead = [], np.array(direction)
    for share in (0.25, 0.5, 1.0):
        bench = Bench(kind, reduced_speed=0.1)
        start, before = bench.tool, bench.joints
        for _ in range(STEPS // 4):
            assert not bench.order("drive", tuple((share * ahead).tolist()))
            request = bench.authority.action(bench.applied, bench.observation)
            bench.step()
            np.testing.assert_array_equal(bench.applied, request)
            moved, before = bench.joints - before, bench.joints
            assert np.abs(moved).max() == pytest.approx(share * 0.1 * bench.spec.period_s, rel=1e-3)
        way = bench.tool - start
        along = float(way @ ahead)
        assert np.linalg.norm(way - along * ahead) < np.tan(np.deg2rad(1.0)) * along
        speed = along / (STEPS // 4 * bench.spec.period_s)
        assert speed == pytest.approx(share * bench.authority.tool_drive.speed, rel=0.02)
        speeds.append(speed)
    np.testing.assert_allclose(speeds, speeds[-1] * np.array([0.25, 0.5, 1.0]), rtol=0.02)


@pytest.mark.parametrize(
    ("description", "reason"),
    [("", "name no `description`"), ("/nowhere.urdf", "name an MJCF or URDF file"), ("so101", "so101 has 5 joints")],
)
def test_robot_without_kinematics_says_why(description: str, reason: str) -> None:
    bench = Bench("joint_delta", description)
    assert bench.authority.tool_drive.speed == 0.0
    assert reason in bench.order("drive", (1.0, 0.0, 0.0))
    assert not bench.order("drive"), "single joints can be driven"
