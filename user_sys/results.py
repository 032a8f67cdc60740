"""The end of a run: the newest policy is evaluated, and what people keep of a run is written."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

from hal.spec import Array
from user_sys.edge.loop import EpisodeSummary
from user_sys.errors import RunError
from user_sys.evaluate import EvaluationConfig, evaluate
from user_sys.report import VIDEO, EpisodePoint, Summary, wilson, write_report, write_video
from user_sys.run_folder import reopen
from user_sys.topology import RunConfig, RunFolder
from user_sys.weights.forms import restore
from user_sys.weights.records import Manifest
from user_sys.weights.shelf import Shelf, newest

log = logging.getLogger(__name__)


def newest_weights(folder: RunFolder) -> tuple[Manifest, dict[str, Array]]:
    """The newest version that the gateway has kept. Raises RunError where the learner has published none."""
    kept = newest(Shelf(folder.weights).open())
    if kept is None:
        raise RunError(f"{folder.path} has no trained policy yet: the learner has published no weights")
    manifest, state = kept
    return manifest, restore(state.tensors, state.form)


def run_evaluation(
    config: RunConfig, folder: RunFolder, episodes: int, console: Console
) -> tuple[list[EpisodeSummary], list[Array], Manifest]:
    """Evaluates the newest policy on the first robot; also returns the pictures of the first episodes."""
    manifest, weights = newest_weights(folder)
    pictures: list[Array] = []
    settings = replace(config.evaluation, episodes=episodes)
    ran = evaluate(
        config.robots[0], config.policy, weights, settings, pictures.append, version=manifest.version, seed=config.seed
    )
    label = f"evaluating version {manifest.version}"
    return list(track(ran, label, total=episodes, console=console, transient=True)), pictures, manifest


def conclude(
    config: RunConfig, folder: RunFolder, points: Sequence[EpisodePoint], counts: Summary, console: Console
) -> Summary:
    """Evaluates the run's policy, and writes summary, plot and video.

    A run without a robot of its own has nothing to evaluate on: its summary holds the counts alone.

    Args:
        points: the training episodes, for the plot.
        counts: the run's counts; its evaluation is filled in here.

    Raises:
        RunError: there is no policy to evaluate, or a file cannot be written.
    """
    if not config.robots:
        write_report(folder.path, counts, points, console)
        return counts
    episodes, pictures, _ = run_evaluation(config, folder, config.evaluation.episodes, console)
    summary = replace(counts, successes=sum(bool(e.success) for e in episodes), episodes=len(episodes))
    if pictures:
        write_video(folder.path / VIDEO, pictures, fps=10)
    write_report(folder.path, summary, points, console)
    return summary


def evaluate_main(args: Namespace) -> int:
    """``user-sys evaluate RUN``: autonomous success with its confidence interval."""
    folder, config, _ = reopen(Path(args.run))
    if not config.robots:
        raise RunError(
            f"{folder.path} has no robot to evaluate on: name a simulated one under robots: in {folder.config}"
        )
    console = Console(stderr=True)
    config = replace(config, evaluation=EvaluationConfig(video_episodes=0))
    episodes, _, manifest = run_evaluation(config, folder, args.episodes, console)
    successes = sum(bool(e.success) for e in episodes)
    low, high = wilson(successes, len(episodes))
    steps = sum(e.steps for e in episodes) / len(episodes)
    result = {
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
