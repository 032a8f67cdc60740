"""What there is for a run, and what it gets of that: the one way that ``train`` goes and ``hardware explain`` tells of.

A run whose needs ask for robots drives those that placement assigns to it out of its `robots`, and no others. A robot
that its file does not list is never taken, since nothing says what drives it and what it is to do.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from hal.cards import UUID, VISIBLE
from hal.discovery import Discovery
from hal.errors import LeaseHeld, PlacementError, SpecError
from hal.lease import MachineLock, driver_of
from hal.machine import require_name, shared_file
from hal.placement import Placement, place
from hal.placement_words import listed
from hal.ray_bridge import Cluster
from hal.request import Request
from hal.resource import Health, Kind, ResourceRecord
from hal.standing import Order, OrderBook
from user_sys.compose import RobotConfig
from user_sys.topology import RunConfig

AGAIN_S = 2.0
NOBODY_HAS_IT = "no node of the cluster has it"
QUICKER = "Another run was quicker to take what was free."


def available(
    config: RunConfig,
    found: Iterable[ResourceRecord],
    cluster: Cluster | None = None,
    *,
    runs: Path | None = None,
    unused: bool = False,
) -> list[ResourceRecord]:
    """What there is for the run: on this computer, or on the `cluster`.

    Args:
        found: on this computer (`compose.probes`).
        runs: the folder of run folders whose orders count (`hal.standing`); None is the config's.
        unused: as it were if nobody used any of it.
    """
    there = [record if unused else in_use(record) for record in found]
    if cluster is not None:
        beside = min(store_nodes(cluster), default="")
        there = with_cluster(config.robots, there, cluster.records(unused=unused), beside)
    orders = _orders(runs or config.runs) if config.chooses_robots else {}
    return _sited([_as_ordered(record, orders) for record in there])


def place_run(
    config: RunConfig,
    requests: Sequence[Request],
    records: Sequence[ResourceRecord],
    near_store: Collection[str] = (),
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
        return config.chooses_robots and record.kind is Kind.ROBOT and record.name not in names

    mine = [record for record in records if not is_strange(record)]
    if near_store:
        with suppress(PlacementError):
            return place(requests, [r for r in mine if r.kind is Kind.ROBOT or r.node in near_store])
    try:
        return place(requests, mine)
    except PlacementError as error:
        raise PlacementError(
            " ".join([str(error), *_passed_over(requests, filter(is_strange, records)), *remarks])
        ) from None


def narrowed(config: RunConfig, chosen: Collection[str]) -> RunConfig:
    """The run with the robots that were chosen alone, in the order of its file; one that chooses none has them all."""
    if not config.chooses_robots:
        return config
    return replace(config, robots=tuple(robot for robot in config.robots if robot.name in chosen))


def store_nodes(cluster: Cluster) -> frozenset[str]:
    """This computer's node, which has the store of a run that is launched here."""
    addresses = cluster.addresses()
    return frozenset(node for node, address in addresses.items() if address == cluster.address)


def failures(found: Discovery) -> list[str]:
    """What was not looked at, since a probe failed: one sentence each."""
    return [f"The probe {probe} failed: {failure}." for probe, failure in sorted(found.failures.items())]


def not_built(found: Discovery) -> list[str]:
    """Which robots of the run's file a run cannot choose, since they cannot be built here: one sentence each."""
    robots = [record for record in found.records if record.kind is Kind.ROBOT and record.found_by == "config"]
    return [f"{record.name} cannot be chosen: {record.trouble}" for record in robots if not record.embodiment]


def in_use(record: ResourceRecord) -> ResourceRecord:
    """The record, LEASED where a run of this computer has taken the robot or GPU, or a driver process drives it."""
    claim = claim_on(record)
    if not claim or record.health is not Health.READY:
        return record
    try:
        owner = _claim_lock(claim).owner() or driver_of(claim)
    except SpecError:  # found by a probe, under a name that no robot of a run can have
        return record
    except OSError as error:  # the folder of locks is another user's, say
        trouble = f"whether it is used from here cannot be seen: {error}"
        return msgspec.structs.replace(record, trouble=record.trouble or trouble)
    return taken(record, owner) if owner else record


def _claim_lock(claim: str, holder: str = "") -> MachineLock:
    """Taken while a run of this user has the robot or GPU. Raises SpecError: not a name for a lock."""
    require_name(claim)
    return MachineLock(shared_file(f"chosen.{os.getuid()}.{claim}.lock"), holder, claim)


def claim_on(record: ResourceRecord) -> str:
    """The name under which a run takes the robot, or the GPU of its own computer, from others; empty for what is
    shared, and for GPUs where whoever has started this program has said himself which it is to see."""
    if record.kind is Kind.ROBOT:
        return record.name
    return record.labels.get(UUID, "") if record.kind is Kind.GPU and VISIBLE not in os.environ else ""


def taken(record: ResourceRecord, owner: str) -> ResourceRecord:
    """The record, LEASED by `owner`."""
    return msgspec.structs.replace(record, health=Health.LEASED, note=f"by {owner}")


def with_cluster(
    robots: Sequence[RobotConfig], found: Iterable[ResourceRecord], cluster: Sequence[ResourceRecord], beside: str
) -> list[ResourceRecord]:
    """What there is for a run on a cluster: what the cluster has, and of what was `found` here the robots.

    Of a robot that a node has, the cluster says where it is and who uses it, and the run's file what it is: one that
    cannot be built here can be in no run that begins here. The file's labels go before the node's. Of those that no
    node has, a simulated one runs on the node `beside` the store. Any other that the file lists is not there.
    """
    there = {record.name: record for record in cluster}
    at_store = there[beside].labels if beside in there else {}
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
            there[record.name] = msgspec.structs.replace(record, node=beside, labels=labels)
        elif record.name in simulated:
            there[record.name] = msgspec.structs.replace(
                record, node="", health=Health.LOST, trouble=NOBODY_HAS_IT, note=""
            )
    return list(there.values())


class Claims:
    """The robots and GPUs of this computer that a run has taken for as long as it lives: no other run gets them.

    Its driver processes lock the robots besides, each when it starts. A claim ends with this process, however it ends.
    """

    def __init__(self, holder: str) -> None:
        """`holder` says to others whose they are."""
        self._holder = holder
        self._locks: list[MachineLock] = []

    def take(self, names: Iterable[str]) -> bool:
        """All of what has these names (`claim_on`), or none: False where another run has some. Never waits."""
        locks = [_claim_lock(name, self._holder) for name in sorted(names)]
        try:
            for lock in locks:
                lock.acquire()
        except LeaseHeld:
            for lock in locks:
                lock.release()
            return False
        self._locks += locks
        return True

    def take_each(self, robots: Iterable[str]) -> None:
        """Those of `robots` that nobody has; for a run whose driver processes wait for the others, each for its own."""
        for robot in robots:
            if not driver_of(robot):
                self.take([robot])

    def release(self) -> None:
        """Gives all of them back; harmless where there are none."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()


class Patience:
    """Tells for what a run waits, once each time that it changes, and lets some time pass before the next try."""

    def __init__(self, run: str, say: Callable[[str], None]) -> None:
        self._run, self._say, self._said = run, say, ""

    def wait(self, why: str) -> None:
        """Blocks for `AGAIN_S`. Nothing is to be held meanwhile."""
        if why != self._said:
            self._said = why
            self._say(f"{self._run} waits, and holds nothing meanwhile. {why}")
        time.sleep(AGAIN_S)


def _passed_over(requests: Sequence[Request], strange: Iterable[ResourceRecord]) -> list[str]:
    """A sentence about robots that would do, were they listed."""
    asked = [request for request in requests if request.kind is Kind.ROBOT]
    ready = (record for record in strange if record.health is Health.READY)
    names = sorted(record.name for record in ready if any(request.admits(record) for request in asked))
    if not names:
        return []
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return [f"{listed(names)} {verb} free too, but not listed under robots: nothing says what drives {them}."]


def _orders(runs: Path) -> dict[str, tuple[Order, str]]:
    """The orders that stand in the run folders in `runs`, each with its run's name, by robot; the gravest counts.

    Raises RegistryError: those of a run cannot be read, so that nobody knows what they forbid.
    """
    found: dict[str, tuple[Order, str]] = {}
    for path in sorted(runs.glob("*/orders.json")):
        if path.parent.is_symlink():
            continue
        for name, order in OrderBook(path).read().orders.items():
            if name not in found or order.health is Health.QUARANTINED:
                found[name] = (order, path.parent.name)
    return found


def _as_ordered(record: ResourceRecord, orders: Mapping[str, tuple[Order, str]]) -> ResourceRecord:
    if record.kind is not Kind.ROBOT or record.name not in orders:
        return record
    order, run = orders[record.name]
    if record.health is Health.LOST and order.health is not Health.QUARANTINED:
        return record
    return msgspec.structs.replace(record, health=order.health, note=f"{order.note}, in run {run}")


def _sited(records: Sequence[ResourceRecord]) -> list[ResourceRecord]:
    """Where a computer's robots say their site and agree, all of the computer that says no other is at that site."""
    said: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.kind is Kind.ROBOT and record.node and "site" in record.labels:
            said[record.node].add(record.labels["site"])
    agreed = {node: {"site": min(sites)} for node, sites in said.items() if len(sites) == 1}
    return [
        msgspec.structs.replace(record, labels={**agreed.get(record.node, {}), **record.labels}) for record in records
    ]
