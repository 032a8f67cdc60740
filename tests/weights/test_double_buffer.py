"""New weights reach a running policy between two steps: newest wins, and what does not fit changes nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from user_sys.algorithms.algorithm import policy_arrays
from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import FOREIGN_RUN, NO_VERSION
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.policies.policy import Policy
from user_sys.weights.receiver import DoubleBufferedPolicy

SPEC = example_spec()
SMALL = MlpSettings((16,))


def weights(seed: int) -> dict[str, Array]:
    torch.manual_seed(seed)
    return policy_arrays(MlpPolicy.make_module(SPEC, settings=SMALL))


def acts(policy: Policy) -> Array:
    return policy.act(example_observation(np.random.default_rng(0)), "", deterministic=True).actions


def expected(seed: int) -> Array:
    policy = MlpPolicy(SPEC)
    policy.load(weights(seed))
    return acts(policy)


def test_version_acts_only_after_the_swap() -> None:
    swap = DoubleBufferedPolicy(lambda: MlpPolicy(SPEC))
    before = acts(swap.policy)
    assert swap.version == NO_VERSION and swap.swap_if_ready() is None
    swap.load(4, weights(4))
    np.testing.assert_array_equal(acts(swap.policy), before)
    assert swap.swap_if_ready() == 4 and swap.version == 4 and swap.swap_delay_s > 0
    np.testing.assert_array_equal(acts(swap.policy), expected(4))
    assert swap.swap_if_ready() is None


def test_newest_waiting_version_wins() -> None:
    swap = DoubleBufferedPolicy(lambda: MlpPolicy(SPEC))
    for version in (1, 2, 3):
        swap.load(version, weights(version))
    assert swap.swap_if_ready() == 3 and swap.swap_if_ready() is None
    np.testing.assert_array_equal(acts(swap.policy), expected(3))


def test_weights_of_another_policy_change_nothing() -> None:
    swap = DoubleBufferedPolicy(lambda: MlpPolicy(SPEC))
    for waiting in (False, True):
        swap.load(1, weights(1))
        if not waiting:
            swap.swap_if_ready()
        with pytest.raises(WireError):
            swap.load(2, {"other": np.zeros(3, np.float32)})
        assert swap.swap_if_ready() == (1 if waiting else None)
        np.testing.assert_array_equal(acts(swap.policy), expected(1))


def test_version_of_another_or_unknown_run_is_foreign() -> None:
    swap = DoubleBufferedPolicy(lambda: MlpPolicy(SPEC))
    swap.load(300, weights(1), run=b"first")
    assert swap.version == NO_VERSION and swap.swap_if_ready() == 300
    assert swap.version == FOREIGN_RUN, "nobody has said yet which run this is"
    for run, version in ((b"first", 300), (b"second", FOREIGN_RUN)):
        swap.run = run
        assert swap.version == version
    swap.load(1, weights(2), run=b"second")
    swap.swap_if_ready()
    assert swap.version == 1


def test_forward_pass_never_mixes_versions() -> None:
    known = {version: weights(version) for version in range(1, 4)}
    actions = {version: expected(version) for version in known}
    swap = DoubleBufferedPolicy(lambda: MlpPolicy(SPEC))
    swap.load(1, known[1])
    swap.swap_if_ready()
    stop = threading.Event()

    def load() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            swap.load(1 + count % 3, known[1 + count % 3])

    loader = threading.Thread(target=load)
    loader.start()
    try:
        for _ in range(3000):
            swap.swap_if_ready()
            np.testing.assert_array_equal(acts(swap.policy), actions[swap.version])
    finally:
        stop.set()
        loader.join(120)
