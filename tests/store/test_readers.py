"""Several processes read a store while another one writes, rotates, labels and compacts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from store_kit import chunk

from user_sys.store.labels import DeleteLabel, RewardLabel
from user_sys.store.maintenance import reclaim_space
from user_sys.store.store import StoreReader, StoreWriter

EPISODES, CHUNKS, READERS = 60, 4, 3


def test_reader_processes_never_fail_and_agree(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "follow_store.py")
    commands = [[sys.executable, script, str(tmp_path), str(seed)] for seed in range(READERS)]
    readers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        write(tmp_path)
        outputs = [reader.communicate(timeout=120) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    assert [reader.returncode for reader in readers] == [0] * READERS, outputs
    assert len({out for out, _ in outputs}) == 1
    alive = dict(word.split("=") for word in outputs[0][0].split())
    assert len(alive) == EPISODES // 3 + 1 and "e00" in alive and "e01" not in alive
    assert set(alive.values()) == {"16", "8"}  # as labelled; the last one as recorded


def write(path: Path) -> None:
    with StoreWriter.open(path, segment_bytes=30_000) as writer, StoreReader.open(path) as own:
        for episode in range(EPISODES):
            name = f"e{episode:02d}"
            for index in range(CHUNKS):
                writer.append(chunk(name, index, end=index == CHUNKS - 1, width=100).encode())
                writer.sync()
            writer.append_label(
                RewardLabel(episode=name, first_step=0, rewards=(1.0,) * 16, labeller="a", at_unix_ns=0)
            )
            if episode % 3:
                writer.append_label(DeleteLabel(episode=name, labeller="a", at_unix_ns=0))
            writer.sync()
            if episode % 10 == 9:
                own.refresh()
                assert not any(reclaim_space(writer, own.index, min_dead_share=0.0))
        for index in range(CHUNKS):
            writer.append(chunk("last", index, end=index == CHUNKS - 1).encode())
