"""The folder of a cluster: private, and removed by the next start if its program was killed."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hal import ray_folder
from hal.ray_folder import RayFolder

HOLDS = """
import sys, time
from pathlib import Path
from hal import ray_folder
ray_folder.BASE = Path(sys.argv[1])
folder = ray_folder.RayFolder()
folder.path.mkdir()
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ray_folder, "BASE", tmp_path)
    return tmp_path


def test_it_is_for_this_user_alone_and_is_removed() -> None:
    folder = RayFolder()
    home = folder.path.parent
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    folder.path.mkdir(mode=0o777)
    folder.remove()
    folder.remove()
    assert not home.exists()


def test_that_of_a_killed_program_is_removed_by_the_next_start_and_no_other(base: Path) -> None:
    foreign = base / f"{ray_folder.PREFIX}link"
    foreign.symlink_to(base)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(base)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        left = Path(program.stdout.readline().strip())
        RayFolder().remove()
        assert (left / "file").exists(), "its program lives"
        program.send_signal(signal.SIGKILL)
        program.wait(60)
        RayFolder().remove()
    assert not left.parent.exists() and foreign.is_symlink() and base.exists()
