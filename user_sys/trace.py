"""Chrome traces of runs: what each process does when (``user-sys train --profile``).

Each process of a run writes its spans into a file of its own. At the end of the run they become one file in Chrome's
trace event format, which https://ui.perfetto.dev opens. Without `TRACE_VARIABLE` in its environment a process writes
none, and `span` does nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

TRACE_VARIABLE = "USER_SYS_TRACE"
"""Path of a process's file; its id and `SPANS_SUFFIX` are appended."""
SPANS_SUFFIX = ".spans"
MAX_FILE_BYTES = 256 << 20  # of a process; later spans are dropped
_OFF = nullcontext()


class SpanWriter:
    """Writes spans into a file, an event in JSON a line. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        self._file = open(f"{path}-{self._pid}{SPANS_SUFFIX}", "a", buffering=1)  # by lines: processes are killed
        self._unix_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._lock, self._threads = threading.Lock(), set[int]()
        self._room = MAX_FILE_BYTES
        self._write({"name": "process_name", "ph": "M", "args": {"name": Path(path).name}}, 0)

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """Writes a span of the calling thread; times are of `time.perf_counter_ns`."""
        thread = threading.get_native_id()
        with self._lock:
            if thread not in self._threads:
                self._threads.add(thread)
                named = {"name": threading.current_thread().name}
                self._write({"name": "thread_name", "ph": "M", "args": named}, thread)
            start_us, duration_us = (start_ns + self._unix_offset_ns) / 1e3, (end_ns - start_ns) / 1e3
            self._write({"name": name, "ph": "X", "ts": start_us, "dur": duration_us}, thread)

    def _write(self, event: dict[str, object], thread: int) -> None:
        line = json.dumps({**event, "pid": self._pid, "tid": thread}) + "\n"
        self._room -= len(line)
        if self._room >= 0:
            self._file.write(line)


class _Span:
    def __init__(self, writer: SpanWriter, name: str) -> None:
        self._writer, self._name = writer, name

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._writer.add(self._name, self._start_ns, time.perf_counter_ns())


_writer = SpanWriter(os.environ[TRACE_VARIABLE]) if TRACE_VARIABLE in os.environ else None


def span(name: str) -> AbstractContextManager[None]:
    """Records the time of a ``with`` block under `name`, if this process writes a trace."""
    return _OFF if _writer is None else _Span(_writer, name)


def child_environment(role: str) -> dict[str, str]:
    """The environment of a process that this one starts, whose spans are shown under ``<this process>-<role>``."""
    path = os.environ.get(TRACE_VARIABLE)
    return {**os.environ, **({TRACE_VARIABLE: f"{path}-{role}"} if path else {})}


def prepare_trace(folder: Path, *, wanted: bool) -> None:
    """Creates an empty `folder` for the files of processes; `wanted` false removes that of a run that was killed."""
    shutil.rmtree(folder, ignore_errors=True)
    if wanted:
        folder.mkdir()


def trace_environment(folder: Path, process: str) -> dict[str, str]:
    """The environment variables of `process`; empty unless `prepare_trace` created `folder`."""
    return {TRACE_VARIABLE: str(folder / process)} if folder.is_dir() else {}


def merge_trace(folder: Path, target: Path) -> int:
    """Merges the files in `folder` into a trace at `target`, and removes them. Returns the number of events."""
    count = 0
    with target.open("w") as merged:
        merged.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for file in sorted(folder.glob(f"*{SPANS_SUFFIX}")):
            with file.open() as lines:
                for line in lines:
                    if line.endswith("}\n"):  # a killed process leaves a torn line
                        merged.write(("\n" if count == 0 else ",\n") + line[:-1])
                        count += 1
        merged.write("\n]}\n")
    shutil.rmtree(folder, ignore_errors=True)
    return count
