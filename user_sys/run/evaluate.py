"""Evaluates trained policies: autonomous episodes without exploration, on starts that training has not used."""

from __future__ import annotations

import logging
import select
import sys
import termios
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console
from rich.progress import track

from hal.camera import Camera
from hal.errors import HalError
from hal.spec import IMAGES, Array, RobotSpec
from user_sys.compose import (
    PolicyConfig,
    RobotConfig,
    build_robot_setup,
    describe_robot,
    make_policy,
    robot_spec,
    select_cameras,
)
from user_sys.edge.agents import HoldingAgent, Judge, JudgedAgent, LoadedPolicy, PolicyAgent
from user_sys.edge.chunk_executor import ActingPolicy
from user_sys.edge.environment import TimeStep
from user_sys.edge.local_environment import (
    StopCheck,
    defer_signals,
    never_stop,
    open_local_environment,
    raise_if_stopped,
)
from user_sys.edge.loop import StepListener, run_episode
from user_sys.edge.recorder import SelectedAction
from user_sys.episode import EpisodeSource
from user_sys.errors import ConfigError, ExitStatus, PolicyUnavailable, RunError
from user_sys.messages import EpisodeReport, WeightsManifest
from user_sys.policies.policy import ActionChunk, ExecutionConfig, PolicyQuery
from user_sys.rewards.reward import side_by_side
from user_sys.robot_records import (
    LEARNER,
    assign_learners,
    first_learner,
    learner_folder,
    learner_from_embodiment,
    read_robot_records,
)
from user_sys.run.allocation import require_in_use
from user_sys.run.config import EvaluationConfig, RunConfig, RunFolder
from user_sys.run.pins import current_pin
from user_sys.run.report import FAILURES, VIDEO, RunSummary, success_text, training_history, write_report, write_video
from user_sys.weights.state import dequantize
from user_sys.weights.version_store import VersionStore, newest_version, read_tensors

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
    numbers: Sequence[int] = (),
    other_pictures: bool = False,
    judge: Judge | None = None,
) -> Iterator[EpisodeReport]:
    """Runs `config.episodes` episodes on `robot` and yields each result.

    The robot is driven in this process, by the same environment, safety kernel and loop as in training. A policy reads
    the pictures that it reads in training, in size and number; a film shows others (`RobotSetup.film_cameras`).

    Args:
        on_frame: gets pictures of the first `config.video_episodes` episodes: uint8 (h, n * w, 3), the cameras side by
            side.
        check_stop: as in `open_local_environment`; also called in each control period.
        numbers: run only these of the episodes, and film all of them.
        other_pictures: see `OtherPictures`.
        judge: judges each episode of a task that a person judges.

    Raises:
        ConfigError: a person judges the task, and there is no `judge`; or `other_pictures` of a policy that reads none.
        WireError: the weights do not fit the policy.
        HalError: the robot cannot be driven.
        PolicyUnavailable: the policy reads a camera that delivers no frames.
    """
    if describe_robot(robot).is_judged and judge is None:
        raise ConfigError(f"robot {robot.name}: a person judges its task: evaluate it with `user-sys evaluate`")
    reads_pictures = bool(select_cameras(policy, robot))
    if other_pictures and not reads_pictures:
        raise ConfigError(f"the policy {policy.kind} of robot {robot.name} reads no pictures: leave out other pictures")
    first = range(min(config.video_episodes, config.episodes))
    rest = range(0) if numbers else range(len(first), config.episodes)
    for filmed, chosen in ((True, numbers or first), (False, rest)):
        if not chosen:
            continue
        setup = build_robot_setup(robot, cameras=reads_pictures or filmed, film=filmed)
        if setup.film_cameras and not reads_pictures:
            setup = replace(setup, cameras=())
        trained = make_policy(policy, setup.robot.spec, seed)
        trained.load(weights)
        acting = LoadedPolicy(trained, version)
        control = OtherPictures(acting) if other_pictures else None
        agent = _make_agent(control or acting, setup.robot.spec, robot, policy.execution, judge)
        driven = replace(robot, frame_stride=1) if filmed else robot  # a film has a frame for each control period
        with open_local_environment(setup, driven, check_stop=check_stop) as environment, ExitStack() as stack:
            listeners: list[StepListener] = [raise_if_stopped, lambda time_step, selected: check_stop()]
            if filmed:
                for camera in setup.film_cameras:
                    stack.callback(camera.close)
                    camera.connect()
                listeners.append(video_listener(on_frame, len(setup.cameras), setup.film_cameras))
            for number in [chosen[0] - 1, *chosen] if control else chosen:
                start, source = EVALUATION_SEED + 10_000 * seed + number, EpisodeSource.EVALUATION
                if control:
                    control.begin_episode()
                result = run_episode(environment, agent, None, source=source, seed=start, listeners=listeners)
                if number in chosen:  # of the one before, only the pictures count
                    yield result


def _make_agent(
    acting: ActingPolicy, spec: RobotSpec, robot: RobotConfig, execution: ExecutionConfig, judge: Judge | None
) -> PolicyAgent | JudgedAgent:
    """The policy's agent. A simulated robot runs as fast as it can, so its delay is counted."""
    kind = PolicyAgent if execution.mode == "wait" else HoldingAgent
    follows_clock = robot.follows_clock and not robot.simulated
    alone = kind(acting, spec, execution, deterministic=True, follows_clock=follows_clock)
    return alone if judge is None else JudgedAgent(alone, spec, judge)


class TerminalJudge:
    """Asks the person at this program's terminal; see `user_sys.edge.agents.Judge`."""

    def __init__(self, robot: str, console: Console) -> None:
        """Raises RunError: there is no terminal."""
        if not sys.stdin.isatty():
            raise RunError(f"robot {robot}: a person judges its task: start the evaluation in a terminal")
        self._console = console

    def ask(self, text: str) -> None:
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def answer(self) -> str | None:
        """A line without spaces around it, in small letters. Raises KeyboardInterrupt: the input has ended."""
        if not select.select([sys.stdin], [], [], 0.0)[0]:
            return None
        if not (line := sys.stdin.readline()):
            raise KeyboardInterrupt
        return line.strip().lower()


class OtherPictures:
    """Shows a policy the pictures of the episode before, from the same control periods: a control.

    A policy that succeeds all the same does not use its pictures.
    """

    def __init__(self, policy: ActingPolicy) -> None:
        self._policy = policy
        self._before: list[Mapping[str, Array]] = []  # the pictures of the episode before, by its acts
        self._now: list[Mapping[str, Array]] = []

    @property
    def version(self) -> int:
        return self._policy.version

    @property
    def cameras(self) -> tuple[str, ...]:
        return self._policy.cameras

    def begin_episode(self) -> None:
        """Call it before each episode."""
        self._before, self._now = self._now, []

    def act(self, query: PolicyQuery) -> ActionChunk:
        self._now.append({name: value for name, value in query.observation.items() if name.startswith(IMAGES)})
        shown = self._before[min(len(self._now), len(self._before)) - 1] if self._before else {}
        return self._policy.act(query._replace(observation={**query.observation, **shown}))


def video_listener(on_frame: Callable[[Array], None], cameras: int, film: Sequence[Camera] = ()) -> StepListener:
    """Joins the newest pictures of the `film` cameras to frames; without any, those of so many of the robot's cameras.

    The first frame comes when each camera has delivered.
    """
    newest: dict[str, Array] = {}

    def on_step(time_step: TimeStep, selected: SelectedAction | None) -> None:
        frames = {camera.spec.name: camera.read() for camera in film} or time_step.frames
        newest.update({name: frame.image for name, frame in frames.items()})
        if frames and len(newest) == (len(film) or cameras):
            on_frame(side_by_side(newest))

    return on_step


def load_acting_weights(folder: RunFolder, learner: str = LEARNER) -> tuple[WeightsManifest, dict[str, Array]]:
    """The version that robots act with: the pinned one, or the newest that the gateway has kept.

    Raises:
        RunError: the learner has published none.
        OSError, WireError: the pin cannot be read.
    """
    store = VersionStore(learner_folder(folder.weights, learner))
    catalog, pin = store.load(), current_pin(store)
    version = (newest_version(catalog, pin.version) if pin else None) or newest_version(catalog)
    if version is None:
        raise RunError(f"{folder.path} has no trained policy yet: {learner} has published no weights; train it first")
    arrays = {entry.name: array for entry, array in read_tensors(version, catalog.cache).items()}
    return version.manifest, dequantize(arrays, version.manifest.precision)


def robots_to_evaluate(config: RunConfig, folder: RunFolder) -> dict[str, RobotConfig]:
    """For each learner of the run, by name, the first simulated robot of its embodiment whose task no person judges.

    Real robots are evaluated with `user-sys evaluate` only, by a person who stands by.
    """
    learners = learner_from_embodiment(read_robot_records(folder.robots))
    found: dict[str, RobotConfig] = {}
    for robot in config.robots:
        if not robot.simulated or describe_robot(robot).is_judged:
            continue
        if (learner := learners.get(robot_spec(robot).embodiment)) is not None:
            found.setdefault(learner, robot)
    return found


def run_evaluation(
    config: RunConfig,
    folder: RunFolder,
    episodes: int,
    console: Console,
    learner: str = LEARNER,
    robot: RobotConfig | None = None,
    numbers: Sequence[int] = (),
    *,
    other_pictures: bool = False,
) -> tuple[list[EpisodeReport], list[Array], WeightsManifest]:
    """Evaluates the policy of `learner` on `robot` (default: the first) and shows progress.

    A task that a person judges asks on the terminal. If an error or a signal ends it early, the success so far is
    printed.

    Args:
        numbers, other_pictures: as in `evaluate`.

    Returns:
        The results, pictures of the filmed episodes, and the version that acted.

    Raises:
        RunError: there is no policy; a person judges the task and there is no terminal; or an operator has taken the
            robot out of use (`require_in_use`).
    """
    robot = robot or config.robots[0]
    require_in_use([robot], folder.path)
    judge = TerminalJudge(robot.name, console) if describe_robot(robot).is_judged else None
    manifest, weights = load_acting_weights(folder, learner)
    execution = config.policy.execution
    has_delay = execution.mode == "async" and robot.simulated and robot.follows_clock
    if has_delay and not execution.delay_periods and not numbers:
        text = f"{robot.name} is evaluated without the delay of its chunks; policy.execution.delay_periods can set one"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    pictures, finished, total = list[Array](), list[EpisodeReport](), len(numbers) or episodes
    try:
        with defer_signals() as check_stop:
            results = evaluate(
                robot,
                config.policy,
                weights,
                replace(config.evaluation, episodes=episodes),
                pictures.append,
                version=manifest.version,
                seed=config.seed,
                check_stop=check_stop,
                numbers=numbers,
                other_pictures=other_pictures,
                judge=judge,
            )
            label = f"{'filming failures of' if numbers else 'evaluating'} version {manifest.version}"
            shown = track(results, label, total=total, console=console, transient=True, disable=judge is not None)
            finished.extend(shown)
    except BaseException:
        if finished and not numbers:
            share = success_text(sum(bool(each.success) for each in finished), len(finished))
            text = f"ended after {len(finished)} of {total} episodes of version {manifest.version}: success {share}"
            console.print(text, highlight=False)
        raise
    return finished, pictures, manifest


def evaluate_and_report(config: RunConfig, folder: RunFolder, counts: RunSummary, console: Console) -> RunSummary:
    """Evaluates the run's policies on its simulated robots, and writes summary, plot and videos.

    Without simulated robots, or with `evaluation.episodes` 0, the summary holds the counts only.

    Args:
        counts: the run's counts; the evaluation of its first learner is added.

    Raises:
        RunError: the first learner has no policy, or a file cannot be written.
    """
    summary, total = counts, config.evaluation.episodes
    first = first_learner(assign_learners(read_robot_records(folder.robots)))
    chosen = robots_to_evaluate(config, folder) if total > 0 else {}
    for learner, robot in chosen.items():
        try:
            if learner == first:
                episodes, film, manifest = run_evaluation(config, folder, total, console, learner, robot)
                summary = _summary(counts, episodes, robot, manifest)
                _film_failures(config, folder, console, learner, robot, episodes, film)
            else:
                _evaluate_other(config, folder, console, learner, robot)
        except (HalError, PolicyUnavailable, RunError) as error:  # the robot or this learner is lost, the run is not
            if learner == first and isinstance(error, RunError):
                raise
            console.print(f"{robot.name} is not evaluated: {error}", highlight=False, markup=False, soft_wrap=True)
        except KeyboardInterrupt:  # the finished evaluation counts all the same
            if summary is counts:
                raise
            console.print("interrupted: no further robot is evaluated", highlight=False)
            break
    if total > 0 and (left_out := _simulated_left_out(config.robots, chosen.values())):
        text = f"not evaluated: {', '.join(left_out)}; user-sys evaluate {folder.path} --robot NAME"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if total > 0 and (real := [robot.name for robot in config.robots if not robot.simulated]):
        console.print(
            f"not evaluated without a person who stands by: {', '.join(real)}; "
            f"with an e-stop within reach: user-sys evaluate {folder.path} --robot NAME",
            highlight=False,
        )
    write_report(folder.path, summary, training_history(folder), console)
    return summary


def _simulated_left_out(robots: Sequence[RobotConfig], evaluated: Collection[RobotConfig]) -> list[str]:
    """The simulated robots with tasks on which no robot of their embodiment is evaluated, each with these tasks."""
    covered = {(robot_spec(robot).embodiment, task.name) for robot in evaluated for task in robot.tasks}
    tasks = {
        robot.name: [each.name for each in robot.tasks if (robot_spec(robot).embodiment, each.name) not in covered]
        for robot in robots
        if robot.simulated
    }
    return [f"{name} ({', '.join(missing)})" for name, missing in tasks.items() if missing]


def _evaluate_other(config: RunConfig, folder: RunFolder, console: Console, learner: str, robot: RobotConfig) -> None:
    """Evaluates another learner than the first and prints its success."""
    settings, total = (
        replace(config, evaluation=replace(config.evaluation, video_episodes=0)),
        config.evaluation.episodes,
    )
    episodes, _, manifest = run_evaluation(settings, folder, total, console, learner, robot)
    share = success_text(sum(bool(episode.success) for episode in episodes), len(episodes))
    console.print(
        f"{learner} on {robot.name}: success {share} of {total} episodes, version {manifest.version}", highlight=False
    )


def _film_failures(
    config: RunConfig,
    folder: RunFolder,
    console: Console,
    learner: str,
    robot: RobotConfig,
    episodes: Sequence[EpisodeReport],
    film: list[Array],
) -> None:
    """Writes the film of the first learner's evaluation. Its first failures run again on the same starts, filmed."""
    total, fps = config.evaluation.episodes, robot_spec(robot).rate_hz
    failed = [number for number, episode in enumerate(episodes) if not episode.success]
    (folder.path / FAILURES).unlink(missing_ok=True)
    try:
        if film:
            write_video(folder.path / VIDEO, film, fps)
        if failed := failed[: config.evaluation.video_failures]:
            _, film, _ = run_evaluation(config, folder, total, console, learner, robot, failed)
            if film:
                write_video(folder.path / FAILURES, film, fps)
    except (HalError, PolicyUnavailable, RunError, KeyboardInterrupt) as error:  # the evaluation counts all the same
        message = f"the films of {robot.name} are incomplete: {str(error) or 'interrupted'}"
        console.print(message, highlight=False, markup=False, soft_wrap=True)
        if isinstance(error, KeyboardInterrupt):
            raise


def _summary(
    counts: RunSummary, episodes: Sequence[EpisodeReport], robot: RobotConfig, manifest: WeightsManifest
) -> RunSummary:
    return replace(
        counts,
        successes=sum(bool(episode.success) for episode in episodes),
        episodes=len(episodes),
        control_s=sum(episode.steps for episode in episodes) / robot_spec(robot).rate_hz,
        tasks=success_by_task(episodes),
        policy_version=manifest.version,
        policy_updates=manifest.updates,
    )


def success_by_task(episodes: Sequence[EpisodeReport]) -> dict[str, tuple[int, int]]:
    """Successes and episodes of each task; empty for one task."""
    names = sorted({episode.task for episode in episodes})
    chosen = {name: [bool(episode.success) for episode in episodes if episode.task == name] for name in names}
    return {name: (sum(each), len(each)) for name, each in chosen.items()} if len(names) > 1 else {}


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
