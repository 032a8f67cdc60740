"""The commands of ``user-sys hardware``: list, watch, doctor, plan, quarantine, drain, restore, audit."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.audit import AUDIT_FILE, machine_audit_path, read_audit_log
from hal.discovery import Discoverer, DiscoveryEvent, DiscoveryResult, Probe, ResourceChange, discover
from hal.doctor import CheckResult, CheckStatus, DoctorConfig, run_checks
from hal.errors import PlacementError
from hal.placement import Placement, describe_record, describe_request, format_list, format_time
from hal.ray_cluster import connect_cluster
from hal.registry import OperatorOverrides, OverrideKind, operator_name, read_registry
from hal.resource import Health, Kind, ResourceRecord
from user_sys.compose import (
    OPTIONAL_LIBRARIES,
    RobotConfig,
    build_error_message,
    missing_library,
    rendering_check_command,
    resource_probes,
)
from user_sys.config import load
from user_sys.errors import RunError
from user_sys.run.allocation import available_resources, place_run, probe_failures, store_node_names, with_local_lease
from user_sys.run.config import RunConfig, RunFolder, read_run_metadata
from user_sys.store.record_format import is_locked

EVENT_WAIT_S = 0.5
GATEWAY_NOT_RUNNING = "the run's gateway is not running"
EXIT_PROBLEM = 1  # a job cannot be placed, or a check has found a problem
_STATUS_STYLES = {
    CheckStatus.OK: ("ok", "green"),
    CheckStatus.ADVICE: ("advice", "yellow"),
    CheckStatus.PROBLEM: ("problem", "red"),
}
_CHANGE_STYLES = {
    ResourceChange.APPEARED: "green",
    ResourceChange.RETURNED: "green",
    ResourceChange.RECOVERED: "green",
    ResourceChange.DEGRADED: "yellow",
    ResourceChange.ABSENT: "red",
    ResourceChange.VANISHED: "red",
    ResourceChange.PROBE_FAILED: "red",
}


def list_main(args: Namespace) -> int:
    """``user-sys hardware list``: this computer, a config's robots, and the resources of a run's gateway."""
    config = _config(args.config)
    found = discover(resource_probes(config.robots, lenient=True))
    records = _with_run(
        [*map(with_local_lease, found.records), *_remote_robot_records(config.remote_robots, args.run)], args.run
    )
    if args.json:
        _print_json([json.loads(record.to_json()) for record in records])
    else:
        Console().print(_table(records))
    for failure in probe_failures(found):
        Console(stderr=args.json).print(Text(failure, style="red"), soft_wrap=True)
    return 0


def watch_main(args: Namespace) -> NoReturn:
    """``user-sys hardware watch``: one line an event, until Ctrl-C."""
    console = Console()
    with Discoverer(resource_probes(_robots(args.config), lenient=True)) as discoverer:
        while True:
            event = discoverer.next_event(EVENT_WAIT_S)
            if event is None:
                continue
            if args.json:
                line = msgspec.json.encode({"unix_s": time.time(), **msgspec.to_builtins(event)})
                sys.stdout.write(f"{line.decode()}\n")
                sys.stdout.flush()
            else:
                console.print(_event_line(event), soft_wrap=True)


def doctor_main(args: Namespace) -> int:
    """``user-sys hardware doctor``: the exit status is 1 if a check has found a problem."""
    config = _config(args.config)
    machine = DoctorConfig(
        runs_folder=config.runs,
        ports=_ports(config),
        libraries=OPTIONAL_LIBRARIES,
        render_command=rendering_check_command(),
    )
    results = list(run_checks(machine))
    results += _check_robots(config.robots)
    if args.json:
        _print_json([msgspec.to_builtins(result) for result in results])
    else:
        _print_results(results)
    return EXIT_PROBLEM if any(result.status is CheckStatus.PROBLEM for result in results) else 0


def _ports(config: RunConfig) -> dict[str, int]:
    """The ports that a run of `config` will listen on, by purpose, without ports that it chooses itself."""
    gateway = config.gateway.endpoint.rpartition(":")[2]
    ports = {"the console": config.console.port if config.console.enabled else 0}
    ports |= {"the gateway": int(gateway) if gateway.isdecimal() else 0}
    return {purpose: port for purpose, port in ports.items() if port}


def plan_main(args: Namespace) -> int:
    """``user-sys hardware plan JOB``: the exit status is 1 if the job cannot be placed now."""
    config = load(RunConfig, args.config)
    found = discover(resource_probes(config.robots, lenient=True))
    available, near_store = _available(config, found, args.ray or config.ray.address)
    known = {record.name for record in available}  # a job cannot use devices on the other computers of a run
    records = [r for r in _with_run(available, args.run) if r.kind is Kind.ROBOT or r.name in known]
    requests = config.requests()
    remote_robots = _describe_remote_robots(config.remote_robots, args.run)
    try:
        placement = place_run(config, requests, records, near_store, probe_failures(found))
    except PlacementError as error:
        why = str(error)
        if args.json:
            _print_json({"possible": False, "why": why, "remote_robots": remote_robots})
        else:
            Console().print(Text("\n".join([why, *_remote_robot_lines(remote_robots)])), soft_wrap=True)
        return EXIT_PROBLEM
    rows = [
        {"asked": describe_request(request), "gets": [record.name for record in records], "where": _node_names(records)}
        for request, records in zip(requests, placement.assigned, strict=True)
    ]
    if args.json:
        _print_json({"possible": True, "placement": rows, "remote_robots": remote_robots})
    else:
        Console().print(
            Text("\n".join([*_placement_lines(placement, rows), *_remote_robot_lines(remote_robots)])), soft_wrap=True
        )
    return 0


def quarantine_main(args: Namespace) -> int:
    """``user-sys hardware quarantine ROBOT --run RUN``"""
    return _override(args, "quarantined", "no session gets it until `user-sys hardware restore`")


def drain_main(args: Namespace) -> int:
    """``user-sys hardware drain ROBOT --run RUN``"""
    return _override(args, "draining", "its session may finish, and no other session gets it")


def restore_main(args: Namespace) -> int:
    """``user-sys hardware restore ROBOT --run RUN``"""
    path = _run_folder(args.run) / "orders.json"
    override = OperatorOverrides(path).clear_override(args.name, operator_name(args.by))
    Console().print(Text(f"{args.name} is in use again; it was {override.what} {override.note}"), soft_wrap=True)
    return 0


def audit_main(args: Namespace) -> int:
    """``user-sys hardware audit [ROBOT] [--run RUN]``: one line for each entry, oldest first."""
    folder = None if args.run is None else RunFolder(_run_folder(args.run))
    path = machine_audit_path() if folder is None else folder.path / AUDIT_FILE
    entries = [e for e in read_audit_log(path) if args.name in ("", e.robot)]
    if args.name and folder is not None and not entries:
        _require_known(args, folder)
    if args.json:
        _print_json(msgspec.to_builtins(entries))
        return 0
    if not entries:
        Console().print(Text(f"{path} has no entry" + (f" of {args.name}" if args.name else "")), soft_wrap=True)
        return 0
    table = Table("time (UTC)", "event", "robot", "who", "from", "order", "outcome", "", box=None)
    for e in entries:
        who = e.person or " ".join(filter(None, (e.peer, e.key if not e.peer else "")))
        token = f"token {e.token}" if e.token else ""
        notes = "; ".join(filter(None, (token, e.reason, f"{e.count} times" if e.count > 1 else "")))
        row = (e.time[:19].replace("T", " "), e.event, e.robot, who, e.address, e.order, e.outcome, notes)
        table.add_row(*map(Text, row))
    Console().print(table)
    return 0


def _available(config: RunConfig, found: DiscoveryResult, address: str) -> tuple[list[ResourceRecord], frozenset[str]]:
    """The resources for the run, and the names of the nodes with its store; no names without a cluster."""
    if not address:
        return available_resources(config, found.records), frozenset()
    with connect_cluster(address) as cluster:
        return available_resources(config, found.records, cluster), store_node_names(cluster)


def _override(args: Namespace, kind: OverrideKind, effect: str) -> int:
    folder = RunFolder(_run_folder(args.run))
    _require_known(args, folder)
    override = OperatorOverrides(folder.path / "orders.json").set_override(
        args.name, kind, operator_name(args.by), args.reason
    )
    Console().print(Text(f"{args.name} is {kind} {override.note}: {effect}"), soft_wrap=True)
    return 0


def _require_known(args: Namespace, folder: RunFolder) -> None:
    """Raises RunError if the run has robots, but not the given one. A run without robots may get any."""
    config = load(RunConfig, folder.config)
    known = {record.name for record in read_registry(folder.path)}
    known |= {robot.name for robot in (*config.robots, *config.remote_robots)}
    if known and args.name not in known:
        raise RunError(f"{args.run} has no robot {args.name}; there is {format_list(sorted(known))}")


def _run_folder(path: Path) -> Path:
    read_run_metadata(path)
    return path.resolve()


def _config(path: Path | None) -> RunConfig:
    return RunConfig() if path is None else load(RunConfig, path)


def _robots(path: Path | None) -> tuple[RobotConfig, ...]:
    return _config(path).robots


def _with_run(records: Iterable[ResourceRecord], run: Path | None) -> list[ResourceRecord]:
    """`records`, updated with those of the run's gateway. If that gateway is not running, only its overrides and the
    loss of its robots are used."""
    named = {record.name: record for record in records}
    if run is not None:
        folder = RunFolder(_run_folder(run))
        is_running = is_locked(folder.store)
        for known in read_registry(folder.path):
            local = named.get(known.name)
            if not is_running and known.health not in (Health.QUARANTINED, Health.DRAINING):
                if local is not None and local.health is not Health.LOST:
                    continue
                known = msgspec.structs.replace(known, health=Health.LOST, note="", trouble=GATEWAY_NOT_RUNNING)
            labels = {**(local.labels if local else {}), **known.labels}
            named[known.name] = msgspec.structs.replace(known, labels=labels)
    return [named[name] for name in sorted(named)]


def _describe_remote_robots(robots: Sequence[RobotConfig], run: Path | None) -> dict[str, str]:
    """The state of each of a job's remote robots, for people, by name."""
    known = {record.name: record for record in _with_run(_remote_robot_records(robots, run), run)}
    return {robot.name: describe_record(known[robot.name]) for robot in robots}


def _remote_robot_records(robots: Sequence[RobotConfig], run: Path | None) -> list[ResourceRecord]:
    """Records of robots that the run's gateway has not seen, and whose drivers may not be installed here."""
    trouble = "a remote robot, which connects from its own computer"
    if run is not None:
        began = format_time(read_run_metadata(run).started_unix_s)
        trouble = f"a remote robot, which has not connected since the run began, {began}"
    return [
        ResourceRecord(
            kind=Kind.ROBOT,
            name=robot.name,
            model="",
            node="",
            labels={"driver": robot.driver, **robot.labels},
            health=Health.LOST,
            trouble=trouble,
        )
        for robot in robots
    ]


def _check_robots(robots: Sequence[RobotConfig]) -> Iterator[CheckResult]:
    """One result for each robot, including those that cannot be built for lack of a library or an option."""
    robot_probes: dict[str, Probe] = {}
    for robot in robots:
        if (library := missing_library(robot.driver)) is not None:
            message = f"{robot.name}: {library.purpose} needs {library.module}, which is not installed"
            yield CheckResult(check="robots", status=CheckStatus.PROBLEM, message=message, fix=library.install)
            continue
        try:
            robot_probes[robot.name] = resource_probes((robot,))["config"]
        except Exception as error:  # another package's driver may fail in any way
            message, fix = (
                build_error_message(robot, error),
                "install its driver's libraries, or fix its options in CONFIG",
            )
            yield CheckResult(check="robots", status=CheckStatus.PROBLEM, message=message, fix=fix)
    found = discover(robot_probes)
    yield from map(_check_robot, found.records)
    for name, failure in sorted(found.failures.items()):
        message = f"{name}: {failure}"
        yield CheckResult(check="robots", status=CheckStatus.PROBLEM, message=message, fix="run it again later")


def _check_robot(record: ResourceRecord) -> CheckResult:
    if record.health is Health.LOST:
        message = f"{record.name}: {record.trouble}"
        fix = "switch it on, check its cable, and compare the address with its controller's"
        return CheckResult(check="robots", status=CheckStatus.PROBLEM, message=message, fix=fix)
    address = record.labels.get("address")
    message = f"{record.name} ({record.model}) answers at {address}" if address else f"{record.name} ({record.model})"
    return CheckResult(check="robots", status=CheckStatus.OK, message=message)


def _table(records: Sequence[ResourceRecord]) -> Table:
    table = Table("name", "kind", "model", "node", "health", "load", "facts", "found by", box=None)
    for record in records:
        health = {Health.READY: "green", Health.LOST: "red", Health.QUARANTINED: "red"}.get(record.health, "yellow")
        load = f"{record.load:.0%}" if record.kind in (Kind.GPU, Kind.COMPUTE) else ""
        why = record.note or record.trouble
        since = f" since {format_time(record.seen_unix_s)}" if record.seen_unix_s else ""
        text = f"{record.health}{since}{f' ({why})' if why else ''}"
        row = (record.name, record.kind, record.model, record.node)
        table.add_row(*map(Text, row), Text(text, style=health), load, Text(_facts(record)), Text(record.found_by))
    return table


def _facts(record: ResourceRecord) -> str:
    facts = [f"{record.memory_bytes / 1e9:.0f} GB"] * bool(record.memory_bytes)
    facts += [f"{record.cores} processors"] * bool(record.cores) + [f"{record.sm_count} SMs"] * bool(record.sm_count)
    facts += [*record.capabilities, *(f"{name} {value}" for name, value in sorted(record.labels.items()))]
    return ", ".join(facts)


def _event_line(event: DiscoveryEvent) -> Text:
    text = Text(time.strftime("%H:%M:%S "))
    text.append(f"{event.change:<13}", style=_CHANGE_STYLES.get(event.change, "default"))
    record = event.record
    subject = f"the probe {event.probe}" if record is None else f"{record.name} ({record.kind} {record.model})"
    return text.append(f"{subject}{f': {event.text}' if event.text else ''}")


def _print_results(results: Sequence[CheckResult]) -> None:
    console, table = Console(), Table.grid(padding=(0, 2))
    for result in results:
        word, style = _STATUS_STYLES[result.status]
        table.add_row(Text(word, style=style), result.check, Text(result.message))
        if result.fix:
            table.add_row("", "", Text(f"-> {result.fix}", style="bold"))
    console.print(table)
    bad = sum(result.status is CheckStatus.PROBLEM for result in results)
    advice = sum(result.status is CheckStatus.ADVICE for result in results)
    console.print(f"{bad} problem(s), {advice} piece(s) of advice")


def _placement_lines(placement: Placement, rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["The job can run now." if placement.assigned else "The job requests nothing: it can run anywhere."]
    return lines + [f"  {row['asked']}: {format_list(row['gets'])} on {row['where']}" for row in rows]


def _remote_robot_lines(remote_robots: Mapping[str, str]) -> list[str]:
    if not remote_robots:
        return []
    return [f"It does not wait for its remote robots: {format_list(list(remote_robots.values()))}."]


def _node_names(records: Sequence[ResourceRecord]) -> str:
    return format_list(sorted({record.node for record in records}))


def _print_json(value: object) -> None:
    Console().print_json(json.dumps(value))
