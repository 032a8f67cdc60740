"""The processes of a run: starts them on Ray, reports restarts, finds crash loops, moves what a lost node had."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from hal.discovery import discover
from hal.durable import UMASK_VARIABLE, umask_from_environment
from hal.placement import format_list
from hal.process_supervisor import ProcessState, ProcessStatus, RestartPolicy, exit_reason
from hal.ray_cluster import PlacementSlot, RayCluster, start_local_cluster
from hal.ray_nodes import ray_resources
from hal.resource import visible_devices_env
from user_sys.compose import resource_probes
from user_sys.errors import RunError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.logs import last_log_message
from user_sys.robot_records import (
    EXIT_ORPHANED,
    LEARNER,
    assign_learners,
    learner_process_name,
    read_robot_records,
)
from user_sys.run.cluster_allocation import Allocation, ClusterAllocation
from user_sys.run.config import RunConfig, RunFolder, RunMetadata
from user_sys.run.prepare import allow_learner, local_endpoint
from user_sys.run.topology import (
    LOOPBACK,
    ProcessSlot,
    ProcessSpec,
    cluster_slots,
    learner_processes,
    local_slots,
    policy_process,
    topology,
)
from user_sys.tunnel.keys import GATEWAY_NAME

log = logging.getLogger(__name__)

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
RESTART_POLICY = RestartPolicy(max_restarts=20, window_s=60.0)
MAX_FAILED_STARTS = 3
SESSION_HEAD_START_S = 1.0  # time for sessions to end their episode before the drivers stop the robots

PrintLine = Callable[[str], None]
StartProcess = Callable[[RayCluster, ProcessSpec, PlacementSlot | None, Sequence[str]], None]


class CrashLoopDetector:
    """Tells a process that fails at every start from one that was killed while it worked. One thread calls it."""

    def __init__(self) -> None:
        self._healthy: set[str] = set()
        self._healthy_restarts: dict[str, int] = {}  # restarts of a process when it was last healthy
        self._reported_restarts: dict[str, int] = {}  # by `was_restarted`

    def mark_healthy(self, name: str) -> None:
        """The process has just shown that it works."""
        self._healthy.add(name)

    def is_crash_looping(self, name: str, status: ProcessStatus) -> bool:
        """Whether it ended `MAX_FAILED_STARTS` times since it was last healthy, the last time with its own error.

        A process that a signal ended may succeed at its next start, so it does not count.
        """
        was_moved = status.restarts < self._healthy_restarts.get(name, 0)
        if name in self._healthy or was_moved:
            self._healthy.discard(name)
            self._healthy_restarts[name] = status.restarts
        failed_starts = status.restarts - self._healthy_restarts.get(name, 0)
        return failed_starts >= MAX_FAILED_STARTS and (status.last_exit or 0) > 0

    def was_restarted(self, name: str, status: ProcessStatus) -> bool:
        """Whether it was restarted since the last call for this process."""
        before, self._reported_restarts[name] = self._reported_restarts.get(name, 0), status.restarts
        return status.restarts > before


class PolicyServerPlacement:
    """Places the run's policy server in its reserved slot, or on this computer. One thread calls it.

    While the server is down the robots hold. They find the next one by themselves, and send it the weights they had.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, allocation: Allocation, start: StartProcess) -> None:
        """`start` starts a process in a slot, or on this computer with these visible GPUs."""
        self._device, self._folder, self._start = config.policy.device, folder, start
        self._allocation, self._gpus = allocation.cluster, allocation.policy_gpus
        # Robots on computers of their own would not find it.
        self._is_used = config.policy.is_started_by_run and bool(config.robots)
        self._wait_reason = ""

    @property
    def process_names(self) -> frozenset[str]:
        """The server's name, if the run has one."""
        return frozenset({POLICY_NODE} if self._is_used else ())

    def start(self, cluster: RayCluster) -> None:
        """Does nothing if the run has no policy server, or has lost its slot."""
        if not self._is_used:
            return
        slot, address = None, LOOPBACK
        if self._allocation is not None:
            share = self._allocation.policy_share
            if share.requests and not share.slots:
                return
            slot = next(iter(share.slots), None)
            address = self._allocation.policy_listen_address()
        resources = {} if slot else {cluster.local_resource: 0.01}
        process = policy_process(self._folder, self._device, resources, address)
        self._start(cluster, process, slot, self._gpus)

    def poll(self, cluster: RayCluster, print_line: PrintLine) -> None:
        """Starts the server on another node as soon as possible after its node was lost; prints what changes."""
        allocation = self._allocation
        if allocation is None or not self._is_used or not allocation.policy_share.requests:
            return
        if lost := allocation.release_lost(allocation.policy_share):
            cluster.kill(POLICY_NODE)
            print_line(
                f"{format_list(lost)} is lost with the policy server; the robots hold, and people may drive them"
            )
        if allocation.policy_share.slots:
            return
        if why := allocation.acquire_share(allocation.policy_share):
            if why != self._wait_reason:
                print_line(f"the policy server waits for a slot. {why}")
            self._wait_reason = why
            return
        self._wait_reason = ""
        self.start(cluster)
        print_line(f"the policy server runs again, on {allocation.policy_share.slots[0].node}")


class RunProcesses:
    """Starts, watches and stops the processes of one run. One thread calls it, except `stop_robots`.

    Attributes:
        learners: names of the learners that were started.
        failed: processes that cannot be kept running, with the reason.
        policy_server: where it runs.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, metadata: RunMetadata, allocation: Allocation) -> None:
        self._config, self._folder, self._metadata = config, folder, metadata
        self._allocation: ClusterAllocation | None = allocation.cluster
        self._gpus = allocation.learner_gpus
        self._cluster: RayCluster | None = None
        self._specs: tuple[ProcessSpec, ...] = ()
        self._crash_loops = CrashLoopDetector()
        self.learners: list[str] = []
        self.failed: dict[str, str] = {}
        self.policy_server = PolicyServerPlacement(config, folder, allocation, self._start)

    def connect(self) -> None:
        """Starts a cluster on this computer, unless the run has an allocation on a shared one."""
        self._cluster = self._allocation.cluster if self._allocation is not None else self._start_local()

    def _start_local(self) -> RayCluster:
        records = discover(resource_probes(self._config.robots)).records
        settings = self._config.ray
        return start_local_cluster(
            ray_resources(records),
            object_store_bytes=settings.object_store_mb * 1_000_000,
            dashboard=settings.dashboard,
            log_dir=self._folder.path / "logs" / "ray",
        )

    def start(self) -> None:
        """Starts the gateway, each robot's processes, the policy server, and a learner for each known embodiment."""
        self._specs = topology(self._config, self._folder, self.cluster.local_resource, self.cluster.has_resource)
        self.cluster.release_robot_locks()
        for spec in self._specs:
            self._start(self.cluster, spec)
        self.policy_server.start(self.cluster)
        self._start_learner(LEARNER)
        self.start_new_learners()

    @property
    def cluster(self) -> RayCluster:
        assert self._cluster is not None
        return self._cluster

    @property
    def names(self) -> list[str]:
        """All processes, the gateway first."""
        started = (spec.name for spec in self._specs)
        return [*started, *self.policy_server.process_names, *self.names_of(*self.learners)]

    def names_of(self, *learners: str) -> list[str]:
        """The processes of these learners, rank 0 first."""
        ranks = range(self._config.learner.processes)
        return [learner_process_name(name, rank) for name in learners for rank in ranks]

    def _start(
        self, cluster: RayCluster, spec: ProcessSpec, slot: PlacementSlot | None = None, gpus: Sequence[str] = ()
    ) -> None:
        """`gpus`: UUIDs of the visible GPUs if there is no slot."""
        env = {**ENVIRONMENT, UMASK_VARIABLE: f"{umask_from_environment():o}", **visible_devices_env(gpus)}
        cluster.start(
            spec.name, spec.argv, spec.resources, log_path=spec.log, env=env, restart=RESTART_POLICY, slot=slot
        )

    def _start_learner(self, name: str) -> None:
        """Starts it in the run's slots in turns, if it has some; else on this computer, with its GPUs in turns."""
        if name not in self.learners:
            self.learners.append(name)
        slots = self._learner_slots(self.learners.index(name))
        placement = slots[0].placement if slots else None
        address = self._allocation.launcher_address(placement) if self._allocation and placement else LOOPBACK
        endpoint = local_endpoint(self._metadata.endpoint, address)
        for spec, slot in learner_processes(self._folder, name, slots, self.cluster.local_resource, endpoint):
            self._start(self.cluster, spec, slot.placement, slot.gpus)

    def _learner_slots(self, index: int) -> tuple[ProcessSlot, ...]:
        """Slots of one learner's processes. Empty while the run has lost its slots."""
        processes = self._config.learner.processes
        if self._allocation is None or not self._allocation.requests_compute:
            return local_slots(index, processes, self._gpus)
        return cluster_slots(
            self._allocation.learner_slots, index, processes, self._allocation.cluster.address_from_node()
        )

    def start_new_learners(self) -> None:
        """Starts a learner for each embodiment that has none. The first learner waits for its robot by itself."""
        for assignment in assign_learners(read_robot_records(self._folder.robots)):
            if assignment.name not in self.learners:
                log.info("run.learner_started name=%s model=%s", assignment.name, assignment.spec.model)
                allow_learner(self._folder, assignment.name)
                self._start_learner(assignment.name)

    def mark_healthy(self, learner: str) -> None:
        """A learner has just reported."""
        for name in self.names_of(learner):
            self._crash_loops.mark_healthy(name)

    def poll_compute(self, print_line: PrintLine, on_wait: Callable[[str], None]) -> None:
        """Moves learners and policy server off lost nodes as soon as other nodes are free.

        Args:
            on_wait: called with the reason why learners do not run; may be called again with the same one.
        """
        if self._allocation is None:
            return
        self._poll_learners(self._allocation, print_line, on_wait)
        self.policy_server.poll(self.cluster, print_line)

    def _poll_learners(
        self, allocation: ClusterAllocation, print_line: PrintLine, on_wait: Callable[[str], None]
    ) -> None:
        if lost := allocation.release_lost(allocation.learner_share):
            self.cluster.kill(*self.names_of(*self.learners))
            on_wait("")
            print_line(f"{format_list(lost)} is lost with the learner; the robots continue with the weights they have")
        if allocation.learner_slots or not allocation.requests_compute:
            return
        if why := allocation.acquire_share(allocation.learner_share):
            on_wait(f"the learner waits for a slot. {why}")
            return
        for name in self.learners:
            self._start_learner(name)
        nodes = format_list(sorted({slot.node for slot in allocation.learner_slots}))
        print_line(f"the learner continues from its checkpoint, on {nodes}")

    def report_failures(self, statuses: Mapping[str, ProcessStatus], print_line: PrintLine) -> None:
        """Prints each restart of a vital process and each process that cannot be kept running; see `failed`."""
        for name, status in statuses.items():
            path = self._folder.log(name)
            orphaned = status.last_exit == EXIT_ORPHANED  # its learner ended, which is reported itself
            is_watched = name in self._vital and not orphaned
            if is_watched and self._crash_loops.was_restarted(name, status):
                print_line(f"{name} ended {exit_reason(status.last_exit or 0)} and was restarted; its log is {path}")
            loops = is_watched and self._crash_loops.is_crash_looping(name, status)
            if (loops or status.state is ProcessState.FAILED) and name not in self.failed:
                self.failed[name] = status.error or last_log_message(path)
                print_line(f"{name} failed: {self.failed[name]}; its log is {path}")

    def require_running(self, *, has_other_robots: bool) -> None:
        """Raises RunError if a vital process failed, or all sessions did and no other robot is active."""
        sessions = {f"{robot.name}-session" for robot in self._config.robots}
        has_no_robot = sessions <= self.failed.keys() and not has_other_robots
        if lost := self._vital & self.failed.keys() or (sessions if has_no_robot else set()):
            name = min(lost)
            raise RunError(
                f"{name} cannot be kept running: {self.failed[name]}; see {self._folder.log(name)}; "
                f"all recorded steps are kept, continue with `user-sys train --resume {self._folder.path}`"
            )

    @property
    def _vital(self) -> set[str]:
        return {GATEWAY_NAME, *self.names_of(*self.learners), *self.policy_server.process_names}

    def are_learners_done(self, statuses: Mapping[str, ProcessStatus]) -> bool:
        learners = [statuses[name] for name in self.learners if name in statuses]
        done = all(learner.state is ProcessState.STOPPED and learner.last_exit == 0 for learner in learners)
        return done and len(learners) == len(self.learners)

    def stop_robots(self) -> None:
        """Asks sessions and learners to stop, then the drivers, also those that are still starting. Any thread."""
        if (cluster := self._cluster) is None:
            return
        robots = [robot.name for robot in self._config.robots]
        cluster.request_stop(*(f"{robot}-session" for robot in robots), *self.learners)
        time.sleep(SESSION_HEAD_START_S)
        cluster.request_stop(*(f"{robot}-driver" for robot in robots))

    def leaving(self) -> set[str]:
        """The sessions and learners, which leave by themselves after a `StopRun`."""
        names = {name for name in self.names if name.endswith("-session") or name in self.learners}
        return names - self.failed.keys()

    def still_running(self, names: Collection[str]) -> set[str]:
        statuses = self.cluster.statuses()
        ended = (ProcessState.STOPPED, ProcessState.FAILED)
        return {name for name in names if name in statuses and statuses[name].state not in ended}

    def shutdown(self, within_s: float) -> None:
        """Kills what still runs. Harmless if called twice."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.shutdown(within_s)
