"""What the launcher knows of a run that goes on: folded from messages, shown in the terminal, kept as scalars."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hal.resource import Health, Kind, ResourceRecord
from user_sys.errors import waiting_for_space
from user_sys.learners import LEARNER, folder_of
from user_sys.messages import EpisodeReport, MetricsReport, RobotStatus
from user_sys.metrics import read_metrics
from user_sys.progress import Progress, RobotProgress, clock_time
from user_sys.report import EpisodePoint
from user_sys.store.store import StoreReader
from user_sys.topology import RunFolder
from user_sys.weights.records import NO_VERSION

LOST_AFTER_S = 5.0
RATE_OVER_S = 10.0
MAX_BETWEEN_REPORTS_S = 1.0
STORE_FULL = "robots keep what they record in their outboxes, and hold when these are full"
LEARNER_FULL = "training pauses until a checkpoint can be written"
HELD = "training waits: an older version of the weights is ordered, and robots may not be further behind than \
learner.publish.max_lead; `user-sys weights release` ends the order"


@dataclass
class _Rate:
    """Increase per second of a count that grows, over the last ten seconds."""

    points: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, count: int) -> None:
        self.points.append((now, count))
        while self.points[0][0] < now - RATE_OVER_S:
            self.points.popleft()

    @property
    def per_s(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self.points[0], self.points[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0


def earlier_s(metrics: Path) -> float:
    """How long a run's launches went on by the scalars in the file `metrics`, as the last told; 0 before any."""
    told = (line.get("elapsed_s") for line in read_metrics(metrics))
    return max((each for each in told if each is not None), default=0.0)


def history(store: Path) -> tuple[int, int, int]:
    """Online episodes, their steps, and those that a person touched, of this run's earlier launches."""
    if not store.exists():
        return 0, 0, 0
    with StoreReader.open(store) as reader:
        reader.refresh()
        online = [episode for episode in reader.episodes() if episode.source == "online"]
    return len(online), sum(e.steps for e in online), sum(e.intervention_steps > 0 for e in online)


class RunMonitor:
    """The run in numbers. One thread calls it.

    Attributes:
        env_steps, episodes, interventions: of online episodes, this launch and those before it (see `seed_history`); an
            intervention is an episode with a person's help.
        updates: of all learners together, as they last reported.
        training_s: as the run's first learner last reported.
        robots_connected: as the gateway last reported.
        unreadable: checkpoints that each learner has passed over, as it last reported.
        points: each autonomous online episode against training time.
    """

    def __init__(
        self,
        run: str,
        address: str,
        budget_s: float,
        clock: Callable[[], float] = time.monotonic,
        folder: Path = Path(),
    ) -> None:
        """`folder`: the run's."""
        self._folder = RunFolder(folder)
        self._run, self._address, self._budget_s, self._clock = run, address, budget_s, clock
        self._started = clock()
        self._before_s = 0.0  # what earlier launches took
        self.env_steps = self.episodes = self.interventions = self.updates = 0
        self.training_s = self._reported_at = 0.0
        self.robots_connected = 0
        self._lost: dict[str, ResourceRecord] = {}  # devices of the run's computers
        self._short: dict[str, str] = {}  # by process, what it waits for on a full disk
        self._held: dict[str, bool] = {}  # each learner: by a person's order
        self.unreadable: dict[str, int] = {}
        self.points: list[EpisodePoint] = []
        self._alone: list[bool] = []
        self._robots: dict[str, tuple[float, RobotStatus]] = {}
        self._awaited: frozenset[str] = frozenset()
        self._learned: dict[str, int] = {}
        self._versions: dict[str, int] = {}  # the newest of each learner
        self._learner_from_robot: dict[str, str] = {}
        self._steps_rate, self._updates_rate = _Rate(), _Rate()

    def seed_history(self, episodes: int, env_steps: int, interventions: int, elapsed_s: float) -> None:
        """What the store holds of earlier launches of a run that is resumed, and how long they went on."""
        self.episodes, self.env_steps, self.interventions = episodes, env_steps, interventions
        self._before_s = elapsed_s

    @property
    def heard(self) -> frozenset[str]:
        """The robots that have said something in this launch."""
        return frozenset(self._robots)

    @property
    def at_work(self) -> frozenset[str]:
        """The robots that are not silent now."""
        since = self._clock() - LOST_AFTER_S
        return frozenset(name for name, (heard, _) in self._robots.items() if heard >= since)

    def taught_by(self, learner_from_robot: Mapping[str, str]) -> None:
        """Which learner each robot's policy comes from; until that is said, it is the run's first."""
        self._learner_from_robot = dict(learner_from_robot)

    def expect(self, robots: Iterable[str]) -> None:
        """These come in from computers of their own, sooner or later; they are shown as missing until they do."""
        self._awaited = frozenset(robots)

    def on_status(self, status: RobotStatus) -> None:
        self._robots[status.robot] = (self._clock(), status)

    def on_resource(self, record: ResourceRecord) -> str:
        """Takes in that a robot or device was lost or is there; returns that as a line for the terminal."""
        lost = record.health is Health.LOST
        if lost and record.kind is not Kind.ROBOT:  # robots have a line of their own
            self._lost[record.name] = record
        else:
            self._lost.pop(record.name, None)
        return f"{_named(record)} is {'lost' if lost else 'there'}"

    def on_episode(self, report: EpisodeReport) -> None:
        self.episodes += 1
        self.env_steps += report.steps
        self._steps_rate.add(self._clock(), self.env_steps)
        intervened = report.intervention_steps > 0
        self.interventions += intervened
        self.points.append(EpisodePoint(self._training_now_s(), bool(report.success), intervened))
        if not intervened:
            self._alone.append(bool(report.success))

    def on_metrics(self, report: MetricsReport) -> None:
        if report.node == "gateway":
            self.robots_connected = int(report.scalars.get("robots", 0))
            self._note_disk(report, self._folder.store, STORE_FULL)
        if not report.node.startswith(LEARNER):
            return
        self._note_disk(report, folder_of(self._folder.checkpoints, report.node), LEARNER_FULL)
        self._learned[report.node] = report.count
        self._held[report.node] = bool(report.scalars.get("held_by_order", 0))
        self.unreadable[report.node] = int(report.scalars.get("checkpoints_unreadable", 0))
        self.updates = sum(self._learned.values())
        self._updates_rate.add(self._clock(), self.updates)
        if "policy_version" in report.scalars:
            self._versions[report.node] = int(report.scalars["policy_version"])
        if report.node == LEARNER:
            self.training_s = report.scalars.get("training_s", self.training_s)
            self._reported_at = self._clock()

    def _note_disk(self, report: MetricsReport, path: Path, meanwhile: str) -> None:
        self._short.pop(report.node, None)
        if needed_bytes := report.scalars.get("disk_needed_bytes", 0):
            words = waiting_for_space(path, needed_bytes, report.scalars.get("disk_free_bytes", 0))
            self._short[report.node] = f"{words}; {meanwhile}"

    @property
    def warning(self) -> str:
        """What a person should mend now; empty if there is nothing."""
        lost = f"lost: {', '.join(map(_named, self._lost.values()))}" if self._lost else ""
        return " | ".join(filter(None, (self.unwritten, lost))) or (HELD if any(self._held.values()) else "")

    @property
    def unwritten(self) -> str:
        """What could not be written for want of room on a disk; empty if there is nothing."""
        return " | ".join(self._short.values())

    def _training_now_s(self) -> float:
        """Training time between two of the learner's reports."""
        since_s = self._clock() - self._reported_at if self.updates else 0.0
        return self.training_s + min(since_s, MAX_BETWEEN_REPORTS_S)

    def success_over(self, episodes: int) -> float | None:
        """Share of the newest `episodes` autonomous episodes that succeeded; None while there are fewer."""
        if len(self._alone) < episodes:
            return None
        return sum(self._alone[-episodes:]) / episodes

    def scalars(self) -> dict[str, float]:
        """For the run's curves."""
        shares = {f"success_{n}": self.success_over(n) for n in (20, 50)}
        return {
            "elapsed_s": self._elapsed_s,
            "episodes": self.episodes,
            "env_steps": self.env_steps,
            "env_steps_per_s": self._steps_rate.per_s,
            "interventions": self.interventions,
            "staleness": self._staleness(),
            **{name: share for name, share in shares.items() if share is not None},
        }

    def progress(self, stage: str) -> Progress:
        """The run now, for the terminal."""
        return Progress(
            run=self._run,
            stage=stage,
            console=self._address,
            elapsed_s=self._elapsed_s,
            left_s=max(0.0, self._budget_s - self.training_s) if self.updates else None,
            done=self.training_s,
            total=self._budget_s,
            episodes=self.episodes,
            success_20=self.success_over(20),
            success_50=self.success_over(50),
            env_steps=self.env_steps,
            env_steps_per_s=self._steps_rate.per_s,
            updates=self.updates,
            updates_per_s=self._updates_rate.per_s,
            policy_version=self._versions.get(LEARNER, 0),
            staleness=self._staleness(),
            interventions=self.interventions,
            robots=tuple(self._views()),
            warning=self.warning,
        )

    @property
    def _elapsed_s(self) -> float:
        return self._before_s + self._clock() - self._started

    def _staleness(self) -> int:
        """How far the robot that is furthest behind its own learner is."""
        behind = [0]
        for robot, (_, status) in self._robots.items():
            newest = self._versions.get(self._learner_from_robot.get(robot, LEARNER), status.policy_version)
            behind.append(newest - max(status.policy_version, NO_VERSION))
        return max(behind)

    def _views(self) -> Iterator[RobotProgress]:
        now = self._clock()
        for name in sorted({*self._robots, *self._awaited}):
            if name not in self._robots:
                waited = f"not come in yet, for {clock_time(now - self._started)}"
                yield RobotProgress(name=name, control="missing", note=waited)
                continue
            heard, status = self._robots[name]
            lost = now - heard > LOST_AFTER_S
            yield RobotProgress(
                name=name,
                control="lost" if lost else status.authority,
                operator=status.operator,
                episode_step=status.step,
                policy_version=status.policy_version,
                outbox_chunks=status.outbox_chunks,
                note=f"silent for {clock_time(now - heard)}" if lost else status.note,
            )


def _named(record: ResourceRecord) -> str:
    return f"{record.name} ({record.kind} {record.model})"
