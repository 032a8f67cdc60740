"""New weights reach a running policy between two steps: newest wins, damage is refused, versions only grow."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from user_sys.algorithms.rlpd import Rlpd, RlpdConfig
from user_sys.messages import WeightsManifest
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.weights.swap import NO_VERSION, PolicySwapper
from user_sys.weights.transfer import encode_full

SPEC = example_spec()
SMALL = RlpdConfig(actor_hidden=(16,), critic_hidden=(8,), critics=2)


def packed(version: int) -> tuple[WeightsManifest, bytes]:
    return encode_full(Rlpd(SMALL, SPEC, seed=version).policy_weights(), version=version, updates=version)


def swapper() -> PolicySwapper:
    return PolicySwapper(lambda: MlpPolicy(SPEC))


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return met


def test_a_version_is_loaded_aside_and_acts_only_after_the_swap() -> None:
    observation = example_observation(np.random.default_rng(0))
    with swapper() as swap:
        before = swap.policy
        assert swap.version == NO_VERSION and swap.swap_if_ready() is None
        manifest, payload = packed(4)
        swap.offer(manifest, payload)
        assert eventually(lambda: swap.swap_if_ready() == 4)
        assert swap.version == 4 and swap.policy is not before and swap.applied_s > 0
        expected = MlpPolicy(SPEC)
        expected.load(Rlpd(SMALL, SPEC, seed=4).policy_weights())
        actions = [p.act(observation, "", deterministic=True).actions for p in (swap.policy, expected)]
        np.testing.assert_array_equal(*actions)
        assert swap.swap_if_ready() is None


def test_the_newest_wins_and_versions_never_go_back() -> None:
    seen = []
    with swapper() as swap:
        for version in (*range(20), 7, 3, 25):
            swap.offer(*packed(version))
            seen.append(swap.swap_if_ready())
        assert eventually(lambda: seen.append(swap.swap_if_ready()) is None and swap.version == 25)
    versions = [v for v in seen if v is not None]
    assert versions == sorted(set(versions)) and versions[-1] == 25


def test_a_damaged_or_foreign_version_is_refused_and_the_former_goes_on() -> None:
    with swapper() as swap:
        swap.offer(*packed(1))
        assert eventually(lambda: swap.swap_if_ready() == 1)
        manifest, payload = packed(2)
        swap.offer(msgspec.structs.replace(manifest, digest="00"), payload)
        assert eventually(lambda: swap.refused == 1)
        swap.offer(*encode_full({"other": np.zeros(3, np.float32)}, version=3, updates=0))
        assert eventually(lambda: swap.refused == 2)
        assert swap.swap_if_ready() is None and swap.version == 1
        swap.offer(*packed(4))
        assert eventually(lambda: swap.swap_if_ready() == 4)


def test_after_close_nothing_is_loaded() -> None:
    swap = swapper()
    swap.close()
    swap.close()
    swap.offer(*packed(1))
    assert swap.swap_if_ready() is None
