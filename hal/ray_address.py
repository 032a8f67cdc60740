"""Whether a Ray cluster answers at an address: Ray itself tries one where none does for many minutes."""

from __future__ import annotations

import os
import socket

from hal.address import host_and_port
from hal.errors import HalError

CONNECT_WITHIN_S = 5.0
ANSWER_WITHIN_S = 30.0
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client begins, with empty settings (RFC 9113, 3.4). gRPC, which Ray speaks, answers with its own settings."""
_HEAD_BYTES, _TYPE_AT, _SETTINGS = 9, 3, 4  # of a frame (RFC 9113, 4.1)


def require_cluster(address: str) -> None:
    """Blocks for the two limits of time at most. An address without a port, such as ``auto``, is Ray's to judge.

    Raises:
        HalError: nothing answers at ``HOST:PORT``, or something that is no Ray cluster.
    """
    if (place := host_and_port(address.removeprefix("ray://"))) is None:
        return
    try:
        with socket.create_connection(place, timeout=CONNECT_WITHIN_S) as link:
            if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
                return
            link.settimeout(ANSWER_WITHIN_S)
            link.sendall(_HELLO)
            with link.makefile("rb") as answer:
                head = answer.read(_HEAD_BYTES)
    except (OSError, OverflowError, ValueError) as error:  # the last two: no port, and no name of a host
        raise HalError(f"no Ray cluster answers at {address}: {error}") from error
    if len(head) < _HEAD_BYTES or head[_TYPE_AT] != _SETTINGS:
        raise HalError(f"what listens at {address} is no Ray cluster")
