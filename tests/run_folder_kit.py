"""Folders of finished runs: a store, the learner's reports and a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from episode_kit import chunk_header

from user_sys.episode import Chunk, EpisodeEnd, EpisodeSource, Phase
from user_sys.learner.config import LearnerConfig
from user_sys.run.config import METADATA_FILE, RunConfig, RunFolder, create_run_folder
from user_sys.run.metrics import MetricsWriter
from user_sys.store.maintenance import merge_stores
from user_sys.store.store import StoreWriter

STARTED_S = 1_700_000_000
LATE_S = 60.0  # the learner begins so long after the first episode


def episode(name: str, start_s: float, success: bool, *, assisted: bool = False, demo: bool = False) -> bytes:
    """An episode of two steps."""
    header = chunk_header(
        name,
        2,
        robot="arm",
        embodiment="e",
        sentence="",
        source=EpisodeSource.DEMO if demo else EpisodeSource.ONLINE,
        started_unix_ns=int((STARTED_S + start_s) * 1e9),
        end=EpisodeEnd(steps=2, success=success),
    )
    columns = {
        "reward": np.array([0, success], np.float32),
        "phase": np.array([Phase.POLICY, Phase.CORRECTION if assisted else Phase.POLICY], np.uint8),
        "policy_version": np.zeros(2, np.int64),
    }
    return Chunk(header, columns, {}).encode()


def make_run(runs: Path, name: str, outcomes: Sequence[bool], *, utd: float = 8.0, seed: int = 0) -> RunFolder:
    """A finished run: an episode each second, training from `LATE_S` on with 10 updates a second."""
    config = RunConfig(runs=runs, seed=seed, learner=LearnerConfig(utd_max=utd))
    folder, metadata = create_run_folder(config, name, f"tcp://127.0.0.1:{5000 + seed}")
    started = msgspec.structs.replace(metadata, started_unix_s=STARTED_S)
    (folder.path / METADATA_FILE).write_bytes(msgspec.json.encode(started))
    with StoreWriter.open(folder.store) as writer:
        writer.append(episode("demo", -5.0, True, demo=True))
        for number, success in enumerate(outcomes):
            writer.append(episode(f"{number:04d}", float(number), success))
        writer.sync()
    with MetricsWriter(folder.path, "learner") as metrics:
        for second in range(0, 200, 10):
            metrics.write(
                10 * second + 1, {"training_s": 0.25 * second, "waited_s": 0.75 * second}, STARTED_S + LATE_S + second
            )
    content = {"successes": sum(outcomes[-20:]), "episodes": 20, "control_s": 36.0}
    (folder.path / "summary.json").write_text(json.dumps(content))
    return folder


def merge_earlier_run(folder: RunFolder) -> None:
    """Merges 60 successes of another run, two days before, into the store of `folder`."""
    with StoreWriter.open(folder.path / "earlier") as writer:
        for number in range(60):
            writer.append(episode(f"earlier-{number}", number - 172_800.0, True))
        writer.sync()
    merge_stores([folder.path / "earlier"], folder.store)
