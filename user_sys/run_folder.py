"""A run's folder: made once, opened again to resume or to evaluate, refused when another version wrote it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from hal.durable import replace_durably, sync_folder
from hal.undecodable import UNDECODABLE
from user_sys.config import load, save
from user_sys.errors import RunError
from user_sys.topology import RunConfig, RunFolder

FORMAT = 1
CARD = "run.json"


class RunCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder says of itself. `endpoint` is the gateway's address, fixed for the life of the run."""

    format: int
    name: str
    started_unix_s: float
    endpoint: str


def create(config: RunConfig, name: str, endpoint: str) -> tuple[RunFolder, RunCard]:
    """A new run folder with the resolved configuration.

    Raises:
        RunError: a run of that name exists, or the folder cannot be written.
    """
    folder = RunFolder(config.runs / name)
    card = RunCard(format=FORMAT, name=name, started_unix_s=time.time(), endpoint=endpoint)
    try:
        folder.path.mkdir(parents=True)
    except FileExistsError:
        raise _exists(folder.path) from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        (folder.path / "logs").mkdir()
        gateway = replace(config.gateway, endpoint=endpoint)
        save(replace(config, name=name, gateway=gateway), folder.config)
        replace_durably(folder.path / CARD, msgspec.json.encode(card))
        for above in (folder.path.parent, folder.path.parent.parent):
            sync_folder(above)
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)  # half a run folder could be neither resumed nor made anew
        raise _unwritable(folder, error) from None
    return folder, card


def require_new(path: Path) -> None:
    """Raises RunError where there is a run folder at `path` already."""
    if path.exists():
        raise _exists(path)


def _exists(path: Path) -> RunError:
    name, runs = path.name, path.parent
    return RunError(f"there is a run {name!r} in {runs} already; go on with `--resume {path}` or choose a --name")


def _unwritable(folder: RunFolder, error: OSError) -> RunError:
    return RunError(f"cannot make the run folder {folder.path}: {os.strerror(error.errno or 0)}")


def read_card(path: Path) -> RunCard:
    """What the run folder at `path` says of itself. Raises RunError: it is none, or its card is damaged."""
    try:
        return msgspec.json.decode((path / CARD).read_bytes(), type=RunCard)
    except OSError:
        raise RunError(f"{path} is not a run folder: it has no {CARD}") from None
    except UNDECODABLE as error:
        raise RunError(f"{path / CARD} cannot be read: {error}") from None


def reopen(path: Path, overrides: Sequence[str] = ()) -> tuple[RunFolder, RunConfig, RunCard]:
    """An existing run, with the settings it has; `overrides` change some of them from here on.

    Raises:
        RunError: there is none, another version of this program made it, or `overrides` would move its gateway, whose
            address its robots know.
        ConfigError: its configuration cannot be read.
    """
    folder = RunFolder(path.resolve())
    card = read_card(path)
    if card.format != FORMAT:
        raise RunError(
            f"{path} was made by another version (run format {card.format}, this is {FORMAT}); "
            "open it with that version, or start a new run"
        )
    config = load(RunConfig, folder.config, overrides)
    if overrides and config.gateway.endpoint != card.endpoint:
        raise RunError(
            f"gateway.endpoint: the run in {path} listens on {card.endpoint} for as long as it lives, where its robots "
            "look for it; start a new run to listen elsewhere"
        )
    return folder, config, card


def default_name(config_path: Path | None) -> str:
    """A name made of the configuration's and the time, e.g. ``demo-1121-0315-07``."""
    stem = config_path.stem if config_path else "run"
    return f"{stem}-{time.strftime('%m%d-%H%M-%S')}"
