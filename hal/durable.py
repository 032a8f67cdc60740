"""Small files that survive a power cut.

What this program writes is for its user alone, unless one environment variable says otherwise.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from hal.errors import HalError

PRIVATE_FILE_MODE = 0o600  # a file's mode: nobody else reads it


def replace_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Puts `content` at `path` in one step: after a crash the file holds the old bytes or the new, never a mixture.

    Blocks until file and folder are on the disk. Parent folders are made. Nobody may do at any moment what neither
    `mode` nor the umask allows. Raises OSError; `path` is then as it was.
    """
    make_folder_durably(path.parent)
    _replace(path, content, mode)
    sync_folder(path.parent)


def replace_all_durably(contents: Mapping[Path, bytes | memoryview]) -> None:
    """Puts each content at its path as `replace_durably` does, one after the other, in folders that are there.

    Blocks until all are on the disk, with one wait for each folder. Raises OSError: some of them may be as they were.
    """
    for path, content in contents.items():
        _replace(path, content, 0o666)
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


def _replace(path: Path, content: bytes | memoryview, mode: int) -> None:
    """The folder's entry may not be on the disk yet on return."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_folder_durably(path: Path) -> None:
    """Makes `path`, and the folders above it that are missing; blocks until they are on the disk. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def remove_durably(path: Path) -> None:
    """Removes `path` if it is there; blocks until the folder is on the disk."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Blocks until the entries of `folder` (names, not contents) are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


UMASK_VARIABLE = "USER_SYS_UMASK"
PRIVATE_UMASK = 0o077


def umask_from_environment(environment: Mapping[str, str] = os.environ) -> int:
    """The umask for this program and the processes that it starts. Raises HalError: the variable is no octal umask."""
    text = environment.get(UMASK_VARIABLE, "")
    if not text:
        return PRIVATE_UMASK
    if not re.fullmatch("[0-7]{1,4}", text):
        raise HalError(f"{UMASK_VARIABLE}={text[:20]!r} is no umask: write an octal number, such as 027")
    return int(text, 8)
