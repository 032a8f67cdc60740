"""Evaluates trained policies: autonomous episodes without exploration, on starts that training has not used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.progress import track

from hal.spec import Array
from user_sys.compose import PolicyConfig, RobotConfig, build_robot_setup, make_policy, robot_spec
from user_sys.edge.agents import PolicyAgent
from user_sys.edge.environment import RobotEnvironment, TimeStep
from user_sys.edge.local_environment import (
    StopCheck,
    defer_signals,
    never_stop,
    open_local_environment,
    raise_if_stopped,
)
from user_sys.edge.loop import EpisodeResult, StepListener, run_episode
from user_sys.edge.recorder import SelectedAction
from user_sys.episode import EpisodeSource
from user_sys.errors import RunError
from user_sys.messages import WeightsManifest
from user_sys.process_exit import ExitStatus
from user_sys.robot_records import LEARNER, assign_learners, learner_folder, read_robot_records
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder
from user_sys.run.report import VIDEO, EpisodePoint, RunSummary, write_report, write_video
from user_sys.weights.precision import dequantize
from user_sys.weights.version_store import VersionStore, newest_version

log = logging.getLogger(__name__)

EVALUATION_SEED = 9_000_000


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
    """Runs `config.episodes` episodes on `robot` and yields each result.

    The robot is driven in this process, by the same environment, safety kernel and loop as in training.

    Args:
        on_frame: gets pictures of the first `config.video_episodes` episodes: uint8 (h, n * w, 3), the cameras side by
            side.
        check_stop: as in `open_local_environment`; also called in each control period.

    Raises:
        WireError: the weights do not fit the policy.
        HalError: the robot cannot be driven.
    """
    for filmed, count in ((True, min(config.video_episodes, config.episodes)), (False, config.episodes)):
        first = 0 if filmed else min(config.video_episodes, config.episodes)
        if first >= count:
            continue
        setup = build_robot_setup(robot, cameras=filmed, high_resolution=filmed)
        trained = make_policy(policy, setup.robot.spec, seed)
        trained.load(weights)
        agent = PolicyAgent(
            lambda policy=trained: (policy, version),  # type: ignore[misc]
            setup.task.instruction,
            setup.task.max_steps,
            deterministic=True,
        )
        with open_local_environment(setup, robot, check_stop=check_stop) as environment:
            listeners: list[StepListener] = [raise_if_stopped, lambda time_step, selected: check_stop()]
            if filmed:
                listeners.append(video_listener(on_frame, len(setup.cameras)))
            yield from _episodes(environment, agent, range(first, count), seed, listeners)


def _episodes(
    environment: RobotEnvironment, agent: PolicyAgent, numbers: range, seed: int, listeners: list[StepListener]
) -> Iterator[EpisodeResult]:
    for number in numbers:
        start = EVALUATION_SEED + 10_000 * seed + number
        yield run_episode(environment, agent, None, source=EpisodeSource.EVALUATION, seed=start, listeners=listeners)


def video_listener(on_frame: Callable[[Array], None], cameras: int) -> StepListener:
    """Joins the newest pictures of so many cameras to frames; the first frame comes when each camera has delivered."""
    newest: dict[str, Array] = {}

    def on_step(time_step: TimeStep, selected: SelectedAction | None) -> None:
        newest.update({name: frame.image for name, frame in time_step.frames.items()})
        if time_step.frames and len(newest) == cameras:
            on_frame(np.concatenate([newest[name] for name in sorted(newest)], axis=1))

    return on_step


def load_newest_weights(folder: RunFolder, learner: str = LEARNER) -> tuple[WeightsManifest, dict[str, Array]]:
    """The newest version that the gateway has kept. Raises RunError: the learner has published none."""
    kept = newest_version(VersionStore(learner_folder(folder.weights, learner)).load())
    if kept is None:
        raise RunError(f"{folder.path} has no trained policy yet: {learner} has published no weights; train it first")
    manifest, state = kept
    return manifest, dequantize(state.tensors, state.form)


def robots_to_evaluate(config: RunConfig, folder: RunFolder) -> dict[str, RobotConfig]:
    """For each learner of the run, by name, the first simulated robot of its embodiment.

    Real robots are evaluated with `user-sys evaluate` only, by a person who stands by.
    """
    records = read_robot_records(folder.robots)
    learner_from_embodiment = {each.spec.embodiment: each.name for each in assign_learners(records)}
    found: dict[str, RobotConfig] = {}
    for robot in config.robots:
        if not robot.simulated:
            continue
        if (learner := learner_from_embodiment.get(robot_spec(robot).embodiment)) is not None:
            found.setdefault(learner, robot)
    return found


def run_evaluation(
    config: RunConfig,
    folder: RunFolder,
    episodes: int,
    console: Console,
    learner: str = LEARNER,
    robot: RobotConfig | None = None,
) -> tuple[list[EpisodeResult], list[Array], WeightsManifest]:
    """Evaluates the newest policy of `learner` on `robot` (default: the first) and shows progress.

    Returns:
        The results, pictures of the first episodes, and the version that acted.
    """
    manifest, weights = load_newest_weights(folder, learner)
    pictures: list[Array] = []
    with defer_signals() as check_stop:
        results = evaluate(
            robot or config.robots[0],
            config.policy,
            weights,
            replace(config.evaluation, episodes=episodes),
            pictures.append,
            version=manifest.version,
            seed=config.seed,
            check_stop=check_stop,
        )
        label = f"evaluating version {manifest.version}"
        return list(track(results, label, total=episodes, console=console, transient=True)), pictures, manifest


def evaluate_and_report(
    config: RunConfig, folder: RunFolder, points: Sequence[EpisodePoint], counts: RunSummary, console: Console
) -> RunSummary:
    """Evaluates the run's policies on its simulated robots, and writes summary, plot and video.

    Without simulated robots, or with `evaluation.episodes` 0, the summary holds the counts only.

    Args:
        points: the training episodes, for the plot.
        counts: the run's counts; the evaluation of its first learner is added.

    Raises:
        RunError: there is no policy to evaluate, or a file cannot be written.
    """
    summary, pictures = counts, list[Array]()
    for learner, robot in robots_to_evaluate(config, folder).items() if config.evaluation.episodes > 0 else ():
        if learner != LEARNER:
            _report_further_learner(config, folder, learner, robot, console)
            continue
        episodes, pictures, _ = run_evaluation(config, folder, config.evaluation.episodes, console, learner, robot)
        summary = replace(counts, successes=sum(bool(e.success) for e in episodes), episodes=len(episodes))
    if config.evaluation.episodes > 0 and (real := [robot.name for robot in config.robots if not robot.simulated]):
        console.print(
            f"not evaluated without a person who stands by: {', '.join(real)}; "
            f"with an e-stop within reach: user-sys evaluate {folder.path} --robot NAME",
            highlight=False,
        )
    if pictures:
        write_video(folder.path / VIDEO, pictures, fps=10)
    write_report(folder.path, summary, points, console)
    return summary


def _report_further_learner(
    config: RunConfig, folder: RunFolder, learner: str, robot: RobotConfig, console: Console
) -> None:
    """Prints one line for an embodiment other than the run's first."""
    episodes, _, manifest = run_evaluation(
        replace(config, evaluation=replace(config.evaluation, video_episodes=0)),
        folder,
        config.evaluation.episodes,
        console,
        learner,
        robot,
    )
    share = sum(bool(e.success) for e in episodes) / len(episodes)
    console.print(
        f"{learner} on {robot.name}: {share:.0%} of {len(episodes)} episodes with version {manifest.version}",
        highlight=False,
    )


def exit_status(config: RunConfig, summary: RunSummary, any_result: bool, console: Console) -> ExitStatus:
    """Prints the targets that were missed. `any_result`: the exit status is 0 all the same."""
    target, required, missed = config.target, config.evaluation.required, False
    if summary.target_reached is False:
        missed = True
        console.print(
            f"target not reached: training ended before {target.success:.0%} of {target.episodes} episodes succeeded"
        )
    if required and not summary.success >= required:  # NaN if nothing was evaluated
        missed = True
        found = f"{summary.success:.0%} of the evaluation succeeded" if summary.episodes else "nothing was evaluated"
        console.print(f"target not reached: {found}, and the configuration requires {required:.0%}")
    return ExitStatus.NOT_REACHED if missed and not any_result else ExitStatus.REACHED
