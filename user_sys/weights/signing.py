"""Ed25519 keys: the learner signs what it publishes, every robot checks it, whoever handed it on in between."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hal.durable import PRIVATE, make_folder_durably, replace_durably
from user_sys.errors import RunError, WireError
from user_sys.weights.records import Record, Signed, decode_record

LEARNER = "learner"
SECRET_SUFFIX, PUBLIC_SUFFIX = ".sign", ".verify"


class Signer:
    """Signs records with a secret key. Any thread may call it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def sign(self, record: msgspec.Struct) -> Signed:
        body = msgspec.msgpack.encode(record)
        return Signed(body, self._key.sign(body))

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    @property
    def verifier(self) -> Verifier:
        return Verifier(self._key.public_key())


class Verifier:
    """Opens records that the holder of one key has signed. Any thread may call it."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    def open(self, signed: Signed, kind: type[Record]) -> Record:
        """Raises WireError: another key signed it, it was changed since, or it is no record of this kind."""
        try:
            self._key.verify(signed.signature, signed.body)
        except InvalidSignature:
            raise WireError(
                f"the signature of a {kind.__name__} is not the learner's: is {LEARNER}{PUBLIC_SUFFIX} of another run?"
            ) from None
        return decode_record(signed.body, kind)


def verifier_of(public_key: bytes) -> Verifier:
    """Raises WireError: it is no public key."""
    try:
        return Verifier(Ed25519PublicKey.from_public_bytes(public_key))
    except ValueError:
        raise WireError("the gateway names no signing key of a learner") from None


class Trust:
    """The learner's public key, as a robot knows it: from a file, or else the first that is named, kept in that file.

    What names the first one is the gateway, over an encrypted connection to a key that the robot was given. Whoever
    does not want to trust the gateway with this copies the file beforehand. A key that cannot be kept is not taken:
    whoever is asked at the next start could name another.
    """

    def __init__(self, path: Path) -> None:
        """Raises RunError: the file is damaged."""
        self._path = path
        self._verifier = load_verifier(path) if path.exists() else None

    def require_lasting(self) -> None:
        """Raises RunError: no key is known, and none could be kept."""
        if self._verifier is not None:
            return
        try:
            make_folder_durably(self._path.parent)
            with TemporaryFile(dir=self._path.parent):
                pass
        except OSError as error:
            raise self._unkept(error) from None

    def open(self, signed: Signed, kind: type[Record]) -> Record:
        """As `Verifier.open`."""
        if self._verifier is None:
            raise WireError(f"no key is known that could have signed a {kind.__name__}")
        return self._verifier.open(signed, kind)

    def adopt(self, public_key: bytes) -> None:
        """Trusts `public_key` if no other is known. Raises WireError: no key; RunError: it cannot be kept."""
        if self._verifier is not None:
            return
        verifier = verifier_of(public_key)
        try:
            replace_durably(self._path, public_key.hex().encode() + b"\n")
        except OSError as error:
            raise self._unkept(error) from None
        self._verifier = verifier

    def _unkept(self, error: OSError) -> RunError:
        return RunError(
            f"whose weights this robot may take is not known, and {self._path} cannot be written ({error.strerror}): "
            f"copy {self._path.name} of the run's keys folder there, or make the folder writable"
        )


def new_signer() -> Signer:
    return Signer(Ed25519PrivateKey.generate())


def ensure_signer(folder: Path, name: str) -> Signer:
    """The key pair ``<name>.sign`` and ``<name>.verify`` of `folder`, made at the first call.

    The first is secret (mode 600); the second goes to every robot. Raises RunError: a file is damaged.
    """
    secret, public = folder / f"{name}{SECRET_SUFFIX}", folder / f"{name}{PUBLIC_SUFFIX}"
    if not secret.exists():
        fresh = Ed25519PrivateKey.generate().private_bytes_raw().hex()
        replace_durably(secret, fresh.encode() + b"\n", PRIVATE)
    signer = load_signer(secret)
    if not public.exists():
        replace_durably(public, signer.public_key.hex().encode() + b"\n")
    return signer


def load_signer(path: Path) -> Signer:
    """Raises RunError: missing or damaged."""
    return Signer(Ed25519PrivateKey.from_private_bytes(_read(path)))


def load_verifier(path: Path) -> Verifier:
    """Raises RunError: missing or damaged."""
    return Verifier(Ed25519PublicKey.from_public_bytes(_read(path)))


def _read(path: Path) -> bytes:
    try:
        raw = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is no signing key ({error}); copy it from the run's keys folder") from None
    if len(raw) != 32:
        raise RunError(f"{path} is no signing key: it holds {len(raw)} bytes, not 32; copy it again")
    return raw
