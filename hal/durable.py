"""Small files that survive a power cut, and the umask of all files.

Files are private to their user unless the environment variable `UMASK_VARIABLE` sets another umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from hal.errors import HalError

PRIVATE_FILE_MODE = 0o600
UMASK_VARIABLE = "USER_SYS_UMASK"
PRIVATE_UMASK = 0o077


def replace_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replaces a file atomically: after a crash it holds the old bytes or the new, never a mixture.

    Blocks until file and folder are synced. Missing parent folders are created. At no moment are the permissions wider
    than `mode` and the umask allow. A file of root gets the owner of its folder.

    Raises OSError: the file then holds the old bytes or the new, and a power cut may exchange them. The error names
    `path`.
    """
    make_folder_durably(path.parent)
    _replace(path, content, mode)
    sync_folder(path.parent)


def replace_all_durably(contents: Mapping[Path, bytes | memoryview]) -> None:
    """Replaces each file as `replace_durably` does, one after the other. The folders must exist.

    Blocks until all are synced, with one sync for each folder. Raises OSError: some files may be unchanged.
    """
    for path, content in contents.items():
        _replace(path, content, 0o666)
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


def _replace(path: Path, content: bytes | memoryview, mode: int) -> None:
    """Syncs the file, not the folder's entry."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            _give_to_owner_of(path.parent, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def open_or_create(path: Path, flags: int) -> int:
    """A descriptor of the file at `path`, opened with the flags of `os.open`; child processes do not inherit it.

    A missing file is created with mode 0666, less the umask. One that root creates gets the owner of its folder.
    """
    flags |= os.O_CREAT | os.O_CLOEXEC
    try:
        created = os.open(path, flags | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags, 0o666)
    _give_to_owner_of(path.parent, created)
    return created


def _give_to_owner_of(folder: Path, created: int) -> None:
    """The open file or folder, if root has created it (a command with sudo), gets the owner and group of `folder`."""
    owner = folder.stat()
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # not every file system has owners
            os.fchown(created, owner.st_uid, owner.st_gid)


def make_folder_durably(path: Path) -> None:
    """Creates `path` and its missing parent folders; blocks until they are synced. Raises OSError.

    Those that root creates get the owner of the folder that exists. An existing `path` is synced too, because a killed
    process may have created it without a sync.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        created = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _give_to_owner_of(folder.parent, created)
        finally:
            os.close(created)
        sync_folder(folder.parent)
    if not missing:
        try:
            sync_folder(path.parent)
        except OSError as error:  # a process that may not read the parent, or that cannot sync it, did not create it
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                raise


def remove_durably(path: Path) -> None:
    """Removes `path` if it exists; blocks until the folder is synced."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Blocks until the entries of `folder` (names, not contents) are synced."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask_from_environment(environment: Mapping[str, str] = os.environ) -> int:
    """The umask for this program and its child processes. Raises HalError if the variable is no octal umask."""
    text = environment.get(UMASK_VARIABLE, "")
    if not text:
        return PRIVATE_UMASK
    if not re.fullmatch("[0-7]{1,4}", text):
        raise HalError(f"{UMASK_VARIABLE}={text[:20]!r} is not an octal umask: write a number such as 027")
    return int(text, 8)
