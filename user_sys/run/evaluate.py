"""How well a trained policy does alone: no person, no exploration, starts that it has not been trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hal.spec import Array
from user_sys.compose import PolicyConfig, RobotConfig, build_robot_setup, make_policy
from user_sys.edge.agents import PolicyAgent
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.edge.local_environment import StopCheck, never_stop, open_local_environment, raise_if_stopped
from user_sys.edge.loop import EpisodeResult, StepListener, run_episode
from user_sys.edge.recorder import SelectedAction
from user_sys.episode import EpisodeSource

EVALUATION_SEED = 9_000_000


@dataclass(frozen=True)
class EvaluationConfig:
    """`episodes` are run when training is over; the first `video_episodes` of them are filmed.

    A share of successes below `required` makes the run's exit status 1.
    """

    episodes: int = 100
    video_episodes: int = 4
    required: float = 0.0


def evaluate(
    robot: RobotConfig,
    policy: PolicyConfig,
    weights: dict[str, Array],
    config: EvaluationConfig,
    on_frame: Callable[[Array], None],
    *,
    check_stop: StopCheck = never_stop,
    version: int = 0,
    seed: int = 0,
) -> Iterator[EpisodeResult]:
    """Runs `config.episodes` episodes on `robot`, yields each as it ends, and hands pictures of the first to `film`.

    The robot is driven through the same driver, safety kernel and loop as in training, in this process. Pictures are
    uint8 (h, n * w, 3), the cameras side by side. `attend`: as in `local_driver`, and called in each control period.

    Raises:
        WireError: the weights are not this policy's.
        HalError: the robot cannot be driven.
    """
    for filmed, count in ((True, min(config.video_episodes, config.episodes)), (False, config.episodes)):
        first = 0 if filmed else min(config.video_episodes, config.episodes)
        if first >= count:
            continue
        station = build_robot_setup(robot, cameras=filmed, high_resolution=filmed)
        trained = make_policy(policy, station.robot.spec, seed)
        trained.load(weights)
        pilot = PolicyAgent(
            lambda policy=trained: (policy, version),  # type: ignore[misc]
            station.task.instruction,
            station.task.max_steps,
            deterministic=True,
        )
        with open_local_environment(station, robot, check_stop=check_stop) as driver:
            listeners: list[StepListener] = [raise_if_stopped, lambda tick, decision: check_stop()]
            if filmed:
                listeners.append(video_listener(on_frame, len(station.cameras)))
            yield from _episodes(driver, pilot, range(first, count), seed, listeners)


def _episodes(
    driver: RobotEnvironment, pilot: PolicyAgent, numbers: range, seed: int, listeners: list[StepListener]
) -> Iterator[EpisodeResult]:
    for number in numbers:
        start = EVALUATION_SEED + 10_000 * seed + number
        yield run_episode(driver, pilot, None, source=EpisodeSource.EVALUATION, seed=start, listeners=listeners)


def video_listener(film: Callable[[Array], None], cameras: int) -> StepListener:
    """Films the newest picture of each of so many cameras, once there is one of each."""
    newest: dict[str, Array] = {}

    def on_step(tick: TimeStep, decision: SelectedAction | None) -> None:
        newest.update({name: frame.image for name, frame in tick.frames.items()})
        if tick.frames and len(newest) == cameras:
            film(np.concatenate([newest[name] for name in sorted(newest)], axis=1))

    return on_step
