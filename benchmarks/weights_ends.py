"""The two ends of a push, in a process each as in a run: a gateway with two versions, and a robot's receiver."""

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

from benchmarks.weights_models import Weights
from user_sys.codec import Array
from user_sys.messages import (
    NO_VERSION,
    PROTOCOL_VERSION,
    Hello,
    WeightsApplied,
    WeightsManifest,
    WeightsOffer,
    WeightsRequest,
)
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import KeyPair, Keyring, new_keypair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer, TunnelServer
from user_sys.weights.catalog import BlobCache, StoredVersion, VersionCatalog, WeightsServer, build_offer
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.receiver import DoubleBufferedPolicy, ReceiverConfig, WeightsReceiver
from user_sys.weights.signing import new_signer
from user_sys.weights.state import build_tensor_set

DEADLINE_S = 120.0
LIMITS = TunnelLimits(handshake_s=30.0)  # a satellite link takes seconds to open
LOOK_S = 0.5

MakePair = Callable[[], tuple[Weights, Weights]]
"""Makes the weights of two versions, which are pushed in turn."""


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


@dataclass(frozen=True)
class Sizes:
    """Bytes of a version and of what travels from one version to the next, its codecs, and the seconds to encode it."""

    full_bytes: int
    sent_bytes: int
    codecs: str
    encode_s: float


def sizes_of(before: Weights, after: Weights) -> Sizes:
    """Encodes the change from `before` to `after` for a receiver that holds `before`."""
    old, new = build_tensor_set(before), build_tensor_set(after, build_tensor_set(before))
    cache, held = BlobCache(1 << 40), dict(old.blobs())
    for digest, content in (*held.items(), *new.blobs()):
        cache.put(digest, content)
    started_s, sent, codecs = time.perf_counter(), 0, set[str]()
    for base, entry in zip(old.entries, new.entries, strict=True):
        for was, digest in zip(base.blobs, entry.blobs, strict=True):
            if digest not in held:
                encoded = cache.encoded(digest, was, new.tensors[entry.name].itemsize)
                assert encoded is not None
                sent += len(encoded.payload)
                codecs.add(encoded.codec)
    return Sizes(new.size_bytes, sent, " and ".join(sorted(codecs)), time.perf_counter() - started_s)


class _Gateway:
    """A gateway for weights only."""

    def __init__(self, pair: tuple[Weights, Weights]) -> None:
        self.tunnel: TunnelServer
        self.signer, self.version = new_signer(), NO_VERSION
        self._states = tuple(build_tensor_set(weights) for weights in pair)
        self._catalog = VersionCatalog(BlobCache(1 << 40))
        self._newest: StoredVersion | None = None
        self._lock = threading.Lock()
        self._server = WeightsServer(
            self._catalog.cache, lambda name, message, payload: self.tunnel.send(name, message, payload), self._offer
        )

    def refusal_reason(self, hello: Hello) -> str:
        return ""

    def on_peer_opened(self, peer: Peer) -> None:
        with self._lock:
            self._server.add_peer(peer.name)

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        with self._lock:
            self._server.remove_peer(peer.name)

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        with self._lock:
            self._server.on_peer_message(peer.name)
            if isinstance(message, WeightsRequest):
                self._server.on_request(peer.name, message)
            assert isinstance(message, WeightsRequest | WeightsApplied)

    def push(self) -> None:
        """Offers the next version to all robots."""
        self.version += 1
        state = self._states[self.version % 2]
        manifest = WeightsManifest(
            version=self.version,
            updates=0,
            precision="exact",
            digest=state.digest,
            table_bytes=len(state.table),
            size_bytes=state.size_bytes,
            published_unix_ns=0,
        )
        with self._lock:
            self._newest = self._catalog.add_tensors(manifest, self.signer.sign(manifest), state)
            self._server.offer_to_all()

    def _offer(self) -> WeightsOffer | None:
        newest = () if self._newest is None else (self._newest,)
        return build_offer(newest, self._catalog.cache, self.signer.public_key)


def _serve(pipe: Connection, make: MakePair, folder: str) -> None:
    """The gateway's process: pushes the next version on each request, until the pipe is closed."""
    pair = make()
    gateway, keys = _Gateway(pair), new_keypair()
    with TunnelServer("tcp://127.0.0.1:0", keys, Keyring(Path(folder)), gateway, LIMITS) as gateway.tunnel:
        pipe.send((gateway.tunnel.endpoint, keys.public, sizes_of(*pair)))
        with pipe:
            while names := _told(pipe):
                _await_peers(gateway.tunnel, names)
                started_s = time.perf_counter()
                gateway.push()
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

    def __init__(self, name: str, client: TunnelClient, swapper: Notifying, receiver: WeightsReceiver) -> None:
        self._name, self._client, self._swapper, self._receiver = name, client, swapper, receiver

    def await_version(self, version: int) -> None:
        """Swaps as soon as it can, until it acts with `version`, and reports to the gateway."""
        until_s = time.perf_counter() + DEADLINE_S
        while self.version != version:
            self._swapper.loaded.wait(LOOK_S)
            self._swapper.loaded.clear()
            self._receiver.raise_failure()
            self._swapper.swap_if_ready()
            assert time.perf_counter() < until_s, "the push did not arrive"
        self._client.send(self._receiver.applied_report(self._name))

    @property
    def version(self) -> int:
        """That it acts with."""
        return self._swapper.version

    @property
    def stages(self) -> Mapping[str, float]:
        """Seconds of the last push's stages."""
        return self._receiver.planner.stage_seconds


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
        with TunnelClient(
            endpoint or self.endpoint, self._keys[name], self._public_key, hello, limits=LIMITS
        ) as client:
            client.wait_open(DEADLINE_S)
            with WeightsReceiver(client, swapper, config, self._folder, None, Governor(config.governor)) as receiver:
                yield Robot(name, client, swapper, receiver)

    def seconds(self, names: Sequence[str], awaited: Sequence[Robot]) -> float:
        """Offers the next version to the robots called `names`; until the last of those `awaited` acts with it."""
        self._version += 1
        self._pipe.send(tuple(names))
        started_s = float(self._pipe.recv())
        for robot in awaited:
            robot.await_version(self._version)
        return time.perf_counter() - started_s


@contextmanager
def pushing(make: MakePair) -> Iterator[Pushes]:
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
