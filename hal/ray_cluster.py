"""Whether a Ray cluster answers at an address, and takes this computer's token. Ray itself tries an address where none
does for many minutes, and of a token that is refused, or not there, it prints a page.

How Ray is imported and started in this process, with its settings in place.

The folder of a Ray cluster that a program starts for itself.

Ray opens all that it makes to every user of the machine (mode 0777, without the sticky bit). Its folder lies in one
that only this user can enter. The program locks that folder for as long as it lives; the next start removes those that
killed programs left.

Ray as the control plane: resource records become Ray resources, nodes become processes that Ray keeps placed.

Ray never carries tensors and never crosses an untrusted network. It is imported when a cluster is started or joined,
with its settings already in place. Each node of a run is a process of its own under an actor: the actor's supervisor
restarts the process, Ray restarts the actor, and the process dies with its actor.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from hal.durable import umask_from_environment
from hal.errors import HalError, LeaseHeld, PlacementError, SupervisionError
from hal.lease import robot_lock
from hal.process_supervisor import ProcessState, ProcessStatus, ProcessSupervisor, RestartPolicy
from hal.ray_nodes import (
    DEFAULT_OBJECT_STORE_BYTES,
    GROUP_NAME_SEPARATOR,
    NODE_SETTINGS,
    Bundle,
    cluster_records,
    node_names,
)
from hal.resource import ResourceRecord, parse_host_port, visible_devices_env

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client begins, with empty settings (RFC 9113, 3.4). gRPC, which Ray speaks, answers with its own settings."""
_HEAD_BYTES, _TYPE_AT, _SETTINGS = 9, 3, 4  # of a frame (RFC 9113, 4.1)


def require_cluster(address: str) -> None:
    """Blocks for the two limits of time at most. An address without a port, such as ``auto``, is Ray's to judge.

    Raises:
        HalError: nothing answers at ``HOST:PORT``, or something that is no Ray cluster.
    """
    if (place := parse_host_port(address.removeprefix("ray://"))) is None:
        return
    try:
        with socket.create_connection(place, timeout=CONNECT_TIMEOUT_S) as link:
            if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
                return
            link.settimeout(ANSWER_TIMEOUT_S)
            link.sendall(_HTTP2_PREFACE)
            with link.makefile("rb") as answer:
                head = answer.read(_HEAD_BYTES)
    except (OSError, OverflowError, ValueError) as error:  # the last two: no port, and no name of a host
        raise HalError(f"no Ray cluster answers at {address}: {error}") from error
    if len(head) < _HEAD_BYTES or head[_TYPE_AT] != _SETTINGS:
        raise HalError(f"what listens at {address} is no Ray cluster")


def require_token(address: str, environment: Mapping[str, str]) -> None:
    """Asks with the token that `environment` names, as Ray documents it. Blocks for a second or two, at most for
    `ANSWER_TIMEOUT_S`. What it cannot tell is Ray's to judge, as is an address without a port.

    Ray's own client asks, in a process of its own: without a token it does not raise, but ends its process.

    Raises:
        HalError: the cluster refuses the token, or there is none.
    """
    if parse_host_port(address) is None:
        return
    argv = [sys.executable, "-c", _TOKEN_CHECK, address]
    try:
        asked = subprocess.run(argv, env=environment, capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return
    said = asked.stderr.decode(errors="replace") if asked.returncode else ""
    named = "" if environment.get("RAY_AUTH_TOKEN") else environment.get("RAY_AUTH_TOKEN_PATH", "")
    if (why := next((text for sign, text in _REFUSAL_FROM_TEXT.items() if sign in said), None)) is not None:
        raise HalError(f"the Ray cluster at {address} {why}{f' in {named}' if named else ''}: {_TOKEN_HINT}")


_TOKEN_CHECK = """
import sys
from ray._raylet import AuthenticationTokenLoader, GcsClient
AuthenticationTokenLoader.instance().has_token()
GcsClient(address=sys.argv[1])
"""
_REFUSAL_FROM_TEXT = {
    "couldn't find an authentication token": "wants a token, and none is given",
    "cannot be opened or is empty": "wants a token, and there is none",
    "AuthenticationError": "refuses the token",
}
"""By what is said of them; the first counts."""
_TOKEN_HINT = (
    "copy the file that `user-sys node head --token FILE` wrote, and give the copy as --token or RAY_AUTH_TOKEN_PATH"
)


logger = logging.getLogger(__name__)

_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    **NODE_SETTINGS,
}
_TERMINAL_SIGNALS = (signal.SIGHUP, signal.SIGTSTP)
_LOOPBACK_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Whatever its name says: the address of this machine's node is then 127.0.0.1, and every server of Ray binds to it."""


def init_ray(ray: Any, tries: int = 1, **settings: Any) -> None:
    """``ray.init``, anew where a busy machine did not let its node come up within the 30 s that Ray gives it.

    Raises:
        RuntimeError: it did not come up in so many `tries`; else as ``ray.init``.
    """
    for left in reversed(range(tries)):
        try:
            with _preserve_signals():
                ray.init(**settings)
            return
        except Exception as error:  # Ray raises a bare Exception for this
            if "timed out" not in str(error) or tries == 1:
                raise
            ray.shutdown()
            if not left:
                raise RuntimeError(f"{tries} times, {error}") from error
            logger.info("ray.slow_start: the machine is busy; trying again")


@contextlib.contextmanager
def _preserve_signals() -> Iterator[None]:
    """Keeps Ray's start from changing what SIGTERM does here, and the end of the terminal or Ctrl-Z from reaching Ray's
    processes, which are in this process's group: they are to outlive it by the time that stopping robots takes."""
    ours = threading.current_thread() is threading.main_thread()
    before, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if ours:
            signal.signal(signal.SIGTERM, before)


def import_ray(token: str | None) -> Any:
    """Ray reads its settings when it is imported, and its processes inherit them. `token`: for a cluster of ours."""
    for name, value in {**_RAY_SETTINGS, **(_LOOPBACK_SETTINGS if token is not None else {})}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if token is not None and os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", token)
    import ray

    return ray


def silence_ray(ray: Any) -> None:
    """Keeps Ray's remarks (that a worker died, say) off the terminal; its logs have them, and `statuses` the outcome.

    There is no setting for these. This switch is the one that Ray's own debugger uses while it has the terminal.
    """
    ray._private.worker._worker_logs_enabled = False


TEMP_BASE = Path("/tmp")  # a socket's path has at most 107 bytes
TEMP_PREFIX = "user-sys-cluster-"


class RayTempFolder:
    """A new folder, which only this user can enter. `path` is the part of it that is Ray's."""

    def __init__(self) -> None:
        """Removes what killed programs left, too. Raises OSError: there is no room."""
        _remove_stale_folders()
        while (handle := _lock_folder(home := Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=TEMP_BASE)))) is None:
            pass
        self._home, self._handle = home, handle
        self.path = home / "r"

    def remove(self) -> None:
        """Calling it twice is harmless."""
        if self._handle >= 0:
            shutil.rmtree(self._home, ignore_errors=True)
            os.close(self._handle)
            self._handle = -1


def _lock_folder(home: Path) -> int | None:
    """The handle that keeps the lock of a folder that was just made; None if another start took it for a leftover."""
    try:
        handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(handle, fcntl.LOCK_EX)
    if home.exists():
        return handle
    os.close(handle)
    return None


def _remove_stale_folders() -> None:
    """Removes this user's folders that no living process has locked."""
    for home in TEMP_BASE.glob(f"{TEMP_PREFIX}*"):
        try:
            handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or gone
            continue
        try:
            if os.fstat(handle).st_uid == os.getuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)


__all__ = [
    "RayCluster",
    "ProcessActor",
    "ProcessState",
    "ProcessStatus",
    "Reservation",
    "RestartPolicy",
    "PlacementSlot",
    "connect_cluster",
    "start_local_cluster",
]


STATUS_TIMEOUT_S = 1.0
ACTOR_TIMEOUT_S = 30.0
RESERVE_TIMEOUT_S = 10.0
VISIBLE_GPU_SHARE = 0.01  # of a GPU that Ray has chosen, reserved as a whole: several processes of its job may see it
LOCK_TIMEOUT_S = 120.0  # a process of Ray's starts for it, on a computer that may be busy
UNKNOWN_OWNER = "somebody, perhaps: its computer does not answer"
START_TRIES = 4
STOP_MARGIN_S = 15.0  # beyond a node's own deadline: the actor's answer, through a busy machine


class ProcessActor:
    """Runs one node in a child process; Ray starts it anew, child and all, wherever its own process dies."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: str, restart: RestartPolicy) -> None:
        os.umask(
            umask_from_environment({**os.environ, **env})
        )  # Ray on this computer may have been started by another program
        self._supervisor = ProcessSupervisor(argv, env, Path(log_path) if log_path else None, restart)
        self._failure: ProcessStatus | None = None
        try:
            self._supervisor.start()
        except SupervisionError as error:
            self._failure = ProcessStatus(state=ProcessState.FAILED, error=str(error))

    def status(self) -> ProcessStatus:
        return self._failure or self._supervisor.status()

    def stop(self) -> ProcessStatus:
        return self._failure or self._supervisor.stop()

    def pid(self) -> int:
        """Of the actor's own process."""
        return os.getpid()


class RobotLockActor:
    """Has a robot's lock on its computer, from when a job gets the robot until its driver process takes over. Where its
    process dies meanwhile, Ray starts it anew, and it has the lock again before anybody asks for it."""

    def __init__(self, robot: str, holder: str, simulated: bool) -> None:
        self._lock = robot_lock(robot, holder, simulated=simulated)
        self.acquire()

    def acquire(self) -> str:
        """Who drives the robot already, in words; empty where the lock is had."""
        try:
            self._lock.acquire()
        except LeaseHeld:
            return self._lock.owner() or "another process"
        return ""


def read_text(path: str) -> str:
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

    def slots(self) -> tuple[PlacementSlot, ...]:
        """One for each bundle."""
        return tuple(PlacementSlot(self, number, bundle.node) for number, bundle in enumerate(self.bundles))


@dataclass(frozen=True)
class PlacementSlot:
    """One bundle of a reservation, on the computer `node`: nodes of a run may be started in it."""

    reservation: Reservation
    index: int
    node: str

    @property
    def bundle(self) -> Bundle:
        return self.reservation.bundles[self.index]

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The UUIDs of all GPUs that the reservation has on this computer, as far as they are known; the seat's own is
        the first. None where the seat has no GPU, or one that Ray has chosen."""
        if not self.bundle.uuid:
            return ()
        others = [each.uuid for each in self.reservation.bundles if each.node == self.node and each.uuid]
        return tuple(dict.fromkeys([self.bundle.uuid, *others]))


class RayCluster:
    """A Ray cluster that this process has started or joined, and the nodes it runs there. One thread calls it."""

    def __init__(self, ray: Any, folder: RayTempFolder | None, log_dir: Path | None) -> None:
        """Made by `start_local_cluster` and `connect_cluster`; `folder` is set if the cluster is ours to end."""
        self._ray = ray
        self._folder = folder
        self._log_dir = log_dir
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._stopping: dict[str, Any] = {}  # the answers of nodes that were asked to end
        self._last: dict[str, ProcessStatus] = {}
        self._patience_s: dict[str, float] = {}
        self._alive: dict[str, Mapping[str, Any]] = {}  # each node, as it was when it was alive
        self._keepers: list[Any] = []

    @property
    def address(self) -> str:
        """Of this machine, as the cluster's other nodes reach it."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def local_resource(self) -> str:
        """The resource that stands for the machine of this process; every Ray node declares its own."""
        return f"node:{self.address}"

    def records(self, *, assume_unused: bool = False) -> tuple[ResourceRecord, ...]:
        """What the cluster has (`hal.ray_nodes`), as it is now; `unused`: as it were if nobody used any of it."""
        nodes = self._nodes()
        if assume_unused:
            return cluster_records(nodes, {}, ())
        free = self._ray._private.state.available_resources_per_node()  # no public call tells it of each node
        return cluster_records(nodes, free, self._ray.util.placement_group_table().values())

    def address_from_node(self) -> dict[str, str]:
        """Ray's address of each living node, by the name that its records carry."""
        nodes = self._nodes()
        names = node_names(nodes)
        return {names[node["NodeID"]]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}

    def hostname_from_node(self) -> dict[str, str]:
        """The host name of each living node, by the name that its records carry."""
        nodes = self._nodes()
        names = node_names(nodes)
        return {names[node["NodeID"]]: node["NodeManagerHostname"] for node in nodes if node["Alive"]}

    def reserve(self, name: str, bundles: Sequence[Bundle]) -> Reservation | None:
        """All of `bundles`, for this process under the name `name`; None where not all are free just now."""
        once = f"{name}{GROUP_NAME_SEPARATOR}{secrets.token_hex(8)}"  # Ray refuses a second group of a name
        group = self._ray.util.placement_group([bundle.resources for bundle in bundles], name=once)
        if self._wait([group.ready()], RESERVE_TIMEOUT_S):  # unlike `group.wait` it lets signals be heard
            return Reservation(group, tuple(bundles))
        self._ray.util.remove_placement_group(group)
        return None

    def release(self, reservation: Reservation) -> None:
        """Gives it back; what runs in it is killed."""
        self._ray.util.remove_placement_group(reservation.group)

    def lost_nodes(self, reservation: Reservation) -> tuple[str, ...]:
        """The computers that are gone with what it had of them."""
        there = self._ray.util.placement_group_table(reservation.group)["bundles_to_node_id"]
        alive = {node["NodeID"] for node in self._nodes() if node["Alive"]}
        return tuple(sorted({b.node for number, b in enumerate(reservation.bundles) if there.get(number) not in alive}))

    def read_remote(self, slot: PlacementSlot, path: Path) -> Callable[[float], str | None]:
        """Has the file at `path` read on the seat's computer, without waiting for that. What is returned waits so many
        seconds at most: what the file says, empty where it is not there or its computer is gone; None: no answer yet.
        """
        call = self._seated(self._ray.remote(num_cpus=0)(read_text), slot).remote(str(path))
        return lambda wait_s: (self._said(call) or "") if self._wait([call], wait_s) else None

    def lock_robots(
        self, slots: Mapping[str, PlacementSlot], holder: str, simulated: Collection[str]
    ) -> dict[str, str]:
        """Takes the locks of these robots on their computers, until `release_robot_locks`. `simulated`: the names of
        those.

        Returns:
            The robots that somebody else drives, outside of the cluster, and who; none is kept where there is one.
        """
        keepers = {}
        for robot, seat in slots.items():
            actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(RobotLockActor)
            keepers[robot] = self._seated(actor, seat).remote(robot, holder, robot in simulated)
        self._keepers += keepers.values()
        calls = {robot: keeper.take.remote() for robot, keeper in keepers.items()}
        self._wait(list(calls.values()), LOCK_TIMEOUT_S)
        answers = {robot: self._said(call) for robot, call in calls.items()}
        taken = {robot: UNKNOWN_OWNER if owner is None else owner for robot, owner in answers.items() if owner != ""}
        if taken:
            self.release_robot_locks()
        return taken

    def release_robot_locks(self) -> None:
        """Lets go of the robots' locks: their driver processes take them next."""
        for keeper in self._keepers:
            self._ray.kill(keeper, no_restart=True)
        self._keepers.clear()

    def has_resource(self, resource: str) -> bool:
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
        slot: PlacementSlot | None = None,
    ) -> None:
        """Has the node `name` placed where `resources` are, or in `seat`, and started there; does not wait for that.

        Of the GPUs of the computer it sees those of the seat's reservation, the seat's own first.

        Raises:
            PlacementError: no node of the cluster has these resources, or `name` is taken.
        """
        if name in self._actors:
            raise PlacementError(f"a node named {name} runs already")
        if slot is None:
            self._require_feasible(name, resources)
        policy = restart or RestartPolicy()
        actor = self._ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(ProcessActor)
        placed = self._seated(actor, slot, resources) if slot else actor.options(resources=dict(resources))
        unprivileged = {"RAY_AUTH_TOKEN": "", **visible_devices_env(slot.gpu_uuids if slot else ()), **(env or {})}
        self._actors[name] = placed.remote(list(argv), unprivileged, str(log_path or ""), policy)
        self._last[name] = ProcessStatus(state=ProcessState.WAITING)
        self._patience_s[name] = policy.stop_after_s + STOP_MARGIN_S

    def statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, ProcessStatus]:
        """Every node as it is now; one that does not answer in time (not placed yet, being restarted) is WAITING. One
        that `request_stop` has asked is as it was, until it has ended."""
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
                    self._last[name], state=ProcessState.WAITING, pid=None, error=""
                )
        return dict(self._last)

    def request_stop(self, *names: str) -> None:
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
        self.request_stop(*chosen)
        calls = {name: self._stopping.pop(name) for name in chosen}
        patience_s = max((self._patience_s[name] for name in calls), default=0.0)
        deadline = time.monotonic() + min(patience_s, within_s)
        for name, call in calls.items():
            done = self._wait([call], max(0.0, deadline - time.monotonic()))
            if not done:
                logger.warning("node.stop_unanswered name=%s: killing its actor", name)
            self._last[name] = self._answer(name, call) if done else ProcessStatus(state=ProcessState.STOPPED)
            self._asked.pop(name, None)
            self._ray.kill(self._actors.pop(name), no_restart=True)

    def kill(self, *names: str) -> None:
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

    def _seated(self, what: Any, seat: PlacementSlot, resources: Mapping[str, float] | None = None) -> Any:
        """An actor or task that Ray will start in the seat; where that has a GPU that Ray chooses, it is visible."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            seat.reservation.group, placement_group_bundle_index=seat.index
        )
        sight = {"num_gpus": VISIBLE_GPU_SHARE} if "GPU" in seat.bundle.resources else {}
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

    def _answer(self, name: str, call: Any) -> ProcessStatus:
        try:
            status: ProcessStatus = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            logger.warning("node.unreachable name=%s error=%s", name, error)
            return ProcessStatus(state=ProcessState.FAILED, error=f"{name}: {str(error).splitlines()[0]}")
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
                os.chmod(folder, 0o777 & ~umask_from_environment())
        except OSError as error:  # a full disk costs Ray's logs only
            first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
            logger.warning("ray.logs_not_kept path=%s: %s", self._log_dir, first)


def start_local_cluster(
    resources: Mapping[str, float],
    *,
    num_cpus: int | None = None,
    object_store_bytes: int = DEFAULT_OBJECT_STORE_BYTES,
    dashboard: bool = False,
    log_dir: Path | None = None,
) -> RayCluster:
    """Starts a cluster on this machine; takes some 7 s.

    Ray listens on loopback only. A token that is drawn here, for this cluster alone, keeps this machine's other users
    out; nodes do not get to see it. Its metrics ports answer without it.

    Raises:
        HalError: Ray cannot start; the message says where its logs are.
    """
    ray = import_ray(token=secrets.token_hex(32))
    folder = RayTempFolder()
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
    silence_ray(ray)
    return RayCluster(ray, folder, log_dir)


def connect_cluster(address: str) -> RayCluster:
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
    silence_ray(ray)
    return RayCluster(ray, None, None)
