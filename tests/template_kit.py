"""Installs the template of docs/ as an outsider's package would be: by its own wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent.parent / "docs" / "template"
BUILD = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
BUILD_S = 240


def install_template(copy: Path, site: Path) -> None:
    """Copies the template's folder to `copy`, builds its wheel there, and unpacks that into `site`."""
    shutil.copytree(TEMPLATE, copy)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert built.returncode == 0, built.stderr[-3000:]
    shutil.unpack_archive(copy / built.stdout.splitlines()[-1], site, "zip")
