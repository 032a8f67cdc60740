"""The device monitor reports the present devices at each change."""

from __future__ import annotations

import queue

from hal.discovery import DeviceMonitor, ScheduledProbe
from hal.resource import Health, Kind, ResourceRecord

CAMERA = ResourceRecord(kind=Kind.CAMERA, name="desk/camera-7", model="C920", node="desk")
GPU = ResourceRecord(kind=Kind.GPU, name="desk/gpu-0", model="H200", node="desk", load=0.3)
GONE = ResourceRecord(kind=Kind.GPU, name="desk/gpu-1", model="H200", node="desk", health=Health.LOST)
ROBOT = ResourceRecord(kind=Kind.ROBOT, name="panda-0", model="panda", node="desk")


def test_added_and_removed_devices_are_reported() -> None:
    plugged, reports = [CAMERA, GPU, GONE, ROBOT], queue.Queue[tuple[ResourceRecord, ...]]()
    with DeviceMonitor(reports.put, {"usb": ScheduledProbe(lambda: tuple(plugged), interval_s=0.01)}):
        while [r.name for r in reports.get(timeout=60)] != ["desk/camera-7", "desk/gpu-0"]:
            pass
        plugged.remove(CAMERA)
        assert [r.name for r in reports.get(timeout=60)] == ["desk/gpu-0"]
        plugged.append(CAMERA)
        assert [r.name for r in reports.get(timeout=60)] == ["desk/camera-7", "desk/gpu-0"]
