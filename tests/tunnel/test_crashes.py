"""No durable chunk is lost or stored twice: kill -9 of either end, and many simulated faults."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from simulate import Tally, simulate_all
from tunnel_kit import QUICK, chunk, hello, prepare, serving, start_gateway_process, status, stored, until

from sim.network_emulator import EmulatedLink, LinkConfig
from user_sys.edge.outbox import Outbox
from user_sys.gateway.gateway import read_gateway_address
from user_sys.store.store import IngestedChunks, StoreWriter
from user_sys.tunnel.client import TunnelClient, TunnelState
from user_sys.tunnel.flow_control import ReceiveWindow
from user_sys.tunnel.keys import KeyPair

LIVES = Path(__file__).with_name("edge_processes.py")
FEW_SEEDS = 60
SEEDS = 500
MANY_SEEDS = 10_000


def stream_through_kills(run: Path, keys: KeyPair, chunks: int, kills: int) -> None:
    gateway, cut = start_gateway_process(run), list[int]()
    try:
        until(lambda: read_gateway_address(run), "the gateway listens")
        address = read_gateway_address(run)
        assert address is not None
        with (
            Outbox.open(run / "outbox") as outbox,
            TunnelClient(
                address.endpoint, keys, address.public_key, hello("panda-0"), outbox=outbox, limits=QUICK
            ) as robot,
        ):
            for first in range(0, chunks, chunks // kills):
                before = len(outbox) + chunks // kills
                outbox.append(*(chunk(first + each, floats=2000) for each in range(chunks // kills)))
                until(lambda before=before: len(outbox) < before, "chunks flow")
                os.kill(gateway.pid, signal.SIGKILL)
                cut += [len(outbox)]
                gateway.wait()
                gateway = start_gateway_process(run)
            assert robot.drain(60) == 0
            assert robot.state is TunnelState.OPEN and robot.counters["lost"] >= 1
    finally:
        gateway.terminate()
        assert gateway.wait(120) == 0
    assert any(cut), "at least one kill came in mid-stream"
    counts = Counter(stored(run))
    assert sorted(counts) == [("episode-0", index) for index in range(chunks)], "none lost"
    assert set(counts.values()) == {1}, "none twice"


def test_killed_gateway_loses_and_duplicates_no_chunk(tmp_path: Path) -> None:
    stream_through_kills(tmp_path, prepare(tmp_path)["panda-0"], chunks=240, kills=3)


@pytest.mark.slow
def test_gateway_killed_a_hundred_times_loses_no_chunk(tmp_path: Path) -> None:
    stream_through_kills(tmp_path, prepare(tmp_path)["panda-0"], chunks=4000, kills=100)


def kill_edges(run: Path, kills: int) -> None:
    """Edge processes record as fast as they can until each is killed; then their chunks are delivered."""
    prepare(run)
    recorded = -1
    with serving(run) as site, EmulatedLink(site.address.endpoint, LinkConfig(delay_ms=2)) as link:
        argv = [sys.executable, str(LIVES), str(run), link.endpoint, site.address.public_key]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=env) as lives:
            assert lives.stdin is not None and lives.stdout is not None
            for life in range(kills):
                lives.stdin.write("\n")
                edge, before = int(lives.stdout.readline()), recorded
                while recorded < before + 20 + 13 * (life % 7):
                    recorded = int(lives.stdout.readline())
                os.kill(edge, signal.SIGKILL)
                recorded = max([recorded, *map(int, iter(lambda: lives.stdout.readline().strip(), "dead"))])
            lives.stdin.close()
        with Outbox.open(run / "outbox") as outbox:
            robot = site.client("panda-0", outbox)
            assert robot.drain(60) == 0
            robot.close()
    counts = Counter(index for _, index in stored(run))
    assert set(range(recorded + 1)) <= set(counts), "all that was recorded arrived"
    assert set(counts.values()) == {1}


def test_edge_killed_while_recording_loses_no_durable_chunk(tmp_path: Path) -> None:
    kill_edges(tmp_path, 3)


@pytest.mark.slow
def test_edge_killed_a_thousand_times_loses_no_durable_chunk(tmp_path: Path) -> None:
    kill_edges(tmp_path, 1000)


def test_suspended_gateway_is_detected_and_resumed(tmp_path: Path) -> None:
    keys = prepare(tmp_path)
    gateway = start_gateway_process(tmp_path)
    try:
        until(lambda: read_gateway_address(tmp_path), "the gateway listens")
        address = read_gateway_address(tmp_path)
        assert address is not None
        alert = replace(QUICK, dead_after_s=2.0)
        robot = TunnelClient(address.endpoint, keys["panda-0"], address.public_key, hello("panda-0"), limits=alert)
        with robot:
            robot.wait_open(120)
            os.kill(gateway.pid, signal.SIGSTOP)
            until(lambda: robot.state is not TunnelState.OPEN, "the silence is noticed")
            assert "silent" in robot.reason or "answer" in robot.reason
            os.kill(gateway.pid, signal.SIGCONT)
            robot.wait_open(120)
            assert robot.send(status())
    finally:
        os.kill(gateway.pid, signal.SIGCONT)
        gateway.terminate()
        gateway.wait(120)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def hold(tally: Tally) -> None:
    again = [f"{why}; again: python tests/tunnel/simulate.py --seed {seed} -v" for seed, why in tally.failed]
    assert not again
    assert tally.chunks > 20 * tally.seeds
    assert min(tally.faults.values()) > tally.seeds / 20


def test_simulation_loses_and_duplicates_no_chunk() -> None:
    hold(simulate_all(range(FEW_SEEDS)))


@pytest.mark.slow
def test_many_simulations_lose_and_duplicate_no_chunk() -> None:
    hold(simulate_all(range(FEW_SEEDS, SEEDS + MANY_SEEDS)))


def test_seed_determines_the_simulation() -> None:
    argv = [sys.executable, str(Path(__file__).with_name("simulate.py")), "--seed=7", "-v"]
    runs = [
        subprocess.run(argv, env=os.environ | {"PYTHONHASHSEED": each}, capture_output=True, text=True, check=True)
        for each in ("1", "2")  # the order of a set is by this
    ]
    first, second = (run.stdout.partition(" failed")[0] for run in runs)
    assert first == second and "seed 7" in first


@pytest.mark.parametrize(
    "of, name, instead, noticed",
    [
        (StoreWriter, "sync", lambda writer, ticket=None: None, "not in the store"),
        (IngestedChunks, "has", lambda known, episode, index: False, "twice"),
        (ReceiveWindow, "release", lambda window, messages, size_bytes: False, "not at rest"),
    ],
    ids=["acknowledged before it is synced", "no deduplication", "credit never comes back"],
)
def test_simulation_detects_a_broken_invariant(of: type, name: str, instead: object, noticed: str) -> None:
    with mock.patch.object(of, name, instead):
        tally = simulate_all(range(SEEDS))
    assert tally.failed and noticed in tally.failed[0][1], tally.failed
