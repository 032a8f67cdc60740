"""A short fuzz run of each parser; `make fuzz` runs them for longer."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest
from fuzz_all import fuzz
from targets import TARGETS

RUNS = 3000


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed here")
@pytest.mark.timeout(900)
def test_parsers_survive_a_short_fuzz(tmp_path: Path) -> None:
    assert fuzz("all", tmp_path, f"-runs={RUNS}", "-seed=1") == ""


@pytest.mark.parametrize("name", TARGETS)
def test_target_accepts_its_examples_and_damaged_forms(name: str) -> None:
    target = TARGETS[name]
    for example in target.examples:
        target.parse(example)
        for at in range(0, len(example), max(1, len(example) // 200)):
            with contextlib.suppress(*target.allowed):
                target.parse(example[:at] + bytes([example[at] ^ 0x55]) + example[at + 1 :])
                target.parse(example[:at])
