"""``user-sys weights``: which versions a run keeps, and a person's order to act with one of them."""

from __future__ import annotations

import datetime
import getpass
import json
import time
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from user_sys.errors import RunError
from user_sys.weights.records import NO_VERSION, Manifest, Order, decode_record
from user_sys.weights.shelf import Shelf
from user_sys.weights.signing import LEARNER, SECRET_SUFFIX, load_signer


def list_main(args: Namespace) -> int:
    catalogue, order = Shelf(_folder(args.run)).open(), _standing(args.run)
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
    kept = Shelf(_folder(args.run)).open().versions()
    if args.version not in kept:
        raise RunError(f"version {args.version} is not kept in {args.run}; there are {', '.join(map(str, kept))}")
    _give(args, args.version, f"every robot is to act with version {args.version}; `user-sys weights release` ends it")
    return 0


def release_main(args: Namespace) -> int:
    _give(args, NO_VERSION, "every robot is to act with the newest version")
    return 0


def _give(args: Namespace, version: int, told: str) -> None:
    """Signs the order with the learner's key, and leaves it where the gateway looks every second."""

    former = _standing(args.run)
    serial = former.serial + 1 if former is not None else 0
    by = args.by or getpass.getuser()
    order = Order(serial=serial, version=version, by=by, reason=args.reason, given_unix_ns=time.time_ns())
    signer = load_signer(args.run / "keys" / f"{LEARNER}{SECRET_SUFFIX}")
    Shelf(_folder(args.run)).give(signer.sign(order))
    Console().print(told)


def _standing(run: Path) -> Order | None:
    """The newest order, or None."""
    signed = Shelf(_folder(run)).order()
    return None if signed is None else decode_record(signed.body, Order)


def _folder(run: Path) -> Path:
    folder = run / "weights"
    if not folder.is_dir():
        raise RunError(
            f"{run} has no weights yet: it is no run folder on the gateway's machine, or nothing was learned"
        )
    return folder
