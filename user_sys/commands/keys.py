"""``user-sys keys``: creates key pairs, and edits the keyring of a gateway. It imports heavy modules lazily."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from user_sys.tunnel.keys import Keyring

DEFAULT_FOLDER = Path("keys")
ROLES = ("robot", "learner", "console", "relay")
OVERLAP_S = 24 * 3600.0
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}

_EPILOG = """\
On the robot's computer:   user-sys keys new panda-0
On the gateway's computer: user-sys keys new gateway
                           user-sys keys allow panda-0 --role robot --public='KEY'
A key has characters with a meaning in a shell: put it in single quotes, or copy FOLDER/panda-0.pub and omit --public.
Never copy FOLDER/NAME.key to another computer. A running gateway applies every change at once.

To replace a key without an outage, run `keys rotate panda-0` on the robot's computer, then the printed command on the
gateway's, then `keys rotate panda-0 --finish` on the robot's.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the verb ``keys`` to a program's subparsers; `run` executes it."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "keys",
        help="create keys, and edit the keys that a gateway allows",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="keys_verb", metavar="COMMAND", required=True)
    _add_named(verbs, "new", "create a key pair: FOLDER/NAME.key and FOLDER/NAME.pub")
    allow = _add_named(verbs, "allow", "allow a public key for a name and a role")
    allow.add_argument("--role", required=True, choices=ROLES)
    allow.add_argument("--public", metavar="KEY", help="the public key; by default the one in FOLDER/NAME.pub")
    allow.add_argument("--robots", nargs="+", default=[], metavar="ROBOT", help="the robots of a relay")
    _add_named(verbs, "revoke", "revoke the key of a name at once")
    rotate = _add_named(verbs, "rotate", "replace the key of a name; the old one stays allowed for an overlap")
    rotate.add_argument("--public", metavar="KEY", help="the new public key, if the private one is on another computer")
    rotate.add_argument("--finish", action="store_true", help="switch to the new key, on the computer that has it")
    rotate.add_argument(
        "--overlap", type=_duration_s, default=OVERLAP_S, metavar="TIME", help="e.g. 30min, 24h, 7d (default: 24h)"
    )
    listing = verbs.add_parser("list", help="list the allowed keys")
    listing.add_argument("--json", action="store_true", help="print JSON")
    _add_folder(listing)
    return parser


def _add_named(verbs: Any, verb: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(verb, help=text)
    parser.add_argument("name", metavar="NAME", help="e.g. panda-0")
    _add_folder(parser)
    return parser


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="folder of the keys (default: keys)")


def run(args: argparse.Namespace) -> int:
    """Executes the command in `args`. Raises ConfigError or RunError."""
    from user_sys.tunnel.keys import Keyring

    ring = Keyring(args.folder)
    if args.keys_verb == "new":
        return _new(args.folder, args.name)
    if args.keys_verb == "allow":
        return _allow(ring, args)
    if args.keys_verb == "revoke":
        ring.revoke(args.name)
        return _print_line(f"{args.name} is revoked")
    if args.keys_verb == "rotate":
        return _rotate(ring, args)
    return _list(ring, args.json)


def _print_line(text: str) -> int:
    sys.stdout.write(text + "\n")
    return 0


def _new(folder: Path, name: str) -> int:
    from user_sys.errors import RunError
    from user_sys.tunnel.keys import fingerprint, new_keypair, save_keypair, validate_name

    private = folder / f"{validate_name(name)}.key"
    if private.exists():
        raise RunError(f"{private} exists; `user-sys keys rotate {name} --folder {folder}` replaces it")
    keys = new_keypair()
    save_keypair(keys, folder, name)
    return _print_line(f"{private}\npublic key: '{keys.public}'\nfingerprint: {fingerprint(keys.public)}")


def _allow(ring: Keyring, args: argparse.Namespace) -> int:
    from user_sys.tunnel.keys import load_public_key, validate_name

    public = args.public or load_public_key(args.folder / f"{validate_name(args.name)}.pub")
    entry = ring.allow(public, args.name, args.role, robots=args.robots)
    robots = f" for {', '.join(entry.robots)}" if entry.robots else ""
    return _print_line(f"{entry.name} is allowed as {entry.role}{robots}: {entry.public}")


def _rotate(ring: Keyring, args: argparse.Namespace) -> int:
    """Rotates a key in a folder with the key and the keyring, with the private key only, or with the keyring only."""
    from user_sys.errors import ConfigError
    from user_sys.tunnel.keys import fingerprint, promote_keypair, stage_keypair

    folder, name = args.folder, args.name
    if args.finish:
        keys = promote_keypair(folder, name)
        return _print_line(f"{name} now uses the key {fingerprint(keys.public)}")
    has_key = (folder / f"{name}.key").exists()
    former = next((entry for entry in ring.list() if entry.name == name), None)
    if former is None and args.public:
        raise ConfigError(f"{name!r} is not in the keyring of {folder}; add it with `user-sys keys allow`")
    if former is None and not has_key:
        raise ConfigError(f"{folder} has neither a key nor a keyring entry of {name!r} to rotate")
    if former is None:
        keys = stage_keypair(folder, name)
        return _print_line(
            f"{folder} has a new key of {name}, not in use yet. Run on the gateway's computer:\n"
            f"  user-sys keys rotate {name} --public='{keys.public}'\n"
            f"and then on this computer:\n  user-sys keys rotate {name} --finish --folder {folder}"
        )
    if not has_key and not args.public:
        raise ConfigError(
            f"{folder} lacks the private key of {name}: rotate it on its computer, and pass the new key with --public"
        )
    public = args.public or stage_keypair(folder, name).public
    ring.allow(public, name, former.role, robots=former.robots, overlap_s=args.overlap)
    if not args.public:
        promote_keypair(folder, name)
    return _print_line(
        f"{name} is allowed by its new key {fingerprint(public)}, and by the old one for {args.overlap:g} s"
    )


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"(\d+)(s|min|h|d)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30min, 24h or 7d, got {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def _list(ring: Keyring, as_json: bool) -> int:
    entries = ring.list()
    for name in ring.unreadable:
        sys.stderr.write(
            f"{ring.folder / name} is damaged, so its peer is not allowed: allow it again, or delete the file\n"
        )
    if as_json:
        import msgspec

        return _print_line(msgspec.json.encode(entries).decode())
    if not entries:
        return _print_line(f"{ring.folder} has no keys")
    from rich.console import Console
    from rich.table import Table

    from user_sys.tunnel.keys import fingerprint

    table = Table("name", "role", "fingerprint", box=None)
    notes = []
    for entry in entries:
        table.add_row(entry.name, entry.role, fingerprint(entry.public))
        if entry.robots:
            notes.append(f"{entry.name} is a relay for {', '.join(entry.robots)}")
        if ring.find(entry.former):
            until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.former_until_unix_s))
            notes.append(f"{entry.name}: the previous key {fingerprint(entry.former)} is allowed until {until}")
    Console().print(table)
    return _print_line("\n".join(notes)) if notes else 0
