"""Validation of reports: impossible values and excess metrics are dropped and counted."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from episode_kit import chunk_header

from user_sys.episode import Chunk
from user_sys.gateway.config import GatewayConfig
from user_sys.gateway.ingest import MAX_METRICS, MAX_TEXT_CHARS, ChunkIngester, Report, ReportValidator
from user_sys.messages import (
    FOREIGN_RUN,
    ChunkOffer,
    ChunkRefusal,
    ControlPeriod,
    EpisodeReport,
    MetricsReport,
    OperatorReply,
    RobotStatus,
    WeightsApplied,
)
from user_sys.store.maintenance import newest_segment_unix_s
from user_sys.store.store import StoreWriter
from user_sys.tunnel.server import Peer

PERIOD = ControlPeriod(1.0, (0.0,), (0.0,), 0, 1.0, 1.0)
STATUS = RobotStatus(
    robot="panda-0", authority="policy", operator="", phase="policy", episode="e0", step=1, policy_version=-1,
    real_time=True, outbox_chunks=0, control_hz=10.0, safety_interventions=0,
)  # fmt: skip
EPISODE = EpisodeReport(
    robot="panda-0", episode="e0", source="online", steps=10, success=True, intervention_steps=2, episode_return=1.0,
    policy_version=3,
)  # fmt: skip


REPLY = OperatorReply(robot="panda-0", operator="ana", order="e-stop", accepted=True, press=3)
APPLIED = WeightsApplied(robot="panda-0", version=FOREIGN_RUN, seconds=0.1)


@pytest.mark.parametrize("report", [STATUS, EPISODE, REPLY, APPLIED])
def test_valid_report_is_unchanged(report: Report) -> None:
    bounds = ReportValidator()
    assert bounds.validate(report, "robot") is report and bounds.rejected == 0


@pytest.mark.parametrize(
    ("report", "changes"),
    [
        *((STATUS, {name: value}) for name, value in (
            ("step", -1), ("faults", -1), ("outbox_chunks", 1 << 60), ("policy_version", -2), ("control_hz", math.nan),
            ("control_hz", math.inf), ("control_hz", -1.0), ("authority", "root"), ("phase", "x"), ("note", "x" * 5000),
            ("episode", "a\nb"), ("operator", "x" * 500), ("periods", (PERIOD,) * 65),
            ("periods", (msgspec.structs.replace(PERIOD, act_ms=math.nan),)),
            ("periods", (msgspec.structs.replace(PERIOD, applied=(0.0,) * 300),)),
            ("state", (0.0,) * 5000), ("promised", ((0.0,) * 100,) * 50), ("promised", ((),) * 5000),
            ("limits", ("workspace",) * 65), ("limits", ("x" * 500,)), ("task", "x" * 500),
            ("tool_refusal", "x" * 5000), ("tool_speed", math.nan),
        )),
        *((REPLY, {name: value}) for name, value in (("operator", "x" * 500), ("order", "explode"))),
        *((APPLIED, {name: value}) for name, value in (
            ("seconds", math.nan), ("seconds", math.inf), ("seconds", 1e300),
            ("version", -(2**63)), ("version", 1 << 60),
        )),
        *((EPISODE, {name: value}) for name, value in (
            ("steps", -1), ("steps", 1 << 40), ("intervention_steps", 11), ("episode_return", math.nan),
            ("episode_return", 1e300), ("source", "elsewhere"), ("policy_version", -5),
        )),
    ],
)  # fmt: skip
def test_impossible_value_is_dropped_and_counted(report: Report, changes: dict[str, object]) -> None:
    bounds = ReportValidator()
    assert bounds.validate(msgspec.structs.replace(report, **changes), "robot") is None
    assert bounds.rejected == 1


def test_long_reason_of_a_reply_is_cut() -> None:
    reply = ReportValidator().validate(msgspec.structs.replace(REPLY, reason="x" * 200_000), "robot")
    assert isinstance(reply, OperatorReply) and reply.accepted and reply.reason == "x" * MAX_TEXT_CHARS


def test_excess_metrics_are_dropped() -> None:
    bounds = ReportValidator()
    metrics = MetricsReport(node="panda-0", count=1, scalars={"hz": 10.0, "nan": math.nan, "huge": 1e300, "a\nb": 1.0})
    kept = bounds.validate(metrics, "robot")
    assert isinstance(kept, MetricsReport) and kept.scalars == {"hz": 10.0} and bounds.rejected == 3
    names: set[str] = set()
    for number in range(2 * MAX_METRICS):
        report = MetricsReport(node="panda-0", count=number, scalars={"hz": 9.0, f"m{number}": 1.0})
        kept = bounds.validate(report, "robot")
        assert isinstance(kept, MetricsReport) and kept.scalars["hz"] == 9.0
        names |= kept.scalars.keys()
    assert len(names) == MAX_METRICS and bounds.rejected == 3 + MAX_METRICS + 1
    other = bounds.validate(MetricsReport(node="panda-1", count=1, scalars={"m9": 1.0}), "robot")
    assert isinstance(other, MetricsReport), "another robot has names of its own"
    assert bounds.validate(MetricsReport(node="panda-0", count=-1, scalars={"hz": 1.0}), "robot") is None
    loss = MetricsReport(node="learner", count=1, scalars={"loss": math.nan})
    assert bounds.validate(loss, "learner") is loss


@pytest.mark.parametrize(("ahead_s", "stored"), [(-1e9, True), (60.0, True), (1e6, False), (9e9, False)])
def test_chunk_from_the_future_is_refused(tmp_path: Path, ahead_s: float, stored: bool) -> None:
    refusals = refusals_of_chunk(tmp_path, ahead_s)
    assert len(refusals) == (0 if stored else 1)
    assert stored or "if the robot's was ahead, this can be sent again once that time" in refusals[0].reason


def test_chunk_whose_time_overflows_is_refused(tmp_path: Path) -> None:
    """In 64 bits the sum of the two times is the year 2152."""
    (refusal,) = refusals_of_chunk(tmp_path, (-(1 << 63) + (1 << 60)) / 1e9, unix_offset_ns=-(1 << 62) + 1)
    assert refusal.reason == "recorded before 1970; set the clock of the robot's computer"


def test_clock_that_is_behind_the_store_refuses_no_chunk(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path, segment_bytes=512) as writer:  # a writer writes the last of several again
        for index in range(4):
            header = chunk_header("before", 1, index=index, first_step=index, task="t", sentence="")
            writer.append(Chunk(header, {"reward": np.zeros(1, np.float32)}, {}).encode())
    for file in tmp_path.iterdir():
        os.utime(file, (time.time() + 1e6, time.time() + 1e6))
    assert refusals_of_chunk(tmp_path, 1e6) == []
    assert refusals_of_chunk(tmp_path, 20 * 365 * 86_400.0), "no power cut lasts that long"


def test_clock_that_is_behind_the_installation_refuses_no_chunk_of_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("user_sys.gateway.ingest.INSTALLED_UNIX_S", time.time() + 1e8)
    assert refusals_of_chunk(tmp_path, 1.2e8) == []
    assert refusals_of_chunk(tmp_path, 1.4e8), "more than a year after it"


def test_segment_replaced_during_the_look_at_the_clock_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoreWriter.open(tmp_path).close()

    def listing(*_: object) -> Iterator[Path]:
        yield tmp_path / "0000000099.seg"  # which a compaction has just deleted

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", listing)
        assert newest_segment_unix_s(tmp_path) == 0.0
    newest = max(file.stat().st_mtime for file in tmp_path.glob("*.seg"))
    assert newest_segment_unix_s(tmp_path) == newest


def test_chunk_that_is_not_ahead_is_stored_without_a_look_at_the_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, glob = list[object](), Path.glob

    def listing(folder: Path, pattern: str, **options: Any) -> Iterator[Path]:
        looks.extend([pattern] * (folder == tmp_path))
        return glob(folder, pattern, **options)

    monkeypatch.setattr(Path, "glob", listing)
    assert not refusals_of_chunk(tmp_path, 60.0) and not looks
    assert refusals_of_chunk(tmp_path, 1e6) and looks


def refusals_of_chunk(store: Path, ahead_s: float, unix_offset_ns: int | None = None) -> list[ChunkRefusal]:
    """Of a chunk that was captured so many seconds after the offset, by default now; it is stored otherwise."""
    answers: list[object] = []
    offset_ns = time.time_ns() if unix_offset_ns is None else unix_offset_ns
    header = chunk_header("e0", 1, task="t", sentence="", unix_offset_ns=offset_ns)
    columns = {"reward": np.zeros(1, np.float32), "t_capture_ns": np.array([int(ahead_s * 1e9)], np.int64)}
    with StoreWriter.open(store) as writer:
        committer = ChunkIngester(
            writer, lambda peer, answer: answers.append(answer), lambda peer, n, size: None, GatewayConfig()
        )
        committer.start()
        peer = Peer("panda-0", "robot", "key", "10.0.0.7", b"session", None, "")
        committer.put_chunk(peer, ChunkOffer(sequence=0), Chunk(header, columns, {}).encode())
        committer.close()
    refusals = [answer for answer in answers if isinstance(answer, ChunkRefusal)]
    assert committer.totals.chunks == 1 - len(refusals)
    return refusals
