"""The simulated arms as a driver: conformance, tasks and experts."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hal.conformance import RobotConformance
from hal.driver import RobotSetupRequest
from hal.errors import HardwareLost, SpecError
from hal.robot import StopLevel
from hal.safety import SafetyKernel, SafetyReason
from hal.spec import ENVIRONMENT_STATE, STATE
from sim.arms import ARMS
from sim.experts import make_expert
from sim.objects import DISTRACTORS, TASK_OBJECTS, make_objects
from sim.robot import FORCE, GRIPPER_WIDTH, TOOL_POSITION, SimRobot, SimRobotConfig
from sim.tasks import TASKS, make_robot_setup, make_task

UNEXPECTED = SafetyReason.JOINT_POSITION | SafetyReason.JOINT_VELOCITY | SafetyReason.RATE | SafetyReason.BOUND


class TestPandaInReach(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot(SimRobotConfig(scene=("reach",)))


class TestPandaWithWrench(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot(SimRobotConfig(scene=("peg", "tidy"), distractors=2, randomise=1.0))


class TestUr5e(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot(SimRobotConfig(model="ur5e"))


class TestSo101(RobotConformance):
    def make_robot(self) -> SimRobot:
        return SimRobot(SimRobotConfig(model="so101"))


def connected(model: str = "panda", task: str = "lift") -> SimRobot:
    robot = SimRobot(SimRobotConfig(model=model, scene=(task,), cameras=()))
    robot.connect()
    return robot


def test_specs_need_no_mujoco_and_differ_by_model_and_scene() -> None:
    code = "import sys; from sim.robot import SimRobot; SimRobot(); assert 'mujoco' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    specs = [SimRobot(SimRobotConfig(model=m, scene=(task,))).spec for m in ARMS for task in TASKS]
    scenes = {frozenset(TASK_OBJECTS[task]) for task in TASKS}
    assert len({spec.embodiment for spec in specs}) == 3 * len(scenes), "tasks of the same objects share a scene"


def test_unknown_names_and_invalid_rates_are_refused() -> None:
    for request, message in (
        (RobotSetupRequest("a", "lift", {"model": "abb"}), r"no simulated arm 'abb'; choose one of \['panda', 'so101'"),
        (RobotSetupRequest("a", "kitchen", {}), "kitchen"),
        (RobotSetupRequest("a", "lift", {"cameras": ["front", "ceiling"]}), "ceiling"),
        (RobotSetupRequest("a", "juggle", {"scene": ["lift"]}), "juggle"),
        (RobotSetupRequest("a", "lift", {"scene": ["lift", "peg_"]}), "no scene 'peg_'; did you mean 'peg'?"),
        (RobotSetupRequest("a", "peg", {"model": "so101"}), "'peg' needs an arm with 6 joints or more; so101 has 5"),
        (RobotSetupRequest("a", "lift", {"distractors": 3}), "distractors: expected a whole number <= 2, got 3"),
        (RobotSetupRequest("a", "lift", {"camera_hz": 0.0}), "camera_hz"),
    ):
        with pytest.raises(SpecError, match=message):
            make_robot_setup(request)
    with pytest.raises(SpecError, match="juggle"):
        make_expert("juggle", SimRobot())
    with pytest.raises(SpecError, match=r"needs \['target'\] in the scene; the robot has \['cube'\]"):
        make_task("reach").reset(connected(), np.random.default_rng(0))
    with pytest.raises(SpecError, match="is for the model 'ur5e'; the robot is 'panda'"):
        make_task("lift", ARMS["ur5e"]).reset(connected(), np.random.default_rng(0))
    with pytest.raises(HardwareLost, match="not connected"):
        SimRobot().observe()


def test_command_returns_step_clipped_to_workspace() -> None:
    robot = connected()
    make_task("lift").reset(robot, np.random.default_rng(0))
    down = np.array([0.0, 0.0, -0.04, 0.08], np.float32)
    applied = [robot.command(down)[2] for _ in range(10)]
    assert applied[0] == pytest.approx(-0.04)
    assert applied[-1] == pytest.approx(0.0, abs=1e-6)
    assert robot.observe().arrays[STATE][TOOL_POSITION][2] == pytest.approx(0.015, abs=2e-3)


@pytest.mark.parametrize("model", ARMS)
@pytest.mark.parametrize("level", list(StopLevel))
def test_stop_keeps_pose_and_gripper(model: str, level: StopLevel) -> None:
    robot = connected(model)
    make_task("lift", ARMS[model]).reset(robot, np.random.default_rng(0))
    for _ in range(5):
        robot.command(np.array([0.0, 0.0, 0.0, 0.05], np.float32))
    before = robot.observe().arrays[STATE]
    for _ in range(20):
        robot.stop(level)
    after = robot.observe().arrays[STATE]
    np.testing.assert_allclose(after[TOOL_POSITION], before[TOOL_POSITION], atol=4e-3)
    assert after[GRIPPER_WIDTH] == pytest.approx(0.05, abs=3e-3)


def successes(model: str, task: str, seeds: int) -> tuple[int, SafetyReason, float]:
    """The expert's successes, the safety kernel's reasons, and the greatest force, N. Randomised, but for lift."""
    plain = task == "lift"
    config = SimRobotConfig(model, scene=(task,), cameras=(), randomise=float(not plain), distractors=0 if plain else 2)
    robot, place = SimRobot(config), make_task(task, ARMS[model])
    robot.connect()
    expert = make_expert(task, robot, noise=0.1)
    observation = robot.observe()
    kernel = SafetyKernel(robot.spec, clock=lambda: observation.t_capture_ns)
    done, seen, force = 0, SafetyReason(0), 0.0
    for seed in range(seeds):
        place.reset(robot, np.random.default_rng(seed))
        for _ in range(place.max_steps):
            observation = robot.observe()
            verdict = kernel.filter(expert(observation), observation)
            seen |= verdict.reasons
            robot.command(verdict.applied)
            force = max(force, float(np.linalg.norm(robot.world.read_sensors().wrench[:3])))
            outcome = place.evaluate(robot.observe())
            assert outcome.reward == float(outcome.success is True)
            if outcome.terminated:
                break
        done += outcome.success is True
    return done, seen, force


CASES = [(m, task) for m in ARMS for task in TASKS if len(ARMS[m].joints) >= TASKS[task].joints_min]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "task"), CASES)
def test_scripted_expert_succeeds_in_95_of_100_episodes(model: str, task: str) -> None:
    done, seen, force = successes(model, task, 100)
    assert done >= 95
    assert not seen & UNEXPECTED
    if SimRobotConfig(scene=(task,)).has_wrench:
        assert force < 2 * ARMS[model].force_max_n


@pytest.mark.parametrize(("model", "task"), [(model, task) for model, task in CASES if model == "panda"])
def test_scripted_expert_succeeds_through_safety_kernel(model: str, task: str) -> None:
    done, seen, _ = successes(model, task, 3 if task == "tidy" else 8)
    assert done >= (3 if task == "tidy" else 7) and not seen & UNEXPECTED


def test_tasks_of_one_scene_alternate_without_each_others_objects() -> None:
    scene = tuple(TASKS)
    robot = SimRobot(SimRobotConfig(scene=scene, cameras=()))
    robot.connect()
    rng, labels = np.random.default_rng(0), robot.spec.feature(ENVIRONMENT_STATE).labels
    model = robot.world.model
    for name in (*scene, *scene[::-1]):
        task = make_task(name)
        task.reset(robot, rng)
        start = robot.world.read_sensors().object_position
        for _ in range(5):
            robot.command(np.array(robot.spec.neutral, np.float32))
            assert not task.evaluate(robot.observe()).terminated
        moved = {thing: place - start[thing] for thing, place in robot.world.read_sensors().object_position.items()}
        if name == "follow":
            assert np.abs(moved.pop("target")).max() > 5e-3
        assert max(np.abs(each).max() for each in moved.values()) < 2e-3, "also where they are out of sight"
        tracked = dict(zip(labels, robot.observe().arrays[ENVIRONMENT_STATE], strict=True))
        present = {thing for thing in robot.config.objects if tracked[f"{thing}.z"] > -0.05}
        assert present == set(TASK_OBJECTS[name])
    assert robot.world.model is model, "compiled once"


@pytest.mark.parametrize("scene", [("tidy",), ("lift", "tidy", "peg")])
def test_task_that_was_never_reset_judges_recorded_observations(scene: tuple[str, ...]) -> None:
    robot = SimRobot(SimRobotConfig(scene=scene, cameras=()))
    robot.connect()
    spots = {"cube": (0.42, 0.06), "can": (0.42, 0.14), "block": (0.5, 0.14)}
    poses = {name: (*spot, 0.03, 0.0) for name, spot in spots.items()}
    robot.world.reset(np.array([0.5, -0.1, 0.2]), {**poses, "bin": (0.46, 0.1, 0.0, 0.0)})
    assert TASKS["tidy"].for_robot(robot, None).evaluate(robot.observe()).success
    robot.world.reset(np.array([0.5, -0.1, 0.2]), {**poses, "bin": (0.46, -0.1, 0.0, 0.0)})
    assert TASKS["tidy"].for_robot(robot, None).evaluate(robot.observe()).success is None


def test_distractors_are_drawn_clear_of_the_objects_and_are_not_tracked() -> None:
    robot = SimRobot(SimRobotConfig(scene=("place",), cameras=(), distractors=2))
    robot.connect()
    assert robot.spec == SimRobot(SimRobotConfig(scene=("place",), cameras=())).spec
    drawn = []
    for seed in (1, 2, 1):
        make_task("place").reset(robot, np.random.default_rng(seed))
        places = robot.world.read_sensors().object_position
        drawn.append(np.array([places[name] for name in DISTRACTORS]))
        gaps = [np.linalg.norm(places[name] - places["cube"]) for name in DISTRACTORS if places[name][2] > 0]
        assert gaps and min(gaps) > 0.08
    assert np.array_equal(drawn[0], drawn[2]) and not np.array_equal(drawn[0], drawn[1])


def test_wrench_shows_a_push_and_the_kernel_limits_it() -> None:
    robot, task = SimRobot(SimRobotConfig(scene=("peg",), cameras=())), make_task("peg")
    robot.connect()
    task.reset(robot, np.random.default_rng(0))
    at_rest = robot.observe().arrays[STATE][FORCE]
    robot.world.reset(np.array([0.5, 0.0, 0.052]), {"hole": (0.52, 0.02, 0.0, 0.0)})
    observation = robot.observe()
    kernel = SafetyKernel(robot.spec, clock=lambda: observation.t_capture_ns)
    pushed = []
    for _ in range(30):
        observation = robot.observe()
        pushed.append(observation.arrays[STATE][FORCE][2])
        robot.command(kernel.filter(np.array([0.0, 0.0, -0.0005, 0.0], np.float32), observation).applied)
    assert np.abs(at_rest).max() < 1.0
    assert 20.0 < max(pushed) < 1.5 * ARMS["panda"].force_max_n


@pytest.mark.parametrize("model", ARMS)
def test_random_actions_do_not_lift_the_cube(model: str) -> None:
    robot, rng = connected(model), np.random.default_rng(0)
    task, action = make_task("lift", ARMS[model]), robot.spec.action
    for seed in range(10):
        task.reset(robot, np.random.default_rng(seed))
        for _ in range(task.max_steps):
            robot.command(rng.uniform(action.low, action.high).astype(np.float32))
            outcome = task.evaluate(robot.observe())
            assert not outcome.success
            if outcome.terminated:
                break


def test_thrown_or_unreachable_cube_is_no_success() -> None:
    robot, task = connected(), make_task("lift")
    task.reset(robot, np.random.default_rng(0))
    robot.world.reset(np.array([0.5, 0.0, 0.15]), {"cube": (0.5, 0.15, 0.3, 0.0)})
    assert task.evaluate(robot.observe()).reward == 0.0
    robot.world.reset(np.array([0.5, 0.0, 0.15]), {"cube": (0.75, 0.0, 0.02, 0.0)})
    lost = task.evaluate(robot.observe())
    assert lost.terminated and lost.success is False and lost.reward == 0.0


def test_cube_beside_or_above_the_bin_is_no_success() -> None:
    robot, task, tool = connected(task="place"), make_task("place"), np.array([0.5, 0.0, 0.2])
    goal = (0.5, 0.15, 0.0, 0.0)
    for cube, success in (((0.5, 0.0, 0.02), False), ((0.5, 0.15, 0.2), False), ((0.5, 0.15, 0.025), True)):
        robot.world.reset(tool, {"cube": (*cube, 0.0), "bin": goal})
        assert bool(task.evaluate(robot.observe()).success) is success
    robot.world.reset(np.array([0.5, 0.15, 0.03]), {"cube": (0.5, 0.15, 0.025, 0.0), "bin": goal})
    assert not task.evaluate(robot.observe()).terminated, "the gripper is still there"


@pytest.mark.parametrize("task", ["peg", "plug", "cap"])
def test_insertion_succeeds_only_in_its_seat_and_fails_when_toppled(task: str) -> None:
    robot, judge, edge = connected(task=task), make_task(task), 0.04
    piece, fixture = TASK_OBJECTS[task]
    thing, goal = make_objects(edge)[piece], (0.5, 0.1, 0.0, 0.0)
    for x, z, success in (
        (0.5, thing.seat_m, True),
        (0.5, thing.seat_m + 0.2 * edge, None),
        (0.45, thing.rest_m, None),
        (0.45, thing.rest_m - 0.4 * edge, False),
    ):
        robot.world.reset(np.array([0.5, 0.0, 0.25]), {piece: (x, 0.1, z, 0.0), fixture: goal})
        outcome = judge.evaluate(robot.observe())
        assert outcome.success is success and outcome.terminated is (success is not None)


def test_starts_follow_seed_and_cover_the_table() -> None:
    robot, task = connected(), make_task("lift")

    def starts(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(40):
            task.reset(robot, rng)
            arrays = robot.observe().arrays
            rows.append(np.concatenate((arrays[ENVIRONMENT_STATE], arrays[STATE])))
        return np.array(rows)

    first = starts(1)
    assert (first == starts(1)).all() and not (first == starts(2)).all()
    assert (np.ptp(first[:, :2], axis=0) > 0.15).all(), "the cube is hardly moved between episodes"
