"""Weights through a real gateway: to every robot, over restarts, at each robot's own rate."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from wait_kit import until

from user_sys.algorithms.algorithm import policy_arrays
from user_sys.codec import Array
from user_sys.commands.main import main
from user_sys.compose import PolicyConfig
from user_sys.errors import RunError, SessionRefused
from user_sys.gateway import Gateway, GatewayConfig
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.inference.__main__ import PolicyServerConfig, policy_opener
from user_sys.inference.live_policy import LivePolicy
from user_sys.inference.protocol import PolicyDescription
from user_sys.messages import (
    FOREIGN_RUN,
    PROTOCOL_VERSION,
    EpisodeReport,
    Hello,
    WeightsApplied,
    WeightsMessage,
)
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.run.pins import SuccessGuards
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import Keyring, Role, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import Payload, TunnelState
from user_sys.weights.catalog import WeightsServer
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig, WeightsReceiver
from user_sys.weights.signing import ensure_signer
from user_sys.weights.version_store import VersionStore, newest_version

# Long timeouts: a busy machine must not end a session.
QUICK = TunnelLimits(heartbeat_s=0.1, dead_after_s=60.0, handshake_s=60.0, backoff_min_s=0.01, backoff_max_s=0.1)
CONFIG = GatewayConfig(tunnel=QUICK, report_s=0.05)


class Numbered(Policy):
    """Records its last weights."""

    precisions = ("exact", "bf16")

    def __init__(self) -> None:
        self.weights: dict[str, Array] = {}

    def act(self, observation: object, sentence: str, *, deterministic: bool, context: object = None) -> ActionChunk:
        return ActionChunk(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))

    def load(self, weights: object) -> None:
        self.weights = dict(weights)  # type: ignore[call-overload]


def weights(number: int, size: int = 200) -> dict[str, Array]:
    return {"w": np.random.default_rng(number).normal(size=size).astype(np.float32), "n": np.array(number)}


class WeightsRobot:
    """The robot's side, which swaps weights on request."""

    def __init__(
        self, site: WeightsSite, name: str, limits: TunnelLimits = QUICK, config: ReceiverConfig | None = None
    ) -> None:
        self.name = name
        config = config or ReceiverConfig()
        self.swapper = DoubleBufferedPolicy(Numbered)
        self.client = site.client(name, "robot", limits)
        keys, self.folder = site.run / "keys", site.run / "edge" / name
        governor = Governor(config.governor)
        self.receiver = WeightsReceiver(
            self.client, self.swapper, config, keys, self.folder, governor, self.say_version
        )

    def __enter__(self) -> WeightsRobot:
        self.receiver.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.receiver.close()
        self.receiver.raise_failure()

    def acts_with(self, version: int) -> bool:
        if self.swapper.swap_if_ready() is not None:
            self.say_version()
        return self.swapper.version == version

    def stored_version(self) -> int:
        """The version with which its next start acts."""
        found = newest_version(VersionStore(self.folder).load())
        return -1 if found is None else found.manifest.version

    def say_version(self) -> None:
        if (version := self.swapper.version) >= 0:
            self.client.send(WeightsApplied(robot=self.name, version=version, seconds=self.swapper.swap_delay_s))


def stored(publisher: Publisher, version: int) -> bool:
    """Waits until the gateway has stored the version."""
    until(lambda: publisher.progress.stored_version >= version, f"version {version} is stored")
    return True


def publish(publisher: Publisher, arrays: dict[str, Array], version: int, *robots: WeightsRobot) -> None:
    """Publishes, and waits until each of `robots` uses the version."""
    publisher.publish(arrays, version, updates=version)
    until(lambda: all(robot.acts_with(version) for robot in robots), f"version {version} acts")


class WeightsSite:
    """A gateway in a thread, a learner and robots; restarting the gateway keeps the rest."""

    def __init__(self, run: Path, stack: ExitStack) -> None:
        self.run, self.stack = run, stack
        self.gateway: Gateway
        self.address: GatewayAddress

    @contextmanager
    def serving(self, config: GatewayConfig = CONFIG) -> Iterator[None]:
        stop, self.gateway = threading.Event(), Gateway(config, self.run)
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
        own_name = f"{name}-1" if role == "policy" else name  # of one of a policy server's policies
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=own_name)
        client = TunnelClient(self.address.endpoint, load_keypair(path), self.address.public_key, hello, limits=limits)
        self.stack.enter_context(client)
        client.wait_open(120)
        return client

    def publisher(self, config: PublishConfig | None = None, run: bytes = b"", epoch: int = 0) -> Publisher:
        signer = ensure_signer(self.run / "keys", "learner")
        return self.stack.enter_context(
            Publisher(self.client("learner", "learner"), signer, config or PublishConfig(), run=run, epoch=epoch)
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
            assert stored(publisher, 30) and publisher.progress.published < 31
            np.testing.assert_array_equal(one.swapper.policy.weights["w"], weights(30)["w"])  # type: ignore[attr-defined]
        site.stack.pop_all().close()
    with ExitStack() as site.stack, site.serving(), WeightsRobot(site, "late") as late:
        until(lambda: late.acts_with(30), "a robot that comes later gets it without the learner")
    kept = newest_version(VersionStore(site.run / "weights").load())
    assert kept is not None and kept.manifest.version == 30


def test_pin_and_unpin_change_the_robots_version(site: WeightsSite, capsys: pytest.CaptureFixture[str]) -> None:
    with site.serving():
        publisher = site.publisher()
        with WeightsRobot(site, "one") as robot:
            for version in (1, 2, 3):
                publish(publisher, weights(version), version, robot)
                assert stored(publisher, version)
            assert main(["weights", "rollback", "2", str(site.run), "--by", "ada", "--reason", "it shakes"]) == 0
            until(lambda: robot.acts_with(2), "the robot goes back")
            publisher.publish(weights(4), 4, updates=4)
            assert stored(publisher, 4)
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


def test_robots_act_with_the_best_version_until_a_newer_one_is_as_good(site: WeightsSite) -> None:
    good, guards = {3, 60}, SuccessGuards(site.run)

    def act(robot: WeightsRobot, episodes: int, failed: int = 0) -> str:
        for number in range(episodes):
            version = robot.swapper.version
            success = version in good and number >= failed
            guards.add(EpisodeReport(robot="one", episode="e", source="online", steps=9, success=success,
                                     intervention_steps=0, episode_return=0.0, policy_version=version))  # fmt: skip
        return " ".join(guards.apply())

    with site.serving(replace(CONFIG, weights_kept=1)):
        publisher = site.publisher()
        with WeightsRobot(site, "one") as robot:
            publish(publisher, weights(3), 3, robot)
            assert act(robot, 50) == "" and stored(publisher, 3)
            for version in range(4, 50):
                publisher.publish(weights(version), version, updates=version)
            publish(publisher, weights(50), 50, robot)
            assert act(robot, 9) == "" and stored(publisher, 50)
            assert "success fell from 100% to 80%; robots act with version 3, the best so far" in act(robot, 1)
            until(lambda: robot.acts_with(3), "the robot goes back to the best version")
            assert guards.scalars(["one"]) == {"acting_with_version/learner": 3.0}
            guards = SuccessGuards(site.run)  # the run is resumed
            assert "robots try the newest version again" in act(robot, 50)
            until(lambda: robot.acts_with(50), "a trial of the newest version")
            assert "the newest version succeeded in 0 of 3 episodes; robots act with version 3" in act(robot, 3)
            until(lambda: robot.acts_with(3), "the robot goes back again")
            publisher.publish(weights(60), 60, updates=60)
            assert stored(publisher, 60) and act(robot, 99) == "" and "try the newest" in act(robot, 1)
            until(lambda: robot.acts_with(60), "a trial of a better version")
            assert "it is as good as the best again" in act(robot, 50, failed=3), "more at once than a trial needs"
            assert act(robot, 100) == ""
            assert main(["weights", "rollback", "3", str(site.run), "--by", "ada"]) == 0
            until(lambda: robot.acts_with(3), "a person's order")
            good.clear()
            assert act(robot, 100) == "", "the order of a person holds"


def test_episodes_without_a_label_do_not_make_the_success_fall(site: WeightsSite) -> None:
    guards = SuccessGuards(site.run)
    with site.serving(replace(CONFIG, weights_kept=1)):
        publisher = site.publisher()
        with WeightsRobot(site, "one") as robot:
            publish(publisher, weights(3), 3, robot)
            for success in [True] * 50 + [None] * 50:
                guards.add(EpisodeReport(robot="one", episode="e", source="online", steps=9, success=success,
                                         intervention_steps=0, episode_return=0.0, policy_version=3))  # fmt: skip
                assert guards.apply() == []


def test_robot_without_a_gateway_uses_its_stored_weights(site: WeightsSite) -> None:
    with site.serving():
        publisher = site.publisher()
        with WeightsRobot(site, "one") as robot:
            publisher.publish(weights(1), 1, updates=1)
            until(lambda: robot.acts_with(1), "it acts")
        robot = WeightsRobot(site, "one")
    with robot:
        assert robot.acts_with(1)


def test_robot_that_is_killed_after_a_rollback_starts_with_the_pinned_version(
    site: WeightsSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.weights.receiver.SAVE_INTERVAL_S", 3600.0)
    with site.serving():
        publisher, robot = site.publisher(), WeightsRobot(site, "one")
        with robot:
            for version in (1, 2, 3):
                publish(publisher, weights(version), version, robot)
                assert stored(publisher, version)
        with WeightsRobot(site, "one") as robot:
            assert robot.acts_with(3)
            assert main(["weights", "rollback", "2", str(site.run)]) == 0
            until(lambda: robot.acts_with(2), "the robot goes back")
            until(lambda: robot.stored_version() == 2, "the version that acts is on disk, long before the interval")


def test_robot_that_is_killed_before_it_has_the_pinned_version_holds(
    site: WeightsSite, caplog: pytest.LogCaptureFixture
) -> None:
    byte_a_second = ReceiverConfig(governor=GovernorConfig(link_bytes_per_s=1.0))
    with site.serving():
        publisher, robot = site.publisher(), WeightsRobot(site, "one")
        with robot:
            for version in (1, 2, 3):
                publish(publisher, weights(version, size=50_000), version, robot)
                assert stored(publisher, version)
        with WeightsRobot(site, "one", config=byte_a_second) as robot:
            assert robot.acts_with(3)
            assert main(["weights", "rollback", "2", str(site.run), "--by", "ada"]) == 0
            until(lambda: robot.receiver.planner.newest_version == 2, "the robot hears of it")
        assert robot.stored_version() == 3
        with WeightsRobot(site, "one", config=byte_a_second) as robot:
            assert robot.acts_with(-1) and "version 3 is stored, but ada has pinned version 2" in caplog.text
        with WeightsRobot(site, "one") as robot:
            until(lambda: robot.acts_with(2), "it has the pinned version")
            assert main(["weights", "release", str(site.run)]) == 0
            until(lambda: robot.acts_with(3), "and then the newest again")
        with WeightsRobot(site, "one") as robot:
            assert robot.acts_with(3), "the pin is released"


def open_served_policy(site: WeightsSite, keys: Path, **settings: str) -> AbstractContextManager[LivePolicy]:
    """A policy of a policy server, whose key is made in the folder `keys`, under the gateway of `site`."""
    if not (keys / "policy.key").exists():
        save_keypair(new_keypair(), keys, "policy")
    for name in ("gateway.pub", "learner.verify"):
        shutil.copy(site.run / "keys" / name, keys)
    own = PolicyConfig(device="cpu")
    config = PolicyServerConfig(gateway=site.address.endpoint, keys=keys, policy=own, tunnel=QUICK, **settings)  # type: ignore[arg-type]
    return policy_opener(config)(PolicyDescription(kind="mlp", options={}, features=(), spec=example_spec()))


def swapped(policy: LivePolicy, version: int) -> bool:
    policy.swap()
    return policy.version == version and not policy.hold_reason(explore=False)


def test_policy_server_that_was_refused_acts_once_its_key_is_allowed(
    site: WeightsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.inference.live_policy.REFUSED_PAUSE_S", 0.1)
    keys = tmp_path / "lab"
    with site.serving():
        site.publisher().publish(policy_arrays(MlpPolicy.make_module(example_spec())), 1, updates=1)
        with open_served_policy(site, keys) as policy:
            until(lambda: "does not allow this key" in policy.hold_reason(explore=False), "its robots learn why")
            Keyring(site.run / "keys").allow(load_keypair(keys / "policy.key").public, "policy", "policy")
            policy.raise_failure()
            time.sleep(0.1)
            with pytest.raises(SessionRefused, match="does not allow this key"):
                policy.raise_failure()
        with open_served_policy(site, keys) as policy:  # as `PolicyServer` does after a failure
            until(lambda: swapped(policy, 1), "it acts")


def test_policy_may_explore_until_its_gateway_offers_a_version(
    site: WeightsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_peer, may_offer = WeightsServer.add_peer, threading.Event()

    def add_later(server: WeightsServer, name: str) -> None:
        assert may_offer.wait(120)  # as while the thread writes a large version
        add_peer(server, name)

    with site.serving(), ExitStack() as stack:
        publisher = site.publisher()
        monkeypatch.setattr(WeightsServer, "add_peer", add_later)
        policies, client = DoubleBufferedPolicy(lambda: MlpPolicy(example_spec())), site.client("policy", "policy")
        keys = site.run / "keys"
        policy = stack.enter_context(LivePolicy(policies, client, "policy-1", ReceiverConfig(), keys, None))
        assert client.state is TunnelState.OPEN
        assert not policy.may_explore, "the gateway has not said yet what it has"
        may_offer.set()
        until(lambda: policy.may_explore, "there is no version")
        publisher.publish(policy_arrays(MlpPolicy.make_module(example_spec())), 1, updates=1)
        until(lambda: swapped(policy, 1), "it acts")
        assert not policy.may_explore


def test_policy_servers_of_two_sites_with_a_name_each_get_every_version(site: WeightsSite, tmp_path: Path) -> None:
    arrays, names = policy_arrays(MlpPolicy.make_module(example_spec())), ("lab", "hall")
    with site.serving(), ExitStack() as servers:
        publisher = site.publisher()
        publisher.publish(arrays, 1, updates=1)
        for name in names:
            save_keypair(new_keypair(), tmp_path / name, "policy")
            public = load_keypair(tmp_path / name / "policy.key").public
            Keyring(site.run / "keys").allow(public, name, "policy")
        policies = [servers.enter_context(open_served_policy(site, tmp_path / name, name=name)) for name in names]
        until(lambda: all([swapped(policy, 1) for policy in policies]), "version 1 acts at each site")
        publisher.publish(arrays, 2, updates=2)
        until(lambda: all([swapped(policy, 2) for policy in policies]), "version 2 acts at each site")


def test_robot_in_another_run_uses_its_weights(tmp_path: Path) -> None:
    """An edge outlives runs with shared keys: its stored version has a greater number."""
    for shared in ("keys", "edge"):
        (tmp_path / "last" / shared).mkdir(parents=True)
        (tmp_path / "next").mkdir(exist_ok=True)
        (tmp_path / "next" / shared).symlink_to(tmp_path / "last" / shared)
    for number, (run, version) in enumerate((("last", 5), ("next", 1))):
        site = WeightsSite(tmp_path / run, ExitStack())
        with site.serving(), site.stack, WeightsRobot(site, "one") as robot:
            kept = robot.acts_with(FOREIGN_RUN)
            assert run == "last" or kept, "it starts with what it kept, whose number says nothing here"
            publisher = site.publisher(run=run.encode(), epoch=number)
            publish(publisher, weights(version), version, robot)
            np.testing.assert_array_equal(robot.swapper.policy.weights["w"], weights(version)["w"])  # type: ignore[attr-defined]


def test_slow_robot_delays_no_other(site: WeightsSite) -> None:
    """Seven robots get six versions while the link of the eighth is blocked."""
    slow = replace(QUICK, weights=ChannelLimits(window_messages=2, window_bytes=1 << 16))
    byte_a_second = ReceiverConfig(governor=GovernorConfig(link_bytes_per_s=1.0))
    with site.serving(), ExitStack() as robots:
        publisher = site.publisher()
        fast = [robots.enter_context(WeightsRobot(site, f"robot-{n}")) for n in range(7)]
        with WeightsRobot(site, "slow", slow, byte_a_second) as slowest:
            for version in range(1, 7):
                publish(publisher, weights(version, size=50_000), version, *fast)
            assert slowest.receiver.planner.loaded_version == -1
        with WeightsRobot(site, "slow", slow) as faster:
            until(lambda: faster.acts_with(6), "and the slow one gets there too")


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

    def receiver() -> WeightsReceiver:
        return WeightsReceiver(Silent(), DoubleBufferedPolicy(Numbered), config, keys, None, Governor(config.governor))

    with pytest.raises(RunError, match=r"learner\.verify cannot be written .* copy learner\.verify from the run"):
        receiver()
    keys = tmp_path / "keys"
    receiver()
    ensure_signer(keys, "learner")
    receiver()


def test_robot_with_unreadable_weights_starts_without_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its session must not end: the gateway has the same weights."""
    (tmp_path / "kept" / "index").mkdir(parents=True)
    swapper, config = DoubleBufferedPolicy(Numbered), ReceiverConfig()
    receiver = WeightsReceiver(
        Silent(), swapper, config, tmp_path / "keys", tmp_path / "kept", Governor(config.governor)
    )
    with receiver:
        assert "weights.stored_version_unusable" in caplog.text and swapper.swap_if_ready() is None
    receiver.raise_failure()


def test_robot_reports_stale_weights(site: WeightsSite) -> None:
    with site.serving(), WeightsRobot(site, "one", config=ReceiverConfig(max_staleness_versions=1)) as one:
        publisher = site.publisher()
        assert not one.receiver.is_too_stale(), "there are none yet"
        publish(publisher, weights(1), 1, one)
        for version in (2, 3):
            publisher.publish(weights(version), version, updates=version)
        until(
            lambda: one.receiver.planner.newest_version == 3, "it has heard of the third, and does not swap meanwhile"
        )
        assert one.receiver.is_too_stale() and one.swapper.version == 1
        until(lambda: one.acts_with(3), "it acts with the third")
        assert not one.receiver.is_too_stale()
        until(lambda: one.receiver.scalars()["weights/version"] == 3, "its metrics say so")
        assert {"weights/fetch_ms", "weights/refused", "governor/share"} <= one.receiver.scalars().keys()
