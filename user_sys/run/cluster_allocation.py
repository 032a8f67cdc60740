"""Reserves a run's robots and compute on a Ray cluster, both or neither.

One placement group holds the robots that the cluster's nodes declare. Each of these robots is also locked on its own
computer against programs outside the cluster. Further placement groups hold the compute of the learners and of the
policy server. All of them end with the launcher. A simulated robot that no node declares runs on the gateway's node.
If a node with compute is lost, that compute is released and requested again; the robots are not affected.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console

from hal.discovery import discover
from hal.errors import PlacementError
from hal.placement import Placement, format_list
from hal.ray_cluster import PlacementSlot, RayCluster, Reservation, connect_cluster
from hal.ray_nodes import ROBOT_RESOURCE_PREFIX, make_bundles
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest, local_node
from user_sys.compose import resource_probes
from user_sys.errors import RunError
from user_sys.run.allocation import (
    TAKEN_BY_ANOTHER_RUN,
    LocalAllocation,
    LocalLocks,
    RetryWait,
    available_resources,
    leased_by,
    place_run,
    select_robots,
    store_node_names,
    unbuildable_robots,
)
from user_sys.run.config import RunConfig
from user_sys.run.topology import LOOPBACK
from user_sys.tunnel.endpoint import is_loopback

log = logging.getLogger(__name__)

FOLDER_CHECK_TIMEOUT_S = 120.0  # a process starts for the check, on a computer that may be busy
UNFIT_EXPIRY_S = 60.0  # then an unfit computer is checked again: its storage may have been mounted

RemoteRead = Callable[[float], str | None]
"""Waits up to so many seconds for a file's text on another computer. Empty: no such file. None: no answer yet."""


class SharedFolderCheck:
    """Checks whether another computer sees a folder of this one: writes a token file that the other computer reads.

    The check starts with the constructor; `close` removes the file. One thread calls it.
    """

    def __init__(
        self, folder: Path, read_remote: Callable[[Path], RemoteRead], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
            folder: if it does not exist yet, its nearest existing parent is checked.
            read_remote: starts to read a file on the other computer, without blocking.
            clock: monotonic seconds.

        Raises:
            OSError: the token file cannot be written.
        """
        self._clock, self._deadline_s = clock, clock() + FOLDER_CHECK_TIMEOUT_S
        self._token = secrets.token_hex(16)
        self._file = next(f for f in (folder, *folder.parents) if f.is_dir()) / f".seen-{self._token[:8]}"
        self._file.write_text(self._token)
        try:
            self._read = read_remote(self._file)
        except BaseException:
            self.close()
            raise

    def is_visible(self, wait_s: float) -> bool | None:
        """Blocks for at most `wait_s`. None: no answer yet. After `FOLDER_CHECK_TIMEOUT_S` without answer: False."""
        left_s = self._deadline_s - self._clock()
        text = self._read(max(0.0, min(wait_s, left_s)))
        return None if text is None and self._clock() < self._deadline_s else text == self._token

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


@dataclass(frozen=True)
class ResourceRequests:
    """What a run requests of the cluster: robots, compute for its learners, compute for its policy server."""

    robots: tuple[ResourceRequest, ...]
    compute: tuple[ResourceRequest, ...]
    policy: tuple[ResourceRequest, ...] = ()

    @property
    def all(self) -> tuple[ResourceRequest, ...]:
        return (*self.robots, *self.compute, *self.policy)


@dataclass(eq=False)
class ComputeShare:
    """Compute for one use, in a reservation of its own, so that it can be lost and reserved again by itself.

    Attributes:
        folder_checks: pending checks, by node, whether the reserved nodes see the run's folder.
        slots: where processes start; empty until all checks have passed.
    """

    requests: tuple[ResourceRequest, ...]
    reservation: Reservation | None = None
    folder_checks: dict[str, SharedFolderCheck] = field(default_factory=dict)
    slots: tuple[PlacementSlot, ...] = ()

    def close_checks(self) -> None:
        for check in self.folder_checks.values():
            check.close()
        self.folder_checks.clear()


def resource_requests(config: RunConfig, is_declared: Callable[[str], bool]) -> ResourceRequests:
    """The run's requests. If it drives all of its robots, simulated ones that no node declares are left out.

    Args:
        is_declared: whether a node of the cluster declares a resource.
    """
    local = {
        robot.name
        for robot in config.robots
        if robot.simulated and not is_declared(f"{ROBOT_RESOURCE_PREFIX}{robot.name}")
    }
    robots = config.robot_requests()
    if not config.selects_robots:
        robots = tuple(request for request in robots if request.name not in local)
    return ResourceRequests(robots, config.compute_requests(), config.policy_requests())


class _RobotReservation:
    """The robots that a run holds: reserved on the cluster, locked on their computers. One thread calls it.

    Attributes:
        slot_from_robot: of the robots that nodes declare; their processes start in these slots.
        driven_elsewhere: robots that a program outside the cluster drives, with its name.
        released: robots released a moment ago, which Ray counts as in use for a while.
    """

    def __init__(self, cluster: RayCluster, owner: str) -> None:
        self._cluster, self._owner = cluster, owner
        self._locks = LocalLocks(owner)
        self._reservation: Reservation | None = None
        self.slot_from_robot: dict[str, PlacementSlot] = {}
        self.driven_elsewhere: dict[str, str] = {}
        self.released: set[str] = set()

    def forget_attempt(self) -> None:
        """Clears what the last attempt has found out."""
        self.driven_elsewhere.clear()
        self.released.clear()

    def reserve(self, chosen: Sequence[ResourceRecord]) -> str:
        """Reserves all of the `chosen` robots, or none. Returns the reason for none, else an empty text."""
        names = [
            record.name for record in chosen if self._cluster.has_resource(f"{ROBOT_RESOURCE_PREFIX}{record.name}")
        ]
        if not self._locks.acquire({record.name for record in chosen}.difference(names)):
            return TAKEN_BY_ANOTHER_RUN
        if not names:
            return ""
        requests = [ResourceRequest(kind=Kind.ROBOT, name=name) for name in names]
        records = [(record,) for record in chosen if record.name in names]
        self._reservation = self._cluster.reserve(self._owner, make_bundles(requests, records, {}))
        if self._reservation is None:
            self.release()
            return TAKEN_BY_ANOTHER_RUN
        self.slot_from_robot = dict(zip(names, self._reservation.slots(), strict=True))
        return ""

    def lock(self, simulated: Sequence[str]) -> str:
        """Locks the reserved robots on their computers. Returns which are driven elsewhere; then none is held."""
        driven = self._cluster.lock_robots(self.slot_from_robot, self._owner, simulated)
        if driven:
            self.driven_elsewhere |= driven
            self.release()
        return " ".join(f"{robot} is driven by {owner}." for robot, owner in sorted(driven.items()))

    def lock_free(self, robots: Sequence[str]) -> None:
        """Locks those of `robots` on this computer that no program drives."""
        self._locks.acquire_free(robot for robot in robots if robot not in self.slot_from_robot)

    def release(self) -> None:
        self._cluster.release_robot_locks()
        if self._reservation is not None:
            self._cluster.release(self._reservation)
        self.released |= self.slot_from_robot.keys()
        self._reservation, self.slot_from_robot = None, {}
        self._locks.release()

    def close(self) -> None:
        """Releases the local locks; the cluster's reservations end with the connection to it."""
        self._locks.release()


class ClusterAllocation:
    """A run's robots and compute on a Ray cluster. One thread calls it; leaving the context leaves the cluster.

    Attributes:
        config: the run's configuration; after `acquire`, with only the robots that the run drives.
        learner_share: compute of the learners; slots on the store's node come first.
        policy_share: compute of the policy server.
    """

    def __init__(self, cluster: RayCluster, config: RunConfig, run: str, folder: Path) -> None:
        """Args:
            folder: the folder of run folders, which each node with compute must see.

        Raises:
            ConfigError: a robot cannot be built, and the run does not select its robots.
        """
        self.cluster, self.config = cluster, config
        self._configured, self._owner, self._folder = config, f"run {run}", folder.resolve()
        self._requests = resource_requests(config, cluster.has_resource)
        self.learner_share = ComputeShare(self._requests.compute)
        self.policy_share = ComputeShare(self._requests.policy)
        probes = resource_probes(config.robots, lenient=config.selects_robots)
        self._probes = {name: probe for name, probe in probes.items() if name == "config"}
        self._records: Sequence[ResourceRecord] = ()  # of the latest discovery of the run's robots
        self._robots = _RobotReservation(cluster, self._owner)
        self._owned: tuple[ResourceRequest, ...] = ()  # the reserved robots, and resources to colocate with them
        self._unfit: dict[str, str] = {}  # nodes that cannot run a learner, with the reason
        self._unfit_expires_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.cluster.shutdown()
        finally:
            self._robots.close()
            for share in (self.learner_share, self.policy_share):
                share.close_checks()

    @property
    def slot_from_robot(self) -> dict[str, PlacementSlot]:
        """Where the processes of the robots start that nodes declare."""
        return self._robots.slot_from_robot

    @property
    def learner_slots(self) -> tuple[PlacementSlot, ...]:
        """Empty if the run requests no compute, or has lost it."""
        return self.learner_share.slots

    @property
    def requests_compute(self) -> bool:
        """Whether learners start in reserved slots only."""
        return bool(self.learner_share.requests)

    def launcher_address(self, slot: PlacementSlot) -> str:
        """The address at which a process in `slot` reaches this computer."""
        local = self.cluster.hostname_from_node().get(slot.node) == local_node()
        return LOOPBACK if local else self.cluster.address

    def policy_listen_address(self) -> str:
        """The address of its own computer on which the policy server listens, reachable by all of the run's robots."""
        for slot in self.policy_share.slots:
            return self.cluster.address_from_node().get(slot.node, LOOPBACK)  # loopback if the node has just left
        return self.cluster.address if self.robots_on_other_nodes()[0] else LOOPBACK

    def robots_on_other_nodes(self) -> tuple[list[str], str]:
        """The robots that other computers drive, and the address at which these reach this computer."""
        far = [name for name, slot in self.slot_from_robot.items() if self.launcher_address(slot) != LOOPBACK]
        return far, self.cluster.address

    def acquire(self, print_line: Callable[[str], None]) -> None:
        """Blocks until the run has its robots and its compute. Prints the reason for waiting each time it changes.

        Raises:
            PlacementError: the cluster could not meet the requests even if it were idle.
            RunError: a node of the cluster cannot reach the gateway.
        """
        found = discover(self._probes)
        for text in unbuildable_robots(found):
            print_line(text)
        self._records = found.records
        wait, unfit = RetryWait(self._owner, print_line), -1
        while True:
            if len(self._unfit) != unfit:
                unfit = len(self._unfit)
                self._place(self._requests.all, assume_unused=True)
            if not (why := self._try_all()):
                break
            wait.wait(why)
        if not self.config.selects_robots:
            self._robots.lock_free([robot.name for robot in self.config.robots])

    def acquire_share(self, share: ComputeShare) -> str:
        """Tries to reserve the compute of one use while the run's robots work.

        It does not wait for the folder checks of reserved nodes; the next call continues.

        Returns:
            The reason why the compute is not reserved (yet), or an empty text.
        """
        if time.monotonic() >= self._unfit_expires_s:
            self._unfit_expires_s = time.monotonic() + UNFIT_EXPIRY_S
            self._unfit.clear()
        while True:
            unfit, why = len(self._unfit), self._try_share(share)
            if len(self._unfit) == unfit:  # else a further node was found unfit; another node may do
                return why

    def _try_share(self, share: ComputeShare) -> str:
        try:
            if share.folder_checks:
                return self._finish_checks(share, 0.0)
            return self._reserve_share(share, self._place_share(share).assigned, 0.0)
        except PlacementError as error:
            return str(error)
        except OSError as error:  # such as a full disk, which must not end the run
            self._release_share(share)
            return f"Cannot write in {self._folder}: {error.strerror or error}."

    def release_lost(self, share: ComputeShare) -> tuple[str, ...]:
        """The nodes that were lost with compute of this share. If there are any, the whole share is released."""
        lost = self.cluster.lost_nodes(share.reservation) if share.reservation else ()
        if lost:
            self._unfit.clear()
            self._release_share(share)
        return lost

    def release(self) -> None:
        """Ends all reservations and the processes in them."""
        for share in (self.learner_share, self.policy_share):
            self._release_share(share)
        self._robots.release()
        self._owned = ()

    def _try_all(self) -> str:
        """Tries once to reserve everything; robots that turn out to be driven elsewhere are replaced by others.

        Returns:
            The reason why nothing is reserved, or an empty text.
        """
        self._robots.forget_attempt()
        self._records = discover(self._probes).records
        while True:
            driven, why = len(self._robots.driven_elsewhere), self._try_placement()
            if len(self._robots.driven_elsewhere) == driven:
                return why

    def _try_placement(self) -> str:
        try:
            placement = self._place(self._requests.all)
        except PlacementError as error:
            return str(error)
        number = len(self._requests.robots)
        if why := self._reserve_robots([record for records in placement.assigned[:number] for record in records]):
            return why
        rest, learners = placement.assigned[number:], len(self.learner_share.requests)
        why = self._reserve_share(self.learner_share, rest[:learners], FOLDER_CHECK_TIMEOUT_S)
        if why := why or self._reserve_share(self.policy_share, rest[learners:], FOLDER_CHECK_TIMEOUT_S):
            self.release()
            return why
        self._owned = _requests_by_name(self._requests.robots, placement.assigned)
        self.config = select_robots(self._configured, [request.name for request in self._owned])
        return ""

    def _reserve_robots(self, chosen: Sequence[ResourceRecord]) -> str:
        """The reason why they cannot be reserved, or an empty text.

        Raises:
            RunError: a robot's node cannot reach the gateway.
        """
        if why := self._robots.reserve(chosen):
            return why
        slots = self.slot_from_robot.values()
        if unreachable := [why for slot in slots if (why := self._unreachable_reason(slot))]:
            raise RunError(unreachable[0])
        if not slots:
            return ""
        return self._robots.lock([robot.name for robot in self._configured.robots if robot.simulated])

    def _reserve_share(self, share: ComputeShare, assigned: Sequence[Sequence[ResourceRecord]], wait_s: float) -> str:
        """Reserves the placed compute. Returns the reason if that fails, or is not known within `wait_s`."""
        if not share.requests:
            return ""
        addresses = self.cluster.address_from_node()
        if gone := sorted({record.node for records in assigned for record in records} - addresses.keys()):
            return f"{format_list(gone)} has just left the cluster."
        share.reservation = self.cluster.reserve(self._owner, make_bundles(share.requests, assigned, addresses))
        if share.reservation is None:
            return "Another job has just taken the free resources."
        local = store_node_names(self.cluster)
        remote = {slot.node: slot for slot in share.reservation.slots() if slot.node not in local}
        if far := {node: why for node, slot in remote.items() if (why := self._unreachable_reason(slot))}:
            return self._reject(share, far)
        for node, slot in remote.items():
            share.folder_checks[node] = SharedFolderCheck(self._folder, partial(self.cluster.read_remote, slot))
        return self._finish_checks(share, wait_s)

    def _finish_checks(self, share: ComputeShare, wait_s: float) -> str:
        """Waits up to `wait_s` for the folder checks; if all pass, the share gets its slots.

        Returns:
            The nodes that do not see the folder or have not answered yet, as a sentence, or an empty text.
        """
        assert share.reservation is not None
        visible = {node: check.is_visible(wait_s) for node, check in share.folder_checks.items()}
        if slow := sorted(node for node, sees in visible.items() if sees is None):
            return f"It is not known yet whether {format_list(slow, 'or')} sees {self._folder}."
        why = f"does not see {self._folder}, which must be on storage that both computers have."
        if blind := {node: f"{node} {why}" for node, sees in visible.items() if not sees}:
            return self._reject(share, blind)
        share.close_checks()
        slots = share.reservation.slots()
        local = store_node_names(self.cluster)
        chosen = [slot for slot in slots if slot.bundle.is_gpu] or slots
        share.slots = tuple(sorted(chosen, key=lambda slot: slot.node not in local))
        return ""

    def _reject(self, share: ComputeShare, unfit: dict[str, str]) -> str:
        self._unfit |= unfit
        self._release_share(share)
        return " ".join(unfit.values())

    def _release_share(self, share: ComputeShare) -> None:
        share.close_checks()
        if share.reservation is not None:
            self.cluster.release(share.reservation)
        share.reservation, share.slots = None, ()

    def _unreachable_reason(self, slot: PlacementSlot) -> str:
        """Why a process in `slot` could not reach the gateway, or an empty text."""
        endpoint = self._configured.gateway.endpoint
        if not is_loopback(endpoint) or self.cluster.hostname_from_node().get(slot.node) == local_node():
            return ""
        return f"{slot.node} cannot reach {endpoint}; give --gateway.endpoint=tcp://0.0.0.0:5555, or another port."

    def _place(self, requests: Sequence[ResourceRequest], *, assume_unused: bool = False) -> Placement:
        """Places `requests`, near the store if possible. Raises PlacementError, which names the unfit nodes."""
        records = [
            self._with_lease_state(record)
            for record in available_resources(
                self._configured, self._records, self.cluster, runs=self._folder, assume_unused=assume_unused
            )
            if record.kind is Kind.ROBOT or record.node not in self._unfit
        ]
        return place_run(
            self._configured, requests, records, store_node_names(self.cluster), tuple(self._unfit.values())
        )

    def _place_share(self, share: ComputeShare) -> Placement:
        """Places the compute of one use, colocated with the run's robots if the requests say so."""
        near = [request for request in self._owned if request.colocate]
        return Placement(self._place((*near, *share.requests)).assigned[len(near) :])

    def _with_lease_state(self, record: ResourceRecord) -> ResourceRecord:
        """The run's own robots are READY for it, wherever they are now; robots driven elsewhere are LEASED."""
        if record.kind is not Kind.ROBOT:
            return record
        if owner := self._robots.driven_elsewhere.get(record.name):
            return leased_by(record, owner)
        owned = any(request.name == record.name for request in self._owned)
        released = record.name in self._robots.released and record.health is Health.LEASED and not record.note
        return msgspec.structs.replace(record, health=Health.READY) if owned or released else record


def _requests_by_name(
    requests: Sequence[ResourceRequest], assigned: Sequence[Sequence[ResourceRecord]]
) -> tuple[ResourceRequest, ...]:
    """A request by name for each assigned record, with the colocation of the request that it was assigned to."""
    return tuple(
        ResourceRequest(kind=record.kind, name=record.name, colocate=request.colocate, colocate_by=request.colocate_by)
        for request, records in zip(requests, assigned, strict=False)
        for record in records
    )


@dataclass(frozen=True)
class Allocation:
    """The resources that a run has got before its folder is created.

    Attributes:
        config: the run's configuration, with only the robots that the run drives.
        cluster: its allocation on a shared cluster; None if it runs on this computer alone.
        learner_gpus: UUIDs of this computer's GPUs for the learners, if it runs on this computer alone.
        policy_gpus: likewise, for the policy server.
    """

    config: RunConfig
    cluster: ClusterAllocation | None = None
    learner_gpus: tuple[str, ...] = ()
    policy_gpus: tuple[str, ...] = ()


@contextmanager
def acquire_resources(config: RunConfig, home: Path, console: Console) -> Iterator[Allocation]:
    """Acquires the run's resources, on this computer or on the cluster of `config.ray`, for the context's duration.

    A resumed run gets the robots that it had, since the configuration in its folder lists only these.

    Raises:
        PlacementError: the resources do not exist.
    """

    def print_line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if not config.ray.address:
        with LocalAllocation(config, home.name, home.parent) as local:
            local.acquire(print_line)
            yield Allocation(local.config, learner_gpus=local.learner_gpus, policy_gpus=local.policy_gpus)
        return
    with ClusterAllocation(connect_cluster(config.ray.address), config, home.name, home.parent) as cluster:
        cluster.acquire(print_line)
        yield Allocation(cluster.config, cluster)
