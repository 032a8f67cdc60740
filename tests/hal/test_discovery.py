"""Discovery, once and repeatedly: changes of resources, and probes that hang or fail."""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hal import discovery
from hal.discovery import (
    DeviceMonitor,
    Discoverer,
    ResourceChange,
    classify_change,
    configured_robots_probe,
    discover,
    installed_probes,
    probe_compute,
    probe_gpus,
)
from hal.resource import Health, Kind, ResourceRecord
from hal.spec import ArraySpec, CameraSpec, RobotSpec

DEADLINE_S = 60.0
ARM = ResourceRecord(kind=Kind.ROBOT, name="arm-0", model="arm", node="desk")
SPEC = RobotSpec(
    model="panda",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(name="action", labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),
    cameras=(CameraSpec(name="front", height=8, width=8, rate_hz=10.0),),
)


class Bench:
    """A probe with records and a failure that a test sets."""

    def __init__(self, *records: ResourceRecord) -> None:
        self.records = records
        self.failure: Exception | None = None

    def __call__(self) -> Iterable[ResourceRecord]:
        if self.failure is not None:
            raise self.failure
        return self.records


def test_configured_robots_are_found_once_by_the_first_probe() -> None:
    first = configured_robots_probe(
        {"panda-1": SPEC, "panda-0": SPEC}, node="desk", labels={"panda-0": {"site": "lab"}}
    )
    found = discover({"config": first, "two": configured_robots_probe({"panda-0": SPEC}, "second")})
    assert [record.name for record in found.records] == ["panda-0", "panda-1"]
    record = found.records[0]
    assert (record.kind, record.model, record.node, record.found_by) == (Kind.ROBOT, "panda", "desk", "config")
    assert (record.embodiment, record.capabilities) == (SPEC.embodiment, ("camera:front",))
    assert record.labels["site"] == "lab"


def failing() -> Iterator[ResourceRecord]:
    yield ARM
    raise OSError("no such bus")


def foreign() -> Iterator[object]:
    yield ARM
    yield {"name": "arm"}


def leaving() -> Iterator[ResourceRecord]:
    yield ARM
    sys.exit("no licence")


@pytest.mark.parametrize(
    ("probe", "failure"),
    [
        (failing, "OSError: no such bus"),
        (foreign, "TypeError: it yields dict, not ResourceRecord"),
        (leaving, "SystemExit: no licence"),
    ],
)
def test_failing_probe_is_reported_and_stops_no_other(probe, failure: str) -> None:  # type: ignore[no-untyped-def]
    found = discover({"usb": probe, "compute": probe_compute})
    assert found.failures == {"usb": failure}
    assert {record.kind for record in found.records} == {Kind.ROBOT, Kind.COMPUTE}


def test_built_in_probes_find_this_computer() -> None:
    found = discover(installed_probes(), timeout_s=DEADLINE_S)
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


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (f"{'a' * 70}.example:1", "nothing answers at"),
        ("desk\0:1", "nothing answers at"),
        ("127.0.0.1:99999", "nothing answers at"),
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1: Connection refused"),
        ("127.0.0.1", "is not an address: write HOST:PORT"),
    ],
)
def test_robot_without_answer_at_its_address_is_lost(address: str, why: str) -> None:
    found = discover({"config": configured_robots_probe({"a": SPEC, "b": SPEC}, addresses={"a": address})})
    assert not found.failures
    a, b = found.records
    assert (a.health, b.health) == (Health.LOST, Health.READY) and why in a.trouble


@pytest.mark.usefixtures("ipv6")
def test_robot_at_ipv6_address_is_ready() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address = f"[::1]:{server.getsockname()[1]}"
        (record,) = configured_robots_probe({"a": SPEC}, addresses={"a": address})()
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


def test_each_change_of_a_robot_is_an_event() -> None:
    bench, changes = Bench(), []
    discoverer = Discoverer({"bench": bench})
    lost = msgspec.structs.replace(ARM, health=Health.LOST)
    for records in (
        (ARM, ARM),
        (msgspec.structs.replace(ARM, trouble="no permission"),),
        (ARM,),
        (),
        (lost,),
        (ARM,),
    ):
        bench.records = records
        (event,) = discoverer.poll()
        assert event.record is not None and event.record.name == "arm-0" and event.probe == "bench"
        changes.append((event.change, event.record.health, event.text))
        assert not discoverer.poll()
    assert changes == [
        (ResourceChange.APPEARED, Health.READY, ""),
        (ResourceChange.DEGRADED, Health.READY, "no permission"),
        (ResourceChange.RECOVERED, Health.READY, ""),
        (ResourceChange.VANISHED, Health.LOST, ""),
        (ResourceChange.ABSENT, Health.LOST, ""),
        (ResourceChange.RETURNED, Health.READY, ""),
    ]
    assert classify_change(ARM, msgspec.structs.replace(ARM, load=0.5)) is None
    assert classify_change(ARM, msgspec.structs.replace(ARM, memory_bytes=1)) is ResourceChange.CHANGED


def test_failing_probe_degrades_its_records_until_it_works() -> None:
    bench = Bench(ARM)
    discoverer = Discoverer({"usb": bench})
    assert [event.change for event in discoverer.poll()] == [ResourceChange.APPEARED]
    bench.failure = OSError("no such bus")
    failed, degraded = discoverer.poll()
    assert (failed.change, failed.text) == (ResourceChange.PROBE_FAILED, "OSError: no such bus")
    assert (degraded.change, degraded.text) == (ResourceChange.DEGRADED, "usb: OSError: no such bus")
    assert discoverer.snapshot().failures == {"usb": "OSError: no such bus"}
    bench.failure = None
    assert [event.change for event in discoverer.poll()] == [ResourceChange.PROBE_WORKS, ResourceChange.RECOVERED]


def test_hanging_probe_stops_no_other_and_is_not_repeated() -> None:
    released, calls = threading.Event(), []

    def hanging() -> Iterable[ResourceRecord]:
        calls.append(True)
        released.wait(DEADLINE_S)
        return (ARM,)

    other = Bench(msgspec.structs.replace(ARM, name="arm-1"))
    try:
        discoverer = Discoverer({"stuck": hanging, "bench": other}, timeout_s=0.2)
        assert {event.change for event in discoverer.poll()} == {ResourceChange.PROBE_FAILED, ResourceChange.APPEARED}
        assert discoverer.snapshot().failures == {"stuck": "no answer within 0.2 s"}
        other.records = ()
        assert [event.change for event in discoverer.poll()] == [ResourceChange.VANISHED]
        assert len(calls) == 1
        released.set()
        changes = list[ResourceChange]()
        while len(changes) < 2:  # its first call returns soon
            changes += [event.change for event in discoverer.poll()]
        assert changes == [ResourceChange.PROBE_WORKS, ResourceChange.APPEARED]
    finally:
        released.set()


def test_monitor_reports_added_and_removed_devices() -> None:
    camera = ResourceRecord(kind=Kind.CAMERA, name="desk/camera-7", model="C920", node="desk")
    gpu = ResourceRecord(kind=Kind.GPU, name="desk/gpu-0", model="H200", node="desk", load=0.3)
    gone = msgspec.structs.replace(gpu, name="desk/gpu-1", health=Health.LOST)
    plugged, reports = [camera, gpu, gone, ARM], queue.Queue[tuple[ResourceRecord, ...]]()
    with DeviceMonitor(reports.put, {"usb": lambda: tuple(plugged)}, interval_s=0.01):
        while [r.name for r in reports.get(timeout=DEADLINE_S)] != ["desk/camera-7", "desk/gpu-0"]:
            pass
        plugged.remove(camera)
        assert [r.name for r in reports.get(timeout=DEADLINE_S)] == ["desk/gpu-0"]
