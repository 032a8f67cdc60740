"""Ray as the control plane: reservations and process placement on the computers of a cluster.

Resource records become Ray resources (`hal.ray_nodes`), and each process of a run becomes a child process of an actor.
The actor's supervisor restarts the process, Ray restarts the actor, and the process ends with its actor. Ray carries no
tensors and crosses no untrusted network. Ray is imported when a cluster is started or joined, after its settings.

The address is checked before Ray is asked, since Ray retries a dead address for minutes. A cluster of our own has its
files in a folder that other users cannot enter: Ray opens its own files to every user (mode 0777, without the sticky
bit).
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
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from hal.durable import umask_from_environment
from hal.errors import HalError, PlacementError, SupervisionError
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

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0
RESERVE_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 120.0  # Ray starts a process for it, on a computer that may be busy
STOP_MARGIN_S = 15.0  # beyond a process's own deadline: the actor's answer, on a busy computer
START_TRIES = 4
TEMP_BASE = Path("/tmp")  # a socket's path has at most 107 bytes
TEMP_PREFIX, RAY_FOLDER = "user-sys-cluster-", "r"
_TERMINAL_SIGNALS = (signal.SIGHUP, signal.SIGTSTP)
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    **NODE_SETTINGS,
}
_LOOPBACK_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Despite its name it makes 127.0.0.1 the address of this machine's node, and all of Ray's servers bind to it."""


def require_server(address: str) -> None:
    """Raises HalError unless something listens at ``HOST:PORT``. Blocks for at most `CONNECT_TIMEOUT_S`.

    An address without a port, such as ``auto``, is not checked.
    """
    if (host_port := parse_host_port(address.removeprefix("ray://"))) is None:
        return
    try:
        socket.create_connection(host_port, timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, ValueError) as error:  # the last two: an impossible port or host name
        raise HalError(f"no Ray cluster answers at {address}: {error}") from error


def init_ray(ray: Any, tries: int = 1, **settings: Any) -> None:
    """``ray.init``, with further tries if a busy machine exceeds the 30 s that Ray gives its node.

    Raises:
        RuntimeError: the node did not start in `tries` tries; else as ``ray.init``.
    """
    for left in reversed(range(tries)):
        try:
            with _preserve_signals():
                ray.init(**settings)
            return
        except Exception as error:  # Ray raises a bare Exception for this
            _end_unfinished_node(ray, error)
            if "timed out" not in str(error) or tries == 1:
                raise
            ray.shutdown()
            if not left:
                raise RuntimeError(f"{tries} times, {error}") from error
            logger.info("ray.slow_start: the machine is busy; retrying")


def _end_unfinished_node(ray: Any, error: BaseException) -> None:
    """Ends the processes of a node whose constructor raised `error`: only its frame has the node, so that
    ``ray.shutdown`` does not end it, and its head would run until this program ends."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(node := frame.f_locals.get("self"), ray._private.node.Node):
            node.kill_all_processes(check_alive=False, allow_graceful=True)


@contextlib.contextmanager
def _preserve_signals() -> Iterator[None]:
    """Keeps this process's handler of SIGTERM, which Ray's start replaces, and blocks the terminal's signals in Ray's
    processes. They are in this process's group, and must outlive it until the robots are stopped."""
    is_main = threading.current_thread() is threading.main_thread()
    before, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGTERM, before)


def import_ray(token: str | None) -> Any:
    """Imports Ray with its settings, which its processes inherit. `token`: for a cluster of our own, else None."""
    for name, value in {**_RAY_SETTINGS, **(_LOOPBACK_SETTINGS if token is not None else {})}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if token is not None and os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", token)
    import ray

    return ray


def silence_ray(ray: Any) -> None:
    """Keeps the messages of Ray's workers off the terminal. Ray's logs have them, and `statuses` has the outcome.

    Ray has no setting for this. The switch is the one that Ray's own debugger uses while it has the terminal.
    """
    ray._private.worker._worker_logs_enabled = False


class RayFolder:
    """A new folder that only this user can enter. Its lock tells it from the folders of killed programs."""

    def __init__(self) -> None:
        """Removes this user's folders that no process has locked first. Raises OSError: the disk is full."""
        for stale in TEMP_BASE.glob(f"{TEMP_PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's or a running program's folder, or removed meanwhile
                handle = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if os.fstat(handle).st_uid == os.getuid():
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(stale, ignore_errors=True)
                finally:
                    os.close(handle)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=TEMP_BASE))
            with contextlib.suppress(FileNotFoundError):  # another program removed it before it was locked
                self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._handle)

    def remove(self) -> None:
        """Removes the folder. Calling it twice is harmless."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class ProcessActor:
    """Runs one process of a run as a child process. Ray restarts the actor, and with it the child."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: str, restart: RestartPolicy) -> None:
        os.umask(umask_from_environment({**os.environ, **env}))  # another program may have started Ray on this computer
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


def read_text(path: str) -> str:
    """The text of the file at `path` on this computer; empty if it is missing."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Reservation:
    """The resources of one placement group. It ends with the process that made it, also after a kill."""

    group: Any
    bundles: tuple[Bundle, ...]

    def slots(self) -> tuple[PlacementSlot, ...]:
        """One slot for each bundle."""
        return tuple(PlacementSlot(self, number, bundle.node) for number, bundle in enumerate(self.bundles))


@dataclass(frozen=True)
class PlacementSlot:
    """One bundle of a reservation, on the computer `node`: processes of a run can be started in it."""

    reservation: Reservation
    index: int
    node: str

    @property
    def bundle(self) -> Bundle:
        return self.reservation.bundles[self.index]

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The known UUIDs of the reservation's GPUs on this computer, the slot's own first. Empty if the slot has no
        GPU."""
        if not self.bundle.uuid:
            return ()
        others = [each.uuid for each in self.reservation.bundles if each.node == self.node and each.uuid]
        return tuple(dict.fromkeys([self.bundle.uuid, *others]))


class RayCluster:
    """A Ray cluster that this process has started or joined, and its own processes there. One thread calls it."""

    def __init__(self, ray: Any, folder: RayFolder | None, log_dir: Path | None) -> None:
        """Made by `start_local_cluster` and `connect_cluster`; `folder` has the files of a cluster of our own."""
        self._ray = ray
        self._folder = folder
        self._log_dir = log_dir
        self._actors: dict[str, Any] = {}
        self._status_calls: dict[str, Any] = {}
        self._stop_calls: dict[str, Any] = {}
        self._last: dict[str, ProcessStatus] = {}
        self._stop_timeout_s: dict[str, float] = {}
        self._alive: dict[str, Mapping[str, Any]] = {}  # each Ray node, when it was last alive

    @property
    def address(self) -> str:
        """The address of this machine for the cluster's other nodes."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def local_resource(self) -> str:
        """The Ray resource of this process's machine; every Ray node declares its own."""
        return f"node:{self.address}"

    def records(self, *, assume_unused: bool = False) -> tuple[ResourceRecord, ...]:
        """The cluster's resources at present (`hal.ray_nodes`); with `assume_unused`, as if none were reserved."""
        nodes = self._nodes()
        if assume_unused:
            return cluster_records(nodes, {}, ())
        free = self._ray._private.state.available_resources_per_node()  # there is no public call for each node
        return cluster_records(nodes, free, self._ray.util.placement_group_table().values())

    def address_from_node(self) -> dict[str, str]:
        """Ray's address of each living node, by the name in its records."""
        nodes = self._nodes()
        names = node_names(nodes)
        return {names[node["NodeID"]]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}

    def reserve(self, name: str, bundles: Sequence[Bundle]) -> Reservation | None:
        """Reserves all `bundles` for this process under the name `name`; None if not all are free at present."""
        once = f"{name}{GROUP_NAME_SEPARATOR}{secrets.token_hex(8)}"  # Ray requires unique names
        group = self._ray.util.placement_group([bundle.resources for bundle in bundles], name=once)
        if self._wait([group.ready()], RESERVE_TIMEOUT_S):  # unlike `group.wait` it lets signal handlers run
            return Reservation(group, tuple(bundles))
        self._ray.util.remove_placement_group(group)
        return None

    def release(self, reservation: Reservation) -> None:
        """Ends the reservation; processes in it are killed."""
        self._ray.util.remove_placement_group(reservation.group)

    def lost_nodes(self, reservation: Reservation) -> tuple[str, ...]:
        """The computers of the reservation that are lost."""
        node_ids = self._ray.util.placement_group_table(reservation.group)["bundles_to_node_id"]
        alive = {node["NodeID"] for node in self._nodes() if node["Alive"]}
        lost = {b.node for number, b in enumerate(reservation.bundles) if node_ids.get(number) not in alive}
        return tuple(sorted(lost))

    def read_remote(self, slots: Sequence[PlacementSlot], path: Path) -> list[str]:
        """The text of the file at `path` on each slot's computer, in at most `READ_TIMEOUT_S`.

        It is empty if the computer has no such file, is lost or does not answer.
        """
        task = self._ray.remote(num_cpus=0)(read_text)
        calls = [self._in_slot(task, slot).remote(str(path)) for slot in slots]
        self._wait(calls, READ_TIMEOUT_S)
        return [self._text_answer(call) for call in calls]

    def has_resource(self, resource: str) -> bool:
        """Whether some living node of the cluster declares `resource`, in use or not."""
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
        """Starts the process `name` in `slot`, or on a node with `resources`; does not wait for the start.

        The process sees the GPUs of the slot's reservation on its computer, the slot's own first.

        Raises:
            PlacementError: `name` is in use.
        """
        if name in self._actors:
            raise PlacementError(f"a process named {name} is running already")
        policy = restart or RestartPolicy()
        actor = self._ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(ProcessActor)
        placed = self._in_slot(actor, slot, resources) if slot else actor.options(resources=dict(resources))
        unprivileged = {"RAY_AUTH_TOKEN": "", **visible_devices_env(slot.gpu_uuids if slot else ()), **(env or {})}
        self._actors[name] = placed.remote(list(argv), unprivileged, str(log_path or ""), policy)
        self._last[name] = ProcessStatus(state=ProcessState.WAITING)
        self._stop_timeout_s[name] = policy.stop_after_s + STOP_MARGIN_S

    def statuses(self) -> dict[str, ProcessStatus]:
        """The status of every process. A process whose actor does not answer in `STATUS_TIMEOUT_S` (not placed yet,
        restarting) is WAITING. After `request_stop`, a process keeps its last status until it has ended."""
        for name, call in list(self._stop_calls.items()):
            self._status_calls.pop(name, None)
            if name in self._actors and self._wait([call], 0.0):
                self._last[name] = self._status_answer(name, call)
        for name, actor in self._actors.items():
            if name not in self._status_calls and name not in self._stop_calls:  # one call at a time, or they pile up
                self._status_calls[name] = actor.status.remote()
        self._wait(list(self._status_calls.values()), STATUS_TIMEOUT_S)
        for name, call in list(self._status_calls.items()):
            if self._wait([call], 0.0):
                self._last[name] = self._status_answer(name, self._status_calls.pop(name))
            else:
                self._last[name] = msgspec.structs.replace(
                    self._last[name], state=ProcessState.WAITING, pid=None, error=""
                )
        return dict(self._last)

    def request_stop(self, *names: str) -> None:
        """Sends SIGTERM to these processes without waiting for their end. Any thread may call it."""
        for name in names:
            actor = self._actors.get(name)
            if actor is not None and name not in self._stop_calls:
                self._stop_calls[name] = actor.stop.remote()

    def stop(self, *names: str, within_s: float = math.inf) -> None:
        """Ends these processes concurrently and removes them from the cluster; all of them without names.

        A process that does not end by its own deadline, or in `within_s` seconds, is killed with its actor.
        """
        chosen = [name for name in names or tuple(self._actors) if name in self._actors]
        self.request_stop(*chosen)
        calls = {name: self._stop_calls.pop(name) for name in chosen}
        timeout_s = max((self._stop_timeout_s[name] for name in calls), default=0.0)
        deadline = time.monotonic() + min(timeout_s, within_s)
        for name, call in calls.items():
            done = self._wait([call], max(0.0, deadline - time.monotonic()))
            if not done:
                logger.warning("process.stop_unanswered name=%s: killing its actor", name)
            self._last[name] = self._status_answer(name, call) if done else ProcessStatus(state=ProcessState.STOPPED)
            self._status_calls.pop(name, None)
            self._ray.kill(self._actors.pop(name), no_restart=True)

    def kill(self, *names: str) -> None:
        """Kills these processes and forgets those of lost computers; their names may be used again."""
        for name in names:
            if name in self._actors:
                self._ray.kill(self._actors.pop(name), no_restart=True)
            self._status_calls.pop(name, None)
            self._stop_calls.pop(name, None)
            self._last.pop(name, None)

    def shutdown(self, within_s: float = math.inf) -> None:
        """Stops every process as `stop` does and leaves the cluster. A cluster of our own ends, and its logs move to
        its log folder."""
        try:
            self.stop(within_s=within_s)
        finally:
            self._ray.shutdown()
            if self._folder is not None:
                self._keep_logs(self._folder.path)
                self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def _nodes(self) -> list[Mapping[str, Any]]:
        """Ray's nodes; a dead one with the resources that it had, if this process has seen it alive."""
        nodes = self._ray.nodes()
        self._alive |= {node["NodeID"]: node for node in nodes if node["Alive"]}
        return [node if node["Alive"] else {**self._alive.get(node["NodeID"], node), "Alive": False} for node in nodes]

    def _in_slot(self, target: Any, slot: PlacementSlot, resources: Mapping[str, float] | None = None) -> Any:
        """An actor or task that Ray starts in the slot."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            slot.reservation.group, placement_group_bundle_index=slot.index
        )
        return target.options(scheduling_strategy=strategy, resources=dict(resources or {}))

    def _wait(self, calls: Sequence[Any], timeout_s: float) -> bool:
        """Whether all calls have answered or failed by then."""
        return not calls or not self._ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[1]

    def _text_answer(self, call: Any) -> str:
        try:
            return str(self._ray.get(call, timeout=0))
        except self._ray.exceptions.RayError as error:
            logger.warning("ray.no_answer %s", error)
            return ""

    def _status_answer(self, name: str, call: Any) -> ProcessStatus:
        try:
            status: ProcessStatus = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            logger.warning("process.unreachable name=%s error=%s", name, error)
            return ProcessStatus(state=ProcessState.FAILED, error=f"{name}: {str(error).splitlines()[0]}")
        return status

    def _keep_logs(self, folder: Path) -> None:
        source = folder / RAY_FOLDER / "session_latest" / "logs"
        if self._log_dir is None or not source.is_dir():
            return
        try:
            shutil.copytree(source, self._log_dir, dirs_exist_ok=True, symlinks=True, ignore_dangling_symlinks=True)
            for opened, _, _ in os.walk(self._log_dir):  # Ray opens its folders to every user
                os.chmod(opened, 0o777 & ~umask_from_environment())
        except OSError as error:  # a full disk: only Ray's logs are lost
            first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
            logger.warning("ray.logs_not_kept path=%s: %s", self._log_dir, first)


def start_local_cluster(
    resources: Mapping[str, float],
    *,
    num_cpus: int | None = None,
    object_store_bytes: int = DEFAULT_OBJECT_STORE_BYTES,
    log_dir: Path | None = None,
) -> RayCluster:
    """Starts a cluster on this machine; takes some 7 s.

    Ray listens on loopback only. A new token for this cluster keeps this machine's other users out; the run's
    processes do not receive it. Ray's metrics ports answer without a token.

    Raises:
        HalError: Ray cannot start; the message has the folder of its logs.
    """
    ray = import_ray(token=secrets.token_hex(32))
    folder = RayFolder()
    settings = {
        "address": "local",
        "num_cpus": num_cpus,
        "resources": dict(resources),
        "object_store_memory": object_store_bytes,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "_temp_dir": str(folder.path / RAY_FOLDER),
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
    """Joins a running cluster, e.g. ``10.0.0.2:6379`` or ``auto``.

    The cluster's token, if it has one, comes from RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, as Ray documents it.

    Raises:
        HalError: no cluster answers there, or it refuses the token.
    """
    require_server(address)
    ray = import_ray(token=None)
    try:
        init_ray(ray, address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises bare ones too
        raise HalError(
            f"the Ray cluster at {address} cannot be joined: {error}; check that RAY_AUTH_TOKEN_PATH names a copy of "
            "the file that `user-sys node head --token FILE` wrote, and that this computer is one of its nodes"
        ) from error
    silence_ray(ray)
    return RayCluster(ray, None, None)
