"""``user-sys edge``: drives the robots of one computer for a run on another one. It needs the `edge` extra only.

It starts two processes for each robot and keeps them running through network failures. It opens no listening port: the
sessions connect to one port of the gateway. SIGTERM, Ctrl-C or the end of its terminal ends the sessions, and a second
later the drivers, which stop the robots safely. Undelivered chunks stay in the outboxes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from rich.console import Console

from hal.durable import replace_durably
from hal.errors import HalError, HardwareLost, StaleObservation
from hal.lease import robot_lock
from hal.resource import local_node
from hal.signals import bounded_shutdown
from user_sys.compose import PolicyConfig, RobotConfig, require_unique_names
from user_sys.config import as_dict, build_with_overrides, load, read_yaml
from user_sys.edge.demonstrations import DemonstrationConfig, check_demonstrable, generate_demonstrations
from user_sys.edge.outbox import Outbox, OutboxConfig
from user_sys.edge.recorder import RecorderConfig
from user_sys.edge.robot_processes import RobotProcesses, write_process_configs
from user_sys.edge.session import SessionConfig
from user_sys.errors import ConfigError
from user_sys.inference.protocol import POLICY_NODE
from user_sys.process_exit import EXIT_DEADLINE_S, exit_now
from user_sys.tunnel.endpoint import check_connect_endpoint
from user_sys.tunnel.keys import GATEWAY_NAME, load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.receiver import ReceiverConfig

POLL_S = 0.5
ROBOT_RETRY_S = 5.0
SESSION_STOP_LEAD_S = 1.0
DEMONSTRATION_COUNT_FILE = "demonstrations"  # the number of recorded ones
PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class EdgeConfig:
    """The robots of one computer. Each key has the meaning that it has in a run's configuration.

    Attributes:
        demonstrations: recorded once, before a policy drives the robot for the first time.
        policy: as in the run's configuration; weights of another policy are refused.
        tunnel: limits of the robots' tunnels, such as the bandwidth of each; the gateway has its own limits.
    """

    robots: tuple[RobotConfig, ...] = ()
    seed: int = 0
    demonstrations: DemonstrationConfig = field(default_factory=lambda: DemonstrationConfig(episodes=0))
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    weights: ReceiverConfig = field(default_factory=ReceiverConfig)
    outbox: OutboxConfig = field(default_factory=OutboxConfig)
    tunnel: TunnelLimits = field(default_factory=TunnelLimits)

    def __post_init__(self) -> None:
        require_unique_names(self.robots)


def edge_main(args: Namespace) -> int:
    """``user-sys edge CONFIG --connect tcp://HOST:PORT``: exit status 0 when the run is over or stopped.

    Raises:
        RunError, ConfigError, LeaseHeld: the configuration cannot work; raised before any robot moves.
    """
    console = Console()

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    if not args.verbose:
        logging.getLogger("hal.process_supervisor").setLevel(logging.ERROR)  # `RobotProcesses` prints its events
    config = load_edge_config(args.config, args.robot, args.overrides)
    _check_config(config, args.connect, args.keys)
    folder = args.folder.resolve()
    for robot in config.robots:
        write_process_configs(folder / robot.name, robot, _session(config, robot, args.connect, args.keys, folder))
    with bounded_shutdown(EXIT_DEADLINE_S, _abandon) as end:
        end.defer(lambda: None)
        stop = end.requested
        for number, robot in enumerate(config.robots):
            record_missing_demonstrations(config, number, robot, folder / robot.name, print_line, stop)
        logs = folder / "logs"
        robots = [RobotProcesses(r.name, folder / r.name, logs, args.connect, print_line) for r in config.robots]
        _run(robots, [args.keys / f"{robot.name}.key" for robot in config.robots], stop, print_line)
    return 0


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
    return build_with_overrides(EdgeConfig, settings, overrides, str(path))


def _check_config(config: EdgeConfig, connect: str, keys: Path) -> None:
    """Checks configuration, keys and locks before any robot moves. Raises ConfigError, RunError or LeaseHeld."""
    check_connect_endpoint(connect)
    if not config.robots:
        raise ConfigError("robots: the list is empty; add the robots of this computer")
    if config.policy.is_started_by_run:
        raise ConfigError(
            "policy.location: server: this computer cannot read the address of the run's policy server in the run's "
            "folder; start a server at this site (`python -m user_sys.inference`) and set "
            "--policy.endpoint=tcp://HOST:PORT, or run the policy in the session with --policy.location=edge"
        )
    for robot in config.robots:
        if robot.link:
            raise ConfigError(
                f"robot {robot.name}: link: `user-sys edge` uses a real network; an emulated link is for the robots of "
                f"`user-sys train`. Remove the key"
            )
    load_public_key(keys / f"{GATEWAY_NAME}.pub")
    if config.policy.location == "server":
        load_public_key(keys / f"{POLICY_NODE}.pub")
    for robot in config.robots:
        load_keypair(keys / f"{robot.name}.key")
        check_demonstrable(robot, config.demonstrations)
        with robot_lock(robot.name, "user-sys edge", simulated=robot.simulated):
            pass  # raises LeaseHeld if another program of this computer drives it


def _session(config: EdgeConfig, robot: RobotConfig, connect: str, keys: Path, folder: Path) -> SessionConfig:
    return SessionConfig(
        robot=robot.name,
        holder=f"edge on {local_node()} ({_identity(folder)})",
        endpoint=connect,
        keys=keys.resolve(),
        state=folder / robot.name,
        seed=config.seed,
        real_time=robot.follows_clock,
        realtime_scheduling=robot.realtime_scheduling,
        explore=robot.explores,
        outbox=config.outbox,
        recorder=config.recorder,
        policy=config.policy,
        weights=config.weights,
        tunnel=config.tunnel,
    )


def _identity(folder: Path) -> str:
    """A random identifier of this computer, so that two computers of the same name do not share a lease."""
    path = folder / "identity"
    if not path.exists():
        replace_durably(path, secrets.token_hex(4).encode())
    return path.read_text()


def record_missing_demonstrations(
    config: EdgeConfig, number: int, robot: RobotConfig, state: Path, print_line: PrintLine, stop: threading.Event
) -> None:
    """Records the missing demonstrations into the robot's outbox, from which they are sent first.

    If the robot is lost it waits until the robot returns or `stop` is set.
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
            _record_demonstrations(config, number, robot, state, stop)
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


def _record_demonstrations(
    config: EdgeConfig, number: int, robot: RobotConfig, state: Path, stop: threading.Event
) -> None:
    existing = _recorded_demonstrations(state)

    def check_stop() -> None:
        if stop.is_set():
            raise _Stopped

    with suppress(_Stopped), Outbox.open(state / "outbox", max_bytes=config.outbox.max_bytes) as outbox:

        def persist(chunks: Sequence[bytes]) -> None:
            for chunk in chunks:
                outbox.append(chunk, sync=False)
            outbox.sync()

        seed = config.seed + 100 * number
        recorded = generate_demonstrations(
            robot, config.demonstrations, existing, persist, config.recorder, seed=seed, check_stop=check_stop
        )
        for count, _ in enumerate(recorded, existing + 1):
            replace_durably(state / DEMONSTRATION_COUNT_FILE, str(count).encode())
            if stop.is_set():
                return


def _run(robots: Sequence[RobotProcesses], keys: Sequence[Path], stop: threading.Event, print_line: PrintLine) -> None:
    """Runs the robots' processes until the run is over for all of them or `stop` is set; then stops them."""
    key_times = [path.stat().st_mtime_ns for path in keys]
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
    finally:
        print_line("stopping: the robots are held, and recorded chunks are delivered")
        for robot in robots:
            robot.request_stop()
        time.sleep(SESSION_STOP_LEAD_S)  # sessions end their episodes; the drivers then stop the robots in any case
        with ThreadPoolExecutor(len(robots)) as pool:
            for done in [pool.submit(robot.stop) for robot in robots]:
                done.result()


def _abandon() -> None:
    exit_now("ended at once; the outboxes keep the recorded chunks for the next start")


def _modified_ns(key: Path, last_ns: int) -> int:
    try:
        return key.stat().st_mtime_ns
    except FileNotFoundError:  # while it is replaced, or removed: the running session has read it
        return last_ns
