"""The control loop of one episode: reset, observe, act, record. Optional behaviour attaches as a listener."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from user_sys.edge.environment import Environment, TaskInfo, TimeStep
from user_sys.edge.recorder import Recorder, SelectedAction, StepOutcome
from user_sys.episode import EpisodeSource, Phase
from user_sys.messages import EpisodeReport
from user_sys.trace import span


class Agent(Protocol):
    """Selects actions: a scripted expert, a policy, or a policy that operators may override."""

    def begin_episode(self, time_step: TimeStep, task: TaskInfo) -> None:
        """A new episode of `task` begins with `time_step`."""

    def select_action(self, time_step: TimeStep) -> SelectedAction | None:
        """The next action. None holds the robot for one control period, which is not a step."""

    def evaluate_step(self, after: TimeStep, steps: int) -> StepOutcome:
        """The outcome of the step that led to `after`, the `steps`-th of the episode."""


StepListener = Callable[[TimeStep, SelectedAction | None], None]
"""Called after each control period, with None if the robot held."""


def derived_seed(*parts: object) -> int:
    """A seed below 2**48 that is the hash of `parts`, so that other parts give another seed."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


def run_episode(
    environment: Environment,
    agent: Agent,
    recorder: Recorder | None,
    *,
    source: EpisodeSource,
    seed: int,
    listeners: Sequence[StepListener] = (),
) -> EpisodeReport:
    """Runs one episode to its end. Without a recorder the report names neither episode nor robot.

    If the e-stop is latched at the reset, nothing was reset, and nothing is recorded: the agent decides on the end. Nor
    is a first step that an e-stop prevents.

    Raises:
        HalError: an error of the environment. The episode stays open and is never sampled past its last step.
    """
    time_step = environment.reset(seed)
    if time_step.stopped:
        recorder = None
    task = environment.episode_task
    agent.begin_episode(time_step, task)
    episode = recorder.begin_episode(source, seed, task) if recorder else ""
    steps, total, interventions, version = 0, 0.0, 0, -1
    while True:
        with span("act"):
            selected = agent.select_action(time_step)
        if selected is None:
            held = environment.hold()
            time_step = replace(held, frames={**time_step.frames, **held.frames})  # the next step records each frame
            _notify(listeners, held, None)
            continue
        with span("step"):
            after = environment.step(selected.action)
        steps += 1
        if steps == 1 and after.stopped and after.applied is None:
            recorder, episode = None, ""
        outcome = agent.evaluate_step(after, steps)
        if recorder:
            recorder.record(time_step, selected, after, outcome)
        total += outcome.reward
        interventions += selected.phase is not Phase.POLICY
        version = max(version, selected.policy_version)
        _notify(listeners, after, selected)
        if outcome.is_last:
            return EpisodeReport(
                robot=recorder.robot if recorder else "",
                episode=episode,
                source=source.value,
                steps=steps,
                success=outcome.success,
                intervention_steps=interventions,
                episode_return=total,
                policy_version=version,
                task=task.name,
            )
        time_step = after


def _notify(listeners: Sequence[StepListener], time_step: TimeStep, selected: SelectedAction | None) -> None:
    for listener in listeners:
        listener(time_step, selected)
