"""Weights through a real gateway: to every robot, over restarts, at each robot's own rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from user_sys.codec import Array
from user_sys.commands.main import main
from user_sys.errors import RunError
from user_sys.gateway import Gateway, GatewayConfig
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.messages import (
    FOREIGN_RUN,
    NO_EPOCH,
    PROTOCOL_VERSION,
    Hello,
    PublisherEpoch,
    WeightsApplied,
    WeightsMessage,
)
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import Keyring, Role, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import Payload
from user_sys.weights.double_buffer import DoubleBufferedPolicy
from user_sys.weights.governor import Governor
from user_sys.weights.patches import VersionIndex, thin_versions
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.receiver import ReceiverConfig, WeightsReceiver
from user_sys.weights.signing import ensure_signer
from user_sys.weights.version_store import VersionStore, newest_version

# Long timeouts: a busy machine must not end a session.
QUICK = TunnelLimits(heartbeat_s=0.1, dead_after_s=60.0, handshake_s=60.0, backoff_min_s=0.01, backoff_max_s=0.1)
CONFIG = GatewayConfig(tunnel=QUICK, report_s=0.05)


class Numbered(Policy):
    """Records its last weights."""

    precisions = ("exact", "bf16", "int8")

    def __init__(self) -> None:
        self.weights: dict[str, Array] = {}

    def act(self, observation: object, sentence: str, *, deterministic: bool) -> ActionChunk:
        return ActionChunk(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))

    def load(self, weights: object) -> None:
        self.weights = dict(weights)  # type: ignore[call-overload]


def weights(number: int, size: int = 200) -> dict[str, Array]:
    return {"w": np.random.default_rng(number).normal(size=size).astype(np.float32), "n": np.array(number)}


def until(condition: Callable[[], object], what: str, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)


class WeightsRobot:
    """The robot's side, which swaps weights on request."""

    def __init__(
        self, site: WeightsSite, name: str, limits: TunnelLimits = QUICK, config: ReceiverConfig | None = None
    ) -> None:
        self.name = name
        config = config or ReceiverConfig()
        self.swapper = DoubleBufferedPolicy(Numbered)
        self.client = site.client(name, "robot", limits)
        keys, state = site.run / "keys", site.run / "edge" / name
        governor = Governor(config.governor)
        self.inlet = WeightsReceiver(self.client, self.swapper, config, keys, state, governor, self.say_version)

    def __enter__(self) -> WeightsRobot:
        self.inlet.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.inlet.close()
        self.inlet.raise_failure()

    def acts_with(self, version: int) -> bool:
        if self.swapper.swap_if_ready() is not None:
            self.say_version()
        return self.swapper.version == version

    def say_version(self) -> None:
        if (version := self.swapper.version) >= 0:
            self.client.send(WeightsApplied(robot=self.name, version=version, seconds=self.swapper.swap_delay_s))


def publish(publisher: Publisher, arrays: dict[str, Array], version: int, *robots: WeightsRobot) -> None:
    """Publishes, and waits until each of `robots` uses the version."""
    publisher.publish(arrays, version, updates=version)
    until(lambda: all(robot.acts_with(version) for robot in robots), f"version {version} acts")


class WeightsSite:
    """A gateway in a thread, a learner and robots; restarting the gateway keeps the rest."""

    def __init__(self, run: Path, stack: ExitStack) -> None:
        self.run, self._stack = run, stack
        self.gateway: Gateway
        self.address: GatewayAddress

    @contextmanager
    def serving(self) -> Iterator[None]:
        stop, self.gateway = threading.Event(), Gateway(CONFIG, self.run)
        thread = threading.Thread(target=self.gateway.run, args=(stop,))
        thread.start()
        try:
            until(lambda: self.gateway.server.endpoint[-2:] != ":0" and read_gateway_address(self.run), "it listens")
            self.address = read_gateway_address(self.run)  # type: ignore[assignment]
            yield
        finally:
            stop.set()
            thread.join(120)
            assert not thread.is_alive()

    def client(self, name: str, role: Role, limits: TunnelLimits = QUICK) -> TunnelClient:
        path = self.run / "keys" / f"{name}.key"
        if not path.exists():
            keys = new_keypair()
            save_keypair(keys, self.run / "keys", name)
            Keyring(self.run / "keys").allow(keys.public, name, role)
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=name)
        client = TunnelClient(self.address.endpoint, load_keypair(path), self.address.public_key, hello, limits=limits)
        self._stack.enter_context(client)
        client.wait_open(120)
        return client

    def publisher(self, config: PublishConfig | None = None, life: PublisherEpoch = NO_EPOCH) -> Publisher:
        signer = ensure_signer(self.run / "keys", "learner")
        return self._stack.enter_context(
            Publisher(self.client("learner", "learner"), signer, config or PublishConfig(), epoch=life)
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[WeightsSite]:
    with ExitStack() as stack:
        yield WeightsSite(tmp_path, stack)


def test_newest_version_reaches_present_and_later_robots(site: WeightsSite) -> None:
    with site.serving():
        publisher = site.publisher()
        with WeightsRobot(site, "one") as one, WeightsRobot(site, "two") as two:
            for version in range(1, 31):
                publisher.publish(weights(version), version, updates=version)
            until(lambda: one.acts_with(30) and two.acts_with(30), "the newest acts")
            assert publisher.wait_until_stored(120) and publisher.progress.published < 31
            np.testing.assert_array_equal(one.swapper.policy.weights["w"], weights(30)["w"])  # type: ignore[attr-defined]
        site._stack.pop_all().close()
    with ExitStack() as site._stack, site.serving(), WeightsRobot(site, "late") as late:
        until(lambda: late.acts_with(30), "a robot that comes later gets it without the learner")
    kept = newest_version(VersionStore(site.run / "weights").load())
    assert kept is not None and kept[0].version == 30


def test_late_joiner_applies_a_chain_of_deltas(site: WeightsSite) -> None:
    with site.serving():
        publisher, state = site.publisher(), weights(0, size=100_000)
        with WeightsRobot(site, "one") as one:
            for version in range(1, 12):
                state = {"w": state["w"].copy(), "n": np.array(version)}
                state["w"][version * 7 :: 1000] += 1
                expected = state["w"].copy()
                publish(publisher, dict(state), version, one)
            codecs = [info.codec for info in site.gateway.weights.distributor("learner").index.patch_infos()]
            assert codecs.count("full") == 1 and codecs.count("delta") == 10
            with WeightsRobot(site, "late") as late:
                until(lambda: late.acts_with(11), "the latecomer has it")
                np.testing.assert_array_equal(late.swapper.policy.weights["w"], expected)  # type: ignore[attr-defined]


def test_pin_and_unpin_change_the_robots_version(site: WeightsSite, capsys: pytest.CaptureFixture[str]) -> None:
    with site.serving():
        publisher = site.publisher()
        with WeightsRobot(site, "one") as robot:
            for version in (1, 2, 3):
                publish(publisher, weights(version), version, robot)
                assert publisher.wait_until_stored(120)
            assert main(["weights", "rollback", "2", str(site.run), "--by", "ada", "--reason", "it shakes"]) == 0
            until(lambda: robot.acts_with(2), "the robot goes back")
            publisher.publish(weights(4), 4, updates=4)
            assert publisher.wait_until_stored(120)
            with WeightsRobot(site, "late") as late:
                until(lambda: late.acts_with(2), "the order holds for those who come later")
            assert robot.acts_with(2)
            assert main(["weights", "list", str(site.run)]) == 0
            assert "pinned by ada: it shakes" in capsys.readouterr().out
            assert main(["weights", "release", str(site.run)]) == 0
            until(lambda: robot.acts_with(4), "and then the newest again")
            assert main(["weights", "rollback", "99", str(site.run)]) == 2
            assert "version 99 is not stored" in capsys.readouterr().err
            assert main(["weights", "list", str(site.run), "--learner", "learner-x"]) == 2
            assert "--learner learner-x: the learners of" in capsys.readouterr().err


def test_robot_without_a_gateway_uses_its_stored_weights(site: WeightsSite) -> None:
    with site.serving():
        publisher = site.publisher()
        with WeightsRobot(site, "one") as robot:
            publisher.publish(weights(1), 1, updates=1)
            until(lambda: robot.acts_with(1), "it acts")
        robot = WeightsRobot(site, "one")
    with robot:
        assert robot.acts_with(1)


def test_governor_limits_the_write_of_a_version_on_the_robot(
    site: WeightsSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The governor attributes the cost for inference to the push."""
    times = list[tuple[int, int]]()
    with site.serving():
        publisher = site.publisher()
        with WeightsRobot(site, "one") as robot:
            governor, version_store = robot.inlet._governor, robot.inlet._store
            assert version_store is not None

            def keep(catalogue: VersionIndex) -> None:
                before = [len(kind) for kind in governor._times]
                governor.observe(0.0)
                times.append(tuple(len(kind) - n for kind, n in zip(governor._times, before, strict=True)))  # type: ignore[arg-type]

            publish(publisher, weights(1), 1, robot)
            monkeypatch.setattr(version_store, "save", keep)
            monkeypatch.setattr("user_sys.weights.governor.PUSH_AFTERMATH_S", 0.0)
            governor._aftermath_end_s = 0.0
    assert times == [(0, 1)]


def test_robot_in_another_run_uses_its_weights(tmp_path: Path) -> None:
    """An edge outlives runs with shared keys: its stored version has a greater number."""
    for shared in ("keys", "edge"):
        (tmp_path / "last" / shared).mkdir(parents=True)
        (tmp_path / "next").mkdir(exist_ok=True)
        (tmp_path / "next" / shared).symlink_to(tmp_path / "last" / shared)
    for number, (run, version) in enumerate((("last", 5), ("next", 1))):
        site = WeightsSite(tmp_path / run, ExitStack())
        with site.serving(), site._stack, WeightsRobot(site, "one") as robot:
            kept = robot.acts_with(FOREIGN_RUN)
            assert run == "last" or kept, "it starts with what it kept, whose number says nothing here"
            publisher = site.publisher(life=PublisherEpoch(run.encode(), number))
            publish(publisher, weights(version), version, robot)
            np.testing.assert_array_equal(robot.swapper.policy.weights["w"], weights(version)["w"])  # type: ignore[attr-defined]


def test_restarted_gateway_gets_the_robots_versions(site: WeightsSite) -> None:
    with site.serving():
        publisher = site.publisher()
        robot = site._stack.enter_context(WeightsRobot(site, "one"))
        publish(publisher, weights(1), 1, robot)
        assert publisher.wait_until_stored(120)
    with site.serving():
        until(lambda: site.gateway.weights.scalars().get("staleness_s/one") == 0, "the robot says it again")


def test_learner_may_publish_only_a_rounded_precision(site: WeightsSite) -> None:
    with site.serving():
        publisher = site.publisher(PublishConfig(precisions=("bf16",)))
        with WeightsRobot(site, "one") as robot:
            publish(publisher, weights(1), 1, robot)
            found = robot.swapper.policy.weights["w"]  # type: ignore[attr-defined]
            np.testing.assert_allclose(found, weights(1)["w"], rtol=2**-8)
            assert found.dtype == np.float32 and not np.array_equal(found, weights(1)["w"])
        assert publisher.wait_until_stored(120)
    kept = newest_version(VersionStore(site.run / "weights").load())
    assert kept is not None and (kept[0].form, kept[0].rms_error > 0) == ("bf16", True)


def test_many_tensors_in_three_precisions_reach_robots(site: WeightsSite) -> None:
    """Its tables of tensors are too long for one offer, so they are separate patches."""
    draw = np.random.default_rng(0)
    arrays = {f"layers.{n:04d}.attention.weight": draw.normal(size=(4, 4)).astype(np.float32) for n in range(1000)}
    with site.serving():
        publisher = site.publisher(PublishConfig(precisions=("exact", "bf16", "int8")))
        with WeightsRobot(site, "one") as one:
            publish(publisher, dict(arrays), 1, one)
            name = next(iter(arrays))
            arrays[name] = np.ones((4, 4), np.float32)
            publish(publisher, dict(arrays), 2, one)
            assert publisher.wait_until_stored(120)
            with WeightsRobot(site, "late") as late:
                until(lambda: late.acts_with(2), "a latecomer has it")
        robot = WeightsRobot(site, "one")
    with robot:
        assert robot.acts_with(2), "it starts with what it kept"
        found = robot.swapper.policy.weights  # type: ignore[attr-defined]
        assert found.keys() == arrays.keys()
        np.testing.assert_array_equal(found[name], arrays[name])
    kept = newest_version(VersionStore(site.run / "weights").load())
    assert kept is not None and kept[0].version == 2 and len(kept[0].tensors) == 1000


def test_damaged_file_is_skipped(site: WeightsSite) -> None:
    with site.serving():
        publisher = site.publisher()
        for version in (1, 2):
            publisher.publish(weights(version), version, updates=version)
            assert publisher.wait_until_stored(120)
    path = max((site.run / "weights").glob("*.parcel"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    found = newest_version(VersionStore(site.run / "weights").load())
    assert found is not None and found[0].version == 1


def test_slow_robot_delays_no_other(site: WeightsSite) -> None:
    """Seven robots get six versions while the link of the eighth is blocked."""
    slow = replace(QUICK, weights=ChannelLimits(window_messages=2, window_bytes=1 << 16))
    rate = [1.0]
    with site.serving(), ExitStack() as robots:
        publisher = site.publisher()
        fast = [robots.enter_context(WeightsRobot(site, f"robot-{n}")) for n in range(7)]
        slowest = robots.enter_context(WeightsRobot(site, "slow", slow))
        fetcher = slowest.inlet.planner._fetcher
        fetcher._limit = lambda: rate[0]
        for version in range(1, 7):
            publish(publisher, weights(version, size=50_000), version, *fast)
        assert slowest.inlet.planner.loaded_version == -1, "a byte a second"
        rate[0], fetcher._next_request_s = 1e9, 0.0
        until(lambda: slowest.acts_with(6), "and the slow one gets there too")


def test_learner_gets_the_version_of_the_slowest_robot(site: WeightsSite) -> None:
    with site.serving():
        publisher = site.publisher()
        with WeightsRobot(site, "one") as one:
            for version in (1, 2, 3):
                publisher.publish(weights(version), version, updates=version)
                if version == 1:
                    until(lambda: one.acts_with(1), "the first acts")
            until(lambda: publisher.versions_ahead == 2, "one is behind")
            until(lambda: one.acts_with(3) and publisher.versions_ahead == 0, "and caught up")
            scalars = site.gateway.weights.scalars()
            assert scalars["staleness_s/one"] == 0 and 0 < scalars["staleness_s/one/up_to_30"] <= 1
        one.client.close()


class Silent:
    """A link that delivers nothing."""

    def send_weights(self, message: WeightsMessage, payload: Payload | None = None) -> bool:
        return False

    def receive_weights(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


def test_unwritable_learner_key_fails_before_driving(tmp_path: Path) -> None:
    """Otherwise it would accept another key at each start."""
    (tmp_path / "no folder").touch()
    keys, config = tmp_path / "no folder" / "keys", ReceiverConfig()

    def inlet() -> WeightsReceiver:
        return WeightsReceiver(Silent(), DoubleBufferedPolicy(Numbered), config, keys, None, Governor(config.governor))

    with pytest.raises(RunError, match=r"learner\.verify cannot be written .* copy learner\.verify from the run"):
        inlet()
    keys = tmp_path / "keys"
    inlet()
    ensure_signer(keys, "learner")
    inlet()


def test_robot_with_unreadable_weights_starts_without_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its session must not end: the gateway has the same weights."""
    (tmp_path / "kept" / "index").mkdir(parents=True)
    swapper, config = DoubleBufferedPolicy(Numbered), ReceiverConfig()
    inlet = WeightsReceiver(Silent(), swapper, config, tmp_path / "keys", tmp_path / "kept", Governor(config.governor))
    with inlet:
        assert "weights.stored_version_unusable" in caplog.text and swapper.swap_if_ready() is None
    inlet.raise_failure()


def test_robot_reports_stale_weights(site: WeightsSite) -> None:
    with site.serving(), WeightsRobot(site, "one", config=ReceiverConfig(max_staleness_versions=1)) as one:
        publisher = site.publisher()
        assert not one.inlet.is_too_stale(), "there are none yet"
        publish(publisher, weights(1), 1, one)
        for version in (2, 3):
            publisher.publish(weights(version), version, updates=version)
        until(lambda: one.inlet.planner.newest_version == 3, "it has heard of the third, and does not swap meanwhile")
        assert one.inlet.is_too_stale() and one.swapper.version == 1
        until(lambda: one.acts_with(3), "it acts with the third")
        assert not one.inlet.is_too_stale()
        until(lambda: one.inlet.scalars()["weights/version"] == 3, "its metrics say so")
        assert {"weights/fetch_ms", "weights/refused", "governor/share"} <= one.inlet.scalars().keys()


@pytest.mark.parametrize(("count", "most"), [(0, 3), (1, 1), (5, 1), (100, 8), (7, 8), (3, 2)])
def test_old_versions_are_further_apart(count: int, most: int) -> None:
    kept = thin_versions(list(range(1, count + 1)), most)
    assert len(kept) == min(count, most) and kept == sorted(kept) and (not kept or kept[-1] == count)
    if count == 100:
        assert np.all(np.diff(np.diff(kept)) <= 0), "the newest lie closest"
