"""What a run says about its sampler: which steps it draws, how it chooses, and how many make a transition."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from user_sys.episode import Phase, Source
from user_sys.errors import ConfigError
from user_sys.replay.balanced import TaskBalanced
from user_sys.replay.choosers import Chooser, InterventionWeighted, Uniform
from user_sys.replay.mix import DemoOnline
from user_sys.replay.prioritized import Prioritized
from user_sys.replay.where import Where

N_STEP_MAX = 1000
MAX_AGE_S = 1e9  # thirty years
MAX_AGE_VERSIONS = 1 << 62
TRAINED_ON = frozenset({Source.DEMO, Source.ONLINE})  # evaluations only where `only.sources` names them

Kind = Literal["mixed", "uniform", "prioritized", "interventions", "tasks"]
PhaseName = Literal["policy", "teleop", "correction", "recovery"]


@dataclass(frozen=True)
class OnlyConfig:
    """Conditions that a step meets to be drawn, all of them; an empty list and null are none.

    Attributes:
        robots, tasks, sources, success: of the episode, as labelled. Without sources: demo and online;
            uniform, prioritized and interventions may draw evaluations.
        phases: of the step.
        max_age_s: captured at most so long before the newest step stored.
        max_age_versions: acted by weights at most so many versions older than the newest that acted. Steps that no
            weights acted do not meet it.
    """

    robots: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    phases: tuple[PhaseName, ...] = ()
    success: bool | None = None
    max_age_s: float | None = None
    max_age_versions: int | None = None

    def __post_init__(self) -> None:
        if self.max_age_s is not None and not 0 < self.max_age_s <= MAX_AGE_S:
            raise ConfigError(f"max_age_s is {self.max_age_s}; it must lie above 0 and up to {MAX_AGE_S:g}")
        if self.max_age_versions is not None and not 0 <= self.max_age_versions <= MAX_AGE_VERSIONS:
            raise ConfigError(f"max_age_versions is {self.max_age_versions}; it must not be negative")

    def where(self, embodiment: str) -> Where:
        """The steps of `embodiment` that meet it."""
        return Where(
            robots=frozenset(self.robots) or None,
            embodiments=frozenset({embodiment}),
            tasks=frozenset(self.tasks) or None,
            phases=frozenset(Phase[name.upper()] for name in self.phases) or None,
            sources=frozenset(self.sources) or None,
            max_age_s=self.max_age_s,
            max_age_versions=self.max_age_versions,
            success=self.success,
        )


@dataclass(frozen=True)
class PrioritizedConfig:
    """See `user_sys.replay.prioritized`."""

    alpha: float = 0.6
    beta: float = 0.4
    beta_draws: int = 100_000


@dataclass(frozen=True)
class InterventionsConfig:
    """`weight`: how many times as likely a step is that a person controlled."""

    weight: float = 4.0


@dataclass(frozen=True)
class TasksConfig:
    """See `user_sys.replay.balanced`; `low` and `high` bound the share of online steps."""

    alpha: float = 1.5
    low: float = 0.2
    high: float = 0.8
    window: int = 200


@dataclass(frozen=True)
class SamplerConfig:
    """How the learner draws.

    Attributes:
        kind: mixed: demonstrations and interventions beside online steps, in shares (`learner.demo_fraction`). The
            others draw from both without shares: uniform; prioritized by TD error; interventions, a person's steps more
            often; tasks, evenly from each, with as much online as its TD errors ask for.
        n_step: steps of a transition, fewer at an episode's end.
        only: what may be drawn; in `mixed` its ages are for the online half.
        prioritized, interventions, tasks: settings of that kind.
    """

    kind: Kind = "mixed"
    n_step: int = 1
    only: OnlyConfig = field(default_factory=OnlyConfig)
    prioritized: PrioritizedConfig = field(default_factory=PrioritizedConfig)
    interventions: InterventionsConfig = field(default_factory=InterventionsConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.n_step <= N_STEP_MAX:
            raise ConfigError(f"n_step is {self.n_step}; it must lie in 1..{N_STEP_MAX}")
        for name in ("prioritized", "interventions", "tasks"):
            section = getattr(self, name)
            if name != self.kind and section != type(section)():
                raise ConfigError(f"{name} means nothing to kind {self.kind!r}: leave it out")
        if self.kind == "mixed" and self.only.sources and not TRAINED_ON & set(self.only.sources):
            raise ConfigError("the mixed sampler draws from demo and online: only.sources leaves it nothing")
        try:
            self.chooser("", 0.5)
        except ConfigError as error:
            raise ConfigError(f"kind {self.kind}: {error}") from None

    @property
    def plain(self) -> bool:
        """Whether it is RLPD's two halves with nothing left out."""
        return self.kind == "mixed" and self.only == OnlyConfig()

    def chooser(self, embodiment: str, demo_fraction: float) -> Chooser:
        """What chooses a learner's steps. Raises ConfigError: settings that the chooser refuses."""
        only = self.only.where(embodiment)
        if self.kind == "mixed":
            return DemoOnline(embodiment, demo_fraction, only)
        if self.kind == "tasks":
            return TaskBalanced(
                only, alpha=self.tasks.alpha, bounds=(self.tasks.low, self.tasks.high), window=self.tasks.window
            )
        only = only if self.only.sources else only.narrowed(TRAINED_ON)
        if self.kind == "prioritized":
            return Prioritized(only, **asdict(self.prioritized))
        if self.kind == "interventions":
            return InterventionWeighted(only, self.interventions.weight)
        return Uniform(only)
