"""Kills writer and backup of a store in turn: ``python backup_kill_loop.py FOLDER URL KILLS SEED``.

`test_backup.py` runs it in its own process, which may fork. A writer stores, acknowledges and compacts; a backup runs
meanwhile; one of the two is killed at a random moment. Then the newest complete backup is restored: it holds every
chunk that was acknowledged before that backup began, undamaged.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import s3fs  # noqa: F401  # imported once, before the forks
from kill_loop import ACK, check, next_acknowledged, packet

from user_sys.store.backup import back_up, restore
from user_sys.store.maintenance import reclaim_space
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.verify import verify_log

SEGMENT_BYTES = 60_000
GROUPS_PER_COMPACTION = 40
MAX_PAUSE_S = 0.15


def write(path: Path, number: int, rng: random.Random, acks: int) -> None:
    with StoreWriter.open(path, segment_bytes=SEGMENT_BYTES) as writer, StoreReader.open(path) as reader:
        while True:
            for _ in range(GROUPS_PER_COMPACTION):
                for _ in range(rng.randrange(1, 6)):
                    writer.append(packet(number))
                    number += 1
                writer.sync()
                os.write(acks, ACK.pack(number))
                time.sleep(0.002)
            reader.refresh()
            for _ in reclaim_space(writer, reader.index):
                pass


def start(run: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return child


def succeeds(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def check_restored(folder: Path, url: str, acknowledged: int) -> None:
    target = folder / "restored"
    shutil.rmtree(target, ignore_errors=True)
    assert succeeds(start(lambda: restore(url, target))), "the backup cannot be restored"
    assert not verify_log(target)
    with StoreReader.open(target) as reader:
        reader.refresh()
        check(reader, acknowledged)
    with StoreWriter.open(target) as writer:
        assert writer.append(packet(10**7))


def main(folder: Path, url: str, kills: int, seed: int) -> None:
    rng, path, acknowledged = random.Random(seed), folder / "store", 0
    counts = {"writer": 0, "backup": 0}
    for _ in range(kills):
        acks_in, acks_out = os.pipe()
        first, child_rng = acknowledged, random.Random(rng.random())
        writer = start(lambda first=first, rng=child_rng, acks=acks_out: write(path, first, rng, acks))  # type: ignore[misc]
        os.close(acks_out)
        for _ in range(rng.randrange(1, 30)):
            acknowledged = next_acknowledged(acks_in)
        begun = acknowledged
        backup = start(lambda: back_up(path, url))
        time.sleep(rng.uniform(0.0, MAX_PAUSE_S))
        victim = rng.choice(("writer", "backup"))
        counts[victim] += 1
        if victim == "writer":
            kill(writer)
        else:
            kill(backup)
            begun = acknowledged = next_acknowledged(acks_in)
            backup = start(lambda: back_up(path, url))
        assert succeeds(backup), "the backup failed"
        check_restored(folder, url, begun)
        if victim == "backup":
            kill(writer)
        while raw := os.read(acks_in, ACK.size):
            acknowledged = max(acknowledged, ACK.unpack(raw)[0])
        os.close(acks_in)
    print(f"{counts['writer']} kills of the writer, {counts['backup']} of the backup, {acknowledged} chunks")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
