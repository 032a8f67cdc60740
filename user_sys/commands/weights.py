"""The commands ``user-sys weights list | rollback | release``: list the stored versions and pin one of them."""

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
from user_sys.robot_records import LEARNER, learner_folder
from user_sys.run.config import RunFolder, read_run_metadata
from user_sys.store.record_format import is_locked
from user_sys.weights.signing import SECRET_SUFFIX, SIGNING_KEY_NAME, load_signer
from user_sys.weights.version_store import VersionStore


def list_main(args: Namespace) -> int:
    store = VersionStore(_store_folder(args))
    index, pin = store.load(), _current_pin(store)
    found = [m for m, _ in index.manifests.values() if m.form in index.complete_precisions(m.version)]
    if not found:
        raise RunError(f"{_run_label(args)} has no weights yet: the gateway has stored no version of its learner")
    found.sort(key=lambda m: (m.version, m.form))
    pinned = pin.version if pin is not None else NO_VERSION
    if args.json:
        rows = [_version_row(m) for m in found]
        Console().print_json(json.dumps({"versions": rows, "pinned": None if pinned == NO_VERSION else pinned}))
        return 0
    table = Table("version", "precision", "updates", "bytes", "published", "digest")
    for m in found:
        published = datetime.datetime.fromtimestamp(m.published_unix_ns / 1e9).isoformat(" ", "seconds")
        mark = "  pinned" if m.version == pinned else ""
        row = (f"{m.version}{mark}", m.form, str(m.updates), f"{m.size_bytes:,}", published, m.digest.hex()[:12])
        table.add_row(*row)
    Console().print(table)
    if pin is not None and pinned != NO_VERSION:
        _print_line(f"version {pinned} is pinned by {pin.by}: {pin.reason or 'no reason given'}")
    if others := [name for name in _learners(args) if name != args.learner]:
        _print_line(f"these are of {args.learner}; --learner NAME shows those of {format_list(others, 'or')}")
    return 0


def _version_row(m: WeightsManifest) -> dict[str, object]:
    return {
        "version": m.version,
        "precision": m.form,
        "updates": m.updates,
        "size_bytes": m.size_bytes,
        "max_error": m.max_error,
        "rms_error": m.rms_error,
        "published_unix_s": m.published_unix_ns / 1e9,
        "digest": m.digest.hex(),
    }


def rollback_main(args: Namespace) -> int:
    _require_stored(args)
    message = _sign_pin(args, args.version, f"version {args.version}; `user-sys weights release` ends this")
    _require_stored(args)  # a running gateway removes versions until it has read the pin
    _print_line(message)
    return 0


def _require_stored(args: Namespace) -> None:
    stored = VersionStore(_store_folder(args)).load().complete_versions()
    if args.version not in stored:
        available = ", ".join(map(str, stored)) or "none"
        raise RunError(f"version {args.version} is not stored in {_run_label(args)}; available: {available}")


def release_main(args: Namespace) -> int:
    pin = _current_pin(VersionStore(_store_folder(args)))
    if pin is None or pin.version == NO_VERSION:
        raise RunError(f"no version is pinned in {_run_label(args)}: its robots use the newest version already")
    _print_line(_sign_pin(args, NO_VERSION, "the newest version"))
    return 0


def _sign_pin(args: Namespace, version: int, target: str) -> str:
    """Signs a pin with the learner's key and stores it for the gateway, which looks every second.

    The serial number is greater than those of earlier runs, which robots may have accepted. Returns a message.
    """
    key = args.run / "keys" / f"{SIGNING_KEY_NAME}{SECRET_SUFFIX}"
    if not key.exists():
        raise RunError(f"{args.run} has no {key.name}: run this command in the run's folder on the gateway's machine")
    store = VersionStore(_store_folder(args))
    previous = _current_pin(store)
    run = next((m.run for m, _ in store.load().manifests.values()), b"")
    serial = max(int(time.time()), previous.serial + 1 if previous is not None else 0)
    by, reason = (shorten(text, MAX_TEXT_CHARS) for text in (operator_name(args.by), args.reason))
    pin = PinnedVersion(serial=serial, version=version, by=by, reason=reason, given_unix_ns=time.time_ns(), run=run)
    store.set_pin(load_signer(key).sign(pin))
    audit_operator_action(by, f"weights of {args.learner}: use {target}", run=args.run, reason=reason)
    robots = "every robot" if len(_learners(args)) == 1 else f"every robot of {args.learner}"
    note = "" if is_locked(RunFolder(args.run).store) else ". The gateway is not running; it applies this at its start"
    return f"{robots} will use {target}{note}"


def _current_pin(store: VersionStore) -> PinnedVersion | None:
    """Returns the newest pin, or None."""
    signed = store.read_pin()
    return None if signed is None else decode_record(signed.body, PinnedVersion)


def _store_folder(args: Namespace) -> Path:
    """Returns the version store of the selected learner; a run has one per embodiment."""
    weights: Path = args.run / "weights"
    if not weights.is_dir():
        read_run_metadata(args.run)
        raise RunError(f"{args.run} has no weights yet: its learner has published no version")
    if args.learner not in _learners(args):
        raise RunError(f"--learner {args.learner}: the learners of {args.run} are {', '.join(_learners(args))}")
    return learner_folder(weights, args.learner)


def _learners(args: Namespace) -> list[str]:
    return [LEARNER, *sorted(folder.name for folder in (args.run / "weights").glob(f"{LEARNER}-*/"))]


def _run_label(args: Namespace) -> str:
    return str(args.run) if len(_learners(args)) == 1 else f"{args.learner} of {args.run}"


def _print_line(text: str) -> None:
    Console().print(Text(text), soft_wrap=True)
