"""The policy server: who is admitted, sharing and batches, weights, unavailable servers, and invalid messages."""

from __future__ import annotations

import dataclasses
import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from blake3 import blake3
from inference_kit import (
    END_S,
    OBSERVATION,
    ROBOTS,
    SPEC,
    EchoPolicy,
    EchoServer,
    acts,
    failing,
    make_keys,
    process,
    remote,
    running,
    serving,
    unavailable,
    until,
)
from msgspec.structs import replace

from hal.errors import SpecError
from hal.spec import ENVIRONMENT_STATE, STATE, Array, SafetyLimits
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.codec import encode_packet
from user_sys.edge.chunk_executor import ChunkExecutor
from user_sys.errors import ConfigError, PolicyUnavailable, RunError, WireError
from user_sys.inference.policy_server import IDLE_TIMEOUT_S, REMEMBERED_BATCHES, BatchTimes, PolicyServer, PolicyTable
from user_sys.inference.protocol import (
    MAX_MESSAGE_BYTES,
    POLICY_NODE,
    POLICY_PROTOCOL_VERSION,
    PREVIOUS_POLICY_PROTOCOL_VERSION,
    ActionRequest,
    ActionResponse,
    PolicyDescription,
    decode_response,
    encode_description,
)
from user_sys.inference.remote_policy import STANDING_TIMEOUT_S, RemotePolicy, action_timeout_s
from user_sys.messages import NO_VERSION
from user_sys.policies.correction import ChunkCorrection
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.policy import ActionChunk, ChunkContext, ExecutionConfig, ExecutionMethod, PolicyQuery
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key, new_keypair, save_keypair

OLD_REQUEST = Path(__file__).parent / "policy-protocol-4.msgpack"
DESCRIPTION = encode_description(PolicyDescription(kind="mlp", options={}, features=(), spec=SPEC).shared)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def server(keys: Path) -> Iterator[EchoServer]:
    with serving(keys) as found:
        yield found


@pytest.fixture
def robots(server: EchoServer, keys: Path) -> Iterator[list[RemotePolicy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(remote(lambda: server.endpoint, keys, robot)) for robot in ROBOTS]


class Peer:
    """A robot's key with any messages."""

    def __init__(self, server: EchoServer, keys: Path, robot: str = ROBOTS[0]) -> None:
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

    def receive(self) -> ActionResponse:
        assert self._socket.poll(1e3 * END_S)
        return decode_response(self._socket.recv())[0]


def request(number: int, observation: dict[str, Array] = OBSERVATION, **changes: object) -> bytes:
    fields: dict[str, object] = {"protocol": POLICY_PROTOCOL_VERSION, "number": number, "instruction": ""}
    fields |= {"policy": blake3(DESCRIPTION).digest(), "description": DESCRIPTION}
    fields |= {"deterministic": True, "explore": False, "timeout_s": 60.0}
    return encode_packet(ActionRequest(**{**fields, **changes}), observation)  # type: ignore[arg-type]


# Who is admitted


def test_unknown_key_is_refused_until_it_is_allowed(server: EchoServer, keys: Path) -> None:
    save_keypair(new_keypair(), keys, "stranger")
    host = server.endpoint.removeprefix("tcp://")
    quick = replace(SPEC, rate_hz=10.0)
    with remote(lambda: server.endpoint, keys, "stranger", quick) as policy:
        reason = "does not allow this robot's key; run `user-sys keys allow` there; the robot holds"
        unavailable(policy, f"the policy at {host} {reason}")
        Keyring(keys).allow(load_keypair(keys / "stranger.key").public, "stranger", "robot")
        acts(policy)
        Keyring(keys).revoke("stranger")
        unavailable(policy, "; the robot holds")


def test_key_of_another_role_is_refused(server: EchoServer, keys: Path) -> None:
    save_keypair(new_keypair(), keys, "learner")
    Keyring(keys).allow(load_keypair(keys / "learner.key").public, "learner", "learner")
    with remote(lambda: server.endpoint, keys, "learner") as policy:
        unavailable(policy, "refuses this robot: its key is a learner's")


def test_robot_one_protocol_version_behind_gets_actions(server: EchoServer, keys: Path) -> None:
    """The request was recorded by protocol 4."""
    with Peer(server, keys) as old:
        old.send(OLD_REQUEST.read_bytes())
        response = old.receive()
    assert (response.number, response.unavailable, response.invalid) == (1, "", "")
    assert response.version != NO_VERSION, "the policy acted"


# Sharing, batches, weights


@pytest.mark.parametrize("opens", [False, True])
def test_failed_policy_is_freed_at_once(opens: bool) -> None:
    class Failed(EchoPolicy):
        error = MemoryError("CUDA out of memory")

        def raise_failure(self) -> None:
            raise self.error

    freed, digest = list[weakref.ref[EchoPolicy]](), blake3(DESCRIPTION).digest()

    @contextmanager
    def open_policy(description: PolicyDescription) -> Iterator[Any]:
        policy = Failed(description)
        freed.append(weakref.ref(policy))
        if not opens:
            raise policy.error
        yield policy

    def attempt() -> bool:
        try:
            return table.get("left", digest, DESCRIPTION) is not None
        except WireError as error:
            return "cannot be loaded" in str(error)

    table = PolicyTable(open_policy, time.monotonic)
    gc.disable()
    try:
        until(attempt, "it is opened, or could not be")
        table.expire(lambda robot: True)
        table.close()
        assert not table.is_known(digest) and freed[0]() is None
    finally:
        gc.enable()


def test_robots_with_equal_policies_share_one(server: EchoServer, robots: list[RemotePolicy], keys: Path) -> None:
    for policy in robots:
        np.testing.assert_array_equal(acts(policy).actions[0], OBSERVATION[STATE][:2])
    assert len(server.opened) == 1
    with remote(lambda: server.endpoint, keys, spec=replace(SPEC, model="another")) as other:
        acts(other)
    assert len(server.opened) == 2


def test_robots_that_differ_in_limits_only_share_a_policy(
    server: EchoServer, robots: list[RemotePolicy], keys: Path
) -> None:
    acts(robots[0])
    limits = SafetyLimits(tool_force_max=5.0, reduced_speed=0.1)
    with remote(lambda: server.endpoint, keys, "right", replace(SPEC, limits=limits, safe_stop="opens")) as gentle:
        acts(gentle)
    assert len(server.opened) == 1
    with remote(lambda: server.endpoint, keys, "right", replace(SPEC, limits=SafetyLimits(joint_position=(1,)))) as arm:
        acts(arm)
    assert len(server.opened) == 2, "vlash reads the places of the joints"


def answers_together(policy: EchoPolicy, left: Peer, right: Peer) -> list[ActionResponse]:
    """Answers to three requests, of which the last two wait until the first has acted."""
    policy.go.clear()
    policy.batches.clear()
    left.send(request(1))
    until(lambda: policy.batches, "the first request acts")
    left.send(request(2))
    right.send(request(3))
    policy.go.set()
    return [left.receive(), left.receive(), right.receive()]


def test_waiting_requests_of_one_policy_act_as_a_batch(
    server: EchoServer, robots: list[RemotePolicy], keys: Path
) -> None:
    acts(robots[0])
    policy = server.opened[0]
    with Peer(server, keys) as left, Peer(server, keys, "right") as right:

        def attempt() -> bool:
            assert [each.number for each in answers_together(policy, left, right)] == [1, 2, 3]
            return max(policy.batches) == 2

        until(attempt, "both act together")


def test_batch_is_as_large_as_its_deadlines_allow() -> None:
    times = BatchTimes()
    assert times.choose([0.01] * 3) == [0, 1, 2], "nothing is known yet"
    times.add(1, 0.10)
    assert times.predict(3) == pytest.approx(0.3)
    assert times.choose([1.0] * 3) == [0, 1, 2] and times.choose([0.25, *[1.0] * 7]) == [0, 1]
    times.add(8, 0.20)
    assert times.choose([0.25, *[1.0] * 7]) == [*range(8)], "a batch of eight takes little longer"
    assert times.choose([0.15, 0.16, 9.0]) == [0]


def test_request_that_would_be_late_alone_does_not_delay_others() -> None:
    times = BatchTimes()
    times.add(1, 0.10)
    assert times.choose([0.05, 9.0, 9.0]) == [1, 2]
    assert times.choose([0.05, 0.15, 9.0]) == [1]
    assert times.choose([0.05, 0.06]) == [0], "it measures whether it is still so slow"


def test_smaller_batch_is_tried_when_a_large_one_was_late() -> None:
    def took_s(size: int) -> float:
        return 0.006 + 0.005 * size

    times, sizes = BatchTimes(), list[int]()
    for _ in range(5):
        sizes.append(len(times.choose([0.08] * 16)))
        times.add(sizes[-1], took_s(sizes[-1]))
    assert sizes == [16, 1, 7, 13, 14] and took_s(14) < 0.08 < took_s(15)


def test_stall_makes_no_size_look_slow_for_good() -> None:
    times = BatchTimes()
    times.add(1, 0.03)
    for _ in range(3):
        times.add(8, 0.5)  # a stall
        sizes = list[int]()
        for _ in range(6):
            sizes.append(len(times.choose([0.1] * 8)))
            times.add(sizes[-1], 0.03 + 0.002 * sizes[-1])
        assert sizes[-1] == 8, sizes


def test_batch_shrinks_after_the_policy_has_become_slower() -> None:
    times, waits_s = BatchTimes(), [0.03] * 5
    for size in (*range(1, 6), *range(1, 6)):
        times.add(size, 1e-4)  # it explores: no network runs
    late = 0
    for _ in range(REMEMBERED_BATCHES + 20):
        size = len(times.choose(waits_s))
        times.add(size, 0.012 * size)
        late += 0.012 * size > waits_s[0]
    assert size == 2 and late <= REMEMBERED_BATCHES


def test_urgent_request_acts_first_and_the_others_follow(
    server: EchoServer, robots: list[RemotePolicy], keys: Path
) -> None:
    acts(robots[0])
    policy, later = server.opened[0], OBSERVATION | {STATE: np.full_like(OBSERVATION[STATE], 0.25)}
    echo = policy.act_batch

    def act_batch(*args: Any, **settings: Any) -> list[ActionChunk]:
        server.now_s += 20.0
        return echo(*args, **settings)

    policy.act_batch = act_batch  # type: ignore[method-assign]
    for _ in range(5):  # the server learns how long a batch takes now
        acts(robots[0])
    with Peer(server, keys) as left, Peer(server, keys, "right") as right:

        def attempt() -> bool:
            policy.go.clear()
            policy.batches.clear()
            left.send(request(1))
            until(lambda: policy.batches, "the first request acts")
            left.send(request(2, later))
            right.send(request(3, timeout_s=35.0))
            policy.go.set()
            assert [left.receive().number, left.receive().number, right.receive().number] == [1, 2, 3]
            assert policy.batches == [1, 1, 1], "a batch of two would be too late for one"
            return bool(policy.seen[STATE][0] == 0.25)

        until(attempt, "the request with the later deadline acts last")


def test_response_names_the_version_that_acted(server: EchoServer, keys: Path) -> None:
    reports: list[tuple[int, float]] = []
    with remote(lambda: server.endpoint, keys, on_version=lambda *report: reports.append(report)) as policy:
        acts(policy)
        server.opened[0].ready.append(7)
        policy.act(PolicyQuery(OBSERVATION, "", True))
        assert policy.version == 7 and reports[-1] == (7, 0.5)


def test_robot_holds_without_weights_unless_it_may_explore(server: EchoServer, keys: Path) -> None:
    with ExitStack() as stack:
        waiting, exploring = (
            stack.enter_context(remote(lambda: server.endpoint, keys, robot, explore=robot == "right"))
            for robot in ROBOTS
        )
        acts(waiting)
        served = server.opened[0]
        served.version = NO_VERSION
        unavailable(waiting, "waiting for weights")
        assert waiting.awaits_weights
        acts(exploring)
        served.version = 3
        acts(exploring)
        served.version = NO_VERSION  # as after a restart of the server
        unavailable(exploring, "waiting for weights")
        served.version, served.reason = 3, "too old"
        unavailable(waiting, "too old")
        assert not waiting.awaits_weights


def test_exploring_robot_holds_if_the_server_may_have_lost_its_weights(server: EchoServer, keys: Path) -> None:
    with remote(lambda: server.endpoint, keys, explore=True) as policy:
        acts(policy)
        served = server.opened[0]
        served.version, served.may_explore = NO_VERSION, False
    with remote(lambda: server.endpoint, keys, explore=True) as policy:  # the robot's next session
        unavailable(policy, "waiting for weights")
        assert policy.awaits_weights
        served.may_explore = True
        acts(policy)


def test_opening_a_policy_does_not_delay_another_robot(keys: Path) -> None:
    go = threading.Event()
    with ExitStack() as stack:
        server = stack.enter_context(serving(keys, lambda description: description.spec.model != "slow" or go.wait()))
        left = stack.enter_context(remote(lambda: server.endpoint, keys))
        right = stack.enter_context(remote(lambda: server.endpoint, keys, "right", replace(SPEC, model="slow")))
        acts(left)
        unavailable(right, "is being loaded")
        acts(left)
        go.set()
        acts(right)


def test_weights_are_swapped_without_a_request(server: EchoServer, robots: list[RemotePolicy]) -> None:
    acts(robots[0])
    server.opened[0].ready.append(7)
    until(lambda: server.opened[0].version == 7, "the policy has the new weights")


def test_paused_robot_reports_that_it_uses_no_version(server: EchoServer, keys: Path) -> None:
    reports: list[int] = []
    with remote(lambda: server.endpoint, keys, on_version=lambda version, _: reports.append(version)) as policy:
        policy.pause()
        acts(policy)
        policy.pause()
        policy.pause()
        assert reports == [0, NO_VERSION]
        acts(policy)
        assert reports == [0, NO_VERSION, 0], "the same version is in use again"


def test_policy_of_a_robot_that_a_person_has_for_minutes_stays_open(server: EchoServer, keys: Path) -> None:
    with remote(lambda: server.endpoint, keys) as policy:
        acts(policy)
        policy.pause()
        served, calls = server.opened[0], []
        served.swap = lambda: calls.append(None)  # type: ignore[method-assign]  # in each housekeeping
        server.now_s += 10 * 60.0
        until(lambda: server.closed or len(calls) >= 3, "the server has looked for unused policies")
        policy.act(PolicyQuery(OBSERVATION, "", True))
        assert server.opened == [served] and not server.closed


def test_unused_policy_is_closed(server: EchoServer, robots: list[RemotePolicy], keys: Path) -> None:
    acts(robots[0])
    server.now_s += IDLE_TIMEOUT_S + 1
    until(lambda: server.closed == 1, "it is closed")
    acts(robots[0])
    assert len(server.opened) == 2


# An unavailable server


@pytest.mark.parametrize(
    ("signals", "restarts"), [((signal.SIGKILL,), True), ((signal.SIGSTOP, signal.SIGCONT), False)]
)
def test_robot_holds_while_the_server_is_dead_or_hangs(
    keys: Path, tmp_path: Path, signals: tuple[signal.Signals, ...], restarts: bool
) -> None:
    quick = replace(SPEC, rate_hz=5.0)
    with process(keys, tmp_path) as site, remote(lambda: site.endpoint, keys, spec=quick, explore=True) as policy:
        unavailable(policy, "waiting for weights")  # it reaches no gateway
        host = site.endpoint.removeprefix("tcp://")
        site.send(signals[0])
        unavailable(policy, f"the policy at {host} does not answer; the robot holds")
        if restarts:
            site.end()
            site.start()
        else:
            site.send(signals[1])
        unavailable(policy, "waiting for weights")


def test_first_request_after_a_pause_is_answered(server: EchoServer, keys: Path) -> None:
    paused_s = 0.0
    with remote(lambda: server.endpoint, keys, clock=lambda: time.monotonic() + paused_s) as policy:
        acts(policy)
        for pause_s in (10.0, 3600.0):  # while a person drives, or the scene is reset
            paused_s += pause_s
            policy.act(PolicyQuery(OBSERVATION, "", True))


def test_late_response_is_dropped(server: EchoServer, keys: Path) -> None:
    quick = replace(SPEC, rate_hz=20.0)
    with remote(lambda: server.endpoint, keys, spec=quick) as policy:
        acts(policy)
        server.opened[0].go.clear()
        unavailable(policy, "does not answer")
        server.opened[0].go.set()
        for count in range(20):
            seen = OBSERVATION | {STATE: np.full(len(OBSERVATION[STATE]), count, np.float32)}
            assert (acts(policy, seen).actions == count).all()


def test_robot_without_a_server_holds(keys: Path) -> None:
    with remote(lambda: "", keys) as policy, pytest.raises(PolicyUnavailable, match="is not found yet"):
        policy.act(PolicyQuery(OBSERVATION, "", True))


def test_too_short_timeout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.5 of a control period of 1 ms is 0.5 ms.*policy.location: edge"):
        action_timeout_s(replace(SPEC, rate_hz=1000.0), 0.5, may_take_long=False)


def test_robot_whose_time_stands_still_waits_longer() -> None:
    fast = replace(SPEC, rate_hz=1000.0)
    assert action_timeout_s(fast, 0.5, may_take_long=True) == STANDING_TIMEOUT_S
    assert action_timeout_s(replace(SPEC, rate_hz=10.0), 0.5, may_take_long=False) == 0.05


def test_port_in_use_raises(server: EchoServer, keys: Path) -> None:
    pair = load_keypair(keys / f"{POLICY_NODE}.key")
    second = PolicyServer(server.endpoint, pair, Keyring(keys), failing(ConfigError("")))
    with pytest.raises(RunError, match=r"cannot listen on .*; change the policy server's --listen"):
        second.run(threading.Event())


# Invalid messages


@pytest.mark.parametrize("error", [SpecError("it needs finite bounds"), RuntimeError("not enough memory")])
def test_policy_that_cannot_be_opened_is_refused(keys: Path, error: Exception) -> None:
    pair = load_keypair(keys / f"{POLICY_NODE}.key")
    server = PolicyServer("tcp://127.0.0.1:0", pair, Keyring(keys), failing(error))
    with running(server) as endpoint, remote(lambda: endpoint, keys) as policy:
        unavailable(policy, str(error))


def test_robot_opens_one_policy_at_a_time(keys: Path) -> None:
    go, begun = threading.Event(), list[str]()
    with ExitStack() as stack:
        server = stack.enter_context(
            serving(keys, lambda description: (begun.append(description.spec.model), go.wait(END_S)))
        )
        left = stack.enter_context(Peer(server, keys))
        for number in range(1, 5):
            described = encode_description(
                PolicyDescription(kind="mlp", options={}, features=(), spec=replace(SPEC, model=str(number)))
            )
            left.send(request(number, policy=blake3(described).digest(), description=described))
            assert left.receive().unavailable == "is being loaded"
        left.send(request(5, description=b"of another policy"))
        assert "does not match its digest" in left.receive().unavailable
        go.set()
        acts(stack.enter_context(remote(lambda: server.endpoint, keys, "right")))
        assert begun == ["1", SPEC.model]


def test_invalid_observation_fails_no_other_robot(server: EchoServer, robots: list[RemotePolicy], keys: Path) -> None:
    acts(robots[1])
    with Peer(server, keys) as left:
        for observation in ({}, {STATE: np.zeros((9, 9), np.float32)}):
            left.send(request(1, observation))
            assert "observation" in left.receive().invalid or "shape" in left.receive().invalid
            acts(robots[1])


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_vector_of_another_dtype_fails_no_other_robot(
    server: EchoServer, robots: list[RemotePolicy], keys: Path, dtype: type
) -> None:
    acts(robots[1])
    flow = FlowPolicy(SPEC, settings=FlowSettings(hidden=(8,)))
    flow.load(policy_arrays(flow.module))
    server.opened[0].act_batch = flow.act_batch  # type: ignore[method-assign]
    with Peer(server, keys) as left:
        left.send(request(1, {name: array.astype(dtype) for name, array in OBSERVATION.items()}))
        assert f"has dtype {np.dtype(dtype)}; the spec says float32" in left.receive().invalid
        acts(robots[1])


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 must have the same dtype"),
        KeyError("a sentence that the policy does not know"),
        ConfigError("policy.options.text_encoder: no model.safetensors"),
        AttributeError("a defect of an installed package"),
    ],
)
def test_error_of_a_policy_fails_only_its_robot(keys: Path, error: Exception) -> None:
    with serving(keys) as server, remote(lambda: server.endpoint, keys) as policy:
        acts(policy)
        echo = server.opened[0].act_batch

        def act_batch(*args: Any, **settings: Any) -> list[ActionChunk]:
            raise error

        server.opened[0].act_batch = act_batch  # type: ignore[method-assign]
        unavailable(policy, "failed to select an action")
        server.opened[0].act_batch = echo  # type: ignore[method-assign]
        acts(policy)


def test_array_with_a_name_of_the_gpus_errors_fails_only_its_robot(
    server: EchoServer, robots: list[RemotePolicy], keys: Path
) -> None:
    acts(robots[1])
    with Peer(server, keys) as left:
        left.send(request(1, {"CUDA out of memory": np.zeros(1, np.float32)}))
        assert "CUDA" in left.receive().invalid
        acts(robots[1])


def test_batch_without_memory_acts_one_by_one(server: EchoServer, robots: list[RemotePolicy], keys: Path) -> None:
    acts(robots[0])
    policy = server.opened[0]
    echo, refused = policy.act_batch, list[int]()

    def act_batch(observations: Any, *args: Any, **settings: Any) -> list[ActionChunk]:
        chunks = echo(observations, *args, **settings)
        if len(observations) > 1:
            refused.append(len(observations))
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return chunks

    policy.act_batch = act_batch  # type: ignore[method-assign]
    with Peer(server, keys) as left, Peer(server, keys, "right") as right:

        def attempt() -> bool:
            answers = answers_together(policy, left, right)
            assert [(each.number, each.unavailable) for each in answers] == [(1, ""), (2, ""), (3, "")]
            return refused == [2]

        until(attempt, "both act together")


def test_lost_gpu_ends_the_server(keys: Path) -> None:
    echo, ended = EchoServer(keys), threading.Event()

    def act_batch(*args: Any, **settings: Any) -> list[ActionChunk]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def ask(endpoint: str) -> None:
        echo.endpoint = endpoint
        with Peer(echo, keys) as peer:
            while not ended.wait(0.05):
                for policy in echo.opened:
                    policy.act_batch = act_batch  # type: ignore[method-assign]
                peer.send(request(1))

    with ExitStack() as stack:
        stack.callback(ended.set)
        with pytest.raises(RuntimeError, match="device-side assert"):
            echo.server.run(
                threading.Event(), lambda endpoint: threading.Thread(target=ask, args=(endpoint,), daemon=True).start()
            )


def test_server_survives_any_message(server: EchoServer, robots: list[RemotePolicy], keys: Path) -> None:
    draw, valid = random.Random(0), request(1)
    hostile: list[tuple[bytes, ...]] = [(b"",), (b"\0" * 64,), (valid, valid), (valid[:40],), (b"\x91" * 4096,)]
    hostile += [(request(1, policy=bytes(32)),), (request(1, policy=bytes(32), description=b""),)]
    for _ in range(200):
        spoiled = bytearray(valid)
        for _ in range(draw.randint(1, 8)):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
        hostile.append((bytes(spoiled),))
    with Peer(server, keys) as left:
        for frames in hostile:
            left.send(*frames)
            left.receive()  # every message gets a response, an invalid one a refusal
        for version in (POLICY_PROTOCOL_VERSION + 1, PREVIOUS_POLICY_PROTOCOL_VERSION - 1):
            left.send(request(1, protocol=version))
            assert f"this robot {version}; install the same release" in left.receive().unavailable
        left.send(bytes(MAX_MESSAGE_BYTES + 1))  # closes its connection only
        acts(robots[1])


# Pictures


def test_server_gets_all_vectors_as_a_frozen_policy_may_read_other_features(server: EchoServer, keys: Path) -> None:
    with remote(lambda: server.endpoint, keys, features=(ENVIRONMENT_STATE,)) as policy:
        acts(policy)
        (served,) = server.opened
        assert set(served.seen) == {STATE, ENVIRONMENT_STATE}


def test_pictures_are_sent_once_the_server_has_named_the_cameras(server: EchoServer, keys: Path) -> None:
    front = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    pictured = OBSERVATION | {"observation.images.front": front, "observation.images.front.age": np.ones(1, np.float32)}
    with remote(lambda: server.endpoint, keys) as policy:
        acts(policy)
        served = server.opened[0]
        assert policy.cameras == () and not any("images" in name for name in served.seen)
        served.cameras = ("front",)
        unavailable(policy, "needs pictures of front")
        assert policy.cameras == ("front",)
        acts(policy, pictured)
        for name in ("observation.images.front", "observation.images.front.age"):
            np.testing.assert_array_equal(served.seen[name], pictured[name])


def test_options_of_the_policy_reach_the_server_in_any_order(server: EchoServer, keys: Path) -> None:
    for options in ({"hidden": [8], "more": {"b": 1, "a": 2}}, {"more": {"a": 2, "b": 1}, "hidden": [8]}):
        with remote(lambda: server.endpoint, keys, options=options) as policy:
            acts(policy)
    assert [each.options for each in server.opened] == [{"hidden": [8], "more": {"a": 2, "b": 1}}]


def test_promised_actions_travel_with_a_request(server: EchoServer, keys: Path) -> None:
    with remote(lambda: server.endpoint, keys) as policy:
        acts(policy)
        assert server.opened[0].contexts == [None]
        prefix = np.arange(6, dtype=np.float32).reshape(3, 2)
        server.opened[0].bridged = 1
        assert policy.act(PolicyQuery(OBSERVATION, "", True, ChunkContext(prefix, 2))).bridged == 1
        (context,) = server.opened[0].contexts
        assert context is not None and context.delay == 2
        np.testing.assert_array_equal(context.prefix, prefix)
        assert "prefix" not in server.opened[0].seen


@pytest.mark.parametrize("features", [(), (ENVIRONMENT_STATE,), (STATE, ENVIRONMENT_STATE)])
def test_correction_travels_with_its_chunk(server: EchoServer, keys: Path, features: tuple[str, ...]) -> None:
    """It reads the vectors that the policy reads, in the robot's order as the policy."""
    with remote(lambda: server.endpoint, keys, features=features) as policy:
        assert acts(policy).correction is None
        names = tuple(spec.name for spec in SPEC.observation if not features or spec.name in features)
        two = np.ones(2, np.float32)
        seen = np.concatenate([OBSERVATION[name] for name in names])
        layer = np.zeros((2, 2 * len(seen) + 3), np.float32), 0.5 * two
        sent = ChunkCorrection(names, seen, seen, seen, 0 * two, two, 1, (layer,))
        server.opened[0].correction = sent
        found = acts(policy).correction
        assert found is not None and found.features == names
        np.testing.assert_array_equal(found.correct(0 * two, 0, OBSERVATION), 0.5 * two)
        for shape in ((3,), ()):
            server.opened[0].correction = dataclasses.replace(sent, centre=np.ones(shape, np.float32))
            unavailable(policy, "a correction of a chunk")


def test_robot_executes_its_promise_when_the_server_dies_in_mid_chunk(keys: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(keys))
        with remote(lambda: server.endpoint, keys) as policy:
            acts(policy)
            server.opened[0].length = 6
            executor = ChunkExecutor(policy, SPEC.action, ExecutionConfig(mode="async"), deterministic=True)
            executor.begin_episode()

            def next_step() -> int | None:
                try:
                    return executor.next_action(lambda: OBSERVATION, 0, "").chunk_step
                except PolicyUnavailable:
                    return None

            def chunk_begins() -> bool:
                if step := next_step():  # the start of its first chunk was late
                    executor.begin_episode()
                return step == 0

            until(chunk_begins, "the first chunk begins")
            stack.close()
            steps = [next_step() for _ in range(12)]
            held = steps.index(None)
            assert steps[:held] == [*range(1, 1 + held)] and held >= 4 and set(steps[held:]) == {None}


@pytest.mark.parametrize("method", ["rtc", "training_rtc", "a2c2"])
def test_flow_of_a_server_executes_asynchronously(server: EchoServer, keys: Path, method: ExecutionMethod) -> None:
    flow = FlowPolicy(SPEC, settings=FlowSettings(hidden=(8,), prefix_max=4, correction_hidden=(8,)))
    flow.load(policy_arrays(flow.module))
    with remote(lambda: server.endpoint, keys, timeout_s=60.0) as policy:  # a busy machine
        acts(policy)
        server.opened[0].act_batch = flow.act_batch  # type: ignore[method-assign]
        config = ExecutionConfig(mode="async", method=method, delay_periods=2)
        executor = ChunkExecutor(policy, SPEC.action, config, deterministic=True)
        executor.begin_episode()
        for _ in range(2):
            with pytest.raises(PolicyUnavailable, match="has not arrived"):
                executor.next_action(lambda: OBSERVATION, 0, "")
        steps = [executor.next_action(lambda: OBSERVATION, 0, "") for _ in range(14)]
        assert executor.counters.stalls == 0 and steps[-1].chunk >= 2 and steps[-1].delay == 2
