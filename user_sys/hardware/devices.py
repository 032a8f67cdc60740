"""Watches the devices of this computer while a process of a run lives on it: GPUs, cameras, motor buses, input devices.

The gateway, each robot's session and each learner watch theirs, so that the gateway's registry has the devices of every
computer of the run. It is a look at sysfs and NVML every few seconds, in threads of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import msgspec

from hal.discovery import Discoverer, Discovery, Paced, Probe, installed_probes
from hal.resource import Health, Kind, ResourceRecord

KINDS = frozenset({Kind.GPU, Kind.CAMERA, Kind.INPUT, Kind.BUS})
EVERY_S = 3.0
REPEAT_S = 30.0  # a gateway that was restarted knows again what there is
MAX_DEVICES = 64  # of one computer
_WAIT_S = 0.5
_JOIN_S = 2.0

Tell = Callable[[tuple[ResourceRecord, ...]], object]


class DeviceWatch:
    """Calls `tell` with the devices that are there: at each change, and every `REPEAT_S`. A context manager."""

    def __init__(self, tell: Tell, probes: Mapping[str, Probe] | None = None) -> None:
        """Args:
        tell: called in a thread of this object's; must not raise.
        probes: by default the installed ones, each every `EVERY_S`.
        """
        self._tell = tell
        self._discoverer = Discoverer(device_probes() if probes is None else probes)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        told: tuple[ResourceRecord, ...] | None = None
        due_s = time.monotonic() + EVERY_S
        with self._discoverer as discoverer:
            while not self._stop.is_set():
                event = discoverer.next_event(_WAIT_S)
                if event is None and time.monotonic() < due_s:
                    continue
                now = present(discoverer.now())
                if now != told or time.monotonic() >= due_s:
                    told, due_s = now, time.monotonic() + REPEAT_S
                    self._tell(now)


def device_probes() -> dict[str, Probe]:
    """The installed probes, each at its own pace or every `EVERY_S`; the computer itself does not come and go."""
    probes = installed_probes()
    del probes["compute"]
    return {name: Paced(probe, EVERY_S) if name in ("nvml", "usb") else probe for name, probe in probes.items()}


def present(found: Discovery) -> tuple[ResourceRecord, ...]:
    """The devices that are there, at most `MAX_DEVICES`, without their load, which changes all the time."""
    there = (record for record in found.records if record.kind in KINDS and record.health is not Health.LOST)
    return tuple(msgspec.structs.replace(record, load=0.0) for record in there)[:MAX_DEVICES]
