"""README and the tutorial (docs/bring-your-robot.md), typed line by line as a reader does."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from docs_kit import code_blocks
from run_kit import Launch, until, user_sys
from template_kit import TEMPLATE, environment

from user_sys.run.status import read_status

ROOT = Path(__file__).resolve().parent.parent
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "bring-your-robot.md"
LINE_S, MAKE_S = 200, 1500
CONFIG = """
robots: [{name: arm, driver: fake, task: reach, real_time: false, options: {cameras: [front]}}]
demonstrations: {episodes: 20}
learner: {max_training_s: 100000, warmup_updates: 20}
logging: {wandb: {mode: disabled}}
console: {port: 0}
"""
START, RESUME = "user-sys train CONFIG --seed 1 --learner.batch_size 128", "user-sys train --resume runs/latest"
QUICK = {"user-sys keys new robot-7": "", 'eval "$(user-sys completion bash)"': ""}
WHILE_IT_TRAINS = {  # with the line that is typed, if it has a placeholder
    "user-sys status runs/latest": "user-sys status runs/latest || [ $? = 1 ]",  # 1: a fault
    "user-sys weights rollback VERSION runs/latest": "user-sys weights rollback 1 runs/latest",
    "user-sys stop [ROBOT]": "user-sys stop arm",
}
ONCE_IT_HAS_TRAINED = {
    "user-sys hardware VERB": "user-sys hardware list || [ $? = 1 ]",  # 1: a finding
    "user-sys evaluate runs/latest": "",
    "user-sys compare runs/a-0 runs/a-1 runs/b": "",
    "user-sys store VERB": "user-sys store inspect runs/latest/store && user-sys store verify runs/latest/store",
    "user-sys reward train runs/latest": "user-sys reward train runs/latest --updates 5",
}
NOT_TYPED = {
    "user-sys cloud": "tests/test_docs_blocks.py",
    "user-sys edge": "tests/test_docs_blocks.py",
    "user-sys relay": "tests/test_docs_blocks.py",
    "reward audit": "part of a command",
    "user-sys top runs/latest": "lasts until Ctrl-C: tests/run/test_run_status.py",
    "user-sys view runs/latest --rerun": "needs the extra rerun: tests/interchange",
    "user-sys rearm ROBOT": "of a real robot: tests/edge/test_stop_command.py",
    "user-sys node join": "needs two computers: tests/test_learner_failover.py",
    "make bench": "measures for hours: tests/test_benchmarks.py",
    "make bench-learning": "trains for hours",
}


def commands() -> list[str]:
    """The commands of README's table."""
    table = README.read_text().partition("## Commands")[2].partition("\n## ")[0]
    return [line for row in re.findall(r"^\| (`.*`) \|", table, re.MULTILINE) for line in re.findall(r"`([^`]+)`", row)]


def type_all(lines: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
    for line in lines:
        shell = ["bash", "-c", line]
        env = {**os.environ, **variables}
        done = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=LINE_S)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def typed(lines: Mapping[str, str]) -> list[str]:
    return [filled or line for line, filled in lines.items()]


def test_each_command_of_the_table_is_typed_or_has_a_reason() -> None:
    assert sorted(commands()) == sorted([START, RESUME, *QUICK, *WHILE_IT_TRAINS, *ONCE_IT_HAS_TRAINED, *NOT_TYPED])


def test_commands_that_need_no_run(tmp_path: Path) -> None:
    type_all(typed(QUICK), tmp_path, environment(tmp_path / "venv"))
    assert (tmp_path / "keys" / "robot-7.pub").exists()


@contextmanager
def started(line: str, folder: Path, variables: Mapping[str, str]) -> Iterator[Launch]:
    """A run that trains; Ctrl-C ends it."""
    latest, begun = folder / "runs" / "latest", time.time()
    with user_sys(folder, *line.replace("CONFIG", "config.yaml").split()[1:], env=variables) as launch:

        def trains() -> bool:
            assert launch.process.poll() is None, launch.err
            if not (file := latest / "status.json").exists() or file.stat().st_mtime < begun:
                return False
            run = read_status(latest).run
            return run.updates > 20 and run.episodes > 20

        until(trains, f"it trains: {line}")
        yield launch
        launch.interrupt()
        assert launch.wait() == 130, launch.err
        assert "--resume" in launch.out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_in_an_empty_folder(tmp_path: Path) -> None:
    """One run that is started, looked at, stopped by Ctrl-C, resumed, and evaluated."""
    variables = environment(tmp_path / "venv")
    (tmp_path / "config.yaml").write_text(CONFIG)
    with started(START, tmp_path, variables) as launch:
        type_all(typed(WHILE_IT_TRAINS), tmp_path, {**variables, "USER_SYS_TEST_FOLDER": str(launch.runtime)})
    latest = (tmp_path / "runs" / "latest").resolve()
    with started(RESUME, tmp_path, variables):
        assert (tmp_path / "runs" / "latest").resolve() == latest
    for copy in ("a-0", "a-1", "b"):
        (tmp_path / "runs" / copy).symlink_to(latest)
    type_all(typed(ONCE_IT_HAS_TRAINED), tmp_path, {**variables, "USER_SYS_TEST_FOLDER": str(tmp_path)})
    assert (tmp_path / "compare.png").exists() and (tmp_path / "reward.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tutorial_in_an_empty_folder(tmp_path: Path) -> None:
    variables = environment(tmp_path / "venv")
    (tmp_path / "docs").symlink_to(TEMPLATE.parent)
    *install, start = "".join(code_blocks(TUTORIAL)).splitlines()
    (config,) = code_blocks(TUTORIAL, "yaml")
    type_all(["; ".join(["set -e", *install])], tmp_path, variables)
    (tmp_path / "my-robot" / "config.yaml").write_text(f"{config}console: {{port: 0}}\n")
    with user_sys(
        tmp_path / "my-robot", *start.replace("CONFIG", "config.yaml").split()[1:],
        env=variables, python=tmp_path / "venv" / "bin" / "python",
    ) as launch:  # fmt: skip
        latest = tmp_path / "my-robot" / "runs" / "latest"
        until(lambda: (latest / "status.json").exists(), "it starts")
        until(lambda: [each for each in read_status(latest).run.robots if each.status], "its robot reports")
        launch.interrupt()
        assert launch.wait() == 130, launch.err


@pytest.mark.slow
@pytest.mark.timeout(3 * MAKE_S)
def test_make_in_a_clean_clone(tmp_path: Path) -> None:
    """The demos in their short form. `make test` collects the tests only: .ci/run runs them."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    of_these_tests = ("PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS", "ARGS")  # `make test-slow ARGS=...` hands ARGS on
    plain = {name: value for name, value in os.environ.items() if not name.startswith(of_these_tests)}
    (block,) = code_blocks(README)
    for line in block.splitlines():
        short = "ARGS='--collect-only -q' WORKERS=0" if line == "make test" else "DEMO=smoke"
        command = f"{line.partition('#')[0]} {short}"
        done = subprocess.run(["bash", "-c", command], cwd=clone, env=plain, capture_output=True, timeout=MAKE_S)
        assert done.returncode == 0, f"{command}\n{done.stdout.decode()[-3000:]}{done.stderr.decode()[-3000:]}"
