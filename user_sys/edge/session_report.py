"""What a session tells the `user-sys edge` that looks after it: a small file in the runtime folder, once a second."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from hal.machine import runtime_folder
from hal.undecodable import UNDECODABLE
from user_sys.edge.outbox import Outbox
from user_sys.tunnel.client import TunnelClient

log = logging.getLogger(__name__)

PERIOD_S = 1.0
Doing = Literal["waiting for its lease", "waiting for weights", "driving", "held without a lease", "delivering"]


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A session at one moment.

    Attributes:
        link: a `TunnelState`'s value.
        reason: why the tunnel is not open; empty before the first attempt has failed.
    """

    pid: int
    link: str
    reason: str
    doing: Doing
    waiting_chunks: int
    waiting_bytes: int
    dropped_episodes: int


class SessionReporter:
    """Writes the report from a thread of its own. Set `doing` from any thread."""

    def __init__(self, robot: str, client: TunnelClient, outbox: Outbox) -> None:
        self.doing: Doing = "waiting for its lease"
        self._path, self._client, self._outbox = report_path(robot), client, outbox
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(2 * PERIOD_S)

    def _run(self) -> None:
        try:
            self._write()
            while not self._over.is_set():
                self._over.wait(PERIOD_S)
                self._write()  # the last time when all is over: what is left in the outbox
        except OSError as error:
            log.warning("session.unreported %s", error)

    def _write(self) -> None:
        waiting = len(self._outbox)
        report = SessionReport(
            pid=os.getpid(),
            link=self._client.state.value,
            reason=self._client.reason if self._client.counters["lost"] else "",
            doing=self.doing,
            waiting_chunks=waiting,
            waiting_bytes=self._outbox.used_bytes if waiting else 0,
            dropped_episodes=self._outbox.dropped.episodes,
        )
        fresh = self._path.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(report))
        fresh.replace(self._path)


def read_report(robot: str, pid: int | None) -> SessionReport | None:
    """What the session that runs as `pid` said last; None where it has not said anything yet."""
    try:
        report = msgspec.json.decode(report_path(robot).read_bytes(), type=SessionReport)
    except (FileNotFoundError, *UNDECODABLE):
        return None
    return report if report.pid == pid else None


def report_path(robot: str) -> Path:
    return runtime_folder() / f"{robot}.session.json"
