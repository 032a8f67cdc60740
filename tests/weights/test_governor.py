"""The governor slows a push down to the victim's budget, gives it back, and never lets it starve."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from user_sys.gateway.weights import FLUSH_DELAY_S
from user_sys.weights.governor import MIN_SAMPLES, PUSH_AFTERMATH_S, GovernedBudget, Governor, GovernorConfig

CONFIG = GovernorConfig(budget=0.1, update_interval_s=1.0, link_bytes_per_s=1e6)
DECIDING = """
import itertools, sys
from user_sys.weights.governor import Governor, GovernorConfig

for quantile in (0.0, 0.99):
    ticks = itertools.count()
    governor = Governor(GovernorConfig(quantile=quantile, update_interval_s=1.0), clock=lambda: next(ticks))
    before = set(sys.modules)
    for _ in range(100):
        governor.observe(0.01)
    for _ in range(100):
        with governor.push():
            governor.observe(0.01)
    governor.pause_after_push_s()
    assert governor.decisions
    print(*(set(sys.modules) - before))
"""


class SimulatedMachine:
    """A victim of which a push at full share doubles the time; time passes with its steps and the push's rests."""

    def __init__(self, config: GovernorConfig = CONFIG) -> None:
        self.now_s, self.rests_s = 0.0, 0.0
        self.governor = Governor(config, clock=lambda: self.now_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.rests_s += seconds
        self.now_s += seconds

    def run(self, steps: int, harm: float, pushing: bool) -> None:
        for _ in range(steps):
            seconds = 0.01 * (1 + (harm * self.governor.share if pushing else 0))
            self.now_s += seconds
            if pushing:
                with self.governor.push():
                    self.governor.observe(seconds)
            else:
                self.governor.observe(seconds)


def test_costly_push_is_slowed_to_the_budget() -> None:
    machine = SimulatedMachine()
    machine.run(100, 0.0, pushing=False)
    machine.run(3000, 1.0, pushing=True)
    shares = [decision.share for decision in machine.governor.decisions]
    assert min(shares) < 0.15 and max(shares[-10:]) < 0.25, "about a tenth is what it can have"
    assert machine.governor.link_limit_bytes_per_s() < 0.25e6
    newest = machine.governor.scalars()
    assert newest["governor/share"] == machine.governor.share and newest["governor/idle_ms"] == pytest.approx(10.0)


def test_push_without_cost_regains_the_full_share() -> None:
    machine = SimulatedMachine()
    machine.run(100, 0.0, pushing=False)
    machine.run(2000, 1.0, pushing=True)
    assert machine.governor.share < 0.5
    machine.run(10_000, 0.0, pushing=True)
    assert machine.governor.share == 1.0


def test_share_waits_for_samples_and_keeps_its_minimum() -> None:
    machine = SimulatedMachine(replace(CONFIG, min_share=0.2))
    machine.run(MIN_SAMPLES - 1, 0.0, pushing=False)
    machine.run(1000, 100.0, pushing=True)
    assert machine.governor.share == 1.0 and not machine.governor.decisions
    machine.run(MIN_SAMPLES + 100, 0.0, pushing=False)
    machine.run(30_000, 100.0, pushing=True)
    assert machine.governor.share == 0.2


class PushStatistics:
    """A learner that publishes after every step if the governor lets it: steps of 10 ms, and each push costs 1 ms more.

    Most of what a push does to the step is over with the step; what gateway and robots do `lingers_s` longer.
    """

    def __init__(self, cost_s: float = 0.001, lingers_s: float = 0.01) -> None:
        self.now_s, self.open_s, self.pushed, self.cost_s = 0.0, 0.0, 0, cost_s
        self.lingers_s, self.late_s = lingers_s, 0.0
        self.steps_s: list[float] = []
        config = GovernorConfig()
        self.governor = Governor(config, clock=lambda: self.now_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self, steps: int) -> float:
        """Returns by how much the steps took longer than without pushes."""
        self.steps_s = []
        for _ in range(steps):
            push, late = self.now_s >= self.open_s, self.now_s < self.late_s
            taken_s = 0.01 + 0.7 * self.cost_s * push + 0.3 * self.cost_s * late
            if push:
                self.late_s = self.now_s + taken_s + self.lingers_s
                self.pushed += 1
                with self.governor.push():
                    self.now_s += taken_s
                    self.governor.yield_cpu(1)
            else:
                self.now_s += taken_s
            self.governor.observe(taken_s)
            if push:
                self.open_s = self.now_s + self.governor.pause_after_push_s()
            self.steps_s.append(taken_s)
        return sum(self.steps_s) / (0.01 * steps) - 1.0


def test_frequent_pushes_are_spread_to_the_budget() -> None:
    learner = PushStatistics()
    learner.run(5000)
    pushed = learner.pushed
    assert learner.run(20_000) <= 0.03
    assert learner.pushed - pushed > 20_000 * 0.03 / 0.1 / 3, "and no more than that"
    assert learner.governor.scalars()["governor/slowdown"] <= 0.05


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.2, 0.5])
def test_mean_cost_keeps_the_budget_under_noise(cost: float) -> None:
    """A third for a step and 6% for a second's steps, as measured next to a simulated robot on two processors."""
    longer, pushed = zip(*(noisy(cost, seed) for seed in range(12)), strict=True)
    assert float(np.mean(longer)) <= 0.012
    assert float(np.mean(pushed)) >= min(0.02, 0.003 / cost), "and pushes come"


def noisy(cost: float, seed: int) -> tuple[float, float]:
    """By how much steps were longer, and pushes for each step, where one costs so much of a step; half within 0.5 s."""
    now, rng = 0.0, np.random.default_rng(seed)
    governor = Governor(GovernorConfig(), clock=lambda: now)
    open_s, slow, base_s, extra_s, pushed, steps = 0.0, 0.0, 0.0, 0.0, 0, 0
    late: list[tuple[float, float]] = []
    while now < 150.0:
        slow += -0.013 * slow + 0.06 * (2 * 0.013) ** 0.5 * rng.normal()
        own_s = 0.013 * (1.25 if steps % 2 else 0.75) * (1 + slow) * (0.9 + 0.1 * rng.exponential())
        late = [(until_s, each) for until_s, each in late if until_s > now]
        more_s = own_s * sum(each for _, each in late)
        if push := now >= open_s:
            more_s += 0.5 * cost * 0.013
            governor.begin_push()
        now += own_s + more_s
        if push:
            governor.end_push(0.003)
            late.append((now + 0.5, 0.5 * cost * 0.013 / 0.5))
        governor.observe(own_s + more_s)
        if push:
            open_s = now + governor.pause_after_push_s()
        if now > 20.0:
            base_s, extra_s, pushed, steps = base_s + own_s, extra_s + more_s, pushed + push, steps + 1
    return extra_s / base_s, pushed / steps


@pytest.mark.parametrize("lingers_s", [0.4, FLUSH_DELAY_S + 0.2])
def test_aftermath_of_a_push_is_no_idle_time(lingers_s: float) -> None:
    learner = PushStatistics(cost_s=0.0008, lingers_s=lingers_s)
    learner.run(5000)
    assert learner.run(20_000) <= 0.03
    assert learner.governor.scalars()["governor/idle_ms"] == pytest.approx(10.0)


def test_step_time_that_is_reported_late_counts_at_its_end() -> None:
    machine = SimulatedMachine()
    with machine.governor.push():
        pass
    machine.now_s = 2 * PUSH_AFTERMATH_S
    for ended_s, seconds in ((machine.now_s, 0.01), (PUSH_AFTERMATH_S, 0.015)):
        for _ in range(MIN_SAMPLES):
            machine.governor.observe(seconds, ended_s)
    machine.run(200, 0.0, pushing=False)
    assert machine.governor.scalars()["governor/pushing_ms"] == pytest.approx(15.0)


def test_cheap_pushes_pause_only_for_idle_samples() -> None:
    learner = PushStatistics(cost_s=5e-5)
    learner.run(1000)
    pushed = learner.pushed
    learner.run(10_000)
    assert learner.governor.share == 1.0 and learner.governor.decisions
    assert 0.85 * 10_000 < learner.pushed - pushed < 10_000


def test_bulk_work_rests_by_its_share() -> None:
    machine = SimulatedMachine()
    machine.governor.share = 0.25
    with machine.governor.push():
        for _ in range(10):
            machine.now_s += 0.004
            machine.governor.yield_cpu(1 << 20)
    assert machine.rests_s == pytest.approx(10 * 0.012)
    machine.governor.share = 1.0
    machine.governor.yield_cpu(1 << 20)
    assert machine.rests_s == pytest.approx(10 * 0.012)


def test_on_a_gpu_the_share_sets_thread_blocks_and_chunks() -> None:
    told, found = [1.0], []
    allowance = GovernedBudget(replace(CONFIG, max_ctas=16), lambda: told[0])
    for told[0] in (1.0, 0.5, 0.05, 0.01):
        found.append((allowance.ctas, allowance.chunk_bytes))
    assert found == [(16, 32 << 20), (8, 16 << 20), (1, int(0.05 * (32 << 20))), (1, 1 << 20)]
    assert GovernedBudget(replace(CONFIG, enabled=False, max_ctas=4), lambda: 0.25).ctas == 4


def test_budget_in_another_process_follows_the_given_share() -> None:
    told, now, rests = [1.0], [0.0], list[float]()

    def sleep(seconds: float) -> None:
        rests.append(seconds)
        now[0] += seconds

    allowance, found = GovernedBudget(CONFIG, lambda: told[0], lambda: now[0], sleep), []
    for told[0] in (1.0, 0.5, 0.25):
        now[0] += 0.01
        allowance.yield_cpu(1)
        found.append(allowance.worked_s)
    assert rests == pytest.approx([0.01, 0.03]) and found == pytest.approx([0.01, 0.02, 0.03])
    off = GovernedBudget(replace(CONFIG, enabled=False), lambda: 0.25, lambda: now[0], sleep)
    now[0] += 1.0
    off.yield_cpu(1)
    assert off.worked_s == 1.0 and len(rests) == 2


def test_disabled_governor_limits_nothing() -> None:
    machine = SimulatedMachine(replace(CONFIG, enabled=False, link_bytes_per_s=0.0))
    machine.run(100, 0.0, pushing=False)
    machine.run(1000, 5.0, pushing=True)
    machine.governor.yield_cpu(1 << 20)
    assert (
        machine.governor.share == 1.0 and machine.rests_s == 0 and machine.governor.link_limit_bytes_per_s() == math.inf
    )


def test_decision_imports_no_module() -> None:
    done = subprocess.run([sys.executable, "-c", DECIDING], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
