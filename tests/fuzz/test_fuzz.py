"""A short fuzz run of each parser; `make fuzz` runs them for longer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import fuzz_all
import pytest
from fuzz_all import fuzz
from targets import TARGETS

RUNS = 3000


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed here")
@pytest.mark.timeout(900)
def test_parsers_survive_a_short_fuzz(tmp_path: Path) -> None:
    done = fuzz("all", tmp_path, f"-runs={RUNS}", "-seed=1")
    assert done.returncode == 0, done.stderr[-3000:]


def test_parser_beyond_its_time_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz_all, "START_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["fuzz_all.py", "0", "reply", "word"])
    assert fuzz_all.main() == 1
    out = capsys.readouterr().out
    assert all(f"{name}: FOUND\n" in out and f"{name} did not end within 0 s\n" in out for name in ("reply", "word"))


@pytest.mark.parametrize("name", TARGETS)
def test_target_accepts_its_examples_and_damaged_forms(name: str) -> None:
    target = TARGETS[name]
    for example in target.examples:
        target.parse(example)
        for at in range(0, len(example), max(1, len(example) // 200)):
            try:
                target.parse(example[:at] + bytes([example[at] ^ 0x55]) + example[at + 1 :])
                target.parse(example[:at])
            except target.allowed:
                continue
