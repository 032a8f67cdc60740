"""A gateway process, allowed keys and the content of its store, for tests of several sites."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from run_kit import END_S, until

from user_sys.episode import ChunkHeader, decode_chunk
from user_sys.gateway.gateway import GatewayAddress, read_gateway_address
from user_sys.store.log_reader import LogReader
from user_sys.store.store import CHUNK_KIND
from user_sys.tunnel.keys import Keyring, new_keypair, save_keypair


def allow(run: Path, keys: Path, name: str) -> None:
    """Gives `name` a key pair in `keys`, as on its own computer, and allows it at the gateway of `run` as a robot."""
    pair = new_keypair()
    save_keypair(pair, keys, name)
    Keyring(run / "keys").allow(pair.public, name, "robot")


@contextmanager
def gateway(run: Path) -> Iterator[GatewayAddress]:
    """A gateway in a process of its own; it has the same address at each start."""
    run.mkdir(exist_ok=True)
    with (run / "gateway.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "user_sys.gateway", "--run", str(run)], stdout=log, stderr=log
        )
    try:
        yield until(lambda: read_gateway_address(run), "the gateway listens")
    finally:
        process.terminate()
        process.wait(END_S)


def waiting(outbox: Path) -> list[ChunkHeader]:
    """Of the chunks in an outbox; they may be delivered meanwhile."""
    found = []
    for file in sorted(outbox.glob("*.chunk")):
        with suppress(FileNotFoundError):
            found.append(decode_chunk(file.read_bytes()).header)
    return found


def headers(log: Path) -> list[ChunkHeader]:
    """Of every chunk in a store, with duplicates."""
    if not any(log.glob("*.seg")):
        return []
    with LogReader.open(log) as reader:
        return [decode_chunk(bytes(reader.read(ref))).header for ref in reader.records() if ref.kind == CHUNK_KIND]


def require_delivered(run: Path, outbox: Path) -> None:
    """The run's store holds every chunk that the robot recorded, and each once: no episode has a gap."""
    stored = Counter((header.episode, header.index) for header in headers(run / "store"))
    assert set(stored.values()) == {1}
    assert all((episode, index - 1) in stored for episode, index in stored if index)
    assert {(header.episode, header.index) for header in waiting(outbox)} <= set(stored)
