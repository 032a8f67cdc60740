"""``user-sys weights``: lists the stored versions of a run and pins one of them; ``policy export``."""

from __future__ import annotations

import datetime
from pathlib import Path

import click
from rich.table import Table

from hal.placement import format_list
from hal.registry import operator_name
from user_sys.commands.options import PATH, by_option, combined, json_option, reason_option
from user_sys.commands.output import print_json, print_line, print_table
from user_sys.compose import make_policy
from user_sys.errors import RunError
from user_sys.messages import NO_VERSION, WeightsManifest
from user_sys.policies.policy import ExportablePolicy
from user_sys.robot_records import LEARNER, assign_learners, learner_folder, read_robot_records
from user_sys.run.config import RunFolder, open_run_folder, read_run_metadata
from user_sys.run.evaluate import load_acting_weights
from user_sys.run.pins import current_pin, published_learners, set_pin
from user_sys.store.record_format import is_locked
from user_sys.weights.version_store import VersionStore

_learner_options = combined(
    click.argument("run", type=PATH, metavar="RUN"),
    click.option("--learner", default=LEARNER, metavar="NAME", help="of the run (default: the first)"),
)


@click.command()
@_learner_options
@json_option
def list_(run: Path, learner: str, as_json: bool) -> None:
    """List the versions that the run in the folder RUN keeps, and the pinned one."""
    store = _open_store(run, learner)
    pin, found = current_pin(store), [version.manifest for version in store.load().versions.values()]
    if not found:
        raise RunError(
            f"{_run_label(run, learner)} has no weights yet: the gateway has stored no version of its learner"
        )
    found.sort(key=lambda m: (m.version, m.precision))
    if as_json:
        rows = [_version_row(m) for m in found]
        print_json({"versions": rows, "pinned": None if pin is None else pin.version})
        return
    table = Table("version", "precision", "updates", "bytes", "published", "digest")
    for m in found:
        published = datetime.datetime.fromtimestamp(m.published_unix_ns / 1e9).isoformat(" ", "seconds")
        mark = "  pinned" if pin is not None and m.version == pin.version else ""
        row = (f"{m.version}{mark}", m.precision, str(m.updates), f"{m.size_bytes:,}", published, m.digest.hex()[:12])
        table.add_row(*row)
    print_table(table)
    if pin is not None:
        print_line(f"version {pin.version} is pinned by {pin.by}: {pin.reason or 'no reason given'}")
    if others := [name for name in published_learners(run) if name != learner]:
        print_line(f"these are of {learner}; --learner NAME shows those of {format_list(others, 'or')}")


def _version_row(m: WeightsManifest) -> dict[str, object]:
    return {
        "version": m.version,
        "precision": m.precision,
        "updates": m.updates,
        "size_bytes": m.size_bytes,
        "published_unix_s": m.published_unix_ns / 1e9,
        "digest": m.digest.hex(),
    }


@click.command()
@click.argument("version", type=int, metavar="VERSION")
@_learner_options
@by_option
@reason_option
def rollback(version: int, run: Path, learner: str, by: str | None, reason: str) -> None:
    """Pin a VERSION that `list` shows: every robot acts with it until `release`.

    RUN is a run folder on the gateway's machine, such as runs/latest.
    """
    _require_stored(run, learner, version)
    before = current_pin(_open_store(run, learner))
    target = f"version {version}; `user-sys weights release` ends this"
    message = _pin(run, learner, version, target, by, reason)
    try:
        _require_stored(run, learner, version)  # a running gateway removes versions until it has read the pin
    except RunError:
        if before is None:
            set_pin(run, learner, NO_VERSION, operator_name(by), f"version {version} is not stored")
        else:
            set_pin(run, learner, before.version, before.by, before.reason)
        raise
    print_line(message)


def _require_stored(run: Path, learner: str, version: int) -> None:
    stored = _open_store(run, learner).load().numbers()
    if version not in stored:
        available = ", ".join(map(str, stored)) or "none"
        raise RunError(f"version {version} is not stored in {_run_label(run, learner)}; available: {available}")


@click.command()
@_learner_options
@by_option
@reason_option
def release(run: Path, learner: str, by: str | None, reason: str) -> None:
    """Unpin: every robot of the run in the folder RUN acts with the newest version again."""
    if current_pin(_open_store(run, learner)) is None:
        raise RunError(f"no version is pinned in {_run_label(run, learner)}: its robots use the newest version already")
    print_line(_pin(run, learner, NO_VERSION, "the newest version", by, reason))


def _pin(run: Path, learner: str, version: int, target: str, by: str | None, reason: str) -> str:
    """Pins a version, and returns a message."""
    set_pin(run, learner, version, operator_name(by), reason)
    robots = "every robot" if len(published_learners(run)) == 1 else f"every robot of {learner}"
    note = "" if is_locked(RunFolder(run).store) else ". The gateway is not running; it applies this at its start"
    return f"{robots} will use {target}{note}"


def _open_store(run: Path, learner: str) -> VersionStore:
    """Returns the version store of a learner; a run has one per embodiment."""
    weights = run / "weights"
    if not weights.is_dir():
        read_run_metadata(run)
        raise RunError(f"{run} has no weights yet: its learner has published no version")
    if learner not in published_learners(run):
        raise RunError(f"--learner {learner}: the learners of {run} are {', '.join(published_learners(run))}")
    return VersionStore(learner_folder(weights, learner))


def _run_label(run: Path, learner: str) -> str:
    return str(run) if len(published_learners(run)) == 1 else f"{learner} of {run}"


@click.command()
@click.argument("run", type=PATH, metavar="RUN")
@click.argument("output", type=PATH, metavar="FOLDER")
@click.option("--learner", default=LEARNER, metavar="NAME", help="of the run (default: the first)")
def export(run: Path, output: Path, learner: str) -> None:
    """Write the policy that RUN acts with into a new FOLDER, as LeRobot's tools load it.

    The run's policy is of the kind lerobot. FOLDER is also a checkpoint for policy.options.path of another run.
    """
    folder, config, _ = open_run_folder(run)
    if output.exists():
        raise RunError(f"{output} exists; give a new folder")
    specs = assign_learners(read_robot_records(folder.robots))
    if learner not in specs:
        raise RunError(f"{run} has no learner {learner!r}; it has {', '.join(sorted(specs)) or 'none'}")
    manifest, weights = load_acting_weights(folder, learner)
    policy = make_policy(config.policy, specs[learner], config.seed)
    if not isinstance(policy, ExportablePolicy):
        raise RunError(
            f"{run} has the policy {config.policy.kind}, which no other library loads; lerobot can be exported"
        )
    policy.load(weights)
    partial = output.with_name(f".{output.name}.partial")
    policy.export(partial)
    partial.rename(output)
    print_line(
        f"{output}: version {manifest.version} after {manifest.updates} updates; next: lerobot-eval or policy.path"
    )
