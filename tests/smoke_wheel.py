"""Builds the wheel and tries it as a robot's computer would have it: outside the checkout, with the `edge` extra only.

Run by ``make wheel``; it takes about a minute, so it is no test of the default run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
DRIVE_S = 300.0
HEAVY = ("torch", "ray", "mujoco", "gymnasium", "matplotlib", "fastapi", "wandb", "tensorboard", "pyarrow", "av")
LIGHT_MODULES = (
    "hal.conformance",
    "hal.discovery",
    "hal.lease",
    "hal.placement",
    "hal.discovery",
    "hal.registry",
    "hal.robot",
    "hal.safety",
    "robots.fake",
    "user_sys.commands.main",
    "user_sys.edge.control_authority",
    "user_sys.edge.driver_server",
    "user_sys.commands.edge",
    "user_sys.edge.outbox",
    "user_sys.edge.recorder",
    "user_sys.edge.session",
    "user_sys.store.log_writer",
    "user_sys.tunnel.client",
    "user_sys.tunnel.server",
)
SHIPPED = ("user_sys/console/static/index.html", "sim/assets/panda.xml", "user_sys/py.typed", "hal/py.typed")
ROBOT = "robots: [{name: left, driver: fake, task: reach, options: {cameras: [front]}}]\n"
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
        began = time.monotonic()
        python = install(wheel, outside / "environment")
        run(outside, python.with_name("user-sys"), "--help")
        run(outside, python.with_name("user-sys"), "--version")
        run(outside, python, "-c", PROBE)
        seconds, size_mb = time.monotonic() - began, folder_mb(outside / "environment")
        print(f"user-sys[edge]: installed in {seconds:.0f} s, {size_mb:.0f} MB")
        drive(outside, python)
    print(f"{wheel.name}: installs and runs outside the checkout")
    return 0


def folder_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def drive(outside: Path, python: Path) -> None:
    """A robot's computer with the `edge` extra alone: it makes its key, drives, records and delivers to a gateway."""
    program = python.with_name("user-sys")
    run(outside, program, "keys", "new", "left")
    run(outside, program, "keys", "allow", "left", "--role", "robot")
    run(outside, program, "keys", "new", "gateway")
    (outside / "robots.yaml").write_text(ROBOT)
    (outside / "run").mkdir()
    (outside / "run" / "keys").symlink_to(outside / "keys")
    with process(outside, python, "-m", "user_sys.gateway", "--run", "run"):
        address = json.loads(read(outside / "run" / "gateway.json"))["endpoint"]
        with process(outside, program, "edge", "robots.yaml", "--connect", address):
            deadline = time.monotonic() + DRIVE_S
            while stored_steps(outside, program) < 20:
                if time.monotonic() > deadline:
                    raise SystemExit(f"nothing arrived: {read(outside / 'edge' / 'logs' / 'left-session.log')[-2000:]}")


def stored_steps(outside: Path, program: Path) -> int:
    shown = run(outside, program, "store", "inspect", "--json", "run/store")
    return int(json.loads(shown)["steps"])


def read(path: Path) -> str:
    deadline = time.monotonic() + DRIVE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.read_text()


@contextmanager
def process(folder: Path, *command: object) -> Iterator[None]:
    """Ended by SIGTERM at the end; must then leave with status 0."""
    environment = {**os.environ, "USER_SYS_TEST_FOLDER": str(folder / "r")}
    running = subprocess.Popen([str(part) for part in command], cwd=folder, env=environment)
    try:
        yield
    finally:
        running.terminate()
        if running.wait(DRIVE_S):
            raise SystemExit(f"{' '.join(map(str, command))[:200]}: exit status {running.returncode}")


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


def run(folder: Path, *command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, command))[:200]}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
