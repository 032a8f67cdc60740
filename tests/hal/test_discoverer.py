"""Repeated discovery: changes of resources, and probes that hang or fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable

import msgspec

from hal.discovery import (
    MAX_LOST_RECORDS,
    Discoverer,
    DiscoveryEvent,
    ResourceChange,
    ScheduledProbe,
    classify_change,
    configured_robots_probe,
    discover,
)
from hal.resource import Health, Kind, ResourceRecord
from hal.spec import ArraySpec, RobotSpec

DEADLINE_S = 60.0
ARM = ResourceRecord(kind=Kind.ROBOT, name="arm-0", model="arm", node="desk")
SPEC = RobotSpec(
    model="arm",
    rate_hz=10.0,
    observation=(),
    action=ArraySpec(name="action", labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),
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


def quick(probe: Bench) -> ScheduledProbe:
    return ScheduledProbe(probe, interval_s=0.01, timeout_s=DEADLINE_S)


def next_event(discoverer: Discoverer) -> DiscoveryEvent:
    event = discoverer.next_event(DEADLINE_S)
    assert event is not None, f"no event within {DEADLINE_S:g} s"
    return event


def test_each_change_of_a_robot_is_an_event() -> None:
    bench = Bench()
    with Discoverer({"bench": quick(bench)}) as discoverer:
        changes = []
        for records in ((ARM,), (msgspec.structs.replace(ARM, trouble="no permission"),), (ARM,), (), (ARM,)):
            bench.records = records
            event = next_event(discoverer)
            assert event.record is not None and event.record.name == "arm-0" and event.probe == "bench"
            changes.append((event.change, event.record.health, event.text))
    assert changes == [
        (ResourceChange.APPEARED, Health.READY, ""),
        (ResourceChange.DEGRADED, Health.READY, "no permission"),
        (ResourceChange.RECOVERED, Health.READY, ""),
        (ResourceChange.VANISHED, Health.LOST, ""),
        (ResourceChange.RETURNED, Health.READY, ""),
    ]


def test_failing_probe_degrades_its_records_until_it_works() -> None:
    bench = Bench(ARM)
    with Discoverer({"usb": quick(bench)}) as discoverer:
        assert next_event(discoverer).change is ResourceChange.APPEARED
        bench.failure = OSError("no such bus")
        failed, degraded = next_event(discoverer), next_event(discoverer)
        assert (failed.change, failed.text) == (ResourceChange.PROBE_FAILED, "OSError: no such bus")
        assert (degraded.change, degraded.text) == (ResourceChange.DEGRADED, "usb: OSError: no such bus")
        assert discoverer.snapshot().failures == {"usb": "OSError: no such bus"}
        bench.failure = None
        assert [next_event(discoverer).change for _ in range(2)] == [
            ResourceChange.PROBE_WORKS,
            ResourceChange.RECOVERED,
        ]


def test_hanging_probe_delays_no_other_and_is_not_repeated() -> None:
    released, calls = threading.Event(), []

    def hanging() -> Iterable[ResourceRecord]:
        calls.append(time.monotonic())
        released.wait(DEADLINE_S)
        return (ARM,)

    other = Bench(msgspec.structs.replace(ARM, name="arm-1"))
    probes = {"stuck": ScheduledProbe(hanging, interval_s=0.01, timeout_s=0.05), "bench": quick(other)}
    try:
        with Discoverer(probes) as discoverer:
            events = {next_event(discoverer).change for _ in range(2)}
            assert events == {ResourceChange.PROBE_FAILED, ResourceChange.APPEARED}
            assert discoverer.snapshot().failures == {"stuck": "no answer within 0.05 s"}
            other.records = ()
            assert next_event(discoverer).change is ResourceChange.VANISHED
            assert len(calls) == 1
            released.set()
            assert {next_event(discoverer).change for _ in range(2)} == {
                ResourceChange.PROBE_WORKS,
                ResourceChange.APPEARED,
            }
    finally:
        released.set()


def test_duplicate_name_of_one_probe_keeps_first_record() -> None:
    bench = Bench(ARM, msgspec.structs.replace(ARM, node="elsewhere"))
    with Discoverer({"bench": quick(bench)}) as discoverer:
        assert next_event(discoverer).change is ResourceChange.APPEARED
        bench.records = ()
        assert next_event(discoverer).change is ResourceChange.VANISHED, "there is no event in between"


def test_oldest_lost_records_are_dropped() -> None:
    """E.g. of the nodes of a ROS graph, whose names contain growing numbers."""
    bench = Bench(*(msgspec.structs.replace(ARM, name=f"arm-{number:05}") for number in range(MAX_LOST_RECORDS + 100)))
    with Discoverer({"bench": quick(bench)}) as discoverer:
        for change in (ResourceChange.APPEARED, ResourceChange.VANISHED):
            assert {next_event(discoverer).change for _ in bench.records or range(MAX_LOST_RECORDS + 100)} == {change}
            bench.records = ()
        bench.records = (ARM, msgspec.structs.replace(ARM, name="arm-00000"))
        assert [next_event(discoverer).change for _ in range(2)] == [ResourceChange.APPEARED] * 2
        known = {record.name: record.health for record in discoverer.snapshot().records}
    assert (len(known), known["arm-00000"], known["arm-00100"]) == (MAX_LOST_RECORDS + 2, Health.READY, Health.LOST)


def test_discover_waits_for_each_probe_within_its_timeout() -> None:
    released, found_one = threading.Event(), threading.Event()

    def hanging() -> Iterable[ResourceRecord]:
        yield ARM
        found_one.set()
        released.wait(DEADLINE_S)

    def patient() -> Iterable[ResourceRecord]:
        """Is listed first, and answers after the other probe has found a record."""
        assert found_one.wait(DEADLINE_S)
        return ()

    found = discover(
        {"patient": ScheduledProbe(patient, timeout_s=DEADLINE_S), "stuck": ScheduledProbe(hanging, timeout_s=0.05)}
    )
    released.set()
    assert [record.name for record in found.records] == ["arm-0"]
    assert found.failures == {"stuck": "no answer within 0.05 s"}


def test_load_is_no_change_and_absence_is_reported_once() -> None:
    assert classify_change(ARM, msgspec.structs.replace(ARM, load=0.5)) is None
    assert classify_change(ARM, msgspec.structs.replace(ARM, memory_bytes=1)) is ResourceChange.CHANGED
    gone = msgspec.structs.replace(ARM, health=Health.LOST)
    assert classify_change(None, gone) is ResourceChange.ABSENT
    assert classify_change(gone, msgspec.structs.replace(gone, trouble="still")) is None


def test_networked_robot_is_ready_with_firmware_or_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        probe = configured_robots_probe(
            {"arm-0": SPEC}, addresses={"arm-0": address}, labels={"arm-0": {"site": "lab"}}
        )

        def greet() -> None:
            link, _ = server.accept()
            link.sendall(b"Controller 5.11.1\n")
            link.close()

        thread = threading.Thread(target=greet)
        thread.start()
        (present,) = probe()
        thread.join()
    (lost,) = probe()
    assert present.health is Health.READY
    assert (present.labels["firmware"], present.labels["site"]) == ("Controller 5.11.1", "lab")
    assert lost.health is Health.LOST and lost.trouble == f"nothing answers at {address}: Connection refused"
    (nonsense,) = configured_robots_probe({"arm-0": SPEC}, addresses={"arm-0": "nowhere"})()
    assert nonsense.trouble == "'nowhere' is not an address: write HOST:PORT"
