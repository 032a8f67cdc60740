"""The rule of a run's own tasks, evaluated again on recorded episodes, after the rule or its options changed."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hal.robot import Observation
from hal.task import Task
from user_sys.compose import RobotConfig, build_robot_setup
from user_sys.config import build, read_yaml
from user_sys.errors import ConfigError, DataSetError
from user_sys.interchange.episodes import StoredEpisode
from user_sys.rewards.reward import EpisodeReward, Reward

OBSERVATION = "observation."


@dataclass(frozen=True)
class RuleSettings:
    """`config`: the file that names the robots with their tasks, such as ``config.yaml`` of a run."""

    config: Path = Path("runs/latest/config.yaml")


class RuleReward(Reward):
    """Rewards and success by `hal.task.Task.evaluate` of each recorded observation.

    Episodes of other robots stay, and those of tasks that do not decide by the observation.
    """

    settings = RuleSettings

    def __init__(self, settings: RuleSettings) -> None:
        self._tasks: dict[tuple[str, str], Task] = {}
        for number, item in enumerate(read_yaml(settings.config).get("robots", ())):
            robot = build(RobotConfig, item, f"{settings.config}: robots.{number}")
            for each in build_robot_setup(robot, cameras=False).task.parts:
                if each.reads_observation and not each.is_judged:
                    self._tasks[robot.name, each.name] = each
        if not self._tasks:
            how = "set --options.config to the config.yaml of a run with such a task"
            raise ConfigError(f"{settings.config} names no task that observations decide; {how}")

    def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
        task = copy(self._tasks.get((episode.header.robot, episode.header.task)))  # a task may count control periods
        if task is None:
            return EpisodeReward(None)
        columns = {name: column for name, column in episode.columns.items() if name.startswith(OBSERVATION)}
        if not columns or not columns.keys() <= episode.final.keys():
            raise DataSetError(f"episode {episode.header.episode} has no observation after its last step")
        times = episode.columns.get("t_capture_ns", np.zeros(episode.steps, np.int64))
        rewards, success = np.zeros(episode.steps, np.float32), None
        for step in range(episode.steps):
            last = step + 1 == episode.steps
            arrays = {name: episode.final[name] if last else column[step + 1] for name, column in columns.items()}
            outcome = task.evaluate(Observation(arrays, int(times[-1 if last else step + 1])))
            rewards[step] = outcome.reward
            success = outcome.success if outcome.success is not None else success
            if outcome.terminated or outcome.truncated:
                break  # it would have ended here, so that later steps have no reward
        return EpisodeReward(bool(success), rewards)
