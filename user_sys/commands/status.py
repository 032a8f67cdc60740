"""`user-sys status`, `top` and `debug bundle`: state and faults of a run, and a bundle for others."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from user_sys.commands.options import PATH, json_option
from user_sys.commands.output import print_json, print_line, print_table, size_text
from user_sys.config import rewrite_yaml
from user_sys.edge.robot_processes import EDGE_IDENTITY_FILE, EDGE_STATUS_FILE, EdgeStatus, read_edge_status
from user_sys.errors import ConfigError, RunError
from user_sys.run.config import METADATA_FILE
from user_sys.run.progress import robots_table
from user_sys.run.status import STATUS_FILE, Fault, RunStatus, find_faults, launcher_fault, read_status

REFRESH_S = 1.0
EXIT_FAULTS = 1
run_argument = click.argument("run", type=PATH, metavar="RUN")
MASK = b"[REDACTED]"
MAX_TAIL_BYTES = 2 << 20  # of each log and each file of metrics
MIN_SECRET_CHARS = 8
FILES = (
    "config.yaml", METADATA_FILE, STATUS_FILE, "summary.json", "gateway.json", "robots/*.json", "metrics/*.jsonl",
    "logs/*.log", "logs/*.log.*", "edge/*/*.yaml",
)  # fmt: skip
LISTED = ("store", "checkpoints", "weights", "edge")
_PUBLIC_KEYS = (".pub", ".verify", ".lives")
_SECRET_NAME = re.compile(r"token|secret|passw|api_?key|credential|private", re.IGNORECASE)
_WORD = r"token|secret|passw|passphrase|api_?key|(?<![a-z])key(?![a-z])|credential|private|authorization|cookie"
_KEY = re.compile(_WORD, re.IGNORECASE)  # of a setting
_ASSIGNED = re.compile(
    rb"""
    (?P<name> (?P<option> (?<![\w-]) --? [\w-]{0,64}? )? (?:WORD)[\w-]{0,64} )  # an option's value may be the next word
    (?:
        (?P<open> (?: \\*["']? \s* [:=] \s* | (?(option) (?: \\*["'], \s* | [ \t]+ ) | (?!) ) )
            [bru]{0,2} (?P<escape>\\*) (?P<quote>["']) )  # a quoted value
        .*? (?P<close> (?<!\\) (?P=escape) (?P=quote) | $ )
      | (?P<json> (?P<mark> \\*["'] ) [ \t]* : [ \t]* ) (?: [\[{].* | [^\s,}\]]+ )
      | (?P<line> [ \t]* : [ \t]* ) [^\s].*  # of YAML or of a header: all of it
      | (?P<word> [ \t]* = [ \t]* | (?(option) [ \t]+ (?!-) | (?!) ) ) (?: [^\s&"'] | (?<=[\w+/=-]) ["'] (?=[\w+/=-]) )+
    )
    """.replace(b"WORD", _WORD.encode()),
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_USER_IN_URL = re.compile(rb"""(?<=://)[^\s/"'<>]+(?=@)""")
_BEARER = re.compile(rb"(?<=bearer )[\w.~+/=-]{8,}", re.IGNORECASE)


@click.command()
@run_argument
@json_option
@click.option("--alive", is_flag=True, help="exit status 1 only if the program itself hangs or has ended too early")
def status(run: Path, as_json: bool, alive: bool) -> int:
    """Print the state of the run in the folder RUN, and one sentence for each fault: the problem, the reaction.

    RUN can be the folder of `user-sys edge` too. Exit status 1: there is a fault.
    """
    if (run / EDGE_IDENTITY_FILE).exists() or (run / EDGE_STATUS_FILE).exists():
        return _edge_status(read_edge_status(run), as_json, alive)
    found = read_status(run)
    if alive:
        fault = launcher_fault(found, run)
        print_line(f"FAULT: {fault}" if fault else f"{found.run.run}: {found.stage}")
        return EXIT_FAULTS if fault else 0
    faults = find_faults(found, run)
    if as_json:
        age_s = round(time.time() - found.written_unix_s, 1)
        print_json({"stage": found.stage, "age_s": age_s, "faults": faults, "run": found.run})
        return EXIT_FAULTS if faults else 0
    for line in _summary(found):
        print_line(line)
    print_table(robots_table(found.run))
    for fault in faults:
        print_line(f"FAULT: {fault}")
    if not faults:
        print_line("no fault")
    return EXIT_FAULTS if faults else 0


def _edge_status(found: EdgeStatus, as_json: bool, alive: bool) -> int:
    has_faults = not found.is_alive or (not alive and any(robot.is_fault for robot in found.robots))
    if as_json:
        print_json({"age_s": round(time.time() - found.written_unix_s, 1), "robots": found.robots})
    else:
        for robot in found.robots:
            print_line(f"{'FAULT: ' if robot.is_fault else ''}{robot.name}: {robot.text}")
        if not found.is_alive:
            print_line(f"FAULT: `user-sys edge` (process {found.pid} on {found.host}) has ended or hangs")
    return EXIT_FAULTS if has_faults else 0


@click.command()
@run_argument
def top(run: Path) -> None:
    """Show the run in the folder RUN: robots, processes, faults. Each second; Ctrl-C ends it."""
    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            found = read_status(run)
            live.update(_view(found, find_faults(found, run)), refresh=True)
            time.sleep(REFRESH_S)


def _view(found: RunStatus, faults: list[Fault]) -> RenderableType:
    processes = _table("process", "state", "restarts")
    for each in found.processes:
        processes.add_row(each.name, each.state, str(each.restarts))
    shown = [Text(f"FAULT: {fault}", style="bold red") for fault in faults]
    return Group(*map(Text, _summary(found)), Text(), robots_table(found.run), Text(), processes, Text(), *shown)


def _summary(found: RunStatus) -> list[str]:
    run = found.run
    success = "-" if run.success is None else f"{run.success:.0%}"
    age_s = max(0.0, time.time() - found.written_unix_s)
    return [
        f"{run.run}: {found.stage}, {run.elapsed_s / 60:.1f} min (reported {age_s:.0f} s ago)",
        f"episodes {run.episodes:,}, with help {run.interventions:,}, success of the newest {success}; "
        f"steps {run.env_steps:,} ({run.env_steps_per_s:.0f}/s); "
        f"updates {run.updates:,} ({run.updates_per_s:.0f}/s), robots are {run.staleness} versions behind",
    ]


def _table(*names: str) -> Table:
    return Table(*(Column(name, no_wrap=True) for name in names), box=None, padding=(0, 2, 0, 0), header_style="bold")


@click.command()
@run_argument
@click.option("--output", type=PATH, metavar="FILE", help="the archive to write (default: debug-RUN.tar.gz here)")
def bundle(run: Path, output: Path | None) -> None:
    """Pack logs, settings, metrics and versions of the run in the folder RUN for a bug report.

    Keys, recorded steps and weights are left out; tokens and passwords in texts are replaced.
    """
    target = output or Path(f"debug-{run.resolve().name}.tar.gz")
    names = write_debug_bundle(run, target)
    print_line(f"{target}: {len(names)} files, {size_text(target.stat().st_size)}; read it before you send it")


def write_debug_bundle(run: Path, target: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Writes a gzipped tar file with mode 0600 at `target`; returns the names of the packed files.

    Only named kinds of files are packed: no keys, no recorded steps, no weights. In each text ``[REDACTED]`` replaces
    the run's secret keys, values of secret variables, and values that follow words such as ``token``.

    Raises:
        RunError: `run` is not a run's folder, or `target` exists.
        OSError: `target` cannot be written.
    """
    if not (run / METADATA_FILE).exists():
        raise RunError(f"{run} is not a run folder: it has no {METADATA_FILE}")
    secrets = _secrets(run, environment)
    names = []
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RunError(f"{target} exists; choose another --output") from None
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in _contents(run):
            masked = redact(_masked_yaml(content) if name.endswith(".yaml") else content, secrets)
            entry = tarfile.TarInfo(f"{target.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mtime, entry.mode = len(masked), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(masked))
            names.append(name)
    return names


def redact(text: bytes, secrets: frozenset[bytes]) -> bytes:
    """`text` without `secrets`, without values that follow a word for a secret, and without people in URLs."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _BEARER.sub(MASK, _USER_IN_URL.sub(MASK, text))
    return _ASSIGNED.sub(_masked_assignment, text)


def _masked_assignment(found: re.Match[bytes]) -> bytes:
    before = found["open"] or found["json"] or found["line"] or found["word"]
    mark = found["mark"] or b""  # JSON needs quotes around the mask
    return found["name"] + before + mark + MASK + mark + (found["close"] or b"")


def _masked_yaml(text: bytes) -> bytes:
    """`text` without the values of keys that name a secret; unchanged if it is not YAML."""
    try:
        return rewrite_yaml(text.decode(), _masked_values).encode()
    except (UnicodeDecodeError, ConfigError):
        return text


def _masked_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: MASK.decode() if each and _KEY.search(str(key)) else _masked_values(each)
            for key, each in value.items()
        }
    return [_masked_values(each) for each in value] if isinstance(value, list) else value


def _secrets(run: Path, environment: Mapping[str, str]) -> frozenset[bytes]:
    found = {value.encode() for name, value in environment.items() if _SECRET_NAME.search(name)}
    for path in (run / "keys").glob("*"):
        if path.is_file() and path.suffix not in _PUBLIC_KEYS:
            raw = path.read_bytes().strip()
            found.add(raw)
            found.update(_secret_texts(raw))
    escaped = {json.dumps(secret.decode(errors="replace"))[1:-1].encode() for secret in found}
    return frozenset(secret for secret in found | escaped if len(secret) >= MIN_SECRET_CHARS)


def _secret_texts(raw: bytes) -> Iterator[bytes]:
    """The secret part of a key file in JSON."""
    try:
        secret = json.loads(raw)["secret"]
    except (ValueError, KeyError, TypeError):
        return
    yield str(secret).encode()


def _contents(run: Path) -> Iterator[tuple[str, bytes]]:
    yield "report.json", json.dumps(_report(run), indent=1).encode()
    for pattern in FILES:
        for path in sorted(run.glob(pattern)):
            if path.is_file():
                yield str(path.relative_to(run)), _tail(path)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_TAIL_BYTES))
        return file.read()


def _report(run: Path) -> dict[str, object]:
    """Versions, machine, faults, and the sizes of files that are not packed."""
    try:
        status = read_status(run)
        faults = [str(fault) for fault in find_faults(status, run)]
        stage = status.stage
    except RunError as error:
        faults, stage = [str(error)], "unknown"
    usage = shutil.disk_usage(run)
    return {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": run.resolve().name,
        "stage": stage,
        "faults": faults,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "disk_free_bytes": usage.free,
        "disk_bytes": usage.total,
        "packages": {each.name: each.version for each in sorted(distributions(), key=lambda each: each.name)},
        "files": {
            str(path.relative_to(run)): path.stat().st_size
            for name in LISTED
            for path in sorted((run / name).rglob("*"))
            if path.is_file()
        },
    }
