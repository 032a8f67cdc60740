"""The policy `lerobot` where LeRobot is not installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from user_sys.errors import ConfigError
from user_sys.plugins import load_policy
from user_sys.policies.conformance import example_spec
from user_sys.policies.lerobot_checkpoint import (
    PREPROCESSOR_NAME,
    LeRobotSettings,
    PolicyFeatures,
    require_known_steps,
)


@pytest.mark.skipif(find_spec("lerobot") is not None, reason="LeRobot is installed")
def test_missing_lerobot_is_named() -> None:
    kind, settings = load_policy("lerobot", {"type": "act"})
    for call in (kind.select_cameras, lambda spec, options: kind(spec, settings=options)):
        with pytest.raises(ConfigError, match="needs LeRobot .*pip install"):
            call(example_spec(), settings)


def test_contradictory_settings_are_refused() -> None:
    for options in ({"path": "a", "cameras": ["front"]}, {"tokenizer": "words"}, {"statistics": "checkpoint"}):
        with pytest.raises(ConfigError, match="path"):
            load_policy("lerobot", options)


def test_home_folder_in_a_path_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    _, settings = load_policy("lerobot", {"path": "~/smolvla", "statistics": "~/cubes", "tokenizer": "~/words"})
    assert isinstance(settings, LeRobotSettings)
    found = (settings.path, settings.statistics, settings.tokenizer)
    assert found == (Path("/home/ann/smolvla"), "/home/ann/cubes", "/home/ann/words")
    named = LeRobotSettings(path=Path("lerobot/smolvla_base"), tokenizer="google/paligemma")
    assert (named.source, named.tokenizer) == ("lerobot/smolvla_base", "google/paligemma"), "names on the hub stay"


def test_execute_beyond_a_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("user_sys.policies.lerobot_checkpoint.lerobot_version", lambda: "0.4.4")
    spec = example_spec()
    for execute in (0, 8):
        PolicyFeatures.of(spec, LeRobotSettings(type="diffusion", execute=execute))
    with pytest.raises(ConfigError, match="execute is 16, and a chunk of lerobot diffusion has only 8 actions"):
        PolicyFeatures.of(spec, LeRobotSettings(type="diffusion", execute=16))


@pytest.mark.parametrize(("config", "bound"), [({}, 4), ({"horizon": 32, "n_action_steps": 12}, 6)])
def test_diffusion_bridges_half_of_the_actions_that_lerobot_keeps(config: dict[str, int], bound: int) -> None:
    kind, settings = load_policy("lerobot", {"type": "diffusion", "config": config})
    assert kind.execution_delays(settings) == {"switch": bound, "ensemble": bound}


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"class": "subprocess.Popen", "config": {"args": ["true"]}}, "the step 'subprocess.Popen', which is none of"),
        ({"registry_name": "action_tokenizer_processor"}, "the step 'action_tokenizer_processor', which is none of"),
        ({"registry_name": ["tokenizer_processor"]}, "has no processors of LeRobot"),
        ("tokenizer_processor", "has no processors of LeRobot"),
    ],
)
def test_step_that_may_run_code_of_a_checkpoint_is_refused(tmp_path: Path, step: object, reason: str) -> None:
    settings = LeRobotSettings(path=tmp_path)
    steps = [{"registry_name": "to_batch_processor", "config": {}}]
    (tmp_path / PREPROCESSOR_NAME).write_text(json.dumps({"steps": steps}))
    require_known_steps(settings, PREPROCESSOR_NAME)
    (tmp_path / PREPROCESSOR_NAME).write_text(json.dumps({"steps": [*steps, step]}))
    with pytest.raises(ConfigError, match=reason) as refused:
        require_known_steps(settings, PREPROCESSOR_NAME)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("marks", "use_degrees", "reason"),
    [
        ([False, False], True, "exported in rad: .* export it with user-sys store export --use-degrees"),
        ([None, True], False, "exported in degrees: .* export it without user-sys store export --use-degrees"),
        ([True], True, ""),
        ([False], False, ""),
        ([None], True, ""),
    ],
)
def test_statistics_of_an_export_in_another_unit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: list[bool | None], use_degrees: bool, reason: str
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("user_sys.policies.lerobot_checkpoint.lerobot_version", lambda: "0.4.4")
    (tmp_path / "meta/episodes/chunk-000").mkdir(parents=True)
    (tmp_path / "meta/stats.json").write_text("{}")
    table = pa.table({"user/use_degrees": pa.array(marks, pa.bool_())})
    pq.write_table(table, tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    plain, settings = example_spec(), LeRobotSettings(type="act", use_degrees=use_degrees, statistics=str(tmp_path))
    spec = replace(plain, observation=(replace(plain.observation[0], units=("rad", "rad/s")),))
    features = PolicyFeatures.of(spec, settings)
    if reason:
        with pytest.raises(ConfigError, match=f"use_degrees is {str(use_degrees).lower()}, .* {reason}"):
            features.statistics(spec, settings)
    else:
        assert features.statistics(spec, settings)
