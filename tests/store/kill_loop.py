"""Kills a store's writer repeatedly while a reader follows: ``python kill_loop.py FOLDER KILLS SEED``.

`test_kills.py` runs it in its own process, which may fork. Each writer stores chunks, acknowledges them through a pipe,
and is killed at random. The next one resends unacknowledged chunks and some others. In the end everything
acknowledged is present once and undamaged, and old and new readers agree.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import sys
import time
from pathlib import Path

import numpy as np

from user_sys.episode import Chunk, ChunkHeader, EpisodeEnd, EpisodeSource
from user_sys.store.store import StoreReader, StoreWriter

CHUNKS_PER_EPISODE = 5
SEGMENT_BYTES = 200_000
ACK_DEADLINE_S = 300.0
ACK = struct.Struct("<I")


def packet(number: int) -> bytes:
    """Chunk `number` of an endless series of episodes; its size depends on its number."""
    episode, index = divmod(number, CHUNKS_PER_EPISODE)
    steps = 1 + number * 7 % 40
    header = ChunkHeader(
        episode=f"ep-{episode}",
        index=index,
        first_step=0,
        steps=steps,
        robot="panda-0",
        embodiment="e1",
        task="lift",
        sentence="lift the cube",
        source=EpisodeSource.ONLINE,
        seed=number,
        started_unix_ns=1,
        end=EpisodeEnd(steps=steps, success=True) if index == CHUNKS_PER_EPISODE - 1 else None,
    )
    columns = {"observation.state": np.full((steps, 64), number, np.float32), "reward": np.ones(steps, np.float32)}
    return Chunk(header, columns, {}).encode()


def write(path: Path, first: int, rng: random.Random, acks: int) -> None:
    """The writer's loop, in groups of random size, from shortly before `first` on, until it is killed."""
    with StoreWriter.open(path, segment_bytes=SEGMENT_BYTES) as writer:
        number = max(0, first - rng.randrange(8))
        while True:
            for _ in range(rng.randrange(1, 6)):
                writer.append(packet(number))
                number += 1
            writer.sync()
            os.write(acks, ACK.pack(number))


def run_until_killed(path: Path, first: int, rng: random.Random, *, after_more: bool) -> int:
    """Starts a writer, kills it, and returns the number of acknowledged chunks.

    The kill comes within 20 ms, in which a busy machine may not open the store. With `after_more`, the 20 ms begin when
    more than the `first` chunks are acknowledged.
    """
    acks_in, acks_out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(acks_in)
            write(path, first, rng, acks_out)
        finally:
            os._exit(1)
    os.close(acks_out)
    acknowledged = first
    while after_more and acknowledged <= first:
        acknowledged = next_acknowledged(acks_in)
    time.sleep(rng.uniform(0.0, 0.02))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer failed before it was killed"
    while raw := os.read(acks_in, ACK.size):
        acknowledged = max(acknowledged, ACK.unpack(raw)[0])
    os.close(acks_in)
    return acknowledged


def next_acknowledged(acks: int) -> int:
    ready, _, _ = select.select([acks], [], [], ACK_DEADLINE_S)
    assert ready, f"nothing was acknowledged within {ACK_DEADLINE_S:.0f} s"
    raw = os.read(acks, ACK.size)
    assert raw, "the writer failed before it was killed"
    return int(ACK.unpack(raw)[0])


def check(reader: StoreReader, acknowledged: int) -> None:
    chunks, ids = reader.index.chunks, reader.index.episodes.ids.names
    numbers = [
        int(ids[episode].removeprefix("ep-")) * CHUNKS_PER_EPISODE + index
        for episode, index in zip(chunks.episode.tolist(), chunks.index.tolist(), strict=True)
    ]
    assert len(numbers) == len(set(numbers)), "a chunk appears twice"
    missing = set(range(acknowledged)) - set(numbers)
    assert not missing, f"acknowledged and lost: {sorted(missing)}"
    assert not reader.damaged, reader.damaged
    for row in range(len(chunks))[-20:]:
        chunk = reader.read(row)
        assert chunk.header.seed == numbers[row] and (chunk.columns["observation.state"] == numbers[row]).all()


def main(path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    StoreWriter.open(path, segment_bytes=SEGMENT_BYTES).close()
    acknowledged = 0
    with StoreReader.open(path) as alive:
        for kill in range(kills):
            acknowledged = run_until_killed(path, acknowledged, random.Random(rng.random()), after_more=bool(kill % 2))
            alive.refresh()
            check(alive, acknowledged)
        with StoreReader.open(path) as late:
            late.refresh()
            check(late, acknowledged)
            assert late.episodes() == alive.episodes()
    assert acknowledged >= kills // 2
    print(f"{kills} kills, {acknowledged} chunks acknowledged")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
