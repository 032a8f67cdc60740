"""Weights on a device: a thread fetches them while the learner trains, within the governor's share."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from publisher_kit import DEADLINE_S, PublisherSite, digest, signal_publisher, until, weights

from user_sys.algorithms.conformance import example_batch
from user_sys.algorithms.rlpd import Rlpd
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.codec import Array
from user_sys.errors import RunError
from user_sys.learner.publisher_client import PublisherClient
from user_sys.policies.conformance import example_spec
from user_sys.weights.governor import GovernorConfig
from user_sys.weights.gpu_copy import HostCopier
from user_sys.weights.precision import RoundingStats, quantize
from user_sys.weights.publisher import PublishConfig
from user_sys.weights.snapshot import CopyBudget, TensorLayout
from user_sys.weights.state import build_tensor_set

HOST = torch.device("cpu")  # stands for a GPU: the same code copies it
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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

    def wait(self) -> None:
        self._copy.wait()

    def fetch(self, into: Mapping[str, Array], budget: CopyBudget) -> RoundingStats:
        for array in into.values():
            array[...] = 13  # a partial copy
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        self.allowed = budget.ctas, budget.chunk_bytes
        if self.failure:
            raise RuntimeError(self.failure)
        return self._copy.fetch(into, budget)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PublisherSite]:
    site = PublisherSite(tmp_path)
    with site.serving():
        yield site


@pytest.mark.parametrize("device", DEVICES)
def test_fetched_version_equals_the_weights_of_its_update(site: PublisherSite, device: str) -> None:
    small = RlpdConfig(actor_hidden=(32,), critic_hidden=(16,), critics=2)
    copies, rng, expected = HostCopier(torch.device(device)), np.random.default_rng(0), {}
    algorithm = Rlpd(small, example_spec(), seed=0, device=device, copier=copies)
    with site.client() as learner:
        for version in (1, 2, 3):
            algorithm.update(example_batch(rng))
            expected[version] = digest(algorithm.policy_weights())
            learner.publish(algorithm.policy_snapshot(), version, updates=version)
            algorithm.update(example_batch(rng))
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


def test_restart_during_a_fetch_publishes_the_previous_version_again(site: PublisherSite) -> None:
    with site.client() as learner:
        learner.publish(HostCopier(HOST).snapshot(on_device(weights(1))), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        paused = PausedWeights(weights(2))
        learner.publish(paused, 2, updates=2)
        assert paused.begun.wait(DEADLINE_S)
        signal_publisher(learner, signal.SIGKILL)
        until(
            lambda: learner.scalars()["publisher_restarts"] == 1 and learner.published == 2,
            "the new process publishes it again",
        )
        paused.go.set()
        assert learner.wait_until_stored(DEADLINE_S)
    assert site.digests() == {version: digest(weights(version)) for version in (1, 2)}


def test_governor_limits_a_fetch_in_progress(site: PublisherSite) -> None:
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
        paused.go.set()
        assert learner.wait_until_stored(DEADLINE_S)
        ctas, chunk_bytes = paused.allowed
        assert 1 <= ctas <= 5 and chunk_bytes <= 16 << 20
        assert learner.scalars()["governor/ctas"] <= 5


def test_rounding_on_the_device_is_published_with_its_error(site: PublisherSite) -> None:
    settings = replace(site.settings(), publish=PublishConfig(precisions=("bf16",)))
    expected, errors = quantize(weights(1), "bf16")
    with PublisherClient(settings, site.stops.append) as learner:
        learner.publish(HostCopier(HOST, "bf16").snapshot(on_device(weights(1))), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
    (manifest,) = site.manifests()
    assert manifest.form == "bf16" and manifest.digest == build_tensor_set(expected, "bf16").digest
    assert errors[0] > 0 and (manifest.max_error, manifest.rms_error) == pytest.approx(errors)
