"""Weight pushes: how long, how large, and what the learner's step notices of them (goals 9, 10, 11).

``python -m benchmarks.weights`` prints a table and writes ``benchmarks/out/weights.json`` and the governor's plot in
``docs/images/``; ``--small`` leaves out the policy of 450 million parameters (it needs 8 GB of memory and minutes).
Everything runs over loopback. The bound of a push is the same bytes over bare libzmq with CURVE, in the same process.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace as with_fields

from benchmarks.harness import Row, compare, report
from benchmarks.weights_peers import BareCurve, GrpcPeer, RayPeer
from benchmarks.weights_steps import step_rows
from user_sys.codec import Array
from user_sys.messages import PROTOCOL_VERSION, Hello, WeightsOffer, WeightsRequest
from user_sys.policies.policy import ActionChunk, Policy
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import Keyring, new_keypair
from user_sys.tunnel.server import TunnelServer
from user_sys.tunnel.session import Peer
from user_sys.tunnel.wire import AnyMessage, Payload
from user_sys.weights.catalogue import Catalogue
from user_sys.weights.governor import Governor, GovernorConfig
from user_sys.weights.inlet import InletConfig, WeightsInlet
from user_sys.weights.parcel import Parcel, delta_parcel, full_parcel
from user_sys.weights.records import Signed
from user_sys.weights.serve import answer
from user_sys.weights.signing import Signer, new_signer
from user_sys.weights.state import BF16, State, build_state, describe
from user_sys.weights.swap import PolicySwapper

DEADLINE_S = 60.0
SWAPS_S = 10.0


class Holder(Policy):
    """Keeps copies of its weights in place, as a policy does; acts are not its business here."""

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


# Policies -------------------------------------------------------------------------------------------------------------


def floats(megabytes: int, tensors: int) -> dict[str, Array]:
    rng, size = np.random.default_rng(0), megabytes * 250_000 // tensors
    return {f"layer.{i}": rng.normal(size=size).astype(np.float32) for i in range(tensors)}


def large(parameters: int, tensors: int = 100) -> dict[str, Array]:
    """bfloat16 weights between 2^-8 and 2^8, drawn once and repeated."""
    values = np.random.default_rng(0).integers(0x3B80, 0x4380, parameters // tensors).astype(np.uint16)
    return {f"layer.{i:03}": np.roll(values, i).view(BF16) for i in range(tensors)}


def updated(weights: Mapping[str, Array], share: float, seed: int) -> dict[str, Array]:
    """That share of the values went to their neighbour, up or down: what a small step does to bf16."""
    rng, found = np.random.default_rng(seed), {}
    for name, array in weights.items():
        fresh = array.copy()
        bits = fresh.view(np.uint16)
        chosen = np.flatnonzero(rng.random(bits.size, np.float32) < share)
        bits[chosen] += rng.integers(0, 2, chosen.size, np.uint16) * np.uint16(2) - np.uint16(1)
        found[name] = fresh
    return found


# A push, from the gateway's offer to the swap -------------------------------------------------------------------------


class Counter:
    """A gateway that knows nothing but weights: answers requests from a catalogue."""

    def __init__(self) -> None:
        self.server: TunnelServer
        self.catalogue = Catalogue()

    def objection(self, hello: Hello) -> str:
        return ""

    def peer_opened(self, peer: Peer) -> None:
        return

    def peer_closed(self, peer: Peer, reason: str) -> None:
        return

    def received(self, peer: Peer, message: AnyMessage, payload: Payload | None) -> None:
        if isinstance(message, WeightsRequest):
            self.server.send(peer.name, *answer(self.catalogue, message))


class Push:
    """A gateway, a robot's inlet and a policy, in this process."""

    def __init__(self, counter: Counter, swapper: PolicySwapper, signer: Signer) -> None:
        self.counter, self.swapper, self.signer = counter, swapper, signer
        self.version = 0

    def offer(self, state: State, *parcels: Parcel) -> WeightsOffer:
        """Puts the next version in the catalogue. Parcels may be of an earlier number: they are told as of this one."""
        self.version += 1
        told = [self._renumbered(parcel) for parcel in parcels]
        self.counter.catalogue.parcels = {parcel.info.id: parcel for parcel in told}
        signed: Signed = self.signer.sign(describe(state, self.version, 0, 0, (0.0, 0.0)))
        return WeightsOffer(manifests=(signed,), parcels=tuple(p.info for p in told), signer=self.signer.public_key)

    def _renumbered(self, parcel: Parcel) -> Parcel:
        base = -1 if parcel.info.base < 0 else self.version - 1
        name = self.version.to_bytes(32, "little")
        return Parcel(with_fields(parcel.info, id=name, version=self.version, base=base), parcel.payload)

    def seconds(self, offer: WeightsOffer) -> float:
        """From the offer to the swap."""
        started = time.perf_counter()
        assert self.counter.server.send("panda-0", offer)
        while self.swapper.swap_if_ready() != self.version:
            time.sleep(2e-4)
            assert time.perf_counter() - started < DEADLINE_S, "the push did not arrive"
        return time.perf_counter() - started


@contextmanager
def pushing() -> Iterator[Push]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ring, robot, gateway, counter = Keyring(folder), new_keypair(), new_keypair(), Counter()
        ring.allow(robot.public, "panda-0", "robot")
        counter.server = stack.enter_context(TunnelServer("tcp://127.0.0.1:0", gateway, ring, counter))
        hello = Hello(protocol=PROTOCOL_VERSION, role="robot", name="panda-0")
        client = stack.enter_context(TunnelClient(counter.server.endpoint, robot, gateway.public, hello))
        client.wait_open(10)
        swapper, config = PolicySwapper(Holder), InletConfig(governor=GovernorConfig(enabled=False))
        stack.enter_context(WeightsInlet(client, swapper, config, folder, None, Governor(config.governor)))
        yield Push(counter, swapper, new_signer())


def push_rows(name: str, weights: dict[str, Array], with_ray: bool) -> list[Row]:
    """A full push of `weights` against its bytes over bare CURVE, and the peers' way of doing it."""
    state = build_state(weights)
    parcel = full_parcel(state, 0)
    with ExitStack() as stack:
        push, bare, grpc = stack.enter_context(pushing()), BareCurve(), GrpcPeer(weights)
        stack.callback(bare.close)
        stack.callback(grpc.close)
        peers: dict[str, Callable[[], float]] = {"torch.save + gRPC": lambda: 1e3 * grpc.push()}
        if with_ray:
            ray = RayPeer(weights)
            stack.callback(ray.close)
            peers["Ray object store"] = lambda: 1e3 * ray.push()
        payload = bytes(parcel.payload)
        row = compare(
            f"full push, wire to applied, {name} ({parcel.info.size_bytes / 1e6:,.1f} MB); bound: bytes over CURVE",
            lambda: 1e3 * push.seconds(push.offer(state, parcel)),
            lambda: 1e3 * bare.seconds(payload),
            goal=9,
            unit="ms",
            target=1 / 1.5,
            more_is_better=False,
            peers=peers,
        )
    return [row]


def small_change_rows(name: str, before: State, after: State) -> list[Row]:
    """A push of what changed: its size against a full parcel, and its time; both versions in turn."""
    started = time.perf_counter()
    there, back = delta_parcel(0, before, 1, after), delta_parcel(0, after, 1, before)
    encode_s = (time.perf_counter() - started) / 2
    assert there is not None and back is not None
    times = []
    with pushing() as push:
        push.seconds(push.offer(before, full_parcel(before, 0)))
        for turn in range(8):
            state, parcel = (after, there) if turn % 2 == 0 else (before, back)
            times.append(1e3 * push.seconds(push.offer(state, parcel)))
    smaller = before.size_bytes / there.info.size_bytes
    return [
        Row(10, f"{name}: full / payload, codec {there.info.codec}", "times", smaller, 40.0, smaller / 40,
            target=1.0, met=smaller >= 40),
        Row(9, f"{name}: push, wire to applied", "ms", float(np.median(times)), None, None),
        Row(10, f"{name}: encoding at the learner", "ms", 1e3 * encode_s, None, None),
    ]  # fmt: skip


def large_rows(parameters: int) -> list[Row]:
    weights = large(parameters)
    before = build_state(weights)
    title = f"{parameters / 1e6:.0f}M bf16"
    rows = small_change_rows(f"{title}, 1% of values changed", before, build_state(updated(weights, 0.01, 1)))
    adapters = {f"adapter.{i}": np.random.default_rng(i).normal(size=45_000).astype(np.float32) for i in range(50)}
    tuned = {name: array + np.float32(1e-3) for name, array in adapters.items()}
    frozen = dict(before.tensors)
    with_adapters = build_state({**frozen, **adapters}, former=before)
    after = build_state({**frozen, **tuned}, former=with_adapters)
    rows += small_change_rows(f"{title}, LoRA of 2.25M trained", with_adapters, after)
    most = updated(weights, 0.55, 2)
    chosen = float(delta_parcel(0, before, 1, build_state(most)) is not None)
    rows.append(Row(10, f"{title}, 55% changed: difference chosen", "0/1", chosen, 0.0, None, met=chosen == 0.0))
    return rows


# The swap -------------------------------------------------------------------------------------------------------------


def swap_row() -> Row:
    """p99.9 of a swap while another thread loads versions of 1 MB one after the other."""
    weights, swapper, stop = floats(1, 8), PolicySwapper(Holder), threading.Event()

    def load() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            swapper.load(version, weights)
            time.sleep(1e-3)

    loader = threading.Thread(target=load)
    loader.start()
    times: list[int] = []
    until_s = time.monotonic() + SWAPS_S
    while time.monotonic() < until_s:
        started = time.perf_counter_ns()
        swapped = swapper.swap_if_ready()
        taken = time.perf_counter_ns() - started
        if swapped is not None:
            times.append(taken)
        time.sleep(1e-5)
    stop.set()
    loader.join()
    worst = float(np.quantile(times, 0.999)) / 1e3
    return Row(9, "swap pause, p99.9 beside a busy loader", "µs", worst, 100.0, 100.0 / worst, 1.0, worst <= 100.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="without the policy of 450 million parameters")
    parser.add_argument("--no-ray", action="store_true", help="without the peer that takes seconds to start")
    options = parser.parse_args()
    ray = not options.no_ray
    rows = [swap_row()]
    rows += push_rows("MLP", floats(1, 8), ray) + push_rows("CNN", floats(20, 40), ray)
    rows += step_rows()
    if not options.small:
        rows += push_rows("450M bf16", large(450_000_000), ray) + large_rows(450_000_000)
    report("weights", rows)


if __name__ == "__main__":
    main()
