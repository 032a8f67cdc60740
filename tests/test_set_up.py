""".ci/set-up with an installer that is played: what it asks for, and when it says that an environment is ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CUDA = " + nvidia-cublas==13.1.1.3\n + torch==2.13.0\n"
CPU = " + nvidia-ml-py==13.615.71\n + torch==2.13.0+cpu\n"

UV = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
"venv "*) for last; do :; done; mkdir -p "$last/bin" && ln -sf "$PLAYED_PYTHON" "$last/bin/python" ;;
*--dry-run*--torch-backend=cpu*) [ -n "$WITH_CPU" ] && printf '%s' "$WITH_CPU" || { echo "no index" >&2; exit 2; } ;;
*--dry-run*) [ -n "$AS_IT_IS" ] && printf '%s' "$AS_IT_IS" || { echo "no versions fit" >&2; exit 1; } ;;
esac
"""

SetUp = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture
def set_up(tmp_path: Path, calls: Path) -> Iterator[SetUp]:
    """Runs a copy of the script: `extras`, and what uv would install as it is, and with its CPU builds."""
    tree, programs = tmp_path / "tree", tmp_path / "programs"
    shutil.copytree(ROOT / ".ci", tree / ".ci")
    programs.mkdir()
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)

    def run(extras: str, as_it_is: str, with_cpu: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
        played = {"CALLS": str(calls), "AS_IT_IS": as_it_is, "WITH_CPU": with_cpu, "PLAYED_PYTHON": sys.executable}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PYTHON", "TORCH_"))}
        environment = {**kept, **played, "PATH": f"{programs}:{os.environ['PATH']}", **settings}
        command = [tree / ".ci" / "set-up", extras]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    yield run


def installed(calls: Path) -> list[str]:
    return [line for line in calls.read_text().splitlines() if "pip install" in line and "--dry-run" not in line]


@pytest.mark.parametrize(("with_cpu", "option"), [(CPU, True), ("", False)], ids=["by its index", "in a folder"])
def test_without_gpu_the_cpu_build_is_taken(set_up: SetUp, calls: Path, with_cpu: str, option: bool) -> None:
    set_up("learner", CUDA if option else CPU, with_cpu)
    assert len(installed(calls)) == 1
    assert ("--torch-backend=cpu" in installed(calls)[0]) is option


def test_without_a_cpu_build_nothing_is_downloaded(set_up: SetUp, calls: Path) -> None:
    done = set_up("learner", CUDA)
    assert done.returncode == 1 and installed(calls) == []
    assert "no GPU, and only torch with CUDA" in done.stderr and "PYTHON=python3.11" in done.stderr


def test_cuda_can_be_asked_for(set_up: SetUp, calls: Path) -> None:
    set_up("learner", CUDA, TORCH_WITH_CUDA="1")
    assert len(installed(calls)) == 1 and "torch-backend" not in installed(calls)[0]


def test_versions_that_do_not_fit_are_told(set_up: SetUp, calls: Path) -> None:
    done = set_up("edge", "")
    assert done.returncode == 1 and installed(calls) == []
    assert "no set of versions was found" in done.stderr


@pytest.mark.parametrize("extras", ["edge", "--bench"])
def test_environment_that_cannot_import_is_not_ready(set_up: SetUp, extras: str) -> None:
    done = set_up(extras, CPU)  # nothing was installed in truth
    assert done.returncode == 1
    assert "cannot be imported" in done.stderr and "is not ready" in done.stderr
