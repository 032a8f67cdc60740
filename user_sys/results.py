"""The end of a run: the newest policy is evaluated, and what people keep of a run is written."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from hal.signals import ends_in_time
from hal.spec import Array
from user_sys.compose import RobotConfig, robot_spec
from user_sys.edge.local import ending_between_periods
from user_sys.edge.loop import EpisodeSummary
from user_sys.endings import END_WITHIN_S, ExitStatus, end_at_once
from user_sys.errors import RunError
from user_sys.evaluate import EvaluationConfig, evaluate
from user_sys.learners import LEARNER, folder_of, learners_of
from user_sys.report import VIDEO, EpisodePoint, Summary, wilson, write_report, write_video
from user_sys.robot_cards import read_cards
from user_sys.run_folder import reopen
from user_sys.topology import RunConfig, RunFolder
from user_sys.weights.forms import restore
from user_sys.weights.records import Manifest
from user_sys.weights.shelf import Shelf, newest

log = logging.getLogger(__name__)


def newest_weights(folder: RunFolder, learner: str = LEARNER) -> tuple[Manifest, dict[str, Array]]:
    """The newest version that the gateway has kept. Raises RunError where the learner has published none."""
    kept = newest(Shelf(folder_of(folder.weights, learner)).open())
    if kept is None:
        raise RunError(f"{folder.path} has no trained policy yet: {learner} has published no weights")
    manifest, state = kept
    return manifest, restore(state.tensors, state.form)


def evaluable(config: RunConfig, folder: RunFolder) -> dict[str, RobotConfig]:
    """For each learner of the run, by name, the first of the run's own simulated robots that it learns for.

    A real one is let go by a person who stands by, with `user-sys evaluate`, and not at the end of a night.
    """
    names = {plan.spec.embodiment: plan.name for plan in learners_of(read_cards(folder.robots))}
    found: dict[str, RobotConfig] = {}
    for robot in config.robots:
        if not robot.simulated:
            continue
        if (learner := names.get(robot_spec(robot).embodiment)) is not None:
            found.setdefault(learner, robot)
    return found


def run_evaluation(
    config: RunConfig,
    folder: RunFolder,
    episodes: int,
    console: Console,
    learner: str = LEARNER,
    robot: RobotConfig | None = None,
) -> tuple[list[EpisodeSummary], list[Array], Manifest]:
    """Evaluates the newest policy of `learner` on `robot` (the first); also returns pictures of the first episodes."""
    manifest, weights = newest_weights(folder, learner)
    pictures: list[Array] = []
    settings = replace(config.evaluation, episodes=episodes)
    with ending_between_periods() as attend:
        ran = evaluate(
            robot or config.robots[0],
            config.policy,
            weights,
            settings,
            pictures.append,
            version=manifest.version,
            seed=config.seed,
            attend=attend,
        )
        label = f"evaluating version {manifest.version}"
        return list(track(ran, label, total=episodes, console=console, transient=True)), pictures, manifest


def conclude(
    config: RunConfig, folder: RunFolder, points: Sequence[EpisodePoint], counts: Summary, console: Console
) -> Summary:
    """Evaluates the run's policies on its simulated robots, and writes summary, plot and video.

    A run without such a robot has nothing to evaluate on, and one may want no evaluation: its summary holds the counts
    alone.

    Args:
        points: the training episodes, for the plot.
        counts: the run's counts; the evaluation of its first learner is filled in here.

    Raises:
        RunError: there is no policy to evaluate, or a file cannot be written.
    """
    summary, pictures = counts, list[Array]()
    for learner, robot in evaluable(config, folder).items() if config.evaluation.episodes > 0 else ():
        if learner != LEARNER:
            _conclude_other(config, folder, learner, robot, console)
            continue
        episodes, pictures, _ = run_evaluation(config, folder, config.evaluation.episodes, console, learner, robot)
        summary = replace(counts, successes=sum(bool(e.success) for e in episodes), episodes=len(episodes))
    if config.evaluation.episodes > 0 and (real := [robot.name for robot in config.robots if not robot.simulated]):
        console.print(
            f"not evaluated, since nobody may stand by now: {', '.join(real)}; "
            f"later, with an e-stop within reach: user-sys evaluate {folder.path} --robot NAME",
            highlight=False,
        )
    if pictures:
        write_video(folder.path / VIDEO, pictures, fps=10)
    write_report(folder.path, summary, points, console)
    return summary


def status_of(config: RunConfig, summary: Summary, any_result: bool, console: Console) -> ExitStatus:
    """Says which target was missed; with `any_result` that changes no exit status."""
    target, required, missed = config.target, config.evaluation.required, False
    if summary.target_reached is False:
        missed = True
        console.print(
            f"target not reached: training ended before {target.success:.0%} of {target.episodes} episodes succeeded"
        )
    if required and not summary.success >= required:  # NaN where nothing was evaluated
        missed = True
        found = f"{summary.success:.0%} of the evaluation succeeded" if summary.episodes else "nothing was evaluated"
        console.print(f"target not reached: {found}, and the configuration requires {required:.0%}")
    return ExitStatus.NOT_REACHED if missed and not any_result else ExitStatus.REACHED


def _conclude_other(config: RunConfig, folder: RunFolder, learner: str, robot: RobotConfig, console: Console) -> None:
    """One line, for an embodiment beside the run's first."""
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


def evaluate_main(args: Namespace) -> int:
    """``user-sys evaluate RUN``: autonomous success with its confidence interval."""
    folder, config, _ = reopen(Path(args.run))
    if not config.robots:
        raise RunError(
            f"{folder.path} has no robot to evaluate on: name a simulated one under robots: in {folder.config}"
        )
    console = Console(stderr=True)
    config = replace(config, evaluation=EvaluationConfig(video_episodes=0))
    learner, robot = _chosen(config, folder, args.robot)
    with ends_in_time(END_WITHIN_S, partial(end_at_once, "ended at once")):
        episodes, _, manifest = run_evaluation(config, folder, args.episodes, console, learner, robot)
    successes = sum(bool(e.success) for e in episodes)
    low, high = wilson(successes, len(episodes))
    steps = sum(e.steps for e in episodes) / len(episodes)
    result = {
        "robot": robot.name,
        "success": successes / len(episodes),
        "episodes": len(episodes),
        "ci95": [round(low, 4), round(high, 4)],
        "mean_steps": round(steps, 1),
        "policy_version": manifest.version,
        "updates": manifest.updates,
    }
    if args.json:
        Console().print_json(json.dumps(result))
    else:
        Console().print(
            f"{folder.path.name}: policy version {manifest.version} ({manifest.updates} updates) succeeds alone in "
            f"{successes} of {len(episodes)} episodes = {successes / len(episodes):.1%} "
            f"(95% interval {low:.1%} to {high:.1%}), {steps:.1f} steps an episode"
        )
    return 0


def _chosen(config: RunConfig, folder: RunFolder, name: str | None) -> tuple[str, RobotConfig]:
    """The robot of that name, or the first, and the learner for its embodiment. Raises RunError: there is none."""
    robot = next((robot for robot in config.robots if name in (None, robot.name)), None)
    if robot is None:
        raise RunError(f"{folder.path} has no robot {name!r}; there are {[robot.name for robot in config.robots]}")
    embodiment = robot_spec(robot).embodiment
    for plan in learners_of(read_cards(folder.robots)):
        if plan.spec.embodiment == embodiment:
            return plan.name, robot
    raise RunError(f"nothing was learned for {robot.name}: its embodiment has no learner in {folder.path}")
