"""RECAP: conformance, values and indicators on cases that can be worked out, and that it exceeds what it imitates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from point_kit import POINT, chunks, expert, step_point, success_rate

from hal.spec import RobotSpec
from user_sys.algorithms.algorithm import Algorithm, policy_arrays
from user_sys.algorithms.conformance import AlgorithmConformance
from user_sys.algorithms.recap import Recap, RecapSettings
from user_sys.episode import Phase
from user_sys.errors import ConfigError
from user_sys.policies.conformance import example_spec
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.policy import Policy

torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
SMALL = RecapSettings(value_hidden=(32, 32), horizon=10)
FLOW = FlowSettings(chunk_length=2, flow_steps=4, hidden=(64, 64), conditions=2, condition=1, guidance=1.2)


def small(spec: RobotSpec, settings: RecapSettings = SMALL) -> Recap:
    return Recap(settings, FlowPolicy.make_module(spec, settings=FLOW), spec)


class TestRecap(AlgorithmConformance):
    def make(self, spec: RobotSpec) -> Algorithm:
        return small(spec)

    def policy(self, spec: RobotSpec) -> Policy:
        return FlowPolicy(spec, settings=FLOW)


def test_top_share_of_each_instruction_is_positive_and_so_are_people() -> None:
    algorithm, advantage = small(example_spec()), torch.arange(40.0)
    by_person, sentence = torch.zeros(40, dtype=torch.bool), (torch.arange(40) % 2).long()
    positive = algorithm.is_positive(advantage, by_person, ~by_person, sentence)
    assert positive.sum() == 12 and (positive[::2] == positive[1::2]).all() and not positive[:28].any()
    by_person[:5] = True
    assert algorithm.is_positive(advantage, by_person, ~by_person, None)[:5].all()
    failed = algorithm.is_positive(advantage - 100.0, by_person, ~by_person, None)
    assert failed.sum() == by_person.sum(), "failures are no example"


def test_way_back_leaves_the_quantile_of_the_policys_own_steps() -> None:
    algorithm, advantage, own = small(example_spec()), torch.arange(40.0), torch.arange(40) < 20
    positive = algorithm.is_positive(advantage, torch.zeros(40, dtype=torch.bool), own, None)
    assert positive.nonzero()[:, 0].tolist() == [14, 15, 16, 17, 18, 19]


def test_chunk_ends_where_control_first_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, masks = small(POINT), list[torch.Tensor]()
    batch = chunks(np.zeros((8, 1), np.float32), np.zeros((8, 4, 1), np.float32))
    phase = torch.full((8, 4), int(Phase.POLICY), dtype=torch.uint8)
    phase[:, 1] = Phase.TELEOP
    batch = replace(batch, phase=phase, mask=torch.ones(8, 4, dtype=torch.bool))

    def imitation_loss(x: torch.Tensor, action: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        masks.append(mask)
        return x.mean(-1)

    monkeypatch.setattr(algorithm.actor, "imitation_loss", imitation_loss)
    algorithm.update(batch, 0)
    assert masks[0].tolist() == [[True, False, False, False]] * 8


def test_way_back_is_no_example() -> None:
    algorithm = small(POINT)
    batch = chunks(np.zeros((8, 1), np.float32), np.zeros((8, 2, 1), np.float32))
    assert batch.phase is not None
    rewards, before = torch.linspace(0.1, 1.0, 8), policy_arrays(algorithm.policy)
    for phase, share in ((Phase.RECOVERY, 0.0), (Phase.CORRECTION, 1.0)):
        algorithm.update(replace(batch, reward=rewards, phase=torch.full_like(batch.phase, phase)), 0)
        assert algorithm.scalars()["positive_share"] == share
        changed = any((array != before[name]).any() for name, array in policy_arrays(algorithm.policy).items())
        assert changed is (phase == Phase.CORRECTION)


def test_returns_fall_into_the_bins() -> None:
    algorithm = small(example_spec())
    found = algorithm.bins_of(torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 0.2525]))
    assert found.argmax(-1)[:5].tolist() == [0, 0, 100, 200, 200]
    assert found[5, 50:52].tolist() == pytest.approx([0.5, 0.5], abs=1e-3)
    torch.testing.assert_close(found @ algorithm.centres, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0, 0.2525]))


def test_other_policies_and_settings_are_refused() -> None:
    for module in (torch.nn.Linear(1, 1), FlowPolicy.make_module(example_spec())):
        with pytest.raises(ConfigError, match="conditions: 2, condition: 1"):
            Recap(SMALL, module, example_spec())
    for wrong in ({"bins": 1}, {"return_min": 1.0}, {"dropped_share": 1.0}, {"discount": 1.0}):
        with pytest.raises(ConfigError):
            RecapSettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_recap_exceeds_the_steps_that_it_imitates() -> None:
    """Half of the recorded steps go the wrong way. Behaviour cloning would do so too."""
    torch.manual_seed(0)
    settings = replace(SMALL, learning_rate=3e-3, acting_rate=0.05)
    rng, algorithm, policy = np.random.default_rng(0), small(POINT, settings), FlowPolicy(POINT, settings=FLOW)
    for number in range(400):
        x = rng.uniform(-1, 1, (128, 1)).astype(np.float32)
        actions = expert(x, 2) * np.where(rng.random((128, 1, 1)) < 0.5, 1, -1)
        batch = chunks(x, actions.astype(np.float32))
        after, _ = step_point(*(step_point(x, actions[:, 0])[0], actions[:, 1]))
        returns = 0.97 ** (np.abs(after[:, 0]) / 0.2)
        algorithm.update(replace(batch, reward=torch.from_numpy(returns.astype(np.float32))), number)
    policy.load(policy_arrays(algorithm.policy))
    assert success_rate(policy) > 0.9, algorithm.scalars()
    free = FlowPolicy(POINT, settings=replace(FLOW, condition=0))
    free.load(policy_arrays(algorithm.policy))
    assert success_rate(free) < 0.7, "without the condition it imitates both"


def test_only_the_values_learn_from_steps_without_an_action() -> None:
    algorithm = small(POINT)
    policy, value = policy_arrays(algorithm.policy), policy_arrays(algorithm.value)
    batch = chunks(np.zeros((8, 1), np.float32), np.zeros((8, 2, 1), np.float32))
    assert batch.mask is not None
    algorithm.update(replace(batch, weight=torch.zeros(8), mask=torch.zeros_like(batch.mask)), 0)
    for name, array in policy_arrays(algorithm.policy).items():
        np.testing.assert_array_equal(array, policy[name])
    assert any((array != value[name]).any() for name, array in policy_arrays(algorithm.value).items())
