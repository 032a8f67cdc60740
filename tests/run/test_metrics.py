"""Metrics: JSON lines, TensorBoard event files, and wandb."""

from __future__ import annotations

import json
import logging
import math
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from user_sys.errors import ConfigError
from user_sys.run.metrics import LoggingConfig, MetricsWriter, RunLogger, WandbConfig, read_metrics

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


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "gateway") as writer:
        threads = [threading.Thread(target=lambda: [writer.write(i, {"x": 1.0}) for i in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert len(list(read_metrics(writer.path))) == 800


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


def test_process_name_with_slash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a/b"):
        MetricsWriter(tmp_path, "a/b")


def test_missing_file_has_no_metrics(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


def test_tensorboard_reads_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with RunLogger(tmp_path, Config(), NO_WANDB) as logger:
        logger.log("learner", 5, {"loss": 0.5})
        logger.log("panda-0", 7, {"success": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [e for e in LegacyEventFileLoader(str(file)).Load() if e.HasField("summary")]
    read = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert read == [(5, "learner/loss", 0.5), (7, "panda-0/success", 1.0)]


def test_wandb_offline_writes_in_the_run_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("user_sys.run.metrics.CLOSE_TIMEOUT_S", 300.0)  # wandb starts a server of its own
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
