"""Ray as the control plane: resource records become Ray resources, nodes become processes that Ray keeps placed.

Ray never carries tensors and never crosses an untrusted network. It is imported when a cluster is started or joined,
with its settings already in place. Each node of a run is a process of its own under an actor: the actor's supervisor
restarts the process, Ray restarts the actor, and the process dies with its actor.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from hal.cards import sight
from hal.errors import HalError, LeaseHeld, PlacementError, SupervisionError
from hal.lease import robot_lock
from hal.private import umask_of
from hal.ray_address import require_cluster, require_token
from hal.ray_folder import RayFolder
from hal.ray_nodes import DEFAULT_OBJECT_STORE_BYTES
from hal.ray_places import GROUP_MARK, Bundle, cluster_records, node_names
from hal.ray_start import import_ray, init_ray, silence
from hal.resource import ResourceRecord
from hal.supervision import NodeState, NodeStatus, RestartPolicy, Supervisor

__all__ = [
    "Cluster",
    "NodeActor",
    "NodeState",
    "NodeStatus",
    "Reservation",
    "RestartPolicy",
    "Seat",
    "connect",
    "start_local",
]

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 1.0
ACTOR_TIMEOUT_S = 30.0
RESERVE_TIMEOUT_S = 10.0
GPU_SIGHT = 0.01  # of a GPU that Ray has chosen, reserved as a whole: several processes of its job may see it
LOOK_TIMEOUT_S = 120.0  # a process of Ray's starts for it, on a computer that may be busy
NO_ANSWER = "somebody, perhaps: its computer does not answer"
START_TRIES = 4
STOP_MARGIN_S = 15.0  # beyond a node's own deadline: the actor's answer, through a busy machine


class NodeActor:
    """Runs one node in a child process; Ray starts it anew, child and all, wherever its own process dies."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: str, restart: RestartPolicy) -> None:
        os.umask(umask_of({**os.environ, **env}))  # Ray on this computer may have been started by another program
        self._supervisor = Supervisor(argv, env, Path(log_path) if log_path else None, restart)
        self._failure: NodeStatus | None = None
        try:
            self._supervisor.start()
        except SupervisionError as error:
            self._failure = NodeStatus(state=NodeState.FAILED, error=str(error))

    def status(self) -> NodeStatus:
        return self._failure or self._supervisor.status()

    def stop(self) -> NodeStatus:
        return self._failure or self._supervisor.stop()

    def pid(self) -> int:
        """Of the actor's own process."""
        return os.getpid()


class RobotKeeper:
    """Has a robot's lock on its computer, from when a job gets the robot until its driver process takes over. Where its
    process dies meanwhile, Ray starts it anew, and it has the lock again before anybody asks for it."""

    def __init__(self, robot: str, holder: str, simulated: bool) -> None:
        self._lock = robot_lock(robot, holder, simulated=simulated)
        self.take()

    def take(self) -> str:
        """Who drives the robot already, in words; empty where the lock is had."""
        try:
            self._lock.acquire()
        except LeaseHeld:
            return self._lock.owner() or "another process"
        return ""


def content_of(path: str) -> str:
    """What the file at `path` says on this computer; empty where it is not there."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Reservation:
    """What a placement group holds. It ends with the process that made it, however that ends."""

    group: Any
    bundles: tuple[Bundle, ...]

    def seats(self) -> tuple[Seat, ...]:
        """One for each bundle."""
        return tuple(Seat(self, number, bundle.node) for number, bundle in enumerate(self.bundles))


@dataclass(frozen=True)
class Seat:
    """One bundle of a reservation, on the computer `node`: nodes of a run may be started in it."""

    reservation: Reservation
    number: int
    node: str

    @property
    def bundle(self) -> Bundle:
        return self.reservation.bundles[self.number]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of all GPUs that the reservation has on this computer, as far as they are known; the seat's own is
        the first. None where the seat has no GPU, or one that Ray has chosen."""
        if not self.bundle.uuid:
            return ()
        others = [each.uuid for each in self.reservation.bundles if each.node == self.node and each.uuid]
        return tuple(dict.fromkeys([self.bundle.uuid, *others]))


class Cluster:
    """A Ray cluster that this process has started or joined, and the nodes it runs there. One thread calls it."""

    def __init__(self, ray: Any, folder: RayFolder | None, log_dir: Path | None) -> None:
        """Made by `start_local` and `connect`; `folder` is set if the cluster is ours to end."""
        self._ray = ray
        self._folder = folder
        self._log_dir = log_dir
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._stopping: dict[str, Any] = {}  # the answers of nodes that were asked to end
        self._last: dict[str, NodeStatus] = {}
        self._patience_s: dict[str, float] = {}
        self._alive: dict[str, Mapping[str, Any]] = {}  # each node, as it was when it was alive
        self._keepers: list[Any] = []

    @property
    def address(self) -> str:
        """Of this machine, as the cluster's other nodes reach it."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def here(self) -> str:
        """The resource that stands for the machine of this process; every Ray node declares its own."""
        return f"node:{self.address}"

    def records(self, *, unused: bool = False) -> tuple[ResourceRecord, ...]:
        """What the cluster has (`hal.ray_places`), as it is now; `unused`: as it were if nobody used any of it."""
        nodes = self._nodes()
        if unused:
            return cluster_records(nodes, {}, ())
        free = self._ray._private.state.available_resources_per_node()  # no public call tells it of each node
        return cluster_records(nodes, free, self._ray.util.placement_group_table().values())

    def addresses(self) -> dict[str, str]:
        """Ray's address of each living node, by the name that its records carry."""
        nodes = self._nodes()
        names = node_names(nodes)
        return {names[node["NodeID"]]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}

    def hosts(self) -> dict[str, str]:
        """The host name of each living node, by the name that its records carry."""
        nodes = self._nodes()
        names = node_names(nodes)
        return {names[node["NodeID"]]: node["NodeManagerHostname"] for node in nodes if node["Alive"]}

    def reserve(self, name: str, bundles: Sequence[Bundle]) -> Reservation | None:
        """All of `bundles`, for this process under the name `name`; None where not all are free just now."""
        once = f"{name}{GROUP_MARK}{secrets.token_hex(8)}"  # Ray refuses a second group of a name
        group = self._ray.util.placement_group([bundle.resources for bundle in bundles], name=once)
        if self._wait([group.ready()], RESERVE_TIMEOUT_S):  # unlike `group.wait` it lets signals be heard
            return Reservation(group, tuple(bundles))
        self._ray.util.remove_placement_group(group)
        return None

    def release(self, reservation: Reservation) -> None:
        """Gives it back; what runs in it is killed."""
        self._ray.util.remove_placement_group(reservation.group)

    def lost(self, reservation: Reservation) -> tuple[str, ...]:
        """The computers that are gone with what it had of them."""
        there = self._ray.util.placement_group_table(reservation.group)["bundles_to_node_id"]
        alive = {node["NodeID"] for node in self._nodes() if node["Alive"]}
        return tuple(sorted({b.node for number, b in enumerate(reservation.bundles) if there.get(number) not in alive}))

    def read_at(self, seat: Seat, path: Path) -> Callable[[float], str | None]:
        """Has the file at `path` read on the seat's computer, without waiting for that. What is returned waits so many
        seconds at most: what the file says, empty where it is not there or its computer is gone; None: no answer yet.
        """
        call = self._seated(self._ray.remote(num_cpus=0)(content_of), seat).remote(str(path))
        return lambda wait_s: (self._said(call) or "") if self._wait([call], wait_s) else None

    def keep_robots(self, seats: Mapping[str, Seat], holder: str, simulated: Collection[str]) -> dict[str, str]:
        """Takes the locks of these robots on their computers, until `hand_over`. `simulated`: the names of those.

        Returns:
            The robots that somebody else drives, outside of the cluster, and who; none is kept where there is one.
        """
        keepers = {}
        for robot, seat in seats.items():
            actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(RobotKeeper)
            keepers[robot] = self._seated(actor, seat).remote(robot, holder, robot in simulated)
        self._keepers += keepers.values()
        calls = {robot: keeper.take.remote() for robot, keeper in keepers.items()}
        self._wait(list(calls.values()), LOOK_TIMEOUT_S)
        answers = {robot: self._said(call) for robot, call in calls.items()}
        taken = {robot: NO_ANSWER if owner is None else owner for robot, owner in answers.items() if owner != ""}
        if taken:
            self.hand_over()
        return taken

    def hand_over(self) -> None:
        """Lets go of the robots' locks: their driver processes take them next."""
        for keeper in self._keepers:
            self._ray.kill(keeper, no_restart=True)
        self._keepers.clear()

    def declares(self, resource: str) -> bool:
        """Whether some node of the cluster has `resource`, in use or not."""
        return any(resource in node["Resources"] for node in self._ray.nodes() if node["Alive"])

    def start(
        self,
        name: str,
        argv: Sequence[str],
        resources: Mapping[str, float],
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        restart: RestartPolicy | None = None,
        seat: Seat | None = None,
    ) -> None:
        """Has the node `name` placed where `resources` are, or in `seat`, and started there; does not wait for that.

        Of the GPUs of the computer it sees those of the seat's reservation, the seat's own first.

        Raises:
            PlacementError: no node of the cluster has these resources, or `name` is taken.
        """
        if name in self._actors:
            raise PlacementError(f"a node named {name} runs already")
        if seat is None:
            self._require_feasible(name, resources)
        policy = restart or RestartPolicy()
        actor = self._ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(NodeActor)
        placed = self._seated(actor, seat, resources) if seat else actor.options(resources=dict(resources))
        unprivileged = {"RAY_AUTH_TOKEN": "", **sight(seat.gpus if seat else ()), **(env or {})}
        self._actors[name] = placed.remote(list(argv), unprivileged, str(log_path or ""), policy)
        self._last[name] = NodeStatus(state=NodeState.WAITING)
        self._patience_s[name] = policy.stop_after_s + STOP_MARGIN_S

    def statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, NodeStatus]:
        """Every node as it is now; one that does not answer in time (not placed yet, being restarted) is WAITING. One
        that `ask_to_stop` has asked is as it was, until it has ended."""
        for name, call in list(self._stopping.items()):
            self._asked.pop(name, None)
            if name in self._actors and self._wait([call], 0.0):
                self._last[name] = self._answer(name, call)
        for name, actor in self._actors.items():
            if name not in self._asked and name not in self._stopping:  # one question at a time, or they pile up
                self._asked[name] = actor.status.remote()
        self._wait(list(self._asked.values()), timeout_s)
        for name, call in list(self._asked.items()):
            if self._wait([call], 0.0):
                self._last[name] = self._answer(name, self._asked.pop(name))
            else:
                self._last[name] = msgspec.structs.replace(
                    self._last[name], state=NodeState.WAITING, pid=None, error=""
                )
        return dict(self._last)

    def ask_to_stop(self, *names: str) -> None:
        """Has these nodes end (SIGTERM), without waiting for that. Any thread may call it."""
        for name in names:
            actor = self._actors.get(name)
            if actor is not None and name not in self._stopping:
                self._stopping[name] = actor.stop.remote()

    def stop(self, *names: str, within_s: float = math.inf) -> None:
        """Ends these nodes at the same time and takes them off the cluster; all of them where none is named.

        A node that does not end in its own time, or in `within_s` seconds, is killed with its actor.
        """
        chosen = [name for name in names or tuple(self._actors) if name in self._actors]
        self.ask_to_stop(*chosen)
        calls = {name: self._stopping.pop(name) for name in chosen}
        patience_s = max((self._patience_s[name] for name in calls), default=0.0)
        deadline = time.monotonic() + min(patience_s, within_s)
        for name, call in calls.items():
            done = self._wait([call], max(0.0, deadline - time.monotonic()))
            if not done:
                logger.warning("node.stop_unanswered name=%s: killing its actor", name)
            self._last[name] = self._answer(name, call) if done else NodeStatus(state=NodeState.STOPPED)
            self._asked.pop(name, None)
            self._ray.kill(self._actors.pop(name), no_restart=True)

    def drop(self, *names: str) -> None:
        """Kills these nodes, and what is left of those whose computer is gone; they may be started anew."""
        for name in names:
            if name in self._actors:
                self._ray.kill(self._actors.pop(name), no_restart=True)
            self._asked.pop(name, None)
            self._stopping.pop(name, None)
            self._last.pop(name, None)

    def shutdown(self, within_s: float = math.inf) -> None:
        """Stops every node, as `stop`, and leaves the cluster; one of our own ends, and its logs move to its log
        folder."""
        try:
            self.stop(within_s=within_s)
        finally:
            self._ray.shutdown()
            if self._folder is not None:
                self._keep_logs(self._folder.path)
                self._folder.remove()

    def actor_pid(self, name: str, timeout_s: float = ACTOR_TIMEOUT_S) -> int:
        """The process id of a node's actor (not of the node). Raises SupervisionError where it does not answer."""
        call = self._actors[name].pid.remote()
        if not self._wait([call], timeout_s):
            raise SupervisionError(f"the actor of {name} did not answer within {timeout_s:g} s")
        return int(self._ray.get(call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def _nodes(self) -> list[Mapping[str, Any]]:
        """Ray's nodes; of those that died while this process was looking it is still known what they had."""
        nodes = self._ray.nodes()
        self._alive |= {node["NodeID"]: node for node in nodes if node["Alive"]}
        return [node if node["Alive"] else {**self._alive.get(node["NodeID"], node), "Alive": False} for node in nodes]

    def _seated(self, what: Any, seat: Seat, resources: Mapping[str, float] | None = None) -> Any:
        """An actor or task that Ray will start in the seat; where that has a GPU that Ray chooses, it is visible."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            seat.reservation.group, placement_group_bundle_index=seat.number
        )
        sight = {"num_gpus": GPU_SIGHT} if "GPU" in seat.bundle.resources else {}
        return what.options(scheduling_strategy=strategy, resources=dict(resources or {}), **sight)

    def _wait(self, calls: Sequence[Any], timeout_s: float) -> bool:
        """True where all calls are answered (or failed) by then."""
        return not calls or not self._ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[1]

    def _said(self, call: Any) -> str | None:
        """What a call has answered; None where it has not, or its computer is gone."""
        if not self._wait([call], 0.0):
            return None
        try:
            return str(self._ray.get(call))
        except self._ray.exceptions.RayError as error:
            logger.warning("ray.no_answer %s", error)
            return None

    def _answer(self, name: str, call: Any) -> NodeStatus:
        try:
            status: NodeStatus = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            logger.warning("node.unreachable name=%s error=%s", name, error)
            return NodeStatus(state=NodeState.FAILED, error=f"{name}: {str(error).splitlines()[0]}")
        return status

    def _require_feasible(self, name: str, resources: Mapping[str, float]) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(k, 0.0) >= v for k, v in resources.items()) for node in nodes):
            return
        there = sorted({k for node in nodes for k in node if not k.startswith(("node:", "memory", "object_store"))})
        asked = ", ".join(f"{v:g} x {k}" for k, v in resources.items())
        raise PlacementError(f"{name} asked for {asked} on one machine; there is {', '.join(there)}")

    def _keep_logs(self, temp_dir: Path) -> None:
        source = temp_dir / "session_latest" / "logs"
        if self._log_dir is None or not source.is_dir():
            return
        try:
            shutil.copytree(source, self._log_dir, dirs_exist_ok=True, symlinks=True, ignore_dangling_symlinks=True)
            for folder, _, _ in os.walk(self._log_dir):  # Ray opens its own to everybody
                os.chmod(folder, 0o777 & ~umask_of())
        except OSError as error:  # a full disk costs Ray's logs only
            first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
            logger.warning("ray.logs_not_kept path=%s: %s", self._log_dir, first)


def start_local(
    resources: Mapping[str, float],
    *,
    num_cpus: int | None = None,
    object_store_bytes: int = DEFAULT_OBJECT_STORE_BYTES,
    dashboard: bool = False,
    log_dir: Path | None = None,
) -> Cluster:
    """Starts a cluster on this machine; takes some 7 s.

    Ray listens on loopback only. A token that is drawn here, for this cluster alone, keeps this machine's other users
    out; nodes do not get to see it. Its metrics ports answer without it.

    Raises:
        HalError: Ray cannot start; the message says where its logs are.
    """
    ray = import_ray(token=secrets.token_hex(32))
    folder = RayFolder()
    settings = {
        "address": "local",
        "num_cpus": num_cpus,
        "resources": dict(resources),
        "object_store_memory": object_store_bytes,
        "include_dashboard": dashboard,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "_temp_dir": str(folder.path),
        "_node_ip_address": "127.0.0.1",
    }
    try:
        init_ray(ray, START_TRIES, **settings)
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise HalError(f"Ray cannot start on this machine: {error}; its logs are under {folder.path}") from error
    except BaseException:  # Ctrl-C
        ray.shutdown()
        folder.remove()
        raise
    silence(ray)
    return Cluster(ray, folder, log_dir)


def connect(address: str) -> Cluster:
    """Joins a cluster that runs, e.g. ``10.0.0.2:6379`` or ``auto``.

    The token, where the cluster wants one, is found as Ray documents it (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH).

    Raises:
        HalError: no cluster answers there, or it refuses the token.
    """
    require_cluster(address)
    require_token(address, {"RAY_AUTH_MODE": "token", **os.environ})
    ray = import_ray(token=None)
    try:
        init_ray(ray, address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises bare ones too
        hint = "does RAY_AUTH_TOKEN_PATH name a copy of its token, and is this computer one of its nodes?"
        raise HalError(f"the Ray cluster at {address} cannot be joined: {error}; {hint}") from error
    silence(ray)
    return Cluster(ray, None, None)
