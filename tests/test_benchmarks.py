"""What benchmarks report: results are honest about how they came about, and docs/benchmarks.md is made from them."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from benchmarks import harness, page
from benchmarks.__main__ import PROGRAMS
from benchmarks.control import hold_row
from benchmarks.harness import ROOT, Row, Run, compare, report
from benchmarks.holds import count_holds
from benchmarks.page import ResultError, keep, kept


def row(**changes: object) -> Row:
    plain = {"goal": 11, "name": "step", "unit": "ms", "ours": 1.0, "bound": 1.0, "ratio": 1.0, "target": 0.97}
    return Row(**{**plain, "met": True, **changes})


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "OUT", tmp_path / "out")
    return tmp_path / "out"


def put(out: Path, rows: list[Row], **changes: object) -> Run:
    """A run in `out` as if it had been made from a commit."""
    run = msgspec.structs.replace(report("steps", rows), commit="0123456789", **changes)
    (out / "steps.json").write_bytes(msgspec.json.encode(run))
    return run


def test_the_page_is_what_the_generator_makes() -> None:
    assert page.PAGE.read_text() == page.page(kept()), "run make bench-docs"


def test_a_run_names_date_commit_and_machine(out: Path) -> None:
    report("steps", [row()])
    written = msgspec.json.decode((out / "steps.json").read_bytes())
    assert written["machine"] and written["commit"] and written["date"].endswith("+00:00")
    assert written["rows"][0]["met"] is True and written["rows"][0]["goal"] == 11


def test_a_reduced_run_meets_no_goal(out: Path) -> None:
    run = report("steps", [row(), row(met=False)], reduced="60 s of 600")
    assert [each.met for each in run.rows] == [None, None]


def test_work_done_less_often_meets_no_goal() -> None:
    with pytest.raises(ValueError, match=r"0\.25 of the stated work"):
        row(share=0.25)
    assert row(share=0.25, met=False).met is False


@pytest.mark.parametrize(
    ("changes", "why"), [({"reduced": "60 s of 600"}, "60 s of 600"), ({"commit": "0123-dirty"}, "not committed")]
)
def test_what_proves_nothing_is_not_kept(out: Path, tmp_path: Path, changes: dict[str, str], why: str) -> None:
    put(out, [row()])
    run = msgspec.json.decode((out / "steps.json").read_bytes(), type=Run)
    (out / "steps.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(run, **changes)))
    with pytest.raises(ResultError, match=why):
        keep("steps", out, tmp_path / "results")
    assert kept(tmp_path / "results") == {}


def test_the_page_has_each_kept_run_and_its_misses(out: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    for day, ratio in (("2026-01-01", 4.8), ("2026-01-02", 3.0)):
        rows = [row(name="against a peer", goal=1, ratio=ratio, target=3.5, met=ratio >= 3.5)]
        put(out, [*rows, row(met=False, share=0.26)], date=f"{day}T00:00:00+00:00")
        keep("steps", out, results)
    keep("steps", out, results)  # the same run again changes nothing
    text = page.page(kept(results))
    assert "2026-01-01" in text and "2026-01-02" in text and "0123456789" in text
    assert "runs: 4.8, 3 " in text and "| 1 of 2 |" in text
    assert "- Missed: step (share of the stated work: 0.26): the work was done less often than the goal states." in text
    assert "### 18. Crash states of the store\n\nNot measured." in text


def test_a_ratio_comes_with_its_range() -> None:
    rates = iter([1.0, *(float(n) for n in range(1, 8))])
    found = compare("rate", lambda: next(rates), lambda: 1.0)
    assert (found.ratio, found.spread) == (4.0, (1.0, 7.0))


def test_each_hold_comes_with_its_cause(tmp_path: Path) -> None:
    day = datetime(2026, 1, 1)
    at = [(day + timedelta(seconds=second)) for second in (10, 20, 40)]
    lines = [f"{when:%Y-%m-%d %H:%M:%S},000 I driver watchdog.hold robot=a: none\n" for when in at]
    (tmp_path / "driver").write_text("".join(lines))
    (tmp_path / "session").write_text(f"{at[0]:%Y-%m-%d %H:%M:%S},020 W s command.late robot=a: 28 ms waiting\n")
    start = day.timestamp()
    episodes = [(start + 5, start + 12), (start + 15, start + 25), (start + 45, start + 50)]
    holds = count_holds(tmp_path / "driver", episodes, session_log=tmp_path / "session")
    assert (holds.within, holds.between, holds.causes) == (2, 1, ("28 ms waiting", ""))
    row = hold_row("loaded", holds, 2)
    assert row.met is False and row.note == "28 ms waiting; no cause in the log"


def test_make_bench_runs_every_program() -> None:
    by_demo = {"learning"}  # which runs it as a peer
    reporting = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "    report(" in path.read_text()}
    assert reporting - by_demo <= {program.module for program in PROGRAMS}
