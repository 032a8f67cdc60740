"""The documentation: valid examples, existing commands, working links."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import mujoco
import numpy as np
import pytest
import yaml
from tools.settings_page import example_config
from tools.settings_page import page as settings_page

from hal.driver import RobotSetupRequest, read_options
from hal.errors import SpecError
from robots.ur_connection import UrConfig
from sim.arms import UR5E
from sim.scene import Scene
from user_sys.commands.edge import EdgeConfig
from user_sys.commands.main import COMMAND
from user_sys.compose import emulated_link_settings
from user_sys.config import as_dict, load, read_yaml
from user_sys.errors import ConfigError
from user_sys.gateway.relay import RelayConfig
from user_sys.rewards.reward import RewardConfig
from user_sys.run.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
GENERATED = {"settings.md", "benchmarks.md", "soak.md"}

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"^cat > (\S+\.yaml) <<'EOF'\n(.*?)^EOF$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
INLINE = re.compile(r"`user-sys ([^`]+)`")

KINDS: dict[str, type[Any]] = {"robots.yaml": EdgeConfig, "relay.yaml": RelayConfig}
"""By the name that a page gives the file; anything else is a run's."""
OPTIONS = {
    "fake": "robots.fake:FakeRobotConfig",
    "franka": "robots.franka:FrankaConfig",
    "gym": "sim.gym:GymConfig",
    "lerobot": "robots.lerobot:LerobotConfig",
    "point": "point_robot:Options",
    "ros2": "robots.ros2_spec:Ros2Config",
    "sim": "sim.robot:SimRobotConfig",
    "ur": "robots.ur:UrConfig",
}
DEVICES = {
    "gamepad": "robots.input_devices:GamepadConfig",
    "lerobot": "robots.lerobot:LeaderConfig",
    "spacemouse": "robots.input_devices:SpaceMouseConfig",
}


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that docs/template offers can be imported."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "template" / "src")


def examples() -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text()
        found = [(each.start(), "", each[3]) for each in FENCED.finditer(text) if each[2] == "yaml"]
        found += [(each.start(), each[1], each[2]) for each in WRITTEN.finditer(text)]
        for start, name, example in found:
            line = text.count("\n", 0, start) + 1
            yield pytest.param(KINDS.get(name, RunConfig), textwrap.dedent(example), id=f"{page.name}:{line}")


def require_known(kind: type[Any], text: str, path: Path) -> None:
    """Raises ConfigError or SpecError if `text` is not valid for this kind."""
    path.write_text(text)
    config = load(kind, path)
    for robot in getattr(config, "robots", ()):
        read_settings(OPTIONS[robot.driver], robot.name, robot.options)
        for device in robot.teleoperators:
            settings = dict(device)
            read_settings(DEVICES[settings.pop("kind")], robot.name, settings)
        if robot.link:
            emulated_link_settings(robot, "", "")


def read_settings(where: str, robot: str, settings: dict[str, Any]) -> None:
    module, _, name = where.partition(":")
    read_options(getattr(import_module(module), name), RobotSetupRequest(robot, "", settings))


@pytest.mark.parametrize(("kind", "text"), list(examples()))
def test_example_configuration_is_valid(kind: type[Any], text: str, tmp_path: Path) -> None:
    require_known(kind, text, tmp_path / "example.yaml")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (RunConfig, "learner: {sampler: {n_steps: 3}}"),
        (RunConfig, "robots: [{driver: ur, options: {hots: 10.0.0.1}}]"),
        (RunConfig, "robots: [{driver: sim, teleoperators: [{kind: gamepad, hodl: a}]}]"),
        (RunConfig, "robots: [{link: {delay: 50}}]"),
        (EdgeConfig, "learner: {batch_size: 64}"),
        (RelayConfig, "listen: tcp://0.0.0.0:5556"),
    ],
)
def test_wrong_key_in_an_example_is_detected(kind: type[Any], text: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, SpecError)):
        require_known(kind, text, tmp_path / "example.yaml")


def test_settings_page_is_current() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    assert settings_page(text) == text, "run `make docs-settings`"


def test_settings_page_lists_each_setting_with_its_default(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    path = tmp_path / "everything.yaml"
    path.write_text(next(each[3] for each in FENCED.finditer(text) if each[2] == "yaml"))
    everything = example_config()
    assert read_yaml(path) == as_dict(everything)


@pytest.mark.parametrize(("verb", "kind"), [("edge", EdgeConfig), ("relay", RelayConfig)])
def test_settings_page_names_each_section_of_the_file(verb: str, kind: type[Any]) -> None:
    text = " ".join((ROOT / "docs" / "settings.md").read_text().split())
    sentence = re.search(rf"file for `user-sys {verb}` knows ([^;.]*)", text)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == {field.name for field in fields(kind)}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and arguments of each ``user-sys`` that a page gives, placeholders filled in."""
    for page in PAGES:
        text = page.read_text()
        blocks = [each[3] for each in FENCED.finditer(text) if each[2] == "sh"]
        blocks += re.findall(r"^ {4}(.*)$", FENCED.sub("", text), re.MULTILINE)
        lines = "\n".join(blocks).replace("\\\n", " ").replace("; user-sys", "\nuser-sys").splitlines()
        given = [each[1] for line in lines if (each := re.match(r"(?:\S*=\S* |\S*bin/)*user-sys (.*)", line))]
        for command in [*given, *INLINE.findall(text)]:
            filled = command.replace("VERSION", "3").replace("[", "").replace("]", "")
            yield page.name, shlex.split(filled, comments=True)


@pytest.mark.parametrize(("page", "argv"), list(commands()))
def test_documented_command_exists(page: str, argv: list[str]) -> None:
    """One that is only named, such as ``user-sys store merge``, needs no arguments."""
    named = all(re.fullmatch("[a-z]+", word) for word in argv)
    if "VERB" in argv:
        return
    try:
        overrides = parse([*argv, "--help"] if named else argv)
    except click.exceptions.Exit as end:
        assert end.exit_code == 0, f"{page}: user-sys {shlex.join(argv)}"
    else:
        by_verb: dict[str, type[Any]] = {"edge": EdgeConfig, "reward": RewardConfig, "store": RewardConfig}
        load(by_verb.get(argv[0], RunConfig), None, overrides)


def parse(argv: list[str]) -> list[str]:
    """Parses a command without running it. Returns its overrides."""
    command: click.Command = COMMAND
    words = list(argv)
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        _, found, words = command.resolve_command(click.Context(command), words)
        assert found is not None
        command = found
    overrides: list[str] = command.make_context(command.name, words).params.get("overrides", [])
    return overrides


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())}


def test_every_page_and_picture_is_linked() -> None:
    found, ahead = {README}, [README]
    while ahead:
        page = ahead.pop()
        linked = {(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(page.read_text())}
        ahead += [each for each in linked - found if each.suffix == ".md"]
        found |= linked
    assert {*PAGES, *(ROOT / "docs" / "images").iterdir()} <= found


@pytest.mark.parametrize("page", [each for each in PAGES if each.name not in GENERATED], ids=lambda page: page.name)
def test_page_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= 1200


def test_documented_service_may_write_its_home() -> None:
    lines = (ROOT / "docs" / "user-sys-edge.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert unit["Environment"].removeprefix("HOME=") in unit["ReadWritePaths"].split(), "LeRobot and ROS 2 write there"


def test_all_of_docs_is_short() -> None:
    pages = [each for each in PAGES[1:] if each.name not in GENERATED]
    assert sum(len(each.read_text().split()) for each in pages) <= 15_000


@pytest.mark.parametrize("page", [each for each in PAGES if each.name not in GENERATED], ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    """Those of paragraphs and lists: at most 30 words."""
    prose = re.sub(r"^( *[|#]| {4}).*$", "", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))|(?<=[.:;?!])\s+", prose)
    assert [part for part in parts if len(part.split()) > 30] == []


def documented_arms() -> list[UrConfig]:
    pages = [(ROOT / "docs" / name).read_text() for name in ("first-arm.md", "robots.md")]
    blocks = [textwrap.dedent(each[3]) for page in pages for each in FENCED.finditer(page) if each[2] == "yaml"]
    robots = [robot for block in blocks for robot in yaml.safe_load(block).get("robots", [])]
    return [
        read_options(UrConfig, RobotSetupRequest("ur", "tidy", each["options"]))
        for each in robots
        if each["driver"] == "ur"
    ]


@pytest.mark.parametrize("config", documented_arms(), ids=["first-arm", "robots"])
def test_documented_home_is_in_the_documented_workspace(config: UrConfig) -> None:
    model = Scene(UR5E, ("cube",)).model
    data = mujoco.MjData(model)
    data.qpos[:6] = config.home
    mujoco.mj_kinematics(model, data)
    flange = data.site("flange").xpos * (-1, -1, 1)  # in the controller's base frame, half a turn from the model's
    assert (flange > np.add(config.workspace_low, 0.05)).all() and (
        flange < np.subtract(config.workspace_high, 0.05)
    ).all()
