"""A run's policy process: where it goes, and that it goes elsewhere when its computer is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hal.placement_words import listed
from hal.ray_bridge import Cluster, Seat
from user_sys.gang import Gang
from user_sys.inference.wire import POLICY
from user_sys.opening import Places
from user_sys.prepare import LOOPBACK
from user_sys.topology import Node, RunConfig, RunFolder, policy_node

StartNode = Callable[[Cluster, Node, Seat | None, Sequence[str]], None]


class PolicyHost:
    """In the seat that the run has for it, or beside the run's folder. One thread calls it.

    While it is away the robots hold; they find the next one by themselves, and give it the weights that they had.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, places: Places, start: StartNode) -> None:
        """`start` starts a node in a seat, or beside the run's folder with these GPUs to be seen."""
        self._device, self._folder, self._start = config.policy.device, folder, start
        self._gang: Gang | None = places.gang
        self._gpus = places.policy_gpus
        self._wanted = config.policy.is_started_by_run and bool(config.robots)  # guests would not find it
        self._waits = ""

    @property
    def nodes(self) -> frozenset[str]:
        """Its name, where the run has one."""
        return frozenset({POLICY} if self._wanted else ())

    def start(self, cluster: Cluster) -> None:
        """Does nothing where the run has none, or has lost the place for it."""
        if not self._wanted:
            return
        seat, address = None, LOOPBACK
        if self._gang is not None:
            if self._gang.policies.requests and not self._gang.policies.seats:
                return
            seat = next(iter(self._gang.policies.seats), None)
            address = self._gang.policy_address()
        resources = {} if seat else {cluster.here: 0.01}
        node = policy_node(self._folder, self._device, resources, address)
        self._start(cluster, node, seat, self._gpus)

    def look(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        """Where its computer is lost, it goes on elsewhere as soon as it can; `say` is told of what changes."""
        gang = self._gang
        if gang is None or not self._wanted or not gang.policies.requests:
            return
        if lost := gang.give_up_lost(gang.policies):
            cluster.drop(POLICY)
            say(f"{listed(lost)} is lost, and the robots' policies with it; the robots hold, and people may drive them")
        if gang.policies.seats:
            return
        if why := gang.take_share(gang.policies):
            if why != self._waits:
                say(f"the policies wait for a place. {why}")
            self._waits = why
            return
        self._waits = ""
        self.start(cluster)
        say(f"the policies act again, on {gang.policies.seats[0].node}")
