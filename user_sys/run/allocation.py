"""The resources that a run may use and gets: availability, placement, locks, and the allocation on one computer.

`user-sys train` and `user-sys hardware plan` share these functions. A run that requests robots drives those of its
`robots` that placement assigns. It never takes a robot that its file does not list, since nothing would say how to
drive it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hal.discovery import DiscoveryResult, discover
from hal.errors import LeaseHeld, PlacementError, SpecError
from hal.lease import MachineLock, driver_process_of
from hal.machine_folder import require_robot_name, shared_file
from hal.placement import Placement, format_list, place
from hal.ray_cluster import RayCluster
from hal.registry import OperatorOverrides, Override
from hal.resource import (
    CUDA_VISIBLE_DEVICES,
    UUID_LABEL,
    Health,
    Kind,
    ResourceRecord,
    ResourceRequest,
)
from user_sys.compose import RobotConfig, resource_probes
from user_sys.run.config import RunConfig

RETRY_INTERVAL_S = 2.0
NOT_ON_CLUSTER = "no node of the cluster has it"
TAKEN_BY_ANOTHER_RUN = "Another run has just taken the free resources."


def available_resources(
    config: RunConfig,
    found: Iterable[ResourceRecord],
    cluster: RayCluster | None = None,
    *,
    runs: Path | None = None,
    assume_unused: bool = False,
) -> list[ResourceRecord]:
    """The resources for the run, on this computer or on the `cluster`, with their health.

    Args:
        found: on this computer (`compose.resource_probes`).
        runs: the folder of run folders whose operator overrides count; None for the config's.
        assume_unused: ignore leases.
    """
    records = [record if assume_unused else with_local_lease(record) for record in found]
    if cluster is not None:
        store_node = min(store_node_names(cluster), default="")
        on_cluster = cluster.records(assume_unused=assume_unused)
        records = merge_cluster_records(config.robots, records, on_cluster, store_node)
    overrides = _overrides(runs or config.runs) if config.selects_robots else {}
    return _with_sites([_with_override(record, overrides) for record in records])


def place_run(
    config: RunConfig,
    requests: Sequence[ResourceRequest],
    records: Sequence[ResourceRecord],
    store_nodes: Collection[str] = (),
    remarks: Sequence[str] = (),
) -> Placement:
    """Places `requests` of the run; compute goes to `store_nodes` if possible.

    Args:
        remarks: sentences to add to a refusal, such as probes that failed.

    Raises:
        PlacementError: the requests cannot all be met; the message explains why.
    """
    names = {robot.name for robot in config.robots}

    def is_unlisted(record: ResourceRecord) -> bool:
        return config.selects_robots and record.kind is Kind.ROBOT and record.name not in names

    listed = [record for record in records if not is_unlisted(record)]
    if store_nodes:
        with suppress(PlacementError):
            return place(requests, [r for r in listed if r.kind is Kind.ROBOT or r.node in store_nodes])
    try:
        return place(requests, listed)
    except PlacementError as error:
        unlisted = _unlisted_robots(requests, filter(is_unlisted, records))
        raise PlacementError(" ".join([str(error), *unlisted, *remarks])) from None


def select_robots(config: RunConfig, chosen: Collection[str]) -> RunConfig:
    """The run with only the chosen robots, in the order of its file. A run that selects no robots keeps all."""
    if not config.selects_robots:
        return config
    return replace(config, robots=tuple(robot for robot in config.robots if robot.name in chosen))


def store_node_names(cluster: RayCluster) -> frozenset[str]:
    """The node that runs on this computer, which holds the store of a run that is launched here."""
    addresses = cluster.address_from_node()
    return frozenset(node for node, address in addresses.items() if address == cluster.address)


def probe_failures(found: DiscoveryResult) -> list[str]:
    """One sentence for each probe that failed."""
    return [f"The probe {probe} failed: {failure}." for probe, failure in sorted(found.failures.items())]


def unbuildable_robots(found: DiscoveryResult) -> list[str]:
    """One sentence for each robot of the run's file that cannot be built here, and so cannot be selected."""
    robots = [record for record in found.records if record.kind is Kind.ROBOT and record.found_by == "config"]
    return [f"{record.name} cannot be selected: {record.trouble}" for record in robots if not record.embodiment]


def with_local_lease(record: ResourceRecord) -> ResourceRecord:
    """The record; LEASED if a run of this computer has the robot or GPU, or a driver process drives the robot."""
    name = lock_name(record)
    if not name or record.health is not Health.READY:
        return record
    try:
        owner = _resource_lock(name).owner() or driver_process_of(name)
    except SpecError:  # a probe found it under a name that no robot of a run can have
        return record
    except OSError as error:  # such as a lock folder of another user
        trouble = f"whether this computer uses it is unknown: {error}"
        return msgspec.structs.replace(record, trouble=record.trouble or trouble)
    return leased_by(record, owner) if owner else record


def _resource_lock(name: str, holder: str = "") -> MachineLock:
    """The lock that a run of this user holds on a robot or GPU. Raises SpecError: the name is not valid."""
    require_robot_name(name)
    return MachineLock(shared_file(f"chosen.{os.getuid()}.{name}.lock"), holder, name)


def lock_name(record: ResourceRecord) -> str:
    """The name of the lock on a robot, or on a GPU of this computer. Empty for shared resources.

    GPUs are shared if the user has selected them by CUDA_VISIBLE_DEVICES.
    """
    if record.kind is Kind.ROBOT:
        return record.name
    is_lockable = record.kind is Kind.GPU and CUDA_VISIBLE_DEVICES not in os.environ
    return record.labels.get(UUID_LABEL, "") if is_lockable else ""


def leased_by(record: ResourceRecord, owner: str) -> ResourceRecord:
    return msgspec.structs.replace(record, health=Health.LEASED, note=f"by {owner}")


def merge_cluster_records(
    robots: Sequence[RobotConfig], found: Iterable[ResourceRecord], cluster: Sequence[ResourceRecord], store_node: str
) -> list[ResourceRecord]:
    """The resources for a run on a cluster: those of the cluster, with the robots `found` here by the run's file.

    - A robot that cannot be built here: the record found here, which is LOST.
    - A robot that a node declares: node and lease of the cluster; model, capabilities and embodiment of the file; the
      labels of both, those of the file first.
    - A simulated robot that no node declares runs on `store_node`.
    - Any other robot of the file is LOST.
    """
    merged = {record.name: record for record in cluster}
    store_labels = merged[store_node].labels if store_node in merged else {}
    simulated = {robot.name: robot.simulated for robot in robots}
    for record in found:
        if record.kind is not Kind.ROBOT:
            continue
        declared = merged.get(record.name)
        if not record.embodiment:
            merged[record.name] = record
        elif declared is not None and declared.kind is Kind.ROBOT:
            merged[record.name] = msgspec.structs.replace(
                declared,
                model=record.model,
                capabilities=record.capabilities,
                labels={**declared.labels, **record.labels},
                embodiment=record.embodiment,
            )
        elif simulated.get(record.name):
            labels = {**store_labels, **record.labels}
            merged[record.name] = msgspec.structs.replace(record, node=store_node, labels=labels)
        elif record.name in simulated:
            merged[record.name] = msgspec.structs.replace(
                record, node="", health=Health.LOST, trouble=NOT_ON_CLUSTER, note=""
            )
    return list(merged.values())


class LocalLocks:
    """Locks on robots and GPUs of this computer, against other runs, until this process ends.

    The driver processes also lock their robots when they start.
    """

    def __init__(self, holder: str) -> None:
        """`holder` names the run in other runs' messages."""
        self._holder = holder
        self._locks: list[MachineLock] = []

    def acquire(self, names: Iterable[str]) -> bool:
        """Locks all of these names (`lock_name`), or none: False if another run holds one. Does not block."""
        locks = [_resource_lock(name, self._holder) for name in sorted(names)]
        try:
            for lock in locks:
                lock.acquire()
        except LeaseHeld:
            for lock in locks:
                lock.release()
            return False
        self._locks += locks
        return True

    def acquire_free(self, robots: Iterable[str]) -> None:
        """Locks those of `robots` that no process drives. Driver processes wait for the others."""
        for robot in robots:
            if not driver_process_of(robot):
                self.acquire([robot])

    def release(self) -> None:
        """Releases all locks."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()


class RetryWait:
    """Waits between two tries to acquire resources. Prints the reason each time it changes."""

    def __init__(self, run: str, print_line: Callable[[str], None]) -> None:
        self._run, self._print_line, self._last_reason = run, print_line, ""

    def wait(self, reason: str) -> None:
        """Blocks for `RETRY_INTERVAL_S`. The run must hold no resources meanwhile."""
        if reason != self._last_reason:
            self._last_reason = reason
            self._print_line(f"{self._run} waits, and holds nothing meanwhile. {reason}")
        time.sleep(RETRY_INTERVAL_S)


class LocalAllocation:
    """A run's robots and GPUs on this computer. One thread calls it; leaving the context releases them.

    Attributes:
        config: the run's configuration; after `acquire`, with only the robots that the run drives.
        learner_gpus: UUIDs of the GPUs for the learners; empty if the user selected GPUs by CUDA_VISIBLE_DEVICES.
        policy_gpus: likewise, for the policy server.
    """

    def __init__(self, config: RunConfig, run: str, runs: Path | None = None) -> None:
        """Args:
            runs: the folder of run folders whose operator overrides count; None for the config's.

        Raises:
            ConfigError: a robot cannot be built, and the run does not select its robots.
        """
        self.config, self._runs = config, runs
        self.learner_gpus: tuple[str, ...] = ()
        self.policy_gpus: tuple[str, ...] = ()
        self._owner = f"run {run}"
        self._locks = LocalLocks(self._owner)
        robots = config.robot_requests() if config.selects_robots else ()
        self._requests = (*robots, *config.compute_requests(), *config.policy_requests())
        self._probes = resource_probes(config.robots, lenient=config.selects_robots) if self._requests else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._locks.release()

    def acquire(self, print_line: Callable[[str], None]) -> None:
        """Blocks until the run has its resources. Prints the reason for waiting each time it changes.

        A run that drives all of its `robots` does not wait for them: each driver process does.

        Raises:
            PlacementError: this computer could not meet the requests even if it were idle.
        """
        found = discover(self._probes)
        for text in unbuildable_robots(found):
            print_line(text)
        self._place(found, assume_unused=True)
        wait = RetryWait(self._owner, print_line)
        while why := self._try(found):
            wait.wait(why)
            found = discover(self._probes)
        if not self.config.selects_robots:
            self._locks.acquire_free(robot.name for robot in self.config.robots)

    def _try(self, found: DiscoveryResult) -> str:
        """The reason why the resources cannot be acquired, with nothing held, or an empty text."""
        try:
            placement = self._place(found)
        except PlacementError as error:
            return str(error)
        split = len(placement.assigned) - len(self.config.policy_requests())
        chosen, policy = _flatten(placement.assigned[:split]), _flatten(placement.assigned[split:])
        robots = {record.name for record in chosen if record.kind is Kind.ROBOT}
        if not self._locks.acquire(filter(None, map(lock_name, (*chosen, *policy)))):
            return TAKEN_BY_ANOTHER_RUN
        self.config = select_robots(self.config, robots)
        self.learner_gpus, self.policy_gpus = _gpu_uuids(chosen), _gpu_uuids(policy)
        return ""

    def _place(self, found: DiscoveryResult, *, assume_unused: bool = False) -> Placement:
        records = available_resources(self.config, found.records, runs=self._runs, assume_unused=assume_unused)
        return place_run(self.config, self._requests, records, remarks=probe_failures(found))


def _flatten(assigned: Sequence[Sequence[ResourceRecord]]) -> list[ResourceRecord]:
    return [record for records in assigned for record in records]


def _gpu_uuids(chosen: Iterable[ResourceRecord]) -> tuple[str, ...]:
    uuids = [record.labels.get(UUID_LABEL, "") for record in chosen if record.kind is Kind.GPU]
    return () if CUDA_VISIBLE_DEVICES in os.environ else tuple(uuid for uuid in uuids if uuid)


def _unlisted_robots(requests: Sequence[ResourceRequest], unlisted: Iterable[ResourceRecord]) -> list[str]:
    """A sentence that names free robots which would match if the run's file listed them."""
    wanted = [request for request in requests if request.kind is Kind.ROBOT]
    ready = (record for record in unlisted if record.health is Health.READY)
    names = sorted(record.name for record in ready if any(request.matches(record) for request in wanted))
    if not names:
        return []
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return [f"{format_list(names)} {verb} also free; list {them} under robots to use {them}."]


def _overrides(runs: Path) -> dict[str, tuple[Override, str]]:
    """Operator overrides in the run folders of `runs`, by robot, each with its run's name; the most severe counts.

    Raises:
        RegistryError: the overrides of a run cannot be read.
    """
    found: dict[str, tuple[Override, str]] = {}
    for path in sorted(runs.glob("*/orders.json")):
        if path.parent.is_symlink():
            continue
        for name, override in OperatorOverrides(path).read().orders.items():
            if name not in found or override.health is Health.QUARANTINED:
                found[name] = (override, path.parent.name)
    return found


def _with_override(record: ResourceRecord, overrides: Mapping[str, tuple[Override, str]]) -> ResourceRecord:
    if record.kind is not Kind.ROBOT or record.name not in overrides:
        return record
    override, run = overrides[record.name]
    if record.health is Health.LOST and override.health is not Health.QUARANTINED:
        return record
    return msgspec.structs.replace(record, health=override.health, note=f"{override.note}, in run {run}")


def _with_sites(records: Sequence[ResourceRecord]) -> list[ResourceRecord]:
    """If all robots of a computer name the same site, its other resources without a site are at that site."""
    sites_from_node: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.kind is Kind.ROBOT and record.node and "site" in record.labels:
            sites_from_node[record.node].add(record.labels["site"])
    common = {node: {"site": min(sites)} for node, sites in sites_from_node.items() if len(sites) == 1}
    return [
        msgspec.structs.replace(record, labels={**common.get(record.node, {}), **record.labels}) for record in records
    ]
