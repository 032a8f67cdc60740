"""Weights on a device, which a thread fetches while the learner trains; and which device it trains on."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from publisher_kit import DEADLINE_S, PublisherSite, digest, until, weights

from user_sys.algorithms.algorithm import policy_arrays
from user_sys.codec import Array
from user_sys.errors import ConfigError, RunError
from user_sys.learner.config import training_device, training_stream
from user_sys.learner.publisher_client import PublisherClient
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.weights.governor import GovernedBudget, GovernorConfig
from user_sys.weights.gpu_copy import HostCopier
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.state import TensorLayout, build_tensor_set, quantize

HOST = torch.device("cpu")  # stands for a GPU: the same code copies it
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def on_device(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


class PausedWeights:
    """Device weights whose fetch pauses until `go` is set."""

    def __init__(self, arrays: Mapping[str, Array], failure: str = "") -> None:
        self.begun, self.go, self.failure = threading.Event(), threading.Event(), failure
        self.allowed = (0, 0)
        self._copy = HostCopier(HOST).snapshot(on_device(arrays))

    @property
    def layout(self) -> TensorLayout:
        return self._copy.layout

    @property
    def frozen(self) -> frozenset[str]:
        return self._copy.frozen

    def wait(self) -> None:
        self._copy.wait()

    def fetch(self, into: Mapping[str, Array], budget: GovernedBudget) -> None:
        for array in into.values():
            array[...] = 13  # a partial copy
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        self.allowed = budget.ctas, budget.chunk_bytes
        if self.failure:
            raise RuntimeError(self.failure)
        self._copy.fetch(into, budget)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PublisherSite]:
    site = PublisherSite(tmp_path)
    with site.serving():
        yield site


@pytest.mark.parametrize("device", DEVICES)
def test_fetched_version_equals_the_weights_of_its_update(site: PublisherSite, device: str) -> None:
    copies, expected = HostCopier(torch.device(device)), {}
    policy = MlpPolicy.make_module(example_spec()).to(device).requires_grad_(False)
    with site.client() as learner:
        for version in (1, 2, 3):
            expected[version] = digest(policy_arrays(policy))
            learner.publish(copies.snapshot(policy.state_dict()), version, updates=version)
            for parameter in policy.parameters():
                parameter.add_(1.0)
            assert learner.wait_until_stored(DEADLINE_S) and not learner.is_busy and learner.version == version
    assert site.digests() == expected
    assert "weights-fetch" not in {thread.name for thread in threading.enumerate()}, "the thread ends with the client"


def test_learner_continues_during_a_fetch(site: PublisherSite) -> None:
    paused = PausedWeights(weights(1))
    with site.client() as learner:
        learner.publish(paused, 1, updates=1)
        assert paused.begun.wait(DEADLINE_S)
        for step in range(100):
            learner.observe(0.01)
            learner.report(step, {"loss": 0.5})
        assert learner.is_busy and learner.version == 1 and not learner.wait_until_stored(0.0)
        paused.go.set()
        assert learner.wait_until_stored(DEADLINE_S) and not learner.is_busy
        assert learner.scalars()["fetch_ms"] >= 0
        fetched = weakref.ref(paused)
        del paused
        until(lambda: fetched() is None, "the device memory is freed")
    assert site.digests() == {1: digest(weights(1))}


def test_publish_waits_for_an_earlier_fetch(site: PublisherSite) -> None:
    first = PausedWeights(weights(1))
    with site.client() as learner:
        learner.publish(first, 1, updates=1)
        assert first.begun.wait(DEADLINE_S)
        threading.Timer(0.05, first.go.set).start()
        learner.publish(HostCopier(HOST).snapshot(on_device(weights(2))), 2, updates=2)
        assert first.go.is_set() and learner.version == 2
        assert learner.wait_until_stored(DEADLINE_S)
    assert site.digests()[2] == digest(weights(2))


def test_failed_fetch_raises_at_the_next_call(site: PublisherSite) -> None:
    paused = PausedWeights(weights(1), failure="the device is gone")
    paused.go.set()
    with site.client() as learner:
        learner.publish(paused, 1, updates=1)
        with pytest.raises(RunError, match="version 1 could not be fetched from its device: the device is gone"):
            learner.wait_until_stored(DEADLINE_S)
        assert not learner.is_busy, "the next call raises the error"
        with pytest.raises(RunError, match="the device is gone"):
            learner.publish(PausedWeights(weights(2)), 2, updates=2)
    assert site.digests() == {}


@contextmanager
def limited_fetch(site: PublisherSite) -> Iterator[tuple[PublisherClient, PausedWeights]]:
    """A learner whose governor has limited a fetch that is in progress."""
    governor = GovernorConfig(update_interval_s=0.01, max_ctas=10)
    settings, paused = replace(site.settings(), publish=PublishConfig(governor=governor)), PausedWeights(weights(1))
    with PublisherClient(settings, site.stops.append) as learner:
        for _ in range(32):
            learner.observe(0.01)
        learner.publish(paused, 1, updates=1)
        assert paused.begun.wait(DEADLINE_S)

        def slowed_down() -> bool:
            learner.observe(0.1)
            return learner.scalars().get("governor/share", 1.0) <= 0.5

        until(slowed_down, "the share falls")
        yield learner, paused


def test_governor_limits_a_fetch_in_progress(site: PublisherSite) -> None:
    with limited_fetch(site) as (learner, paused):
        paused.go.set()
        assert learner.wait_until_stored(DEADLINE_S)
        ctas, chunk_bytes = paused.allowed
        assert 1 <= ctas <= 5 and chunk_bytes <= 16 << 20
        assert learner.scalars()["governor/ctas"] <= 5


def test_end_of_training_gives_a_fetch_in_progress_the_full_share(site: PublisherSite) -> None:
    with limited_fetch(site) as (learner, paused):
        learner.end_training()
        until(lambda: learner.scalars()["governor/share"] == 1.0, "the publisher process has no limits either")
        paused.go.set()
        assert learner.wait_until_stored(DEADLINE_S)
    assert paused.allowed == (10, 32 << 20)


def test_rounding_on_the_device_is_published(site: PublisherSite) -> None:
    settings = replace(site.settings(), publish=PublishConfig(precisions=("bf16",)))
    expected = quantize(weights(1), "bf16")
    with PublisherClient(settings, site.stops.append) as learner:
        learner.publish(HostCopier(HOST, "bf16").snapshot(on_device(weights(1))), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
    (manifest,) = site.manifests()
    assert manifest.precision == "bf16" and manifest.digest == build_tensor_set(expected).digest


def test_device_without_a_request_is_the_cpu() -> None:
    assert training_device("auto", reserved=False) == "cpu"
    assert training_device("cpu", reserved=True) == "cpu"


@pytest.mark.gpu
def test_device_on_request_is_the_gpu() -> None:
    assert training_device("auto", reserved=True) == training_device("cuda", reserved=False) == "cuda"


@pytest.mark.gpu
def test_training_goes_ahead_of_pushes() -> None:
    snapshot = HostCopier(torch.device("cuda")).snapshot({"w": torch.zeros(4, device="cuda")})
    usual, pushing = torch.cuda.current_stream(), list[torch.cuda.Stream]()

    def share() -> float:
        pushing.append(torch.cuda.current_stream())
        return 1.0

    with training_stream("cuda"):
        training = torch.cuda.current_stream()
        snapshot.wait()
        snapshot.fetch({"w": np.zeros(4, np.float32)}, GovernedBudget(GovernorConfig(), share))
        assert pushing and training not in (usual, pushing[0])
        assert training.priority < pushing[0].priority == 0  # CUDA has the more urgent below the less
    assert torch.cuda.current_stream() == usual


@WITHOUT_GPU
def test_unusable_gpu_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"learner\.device is cuda, and torch .* finds no GPU on \S+$"):
        training_device("cuda", reserved=True)
    with caplog.at_level(logging.WARNING):
        assert training_device("auto", reserved=True) == "cpu"
    assert "finds no GPU" in caplog.text
