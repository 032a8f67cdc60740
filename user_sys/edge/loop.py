"""One episode: reset, observe, act, record. Everything optional attaches as a subscriber."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from user_sys.edge.driver import DriverPort, Tick
from user_sys.edge.recorder import Decision, Recorder, Verdict
from user_sys.episode import Phase, Source


class Pilot(Protocol):
    """Who drives: a policy, a scripted expert, or a session in which people may step in."""

    def begin(self, tick: Tick) -> None:
        """A new episode starts at `tick`."""

    def decide(self, tick: Tick) -> Decision | None:
        """The next action; None asks the robot to hold for a control period, which is not a step."""

    def judge(self, after: Tick, steps: int) -> Verdict:
        """The verdict on the step, the `steps`-th of the episode, that led to `after`."""


@dataclass(frozen=True)
class EpisodeSummary:
    """One finished episode."""

    episode: str
    steps: int
    success: bool | None
    episode_return: float
    intervention_steps: int
    policy_version: int


StepListener = Callable[[Tick, Decision | None], None]


def run_episode(
    driver: DriverPort,
    pilot: Pilot,
    recorder: Recorder | None,
    *,
    source: Source,
    seed: int,
    listeners: Sequence[StepListener] = (),
) -> EpisodeSummary:
    """Runs one episode to its end and returns what became of it.

    Raises:
        HalError: the driver's errors pass through; the episode stays open and is never sampled past its last step.
    """
    tick = driver.reset(seed)
    pilot.begin(tick)
    episode = recorder.begin(source, seed) if recorder else ""
    steps, total, interventions, version = 0, 0.0, 0, -1
    while True:
        decision = pilot.decide(tick)
        if decision is None:
            held = driver.hold()
            tick = replace(held, frames={**tick.frames, **held.frames})  # a step is to have each
            _tell(listeners, held, None)
            continue
        after = driver.command(decision.action)
        steps += 1
        verdict = pilot.judge(after, steps)
        if recorder:
            recorder.record(tick, decision, after, verdict)
        total += verdict.reward
        interventions += decision.phase is not Phase.POLICY
        version = max(version, decision.policy_version)
        _tell(listeners, after, decision)
        if verdict.over:
            return EpisodeSummary(episode, steps, verdict.success, total, interventions, version)
        tick = after


def _tell(listeners: Sequence[StepListener], tick: Tick, decision: Decision | None) -> None:
    for listener in listeners:
        listener(tick, decision)
