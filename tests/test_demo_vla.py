"""The demo of sentences in its short form: four tasks, a supervised start, and corrections of a scripted operator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_kit import user_sys

from user_sys.store.store import StoreReader

DEMO = Path(__file__).parent.parent / "configs" / "demo-vla-smoke.yaml"
DEADLINE_S = 600.0
TASKS = {"lift_red", "lift_green", "lift_blue", "lift_yellow"}


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_operator_corrects_a_policy_of_four_tasks(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "said"
    quiet = ["--runs", tmp_path / "runs", "--logging.wandb.mode", "disabled", "--any-result"]
    with user_sys(tmp_path, "train", DEMO, "--name", "said", *quiet) as launch:
        assert launch.wait(DEADLINE_S) == 0, launch.err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["interventions"] > 0 and summary["updates"] > 100
    with StoreReader.open(run / "store") as reader:
        reader.refresh()
        episodes, sentences = reader.episodes(), set(reader.index.episodes.sentences.names)
    demonstrated = [episode.task for episode in episodes if episode.source == "demo"]
    assert sorted(demonstrated) == sorted(TASKS)
    helped = [episode for episode in episodes if episode.source == "online" and episode.intervention_steps]
    assert helped and any(episode.success for episode in helped)
    assert sentences == {f"lift the {task.removeprefix('lift_')} cube" for task in TASKS}
