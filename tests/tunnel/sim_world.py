"""Edges, a gateway with its store, and a learner, on machines that are killed, lose power, sleep and are cut off.

Real: `Outbox`, `TunnelClient` and its thread, `TunnelServer`'s protocol, `ChunkIngester`, `StoreWriter`, the log below
it, `StoreReader`. Modelled: disks (`disk_model`), libzmq with its encryption (`sim_network`), threads and clocks
(`sim_runtime`), the server's poll loop, the recorder, and the parts of the gateway that do not handle chunks.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
from sim_network import DOWN, UP, SimLink, SimNetwork, SimRouter, SimWakeup
from sim_runtime import Runtime, SimProcess

from hal.pacing import Backoff
from user_sys import threads
from user_sys.edge.outbox import Outbox, OutboxFull, WhenFull
from user_sys.episode import Chunk, Phase, decode_chunk
from user_sys.errors import StoreError
from user_sys.gateway import ingest
from user_sys.gateway.config import GatewayConfig
from user_sys.messages import PROTOCOL_VERSION, ChunkAck, ChunkOffer, ChunkRefusal, Hello
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND, StoreReader, StoreWriter
from user_sys.tunnel import client, flow_control, server
from user_sys.tunnel import connection as connection_module
from user_sys.tunnel.keys import AuthorizedKey, KeyPair
from user_sys.tunnel.limits import ChannelLimits, TunnelLimits
from user_sys.tunnel.protocol import AnyMessage, Payload
from user_sys.tunnel.server import Peer

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from disk_model import ROOT, Choice, Disk, Event, State  # noqa: E402  (the store's tests have the model)
from store_kit import chunk  # noqa: E402

logger = logging.getLogger("simulation")

WINDOW = ChannelLimits(window_messages=5, window_bytes=24 << 10)
LIMITS = TunnelLimits(experience=WINDOW, pipe_messages=8)
CONFIG = GatewayConfig(commit_bytes=16 << 10)
OUTBOX_BYTES, SMALL_OUTBOX_BYTES = 256 << 10, 24 << 10
STORE_SEGMENT_BYTES = 48 << 10
CHUNK_BYTES = 8 << 10  # upper bound
EDGES = ("panda-0", "panda-1", "ur5e-0")
DROPPING = "ur5e-0"  # its policy acts alone, and its small outbox drops the oldest episodes
TROUBLE_S = 10.0
QUIET_WITHIN_S = 120.0
LEARNER_SAMPLES = 4

Key = tuple[str, int]


class InvariantViolation(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantViolation(what)


def robot_of(episode: str) -> str:
    return episode.rsplit(".", 1)[0]


def chunks_of(episode: str) -> int:
    """The number of chunks of a complete episode."""
    return 1 + int(episode.rsplit(".", 1)[1]) * 7 % 4


@functools.cache
def packet(episode: str, index: int) -> bytes:
    """The chunk of that name; its size depends on it."""
    robot = robot_of(episode)
    made = chunk(episode, index, end=index == chunks_of(episode) - 1, width=20 + (len(episode) + 97 * index) % 300)
    if robot == DROPPING:
        made.columns["phase"][:] = Phase.POLICY
    return Chunk(msgspec.structs.replace(made.header, robot=robot), made.columns, made.final).encode()


class PlainDisk(Disk):
    """Does not record the caller of a sync."""

    def record(self, event: Event) -> None:
        self.trace.append(event)
        if len(self.trace) == self.kill_at:
            self.kill()


class SimMachine:
    """A disk, and whether its power is on."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world, self.name = world, name
        self.disk = PlainDisk()
        self.process: SimProcess | None = None

    def start(self) -> None:
        """Starts the process if it does not run; a failed start is retried."""
        if self.process is not None:
            return
        self.process = process = SimProcess(self.world.runtime, self.name)
        self._epoch = self.disk.epoch
        try:
            with self.world.runtime.within(process):
                self.run(process)
        except (StoreError, OSError) as error:
            self.world.tell(f"{self.name} did not start: {error}")
            require(self.was_killed, f"{self.name} cannot start: {error!r}")
            self.stop()

    @property
    def was_killed(self) -> bool:
        """Whether an operation of its disk was the process's last."""
        return self.disk.epoch != self._epoch

    def run(self, process: SimProcess) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Kills the process; the disk keeps the page cache."""
        self.disk.kill()
        self.disk.kill_at = -1
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()

    def lose_power(self) -> None:
        rng = self.world.runtime.rng
        self.stop()
        chances = (0.0, 0.5, 1.0)
        state = State(dict(self.disk.start.durable), {}, dict(self.disk.start.names), [])
        for event in self.disk.trace:
            state.advance(event)
        left = state.outcome(Choice(rng.choice(chances), rng.choice(chances), rng, rng.random() < 0.3))
        self.disk = PlainDisk(left)


class Edge(SimMachine):
    """Records chunks; those that the outbox reported as durable are in `promised`."""

    outbox: Outbox
    client: client.TunnelClient

    def run(self, process: SimProcess) -> None:
        runtime = self.world.runtime
        is_small = self.name == DROPPING
        self._max_bytes = SMALL_OUTBOX_BYTES if is_small else OUTBOX_BYTES
        when_full: WhenFull = "drop_oldest_autonomous" if is_small else "pause"
        self.outbox = Outbox.open(ROOT, max_bytes=self._max_bytes, when_full=when_full, files=self.disk.files())
        hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name=self.name)
        keys = KeyPair(self.name, "secret")
        self.client = client.TunnelClient("tcp://sim", keys, "gateway", hello, outbox=self.outbox, limits=LIMITS)
        self.client.start()
        self._begin_episode()
        process.every("record", functools.partial(self._record, runtime.rng), woken=False)

    def _begin_episode(self) -> None:
        self._episode, self._index = f"{self.name}.{self.world.next_episode()}", 0

    def _record(self, rng: random.Random) -> float:
        if not self.world.recording:
            return math.inf
        try:
            self._append()
        except OutboxFull:
            self.world.tell(f"{self.name} pauses: its outbox is full")
            return 1.0
        except (StoreError, OSError) as error:
            require(self.was_killed, f"{self.name} cannot record: {error!r}")
            return math.inf
        bound = self._max_bytes + CHUNK_BYTES
        require(self.outbox.used_bytes <= bound, f"the outbox of {self.name} is beyond its bound")
        if self._index == chunks_of(self._episode):
            self._begin_episode()
        return rng.random() * 1.0

    def _append(self) -> None:
        key = (self._episode, self._index)
        self.outbox.append(packet(*key))
        self.world.promised[self.name].append(key)
        self._index += 1


class Ring:
    """Allows every edge, with its name as key."""

    unreadable: tuple[str, ...] = ()

    def find(self, public: str) -> AuthorizedKey | None:
        return AuthorizedKey(public=public, name=public, role="robot") if public in EDGES else None

    def refresh(self) -> bool:
        return False


class Cloud(SimMachine):
    """The gateway: the server's protocol, the ingester, the store."""

    server: server.TunnelServer
    committer: ingest.ChunkIngester

    def run(self, process: SimProcess) -> None:
        world = self.world
        files = self.disk.files()
        writer = StoreWriter.open(ROOT, segment_bytes=STORE_SEGMENT_BYTES, files=files)
        self.server = found = server.TunnelServer(
            "tcp://sim", KeyPair("gateway", "secret"), Ring(), self, LIMITS, unix_ns=world.runtime.time_ns
        )
        self.router = SimRouter(world.network)
        found.attach(self.router)  # type: ignore[arg-type]
        self.committer = ingest.ChunkIngester(writer, self._answer, found.release, CONFIG)
        self.committer.start()
        self._next_tick_s = 0.0
        world.network.gateway = process.every("serve", self._serve)

    def stop(self) -> None:
        self.world.network.forget()
        super().stop()

    def _serve(self) -> float:
        """One iteration of the server's loop, without the poll."""
        now_s = self.world.runtime.now_s
        self.server.receive()
        retry_s = self.server.flush()
        if now_s >= self._next_tick_s:
            self.server.tick()
            self._next_tick_s = now_s + server.TICK_S
        self.world.network.sweep()
        require(self.server.counters["malformed"] == 0, "the gateway found an honest edge malformed")
        bound = 2 * len(EDGES) * (WINDOW.window_bytes + CHUNK_BYTES)
        require(self.committer.queued_bytes <= bound, "the committer's queue is beyond its bound")
        return 0.0 if self.router.has_message() else retry_s

    # The handler

    def refusal_reason(self, hello: Hello) -> str:
        return ""

    def on_peer_opened(self, peer: Peer) -> None:
        self.world.tell(f"gateway opened {peer.name}")

    def on_peer_closed(self, peer: Peer, reason: str) -> None:
        self.world.tell(f"gateway closed {peer.name}: {reason}")
        self.committer.discard_session(peer)

    def on_message(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, ChunkOffer) and payload is not None:
            self.committer.put_chunk(peer, message, payload)

    def _answer(self, peer: Peer, answer: ChunkAck | ChunkRefusal) -> None:
        require(isinstance(answer, ChunkAck), f"an honest chunk was refused: {answer}")
        self.server.reply(peer, answer)


class SimLearner:
    """Follows the store on the cloud's disk through its index, and samples it."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self._reader: StoreReader | None = None
        self._disk: Disk | None = None
        self.process = SimProcess(world.runtime, "learner")
        self.process.every("learn", self._step)

    def _step(self) -> float:
        disk = self.world.cloud.disk
        if self._disk is not disk:  # its machine has restarted
            self._reader, self._disk = None, disk
        if self._reader is None:
            with suppress(StoreError):
                self._files = disk.files()
                self._reader = StoreReader.open(ROOT, files=self._files)
        if self._reader is not None:
            self._files.epoch = disk.epoch  # it outlives the gateway
            self._reader.refresh()
            self.sample(self._reader)
        return self.world.runtime.rng.random() * 4.0

    def sample(self, store: StoreReader) -> None:
        """Reads some episodes: complete ones have all steps, others all received steps."""
        rng, episodes = self.world.runtime.rng, store.index.episodes
        for _ in range(min(LEARNER_SAMPLES, len(episodes.ids.names))):
            self.check_episode(store, rng.randrange(len(episodes.ids.names)))

    def check_episode(self, store: StoreReader, row: int) -> int:
        """Reads an episode through the index. Returns the number of its chunks in order."""
        index = store.index
        name, chunks = index.episodes.ids.names[row], index.chunks
        at = next(iter(np.flatnonzero((chunks.episode[:] == row) & (chunks.index[:] == 0)).tolist()), -1)
        found = 0
        while at >= 0:
            read = store.read_packed(at)
            require((read.header.episode, read.header.index) == (name, found), f"{name}: chunk {found} is out of order")
            require(bytes(read.packet.view) == packet(name, found), f"{name}: chunk {found} is not what was recorded")
            at, found = int(chunks.next_chunk[at]), found + 1
        if index.episodes.complete[row]:
            require(found == chunks_of(name), f"{name} is called complete with {found} of {chunks_of(name)} chunks")
        return found


class SimWorld:
    """One simulation; see `run`."""

    def __init__(self, seed: int, verbose: bool = False) -> None:
        self.seed, self.verbose = seed, verbose
        self.runtime = Runtime(random.Random(seed))
        self.network = SimLink.network = SimNetwork(self.runtime, LIMITS)
        self.promised: dict[str, list[Key]] = defaultdict(list)
        self.recording = True
        self.faults: Counter[str] = Counter()
        self._episodes = 0
        self.edges = [Edge(self, name) for name in EDGES[: 1 + seed % len(EDGES)]]
        self.cloud = Cloud(self, "gateway")
        self.learner = SimLearner(self)

    def tell(self, what: str) -> None:
        if self.verbose:
            print(f"{self.runtime.now_s - 1000:9.4f}  {what}")

    def next_episode(self) -> int:
        self._episodes += 1
        return self._episodes

    @property
    def machines(self) -> list[SimMachine]:
        return [*self.edges, self.cloud]

    def run(self) -> None:
        """Raises InvariantViolation."""
        with self._patches():
            try:
                self._live()
            finally:
                for machine in self.machines:
                    machine.stop()

    def _live(self) -> None:
        self.tell(f"seed {self.seed}: {len(self.edges)} edges")
        end_s = self.runtime.now_s + TROUBLE_S
        while self.runtime.now_s < end_s:
            for machine in self.machines:
                if self.runtime.rng.random() < 0.7:
                    machine.start()
            self._pass(self.runtime.rng.expovariate(1.0))
            self._trouble()
        self._come_to_rest()
        self._check()

    def _pass(self, seconds: float) -> None:
        """Advances time, and ends processes that an operation of their disk has killed."""
        end_s = self.runtime.now_s + seconds
        while self.runtime.now_s < end_s:
            self.runtime.run_until(min(end_s, self.runtime.now_s + 0.5))
            self._bury()

    def _bury(self) -> None:
        for machine in self.machines:
            if machine.process is not None and machine.was_killed:
                machine.stop()
        failure = self.cloud.committer.failure if self.cloud.process else None
        require(failure is None, f"the committer failed: {failure!r}")

    # Faults

    def _trouble(self) -> None:
        rng = self.runtime.rng
        fault = rng.choice(TROUBLES)
        self.faults[fault.__name__] += 1
        fault(self, rng.choice(self.edges))

    def _patches(self) -> contextmanager[None]:  # type: ignore[type-arg]
        rng = self.runtime.rng
        return self.runtime.patched(
            {
                client: {
                    "new_context": lambda: SimpleNamespace(term=lambda: None),
                    "Connection": SimLink,
                    "Backoff": lambda low, high: Backoff(low, high, rng),
                    "request_short_time_slice": lambda: None,
                    "Wakeup": SimWakeup,
                },
                server: {"silence_s": self.network.silence_s},
                **dict.fromkeys((connection_module, flow_control, ingest, threads), {}),
            }
        )

    # The end

    def _come_to_rest(self) -> None:
        self.tell("no more faults")
        self.network.heal()
        self.network.slow_s = 0.02
        self.recording = False
        for machine in self.machines:
            if machine.process is not None:
                machine.process.frozen_until_s = 0.0
            machine.disk.kill_at = -1
        self._bury()
        deadline_s = self.runtime.now_s + QUIET_WITHIN_S
        for machine in self.machines:
            machine.start()
        while any(len(edge.outbox) for edge in self.edges):
            for machine in self.machines:
                machine.start()
            self._pass(1.0)
            states = {edge.name: (edge.client.state.value, edge.client.reason) for edge in self.edges}
            left = {edge.name: len(edge.outbox) for edge in self.edges}
            require(self.runtime.now_s < deadline_s, f"not at rest after {QUIET_WITHIN_S} s: {left} {states}")

    def _check(self) -> None:
        if self.runtime.rng.random() < 0.5:
            self.cloud.lose_power()
        with StoreReader.open(ROOT, files=self.cloud.disk.files()) as store:
            store.refresh()
            names, damaged = store.index.episodes.ids.names, store.damaged
            whole = {name: self.learner.check_episode(store, row) for row, name in enumerate(names)}
        for edge in self.edges:
            missing = {name for name, index in self.promised[edge.name] if index >= whole.get(name, 0)}
            dropped = edge.outbox.dropped.episodes
            require(len(missing) <= dropped, f"recorded and not in the store: {sorted(missing)}; dropped: {dropped}")
        require(not damaged or self.faults["power_cut"] > 0, f"damaged: {damaged}")
        times = Counter(stored(self.cloud.disk))
        require(not times or max(times.values()) == 1, f"twice in the store: {times.most_common(1)}")


def stored(disk: Disk) -> Iterator[Key]:
    with LogReader.open(ROOT, files=disk.files()) as log:
        for ref in log.records():
            if ref.kind == CHUNK_KIND:
                header = decode_chunk(log.read(ref)).header
                yield header.episode, header.index


# Faults to inject


def kill(world: SimWorld, edge: Edge) -> None:
    machine = world.runtime.rng.choice(world.machines)
    world.tell(f"kill {machine.name}")
    machine.stop()


def power_cut(world: SimWorld, edge: Edge) -> None:
    machine = world.runtime.rng.choice(world.machines)
    world.tell(f"power cut at {machine.name}")
    machine.lose_power()


def kill_at_the_disk(world: SimWorld, edge: Edge) -> None:
    """Kills a process in the middle of an operation of its disk."""
    machine = world.runtime.rng.choice(world.machines)
    machine.disk.kill_at = len(machine.disk.trace) + world.runtime.rng.randint(1, 8)
    world.tell(f"{machine.name} will be killed by an operation of its disk")


def reset(world: SimWorld, edge: Edge) -> None:
    """Some connections of an edge break, perhaps not all three."""
    for connection in list(world.network.connections.values()):
        if connection.edge == edge.name and world.runtime.rng.random() < 0.6:
            world.network.break_connection(connection)
    world.tell(f"connections of {edge.name} reset")


def partition(world: SimWorld, edge: Edge) -> None:
    ways = world.runtime.rng.choice(([UP], [DOWN], [UP, DOWN]))
    world.network.blocked |= {(edge.name, way) for way in ways}
    world.tell(f"{edge.name} is cut off: {ways}")


def stall(world: SimWorld, edge: Edge) -> None:
    """Stops one connection without breaking it."""
    mine = [connection for connection in world.network.connections.values() if connection.edge == edge.name]
    if mine:
        world.runtime.rng.choice(mine).stalled = True
    world.tell(f"a connection of {edge.name} stalls")


def heal(world: SimWorld, edge: Edge) -> None:
    world.network.heal()
    world.tell("partitions healed")


def delay(world: SimWorld, edge: Edge) -> None:
    world.network.slow_s = world.runtime.rng.choice((0.002, 0.05, 0.5, 3.0))
    world.tell(f"delays up to {world.network.slow_s} s")


def sleep(world: SimWorld, edge: Edge) -> None:
    """Suspends a machine for a while."""
    machine = world.runtime.rng.choice(world.machines)
    if machine.process is not None:
        machine.process.frozen_until_s = world.runtime.now_s + world.runtime.rng.uniform(0.1, 12.0)
    world.tell(f"{machine.name} sleeps")


def clock_jump(world: SimWorld, edge: Edge) -> None:
    world.runtime.wall_s += world.runtime.rng.uniform(-1e5, 1e5)
    world.tell("clocks jump")


TROUBLES: list[Callable[[SimWorld, Edge], None]] = [
    *(kill, kill, power_cut, power_cut, kill_at_the_disk),
    *(reset, reset, reset, partition, partition, stall, heal, heal, heal, delay, delay, sleep, clock_jump),
]
