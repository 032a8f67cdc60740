"""The resources that a run may use and gets: requests, offers, their match, the claim of a match, and its release.

`user-sys train` and `user-sys hardware plan` share `offered_resources` and `plan_run`. A run that requests robots
drives those of its `robots` that it is assigned, and no other: nothing says how to drive another. `LocalAllocation`
claims with locks of this computer, `user_sys.run.cluster_allocation` with reservations on a Ray cluster.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from hal.context import ClosedAtExit
from hal.discovery import DiscoveryResult, Probe, discover, probe_gpus
from hal.errors import LeaseHeld, SpecError
from hal.lease import MachineLock, driver_process_of
from hal.machine_folder import require_robot_name, shared_file
from hal.placement import Assigned, PlacementPlan, plan
from hal.ray_cluster import RayCluster, start_local_cluster
from hal.ray_nodes import ray_resources
from hal.registry import Override
from hal.resource import CUDA_VISIBLE_DEVICES, UUID_LABEL, Health, Kind, ResourceRecord, ResourceRequest
from user_sys.compose import RobotConfig, resource_probes
from user_sys.errors import RunError
from user_sys.operator_overrides import adopt_overrides, overrides_of_real_robots
from user_sys.run.config import RunConfig
from user_sys.run.topology import LOOPBACK, ProcessSlot, local_slots

RETRY_INTERVAL_S = 2.0
NO_GPU = ("-1",)  # in CUDA_VISIBLE_DEVICES it hides every GPU
NOT_ON_CLUSTER = "no node of the cluster has it"
TAKEN_BY_ANOTHER_RUN = "another run has just taken the free resources"

Use = Literal["learner", "policy"]
"""What compute is for: the learners, or the policy server."""
PrintLine = Callable[[str], None]


# Offers


def offered_resources(
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
    overrides = overrides_of_real_robots(runs or config.runs).read() if config.selects_robots else {}
    return _with_sites([_with_override(record, overrides.get(record.name)) for record in records])


def plan_run(
    config: RunConfig,
    requests: Sequence[ResourceRequest],
    records: Sequence[ResourceRecord],
    store_nodes: Collection[str] = (),
) -> PlacementPlan:
    """Matches `requests` of the run with `records`; compute is on `store_nodes` if possible."""
    names = {robot.name for robot in config.robots}
    listed = [r for r in records if not config.selects_robots or r.kind is not Kind.ROBOT or r.name in names]
    near = plan(requests, [r for r in listed if r.kind is Kind.ROBOT or r.node in store_nodes]) if store_nodes else None
    return near if near is not None and near.assigned is not None else plan(requests, listed)


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
    """One line for each probe that failed."""
    return [f"the probe {probe} failed: {failure}" for probe, failure in sorted(found.failures.items())]


def _unbuildable_robots(found: DiscoveryResult) -> list[str]:
    """One line for each robot of the run's file that cannot be built here, and so cannot be selected."""
    robots = [record for record in found.records if record.kind is Kind.ROBOT and record.found_by == "config"]
    return [f"{record.name} cannot be selected: {record.trouble}" for record in robots if not record.embodiment]


def with_local_lease(record: ResourceRecord) -> ResourceRecord:
    """The record; LEASED if a run of this computer has the robot or GPU, or a driver process drives the robot.

    A robot that another user simulates is not LEASED.
    """
    name = lock_name(record)
    if not name or record.health is not Health.READY:
        return record
    try:
        owner = _resource_lock(name).owner() or _resource_lock(name, simulated=True).owner() or driver_process_of(name)
    except SpecError:  # a probe found it under a name that no robot of a run can have
        return record
    except OSError as error:  # such as a lock folder of another user
        trouble = f"whether this computer uses it is unknown: {error}"
        return msgspec.structs.replace(record, trouble=record.trouble or trouble)
    return msgspec.structs.replace(record, health=Health.LEASED, note=f"by {owner}") if owner else record


def _resource_lock(name: str, holder: str = "", *, simulated: bool = False) -> MachineLock:
    """The lock that a run holds on a GPU, a real robot, or a robot that this user simulates.

    Raises:
        SpecError: the name is not valid.
    """
    require_robot_name(name)
    user = f"{os.getuid()}." if simulated else ""
    return MachineLock(shared_file(f"chosen.{user}{name}.lock"), holder, name)


def lock_name(record: ResourceRecord) -> str:
    """The name of the lock on a robot, or on a GPU of this computer. Empty for shared resources.

    GPUs are shared if the user has selected them by CUDA_VISIBLE_DEVICES.
    """
    if record.kind is Kind.ROBOT:
        return record.name
    is_lockable = record.kind is Kind.GPU and CUDA_VISIBLE_DEVICES not in os.environ
    return record.labels.get(UUID_LABEL, "") if is_lockable else ""


def merge_cluster_records(
    robots: Sequence[RobotConfig], found: Iterable[ResourceRecord], cluster: Sequence[ResourceRecord], store_node: str
) -> list[ResourceRecord]:
    """The resources for a run on a cluster: those of the cluster, with the robots `found` here by the run's file.

    - A robot that cannot be built here: the record found here, which is LOST.
    - A robot that a node declares: node and lease of the cluster; model, capabilities and embodiment of the file; the
      labels of both, those of the file first. On `store_node` also a lease outside of the cluster counts.
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
            if declared.node == store_node and declared.health is Health.READY and record.health is Health.LEASED:
                declared = msgspec.structs.replace(declared, health=record.health, note=record.note)
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


def out_of_use(robots: Iterable[RobotConfig], run: Path) -> dict[str, str]:
    """The real ones of `robots` that an operator has taken out of use in `run` or in another run of the same folder,
    each with a line for people.

    Raises StateError: the overrides cannot be read.
    """
    real = [robot.name for robot in robots if not robot.simulated]
    if real:
        adopt_overrides(run)
    overrides = overrides_of_real_robots(run.parent).read() if real else {}
    found = {}
    for name in real:
        if (override := overrides.get(name)) is not None:
            command = f"user-sys hardware restore {name} --run {run.parent}"
            found[name] = f"{name} is {override.what} {override.note}: no program moves it until `{command}`"
    return found


def require_in_use(robots: Iterable[RobotConfig], run: Path) -> None:
    """Raises RunError if there is one of `out_of_use`, and StateError as that does."""
    for text in out_of_use(robots, run).values():
        raise RunError(text)


def _with_override(record: ResourceRecord, override: Override | None) -> ResourceRecord:
    if record.kind is not Kind.ROBOT or override is None:
        return record
    if record.health is Health.LOST and override.health is not Health.QUARANTINED:
        return record
    return msgspec.structs.replace(record, health=override.health, note=override.note)


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


# Claims


class Allocation(ClosedAtExit, ABC):
    """A run's robots and compute. One thread calls it; `close` releases them.

    Attributes:
        config: the run's configuration; after `acquire`, with only the robots that the run drives.
    """

    def __init__(self, config: RunConfig, run: str, probes: Mapping[str, Probe], runs: Path | None = None) -> None:
        """Args:
        probes: find the robots of the run's file, and the resources of this computer if the run uses them.
        runs: the folder of run folders whose operator overrides count; None for the config's.
        """
        self.config = self._configured = config
        self._probes, self._found = probes, DiscoveryResult((), {})
        self._owner, self._runs = f"run {run}", runs
        self._requests: dict[Use, tuple[ResourceRequest, ...]] = {
            "learner": config.compute_requests(),
            "policy": config.policy_requests(),
        }
        self._locks: list[MachineLock] = []

    def close(self) -> None:
        self._unlock()

    def acquire(self, print_line: PrintLine) -> None:
        """Blocks until the run has its resources. Prints the reason for waiting each time it changes.

        A run that drives all of its `robots` does not wait for them: each driver process does.

        Raises:
            PlacementError: the requests could not be met even if nothing else used the resources, or a computer of the
                run does not see the folder of runs.
        """
        self._found = discover(self._probes)
        for text in (*probe_failures(self._found), *_unbuildable_robots(self._found)):
            print_line(text)
        self._plan(assume_unused=True).require()
        printed = ""
        while why := self._try():
            if why != printed:
                printed = why
                print_line(f"{self._owner} waits, and holds nothing meanwhile. {why}")
            time.sleep(RETRY_INTERVAL_S)
        if not self.config.selects_robots:
            self._lock_free_robots()

    def _try(self) -> str:
        """The reason why the resources cannot be acquired, with nothing held; or an empty text."""
        self._found = discover(self._probes)
        found = self._plan()
        return found.reason if found.assigned is None else self._claim(found.assigned)

    @abstractmethod
    def _plan(self, *, assume_unused: bool = False) -> PlacementPlan:
        """Matches the requests of robots, learners and policy server, in this order, with the discovered resources."""

    @abstractmethod
    def _claim(self, assigned: Assigned) -> str:
        """Claims all of these resources and sets `config`, or claims none and returns the reason."""

    def _lock(self, names: Iterable[str]) -> bool:
        """Locks all of these names (`lock_name`) against other runs, or none: False if another run holds one."""
        own = {robot.name for robot in self._configured.robots if robot.simulated}
        locks = [_resource_lock(name, self._owner, simulated=name in own) for name in sorted(names)]
        try:
            for lock in locks:
                lock.acquire()
        except LeaseHeld:
            for lock in locks:
                lock.release()
            return False
        self._locks += locks
        return True

    def _lock_free_robots(self) -> None:
        """Locks those of the run's robots that no process drives. Driver processes wait for the others."""
        for robot in self.config.robots:
            if not driver_process_of(robot.name):
                self._lock([robot.name])

    def _unlock(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    @abstractmethod
    def connect(self, log_dir: Path) -> RayCluster:
        """The cluster on which the run's processes start."""

    @abstractmethod
    def learner_slots(self, number: int, processes: int) -> tuple[ProcessSlot, ...]:
        """Slots for the processes of the run's learner of that `number`. Empty while the run has lost its compute."""

    @abstractmethod
    def policy_slot(self) -> ProcessSlot | None:
        """The policy server's slot; its address is reachable by all of the run's robots. None while it is lost."""

    def launcher_address(self, slot: ProcessSlot) -> str:
        """The address at which a process in `slot` reaches this computer."""
        return LOOPBACK

    def robots_on_other_nodes(self) -> tuple[list[str], str]:
        """The robots that other computers drive, and the address at which these reach this computer."""
        return [], LOOPBACK

    def release_lost(self, use: Use) -> tuple[str, ...]:
        """The nodes that were lost with compute of this use. If there are any, all of its compute is released."""
        return ()

    def reacquire(self, use: Use) -> str | None:
        """Tries to claim the lost compute of one use again, while the run's robots work. Does not wait.

        Returns:
            None if nothing is lost; the reason why it is not claimed (yet); an empty text when it has been claimed.
        """
        return None


class LocalAllocation(Allocation):
    """A run's robots and GPUs on this computer."""

    def __init__(self, config: RunConfig, run: str, runs: Path | None = None) -> None:
        """Raises ConfigError: a robot cannot be built, and the run does not select its robots."""
        robots = config.robot_requests() if config.selects_robots else ()
        self._all = (*robots, *config.compute_requests(), *config.policy_requests())
        probes = resource_probes(config.robots, lenient=config.selects_robots) if self._all else {}
        super().__init__(config, run, probes, runs)
        self._gpus: dict[Use, tuple[str, ...]] = {"learner": (), "policy": ()}  # UUIDs

    def connect(self, log_dir: Path) -> RayCluster:
        records = discover(resource_probes(self.config.robots)).records
        settings = self.config.ray
        return start_local_cluster(
            ray_resources(records),
            object_store_bytes=settings.object_store_mb * 1_000_000,
            log_dir=log_dir,
        )

    def learner_slots(self, number: int, processes: int) -> tuple[ProcessSlot, ...]:
        return local_slots(number, processes, self._gpus["learner"])

    def policy_slot(self) -> ProcessSlot:
        return ProcessSlot(gpus=self._gpus["policy"] or self._gpus["learner"] or unreserved_gpus())

    def _plan(self, *, assume_unused: bool = False) -> PlacementPlan:
        records = offered_resources(self._configured, self._found.records, runs=self._runs, assume_unused=assume_unused)
        return plan_run(self._configured, self._all, records)

    def _claim(self, assigned: Assigned) -> str:
        split = len(assigned) - len(self._requests["policy"])
        chosen, policy = ([record for row in rows for record in row] for rows in (assigned[:split], assigned[split:]))
        if not self._lock(filter(None, map(lock_name, (*chosen, *policy)))):
            return TAKEN_BY_ANOTHER_RUN
        self.config = select_robots(self._configured, [r.name for r in chosen if r.kind is Kind.ROBOT])
        self._gpus = {"learner": _gpu_uuids(chosen), "policy": _gpu_uuids(policy)}
        return ""


def unreserved_gpus(in_use: Collection[str] = ()) -> tuple[str, ...]:
    """The UUIDs of this computer's GPUs that no run has reserved; `NO_GPU` if all are. Empty if it has none, or if the
    user has selected GPUs by CUDA_VISIBLE_DEVICES.

    Args:
        in_use: UUIDs of GPUs that are reserved besides.
    """
    gpus = [with_local_lease(record) for record in probe_gpus() if lock_name(record)]
    free = (gpu.labels[UUID_LABEL] for gpu in gpus if gpu.health is Health.READY)
    return tuple(uuid for uuid in free if uuid not in in_use) or NO_GPU * bool(gpus)


def _gpu_uuids(chosen: Iterable[ResourceRecord]) -> tuple[str, ...]:
    """Empty if the user has selected GPUs by CUDA_VISIBLE_DEVICES."""
    uuids = [record.labels.get(UUID_LABEL, "") for record in chosen if record.kind is Kind.GPU]
    return () if CUDA_VISIBLE_DEVICES in os.environ else tuple(uuid for uuid in uuids if uuid)
