"""The verbs that run and evaluate training: `train`, `cloud`, `record`, `evaluate`, `compare`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import track

from hal.signals import bounded_shutdown
from user_sys.commands.options import (
    COUNT,
    PATH,
    ConfiguredVerb,
    Number,
    combined,
    config_argument,
    json_option,
    keys_option,
)
from user_sys.commands.output import print_json, print_line
from user_sys.compose import RobotConfig, robot_spec
from user_sys.config import load
from user_sys.edge.demonstrations import check_demonstrable
from user_sys.edge.local_environment import defer_signals
from user_sys.edge.loop import derived_seed
from user_sys.errors import EXIT_DEADLINE_S, RunError, exit_now
from user_sys.robot_records import ROBOTS_FOLDER, learner_from_embodiment, read_robot_records, save_robot_record
from user_sys.run.allocation import require_in_use
from user_sys.run.compare import comparison_table, draw_comparison, read_variants
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder, open_run_folder
from user_sys.run.evaluate import run_evaluation, success_by_task
from user_sys.run.launcher import launch_run
from user_sys.run.prepare import LaunchRequest, record_demonstrations
from user_sys.run.report import success_text, wilson_interval

WIDTH = 120  # of the table if the output is no terminal


_run_options = combined(
    click.argument("config", type=PATH, metavar="[CONFIG]", required=False),
    click.option("--resume", type=PATH, metavar="RUN", help="continue the run in this folder"),
    click.option("--profile", is_flag=True, help="write trace.json: what each process does when"),
    click.option(
        "--restart-if-unreadable", is_flag=True, help="with --resume: train again what has no readable checkpoint"
    ),
    click.option("--any-result", is_flag=True, help="exit status 0 also if the target was not reached"),
)


@click.command(cls=ConfiguredVerb)
@_run_options
@click.option("--keys", type=PATH, metavar="FOLDER", help="folder of keys (default: the run makes its own)")
def train(**options: Any) -> int:
    """Start a run of CONFIG and show its progress. Ctrl-C stops it cleanly and prints how to resume.

    The exit status is 0 if the run reached its target, 1 if it did not, 2 for an error, 130 for Ctrl-C.

    Any setting can be overridden: --name=lift-1, --learner.batch_size=128, --robots.0.name=left.
    """
    return _launch("train", options)


@click.command(cls=ConfiguredVerb)
@_run_options
@keys_option
def cloud(**options: Any) -> int:
    """Start gateway, learner and console, and train with the robots that connect (`user-sys edge`).

    Any setting can be overridden: --gateway.endpoint=tcp://0.0.0.0:5555. docs/deployment.md has the steps.
    """
    return _launch("cloud", options)


def _launch(verb: Literal["train", "cloud"], options: dict[str, Any]) -> int:
    request = LaunchRequest(verb=verb, **options)
    if request.config is None and request.resume is None:
        raise click.UsageError("CONFIG is missing: give one, such as configs/demo.yaml, or --resume RUN")
    if request.restart_if_unreadable and request.resume is None:
        raise click.UsageError("--restart-if-unreadable needs --resume RUN")
    if request.resume is not None and request.config is not None:
        raise click.UsageError(
            f"--resume takes the settings of RUN: leave out {request.config}, and set --section.key=value"
        )
    if request.resume is not None and request.keys is not None and _is_given("keys"):
        own = RunFolder(request.resume).keys.resolve()
        if request.keys.resolve() != own:
            raise click.UsageError(f"--resume takes the keys of RUN, which are in {own}: leave out --keys")
    try:
        return launch_run(request)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(request.resume_hint()) from None


def _is_given(name: str) -> bool:
    """Whether the command line has this parameter of the running verb."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


@click.command(cls=ConfiguredVerb)
@config_argument
@click.option("--output", type=PATH, default="runs/demonstrations", metavar="PATH", help="store to add to")
@click.option("--episodes", type=COUNT, default=20, metavar="N", help="demonstrations per robot (default: 20)")
def record(config: Path, output: Path, episodes: int, overrides: list[str]) -> int:
    """Record demonstrations by the task's scripted expert, for each robot of CONFIG, into a store.

    Any setting can be overridden: --section.key=value.
    """
    settings = load(RunConfig, config, overrides)
    require_in_use(settings.robots, settings.runs / "latest")
    demonstrations = replace(settings.demonstrations, episodes=episodes)
    seed = derived_seed("record", settings.seed)  # other starts than in a run, into which they are merged
    for robot in settings.robots:
        check_demonstrable(robot, demonstrations)
    abort = partial(exit_now, "ended at once; the demonstrations that were printed are kept")
    with bounded_shutdown(EXIT_DEADLINE_S, abort), defer_signals() as check_stop:
        for robot in settings.robots:
            save_robot_record(output / ROBOTS_FOLDER, robot.name, robot_spec(robot))
            recorded = record_demonstrations(
                robot, output, demonstrations, settings.recorder, seed=seed, check_stop=check_stop
            )
            steps = [s.steps for s in track(recorded, f"recording {robot.name}", total=episodes)]
            print_line(f"{robot.name}: {len(steps)} new demonstrations, {sum(steps)} steps, in {output}")
    return 0


@click.command()
@click.argument("run", type=PATH, metavar="RUN")
@click.option("--episodes", type=COUNT, default=100, metavar="N", help="episodes to run (default: 100)")
@click.option("--robot", metavar="NAME", help="on this robot, with its embodiment's policy (default: the first)")
@click.option("--other-pictures", is_flag=True, help="show the pictures of the episode before: a control")
@json_option
def evaluate(run: Path, episodes: int, robot: str | None, other_pictures: bool, as_json: bool) -> int:
    """Run the newest policy of RUN without a person's help and report its success with a 95% interval.

    If people judge the robot's task, it asks for the success of each episode.
    """
    folder, config, _ = open_run_folder(run)
    if not config.robots:
        raise RunError(
            f"{folder.path} has no robot to evaluate on: name a simulated one under robots: in {folder.config}"
        )
    config = replace(config, evaluation=EvaluationConfig(video_episodes=0))
    learner, selected = _select_robot(config, folder, robot)
    with bounded_shutdown(EXIT_DEADLINE_S, partial(exit_now, "ended at once")):
        done, _, manifest = run_evaluation(
            config, folder, episodes, Console(stderr=True), learner, selected, other_pictures=other_pictures
        )
    successes = sum(bool(each.success) for each in done)
    steps = sum(each.steps for each in done)
    per_hour = 3600.0 * successes * robot_spec(selected).rate_hz / steps
    if as_json:
        result = {
            "robot": selected.name,
            "success": successes / len(done),
            "episodes": len(done),
            "ci95": [round(bound, 4) for bound in wilson_interval(successes, len(done))],
            "successes_per_hour": round(per_hour, 1),
            "mean_steps": round(steps / len(done), 1),
            "policy_version": manifest.version,
            "updates": manifest.updates,
            "tasks": success_by_task(done),
        }
        print_json(result)
    else:
        print_line(
            f"{folder.path.name}: policy version {manifest.version} ({manifest.updates} updates) succeeds alone in "
            f"{successes} of {len(done)} episodes = {success_text(successes, len(done))}, "
            f"{steps / len(done):.1f} steps an episode, {per_hour:,.0f} successes an hour"
        )
        for task, counts in success_by_task(done).items():
            print_line(f"{task}: {success_text(*counts)} of {counts[1]} episodes")
    return 0


def _select_robot(config: RunConfig, folder: RunFolder, name: str | None) -> tuple[str, RobotConfig]:
    """The learner and the config of the robot of that name (default: the first). Raises RunError: there is none."""
    robot = next((robot for robot in config.robots if name in (None, robot.name)), None)
    if robot is None:
        known = ", ".join(robot.name for robot in config.robots)
        raise RunError(f"{folder.path} has no robot {name!r}; it has {known}")
    learners = learner_from_embodiment(read_robot_records(folder.robots))
    if (learner := learners.get(robot_spec(robot).embodiment)) is None:
        raise RunError(f"{folder.path} has no learner for the embodiment of {robot.name}; evaluate on another robot")
    return learner, robot


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN...")
@click.option("--reach", type=Number(0.01, 1.0), default=0.9, metavar="SHARE", help="success rate (default: 0.9)")
@click.option("--output", type=PATH, default="compare.png", metavar="FILE", help="of the plot (default: compare.png)")
@json_option
def compare(runs: tuple[Path, ...], reach: float, output: Path, as_json: bool) -> None:
    """Compare RUNs, also while they train: their evaluations, what they took to reach a success rate, and a plot.

    Runs that differ in seed and names only are one row. A success rate is that of 50 autonomous training episodes.
    """
    variants = read_variants(runs)
    draw_comparison(output, variants)
    if as_json:
        print_json({"plot": str(output), "variants": [variant.as_json(reach) for variant in variants]})
        return
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(comparison_table(variants, reach))
    for run in (run for variant in variants for run in variant.runs if run.missing):
        print_line(
            f"{run.folder}: {run.missing:,} of its {run.missing + len(run.episodes):,} episodes are not in its store "
            "(retention, deleted, or still on robots): its curve and what it took are without them"
        )
    print_line(f"the plot is {output}")
