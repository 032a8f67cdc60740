"""One episode: reset, observe, act, record. Everything optional attaches as a subscriber."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from user_sys.edge.environment import Environment, TimeStep
from user_sys.edge.recorder import Recorder, SelectedAction, StepOutcome
from user_sys.episode import EpisodeSource, Phase


class Agent(Protocol):
    """Who drives: a policy, a scripted expert, or a session in which people may step in."""

    def begin_episode(self, tick: TimeStep) -> None:
        """A new episode starts at `tick`."""

    def select_action(self, tick: TimeStep) -> SelectedAction | None:
        """The next action; None asks the robot to hold for a control period, which is not a step."""

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        """The verdict on the step, the `steps`-th of the episode, that led to `after`."""


@dataclass(frozen=True)
class EpisodeResult:
    """One finished episode."""

    episode: str
    steps: int
    success: bool | None
    episode_return: float
    intervention_steps: int
    policy_version: int


StepListener = Callable[[TimeStep, SelectedAction | None], None]


def run_episode(
    environment: Environment,
    agent: Agent,
    recorder: Recorder | None,
    *,
    source: EpisodeSource,
    seed: int,
    listeners: Sequence[StepListener] = (),
) -> EpisodeResult:
    """Runs one episode to its end and returns what became of it.

    Raises:
        HalError: the driver's errors pass through; the episode stays open and is never sampled past its last step.
    """
    tick = environment.reset(seed)
    agent.begin_episode(tick)
    episode = recorder.begin_episode(source, seed) if recorder else ""
    steps, total, interventions, version = 0, 0.0, 0, -1
    while True:
        decision = agent.select_action(tick)
        if decision is None:
            held = environment.hold()
            tick = replace(held, frames={**tick.frames, **held.frames})  # a step is to have each
            _notify(listeners, held, None)
            continue
        after = environment.step(decision.action)
        steps += 1
        verdict = agent.evaluate_step(after, steps)
        if recorder:
            recorder.record(tick, decision, after, verdict)
        total += verdict.reward
        interventions += decision.phase is not Phase.POLICY
        version = max(version, decision.policy_version)
        _notify(listeners, after, decision)
        if verdict.is_last:
            return EpisodeResult(episode, steps, verdict.success, total, interventions, version)
        tick = after


def _notify(listeners: Sequence[StepListener], tick: TimeStep, decision: SelectedAction | None) -> None:
    for listener in listeners:
        listener(tick, decision)
