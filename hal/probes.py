"""The probes of this package: the computer itself, its GPUs, and what a configuration names."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from hal.address import host_and_port
from hal.cards import UUID
from hal.resource import Health, Kind, ResourceRecord, local_node
from hal.spec import RobotSpec

# CUDA cores per streaming multiprocessor by compute capability: CUDA C++ Programming Guide, "Arithmetic Instructions".
_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_NEWER_SM = 128

CONNECT_WITHIN_S = 2.0
ANSWER_WITHIN_S = 4.0  # for all addresses together, and the search for their hosts' names
GREETING_WITHIN_S = 0.3  # for servers that speak first, as a UR's dashboard does with its name
MAX_GREETING_BYTES = 200
MAX_ASKED_AT_ONCE = 64
_UNPRINTABLE = re.compile(rb"[^\x20-\x7e]+")


def configured_robots(
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
        pool = ThreadPoolExecutor(MAX_ASKED_AT_ONCE)
        try:
            answers = {name: pool.submit(ask, address) for name, address in where.items()}
            until_s = time.monotonic() + ANSWER_WITHIN_S
            for name, spec in specs.items():
                record = robot_record(name, spec, node or local_node(), "config")
                facts = {**record.labels, **(labels or {}).get(name, {})}
                if name not in answers:
                    yield msgspec.structs.replace(record, labels=facts)
                    continue
                greeting, trouble = _answer(answers[name], where[name], until_s)
                facts |= {"address": where[name], **({"firmware": greeting} if greeting else {})}
                health = Health.LOST if trouble else Health.READY
                yield msgspec.structs.replace(record, labels=facts, health=health, trouble=trouble)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return probe


def _answer(asked: Future[tuple[str, str]], address: str, until_s: float) -> tuple[str, str]:
    """As `ask`; no system call ends the search for a host's name."""
    try:
        return asked.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        return "", f"nothing answers at {address}: timed out"


def ask(address: str) -> tuple[str, str]:
    """Whether something listens at ``HOST:PORT``: what it says by itself, and why it cannot be reached (else empty).

    Blocks for the search of the host's name, for `CONNECT_WITHIN_S` at most, and for a greeting.
    """
    if (place := host_and_port(address)) is None:
        return "", f"{address!r} is no address: write HOST:PORT"
    try:
        with socket.create_connection(place, CONNECT_WITHIN_S) as link:
            link.settimeout(GREETING_WITHIN_S)
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
    quota, period = _limits(cgroup / "cpu.max", 2)
    (most_bytes,) = _limits(cgroup / "memory.max", 1)
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


def _limits(path: Path, count: int) -> list[int]:
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
        labels={UUID: nvml.nvmlDeviceGetUUID(device), "compute_capability": "{}.{}".format(*capability)},
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
