"""A part of ``make chaos-store``: faults and kills lose nothing acknowledged, and damage is always reported."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import (
    Row,
    bit_flips,
    errors_at_operations,
    exchanged_files,
    kills_at_operations,
    sound_store,
    truncations,
    zeroed_pages,
)

LOOP = Path(__file__).with_name("kill_loop.py")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def harmless(row: Row, at_least: int) -> bool:
    assert not row.failures, row
    return row.cases >= at_least


def test_changed_bytes_are_reported_and_lose_at_most_one_chunk() -> None:
    content = sound_store()
    assert all(harmless(row, 25) for row in bit_flips(content, 40, step=3))
    assert harmless(zeroed_pages(content), 40)


@pytest.mark.slow
def test_each_changed_byte_of_headers_is_reported() -> None:
    assert all(harmless(row, 80) for row in bit_flips(sound_store(), 100))


def test_truncated_and_swapped_files_are_reported() -> None:
    content = sound_store()
    assert harmless(truncations(content, 29), 50)
    assert harmless(exchanged_files(content, sound_store()), 17)


def test_kill_during_recovery_loses_nothing() -> None:
    assert harmless(kills_at_operations(7), 50)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_failing_operations_lose_nothing(code: int) -> None:
    assert harmless(errors_at_operations(code, 11), 30)


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
