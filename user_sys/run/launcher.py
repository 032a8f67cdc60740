"""Before anything of a run starts: what cannot work is said, its places are taken, its folder is made.

Tells a process that cannot do its work, however often it is started, from one that was ended at its work.

A run's policy process: where it goes, and that it goes elsewhere when its computer is lost.

``user-sys train``: starts a run's processes on Ray, shows them, and brings them to a clean end.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hal.audit import AUDIT_FILE, AuditLog
from hal.discovery import discover
from hal.durable import UMASK_VARIABLE, umask_from_environment
from hal.placement import format_list
from hal.process_supervisor import exit_reason
from hal.ray_cluster import (
    PlacementSlot,
    ProcessState,
    ProcessStatus,
    RayCluster,
    RestartPolicy,
    connect_cluster,
    start_local_cluster,
)
from hal.ray_nodes import ray_resources
from hal.resource import local_node, visible_devices_env
from hal.signals import TerminationRequest, bounded_shutdown
from hal.spec import RobotSpec
from user_sys.commands.stop import with_local_estop
from user_sys.compose import RobotConfig, emulated_link_settings, resource_probes, robot_spec
from user_sys.config import load, save
from user_sys.console.hub import ConsoleHub, HubMessage
from user_sys.edge.demonstrations import check_demonstrable
from user_sys.edge.driver_client import WAITING_LOG_PREFIX
from user_sys.errors import RunError, WireError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.learner.checkpoint import (
    RESTART_FLAG,
    CheckpointScan,
    quarantine_checkpoints,
    scan_checkpoints,
    unreadable_message,
)
from user_sys.logs import last_log_message
from user_sys.messages import (
    PROTOCOL_VERSION,
    EpisodeReport,
    Hello,
    MetricsReport,
    ResourceUpdate,
    RobotStatus,
    StopRun,
)
from user_sys.process_exit import EXIT_DEADLINE_S, ExitStatus, abort_run
from user_sys.robot_records import (
    EXIT_ORPHANED,
    LEARNER,
    assign_learners,
    is_learner_name,
    learner_from_robot,
    learner_process_name,
    read_robot_records,
)
from user_sys.run.allocation import LocalAllocation
from user_sys.run.cluster_allocation import ClusterAllocation
from user_sys.run.config import (
    ConsoleConfig,
    ProcessSpec,
    RunConfig,
    RunFolder,
    RunMetadata,
    create_run_folder,
    default_run_name,
    open_run_folder,
    policy_process,
    require_no_run,
    topology,
)
from user_sys.run.demonstrations import record_all_demonstrations
from user_sys.run.metrics import MetricsWriter, RunLogger
from user_sys.run.prepare import (
    CONSOLE,
    GATEWAY,
    LOOPBACK,
    allow_learner,
    free_endpoint,
    link_keys,
    local_endpoint,
    prepare_run_folder,
    require_allowed,
    require_keys,
)
from user_sys.run.progress import ProgressDisplay, ProgressTracker, previous_elapsed_s, previous_episodes
from user_sys.run.report import RunSummary, evaluate_and_report, exit_status, link_latest
from user_sys.run.topology import ProcessSlot, cluster_slots, learner_processes, local_slots
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import Keyring, load_keypair, load_public_key

if TYPE_CHECKING:
    from user_sys.console.server import ConsoleServer


def load_run(args: Namespace, verb: str) -> tuple[RunConfig, Path]:
    """The run's configuration, and where its folder is or will be; what cannot work is said before anything is made."""
    if args.resume:
        folder, config, _ = open_run_folder(Path(args.resume), args.overrides)
        _require_free_port(config)
        if not args.restart_if_unreadable:
            for path, found in _surveyed_checkpoints(folder):
                if found.is_all_unreadable:
                    raise RunError(unreadable_message(path, found))
        return config, folder.path
    config = load(RunConfig, Path(args.config), args.overrides)
    if verb == "train" and not config.robots:
        raise RunError(
            f"{args.config}: robots: a run needs at least one robot; "
            "where they come in from computers of their own, run it with `user-sys cloud`"
        )
    _require_free_port(config)
    require_keys(config.gateway.endpoint, args.keys)
    require_allowed(config.guests, args.keys)
    for robot in _buildable_robots(config):
        check_demonstrable(robot, config.demonstrations)
        if robot.link:
            emulated_link_settings(robot, "", "")
    home = config.runs / (args.name or config.name or default_run_name(Path(args.config)))
    require_no_run(home)
    return config, home


def _buildable_robots(config: RunConfig) -> Iterator[RobotConfig]:
    """The run's robots, but for those that it may choose from and cannot, since they cannot be built here."""
    for robot in config.robots:
        try:
            robot_spec(robot)
        except Exception:  # a foreign driver may fail in any way
            if not config.selects_robots:
                raise
            continue
        yield robot


def open_or_create_folder(args: Namespace, config: RunConfig, home: Path) -> tuple[RunFolder, RunMetadata]:
    """The run's folder: made, or the one that is there."""
    if args.resume:
        folder, _, card = open_run_folder(home)
        if args.overrides:
            save(config, folder.config)
        return folder, card
    folder, card = create_run_folder(config, home.name, free_endpoint(config.gateway.endpoint))
    if args.keys:
        link_keys(folder, args.keys)
    return folder, card


@dataclass(frozen=True)
class Allocation:
    """What a run has got before anything of it is made.

    Attributes:
        config: the run, with the robots alone that it drives.
        cluster: its part of the cluster that it runs on; None on one of its own, which has this computer alone.
        learner_gpus: the UUIDs of this computer's GPUs that meet its learners' needs, where it runs on this computer
            alone.
        policy_gpus: likewise, of its policy process.
    """

    config: RunConfig
    cluster: ClusterAllocation | None = None
    learner_gpus: tuple[str, ...] = ()
    policy_gpus: tuple[str, ...] = ()


@contextmanager
def acquire_resources(config: RunConfig, home: Path, console: Console) -> Iterator[Allocation]:
    """Takes what the run needs of this computer, or of the cluster, for as long as the context is.

    A run that goes on is given the robots that it had, which are all that its folder's configuration lists.

    Raises:
        PlacementError: the run needs what there is not.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if not config.ray.address:
        with LocalAllocation(config, home.name, home.parent) as here:
            here.acquire(say)
            yield Allocation(here.config, learner_gpus=here.learner_gpus, policy_gpus=here.policy_gpus)
        return
    with ClusterAllocation(connect_cluster(config.ray.address), config, home.name, home.parent) as gang:
        gang.acquire(say)
        yield Allocation(gang.config, gang)


def _surveyed_checkpoints(folder: RunFolder) -> Iterator[tuple[Path, CheckpointScan]]:
    """The folder of each learner's checkpoints, and what can be read there."""
    further = (path for path in sorted(folder.checkpoints.glob("*/")) if is_learner_name(path.name))
    for path in (folder.checkpoints, *further):
        yield path, scan_checkpoints(path)


def report_unreadable_checkpoints(folder: RunFolder, console: Console) -> None:
    """Says which checkpoints cannot be read; those of a learner that has no other are kept aside."""
    for path, found in _surveyed_checkpoints(folder):
        if found.unreadable:
            outcome = (
                f"{RESTART_FLAG}: training begins anew; they are kept in {quarantine_checkpoints(path)}"
                if found.is_all_unreadable
                else f"training goes on from {found.readable}"
            )
            console.print(f"cannot be read: {found}; {outcome}", highlight=False, markup=False, soft_wrap=True)


def print_join_instructions(folder: RunFolder, metadata: RunMetadata, console: Console) -> None:
    """Tells people how robots come in."""
    ring = Keyring(folder.keys)
    allowed = ", ".join(entry.name for entry in ring.list() if entry.role not in ("learner", "console"))
    public = load_public_key(folder.keys / f"{GATEWAY}.pub")
    _, _, port = metadata.endpoint.rpartition(":")
    reached = (
        f"tcp://{local_node()}:{port}" if local_endpoint(metadata.endpoint) != metadata.endpoint else metadata.endpoint
    )
    for line in (
        f"listening on {metadata.endpoint}; this gateway's public key is {public}",
        f"let in: {allowed or 'no robot yet; user-sys keys allow NAME --role robot --folder ' + str(folder.keys)}",
        f"on a robot's computer: user-sys edge CONFIG --connect {reached}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _require_free_port(config: RunConfig) -> None:
    """Raises RunError when the console's port is taken: recording demonstrations first would waste a person's time."""
    if not config.console.enabled:
        return
    try:
        socket.create_server(("127.0.0.1", config.console.port)).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"console: port {config.console.port} cannot be listened on ({getattr(error, 'strerror', error)}); "
            "choose another with --console.port, or 0"
        ) from None


MAX_FAILED_STARTS = 3


class CrashLoopDetector:
    """What is known of the starts of a run's processes, by their names. One thread calls it."""

    def __init__(self) -> None:
        self._heard: set[str] = set()
        self._restarts: dict[str, int] = {}  # of a process when it last was at work
        self._told: dict[str, int] = {}  # restarts, by `was_restarted`

    def mark_healthy(self, name: str) -> None:
        """It has just shown that it works."""
        self._heard.add(name)

    def is_crash_looping(self, name: str, status: ProcessStatus) -> bool:
        """Whether it ended `MAX_FAILED_STARTS` times or more since it was last at work, the last time with an error of
        its own.

        One that a signal ended may do better next time.
        """
        if name in self._heard or status.restarts < self._restarts.get(name, 0):  # in the latter case it was moved
            self._heard.discard(name)
            self._restarts[name] = status.restarts
        return status.restarts - self._restarts.get(name, 0) >= MAX_FAILED_STARTS and (status.last_exit or 0) > 0

    def was_restarted(self, name: str, status: ProcessStatus) -> bool:
        """Whether it was started again since this was last asked."""
        before, self._told[name] = self._told.get(name, 0), status.restarts
        return status.restarts > before


StartProcess = Callable[[RayCluster, ProcessSpec, PlacementSlot | None, Sequence[str]], None]


class PolicyServerPlacement:
    """In the seat that the run has for it, or beside the run's folder. One thread calls it.

    While it is away the robots hold; they find the next one by themselves, and give it the weights that they had.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, places: Allocation, start: StartProcess) -> None:
        """`start` starts a node in a seat, or beside the run's folder with these GPUs to be seen."""
        self._device, self._folder, self._start = config.policy.device, folder, start
        self._gang: ClusterAllocation | None = places.cluster
        self._gpus = places.policy_gpus
        self._wanted = config.policy.is_started_by_run and bool(config.robots)  # guests would not find it
        self._waits = ""

    @property
    def process_names(self) -> frozenset[str]:
        """Its name, where the run has one."""
        return frozenset({POLICY_NODE} if self._wanted else ())

    def start(self, cluster: RayCluster) -> None:
        """Does nothing where the run has none, or has lost the place for it."""
        if not self._wanted:
            return
        seat, address = None, LOOPBACK
        if self._gang is not None:
            if self._gang.policy_share.requests and not self._gang.policy_share.slots:
                return
            seat = next(iter(self._gang.policy_share.slots), None)
            address = self._gang.policy_listen_address()
        resources = {} if seat else {cluster.local_resource: 0.01}
        node = policy_process(self._folder, self._device, resources, address)
        self._start(cluster, node, seat, self._gpus)

    def poll(self, cluster: RayCluster, print_line: Callable[[str], None]) -> None:
        """Where its computer is lost, it goes on elsewhere as soon as it can; `say` is told of what changes."""
        gang = self._gang
        if gang is None or not self._wanted or not gang.policy_share.requests:
            return
        if lost := gang.release_lost(gang.policy_share):
            cluster.kill(POLICY_NODE)
            print_line(
                f"{format_list(lost)} is lost, and the robots' policies with it; "
                "the robots hold, and people may drive them"
            )
        if gang.policy_share.slots:
            return
        if why := gang.acquire_share(gang.policy_share):
            if why != self._waits:
                print_line(f"the policies wait for a place. {why}")
            self._waits = why
            return
        self._waits = ""
        self.start(cluster)
        print_line(f"the policies act again, on {gang.policy_share.slots[0].node}")


log = logging.getLogger(__name__)

MESSAGE_WAIT_S = 0.1
SCALARS_INTERVAL_S = 2.0
STATUS_INTERVAL_S = 2.0
LEAVE_DEADLINE_S = 60.0  # sessions deliver their outbox and the learner writes its checkpoint before they leave
# The same after Ctrl-C, in seconds from the signal. Robots come first; what is not done by then is killed.
SESSION_HEAD_START_S = 1.0  # what sessions have to end their episode, before the drivers stop the robots
SAVE_DEADLINE_S, PROCESS_DEADLINE_S, GATEWAY_DEADLINE_S = 5.0, 6.0, 7.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
RESTART_POLICY = RestartPolicy(max_restarts=20, window_s=60.0)
INTERRUPTED = "interrupted by a person"
MAX_ROBOT_STARTS = 3  # a robot that nobody has heard of after so many failed starts is not there


def train_main(args: Namespace) -> int:
    """``user-sys train``: a new run, or one that goes on. The exit status: see `ExitStatus`."""
    return _launch(args, "train")


def cloud_main(args: Namespace) -> int:
    """``user-sys cloud``: as `train_main`, for robots that come in over the network from their own computers."""
    return _launch(args, "cloud")


def _launch(args: Namespace, verb: str) -> int:
    console = Console()
    with bounded_shutdown(EXIT_DEADLINE_S, partial(abort_run, args)) as end:
        config, home = load_run(args, verb)
        with acquire_resources(config, home, console) as places:
            return _run(args, verb, places.config, home, places, console, end)


def _run(
    args: Namespace,
    verb: str,
    config: RunConfig,
    home: Path,
    places: Allocation,
    console: Console,
    end: TerminationRequest,
) -> ExitStatus:
    folder, card = open_or_create_folder(args, config, home)
    args.run_dir = folder.path
    report_unreadable_checkpoints(folder, console)
    gang = places.cluster
    specs = prepare_run_folder(config, folder, card, *(gang.robots_on_other_nodes() if gang else ()))
    link_latest(folder.path)
    record_all_demonstrations(config, folder.store, console, frozenset(gang.slot_from_robot) if gang else frozenset())
    if verb == "cloud":
        print_join_instructions(folder, card, console)
    with RunLogger(folder.path, config, config.logging) as logger:
        with RunSupervisor(config, folder, card, specs, logger, console, places, end) as run:
            run.train()
        if end.requested.is_set():
            console.print(f"stopped; go on with: user-sys {verb} --resume {folder.path}")
            return ExitStatus.INTERRUPTED
        summary = evaluate_and_report(config, folder, run.monitor.points, run.summary(), console)
        logger.close(summary.as_json())
    console.print(f"everything of this run is in {folder.path}")
    return exit_status(config, summary, args.any_result, console)


class RunSupervisor:
    """A run's processes, its console, and what is known of it. A context manager: leaving it ends every process."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        card: RunMetadata,
        specs: dict[str, RobotSpec],
        logger: RunLogger,
        console: Console,
        places: Allocation,
        end: TerminationRequest,
    ) -> None:
        """`places`: what the run has got, of a cluster that others use too or of this computer. `end` ends the run."""
        self._config, self._folder, self._specs, self._console = config, folder, specs, console
        self._card, self._gang, self._gpus = card, places.cluster, places.learner_gpus
        self._client = _console_client(folder, card)
        real = [robot.name for robot in (*config.robots, *config.guests) if not robot.simulated]
        ours = {name: f"for {folder.edge(name).resolve()}" for name in real}
        order = with_local_estop(self._client.send, ours, lambda reply: self._hub.update(reply))
        self._hub = ConsoleHub(card.name, order, specs, budget_s=config.learner.max_training_s)
        self._audit = AuditLog(folder.path / AUDIT_FILE)
        self._server = _console_server(self._hub, config.console, self._audit)
        self._log = logger
        self._metrics = MetricsWriter(folder.path, "run")
        self._end = end
        self._reached: bool | None = None  # the target; None without one
        self._over = threading.Event()
        self._cluster: RayCluster | None = None
        self._failed: dict[str, str] = {}  # processes that cannot be kept alive, and why
        self._starts = CrashLoopDetector()
        self._missing: dict[str, str] = {}  # robots that never came up, and why
        self._waits: dict[str, str] = {}  # robots that others drive, as it was told
        self._unreadable: dict[str, int] = {}  # checkpoints that a learner has passed over, as was told
        self._nodes: tuple[ProcessSpec, ...] = ()
        self._learners: list[str] = []
        self._policies = PolicyServerPlacement(config, folder, places, self._start)
        address = self._server.start() if self._server else ""
        self.monitor = ProgressTracker(card.name, address, config.learner.max_training_s, folder=folder.path)
        before = (*previous_episodes(folder.store), previous_elapsed_s(self._metrics.path))
        self.monitor.seed_history(*before)
        self._hub.restore_history(*before)
        self.monitor.expect_robots(guest.name for guest in config.guests)
        for guest in config.guests:
            self._show(self._hub.add_robot, guest.name)

    def __enter__(self) -> RunSupervisor:
        try:
            self._client.start()
            self._cluster = self._start_cluster()
            self._end.defer(self._hold_robots)
            self._nodes = topology(self._config, self._folder, self._cluster.local_resource, self._cluster.has_resource)
            self._cluster.release_robot_locks()
            for node in self._nodes:
                self._start(self._cluster, node)
            self._policies.start(self._cluster)
            self._start_learner(LEARNER)
            self._start_learners()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs. Calling it twice is harmless."""
        self._over.set()
        cluster, self._cluster = self._cluster, None
        try:
            if cluster is not None:
                cluster.shutdown(self._left_s(PROCESS_DEADLINE_S))
        finally:
            self._end.resume()
            if self._server is not None:
                self._server.stop()
            self._audit.close()
            self._client.close()
            self._metrics.close()

    def train(self) -> None:
        """Blocks until the learner is done, a target is reached, or a signal asks for the end.

        Raises:
            RunError: a process of the run cannot be kept alive, or no robot can be driven; the message names its log.
        """
        threading.Thread(target=self._watch_pictures, name="pictures", daemon=True).start()
        threading.Thread(target=self._watch_stops, name="e-stops", daemon=True).start()
        with ProgressDisplay(self._console) as display:
            reason = self._follow(display)
            self._reached = self._target_reached() if self._config.target.success else None
            self._leave(reason, display)

    def summary(self) -> RunSummary:
        """The run's counts, without its evaluation."""
        monitor = self.monitor
        return RunSummary(
            run=self._folder.path.name,
            successes=0,
            episodes=0,
            training_s=monitor.training_s,
            env_steps=monitor.env_steps,
            updates=monitor.updates,
            interventions=monitor.interventions,
            seed=self._config.seed,
            target_reached=self._reached,
        )

    def _start_cluster(self) -> RayCluster:
        if self._gang is not None:
            return self._gang.cluster
        records = discover(resource_probes(self._config.robots)).records
        settings = self._config.ray
        return start_local_cluster(
            ray_resources(records),
            object_store_bytes=settings.object_store_mb * 1_000_000,
            dashboard=settings.dashboard,
            log_dir=self._folder.path / "logs" / "ray",
        )

    def _start(
        self, cluster: RayCluster, node: ProcessSpec, seat: PlacementSlot | None = None, gpus: Sequence[str] = ()
    ) -> None:
        """`gpus`: those that it is to see, where no seat says so."""
        env = {**ENVIRONMENT, UMASK_VARIABLE: f"{umask_from_environment():o}", **visible_devices_env(gpus)}
        cluster.start(
            node.name, node.argv, node.resources, log_path=node.log, env=env, restart=RESTART_POLICY, slot=seat
        )

    def _start_learner(self, name: str) -> None:
        """In the run's seats in turns, where it has some; else beside the run's folder, with its GPUs in turns."""
        assert self._cluster is not None
        if name not in self._learners:
            self._learners.append(name)
        posts = self._posts(self._learners.index(name))
        seat = posts[0].placement if posts else None
        address = self._gang.launcher_address(seat) if self._gang and seat else LOOPBACK
        endpoint = local_endpoint(self._card.endpoint, address)
        for node, post in learner_processes(self._folder, name, posts, self._cluster.local_resource, endpoint):
            self._start(self._cluster, node, post.placement, post.gpus)

    def _posts(self, number: int) -> tuple[ProcessSlot, ...]:
        """Of a learner's processes; none where the run's seats are lost: it starts when there are some again."""
        processes = self._config.learner.processes
        if self._gang is None or not self._gang.requests_compute:
            return local_slots(number, processes, self._gpus)
        return cluster_slots(self._gang.learner_slots, number, processes, self._gang.cluster.address_from_node())

    def _processes(self, *learners: str) -> list[str]:
        """The nodes of these learners, the learner's own first."""
        return [learner_process_name(name, rank) for name in learners for rank in range(self._config.learner.processes)]

    def _start_learners(self) -> None:
        """One for each embodiment that the run knows by now; the first waits for its robot by itself."""
        for plan in assign_learners(read_robot_records(self._folder.robots)):
            if plan.name not in self._learners:
                log.info("run.learner name=%s model=%s", plan.name, plan.spec.model)
                allow_learner(self._folder, plan.name)
                self._start_learner(plan.name)

    def _follow(self, display: ProgressDisplay) -> str:
        """Takes in what comes until the run is over, and says why it is."""
        show_at = scalars_at = status_at = 0.0
        while not self._end.requested.is_set():
            self._take_messages(MESSAGE_WAIT_S)
            now = time.monotonic()
            if now >= show_at:
                show_at = now + 0.25
                self._hub.set_warning(self.monitor.warning)
                display.show(self.monitor.progress("training" if self.monitor.updates else "starting"))
            if now >= scalars_at:
                scalars_at = now + SCALARS_INTERVAL_S
                self._log_scalars("run", self.monitor.env_steps, self.monitor.scalars())
            if now >= status_at:
                status_at = now + STATUS_INTERVAL_S
                if self._learner_is_done(display):
                    return "the learner is done"
            if self._target_reached():
                return "the target is reached"
        return INTERRUPTED

    def _take_messages(self, wait_s: float) -> None:
        """Blocks for the first message only."""
        message = self._client.receive(wait_s)
        while message is not None:
            if isinstance(message, RobotStatus) and message.robot not in self.monitor.seen_robots:
                self._introduce(message.robot)
            if isinstance(message, HubMessage):
                self._show(self._hub.update, message)
            match message:
                case RobotStatus():
                    self.monitor.on_status(message)
                case EpisodeReport():
                    self.monitor.on_episode(message)
                case MetricsReport():
                    self.monitor.on_metrics(message)
                    for process in self._processes(message.node):
                        self._starts.mark_healthy(process)
                    self._log.log(message.node, message.count, message.scalars)
                case ResourceUpdate():
                    self._console.print(self.monitor.on_resource(message.record), markup=False, soft_wrap=True)
            message = self._client.receive(0.0)

    def _introduce(self, robot: str) -> None:
        """A robot is heard of for the first time in this launch: the console learns what it is, a learner starts."""
        self._start_learners()
        cards = read_robot_records(self._folder.robots)
        self.monitor.set_learners(learner_from_robot(cards))
        spec = next((card.spec for card in cards if card.robot == robot), None)
        if spec is not None:
            self._show(self._hub.set_robot_spec, robot, spec)

    def _log_scalars(self, node: str, count: int, scalars: dict[str, float]) -> None:
        self._metrics.write(count, scalars)
        self._log.log(node, count, scalars)
        self._hub.update(MetricsReport(node=node, count=count, scalars=scalars))

    def _watch_pictures(self) -> None:
        while not self._over.is_set():
            if (shown := self._client.receive_preview(0.5)) is not None:
                preview, jpeg = shown
                self._show(self._hub.update_preview, preview, bytes(jpeg))

    def _watch_stops(self) -> None:
        """Confirmations of e-stops reach the console whatever else the run is busy with."""
        while not self._over.is_set():
            reply = self._client.receive_stop(0.5)
            if isinstance(reply, HubMessage):
                self._hub.update(reply)

    def _show(self, feed: Callable[..., None], *report: object) -> None:
        """What the console cannot show must not end the run."""
        try:
            feed(*report)
        except WireError as error:
            log.warning("console.refused %s", error)

    def _learner_is_done(self, display: ProgressDisplay) -> bool:
        """Looks after the processes. A robot's process that fails for good leaves the run to the others."""
        assert self._cluster is not None
        if self._gang is not None:
            self._look_after_compute(self._cluster, self._gang, display)
            self._policies.poll(self._cluster, display.print_line)
        statuses = self._cluster.statuses()
        self._look_after_robots(statuses, display)
        vital = {GATEWAY, *self._processes(*self._learners), *self._policies.process_names}
        for name, status in statuses.items():
            path = self._folder.log(name)
            orphaned = status.last_exit == EXIT_ORPHANED  # its learner ended, of which is told
            if name in vital and self._starts.was_restarted(name, status) and not orphaned:
                display.print_line(
                    f"{name} ended {exit_reason(status.last_exit or 0)} and was started again; its log is {path}"
                )
            in_vain = name in vital and self._starts.is_crash_looping(name, status) and not orphaned
            if (in_vain or status.state is ProcessState.FAILED) and name not in self._failed:
                self._failed[name] = status.error or last_log_message(path)
                display.print_line(f"{name} failed: {self._failed[name]}; its log is {path}")
        for name, count in self.monitor.unreadable_checkpoints.items():
            if count and count != self._unreadable.get(name):
                files = "1 newer checkpoint" if count == 1 else f"{count} newer checkpoints"
                display.print_line(
                    f"{name} went on from an older state: {files} cannot be read; see {self._folder.log(name)}"
                )
            self._unreadable[name] = count
        sessions = {f"{robot.name}-session" for robot in self._config.robots}
        alone = sessions <= self._failed.keys() and not self._guests_at_work()
        if lost := vital & self._failed.keys() or (sessions if alone else set()):
            name = min(lost)
            raise RunError(
                f"{name} cannot be kept alive: {self._failed[name]}; see {self._folder.log(name)}; "
                f"nothing that was recorded is lost, go on with `user-sys train --resume {self._folder.path}`"
            )
        learners = [statuses[name] for name in self._learners if name in statuses]
        done = all(learner.state is ProcessState.STOPPED and learner.last_exit == 0 for learner in learners)
        return done and len(learners) == len(self._learners)

    def _look_after_compute(self, cluster: RayCluster, gang: ClusterAllocation, display: ProgressDisplay) -> None:
        """Where a computer with learners is lost, they go on elsewhere from their checkpoints, as soon as they can."""
        if lost := gang.release_lost(gang.learner_share):
            cluster.kill(*self._processes(*self._learners))
            self._waits.pop(LEARNER, None)
            display.print_line(
                f"{format_list(lost)} is lost, and the learner with it; the robots act on with the weights they have"
            )
        if gang.learner_slots or not gang.requests_compute:
            return
        if why := gang.acquire_share(gang.learner_share):
            self._tell_of_wait(LEARNER, f"the learner waits for a place. {why}", display)
            return
        for name in self._learners:
            self._start_learner(name)
        display.print_line(
            f"the learner goes on from its checkpoint, on {format_list(sorted({s.node for s in gang.learner_slots}))}"
        )

    def _look_after_robots(self, statuses: Mapping[str, ProcessStatus], display: ProgressDisplay) -> None:
        """Tells of robots whose driver ends by itself at each start. Raises RunError when there is no other."""
        for robot in self._config.robots:
            status = statuses[f"{robot.name}-driver"]
            words = last_log_message(self._folder.log(f"{robot.name}-driver"))
            gone = status.restarts >= MAX_ROBOT_STARTS - 1 and (status.last_exit or 0) > 0
            if robot.name in self.monitor.seen_robots:
                self._missing.pop(robot.name, None)
            elif words.startswith(WAITING_LOG_PREFIX):
                self._tell_of_wait(robot.name, f"{robot.name} waits: {words.removeprefix(WAITING_LOG_PREFIX)}", display)
            elif gone and robot.name not in self._missing:
                why = f"{words or 'it said nothing here'}; see {self._folder.log(f'{robot.name}-driver')}"
                self._missing[robot.name] = f"{robot.name} cannot be driven: {why}"
                display.print_line(self._missing[robot.name])
        if self._missing and len(self._missing) == len(self._config.robots) and not self._guests_at_work():
            raise RunError("; ".join(self._missing.values()))

    def _tell_of_wait(self, robot: str, text: str, display: ProgressDisplay) -> None:
        if self._waits.get(robot) != text:
            self._waits[robot] = text
            display.print_line(text)

    def _guests_at_work(self) -> frozenset[str]:
        return self.monitor.active_robots - {robot.name for robot in self._config.robots}

    def _guests(self) -> int:
        """Robots that came in from computers of their own and are connected still."""
        own = {robot.name for robot in self._config.robots}
        return self.monitor.robots_connected if self.monitor.seen_robots - own else 0

    def _target_reached(self) -> bool:
        target = self._config.target
        share = self.monitor.success_rate(target.episodes) if target.success else None
        return share is not None and share >= target.success

    def _hold_robots(self) -> None:
        """After a signal, in a thread of its own: the main one may wait for Ray. Sessions leave their robots, of which
        they hear in two ways; then drivers stop them, also one that is on its way to a start."""
        if (cluster := self._cluster) is None:
            return
        self._client.send(StopRun(reason=INTERRUPTED))
        robots = [robot.name for robot in self._config.robots]
        cluster.request_stop(*(f"{robot}-session" for robot in robots), *self._learners)
        time.sleep(SESSION_HEAD_START_S)
        cluster.request_stop(*(f"{robot}-driver" for robot in robots))

    def _left_s(self, by_s: float) -> float:
        """Until so many seconds after the signal; infinite if there was none."""
        return max(0.0, self._end.requested_s + by_s - time.monotonic())

    def _leave(self, reason: str, display: ProgressDisplay) -> None:
        """Sessions deliver what they have and leave; then the rest is ended, the store last."""
        assert self._cluster is not None
        if reason == INTERRUPTED:
            display.print_line("stopping: the robots hold, and the run is saved; Ctrl-C again ends at once")
        self._client.send(StopRun(reason=reason))
        nodes = [*(node.name for node in self._nodes), *self._policies.process_names, *self._processes(*self._learners)]
        leaving = {name for name in nodes if name.endswith("-session") or name in self._learners} - self._failed.keys()
        leaving -= {f"{robot}-session" for robot in self._missing}
        if self._end.requested.is_set():
            self._cluster.request_stop(*leaving)
        deadline = time.monotonic() + LEAVE_DEADLINE_S
        over = (ProcessState.STOPPED, ProcessState.FAILED)
        while (leaving or self._guests()) and time.monotonic() < deadline and self._left_s(SAVE_DEADLINE_S):
            self._take_messages(MESSAGE_WAIT_S)
            display.show(self.monitor.progress("stopping"))
            statuses = self._cluster.statuses()
            leaving = {name for name in leaving if name in statuses and statuses[name].state not in over}
        if leaving or self._guests():
            log.warning("run.left_behind nodes=%s guests=%d", sorted(leaving), self._guests())
        if self.monitor.disk_warning:
            display.print_line(f"not everything could be written: {self.monitor.disk_warning}")
        self._cluster.stop(*[name for name in nodes if name != GATEWAY], within_s=self._left_s(PROCESS_DEADLINE_S))
        self._cluster.stop(GATEWAY, within_s=self._left_s(GATEWAY_DEADLINE_S))


def _console_server(hub: ConsoleHub, config: ConsoleConfig, audit: AuditLog) -> ConsoleServer | None:
    if not config.enabled:
        return None
    from user_sys.console.server import ConsoleServer  # FastAPI: half a second, which an error before need not wait for

    return ConsoleServer(hub, port=config.port, audit=audit.write)


def _console_client(folder: RunFolder, card: RunMetadata) -> TunnelClient:
    keys = load_keypair(folder.keys / f"{CONSOLE}.key")
    hello = Hello(protocol=PROTOCOL_VERSION, role="console", name=CONSOLE)
    return TunnelClient(local_endpoint(card.endpoint), keys, load_public_key(folder.keys / f"{GATEWAY}.pub"), hello)
