"""The accounts of consoles that other computers can reach: names, roles, passwords, sign-ins, and a certificate.

The files of `AccountStore.folder` are private to their user: ``accounts.json`` with argon2id hashes of the passwords,
``sign-ins.json`` with SHA-256 hashes of the cookies, and a self-signed certificate if none is given. A process changes
the first two while it holds the lock of the file ``lock``.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec

from hal.decode_errors import DECODE_ERRORS
from hal.durable import make_folder_durably, replace_durably
from hal.machine_folder import open_locked
from hal.state_database import machine_state_path
from user_sys.console.config import ConsoleConfig
from user_sys.errors import AccountError, ConfigError, RunError

if TYPE_CHECKING:
    from cryptography import x509

Role = Literal["viewer", "operator", "admin"]
"""A viewer watches, and may press the e-stop. An operator drives and labels, too. An admin takes robots out of use."""

AccountName = Annotated[str, msgspec.Meta(pattern=r"^[\w.@-]{1,32}\Z")]
MIN_PASSWORD_CHARS, MAX_PASSWORD_CHARS = 10, 1024
SIGN_IN_S = 12 * 3600.0
MAX_SIGN_INS = 32  # of an account
TOKEN_BYTES = 32
LOCK_TIMEOUT_S = 10.0  # a change takes milliseconds
CERTIFICATE_DAYS = 825
PRIVATE = 0o600
CERTIFICATE = "certificate.pem"  # self-signed
Content = TypeVar("Content")
_log = logging.getLogger(__name__)


class Account(msgspec.Struct, frozen=True):
    """A person who may use consoles. `password` is an argon2id hash."""

    name: AccountName
    role: Role
    password: str


class SignIn(msgspec.Struct, frozen=True):
    """A signed-in browser, until a time in seconds since 1970.

    Attributes:
        name, role: of its account.
        account: digest of its account; the sign-in ends when the account changes.
        cookie: digest of its cookie; the sign-in ends when the person signs out.
    """

    name: str
    role: Role
    until_unix_s: float
    account: str = ""
    cookie: str = ""


class AccountStore:
    """The accounts and sign-ins in a folder. Any thread of any process may call it.

    Attributes:
        folder: of its files.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Args:
        folder: None for the one of this user's consoles on this computer.
        clock: seconds since 1970.
        """
        self.folder = machine_state_path().parent / "console" if folder is None else folder
        self._clock = clock
        self._accounts: list[Account] | None = None  # as last read
        self._found: dict[str, SignIn] = {}  # as last read
        self._unreadable: set[str] = set()

    # Accounts

    def accounts(self) -> dict[str, Account]:
        """All accounts by name.

        While the file cannot be read, such as with too many open files, they stay as they were: pages and their
        e-stops go on.

        Raises:
            AccountError: the file could never be read.
        """
        self._accounts = self._read("accounts.json", list[Account], self._accounts, [])
        return {account.name: account for account in self._accounts}

    def add(self, name: str, role: Role, password: str) -> None:
        """Adds an account, or replaces it and ends its sign-ins.

        Raises:
            AccountError: the name or the password is not allowed.
        """
        from argon2 import PasswordHasher

        if not MIN_PASSWORD_CHARS <= len(password) <= MAX_PASSWORD_CHARS:
            raise AccountError(f"a password has {MIN_PASSWORD_CHARS} to {MAX_PASSWORD_CHARS} characters")
        try:
            msgspec.convert(name, AccountName)
        except msgspec.ValidationError:
            allowed = "1 to 32 letters, digits, '_', '.', '@' or '-'"
            raise AccountError(f"{name!r} is no account name: use {allowed}") from None
        account = Account(name, role, PasswordHasher().hash(password))
        with self._locked():
            self._replace(self.accounts() | {name: account})

    def remove(self, name: str) -> None:
        """Removes an account and ends its sign-ins. Raises AccountError: there is none."""
        with self._locked():
            accounts = self.accounts()
            if accounts.pop(name, None) is None:
                raise AccountError(f"there is no account {name!r}; there are {sorted(accounts) or 'none'}")
            self._replace(accounts)

    def _replace(self, accounts: dict[str, Account]) -> None:
        self._write("accounts.json", msgspec.json.encode([accounts[name] for name in sorted(accounts)]))

    # Sign-ins

    def sign_in(self, name: str, password: str) -> str:
        """Returns the cookie of a new sign-in. Takes a tenth of a second, on purpose.

        Raises:
            AccountError: the name or the password is wrong; it does not say which.
        """
        from argon2 import PasswordHasher
        from argon2.exceptions import Argon2Error, InvalidHashError

        account = self.accounts().get(name)
        try:  # an unknown name takes as long as a wrong password
            PasswordHasher().verify(account.password if account else _unknown_password(), password)
        except (Argon2Error, InvalidHashError):
            account = None
        if account is None:
            raise AccountError("the name or the password is wrong")
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with self._locked():
            found = self._sign_ins()
            until_s = self._clock() + SIGN_IN_S
            cookie = _digest(token)
            found[cookie] = SignIn(account.name, account.role, until_s, _digest(account.password), cookie)
            own = [digest for digest, each in found.items() if each.name == account.name]
            for oldest in own[:-MAX_SIGN_INS]:
                del found[oldest]
            self._write("sign-ins.json", msgspec.json.encode(found))
        return token

    def find(self, token: str) -> SignIn | None:
        """The sign-in with this cookie; None if it has ended, or if its account has changed."""
        found = self._sign_ins().get(_digest(token))
        return found if found and self.is_valid(found) else None

    def is_valid(self, sign_in: SignIn) -> bool:
        """Whether a sign-in has neither expired nor been signed out, and its account has not changed."""
        account = self.accounts().get(sign_in.name)
        if account is None or sign_in.account != _digest(account.password):
            return False
        return sign_in.cookie in self._sign_ins()

    def sign_out(self, token: str) -> None:
        if _digest(token) not in self._sign_ins():
            return
        with self._locked():
            left = {digest: each for digest, each in self._sign_ins().items() if digest != _digest(token)}
            self._write("sign-ins.json", msgspec.json.encode(left))

    def _sign_ins(self) -> dict[str, SignIn]:
        """Those that are valid now. While the file cannot be read, they stay as this process last read them."""
        self._found = self._read("sign-ins.json", dict[str, SignIn], self._found, {})
        return {digest: each for digest, each in self._found.items() if each.until_unix_s > self._clock()}

    def _read(self, name: str, kind: type[Content], last: Content | None, absent: Content) -> Content:
        """The content of a file; `last` while it cannot be read. Raises AccountError: so without a `last`."""
        path = self.folder / name
        try:
            content = msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            content = absent
        except (OSError, *DECODE_ERRORS) as error:
            if last is None:
                raise AccountError(f"{path} cannot be read: {error}; remove it and add the accounts again") from None
            if name not in self._unreadable:
                self._unreadable.add(name)
                _log.error("console.unreadable %s: %s; accounts and sign-ins stay as they were", path, error)
            return last
        self._unreadable.discard(name)
        return content

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other changes, also of other processes. Raises AccountError."""
        path = self.folder / "lock"
        try:
            make_folder_durably(self.folder)
            os.chmod(self.folder, 0o700)
            with open_locked(path, timeout_s=LOCK_TIMEOUT_S) as (_, is_locked):
                if not is_locked:
                    raise AccountError(f"another process keeps {path} locked; end it, and try again")
                yield
        except OSError as error:
            raise AccountError(f"{self.folder} cannot be written: {error.strerror or error}") from None

    def _write(self, name: str, content: bytes) -> None:
        replace_durably(self.folder / name, content, PRIVATE)


@cache
def _unknown_password() -> str:
    from argon2 import PasswordHasher

    return PasswordHasher().hash(secrets.token_urlsafe())


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def self_signed_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """The certificate and the key in `folder`; made for `host` and this computer's names if missing or expired.

    Raises:
        RunError: the files cannot be written.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    certificate, key = folder / CERTIFICATE, folder / "certificate.key"
    now = datetime.datetime.now(datetime.UTC)
    if certificate.exists() and key.exists():
        if x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc > now:
            return certificate, key
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, socket.gethostname()[:64])])
    others = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(socket.gethostname()), _host(host), *others]), False)
        .sign(private, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    try:
        make_folder_durably(folder)
        replace_durably(key, private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), PRIVATE)
        replace_durably(certificate, made.public_bytes(pem), PRIVATE)
    except OSError as error:
        raise RunError(f"console: {certificate} cannot be written: {error.strerror or error}") from None
    return certificate, key


def require_accounts(config: ConsoleConfig, store: AccountStore) -> None:
    """Raises ConfigError: people sign in to this console, and there is no account."""
    if store.accounts():
        return
    where = f"console.public_url {config.public_url}" if config.is_loopback else f"console.host {config.host}"
    raise ConfigError(
        f"{where} can be reached from other computers, and there is no account: "
        "add one with `user-sys console user add NAME --role operator`"
    )


def certificate_fingerprint(certificate: Path) -> str:
    """SHA-256 of the certificate, as browsers show it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    digest = x509.load_pem_x509_certificate(certificate.read_bytes()).fingerprint(hashes.SHA256())
    return digest.hex(":").upper()


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
