"""``user-sys keys``: makes key pairs, and says which are let in. Imports nothing heavy until a command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from user_sys.tunnel.keys import Keyring

DEFAULT_FOLDER = Path("keys")
ROLES = ("robot", "learner", "console")

_EPILOG = """\
On the robot's computer:   user-sys keys new panda-0
On the gateway's computer: user-sys keys new gateway
                           user-sys keys allow panda-0 --role robot --public='KEY'
A key holds characters that mean something to a shell: keep it in single quotes, or copy FOLDER/panda-0.pub and leave
--public away. FOLDER/NAME.key stays where it was made. A running gateway sees every change at once.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the verb ``keys`` to a program's subparsers; ``run`` carries it out."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "keys",
        help="make keys, and say which a gateway lets in",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="keys_verb", metavar="COMMAND", required=True)
    _add_named(verbs, "new", "make a key pair: FOLDER/NAME.key and FOLDER/NAME.pub")
    allow = _add_named(verbs, "allow", "let a public key in under a name and a role")
    allow.add_argument("--role", required=True, choices=ROLES)
    allow.add_argument("--public", metavar="KEY", help="the public key; by default the one in FOLDER/NAME.pub")
    _add_named(verbs, "revoke", "shut a name out, at once")
    _add_named(verbs, "rotate", "make a new key pair for a name and let it in instead of the old one")
    listing = verbs.add_parser("list", help="show who is let in")
    listing.add_argument("--json", action="store_true", help="print JSON")
    _add_folder(listing)
    return parser


def _add_named(verbs: Any, verb: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(verb, help=text)
    parser.add_argument("name", metavar="NAME", help="e.g. panda-0")
    _add_folder(parser)
    return parser


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where keys are kept (default: keys)")


def run(args: argparse.Namespace) -> int:
    """Carries out the command in `args`. Raises ConfigError or RunError, which tell what to mend."""
    from user_sys.tunnel.keys import Keyring

    ring = Keyring(args.folder)
    if args.keys_verb == "new":
        return _new(args.folder, args.name)
    if args.keys_verb == "allow":
        return _allow(ring, args.folder, args.name, args.role, args.public)
    if args.keys_verb == "revoke":
        ring.revoke(args.name)
        return _say(f"{args.name} is shut out")
    if args.keys_verb == "rotate":
        return _rotate(ring, args.folder, args.name)
    return _list(ring, args.json)


def _say(text: str) -> int:
    sys.stdout.write(text + "\n")
    return 0


def _new(folder: Path, name: str) -> int:
    from user_sys.errors import RunError
    from user_sys.tunnel.keys import checked_name, new_keypair, save_keypair

    private = folder / f"{checked_name(name)}.key"
    if private.exists():
        raise RunError(f"{private} exists; `user-sys keys rotate {name} --folder {folder}` replaces it")
    keys = new_keypair()
    save_keypair(keys, folder, name)
    return _say(f"{private}\npublic key: '{keys.public}'")


def _allow(ring: Keyring, folder: Path, name: str, role: Any, public: str | None) -> int:
    from user_sys.tunnel.keys import checked_name, load_public_key

    entry = ring.allow(public or load_public_key(folder / f"{checked_name(name)}.pub"), name, role)
    return _say(f"{entry.name} is let in as {entry.role}: {entry.public}")


def _rotate(ring: Keyring, folder: Path, name: str) -> int:
    from user_sys.errors import ConfigError
    from user_sys.tunnel.keys import new_keypair, save_keypair

    former = next((entry for entry in ring.list() if entry.name == name), None)
    if former is None:
        raise ConfigError(f"{name!r} is not allowed, so there is nothing to rotate; see `user-sys keys list`")
    keys = new_keypair()
    save_keypair(keys, folder, name)
    ring.allow(keys.public, name, former.role)
    return _say(f"{name} has a new key; the old one is shut out\npublic key: '{keys.public}'")


def _list(ring: Keyring, as_json: bool) -> int:
    entries = ring.list()
    if as_json:
        import msgspec

        return _say(msgspec.json.encode(entries).decode())
    if not entries:
        return _say(f"nobody is let in by {ring.folder}")
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "role", "public key")
    for entry in entries:
        table.add_row(entry.name, entry.role, entry.public)
    Console().print(table)
    return 0
