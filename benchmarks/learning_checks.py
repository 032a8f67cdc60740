"""What `benchmarks.learning` measures besides training: pictures of other episodes, scripted people, the plain loop."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import Row, at_most, user_sys
from benchmarks.plain_loop import PlainLoop
from user_sys.compose import build_robot_setup
from user_sys.config import load
from user_sys.edge.agents import ScriptedAgent
from user_sys.edge.local_environment import open_local_environment
from user_sys.edge.loop import run_episode
from user_sys.edge.recorder import Recorder
from user_sys.episode import EpisodeSource
from user_sys.run.config import RunConfig, open_run_folder
from user_sys.run.metrics import METRICS, read_metrics
from user_sys.store.labels import SuccessLabel
from user_sys.store.store import StoreWriter

WANTED = 0.95
CONTROL_MAX, COST_MAX = 0.20, 1.5
EVALUATION_S = 1800.0
HAND_DRIVEN_SEED = 7_000_000


def success_with_other_pictures(run: Path, episodes: int) -> float:
    """The share of `episodes` in which the run's newest policy succeeds with the pictures of other episodes."""
    command = user_sys("evaluate", run, "--other-pictures", f"--episodes={episodes}", "--json")
    return float(json.loads(subprocess.check_output(command, text=True, timeout=EVALUATION_S))["success"])


def step_ms(run: Path) -> float:
    """The median time of an update in the second half of a run, ms."""
    times = [line["step_ms"] for line in read_metrics(run / METRICS / "learner.jsonl") if line.get("step_ms")]
    return float(statistics.median([value for value in times[len(times) // 2 :] if value is not None]))


def pixel_rows(trained: Sequence[Path], state: Sequence[Path], episodes: int) -> Iterator[Row]:
    """The control, and what an update with a frozen encoder costs next to one on states."""
    shares = [success_with_other_pictures(run, episodes) for run in trained]
    name = f"rlpd: success with another episode's pictures, worst of {len(shares)} seeds"
    yield at_most(12, name, "share", max(shares), CONTROL_MAX)
    ours, bound = (statistics.median(step_ms(run) for run in runs) for runs in (trained, state))
    ratio = bound / ours
    yield Row(12, "update with a frozen encoder; bound: from states", "ms", ours, bound, ratio, 1 / COST_MAX,
              ratio >= 1 / COST_MAX)  # fmt: skip


def plain_s(config: Path, seed: int, steps_per_update: float, limit_s: float) -> float | str:
    """Seconds until the plain loop was done by the run's rule; how far it came, in words, if it was not."""
    with PlainLoop(load(RunConfig, config), seed, steps_per_update) as loop:
        plain = loop.run(limit_s)
    enough = plain.done and plain.successes >= WANTED * plain.episodes
    return plain.seconds if enough else plain.words


def add_hand_driven(run: Path) -> None:
    """Adds three episodes driven by a scripted person to a run's store; one of them fails and is labelled a success."""
    folder, config, _ = open_run_folder(run)
    robot, chunks = config.robots[0], list[bytes]()
    setup = build_robot_setup(robot)
    recorder = Recorder(setup.robot.spec, robot.name, chunks.append, config.recorder)
    with StoreWriter.open(folder.store) as writer, open_local_environment(setup, robot) as environment:
        for number, noise in enumerate((0.1, 0.1, 3.0)):
            start = HAND_DRIVEN_SEED + number
            agent = ScriptedAgent(setup.task.make_expert(setup.robot, start, noise))
            result = run_episode(environment, agent, recorder, source=EpisodeSource.ONLINE, seed=start)
            for chunk in chunks:
                writer.append(chunk)
            chunks.clear()
            if not result.success:
                label = SuccessLabel(
                    episode=result.episode, labeller="benchmark", at_unix_ns=time.time_ns(), success=True
                )
                writer.append_label(label)
        writer.sync()
