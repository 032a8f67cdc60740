"""The probe of what is plugged in: serial ports of motor buses, cameras, and devices to drive robots by.

It reads sysfs and opens nothing. A device is named by its serial number, e.g. ``NODE/serial-5A46``; where it has none,
or another one before it has the same, by the port that it is plugged into. So it has the same name when it comes back.

The probes of this package: the computer itself, its GPUs, and what a configuration names.

Discovery: probes that look for resources on this computer, once (`discover`) or all the time (`Discoverer`).

An installed package adds a probe with an entry point of the group ``user_sys.probes``; the entry point names a callable
without arguments that returns resource records::

    def probe() -> tuple[ResourceRecord, ...]: ...

A probe does not open what it finds. What it yields is there (`Health.READY`), there with a flaw (`trouble` says which),
or known and not there now (`Health.LOST`). Each runs in a thread of its own at its own pace: one that hangs is told of
and stops no other. `ScheduledProbe` gives a probe another pace than the default.

Watches the devices of this computer while a process of a run lives on it: GPUs, cameras, motor buses, input devices.

The gateway, each robot's session and each learner watch theirs, so that the gateway's registry has the devices of every
computer of the run. It is a look at sysfs and NVML every few seconds, in threads of its own.
"""

from __future__ import annotations

import contextlib
import enum
import grp
import importlib
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from hal.resource import UUID_LABEL, Health, Kind, ResourceRecord, local_node, parse_host_port
from hal.spec import RobotSpec

# Vendor and product ids, by usb.ids, the makers' documentation and spacenavd's table; (vendor, "") is any product.
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
    ("046d", "c603"): ("3Dconnexion SpaceMouse Plus", ("spacemouse",)),
    ("046d", "c605"): ("3Dconnexion CadMan", ("spacemouse",)),
    ("046d", "c606"): ("3Dconnexion SpaceMouse Classic", ("spacemouse",)),
    ("046d", "c621"): ("3Dconnexion SpaceBall 5000", ("spacemouse",)),
    ("046d", "c623"): ("3Dconnexion SpaceTraveler", ("spacemouse",)),
    ("046d", "c625"): ("3Dconnexion SpacePilot", ("spacemouse",)),
    ("046d", "c626"): ("3Dconnexion SpaceNavigator", ("spacemouse",)),
    ("046d", "c627"): ("3Dconnexion SpaceExplorer", ("spacemouse",)),
    ("046d", "c628"): ("3Dconnexion SpaceNavigator for Notebooks", ("spacemouse",)),
    ("046d", "c629"): ("3Dconnexion SpacePilot Pro", ("spacemouse",)),
    ("046d", "c62b"): ("3Dconnexion SpaceMouse Pro", ("spacemouse",)),
}


@dataclass(frozen=True)
class _DeviceClass:
    """One class of devices in sysfs. Of class `folder`, nodes that begin with `prefix` are devices of `kind`."""

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
    """A `hal.discovery.Probe`: one record for each USB device that has a serial port, a picture or a hand's input.

    Args:
        sys, dev: where sysfs and the device nodes are.
    """
    for each in DEVICE_CLASSES:
        seen: set[Path] = set()
        named: set[str] = set()
        nodes = (sys / "class" / each.folder).glob(each.prefix + "*")
        for node in sorted(nodes, key=lambda path: (len(path.name), path.name)):
            device = _usb_device(node, sys)
            if device is None or device in seen:  # a camera has several nodes; the first is that of the picture
                continue
            serial = _read_attribute(device / "serial")
            name = device.name if serial in named else serial or device.name
            record = _usb_record(each, node, device, dev, f"{local_node()}/{each.word}-{name}")
            if record is not None:
                seen.add(device)
                named.add(serial)
                yield record


def _usb_device(node: Path, sys: Path) -> Path | None:
    """The USB device that the node belongs to; None for what is not on a USB."""
    place = (node / "device").resolve()
    for folder in (place, *place.parents):
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
    said = " ".join(filter(None, (_read_attribute(device / "manufacturer"), _read_attribute(device / "product"))))
    model, uses = known or (said or f"USB device {vendor}:{product}", ())
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
        gid = path.stat().st_gid
    except OSError:  # never made, or just pulled out
        return f"{path} is missing: no device node was made for it"
    if os.access(path, os.R_OK | os.W_OK):
        return ""
    group = str(gid)
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(gid).gr_name
    return f"{path} may not be opened by this user: add the user to the group {group}, and log in anew"


def _read_attribute(path: Path) -> str:
    """The attribute's text; empty where the device has none, or is being unplugged just now."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# CUDA cores per streaming multiprocessor by compute capability: CUDA C++ Programming Guide, "Arithmetic Instructions".
_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_NEWER_SM = 128

CONNECT_TIMEOUT_S = 2.0
ADDRESSES_TIMEOUT_S = 4.0  # for all addresses together, and the search for their hosts' names
GREETING_TIMEOUT_S = 0.3  # for servers that speak first, as a UR's dashboard does with its name
MAX_GREETING_BYTES = 200
MAX_CONCURRENT_CONNECTIONS = 64
_UNPRINTABLE = re.compile(rb"[^\x20-\x7e]+")


def configured_robots_probe(
    specs: Mapping[str, RobotSpec],
    node: str = "",
    *,
    addresses: Mapping[str, str] | None = None,
    labels: Mapping[str, Mapping[str, str]] | None = None,
) -> Callable[[], Iterator[ResourceRecord]]:
    """A probe that finds the robots that a config names, simulated ones too.

    Args:
        specs: by robot name.
        node: what they are attached to; this computer where it is empty.
        addresses: ``HOST:PORT`` of those that are reached over a network: they are LOST while nothing listens there.
        labels: by robot name, added to its record.
    """
    where = dict(addresses or {})

    def probe() -> Iterator[ResourceRecord]:
        pool = ThreadPoolExecutor(MAX_CONCURRENT_CONNECTIONS)
        try:
            answers = {name: pool.submit(probe_address, address) for name, address in where.items()}
            until_s = time.monotonic() + ADDRESSES_TIMEOUT_S
            for name, spec in specs.items():
                record = robot_record(name, spec, node or local_node(), "config")
                facts = {**record.labels, **(labels or {}).get(name, {})}
                if name not in answers:
                    yield msgspec.structs.replace(record, labels=facts)
                    continue
                greeting, trouble = _await_answer(answers[name], where[name], until_s)
                facts |= {"address": where[name], **({"firmware": greeting} if greeting else {})}
                health = Health.LOST if trouble else Health.READY
                yield msgspec.structs.replace(record, labels=facts, health=health, trouble=trouble)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return probe


def _await_answer(asked: Future[tuple[str, str]], address: str, until_s: float) -> tuple[str, str]:
    """As `ask`; no system call ends the search for a host's name."""
    try:
        return asked.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        return "", f"nothing answers at {address}: timed out"


def probe_address(address: str) -> tuple[str, str]:
    """Whether something listens at ``HOST:PORT``: what it says by itself, and why it cannot be reached (else empty).

    Blocks for the search of the host's name, for `CONNECT_TIMEOUT_S` at most, and for a greeting.
    """
    if (place := parse_host_port(address)) is None:
        return "", f"{address!r} is no address: write HOST:PORT"
    try:
        with socket.create_connection(place, CONNECT_TIMEOUT_S) as link:
            link.settimeout(GREETING_TIMEOUT_S)
            with contextlib.suppress(TimeoutError):
                return _UNPRINTABLE.sub(b" ", link.recv(MAX_GREETING_BYTES)).decode().strip(), ""
            return "", ""
    except (OSError, OverflowError, ValueError) as error:  # the last: a name that cannot be one
        return "", f"nothing answers at {address}: {getattr(error, 'strerror', '') or error}"


def robot_record(name: str, spec: RobotSpec, node: str, found_by: str) -> ResourceRecord:
    """The record of a robot with this spec."""
    return ResourceRecord(
        kind=Kind.ROBOT,
        name=name,
        model=spec.model,
        node=node,
        capabilities=tuple(f"camera:{camera.name}" for camera in spec.cameras),
        labels={"rate_hz": f"{spec.rate_hz:g}"},
        found_by=found_by,
        embodiment=spec.embodiment,
    )


def probe_compute(cgroup: Path = Path("/sys/fs/cgroup")) -> Iterator[ResourceRecord]:
    """This computer's processors and memory, as one resource; of a container, what it may use of them.

    Args:
        cgroup: where a container finds its own limits (cgroup v2).
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
    """The file's numbers; 0 for each that sets no limit, as ``max``, and where there is no such file."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    return [int(word) if word.isdecimal() else 0 for word in (*words, *["max"] * count)][:count]


def probe_gpus() -> Iterator[ResourceRecord]:
    """This computer's NVIDIA GPUs; none where the library or the driver is absent. One that has failed is LOST."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return
    except nvml.NVMLError:  # no driver, or no GPU: `user-sys hardware doctor` says which
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                yield _gpu_record(nvml, index)
            except nvml.NVMLError as error:  # it has fallen off its bus, say; the others go on
                yield ResourceRecord(
                    kind=Kind.GPU,
                    name=f"{local_node()}/gpu-{index}",
                    model="GPU",
                    node=local_node(),
                    health=Health.LOST,
                    trouble=f"its driver says: {error}",
                    found_by="nvml",
                )
    finally:
        nvml.nvmlShutdown()


def _gpu_record(nvml: Any, index: int) -> ResourceRecord:
    """What the GPU does not tell, as one that shares the computer's memory or is split into slices, is left out."""
    device, node = nvml.nvmlDeviceGetHandleByIndex(index), local_node()

    def told(question: Any, otherwise: Any) -> Any:
        try:
            return question(device)
        except nvml.NVMLError:
            return otherwise

    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(device))
    memory = told(nvml.nvmlDeviceGetMemoryInfo, None)
    busy = told(nvml.nvmlDeviceGetUtilizationRates, None)
    return ResourceRecord(
        kind=Kind.GPU,
        name=f"{node}/gpu-{index}",
        model=nvml.nvmlDeviceGetName(device),
        node=node,
        labels={UUID_LABEL: nvml.nvmlDeviceGetUUID(device), "compute_capability": "{}.{}".format(*capability)},
        memory_bytes=memory.total if memory else 0,
        sm_count=_sm_count(told(nvml.nvmlDeviceGetNumGpuCores, 0), capability),
        load=max(busy.gpu / 100 if busy else 0.0, memory.used / memory.total if memory else 0.0),
        found_by="nvml",
    )


def _sm_count(cores: int, capability: tuple[int, ...]) -> int:
    """NVML counts cores. Compute capabilities before 7.0 are not known here and give 0."""
    if capability < (7, 0):
        return 0
    return cores // _CORES_PER_SM.get((capability[0], capability[1]), _CORES_PER_NEWER_SM)


logger = logging.getLogger(__name__)

PROBE_GROUP = "user_sys.probes"
DEFAULT_PROBE_INTERVAL_S = 2.0
DEFAULT_PROBE_TIMEOUT_S = 5.0
MAX_EVENTS = 10_000  # that nobody has taken
MAX_RECORDS = 10_000  # of one look
MAX_LOST_RECORDS = 1_000  # that are remembered, and told as LOST


class Probe(Protocol):
    """Looks for resources of one sort. An exception means that it found nothing now; the others go on."""

    def __call__(self) -> Iterable[ResourceRecord]: ...


@dataclass(frozen=True)
class ScheduledProbe:
    """A probe with a pace of its own: a pause of `interval_s` after each look, which may take `timeout_s`."""

    probe: Probe
    interval_s: float = DEFAULT_PROBE_INTERVAL_S
    timeout_s: float = DEFAULT_PROBE_TIMEOUT_S

    def __call__(self) -> Iterable[ResourceRecord]:
        return self.probe()


@dataclass(frozen=True)
class DiscoveryResult:
    """What was found, by name, and what each probe that failed said."""

    records: tuple[ResourceRecord, ...]
    failures: Mapping[str, str]


class ResourceChange(enum.StrEnum):
    """What became of a resource, or (the last two) of a probe."""

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
    """`record` is the resource as it is now; None where the event is the probe's. `text` is for people."""

    change: ResourceChange
    probe: str
    record: ResourceRecord | None = None
    text: str = ""


def discover(probes: Mapping[str, Probe]) -> DiscoveryResult:
    """Runs every probe once, all at the same time, each within its own limit of time.

    Where two find the same name, the one that is named first in `probes` prevails.
    """
    looks = {source: _ProbeCall(source, probe) for source, probe in probes.items()}
    found: dict[str, ResourceRecord] = {}
    failures: dict[str, str] = {}
    for source, look in looks.items():
        records, failure = look.result()
        if failure:
            failures[source] = failure
        for record in records:
            if found.setdefault(record.name, record) is not record:
                logger.warning("discovery.duplicate name=%s probe=%s", record.name, source)
    return DiscoveryResult(tuple(found[name] for name in sorted(found)), failures)


def installed_probes() -> dict[str, Probe]:
    """The built-in probes and those of installed packages; the latter are imported when they are first called."""
    probes: dict[str, Probe] = {"compute": probe_compute, "nvml": probe_gpus, "usb": probe_usb}
    for entry in entry_points(group=PROBE_GROUP):
        probes[entry.name] = lazy_probe(entry.load)
    return probes


def lazy_probe(load: Callable[[], Any]) -> Probe:
    """The probe that `load` gives, imported when it is first called, in its own thread; its pace counts from then."""
    return _LazyProbe(load)


class _LazyProbe:
    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self.probe: Probe | None = None

    def __call__(self) -> Iterable[ResourceRecord]:
        if self.probe is None:
            self.probe = self._load()
        return self.probe()


def _schedule(probe: Probe) -> ScheduledProbe:
    found = probe.probe if isinstance(probe, _LazyProbe) else probe
    return found if isinstance(found, ScheduledProbe) else ScheduledProbe(probe)


class _ProbeCall:
    """One call of one probe, in a thread of its own. What it found before it failed counts."""

    def __init__(self, source: str, probe: Probe) -> None:
        self._source, self._probe = source, probe
        self._began_s = time.monotonic()
        self._records: list[ResourceRecord] = []
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name=f"probe-{source}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def _left_s(self) -> float:
        return max(0.0, self._began_s + _schedule(self._probe).timeout_s - time.monotonic())

    def wait(self, stop: threading.Event) -> None:
        """Blocks until the look is over, its time is up, or `stop` is set."""
        while self.running and self._left_s and not stop.is_set():
            self._thread.join(0.05)

    def result(self) -> tuple[tuple[ResourceRecord, ...], str]:
        """What it found, and how it failed; blocks until then, at most for the probe's own limit of time."""
        while self.running and (left_s := self._left_s):  # which changes once a probe is imported
            self._thread.join(min(left_s, 0.05))
        if self.running:
            return tuple(self._records), f"it has not answered within {_schedule(self._probe).timeout_s:g} s"
        return tuple(self._records), self._failure

    def _run(self) -> None:
        try:
            found: Iterable[object] = self._probe()  # a foreign one may yield anything
            for record in found:
                if not isinstance(record, ResourceRecord):
                    raise TypeError(f"it yields {type(record).__name__}, not ResourceRecord")
                if len(self._records) == MAX_RECORDS:
                    raise ValueError(f"it yields more than {MAX_RECORDS} records")
                self._records.append(record)
        except BaseException as error:  # a foreign probe may fail in any way, by sys.exit too; the others go on
            logger.debug("discovery.probe_failed probe=%s error=%r", self._source, error)
            self._failure = f"{type(error).__name__}: {error}"


class Discoverer:
    """Looks all the time and tells what changes. A context manager: within it, each probe has a thread.

    A probe that fails or hangs says nothing about what it found before: that stays, and is degraded until the probe
    answers again. A hanging look is not called a second time before it returns. Of what vanished the newest
    `MAX_LOST_RECORDS` are remembered; what was there before that appears anew.
    """

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        self._probes = dict(probes)
        self._events: queue.Queue[DiscoveryEvent] = queue.Queue(MAX_EVENTS)
        self._lock = threading.Lock()
        self._known: dict[str, ResourceRecord] = {}
        self._owner: dict[str, str] = {}
        self._vanished: dict[str, None] = {}  # in that order
        self._failures: dict[str, str] = {}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_looking, args=(source,), name=f"discovery-{source}", daemon=True)
            for source in self._probes
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(1.0)

    def snapshot(self) -> DiscoveryResult:
        """Everything that is or was found, what vanished as LOST. Never blocks."""
        with self._lock:
            return DiscoveryResult(tuple(self._known[name] for name in sorted(self._known)), dict(self._failures))

    def next_event(self, wait_s: float) -> DiscoveryEvent | None:
        """The oldest event that was not taken yet; None where there is none within `wait_s`."""
        try:
            return self._events.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _keep_looking(self, source: str) -> None:
        probe = self._probes[source]
        look: _ProbeCall | None = None
        while not self._stop.is_set():
            look = look if look is not None and look.running else _ProbeCall(source, probe)
            look.wait(self._stop)
            if not self._stop.is_set():
                self._take_in(source, *look.result())
            self._stop.wait(_schedule(probe).interval_s)

    def _take_in(self, source: str, records: Iterable[ResourceRecord], failure: str) -> None:
        with self._lock:
            self._note_failure(source, failure)
            seen: set[str] = set()
            for record in records:
                if record.name not in seen and self._may_tell(source, record.name):
                    self._owner[record.name] = source
                    self._vanished.pop(record.name, None)
                    seen.add(record.name)
                    self._compare(source, record)
            for name in [n for n, owner in self._owner.items() if owner == source and n not in seen]:
                record = self._known[name]
                gone = {"trouble": f"{source}: {failure}"} if failure else {"health": Health.LOST}
                self._compare(source, msgspec.structs.replace(record, **gone))
                if not failure:
                    self._vanished.setdefault(name)
            self._forget()

    def _forget(self) -> None:
        for name in [*self._vanished][: max(0, len(self._vanished) - MAX_LOST_RECORDS)]:
            del self._vanished[name], self._known[name], self._owner[name]

    def _may_tell(self, source: str, name: str) -> bool:
        """Of two probes that find the same name, the first is believed for as long as it finds it."""
        known = self._known.get(name)
        return known is None or known.health is Health.LOST or self._owner[name] == source

    def _note_failure(self, source: str, failure: str) -> None:
        if failure == self._failures.get(source, ""):
            return
        self._failures[source] = failure
        if failure:
            self._tell(DiscoveryEvent(change=ResourceChange.PROBE_FAILED, probe=source, text=failure))
        else:
            del self._failures[source]
            self._tell(DiscoveryEvent(change=ResourceChange.PROBE_WORKS, probe=source))

    def _compare(self, source: str, record: ResourceRecord) -> None:
        before, self._known[record.name] = self._known.get(record.name), record
        change = classify_change(before, record)
        if change is not None:
            self._tell(DiscoveryEvent(change=change, probe=source, record=record, text=record.trouble))

    def _tell(self, event: DiscoveryEvent) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            logger.warning("discovery.event_dropped change=%s probe=%s", event.change, event.probe)


def classify_change(before: ResourceRecord | None, now: ResourceRecord) -> ResourceChange | None:
    """The news in `snapshot`; None where there is none. ABSENT is what is known and was not there from the start."""
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


DEVICE_KINDS = frozenset({Kind.GPU, Kind.CAMERA, Kind.INPUT, Kind.BUS})
DEVICE_PROBE_INTERVAL_S = 3.0
DEVICE_REPORT_INTERVAL_S = 30.0  # a gateway that was restarted knows again what there is
MAX_REPORTED_DEVICES = 64  # of one computer
_EVENT_WAIT_S = 0.5
_JOIN_TIMEOUT_S = 2.0

OnDevices = Callable[[tuple[ResourceRecord, ...]], object]


class DeviceMonitor:
    """Calls `tell` with the devices that are there: at each change, and every `DEVICE_REPORT_INTERVAL_S`. A context
    manager.
    """

    def __init__(self, on_devices: OnDevices, probes: Mapping[str, Probe] | None = None) -> None:
        """Args:
        tell: called in a thread of this object's; must not raise.
        probes: by default the installed ones, each every `DEVICE_PROBE_INTERVAL_S`.
        """
        self._tell = on_devices
        self._discoverer = Discoverer(device_probes() if probes is None else probes)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        told: tuple[ResourceRecord, ...] | None = None
        due_s = time.monotonic() + DEVICE_PROBE_INTERVAL_S
        with self._discoverer as discoverer:
            while not self._stop.is_set():
                event = discoverer.next_event(_EVENT_WAIT_S)
                if event is None and time.monotonic() < due_s:
                    continue
                now = present_devices(discoverer.snapshot())
                if now != told or time.monotonic() >= due_s:
                    told, due_s = now, time.monotonic() + DEVICE_REPORT_INTERVAL_S
                    self._tell(now)


def device_probes() -> dict[str, Probe]:
    """The installed probes, each at its own pace or every `DEVICE_PROBE_INTERVAL_S`; the computer itself does not come
    and go.
    """
    probes = installed_probes()
    del probes["compute"]
    return {
        name: ScheduledProbe(probe, DEVICE_PROBE_INTERVAL_S) if name in ("nvml", "usb") else probe
        for name, probe in probes.items()
    }


def present_devices(found: DiscoveryResult) -> tuple[ResourceRecord, ...]:
    """The devices that are there, at most `MAX_REPORTED_DEVICES`, without their load, which changes all the time."""
    there = (record for record in found.records if record.kind in DEVICE_KINDS and record.health is not Health.LOST)
    return tuple(msgspec.structs.replace(record, load=0.0) for record in there)[:MAX_REPORTED_DEVICES]
