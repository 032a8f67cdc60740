"""Discovery: probes that look for resources on this computer.

An installed package adds a probe with an entry point of the group ``user_sys.probes``; the entry point names a callable
without arguments that yields resource records. Discovery goes on while the system runs, so a probe must return soon
(within a second) and must not open what it finds.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from hal.resource import Kind, ResourceRecord, local_node
from hal.spec import RobotSpec

logger = logging.getLogger(__name__)

PROBE_GROUP = "user_sys.probes"

# CUDA cores per streaming multiprocessor by compute capability: CUDA C++ Programming Guide, "Arithmetic Instructions".
_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_NEWER_SM = 128


class Probe(Protocol):
    """Looks for resources of one sort. An exception means that this probe found nothing; the others go on."""

    def __call__(self) -> Iterable[ResourceRecord]: ...


@dataclass(frozen=True)
class Discovery:
    """What was found, by name, and what each probe that failed said."""

    records: tuple[ResourceRecord, ...]
    failures: Mapping[str, str]


def discover(probes: Mapping[str, Probe]) -> Discovery:
    """Runs every probe once. Where two find the same name, the first one's record stands."""
    found: dict[str, ResourceRecord] = {}
    failures: dict[str, str] = {}
    for source, probe in probes.items():
        try:
            for record in probe():
                if found.setdefault(record.name, record) is not record:
                    logger.warning("discovery.duplicate name=%s probe=%s", record.name, source)
        except Exception as error:  # a foreign probe may fail in any way; it is reported and the others go on
            logger.warning("discovery.probe_failed probe=%s error=%r", source, error)
            failures[source] = f"{type(error).__name__}: {error}"
    return Discovery(tuple(found[name] for name in sorted(found)), failures)


def installed_probes() -> dict[str, Probe]:
    """The built-in probes and those of installed packages; the latter are imported when they are first called."""
    probes: dict[str, Probe] = {"compute": probe_compute, "nvml": probe_gpus}
    for entry in entry_points(group=PROBE_GROUP):
        probes[entry.name] = _lazily(entry.load)
    return probes


def configured_robots(specs: Mapping[str, RobotSpec], node: str = "") -> Probe:
    """A probe that finds the robots that the run's config names, simulated ones too. `specs` is by robot name."""

    def probe() -> Iterator[ResourceRecord]:
        for name, spec in specs.items():
            yield robot_record(name, spec, node or local_node(), "config")

    return probe


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


def probe_compute() -> Iterator[ResourceRecord]:
    """This computer's processors and memory, as one resource."""
    node = local_node()
    yield ResourceRecord(
        kind=Kind.COMPUTE,
        name=f"{node}/cpu",
        model=os.uname().machine,
        node=node,
        labels={"cores": str(len(os.sched_getaffinity(0)))},
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        found_by="compute",
    )


def probe_gpus() -> Iterator[ResourceRecord]:
    """This computer's NVIDIA GPUs; none where the library or the driver is absent."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return
    except nvml.NVMLError as error:
        logger.debug("discovery.no_nvml error=%s", error)
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            yield _gpu_record(nvml, index)
    finally:
        nvml.nvmlShutdown()


def _gpu_record(nvml: Any, index: int) -> ResourceRecord:
    device, node = nvml.nvmlDeviceGetHandleByIndex(index), local_node()
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(device))
    return ResourceRecord(
        kind=Kind.GPU,
        name=f"{node}/gpu-{index}",
        model=nvml.nvmlDeviceGetName(device),
        node=node,
        labels={"uuid": nvml.nvmlDeviceGetUUID(device), "compute_capability": "{}.{}".format(*capability)},
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(device).total,
        sm_count=_sm_count(nvml.nvmlDeviceGetNumGpuCores(device), capability),
        found_by="nvml",
    )


def _sm_count(cores: int, capability: tuple[int, ...]) -> int:
    """NVML counts cores. Compute capabilities before 7.0 are not known here and give 0."""
    if capability < (7, 0):
        return 0
    return cores // _CORES_PER_SM.get((capability[0], capability[1]), _CORES_PER_NEWER_SM)


def _lazily(load: Callable[[], Any]) -> Probe:
    def probe() -> Iterable[ResourceRecord]:
        found: Iterable[ResourceRecord] = load()()
        return found

    return probe
