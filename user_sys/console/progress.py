"""The progress of a run: counts, rates and curves from its processes' messages, for terminal and console."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hal.resource import Health, ResourceRecord
from user_sys.episode import EpisodeSource
from user_sys.errors import WireError, disk_full_message
from user_sys.messages import NO_VERSION, EpisodeReport, MetricsReport, RobotStatus
from user_sys.robot_records import LEARNER, first_learner, learner_folder
from user_sys.tunnel.keys import GATEWAY_NAME

MAX_POINTS = 240
MAX_NODES = 64
MAX_CURVES = 64
MAX_TASKS = 32
SUCCESS_WINDOWS = (20, 50)  # autonomous episodes in each moving average of success
SUCCESS_DROP = 0.2  # a fall of success over the larger window by this much from its best is a warning
EVALUATED, EVALUATION_DROP = 20, 0.3  # the same of an evaluated task's newest episodes: fewer, and so a larger fall
RATE_WINDOW_S = 10.0
LEARNER_SILENT_S = 60.0
EVALUATION = "evaluation/"  # begins the name of a task that is evaluated during training
BEST_VERSION_SCALAR = "acting_with_version"  # of a run's metrics; see `user_sys.run.pins`
STORE_FULL_HINT = "robots keep their steps in their outboxes, and hold when these are full"
LEARNER_DISK_FULL_HINT = "training pauses until a checkpoint can be written"
NOTHING_TO_SAMPLE_WARNING = (
    "training waits: {} finds no stored step that its algorithm trains on; give it demonstrations or corrections, or "
    "check learner.options (such as steps) and learner.sampler"
)
DEMONSTRATIONS_WARNING = (
    "training waits: {} demonstrations; show the task and end each episode, or lower learner.min_demonstrations"
)
PINNED_VERSION_WARNING = (
    "training waits: an older version of the weights is pinned, and robots may be at most "
    "learner.staleness behind; `user-sys weights release` unpins it"
)


class RobotView(msgspec.Struct, frozen=True):
    """One robot at one moment.

    Attributes:
        status: None before its first report.
        lost: it has reported, but not within `LOSS_TIMEOUT_S`; or the gateway lost it before the hub was created.
        cameras: those that have sent pictures.
        joints: labels of the joints that can be driven one by one.
        moves_tool: its tool can be driven along x, y and z.
        tool_speed: of the tool at the full share, m/s; 0 if it is unknown.
        expects_cameras: whether its spec has cameras; None if the spec is unknown.
        last: the report of its newest finished episode.
        silent_s: time since its newest report, or since the hub was created if it is not known to have reported.
        health: of its resource record, as the registry last reported it.
        health_note: the reason of a quarantine or a drain, and the person.
        phases: of the running episode: the first step and the phase of each section.
        latency_ms: of the newest control period, from the observation until the action was applied; None if unknown.
        behind: the number of versions by which it is behind its own learner.
    """

    name: str
    status: RobotStatus | None
    lost: bool
    cameras: tuple[str, ...]
    last: EpisodeReport | None
    silent_s: float
    joints: tuple[str, ...] = ()
    moves_tool: bool = True
    tool_speed: float = 0.0
    expects_cameras: bool | None = None
    health: Health = Health.READY
    health_note: str = ""
    phases: tuple[tuple[int, str], ...] = ()
    latency_ms: float | None = None
    behind: int = 0


class RunView(msgspec.Struct, frozen=True):
    """The run at one moment.

    Attributes:
        elapsed_s: duration of the run, earlier launches included.
        training_s, budget_s: training time of the first learner, by its newest report, and its limit.
        env_steps, episodes, interventions: of online episodes; an intervention is an episode with steps of a person.
        updates: of all learners.
        policy_version: newest version of the first learner.
        staleness: the largest number of versions by which a robot is behind its learner.
        success: share of successes among the newest online episodes without a person's steps; None before the first.
        success_20, success_50: the same of so many episodes; None while there are fewer.
        tasks: of runs with several tasks: the share of successes among the newest autonomous episodes of each, and
            ``evaluation/<task>``: among the newest evaluations during training.
        helped: share of the newest online episodes with a person's steps; None before the first.
        metrics: newest scalars by node.
        warning: a problem that a person should fix; empty if there is none.
        alarms: problems of single robots, likewise.
    """

    run: str
    elapsed_s: float = 0.0
    training_s: float = 0.0
    budget_s: float = 0.0
    env_steps: int = 0
    env_steps_per_s: float = 0.0
    episodes: int = 0
    interventions: int = 0
    updates: int = 0
    updates_per_s: float = 0.0
    policy_version: int = 0
    staleness: int = 0
    success: float | None = None
    success_20: float | None = None
    success_50: float | None = None
    tasks: dict[str, float] = {}
    helped: float | None = None
    robots: tuple[RobotView, ...] = ()
    metrics: dict[str, dict[str, float]] = {}
    warning: str = ""
    alarms: tuple[str, ...] = ()


class CurveView(msgspec.Struct, frozen=True):
    """A curve at one moment: points in order of x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Curve:
    """At most `max_points` points (x, y) with ascending x. A full curve averages pairs of neighbours.

    The newest point is always in the view. One thread calls it at a time.
    """

    def __init__(self, name: str, max_points: int = MAX_POINTS) -> None:
        self.name = name
        self._max_points = max_points
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        self._pending.append((x, y))
        if len(self._pending) < self._stride:
            return
        self._points.append(_mean(self._pending))
        self._pending.clear()
        if len(self._points) >= self._max_points:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._stride *= 2

    def view(self) -> CurveView:
        points = self._points + self._pending[-1:]
        return CurveView(self.name, tuple(x for x, _ in points), tuple(y for _, y in points))


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    n = len(points)
    return sum(x for x, _ in points) / n, sum(y for _, y in points) / n


def share_of(values: list[bool], newest: int) -> float | None:
    """The share of True among the `newest` values; None before the first."""
    chosen = values[-newest:]
    return sum(chosen) / len(chosen) if chosen else None


@dataclass
class _Rate:
    """Increase per second of a growing count, since the newest report that is older than `RATE_WINDOW_S`."""

    points: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now_s: float, count: int) -> None:
        self.points.append((now_s, count))
        while len(self.points) > 1 and self.points[1][0] < now_s - RATE_WINDOW_S:
            self.points.popleft()

    def per_s(self, now_s: float) -> float:
        """It falls while no report arrives for longer than that."""
        if not self.points:
            return 0.0
        (t0, n0), (t1, n1) = self.points[0], self.points[-1]
        seconds = max(t1, now_s - RATE_WINDOW_S) - t0
        return (n1 - n0) / seconds if seconds > 0 else 0.0


class _Success:
    """The share of successes among the newest `window` episodes, and its best."""

    def __init__(self, window: int = SUCCESS_WINDOWS[1], drop: float = SUCCESS_DROP) -> None:
        self._window, self._drop = window, drop
        self.newest = deque[bool](maxlen=window)
        self._best = 0.0

    def add(self, success: bool) -> None:
        self.newest.append(success)
        if len(self.newest) == self._window:
            self._best = max(self._best, self.share)

    @property
    def share(self) -> float:
        return sum(self.newest) / len(self.newest)

    @property
    def fall(self) -> str:
        """That it has fallen by `drop` from its best, in words; empty if it has not."""
        if len(self.newest) < self._window or self.share > self._best - self._drop:
            return ""
        return f"{self.share:.0%} of the newest {self._window} autonomous episodes, from {self._best:.0%}"


class _AutonomousEpisodes:
    """The successes of episodes without a person's steps: of all, and of each task."""

    def __init__(self) -> None:
        self.successes: list[bool] = []
        self.earlier = 0  # of them, of earlier launches
        self.evaluations: list[bool] = []
        self._all = _Success()
        self._tasks: dict[str, _Success] = {}

    def add(self, task: str, success: bool) -> None:
        if task in self._tasks or len(self._tasks) < MAX_TASKS:
            self._tasks.setdefault(task, _Success()).add(success)
        self.successes.append(success)
        self._all.add(success)

    def add_evaluation(self, task: str, success: bool) -> None:
        """Counts an evaluation during training, apart from practice of the same task."""
        if (name := f"{EVALUATION}{task}") in self._tasks or len(self._tasks) < MAX_TASKS:
            self._tasks.setdefault(name, _Success(EVALUATED, EVALUATION_DROP)).add(success)
        self.evaluations.append(success)

    def rate(self, episodes: int, without: int = 0) -> float | None:
        """Share of successes among so many newest episodes; None while there are fewer after the first `without`."""
        return share_of(self.successes, episodes) if len(self.successes) - without >= episodes else None

    def rate_by_task(self) -> dict[str, float]:
        """Share of successes among the newest episodes of each task; of a task that is practised alone it is `rate`."""
        return {name: each.share for name, each in self._shown_tasks()}

    def _shown_tasks(self) -> list[tuple[str, _Success]]:
        """All, but not the only one unless it was evaluated."""
        is_shown = len(self._tasks) > 1 or any(name.startswith(EVALUATION) for name in self._tasks)
        return sorted(self._tasks.items()) if is_shown else []

    @property
    def warning(self) -> str:
        """That success has fallen, of all episodes or of one of several tasks; empty if it has not."""
        falls = [f"success fell to {self._all.fall}"] if self._all.fall else []
        falls += [f"success of {name} fell to {each.fall}" for name, each in self._shown_tasks() if each.fall]
        if not falls:
            return ""
        return (
            f"{'; '.join(falls)}: check the newest labels and the robot, "
            "or act with an older version (`user-sys weights rollback`)"
        )


class RunProgress:
    """Folds the messages of a run into counts. Any thread may call it.

    Attributes:
        episodes, env_steps, interventions: of online episodes, of this launch and those before it; `interventions`
            counts episodes with steps of a person.
        metrics: the newest scalars of each process.
    """

    def __init__(self, folder: Path = Path(), clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        folder: of the run, for messages.
        clock: monotonic seconds.
        """
        self._folder, self._clock, self._started_s = folder, clock, clock()  # or earlier, by the earlier launches
        self._lock = threading.RLock()
        self.episodes = self.env_steps = self.interventions = 0
        self._assisted: list[bool] = []  # of each online episode
        self.metrics: dict[str, dict[str, float]] = {}
        self._curves: dict[str, Curve] = {}
        self._autonomous = _AutonomousEpisodes()
        self._updates: dict[str, tuple[int, float]] = {}  # of each learner, and when it reported them
        self._step_rate, self._update_rate = _Rate(), _Rate()
        self._learner_from_robot: dict[str, str] = {}
        self._lost_devices: dict[str, ResourceRecord] = {}

    def restore_history(self, episodes: int, env_steps: int, interventions: int, elapsed_s: float) -> None:
        """Sets the counts and the duration of earlier launches of a resumed run."""
        with self._lock:
            self.episodes, self.env_steps, self.interventions = episodes, env_steps, interventions
            self._started_s -= elapsed_s

    def set_learners(self, learner_from_robot: Mapping[str, str]) -> None:
        """Sets each robot's learner. A robot that is not named here has the run's first learner."""
        with self._lock:
            self._learner_from_robot = dict(learner_from_robot)

    def restore_curves(self, outcomes: Iterable[tuple[float, EpisodeReport]], losses: Iterable[MetricsReport]) -> None:
        """Adds what an earlier process has shown to curves and success; counts stay as they are.

        Args:
            outcomes: finished episodes, each with its second of the run.
            losses: in reports of learners.
        """
        with self._lock:
            for at_s, episode in outcomes:
                self._add_outcome(episode, at_s)
            self._autonomous.earlier = len(self._autonomous.successes)
            for report in losses:
                self._add_losses(report)

    def add_episode(self, episode: EpisodeReport) -> None:
        with self._lock:
            if episode.source == EpisodeSource.ONLINE:
                self.episodes += 1
                self.env_steps += episode.steps
                self.interventions += episode.intervention_steps > 0
                self._step_rate.add(self._clock(), self.env_steps)
            self._add_outcome(episode, self.elapsed_s)

    def _add_outcome(self, episode: EpisodeReport, at_s: float) -> None:
        helped, succeeded = episode.intervention_steps > 0, episode.success is True
        is_attempt = not helped and episode.success is not None  # not one that was cut off without a label
        if episode.source == EpisodeSource.EVALUATION and is_attempt:
            self._autonomous.add_evaluation(episode.task, succeeded)
            self._add_point("evaluation", at_s, share_of(self._autonomous.evaluations, SUCCESS_WINDOWS[0]))
        if episode.source != EpisodeSource.ONLINE:
            return
        self._assisted.append(helped)
        self._add_point("helped", at_s, self._helped)
        if is_attempt:
            self._autonomous.add(episode.task, succeeded)
            self._add_point("success", at_s, share_of(self._autonomous.successes, SUCCESS_WINDOWS[0]))

    def add_metrics(self, report: MetricsReport) -> None:
        """Raises WireError: reports of too many processes."""
        with self._lock:
            if report.node not in self.metrics and len(self.metrics) >= MAX_NODES:
                raise WireError(f"{report.node[:80]!r} is one node too many: the console shows {MAX_NODES}")
            finite = {name: value for name, value in report.scalars.items() if math.isfinite(value)}
            self.metrics.setdefault(report.node, {}).update(finite)
            if not report.node.startswith(LEARNER):
                return
            self._updates[report.node] = report.count, self._clock()
            self._update_rate.add(self._clock(), self._total_updates)
            self._add_losses(report)

    def set_ended(self, processes: Iterable[str]) -> None:
        """Sets the processes that have ended and are not started again. A learner among them need not report."""
        with self._lock:
            for name in self._updates.keys() & set(processes):
                self._updates[name] = self._updates[name][0], math.inf

    def set_scalars(self, node: str, scalars: Mapping[str, float]) -> None:
        """Replaces the newest scalars of `node`, which sends no reports itself, such as the run."""
        with self._lock:
            self.metrics[node] = dict(scalars)

    def _add_losses(self, report: MetricsReport) -> None:
        for name, value in report.scalars.items():
            curve = f"{report.node}/{name}"
            if "loss" in name and (curve in self._curves or len(self._curves) < MAX_CURVES):  # the files have all
                self._add_point(curve, report.count, value)

    def add_device(self, record: ResourceRecord) -> None:
        """A device was lost or found."""
        with self._lock:
            self._lost_devices.pop(record.name, None)
            if record.health is Health.LOST:
                self._lost_devices[record.name] = record

    def view(self, run: str, budget_s: float, robots: tuple[RobotView, ...], alarms: Iterable[str] = ()) -> RunView:
        """The run called `run`, with these `robots`; `budget_s` limits the training time of its first learner.
        `alarms`: see `RunView`.
        """
        with self._lock:
            robots = tuple(replace(robot, behind=self._staleness(robot)) for robot in robots)
            return RunView(
                run=run,
                elapsed_s=self.elapsed_s,
                training_s=self._training_s,
                budget_s=budget_s,
                env_steps=self.env_steps,
                env_steps_per_s=self._step_rate.per_s(self._clock()),
                episodes=self.episodes,
                interventions=self.interventions,
                updates=self._total_updates,
                updates_per_s=self._update_rate.per_s(self._clock()),
                policy_version=self._newest_version(self._first_learner, 0),
                staleness=max((robot.behind for robot in robots), default=0),
                success=share_of(self._autonomous.successes, SUCCESS_WINDOWS[0]),
                success_20=self._autonomous.rate(20),
                success_50=self._autonomous.rate(50),
                tasks=self._autonomous.rate_by_task(),
                helped=self._helped,
                robots=robots,
                metrics={node: dict(scalars) for node, scalars in self.metrics.items()},
                warning=self._warning,
                alarms=tuple(alarms),
            )

    @property
    def elapsed_s(self) -> float:
        """Duration of the run, earlier launches included."""
        return self._clock() - self._started_s

    @property
    def _training_s(self) -> float:
        return self.metrics.get(self._first_learner, {}).get("training_s", 0.0)

    @property
    def _first_learner(self) -> str:
        return first_learner(self._learner_from_robot.values())

    @property
    def _helped(self) -> float | None:
        return share_of(self._assisted, SUCCESS_WINDOWS[0])

    def success_rate(self, episodes: int) -> float | None:
        """Share of successes among so many autonomous episodes of this launch; None while there are fewer."""
        with self._lock:
            return self._autonomous.rate(episodes, self._autonomous.earlier)

    def _staleness(self, robot: RobotView) -> int:
        """The number of versions by which the robot is behind its own learner."""
        if robot.status is None:
            return 0
        version = robot.status.policy_version
        newest = self._newest_version(self._learner_from_robot.get(robot.name, LEARNER), version)
        return max(0, newest - max(version, NO_VERSION))

    @property
    def _warning(self) -> str:
        lost = f"lost: {', '.join(map(describe_device, self._lost_devices.values()))}" if self._lost_devices else ""
        is_pinned = any(scalars.get("held_by_pin", 0) for scalars in self.metrics.values())
        pinned = PINNED_VERSION_WARNING if is_pinned else ""
        success = self._best_version_warning or self._autonomous.warning
        waits = (*self._missing_steps(), success or pinned)
        return " | ".join(filter(None, (self.disk_warning, lost, self._silent_learners, *waits)))

    @property
    def _total_updates(self) -> int:
        return sum(count for count, _ in self._updates.values())

    def _missing_steps(self) -> Iterator[str]:
        """What learners wait for, without those that have ended or that no robot has."""
        running = [name for name, (_, at_s) in sorted(self._updates.items()) if math.isfinite(at_s)]
        with_robots = {*self._learner_from_robot.values()} or {*running}
        scalars = {name: self.metrics[name] for name in running if name in with_robots}
        if starved := [name for name, each in scalars.items() if each.get("nothing_to_sample", 0)]:
            yield NOTHING_TO_SAMPLE_WARNING.format(", ".join(starved))
        if counts := [
            f"{name} has {each['demonstrations']:.0f} of {needed:.0f}"
            for name, each in scalars.items()
            if (needed := each.get("demonstrations_needed", 0))
        ]:
            yield DEMONSTRATIONS_WARNING.format(", ".join(counts))

    @property
    def _silent_learners(self) -> str:
        """The learners that have not reported for `LEARNER_SILENT_S`; they report each second, also while they wait.

        One that has finished or ended need not report.
        """
        since_s = self._clock() - LEARNER_SILENT_S
        learners = [name for name in sorted(self._updates) if not self.metrics[name].get("finished", 0)]
        silent = [name for name in learners if self._updates[name][1] < since_s]
        logs = ", ".join(str(self._folder / "logs" / f"{name}.log") for name in silent)
        return f"training stands still: no report from {', '.join(silent)}; read {logs}" if silent else ""

    @property
    def _best_version_warning(self) -> str:
        """That robots act with an older version, because newer ones succeed less often."""
        scalars = [pair for each in self.metrics.values() for pair in each.items()]
        found = [int(value) for name, value in scalars if name.startswith(BEST_VERSION_SCALAR) and value >= 0]
        return f"newer versions succeed less often: robots act with version {found[0]}" if found else ""

    @property
    def disk_warning(self) -> str:
        """What waits for disk space, or an empty text."""
        with self._lock:
            return " | ".join(self._disk_warnings())

    def curves(self) -> tuple[CurveView, ...]:
        """``success``, ``helped`` and ``evaluation`` against seconds; ``<learner>/<loss>`` against its updates."""
        with self._lock:
            return tuple(curve.view() for curve in self._curves.values())

    def _disk_warnings(self) -> Iterator[str]:
        for node, scalars in self.metrics.items():
            if needed_bytes := scalars.get("disk_needed_bytes", 0):
                folder, hint = self._folder / "store", STORE_FULL_HINT
                if node != GATEWAY_NAME:
                    folder, hint = learner_folder(self._folder / "checkpoints", node), LEARNER_DISK_FULL_HINT
                yield f"{disk_full_message(folder, needed_bytes, scalars.get('disk_free_bytes', 0))}; {hint}"

    def _newest_version(self, learner: str, default: int) -> int:
        return int(self.metrics.get(learner, {}).get("policy_version", default))

    def _add_point(self, name: str, x: float, y: float | None) -> None:
        if y is not None and math.isfinite(y):
            self._curves.setdefault(name, Curve(name)).add(x, y)


def describe_device(record: ResourceRecord) -> str:
    """E.g. ``desk/gpu-0 (gpu L4)``."""
    return f"{record.name} ({record.kind} {record.model})"
