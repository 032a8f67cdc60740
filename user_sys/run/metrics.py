"""Scalars of a run: JSON lines of each node, and TensorBoard and wandb from the launcher.

Metrics are not experience: if they cannot be written (full disk, wandb unreachable), that is logged once and the run
continues without them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from hal.context import ClosedAtExit
from hal.durable import replace_durably
from hal.settings import Port
from hal.spec import Array
from user_sys.config import as_dict
from user_sys.errors import ConfigError
from user_sys.interchange.episodes import EpisodeReader
from user_sys.interchange.frames import decode_frame
from user_sys.store.store import StoreReader

METRICS = "metrics"  # folders in a run folder
TENSORBOARD = "tensorboard"
RUN = "run"  # the node name of the launcher's own metrics
PLOT, FILMS = "success.png", ("evaluation.mp4", "failures.mp4")  # of the evaluation, in a run folder
STORE, SHEET_EPISODES, SHEET_FRAMES = "store", 12, 8  # in a run folder; rows of the contact sheet, frames of a row
ID_FILE = "run-id"  # in the folder wandb/
FLUSH_S = 10.0
INIT_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
MAX_QUEUED = 1000  # events that wait for TensorBoard's thread
FULL_RATE_S = 10_000.0  # after so long TensorBoard and wandb get fewer reports, so that their files stay small
MAX_READ_BYTES = 64 << 20  # a larger file is read in part
MAX_READ_LINES = 20_000  # of such a file, without the newest ones

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, next to the JSON lines and TensorBoard files that are always written.

    A resumed run continues under the same id. At the end of a run its films, its plot, a contact sheet of its newest
    episodes, and its newest checkpoint follow.

    Attributes:
        mode: offline (files in the run's folder, for ``wandb sync``), online (needs a login), or disabled.
        project: of wandb.
        entity: account or team; null for the account's default.
        group: of several runs.
        files: films, plot, contact sheet and checkpoint at the end.
    """

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = "user-sys"
    entity: str | None = None
    group: str | None = None
    files: bool = True


@dataclass(frozen=True)
class LoggingConfig:
    """Where a run's metrics go beyond its folder.

    Attributes:
        prometheus_port: for /metrics on loopback; 0: none.
    """

    wandb: WandbConfig = field(default_factory=WandbConfig)
    prometheus_port: Port = 0


class MetricsWriter(ClosedAtExit):
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


def read_metrics(path: Path) -> Iterator[dict[str, float | None]]:
    """The lines of a node's metrics, oldest first; torn lines are skipped. Empty if there is no file.

    Of a file above `MAX_READ_BYTES`, such as of a run of weeks, lines that are spread evenly, and the newest ones.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in _spread_lines(file, path.stat().st_size):
            try:
                report = json.loads(line)
            except ValueError:
                continue
            if isinstance(report, dict):
                yield report


def _spread_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    if size > MAX_READ_BYTES:
        stride = size // MAX_READ_LINES
        for offset in range(0, size - stride, stride):
            file.seek(offset)
            if offset:
                file.readline()  # the rest of a line
            yield file.readline()
    yield from file


def rows_in_order(rows: Array) -> Array:
    """The rows (N, K) of reports, oldest first, in the order of their times (column 0), as `np.interp` needs them.

    If the clock was set back, some times occurred twice: the rows after that replace the earlier ones of these times.
    """
    *older, kept = np.split(rows, np.flatnonzero(np.diff(rows[:, 0]) < 0) + 1)
    for part in reversed(older):
        kept = np.concatenate([part[part[:, 0] < kept[0, 0]], kept, part[part[:, 0] > kept[-1, 0]]])
    return kept


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: float) -> float | int | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number


class RunLogger(ClosedAtExit):
    """Logs the reports of all processes of a run to TensorBoard and wandb, and the launcher's own as JSON lines.

    TensorBoard and wandb have threads of their own.
    """

    def __init__(
        self,
        run_dir: Path,
        config: object,
        logging: LoggingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        run_dir: the run folder; its name is the run's name.
        config: the run's configuration (a dataclass), saved in wandb.
        logging: settings of wandb.
        clock: monotonic seconds.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run = MetricsWriter(run_dir, RUN)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._tensorboard = EventFileWriter(str(run_dir / TENSORBOARD), MAX_QUEUED, FLUSH_S)  # torch's imports torch
        self._settings = (logging or LoggingConfig()).wandb
        self._run_dir, self._config = run_dir, config
        self._wandb: Any = None
        self._failed = {"wandb"} if self._settings.mode == "disabled" else set[str]()
        self._clock, self._began_s, self._due_s = clock, clock(), dict[str, float]()

    def log(self, node: str, count: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of `node` under the names ``<node>/<scalar>``.

        The first call starts wandb, which takes a second or two; later calls return at once. In a launch of T seconds
        the interval of a node's points in TensorBoard and wandb grows to T / `FULL_RATE_S`; JSON lines have all.

        Args:
            count: updates of a learner; online steps of the run for all other nodes, so that no curve goes back.
        """
        if node == RUN:
            self.run.write(count, scalars)
        if not self._is_due(node):
            return
        named = {f"{node}/{name}": float(value) for name, value in scalars.items()}
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in named.items()]
        event = self._event(wall_time=time.time(), step=count, summary=self._summary(value=values))
        self._attempt("tensorboard", lambda: self._tensorboard.add_event(event))
        self._attempt("wandb", lambda: self._started_wandb().log({**named, f"{node}/count": count}))

    def _is_due(self, node: str) -> bool:
        now_s = self._clock()
        if now_s < self._due_s.get(node, now_s):
            return False
        self._due_s[node] = now_s + (now_s - self._began_s) / FULL_RATE_S
        return True

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Writes pending reports, for at most `CLOSE_TIMEOUT_S` in wandb; `summary` is saved there."""
        self.run.close()
        self._attempt("tensorboard", self._tensorboard.close)
        if self._wandb is not None:
            self._attempt("wandb", lambda: self._wandb.summary.update(dict(summary or {})))
            if summary is not None and self._settings.files:
                self._attempt("contact_sheet", self._log_contact_sheet)
                self._attempt("wandb", self._log_files)
            self._attempt("wandb", self._wandb.finish)
            self._wandb = None

    def _attempt(self, name: str, write: Callable[[], object]) -> None:
        """A writer that has failed once is not used again."""
        if name in self._failed:
            return
        try:
            write()
        except Exception as error:  # a foreign library may fail in any way; the run continues
            self._failed.add(name)
            _log.warning("%s.failed: the run continues without it: %s", name, " ".join(str(error).split())[:300])

    def _log_files(self) -> None:
        """Films and plot of the evaluation, and the newest checkpoint as an artifact."""
        import wandb

        for name in FILMS:
            if (path := self._run_dir / name).exists():
                self._wandb.log({path.stem: wandb.Video(str(path), format="mp4")})
        if (path := self._run_dir / PLOT).exists():
            self._wandb.log({path.stem: wandb.Image(str(path))})
        for path in sorted(self._run_dir.glob("checkpoints/*.checkpoint"))[-1:]:
            artifact = wandb.Artifact(
                f"{self._run_dir.name.strip('.-')}-checkpoint", type="model", metadata={"checkpoint": path.name}
            )
            artifact.add_dir(str(path), skip_cache=True)
            self._wandb.log_artifact(artifact)

    def _log_contact_sheet(self) -> None:
        """A row of frames of each of the newest episodes that are not deleted, of its first camera."""
        import wandb

        if not (path := self._run_dir / STORE).exists():
            return
        rows = []
        with StoreReader.open(path) as store:
            reader = EpisodeReader(store, trimmed=True)
            complete = (each for each in store.episodes() if each.complete and not each.deleted)
            chosen = [each for each in complete if reader.steps(each.episode)]
            for summary in chosen[-SHEET_EPISODES:]:
                cameras = reader.read(summary.episode).frames.values()
                if frames := [frame for frame in next(iter(cameras), ()) if frame is not None]:
                    steps = np.linspace(0, len(frames) - 1, SHEET_FRAMES).round().astype(int).tolist()
                    row = np.hstack([decode_frame(frames[step]) for step in steps])
                    caption = f"{summary.episode}: {summary.source}, success {summary.success}"
                    rows.append(wandb.Image(row, caption=caption))
        if rows:
            self._wandb.log({"episodes": rows})

    def _wandb_id(self, home: Path) -> str:
        """The run's id, the same in each launch."""
        file = home / ID_FILE
        known = file.read_text().strip() if file.exists() else ""
        if not known:
            known = secrets.token_hex(4)
            replace_durably(file, known.encode())
        return known

    def _started_wandb(self) -> Any:
        if self._wandb is not None:
            return self._wandb
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at import
        home, settings = self._run_dir / "wandb", self._settings
        for name in ("CONFIG", "CACHE", "DATA"):
            os.environ.setdefault(f"WANDB_{name}_DIR", str(home / name.lower()))
        import wandb

        mode = settings.mode
        if mode == "online" and not wandb.login(prompt=False):
            _log.warning("wandb.offline: not logged in; run `wandb login`, later `wandb sync %s/offline-run-*`", home)
            mode = "offline"
        home.mkdir(parents=True, exist_ok=True)
        limits = {"init_timeout": INIT_TIMEOUT_S, "finish_timeout": CLOSE_TIMEOUT_S}  # old releases lack the latter
        known: dict[str, Any] = {name: value for name, value in limits.items() if hasattr(wandb.Settings(), name)}
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True,
            **known,
        )  # fmt: skip
        self._wandb = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            name=self._run_dir.name,
            id=self._wandb_id(home),
            resume="allow" if mode == "online" else None,
            dir=str(self._run_dir),
            config=as_dict(self._config),
            mode=mode,
            settings=quiet,
        )
        return self._wandb
