"""Any Gymnasium environment as a robot: spaces, ends, rewards, failures, whole runs; ours as Gymnasium's."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from run_kit import user_sys

import sim  # noqa: F401  registers the environments
from hal.camera import Camera
from hal.conformance import CameraConformance, RobotConformance
from hal.errors import HardwareLost, SpecError
from hal.robot import Robot
from hal.safety import SafetyKernel
from hal.spec import STATE, RobotSpec
from sim.gym import GymCamera, GymConfig, GymRobot, GymTask
from user_sys.algorithms.algorithm import SentenceReader, policy_arrays
from user_sys.algorithms.conformance import example_batch_for
from user_sys.compose import PolicyConfig, RobotConfig, TaskConfig, build_robot_setup, make_policy, robot_spec
from user_sys.edge.agents import NewestFrames, task_outcome
from user_sys.edge.environment import RobotEnvironment
from user_sys.errors import ConfigError
from user_sys.learner.config import LearnerConfig
from user_sys.plugins import load_algorithm, load_policy
from user_sys.run.config import RunConfig
from user_sys.run.metrics import read_metrics
from user_sys.run.prepare import check_plugins
from user_sys.store.store import StoreReader

PICTURE = spaces.Box(0, 255, (8, 6, 3), np.uint8)
OBSERVATION = spaces.Dict({"place": spaces.Box(-2.0, 2.0, (2,), np.float64), "view": spaces.Dict({"top": PICTURE})})
floats = st.sampled_from([np.float32, np.float64])
shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
bounds = st.sampled_from([(-1.0, 1.0), (-np.inf, np.inf), (0.0, np.inf), (-np.inf, -3.0), (5.0, 7.0), (2.0, 2.0)])
boxes = st.builds(lambda bound, shape, dtype: spaces.Box(*bound, shape, dtype), bounds, shapes, floats)
integers = st.builds(lambda shape: spaces.Box(-3, 9, shape, np.int64), shapes)
pictures = st.builds(
    lambda h, w, c, first: spaces.Box(0, 255, (c, h, w) if first else (h, w, c), np.uint8),
    st.integers(4, 9),
    st.integers(4, 9),
    st.sampled_from([1, 3]),
    st.booleans(),
) | st.builds(lambda h, w: spaces.Box(0, 255, (h, w), np.uint8), st.integers(16, 20), st.integers(16, 20))
observations = st.recursive(
    boxes | integers | pictures,
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "camera"]), inner, min_size=1, max_size=3).map(
        spaces.Dict
    ),
    max_leaves=5,
)
actions = st.builds(lambda shape, dtype: spaces.Box(-0.5, 2.0, shape, dtype), shapes, floats)
PACKAGES: list[Any] = [
    ("gymnasium_robotics:FetchReach-v4", {}, None, 0.04),
    ("gym_pusht:gym_pusht/PushT-v0", {"obs_type": "pixels_agent_pos"}, (96, 96, 3), 8.0),
    pytest.param(
        "gym_aloha:gym_aloha/AlohaInsertion-v0",
        {"obs_type": "pixels_agent_pos"},
        (480, 640, 3),
        0.02,
        marks=pytest.mark.slow,
    ),
]
RUN = """
robots: [{name: gym-0, driver: gym, task: try, frame_stride: 1, options: OPTIONS}]
demonstrations: {episodes: 0}
learner: {max_training_s: 5, batch_size: 32, warmup_updates: 5, checkpoint_interval_s: 2}
evaluation: {episodes: 1, video_episodes: 0}
console: {port: 0}
logging: {wandb: {mode: disabled}}
"""
ENVIRONMENTS = {
    "Reacher-v5": "{id: Reacher-v5, success_reward: -0.1}",
    "FetchReach-v4": "{id: 'gymnasium_robotics:FetchReach-v4'}",
    "PushT-v0": "{id: 'gym_pusht:gym_pusht/PushT-v0', max_steps: 30, settings: {obs_type: pixels_agent_pos}}",
    "AlohaInsertion-v0": "{id: 'gym_aloha:gym_aloha/AlohaInsertion-v0', max_steps: 10, picture_size: [48, 64], "
    "settings: {obs_type: pixels_agent_pos}}",
}
IDS = [f"user_sim/{model}{task}-v0" for model in ("Panda", "SO101", "UR5e") for task in ("Lift", "Place", "Reach")]


class PointEnv(gymnasium.Env[Any, Any]):
    """A point that moves by its action; success at 1 on the first axis. It can raise, and draw from any spaces."""

    metadata = {"render_fps": 5, "render_modes": []}

    def __init__(
        self, observation: spaces.Space[Any] = OBSERVATION, action: spaces.Space[Any] | None = None, fault: str = ""
    ) -> None:
        self.observation_space, self._fault = observation, fault
        self.action_space = action or spaces.Box(-0.5, 0.5, (2,), np.float32)
        self._drawn = observation is not OBSERVATION
        self._place = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._place = self.np_random.uniform(-0.2, 0.2, 2)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        if self._fault == "raises":
            raise RuntimeError("the arm\nexploded")
        if not self._drawn:
            self._place = np.clip(self._place + action, -2, 2)
        done = bool(self._place[0] >= 1.0)
        reward = float("nan") if self._fault == "nan" else float(done) - 0.25
        observation = {"other": 1} if self._fault == "shape" else self._observation()
        if self._fault == "picture":
            observation["view"]["top"] = np.zeros((16, 12, 3), np.uint8)
        if self._fault == "inf":
            observation["place"][1] = np.inf
        if self._fault == "truncates":
            return observation, 1.0, False, True, {}
        if self._fault == "rewards":
            return observation, np.zeros(2), False, False, {}
        return observation, reward, False, False, {"is_success": np.zeros(2) if self._fault == "successes" else done}

    def _observation(self) -> Any:
        if self._drawn:
            return self.observation_space.sample()
        return {"place": self._place.copy(), "view": {"top": np.full((8, 6, 3), 100, np.uint8)}}


gymnasium.register("TestPoint-v0", entry_point=PointEnv, max_episode_steps=30)
VIEW = spaces.Dict({"front": spaces.Box(0, 255, (24, 32, 3), np.uint8)})  # as the conformance suites show it
gymnasium.register("TestView-v0", entry_point=PointEnv, max_episode_steps=30, kwargs={"observation": VIEW})


def point(**options: Any) -> GymRobot:
    return GymRobot(GymConfig("TestPoint-v0", settings=options))


class TestPoint(RobotConformance):
    def make_robot(self) -> Robot:
        return point()


class TestPicture(CameraConformance):
    def make_camera(self) -> Camera:
        robot = point()
        robot.connect()
        return GymCamera(robot, robot.spec.cameras[0])


def test_spec_follows_spaces() -> None:
    spec = point().spec
    assert (spec.model, spec.rate_hz) == ("TestPoint-v0", 5)
    assert spec.feature(STATE).labels == ("place.0", "place.1") and spec.feature(STATE).low == (-2.0, -2.0)
    assert [(camera.name, camera.shape) for camera in spec.cameras] == [("view_top", (8, 6, 3))]
    assert (spec.action.low, spec.action.high) == ((-0.5, -0.5), (0.5, 0.5))


@settings(deadline=None)
@given(observation=observations, action=actions, seed=st.integers(0, 2**31 - 1))
def test_any_mappable_space_is_a_robot(observation: spaces.Space[Any], action: spaces.Box, seed: int) -> None:
    with point(observation=observation, action=action) as robot:
        spec = robot.spec
        assert msgspec.json.decode(msgspec.json.encode(spec), type=RobotSpec) == spec
        SafetyKernel(spec)
        robot.reset(seed)
        robot.command(np.random.default_rng(seed).uniform(spec.action.low, spec.action.high).astype(np.float32))
        spec.validate(robot.observe().arrays)
        for camera in spec.cameras:
            image = robot.images[camera.name]
            assert image.shape == camera.shape and image.dtype == np.uint8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "NoSuchArm-v0"}, "gym NoSuchArm-v0 cannot be made: NameNotFound"),
        ({"id": "no_such_package:Arm-v0"}, "gym no_such_package:Arm-v0 cannot be made: .*no_such_package"),
        ({"id": "TestPoint-v0", "settings": {"speed": 3}}, "cannot be made: TypeError"),
        ({"id": "CartPole-v1"}, r"its action is Discrete\(2\); only a Box of floating-point numbers can be mapped"),
        ({"settings": {"action": spaces.Box(-np.inf, np.inf, (2,))}}, "its action has no bounds"),
        ({"settings": {"observation": spaces.Tuple([PICTURE])}}, "the observation observation is Tuple"),
        ({"settings": {"observation": spaces.Dict({"word": spaces.Text(5)})}}, "the observation word is Text"),
        ({"settings": {"observation": spaces.Box(0, 255, (9, 9, 12), np.uint8)}}, "it needs 1 or 3 channels"),
        ({"bounds": {"place": (1, 0)}}, "a lower bound exceeds its upper bound"),
        ({"bounds": {"plaice": (0, 1)}}, "bounds: no observation 'plaice'; did you mean 'place'"),
        ({"settings": {"observation": spaces.Box(-1, 1, (200, 200))}}, "has 40000 numbers; at most 10000"),
        (
            {"settings": {"observation": spaces.Dict({"a_b": OBSERVATION["place"], "a": spaces.Dict({"b": PICTURE})})}},
            "two observations have one name",
        ),
    ],
)
def test_unmappable_environment_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        GymRobot(GymConfig(**{"id": "TestPoint-v0", **options}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "gym TestPoint-v0: a step failed: RuntimeError: the arm exploded"),
        ("nan", "its reward is nan"),
        ("rewards", "a step failed: TypeError: "),
        ("successes", "a step failed: ValueError: "),
        ("picture", r"its picture view_top is \(16, 12, 3\); its space says \(8, 6, 3\)"),
        ("inf", "its observation place.1 is inf"),
        ("shape", "its observation differs from its space"),
    ],
)
def test_environment_that_fails_is_a_lost_robot(fault: str, message: str) -> None:
    with point(fault=fault) as robot, pytest.raises(HardwareLost, match=message):
        robot.command(np.zeros(2, np.float32))


def test_reward_end_and_success_feed_the_episode() -> None:
    task = TaskConfig("go", sentence="go right")
    setup = build_robot_setup(RobotConfig(name="gym-0", driver="gym", task=task, options={"id": "TestPoint-v0"}))
    assert isinstance(setup.task, GymTask) and (setup.task.max_steps, setup.task.instruction) == (30, "go right")
    environment = RobotEnvironment(setup.robot, setup.task, SafetyKernel(setup.robot.spec), setup.cameras)
    environment.connect()
    first = environment.reset(3)
    assert np.array_equal(environment.reset(3).observation[STATE], first.observation[STATE]), "by its seed"
    rewards, outcome = [], None
    while outcome is None or not outcome.terminated:
        step = environment.step(np.array([0.5, 0.0], np.float32))
        outcome = step.outcome
        rewards.append(outcome.reward)
    assert rewards == [*[-0.25] * (len(rewards) - 1), 0.75] and outcome.success is True
    assert list(step.frames) == ["view_top"]
    after = environment.hold()
    assert after.outcome.reward == 0.0
    stands = environment.step(np.array([0.5, 0.0], np.float32))
    assert np.array_equal(stands.observation[STATE], step.observation[STATE]), "until the next reset"
    environment.close()


def test_truncated_episode_is_not_terminated() -> None:
    options = {"id": "TestPoint-v0", "settings": {"fault": "truncates"}}
    setup = build_robot_setup(RobotConfig(name="gym-0", driver="gym", task="go", options=options))
    environment = RobotEnvironment(setup.robot, setup.task, SafetyKernel(setup.robot.spec), setup.cameras)
    environment.connect()
    environment.reset(0)
    step = environment.step(np.array([0.5, 0.0], np.float32))
    outcome = task_outcome(step, late=False)
    assert (outcome.terminated, outcome.truncated, outcome.success) == (False, True, False)
    after = environment.step(np.array([0.5, 0.0], np.float32))
    assert np.array_equal(after.observation[STATE], step.observation[STATE]), "until the next reset"
    environment.close()


def test_picture_of_a_held_environment_is_of_the_present() -> None:
    """A policy refuses an old picture, and only a step would bring a new one."""
    setup = build_robot_setup(RobotConfig(name="gym-0", driver="gym", task="go", options={"id": "TestPoint-v0"}))
    environment = RobotEnvironment(setup.robot, setup.task, SafetyKernel(setup.robot.spec), setup.cameras)
    environment.connect()
    frames = NewestFrames(setup.robot.spec)
    frames.update(reset := environment.reset(0))
    frames.update(environment.hold())
    assert frames.newest["view_top"].t_capture_ns >= reset.t_capture_ns
    environment.close()


def test_greatest_action_of_a_float64_space_is_within_it() -> None:
    with point(action=spaces.Box(-0.1, 0.1, (2,), np.float64)) as robot:
        robot.command(np.array(robot.spec.action.high, np.float32))


@pytest.mark.parametrize(("low", "high"), [(0.1, 1.0), (-1.0, -0.1), (0.7, 1.0)])
def test_robot_of_a_float64_space_without_zero_is_driven(low: float, high: float) -> None:
    with point(action=spaces.Box(low, high, (2,), np.float64)) as robot:
        rest = robot.spec.rest_action(robot.observe().arrays)
        applied = SafetyKernel(robot.spec).filter(rest, robot.observe()).applied
        assert applied is not None
        robot.command(applied)


@pytest.mark.parametrize("rate_hz", [1.0, 125.0])
def test_watchdog_gives_a_session_a_second_at_any_rate(rate_hz: float) -> None:
    spec = GymRobot(GymConfig("TestPoint-v0", rate_hz=rate_hz)).spec
    assert spec.limits.watchdog_periods * spec.period_s >= 1.0


def test_gymnasiums_reacher_is_a_robot() -> None:
    with GymRobot(GymConfig("Reacher-v5")) as robot:
        assert robot.max_steps == 50 and len(robot.spec.feature(STATE).labels) == 10
        for _ in range(60):
            robot.command(np.array([0.1, -0.1], np.float32))
        assert not robot.take_outcome().terminated, "the session truncates the episode"


def test_success_is_a_reward_and_bounds_are_given() -> None:
    config = GymConfig("TestPoint-v0", success_reward=-0.25, bounds={"place": (-1, 3), "place.1": (0, 1)})
    with GymRobot(config) as robot:
        assert (robot.spec.feature(STATE).low, robot.spec.feature(STATE).high) == ((-1, 0), (3, 1))
        robot.command(np.zeros(2, np.float32))
        outcome = robot.take_outcome()
        assert outcome.success and outcome.terminated and outcome.reward == -0.25


def test_pictures_are_brought_to_a_size() -> None:
    with GymRobot(GymConfig("TestPoint-v0", picture_size=(4, 12))) as robot:
        assert robot.spec.cameras[0].shape == robot.images["view_top"].shape == (4, 12, 3)
        assert (robot.images["view_top"] == 100).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "picture", "moved"), PACKAGES)
def test_packages_of_others_are_robots(
    name: str, options: dict[str, Any], picture: tuple[int, ...] | None, moved: float
) -> None:
    package = name.partition(":")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"pip install {package.replace('_', '-')}")
    robot = GymRobot(GymConfig(name, settings=options))
    rng, action = np.random.default_rng(0), robot.spec.action
    with robot:
        assert [camera.shape for camera in robot.spec.cameras] == ([] if picture is None else [picture])
        first, images = robot.observe().arrays[STATE], dict(robot.images)
        for _ in range(5):
            robot.command(rng.uniform(action.low, action.high).astype(np.float32))
            robot.spec.validate(robot.observe().arrays)
        assert np.abs(robot.observe().arrays[STATE] - first).max() > moved
        assert all((robot.images[camera] != images[camera]).any() for camera in images)


def test_missing_environment_of_a_closed_robot_is_lost() -> None:
    with pytest.raises(HardwareLost, match="is not connected"):
        point().observe()
    with pytest.raises(SpecError):
        GymRobot(GymConfig("Nothing-v0"))


def updates(run: Path) -> int:
    return max((int(line["count"] or 0) for line in read_metrics(run / "metrics" / "learner.jsonl")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_is_recorded_trained_on_and_resumed(name: str, tmp_path: Path) -> None:
    options = ENVIRONMENTS[name]
    package = options.partition("'")[2].partition(":")[0]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"pip install {package.replace('_', '-')}")
    (tmp_path / "gym.yaml").write_text(RUN.replace("OPTIONS", options))
    run, steps, counts = tmp_path / "runs" / "first", [0], [0]
    for argv in (("gym.yaml", "--name=first"), ("--resume", "runs/first", "--learner.max_training_s=9")):
        with user_sys(tmp_path, "train", *argv) as launch:
            assert launch.wait() == 0, launch.err
        with StoreReader.open(run / "store") as reader:
            reader.refresh()
            steps.append(sum(episode.steps for episode in reader.episodes()))
        counts.append(updates(run))
    assert steps[2] > steps[1] > 0 and counts[2] > counts[1] > 0
    assert json.loads((run / "summary.json").read_text())["updates"] == counts[2]


IDS += [f"user_sim/Panda{task}-v0" for task in ("Peg", "Plug", "Cap", "Tidy")]


@pytest.mark.parametrize("name", IDS)
def test_environment_passes_gymnasium_check_and_ends(name: str) -> None:
    env = gymnasium.make(f"sim:{name}", render_mode="rgb_array", width=96, height=64)
    check_env(env.unwrapped)
    env.action_space.seed(0)
    env.reset(seed=3)
    for _ in range(160):
        _, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert info["is_success"] == (reward == 1.0)
        if terminated or truncated:
            break
    assert terminated or truncated
    assert env.render().shape == (64, 96, 3)
    env.close()


def test_action_spans_the_whole_range() -> None:
    env = gymnasium.make("user_sim/PandaReach-v0")
    before, _ = env.reset(seed=0)
    for _ in range(3):
        after, *_ = env.step(np.array([0, 0, 1, -1], np.float32))
    rise = after["state"][16] - before["state"][16]
    assert 0.05 < rise <= 0.125
    assert after["state"][20] < 0.06, "the gripper closes at -1"
    env.close()


TINY_VLA = {"width": 16, "heads": 2, "expert_layers": 1}
PICTURE_POLICIES: list[tuple[str, str, dict[str, Any]]] = [
    ("rlpd", "cnn", {"hidden": [16], "picture_size": 8, "pretrain_updates": 1}),
    ("ppo", "cnn", {"hidden": [16], "picture_size": 8}),
    ("bc", "flow", {"pictures": True, "hidden": [16], "prefix_max": 2}),
    ("sac_flow", "gated_flow", {"pictures": True, "hidden": [16]}),
    ("hg_dagger", "vla", TINY_VLA),
    ("sac_flow", "vla", {**TINY_VLA, "gated": True}),
    ("dsrl", "steered", {"pictures": True, "hidden": [16], "base": "vla", "base_options": TINY_VLA}),
    ("dsrl", "steered", {"reads_base": True, "hidden": [16], "base": "vla", "base_options": TINY_VLA}),
]
DRIVER = RobotConfig(name="gym-0", driver="gym", task="drive", frame_stride=1, options={"id": "TestView-v0"})


@pytest.mark.parametrize(("algorithm", "kind", "options"), PICTURE_POLICIES)
def test_environment_of_pictures_alone_is_trained_on(algorithm: str, kind: str, options: dict[str, Any]) -> None:
    policy, spec = PolicyConfig(kind=kind, options=options), robot_spec(DRIVER)
    check_plugins(RunConfig(robots=(DRIVER,), learner=LearnerConfig(algorithm=algorithm), policy=policy))
    (camera,) = spec.cameras
    chosen, settings = load_policy(kind, options)
    trained, trained_settings = load_algorithm(algorithm, {})
    learner = trained(trained_settings, chosen.make_module(spec, settings=settings), spec)
    assert (learner.data.features, learner.data.cameras) == ((), (camera.name,))
    batch = example_batch_for(learner.data, np.random.default_rng(0), n=4)
    shown, following = (each[camera.feature] for each in (batch.observation, batch.next_observation))
    batch = replace(batch, observation={camera.feature: shown}, next_observation={camera.feature: following})
    if isinstance(learner.policy, SentenceReader):
        batch = batch.with_sentences(learner.policy.encode_sentences(batch.sentences))
    for number in range(2):
        learner.update(batch, number)
    acting = make_policy(policy, spec, 0)
    acting.load(policy_arrays(learner.policy))
    chunk = acting.act({camera.feature: np.zeros(camera.shape, np.uint8)}, "drive", deterministic=True)
    assert np.isfinite(chunk.actions).all()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("mlp", {}, "the policy mlp reads vectors, and .* has only pictures: set policy.kind to one that reads pict"),
        ("flow", {}, "the policy without policy.options.pictures reads vectors, .*: set pictures: true"),
        ("flow", {"pictures": True, "correction_hidden": [8]}, "correction_hidden reads vectors, .*: leave it out"),
        ("flow", {"pictures": True, "offset_max": 2}, "offset_max is 2, and the policy reads only pictures"),
        ("steered", {"base": "vla"}, "the policy steered without policy.options.pictures reads vectors"),
    ],
)
def test_policy_that_reads_no_pictures_is_refused_before_the_run(
    kind: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^robot gym-0: .*{reason}"):
        check_plugins(RunConfig(robots=(DRIVER,), policy=PolicyConfig(kind=kind, options=options)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium names the version
def test_environment_without_a_version_is_the_newest() -> None:
    with GymRobot(GymConfig("Pendulum")) as robot:
        assert robot.max_steps == 200


def test_element_whose_only_bound_lies_beyond_the_range_has_two_bounds() -> None:
    low, high = np.array([273.15, -np.inf, 0.0, -np.inf]), np.array([np.inf, -50.0, np.inf, np.inf])
    robot = point(observation=spaces.Box(low, high, dtype=np.float64))
    state = robot.spec.feature(STATE)
    assert (state.low, state.high) == ((273.15, -52.0, 0.0, -1.0), (275.15, -50.0, 1.0, 1.0))
