"""What benchmarks report: results are honest about how they came about, and docs/benchmarks.md is made from them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_folder_kit import make_run

from benchmarks import gpu_learning, gpu_vla, harness, learning, page, vla
from benchmarks.__main__ import PROGRAMS
from benchmarks.control import hold_row
from benchmarks.harness import ROOT, Row, Run, compare, report
from benchmarks.holds import count_holds
from benchmarks.page import ResultError, keep, kept
from user_sys.compose import check_pictures, robot_spec
from user_sys.config import load
from user_sys.logs import JsonFormatter
from user_sys.plugins import load_algorithm, load_policy
from user_sys.run.config import RunConfig


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


def test_page_is_what_the_generator_makes() -> None:
    assert page.PAGE.read_text() == page.page(kept()), "run make bench-docs"


def test_run_names_date_commit_and_machine(out: Path) -> None:
    report("steps", [row()])
    written = msgspec.json.decode((out / "steps.json").read_bytes())
    assert written["machine"] and written["commit"] and written["date"].endswith("+00:00")
    assert written["rows"][0]["met"] is True and written["rows"][0]["goal"] == 11


def test_reduced_run_meets_no_goal(out: Path) -> None:
    run = report("steps", [row(), row(met=False)], reduced="60 s of 600")
    assert [each.met for each in run.rows] == [None, None]


def test_work_done_less_often_meets_no_goal() -> None:
    with pytest.raises(ValueError, match=r"0\.25 of the stated work"):
        row(share=0.25)
    assert row(share=0.25, met=False).met is False


@pytest.mark.parametrize(
    ("changes", "why"), [({"reduced": "60 s of 600"}, "60 s of 600"), ({"commit": "0123-dirty"}, "not committed")]
)
def test_result_without_proof_is_not_kept(out: Path, tmp_path: Path, changes: dict[str, str], why: str) -> None:
    put(out, [row()])
    run = msgspec.json.decode((out / "steps.json").read_bytes(), type=Run)
    (out / "steps.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(run, **changes)))
    with pytest.raises(ResultError, match=why):
        keep("steps", out, tmp_path / "results")
    assert kept(tmp_path / "results") == {}


def test_page_has_each_kept_run_and_its_misses(out: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    for day, ratio in (("2026-01-01", 4.8), ("2026-01-02", 3.0)):
        rows = [row(name="against a peer", goal=1, ratio=ratio, target=3.5, met=ratio >= 3.5)]
        put(out, [*rows, row(met=False, share=0.26)], date=f"{day}T00:00:00+00:00")
        keep("steps", out, results)
    keep("steps", out, results)  # the same run again changes nothing
    text = page.page(kept(results))
    assert "2026-01-02" in text and "0123456789" in text
    assert "| 3.00 of 3.5, **missed**, 1 of 2 runs |" in text
    assert "- Missed: step (share of the stated work: 0.26): the work was done less often than the goal states." in text
    assert "crash states of the store (18)" in text


def test_ratio_comes_with_its_range() -> None:
    rates = iter([1.0, *(float(n) for n in range(1, 8))])
    found = compare("rate", lambda: next(rates), lambda: 1.0)
    assert (found.ratio, found.spread) == (4.0, (1.0, 7.0))


def hold_line(at: datetime) -> str:
    """As in the log of a run."""
    record = logging.LogRecord("driver", logging.INFO, "", 0, "watchdog.hold robot=a: none", (), None)
    record.created, record.msecs = at.timestamp(), 0.0
    return JsonFormatter({}).format(record) + "\n"


def test_each_hold_comes_with_its_cause(tmp_path: Path) -> None:
    day = datetime(2026, 1, 1)
    at = [(day + timedelta(seconds=second)) for second in (10, 20, 40)]
    (tmp_path / "driver").write_text("".join(hold_line(when) for when in at))
    (tmp_path / "session").write_text(f"{at[0]:%Y-%m-%d %H:%M:%S},020 W s command.late robot=a: 28 ms waiting\n")
    start = day.timestamp()
    episodes = [(start + 5, start + 12), (start + 15, start + 25), (start + 45, start + 50)]
    holds = count_holds(tmp_path / "driver", episodes, session_log=tmp_path / "session")
    assert (holds.within, holds.between, holds.causes) == (2, 1, ("28 ms waiting", ""))
    row = hold_row("loaded", holds, 2)
    assert row.met is False and row.note == "28 ms waiting; no cause in the log"


def test_make_bench_runs_every_program() -> None:
    reporting = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "    report(" in path.read_text()}
    assert reporting <= {program.module for program in PROGRAMS}
    assert [program.arguments for program in PROGRAMS if program.module == "vla"] == list(vla.PARTS)
    learned = [program.arguments for program in PROGRAMS if program.module == "learning"]
    assert learned == list(learning.PARTS)


def variants() -> list[Any]:
    entries = [(f"{name}: {entry.name}", entry) for name, part in learning.PARTS.items() for entry in part.entries]
    for name, overrides in (
        ("vla start", vla.DEMONSTRATIONS_ALONE),
        ("vla hg-dagger", ("--learner.algorithm=hg_dagger", vla.robots(2, more=vla.OPERATOR))),
        ("vla recap", ("--learner.algorithm=recap", vla.robots(2))),
        ("vla dsrl", ("--learner.algorithm=dsrl", vla.robots(2))),
        ("vla fifth", (*vla.DEMONSTRATIONS_ALONE, vla.robots(1, [*vla.NAMES, vla.FIFTH]), vla.OLD_TASKS)),
    ):
        acting = vla.POLICY | (vla.GUIDED if name == "vla recap" else {})
        options = vla.policy_overrides(acting, steered=name == "vla dsrl")
        entries.append((name, learning.Entry(name, vla.CONFIG.name, (*vla.ALWAYS, *options, *overrides))))
    return [pytest.param(entry, id=name) for name, entry in entries]


@pytest.mark.parametrize("entry", variants())
def test_variants_of_learning_can_be_built(entry: learning.Entry) -> None:
    config = load(RunConfig, ROOT / "configs" / entry.config, [*learning.ALWAYS, *entry.overrides])
    spec = robot_spec(config.robots[0])
    check_pictures(config.policy, config.robots[0])
    policy, options = load_policy(config.policy.kind, config.policy.options)
    algorithm, settings = load_algorithm(config.learner.algorithm, config.learner.options)
    module = policy.make_module(spec, settings=options, features=config.policy.features)
    assert algorithm(settings, module, spec).data.batches(config.learner.sampler.n_step)


def test_part_reports_the_worst_of_its_seeds(tmp_path: Path) -> None:
    finished = learning.Finished(
        learning.Entry("fast", "demo.yaml", success=0.95, seconds=60.0),
        tuple(make_run(tmp_path, f"fast-seed{n}", [False] * 10 + [True] * 90, seed=n).path for n in range(3)),
    )
    summary = {"success": 1.0, "training_s": 40.0, "env_steps": 9, "updates": 7, "successes_per_hour": 100.0}
    for number, run in enumerate(finished.runs):
        changes = {"success": 0.9, "training_s": 70.0} if number == 2 else {}
        (run / "summary.json").write_text(json.dumps({**summary, **changes}))
    rows = {each.name: each for each in learning.rows_of(learning.Part((finished.entry,)), finished)}
    success, took = rows["fast: success, worst of 3 seeds"], rows["fast: training time, worst of 3 seeds"]
    assert (success.ours, success.met, took.ours, took.met) == (0.9, False, 70.0, False)
    assert rows["fast: episodes to 90%"].note == "3 of 3 seeds"


def part_rows(name: str, tmp_path: Path, runs: dict[str, dict[str, float]]) -> dict[str, Row]:
    """The rows of a part whose runs exist: each has 10 failures, then successes, and these summaries."""
    for variant, summary in runs.items():
        late = int(summary.pop("failures", 10))
        folder = make_run(tmp_path / name, f"{variant}-seed0", [False] * late + [True] * 90)
        whole = {"success": 1.0, "training_s": 60.0, "env_steps": 9, "updates": 7, "successes_per_hour": 1.0, "seed": 0}
        (folder.path / "summary.json").write_text(json.dumps({**whole, **summary}))
    return {each.name: each for each in learning.run_part(name, [0], False, tmp_path)}


def test_asynchronous_training_is_measured_beside_synchronous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "OUT", tmp_path / "out")
    fast, slow = {"env_steps": 3000.0, "updates": 9000.0}, {"env_steps": 1000.0, "updates": 900.0, "success": 0.9}
    rows = part_rows("asynchrony", tmp_path, {"asynchronous": fast, "synchronous": slow})
    generation, updates = (rows[f"{name} an hour, bound: synchronous"] for name in ("generation", "updates"))
    assert (generation.ratio, generation.met, updates.ratio, updates.met) == (3.0, True, 10.0, True)
    assert rows["success, bound: synchronous"].met
    assert (tmp_path / "out" / "learning-asynchrony.png").stat().st_size > 0


def test_robots_are_measured_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "OUT", tmp_path / "out")
    runs = {f"robots-{n}": {"failures": float(failures)} for n, failures in ((1, 120), (2, 70), (4, 60), (8, 40))}
    rows = part_rows("robots", tmp_path, runs)
    two = rows["2 robots: time to 80%; bound: one"]
    assert two.bound == 99.0 and two.ours == 49.0 and two.met and two.target == 1.6
    assert rows["8 robots: time to 80%; bound: one"].met is False


@pytest.mark.slow
def test_large_policies_of_the_gpu_benchmark_run_on_a_cpu() -> None:
    size, trains = replace(gpu_vla.SMOKE[0], seconds=0.05), {"expert": gpu_vla.TRAINS["expert"]}
    rows = list(gpu_vla.rows(size, gpu_vla.HOST, trains))
    assert all(row.ours and row.ours > 0 and row.met is None for row in rows)
    assert {row.unit for row in rows} == {"1/s", "MB", "chunks/s", "ms"}


def test_pixel_learner_of_the_gpu_benchmark_runs_on_a_cpu() -> None:
    require_pixel_rows(1)


@pytest.mark.slow  # it compiles the update
def test_pixel_learner_of_the_gpu_benchmark_is_compiled() -> None:
    require_pixel_rows(3)


def require_pixel_rows(variants: int) -> None:
    rows = gpu_learning.rows("cpu", replace(gpu_learning.SMOKE, episodes=1, seconds=0.1))
    found = list(islice((each for each in rows if each.unit == "1/s"), variants))
    names = ["32x32, trained: updates", "32x32, frozen: updates", "32x32, trained, compiled: updates"]
    assert [each.name for each in found] == names[:variants]
    assert all(each.ours and each.met is None for each in found)
