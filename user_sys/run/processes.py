"""The processes of a run: starts them on Ray, reports restarts, and moves those that a lost node had."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence

from hal.durable import UMASK_VARIABLE, umask_from_environment
from hal.placement import format_list
from hal.process_supervisor import ProcessState, ProcessStatus, RestartPolicy, exit_reason
from hal.ray_cluster import RayCluster
from hal.resource import visible_devices_env
from user_sys.errors import RunError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.logs import last_log_message, log_environment
from user_sys.robot_records import (
    EXIT_ORPHANED,
    LEARNER,
    assign_learners,
    first_learner,
    learner_from_robot,
    learner_process_name,
    read_robot_records,
)
from user_sys.run.allocation import Allocation, PrintLine, Use
from user_sys.run.config import RunConfig, RunFolder, RunMetadata
from user_sys.run.prepare import allow_process, free_port, local_endpoint
from user_sys.run.status import ended_processes
from user_sys.run.topology import (
    CONSOLE,
    REWARD_PROCESS,
    ProcessSlot,
    ProcessSpec,
    learner_processes,
    policy_process,
    topology,
)
from user_sys.trace import trace_environment
from user_sys.tunnel.keys import GATEWAY_NAME

log = logging.getLogger(__name__)

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
ROBOT_RESTARTS = RestartPolicy()  # for ever: the robot may be switched on, or released by another program
# Without these processes the run ends; without a learner after the first it goes on. A process that ends with another
# one of its learner has not failed itself.
VITAL_RESTARTS = RestartPolicy(max_failures=3, tolerated_exits=(EXIT_ORPHANED,))
ROBOT_REMINDER_S = 60.0  # between two lines about one process of a robot that ends again and again
SESSION_HEAD_START_S = 1.0  # time for sessions to end their episode before the drivers stop the robots
_NOUNS: dict[Use, str] = {"learner": "the learner", "policy": "the policy server"}
_EFFECTS: dict[Use, str] = {
    "learner": "the robots continue with the weights they have",
    "policy": "the robots hold, and people may drive them",
}


class PrintedReasons:
    """Prints each reason once. An empty reason forgets the last one."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def print(self, name: str, reason: str, print_line: PrintLine) -> None:
        if reason and self._last.get(name) != reason:
            print_line(reason)
        self._last[name] = reason


class RunProcesses:
    """Starts, watches and stops the processes of one run. One thread calls it, except `stop_robots`.

    Attributes:
        learners: names of the learners that were started, the run's first one first.
        failed: processes that cannot be kept running, with the reason.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, metadata: RunMetadata, allocation: Allocation) -> None:
        self._config, self._folder, self._metadata, self._allocation = config, folder, metadata, allocation
        self._cluster: RayCluster | None = None
        self._specs: tuple[ProcessSpec, ...] = ()
        self._reasons, self._restarts, self._remind_at_s = PrintedReasons(), dict[str, int](), dict[str, float]()
        # Robots on computers of their own would not find the policy server.
        self._has_policy_server = config.policy.is_started_by_run and bool(config.robots)
        self.learners: list[str] = []
        self.failed: dict[str, str] = {}

    def connect(self) -> None:
        """Starts a cluster on this computer, unless the run has an allocation on a shared one."""
        self._cluster = self._allocation.connect(self._folder.path / "logs" / "ray")

    def start(self) -> None:
        """Starts the gateway, each robot's processes, the policy server, and a learner for each known embodiment."""
        self._specs = topology(self._config, self._folder, self.cluster.local_resource, self.cluster.has_resource)
        for spec in self._specs:
            self._start(spec, VITAL_RESTARTS if spec.name in (GATEWAY_NAME, REWARD_PROCESS) else ROBOT_RESTARTS)
        self._start_policy_server()
        if not read_robot_records(self._folder.robots):
            self._start_learner(LEARNER)  # it waits for the first robot
        self.start_new_learners()

    @property
    def cluster(self) -> RayCluster:
        assert self._cluster is not None
        return self._cluster

    @property
    def names(self) -> list[str]:
        """All processes, the gateway first."""
        return [*(spec.name for spec in self._specs), *self._names_of("policy"), *self._names_of("learner")]

    def _names_of(self, use: Use) -> list[str]:
        """The processes of the policy server or of the learners, rank 0 first."""
        if use == "policy":
            return [POLICY_NODE] * self._has_policy_server
        return [process for name in self.learners for process in self._processes_of(name)]

    def _processes_of(self, learner: str) -> list[str]:
        return [learner_process_name(learner, rank) for rank in range(self._config.learner.processes)]

    def _start(self, spec: ProcessSpec, restart: RestartPolicy, slot: ProcessSlot | None = None) -> None:
        gpus: Sequence[str] = slot.gpus if slot else ()
        env = {**ENVIRONMENT, UMASK_VARIABLE: f"{umask_from_environment():o}", **visible_devices_env(gpus), **spec.env}
        env |= trace_environment(self._folder.trace.resolve(), spec.name)
        robot = next((r.name for r in self._config.robots if spec.name.rpartition("-")[0] == r.name), "")
        env |= log_environment(run=self._metadata.name, process=spec.name, robot=robot)
        placement = slot.placement if slot else None
        self.cluster.start(
            spec.name, spec.argv, spec.resources, log_path=spec.log, env=env, restart=restart, slot=placement
        )

    def _start_policy_server(self) -> Sequence[ProcessSlot]:
        """In its slot or on this computer. While it is down the robots hold. They find the next one by themselves."""
        slot = self._allocation.policy_slot()
        if not self._has_policy_server or slot is None:
            return ()
        endpoint = local_endpoint(self._metadata.endpoint, self._allocation.launcher_address(slot))
        process = policy_process(self._folder, self._config, slot, self.cluster.local_resource, endpoint)
        self._start(process, VITAL_RESTARTS, slot)
        return (slot,)

    def _start_learner(self, name: str) -> Sequence[ProcessSlot]:
        """Starts it in the run's slots in turns."""
        if name not in self.learners:
            self.learners.append(name)
        slots = self._allocation.learner_slots(self.learners.index(name), self._config.learner.processes)
        if not slots:  # lost
            return ()
        endpoint = local_endpoint(self._metadata.endpoint, self._allocation.launcher_address(slots[0]))
        port = free_port(slots[0].address)
        for spec, slot in learner_processes(self._folder, name, slots, self.cluster.local_resource, endpoint, port):
            self._start(spec, VITAL_RESTARTS, slot)
        return slots

    def start_new_learners(self) -> None:
        """Starts a learner for each embodiment of a robot that has none."""
        for name, spec in assign_learners(read_robot_records(self._folder.robots)).items():
            if name not in self.learners:
                log.info("run.learner_started name=%s model=%s", name, spec.model)
                allow_process(self._folder, name, "learner")
                self._start_learner(name)

    def poll_compute(self, print_line: PrintLine) -> None:
        """Moves learners and policy server off lost nodes as soon as other nodes are free. Prints what changes."""
        for use in _NOUNS:
            if lost := self._allocation.release_lost(use):
                self.cluster.kill(*self._names_of(use))
                self._reasons.print(use, "", print_line)
                print_line(f"{format_list(lost)} is lost with {_NOUNS[use]}; {_EFFECTS[use]}")
            why = self._allocation.reacquire(use)
            if why:
                self._reasons.print(use, f"{_NOUNS[use]} waits for a slot. {why}", print_line)
            elif why is not None:
                slots = self._restart(use)
                if nodes := sorted({slot.placement.node for slot in slots if slot.placement}):
                    print_line(f"{_NOUNS[use]} runs again, on {format_list(nodes)}")

    def _restart(self, use: Use) -> Sequence[ProcessSlot]:
        if use == "policy":
            return self._start_policy_server()
        working = [name for name in self.learners if name not in self.failed]
        return [slot for name in working for slot in self._start_learner(name)]

    def report_failures(
        self, statuses: Mapping[str, ProcessStatus], print_line: PrintLine, driven: Collection[str] = ()
    ) -> None:
        """Prints each restart of a vital process and each process that cannot be kept running; see `failed`.

        Of the robots in `driven` it prints restarts too, each process every `ROBOT_REMINDER_S` at most.
        """
        robots = {f"{robot}-{part}" for robot in driven for part in ("driver", "session")}
        for name, status in statuses.items():
            path = self._folder.log(name)
            before, self._restarts[name] = self._restarts.get(name, 0), status.restarts
            is_printed = name in (*self._vital, *self._names_of("learner"), CONSOLE)
            if status.restarts > before and is_printed and status.last_exit != EXIT_ORPHANED:
                print_line(f"{name} ended {exit_reason(status.last_exit or 0)} and was restarted; its log is {path}")
            if status.restarts > before and name in robots and time.monotonic() >= self._remind_at_s.get(name, 0.0):
                self._remind_at_s[name] = time.monotonic() + ROBOT_REMINDER_S
                ended = f"has ended {status.restarts} times, last" if status.restarts > 1 else "ended"
                reason = f"{name} {ended} {exit_reason(status.last_exit or 0)}, and is restarted"
                print_line(f"{reason}; the robot holds meanwhile; its log is {path}")
            if status.state is ProcessState.FAILED and name not in self.failed:
                self.failed[name] = last_log_message(path) or status.error
                print_line(f"{name} failed: {self.failed[name]}; its log is {path}{self._leave_out(name)}")

    def _leave_out(self, name: str) -> str:
        """If the failed process is of another learner than the first, stops that. Returns what people can do then."""
        learner = next((each for each in self.learners if name in self._processes_of(each)), self._first_learner)
        if learner == self._first_learner:
            return ""
        others = [each for each in self._processes_of(learner) if each not in self.failed]
        self.failed |= dict.fromkeys(others, f"{name} has failed")
        self.cluster.request_stop(*others)
        learners = learner_from_robot(read_robot_records(self._folder.robots))
        robots = [robot for robot, each in learners.items() if each == learner]
        return (
            f". The run continues without it, and robots get no new weights from it ({', '.join(robots)}): correct "
            "their configuration and restart them, or mend the cause and continue with "
            f"`user-sys train --resume {self._folder.path}`"
        )

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
        own = {GATEWAY_NAME, *([REWARD_PROCESS] if self._config.rewards.kind else [])}
        return own | {*self._processes_of(self._first_learner), *self._names_of("policy")}

    @property
    def _first_learner(self) -> str:
        """The first of those that robots have now."""
        return first_learner(assign_learners(read_robot_records(self._folder.robots)))

    def are_learners_done(self, statuses: Mapping[str, ProcessStatus]) -> bool:
        """Whether learners have ended, and all have but failed ones and those that no robot has, which get no steps."""
        ended = {n for n, each in statuses.items() if each.state is ProcessState.STOPPED and each.last_exit == 0}
        done = ended.intersection(self.learners)
        others = {*self.learners} - done - self.failed.keys()
        return bool(done) and not others & assign_learners(read_robot_records(self._folder.robots)).keys()

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
        return statuses.keys() & set(names) - ended_processes(statuses)

    def shutdown(self, within_s: float) -> None:
        """Kills what still runs. Harmless if called twice."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.shutdown(within_s)
