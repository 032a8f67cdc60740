"""Metrics: JSON lines, TensorBoard event files, and wandb."""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from episode_kit import chunk_header
from wait_kit import Clock

from hal.spec import Array
from user_sys.episode import Chunk, EpisodeEnd, frame_columns
from user_sys.run import metrics
from user_sys.run.metrics import LoggingConfig, MetricsWriter, RunLogger, WandbConfig, read_metrics
from user_sys.store.labels import DeleteLabel, TrimLabel
from user_sys.store.store import StoreWriter

NO_WANDB = LoggingConfig(WandbConfig(mode="disabled"))


@dataclass(frozen=True)
class Config:
    seed: int = 3


def test_report_is_one_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "learner") as writer:
        writer.write(10, {"loss": 0.5, "done": True}, time_unix_s=1.5)
        lines = (tmp_path / "metrics" / "learner.jsonl").read_text().splitlines()  # there before close
    assert [json.loads(line) for line in lines] == [{"count": 10, "time_unix_s": 1.5, "loss": 0.5, "done": 1}]


def test_scalar_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "learner") as writer:
        writer.write(1, {"a": math.nan, "b": math.inf})
    (line,) = read_metrics(writer.path)
    assert (line["a"], line["b"]) == (None, None)


def test_restarted_process_appends_after_a_torn_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "learner") as writer:
        writer.write(1, {})
    with open(writer.path, "ab") as file:
        file.write(b'{"count": 2, "ti')  # killed in the middle
    with MetricsWriter(tmp_path, "learner") as writer:
        writer.write(3, {})
    assert [line["count"] for line in read_metrics(writer.path)] == [1, 3]


def test_full_disk_is_logged_once_and_writing_continues_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path, "learner") as writer:
        writer.write(1, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 5, limits[1]))
        try:
            for count in (2, 3, 4):
                writer.write(count, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.write(5, {})
    assert [line["count"] for line in read_metrics(writer.path)] == [1, 5]
    assert [r.message.split()[0] for r in caplog.records] == ["metrics.write_failed"]


def test_tensorboard_reads_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with RunLogger(tmp_path, Config(), NO_WANDB) as logger:
        logger.log("learner", 5, {"loss": 0.5})
        logger.log("panda-0", 7, {"success": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [e for e in LegacyEventFileLoader(str(file)).Load() if e.HasField("summary")]
    read = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert read == [(5, "learner/loss", 0.5), (7, "panda-0/success", 1.0)]


def test_tensorboard_gets_fewer_points_the_longer_a_run_takes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    clock = Clock(0.0)
    with RunLogger(tmp_path, Config(), NO_WANDB, clock) as logger:
        for second in (*range(100), *range(100_000, 100_100)):
            clock.now_s = second
            logger.log("run", second, {"success": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    steps = [event.step for event in LegacyEventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert steps[:100] == list(range(100)) and len(steps) == 110
    assert len(list(read_metrics(tmp_path / "metrics" / "run.jsonl"))) == 200


def test_large_file_of_metrics_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MetricsWriter(tmp_path, "learner") as writer:
        for count in range(20_000):
            writer.write(count, {"loss": 0.5})
    whole = [line["count"] for line in read_metrics(writer.path)]
    monkeypatch.setattr(metrics, "MAX_READ_BYTES", 1 << 20)
    monkeypatch.setattr(metrics, "MAX_READ_LINES", 100)
    counts = [int(line["count"] or 0) for line in read_metrics(writer.path)]
    assert whole == list(range(20_000))
    assert (counts[0], counts[-1]) == (0, 19_999) and 99 <= len(counts) < 500
    assert max(after - before for before, after in pairwise(counts)) < 300


def test_wandb_offline_writes_in_the_run_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, "user_sys.run.metrics"):
        logger = RunLogger(tmp_path / "demo-1", Config())
        logger.log("learner", 1, {"loss": 0.5})
        logger.close({"success": 0.98})
    assert caplog.messages == []
    (record,) = (tmp_path / "demo-1" / "wandb").glob("offline-run-*/run-*.wandb")
    deadline_s = time.monotonic() + 120
    while b"learner/loss" not in record.read_bytes():  # wandb's own process may write on for a moment
        assert time.monotonic() < deadline_s, "it is not in wandb's file"
        time.sleep(0.01)
    assert not home.exists()


def test_wandb_gets_films_and_checkpoint_and_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "demo-1"
    for number in (1, 2):
        (run / "checkpoints" / f"00000{number}.checkpoint").mkdir(parents=True)
        (run / "checkpoints" / f"00000{number}.checkpoint" / "index.json").write_text(f"checkpoint {number}")
    (run / "evaluation.mp4").write_bytes(b"film")
    with caplog.at_level(logging.WARNING, "user_sys.run.metrics"):
        for _ in range(2):
            logger = RunLogger(run, Config())
            logger.log("learner", 1, {"loss": 0.5})
            logger.close({"success": 0.98})
    assert caplog.messages == []
    launches = list((run / "wandb").glob("offline-run-*"))
    known = (run / "wandb" / "run-id").read_text()
    assert len(launches) == 2 and all(f"-{known}" in launch.name for launch in launches)
    assert [film.read_bytes() for film in (run / "wandb").glob("offline-run-*/files/media/videos/*.mp4")]
    records = b"".join(path.read_bytes() for path in (run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert b"demo-1-checkpoint" in records and b"000002.checkpoint" in records and b"000001.checkpoint" not in records


class FakeWandb(SimpleNamespace):
    """Stands for the module wandb and for its run. Keeps the ids of runs, and captions and darkest values of images."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(Settings=SimpleNamespace, summary={}, log=lambda values: None, finish=lambda: None)
        self.ids, self.shown = list[str](), list[tuple[str, int]]()
        monkeypatch.setitem(sys.modules, "wandb", self)

    def init(self, *, id: str, **_: object) -> FakeWandb:
        self.ids.append(id)
        return self

    def Image(self, row: Array, caption: str) -> None:  # noqa: N802  # as in wandb
        self.shown.append((caption.split(":")[0], row.min()))


def log_in_wandb(folder: Path) -> None:
    logger = RunLogger(folder, Config(), LoggingConfig(WandbConfig(mode="offline")))
    logger.log("learner", 1, {"loss": 0.5})
    logger.close({})


def test_empty_wandb_id_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, file = FakeWandb(monkeypatch), tmp_path / "wandb" / "run-id"
    file.parent.mkdir()
    file.write_text("")
    for _ in range(2):
        log_in_wandb(tmp_path)
    assert wandb.ids == [file.read_text()] * 2 and len(wandb.ids[0]) == 8


def test_contact_sheet_leaves_out_deleted_episodes_and_trimmed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second half of each episode is white."""
    camera = "observation.images.front"
    frames = [np.full((4, 4, 3), 255 * (step >= 4), np.uint8) for step in range(8)]
    columns = {"reward": np.zeros(8, np.float32), **frame_columns(camera, frames, np.arange(8))}
    with StoreWriter.open(tmp_path / "store") as writer:
        for name in ("deleted", "trimmed"):
            header = chunk_header(name, 8, end=EpisodeEnd(steps=8, success=True))
            writer.append(Chunk(header, columns, {camera: frames[-1]}).encode())
        writer.append_label(DeleteLabel(episode="deleted", labeller="ann", at_unix_ns=1))
        writer.append_label(TrimLabel(episode="trimmed", labeller="ann", at_unix_ns=1, first_step=4, steps=4))
        writer.sync()
    wandb = FakeWandb(monkeypatch)
    log_in_wandb(tmp_path)
    assert wandb.shown == [("trimmed", 255)]


def test_wandb_failure_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "demo-1"
    run.mkdir()
    (run / "wandb").write_text("in its place")
    logger = RunLogger(run, Config())
    for count in range(10):
        logger.log("learner", count, {"loss": 0.5})
    logger.close()
    assert [m.split(":")[0] for m in caplog.messages] == ["wandb.failed"]
