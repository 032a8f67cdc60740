"""What the orders of ``user-sys hardware`` do."""

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
GATEWAY_NOT_RUNNING = "the run's gateway does not run"
EXIT_PROBLEM = 1  # the exit status where a job cannot be placed, or something does not work
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
    """``user-sys hardware list``: this computer, a config's robots, the robots of a run's gateway."""
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
    """``user-sys hardware doctor``: the exit status is 1 where something does not work."""
    config = _config(args.config)
    machine = DoctorConfig(
        runs_folder=config.runs,
        ports=_ports(config),
        libraries=OPTIONAL_LIBRARIES,
        render_command=rendering_check_command(),
    )
    findings = list(run_checks(machine))
    findings += _check_robots(config.robots)
    if args.json:
        _print_json([msgspec.to_builtins(finding) for finding in findings])
    else:
        _show_findings(findings)
    return EXIT_PROBLEM if any(finding.status is CheckStatus.PROBLEM for finding in findings) else 0


def _ports(config: RunConfig) -> dict[str, int]:
    """Those that a run of `config` is to listen on, by what for; where it takes any that is free, none."""
    gateway = config.gateway.endpoint.rpartition(":")[2]
    wanted = {"the console": config.console.port if config.console.enabled else 0}
    wanted |= {"the gateway": int(gateway) if gateway.isdecimal() else 0}
    return {purpose: port for purpose, port in wanted.items() if port}


def plan_main(args: Namespace) -> int:
    """``user-sys hardware explain JOB``: the exit status is 1 where the job cannot be placed now."""
    config = load(RunConfig, args.config)
    found = discover(resource_probes(config.robots, lenient=True))
    there, near_store = _available(config, found, args.ray or config.ray.address)
    known = {record.name for record in there}  # of devices that a run knows elsewhere nothing could be placed on
    records = [r for r in _with_run(there, args.run) if r.kind is Kind.ROBOT or r.name in known]
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
    return _override(args, "quarantined", "it is used by nobody until `user-sys hardware restore`")


def drain_main(args: Namespace) -> int:
    """``user-sys hardware drain ROBOT --run RUN``"""
    return _override(args, "draining", "the session at work may finish, and no other gets it")


def restore_main(args: Namespace) -> int:
    """``user-sys hardware restore ROBOT --run RUN``"""
    order = OperatorOverrides(_run_folder(args.run) / "orders.json").clear_override(args.name, operator_name(args.by))
    Console().print(Text(f"{args.name} is back in use; it was {order.what} {order.note}"), soft_wrap=True)
    return 0


def audit_main(args: Namespace) -> int:
    """``user-sys hardware audit [ROBOT] [--run RUN]``: one line an entry, oldest first."""
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
    """What there is for the run, and the nodes of that which have its store; none without a cluster."""
    if not address:
        return available_resources(config, found.records), frozenset()
    with connect_cluster(address) as cluster:
        return available_resources(config, found.records, cluster), store_node_names(cluster)


def _override(args: Namespace, what: OverrideKind, meaning: str) -> int:
    folder = RunFolder(_run_folder(args.run))
    _require_known(args, folder)
    order = OperatorOverrides(folder.path / "orders.json").set_override(
        args.name, what, operator_name(args.by), args.reason
    )
    Console().print(Text(f"{args.name} is {what} {order.note}: {meaning}"), soft_wrap=True)
    return 0


def _require_known(args: Namespace, folder: RunFolder) -> None:
    """Raises RunError where the run has other robots than the one that is named; one that has none may get any."""
    config = load(RunConfig, folder.config)
    known = {record.name for record in read_registry(folder.path)}
    known |= {robot.name for robot in (*config.robots, *config.remote_robots)}
    if known and args.name not in known:
        raise RunError(f"{args.run} knows no {args.name}; there is {format_list(sorted(known))}")


def _run_folder(path: Path) -> Path:
    read_run_metadata(path)
    return path.resolve()


def _config(path: Path | None) -> RunConfig:
    return RunConfig() if path is None else load(RunConfig, path)


def _robots(path: Path | None) -> tuple[RobotConfig, ...]:
    return _config(path).robots


def _with_run(records: Iterable[ResourceRecord], run: Path | None) -> list[ResourceRecord]:
    """`records`, and what the run's gateway knows, which says more of a robot than this computer can. Of what a gateway
    knew that does not run any more, orders still stand; where a robot is now, it cannot say."""
    named = {record.name: record for record in records}
    if run is not None:
        folder = RunFolder(_run_folder(run))
        runs = is_locked(folder.store)
        for known in read_registry(folder.path):
            here = named.get(known.name)
            if not runs and known.health not in (Health.QUARANTINED, Health.DRAINING):
                if here is not None and here.health is not Health.LOST:
                    continue
                known = msgspec.structs.replace(known, health=Health.LOST, note="", trouble=GATEWAY_NOT_RUNNING)
            labels = {**(here.labels if here else {}), **known.labels}
            named[known.name] = msgspec.structs.replace(known, labels=labels)
    return [named[name] for name in sorted(named)]


def _describe_remote_robots(robots: Sequence[RobotConfig], run: Path | None) -> dict[str, str]:
    """How each of a job's remote_robots fares, in words, by name."""
    known = {record.name: record for record in _with_run(_remote_robot_records(robots, run), run)}
    return {robot.name: describe_record(known[robot.name]) for robot in robots}


def _remote_robot_records(robots: Sequence[RobotConfig], run: Path | None) -> list[ResourceRecord]:
    """What can be said of robots that the run's gateway does not know, and whose drivers may not be installed here."""
    trouble = "a guest, which comes in from a computer of its own"
    if run is not None:
        trouble = (
            f"a guest, which has not come in since the run began, {format_time(read_run_metadata(run).started_unix_s)}"
        )
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
    """One for each robot. One that cannot even be built, for want of a library or an option, keeps no other from it."""
    looks: dict[str, Probe] = {}
    for robot in robots:
        if (library := missing_library(robot.driver)) is not None:
            says = f"{robot.name}: {library.purpose} needs {library.module}, which is not installed"
            yield CheckResult(check="robots", status=CheckStatus.PROBLEM, message=says, fix=library.install)
            continue
        try:
            looks[robot.name] = resource_probes((robot,))["config"]
        except Exception as error:  # a foreign driver may fail in any way
            mend, says = (
                "install what its driver needs, or mend its options in CONFIG",
                build_error_message(robot, error),
            )
            yield CheckResult(check="robots", status=CheckStatus.PROBLEM, message=says, fix=mend)
    found = discover(looks)
    yield from map(_check_robot, found.records)
    for name, failure in sorted(found.failures.items()):
        yield CheckResult(
            check="robots", status=CheckStatus.PROBLEM, message=f"{name}: {failure}", fix="look again in a while"
        )


def _check_robot(record: ResourceRecord) -> CheckResult:
    if record.health is Health.LOST:
        mend = "switch it on, look at its cable, and compare the address with what its controller shows"
        return CheckResult(
            check="robots", status=CheckStatus.PROBLEM, message=f"{record.name}: {record.trouble}", fix=mend
        )
    address = record.labels.get("address")
    says = f"{record.name} ({record.model}) answers at {address}" if address else f"{record.name} ({record.model})"
    return CheckResult(check="robots", status=CheckStatus.OK, message=says)


def _table(records: Sequence[ResourceRecord]) -> Table:
    table = Table("name", "kind", "model", "node", "health", "load", "facts", "found by", box=None)
    for record in records:
        health = {Health.READY: "green", Health.LOST: "red", Health.QUARANTINED: "red"}.get(record.health, "yellow")
        load = f"{record.load:.0%}" if record.kind in (Kind.GPU, Kind.COMPUTE) else ""
        why = record.note or record.trouble
        since = f" since {format_time(record.seen_unix_s)}" if record.seen_unix_s else ""
        told = f"{record.health}{since}{f' ({why})' if why else ''}"
        row = (record.name, record.kind, record.model, record.node)
        table.add_row(*map(Text, row), Text(told, style=health), load, Text(_facts(record)), Text(record.found_by))
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
    what = f"the probe {event.probe}" if record is None else f"{record.name} ({record.kind} {record.model})"
    return text.append(f"{what}{f': {event.text}' if event.text else ''}")


def _show_findings(findings: Sequence[CheckResult]) -> None:
    console, table = Console(), Table.grid(padding=(0, 2))
    for finding in findings:
        word, style = _STATUS_STYLES[finding.status]
        table.add_row(Text(word, style=style), finding.check, Text(finding.message))
        if finding.fix:
            table.add_row("", "", Text(f"-> {finding.fix}", style="bold"))
    console.print(table)
    bad = sum(finding.status is CheckStatus.PROBLEM for finding in findings)
    advice = sum(finding.status is CheckStatus.ADVICE for finding in findings)
    console.print(f"{bad} problem(s), {advice} piece(s) of advice")


def _placement_lines(placement: Placement, rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["The job can run now." if placement.assigned else "The job asks for nothing: it can run anywhere."]
    return lines + [f"  {row['asked']}: {format_list(row['gets'])} on {row['where']}" for row in rows]


def _remote_robot_lines(remote_robots: Mapping[str, str]) -> list[str]:
    return (
        [f"It does not wait for its remote robots: {format_list(list(remote_robots.values()))}."]
        if remote_robots
        else []
    )


def _node_names(records: Sequence[ResourceRecord]) -> str:
    return format_list(sorted({record.node for record in records}))


def _print_json(value: object) -> None:
    Console().print_json(json.dumps(value))
