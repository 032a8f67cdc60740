"""``user-sys edge``: drives the robots of one computer for a run elsewhere. It needs the `edge` extra only.

It starts two processes for each robot and keeps them running, whatever becomes of the network. It listens on nothing:
the sessions dial out to one port. SIGTERM, Ctrl-C or the end of its terminal ends the sessions, and a second later the
drivers, so that robots do their documented stop; what has not been delivered stays in the outboxes.
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
from user_sys.tunnel.keys import load_keypair, load_public_key
from user_sys.tunnel.limits import TunnelLimits
from user_sys.weights.receiver import ReceiverConfig

POLL_S = 0.5
ROBOT_RETRY_S = 5.0
SESSION_STOP_LEAD_S = 1.0
DEMONSTRATION_COUNT_FILE = "demonstrations"  # of those that are in the outbox
GATEWAY = "gateway"
PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class EdgeConfig:
    """The robots of one computer, and how they act. Each key means what it means in a run's configuration.

    Attributes:
        demonstrations: shown by the scripted expert, once, before the robot is first driven by a policy.
        policy: the same as in the run's configuration; weights of another one are refused.
        tunnel: bounds of the robots' end, such as the bandwidth that each may take; the gateway has its own.
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
        RunError, ConfigError, LeaseHeld: what cannot work is said before any robot moves.
    """
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    if not args.verbose:
        logging.getLogger("hal.process_supervisor").setLevel(logging.ERROR)  # what it would say is said in plain words
    config = load_edge_config(args.config, args.robot, args.overrides)
    _check_config(config, args.connect, args.keys)
    folder = args.folder.resolve()
    for robot in config.robots:
        write_process_configs(folder / robot.name, robot, _session(config, robot, args.connect, args.keys, folder))
    with bounded_shutdown(EXIT_DEADLINE_S, _abandon) as end:
        end.defer(lambda: None)
        stop = end.requested
        for number, robot in enumerate(config.robots):
            record_missing_demonstrations(config, number, robot, folder / robot.name, say, stop)
        watches = [RobotProcesses(r.name, folder / r.name, folder / "logs", args.connect, say) for r in config.robots]
        _run(watches, [args.keys / f"{robot.name}.key" for robot in config.robots], stop, say)
    return 0


def load_edge_config(path: Path, robots: Sequence[str], overrides: Sequence[str]) -> EdgeConfig:
    """The configuration in the file at `path`; with `robots`, a run's, of which these remote robots count.

    Raises:
        ConfigError: as `load`; a run's file names no such remote robot.
    """
    if not robots:
        return load(EdgeConfig, path, overrides)
    of_run = read_yaml(path)
    listed = of_run["remote_robots"] if isinstance(of_run.get("remote_robots"), list) else []
    remote_robots = {str(each.get("name")): each for each in listed if isinstance(each, dict)}
    if unknown := [name for name in robots if name not in remote_robots]:
        raise ConfigError(f"--robot {unknown[0]}: {path} names {sorted(remote_robots) or 'none'} under remote_robots:")
    mine = {field.name: of_run[field.name] for field in fields(EdgeConfig) if field.name in of_run}
    mine = {
        "demonstrations": as_dict(DemonstrationConfig()),
        **mine,
        "robots": [remote_robots[name] for name in robots],
    }
    return build_with_overrides(EdgeConfig, mine, overrides, str(path))


def _check_config(config: EdgeConfig, connect: str, keys: Path) -> None:
    check_connect_endpoint(connect)
    if not config.robots:
        raise ConfigError("robots: the configuration names none; this computer has nothing to drive")
    if config.policy.is_started_by_run:
        raise ConfigError(
            "policy.location: server: this computer does not see the run's folder, with the address of its policy "
            "server; start one at this site (`python -m user_sys.inference`) and say where it listens, as "
            "--policy.endpoint=tcp://HOST:PORT, or let the policy act here, with --policy.location=edge"
        )
    for robot in config.robots:
        if robot.link:
            raise ConfigError(
                f"robot {robot.name}: link: an edge dials a real network; an emulated one is for robots that a run "
                f"drives itself (`user-sys train`). Leave it out here"
            )
    load_public_key(keys / f"{GATEWAY}.pub")
    if config.policy.location == "server":
        load_public_key(keys / f"{POLICY_NODE}.pub")
    for robot in config.robots:
        load_keypair(keys / f"{robot.name}.key")
        check_demonstrable(robot, config.demonstrations)
        with robot_lock(robot.name, "user-sys edge", simulated=robot.simulated):
            pass  # nobody else drives it on this computer


def _session(config: EdgeConfig, robot: RobotConfig, connect: str, keys: Path, folder: Path) -> SessionConfig:
    return SessionConfig(
        robot=robot.name,
        holder=f"edge on {local_node()} ({_identity(folder)})",
        endpoint=connect,
        keys=keys.resolve(),
        state=folder / robot.name,
        seed=config.seed,
        real_time=robot.follows_clock,
        realtime=robot.realtime,
        explore=robot.explores,
        outbox=config.outbox,
        recorder=config.recorder,
        policy=config.policy,
        weights=config.weights,
        tunnel=config.tunnel,
    )


def _identity(folder: Path) -> str:
    """Tells this computer from another of the same name, so that two do not take the robot from each other in turns."""
    path = folder / "identity"
    if not path.exists():
        replace_durably(path, secrets.token_hex(4).encode())
    return path.read_text()


def record_missing_demonstrations(
    config: EdgeConfig, number: int, robot: RobotConfig, state: Path, print_line: PrintLine, stop: threading.Event
) -> None:
    """Shows what is missing, into the robot's outbox: the demonstrations travel before everything else.

    A robot that goes away meanwhile is awaited, as it is later on; `stop` ends that.
    """
    said = ""
    if (there := _recorded_demonstrations(state)) < config.demonstrations.episodes:
        print_line(f"{robot.name}: the scripted expert shows {config.demonstrations.episodes - there} demonstrations")
    elif config.demonstrations.episodes:
        print_line(
            f"{robot.name}: {there} demonstrations were shown before, to the same run or another, so none now; without "
            f"the file {state / DEMONSTRATION_COUNT_FILE} they would be shown again"
        )
    while _recorded_demonstrations(state) < config.demonstrations.episodes and not stop.is_set():
        try:
            _record_demonstrations(config, number, robot, state, stop)
        except (HardwareLost, StaleObservation) as error:
            if str(error) != said:
                said = str(error)
                print_line(f"{robot.name} is awaited: {said}")
            stop.wait(ROBOT_RETRY_S)


def _recorded_demonstrations(state: Path) -> int:
    counter = state / DEMONSTRATION_COUNT_FILE
    return int(counter.read_text()) if counter.exists() else 0


class _Stopped(HalError):
    """Somebody ends the program: the demonstration that is under way is given up."""


def _record_demonstrations(
    config: EdgeConfig, number: int, robot: RobotConfig, state: Path, stop: threading.Event
) -> None:
    there = _recorded_demonstrations(state)

    def attend() -> None:
        if stop.is_set():
            raise _Stopped

    with suppress(_Stopped), Outbox.open(state / "outbox", max_bytes=config.outbox.max_bytes) as outbox:

        def keep(chunks: Sequence[bytes]) -> None:
            for chunk in chunks:
                outbox.append(chunk, sync=False)
            outbox.sync()

        seed = config.seed + 100 * number
        shown = generate_demonstrations(
            robot, config.demonstrations, there, keep, config.recorder, seed=seed, check_stop=attend
        )
        for count, _ in enumerate(shown, there + 1):
            replace_durably(state / DEMONSTRATION_COUNT_FILE, str(count).encode())
            if stop.is_set():
                return


def _run(watches: Sequence[RobotProcesses], keys: Sequence[Path], stop: threading.Event, say: PrintLine) -> None:
    """Keeps the robots going until the run is over for all of them or `stop` is set; then stops them."""
    versions = [path.stat().st_mtime_ns for path in keys]
    try:
        for watch in watches:
            watch.start()
        while not stop.is_set() and not all(watch.is_finished for watch in watches):
            stop.wait(POLL_S)
            for index, watch in enumerate(watches):
                watch.poll()
                if (version := _version(keys[index], versions[index])) != versions[index]:
                    versions[index] = version
                    watch.restart_session("it has a new key")
    finally:
        say("stopping: the robots are held, what was recorded is delivered")
        for watch in watches:
            watch.request_stop()
        time.sleep(
            SESSION_STOP_LEAD_S
        )  # to end their episodes; a session that does not keeps no robot from its safe stop
        _for_each(watches, RobotProcesses.stop)


def _abandon() -> None:
    exit_now("ended at once; what was recorded is kept in the outboxes, and delivered by the next start")


def _version(key: Path, known: int) -> int:
    try:
        return key.stat().st_mtime_ns
    except FileNotFoundError:  # while it is replaced, or for good: the session has its own
        return known


def _for_each(watches: Sequence[RobotProcesses], act: Callable[[RobotProcesses], None]) -> None:
    with ThreadPoolExecutor(len(watches)) as pool:
        for done in [pool.submit(act, watch) for watch in watches]:
            done.result()
