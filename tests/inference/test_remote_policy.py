"""A remote policy passes the policies' conformance suite and acts as the local one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from inference_kit import Process, acts, link_to, make_keys, process, slowly, weights_of

from hal.spec import Array, RobotSpec
from user_sys.policies.conformance import PolicyConformance, example_observation, example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import Policy


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("site")
    with process(make_keys(folder / "keys"), folder) as found:
        yield found


class TestRemotePolicy(PolicyConformance):
    """Each policy has its own client, as in two robots' sessions."""

    @pytest.fixture(autouse=True)
    def _links(self, site: Process) -> Iterator[None]:
        self._site = site
        with ExitStack() as self._stack:
            yield

    def make(self, spec: RobotSpec) -> Policy:
        link = self._stack.enter_context(link_to(lambda: self._site.endpoint, self._site.keys, slowly(spec)))
        policy = link.make_policy(seed=0)
        acts(policy)  # it is available
        return policy

    def weights(self, spec: RobotSpec, seed: int) -> dict[str, Array]:
        return weights_of(spec, seed)


def test_remote_policy_acts_as_the_local_one(site: Process) -> None:
    spec, rng = slowly(example_spec()), np.random.default_rng(5)
    here = MlpPolicy(spec, seed=3)
    with link_to(lambda: site.endpoint, site.keys, spec) as link:
        there = link.make_policy(seed=3)
        assert there.precisions == MlpPolicy.precisions
        first = example_observation(rng)
        explored = here.act(first, "", deterministic=False)
        np.testing.assert_array_equal(acts(there, first, deterministic=False).actions, explored.actions)
        for policy in (here, there):
            policy.load(weights_of(spec, 1))
        for _ in range(20):
            observation = example_observation(rng)
            one, other = (p.act(observation, "", deterministic=False) for p in (here, there))
            np.testing.assert_array_equal(one.actions, other.actions)
            np.testing.assert_array_equal(one.log_prob, other.log_prob)
