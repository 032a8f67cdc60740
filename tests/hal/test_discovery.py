from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hal.discovery import discover, installed_probes
from hal.probes import configured_robots, probe_compute
from hal.resource import Kind, ResourceRecord
from hal.spec import ArraySpec, CameraSpec, RobotSpec

SPEC = RobotSpec(
    model="panda",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(name="action", labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),
    cameras=(CameraSpec(name="front", height=8, width=8, rate_hz=10.0),),
)


def test_the_configured_robots_are_found_with_what_they_are() -> None:
    found = discover({"config": configured_robots({"panda-1": SPEC, "panda-0": SPEC}, node="desk")})
    assert [record.name for record in found.records] == ["panda-0", "panda-1"]
    record = found.records[0]
    assert (record.kind, record.model, record.node, record.found_by) == (Kind.ROBOT, "panda", "desk", "config")
    assert (record.embodiment, record.capabilities) == (SPEC.embodiment, ("camera:front",))


def test_a_probe_that_fails_is_reported_and_stops_no_other() -> None:
    def broken() -> Iterator[ResourceRecord]:
        yield from configured_robots({"panda-0": SPEC})()
        raise OSError("no such bus")

    found = discover({"usb": broken, "compute": probe_compute})
    assert found.failures == {"usb": "OSError: no such bus"}
    assert {record.kind for record in found.records} == {Kind.ROBOT, Kind.COMPUTE}


def test_a_foreign_probe_that_yields_something_else_is_reported_and_stops_no_other() -> None:
    def foreign() -> Iterator[Any]:
        yield from configured_robots({"panda-0": SPEC})()
        yield {"name": "arm"}

    found = discover({"crane": foreign, "compute": probe_compute})
    assert found.failures == {"crane": "TypeError: it yields dict, not ResourceRecord"}
    assert {record.kind for record in found.records} == {Kind.ROBOT, Kind.COMPUTE}


def test_of_two_records_with_one_name_the_first_stands() -> None:
    probes = {"one": configured_robots({"a": SPEC}, "first"), "two": configured_robots({"a": SPEC}, "second")}
    assert [record.node for record in discover(probes).records] == ["first"]


def test_this_computer_is_found_and_the_built_in_probes_never_fail() -> None:
    found = discover(installed_probes())
    assert found.failures == {}
    (computer,) = [record for record in found.records if record.kind is Kind.COMPUTE]
    assert computer.cores >= 1 and computer.memory_bytes > 1 << 20


def test_an_installed_package_adds_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "grippers-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: grippers\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[user_sys.probes]\ngrippers = grippers_probe:find\n")
    (tmp_path / "grippers_probe.py").write_text(
        "from hal.resource import Kind, ResourceRecord\n"
        "def find():\n    yield ResourceRecord(kind=Kind.ROBOT, name='g', model='gripper', node='desk')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    probes = installed_probes()
    assert "grippers_probe" not in sys.modules
    assert [record.name for record in discover({"grippers": probes["grippers"]}).records] == ["g"]
