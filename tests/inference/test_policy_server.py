"""The policy server: slots of each robot, uploads, bounds and invalid messages."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from blake3 import blake3
from inference_kit import (
    END_S,
    ROBOTS,
    Server,
    acts,
    link_to,
    make_keys,
    process,
    serving,
    slowly,
    until,
    weights_of,
)
from msgspec.structs import replace

from hal.spec import STATE, Array
from user_sys.codec import encode_packet
from user_sys.compose import policy_factory
from user_sys.errors import ConfigError, PolicyUnavailable, RunError, WireError
from user_sys.inference.policy_server import (
    MAX_JOBS,
    MAX_SESSIONS,
    SESSION_TIMEOUT_S,
    EncodedWeightsCache,
    PolicyServer,
    SessionTable,
)
from user_sys.inference.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_SLOTS,
    MAX_WEIGHTS_BYTES,
    PART_ARRAY,
    POLICY_NODE,
    POLICY_PROTOCOL_VERSION,
    SESSION_BYTES,
    ActionRequest,
    ActionResponse,
    AnyResponse,
    InvalidInput,
    LoadSlotWeights,
    NextPart,
    OpenSlot,
    PackedWeights,
    PolicyRequest,
    RequestRejected,
    ServerInfo,
    SessionHeartbeat,
    SlotBusy,
    SlotNotFound,
    SlotReady,
    WeightsPart,
    decode_response,
    encode,
)
from user_sys.inference.remote_policy import LOAD_TIMEOUT_S
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key, new_keypair, save_keypair
from user_sys.weights.double_buffer import DoubleBufferedPolicy

SPEC = slowly(example_spec())
SPEC_BYTES = msgspec.msgpack.encode(SPEC)
LENGTH = 4


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    with serving(keys) as found:
        yield found


class Peer:
    """A peer with a key that sends any message."""

    def __init__(self, server: Server, keys: Path, robot: str, session: bytes) -> None:
        self.session, self._number = session, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        pair = load_keypair(keys / f"{robot}.key")
        self._socket.curve_publickey, self._socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
        self._socket.curve_serverkey = load_public_key(keys / f"{POLICY_NODE}.pub").encode()
        self._socket.connect(server.endpoint)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> AnyResponse:
        assert self._socket.poll(1e3 * END_S)
        return decode_response(self._socket.recv())[0]

    def ask(
        self, request: Callable[..., PolicyRequest], arrays: dict[str, Array] | None = None, **fields: Any
    ) -> AnyResponse:
        self._number += 1
        self.send(encode(request(number=self._number, session=self.session, **fields), arrays))
        answer = self.receive()
        assert answer.number in (0, self._number)
        return answer

    def greet(self, *slots: int) -> None:
        assert isinstance(self.ask(SessionHeartbeat, protocol=POLICY_PROTOCOL_VERSION, slots=slots), ServerInfo)

    def open(self, slot: int = 0, **changes: Any) -> AnyResponse:
        fields = {"slot": slot, "kind": "mlp", "features": (), "seed": 0, "spec": SPEC} | changes
        return self.ask(OpenSlot, **fields)

    def act(self, slot: int = 0, digest: bytes = b"", observation: dict[str, Array] | None = None) -> AnyResponse:
        seen = example_observation(np.random.default_rng(0)) if observation is None else observation
        return self.ask(ActionRequest, seen, slot=slot, digest=digest, sentence="", deterministic=True)

    def load(self, weights: dict[str, Array], slot: int = 0) -> AnyResponse:
        packet = encode_packet(PackedWeights(), weights)
        digest = digest_of(packet)
        answer = self.ask(LoadSlotWeights, slot=slot, digest=digest, size_bytes=len(packet))
        if isinstance(answer, NextPart):
            part = {PART_ARRAY: np.frombuffer(packet, np.uint8)}
            answer = self.ask(WeightsPart, part, slot=slot, digest=digest, offset=answer.offset)
        return answer


def digest_of(packet: bytes) -> bytes:
    return blake3(packet).digest()


@pytest.fixture
def peer(server: Server, keys: Path) -> Iterator[Callable[..., Peer]]:
    with ExitStack() as stack:
        yield lambda robot=ROBOTS[0], session=bytes(SESSION_BYTES): stack.enter_context(
            Peer(server, keys, robot, session)
        )


# Who is let in


def away(policy: Policy, says: str) -> None:
    """Waits until the policy raises; returns the reason."""
    observation = example_observation(np.random.default_rng(0))

    def said() -> bool:
        try:
            policy.act(observation, "", deterministic=True)
        except PolicyUnavailable as error:
            assert str(error).endswith("; the robot holds")
            return says in str(error)
        return False

    until(said, f"it says {says!r}")


def test_unknown_key_is_refused_until_it_is_allowed(server: Server, keys: Path) -> None:
    save_keypair(new_keypair(), keys, "stranger")
    with link_to(lambda: server.endpoint, keys, SPEC, "stranger") as link:
        policy = link.make_policy(0)
        host = server.endpoint.removeprefix("tcp://")
        away(policy, f"the policy at {host} does not allow this robot's key; the robot holds")
        Keyring(keys).allow(load_keypair(keys / "stranger.key").public, "stranger", "robot")
        acts(policy)
        Keyring(keys).revoke("stranger")
        away(policy, "")


def test_key_of_another_role_is_refused(server: Server, keys: Path) -> None:
    save_keypair(new_keypair(), keys, "learner")
    Keyring(keys).allow(load_keypair(keys / "learner.key").public, "learner", "learner")
    with link_to(lambda: server.endpoint, keys, SPEC, "learner") as link:
        away(link.make_policy(0), "refuses this robot: a learner has no policy here")


def test_robot_cannot_reach_another_robots_slot(peer: Callable[..., Peer]) -> None:
    left, right = peer("left"), peer("right")
    left.greet()
    assert isinstance(left.open(), SlotReady)
    weights = weights_of(SPEC, 0)
    for greets in (False, True):
        if greets:
            right.greet(0)
        assert isinstance(right.act(), SlotNotFound)
        assert isinstance(right.load(weights), SlotNotFound)
    right.greet()  # without slots: a separate session with the other robot's session id
    assert isinstance(left.act(), ActionResponse)


# Weights


def test_equal_weights_are_uploaded_once(server: Server, keys: Path) -> None:
    weights = weights_of(SPEC, 1, hidden=1 << 17)  # several parts
    with ExitStack() as stack:
        found = []
        for robot in ROBOTS:
            link = stack.enter_context(link_to(lambda: server.endpoint, keys, SPEC, robot))
            policy = link.make_policy(0)
            policy.load(weights)
            found.append(acts(policy).actions)
    np.testing.assert_array_equal(*found)
    assert server.server.counters["packets"] == 1


def test_request_with_another_digest_selects_no_action(peer: Callable[..., Peer]) -> None:
    left = peer()
    left.greet()
    left.open()
    weights = weights_of(SPEC, 0)
    digest = digest_of(encode_packet(PackedWeights(), weights))
    assert isinstance(left.act(digest=digest), SlotNotFound)
    assert isinstance(left.load(weights), SlotReady)
    assert isinstance(left.act(digest=digest), ActionResponse)
    assert isinstance(left.act(), SlotNotFound)


def test_chunk_keeps_its_version_during_a_swap(keys: Path) -> None:
    class Chunks(Policy):
        """Acts in chunks of four actions that identify their weights."""

        size = 0.0

        def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
            return ActionChunk(np.full((LENGTH, 2), self.size, np.float32), np.zeros(LENGTH, np.float32))

        def load(self, weights: Mapping[str, Array]) -> None:
            self.size = float(weights["size"][0])

    seen = example_observation(np.random.default_rng(0))
    with serving(keys, lambda kind, features, spec, seed: Chunks()) as server:
        with link_to(lambda: server.endpoint, keys, SPEC) as link:
            policies = DoubleBufferedPolicy(lambda: link.make_policy(0))
            for version in range(1, 6):
                policies.load(version, {"size": np.array([version], np.float32)})
                policies.swap_if_ready()
                chunk = acts(policies.policy, seen)
                policies.load(99, {"size": np.array([99], np.float32)})  # during a chunk, into the other slot
                again = policies.policy.act(seen, "", deterministic=True)
                assert policies.version == version
                assert (chunk.actions == version).all() and (again.actions == version).all()


# An unavailable server


def test_robot_holds_without_the_server_and_resumes_its_version(keys: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, rate_hz=5.0)
    with process(keys, tmp_path) as site, link_to(lambda: site.endpoint, keys, spec) as link:
        policies = DoubleBufferedPolicy(lambda: link.make_policy(0))
        policies.load(7, weights_of(spec, 7))
        policies.swap_if_ready()
        before = acts(policies.policy).actions
        host = site.endpoint.removeprefix("tcp://")
        site.end(signal.SIGKILL)
        away(policies.policy, f"the policy at {host} does not answer; the robot holds")
        site.start()
        np.testing.assert_array_equal(acts(policies.policy).actions, before)
        assert policies.version == 7
        site.end(signal.SIGKILL)
        policies.load(8, weights_of(spec, 8))  # arrives while the server is stopped
        policies.swap_if_ready()
        away(policies.policy, "; the robot holds")
        site.start()
        after = acts(policies.policy).actions
        assert policies.version == 8 and not np.array_equal(after, before)


def test_hanging_server_is_unavailable_until_it_responds(keys: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, rate_hz=5.0)
    with process(keys, tmp_path) as site, link_to(lambda: site.endpoint, keys, spec) as link:
        policy = link.make_policy(0)
        policy.load(weights_of(spec, 7))
        before = acts(policy).actions
        site.send(signal.SIGSTOP)
        away(policy, "does not answer")
        site.send(signal.SIGCONT)
        np.testing.assert_array_equal(acts(policy).actions, before)


def test_late_response_is_dropped(keys: Path) -> None:
    class Echo(Policy):
        """Acts on its observation when the test permits it."""

        def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
            assert go.wait(END_S)
            return ActionChunk(observation[STATE][None].copy(), np.zeros(1, np.float32))

        def load(self, weights: Mapping[str, Array]) -> None:
            raise WireError("it takes none")

    go = threading.Event()
    spec = replace(SPEC, rate_hz=20.0)
    rest = example_observation(np.random.default_rng(0))
    with serving(keys, lambda kind, features, spec, seed: Echo()) as server:
        with link_to(lambda: server.endpoint, keys, spec) as link:
            policy, count = link.make_policy(0), 0
            away(policy, "does not answer")
            go.set()

            def attempt() -> bool:
                nonlocal count
                count += 1
                try:
                    chunk = policy.act(rest | {STATE: np.full(2, count, np.float32)}, "", deterministic=True)
                except PolicyUnavailable:
                    return False
                assert (chunk.actions == count).all()
                return True

            for _ in range(20):
                until(attempt, "it acts")


def test_load_of_one_robot_does_not_delay_another(keys: Path) -> None:
    class Slow(Policy):
        def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
            return ActionChunk(np.zeros((1, 2), np.float32), np.zeros(1, np.float32))

        def load(self, weights: Mapping[str, Array]) -> None:
            loading.set()
            assert go.wait(END_S)

    loading, go = threading.Event(), threading.Event()
    with ExitStack() as stack:
        server = stack.enter_context(serving(keys, lambda kind, features, spec, seed: Slow()))
        left, right = (stack.enter_context(link_to(lambda: server.endpoint, keys, SPEC, robot)) for robot in ROBOTS)
        one, other = left.make_policy(0), right.make_policy(0)
        acts(one), acts(other)
        loader = threading.Thread(target=one.load, args=(weights_of(SPEC, 0),))
        loader.start()
        assert loading.wait(END_S)
        acts(other)
        go.set()
        loader.join(END_S)
        acts(one)


def test_close_ends_a_pending_load(keys: Path) -> None:
    link = link_to(lambda: "", keys, SPEC)
    with link:
        policy = link.make_policy(0)
        policy.load(weights_of(SPEC, 0))  # once there is a server
        away(policy, "the policy is not found yet")
        loads = threading.Thread(target=policy.load, args=(weights_of(SPEC, 1),))
        link.stop_loading()
        loads.start()
        loads.join(LOAD_TIMEOUT_S / 2)
        assert not loads.is_alive()
    link.raise_failure()


# Bounds


def test_too_short_timeout_is_refused(keys: Path) -> None:
    with pytest.raises(ConfigError, match=r"0.5 of a control period of 1 ms is 0.5 ms.*policy.location: edge"):
        link_to(lambda: "", keys, replace(SPEC, rate_hz=1000.0), timeout_fraction=0.5)


def test_port_in_use_raises(server: Server, keys: Path) -> None:
    pair = load_keypair(keys / f"{POLICY_NODE}.key")
    second = PolicyServer(server.endpoint, pair, Keyring(keys), policy_factory("cpu"))
    with pytest.raises(RunError, match=r"cannot listen on .*; choose another address with --listen"):
        second.run(threading.Event())


def test_unknown_policy_is_refused(peer: Callable[..., Peer]) -> None:
    left = peer()
    left.greet()
    endless = replace(SPEC, action=replace(SPEC.action, low=(-np.inf, 0.0)))
    slower = SPEC_BYTES.replace(msgspec.msgpack.encode(SPEC.rate_hz), msgspec.msgpack.encode(-1.0))
    for changes, says in (
        ({"kind": "cnn"}, "expected one of mlp"),
        ({"features": ("smell",)}, "smell"),
        ({"spec": endless}, "finite bounds"),
        ({"spec": msgspec.Raw(slower)}, "a control rate of -1 Hz"),
    ):
        answer = left.open(**changes)
        assert isinstance(answer, RequestRejected) and says in answer.reason
        assert isinstance(left.act(), SlotNotFound)


def test_other_protocol_version_is_refused(peer: Callable[..., Peer]) -> None:
    left = peer()
    for record in (
        {
            "type": "greeting",
            "number": 1,
            "session": left.session,
            "protocol": POLICY_PROTOCOL_VERSION + 1,
            "slots": [],
        },
        {"type": "greeting", "protocol": POLICY_PROTOCOL_VERSION + 1, "of": "another shape"},
    ):
        raw, layout = msgspec.msgpack.encode(record), msgspec.msgpack.encode([])
        head = b"USP2" + len(raw).to_bytes(4, "little") + len(layout).to_bytes(4, "little") + raw + layout
        left.send(head + bytes(-len(head) % 64))
        answer = left.receive()
        assert isinstance(answer, RequestRejected)
        assert (
            f"has protocol version {POLICY_PROTOCOL_VERSION}, this peer {POLICY_PROTOCOL_VERSION + 1}; "
            "install the same" in answer.reason
        )


def test_unused_slot_is_freed(peer: Callable[..., Peer]) -> None:
    left = peer()
    left.greet()
    left.open(0), left.open(1)
    left.greet(1)
    assert isinstance(left.act(0), SlotNotFound) and isinstance(left.act(1), ActionResponse)


# Whatever is sent


def test_server_survives_any_message(server: Server, keys: Path, peer: Callable[..., Peer]) -> None:
    draw = random.Random(0)
    left = peer()
    left.greet()
    left.open()
    valid = encode(SessionHeartbeat(number=1, session=left.session, protocol=POLICY_PROTOCOL_VERSION))
    hostile: list[tuple[bytes, ...]] = [(b"",), (b"\0" * 64,), (valid, valid), (valid[:40],), (b"\x91" * 4096,)]
    for _ in range(200):
        spoiled = bytearray(valid)
        for _ in range(draw.randint(1, 8)):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
        hostile.append((bytes(spoiled),))
    for frames in hostile:
        left.send(*frames)
        left.receive()  # every message gets a response, an invalid one a rejection
    right = peer("right")
    right.greet()
    assert isinstance(right.open(), SlotReady) and isinstance(right.act(), ActionResponse)


def test_invalid_weights_and_observations_are_refused(peer: Callable[..., Peer]) -> None:
    left = peer()
    left.greet()
    left.open()
    weights = weights_of(SPEC, 0)
    assert isinstance(left.load(weights), SlotReady)
    digest = digest_of(encode_packet(PackedWeights(), weights))
    scalar = weights | {"hidden.0.weight": np.float32(1.0).reshape(())}
    for foreign in ({}, scalar, weights | {"hidden.1.weight": np.zeros((0, 0, 3), np.float32)}):
        assert isinstance(left.load(foreign), InvalidInput)
    for observation in ({}, {STATE: np.zeros((9, 9), np.float32)}, {STATE: np.zeros(2, np.bool_)}):
        answer = left.act(digest=digest, observation=observation)
        assert isinstance(answer, InvalidInput) and "observation" in answer.reason
    assert isinstance(left.act(digest=digest), ActionResponse)


def test_request_without_observation_is_refused(peer: Callable[..., Peer]) -> None:
    left, right = peer("left"), peer("right")
    left.greet(), right.greet()
    assert isinstance(left.open(spec=replace(SPEC, observation=())), SlotReady)
    assert isinstance(left.act(), RequestRejected)
    assert isinstance(right.open(), SlotReady) and isinstance(right.act(), ActionResponse)


def test_weights_with_a_wrong_digest_are_refused(peer: Callable[..., Peer]) -> None:
    left = peer()
    left.greet()
    left.open()
    digest, lies = bytes(SESSION_BYTES), {PART_ARRAY: np.zeros(10, np.uint8)}
    assert left.ask(LoadSlotWeights, slot=0, digest=digest, size_bytes=10) == NextPart(number=3, offset=0)
    for arrays in (
        {},
        {PART_ARRAY: np.zeros(11, np.uint8)},
        {PART_ARRAY: np.zeros(0, np.uint8)},
        {PART_ARRAY: np.zeros(10, np.int8)},
    ):
        assert isinstance(left.ask(WeightsPart, arrays, slot=0, digest=digest, offset=0), RequestRejected)
    assert isinstance(left.ask(WeightsPart, lies, slot=0, digest=digest, offset=1), RequestRejected)
    assert isinstance(left.ask(WeightsPart, lies, slot=0, digest=digest, offset=0), RequestRejected)  # another digest
    assert isinstance(left.act(), ActionResponse)
    with pytest.raises(msgspec.ValidationError):  # the peer's decoder
        raw = msgspec.msgpack.encode(
            LoadSlotWeights(number=1, session=digest, slot=0, digest=digest, size_bytes=MAX_WEIGHTS_BYTES + 1)
        )
        msgspec.msgpack.decode(raw, type=LoadSlotWeights)


def test_slots_and_sessions_are_bounded(peer: Callable[..., Peer]) -> None:
    left = peer()
    left.greet()
    for slot in range(MAX_SLOTS):
        assert isinstance(left.open(slot), SlotReady)
    assert isinstance(left.open(MAX_SLOTS), RequestRejected)
    assert isinstance(left.open(0), SlotReady)  # replaces a slot
    for number in range(1, MAX_SESSIONS + 1):
        peer(session=bytes([number]) * SESSION_BYTES).greet()
    assert isinstance(left.act(), SlotNotFound)  # the least recently seen session is removed


def test_requests_beyond_the_queue_are_answered_busy(keys: Path) -> None:
    go = threading.Event()
    make = policy_factory("cpu")

    def slowly_made(*wanted: Any) -> Policy:
        assert go.wait(END_S)
        return make(*wanted)

    with serving(keys, slowly_made) as server, Peer(server, keys, ROBOTS[0], bytes(SESSION_BYTES)) as left:
        left.greet()
        fields = {"session": left.session, "slot": 0, "kind": "mlp", "features": (), "seed": 0, "spec": SPEC}
        for number in range(MAX_JOBS):
            left.send(encode(OpenSlot(number=number, **fields)))
        assert isinstance(left.open(), SlotBusy)
        go.set()
        assert all(isinstance(left.receive(), SlotReady) for _ in range(MAX_JOBS))
        assert isinstance(left.open(), SlotReady)


def test_too_long_message_closes_its_connection_only(server: Server, peer: Callable[..., Peer]) -> None:
    left, right = peer("left"), peer("right")
    left.greet(), right.greet()
    right.open()
    left.send(bytes(MAX_MESSAGE_BYTES + 1))
    assert isinstance(right.act(), ActionResponse)


def test_silent_session_expires() -> None:
    now_s = 0.0
    slots = SessionTable(lambda: now_s)
    slots.heartbeat("left", b"one", ())
    now_s += SESSION_TIMEOUT_S
    slots.heartbeat("right", b"two", ())
    slots.expire(lambda robot: True)
    assert slots.session("left", b"one") and slots.session("right", b"two")
    now_s += 1.0
    slots.expire(lambda robot: True)
    assert slots.session("left", b"one") is None and slots.session("right", b"two")
    slots.expire(lambda robot: robot != "right")
    assert slots.session("right", b"two") is None


def test_weights_cache_is_bounded_and_keeps_the_newest() -> None:
    packets = EncodedWeightsCache(limit_bytes=10)
    for name in (b"a", b"b"):
        packets.put(name, memoryview(bytes(5)))
    assert packets.get(b"a") is not None
    packets.put(b"c", memoryview(bytes(5)))
    assert packets.get(b"b") is None and packets.get(b"a") is not None
    packets.put(b"d", memoryview(bytes(50)))
    assert packets.get(b"a") is None and packets.get(b"d") is not None
