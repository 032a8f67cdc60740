"""CURVE key pairs, and the keyring of public keys that a gateway allows.

A key pair is two files: ``<name>.key`` (private; mode 0600, refused if others can read it) and ``<name>.pub`` (one
line, public). A keyring is a folder ``allowed/`` with one JSON file for each peer, which binds a public key to a name
and a role. Every write replaces a file atomically, so a keyring may change while a gateway reads it.

Key rotation causes no outage: the keyring allows the new and the previous key for an overlap.
"""

from __future__ import annotations

import hashlib
import os
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
from hal.durable import PRIVATE_FILE_MODE, make_folder_durably, remove_durably, replace_durably, sync_folder
from hal.settings import NAME_PATTERN
from user_sys.errors import ConfigError, RunError

Role = Literal["robot", "learner", "console", "relay", "policy"]
ROLES: tuple[Role, ...] = get_args(Role)
GATEWAY_NAME = "gateway"  # of every gateway, in key files and messages
KEY_CHARS = 40
MAX_FILE_BYTES = 4096
MAX_ENTRY_BYTES = 1 << 20  # of a keyring: a relay has many robots


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85: 40 characters each. The secret never shows in a repr."""

    public: str
    secret: str = field(repr=False)


class AuthorizedKey(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a keyring: the name and role that `public` authenticates.

    Attributes:
        robots: the robots for which a relay may open sessions.
        former, former_until_unix_s: the previous key, and the time until which it is allowed.
    """

    public: str
    name: str
    role: Role
    robots: tuple[str, ...] = ()
    former: str = ""
    former_until_unix_s: float = 0.0

    def can_act_as(self, name: str, role: Role) -> bool:
        """Whether the holder of this key may open a session under `name` and `role`.

        A relay opens one for each of its robots, and a policy server one for each of its policies.
        """
        if self.role == role == "policy":
            return name.startswith(f"{self.name}-") and bool(NAME_PATTERN.fullmatch(name))
        return (name, role) == (self.name, self.role) or (
            self.role == "relay" and role == "robot" and name in self.robots
        )


def _require_no_overlap(server: AuthorizedKey, other: AuthorizedKey) -> None:
    """Raises ConfigError if `server` is a policy server whose key may act under a name of `other`."""
    for name in (other.name, *other.robots):
        if server.can_act_as(name, "policy"):
            raise ConfigError(f"the policy server {server.name!r} could act as {name!r}; rename one of them")


def new_keypair() -> KeyPair:
    """A new pair. Its public key does not begin with a dash, which a command line would parse as an option."""
    while True:
        public, secret = zmq.curve_keypair()
        if not public.startswith(b"-"):
            return KeyPair(public.decode(), secret.decode())


def fingerprint(public: str) -> str:
    """A short form of a public key for people and logs: 16 hexadecimal digits of its BLAKE2b."""
    digits = hashlib.blake2b(public.encode(), digest_size=8).hexdigest()
    return "-".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def validate_name(name: str) -> str:
    """Returns `name`. Raises ConfigError unless it is safe as a file name and in messages."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is not a name: use letters, digits, '.', '_', '-', and start with a letter or digit"
        )
    return name


def validate_public_key(public: str) -> str:
    """Returns `public`. Raises ConfigError unless it is a CURVE public key in Z85."""
    try:
        decoded = z85.decode(public.encode("ascii")) if len(public) == KEY_CHARS else b""
    except (ValueError, KeyError, UnicodeEncodeError, struct.error):  # struct.error: a group beyond 32 bits
        decoded = b""
    if len(decoded) != 32:
        raise ConfigError(
            f"{public[:60]!r} is not a public key: expected {KEY_CHARS} Z85 characters, as `user-sys keys new` prints"
        )
    return public


def save_keypair(keys: KeyPair, folder: Path, name: str) -> None:
    """Writes ``<name>.key`` (0600) and ``<name>.pub`` into `folder`; creates the folder if it is missing."""
    if not folder.exists():
        make_folder_durably(folder)
        folder.chmod(0o700)
    private = msgspec.json.encode({"public": keys.public, "secret": keys.secret})
    replace_durably(folder / f"{validate_name(name)}.key", private + b"\n", PRIVATE_FILE_MODE)
    replace_durably(folder / f"{name}.pub", keys.public.encode() + b"\n")


def load_keypair(path: Path) -> KeyPair:
    """The key pair in a ``.key`` file.

    Raises:
        RunError: the file is missing, others can read it, or it does not hold a matching key pair.
    """
    try:
        with path.open("rb") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            content = stream.read(MAX_FILE_BYTES)
    except OSError as error:
        raise RunError(f"no private key at {path} ({error.strerror}); make one with `user-sys keys new`") from None
    if mode & 0o077:
        raise RunError(f"others can read {path} (mode {mode:04o}); run `chmod 600 {path}` and consider a new key")
    try:
        keys = msgspec.json.decode(content, type=KeyPair)
        validate_public_key(keys.public)
        validate_public_key(keys.secret)
    except (*DECODE_ERRORS, ConfigError):
        raise RunError(f"{path} holds no key pair; make one with `user-sys keys new`") from None
    if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
        raise RunError(f"{path} holds halves of two different keys; make a new key with `user-sys keys new`")
    return keys


def stage_keypair(folder: Path, name: str) -> KeyPair:
    """The successor of ``<name>.key``, in ``<name>.next.key``; generated if it is missing or, after a kill, in use."""
    path, current = folder / f"{validate_name(name)}.next.key", folder / f"{name}.key"
    if not path.exists() or (current.exists() and load_keypair(current) == load_keypair(path)):
        save_keypair(new_keypair(), folder, f"{name}.next")
    return load_keypair(path)


def promote_keypair(folder: Path, name: str) -> KeyPair:
    """Replaces ``<name>.key`` with the staged pair. Raises RunError if none is staged."""
    path = folder / f"{validate_name(name)}.next.key"
    if not path.exists():
        raise RunError(f"{path} does not exist; `user-sys keys rotate {name}` creates it")
    keys = load_keypair(path)
    save_keypair(keys, folder, name)
    for staged in (path, path.with_suffix(".pub")):
        remove_durably(staged)
    return keys


def load_public_key(path: Path) -> str:
    """The public key in a ``.pub`` file. Raises RunError if the file is missing or damaged."""
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
    """The public keys that a gateway allows. Any thread may call it.

    `find` reads memory only; `refresh` reads changes of other processes and costs one directory listing.
    """

    def __init__(self, folder: Path, unix_s: Callable[[], float] = time.time) -> None:
        self.folder = folder / "allowed"
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._by_key: dict[str, AuthorizedKey] = {}
        self._names = frozenset[str]()
        self._unreadable: tuple[str, ...] = ()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Damaged files of the keyring; their peers are not allowed."""
        return self._unreadable

    def allow(
        self, public: str, name: str, role: Role, *, robots: Sequence[str] = (), overlap_s: float | None = None
    ) -> AuthorizedKey:
        """Allows `public` for `name`. A previous key of `name` stays allowed for `overlap_s` from now.

        Without `overlap_s` an earlier rotation to `public` stays as it is, and another previous key is not allowed.

        Raises:
            ConfigError: a bad argument, a name that has another role, a key that belongs to another name, or a name
                that a policy server may use for one of its policies.
        """
        if role not in ROLES:
            raise ConfigError(f"{role!r} is not a role; use one of {', '.join(ROLES)}")
        if bool(robots) != (role == "relay"):
            raise ConfigError(f"role {role!r} with robots {list(robots)}: a relay needs robots, other roles take none")
        entry = AuthorizedKey(
            public=validate_public_key(public),
            name=validate_name(name),
            role=role,
            robots=tuple(validate_name(robot) for robot in robots),
        )
        others = self.list()
        has_names = any((each.name, each.role) == (name, role) and {*robots} <= {*each.robots} for each in others)
        for other in others:
            if other.name == name:
                entry = self._replace(other, entry, overlap_s)
            elif public in (other.public, other.former):
                raise ConfigError(f"this key already belongs to {other.name!r}; create one key for each peer")
            elif not has_names:  # a rotation of names that a release without this check has allowed
                _require_no_overlap(entry, other)
                _require_no_overlap(other, entry)
        encoded = msgspec.json.encode(entry) + b"\n"
        if len(encoded) > MAX_ENTRY_BYTES:
            raise ConfigError(f"{name!r} has {len(robots)} robots: too many for one relay; use several")
        replace_durably(self.folder / f"{name}.json", encoded)
        self.refresh()
        return entry

    def _replace(self, previous: AuthorizedKey, entry: AuthorizedKey, overlap_s: float | None) -> AuthorizedKey:
        if previous.role != entry.role:
            raise ConfigError(
                f"{entry.name!r} is a {previous.role} here; choose another name, or first run `user-sys keys revoke "
                f"{entry.name}`, after which that {previous.role} cannot connect any more"
            )
        now_s, former, until = self._unix_s(), previous.public, 0.0
        if previous.public == entry.public:
            former, until = previous.former, previous.former_until_unix_s
        if overlap_s is not None:
            until = now_s + overlap_s
        if until <= now_s:
            former, until = "", 0.0
        return msgspec.structs.replace(entry, former=former, former_until_unix_s=until)

    def revoke(self, name: str) -> None:
        """Revokes the key of `name`, durably on return. Raises ConfigError if `name` is not allowed."""
        try:
            (self.folder / f"{validate_name(name)}.json").unlink()
            sync_folder(self.folder)
        except FileNotFoundError:
            known = ", ".join(entry.name for entry in self.list()) or "no key"
            raise ConfigError(f"{name!r} is not in the keyring; it has {known}") from None
        self.refresh()

    def list(self) -> tuple[AuthorizedKey, ...]:
        """All entries, sorted by name."""
        self.refresh()
        with self._lock:
            return tuple(sorted({e.name: e for e in self._by_key.values()}.values(), key=lambda entry: entry.name))

    def find(self, public: str) -> AuthorizedKey | None:
        """The entry that allows a public key, as of the last `refresh`."""
        entry = self._by_key.get(public)
        if entry is None or (public != entry.public and self._unix_s() >= entry.former_until_unix_s):
            return None
        return entry

    def has_name(self, name: str) -> bool:
        """Whether a peer of the keyring, or a relay's robot, has this name, as of the last `refresh`."""
        return name in self._names

    def refresh(self) -> bool:
        """Reads the folder again if it changed. Returns whether it changed."""
        with self._lock:
            seen = tuple(sorted(self._signatures()))
            if seen == self._seen:
                return False
            self._seen = seen
            read = {name: self._read(name) for name, _, _ in seen}
            entries = [entry for entry in read.values() if entry is not None]
            self._by_key = {entry.former: entry for entry in entries if entry.former}
            self._by_key |= {entry.public: entry for entry in entries}
            self._names = frozenset(name for entry in entries for name in (entry.name, *entry.robots))
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
                    except FileNotFoundError:  # revoked after the listing
                        continue
                    yield item.name, status.st_ino, status.st_ctime_ns  # of the permissions too

    def _read(self, file_name: str) -> AuthorizedKey | None:
        try:
            with (self.folder / file_name).open("rb") as stream:
                entry = msgspec.json.decode(stream.read(MAX_ENTRY_BYTES), type=AuthorizedKey)
            validate_public_key(entry.public)
        except (OSError, *DECODE_ERRORS, ConfigError):
            return None
        return entry if entry.name == file_name.removesuffix(".json") else None
