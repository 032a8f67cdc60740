"""``user-sys weights``: which versions a run keeps, and a person's order to act with one of them."""

from __future__ import annotations

import datetime
import json
import time
from argparse import Namespace
from pathlib import Path
from textwrap import shorten

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.audit import audit_operator_action
from hal.placement import format_list
from hal.registry import MAX_TEXT_CHARS, operator_name
from user_sys.errors import RunError
from user_sys.messages import NO_VERSION, PinnedVersion, WeightsManifest, decode_record
from user_sys.robot_records import learner_folder
from user_sys.run.config import RunFolder, read_run_metadata
from user_sys.store.record_format import is_locked
from user_sys.weights.signing import SECRET_SUFFIX, SIGNING_KEY_NAME, load_signer
from user_sys.weights.version_store import VersionStore


def list_main(args: Namespace) -> int:
    shelf = VersionStore(_store_folder(args))
    catalogue, order = shelf.load(), _current_pin(shelf)
    found = [m for m, _ in catalogue.manifests.values() if m.form in catalogue.complete_precisions(m.version)]
    if not found:
        raise RunError(f"{_run_label(args)} has no weights yet: no version that its learner has published is kept here")
    found.sort(key=lambda m: (m.version, m.form))
    pinned = order.version if order is not None else NO_VERSION
    if args.json:
        rows = [_version_row(m) for m in found]
        Console().print_json(json.dumps({"versions": rows, "ordered": None if pinned == NO_VERSION else pinned}))
        return 0
    table = Table("version", "form", "updates", "bytes", "published", "digest")
    for m in found:
        published = datetime.datetime.fromtimestamp(m.published_unix_ns / 1e9).isoformat(" ", "seconds")
        mark = "  ordered" if m.version == pinned else ""
        row = (f"{m.version}{mark}", m.form, str(m.updates), f"{m.size_bytes:,}", published, m.digest.hex()[:12])
        table.add_row(*row)
    Console().print(table)
    if order is not None and pinned != NO_VERSION:
        _print_line(f"version {pinned} is ordered by {order.by}: {order.reason or 'no reason given'}")
    if others := [name for name in _learners(args) if name != args.learner]:
        _print_line(f"these are of {args.learner}; --learner NAME shows those of {format_list(others, 'or')}")
    return 0


def _version_row(m: WeightsManifest) -> dict[str, object]:
    return {
        "version": m.version,
        "form": m.form,
        "updates": m.updates,
        "size_bytes": m.size_bytes,
        "max_error": m.max_error,
        "rms_error": m.rms_error,
        "published_unix_s": m.published_unix_ns / 1e9,
        "digest": m.digest.hex(),
    }


def rollback_main(args: Namespace) -> int:
    _require_stored(args)
    told = _sign_pin(args, args.version, f"act with version {args.version}; `user-sys weights release` ends it")
    _require_stored(args)  # a gateway at work gives versions up all the while, until it has seen the order
    _print_line(told)
    return 0


def _require_stored(args: Namespace) -> None:
    kept = VersionStore(_store_folder(args)).load().complete_versions()
    if args.version not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise RunError(f"version {args.version} is not kept in {_run_label(args)}; there are {there}")


def release_main(args: Namespace) -> int:
    standing = _current_pin(VersionStore(_store_folder(args)))
    if standing is None or standing.version == NO_VERSION:
        raise RunError(f"no version is ordered in {_run_label(args)}: its robots act with the newest already")
    _print_line(_sign_pin(args, NO_VERSION, "act with the newest version"))
    return 0


def _sign_pin(args: Namespace, version: int, told: str) -> str:
    """Signs the order with the learner's key, and leaves it where the gateway looks every second.

    Its serial number is greater than those of earlier runs, which robots may have obeyed. Returns what to tell.
    """
    key = args.run / "keys" / f"{SIGNING_KEY_NAME}{SECRET_SUFFIX}"
    if not key.exists():
        raise RunError(f"{args.run} has no {key.name}: give the order in the run's folder on the gateway's machine")
    shelf = VersionStore(_store_folder(args))
    former = _current_pin(shelf)
    run = next((m.run for m, _ in shelf.load().manifests.values()), b"")
    serial = max(int(time.time()), former.serial + 1 if former is not None else 0)
    by, reason = (shorten(words, MAX_TEXT_CHARS) for words in (operator_name(args.by), args.reason))
    order = PinnedVersion(serial=serial, version=version, by=by, reason=reason, given_unix_ns=time.time_ns(), run=run)
    shelf.set_pin(load_signer(key).sign(order))
    audit_operator_action(by, f"weights of {args.learner}: {told}", run=args.run, reason=reason)
    robots = "every robot" if len(_learners(args)) == 1 else f"every robot of {args.learner}"
    later = "" if is_locked(RunFolder(args.run).store) else ". The run's gateway does not run: the next one obeys"
    return f"{robots} is to {told}{later}"


def _current_pin(shelf: VersionStore) -> PinnedVersion | None:
    """The newest order, or None."""
    signed = shelf.read_pin()
    return None if signed is None else decode_record(signed.body, PinnedVersion)


def _store_folder(args: Namespace) -> Path:
    """The shelf of the learner that is meant; a run has one for each embodiment."""
    all_of_run: Path = args.run / "weights"
    if not all_of_run.is_dir():
        read_run_metadata(args.run)
        raise RunError(f"{args.run} has no weights yet: its learner has published no version")
    if args.learner not in _learners(args):
        raise RunError(f"--learner {args.learner}: the learners of {args.run} are {', '.join(_learners(args))}")
    return learner_folder(all_of_run, args.learner)


def _learners(args: Namespace) -> list[str]:
    return [SIGNING_KEY_NAME, *sorted(folder.name for folder in (args.run / "weights").glob(f"{SIGNING_KEY_NAME}-*/"))]


def _run_label(args: Namespace) -> str:
    return str(args.run) if len(_learners(args)) == 1 else f"{args.learner} of {args.run}"


def _print_line(text: str) -> None:
    Console().print(Text(text), soft_wrap=True)
