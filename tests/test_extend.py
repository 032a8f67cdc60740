"""A package of one's own (docs/template): its algorithm, policy and reward, and the commands of docs/extend.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from docs_kit import code_blocks
from template_kit import TEMPLATE, environment

sys.path[:0] = [str(TEMPLATE / "src"), str(TEMPLATE / "tests")]

template = import_module("test_learning")

ROOT = TEMPLATE.parent.parent
PAGE = ROOT / "docs" / "extend.md"
RUN_S = 900


class TestPolicy(template.TestTanhPolicy):
    """The template's."""


class TestAlgorithm(template.TestCloning):
    """The template's, in this process only; the template's own tests train in two."""

    def test_processes_that_train_together_keep_the_same_weights(self) -> None:
        """See the slow test."""


class TestVla(template.TestVlaPolicy):
    """The template's."""


class TestHgDaggerOfVla(template.TestHgDaggerOfVla):
    """The template's, likewise."""

    def test_processes_that_train_together_keep_the_same_weights(self) -> None:
        """See the slow test."""


test_the_sentence_selects_the_actions = template.test_the_sentence_selects_the_actions


class TestReward(template.TestSwiftReward):
    """The template's."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_of_the_page_train_with_the_installed_package(tmp_path: Path) -> None:
    """Everything that docs/extend.md gives, in a folder and an environment outside of the checkout."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    variables = {**os.environ, **environment(tmp_path / "venv")}
    for line in "".join(code_blocks(PAGE)).splitlines():
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=variables, capture_output=True, timeout=RUN_S)
        assert done.returncode == 0, f"{line}\n{done.stdout.decode()[-3000:]}{done.stderr.decode()[-3000:]}"
    summary = json.loads((tmp_path / "runs" / "point" / "summary.json").read_text())
    assert summary["target_reached"] is True and summary["updates"] > 0
