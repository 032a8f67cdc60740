"""The publisher process: published weights arrive bit for bit, and neither process slows the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from publisher_kit import DEADLINE_S, PublisherSite, digest, signal_publisher, until, weights

from user_sys.codec import Array
from user_sys.errors import RunError, WireError
from user_sys.learner.publisher_client import PublisherClient
from user_sys.messages import PinnedVersion, StopRun, WeightsApplied
from user_sys.tunnel.keys import new_keypair, save_keypair
from user_sys.weights.governor import MIN_SAMPLES
from user_sys.weights.signing import ensure_signer
from user_sys.weights.state import NotFinite
from user_sys.weights.version_store import VersionStore


def frozen() -> Array:
    array = np.arange(1000.0)
    array.flags.writeable = False
    return array


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PublisherSite]:
    site = PublisherSite(tmp_path)
    with site.serving():
        yield site


def test_published_version_is_stored_bit_for_bit(site: PublisherSite) -> None:
    kept = frozen()
    with site.client() as learner:
        for version in (1, 2, 3):
            arrays = weights(version, kept=kept)
            learner.observe(0.01)
            learner.publish(arrays, version, updates=version)
            arrays["w"][:] = np.nan  # the arrays belong to the caller again
            assert learner.wait_until_stored(DEADLINE_S) and not learner.is_busy and learner.version == version
        learner.report(3, {"loss": 0.5})
        assert learner.published == learner.scalars()["versions_published"] == 3 and learner.versions_ahead == 0
        assert site.digests()[3] == digest(weights(3, kept=kept))
        site.gateway.server.send("learner", StopRun(reason="enough"))
        until(lambda: site.stops == ["enough"], "the learner gets the end of the run")


def test_frozen_tensors_do_not_count_once_the_gateway_has_a_version(site: PublisherSite) -> None:
    kept, trained = frozen(), np.zeros(10, np.float32)
    with site.client() as learner:
        assert learner.size_bytes == 0
        learner.publish({"base": kept, "adapter": trained}, 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        assert trained.nbytes <= learner.size_bytes < kept.nbytes


def test_governor_separates_steps_with_a_push_from_others(site: PublisherSite) -> None:
    with site.client() as learner:
        for _ in range(2 * MIN_SAMPLES):
            learner.observe(0.01)
        version = 0
        while "governor/idle_ms" not in (found := learner.scalars()):
            version += 1
            learner.publish(weights(version), version, updates=version)
            until(lambda: not learner.is_busy, "the version is ready")
            for _ in range(MIN_SAMPLES):
                learner.observe(0.015)
            time.sleep(0.03)  # shorter steps would reach the baseline interval
        assert found["governor/idle_ms"] == pytest.approx(10.0) and found["governor/pushing_ms"] == pytest.approx(15.0)


def test_killed_process_ends_the_training(site: PublisherSite) -> None:
    with site.client() as learner:
        learner.publish(weights(1), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        signal_publisher(learner, signal.SIGKILL)
        with pytest.raises(RunError, match="the publisher process ended by signal 9"):
            learner.publish(weights(2), 2, updates=2)
            learner.wait_until_stored(DEADLINE_S)
        assert site.stops == ["the publisher process ended by signal 9; see its log"]
        with pytest.raises(RunError, match="ended by signal 9"):
            learner.end_training()


def test_learner_does_not_wait_for_a_stopped_process(site: PublisherSite) -> None:
    with site.client() as learner:
        learner.publish(weights(1), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        signal_publisher(learner, signal.SIGSTOP)
        learner.publish(weights(3), 3, updates=3)
        for step in range(2000):  # more than a socket holds
            learner.observe(0.01)
            learner.report(step, {"loss": 0.0})
        assert learner.is_busy
        signal_publisher(learner, signal.SIGCONT)
        assert learner.wait_until_stored(DEADLINE_S)
        assert site.digests()[3] == digest(weights(3))


def test_weights_with_infinity_raise_and_are_not_published(site: PublisherSite) -> None:
    with site.client() as learner:
        learner.publish(weights(1), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        infinite = weights(2)
        infinite["w"][3, 3] = np.inf
        learner.publish(infinite, 2, updates=2)
        with pytest.raises(NotFinite, match="'w'"):
            learner.wait_until_stored(DEADLINE_S)
        assert not learner.is_busy, "the next call raises the error"
        assert learner.versions_ahead == 0, "it does not wait for robots either"
        with pytest.raises(NotFinite):
            learner.publish(weights(3), 3, updates=3)
        assert set(site.digests()) == {1}


def test_learner_knows_the_pin_and_the_version_of_the_slowest_robot(site: PublisherSite) -> None:
    settings = replace(site.settings(), waits_for_robots=True)
    store, desk = VersionStore(site.run / "weights"), site.gateway.weights.distributor("learner")
    with PublisherClient(settings, site.stops.append) as learner:
        for version in (1, 2):
            learner.publish(weights(version), version, updates=version)
            assert learner.wait_until_stored(DEADLINE_S)
        signer = ensure_signer(site.keys, "learner")
        store.set_pin(signer.sign(PinnedVersion(serial=1, version=1, by="ada", reason="it shakes", given_unix_ns=0)))
        until(lambda: learner.pinned_version == 1, "the learner gets the pin")
        desk.on_message("panda-0", WeightsApplied(robot="panda-0", version=1, seconds=0.1), None)
        until(lambda: learner.versions_ahead == 1, "and the version of the robot")
        for version in (3, 4):
            learner.publish(weights(version), version, updates=version)
            assert learner.wait_until_stored(DEADLINE_S)
        until(lambda: learner.versions_ahead == 3, "both versions")
        assert learner.scalars()["versions_ahead"] == 3
        store.set_pin(signer.sign(PinnedVersion(serial=2, version=-1, by="ada", reason="", given_unix_ns=0)))
        until(lambda: learner.pinned_version == -1, "the pin is removed")


def test_changed_layout_is_refused(site: PublisherSite) -> None:
    with site.client() as learner:
        learner.publish(weights(1), 1, updates=1)
        with pytest.raises(WireError, match="differ from those of the version before"):
            learner.publish(weights(2, more=np.zeros(3)), 2, updates=2)


def test_process_without_access_to_the_gateway_raises(site: PublisherSite, capfd: pytest.CaptureFixture[str]) -> None:
    save_keypair(new_keypair(), site.keys, "stranger")
    with PublisherClient(site.settings("stranger.key"), site.stops.append) as learner:
        learner.publish(weights(1), 1, updates=1)
        with pytest.raises(RunError, match="ended with exit status 2"):
            learner.wait_until_stored(DEADLINE_S)
    assert "the gateway refuses this learner" in capfd.readouterr().err


LEARNER = """
import sys
import msgspec, numpy as np
from user_sys.learner.publisher_client import PublisherClient
from user_sys.learner.publisher_protocol import PublisherSettings
with PublisherClient(msgspec.json.decode(sys.argv[1], type=PublisherSettings), print) as client:
    client.publish({"w": np.zeros(3)}, 1, updates=1)
    assert client.wait_until_stored(120)
    print("published", flush=True)
    sys.stdin.read()
"""


def test_process_ends_with_a_killed_learner(site: PublisherSite) -> None:
    from msgspec.json import encode

    argv = [sys.executable, "-c", LEARNER, encode(site.settings()).decode()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environment) as learner:
        assert learner.stdout is not None
        assert any(b"published" in line for line in learner.stdout)
        learner.kill()
        learner.communicate(
            timeout=DEADLINE_S
        )  # the publisher process shares the output, which closes when both have ended


def test_publisher_process_imports_no_torch() -> None:
    code = "import sys; import user_sys.learner.publisher_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
