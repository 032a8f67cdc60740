"""Driver for any Gymnasium environment with Box or Dict observations, pictures too, and a Box action, by config alone.

Vectors of the observation become ``observation.state`` in the order of the space, pictures become cameras. The
environment's reward, end and success are those of the episode. Time moves only with an action: a hold or a stop leaves
the environment as it is. An environment that raises is a lost robot.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from hal.camera import Camera, CameraFrame
from hal.driver import RobotSetup, RobotSetupRequest, read_options
from hal.errors import HardwareLost, SpecError
from hal.robot import Observation, Robot, StopLevel
from hal.settings import Count, Positive, suggest
from hal.spec import ACTION, STATE, Array, ArraySpec, CameraSpec, RobotSpec, SafetyLimits
from hal.task import Task, TaskOutcome, TaskRequest

DEFAULT_RATE_HZ = 10.0
DEFAULT_MAX_STEPS = 1000
HOLD_AFTER_S = 1.0  # a hold would end the episode, and the environment stands still without it
UNBOUNDED = 1e9  # a bound beyond this is none
MAX_ELEMENTS = 10_000  # of an observation's vectors together
MIN_GREY_PIXELS = 16  # a uint8 matrix with shorter edges is a vector
SUCCESS_KEYS = ("is_success", "success")  # of the step's ``info``

T = TypeVar("T")
Path = tuple[str, ...]


@dataclass(frozen=True)
class GymConfig:
    """Attributes:
    id: as for ``gymnasium.make``: ``Reacher-v5``, or with its package ``gymnasium_robotics:FetchReach-v4``.
    settings: arguments of the environment.
    rate_hz: default: the environment's ``render_fps``.
    observation_range: the bounds in the spec of elements that have none, to either side. Readings may exceed them. If
        an element's only bound lies beyond them, the other one is twice this range away from it.
    bounds: low and high of the parts of an observation, or of single elements, such as ``{agent_pos: [-3, 3],
        goal.2: [0, 1]}``. Policies scale what they read by its bounds.
    picture_size: height and width to which pictures are brought, by the nearest pixels.
    success_reward: a step with this reward, or more, is a success; default: ``is_success`` or ``success`` in ``info``.
    ends_at_success: the episode ends at the first success.
    max_steps: default: that of the environment.
    sentence: the instruction for the policy.
    """

    id: str
    settings: dict[str, Any] = field(default_factory=dict)
    rate_hz: Positive | None = None
    observation_range: Positive = 1.0
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    picture_size: tuple[Count, Count] | None = None
    success_reward: float | None = None
    ends_at_success: bool = True
    max_steps: Count | None = None
    sentence: str = ""


class GymRobot(Robot):
    """One environment.

    Attributes:
        max_steps: of an episode.
        images: the newest picture of each camera, uint8 (height, width, 3).
    """

    def __init__(self, config: GymConfig) -> None:
        """Makes the environment and closes it again, to read its spaces.

        Raises:
            SpecError: there is no such environment, its package is not installed, or a space cannot be mapped.
        """
        self.config, self._name = config, f"gym {config.id}"
        env = _make(config)
        leaves = list(_leaves(self._name, env.observation_space))
        self._pictures = {_label(path): (path, box.shape) for path, box in leaves if _is_picture(box)}
        self._vectors = [path for path, box in leaves if not _is_picture(box)]
        if len({_label(path) for path, _ in leaves}) < len(leaves):
            raise SpecError(
                f"{self._name}: two observations have one name: {sorted(_label(path) for path, _ in leaves)}"
            )
        self._space = _action_space(self._name, env.action_space)
        self.spec = self._make_spec(leaves, env.metadata.get("render_fps"))
        self.max_steps = config.max_steps or _max_episode_steps(env) or DEFAULT_MAX_STEPS
        env.close()
        self._low, self._high = (np.array(each, np.float32) for each in (self.spec.action.low, self.spec.action.high))
        self._env: Any = None
        self._state: Array = np.empty(0)
        self._outcome = TaskOutcome(reward=0.0, terminated=False)
        self.images: dict[str, Array] = {}

    def connect(self) -> None:
        """See `hal.robot.Robot`. Raises HardwareLost if the environment cannot be made or reset."""
        if self._env is None:
            self._env = self._call("making it", lambda: _make(self.config))
            self.reset(0)

    def observe(self) -> Observation:
        self._require_env()
        arrays = {STATE: self._state.copy()} if self._vectors else {}
        return Observation(arrays, time.monotonic_ns())

    def command(self, action: Array) -> Array:
        """See `hal.robot.Robot`. After the end of an episode, the environment waits for `reset`.

        Raises:
            HardwareLost: also if the reward or an observation is not finite.
        """
        self.spec.action.validate(action)
        env = self._require_env()
        applied: Array = np.clip(action, self._low, self._high)
        if self._outcome.terminated or self._outcome.truncated:
            return applied
        wanted = applied.astype(self._space.dtype).reshape(self._space.shape)
        np.clip(wanted, self._space.low, self._space.high, out=wanted)  # the spec's bounds are rounded to float32
        observation, outcome = self._call("a step", lambda: self._step(env, wanted))
        if not math.isfinite(outcome.reward):
            raise HardwareLost(f"{self._name}: its reward is {outcome.reward}")
        self._receive(observation)
        self._outcome = replace(outcome, reward=self._outcome.reward + outcome.reward)
        return applied

    def stop(self, level: StopLevel) -> None:
        self._require_env()

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            self._call("closing it", env.close)

    def reset(self, seed: int) -> None:
        """Start an episode. Raises HardwareLost."""
        env = self._require_env()
        observation, _ = self._call("a reset", lambda: env.reset(seed=seed))
        self._outcome = TaskOutcome(reward=0.0, terminated=False)
        self._receive(observation)

    def take_outcome(self) -> TaskOutcome:
        """The reward since the last call, and whether the episode has ended."""
        outcome = self._outcome
        self._outcome = replace(outcome, reward=0.0)
        return outcome

    def _step(self, env: Any, action: Array) -> tuple[Any, TaskOutcome]:
        """The observation and the outcome of one step. Raises any exception."""
        observation, reward, terminated, truncated, info = env.step(action)
        known = next((bool(info[key]) for key in SUCCESS_KEYS if key in info), None)
        if self.config.success_reward is not None:
            known = float(reward) >= self.config.success_reward
        ends = bool(terminated or (known and self.config.ends_at_success))
        success = known if ends or truncated or known else None
        return observation, TaskOutcome(float(reward), ends, success, truncated=bool(truncated))

    def _make_spec(self, leaves: list[tuple[Path, Any]], render_fps: float | None) -> RobotSpec:
        wide, rate_hz = self.config.observation_range, float(self.config.rate_hz or render_fps or DEFAULT_RATE_HZ)
        vectors = [(path, box) for path, box in leaves if not _is_picture(box)]
        if (size := sum(math.prod(box.shape) for _, box in vectors)) > MAX_ELEMENTS:
            raise SpecError(f"{self._name}: its observation has {size} numbers; at most {MAX_ELEMENTS} are supported")
        low = np.concatenate([np.ravel(box.low) for _, box in vectors] or [np.empty(0)]).astype(np.float64)
        high = np.concatenate([np.ravel(box.high) for _, box in vectors] or [np.empty(0)]).astype(np.float64)
        labels = [f"{_label(path)}.{i}" for path, box in vectors for i in range(math.prod(box.shape))]
        low = np.where(np.abs(low) < UNBOUNDED, low, np.where(high > -wide, -wide, high - 2 * wide))
        high = np.where(np.abs(high) < UNBOUNDED, high, np.where(low < wide, wide, low + 2 * wide))
        for name, (least, most) in self.config.bounds.items():
            chosen = [name in (label, label.rpartition(".")[0]) for label in labels]
            if not any(chosen):
                parts = {label.rpartition(".")[0] for label in labels}
                raise SpecError(f"{self._name}: bounds: no observation {name!r}; {suggest(name, parts)}")
            low[chosen], high[chosen] = least, most
        state = _array_spec(STATE, labels, low, high)
        action = self._space
        action_low, action_high = np.ravel(action.low), np.ravel(action.high)
        return RobotSpec(
            model=self.config.id.rpartition(":")[2],
            rate_hz=rate_hz,
            observation=(state,) if vectors else (),
            action=_array_spec(ACTION, [f"action.{i}" for i in range(len(action_low))], action_low, action_high),
            cameras=tuple(
                CameraSpec(name=_label(path), height=shape[0], width=shape[1], rate_hz=rate_hz)
                for path, box in leaves
                if _is_picture(box) and (shape := _rgb(np.zeros(box.shape, np.uint8), self.config.picture_size).shape)
            ),
            limits=SafetyLimits(watchdog_periods=max(2, math.ceil(HOLD_AFTER_S * rate_hz))),
            neutral=tuple(np.clip(0.0, action_low, action_high).astype(np.float64).tolist()),
            safe_stop="the environment stands still",
        )

    def _receive(self, observation: Any) -> None:
        """Keep an observation. Raises HardwareLost if it differs from the space."""
        try:
            parts = [np.ravel(_at(observation, path)).astype(np.float32) for path in self._vectors]
            state = np.concatenate(parts) if parts else np.empty(0, np.float32)
            pictures = {name: np.asarray(_at(observation, path)) for name, (path, _) in self._pictures.items()}
            images = {name: _rgb(picture, self.config.picture_size) for name, picture in pictures.items()}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise HardwareLost(f"{self._name}: its observation differs from its space: {error!r}") from error
        if self._vectors and state.shape != self.spec.feature(STATE).shape:
            raise HardwareLost(f"{self._name}: its observation has {len(state)} numbers, unlike its space")
        for name, (_, shape) in self._pictures.items():
            if pictures[name].shape != shape:
                raise HardwareLost(
                    f"{self._name}: its picture {name} is {pictures[name].shape}; its space says {shape}"
                )
        if not np.isfinite(state).all():
            wrong = int(np.flatnonzero(~np.isfinite(state))[0])
            label = self.spec.feature(STATE).labels[wrong]
            raise HardwareLost(f"{self._name}: its observation {label} is {state[wrong]}")
        self._state, self.images = state, images

    def _require_env(self) -> Any:
        if self._env is None:
            raise HardwareLost(f"{self._name} is not connected")
        return self._env

    def _call(self, operation: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:  # an environment may raise anything
            text = " ".join(str(error).split())
            raise HardwareLost(f"{self._name}: {operation} failed: {type(error).__name__}: {text}") from error


class GymCamera(Camera):
    """A picture in the environment's observation. It is of the present: between steps the environment stands still."""

    def __init__(self, robot: GymRobot, spec: CameraSpec) -> None:
        self.spec, self._robot = spec, robot
        self._connected = False

    def connect(self) -> None:
        self._connected = True

    def read(self) -> CameraFrame:
        if not self._connected or self.spec.name not in self._robot.images:
            raise HardwareLost(f"camera {self.spec.name} of {self._robot.spec.model} is not connected")
        return CameraFrame(self._robot.images[self.spec.name], time.monotonic_ns())

    def close(self) -> None:
        self._connected = False


class GymTask(Task):
    """The environment's own task: its reward, its end, and the success that it reports."""

    reads_observation = False

    def __init__(self, task: TaskRequest, robot: GymRobot) -> None:
        sentence = task.sentence or robot.config.sentence
        self.name, self.instruction, self.max_steps = task.name, sentence or task.name, robot.max_steps
        self._robot = robot

    def reset(self, robot: Robot, rng: np.random.Generator) -> None:
        self._robot.reset(int(rng.integers(2**31)))

    def evaluate(self, observation: Observation) -> TaskOutcome:
        return self._robot.take_outcome()


def _make(config: GymConfig) -> Any:
    """Make the environment without its own limit of steps. Raises SpecError."""
    import gymnasium

    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read by MuJoCo and dm_control before they draw
    try:
        return gymnasium.make(config.id, max_episode_steps=-1, disable_env_checker=True, **config.settings)
    except Exception as error:  # unknown, a missing package, or an environment that raises anything
        text = " ".join(str(error).split())
        raise SpecError(f"gym {config.id} cannot be made: {type(error).__name__}: {text}") from error


def _max_episode_steps(env: Any) -> int | None:
    """The registered limit of an environment that `_make` gave."""
    import gymnasium

    return gymnasium.spec(env.spec.id).max_episode_steps


def _leaves(name: str, space: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The Boxes of an observation space, with their paths. Raises SpecError for any other space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(name, inner, (*path, str(key)))
    elif isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind in "fiub":
        if space.dtype == np.uint8 and len(space.shape) == 3 and not _is_picture(space):
            raise SpecError(f"{name}: the picture {_label(path)} has the shape {space.shape}; it needs 1 or 3 channels")
        yield path, space
    else:
        raise SpecError(f"{name}: the observation {_label(path)} is {space}; only Box and Dict can be mapped")


def _action_space(name: str, space: Any) -> Any:
    from gymnasium import spaces

    if (
        not isinstance(space, spaces.Box)
        or space.dtype is None
        or space.dtype.kind != "f"
        or not math.prod(space.shape)
    ):
        raise SpecError(f"{name}: its action is {space}; only a Box of floating-point numbers can be mapped")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise SpecError(f"{name}: its action has no bounds: {space}")
    return space


def _array_spec(feature: str, labels: list[str], low: Array, high: Array) -> ArraySpec:
    return ArraySpec(
        name=feature,
        labels=tuple(labels),
        units=("1",) * len(labels),
        low=tuple(low.astype(np.float64).tolist()),
        high=tuple(high.astype(np.float64).tolist()),
        frame="",
    )


def _label(path: Path) -> str:
    return "_".join(path) or "observation"


def _at(observation: Any, path: Path) -> Any:
    for key in path:
        observation = observation[key]
    return observation


def _is_picture(box: Any) -> bool:
    if box.dtype != np.uint8 or len(box.shape) not in (2, 3):
        return False
    return min(box.shape) >= MIN_GREY_PIXELS if len(box.shape) == 2 else bool({box.shape[0], box.shape[-1]} & {1, 3})


def _rgb(picture: Array, size: tuple[int, int] | None) -> Array:
    """uint8 (height, width, 3) from a picture without channels, or with 1 or 3, last or first; a new array."""
    picture = picture[..., None] if picture.ndim == 2 else picture
    if picture.ndim != 3 or picture.dtype != np.uint8:
        raise ValueError(f"a picture is {picture.dtype} {picture.shape}")
    last = picture if picture.shape[-1] in (1, 3) else np.moveaxis(picture, 0, -1)
    if size is not None:
        rows, columns = (np.arange(new) * old // new for new, old in zip(size, last.shape[:2], strict=True))
        last = last[np.ix_(rows, columns)]
    return np.ascontiguousarray(np.broadcast_to(last, (*last.shape[:2], 3))).copy()


def make_robot_setup(request: RobotSetupRequest) -> RobotSetup:
    """A `hal.driver.RobotSetupFactory`; options: `GymConfig`. Its task is the environment's."""
    if len(request.tasks) > 1 or request.tasks[0].options:
        raise SpecError("task: a Gymnasium environment has one task, without options; set those of the environment")
    robot = GymRobot(read_options(GymConfig, request))
    cameras = tuple(GymCamera(robot, spec) for spec in robot.spec.cameras) if request.cameras else ()
    return RobotSetup(request.name, robot, GymTask(request.tasks[0], robot), cameras)
