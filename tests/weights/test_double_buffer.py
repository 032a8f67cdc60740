"""New weights reach a running policy between two steps: newest wins, and what does not fit changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
import torch

from user_sys.algorithms.algorithm import policy_arrays
from user_sys.codec import Array
from user_sys.errors import WireError
from user_sys.messages import FOREIGN_RUN, NO_VERSION
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.mlp import MlpPolicy, MlpSettings
from user_sys.policies.policy import Policy
from user_sys.weights.receiver import DoubleBufferedPolicy, WeightsNotLoaded

SPEC = example_spec()
SMALL = MlpSettings((16,))
FLOW = FlowSettings(hidden=(16,))


def weights(seed: int) -> dict[str, Array]:
    torch.manual_seed(seed)
    return policy_arrays(MlpPolicy.make_module(SPEC, settings=SMALL))


def flow_weights(seed: int) -> dict[str, Array]:
    torch.manual_seed(seed)
    return policy_arrays(FlowPolicy.make_module(SPEC, settings=FLOW))


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


@contextmanager
def memory_for(tensors: int) -> Iterator[None]:
    """Meanwhile torch has memory for so many tensors of weights."""
    made, from_numpy = count(), torch.from_numpy

    def narrow(array: Array) -> torch.Tensor:
        if next(made) == tensors:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return from_numpy(array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", narrow)
        yield


@pytest.mark.parametrize("waiting", [False, True])
def test_without_memory_for_a_version_the_acting_one_stays(waiting: bool) -> None:
    known = {version: flow_weights(version) for version in (1, 2, 3)}
    swap = DoubleBufferedPolicy(FlowPolicy(SPEC, settings=FLOW).copy)
    swap.load(1, known[1])
    swap.swap_if_ready()
    before = acts(swap.policy)
    if waiting:
        swap.load(2, known[2])
    refused = pytest.raises(WeightsNotLoaded, match="cannot be loaded: OutOfMemoryError: CUDA out of memory")
    with memory_for(2), refused:
        swap.load(3, known[3])
    assert swap.swap_if_ready() is None, "a copy with tensors of two versions does not act"
    np.testing.assert_array_equal(acts(swap.policy), before)
    swap.load(3, known[3])
    assert swap.swap_if_ready() == 3 and not np.array_equal(acts(swap.policy), before)


def test_without_memory_for_the_first_version_the_policy_fails() -> None:
    """A policy server then opens it again."""
    with memory_for(2), pytest.raises(torch.OutOfMemoryError):
        DoubleBufferedPolicy(FlowPolicy(SPEC, settings=FLOW).copy).load(1, flow_weights(1))


@pytest.mark.gpu
def test_load_needs_no_third_copy_on_the_gpu() -> None:
    settings = FlowSettings(hidden=(2048, 2048, 2048))
    module = FlowPolicy.make_module(SPEC, settings=settings)
    swap = DoubleBufferedPolicy(FlowPolicy(SPEC, settings=settings, device="cuda").copy)
    arrays = policy_arrays(module)
    largest, total = max(each.nbytes for each in arrays.values()), sum(each.nbytes for each in arrays.values())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for version in range(1, 5):
        fresh = {name: each.copy() for name, each in arrays.items()}
        for each in fresh.values():
            each.flags.writeable = False
        swap.load(version, fresh)
        swap.swap_if_ready()
    assert torch.cuda.max_memory_allocated() - before < 2 * total + 2 * largest + (1 << 20)


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
