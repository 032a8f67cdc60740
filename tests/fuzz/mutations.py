"""Mutations of inputs that change one field and keep the rest valid.

Most parsers decode in C, without coverage for libFuzzer, and random changes rarely pass their first check.
"""

from __future__ import annotations

import operator
import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

Mutate = Callable[[bytes, random.Random], bytes]
"""Changes an input. Raises any exception for an input of another form, which is then changed as bytes."""

_PREFIX = struct.Struct("<4sII")
_ALIGN_BYTES = 64
_ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 63, 64, 255, 1 << 16, 1 << 29, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53),
    *((1 << 62) - 1, (1 << 63) - 1, (1 << 64) - 1, -(1 << 31), -(1 << 63)),
    *(0.0, -1.0, 1e308, float("inf"), float("nan"), True, False, None, b"", b"\0" * 40, [], {}, [[]], [0, 1 << 30]),
    *("", "a", "../../x", "/etc/passwd", "a\0b", "\n", "é" * 200, "x" * 5000, "{0}", "float64", "uint8", "object"),
)


def value(given: Any, rng: random.Random) -> Any:
    """`given`, a tree of dicts and lists, with a leaf or a branch changed, repeated or removed."""
    if not isinstance(given, (dict, list)) or not given or rng.random() < 0.05:
        return _leaf(given, rng)
    keys = list(given) if isinstance(given, dict) else list(range(len(given)))
    key = rng.choice(keys)
    changed: Any = dict(given) if isinstance(given, dict) else list(given)
    action = rng.random()
    if action < 0.1:
        del changed[key]
    elif action < 0.15 and isinstance(given, list):
        changed.insert(key, given[rng.choice(keys)])
    elif action < 0.25:
        changed[key] = given[rng.choice(keys)]
    else:
        changed[key] = value(given[key], rng)
    return changed


def _leaf(given: Any, rng: random.Random) -> Any:
    if isinstance(given, (str, bytes)) and given and rng.random() < 0.5:
        at = rng.randrange(len(given))
        new = chr(rng.randrange(0x250)) if isinstance(given, str) else bytes([rng.randrange(256)])
        return given[:at] + new + given[at + rng.randrange(2) :]  # type: ignore[operator]
    if isinstance(given, int) and not isinstance(given, bool) and rng.random() < 0.5:
        return max(-(1 << 63), min((1 << 64) - 1, given + rng.choice((-2, -1, 1, 2, rng.randrange(-300, 300)))))
    return rng.choice(_ODD)


def msgpack(raw: bytes, rng: random.Random) -> bytes:
    return msgspec.msgpack.encode(value(msgspec.msgpack.decode(raw), rng))


def json(raw: bytes, rng: random.Random) -> bytes:
    return msgspec.json.encode(value(msgspec.json.decode(raw), rng))


def yaml(raw: bytes, rng: random.Random) -> bytes:
    return msgspec.yaml.encode(value(msgspec.yaml.decode(raw), rng))


def after_first(mutate: Mutate) -> Mutate:
    """For inputs whose first byte belongs to the target."""
    return lambda raw, rng: raw[:1] + mutate(raw[1:], rng)


def packet(raw: bytes, rng: random.Random) -> bytes:
    """For packets of `user_sys.codec`: it mostly corrects the lengths."""
    magic, record_bytes, layout_bytes = _PREFIX.unpack_from(raw)
    middle, end = _PREFIX.size + record_bytes, _PREFIX.size + record_bytes + layout_bytes
    record, layout, arrays = raw[_PREFIX.size : middle], raw[middle:end], raw[-(-end // _ALIGN_BYTES) * _ALIGN_BYTES :]
    part = rng.randrange(3)
    if part == 0:
        record = msgpack(record, rng)
    elif part == 1:
        layout = msgpack(layout, rng)
        if rng.random() < 0.8:
            arrays = arrays[: _size(layout)].ljust(_size(layout), b"\0")
    elif arrays:
        at = rng.randrange(len(arrays))
        arrays = arrays[:at] + bytes([rng.randrange(256)]) + arrays[at + 1 :]
    head = _PREFIX.pack(magic, len(record), len(layout)) + record + layout
    return head + bytes(-len(head) % _ALIGN_BYTES) + arrays


def _size(layout: bytes) -> int:
    """The padded arrays, up to the size limit of an input."""
    total = 0
    for _, dtype, shape in msgspec.msgpack.decode(layout):
        size = {"bool": 1}.get(dtype) or int("".join(filter(str.isdigit, dtype))) // 8
        for length in shape:
            size *= operator.index(length)  # the lengths before determine their number
        total += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return max(0, min(total, 8192))
