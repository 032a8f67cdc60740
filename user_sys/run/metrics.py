"""Scalars of a run: JSON lines of each node, and TensorBoard and wandb from the launcher.

Metrics are not experience: if they cannot be written (full disk, wandb unreachable), that is logged once and the run
continues without them. No call waits for a disk sync or the network.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from user_sys.config import as_dict
from user_sys.errors import ConfigError

METRICS = "metrics"  # folders in a run folder
TENSORBOARD = "tensorboard"
FLUSH_S = 10.0
CLOSE_TIMEOUT_S = 10.0
MAX_QUEUED = 1000  # reports that wait for wandb; further ones are dropped

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, beside the JSON lines and TensorBoard files that are always written.

    Attributes:
        mode: offline (files in the run's folder, for ``wandb sync``), online (needs a login), or disabled.
        project: of wandb.
        entity: account or team; null for the account's default.
        group: of several runs.
    """

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = "user-sys"
    entity: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class LoggingConfig:
    """Where a run's metrics go beyond its folder."""

    wandb: WandbConfig = field(default_factory=WandbConfig)


class MetricsWriter:
    """Appends to ``metrics/<node>.jsonl``: one line for each report, in one write, so that readers see whole lines.

    A line holds ``count`` (the node's own count of updates or steps), ``time_unix_s`` and the scalars; a scalar that is
    not finite is null. Any thread may call. Written lines survive a killed process.
    """

    def __init__(self, run_dir: Path, node: str) -> None:
        if not node or "/" in node:
            raise ConfigError(f"{node!r} cannot be a node's name, since it names a file; leave out '/'")
        self.path = run_dir / METRICS / f"{node}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = open(self.path, "ab", buffering=0)
        self._torn = self._file.tell() > 0 and not _ends_line(self.path)
        self._failed = False

    def write(self, count: int, scalars: Mapping[str, float], time_unix_s: float | None = None) -> None:
        """Appends one line. A scalar of type bool becomes 0 or 1."""
        line: dict[str, Any] = {"count": count, "time_unix_s": time.time() if time_unix_s is None else time_unix_s}
        line |= {name: _finite(value) for name, value in scalars.items()}
        encoded = json.dumps(line, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._append(encoded)

    def _append(self, encoded: bytes) -> None:
        if self._file.closed:
            return
        encoded = b"\n" * self._torn + encoded  # completes a torn line
        try:
            self._torn = self._file.write(encoded) != len(encoded)
            self._failed = False
        except OSError as error:
            if not self._failed:
                _log.warning("metrics.write_failed path=%s error=%s", self.path, error)
            self._failed = True

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, float | None]]:
    """The lines of a node's metrics, oldest first; torn lines are skipped. Empty if there is no file."""
    if not path.exists():
        return
    with open(path, "rb") as lines:
        for line in lines:
            try:
                report = json.loads(line)
            except ValueError:
                continue
            if isinstance(report, dict):
                yield report


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: float) -> float | int | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number


class RunLogger:
    """Logs the reports of all processes of a run to TensorBoard and wandb.

    Args:
        run_dir: the run folder; its name is the run's name.
        config: the run's configuration (a dataclass), saved in wandb.
        logging: settings of wandb.
    """

    def __init__(self, run_dir: Path, config: object, logging: LoggingConfig | None = None) -> None:
        settings = (logging or LoggingConfig()).wandb
        self._tensorboard = _Tensorboard(run_dir / TENSORBOARD)
        self._wandb = None if settings.mode == "disabled" else _Wandb(run_dir, as_dict(config), settings)

    def log(self, node: str, count: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of `node` at its own `count`, under the names ``<node>/<scalar>``. Returns at once."""
        named = {f"{node}/{name}": float(value) for name, value in scalars.items()}
        self._tensorboard.add(count, named)
        if self._wandb:
            self._wandb.add({**named, f"{node}/count": count})

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Writes pending reports, for at most `CLOSE_TIMEOUT_S` each; `summary` is saved in wandb."""
        self._tensorboard.close()
        if self._wandb:
            self._wandb.close(dict(summary or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Tensorboard:
    """Event files, written by the thread of tensorboard's writer. The writer of torch would import torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder), max_queue_size=MAX_QUEUED, flush_secs=FLUSH_S)
        self._failed = False

    def add(self, count: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = self._event(wall_time=time.time(), step=count, summary=self._summary(value=values))
        self._attempt(lambda: self._writer.add_event(event))

    def close(self) -> None:
        self._attempt(self._writer.close)

    def _attempt(self, write: Any) -> None:
        if self._failed:
            return
        try:
            write()
        except OSError as error:  # its thread failed: a full disk
            self._failed = True
            _log.warning("tensorboard.write_failed error=%s", error)


class _Wandb:
    """wandb in a thread of its own: its start takes seconds, and its failures must not block or end the run."""

    def __init__(self, run_dir: Path, config: dict[str, Any], settings: WandbConfig) -> None:
        self._run_dir, self._config, self._settings = run_dir, config, settings
        self._reports: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED)
        self._final: dict[str, Any] = {}
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def add(self, report: dict[str, Any]) -> None:
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                _log.warning("wandb.queue_full: reports are dropped; JSON lines and TensorBoard have them")

    def close(self, summary: dict[str, Any]) -> None:
        self._final = summary
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self._reports.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            _log.warning("wandb.close_blocked: its files may be incomplete")
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            _log.warning("wandb.close_timeout: not finished after %.0f s; its files may be incomplete", CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        try:
            run = self._start()
            while (report := self._reports.get()) is not None:  # close() ends the wait
                run.log(report)
            run.summary.update(self._final)
            run.finish()
        except Exception as error:  # a foreign library may fail in any way; the run continues
            _log.warning("wandb.failed: the run continues without it: %s", " ".join(str(error).split())[:300])
            self._drain()

    def _drain(self) -> None:
        while self._reports.get() is not None:  # close() ends the wait
            pass

    def _start(self) -> Any:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at import
        home = self._run_dir / "wandb"
        for name in ("CONFIG", "CACHE", "DATA"):
            os.environ.setdefault(f"WANDB_{name}_DIR", str(home / name.lower()))
        import wandb

        mode = self._settings.mode
        if mode == "online" and not wandb.login(prompt=False):
            _log.warning("wandb.offline: not logged in; run `wandb login`, later `wandb sync %s/offline-run-*`", home)
            mode = "offline"
        home.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            group=self._settings.group,
            name=self._run_dir.name,
            dir=str(self._run_dir),
            config=self._config,
            mode=mode,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )
