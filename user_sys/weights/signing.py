"""Ed25519 keys: the learner signs what it publishes, every robot checks it, whoever handed it on in between.

Whose numbers versions have, and which of two runs is the later one, without a word of the clock where that jumps.

A *run* here is a numbering: a learner that begins without a checkpoint begins one, and one that goes on from a
checkpoint goes on with its numbers. Each start of a learner's envoy is a *life*. Lives that share a signing key are
counted in a file beside it, and begin at the time of day, so that a copy of the key elsewhere counts on from about
where the others are.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hal.durable import PRIVATE_FILE_MODE, make_folder_durably, replace_durably
from user_sys.errors import RunError, WireError
from user_sys.messages import RecordT, SignedRecord, decode_record

SIGNING_KEY_NAME = "learner"
SECRET_SUFFIX, PUBLIC_SUFFIX = ".sign", ".verify"


class Signer:
    """Signs records with a secret key. Any thread may call it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def sign(self, record: msgspec.Struct) -> SignedRecord:
        body = msgspec.msgpack.encode(record)
        return SignedRecord(body, self._key.sign(body))

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

    def verify(self, signed: SignedRecord, kind: type[RecordT]) -> RecordT:
        """Raises WireError: another key signed it, it was changed since, or it is no record of this kind."""
        try:
            self._key.verify(signed.signature, signed.body)
        except InvalidSignature:
            raise WireError(
                f"the signature of a {kind.__name__} is not the learner's: "
                f"is {SIGNING_KEY_NAME}{PUBLIC_SUFFIX} of another run?"
            ) from None
        return decode_record(signed.body, kind)


def verifier_from_public_key(public_key: bytes) -> Verifier:
    """Raises WireError: it is no public key."""
    try:
        return Verifier(Ed25519PublicKey.from_public_bytes(public_key))
    except ValueError:
        raise WireError("the gateway names no signing key of a learner") from None


class TrustedLearnerKey:
    """The learner's public key, as a robot knows it: from a file, or else the first that is named, kept in that file.

    What names the first one is the gateway, over an encrypted connection to a key that the robot was given. Whoever
    does not want to trust the gateway with this copies the file beforehand. A key that cannot be kept is not taken:
    whoever is asked at the next start could name another.
    """

    def __init__(self, path: Path) -> None:
        """Raises RunError: the file is damaged."""
        self._path = path
        self._verifier = load_verifier(path) if path.exists() else None

    def require_persistent(self) -> None:
        """Raises RunError: no key is known, and none could be kept."""
        if self._verifier is not None:
            return
        try:
            make_folder_durably(self._path.parent)
            with TemporaryFile(dir=self._path.parent):
                pass
        except OSError as error:
            raise self._unkept(error) from None

    def verify(self, signed: SignedRecord, kind: type[RecordT]) -> RecordT:
        """As `Verifier.open`."""
        if self._verifier is None:
            raise WireError(f"no key is known that could have signed a {kind.__name__}")
        return self._verifier.verify(signed, kind)

    def trust_on_first_use(self, public_key: bytes) -> None:
        """Trusts `public_key` if no other is known. Raises WireError: no key; RunError: it cannot be kept."""
        if self._verifier is not None:
            return
        verifier = verifier_from_public_key(public_key)
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
        replace_durably(secret, fresh.encode() + b"\n", PRIVATE_FILE_MODE)
    signer = load_signer(secret)
    if not public.exists():
        replace_durably(public, signer.public_key.hex().encode() + b"\n")
    return signer


def load_signer(path: Path) -> Signer:
    """Raises RunError: missing or damaged."""
    return Signer(Ed25519PrivateKey.from_private_bytes(_read_key(path)))


def load_verifier(path: Path) -> Verifier:
    """Raises RunError: missing or damaged."""
    return Verifier(Ed25519PublicKey.from_public_bytes(_read_key(path)))


def _read_key(path: Path) -> bytes:
    try:
        raw = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is no signing key ({error}); copy it from the run's keys folder") from None
    if len(raw) != 32:
        raise RunError(f"{path} is no signing key: it holds {len(raw)} bytes, not 32; copy it again")
    return raw


RUN_ID_BYTES = 16
RUN_ID_FILE = "numbering"
EPOCH_SUFFIX = ".lives"
_log = logging.getLogger(__name__)


def run_id_of(checkpoints: Path) -> bytes:
    """Identifies the numbers of the versions that a learner publishes which has its checkpoints in that folder.

    Call it before the first checkpoint is written. Raises OSError: the folder cannot be written.
    """
    path = checkpoints / RUN_ID_FILE
    known = path.read_bytes() if path.exists() and any(checkpoints.glob("*.checkpoint")) else b""
    if len(known) == RUN_ID_BYTES:
        return known
    fresh = secrets.token_bytes(RUN_ID_BYTES)
    replace_durably(path, fresh)
    return fresh


def next_epoch(keys: Path, unix_s: Callable[[], float] = time.time) -> int:
    """A number greater than that of every life before whose key is in the folder `keys`.

    Where it cannot be kept the next one may be no greater, if the clock jumps back meanwhile; that is logged.
    """
    path = keys / f"{SIGNING_KEY_NAME}{EPOCH_SUFFIX}"
    try:
        last = int(path.read_text())
    except FileNotFoundError:
        last = 0
    except (OSError, ValueError) as error:
        _log.warning("weights.lives_unreadable file=%s: %s", path, error)
        last = 0
    life = max(int(unix_s()), last + 1)
    try:
        replace_durably(path, f"{life}\n".encode())
    except OSError as error:
        _log.warning("weights.life_not_kept file=%s: %s; which of two runs is later hangs on the clock", path, error)
    return life
