"""Reserves a run's robots and compute on a Ray cluster, both or neither.

One placement group holds the robots that the cluster's nodes declare. Each of these robots is also locked on its own
computer against programs outside the cluster. Further placement groups hold the compute of the learners and of the
policy server. All of them end with the launcher. A simulated robot that no node declares runs on the gateway's node.
If a node with compute is lost, that compute is released and requested again; the robots are not affected.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from hal.errors import PlacementError, StateError
from hal.placement import Assigned, PlacementPlan, format_list
from hal.ray_cluster import PlacementSlot, RayCluster, RemoteRead, Reservation, connect_cluster
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

FOLDER_CHECK_TIMEOUT_S = 120.0  # a process starts for the check, on a computer that may be busy
UNFIT_EXPIRY_S = 60.0  # then an unfit computer is checked again: its storage may have been mounted


@dataclass(eq=False)
class _Share:
    """Compute for one use, in a reservation of its own, so that it can be lost and reserved again by itself.

    Attributes:
        checks: pending reads of the token file, by node, which tell whether the node sees the folder of runs.
        deadline_s: when a check without an answer counts as failed.
        slots: where processes start, those on the store's node first; empty until all checks have passed.
    """

    reservation: Reservation | None = None
    checks: dict[str, RemoteRead] = field(default_factory=dict)
    deadline_s: float = 0.0
    slots: tuple[PlacementSlot, ...] = ()


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
        self._shares: dict[Use, _Share] = {"learner": _Share(), "policy": _Share()}
        self._near: tuple[ResourceRequest, ...] = ()  # the assigned robots by name, to colocate compute with them
        self._unlocked: dict[str, tuple[Health, str]] = {}  # robots that could not be locked; see `lock_robots`
        self._unfit: dict[str, tuple[str, float]] = {}  # nodes that cannot run a process: why, and until when
        self._token = secrets.token_hex(16)
        self._token_file: Path | None = None

    def close(self) -> None:
        try:
            self._cluster.shutdown()
        finally:
            self._unlock()
            if self._token_file is not None:
                self._token_file.unlink(missing_ok=True)

    def connect(self, log_dir: Path) -> RayCluster:
        return self._cluster

    def learner_slots(self, number: int, processes: int) -> tuple[ProcessSlot, ...]:
        if not self._requests["learner"]:
            return tuple(ProcessSlot(gpu_index=rank) for rank in range(processes))
        return cluster_slots(self._shares["learner"].slots, number, processes, self._cluster.address_from_node())

    def policy_slot(self) -> ProcessSlot | None:
        if not self._requests["policy"]:
            address = self._cluster.address if self.robots_on_other_nodes()[0] else LOOPBACK
            return ProcessSlot(address=address, gpus=self._own_gpus_here() or unreserved_gpus(self._gpus_in_use()))
        for slot in self._shares["policy"].slots:
            address = self._cluster.address_from_node().get(slot.node, LOOPBACK)  # loopback if the node has just left
            return ProcessSlot(placement=slot, address=address)
        return None

    def _own_gpus_here(self) -> tuple[str, ...]:
        """Those of the run's learners on this computer."""
        slots = self._shares["learner"].slots
        return next((slot.gpu_uuids for slot in slots if slot.gpu_uuids and self._is_here(slot.node)), ())

    def _gpus_in_use(self) -> set[str]:
        records = self._cluster.records()
        return {record.labels.get(UUID_LABEL, "") for record in records if record.health is not Health.READY}

    def locked_robots(self) -> frozenset[str]:
        return frozenset(self.slot_from_robot)

    def launcher_address(self, slot: ProcessSlot) -> str:
        is_here = slot.placement is None or self._is_here(slot.placement.node)
        return LOOPBACK if is_here else self._cluster.address

    def robots_on_other_nodes(self) -> tuple[list[str], str]:
        far = [name for name, slot in self.slot_from_robot.items() if not self._is_here(slot.node)]
        return far, self._cluster.address

    def release_lost(self, use: Use) -> tuple[str, ...]:
        share = self._shares[use]
        lost = self._cluster.lost_nodes(share.reservation) if share.reservation else ()
        if lost:
            self._unfit.clear()
            self._release_share(use)
        return lost

    def reacquire(self, use: Use) -> str | None:
        share = self._shares[use]
        if not self._requests[use] or share.slots:
            return None
        try:
            while True:
                self._plan_again, why = False, self._try_share(use)
                if not self._plan_again:
                    return why
        except (PlacementError, StateError) as error:  # StateError: the overrides of some run cannot be read
            return str(error)
        except OSError as error:  # such as a full disk, which must not end the run
            self._release_share(use)
            return f"cannot write in {self._folder}: {error.strerror or error}"

    def release(self) -> None:
        """Ends all reservations and the processes in them."""
        for use in self._shares:
            self._release_share(use)
        self._release_robots()
        self._near = ()

    def _try_share(self, use: Use) -> str:
        if self._shares[use].checks:
            return self._finish_checks(use, 0.0)
        near = [request for request in self._near if request.colocate]
        found = self._plan_requests((*near, *self._requests[use]))
        return found.reason if found.assigned is None else self._claim_share(use, found.assigned[len(near) :], 0.0)

    def _discover(self) -> None:
        super()._discover()
        self._unlocked.clear()

    def _plan(self, *, assume_unused: bool = False) -> PlacementPlan:
        requests = (*self._robot_requests, *self._requests["learner"], *self._requests["policy"])
        return self._plan_requests(requests, assume_unused=assume_unused)

    def _plan_requests(self, requests: Sequence[ResourceRequest], *, assume_unused: bool = False) -> PlacementPlan:
        """Matches `requests`, near the store if possible."""
        records = offered_resources(
            self._configured, self._found.records, self._cluster, runs=self._folder, assume_unused=assume_unused
        )
        usable = [self._as_usable(record, assume_unused) for record in records]
        return plan_run(self._configured, requests, usable, store_node_names(self._cluster))

    def _as_usable(self, record: ResourceRecord, assume_unused: bool) -> ResourceRecord:
        """The record as the run can use it: its own robots are READY; others may be LEASED or LOST."""
        if record.kind is Kind.ROBOT:
            if record.name in self._unlocked and not assume_unused:
                health, why = self._unlocked[record.name]
                note, trouble = ("", f"its computer {record.node} {why}") if health is Health.LOST else (why, "")
                return msgspec.structs.replace(record, health=health, note=note, trouble=trouble)
            if any(request.name == record.name for request in self._near):
                return msgspec.structs.replace(record, health=Health.READY)
        why = self._unreachable_reason(record) if record.health is not Health.LOST else ""
        if record.node in self._unfit:
            text, until_s = self._unfit[record.node]
            text = f"its computer {record.node} {text}" if record.kind is Kind.ROBOT else text
            why = text if time.monotonic() < until_s else why
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
        why = why or self._claim_share("learner", assigned[robots : robots + learners], FOLDER_CHECK_TIMEOUT_S)
        why = why or self._claim_share("policy", assigned[robots + learners :], FOLDER_CHECK_TIMEOUT_S)
        if why:
            self.release()
            return why
        self._near = tuple(
            ResourceRequest(kind=r.kind, name=r.name, colocate=request.colocate, colocate_by=request.colocate_by)
            for request, records in zip(self._robot_requests, assigned, strict=False)
            for r in records
        )
        self.config = select_robots(self._configured, [request.name for request in self._near])
        return ""

    def _claim_robots(self, chosen: Sequence[ResourceRecord]) -> str:
        """The reason why they cannot be reserved and locked on their computers, or an empty text."""
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
        checks = self._start_checks(self._robots)
        simulated = [robot.name for robot in self._configured.robots if robot.simulated]
        refused = self._cluster.lock_robots(self.slot_from_robot, self._owner, simulated)
        if refused:
            self._unlocked |= refused
            self._plan_again = True
            return f"{format_list(sorted(refused))} cannot be locked"
        blind = [node for node, read in checks.items() if read(FOLDER_CHECK_TIMEOUT_S) != self._token]
        return self._refuse(blind) if blind else ""

    def _release_robots(self) -> None:
        self._cluster.release_robot_locks()
        if self._robots is not None:
            self._cluster.release(self._robots)
        self._robots, self.slot_from_robot = None, {}
        self._unlock()

    def _claim_share(self, use: Use, assigned: Assigned, wait_s: float) -> str:
        """Reserves the compute. Returns the reason if that fails, or is not known within `wait_s`."""
        if not self._requests[use]:
            return ""
        share, addresses = self._shares[use], self._cluster.address_from_node()
        if gone := sorted({record.node for records in assigned for record in records} - addresses.keys()):
            return f"{format_list(gone)} has just left the cluster"
        share.reservation = self._cluster.reserve(self._owner, make_bundles(self._requests[use], assigned, addresses))
        if share.reservation is None:
            return TAKEN_BY_ANOTHER_RUN
        share.checks = self._start_checks(share.reservation)
        share.deadline_s = time.monotonic() + FOLDER_CHECK_TIMEOUT_S
        return self._finish_checks(use, wait_s)

    def _start_checks(self, reservation: Reservation) -> dict[str, RemoteRead]:
        """Starts to read the token file on the other computers of the reservation; see `_Share.checks`."""
        local = store_node_names(self._cluster)
        far = {slot.node: slot for slot in reservation.slots() if slot.node not in local}
        return {node: self._cluster.read_remote(slot, self._written_token()) for node, slot in far.items()}

    def _written_token(self) -> Path:
        """The file that shows whether a node sees the folder of runs, or its nearest existing parent."""
        if self._token_file is None:
            parent = next(f for f in (self._folder, *self._folder.parents) if f.is_dir())
            self._token_file = parent / f".seen-{self._token[:8]}"
            self._token_file.write_text(self._token)
        return self._token_file

    def _finish_checks(self, use: Use, wait_s: float) -> str:
        """Waits up to `wait_s` for the checks; if all pass, the share gets its slots. Returns why it has none yet."""
        share = self._shares[use]
        assert share.reservation is not None
        left_s = share.deadline_s - time.monotonic()
        texts = {node: read(max(0.0, min(wait_s, left_s))) for node, read in share.checks.items()}
        if left_s > 0 and (slow := [node for node, text in texts.items() if text is None]):
            return f"it is not known yet whether {format_list(sorted(slow), 'or')} sees {self._folder}"
        if blind := [node for node, text in texts.items() if text != self._token]:
            self._release_share(use)
            return self._refuse(blind)
        share.checks = {}
        slots, local = share.reservation.slots(), store_node_names(self._cluster)
        chosen = [slot for slot in slots if slot.bundle.is_gpu] or slots
        share.slots = tuple(sorted(chosen, key=lambda slot: slot.node not in local))
        return ""

    def _refuse(self, blind: Sequence[str]) -> str:
        """Uses none of these nodes, which do not see the folder of runs. Returns the reason.

        Raises:
            PlacementError: the run cannot do without them.
        """
        why = f"does not see {self._folder}, which must be on storage that both computers have"
        self._unfit |= dict.fromkeys(blind, (why, time.monotonic() + UNFIT_EXPIRY_S))
        self._plan(assume_unused=True).require()
        self._plan_again = True
        return f"{format_list(sorted(blind))} {why}"

    def _release_share(self, use: Use) -> None:
        if (reservation := self._shares[use].reservation) is not None:
            self._cluster.release(reservation)
        self._shares[use] = _Share()


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
        PlacementError: the resources do not exist.
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
