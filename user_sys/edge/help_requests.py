"""When a robot requests a person's help: it holds and shows a flag on the console until a person acts.

The inconsistency of successive action chunks is a sign that a generative policy is outside its training data (Agia et
al., 2024, "Unpacking failure modes of generative policies: runtime monitoring of consistency and progress").

Help comes in grades (Zhai et al., "A Vision-Language-Action-Critic Model for Robotic Real-World Reinforcement
Learning", 2025, arXiv 2509.15937): training replays demonstrations; the robot returns to an earlier state and explores
from there; a person guides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hal.camera import CameraFrame
from hal.errors import install_hint
from hal.settings import Count, Limit
from hal.spec import RobotSpec
from hal.task import TaskOutcome
from user_sys.edge.environment import TaskInfo
from user_sys.errors import ConfigError

if TYPE_CHECKING:
    from user_sys.rewards.progress import ProgressWatch

MIN_GAIN = 0.05  # of the way to the goal: less is no progress


@dataclass(frozen=True)
class HelpConfig:
    """When a robot requests help. A task may request it too (`hal.task.TaskOutcome.help`).

    Attributes:
        after_steps: the policy has acted for so many steps of an episode without success; 0 is never.
        disagreement: an action chunk differs from the one before by this share of the action's range, as the mean over
            the control periods that both cover; 0 is never.
        progress: file of a progress model on the robot's computer (`user-sys reward train --kind progress`).
        progress_steps: with `progress`, so many steps of the policy have brought the goal no nearer.
        wait_s: how long a robot waits for a person; 0 waits without a limit.
        returns: so often in an episode the robot first goes back along its path by itself, and the policy tries again.
        return_steps: control periods for which it goes back.
    """

    after_steps: Annotated[int, Meta(ge=0)] = 0
    disagreement: Annotated[float, Meta(ge=0)] = 0.0
    progress: str = ""
    progress_steps: Count = 40
    wait_s: Annotated[float, Meta(ge=0)] = 60.0
    returns: Limit = 0
    return_steps: Count = 20

    def __post_init__(self) -> None:
        if self.disagreement > 1:
            raise ConfigError(f"intervention.help.disagreement is {self.disagreement:g}, a share of the range: 0 to 1")


@dataclass(frozen=True)
class InterventionConfig:
    """What a person's help does to an episode, and when a robot requests it.

    Attributes:
        ends_episode: at the hand-back; else the policy goes on.
        reset_instructions: how a person prepares the scene, such as ``put the cube on the mark``. Each episode then
            waits until a person says at the console that it is done; empty if no person is needed.
    """

    ends_episode: bool = False
    reset_instructions: str = ""
    help: HelpConfig = field(default_factory=HelpConfig)


class InterventionRules:
    """Applies an `InterventionConfig` to the episodes of one robot. One thread calls it.

    A robot requests help once for each reason in an episode, so that it can go on if no person comes.

    Attributes:
        ends_episode, reset_instructions, wait_s: as configured.
    """

    def __init__(self, config: InterventionConfig, spec: RobotSpec) -> None:
        """Raises ConfigError: the progress model cannot be read, or needs a camera that the robot lacks."""
        self.ends_episode, self.wait_s = config.ends_episode, config.help.wait_s
        self.reset_instructions = config.reset_instructions
        self._config = config.help
        self._progress = _progress_watch(config.help, spec) if config.help.progress else None
        self._requested: set[str] = set()
        self._returns_left = self._steps_back = 0

    def begin_episode(self, task: TaskInfo) -> None:
        self._requested.clear()
        if self._progress is not None:
            self._progress.begin_episode(task.name, task.sentence)
        self._returns_left, self._steps_back = self._config.returns, 0

    def begin_return(self) -> bool:
        """Whether the robot goes back by itself now, instead of a request that is due."""
        if not self._returns_left:
            return False
        self._returns_left, self._steps_back = self._returns_left - 1, self._config.return_steps
        self._requested.clear()
        return True

    def take_step_back(self) -> bool:
        """Whether the robot goes back in this control period."""
        is_returning = self._steps_back > 0
        self._steps_back -= is_returning
        return is_returning

    def end_return(self) -> None:
        """The path ends, or a person acts."""
        self._steps_back = 0

    def help_reason(
        self, steps: int, outcome: TaskOutcome, disagreement: float, frames: Mapping[str, CameraFrame]
    ) -> str:
        """Why the robot requests help now; empty if it does not.

        Args:
            steps: of the policy in this episode, since a person's last help.
            outcome: of the newest step.
            disagreement: see `HelpConfig`.
            frames: the newest of each camera.
        """
        config = self._config
        reasons = {"task": outcome.help}
        if config.after_steps and steps >= config.after_steps:
            reasons["steps"] = f"no success after {steps} steps"
        if config.disagreement and disagreement > config.disagreement:
            reasons["disagreement"] = f"successive action chunks differ by {disagreement:.0%} of the range"
        if self._progress is not None:
            gain = self._progress.gain(steps, {camera: frame.image for camera, frame in frames.items()})
            if gain is not None and gain < MIN_GAIN:
                reasons["progress"] = f"no progress over {config.progress_steps} steps"
        for kind, reason in reasons.items():
            if reason and kind not in self._requested:
                self._requested.add(kind)
                return reason
        return ""


def require_progress_model(config: HelpConfig, specs: Iterable[RobotSpec]) -> None:
    """Checks the file of the progress model, if there is one, for robots with these specs. Imports no torch.

    Raises ConfigError: it is no file or no progress model, a robot lacks a camera that it reads, or torch is missing.
    """
    from user_sys.rewards.reward import read_metadata

    if not config.progress:
        return
    if not Path(config.progress).is_file():
        how = f"user-sys reward train RUN --kind progress --output {config.progress}"
        raise ConfigError(f"intervention.help.progress: {config.progress} is no file; train one: {how}")
    if find_spec("torch") is None:
        raise ConfigError(f"intervention.help.progress needs torch: {install_hint('learner')}")
    try:
        cameras = read_metadata(Path(config.progress), "progress").cameras
    except ConfigError as error:
        raise ConfigError(f"intervention.help.progress: {error}") from None
    for spec in specs:
        _require_cameras(config, cameras, spec)


def _require_cameras(config: HelpConfig, wanted: Iterable[str], spec: RobotSpec) -> None:
    cameras = [each.name for each in spec.cameras]
    if missing := set(wanted) - set(cameras):
        raise ConfigError(
            f"intervention.help.progress: {config.progress} reads the cameras {sorted(missing)}; {spec.model} has "
            f"{cameras}; name its cameras so, or train a model on its pictures"
        )


def _progress_watch(config: HelpConfig, spec: RobotSpec) -> ProgressWatch:
    try:
        from user_sys.rewards.progress import ProgressWatch
    except ImportError as error:
        raise ConfigError(f"intervention.help.progress needs torch ({error}): {install_hint('learner')}") from None
    watch = ProgressWatch(Path(config.progress), config.progress_steps)
    _require_cameras(config, watch.cameras, spec)
    return watch
