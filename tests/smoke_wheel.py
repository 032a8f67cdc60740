"""Builds the wheel and tries it as a robot's computer would have it: outside the checkout, with the `edge` extra only.

Run by ``make wheel``; it takes about a minute, so it is no test of the default run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
HEAVY = ("torch", "ray", "mujoco", "gymnasium", "matplotlib", "fastapi", "wandb", "tensorboard")
LIGHT_MODULES = (
    "hal.conformance",
    "hal.discovery",
    "hal.lease",
    "hal.placement",
    "hal.registry",
    "hal.robot",
    "hal.safety",
    "robots.fake",
    "user_sys.cli",
    "user_sys.edge.authority",
    "user_sys.edge.driver_process",
    "user_sys.edge.outbox",
    "user_sys.edge.recorder",
    "user_sys.store.log",
    "user_sys.tunnel.client",
    "user_sys.tunnel.server",
)
SHIPPED = ("user_sys/console/static/index.html", "sim/assets/panda.xml", "user_sys/py.typed", "hal/py.typed")
PROBE = f"""
import importlib, importlib.util, pathlib, sys
present = [name for name in {HEAVY!r} if importlib.util.find_spec(name)]
assert not present, f"the edge extra brought {{present}}"
for name in {LIGHT_MODULES!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(sys.prefix) in pathlib.Path(module.__file__).parents, f"{{name}} came from {{module.__file__}}"
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="user-sys-wheel-") as folder:
        outside = Path(folder)
        wheel = build(outside)
        check_contents(wheel)
        python = install(wheel, outside / "edge")
        run(outside, python.with_name("user-sys"), "--help")
        run(outside, python.with_name("user-sys"), "--version")
        run(outside, python, "-c", PROBE)
    print(f"{wheel.name}: installs and runs outside the checkout")
    return 0


def build(outside: Path) -> Path:
    """The wheel, built from the source distribution, so that both are tried and no stale file gets in."""
    run(ROOT, sys.executable, "-m", "build", "--outdir", outside / "dist", ROOT)
    (wheel,) = (outside / "dist").glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in SHIPPED if name not in names]
    strangers = {name.split("/")[0] for name in names} - {"hal", "robots", "sim", "user_sys"}
    strangers = {name for name in strangers if not name.endswith(".dist-info")}
    if missing or strangers:
        raise SystemExit(f"{wheel.name}: lacks {missing}, should not hold {sorted(strangers)}")


def install(wheel: Path, environment: Path) -> Path:
    """A fresh environment with the wheel and its `edge` extra; returns its Python."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(environment, python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[edge]")
    return python


def run(folder: Path, *command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, command))[:200]}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )


if __name__ == "__main__":
    sys.exit(main())
