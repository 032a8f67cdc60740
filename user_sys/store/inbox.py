"""Labels for a store that another process writes: small files in the store's folder, which that process takes in.

A post is durable before `post` returns, and is removed once its labels are durable in the log. A crash in between
stores them twice, which changes nothing: a label says the same again. Several processes may post; the writer alone
takes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hal.durable import remove_durably, replace_durably
from hal.undecodable import UNDECODABLE
from user_sys.errors import StoreError
from user_sys.store.labels import Label, encode_label

INBOX = "inbox"
SUFFIX = ".labels"
MAX_POST_BYTES = 8 << 20
POLL_S = 0.1

_DECODER = msgspec.msgpack.Decoder(tuple[Label, ...])


def post(store: Path, labels: Sequence[Label]) -> Path:
    """Leaves `labels` for the writer of `store`; returns the file, which is gone once they are stored.

    Raises:
        StoreError: they are more than `MAX_POST_BYTES`.
        WireError: one of them says what no label may.
        OSError: the folder cannot be written.
    """
    for each in labels:
        encode_label(each)
    raw = msgspec.msgpack.encode(tuple(labels))
    if len(raw) > MAX_POST_BYTES:
        raise StoreError(f"labels of {len(raw)} bytes at once; at most {MAX_POST_BYTES}: label fewer episodes or steps")
    file = store / INBOX / f"{time.time_ns():020d}-{secrets.token_hex(4)}{SUFFIX}"
    replace_durably(file, raw)
    return file


def posts(store: Path) -> list[Path]:
    """What waits to be taken in, oldest first."""
    return sorted((store / INBOX).glob(f"[0-9]*{SUFFIX}"))


def read_post(file: Path) -> tuple[Label, ...]:
    """The labels in a post. Raises StoreError: it holds none."""
    try:
        with file.open("rb") as stream:
            labels: tuple[Label, ...] = _DECODER.decode(stream.read(MAX_POST_BYTES + 1))
    except UNDECODABLE as error:
        raise StoreError(f"{file} holds no labels: {error}; delete it") from None
    return labels


def withdraw(file: Path) -> None:
    """Removes a post, durably: its labels are stored."""
    remove_durably(file)


def await_taken(file: Path, timeout_s: float) -> bool:
    """Blocks until the post at `file` is taken in; False where that takes longer than `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
