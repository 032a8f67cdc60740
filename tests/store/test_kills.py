"""``kill -9`` of the writer loses nothing acknowledged and repeats nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).with_name("kill_loop.py")


def run(folder: Path, kills: int, seed: int, timeout_s: float) -> str:
    command = [sys.executable, str(LOOP), str(folder / "store"), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_thirty_kills_lose_nothing(tmp_path: Path) -> None:
    assert "30 kills" in run(tmp_path, 30, seed=1, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_thousand_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    assert "100 kills" in run(tmp_path, 100, seed=100 + seed, timeout_s=200)
