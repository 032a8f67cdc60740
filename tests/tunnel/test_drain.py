"""The backlog of a long time offline is delivered once, in order, in bounded memory."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episode_kit import chunk_header
from tunnel_kit import prepare, serving, stored, until

from user_sys.edge import session
from user_sys.edge.outbox import Outbox
from user_sys.episode import Chunk, EpisodeEnd
from user_sys.tunnel import client as client_module
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.connection import Connection

RATE_HZ, CHUNK_STEPS, EPISODE_CHUNKS = 10, 10, 6  # of a robot without cameras
GROWTH_MB = 128


def recorded(number: int) -> bytes:
    """The chunk of one second; each minute is an episode."""
    minute, index = divmod(number, EPISODE_CHUNKS)
    last = index == EPISODE_CHUNKS - 1
    header = chunk_header(
        f"minute-{minute:05d}",
        CHUNK_STEPS,
        index=index,
        first_step=index * CHUNK_STEPS,
        embodiment="fake",
        sentence="",
        started_unix_ns=number * 10**9,
        end=EpisodeEnd(steps=EPISODE_CHUNKS * CHUNK_STEPS, success=None) if last else None,
    )
    columns = {
        "observation.state": np.full((CHUNK_STEPS, 20), number, np.float32),
        "phase": np.zeros(CHUNK_STEPS, np.uint8),
        "reward": np.zeros(CHUNK_STEPS, np.float32),
    }
    return Chunk(header, columns, {}).encode()


def own_memory_mb() -> float:
    """Memory of this process, including the gateway, without mapped files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("seconds", [600, pytest.param(86400, marks=pytest.mark.slow)], ids=["ten minutes", "a day"])
def test_backlog_is_delivered_once_and_in_order(tmp_path: Path, seconds: int) -> None:
    chunks = seconds * RATE_HZ // CHUNK_STEPS
    prepare(tmp_path)
    with Outbox.open(tmp_path / "outbox") as outbox:
        for first in range(0, chunks, 512):
            outbox.append(*map(recorded, range(first, min(first + 512, chunks))))
        assert len(outbox) == chunks
        before_mb, peak_mb = own_memory_mb(), 0.0
        with serving(tmp_path) as site:
            site.client("panda-0", outbox)

            def delivered() -> bool:
                nonlocal peak_mb
                peak_mb = max(peak_mb, own_memory_mb())
                return len(outbox) == 0

            until(delivered, "the outbox is empty", 120 + seconds / 400)
            site.clients[0].close()
    assert peak_mb - before_mb < GROWTH_MB
    wanted = [(f"minute-{number // EPISODE_CHUNKS:05d}", number % EPISODE_CHUNKS) for number in range(chunks)]
    assert stored(tmp_path) == wanted


def test_session_that_ends_offline_delivers_after_reconnect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    waits = threading.Event()
    drain = TunnelClient.drain

    class LateConnection(Connection):
        def __init__(self, *args: Any) -> None:
            assert waits.wait(120)
            super().__init__(*args)

    def said(client: TunnelClient, timeout_s: float) -> int:
        waits.set()
        return drain(client, timeout_s)

    monkeypatch.setattr(client_module, "Connection", LateConnection)
    monkeypatch.setattr(TunnelClient, "drain", said)
    monkeypatch.setattr(session, "DRAIN_DEADLINE_S", 120.0)
    with serving(tmp_path) as site, Outbox.open(tmp_path / "outbox") as outbox:
        for number in range(EPISODE_CHUNKS):
            outbox.append(recorded(number))
        robot = site.client("panda-0", outbox, wait=False)
        session.drain_outbox(robot, threading.Event())
        assert len(outbox) == 0
        robot.close()
    assert stored(tmp_path) == [("minute-00000", index) for index in range(EPISODE_CHUNKS)]
