"""Ed25519 signatures of weights, and the run and epoch that are signed with each version.

The learner signs each version and every robot verifies it, through any number of relays. A run identifies a sequence
of version numbers: a learner without a checkpoint begins one, and a resumed learner continues it. An epoch is one start
of the learner's publisher process. Epochs of one signing key are counted in a file next to it, from the unix time on.
So a copy of the key on another computer continues at about the same count, and a clock that jumps back does no harm.
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


class Verifier:
    """Verifies records against one public key. Any thread may call it."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    def verify(self, signed: SignedRecord, kind: type[RecordT]) -> RecordT:
        """Returns the record. Raises WireError if another key signed it, or if it was changed or is of another kind."""
        try:
            self._key.verify(signed.signature, signed.body)
        except InvalidSignature:
            raise WireError(
                f"the signature of a {kind.__name__} does not match the learner's key: "
                f"copy {SIGNING_KEY_NAME}{PUBLIC_SUFFIX} from this run's keys folder"
            ) from None
        return decode_record(signed.body, kind)


def verifier_from_public_key(public_key: bytes) -> Verifier:
    """Raises WireError if `public_key` is invalid."""
    try:
        return Verifier(Ed25519PublicKey.from_public_bytes(public_key))
    except ValueError:
        raise WireError("the gateway's offer has no valid public key of a learner") from None


class TrustedLearnerKey:
    """The learner's public key on a robot: from a file, or the first key that the gateway names (trust on first use).

    The gateway names the key over an encrypted connection to a known gateway key. Copy the file to the robot beforehand
    to
    exclude the gateway from this trust. A key that cannot be stored is refused: at the next start the gateway could
    name
    another one.
    """

    def __init__(self, path: Path) -> None:
        """Raises RunError if the file is damaged."""
        self._path = path
        self._verifier = load_verifier(path) if path.exists() else None

    def require_persistent(self) -> None:
        """Raises RunError if no key is known and none could be stored."""
        if self._verifier is not None:
            return
        try:
            make_folder_durably(self._path.parent)
            with TemporaryFile(dir=self._path.parent):
                pass
        except OSError as error:
            raise self._write_error(error) from None

    def verify(self, signed: SignedRecord, kind: type[RecordT]) -> RecordT:
        """See `Verifier.verify`."""
        if self._verifier is None:
            raise WireError(f"no public key is known to verify a {kind.__name__}")
        return self._verifier.verify(signed, kind)

    def trust_on_first_use(self, public_key: bytes) -> None:
        """Stores `public_key` if no key is known. Raises WireError if it is invalid, RunError if it cannot be
        stored.
        """
        if self._verifier is not None:
            return
        verifier = verifier_from_public_key(public_key)
        try:
            replace_durably(self._path, public_key.hex().encode() + b"\n")
        except OSError as error:
            raise self._write_error(error) from None
        self._verifier = verifier

    def _write_error(self, error: OSError) -> RunError:
        return RunError(
            f"the learner's public key is unknown, and {self._path} cannot be written ({error.strerror}): "
            f"copy {self._path.name} from the run's keys folder there, or make the folder writable"
        )


def new_signer() -> Signer:
    return Signer(Ed25519PrivateKey.generate())


def ensure_signer(folder: Path, name: str) -> Signer:
    """Returns the key pair ``<name>.sign`` and ``<name>.verify`` of `folder`; creates it at the first call.

    The ``.sign`` file is secret (mode 600); copy the ``.verify`` file to every robot. Raises RunError if a file is
    damaged.
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
    """Raises RunError if the file is missing or damaged."""
    return Signer(Ed25519PrivateKey.from_private_bytes(_read_key(path)))


def load_verifier(path: Path) -> Verifier:
    """Raises RunError if the file is missing or damaged."""
    return Verifier(Ed25519PublicKey.from_public_bytes(_read_key(path)))


def _read_key(path: Path) -> bytes:
    try:
        raw = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is not a signing key ({error}); copy it from the run's keys folder") from None
    if len(raw) != 32:
        raise RunError(
            f"{path} is not a signing key: it has {len(raw)} bytes, expected 32; copy it from the run's keys folder"
        )
    return raw


RUN_ID_BYTES = 16
RUN_ID_FILE = "numbering"
EPOCH_SUFFIX = ".lives"
_log = logging.getLogger(__name__)


def run_id_of(checkpoints: Path) -> bytes:
    """Returns the id of the run whose checkpoints are in this folder; creates an id if there are none.

    Call it before the first checkpoint is written. Raises OSError if the folder cannot be written.
    """
    path = checkpoints / RUN_ID_FILE
    known = path.read_bytes() if path.exists() and any(checkpoints.glob("*.checkpoint")) else b""
    if len(known) == RUN_ID_BYTES:
        return known
    fresh = secrets.token_bytes(RUN_ID_BYTES)
    replace_durably(path, fresh)
    return fresh


def next_epoch(keys: Path, unix_s: Callable[[], float] = time.time) -> int:
    """Returns an epoch greater than all before it that used the key in the folder `keys`.

    If it cannot be stored, the next epoch may not be greater after a clock jump; this is logged.
    """
    path = keys / f"{SIGNING_KEY_NAME}{EPOCH_SUFFIX}"
    try:
        last = int(path.read_text())
    except FileNotFoundError:
        last = 0
    except (OSError, ValueError) as error:
        _log.warning("weights.epoch_unreadable file=%s: %s", path, error)
        last = 0
    epoch = max(int(unix_s()), last + 1)
    try:
        replace_durably(path, f"{epoch}\n".encode())
    except OSError as error:
        _log.warning("weights.epoch_not_stored file=%s: %s; a clock that jumps back may reorder runs", path, error)
    return epoch
