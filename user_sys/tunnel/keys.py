"""CURVE key pairs, and the ring of public keys that a gateway lets in.

A key pair is two files: ``<name>.key`` (private; mode 0600, refused when others can read it) and ``<name>.pub`` (one
line, public). A ring is a folder ``allowed/`` with one JSON file a peer, which binds a public key to a name and a role.
Every write replaces a file atomically, so that a ring may change while a gateway reads it.

A key is rotated without an outage: for a while the ring lets in both the new key and the one before it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq
from zmq.utils import z85

from hal.decode_errors import DECODE_ERRORS
from hal.durable import PRIVATE_FILE_MODE, remove_durably, replace_durably, sync_folder
from user_sys.errors import ConfigError, RunError

Role = Literal["robot", "learner", "console", "relay"]
ROLES: tuple[Role, ...] = get_args(Role)
KEY_CHARS = 40
MAX_FILE_BYTES = 4096
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85: 40 characters each. The secret never shows in a repr."""

    public: str
    secret: str = field(repr=False)


class AuthorizedKey(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a ring: who holds `public`, and what it may do.

    Attributes:
        robots: of a relay: those for which it may speak.
        former, former_until_unix_s: the key before this one, let in until then.
    """

    public: str
    name: str
    role: Role
    robots: tuple[str, ...] = ()
    former: str = ""
    former_until_unix_s: float = 0.0

    def can_act_as(self, name: str, role: Role) -> bool:
        """Whether the holder of this key may open a session under `name` and `role`."""
        return (name, role) == (self.name, self.role) or (
            self.role == "relay" and role == "robot" and name in self.robots
        )


def new_keypair() -> KeyPair:
    """A fresh pair. A public key that begins with a dash is drawn again: a command line would take it for an option."""
    while True:
        public, secret = zmq.curve_keypair()
        if not public.startswith(b"-"):
            return KeyPair(public.decode(), secret.decode())


def fingerprint(public: str) -> str:
    """A public key in short, for people and logs: 16 hexadecimal digits of its BLAKE2b."""
    digits = hashlib.blake2b(public.encode(), digest_size=8).hexdigest()
    return "-".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def validate_name(name: str) -> str:
    """Returns `name`; raises ConfigError unless it is safe as a file name and on the wire."""
    if not _NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is not a name: use letters, digits, '.', '_', '-', starting with the first two"
        )
    return name


def validate_public_key(public: str) -> str:
    """Returns `public`; raises ConfigError unless it is a CURVE public key in Z85."""
    try:
        decoded = z85.decode(public.encode("ascii")) if len(public) == KEY_CHARS else b""
    except (ValueError, KeyError, UnicodeEncodeError, struct.error):  # the last for groups beyond 32 bits
        decoded = b""
    if len(decoded) != 32:
        raise ConfigError(
            f"{public[:60]!r} is not a public key: {KEY_CHARS} Z85 characters, as `user-sys keys new` prints"
        )
    return public


def save_keypair(keys: KeyPair, folder: Path, name: str) -> None:
    """Writes ``<name>.key`` (0600) and ``<name>.pub`` into `folder`, which is made when missing."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = msgspec.json.encode({"public": keys.public, "secret": keys.secret})
    replace_durably(folder / f"{validate_name(name)}.key", private + b"\n", PRIVATE_FILE_MODE)
    replace_durably(folder / f"{name}.pub", keys.public.encode() + b"\n")


def load_keypair(path: Path) -> KeyPair:
    """The key pair in a ``.key`` file.

    Raises:
        RunError: there is no such file, others can read it, or it holds no key pair: half written, or mixed of two.
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
        validate_public_key(keys.public)
        validate_public_key(keys.secret)
    except (*DECODE_ERRORS, ConfigError):
        raise RunError(f"{path} holds no key pair; make one with `user-sys keys new`") from None
    if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
        raise RunError(f"{path} holds two halves that do not belong together; make a new key with `user-sys keys new`")
    return keys


def stage_keypair(folder: Path, name: str) -> KeyPair:
    """The pair that is to follow ``<name>.key``: the one in ``<name>.next.key``, made where it is missing."""
    path = folder / f"{validate_name(name)}.next.key"
    if not path.exists():
        save_keypair(new_keypair(), folder, f"{name}.next")
    return load_keypair(path)


def promote_keypair(folder: Path, name: str) -> KeyPair:
    """Puts the staged pair in the place of ``<name>.key``. Raises RunError where none is staged."""
    path = folder / f"{validate_name(name)}.next.key"
    if not path.exists():
        raise RunError(f"there is no {path}; `user-sys keys rotate {name}` makes it")
    keys = load_keypair(path)
    save_keypair(keys, folder, name)
    for staged in (path, path.with_suffix(".pub")):
        remove_durably(staged)
    return keys


def load_public_key(path: Path) -> str:
    """The public key in a ``.pub`` file; raises RunError when there is none, which says how to come by it."""
    try:
        with path.open("rb") as stream:
            return validate_public_key(stream.read(MAX_FILE_BYTES).decode("ascii", "replace").strip())
    except OSError as error:
        raise RunError(
            f"no public key at {path} ({error.strerror}): copy it from the computer where "
            f"`user-sys keys new {path.stem}` made it"
        ) from None
    except ConfigError as error:
        raise RunError(f"{path}: {error}") from None


class Keyring:
    """The public keys that a gateway lets in. Any thread may call it; changes by other processes are seen.

    `find` answers from memory; `refresh` looks at the folder and costs one directory listing.
    """

    def __init__(self, folder: Path, unix_s: Callable[[], float] = time.time) -> None:
        self.folder = folder / "allowed"
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._by_key: dict[str, AuthorizedKey] = {}
        self._unreadable: tuple[str, ...] = ()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Files in the ring that hold no entry; whom they name is not let in."""
        return self._unreadable

    def allow(
        self, public: str, name: str, role: Role, *, robots: Sequence[str] = (), overlap_s: float = 0.0
    ) -> AuthorizedKey:
        """Lets `public` in as `name`; a key that `name` had before is out once `overlap_s` have passed.

        Raises:
            ConfigError: a bad argument, or a key that belongs to another name.
        """
        if role not in ROLES:
            raise ConfigError(f"{role!r} is not a role; there are {', '.join(ROLES)}")
        if bool(robots) != (role == "relay"):
            raise ConfigError("a relay, and nothing else, is allowed together with the robots that it speaks for")
        entry = AuthorizedKey(
            public=validate_public_key(public),
            name=validate_name(name),
            role=role,
            robots=tuple(validate_name(robot) for robot in robots),
        )
        for other in self.list():
            if other.name == name:
                entry = self._succeed(other, entry, overlap_s)
            elif public in (other.public, other.former):
                raise ConfigError(f"this key already belongs to {other.name!r}; every peer has a key of its own")
        replace_durably(self.folder / f"{name}.json", msgspec.json.encode(entry) + b"\n")
        self.refresh()
        return entry

    def _succeed(self, before: AuthorizedKey, entry: AuthorizedKey, overlap_s: float) -> AuthorizedKey:
        if before.public == entry.public:
            former, until = before.former, before.former_until_unix_s
        else:
            former, until = (before.public, self._unix_s() + overlap_s) if overlap_s > 0 else ("", 0.0)
        return msgspec.structs.replace(entry, former=former, former_until_unix_s=until)

    def revoke(self, name: str) -> None:
        """Shuts `name` out, for good on return. Raises ConfigError when it was not in."""
        try:
            (self.folder / f"{validate_name(name)}.json").unlink()
            sync_folder(self.folder)
        except FileNotFoundError:
            raise ConfigError(f"{name!r} is not allowed; allowed are {[e.name for e in self.list()]}") from None
        self.refresh()

    def list(self) -> tuple[AuthorizedKey, ...]:
        """All entries, by name."""
        self.refresh()
        with self._lock:
            return tuple(sorted({e.name: e for e in self._by_key.values()}.values(), key=lambda entry: entry.name))

    def find(self, public: str) -> AuthorizedKey | None:
        """The entry that lets a public key in, as of the last `refresh`."""
        entry = self._by_key.get(public)
        if entry is None or (public != entry.public and self._unix_s() >= entry.former_until_unix_s):
            return None
        return entry

    def refresh(self) -> bool:
        """Reads the folder again if it changed; True if it did."""
        with self._lock:
            seen = tuple(sorted(self._signatures()))
            if seen == self._seen:
                return False
            self._seen = seen
            read = {name: self._read(name) for name, _, _ in seen}
            entries = [entry for entry in read.values() if entry is not None]
            self._by_key = {entry.former: entry for entry in entries if entry.former}
            self._by_key |= {entry.public: entry for entry in entries}
            self._unreadable = tuple(name for name, entry in read.items() if entry is None)
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

    def _read(self, file_name: str) -> AuthorizedKey | None:
        try:
            with (self.folder / file_name).open("rb") as stream:
                entry = msgspec.json.decode(stream.read(MAX_FILE_BYTES), type=AuthorizedKey)
            validate_public_key(entry.public)
        except (OSError, *DECODE_ERRORS, ConfigError):
            return None
        return entry if entry.name == file_name.removesuffix(".json") else None
