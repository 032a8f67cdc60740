"""Whether another computer sees a folder of this one: a sign is laid beside it, and somebody over there reads it.

What a run gets of a Ray cluster before anything of it starts: its robots and its compute half, both or neither.

The robots that the cluster's nodes have are reserved in one placement group, and locked on their own computers against
whoever is not in the cluster; what is to compute is reserved in another. Both end with the launcher, however that ends.
Simulated robots that no node has run beside the gateway. When a computer of the compute half is lost, that half is
given back and asked for anew: the learners go on elsewhere, and the robots do not notice.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hal.discovery import discover
from hal.errors import PlacementError
from hal.placement import Placement, format_list
from hal.ray_cluster import PlacementSlot, RayCluster, Reservation
from hal.ray_nodes import ROBOT_RESOURCE_PREFIX, make_bundles
from hal.resource import Health, Kind, ResourceRecord, ResourceRequest, local_node
from user_sys.compose import resource_probes
from user_sys.errors import RunError
from user_sys.gateway.gateway import is_loopback
from user_sys.run.allocation import (
    TAKEN_BY_ANOTHER_RUN,
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
from user_sys.run.prepare import LOOPBACK

FOLDER_CHECK_TIMEOUT_S = 120.0  # a process starts for it, on a computer that may be busy

RemoteRead = Callable[[float], str | None]
"""What a file says over there, empty where it is not there; None where no answer has come in so many seconds."""


class SharedFolderCheck:
    """It begins when it is made. One thread calls it; `close` takes the sign away."""

    def __init__(
        self, folder: Path, read_remote: Callable[[Path], RemoteRead], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
            folder: or, where that is not made yet, the nearest one above it that is.
            ask: has a file read over there, without waiting for it.
            clock: seconds that only grow.

        Raises:
            OSError: nothing can be written there.
        """
        self._clock, self._until_s = clock, clock() + FOLDER_CHECK_TIMEOUT_S
        self._token = secrets.token_hex(16)
        self._sign = next(f for f in (folder, *folder.parents) if f.is_dir()) / f".seen-{self._token[:8]}"
        self._sign.write_text(self._token)
        try:
            self._told = read_remote(self._sign)
        except BaseException:
            self.close()
            raise

    def is_visible(self, wait_s: float) -> bool | None:
        """None where it is not known within `wait_s`; who has not answered `FOLDER_CHECK_TIMEOUT_S` after the beginning
        does not.
        """
        left_s = self._until_s - self._clock()
        said = self._told(max(0.0, min(wait_s, left_s)))
        return None if said is None and self._clock() < self._until_s else said == self._token

    def close(self) -> None:
        self._sign.unlink(missing_ok=True)


log = logging.getLogger(__name__)

UNFIT_EXPIRY_S = 60.0  # then a computer is looked at anew: its storage may have come up meanwhile


@dataclass(frozen=True)
class ResourceRequests:
    """What a run asks of the cluster: robots, and what computes for its learners and for its policies."""

    robots: tuple[ResourceRequest, ...]
    compute: tuple[ResourceRequest, ...]
    policy: tuple[ResourceRequest, ...] = ()

    @property
    def all(self) -> tuple[ResourceRequest, ...]:
        return (*self.robots, *self.compute, *self.policy)


@dataclass(eq=False)
class ComputeShare:
    """What computes for one use, reserved by itself: it can be lost, given back and taken anew while the rest stays."""

    requests: tuple[ResourceRequest, ...]
    reservation: Reservation | None = None
    folder_checks: dict[str, SharedFolderCheck] = field(
        default_factory=dict
    )  # at computers that it is held on, until they are known
    slots: tuple[PlacementSlot, ...] = ()


def resource_requests(config: RunConfig, is_declared: Callable[[str], bool]) -> ResourceRequests:
    """A run that drives all of its robots asks for nothing where one is simulated and no node has it.

    Args:
        declares: whether some node of the cluster has a resource.
    """
    lone = {
        robot.name
        for robot in config.robots
        if robot.simulated and not is_declared(f"{ROBOT_RESOURCE_PREFIX}{robot.name}")
    }
    robots = config.robot_requests()
    if not config.selects_robots:
        robots = tuple(request for request in robots if request.name not in lone)
    return ResourceRequests(robots, config.compute_requests(), config.policy_requests())


class ClusterAllocation:
    """A run's two halves. One thread calls it; leaving it leaves the cluster.

    Attributes:
        config: the run, with the robots alone that it drives: once they are taken, where its needs choose them.
        slot_from_robot: those that nodes have, and where; their processes start beside what is reserved of them.
        learner_share: where the run's learners go, in turns, those beside the store first.
        policy_share: where its policy process goes.
    """

    def __init__(self, cluster: RayCluster, config: RunConfig, run: str, folder: Path) -> None:
        """Args:
        folder: where run folders lie, which each computer of the compute half must see too.

        Raises ConfigError: a robot cannot be built; one that the run may choose is passed over then.
        """
        self.cluster, self.config = cluster, config
        self.slot_from_robot: dict[str, PlacementSlot] = {}
        self._listed, self._run, self._folder = config, run, folder.resolve()
        self._wanted = resource_requests(config, cluster.has_resource)
        self.learner_share, self.policy_share = ComputeShare(self._wanted.compute), ComputeShare(self._wanted.policy)
        looks = resource_probes(config.robots, lenient=config.selects_robots)
        self._looks = {name: look for name, look in looks.items() if name == "config"}
        self._found: Sequence[ResourceRecord] = ()  # when the run's robots were looked for last
        self._claims = LocalLocks(self._name)
        self._mine: tuple[ResourceRequest, ...] = ()  # the robots that were taken, and what else is to be near them
        self._driven: dict[str, str] = {}  # robots that turned out to be driven from outside, and by whom
        self._given_back: set[str] = set()  # robots that were had a moment ago: Ray counts them as in use a while
        self._held: Reservation | None = None
        self._unfit: dict[str, str] = {}  # computers that cannot have a learner, and why
        self._ask_again_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.cluster.shutdown()
        finally:
            self._claims.release()
            for share in (self.learner_share, self.policy_share):
                _close_folder_checks(share)

    @property
    def learner_slots(self) -> tuple[PlacementSlot, ...]:
        """The learners'; empty where the run asks for none, or has lost them."""
        return self.learner_share.slots

    @property
    def requests_compute(self) -> bool:
        """Whether learners go where the run has seats for them."""
        return bool(self.learner_share.requests)

    def launcher_address(self, seat: PlacementSlot) -> str:
        """Where a process in `seat` finds this machine."""
        near = self.cluster.hostname_from_node().get(seat.node) == local_node()
        return LOOPBACK if near else self.cluster.address

    def policy_listen_address(self) -> str:
        """On which address of its computer the run's policy process listens: one that all of the run's robots reach."""
        for seat in self.policy_share.slots:
            return self.cluster.address_from_node().get(seat.node, LOOPBACK)  # the latter where it has just gone
        return self.cluster.address if self.robots_on_other_nodes()[0] else LOOPBACK

    def robots_on_other_nodes(self) -> tuple[list[str], str]:
        """The robots that other computers drive, and where these find this machine."""
        far = [name for name, seat in self.slot_from_robot.items() if self.launcher_address(seat) != LOOPBACK]
        return far, self.cluster.address

    def acquire(self, print_line: Callable[[str], None]) -> None:
        """Blocks until the run has both halves; says, once each time that it changes, what it waits for.

        Raises:
            PlacementError: the cluster would not have all of it even if nobody used any of it.
            RunError: a computer of the cluster cannot reach the gateway.
        """
        found = discover(self._looks)
        for text in unbuildable_robots(found):
            print_line(text)
        self._found = found.records
        patience, unfit = RetryWait(self._name, print_line), -1
        while True:
            if len(self._unfit) != unfit:
                unfit = len(self._unfit)
                self._place(self._wanted.all, unused=True)
            if not (why := self._take_both()):
                break
            patience.wait(why)
        if not self.config.selects_robots:
            self._claims.acquire_free(
                robot.name for robot in self.config.robots if robot.name not in self.slot_from_robot
            )

    def acquire_share(self, share: ComputeShare) -> str:
        """Tries to get what computes for one use, for a run whose robots are at work.

        It does not wait for computers that have yet to say whether they see the run's folder: the next call goes on.

        Returns:
            Why it cannot be had, or cannot yet; empty where it was.
        """
        if time.monotonic() >= self._ask_again_s:
            self._ask_again_s = time.monotonic() + UNFIT_EXPIRY_S
            self._unfit.clear()
        while True:
            unfit, why = len(self._unfit), self._try_share(share)
            if len(self._unfit) == unfit:  # else one more is found unfit, and another may do
                return why

    def _try_share(self, share: ComputeShare) -> str:
        try:
            if share.folder_checks:
                return self._settle(share, 0.0)
            return self._seat(share, self._place_share(share).assigned, 0.0)
        except PlacementError as error:
            return str(error)
        except OSError as error:  # of a full disk, say, which ends no run
            self._give_back_share(share)
            return f"Nothing can be written beside {self._folder}: {error.strerror or error}."

    def release_lost(self, share: ComputeShare) -> tuple[str, ...]:
        """The computers that were lost with what computed there for one use; that is then given back as a whole."""
        lost = self.cluster.lost_nodes(share.reservation) if share.reservation else ()
        if lost:
            self._unfit.clear()
            self._give_back_share(share)
        return lost

    def release(self) -> None:
        """Ends all reservations, and what runs in them."""
        for share in (self.learner_share, self.policy_share):
            self._give_back_share(share)
        self._give_back_robots()
        self._mine = ()

    def _take_both(self) -> str:
        """Why both halves cannot be had, or empty. A robot that is driven from outside is passed over for another."""
        self._driven.clear()
        self._given_back.clear()
        self._found = discover(self._looks).records
        while True:
            driven, why = len(self._driven), self._try_both()
            if len(self._driven) == driven:
                return why

    def _try_both(self) -> str:
        try:
            placement = self._place(self._wanted.all)
        except PlacementError as error:
            return str(error)
        number = len(self._wanted.robots)
        if why := self._take_robots([record for records in placement.assigned[:number] for record in records]):
            return why
        rest, learners = placement.assigned[number:], len(self.learner_share.requests)
        why = self._seat(self.learner_share, rest[:learners], FOLDER_CHECK_TIMEOUT_S)
        if why := why or self._seat(self.policy_share, rest[learners:], FOLDER_CHECK_TIMEOUT_S):
            self.release()
            return why
        self._mine = _requests_by_name(self._wanted.robots, placement.assigned)
        self.config = select_robots(self._listed, [request.name for request in self._mine])
        return ""

    def _take_robots(self, chosen: Sequence[ResourceRecord]) -> str:
        """Why they cannot be had, or empty; nothing is held in the first case."""
        names = [record.name for record in chosen if self.cluster.has_resource(f"{ROBOT_RESOURCE_PREFIX}{record.name}")]
        if not self._claims.acquire({record.name for record in chosen}.difference(names)):
            return TAKEN_BY_ANOTHER_RUN
        if not names:
            return ""
        asked = [ResourceRequest(kind=Kind.ROBOT, name=name) for name in names]
        there = [(record,) for record in chosen if record.name in names]
        self._held = self.cluster.reserve(self._name, make_bundles(asked, there, {}))
        if self._held is None:
            self._give_back_robots()
            return TAKEN_BY_ANOTHER_RUN
        self.slot_from_robot = dict(zip(names, self._held.slots(), strict=True))
        if far := [why for seat in self._held.slots() if (why := self._out_of_reach(seat))]:
            raise RunError(far[0])
        simulated = [robot.name for robot in self._listed.robots if robot.simulated]
        driven = self.cluster.lock_robots(self.slot_from_robot, self._name, simulated)
        if driven:
            self._driven |= driven
            self._give_back_robots()
        return " ".join(f"{robot} is driven by {owner}." for robot, owner in sorted(driven.items()))

    def _give_back_robots(self) -> None:
        self.cluster.release_robot_locks()
        if self._held is not None:
            self.cluster.release(self._held)
        self._given_back |= self.slot_from_robot.keys()
        self._held, self.slot_from_robot = None, {}
        self._claims.release()

    def _seat(self, share: ComputeShare, assigned: Sequence[Sequence[ResourceRecord]], wait_s: float) -> str:
        """Reserves what computes for one use as it was placed; why it cannot be had (within `wait_s`), or empty."""
        if not share.requests:
            return ""
        addresses = self.cluster.address_from_node()
        if gone := sorted({record.node for records in assigned for record in records} - addresses.keys()):
            return f"{format_list(gone)} has just gone."
        share.reservation = self.cluster.reserve(self._name, make_bundles(share.requests, assigned, addresses))
        if share.reservation is None:
            return "Another job was quicker to take what was free."
        here = self._here()
        away = {seat.node: seat for seat in share.reservation.slots() if seat.node not in here}
        if far := {node: why for node, seat in away.items() if (why := self._out_of_reach(seat))}:
            return self._refuse(share, far)
        for node, seat in away.items():
            share.folder_checks[node] = SharedFolderCheck(self._folder, partial(self.cluster.read_remote, seat))
        return self._settle(share, wait_s)

    def _settle(self, share: ComputeShare, wait_s: float) -> str:
        """Why neither a learner nor a policy process would work where the share is held, or that this is not known
        within `wait_s`; empty where they would: it has its seats then."""
        assert share.reservation is not None
        see = {node: look.is_visible(wait_s) for node, look in share.folder_checks.items()}
        if slow := sorted(node for node, sees in see.items() if sees is None):
            return f"It is not known yet whether {format_list(slow, 'or')} sees {self._folder}."
        why = f"does not see {self._folder}, which must be on storage that both computers have."
        if blind := {node: f"{node} {why}" for node, sees in see.items() if not sees}:
            return self._refuse(share, blind)
        _close_folder_checks(share)
        seats = share.reservation.slots()
        here = self._here()
        chosen = [seat for seat in seats if seat.bundle.is_gpu] or seats
        share.slots = tuple(sorted(chosen, key=lambda seat: seat.node not in here))
        return ""

    def _refuse(self, share: ComputeShare, unfit: dict[str, str]) -> str:
        self._unfit |= unfit
        self._give_back_share(share)
        return " ".join(unfit.values())

    def _give_back_share(self, share: ComputeShare) -> None:
        _close_folder_checks(share)
        if share.reservation is not None:
            self.cluster.release(share.reservation)
        share.reservation, share.slots = None, ()

    def _out_of_reach(self, seat: PlacementSlot) -> str:
        """Why a process there could not reach the gateway, or empty."""
        endpoint = self._listed.gateway.endpoint
        if not is_loopback(endpoint) or self.cluster.hostname_from_node().get(seat.node) == local_node():
            return ""
        return f"{seat.node} cannot reach {endpoint}; give --gateway.endpoint=tcp://0.0.0.0:5555, or another port."

    def _place(self, requests: Sequence[ResourceRequest], *, unused: bool = False) -> Placement:
        """Near the store, if that is possible. Raises PlacementError, which says of unfit computers why they are."""
        records = [
            self._as_known(record)
            for record in available_resources(
                self._listed, self._found, self.cluster, runs=self._folder, assume_unused=unused
            )
            if record.kind is Kind.ROBOT or record.node not in self._unfit
        ]
        return place_run(self._listed, requests, records, self._here(), tuple(self._unfit.values()))

    def _place_share(self, share: ComputeShare) -> Placement:
        """What computes for one use, near the robots that the run has where it is to be near robots."""
        near = [request for request in self._mine if request.colocate]
        return Placement(self._place((*near, *share.requests)).assigned[len(near) :])

    def _as_known(self, record: ResourceRecord) -> ResourceRecord:
        """The run's own robots are nobody else's, wherever they are now; others may be driven from outside."""
        if record.kind is not Kind.ROBOT:
            return record
        if record.name in self._driven:
            return leased_by(record, self._driven[record.name])
        mine = any(request.name == record.name for request in self._mine)
        if mine or (record.name in self._given_back and record.health is Health.LEASED and not record.note):
            return msgspec.structs.replace(record, health=Health.READY)
        return record

    def _here(self) -> frozenset[str]:
        return store_node_names(self.cluster)

    @property
    def _name(self) -> str:
        return f"run {self._run}"


def _requests_by_name(
    requests: Sequence[ResourceRequest], assigned: Sequence[Sequence[ResourceRecord]]
) -> tuple[ResourceRequest, ...]:
    """What was assigned to the first of the `assigned`, each as a request for itself, near what its request is near."""
    return tuple(
        ResourceRequest(kind=record.kind, name=record.name, colocate=request.colocate, colocate_by=request.colocate_by)
        for request, records in zip(requests, assigned, strict=False)
        for record in records
    )


def _close_folder_checks(share: ComputeShare) -> None:
    for look in share.folder_checks.values():
        look.close()
    share.folder_checks.clear()
