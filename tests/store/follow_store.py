"""Follows a store until the episode ``last`` is complete: ``python follow_store.py FOLDER SEED``.

Prints the alive rows.

`test_readers.py` runs several of them with a writer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from user_sys.errors import StoreRecordGone
from user_sys.store.store import StoreReader

DEADLINE_S = 120.0
POLL_S = 0.02  # leaves CPU time to the writer


def main(path: Path, seed: int) -> None:
    rng, deadline, gone = np.random.default_rng(seed), time.monotonic() + DEADLINE_S, 0
    with StoreReader.open(path, wait_s=30) as reader:
        index, complete = reader.index, False
        while not complete:
            assert time.monotonic() < deadline, "the writer never came to its end"
            time.sleep(POLL_S)
            change = reader.refresh()
            assert (index.steps.reward[change.rows.start : change.rows.stop] >= 0).all()
            alive = np.flatnonzero(index.chunks.alive)
            for row in rng.choice(alive, min(len(alive), 20)).tolist():
                try:
                    chunk = reader.read(row)
                except StoreRecordGone:  # deleted and compacted since the refresh
                    gone += 1
                else:
                    assert (chunk.columns["observation.state"] == index.chunks.index[row]).all()
            row = index.episodes.find("last")
            complete = row >= 0 and bool(index.episodes.complete[row])
        reader.refresh()
        assert not reader.damaged, reader.damaged
        rewards = np.bincount(index.chunks.episode[index.steps.chunk], index.steps.reward * index.steps.alive)
        names, kept = index.episodes.ids.names, np.flatnonzero(~index.episodes.deleted).tolist()
    print(" ".join(sorted(f"{names[row]}={rewards[row]:g}" for row in kept)))
    print(f"{gone} chunks were gone when read", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
