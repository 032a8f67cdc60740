"""The commands of ``user-sys hardware``: list, watch, doctor, plan, quarantine, drain, restore, audit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.discovery import PROBE_INTERVAL_S, Discoverer, DiscoveryEvent, DiscoveryResult, discover
from hal.doctor import CheckResult, CheckStatus, DoctorConfig, run_checks
from hal.placement import PlacementPlan, describe_state, format_time
from hal.ray_cluster import connect_cluster
from hal.registry import OverrideKind, operator_name, read_registry
from hal.resource import Health, Kind, ResourceRecord
from hal.settings import suggest
from hal.state_database import STATE_FILE, AuditEntry, StateDatabase, machine_state_path, read_audit_log
from user_sys.commands.options import PATH, by_option, combined, json_option, reason_option
from user_sys.commands.output import print_json, print_line, print_table
from user_sys.compose import (
    OPTIONAL_LIBRARIES,
    RobotConfig,
    lost_robot,
    rendering_check_command,
    resource_probes,
)
from user_sys.config import load
from user_sys.errors import RunError
from user_sys.operator_overrides import overrides_of_real_robots, overrides_of_run
from user_sys.run.allocation import offered_resources, plan_run, probe_failures, store_node_names, with_local_lease
from user_sys.run.config import METADATA_FILE, RunConfig, RunFolder, open_run_folder, read_run_metadata
from user_sys.store.record_format import is_locked

GATEWAY_NOT_RUNNING = "the run's gateway is not running"
EXIT_PROBLEM = 1  # a job cannot be placed, or a check has found a problem
_STATUS_STYLES = {
    CheckStatus.OK: ("ok", "green"),
    CheckStatus.ADVICE: ("advice", "yellow"),
    CheckStatus.PROBLEM: ("problem", "red"),
}

_config_argument = click.argument("config", type=PATH, metavar="[CONFIG]", required=False)
_run_option = click.option("--run", type=PATH, metavar="RUN", help="add the resources of this run's gateway")


@click.command()
@_config_argument
@_run_option
@json_option
def list_(config: Path | None, run: Path | None, as_json: bool) -> None:
    """List the resources of this computer, the robots in CONFIG, and the resources of a run's gateway."""
    settings = _load(config)
    found = discover(resource_probes(settings.robots, lenient=True))
    remote_robots = _remote_robot_records(settings.remote_robots, run)
    records = _with_run([*map(with_local_lease, found.records), *remote_robots], run)
    if as_json:
        print_json([json.loads(record.to_json()) for record in records])
    else:
        print_table(_table(records), wrapped=("health", "facts"))
    for failure in probe_failures(found):
        print_line(failure, error=as_json)


@click.command()
@_config_argument
@json_option
def watch(config: Path | None, as_json: bool) -> NoReturn:
    """Print changes of the resources, one line an event, until Ctrl-C."""
    discoverer = Discoverer(resource_probes(_load(config).robots, lenient=True))
    while True:
        for event in discoverer.poll():
            if as_json:
                print_json({"unix_s": time.time(), **msgspec.to_builtins(event)})
            else:
                print_line(_event_line(event))
        time.sleep(PROBE_INTERVAL_S)


@click.command()
@_config_argument
@json_option
def doctor(config: Path | None, as_json: bool) -> int:
    """Print problems of this computer and of the robots in CONFIG, and how to fix them.

    The exit status is 1 if a check has found a problem.
    """
    settings = _load(config)
    machine = DoctorConfig(
        runs_folder=settings.runs,
        ports=_ports(settings),
        libraries=OPTIONAL_LIBRARIES,
        render_command=rendering_check_command(),
        has_real_robots=any(not robot.simulated for robot in settings.robots),
    )
    results = [*run_checks(machine), *_check_robots(settings.robots)]
    if as_json:
        print_json(results)
    else:
        _print_results(results)
    return EXIT_PROBLEM if any(result.status is CheckStatus.PROBLEM for result in results) else 0


def _ports(config: RunConfig) -> dict[str, int]:
    """The ports that a run of `config` will listen on, by purpose, without ports that it chooses itself."""
    gateway = config.gateway.endpoint.rpartition(":")[2]
    ports = {"the console": config.console.port if config.console.enabled else 0}
    ports |= {"the gateway": int(gateway) if gateway.isdecimal() else 0}
    return {purpose: port for purpose, port in ports.items() if port}


@click.command()
@click.argument("job", type=PATH, metavar="JOB")
@click.option("--ray", default="", metavar="HOST:PORT", help="address of the Ray cluster (default: JOB's)")
@_run_option
@json_option
def plan(job: Path, ray: str, run: Path | None, as_json: bool) -> int:
    """Place the robots and resources of JOB on those that are free now, without reserving them.

    JOB is the YAML file of a run, such as configs/fleet.yaml. The exit status is 1 if it cannot be placed now.
    """
    config = load(RunConfig, job)
    found = discover(resource_probes(config.robots, lenient=True))
    available, near_store = _available(config, found, ray or config.ray.address)
    known = {record.name for record in available}  # a job cannot use devices on the other computers of a run
    records = [r for r in _with_run(available, run) if r.kind is Kind.ROBOT or r.name in known]
    found_plan = plan_run(config, config.requests(), records, near_store)
    remote = _with_run(_remote_robot_records(config.remote_robots, run), run)
    names = {robot.name for robot in config.remote_robots}
    remote_robots = {record.name: describe_state(record) for record in remote if record.name in names}
    is_possible, failures = found_plan.assigned is not None, probe_failures(found)
    if as_json:
        rows = msgspec.to_builtins(found_plan.rows)
        print_json({"possible": is_possible, "rows": rows, "remote_robots": remote_robots, "failures": failures})
    else:
        Console().print(_plan_table(found_plan, remote_robots))
        for failure in failures:
            print_line(failure)
    return 0 if is_possible else EXIT_PROBLEM


def _plan_table(found: PlacementPlan, remote_robots: Mapping[str, str]) -> Table:
    """The requests, the resources, those that the job gets, and the missing ones."""
    outcome = "The job can run now" if found.assigned is not None else "The job cannot run now"
    table = Table("asked", "there is", "gets", "on", "missing", title=outcome, title_justify="left", box=box.SIMPLE)
    for row in found.rows:
        cells = (row.asked, "\n".join(row.there) or "none", "\n".join(row.gets), row.node)
        table.add_row(*map(Text, cells), Text(row.missing, style="red"))
    for name, state in remote_robots.items():
        table.add_row(Text(f"remote robot {name}"), Text(state), "not waited for", "", "")
    return table


_override_options = combined(
    click.argument("robot", metavar="ROBOT"),
    click.option("--run", type=PATH, required=True, metavar="RUN", help="run folder, such as runs/latest"),
    by_option,
)


@click.command()
@_override_options
@reason_option
def quarantine(robot: str, run: Path, by: str | None, reason: str) -> None:
    """Take ROBOT out of use at once; its lease ends. A running gateway applies this at once."""
    _override(robot, run, "quarantined", by, reason, "no session gets it until `user-sys hardware restore`")


@click.command()
@_override_options
@reason_option
def drain(robot: str, run: Path, by: str | None, reason: str) -> None:
    """Let ROBOT's session finish, and give ROBOT to no other. A running gateway applies this at once."""
    _override(robot, run, "draining", by, reason, "its session may finish, and no other session gets it")


@click.command()
@_override_options
def restore(robot: str, run: Path, by: str | None) -> None:
    """Put ROBOT back into use. A running gateway applies this at once."""
    of_all_runs = (run / STATE_FILE).exists() and not (run / METADATA_FILE).exists()
    overrides = overrides_of_real_robots(run) if of_all_runs else overrides_of_run(_run_folder(run))
    override = overrides.clear_override(robot, operator_name(by))
    print_line(f"{robot} is in use again; it was {override.what} {override.note}")


@click.command()
@click.argument("robot", default="", metavar="[ROBOT]")
@click.option("--run", type=PATH, metavar="RUN", help="such as runs/latest (default: actions outside of runs)")
@json_option
def audit(robot: str, run: Path | None, as_json: bool) -> None:
    """Print operators' actions, sign-ins, connections, refusals and leases, of all robots or of ROBOT, oldest first.

    RUN may be the folder of a relay, or of `user-sys edge --console`.
    """
    path = machine_state_path() if run is None else run / STATE_FILE
    if run is not None and not path.exists():
        read_run_metadata(run)
    entries = [e for e in read_audit_log(path) if robot in ("", e.robot)]
    if robot and run is not None and not entries:
        _require_known(robot, RunFolder(_run_folder(run)))
    if as_json:
        print_json(entries)
    elif not entries:
        print_line(f"{path} has no entry" + (f" of {robot}" if robot else ""))
    else:
        print_table(_audit_table(entries), wrapped=("outcome", ""))


def _audit_table(entries: Sequence[AuditEntry]) -> Table:
    table = Table("time (UTC)", "event", "robot", "who", "from", "order", "outcome", "", box=None)
    for e in entries:
        who = e.person or " ".join(filter(None, (e.peer, e.key if not e.peer else "")))
        token = f"token {e.token}" if e.token else ""
        notes = "; ".join(filter(None, (token, e.reason, f"{e.count} times" if e.count > 1 else "")))
        row = (e.time[:19].replace("T", " "), e.event, e.robot, who, e.address, e.order, e.outcome, notes)
        table.add_row(*map(Text, row))
    return table


def _available(config: RunConfig, found: DiscoveryResult, address: str) -> tuple[list[ResourceRecord], frozenset[str]]:
    """The resources for the run, and the names of the nodes with its store; no names without a cluster."""
    if not address:
        return offered_resources(config, found.records), frozenset()
    with connect_cluster(address) as cluster:
        return offered_resources(config, found.records, cluster), store_node_names(cluster)


def _override(robot: str, run: Path, kind: OverrideKind, by: str | None, reason: str, effect: str) -> None:
    folder = RunFolder(_run_folder(run))
    _require_known(robot, folder)
    override = overrides_of_run(folder.path).set_override(robot, kind, operator_name(by), reason)
    print_line(f"{robot} is {kind} {override.note}: {effect}")


def _require_known(robot: str, folder: RunFolder) -> None:
    """Raises RunError if the run has robots, but not the given one. A run without robots may get any."""
    _, config, _ = open_run_folder(folder.path)
    known = {record.name for record in read_registry(StateDatabase(folder.path / STATE_FILE))}
    known |= {each.name for each in (*config.robots, *config.remote_robots)}
    if known and robot not in known:
        raise RunError(f"{folder.path} has no robot {robot}; {suggest(robot, known)}")


def _run_folder(path: Path) -> Path:
    read_run_metadata(path)
    return path.resolve()


def _load(path: Path | None) -> RunConfig:
    return RunConfig() if path is None else load(RunConfig, path)


def _with_run(records: Iterable[ResourceRecord], run: Path | None) -> list[ResourceRecord]:
    """`records`, updated with those of the run's gateway. If that gateway is not running, only its overrides and the
    loss of its robots are used."""
    named = {record.name: record for record in records}
    if run is not None:
        folder = RunFolder(_run_folder(run))
        is_running = is_locked(folder.store)
        for known in read_registry(StateDatabase(folder.path / STATE_FILE)):
            local = named.get(known.name)
            if not is_running and known.health not in (Health.QUARANTINED, Health.DRAINING):
                if local is not None and local.health is not Health.LOST:
                    continue
                known = msgspec.structs.replace(known, health=Health.LOST, note="", trouble=GATEWAY_NOT_RUNNING)
            labels = {**(local.labels if local else {}), **known.labels}
            named[known.name] = msgspec.structs.replace(known, labels=labels)
    return [named[name] for name in sorted(named)]


def _remote_robot_records(robots: Sequence[RobotConfig], run: Path | None) -> list[ResourceRecord]:
    """Records of robots that the run's gateway has not seen, and whose drivers may not be installed here."""
    trouble = "a remote robot, which connects from its own computer"
    if run is not None:
        began = format_time(read_run_metadata(run).started_unix_s)
        trouble = f"a remote robot, which has not connected since the run began, {began}"
    return [lost_robot(robot, trouble) for robot in robots]


def _check_robots(robots: Sequence[RobotConfig]) -> Iterator[CheckResult]:
    """One result for each robot, also for one that cannot be built here."""
    if not robots:
        return
    for record in discover({"config": resource_probes(robots, lenient=True)["config"]}).records:
        if record.health is Health.LOST:
            fix = "install what is missing, mend its options in CONFIG, switch it on, or check its cable and address"
            problem = f"{record.name}: {record.trouble}"
            yield CheckResult(check="robots", status=CheckStatus.PROBLEM, message=problem, fix=fix)
        else:
            address = f" answers at {record.labels['address']}" if "address" in record.labels else ""
            message = f"{record.name} ({record.model}){address}"
            yield CheckResult(check="robots", status=CheckStatus.OK, message=message)


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


def _event_line(event: DiscoveryEvent) -> str:
    record = event.record
    subject = f"the probe {event.probe}" if record is None else f"{record.name} ({record.kind} {record.model})"
    return f"{time.strftime('%H:%M:%S')} {event.change:<13} {subject}{f': {event.text}' if event.text else ''}"


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
