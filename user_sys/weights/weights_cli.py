"""``user-sys weights``: which versions a run keeps, and a person's order to act with one of them."""

from __future__ import annotations

import datetime
import json
import time
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hal.standing import who_orders
from user_sys.errors import RunError
from user_sys.learners import folder_of
from user_sys.weights.records import NO_VERSION, Manifest, Order, decode_record
from user_sys.weights.shelf import Shelf
from user_sys.weights.signing import LEARNER, SECRET_SUFFIX, load_signer


def list_main(args: Namespace) -> int:
    shelf = Shelf(_folder(args))
    catalogue, order = shelf.open(), _standing(shelf)
    found = [m for m, _ in catalogue.manifests.values() if m.form in catalogue.forms(m.version)]
    found.sort(key=lambda m: (m.version, m.form))
    pinned = order.version if order is not None else NO_VERSION
    if args.json:
        rows = [_row(m) for m in found]
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
        Console().print(f"version {pinned} is ordered by {order.by}: {order.reason or 'no reason given'}")
    return 0


def _row(m: Manifest) -> dict[str, object]:
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
    _require_kept(args)
    told = _give(args, args.version, f"act with version {args.version}; `user-sys weights release` ends it")
    _require_kept(args)  # a gateway at work gives versions up all the while, until it has seen the order
    Console().print(told)
    return 0


def _require_kept(args: Namespace) -> None:
    kept = Shelf(_folder(args)).open().versions()
    if args.version not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise RunError(f"version {args.version} is not kept in {args.run}; there are {there}")


def release_main(args: Namespace) -> int:
    Console().print(_give(args, NO_VERSION, "act with the newest version"))
    return 0


def _give(args: Namespace, version: int, told: str) -> str:
    """Signs the order with the learner's key, and leaves it where the gateway looks every second.

    Its serial number is greater than those of earlier runs, which robots may have obeyed. Returns what to tell.
    """
    shelf = Shelf(_folder(args))
    former = _standing(shelf)
    run = next((m.run for m, _ in shelf.open().manifests.values()), b"")
    serial = max(int(time.time()), former.serial + 1 if former is not None else 0)
    by = who_orders(args.by)
    order = Order(serial=serial, version=version, by=by, reason=args.reason, given_unix_ns=time.time_ns(), run=run)
    signer = load_signer(args.run / "keys" / f"{LEARNER}{SECRET_SUFFIX}")
    shelf.give(signer.sign(order))
    alone = not any((args.run / "weights").glob(f"{LEARNER}-*/"))
    robots = "every robot" if alone else f"every robot of {args.learner}"
    return f"{robots} is to {told}"


def _standing(shelf: Shelf) -> Order | None:
    """The newest order, or None."""
    signed = shelf.order()
    return None if signed is None else decode_record(signed.body, Order)


def _folder(args: Namespace) -> Path:
    """The shelf of the learner that is meant; a run has one for each embodiment."""
    all_of_run: Path = args.run / "weights"
    if not all_of_run.is_dir():
        raise RunError(
            f"{args.run} has no weights yet: it is no run folder on the gateway's machine, or nothing was learned"
        )
    names = [LEARNER, *sorted(folder.name for folder in all_of_run.glob(f"{LEARNER}-*/"))]
    if args.learner not in names:
        raise RunError(f"--learner {args.learner}: the learners of {args.run} are {', '.join(names)}")
    return folder_of(all_of_run, args.learner)
