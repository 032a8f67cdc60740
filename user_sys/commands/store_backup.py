"""`user-sys store backup` and `restore`: copies of a store in a folder or bucket."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from user_sys.commands.options import COUNT, PATH, json_option, store_argument
from user_sys.commands.output import EXIT_DAMAGED, print_json, print_line, progress_bar, size_text
from user_sys.errors import StoreCorrupt, StoreVersionMismatch
from user_sys.store.backup import BackupFolder, BackupReport, back_up, list_snapshots, read_snapshot, restore
from user_sys.store.maintenance import disk_bytes

url_argument = click.argument("url", metavar="URL")


@click.command()
@store_argument
@url_argument
@click.option("--keep", type=COUNT, metavar="N", help="delete all snapshots but the newest N (default: keep all)")
@json_option
def backup(path: Path, url: str, keep: int | None, as_json: bool) -> int:
    """Copy the store PATH to URL: a folder, or s3://BUCKET/PREFIX. Another process may write the store meanwhile.

    Only what URL lacks is copied. Each backup adds a snapshot. S3 takes its credentials and endpoint
    from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL or ~/.aws.
    """
    with progress_bar("backing up", disk_bytes(path), is_bytes=True) as advance:
        report = back_up(path, url, keep=keep or 0, advance=advance)
    _show(report, as_json, f"{path} is backed up")
    if report.unreadable_parts:
        print_line(
            f"{report.unreadable_parts} parts of {path} could not be read, and the backup has zeros in them: run "
            f"`user-sys store verify {path}`",
            error=True,
        )
        return EXIT_DAMAGED
    return 0


@click.command("restore")
@url_argument
@click.argument("store", type=PATH, metavar="[STORE]", required=False)
@click.option("--snapshot", default="", metavar="NAME", help="restore this one (default: the newest)")
@click.option("--list", "list_only", is_flag=True, help="only list the snapshots, oldest first")
@json_option
def restore_(url: str, store: Path | None, snapshot: str, list_only: bool, as_json: bool) -> int:
    """Write the store of a backup at URL to the new folder STORE, and verify each byte.

    Exit status 1: --list found a snapshot that cannot be restored.
    """
    if list_only:
        return _list(BackupFolder(url), as_json)
    if store is None:
        raise click.UsageError("STORE is missing: give a new folder, or --list")
    with progress_bar("restoring", None, is_bytes=True) as advance:
        report = restore(url, store, snapshot, advance=advance)
    _show(report, as_json, f"{store} is restored")
    return 0


def _show(report: BackupReport, as_json: bool, done: str) -> None:
    if as_json:
        print_json(report)
        return
    print_line(
        f"{done}: snapshot {report.snapshot}, {report.files} files, {size_text(report.size_bytes)}, "
        f"{size_text(report.copied_bytes)} of it copied in {report.seconds:.3g} s"
    )


def _list(folder: BackupFolder, as_json: bool) -> int:
    status = 0
    for name in list_snapshots(folder):
        try:
            found = read_snapshot(folder, name)
        except (StoreCorrupt, StoreVersionMismatch) as error:
            status = EXIT_DAMAGED
            print_json({"snapshot": name, "error": str(error)}) if as_json else print_line(f"{name}  unusable: {error}")
            continue
        at = datetime.fromtimestamp(found.created_unix_ns / 1e9, UTC)
        if as_json:
            print_json({"snapshot": name, "created": at.isoformat(), "size_bytes": found.size_bytes})
        else:
            print_line(f"{name}  {at:%Y-%m-%d %H:%M:%S} UTC  {size_text(found.size_bytes)}")
    return status
