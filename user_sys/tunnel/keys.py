"""CURVE key pairs, and the ring of public keys that a gateway lets in.

A key pair is two files: ``<name>.key`` (private; mode 0600, refused when others can read it) and ``<name>.pub`` (one
line, public). A ring is a folder ``allowed/`` with one JSON file a peer, which binds a public key to a name and a role.
Every write replaces a file atomically, so that a ring may change while a gateway reads it.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq
from zmq.utils import z85

from hal.durable import replace_durably, sync_folder
from user_sys.errors import ConfigError, RunError

Role = Literal["robot", "learner", "console"]
ROLES: tuple[Role, ...] = get_args(Role)
KEY_CHARS = 40
MAX_FILE_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85: 40 characters each. The secret never shows in a repr."""

    public: str
    secret: str = field(repr=False)


class AllowedKey(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a ring: who holds `public`, and what it may do."""

    public: str
    name: str
    role: Role


def new_keypair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def checked_name(name: str) -> str:
    """Returns `name`; raises ConfigError unless it is safe as a file name and on the wire."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is not a name: use letters, digits, '.', '_', '-', starting with the first two"
        )
    return name


def checked_public_key(public: str) -> str:
    """Returns `public`; raises ConfigError unless it is a CURVE public key in Z85."""
    try:
        decoded = z85.decode(public.encode("ascii")) if len(public) == KEY_CHARS else b""
    except (ValueError, KeyError, UnicodeEncodeError):
        decoded = b""
    if len(decoded) != 32:
        raise ConfigError(
            f"{public[:60]!r} is not a public key: {KEY_CHARS} Z85 characters, as `user-sys keys new` prints"
        )
    return public


def _write_private(path: Path, content: bytes) -> None:
    """Replaces `path` by `content`, which nobody else can read at any moment; durable on return."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)
    fresh.replace(path)
    sync_folder(path.parent)


def save_keypair(keys: KeyPair, folder: Path, name: str) -> None:
    """Writes ``<name>.key`` (0600) and ``<name>.pub`` into `folder`, which is made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    private = msgspec.json.encode({"public": keys.public, "secret": keys.secret})
    _write_private(folder / f"{checked_name(name)}.key", private + b"\n")
    replace_durably(folder / f"{name}.pub", keys.public.encode() + b"\n")


def load_keypair(path: Path) -> KeyPair:
    """The key pair in a ``.key`` file.

    Raises:
        RunError: there is no such file, others can read it, or it holds no key pair.
    """
    try:
        with path.open("rb") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            content = stream.read(MAX_FILE_BYTES)
    except OSError as error:
        raise RunError(f"no private key at {path} ({error.strerror}); make one with `user-sys keys new`") from None
    if mode & 0o077:
        raise RunError(f"{path} can be read by others (mode {mode:04o}); run `chmod 600 {path}` and consider a new key")
    try:
        keys = msgspec.json.decode(content, type=KeyPair)
        checked_public_key(keys.public)
        checked_public_key(keys.secret)
    except (msgspec.MsgspecError, ConfigError):
        raise RunError(f"{path} holds no key pair; make one with `user-sys keys new`") from None
    return keys


def load_public_key(path: Path) -> str:
    """The public key in a ``.pub`` file; raises RunError when there is none."""
    try:
        with path.open("rb") as stream:
            return checked_public_key(stream.read(MAX_FILE_BYTES).decode("ascii", "replace").strip())
    except OSError as error:
        raise RunError(f"no public key at {path} ({error.strerror})") from None
    except ConfigError as error:
        raise RunError(f"{path}: {error}") from None


class Keyring:
    """The public keys that a gateway lets in. Any thread may call it; changes by other processes are seen.

    `find` answers from memory; `refresh` looks at the folder and costs one directory listing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "allowed"
        self._lock = threading.Lock()
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._by_key: dict[str, AllowedKey] = {}
        self._unreadable: tuple[str, ...] = ()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Files in the ring that hold no entry; whom they name is not let in."""
        return self._unreadable

    def allow(self, public: str, name: str, role: Role) -> AllowedKey:
        """Lets `public` in as `name`; a key that `name` had before is out. Raises ConfigError for a bad argument."""
        if role not in ROLES:
            raise ConfigError(f"{role!r} is not a role; there are {', '.join(ROLES)}")
        entry = AllowedKey(public=checked_public_key(public), name=checked_name(name), role=role)
        for other in self.list():
            if other.public == public and other.name != name:
                raise ConfigError(f"this key already belongs to {other.name!r}; every peer has a key of its own")
        replace_durably(self.folder / f"{name}.json", msgspec.json.encode(entry) + b"\n")
        self.refresh()
        return entry

    def revoke(self, name: str) -> None:
        """Shuts `name` out. Raises ConfigError when it was not in."""
        try:
            (self.folder / f"{checked_name(name)}.json").unlink()
        except FileNotFoundError:
            raise ConfigError(f"{name!r} is not allowed; allowed are {[e.name for e in self.list()]}") from None
        self.refresh()

    def list(self) -> tuple[AllowedKey, ...]:
        """All entries, by name."""
        self.refresh()
        with self._lock:
            return tuple(sorted(self._by_key.values(), key=lambda entry: entry.name))

    def find(self, public: str) -> AllowedKey | None:
        """The entry of a public key as of the last `refresh`."""
        return self._by_key.get(public)

    def refresh(self) -> bool:
        """Reads the folder again if it changed; True if it did."""
        with self._lock:
            seen = tuple(sorted(self._signatures()))
            if seen == self._seen:
                return False
            self._seen = seen
            entries, unreadable = [], []
            for name, _, _ in seen:
                entry = self._read(name)
                entries.append(entry) if entry else unreadable.append(name)
            self._by_key = {entry.public: entry for entry in entries if entry}
            self._unreadable = tuple(unreadable)
            return True

    def _signatures(self) -> Iterator[tuple[str, int, int]]:
        if not self.folder.is_dir():
            return
        with os.scandir(self.folder) as listing:
            for item in listing:
                if item.name.endswith(".json") and not item.name.startswith("."):
                    try:
                        status = item.stat()
                    except FileNotFoundError:  # revoked between the listing and the look
                        continue
                    yield item.name, status.st_ino, status.st_mtime_ns

    def _read(self, file_name: str) -> AllowedKey | None:
        try:
            with (self.folder / file_name).open("rb") as stream:
                entry = msgspec.json.decode(stream.read(MAX_FILE_BYTES), type=AllowedKey)
            checked_public_key(entry.public)
        except (OSError, msgspec.MsgspecError, ConfigError):
            return None
        return entry if entry.name == file_name.removesuffix(".json") else None
