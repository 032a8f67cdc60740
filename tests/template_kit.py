"""The template of docs/ as an outsider installs it, and a shell in an environment outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent.parent / "docs" / "template"
BUILD = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
BUILD_S = 240
PROGRAMS = {  # of an environment; pip takes what is installed here for dependencies
    "user-sys": 'exec "$(dirname "$0")/python" -m user_sys.commands.main "$@"',
    "pytest": 'exec "$(dirname "$0")/python" -m pytest "$@"',
    "pip": '[ "$2" = --no-deps ] && shift; shift; exec uv pip install -q --no-deps --no-build-isolation'
    ' --python "$(dirname "$0")/python" "$@"',
}


def install_template(copy: Path, site: Path) -> None:
    """Copies the template's folder to `copy`, builds its wheel there, and unpacks that into `site`."""
    shutil.copytree(TEMPLATE, copy)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert built.returncode == 0, built.stderr[-3000:]
    shutil.unpack_archive(copy / built.stdout.splitlines()[-1], site, "zip")


def environment(folder: Path) -> dict[str, str]:
    """What a shell must set to use a new Python environment in `folder`, with this one's packages and `PROGRAMS`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    for name, line in PROGRAMS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    packages = [path for path in sys.path if "site-packages" in path]
    return {
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"], str(Path(sys.executable).parent)]),
        "PYTHONPATH": os.pathsep.join([str(TEMPLATE.parent.parent), *packages]),
    }
