"""``user-sys keys``: creates key pairs, and edits the keyring of a gateway."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
from rich.table import Table

from user_sys.commands.options import PATH, json_option, parse_duration_s
from user_sys.commands.output import print_json, print_line, print_table
from user_sys.errors import ConfigError, RunError
from user_sys.tunnel.keys import (
    GATEWAY_NAME,
    Keyring,
    Role,
    fingerprint,
    load_public_key,
    new_keypair,
    promote_keypair,
    save_keypair,
    stage_keypair,
    validate_name,
)

_name = click.argument("name", metavar="NAME")
_folder = click.option("--folder", type=PATH, default="keys", metavar="FOLDER", help="of the keys (default: keys)")


@click.command()
@_name
@_folder
def new(name: str, folder: Path) -> None:
    """Create the key pair FOLDER/NAME.key and FOLDER/NAME.pub."""
    private = folder / f"{validate_name(name)}.key"
    if private.exists():
        raise RunError(f"{private} exists; {_way_to_replace(name, folder)}")
    keys = new_keypair()
    save_keypair(keys, folder, name)
    print_line(f"{private}\npublic key: '{keys.public}'\nfingerprint: {fingerprint(keys.public)}")


@click.command()
@_name
@click.option("--role", required=True, type=click.Choice(get_args(Role)), help="what the peer may do")
@click.option("--public", metavar="KEY", help="the public key; by default the one in FOLDER/NAME.pub")
@click.option("--robots", multiple=True, metavar="ROBOT", help="a robot of a relay; repeatable")
@_folder
def allow(name: str, role: Role, public: str | None, robots: Sequence[str], folder: Path) -> None:
    """Allow a public key for a name and a role."""
    key = public or load_public_key(folder / f"{validate_name(name)}.pub")
    entry = Keyring(folder).allow(key, name, role, robots=robots)
    of = f" for {', '.join(entry.robots)}" if entry.robots else ""
    print_line(f"{entry.name} is allowed as {entry.role}{of}: {entry.public}")


@click.command()
@_name
@_folder
def revoke(name: str, folder: Path) -> None:
    """Revoke the key of a name at once."""
    Keyring(folder).revoke(name)
    print_line(f"{name} is revoked")


@click.command()
@_name
@click.option("--public", metavar="KEY", help="the new public key, if the private one is on another computer")
@click.option("--finish", is_flag=True, help="switch to the new key, on the computer that has it")
@click.option("--overlap", type=parse_duration_s, default="24h", metavar="TIME", help="30min, 24h, 7d (default: 24h)")
@_folder
def rotate(name: str, public: str | None, finish: bool, overlap: float, folder: Path) -> None:
    """Replace the key of a name; the old one stays allowed for an overlap.

    FOLDER has the key and the keyring, only the private key, or only the keyring.
    """
    if name == GATEWAY_NAME:
        raise ConfigError(f"peers accept one key of the gateway only; {_way_to_replace(name, folder)}")
    ring, has_key = Keyring(folder), (folder / f"{name}.key").exists()
    robots_need = f"\nRobots that connect to {name} need its new {name}.pub when it starts again"
    if finish:
        is_server = bool(ring.list())
        public = promote_keypair(folder, name).public
        print_line(f"{name} now uses the key {fingerprint(public)}{robots_need if is_server else ''}")
        return
    former = next((entry for entry in ring.list() if entry.name == name), None)
    if former is None and public:
        raise ConfigError(
            f"{name!r} is not in the keyring of {folder}: if it connects through a relay, rotate its key there; to "
            "allow a new peer, use `user-sys keys allow`"
        )
    if former is None and not has_key:
        raise ConfigError(f"{folder} has neither a key nor a keyring entry of {name!r} to rotate")
    if former is None:
        print_line(
            f"{folder} has a new key of {name}, not in use yet. Run on each computer that allows the old one (its "
            "gateway or relay, and a robot's policy server):\n"
            f"  user-sys keys rotate {name} --public='{stage_keypair(folder, name).public}'\n"
            f"and then on this computer:\n  user-sys keys rotate {name} --finish --folder {folder}"
        )
        return
    if not has_key and not public:
        raise ConfigError(
            f"{folder} lacks the private key of {name}: rotate it on its computer, and pass the new key with --public"
        )
    key = public or stage_keypair(folder, name).public
    entry = ring.allow(key, name, former.role, robots=former.robots, overlap_s=overlap)
    if not public:
        promote_keypair(folder, name)
    for_robots = robots_need if former.role in ("relay", "policy") else ""
    for_old = f", and by the old one for {overlap:g} s" if entry.former else ""
    print_line(f"{name} is allowed by its new key {fingerprint(key)}{for_old}{for_robots}")


def _way_to_replace(name: str, folder: Path) -> str:
    if name != GATEWAY_NAME:
        return f"`user-sys keys rotate {name} --folder {folder}` replaces it"
    return (
        f"to replace it, stop the run, move {folder / name}.key away, run "
        f"`user-sys keys new {name} --folder {folder}`, and copy {name}.pub to all robots and relays"
    )


@click.command()
@json_option
@_folder
def list_(as_json: bool, folder: Path) -> None:
    """List the allowed keys."""
    ring = Keyring(folder)
    entries = ring.list()
    for name in ring.unreadable:
        text = f"{folder / name} is damaged, so its peer is not allowed: allow it again, or delete the file"
        print_line(text, error=True)
    if as_json:
        print_json(entries)
    elif not entries:
        print_line(f"{folder} has no keys")
    else:
        table = Table("name", "role", "fingerprint", box=None)
        for entry in entries:
            table.add_row(entry.name, entry.role, fingerprint(entry.public))
        print_table(table)
        for entry in entries:
            if entry.robots:
                print_line(f"{entry.name} is a relay for {', '.join(entry.robots)}")
            if ring.find(entry.former):
                until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.former_until_unix_s))
                print_line(f"{entry.name}: the previous key {fingerprint(entry.former)} is allowed until {until}")
