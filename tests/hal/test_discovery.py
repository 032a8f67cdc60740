from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hal import discovery
from hal.discovery import (
    ScheduledProbe,
    configured_robots_probe,
    discover,
    installed_probes,
    lazy_probe,
    probe_compute,
    probe_gpus,
)
from hal.resource import Health, Kind, ResourceRecord
from hal.spec import ArraySpec, CameraSpec, RobotSpec

SPEC = RobotSpec(
    model="panda",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(name="action", labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),
    cameras=(CameraSpec(name="front", height=8, width=8, rate_hz=10.0),),
)


def test_configured_robots_are_found() -> None:
    found = discover({"config": configured_robots_probe({"panda-1": SPEC, "panda-0": SPEC}, node="desk")})
    assert [record.name for record in found.records] == ["panda-0", "panda-1"]
    record = found.records[0]
    assert (record.kind, record.model, record.node, record.found_by) == (Kind.ROBOT, "panda", "desk", "config")
    assert (record.embodiment, record.capabilities) == (SPEC.embodiment, ("camera:front",))


def test_failing_probe_is_reported_and_stops_no_other() -> None:
    def broken() -> Iterator[ResourceRecord]:
        yield from configured_robots_probe({"panda-0": SPEC})()
        raise OSError("no such bus")

    found = discover({"usb": broken, "compute": probe_compute})
    assert found.failures == {"usb": "OSError: no such bus"}
    assert {record.kind for record in found.records} == {Kind.ROBOT, Kind.COMPUTE}


def test_probe_with_invalid_records_is_reported() -> None:
    def foreign() -> Iterator[Any]:
        yield from configured_robots_probe({"panda-0": SPEC})()
        yield {"name": "arm"}

    found = discover({"crane": foreign, "compute": probe_compute})
    assert found.failures == {"crane": "TypeError: it yields dict, not ResourceRecord"}
    assert {record.kind for record in found.records} == {Kind.ROBOT, Kind.COMPUTE}


def test_duplicate_name_keeps_record_of_first_probe() -> None:
    probes = {
        "one": configured_robots_probe({"a": SPEC}, "first"),
        "two": configured_robots_probe({"a": SPEC}, "second"),
    }
    assert [record.node for record in discover(probes).records] == ["first"]


def test_built_in_probes_find_this_computer() -> None:
    found = discover(installed_probes())
    assert found.failures == {}
    (computer,) = [record for record in found.records if record.kind is Kind.COMPUTE]
    assert computer.cores >= 1 and computer.memory_bytes > 1 << 20


def test_installed_package_adds_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_probe_that_calls_exit_is_reported() -> None:
    def leaving() -> Iterator[ResourceRecord]:
        yield from configured_robots_probe({"panda-0": SPEC})()
        sys.exit("no licence")

    found = discover({"crane": leaving, "compute": probe_compute})
    assert found.failures == {"crane": "SystemExit: no licence"}
    assert {record.kind for record in found.records} == {Kind.ROBOT, Kind.COMPUTE}


def test_schedule_of_lazy_probe_applies_after_import() -> None:
    answer = threading.Event()

    def stuck() -> Iterator[ResourceRecord]:
        answer.wait(60.0)
        yield from ()

    try:
        found = discover({"crane": lazy_probe(lambda: ScheduledProbe(stuck, timeout_s=0.05))})
        assert found.failures == {"crane": "no answer within 0.05 s"}
    finally:
        answer.set()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (f"{'a' * 70}.example:1", "nothing answers at"),
        ("desk\0:1", "nothing answers at"),
        ("127.0.0.1:99999", "nothing answers at"),
        ("127.0.0.1:²", "is not an address: write HOST:PORT"),
        ("127.0.0.1", "is not an address: write HOST:PORT"),
    ],
)
def test_robot_with_invalid_address_is_lost(address: str, why: str) -> None:
    found = discover({"config": configured_robots_probe({"a": SPEC, "b": SPEC}, addresses={"a": address})})
    assert not found.failures
    a, b = found.records
    assert (a.health, b.health) == (Health.LOST, Health.READY) and why in a.trouble


@pytest.mark.usefixtures("ipv6")
def test_ipv6_address_in_brackets_is_probed() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address = f"[::1]:{server.getsockname()[1]}"
        found = discover({"config": configured_robots_probe({"a": SPEC}, addresses={"a": address})})
    (record,) = found.records
    assert (record.health, record.trouble, record.labels["address"]) == (Health.READY, "", address)


def test_slow_name_resolution_does_not_delay_other_robots(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def resolve(*_: object, **__: object) -> list[object]:
        answer.wait(60.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(discovery, "ADDRESSES_TIMEOUT_S", 0.05)
    try:
        found = discover({"config": configured_robots_probe({"a": SPEC, "b": SPEC}, addresses={"a": "far.example:1"})})
        assert not found.failures
        assert [(record.name, record.health) for record in found.records] == [("a", Health.LOST), ("b", Health.READY)]
        assert found.records[0].trouble == "nothing answers at far.example:1: timed out"
    finally:
        answer.set()


def test_failed_gpu_does_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(Exception):
        pass

    def handle(index: int) -> int:
        if index == 1:
            raise Refusal("GPU is lost")
        return index

    def untold(device: int) -> int:
        raise Refusal("Not Supported")

    nvml = SimpleNamespace(
        NVMLError=Refusal,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetName=lambda device: "NVIDIA GB10",
        nvmlDeviceGetUUID=lambda device: f"GPU-{device}",
        nvmlDeviceGetCudaComputeCapability=lambda device: (12, 1),
        nvmlDeviceGetMemoryInfo=untold,
        nvmlDeviceGetUtilizationRates=untold,
        nvmlDeviceGetNumGpuCores=untold,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = [(r.name.rpartition("/")[2], r.health, r.trouble, r.memory_bytes, r.load) for r in probe_gpus()]
    assert found == [
        ("gpu-0", Health.READY, "", 0, 0.0),
        ("gpu-1", Health.LOST, "its driver reports: GPU is lost", 0, 0.0),
        ("gpu-2", Health.READY, "", 0, 0.0),
    ]


@pytest.mark.parametrize(
    ("cpu", "memory", "may"), [("150000 100000", "1000000", (1, 10**6)), ("50000 100000", "max", (1, None))]
)
def test_container_limits_are_applied(cpu: str, memory: str, may: tuple[int, int | None], tmp_path: Path) -> None:
    (whole,) = probe_compute(tmp_path)
    (tmp_path / "cpu.max").write_text(f"{cpu}\n")
    (tmp_path / "memory.max").write_text(f"{memory}\n")
    (part,) = probe_compute(tmp_path)
    assert (part.cores, part.memory_bytes) == (may[0], may[1] or whole.memory_bytes)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert [(r.cores, r.memory_bytes) for r in probe_compute(tmp_path)] == [(whole.cores, whole.memory_bytes)]
