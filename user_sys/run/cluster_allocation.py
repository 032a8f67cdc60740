"""Reserves a run's robots and compute on a Ray cluster, both or neither.

One placement group holds the robots that the cluster's nodes declare. Further placement groups hold the compute of the
learners and of the policy server. All of them end with the launcher. A simulated robot that no node declares runs on
the gateway's node. If a node with compute is lost, that compute is released and requested again; the robots are not
affected.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from hal.errors import PlacementError, StateError
from hal.placement import Assigned, PlacementPlan, format_list
from hal.ray_cluster import PlacementSlot, RayCluster, Reservation, connect_cluster
from hal.ray_nodes import ROBOT_RESOURCE_PREFIX, make_bundles
from hal.resource import UUID_LABEL, Health, Kind, ResourceRecord, ResourceRequest
from user_sys.compose import resource_probes
from user_sys.run.allocation import (
    TAKEN_BY_ANOTHER_RUN,
    Allocation,
    LocalAllocation,
    Use,
    offered_resources,
    plan_run,
    select_robots,
    store_node_names,
    unreserved_gpus,
)
from user_sys.run.config import RunConfig
from user_sys.run.topology import LOOPBACK, ProcessSlot, cluster_slots
from user_sys.tunnel.limits import is_loopback


class ClusterAllocation(Allocation):
    """A run's robots and compute on a Ray cluster. `close` leaves the cluster.

    Attributes:
        slot_from_robot: of the robots that nodes declare.
    """

    def __init__(self, cluster: RayCluster, config: RunConfig, run: str, folder: Path) -> None:
        """Args:
            folder: the folder of run folders, which each node with robots or compute must see.

        Raises:
            ConfigError: a robot cannot be built, and the run does not select its robots.
        """
        probes = resource_probes(config.robots, lenient=config.selects_robots)
        super().__init__(
            config, run, {name: each for name, each in probes.items() if name == "config"}, folder.resolve()
        )
        self._cluster, self._folder = cluster, folder.resolve()
        self._robot_requests = _robot_requests(config, cluster)
        self.slot_from_robot: dict[str, PlacementSlot] = {}
        self._robots: Reservation | None = None
        self._compute: dict[Use, Reservation] = {}  # each can be lost and reserved again by itself
        self._near: tuple[ResourceRequest, ...] = ()  # the assigned robots by name, to colocate compute with them

    def close(self) -> None:
        try:
            self._cluster.shutdown()
        finally:
            self._unlock()

    def connect(self, log_dir: Path) -> RayCluster:
        return self._cluster

    def learner_slots(self, number: int, processes: int) -> tuple[ProcessSlot, ...]:
        if not self._requests["learner"]:
            return tuple(ProcessSlot(gpu_index=rank) for rank in range(processes))
        return cluster_slots(self._compute_slots("learner"), number, processes, self._cluster.address_from_node())

    def policy_slot(self) -> ProcessSlot | None:
        if not self._requests["policy"]:
            address = self._cluster.address if self.robots_on_other_nodes()[0] else LOOPBACK
            return ProcessSlot(address=address, gpus=self._own_gpus_here() or unreserved_gpus(self._gpus_in_use()))
        for slot in self._compute_slots("policy"):
            address = self._cluster.address_from_node().get(slot.node, LOOPBACK)  # loopback if the node has just left
            return ProcessSlot(placement=slot, address=address)
        return None

    def _own_gpus_here(self) -> tuple[str, ...]:
        """Those of the run's learners on this computer."""
        slots = self._compute_slots("learner")
        return next((slot.gpu_uuids for slot in slots if slot.gpu_uuids and self._is_here(slot.node)), ())

    def _gpus_in_use(self) -> set[str]:
        records = self._cluster.records()
        return {record.labels.get(UUID_LABEL, "") for record in records if record.health is not Health.READY}

    def launcher_address(self, slot: ProcessSlot) -> str:
        is_here = slot.placement is None or self._is_here(slot.placement.node)
        return LOOPBACK if is_here else self._cluster.address

    def robots_on_other_nodes(self) -> tuple[list[str], str]:
        far = [name for name, slot in self.slot_from_robot.items() if not self._is_here(slot.node)]
        return far, self._cluster.address

    def release_lost(self, use: Use) -> tuple[str, ...]:
        lost = self._cluster.lost_nodes(self._compute[use]) if use in self._compute else ()
        if lost:
            self._release_compute(use)
        return lost

    def reacquire(self, use: Use) -> str | None:
        if not self._requests[use] or use in self._compute:
            return None
        near = [request for request in self._near if request.colocate]
        try:
            found = self._plan_requests((*near, *self._requests[use]))
        except StateError as error:  # the overrides cannot be read
            return str(error)
        return found.reason if found.assigned is None else self._claim_compute(use, found.assigned[len(near) :])

    def release(self) -> None:
        """Ends all reservations and the processes in them."""
        for use in tuple(self._compute):
            self._release_compute(use)
        if self._robots is not None:
            self._cluster.release(self._robots)
        self._robots, self.slot_from_robot, self._near = None, {}, ()
        self._unlock()

    def _plan(self, *, assume_unused: bool = False) -> PlacementPlan:
        requests = (*self._robot_requests, *self._requests["learner"], *self._requests["policy"])
        return self._plan_requests(requests, assume_unused=assume_unused)

    def _plan_requests(self, requests: Sequence[ResourceRequest], *, assume_unused: bool = False) -> PlacementPlan:
        """Matches `requests`, near the store if possible."""
        records = offered_resources(
            self._configured, self._found.records, self._cluster, runs=self._folder, assume_unused=assume_unused
        )
        usable = [self._as_usable(record) for record in records]
        return plan_run(self._configured, requests, usable, store_node_names(self._cluster))

    def _as_usable(self, record: ResourceRecord) -> ResourceRecord:
        """The record as the run can use it: its own robots are READY, what its processes cannot use is LOST."""
        if record.kind is Kind.ROBOT and any(request.name == record.name for request in self._near):
            return msgspec.structs.replace(record, health=Health.READY)
        why = self._unreachable_reason(record) if record.health is not Health.LOST else ""
        return msgspec.structs.replace(record, health=Health.LOST, trouble=why, note="") if why else record

    def _unreachable_reason(self, record: ResourceRecord) -> str:
        """Why a process on the record's node could not reach the gateway, or an empty text."""
        endpoint = self._configured.gateway.endpoint
        is_reachable = not is_loopback(endpoint) or not record.node or self._is_here(record.node)
        return "" if is_reachable else f"cannot reach {endpoint}: give --gateway.endpoint=tcp://0.0.0.0:5555"

    def _is_here(self, node: str) -> bool:
        """Whether the node is on this computer. Host names do not tell: cloned computers may have the same."""
        address = self._cluster.address_from_node().get(node, "")
        return address == self._cluster.address or address.startswith("127.")

    def _claim(self, assigned: Assigned) -> str:
        robots, learners = len(self._robot_requests), len(self._requests["learner"])
        why = self._claim_robots([record for records in assigned[:robots] for record in records])
        why = why or self._claim_compute("learner", assigned[robots : robots + learners])
        why = why or self._claim_compute("policy", assigned[robots + learners :])
        if why:
            self.release()
            return why
        self._require_folder()
        self._near = tuple(
            ResourceRequest(kind=r.kind, name=r.name, colocate=request.colocate, colocate_by=request.colocate_by)
            for request, records in zip(self._robot_requests, assigned, strict=False)
            for r in records
        )
        self.config = select_robots(self._configured, [request.name for request in self._near])
        return ""

    def _claim_robots(self, chosen: Sequence[ResourceRecord]) -> str:
        """The reason why they cannot be reserved, or an empty text."""
        declared = [r for r in chosen if self._cluster.has_resource(f"{ROBOT_RESOURCE_PREFIX}{r.name}")]
        names = [record.name for record in declared]
        if not self._lock({record.name for record in chosen}.difference(names)):
            return TAKEN_BY_ANOTHER_RUN
        if not names:
            return ""
        requests = [ResourceRequest(kind=Kind.ROBOT, name=name) for name in names]
        self._robots = self._cluster.reserve(self._owner, make_bundles(requests, [(r,) for r in declared], {}))
        if self._robots is None:
            return TAKEN_BY_ANOTHER_RUN
        self.slot_from_robot = dict(zip(names, self._robots.slots(), strict=True))
        return ""

    def _claim_compute(self, use: Use, assigned: Assigned) -> str:
        """The reason why it cannot be reserved, or an empty text."""
        if not self._requests[use]:
            return ""
        addresses = self._cluster.address_from_node()
        if gone := sorted({record.node for records in assigned for record in records} - addresses.keys()):
            return f"{format_list(gone)} has just left the cluster"
        reservation = self._cluster.reserve(self._owner, make_bundles(self._requests[use], assigned, addresses))
        if reservation is None:
            return TAKEN_BY_ANOTHER_RUN
        self._compute[use] = reservation
        return ""

    def _require_folder(self) -> None:
        """Reads a token in the folder of runs, or in its nearest existing parent, on the other computers of the run.

        Raises:
            PlacementError: one of them does not see the folder.
        """
        compute, local = [each.slots() for each in self._compute.values()], store_node_names(self._cluster)
        slots = itertools.chain(self.slot_from_robot.values(), *compute)
        far = {slot.node: slot for slot in slots if slot.node not in local}
        if not far:
            return
        parent = next(each for each in (self._folder, *self._folder.parents) if each.is_dir())
        token = secrets.token_hex(16)
        file = parent / f".seen-{token[:8]}"
        try:
            file.write_text(token)
            texts = self._cluster.read_remote(tuple(far.values()), file)
        finally:
            file.unlink(missing_ok=True)
        if blind := sorted(node for node, text in zip(far, texts, strict=True) if text != token):
            raise PlacementError(
                f"{format_list(blind)} does not see {self._folder}, which must be on storage that both computers have; "
                "or exclude it by labels"
            )

    def _compute_slots(self, use: Use) -> tuple[PlacementSlot, ...]:
        """Where processes start, those on the store's node first; empty while none is reserved."""
        slots = self._compute[use].slots() if use in self._compute else ()
        chosen, local = [slot for slot in slots if slot.bundle.is_gpu] or slots, store_node_names(self._cluster)
        return tuple(sorted(chosen, key=lambda slot: slot.node not in local))

    def _release_compute(self, use: Use) -> None:
        self._cluster.release(self._compute.pop(use))


def _robot_requests(config: RunConfig, cluster: RayCluster) -> tuple[ResourceRequest, ...]:
    """A run that drives all of its robots requests no simulated robot that no node declares: it runs here."""
    local = {
        robot.name
        for robot in config.robots
        if robot.simulated and not cluster.has_resource(f"{ROBOT_RESOURCE_PREFIX}{robot.name}")
    }
    return tuple(r for r in config.robot_requests() if config.selects_robots or r.name not in local)


@contextmanager
def acquire_resources(config: RunConfig, home: Path, console: Console) -> Iterator[Allocation]:
    """Acquires the run's resources, on this computer or on the cluster of `config.ray`, for the context's duration.

    A resumed run gets the robots that it had, since the configuration in its folder lists only these.

    Raises:
        PlacementError: the resources do not exist, or a computer with some of them does not see the folder of runs.
    """

    def print_line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    allocation: Allocation
    if config.ray.address:
        allocation = ClusterAllocation(connect_cluster(config.ray.address), config, home.name, home.parent)
    else:
        allocation = LocalAllocation(config, home.name, home.parent)
    with allocation:
        allocation.acquire(print_line)
        yield allocation
