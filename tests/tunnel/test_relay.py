"""A relay between a site's robots and the cloud: no lost chunk, no foreign name, weights fetched once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tunnel_kit import QUICK, GatewaySite, RecordingHandler, chunk, hello, prepare, serving, status, stored, until

from hal.registry import read_registry
from hal.resource import Kind, ResourceRecord
from hal.spec import ArraySpec, RobotSpec
from hal.state_database import STATE_FILE, StateDatabase
from sim.network_emulator import EmulatedLink
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.codec import Array
from user_sys.edge.outbox import Outbox
from user_sys.errors import SessionRefused
from user_sys.gateway.gateway import GatewayAddress
from user_sys.gateway.relay import Relay, RelayConfig, run_relay
from user_sys.inference.live_policy import LivePolicy
from user_sys.messages import (
    DevicesReport,
    LeaseGrant,
    LeaseRequest,
    OperatorCommand,
    OperatorReply,
    PinnedVersion,
    RobotStatus,
    WeightsApplied,
    WeightsBlobs,
    WeightsGone,
    WeightsManifest,
    WeightsOffer,
)
from user_sys.policies.conformance import example_spec
from user_sys.policies.mlp import MlpPolicy
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.keys import KeyPair, Keyring, load_keypair, new_keypair, save_keypair
from user_sys.tunnel.server import TunnelServer
from user_sys.weights.publisher import PublishConfig, Publisher
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig, UpdatePlanner
from user_sys.weights.signing import PUBLIC_SUFFIX, TrustedLearnerKey, ensure_signer
from user_sys.weights.version_store import VersionStore

ROBOTS = ("far-0", "far-1", "far-2", "far-3")
PANDA = RobotSpec(
    model="panda",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(name="action", labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),
)
ARM = replace(PANDA, model="so 101")


class FarSite:
    """A running relay, and its robots."""

    def __init__(self, folder: Path, relay: Relay, public: str, failures: list[Exception]) -> None:
        self.folder, self.relay, self.public, self.failures = folder, relay, public, failures
        self.clients: list[TunnelClient] = []

    def robot(
        self,
        name: str,
        keys: KeyPair | None = None,
        outbox: Outbox | None = None,
        spec: RobotSpec | None = None,
        holder: str = "",
    ) -> TunnelClient:
        pair = keys or load_keypair(self.folder / "keys" / f"{name}.key")
        said = replace(hello(name, "robot"), holder=holder or f"edge of {name}", spec=spec)
        client = TunnelClient(self.relay.server.endpoint, pair, self.public, said, outbox=outbox, limits=QUICK)
        self.clients.append(client)
        client.start()
        return client


@contextmanager
def relaying(
    folder: Path, cloud: GatewaySite, robots: tuple[str, ...] = ROBOTS, upstream: str = ""
) -> Iterator[FarSite]:
    """A relay in a thread of this process; the cloud allows it for its robots. Raises what is left in `failures`."""
    keys = folder / "keys"
    if not (keys / "lab.key").exists():
        save_keypair(new_keypair(), keys, "lab")
        for name in ROBOTS:
            pair = new_keypair()
            save_keypair(pair, keys, name)
            Keyring(keys).allow(pair.public, name, "robot")
    lab = load_keypair(keys / "lab.key")
    Keyring(cloud.run / "keys").allow(lab.public, "lab", "relay", robots=robots)
    config = RelayConfig(name="lab", endpoint="tcp://127.0.0.1:0", tunnel=QUICK)
    relay = Relay(
        config, folder / "relay", lab, Keyring(keys), upstream or cloud.address.endpoint, cloud.address.public_key
    )
    stop, failures = threading.Event(), list[Exception]()

    def serve() -> None:
        try:
            relay.run(stop)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    site = FarSite(folder, relay, lab.public, failures)
    try:
        until(lambda: failures or not relay.server.endpoint.endswith(":0"), "the relay listens")
        yield site
    finally:
        for client in site.clients:
            client.close()
        stop.set()
        thread.join(120)
        assert not thread.is_alive() and not failures, failures


def test_relayed_chunk_is_acknowledged_by_the_cloud(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        outboxes = {name: Outbox.open(tmp_path / name) for name in ROBOTS[:2]}
        for name, outbox in outboxes.items():
            far.robot(name, outbox=outbox)
            for first in range(0, 200, 20):
                outbox.append(*(chunk(first + each, robot=name, episode=f"episode-{name}") for each in range(20)))
        until(lambda: not any(map(len, outboxes.values())), "every chunk is acknowledged")
        assert sorted(stored(cloud.run)) == sorted((f"episode-{n}", i) for n in outboxes for i in range(200))
        for outbox in outboxes.values():
            outbox.close()


def test_killed_or_offline_relay_loses_no_chunk(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    outbox = Outbox.open(tmp_path / "outbox")
    with serving(tmp_path / "cloud") as cloud:
        with relaying(tmp_path / "far", cloud) as far:
            robot = far.robot("far-0", outbox=outbox)
            outbox.append(chunk(0, robot="far-0"))
            until(lambda: not len(outbox), "the first is acknowledged")
        outbox.append(*(chunk(index, robot="far-0") for index in range(1, 40)))
        assert robot.chunks_pending == 39
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        robot = far.robot("far-0", outbox=outbox)
        robot.wait_open(120)
        until(lambda: not len(outbox), "the rest is acknowledged")
        assert sorted(stored(cloud.run)) == [("episode-0", index) for index in range(40)]
    outbox.close()


def test_relay_forwards_leases_commands_and_reports(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        console = cloud.client("console-0")
        robot = far.robot("far-0")
        robot.wait_open(120)
        assert cloud.gateway is not None
        passages = far.relay.upstream_sessions  # a lost connection drops a request
        until(lambda: passages and passages["far-0"].client.state is TunnelState.OPEN, "its way to the cloud is open")
        robot.send(LeaseRequest(robot="far-0", holder="edge of far-0"))
        grant = robot.receive(120)
        assert isinstance(grant, LeaseGrant) and grant.token == 1
        robot.send(status(robot="far-0"))
        until(lambda: isinstance(console.receive(1), RobotStatus), "the console sees it")
        console.send(OperatorCommand(robot="far-0", operator="eve", order="e-stop"))
        order = robot.receive_stop(120)
        assert isinstance(order, OperatorCommand) and order.order == "e-stop"
        robot.send(OperatorReply(robot="far-0", operator="eve", order="e-stop", accepted=True))
        reply = console.receive_stop(120)
        assert isinstance(reply, OperatorReply) and reply.accepted


def test_relay_forwards_the_devices_of_each_robots_computer(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        for name in ROBOTS[:2]:
            camera = ResourceRecord(kind=Kind.CAMERA, name=f"pc-{name}/camera", model="C920", node=f"pc-{name}")
            far.robot(name).send(DevicesReport(records=(camera,)))

        def devices() -> set[str]:
            return {record.name for record in read_registry(StateDatabase(cloud.run / STATE_FILE))}

        until(lambda: devices() >= {"pc-far-0/camera", "pc-far-1/camera"}, "the cloud knows both")


def test_relay_refuses_foreign_names(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud, robots=("far-0", "far-1")) as far:
        neighbour = load_keypair(far.folder / "keys" / "far-1.key")
        with pytest.raises(SessionRefused, match="belongs to the robot 'far-1', not to the robot 'far-0'"):
            far.robot("far-0", neighbour).wait_open(120)
        with pytest.raises(SessionRefused, match="does not allow this key"):
            far.robot("far-0", new_keypair()).wait_open(120)
        liar = far.robot("far-1")
        liar.wait_open(120)
        liar.send(status(robot="far-0"))
        until(lambda: liar.state is TunnelState.REFUSED, "a robot that writes as another is cut off")
        foreign = far.robot("far-2")  # the relay accepts it, the cloud does not: it is not one of the relay's robots
        until(lambda: foreign.send(status(robot="far-2")) and foreign.state is TunnelState.REFUSED, "it is refused")
        assert "belongs to the relay 'lab', not to the robot 'far-2'" in foreign.reason
        outbox = Outbox.open(tmp_path / "outbox")
        far.robot("far-0", outbox=outbox)
        outbox.append(chunk(0, robot="panda-0"))
        until(lambda: not len(outbox), "it is answered")
        assert stored(cloud.run) == [] and list((tmp_path / "outbox").glob("*.refused"))
        outbox.close()


def test_relay_that_the_cloud_refuses_serves_again_once_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.gateway.relay.REFUSED_PAUSE_S", 0.1)
    prepare(tmp_path / "cloud")
    outbox = Outbox.open(tmp_path / "outbox")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        until(lambda: far.relay.uplink.state is TunnelState.OPEN, "the cloud accepts the relay")
        ring = Keyring(cloud.run / "keys")
        ring.revoke("lab")
        until(lambda: far.relay.uplink.state is TunnelState.REFUSED, "the cloud refuses it")
        ring.allow(load_keypair(far.folder / "keys" / "lab.key").public, "lab", "relay", robots=ROBOTS)
        until(lambda: far.relay.uplink.state is TunnelState.OPEN, "the cloud accepts it again")
        far.robot("far-0", outbox=outbox)
        outbox.append(chunk(0, robot="far-0"))
        until(lambda: not len(outbox), "its robot's chunk is acknowledged")
    outbox.close()


def test_relay_ends_once_another_of_its_name_has_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.gateway.relay.REFUSED_PAUSE_S", 0.1)
    prepare(tmp_path / "cloud")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        until(lambda: far.relay.uplink.state is TunnelState.OPEN, "the cloud accepts the relay")
        keys = load_keypair(far.folder / "keys" / "lab.key")
        said = hello("lab", "relay")
        with TunnelClient(cloud.address.endpoint, keys, cloud.address.public_key, said, limits=QUICK) as other:
            until(lambda: far.failures, "the first relay ends")
            assert other.state is TunnelState.OPEN
        failure = far.failures.pop()
        assert isinstance(failure, SessionRefused) and "another session of lab has taken over" in str(failure)


def test_relay_prints_each_reason_of_its_refusals_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stops: list[threading.Event] = []
    monkeypatch.setattr("user_sys.gateway.relay.stop_on_signals", stops.append)
    monkeypatch.setattr("user_sys.gateway.relay.REFUSED_PAUSE_S", 0.1)
    monkeypatch.setattr("user_sys.gateway.relay.STATUS_POLL_S", 0.01)
    prepare(tmp_path / "cloud")
    printed: list[str] = []

    def count(text: str) -> int:
        printed.append(capsys.readouterr().out)
        return "".join(printed).count(text)

    with serving(tmp_path / "cloud") as cloud:
        pair, keys = new_keypair(), tmp_path / "keys"
        save_keypair(pair, keys, "lab")
        (keys / "gateway.pub").write_text(cloud.address.public_key)
        config = RelayConfig(name="lab", endpoint="tcp://127.0.0.1:0", tunnel=QUICK)
        arguments = (config, cloud.address.endpoint, tmp_path / "relay", keys)
        thread = threading.Thread(target=run_relay, args=arguments)
        thread.start()
        try:
            until(lambda: count("does not allow this key") == 1, "it prints the first reason")
            Keyring(cloud.run / "keys").allow(pair.public, "lab", "robot")
            until(lambda: count("belongs to the robot 'lab'") == 1, "it prints the second one")
            assert cloud.gateway is not None
            counters = cloud.gateway.server.counters
            until(lambda: counters["hellos_refused"] > 3, "the cloud refuses it several times")
            assert [count("does not allow this key"), count("belongs to the robot 'lab'")] == [1, 1]
        finally:
            until(lambda: stops, "it can be stopped")[0].set()
            thread.join(120)


def test_second_edge_of_a_relayed_robot_does_not_cut_the_first(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        first = far.robot("far-0")
        first.wait_open(120)
        upstream = until(lambda: far.relay.upstream_sessions.get("far-0"), "the relay connects for it").client
        upstream.wait_open(120)
        first.send(LeaseRequest(robot="far-0", holder="edge of far-0"))
        assert isinstance(first.receive(120), LeaseGrant)
        for _ in range(3):
            with pytest.raises(SessionRefused, match="far-0 is driven by edge of far-0"):
                far.robot("far-0", holder="another edge").wait_open(120)
        assert (first.state, upstream.state) == (TunnelState.OPEN, TunnelState.OPEN)
        assert first.counters["lost"] == upstream.counters["lost"] == 0
        far.robot("far-0").wait_open(120)  # the same edge, whose session has restarted


def test_edge_replaces_one_that_the_cloud_refuses(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud, robots=("far-1",)) as far:
        far.robot("far-0").wait_open(120)
        upstream = until(lambda: far.relay.upstream_sessions.get("far-0"), "the relay connects for it")
        until(lambda: upstream.refusal_reason, "the cloud refuses the robot")
        far.robot("far-0", holder="another edge").wait_open(120)


def test_relayed_robots_use_the_clouds_clock(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    pair, hour_ns = new_keypair(), 3_600 * 10**9
    server = TunnelServer(
        *("tcp://127.0.0.1:0", pair, Keyring(tmp_path / "cloud" / "keys"), RecordingHandler(), QUICK),
        unix_ns=lambda: time.time_ns() + hour_ns,
    )
    with server:
        cloud = GatewaySite(tmp_path / "cloud", GatewayAddress(endpoint=server.endpoint, public_key=pair.public))
        with relaying(tmp_path / "far", cloud) as far:
            until(lambda: far.relay.uplink.clock, "the relay knows the cloud's clock")
            robot = far.robot("far-0")
            until(lambda: robot.clock, "the robot knows it too")
            assert robot.clock is not None
            ahead_ns = robot.clock.gateway_unix_ns(time.monotonic_ns()) - time.time_ns()
            assert abs(ahead_ns - hour_ns) < 10**9


class StoredReader:
    """A robot's weights; `poll` continues to receive."""

    def __init__(self, robot: TunnelClient, keys: Path) -> None:
        self.robot, self.version = robot, -1
        self.arrays: Mapping[str, Array] = {}
        trust = TrustedLearnerKey(keys / f"{robot.hello.name}{PUBLIC_SUFFIX}")
        self._receiver = UpdatePlanner(trust, self._load, self.robot.send_weights)

    def poll(self) -> int:
        """Processes received messages. Returns the complete version."""
        envelope = self.robot.receive_weights(0.0)
        match envelope.message if envelope else None:
            case WeightsOffer() as offer:
                self._receiver.on_offer(offer)
            case WeightsBlobs() | WeightsGone() as message:
                assert envelope is not None
                self._receiver.on_reply(message, memoryview(envelope.payload) if envelope.payload else None)
        self._receiver.step()
        return self.version

    def _load(self, manifest: WeightsManifest, arrays: Mapping[str, Array], heard_s: float) -> None:
        self.version, self.arrays = manifest.version, arrays


def test_relay_fetches_weights_once_for_its_robots(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    signer = ensure_signer(tmp_path / "cloud" / "keys", "learner")
    arrays = {"w": np.random.default_rng(0).standard_normal(200_000).astype(np.float32)}  # does not compress
    with serving(tmp_path / "cloud") as cloud, EmulatedLink(cloud.address.endpoint.removeprefix("tcp://")) as link:
        with relaying(tmp_path / "far", cloud, upstream=link.endpoint) as far:
            readers = [StoredReader(far.robot(name), tmp_path) for name in ROBOTS]
            for reader in readers:
                reader.robot.wait_open(120)
            with Publisher(cloud.client("learner"), signer, PublishConfig()) as publisher:
                publisher.publish(arrays, 7, updates=1)
                for reader in readers:
                    until(lambda r=reader: r.poll() == 7, "the weights arrive")  # type: ignore[misc]
                    reader.robot.send(WeightsApplied(robot=reader.robot.hello.name, version=7, seconds=0.1))
                until(lambda: publisher.progress.stored_version == 7, "it is stored")
            assert arrays["w"].nbytes <= link.traffic.down_bytes < 1.3 * arrays["w"].nbytes
            assert all(np.array_equal(reader.arrays["w"], arrays["w"]) for reader in readers)
            until(lambda: (far.folder / "relay" / "weights").exists() and _kept(far.folder), "the relay keeps them")
    with relaying(tmp_path / "far", cloud) as far:  # the cloud is away by now
        late = StoredReader(far.robot("far-0"), tmp_path)
        until(lambda: late.poll() == 7, "the relay has them on its disk")


def _kept(folder: Path) -> bool:
    return VersionStore(folder / "relay" / "weights").load().numbers() == [7]


def test_restarted_cloud_gets_versions_of_relayed_robots(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    with ExitStack() as first:
        cloud = first.enter_context(serving(tmp_path / "cloud"))
        with relaying(tmp_path / "far", cloud) as far:
            robot = far.robot("far-0")
            robot.wait_open(120)
            robot.send(WeightsApplied(robot="far-0", version=7, seconds=0.1))
            until(lambda: _acting(cloud, "far-0"), "the cloud knows")
            first.close()
            with serving(tmp_path / "cloud") as again:
                until(lambda: _acting(again, "far-0"), "it is said again")


def _acting(cloud: GatewaySite, robot: str) -> bool:
    assert cloud.gateway is not None
    return robot in cloud.gateway.weights.distributor("learner").acting_versions


def test_relayed_robots_get_their_learners_weights_and_pins(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    keys, second = tmp_path / "cloud" / "keys", "learner-so-101-x"
    signer, pair = ensure_signer(keys, "learner"), new_keypair()
    save_keypair(pair, keys, second)
    Keyring(keys).allow(pair.public, second, "learner")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far, ExitStack() as stack:
        panda, arm = (
            StoredReader(far.robot(name, spec=spec), tmp_path) for name, spec in (("far-0", PANDA), ("far-1", ARM))
        )
        for number, (name, spec) in enumerate((("learner", PANDA), (second, ARM)), 1):
            client = _learner(cloud, name, spec)
            publisher = stack.enter_context(Publisher(client, signer, PublishConfig()))
            publisher.publish({"w": np.full(10, number, np.float32)}, 10 * number, updates=1)
            until(lambda p=publisher, n=number: p.progress.stored_version == 10 * n, "it is stored")  # type: ignore[misc]
        until(lambda: (panda.poll(), arm.poll()) == (10, 20), "each has its own learner's")
        assert panda.arrays["w"][0] == 1 and arm.arrays["w"][0] == 2
        publisher.publish({"w": np.full(10, 3, np.float32)}, 21, updates=2)
        until(lambda: arm.poll() == 21, "a newer one")
        order = PinnedVersion(serial=1, version=20, by="eve", reason="it is worse", given_unix_ns=time.time_ns())
        VersionStore(cloud.run / "weights" / second).set_pin(signer.sign(order))
        until(lambda: arm.poll() == 20, "the order is for those of the second learner")
        until(
            lambda: VersionStore(far.folder / "relay" / "weights" / second).load().numbers() == [20, 21],
            "they are kept",
        )
        assert panda.poll() == 10
    with relaying(tmp_path / "far", cloud) as far:  # the cloud is away by now
        panda, arm = (
            StoredReader(far.robot(name, spec=spec), tmp_path) for name, spec in (("far-0", PANDA), ("far-1", ARM))
        )
        until(lambda: (panda.poll(), arm.poll()) == (10, 20), "the relay has both on its disk, and the order")


def test_relay_fetches_only_weights_of_its_robots(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    keys, second = tmp_path / "cloud" / "keys", "learner-so-101-x"
    signer, pair = ensure_signer(keys, "learner"), new_keypair()
    save_keypair(pair, keys, second)
    Keyring(keys).allow(pair.public, second, "learner")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far, ExitStack() as stack:
        panda = StoredReader(far.robot("far-0", spec=PANDA), tmp_path)
        for number, (name, spec) in enumerate((("learner", PANDA), (second, ARM)), 1):
            publisher = stack.enter_context(Publisher(_learner(cloud, name, spec), signer, PublishConfig()))
            publisher.publish({"w": np.full(10, number, np.float32)}, 10 * number, updates=1)
            until(lambda p=publisher, n=number: p.progress.stored_version == 10 * n, "it is stored")  # type: ignore[misc]
        until(lambda: panda.poll() == 10, "its learner's weights are here")
        until(lambda: second in far.relay.weights.deferred_offers, "the other learner's are offered")
        assert far.relay.weights.router.learners_with_weights() == {"learner"}
        arm = StoredReader(far.robot("far-1", spec=ARM), tmp_path)
        until(lambda: arm.poll() == 20, "a robot came that they are for")
        assert panda.poll() == 10 and not far.relay.weights.deferred_offers


def test_relayed_robot_gets_weights_of_a_learner_whose_embodiment_has_changed(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    signer = ensure_signer(tmp_path / "cloud" / "keys", "learner")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        panda = StoredReader(far.robot("far-0", spec=PANDA), tmp_path)
        with Publisher(_learner(cloud, "learner", PANDA), signer, PublishConfig()) as publisher:
            publisher.publish({"w": np.zeros(10, np.float32)}, 10, updates=1)
            until(lambda: panda.poll() == 10, "the weights arrive")
        arm = StoredReader(far.robot("far-1", spec=ARM), tmp_path)
        arm.robot.wait_open(120)
        with Publisher(_learner(cloud, "learner", ARM), signer, PublishConfig()) as publisher:
            publisher.publish({"w": np.ones(10, np.float32)}, 11, updates=2)
            until(lambda: arm.poll() == 11, "the weights of the next launch arrive")


def test_policy_server_gets_weights_from_the_relay_of_its_site(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    signer = ensure_signer(tmp_path / "cloud" / "keys", "learner")
    with serving(tmp_path / "cloud") as cloud, relaying(tmp_path / "far", cloud) as far:
        learner = _learner(cloud, "learner", PANDA)
        publisher = Publisher(learner, signer, PublishConfig())
        with publisher:
            publisher.publish({"w": np.zeros(10_000, np.float32)}, 10, updates=1)
            pair = new_keypair()
            Keyring(far.folder / "keys").allow(pair.public, "policy", "policy")
            said = replace(hello("policy-1", "policy"), spec=PANDA)
            with TunnelClient(far.relay.server.endpoint, pair, far.public, said, limits=QUICK) as server:
                reader = StoredReader(server, tmp_path / "policy-keys")
                until(lambda: reader.poll() == 10, "the weights arrive")
                server.send(WeightsApplied(robot="policy-1", version=10, seconds=0.1))
                publisher.publish({"w": np.ones(10_000, np.float32)}, 11, updates=2)
                until(lambda: reader.poll() == 11, "and newer ones")
            assert not far.relay.upstream_sessions


def test_policy_behind_a_relay_explores_only_after_the_cloud_has_said_that_it_has_no_version(tmp_path: Path) -> None:
    prepare(tmp_path / "cloud")
    pair, spec = new_keypair(), example_spec()
    with ExitStack() as first:
        cloud = first.enter_context(serving(tmp_path / "cloud"))
        first.close()
        with relaying(tmp_path / "far", cloud) as far:
            Keyring(far.folder / "keys").allow(pair.public, "policy", "policy")
            said = replace(hello("policy-1", "policy"), spec=spec)
            client = TunnelClient(far.relay.server.endpoint, pair, far.public, said, limits=QUICK)
            served = DoubleBufferedPolicy(lambda: MlpPolicy(spec))
            with client, LivePolicy(served, client, "policy-1", ReceiverConfig(), tmp_path / "lab", None) as policy:
                client.wait_open(120)
                time.sleep(0.5)
                assert not policy.may_explore
                with serving(tmp_path / "cloud") as again:
                    until(lambda: policy.may_explore, "the cloud has no version")
                    signer = ensure_signer(tmp_path / "cloud" / "keys", "learner")
                    with Publisher(_learner(again, "learner", spec), signer, PublishConfig()) as publisher:
                        publisher.publish(policy_arrays(MlpPolicy.make_module(spec)), 10, updates=1)
                        until(lambda: not policy.may_explore, "the learner has a version")


def _learner(cloud: GatewaySite, name: str, spec: RobotSpec) -> TunnelClient:
    keys = load_keypair(cloud.run / "keys" / f"{name}.key")
    said = replace(hello(name, "learner"), spec=spec)
    client = TunnelClient(cloud.address.endpoint, keys, cloud.address.public_key, said, limits=QUICK)
    cloud.clients.append(client)
    client.start()
    client.wait_open(120)
    return client
