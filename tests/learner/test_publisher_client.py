"""The envoy: what is published arrives bit for bit, and neither of the two processes drags the other along."""

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
from publisher_kit import DEADLINE_S, PublisherSite, digest, kill, until, weights

from user_sys.codec import Array
from user_sys.errors import RunError, WireError
from user_sys.learner import publisher_client
from user_sys.learner.publisher_client import PublisherClient
from user_sys.messages import PinnedVersion, StopRun, WeightsApplied
from user_sys.tunnel.keys import new_keypair, save_keypair
from user_sys.weights.governor import MIN_SAMPLES
from user_sys.weights.publisher import PublishConfig
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


def test_what_is_published_is_on_the_gateways_disk_bit_for_bit_and_the_run_can_be_stopped(site: PublisherSite) -> None:
    kept = frozen()
    with site.envoy() as learner:
        for version in (1, 2, 3):
            arrays = weights(version, kept=kept)
            learner.observe(0.01)
            learner.publish(arrays, version, updates=version)
            arrays["w"][:] = np.nan  # they are the caller's again
            assert learner.wait_until_stored(DEADLINE_S) and not learner.is_busy and learner.version == version
        learner.report(3, {"loss": 0.5})
        assert learner.published == learner.scalars()["versions_published"] == 3 and learner.versions_ahead == 0
        assert site.digests()[3] == digest(weights(3, kept=kept))
        site.gateway.server.send("learner", StopRun(reason="enough"))
        until(lambda: site.stops == ["enough"], "the learner hears of it")


def test_the_governor_hears_of_steps_together_and_which_of_them_were_beside_a_push(site: PublisherSite) -> None:
    with site.envoy() as learner:
        for _ in range(2 * MIN_SAMPLES):
            learner.observe(0.01)
        version = 0
        while "governor/idle_ms" not in (found := learner.scalars()):
            version += 1
            learner.publish(weights(version), version, updates=version)
            until(lambda: not learner.is_busy, "it is ready")
            for _ in range(MIN_SAMPLES):
                learner.observe(0.015)
            time.sleep(0.03)  # or it would be time for a look at steps without pushes
        assert found["governor/idle_ms"] == pytest.approx(10.0) and found["governor/pushing_ms"] == pytest.approx(15.0)


def test_an_envoy_that_was_killed_is_replaced_and_publishes_the_newest_version_again(site: PublisherSite) -> None:
    kept = frozen()
    with site.envoy() as learner:
        learner.publish(weights(1, kept=kept), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        learner.publish(weights(2, kept=kept), 2, updates=2)
        kill(learner, signal.SIGKILL)
        assert learner.wait_until_stored(DEADLINE_S), "the new one publishes it, whether or not the old one did"
        until(lambda: learner.scalars()["envoy_restarts"] == 1, "it was replaced")
        learner.publish(weights(3, kept=kept), 3, updates=3)
        assert learner.wait_until_stored(DEADLINE_S)
        expected = {version: digest(weights(version, kept=kept)) for version in (1, 2, 3)}
        assert site.digests().items() <= expected.items() and 3 in site.digests()


def test_a_learner_does_not_wait_for_an_envoy_that_stands_still(site: PublisherSite) -> None:
    with site.envoy() as learner:
        learner.publish(weights(1), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        kill(learner, signal.SIGSTOP)
        learner.publish(weights(2), 2, updates=2)
        learner.publish(weights(3), 3, updates=3)
        for step in range(2000):  # more than a socket holds
            learner.observe(0.01)
            learner.report(step, {"loss": 0.0})
        assert learner.is_busy
        kill(learner, signal.SIGCONT)
        assert learner.wait_until_stored(DEADLINE_S)
        assert site.digests()[3] == digest(weights(3))


def test_weights_that_are_not_finite_end_the_learner_and_never_leave_it(site: PublisherSite) -> None:
    with site.envoy() as learner:
        learner.publish(weights(1), 1, updates=1)
        assert learner.wait_until_stored(DEADLINE_S)
        spoiled = weights(2)
        spoiled["w"][3, 3] = np.inf
        learner.publish(spoiled, 2, updates=2)
        with pytest.raises(NotFinite, match="'w'"):
            learner.wait_until_stored(DEADLINE_S)
        assert not learner.is_busy, "the learner is to ask again, and hear of it"
        learner._status = replace(learner._status, oldest_in_use=0)  # a robot is behind
        assert learner.versions_ahead == 0, "nor is it to wait for robots until then"
        with pytest.raises(NotFinite):
            learner.publish(weights(3), 3, updates=3)
        assert set(site.digests()) == {1}


def test_a_learner_that_waits_for_robots_under_a_persons_order_says_so_once(
    site: PublisherSite, caplog: pytest.LogCaptureFixture
) -> None:
    setup = replace(site.setup(), publish=PublishConfig(max_versions_ahead=1))
    shelf, desk = VersionStore(site.run / "weights"), site.gateway.weights.distributor("learner")
    with PublisherClient(setup, site.stops.append) as learner:
        for version in (1, 2):
            learner.publish(weights(version), version, updates=version)
            assert learner.wait_until_stored(DEADLINE_S)
        signer = ensure_signer(site.keys, "learner")
        shelf.set_pin(signer.sign(PinnedVersion(serial=1, version=1, by="ada", reason="it shakes", given_unix_ns=0)))
        until(lambda: learner._status.pinned_version == 1, "the learner hears of the order")
        desk.on_message("panda-0", WeightsApplied(robot="panda-0", version=1, seconds=0.1), None)
        until(lambda: learner.versions_ahead == 1, "and with what the robot acts")
        assert learner.scalars()["held_by_order"] == 0 and "learner.waits" not in caplog.text
        for version in (3, 4):
            learner.publish(weights(version), version, updates=version)
            assert learner.wait_until_stored(DEADLINE_S)
        until(lambda: "learner.waits version=3 ordered=1" in caplog.text, "it says why it waits")
        assert learner.scalars()["held_by_order"] == 1 and learner.scalars()["versions_ahead"] == 3
        shelf.set_pin(signer.sign(PinnedVersion(serial=2, version=-1, by="ada", reason="", given_unix_ns=0)))
        until(lambda: learner._status.pinned_version == -1, "the order is taken back")
        assert learner.scalars()["held_by_order"] == 0 and caplog.text.count("learner.waits") == 1


def test_another_layout_is_refused(site: PublisherSite) -> None:
    with site.envoy() as learner:
        learner.publish(weights(1), 1, updates=1)
        with pytest.raises(WireError, match="not those of the version before"):
            learner.publish(weights(2, more=np.zeros(3)), 2, updates=2)


def test_an_envoy_that_ends_again_and_again_ends_the_learner(
    site: PublisherSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_client, "MAX_CRASHES", 2)
    with PublisherClient(site.setup("nobody.key"), site.stops.append) as learner:
        learner.publish(weights(1), 1, updates=1)
        with pytest.raises(RunError, match="ended 2 times"):
            learner.wait_until_stored(DEADLINE_S)


def test_an_envoy_that_the_gateway_does_not_let_in_ends_the_learner(
    site: PublisherSite, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publisher_client, "MAX_CRASHES", 2)
    save_keypair(new_keypair(), site.keys, "stranger")
    with PublisherClient(site.setup("stranger.key"), site.stops.append) as learner:
        learner.publish(weights(1), 1, updates=1)
        with pytest.raises(RunError, match="ended 2 times"):
            learner.wait_until_stored(DEADLINE_S)
    assert "nothing can be published" in capfd.readouterr().err


LEARNER = """
import sys
import msgspec, numpy as np
from user_sys.learner.publisher_client import Envoy
from user_sys.learner.publisher_protocol import Setup
with Envoy(msgspec.json.decode(sys.argv[1], type=Setup), print) as envoy:
    envoy.publish({"w": np.zeros(3)}, 1, updates=1)
    assert envoy.settle(120)
    print("published", flush=True)
    sys.stdin.read()
"""


def test_the_envoy_of_a_learner_that_was_killed_ends(site: PublisherSite) -> None:
    from msgspec.json import encode

    argv = [sys.executable, "-c", LEARNER, encode(site.setup()).decode()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environment) as learner:
        assert learner.stdout is not None
        assert any(b"published" in line for line in learner.stdout)
        learner.kill()
        learner.communicate(timeout=DEADLINE_S)  # its envoy has the same output: that ends when both have


def test_it_needs_no_torch() -> None:
    code = "import sys; import user_sys.learner.publisher_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
