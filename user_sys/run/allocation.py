"""What there is for a run, and what it gets of that: the one way that ``train`` goes and ``hardware explain`` tells of.

A run whose needs ask for robots drives those that placement assigns to it out of its `robots`, and no others. A robot
that its file does not list is never taken, since nothing says what drives it and what it is to do.

What a run gets of this computer, where it is on no cluster but one of its own.
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
from hal.resource import CUDA_VISIBLE_DEVICES, UUID_LABEL, Health, Kind, ResourceRecord, ResourceRequest
from user_sys.compose import RobotConfig, resource_probes
from user_sys.run.config import RunConfig

RETRY_INTERVAL_S = 2.0
NOT_ON_CLUSTER = "no node of the cluster has it"
TAKEN_BY_ANOTHER_RUN = "Another run was quicker to take what was free."


def available_resources(
    config: RunConfig,
    found: Iterable[ResourceRecord],
    cluster: RayCluster | None = None,
    *,
    runs: Path | None = None,
    assume_unused: bool = False,
) -> list[ResourceRecord]:
    """What there is for the run: on this computer, or on the `cluster`.

    Args:
        found: on this computer (`compose.probes`).
        runs: the folder of run folders whose orders count (`hal.registry`); None is the config's.
        unused: as it were if nobody used any of it.
    """
    there = [record if assume_unused else with_local_lease(record) for record in found]
    if cluster is not None:
        beside = min(store_node_names(cluster), default="")
        there = merge_cluster_records(config.robots, there, cluster.records(assume_unused=assume_unused), beside)
    orders = _overrides(runs or config.runs) if config.selects_robots else {}
    return _with_sites([_with_override(record, orders) for record in there])


def place_run(
    config: RunConfig,
    requests: Sequence[ResourceRequest],
    records: Sequence[ResourceRecord],
    store_nodes: Collection[str] = (),
    remarks: Sequence[str] = (),
) -> Placement:
    """Places `requests` of the run; what computes, on the nodes `near_store` if that is possible.

    Args:
        remarks: sentences that belong to a refusal, such as what could not be looked at.

    Raises:
        PlacementError: they cannot all be met; says why as a colleague would.
    """
    names = {robot.name for robot in config.robots}

    def is_strange(record: ResourceRecord) -> bool:
        return config.selects_robots and record.kind is Kind.ROBOT and record.name not in names

    mine = [record for record in records if not is_strange(record)]
    if store_nodes:
        with suppress(PlacementError):
            return place(requests, [r for r in mine if r.kind is Kind.ROBOT or r.node in store_nodes])
    try:
        return place(requests, mine)
    except PlacementError as error:
        raise PlacementError(
            " ".join([str(error), *_unlisted_robots(requests, filter(is_strange, records)), *remarks])
        ) from None


def select_robots(config: RunConfig, chosen: Collection[str]) -> RunConfig:
    """The run with the robots that were chosen alone, in the order of its file; one that chooses none has them all."""
    if not config.selects_robots:
        return config
    return replace(config, robots=tuple(robot for robot in config.robots if robot.name in chosen))


def store_node_names(cluster: RayCluster) -> frozenset[str]:
    """This computer's node, which has the store of a run that is launched here."""
    addresses = cluster.address_from_node()
    return frozenset(node for node, address in addresses.items() if address == cluster.address)


def probe_failures(found: DiscoveryResult) -> list[str]:
    """What was not looked at, since a probe failed: one sentence each."""
    return [f"The probe {probe} failed: {failure}." for probe, failure in sorted(found.failures.items())]


def unbuildable_robots(found: DiscoveryResult) -> list[str]:
    """Which robots of the run's file a run cannot choose, since they cannot be built here: one sentence each."""
    robots = [record for record in found.records if record.kind is Kind.ROBOT and record.found_by == "config"]
    return [f"{record.name} cannot be chosen: {record.trouble}" for record in robots if not record.embodiment]


def with_local_lease(record: ResourceRecord) -> ResourceRecord:
    """The record, LEASED where a run of this computer has taken the robot or GPU, or a driver process drives it."""
    claim = lock_name(record)
    if not claim or record.health is not Health.READY:
        return record
    try:
        owner = _resource_lock(claim).owner() or driver_process_of(claim)
    except SpecError:  # found by a probe, under a name that no robot of a run can have
        return record
    except OSError as error:  # the folder of locks is another user's, say
        trouble = f"whether it is used from here cannot be seen: {error}"
        return msgspec.structs.replace(record, trouble=record.trouble or trouble)
    return leased_by(record, owner) if owner else record


def _resource_lock(claim: str, holder: str = "") -> MachineLock:
    """Taken while a run of this user has the robot or GPU. Raises SpecError: not a name for a lock."""
    require_robot_name(claim)
    return MachineLock(shared_file(f"chosen.{os.getuid()}.{claim}.lock"), holder, claim)


def lock_name(record: ResourceRecord) -> str:
    """The name under which a run takes the robot, or the GPU of its own computer, from others; empty for what is
    shared, and for GPUs where whoever has started this program has said himself which it is to see."""
    if record.kind is Kind.ROBOT:
        return record.name
    return (
        record.labels.get(UUID_LABEL, "") if record.kind is Kind.GPU and CUDA_VISIBLE_DEVICES not in os.environ else ""
    )


def leased_by(record: ResourceRecord, owner: str) -> ResourceRecord:
    """The record, LEASED by `owner`."""
    return msgspec.structs.replace(record, health=Health.LEASED, note=f"by {owner}")


def merge_cluster_records(
    robots: Sequence[RobotConfig], found: Iterable[ResourceRecord], cluster: Sequence[ResourceRecord], store_node: str
) -> list[ResourceRecord]:
    """What there is for a run on a cluster: what the cluster has, and of what was `found` here the robots.

    Of a robot that a node has, the cluster says where it is and who uses it, and the run's file what it is: one that
    cannot be built here can be in no run that begins here. The file's labels go before the node's. Of those that no
    node has, a simulated one runs on the node `beside` the store. Any other that the file lists is not there.
    """
    there = {record.name: record for record in cluster}
    at_store = there[store_node].labels if store_node in there else {}
    simulated = {robot.name: robot.simulated for robot in robots}
    for record in found:
        if record.kind is not Kind.ROBOT:
            continue
        if not record.embodiment:
            there[record.name] = record
        elif (declared := there.get(record.name)) is not None and declared.kind is Kind.ROBOT:
            labels = {**declared.labels, **record.labels}
            there[record.name] = msgspec.structs.replace(
                declared,
                model=record.model,
                capabilities=record.capabilities,
                labels=labels,
                embodiment=record.embodiment,
            )
        elif simulated.get(record.name):
            labels = {**at_store, **record.labels}
            there[record.name] = msgspec.structs.replace(record, node=store_node, labels=labels)
        elif record.name in simulated:
            there[record.name] = msgspec.structs.replace(
                record, node="", health=Health.LOST, trouble=NOT_ON_CLUSTER, note=""
            )
    return list(there.values())


class LocalLocks:
    """The robots and GPUs of this computer that a run has taken for as long as it lives: no other run gets them.

    Its driver processes lock the robots besides, each when it starts. A claim ends with this process, however it ends.
    """

    def __init__(self, holder: str) -> None:
        """`holder` says to others whose they are."""
        self._holder = holder
        self._locks: list[MachineLock] = []

    def acquire(self, names: Iterable[str]) -> bool:
        """All of what has these names (`lock_name`), or none: False where another run has some. Never waits."""
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
        """Those of `robots` that nobody has; for a run whose driver processes wait for the others, each for its own."""
        for robot in robots:
            if not driver_process_of(robot):
                self.acquire([robot])

    def release(self) -> None:
        """Gives all of them back; harmless where there are none."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()


class RetryWait:
    """Tells for what a run waits, once each time that it changes, and lets some time pass before the next try."""

    def __init__(self, run: str, print_line: Callable[[str], None]) -> None:
        self._run, self._say, self._said = run, print_line, ""

    def wait(self, why: str) -> None:
        """Blocks for `RETRY_INTERVAL_S`. Nothing is to be held meanwhile."""
        if why != self._said:
            self._said = why
            self._say(f"{self._run} waits, and holds nothing meanwhile. {why}")
        time.sleep(RETRY_INTERVAL_S)


def _unlisted_robots(requests: Sequence[ResourceRequest], strange: Iterable[ResourceRecord]) -> list[str]:
    """A sentence about robots that would do, were they listed."""
    asked = [request for request in requests if request.kind is Kind.ROBOT]
    ready = (record for record in strange if record.health is Health.READY)
    names = sorted(record.name for record in ready if any(request.matches(record) for request in asked))
    if not names:
        return []
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return [f"{format_list(names)} {verb} free too, but not listed under robots: nothing says what drives {them}."]


def _overrides(runs: Path) -> dict[str, tuple[Override, str]]:
    """The orders that stand in the run folders in `runs`, each with its run's name, by robot; the gravest counts.

    Raises RegistryError: those of a run cannot be read, so that nobody knows what they forbid.
    """
    found: dict[str, tuple[Override, str]] = {}
    for path in sorted(runs.glob("*/orders.json")):
        if path.parent.is_symlink():
            continue
        for name, order in OperatorOverrides(path).read().orders.items():
            if name not in found or order.health is Health.QUARANTINED:
                found[name] = (order, path.parent.name)
    return found


def _with_override(record: ResourceRecord, orders: Mapping[str, tuple[Override, str]]) -> ResourceRecord:
    if record.kind is not Kind.ROBOT or record.name not in orders:
        return record
    order, run = orders[record.name]
    if record.health is Health.LOST and order.health is not Health.QUARANTINED:
        return record
    return msgspec.structs.replace(record, health=order.health, note=f"{order.note}, in run {run}")


def _with_sites(records: Sequence[ResourceRecord]) -> list[ResourceRecord]:
    """Where a computer's robots say their site and agree, all of the computer that says no other is at that site."""
    said: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.kind is Kind.ROBOT and record.node and "site" in record.labels:
            said[record.node].add(record.labels["site"])
    agreed = {node: {"site": min(sites)} for node, sites in said.items() if len(sites) == 1}
    return [
        msgspec.structs.replace(record, labels={**agreed.get(record.node, {}), **record.labels}) for record in records
    ]


class LocalAllocation:
    """A run's robots and GPUs. One thread calls it; after leaving it other runs may have them.

    Attributes:
        config: the run, with the robots alone that it drives.
        learner_gpus: the UUIDs of the GPUs that meet its learners' needs; none where whoever started the run has said
            himself which it is to see.
        policy_gpus: likewise, of its policy process.
    """

    def __init__(self, config: RunConfig, run: str, runs: Path | None = None) -> None:
        """Args:
            runs: the folder that has the run's, and others' whose orders count; None is the config's.

        Raises:
            ConfigError: a robot cannot be built; one that the run may choose is passed over then.
        """
        self.config, self._runs = config, runs
        self.learner_gpus: tuple[str, ...] = ()
        self.policy_gpus: tuple[str, ...] = ()
        self._run = f"run {run}"
        self._claims = LocalLocks(self._run)
        robots = config.robot_requests() if config.selects_robots else ()
        self._requests = (*robots, *config.compute_requests(), *config.policy_requests())
        self._looks = resource_probes(config.robots, lenient=config.selects_robots) if self._requests else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._claims.release()

    def acquire(self, print_line: Callable[[str], None]) -> None:
        """Blocks until the run has what it needs; says, once each time that it changes, what it waits for.

        A run that drives all of its `robots` does not wait for them: the driver process of each does.

        Raises:
            PlacementError: this computer would not have all of it even if nobody used any of it.
        """
        found = discover(self._looks)
        for text in unbuildable_robots(found):
            print_line(text)
        self._place(found, unused=True)
        patience = RetryWait(self._run, print_line)
        while why := self._try(found):
            patience.wait(why)
            found = discover(self._looks)
        if not self.config.selects_robots:
            self._claims.acquire_free(robot.name for robot in self.config.robots)

    def _try(self, found: DiscoveryResult) -> str:
        """Why the run cannot have what it needs, or empty; nothing is held in the first case."""
        try:
            placement = self._place(found)
        except PlacementError as error:
            return str(error)
        split = len(placement.assigned) - len(self.config.policy_requests())
        chosen, policy = _flatten(placement.assigned[:split]), _flatten(placement.assigned[split:])
        robots = {record.name for record in chosen if record.kind is Kind.ROBOT}
        if not self._claims.acquire(filter(None, map(lock_name, (*chosen, *policy)))):
            return TAKEN_BY_ANOTHER_RUN
        self.config = select_robots(self.config, robots)
        self.learner_gpus, self.policy_gpus = _gpu_uuids(chosen), _gpu_uuids(policy)
        return ""

    def _place(self, found: DiscoveryResult, *, unused: bool = False) -> Placement:
        records = available_resources(self.config, found.records, runs=self._runs, assume_unused=unused)
        return place_run(self.config, self._requests, records, remarks=probe_failures(found))


def _flatten(assigned: Sequence[Sequence[ResourceRecord]]) -> list[ResourceRecord]:
    return [record for records in assigned for record in records]


def _gpu_uuids(chosen: Iterable[ResourceRecord]) -> tuple[str, ...]:
    uuids = [record.labels.get(UUID_LABEL, "") for record in chosen if record.kind is Kind.GPU]
    return () if CUDA_VISIBLE_DEVICES in os.environ else tuple(uuid for uuid in uuids if uuid)
