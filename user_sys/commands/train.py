"""The verbs that run and evaluate training: `train`, `cloud`, `record`, `evaluate`."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from hal.signals import bounded_shutdown
from user_sys.compose import RobotConfig, robot_spec
from user_sys.config import load
from user_sys.edge.demonstrations import SEEDS_PER_ROBOT, check_demonstrable
from user_sys.edge.local_environment import defer_signals
from user_sys.errors import RunError
from user_sys.process_exit import EXIT_DEADLINE_S, exit_now
from user_sys.robot_records import ROBOTS_FOLDER, assign_learners, read_robot_records, save_robot_record
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder, open_run_folder
from user_sys.run.demonstrations import record_demonstrations
from user_sys.run.evaluate import run_evaluation
from user_sys.run.launcher import launch_run
from user_sys.run.report import wilson_interval


def train_main(args: Namespace) -> int:
    """``user-sys train``: starts a run, or continues one. Returns an `ExitStatus`."""
    return launch_run(args, "train")


def cloud_main(args: Namespace) -> int:
    """``user-sys cloud``: as `train_main`, for robots that connect from their own computers."""
    return launch_run(args, "cloud")


def record_main(args: Namespace) -> int:
    """``user-sys record CONFIG``: records demonstrations of each robot of a run's configuration."""
    config = load(RunConfig, args.config, args.overrides)
    output = Path(args.output)
    demonstrations = replace(config.demonstrations, episodes=args.episodes)
    for robot in config.robots:
        check_demonstrable(robot, demonstrations)
    abort = partial(exit_now, "ended at once; the demonstrations that were printed are kept")
    with bounded_shutdown(EXIT_DEADLINE_S, abort), defer_signals() as check_stop:
        for number, robot in enumerate(config.robots):
            seed = config.seed + number * SEEDS_PER_ROBOT
            save_robot_record(output / ROBOTS_FOLDER, robot.name, robot_spec(robot))
            recorded = record_demonstrations(
                robot, output, demonstrations, config.recorder, seed=seed, check_stop=check_stop
            )
            steps = [s.steps for s in track(recorded, f"recording {robot.name}", total=args.episodes)]
            Console().print(f"{robot.name}: {len(steps)} new demonstrations, {sum(steps)} steps, in {output}")
    return 0


def evaluate_main(args: Namespace) -> int:
    """``user-sys evaluate RUN``: prints autonomous success with its confidence interval."""
    folder, config, _ = open_run_folder(Path(args.run))
    if not config.robots:
        raise RunError(
            f"{folder.path} has no robot to evaluate on: name a simulated one under robots: in {folder.config}"
        )
    console = Console(stderr=True)
    config = replace(config, evaluation=EvaluationConfig(video_episodes=0))
    learner, robot = _select_robot(config, folder, args.robot)
    with bounded_shutdown(EXIT_DEADLINE_S, partial(exit_now, "ended at once")):
        episodes, _, manifest = run_evaluation(config, folder, args.episodes, console, learner, robot)
    successes = sum(bool(e.success) for e in episodes)
    low, high = wilson_interval(successes, len(episodes))
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


def _select_robot(config: RunConfig, folder: RunFolder, name: str | None) -> tuple[str, RobotConfig]:
    """The learner and the config of the robot of that name (default: the first). Raises RunError: there is none."""
    robot = next((robot for robot in config.robots if name in (None, robot.name)), None)
    if robot is None:
        raise RunError(f"{folder.path} has no robot {name!r}; it has {[robot.name for robot in config.robots]}")
    embodiment = robot_spec(robot).embodiment
    for learner in assign_learners(read_robot_records(folder.robots)):
        if learner.spec.embodiment == embodiment:
            return learner.name, robot
    raise RunError(f"{folder.path} has no learner for the embodiment of {robot.name}; evaluate on another robot")
