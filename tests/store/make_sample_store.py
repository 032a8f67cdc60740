"""Makes a small store and packs it: ``python make_sample_store.py FILE.tar.gz``.

``store-format-2.tar.gz`` was made by the program of 23 November 2026. `test_old_store.py` opens it. A new format gets a
sample of its own, before the code changes.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

from store_kit import chunk

from user_sys.store.labels import DeleteLabel, RewardLabel, SuccessLabel
from user_sys.store.maintenance import add_labels, compact_store
from user_sys.store.store import StoreWriter

EPISODES, CHUNKS = 8, 2


def make(path: Path) -> None:
    """Sealed and rewritten segments, labels, a deleted episode, and a tail that a killed writer left."""
    with StoreWriter.open(path, segment_bytes=6000) as writer:
        for episode in range(EPISODES):
            for index in range(CHUNKS):
                writer.append(chunk(f"e{episode}", index, end=index == CHUNKS - 1).encode())
    common = {"labeller": "ada", "at_unix_ns": 1}
    labels = (
        SuccessLabel(episode="e1", success=False, **common),  # type: ignore[arg-type]
        RewardLabel(episode="e2", first_step=1, rewards=(0.5, 0.25), **common),  # type: ignore[arg-type]
        DeleteLabel(episode="e0", **common),  # type: ignore[arg-type]
    )
    add_labels(path, labels)
    compact_store(path)
    with StoreWriter.open(path, segment_bytes=6000) as writer:
        for index in range(CHUNKS):
            writer.append(chunk("later", index, end=index == CHUNKS - 1).encode())
    newest = max(path.glob("*.seg"))
    with newest.open("ab") as file:
        file.write(b"\xf5UR2 torn")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, tarfile.open(sys.argv[1], "w:gz") as archive:
        make(Path(folder) / "store")
        archive.add(Path(folder) / "store", "store")
