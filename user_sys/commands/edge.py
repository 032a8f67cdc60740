"""The verbs `edge`, which drives the robots of one computer for a run on another one, and `relay`.

`edge` needs the `edge` extra only. It starts two processes for each robot and keeps them running through network
failures. It opens no listening port: the sessions connect to one port of the gateway. SIGTERM, Ctrl-C or the end of its
terminal ends the sessions, and a second later the drivers, which stop the robots safely. Undelivered chunks stay in the
outboxes.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

import click

from hal.durable import make_folder_durably, replace_durably
from hal.errors import HalError, HardwareLost, StaleObservation, install_hint
from hal.lease import robot_lock
from hal.process_supervisor import ProcessSupervisor
from hal.resource import local_node
from hal.signals import bounded_shutdown
from user_sys.commands.options import PATH, ConfiguredVerb, config_argument, connect_option, keys_option
from user_sys.commands.output import print_line
from user_sys.compose import (
    PolicyConfig,
    RobotConfig,
    check_execution,
    check_pictures,
    describe_robot,
    drawing_source,
    policy_location,
    require_unique_names,
    robot_spec,
)
from user_sys.config import as_dict, build, load, read_yaml, save
from user_sys.console.config import ConsoleConfig, require_certificate
from user_sys.edge.demonstrations import (
    DemonstrationConfig,
    check_demonstrable,
    generate_demonstrations,
)
from user_sys.edge.help_requests import InterventionConfig, require_progress_model
from user_sys.edge.local_link import local_console_endpoint
from user_sys.edge.outbox import Outbox, OutboxConfig, OutboxFull
from user_sys.edge.recorder import RecorderConfig
from user_sys.edge.robot_processes import (
    EDGE_IDENTITY_FILE,
    EdgeStatusFile,
    RobotProcesses,
    module_argv,
    write_process_configs,
)
from user_sys.edge.session import EpisodeStarts, SessionConfig
from user_sys.errors import EXIT_DEADLINE_S, ConfigError, exit_now
from user_sys.inference.protocol import POLICY_NODE
from user_sys.inference.remote_policy import check_server_swaps
from user_sys.logs import log_environment
from user_sys.run.edge_console import EdgeConsoleConfig
from user_sys.store.files import NO_SPACE_ERRNOS
from user_sys.tunnel.keys import GATEWAY_NAME, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits, check_connect_endpoint
from user_sys.weights.receiver import ReceiverConfig

POLL_S = 0.5
CONSOLE_FILE = "console.yaml"
CONSOLE_PACKAGES = ("fastapi", "uvicorn", "websockets", "argon2")
ROBOT_RETRY_S = 5.0
SESSION_STOP_LEAD_S = 1.0
END_WAIT_S = 60.0  # from the first robot that has heard of the run's end until those that cannot reach it are left
DEMONSTRATION_COUNT_FILE = "demonstrations"  # the number of recorded ones
PrintLine = Callable[[str], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeConfig:
    """The robots of one computer. Each key has the meaning that it has in a run's configuration.

    Attributes:
        demonstrations: recorded once, before a policy drives the robot for the first time.
        policy: as in the run's configuration; weights of another policy are refused.
        tunnel: limits of the robots' tunnels, such as the bandwidth of each; the gateway has its own limits.
        console: of the page that ``--console`` serves.
    """

    robots: tuple[RobotConfig, ...] = ()
    seed: int = 0
    demonstrations: DemonstrationConfig = field(default_factory=lambda: DemonstrationConfig(episodes=0))
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)

    def __post_init__(self) -> None:
        require_unique_names(self.robots)


@click.command(cls=ConfiguredVerb)
@config_argument
@click.option(
    "--robot", multiple=True, metavar="NAME", help="CONFIG is a run's: drive this of its remote_robots; repeatable"
)
@connect_option
@click.option("--folder", type=PATH, default="edge", metavar="FOLDER", help="outboxes, e-stops, logs (default: edge)")
@keys_option
@click.option("--console", is_flag=True, help="serve a page for these robots, also while the run cannot be reached")
def edge(
    config: Path, robot: Sequence[str], connect: str, folder: Path, keys: Path, console: bool, overrides: list[str]
) -> int:
    """Drive the robots of CONFIG for the run at --connect, until the run ends, or Ctrl-C.

    CONFIG is a YAML file that names this computer's robots. Any setting can be overridden: --section.key=value.
    """
    if not log.isEnabledFor(logging.INFO):
        logging.getLogger("hal.process_supervisor").setLevel(logging.ERROR)  # `RobotProcesses` prints its events
    settings = load_edge_config(config, robot, overrides)
    check_config(settings, connect, keys)
    folder = folder.resolve()
    page = _write_console_config(settings, folder) if console else None
    for each in settings.robots:
        session = replace(
            _session(settings, each, connect, keys, folder), console="" if page is None else page.endpoint
        )
        write_process_configs(folder / each.name, each, session)
    with bounded_shutdown(EXIT_DEADLINE_S, _abandon) as end, ExitStack() as stack:
        end.defer(lambda: None)
        stop = end.requested
        if page is not None:
            stack.enter_context(_served_console(page, stop, print_line))
        for each in settings.robots:
            record_missing_demonstrations(settings, each, folder / each.name, print_line, stop)
        robots = [
            RobotProcesses(r.name, folder / r.name, folder / "logs", connect, print_line) for r in settings.robots
        ]
        status = EdgeStatusFile(folder)
        run_robots(robots, [keys / f"{each.name}.key" for each in settings.robots], stop, print_line, status)
    return 0


@click.command(cls=ConfiguredVerb)
@config_argument
@connect_option
@click.option("--folder", type=PATH, default="relay", metavar="FOLDER", help="weights (default: relay)")
@keys_option
def relay(config: Path, connect: str, folder: Path, keys: Path, overrides: list[str]) -> int:
    """Forward messages of a site's robots to the run at --connect, and fetch weights once for all of them.

    CONFIG is a YAML file with the relay's name and endpoint. Any setting can be overridden: --section.key=value.
    """
    from user_sys.gateway.relay import RelayConfig, run_relay

    return run_relay(load(RelayConfig, config, overrides), connect, folder, keys)


def load_edge_config(path: Path, robots: Sequence[str], overrides: Sequence[str]) -> EdgeConfig:
    """The configuration in the file at `path`. With `robots` the file is a run's, and these are its remote robots.

    Raises:
        ConfigError: as `load`; or the run's file lists no such robot.
    """
    if not robots:
        return load(EdgeConfig, path, overrides)
    run = read_yaml(path)
    listed = run["remote_robots"] if isinstance(run.get("remote_robots"), list) else []
    remote = {str(each.get("name")): each for each in listed if isinstance(each, dict)}
    if unknown := [name for name in robots if name not in remote]:
        raise ConfigError(f"--robot {unknown[0]}: {path} names {sorted(remote) or 'none'} under remote_robots:")
    settings = {field.name: run[field.name] for field in fields(EdgeConfig) if field.name in run}
    defaults = {"demonstrations": as_dict(DemonstrationConfig())}
    settings = {**defaults, **settings, "robots": [remote[name] for name in robots]}
    return build(EdgeConfig, settings, str(path), overrides)


def check_config(config: EdgeConfig, connect: str, keys: Path) -> None:
    """Checks configuration, keys and locks before any robot moves. Raises ConfigError, RunError or LeaseHeld."""
    check_connect_endpoint(connect)
    if not config.robots:
        raise ConfigError("robots: the list is empty; add the robots of this computer")
    if config.policy.is_started_by_run:
        raise ConfigError(
            f"policy: {config.policy.kind} acts in a policy server, and this computer cannot read the address of the "
            "run's in the run's folder; start a server at this site (`python -m user_sys.inference CONFIG`) and set "
            "--policy.endpoint=tcp://HOST:PORT, or run a policy that acts without torch with --policy.location=edge"
        )
    for robot in config.robots:
        if robot.link:
            raise ConfigError(
                f"robot {robot.name}: link: `user-sys edge` uses a real network; an emulated link is for the robots of "
                f"`user-sys train`. Remove the key"
            )
    load_public_key(keys / f"{GATEWAY_NAME}.pub")
    at_server = policy_location(config.policy) == "server"
    check_execution(config.policy, at_server=at_server)
    require_progress_model(config.intervention.help, map(robot_spec, config.robots))
    if at_server:
        check_server_swaps(config.weights)
        load_public_key(keys / f"{POLICY_NODE}.pub")
    for robot in config.robots:
        load_keypair(keys / f"{robot.name}.key")
        check_demonstrable(robot, config.demonstrations)
        check_pictures(config.policy, robot, at_server=at_server)
        with robot_lock(robot.name, "user-sys edge", simulated=robot.simulated):
            pass  # raises LeaseHeld if another program of this computer drives it


def _session(config: EdgeConfig, robot: RobotConfig, connect: str, keys: Path, folder: Path) -> SessionConfig:
    return SessionConfig(
        robot=robot.name,
        holder=f"edge on {local_node()} ({_identity(folder)})",
        endpoint=connect,
        keys=keys.resolve(),
        state=folder / robot.name,
        starts=EpisodeStarts.of(robot, config.seed),
        real_time=robot.follows_clock,
        realtime_scheduling=robot.realtime_scheduling,
        explore=robot.explores,
        description=robot.description,
        outbox=config.outbox,
        recorder=config.recorder,
        intervention=config.intervention,
        policy=replace(config.policy, location=policy_location(config.policy)),
        weights=config.weights,
        tunnel=config.tunnel,
    )


def _write_console_config(config: EdgeConfig, folder: Path) -> EdgeConsoleConfig:
    """Raises ConfigError: the extra `console` is not installed, or the certificate cannot be used."""
    if missing := [name for name in CONSOLE_PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"--console needs the package {missing[0]}: {install_hint('console')}")
    require_certificate(config.console)
    make_folder_durably(folder)
    settings = EdgeConsoleConfig(
        robots=tuple(robot.name for robot in config.robots),
        simulated=tuple(robot.name for robot in config.robots if robot.simulated),
        drawing_sources={robot.name: drawing_source(robot) for robot in config.robots},
        endpoint=local_console_endpoint(_identity(folder)),
        folder=folder,
        console=config.console,
    )
    save(settings, folder / CONSOLE_FILE)
    return settings


@contextmanager
def _served_console(settings: EdgeConsoleConfig, stop: threading.Event, print_line: PrintLine) -> Iterator[None]:
    """The process that serves the page; it is restarted if it ends. Another thread prints its address."""
    folder, done = settings.folder, threading.Event()

    def print_address() -> None:
        while not settings.address.exists() and not stop.is_set() and not done.wait(POLL_S):
            pass
        if settings.address.exists():
            print_line(f"watch and take over: {settings.address.read_text()}")

    settings.address.unlink(missing_ok=True)
    argv = module_argv("user_sys.run.edge_console", folder / CONSOLE_FILE)
    process = ProcessSupervisor(argv, log_environment(process="console"), folder / "logs" / "console.log")
    process.start()
    try:
        threading.Thread(target=print_address, daemon=True).start()
        yield
    finally:
        done.set()
        process.stop()


def _identity(folder: Path) -> str:
    """A random identifier of this computer, so that two computers of the same name do not share a lease."""
    path = folder / EDGE_IDENTITY_FILE
    if not path.exists():
        replace_durably(path, secrets.token_hex(4).encode())
    return path.read_text()


def record_missing_demonstrations(
    config: EdgeConfig, robot: RobotConfig, state: Path, print_line: PrintLine, stop: threading.Event
) -> None:
    """Records the missing demonstrations into the robot's outbox, from which they are sent first.

    If the robot is lost it waits until the robot returns or `stop` is set. If the outbox or its disk is full it prints
    so and returns: the session, which delivers, comes first, and the next start records the rest.
    """
    last_error = ""
    if (existing := _recorded_demonstrations(state)) < config.demonstrations.episodes:
        missing = config.demonstrations.episodes - existing
        print_line(f"{robot.name}: recording {missing} demonstrations of the scripted expert")
    elif config.demonstrations.episodes:
        print_line(
            f"{robot.name}: {existing} demonstrations were recorded before, for this run or another one; to record "
            f"them again, remove the file {state / DEMONSTRATION_COUNT_FILE}"
        )
    while _recorded_demonstrations(state) < config.demonstrations.episodes and not stop.is_set():
        try:
            _record_demonstrations(config, robot, state, stop)
        except (OutboxFull, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_SPACE_ERRNOS:
                raise
            print_line(
                f"{robot.name}: its outbox or the disk is full: {_recorded_demonstrations(state)} of "
                f"{config.demonstrations.episodes} demonstrations are recorded; the next start records the others"
            )
            return
        except (HardwareLost, StaleObservation) as error:
            if str(error) != last_error:
                last_error = str(error)
                print_line(f"{robot.name}: waiting for the robot: {last_error}")
            stop.wait(ROBOT_RETRY_S)


def _recorded_demonstrations(state: Path) -> int:
    counter = state / DEMONSTRATION_COUNT_FILE
    return int(counter.read_text()) if counter.exists() else 0


class _Stopped(HalError):
    """The program ends: the demonstration in progress is discarded."""


def _record_demonstrations(config: EdgeConfig, robot: RobotConfig, state: Path, stop: threading.Event) -> None:
    existing = _recorded_demonstrations(state)

    def check_stop() -> None:
        if stop.is_set():
            raise _Stopped

    with suppress(_Stopped), Outbox.open(state / "outbox", max_bytes=config.outbox.max_bytes) as outbox:
        by_task = Counter(islice(cycle(describe_robot(robot).tasks), existing))  # the order in which they are recorded
        recorded = generate_demonstrations(
            robot,
            config.demonstrations,
            by_task,
            lambda chunks: outbox.append(*chunks),
            config.recorder,
            seed=config.seed,
            check_stop=check_stop,
        )
        for count, _ in enumerate(recorded, existing + 1):
            replace_durably(state / DEMONSTRATION_COUNT_FILE, str(count).encode())
            if stop.is_set():
                return


def run_robots(
    robots: Sequence[RobotProcesses],
    keys: Sequence[Path],
    stop: threading.Event,
    print_line: PrintLine,
    status: EdgeStatusFile,
) -> None:
    """Runs the robots' processes until the run is over or `stop` is set; then stops them.

    The run is over when all robots have heard so; or when one has, and the others still cannot work after `END_WAIT_S`.
    """
    if stop.is_set():  # while demonstrations were recorded
        return
    key_times, over_s = [path.stat().st_mtime_ns for path in keys], math.inf
    try:
        for robot in robots:
            robot.start()
        while not stop.is_set() and not all(robot.is_finished for robot in robots):
            stop.wait(POLL_S)
            for index, robot in enumerate(robots):
                robot.poll()
                if (changed_ns := _modified_ns(keys[index], key_times[index])) != key_times[index]:
                    key_times[index] = changed_ns
                    robot.restart_session("it has a new key")
            status.write(robots)
            over_s = min(over_s, time.monotonic()) if any(robot.is_finished for robot in robots) else math.inf
            is_late = time.monotonic() - over_s > END_WAIT_S
            if is_late and all(robot.is_finished or robot.health.is_fault for robot in robots):
                break
    finally:
        print_line("stopping: the robots are held, and recorded chunks are delivered")
        for robot in robots:
            robot.request_stop()
        time.sleep(SESSION_STOP_LEAD_S)  # sessions end their episodes; the drivers then stop the robots in any case
        with ThreadPoolExecutor(len(robots)) as pool:
            for done in [pool.submit(robot.stop) for robot in robots]:
                done.result()
        status.remove()


def _abandon() -> None:
    exit_now("ended at once; the outboxes keep the recorded chunks for the next start")


def _modified_ns(key: Path, last_ns: int) -> int:
    try:
        return key.stat().st_mtime_ns
    except FileNotFoundError:  # while it is replaced, or removed: the running session has read it
        return last_ns
