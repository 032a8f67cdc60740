"""An external driver: the template installs, is found by its entry point, and passes the conformance suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from template_kit import install_template

ROOT = Path(__file__).resolve().parent.parent
RUN_S = 240

FIND = """
from user_sys.compose import RobotConfig, robot_spec
print(robot_spec(RobotConfig(name="point-0", driver="point", task="upright")).model)
"""


def run(python: Path | str, *arguments: object, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, sys.path[1:])])}
    done = subprocess.run(
        [str(python), *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the template's folder, and a Python environment in which it is installed."""
    folder = tmp_path_factory.mktemp("outside")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    install_template(folder / "package", Path(site))
    return folder, python


def test_template_driver_is_found_by_entry_point(installed: tuple[Path, Path]) -> None:
    folder, python = installed
    assert run(python, "-c", FIND, cwd=folder).strip() == "point"


def test_template_passes_conformance_suite(installed: tuple[Path, Path]) -> None:
    folder, python = installed
    out = run(
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        folder / "package" / "tests" / "test_point_robot.py",
        cwd=folder,
    )
    assert "passed" in out and "failed" not in out
