"""Discovery of the resources of this computer: probes, and the objects that run them.

A probe lists the resources of one sort and opens none of them. An installed package adds a probe with an entry point of
the group ``user_sys.probes``, which refers to a callable without arguments::

    def probe() -> tuple[ResourceRecord, ...]: ...

A record's resource is present (`Health.READY`), present with a defect (`trouble`), or known and absent (`Health.LOST`).
Each probe runs in its own thread with a timeout; a probe that hangs is reported and delays no other.

`discover` runs all probes once. `Discoverer` runs them repeatedly and returns changes. `DeviceMonitor` reports the
devices of this computer to a gateway while a gateway, a session or a learner runs here.

Built-in probes are `probe_usb` (sysfs), `probe_compute`, `probe_gpus` (NVML) and `configured_robots_probe`. A USB
device is named by its serial number, e.g. ``NODE/serial-5A46``, so that it keeps its name when it returns. If the
serial number is missing or not unique, the device is named by its port.
"""

from __future__ import annotations

import enum
import grp
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from hal.context import StartedAtEntry
from hal.resource import UUID_LABEL, Health, Kind, ResourceRecord, local_node, parse_host_port
from hal.spec import RobotSpec

logger = logging.getLogger(__name__)

PROBE_GROUP = "user_sys.probes"
PROBE_INTERVAL_S = 2.0  # the pause after each `poll`
PROBE_TIMEOUT_S = 5.0  # of one call
MAX_RECORDS = 10_000  # of one call of a probe

CONNECT_TIMEOUT_S = 2.0
ADDRESSES_TIMEOUT_S = 4.0  # for all addresses together, host name resolution included
MAX_CONCURRENT_CONNECTIONS = 64

DEVICE_KINDS = frozenset({Kind.GPU, Kind.CAMERA, Kind.INPUT, Kind.BUS})
DEVICE_PROBE_INTERVAL_S = 3.0
DEVICE_REPORT_INTERVAL_S = 30.0  # a restarted gateway receives the devices again
MAX_REPORTED_DEVICES = 64  # of one computer
_JOIN_TIMEOUT_S = 2.0

UDEV_FIX = 'let the person at the desk use it with a udev rule, such as KERNEL=="hidraw*", TAG+="uaccess"'

Probe = Callable[[], Iterable[ResourceRecord]]
"""Lists resources of one sort. An exception means that it found nothing this time."""

# CUDA cores per streaming multiprocessor by compute capability: CUDA C++ Programming Guide, "Arithmetic Instructions".
_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_NEWER_SM = 128

# Vendor and product ids, by usb.ids, the makers' documentation and spacenavd's table; (vendor, "") is any product.
_SPACE_MICE = "c603 c605 c606 c621 c623 c625 c626 c627 c628 c629 c62b".split()  # from Logitech
KNOWN_DEVICES: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("1a86", "7523"): ("CH340 adapter, as Feetech buses have", ("feetech",)),
    ("1a86", "55d3"): ("CH343 adapter, as Feetech buses have", ("feetech",)),
    ("1a86", "55d4"): ("CH9102 adapter, as Feetech buses have", ("feetech",)),
    ("0403", "6014"): ("ROBOTIS U2D2", ("dynamixel",)),
    ("0403", "6001"): ("FT232R adapter, as USB2Dynamixel", ("dynamixel",)),
    ("2f5d", ""): ("ROBOTIS board", ("dynamixel",)),
    ("0483", "5740"): ("STM32 serial port, as OpenCM and CAN adapters have", ("dynamixel", "can")),
    ("16d0", "117e"): ("CANable adapter", ("can",)),
    ("8086", "0ad3"): ("RealSense D415", ("depth",)),
    ("8086", "0b07"): ("RealSense D435", ("depth",)),
    ("8086", "0b3a"): ("RealSense D435i", ("depth",)),
    ("8086", "0b5b"): ("RealSense D405", ("depth",)),
    ("8086", "0b5c"): ("RealSense D455", ("depth",)),
    ("256f", ""): ("3Dconnexion SpaceMouse", ("spacemouse",)),
    **{("046d", product): ("3Dconnexion SpaceMouse", ("spacemouse",)) for product in _SPACE_MICE},
}


@dataclass(frozen=True)
class _DeviceClass:
    """A class of devices in sysfs: nodes of class `folder` whose names begin with `prefix` are devices of `kind`."""

    folder: str
    prefix: str
    kind: Kind
    word: str
    only_known: bool = False


DEVICE_CLASSES = (
    _DeviceClass("tty", "tty", Kind.BUS, "serial"),
    _DeviceClass("video4linux", "video", Kind.CAMERA, "camera"),
    _DeviceClass("hidraw", "hidraw", Kind.INPUT, "hid", only_known=True),
    _DeviceClass("input", "js", Kind.INPUT, "gamepad"),
)
_FOLDER_FROM_PREFIX = {"js": "input"}  # below /dev


def probe_usb(sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> Iterator[ResourceRecord]:
    """Lists USB devices with a serial port, a camera or an input device.

    Args:
        sys, dev: the mount points of sysfs and of the device nodes.
    """
    for each in DEVICE_CLASSES:
        seen: set[Path] = set()
        named: set[str] = set()
        nodes = (sys / "class" / each.folder).glob(each.prefix + "*")
        for node in sorted(nodes, key=lambda path: (len(path.name), path.name)):
            device = _usb_device(node, sys)
            if device is None or device in seen:  # a camera has several nodes; the first delivers images
                continue
            serial = _read_attribute(device / "serial")
            name = device.name if serial in named else serial or device.name
            record = _usb_record(each, node, device, dev, f"{local_node()}/{each.word}-{name}")
            if record is not None:
                seen.add(device)
                named.add(serial)
                yield record


def _usb_device(node: Path, sys: Path) -> Path | None:
    """The USB device of the node; None for another bus."""
    folder_of_node = (node / "device").resolve()
    for folder in (folder_of_node, *folder_of_node.parents):
        if folder == sys.resolve():
            return None
        if (folder / "idVendor").exists():
            return folder
    return None


def _usb_record(each: _DeviceClass, node: Path, device: Path, dev: Path, name: str) -> ResourceRecord | None:
    vendor, product = _read_attribute(device / "idVendor"), _read_attribute(device / "idProduct")
    known = KNOWN_DEVICES.get((vendor, product)) or KNOWN_DEVICES.get((vendor, ""))
    if known is None and each.only_known:
        return None
    description = " ".join(
        filter(None, (_read_attribute(device / "manufacturer"), _read_attribute(device / "product")))
    )
    model, uses = known or (description or f"USB device {vendor}:{product}", ())
    serial = _read_attribute(device / "serial")
    path = dev / _FOLDER_FROM_PREFIX.get(each.prefix, "") / node.name
    labels = {"device": str(path), "usb": f"{vendor}:{product}", "port": device.name}
    return ResourceRecord(
        kind=each.kind,
        name=name,
        model=model,
        node=local_node(),
        capabilities=(each.word, *uses),
        labels=labels | ({"serial": serial} if serial else {}),
        found_by="usb",
        trouble=_access_trouble(path),
    )


def _access_trouble(path: Path) -> str:
    try:
        group = device_group(path)
    except OSError:  # never created, or just removed
        return f"{path} is missing: the kernel created no device node"
    if can_use_device(path):
        return ""
    fix = UDEV_FIX if group == "root" else f"add the user to the group {group}, and log in again"
    return f"{path} may not be opened by this user: {fix}"


def can_use_device(path: Path) -> bool:
    """Whether this user may open it as its driver does: a ``hidraw`` device is only read."""
    return os.access(path, os.R_OK if path.name.startswith("hidraw") else os.R_OK | os.W_OK)


def device_group(path: Path) -> str:
    """The name of its group, or the number of one without a name. Raises OSError: there is no such file."""
    gid = path.stat().st_gid
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _read_attribute(path: Path) -> str:
    """The attribute's text; empty if the device has none or is being unplugged."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def configured_robots_probe(
    specs: Mapping[str, RobotSpec],
    node: str = "",
    *,
    addresses: Mapping[str, str] | None = None,
    labels: Mapping[str, Mapping[str, str]] | None = None,
) -> Probe:
    """A probe for the robots of a config, simulated ones included.

    Args:
        specs: by robot name.
        node: the robots' computer; empty for this one.
        addresses: ``HOST:PORT`` of robots on a network: a robot is LOST if nothing listens there.
        labels: by robot name, added to its record.
    """
    address_of = dict(addresses or {})

    def probe() -> Iterator[ResourceRecord]:
        pool = ThreadPoolExecutor(MAX_CONCURRENT_CONNECTIONS)
        try:
            answers = {name: pool.submit(address_trouble, address) for name, address in address_of.items()}
            until_s = time.monotonic() + ADDRESSES_TIMEOUT_S
            for name, spec in specs.items():
                address, trouble, facts = address_of.get(name, ""), "", dict((labels or {}).get(name, {}))
                if address:
                    facts["address"] = address
                    try:
                        trouble = answers[name].result(max(0.0, until_s - time.monotonic()))
                    except TimeoutError:  # no system call ends a host name resolution
                        trouble = f"nothing answers at {address}: timed out"
                yield ResourceRecord(
                    kind=Kind.ROBOT,
                    name=name,
                    model=spec.model,
                    node=node or local_node(),
                    capabilities=tuple(f"camera:{camera.name}" for camera in spec.cameras),
                    labels={"rate_hz": f"{spec.rate_hz:g}", **facts},
                    found_by="config",
                    embodiment=spec.embodiment,
                    health=Health.LOST if trouble else Health.READY,
                    trouble=trouble,
                )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return probe


def address_trouble(address: str) -> str:
    """Why nothing can connect to ``HOST:PORT``; empty if it works.

    Blocks for the host name resolution, and for at most `CONNECT_TIMEOUT_S`.
    """
    if (host_port := parse_host_port(address)) is None:
        return f"{address!r} is not an address: write HOST:PORT"
    try:
        socket.create_connection(host_port, CONNECT_TIMEOUT_S).close()
        return ""
    except (OSError, OverflowError, ValueError) as error:  # ValueError: an impossible host name
        return f"nothing answers at {address}: {getattr(error, 'strerror', '') or error}"


def probe_compute(cgroup: Path = Path("/sys/fs/cgroup")) -> Iterator[ResourceRecord]:
    """This computer's processors and memory as one resource, within a container's limits.

    Args:
        cgroup: the folder with the container's limits (cgroup v2).
    """
    node, cores = local_node(), len(os.sched_getaffinity(0))
    quota, period = _cgroup_limits(cgroup / "cpu.max", 2)
    (most_bytes,) = _cgroup_limits(cgroup / "memory.max", 1)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield ResourceRecord(
        kind=Kind.COMPUTE,
        name=f"{node}/cpu",
        model=os.uname().machine,
        node=node,
        memory_bytes=min(memory_bytes, most_bytes or memory_bytes),
        cores=max(1, min(cores, quota // period)) if quota and period else cores,
        load=min(1.0, os.getloadavg()[0] / (os.cpu_count() or cores)),
        found_by="compute",
    )


def _cgroup_limits(path: Path, count: int) -> list[int]:
    """The file's numbers; 0 for each ``max``, and for a missing file."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    return [int(word) if word.isdecimal() else 0 for word in (*words, *["max"] * count)][:count]


def probe_gpus() -> Iterator[ResourceRecord]:
    """This computer's NVIDIA GPUs; none without the library or the driver. A GPU that has failed is LOST."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return
    except nvml.NVMLError:  # no driver, or no GPU: `user-sys hardware doctor` reports which
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                yield _gpu_record(nvml, index)
            except nvml.NVMLError as error:  # e.g. it has fallen off the bus; the other GPUs are still listed
                yield ResourceRecord(
                    kind=Kind.GPU,
                    name=f"{local_node()}/gpu-{index}",
                    model="GPU",
                    node=local_node(),
                    health=Health.LOST,
                    trouble=f"its driver reports: {error}",
                    found_by="nvml",
                )
    finally:
        nvml.nvmlShutdown()


def _gpu_record(nvml: Any, index: int) -> ResourceRecord:
    """Facts that the GPU does not report are left out, e.g. of a GPU with shared memory or with slices."""
    device, node = nvml.nvmlDeviceGetHandleByIndex(index), local_node()

    def query(function: Any, default: Any) -> Any:
        try:
            return function(device)
        except nvml.NVMLError:
            return default

    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(device))
    memory = query(nvml.nvmlDeviceGetMemoryInfo, None)
    busy = query(nvml.nvmlDeviceGetUtilizationRates, None)
    return ResourceRecord(
        kind=Kind.GPU,
        name=f"{node}/gpu-{index}",
        model=nvml.nvmlDeviceGetName(device),
        node=node,
        labels={UUID_LABEL: nvml.nvmlDeviceGetUUID(device), "compute_capability": "{}.{}".format(*capability)},
        memory_bytes=memory.total if memory else 0,
        sm_count=_sm_count(query(nvml.nvmlDeviceGetNumGpuCores, 0), capability),
        load=max(busy.gpu / 100 if busy else 0.0, memory.used / memory.total if memory else 0.0),
        found_by="nvml",
    )


def _sm_count(cores: int, capability: tuple[int, ...]) -> int:
    """NVML counts cores. Compute capabilities before 7.0 give 0."""
    if capability < (7, 0):
        return 0
    return cores // _CORES_PER_SM.get((capability[0], capability[1]), _CORES_PER_NEWER_SM)


@dataclass(frozen=True)
class DiscoveryResult:
    """The records by name, and the failure of each probe that failed."""

    records: tuple[ResourceRecord, ...]
    failures: Mapping[str, str]


class ResourceChange(enum.StrEnum):
    """A change of a resource, or (the last two) of a probe. ABSENT: a known resource that was never present."""

    APPEARED = "appeared"
    ABSENT = "absent"
    CHANGED = "changed"
    DEGRADED = "degraded"
    RECOVERED = "recovered"
    VANISHED = "vanished"
    RETURNED = "returned"
    PROBE_FAILED = "probe failed"
    PROBE_WORKS = "probe works"


class DiscoveryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`record` is the resource after the change; None for a change of the probe. `text` is for people."""

    change: ResourceChange
    probe: str
    record: ResourceRecord | None = None
    text: str = ""


def discover(probes: Mapping[str, Probe], timeout_s: float = PROBE_TIMEOUT_S) -> DiscoveryResult:
    """Runs every probe once, concurrently, each within the timeout.

    If two probes find the same name, the first one in `probes` prevails.
    """
    discoverer = Discoverer(probes, timeout_s)
    discoverer.poll()
    return discoverer.snapshot()


def installed_probes() -> dict[str, Probe]:
    """The built-in probes and those of installed packages, which are imported at their first call."""
    probes: dict[str, Probe] = {"compute": probe_compute, "nvml": probe_gpus, "usb": probe_usb}
    return probes | {entry.name: lazy_probe(entry.load) for entry in entry_points(group=PROBE_GROUP)}


def lazy_probe(load: Callable[[], Any]) -> Probe:
    """The probe that `load` returns, imported at its first call in its own thread."""
    return lambda: load()()


class _ProbeCall:
    """One call of one probe in its own thread. Records that it yields before a failure count."""

    def __init__(self, source: str, probe: Probe, timeout_s: float) -> None:
        self._source, self._probe, self._timeout_s = source, probe, timeout_s
        self._until_s = time.monotonic() + timeout_s
        self._records: list[ResourceRecord] = []
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name=f"probe-{source}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, stop: threading.Event | None = None) -> tuple[tuple[ResourceRecord, ...], str]:
        """Its records and its failure (else empty). Blocks until the call returns, its timeout ends, or `stop` is
        set."""
        while self.running and time.monotonic() < self._until_s and not (stop and stop.is_set()):
            self._thread.join(0.05)
        failure = f"no answer within {self._timeout_s:g} s" if self.running else self._failure
        return tuple(self._records), failure

    def _run(self) -> None:
        try:
            found: Iterable[object] = self._probe()  # another package's probe may yield anything
            for record in found:
                if not isinstance(record, ResourceRecord):
                    raise TypeError(f"it yields {type(record).__name__}, not ResourceRecord")
                if len(self._records) == MAX_RECORDS:
                    raise ValueError(f"it yields more than {MAX_RECORDS} records")
                self._records.append(record)
        except BaseException as error:  # another package's probe may fail in any way, by sys.exit too
            logger.debug("discovery.probe_failed probe=%s error=%r", self._source, error)
            self._failure = f"{type(error).__name__}: {error}"


class Discoverer:
    """Runs probes repeatedly and returns changes. One thread calls it.

    A failing or hanging probe changes none of its earlier records: they are degraded until the probe answers again. A
    hanging call is not repeated before it returns, and delays one `poll` by its timeout. A resource that a probe no
    longer lists is forgotten: it appears as new if it returns. Of two probes that find the same name, the first one
    prevails while it finds it.
    """

    def __init__(self, probes: Mapping[str, Probe], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """`timeout_s`: of one call of a probe."""
        self._probes, self._timeout_s = dict(probes), timeout_s
        self._calls: dict[str, _ProbeCall] = {}
        self._known: dict[str, tuple[str, ResourceRecord]] = {}  # with the probe that found it
        self._failures: dict[str, str] = {}

    def snapshot(self) -> DiscoveryResult:
        """All records, including LOST ones, as of the last `poll`."""
        return DiscoveryResult(tuple(self._known[name][1] for name in sorted(self._known)), dict(self._failures))

    def poll(self, stop: threading.Event | None = None) -> list[DiscoveryEvent]:
        """Runs the probes concurrently. Returns the changes since the last call; only a part of them after `stop`."""
        for source, probe in self._probes.items():
            call = self._calls.get(source)
            if call is None or not call.running:
                self._calls[source] = _ProbeCall(source, probe, self._timeout_s)
        events = list[DiscoveryEvent]()
        for source, call in self._calls.items():
            records, failure = call.result(stop)
            if stop is None or not stop.is_set():
                events += self._update(source, records, failure)
        return events

    def _update(self, source: str, records: Iterable[ResourceRecord], failure: str) -> Iterator[DiscoveryEvent]:
        if failure != self._failures.get(source, ""):
            self._failures.pop(source, None)
            self._failures |= {source: failure} if failure else {}
            works = ResourceChange.PROBE_FAILED if failure else ResourceChange.PROBE_WORKS
            yield DiscoveryEvent(change=works, probe=source, text=failure)
        found: dict[str, ResourceRecord] = {}
        for record in records:
            if self._known.get(record.name, (source,))[0] == source:
                found.setdefault(record.name, record)
        for name, (owner, record) in list(self._known.items()):
            if owner == source and name not in found and failure:
                found[name] = msgspec.structs.replace(record, trouble=f"{source}: {failure}")
            elif owner == source and name not in found:
                del self._known[name]
                if record.health is not Health.LOST:
                    lost = msgspec.structs.replace(record, health=Health.LOST)
                    yield DiscoveryEvent(change=ResourceChange.VANISHED, probe=source, record=lost)
        for name, record in found.items():
            before = self._known.get(name)
            self._known[name] = source, record
            if (change := classify_change(before and before[1], record)) is not None:
                yield DiscoveryEvent(change=change, probe=source, record=record, text=record.trouble)


def classify_change(before: ResourceRecord | None, now: ResourceRecord) -> ResourceChange | None:
    """The change from `before` to `now`; None without one."""
    lost = now.health is Health.LOST
    if before is None:
        return ResourceChange.ABSENT if lost else ResourceChange.APPEARED
    if before.health is Health.LOST:
        return None if lost else ResourceChange.RETURNED
    if lost:
        return ResourceChange.VANISHED
    if now.trouble != before.trouble:
        return ResourceChange.DEGRADED if now.trouble else ResourceChange.RECOVERED
    return None if msgspec.structs.replace(now, load=before.load) == before else ResourceChange.CHANGED


class DeviceMonitor(StartedAtEntry):
    """Calls `on_devices` with the present devices, at most `MAX_REPORTED_DEVICES` and without their changing load: at
    each change, and every `DEVICE_REPORT_INTERVAL_S`."""

    def __init__(
        self,
        on_devices: Callable[[tuple[ResourceRecord, ...]], object],
        probes: Mapping[str, Probe] | None = None,
        interval_s: float = DEVICE_PROBE_INTERVAL_S,
    ) -> None:
        """Args:
        on_devices: called in this object's thread; must not raise.
        probes: by default the installed ones without the computer's own.
        """
        found = {name: probe for name, probe in installed_probes().items() if name != "compute"}
        self._on_devices = on_devices
        self._discoverer, self._interval_s = Discoverer(found if probes is None else probes), interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        reported: tuple[ResourceRecord, ...] | None = None
        due_s = 0.0
        while not self._stop.is_set():
            self._discoverer.poll(self._stop)
            present = (r for r in self._discoverer.snapshot().records if r.health is not Health.LOST)
            devices = (msgspec.structs.replace(r, load=0.0) for r in present if r.kind in DEVICE_KINDS)
            now = tuple(devices)[:MAX_REPORTED_DEVICES]
            if not self._stop.is_set() and (now != reported or time.monotonic() >= due_s):
                reported, due_s = now, time.monotonic() + DEVICE_REPORT_INTERVAL_S
                self._on_devices(now)
            self._stop.wait(self._interval_s)
