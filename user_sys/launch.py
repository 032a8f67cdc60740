"""``user-sys train``: starts a run's processes on Ray, shows them, and brings them to a clean end."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hal.audit import AUDIT, AuditLog
from hal.cards import sight
from hal.discovery import discover
from hal.placement_words import listed
from hal.private import UMASK, umask_of
from hal.ray_bridge import Cluster, NodeState, NodeStatus, RestartPolicy, Seat, start_local
from hal.ray_nodes import ray_resources
from hal.signals import EndRequest, ends_in_time
from hal.spec import RobotSpec
from hal.supervision import cause
from user_sys.compose import probes
from user_sys.console.hub import ConsoleHub, Report
from user_sys.crew import Post, learner_nodes, posts_here, posts_in
from user_sys.edge.driver_wire import WAITING
from user_sys.edge.press import pressing_aside
from user_sys.endings import END_WITHIN_S, ExitStatus, abandon_run
from user_sys.errors import RunError, WireError
from user_sys.gang import Gang
from user_sys.learners import LEARNER, ORPHANED, learner_from_robot, learners_of, process_name
from user_sys.logs import last_words
from user_sys.messages import PROTOCOL_VERSION, EpisodeReport, Hello, MetricsReport, ResourceNews, RobotStatus, StopRun
from user_sys.metrics import MetricsWriter, RunLogger
from user_sys.monitor import RunMonitor, earlier_s, history
from user_sys.opening import Places, invite, make, read, take_places, tell_of_checkpoints
from user_sys.policy_host import PolicyHost
from user_sys.prepare import (
    CONSOLE,
    GATEWAY,
    LOOPBACK,
    allow_learner,
    local_endpoint,
    prepare,
)
from user_sys.progress import ProgressDisplay
from user_sys.record import demonstrate_all
from user_sys.report import Summary, point_latest
from user_sys.results import conclude, status_of
from user_sys.robot_cards import read_cards
from user_sys.run_folder import RunCard
from user_sys.starts import Starts
from user_sys.topology import ConsoleConfig, Node, RunConfig, RunFolder, topology
from user_sys.tunnel.client import TunnelClient
from user_sys.tunnel.keys import load_keypair, load_public_key

if TYPE_CHECKING:
    from user_sys.console.server import ConsoleServer

log = logging.getLogger(__name__)

TICK_S = 0.1
SCALARS_EVERY_S = 2.0
STATUS_EVERY_S = 2.0
LEAVE_DEADLINE_S = 60.0  # sessions deliver their outbox and the learner writes its checkpoint before they leave
# The same after Ctrl-C, in seconds from the signal. Robots come first; what is not done by then is killed.
SESSIONS_FIRST_S = 1.0  # what sessions have to end their episode, before the drivers stop the robots
SAVED_BY_S, ENDED_BY_S, GATEWAY_BY_S = 5.0, 6.0, 7.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
RESTART = RestartPolicy(max_restarts=20, window_s=60.0)
BY_PERSON = "interrupted by a person"
STARTS_OF_A_ROBOT = 3  # a robot that nobody has heard of after so many failed starts is not there


def train_main(args: Namespace) -> int:
    """``user-sys train``: a new run, or one that goes on. The exit status: see `ExitStatus`."""
    return _launch(args, "train")


def cloud_main(args: Namespace) -> int:
    """``user-sys cloud``: as `train_main`, for robots that come in over the network from their own computers."""
    return _launch(args, "cloud")


def _launch(args: Namespace, verb: str) -> int:
    console = Console()
    with ends_in_time(END_WITHIN_S, partial(abandon_run, args)) as end:
        config, home = read(args, verb)
        with take_places(config, home, console) as places:
            return _run(args, verb, places.config, home, places, console, end)


def _run(
    args: Namespace,
    verb: str,
    config: RunConfig,
    home: Path,
    places: Places,
    console: Console,
    end: EndRequest,
) -> ExitStatus:
    folder, card = make(args, config, home)
    args.run_dir = folder.path
    tell_of_checkpoints(folder, console)
    gang = places.gang
    specs = prepare(config, folder, card, *(gang.robots_from_afar() if gang else ()))
    point_latest(folder.path)
    demonstrate_all(config, folder.store, console, frozenset(gang.robots) if gang else frozenset())
    if verb == "cloud":
        invite(folder, card, console)
    with RunLogger(folder.path, config, config.logging) as logger:
        with Run(config, folder, card, specs, logger, console, places, end) as run:
            run.train()
        if end.asked.is_set():
            console.print(f"stopped; go on with: user-sys {verb} --resume {folder.path}")
            return ExitStatus.INTERRUPTED
        summary = conclude(config, folder, run.monitor.points, run.summary(), console)
        logger.close(summary.as_json())
    console.print(f"everything of this run is in {folder.path}")
    return status_of(config, summary, args.any_result, console)


class Run:
    """A run's processes, its console, and what is known of it. A context manager: leaving it ends every process."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        card: RunCard,
        specs: dict[str, RobotSpec],
        logger: RunLogger,
        console: Console,
        places: Places,
        end: EndRequest,
    ) -> None:
        """`places`: what the run has got, of a cluster that others use too or of this computer. `end` ends the run."""
        self._config, self._folder, self._specs, self._console = config, folder, specs, console
        self._card, self._gang, self._gpus = card, places.gang, places.gpus
        self._client = _console_client(folder, card)
        real = [robot.name for robot in (*config.robots, *config.guests) if not robot.simulated]
        ours = {name: f"for {folder.edge(name).resolve()}" for name in real}
        order = pressing_aside(self._client.send, ours, lambda reply: self._hub.feed(reply))
        self._hub = ConsoleHub(card.name, order, specs, budget_s=config.learner.max_training_s)
        self._audit = AuditLog(folder.path / AUDIT)
        self._server = _console_server(self._hub, config.console, self._audit)
        self._log = logger
        self._metrics = MetricsWriter(folder.path, "run")
        self._end = end
        self._reached: bool | None = None  # the target; None without one
        self._over = threading.Event()
        self._cluster: Cluster | None = None
        self._failed: dict[str, str] = {}  # processes that cannot be kept alive, and why
        self._starts = Starts()
        self._missing: dict[str, str] = {}  # robots that never came up, and why
        self._waits: dict[str, str] = {}  # robots that others drive, as it was told
        self._unreadable: dict[str, int] = {}  # checkpoints that a learner has passed over, as was told
        self._nodes: tuple[Node, ...] = ()
        self._learners: list[str] = []
        self._policies = PolicyHost(config, folder, places, self._start)
        address = self._server.start() if self._server else ""
        self.monitor = RunMonitor(card.name, address, config.learner.max_training_s, folder=folder.path)
        before = (*history(folder.store), earlier_s(self._metrics.path))
        self.monitor.seed_history(*before)
        self._hub.seed_history(*before)
        self.monitor.expect(guest.name for guest in config.guests)
        for guest in config.guests:
            self._show(self._hub.expect, guest.name)

    def __enter__(self) -> Run:
        try:
            self._client.start()
            self._cluster = self._start_cluster()
            self._end.defer(self._hold_robots)
            self._nodes = topology(self._config, self._folder, self._cluster.here, self._cluster.declares)
            self._cluster.hand_over()
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
                cluster.shutdown(self._left_s(ENDED_BY_S))
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

    def summary(self) -> Summary:
        """The run's counts, without its evaluation."""
        monitor = self.monitor
        return Summary(
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

    def _start_cluster(self) -> Cluster:
        if self._gang is not None:
            return self._gang.cluster
        records = discover(probes(self._config.robots)).records
        settings = self._config.ray
        return start_local(
            ray_resources(records),
            object_store_bytes=settings.object_store_mb * 1_000_000,
            dashboard=settings.dashboard,
            log_dir=self._folder.path / "logs" / "ray",
        )

    def _start(self, cluster: Cluster, node: Node, seat: Seat | None = None, gpus: Sequence[str] = ()) -> None:
        """`gpus`: those that it is to see, where no seat says so."""
        env = {**ENVIRONMENT, UMASK: f"{umask_of():o}", **sight(gpus)}
        cluster.start(node.name, node.argv, node.resources, log_path=node.log, env=env, restart=RESTART, seat=seat)

    def _start_learner(self, name: str) -> None:
        """In the run's seats in turns, where it has some; else beside the run's folder, with its GPUs in turns."""
        assert self._cluster is not None
        if name not in self._learners:
            self._learners.append(name)
        posts = self._posts(self._learners.index(name))
        seat = posts[0].seat if posts else None
        address = self._gang.address_for(seat) if self._gang and seat else LOOPBACK
        endpoint = local_endpoint(self._card.endpoint, address)
        for node, post in learner_nodes(self._folder, name, posts, self._cluster.here, endpoint):
            self._start(self._cluster, node, post.seat, post.gpus)

    def _posts(self, number: int) -> tuple[Post, ...]:
        """Of a learner's processes; none where the run's seats are lost: it starts when there are some again."""
        processes = self._config.learner.processes
        if self._gang is None or not self._gang.asks_for_compute:
            return posts_here(number, processes, self._gpus)
        return posts_in(self._gang.seats, number, processes, self._gang.cluster.addresses())

    def _processes(self, *learners: str) -> list[str]:
        """The nodes of these learners, the learner's own first."""
        return [process_name(name, rank) for name in learners for rank in range(self._config.learner.processes)]

    def _start_learners(self) -> None:
        """One for each embodiment that the run knows by now; the first waits for its robot by itself."""
        for plan in learners_of(read_cards(self._folder.robots)):
            if plan.name not in self._learners:
                log.info("run.learner name=%s model=%s", plan.name, plan.spec.model)
                allow_learner(self._folder, plan.name)
                self._start_learner(plan.name)

    def _follow(self, display: ProgressDisplay) -> str:
        """Takes in what comes until the run is over, and says why it is."""
        show_at = scalars_at = status_at = 0.0
        while not self._end.asked.is_set():
            self._take_messages(TICK_S)
            now = time.monotonic()
            if now >= show_at:
                show_at = now + 0.25
                self._hub.warn(self.monitor.warning)
                display.show(self.monitor.progress("training" if self.monitor.updates else "starting"))
            if now >= scalars_at:
                scalars_at = now + SCALARS_EVERY_S
                self._log_scalars("run", self.monitor.env_steps, self.monitor.scalars())
            if now >= status_at:
                status_at = now + STATUS_EVERY_S
                if self._learner_is_done(display):
                    return "the learner is done"
            if self._target_reached():
                return "the target is reached"
        return BY_PERSON

    def _take_messages(self, wait_s: float) -> None:
        """Blocks for the first message only."""
        message = self._client.receive(wait_s)
        while message is not None:
            if isinstance(message, RobotStatus) and message.robot not in self.monitor.heard:
                self._introduce(message.robot)
            if isinstance(message, Report):
                self._show(self._hub.feed, message)
            match message:
                case RobotStatus():
                    self.monitor.on_status(message)
                case EpisodeReport():
                    self.monitor.on_episode(message)
                case MetricsReport():
                    self.monitor.on_metrics(message)
                    for process in self._processes(message.node):
                        self._starts.at_work(process)
                    self._log.log(message.node, message.count, message.scalars)
                case ResourceNews():
                    self._console.print(self.monitor.on_resource(message.record), markup=False, soft_wrap=True)
            message = self._client.receive(0.0)

    def _introduce(self, robot: str) -> None:
        """A robot is heard of for the first time in this launch: the console learns what it is, a learner starts."""
        self._start_learners()
        cards = read_cards(self._folder.robots)
        self.monitor.taught_by(learner_from_robot(cards))
        spec = next((card.spec for card in cards if card.robot == robot), None)
        if spec is not None:
            self._show(self._hub.introduce, robot, spec)

    def _log_scalars(self, node: str, count: int, scalars: dict[str, float]) -> None:
        self._metrics.write(count, scalars)
        self._log.log(node, count, scalars)
        self._hub.feed(MetricsReport(node=node, count=count, scalars=scalars))

    def _watch_pictures(self) -> None:
        while not self._over.is_set():
            if (shown := self._client.take_preview(0.5)) is not None:
                preview, jpeg = shown
                self._show(self._hub.feed_picture, preview, bytes(jpeg))

    def _watch_stops(self) -> None:
        """Confirmations of e-stops reach the console whatever else the run is busy with."""
        while not self._over.is_set():
            reply = self._client.receive_stop(0.5)
            if isinstance(reply, Report):
                self._hub.feed(reply)

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
            self._policies.look(self._cluster, display.say)
        statuses = self._cluster.statuses()
        self._look_after_robots(statuses, display)
        vital = {GATEWAY, *self._processes(*self._learners), *self._policies.nodes}
        for name, status in statuses.items():
            path = self._folder.log(name)
            orphaned = status.last_exit == ORPHANED  # its learner ended, of which is told
            if name in vital and self._starts.anew(name, status) and not orphaned:
                display.say(f"{name} ended {cause(status.last_exit or 0)} and was started again; its log is {path}")
            in_vain = name in vital and self._starts.in_vain(name, status) and not orphaned
            if (in_vain or status.state is NodeState.FAILED) and name not in self._failed:
                self._failed[name] = status.error or last_words(path)
                display.say(f"{name} failed: {self._failed[name]}; its log is {path}")
        for name, count in self.monitor.unreadable.items():
            if count and count != self._unreadable.get(name):
                files = "1 newer checkpoint" if count == 1 else f"{count} newer checkpoints"
                display.say(f"{name} went on from an older state: {files} cannot be read; see {self._folder.log(name)}")
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
        done = all(learner.state is NodeState.STOPPED and learner.last_exit == 0 for learner in learners)
        return done and len(learners) == len(self._learners)

    def _look_after_compute(self, cluster: Cluster, gang: Gang, display: ProgressDisplay) -> None:
        """Where a computer with learners is lost, they go on elsewhere from their checkpoints, as soon as they can."""
        if lost := gang.give_up_lost(gang.learners):
            cluster.drop(*self._processes(*self._learners))
            self._waits.pop(LEARNER, None)
            display.say(
                f"{listed(lost)} is lost, and the learner with it; the robots act on with the weights they have"
            )
        if gang.seats or not gang.asks_for_compute:
            return
        if why := gang.take_share(gang.learners):
            self._tell_of_wait(LEARNER, f"the learner waits for a place. {why}", display)
            return
        for name in self._learners:
            self._start_learner(name)
        display.say(f"the learner goes on from its checkpoint, on {listed(sorted({s.node for s in gang.seats}))}")

    def _look_after_robots(self, statuses: Mapping[str, NodeStatus], display: ProgressDisplay) -> None:
        """Tells of robots whose driver ends by itself at each start. Raises RunError when there is no other."""
        for robot in self._config.robots:
            status = statuses[f"{robot.name}-driver"]
            words = last_words(self._folder.log(f"{robot.name}-driver"))
            gone = status.restarts >= STARTS_OF_A_ROBOT - 1 and (status.last_exit or 0) > 0
            if robot.name in self.monitor.heard:
                self._missing.pop(robot.name, None)
            elif words.startswith(WAITING):
                self._tell_of_wait(robot.name, f"{robot.name} waits: {words.removeprefix(WAITING)}", display)
            elif gone and robot.name not in self._missing:
                why = f"{words or 'it said nothing here'}; see {self._folder.log(f'{robot.name}-driver')}"
                self._missing[robot.name] = f"{robot.name} cannot be driven: {why}"
                display.say(self._missing[robot.name])
        if self._missing and len(self._missing) == len(self._config.robots) and not self._guests_at_work():
            raise RunError("; ".join(self._missing.values()))

    def _tell_of_wait(self, robot: str, text: str, display: ProgressDisplay) -> None:
        if self._waits.get(robot) != text:
            self._waits[robot] = text
            display.say(text)

    def _guests_at_work(self) -> frozenset[str]:
        return self.monitor.at_work - {robot.name for robot in self._config.robots}

    def _guests(self) -> int:
        """Robots that came in from computers of their own and are connected still."""
        own = {robot.name for robot in self._config.robots}
        return self.monitor.robots_connected if self.monitor.heard - own else 0

    def _target_reached(self) -> bool:
        target = self._config.target
        share = self.monitor.success_over(target.episodes) if target.success else None
        return share is not None and share >= target.success

    def _hold_robots(self) -> None:
        """After a signal, in a thread of its own: the main one may wait for Ray. Sessions leave their robots, of which
        they hear in two ways; then drivers stop them, also one that is on its way to a start."""
        if (cluster := self._cluster) is None:
            return
        self._client.send(StopRun(reason=BY_PERSON))
        robots = [robot.name for robot in self._config.robots]
        cluster.ask_to_stop(*(f"{robot}-session" for robot in robots), *self._learners)
        time.sleep(SESSIONS_FIRST_S)
        cluster.ask_to_stop(*(f"{robot}-driver" for robot in robots))

    def _left_s(self, by_s: float) -> float:
        """Until so many seconds after the signal; infinite if there was none."""
        return max(0.0, self._end.asked_s + by_s - time.monotonic())

    def _leave(self, reason: str, display: ProgressDisplay) -> None:
        """Sessions deliver what they have and leave; then the rest is ended, the store last."""
        assert self._cluster is not None
        if reason == BY_PERSON:
            display.say("stopping: the robots hold, and the run is saved; Ctrl-C again ends at once")
        self._client.send(StopRun(reason=reason))
        nodes = [*(node.name for node in self._nodes), *self._policies.nodes, *self._processes(*self._learners)]
        leaving = {name for name in nodes if name.endswith("-session") or name in self._learners} - self._failed.keys()
        leaving -= {f"{robot}-session" for robot in self._missing}
        if self._end.asked.is_set():
            self._cluster.ask_to_stop(*leaving)
        deadline = time.monotonic() + LEAVE_DEADLINE_S
        over = (NodeState.STOPPED, NodeState.FAILED)
        while (leaving or self._guests()) and time.monotonic() < deadline and self._left_s(SAVED_BY_S):
            self._take_messages(TICK_S)
            display.show(self.monitor.progress("stopping"))
            statuses = self._cluster.statuses()
            leaving = {name for name in leaving if name in statuses and statuses[name].state not in over}
        if leaving or self._guests():
            log.warning("run.left_behind nodes=%s guests=%d", sorted(leaving), self._guests())
        if self.monitor.unwritten:
            display.say(f"not everything could be written: {self.monitor.unwritten}")
        self._cluster.stop(*[name for name in nodes if name != GATEWAY], within_s=self._left_s(ENDED_BY_S))
        self._cluster.stop(GATEWAY, within_s=self._left_s(GATEWAY_BY_S))


def _console_server(hub: ConsoleHub, config: ConsoleConfig, audit: AuditLog) -> ConsoleServer | None:
    if not config.enabled:
        return None
    from user_sys.console.server import ConsoleServer  # FastAPI: half a second, which an error before need not wait for

    return ConsoleServer(hub, port=config.port, audit=audit.write)


def _console_client(folder: RunFolder, card: RunCard) -> TunnelClient:
    keys = load_keypair(folder.keys / f"{CONSOLE}.key")
    hello = Hello(protocol=PROTOCOL_VERSION, role="console", name=CONSOLE)
    return TunnelClient(local_endpoint(card.endpoint), keys, load_public_key(folder.keys / f"{GATEWAY}.pub"), hello)
