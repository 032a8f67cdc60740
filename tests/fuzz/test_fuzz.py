"""Each parser under atheris for a moment; `make fuzz` runs them for long."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from fuzz_all import fuzz
from targets import TARGETS

RUNS = 3000


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed here")
@pytest.mark.timeout(900)
def test_no_parser_breaks_soon(tmp_path: Path) -> None:
    done = fuzz("all", tmp_path, f"-runs={RUNS}", "-seed=1")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_examples_and_their_damaged_forms(name: str) -> None:
    target = TARGETS[name]
    for example in target.examples:
        target.parse(example)
        for at in range(0, len(example), max(1, len(example) // 200)):
            try:
                target.parse(example[:at] + bytes([example[at] ^ 0x55]) + example[at + 1 :])
                target.parse(example[:at])
            except target.allowed:
                continue
