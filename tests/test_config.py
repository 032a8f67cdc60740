"""Configuration: defaults, overrides, and errors in one line."""

from __future__ import annotations

import enum
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hal.settings import Share
from user_sys.config import as_dict, load, save
from user_sys.errors import ConfigError
from user_sys.run.config import RunConfig


class Codec(enum.StrEnum):
    FULL = "full"
    BF16 = "bf16"


@dataclass(frozen=True)
class Learner:
    batch_size: int = 256
    learning_rate: float = 3e-4
    layers: tuple[int, ...] = (256, 256)
    name: str = "rlpd"
    max_training_s: float | None = None
    codec: Codec = Codec.FULL
    mode: Literal["online", "offline"] = "offline"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")


@dataclass(frozen=True)
class Robot:
    name: str = "panda-0"
    bounds: tuple[float, float] = (-1.0, 1.0)
    task: str | tuple[str, ...] = "reach"


@dataclass(frozen=True)
class Train:
    seed: int = 0
    folder: Path = Path("runs")
    learner: Learner = field(default_factory=lambda: Learner(batch_size=512))
    robots: tuple[Robot, ...] = (Robot(), Robot("panda-1"))
    labels: Mapping[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    success: Share = 0.0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError("seed must not be negative")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "demo.yaml"


def _load(path: Path, text: str, *overrides: str) -> Train:
    path.write_text(text)
    return load(Train, path, list(overrides))


def test_missing_file_argument_gives_defaults() -> None:
    assert load(Train, None) == Train()


def test_partial_section_keeps_the_other_defaults(path: Path) -> None:
    config = _load(path, "learner:\n  learning_rate: 1e-3\n")
    assert config.learner == Learner(batch_size=512, learning_rate=1e-3)


def test_overrides_win_over_the_file(path: Path) -> None:
    config = _load(path, "learner: {batch_size: 64, name: a}", "--learner.batch_size=128", "--seed", "-0")
    assert (config.learner.batch_size, config.learner.name, config.seed) == (128, "a", 0)


def test_text_override_is_taken_literally(path: Path) -> None:
    config = _load(path, "", "--learner.name=0010", "--folder=12", "--learner.max_training_s=null")
    assert (config.learner.name, config.folder, config.learner.max_training_s) == ("0010", Path("12"), None)


def test_list_item_can_be_overridden(path: Path) -> None:
    text = "robots: [{bounds: [0, 1]}, {name: b}]"
    assert [r.name for r in _load(path, text).robots] == ["panda-0", "b"]
    assert _load(path, text, "--robots.0.bounds.0=-2").robots[0] == Robot("panda-0", (-2.0, 1.0))
    with pytest.raises(ConfigError, match="--robots.7: no item 7: the list has 2 items"):
        _load(path, text, "--robots.7.name=x")
    assert _load(path, text, "--robots.0.task=[reach, lift]").robots[0].task == ("reach", "lift")
    assert _load(path, text, "--robots.0.task=lift").robots[0].task == "lift"
    assert _load(path, text, "--robots.0.name=c").robots[0] == Robot("c", (0.0, 1.0))
    assert _load(path, "", "--learner.layers=[64]").learner.layers == (64,)


@pytest.mark.parametrize(
    ("overrides", "learner"),
    [
        (("--learner={batch_size: 64}", "--learner.name=a"), Learner(64, name="a")),
        (("--learner.name=a", "--learner={batch_size: 64}"), Learner(64)),
        (("--learner.name=a", "--learner={batch_size: 64}", "--learner.name=b"), Learner(64, name="b")),
        (("--learner={batch_size: 64}", "--learner.layers=[3, 4]", "--learner.layers.1=5"), Learner(64, layers=(3, 5))),
    ],
)
def test_override_changes_the_section_that_an_earlier_one_gave(overrides: tuple[str, ...], learner: Learner) -> None:
    assert load(Train, None, overrides).learner == learner


def test_override_changes_the_options_and_items_that_an_earlier_one_gave() -> None:
    config = load(
        Train, None, ["--options={type: act}", "--options.size=3", "--robots=[{name: a}]", "--robots.0.task=b"]
    )
    assert (config.options, config.robots) == ({"type": "act", "size": 3}, (Robot("a", task="b"),))


def test_key_that_is_not_text_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="a key must be a name"):
        _load(path, "robots: [{[name]: a}]")


def test_untyped_options_are_kept(path: Path) -> None:
    text = "options: {camera: {width: 64, name: front}, gains: [1, 2]}"
    config = _load(path, text, "--options.camera.width=128", "--options.gains.1=3.5", "--options.new.deep=[a]")
    assert config.options == {"camera": {"width": 128, "name": "front"}, "gains": [1, 3.5], "new": {"deep": ["a"]}}


def test_choice_accepts_listed_values(path: Path) -> None:
    config = _load(path, "learner: {codec: bf16, mode: online}")
    assert (config.learner.codec, config.learner.mode) == (Codec.BF16, "online")


@dataclass(frozen=True)
class Switch:
    ask: Literal["auto", "off"] = "auto"
    power: Literal["on", "half"] = "half"


def test_choice_may_be_named_off_or_on(path: Path) -> None:
    path.write_text("ask: off\npower: on\n")
    assert load(Switch, path) == Switch("off", "on") == load(Switch, None, ["--ask=off", "--power=on"])
    with pytest.raises(ConfigError, match="--ask: expected one of auto, off, got 'on'"):
        load(Switch, None, ["--ask=on"])


def test_saved_configuration_loads_equal(path: Path) -> None:
    config = _load(path, "labels: {a: 1, b: 2.5}\nrobots: [{name: 'null'}]", "--learner.codec=bf16")
    save(config, path)
    assert load(Train, path) == config
    assert as_dict(config)["learner"]["codec"] == "bf16"


def test_equal_configuration_is_not_written_again(path: Path) -> None:
    save(_load(path, "seed: 1"), path)
    before = path.stat().st_ino
    save(load(Train, path), path)
    assert path.stat().st_ino == before, "which a full disk could not hold"
    save(_load(path, "seed: 2"), path)
    assert load(Train, path).seed == 2


@settings(deadline=None)
@example(rate=1.0, name="\x85", layers=[], limit=None, label="")
@given(
    rate=st.floats(allow_nan=False, allow_infinity=False),
    name=st.text(st.characters(blacklist_categories=["Cs"]), max_size=20),
    layers=st.lists(st.integers(-(2**40), 2**40), max_size=4),
    limit=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    label=st.text(string.ascii_letters, max_size=5),
)
def test_configuration_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rate: float, name: str, layers: list[int], limit: float | None, label: str
) -> None:
    path = tmp_path_factory.mktemp("config") / "saved.yaml"
    learner = Learner(learning_rate=rate, name=name, layers=tuple(layers), max_training_s=limit)
    config = Train(learner=learner, labels={label: rate}, robots=(Robot(name, (rate, 0.5)),))
    save(config, path)
    assert load(Train, path) == config


ERRORS = {
    "learner: {batchsize: 1}": ["demo.yaml", "learner.batchsize", "did you mean 'learner.batch_size'?"],
    "batch_size: 1": ["batch_size", "did you mean 'learner.batch_size'?"],
    "zzz: 1": ["zzz", "known are seed, folder, learner"],
    "robots: [{nam: a}]": ["robots.0.nam", "'robots.0.name'"],
    "learner:": ["learner", "expected a section", "got nothing"],
    "learner: 3": ["learner", "expected a section", "got 3"],
    "learner: {batch_size: 2.5}": ["learner.batch_size", "a whole number", "2.5"],
    "learner: {batch_size: true}": ["learner.batch_size", "a whole number", "True"],
    "learner: {batch_size: '7'}": ["learner.batch_size", "a whole number", "'7'"],
    "learner: {compile: 1}": ["learner.compile", "true or false", "got 1"],
    "learner: {learning_rate: fast}": ["learner.learning_rate", "a number", "'fast'"],
    "learner: {name: 5}": ["learner.name", "text", "put it in quotes"],
    "learner: {name: null}": ["learner.name", "text", "nothing"],
    "learner: {codec: bf61}": ["learner.codec", "bf16, full", "did you mean 'bf16'?"],
    "learner: {mode: onlin}": ["learner.mode", "did you mean 'online'?"],
    "learner: {layers: 5}": ["learner.layers", "a list"],
    "learner: {layers: [1, x]}": ["learner.layers.1", "a whole number", "'x'"],
    "learner: {max_training_s: soon}": ["learner.max_training_s", "a number"],
    "robots: [{bounds: [1]}]": ["robots.0.bounds", "2 items, got 1"],
    "labels: {a: b}": ["labels.a", "a number"],
    "labels: [1]": ["labels", "names with values"],
    "learner: {batch_size: 0}": ["demo.yaml", "batch_size must be at least 1, got 0"],
    "seed: -1": ["demo.yaml", "seed must not be negative"],
    "seed: 1\nseed: 2": ["demo.yaml:2", "'seed' is repeated"],
    "seed: [1": ["demo.yaml", "not valid YAML"],
    "seed: 1\n\tx: 2": ["demo.yaml:2", "not valid YAML"],
    "!!python/object/apply:os.system [ls]": ["demo.yaml", "not valid YAML"],
    "just text": ["demo.yaml", "expected sections and keys"],
    "success: 1.1": ["success", "a number <= 1.0", "got 1.1"],
    "success: .nan": ["success", "a number", "nan"],
}


@pytest.mark.parametrize("text", ERRORS)
def test_invalid_file_is_refused_in_one_line(path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(path, text)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in ERRORS[text] if part not in message] == [], message


OVERRIDES = {
    "--learner.batchsize=1": "--learner.batchsize: unknown key; did you mean 'learner.batch_size'?",
    "--learner.batch-size=1": "--learner.batch-size: unknown key; did you mean 'learner.batch_size'?",
    "--learner.batch_size=many": "--learner.batch_size: expected a whole number, got 'many'",
    "--learner.batch_size=[": "--learner.batch_size: expected a whole number, got '['",
    "--learner.batch_size": "--learner.batch_size needs a value",
    "--learner.batch_size.deep=1": "--learner.batch_size",
    "--learner=3": "--learner: expected a section",
    "--robots.0.name=x": "--robots: expected a list, got {'0': {'name': 'x'}}",
    "--learner.layers.x=1": "--learner.layers: expected a list",
    "seed=1": "'seed=1' is not an override",
    "--": "'--' is not an override",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_invalid_override_is_refused_in_one_line(path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(path, "", override)
    assert str(caught.value).startswith(OVERRIDES[override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        *("target.success=1.1", "target.episodes=0", "evaluation.episodes=-1", "console.port=99999", "seed=-1"),
        *("learner.batch_size=0", "learner.cache_bytes=1", "learner.utd_max=0", "learner.publish.every_s=-1"),
        *("demonstrations.episodes=-1", "recorder.chunk_steps=0", "weights.max_staleness_versions=-1"),
        *("gateway.lease_ttl_s=0", "gateway.retention.slack=1", "gateway.retention.max_bytes=-1", "name=../../evil"),
        *(
            "weights.governor.cut=1",
            "learner.publish.governor.budget=0",
            "tunnel.heartbeat_s=0",
            "tunnel.pipe_messages=0",
        ),
    ],
)
def test_value_outside_its_range_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{override.partition('=')[0]}: expected .*, got "):
        load(RunConfig, None, [f"--{override}"])


def test_missing_file_suggests_the_nearest_name(path: Path) -> None:
    path.write_text("")
    with pytest.raises(ConfigError, match=r"demos\.yaml: no such file; did you mean .*demo\.yaml\?"):
        load(Train, path.with_name("demos.yaml"))


def test_missing_required_key_is_named(path: Path) -> None:
    @dataclass(frozen=True)
    class Needy:
        endpoint: str

    path.write_text("")
    with pytest.raises(ConfigError, match="demo.yaml.*endpoint"):
        load(Needy, path)


def test_folder_or_binary_file_is_refused(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: it is not text in UTF-8"):
        load(Train, path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(Train, tmp_path)
