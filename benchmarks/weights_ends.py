"""The two ends of a push, in a process each as in a run: a gateway with versions to hand out, and a robot's inlet."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from msgspec.structs import replace as with_fields

from user_sys.codec import Array
from user_sys.messages import NO_VERSION, PROTOCOL_VERSION, Hello, WeightsApplied, WeightsOffer, WeightsRequest
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import KeyPair, Keyring, new_keypair
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import TunnelServer
from user_sys.tunnel.session import Peer
from user_sys.weights.distribution import PrefetchPlanner, read_blocks
from user_sys.weights.double_buffer import DoubleBufferedPolicy
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.patches import Patch, VersionIndex, delta_patch, full_patch
from user_sys.weights.receiver import ReceiverConfig, WeightsReceiver
from user_sys.weights.signing import new_signer
from user_sys.weights.state import BF16, TensorSet, build_manifest, build_tensor_set

DEADLINE_S = 120.0
LOOK_S = 0.5


class Holder(Policy):
    """Updates copies of its weights in place, as a policy does; it never acts."""

    def __init__(self) -> None:
        self.weights: dict[str, Array] = {}

    def act(self, observation: Mapping[str, Array], sentence: str, *, deterministic: bool) -> ActionChunk:
        return ActionChunk(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))

    def load(self, weights: Mapping[str, Array]) -> None:
        if self.weights.keys() != weights.keys():
            self.weights = {name: array.copy() for name, array in weights.items()}
            return
        for name, array in weights.items():
            np.copyto(self.weights[name], array)


def floats(megabytes: int, tensors: int) -> dict[str, Array]:
    rng, size = np.random.default_rng(0), megabytes * 250_000 // tensors
    return {f"layer.{i}": rng.normal(size=size).astype(np.float32) for i in range(tensors)}


def large(parameters: int, tensors: int = 100) -> dict[str, Array]:
    """bfloat16 weights between 2^-8 and 2^8, drawn once and repeated."""
    values = np.random.default_rng(0).integers(0x3B80, 0x4380, parameters // tensors).astype(np.uint16)
    return {f"layer.{i:03}": np.roll(values, i).view(BF16) for i in range(tensors)}


def updated(weights: Mapping[str, Array], share: float, seed: int) -> dict[str, Array]:
    """Moves that share of the values to their neighbour, up or down, as a small step does in bf16."""
    rng, found = np.random.default_rng(seed), {}
    for name, array in weights.items():
        fresh = array.copy()
        bits = fresh.view(np.uint16)
        chosen = np.flatnonzero(rng.random(bits.size, np.float32) < share)
        bits[chosen] += rng.integers(0, 2, chosen.size, np.uint16) * np.uint16(2) - np.uint16(1)
        found[name] = fresh
    return found


@dataclass(frozen=True)
class Pair:
    """Two versions, and what leads from each to the other; and how long that took to make."""

    before: TensorSet
    after: TensorSet
    there: Patch
    back: Patch
    encode_s: float


def changed(parameters: int, share: float) -> Pair:
    """That share of the values of a large policy changed."""
    weights = large(parameters)
    return _pair(build_tensor_set(weights), build_tensor_set(updated(weights, share, 1)))


def adapted(parameters: int) -> Pair:
    """An adapter of 2.25M parameters next to a large frozen policy."""
    before = build_tensor_set(large(parameters))
    adapters = {f"adapter.{i}": np.random.default_rng(i).normal(size=45_000).astype(np.float32) for i in range(50)}
    tuned = {name: array + np.float32(1e-3) for name, array in adapters.items()}
    with_adapters = build_tensor_set({**before.tensors, **adapters}, previous=before)
    return _pair(with_adapters, build_tensor_set({**before.tensors, **tuned}, previous=with_adapters))


def _pair(before: TensorSet, after: TensorSet) -> Pair:
    started = time.perf_counter()
    there, back = delta_patch(0, before, 1, after), delta_patch(0, after, 1, before)
    encode_s = (time.perf_counter() - started) / 2
    assert there is not None and back is not None
    return Pair(before, after, there, back, encode_s)


class _Gateway:
    """A gateway for weights only: answers requests from a version index."""

    def __init__(self) -> None:
        self.server: TunnelServer
        self.catalogue = VersionIndex()
        self.version = NO_VERSION
        self.signer = new_signer()
        self._waiting: dict[str, WeightsApplied] = {}

    def refusal_reason(self, hello: Hello) -> str:
        return ""

    def on_peer_opened(self, peer: Peer) -> None:
        return

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        return

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, WeightsRequest):
            self._answer(peer.name, message)
        elif isinstance(message, WeightsApplied):
            self._waiting[peer.name] = message

    def _answer(self, name: str, request: WeightsRequest) -> None:
        for found, content in read_blocks(self.catalogue, request):
            self.server.send(name, found, content)

    def push(self, name: str, offer: WeightsOffer) -> None:
        """Offers a version to a robot, and sends ahead the part that the robot accepts unasked."""
        waits = self._waiting.pop(name, None)
        ahead = PrefetchPlanner(self.catalogue, self.version).requests(waits) if waits is not None else ()
        assert self.server.send(name, with_fields(offer, ahead=ahead))
        for request in ahead:
            self._answer(name, request)

    def offer(self, state: TensorSet, patch: Patch) -> WeightsOffer:
        """Adds the next version to the index: the patch is announced under this version's number."""
        self.version += 1
        base = NO_VERSION if patch.info.base == NO_VERSION else self.version - 1
        info = with_fields(patch.info, id=self.version.to_bytes(32, "little"), version=self.version, base=base)
        self.catalogue.patches = {info.id: Patch(info, patch.payload)}
        manifest = build_manifest(state, self.version, 0, 0, (0.0, 0.0))
        signed = self.signer.sign(manifest)
        self.catalogue.manifests = {("exact", self.version): (manifest, signed)}
        return WeightsOffer(manifests=(signed,), parcels=(info,), signer=self.signer.public_key)


def _serve(pipe: Connection, make: Callable[[], Pair | dict[str, Array]], folder: str) -> None:
    """The gateway's process: pushes the next version on each request, until the pipe is closed."""
    gateway, keys = _Gateway(), new_keypair()
    made = make()
    pair = made if isinstance(made, Pair) else None
    state = pair.before if pair else build_tensor_set(made)  # type: ignore[arg-type]
    full = full_patch(state, 0)
    with TunnelServer("tcp://127.0.0.1:0", keys, Keyring(Path(folder)), gateway) as gateway.server:
        pipe.send((gateway.server.endpoint, keys.public, _sizes(full, pair)))
        with pipe:
            while names := _told(pipe):
                if pair is None or gateway.version == NO_VERSION:
                    offer = gateway.offer(state, full)
                elif gateway.version % 2 == 0:
                    offer = gateway.offer(pair.after, pair.there)
                else:
                    offer = gateway.offer(pair.before, pair.back)
                _await_peers(gateway.server, names)
                started_s = time.perf_counter()
                for name in names:
                    gateway.push(name, offer)
                pipe.send(started_s)


def _await_peers(server: TunnelServer, names: tuple[str, ...]) -> None:
    until_s = time.perf_counter() + DEADLINE_S
    while not {peer.name for peer in server.peers()} >= set(names):
        assert time.perf_counter() < until_s, f"{names} have not all come"
        time.sleep(1e-3)


def _told(pipe: Connection) -> tuple[str, ...]:
    """The robots that get the next version; none once the pipe is closed."""
    try:
        return tuple(pipe.recv())
    except EOFError:
        return ()


@dataclass(frozen=True)
class Sizes:
    """Bytes of a full patch and of a difference, its codec, and the seconds of making it; of a full one alone 0."""

    full_bytes: int
    delta_bytes: int
    codec: str
    encode_s: float


def _sizes(full: Patch, pair: Pair | None) -> Sizes:
    if pair is None:
        return Sizes(full.info.size_bytes, 0, "full", 0.0)
    return Sizes(full.info.size_bytes, pair.there.info.size_bytes, pair.there.info.codec, pair.encode_s)


class Notifying(DoubleBufferedPolicy):
    """Signals a version that is ready to be swapped to: polling for it would take the processor from the transfer."""

    def __init__(self) -> None:
        super().__init__(Holder)
        self.loaded = threading.Event()

    def load(
        self, version: int, weights: Mapping[str, Array], offered_s: float | None = None, run: bytes = b""
    ) -> None:
        super().load(version, weights, offered_s, run)
        self.loaded.set()


class Robot:
    """A robot's receiving end and the policy that it loads, in this process."""

    def __init__(self, name: str, client: TunnelClient, swapper: Notifying, inlet: WeightsReceiver) -> None:
        self._name, self._client, self._swapper, self._inlet = name, client, swapper, inlet

    def await_version(self, version: int) -> None:
        """Swaps as soon as it can, until it acts with `version`, and reports to the gateway."""
        until_s = time.perf_counter() + DEADLINE_S
        while self.version != version:
            self._swapper.loaded.wait(LOOK_S)
            self._swapper.loaded.clear()
            self._inlet.raise_failure()
            self._swapper.swap_if_ready()
            assert time.perf_counter() < until_s, "the push did not arrive"
        self._client.send(self._inlet.applied_report(self._name))

    @property
    def version(self) -> int:
        """That it acts with."""
        return self._swapper.version

    @property
    def stages(self) -> Mapping[str, float]:
        """Seconds of the last push's stages."""
        return self._inlet.planner.stage_seconds


class Pushes:
    """The gateway's process as seen from here."""

    def __init__(self, pipe: Connection, endpoint: str, public_key: str, sizes: Sizes, folder: Path) -> None:
        self.endpoint, self.sizes = endpoint, sizes
        self._pipe, self._public_key, self._folder = pipe, public_key, folder
        self._keys: dict[str, KeyPair] = {}
        self._version = NO_VERSION

    @contextmanager
    def robot(self, name: str, endpoint: str = "") -> Iterator[Robot]:
        """Connects a robot, through `endpoint` if it is given."""
        if name not in self._keys:
            self._keys[name] = new_keypair()
            Keyring(self._folder).allow(self._keys[name].public, name, "robot")
        hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name=name)
        swapper, config = Notifying(), ReceiverConfig(governor=GovernorConfig(enabled=False))
        with TunnelClient(endpoint or self.endpoint, self._keys[name], self._public_key, hello) as client:
            client.wait_open(DEADLINE_S)
            with WeightsReceiver(client, swapper, config, self._folder, None, Governor(config.governor)) as inlet:
                yield Robot(name, client, swapper, inlet)

    def seconds(self, names: Sequence[str], awaited: Sequence[Robot]) -> float:
        """Offers the next version to the robots called `names`; until the last of those `awaited` acts with it."""
        self._version += 1
        self._pipe.send(tuple(names))
        started_s = float(self._pipe.recv())
        for robot in awaited:
            robot.await_version(self._version)
        return time.perf_counter() - started_s


@contextmanager
def pushing(make: Callable[[], Pair | dict[str, Array]]) -> Iterator[Pushes]:
    """A gateway's process; `make` is called there."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ours, theirs = context.Pipe()
        gateway = context.Process(target=_serve, args=(theirs, make, folder), daemon=True)
        gateway.start()
        theirs.close()
        stack.callback(gateway.join, DEADLINE_S)
        stack.enter_context(ours)
        yield Pushes(ours, *ours.recv(), Path(folder))
