"""The short way between a gateway and the peers on its own machine: a Unix socket beside its TCP port.

Both ends derive the socket's path from the port and the gateway's public key, so that nothing has to be configured, and
an endpoint that leads through a proxy or to another machine is never short-cut. CURVE and the ring of keys apply as on
TCP: the path is a convenience, not a credential.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

from hal.machine import runtime_folder
from user_sys.errors import ConfigError
from user_sys.tunnel.tcp_state import duplicate

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_SOCKET_PATH_BYTES = 107
BUFFER_BYTES = 4 << 20
_TCP = re.compile(r"tcp://(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):(\d{1,5})")
_LISTENING = "00010000"  # __SO_ACCEPTCON among the flags of /proc/net/unix


def require_dialled(endpoint: str, given_as: str = "--connect") -> None:
    """Raises ConfigError unless an edge or a relay can dial `endpoint`."""
    if _port(endpoint) in (None, 0):
        raise ConfigError(
            f"{given_as} {endpoint}: expected tcp://HOST:PORT, {_hint(endpoint) or 'as the run says at its start'}"
        )


def require_listening(endpoint: str) -> None:
    """Raises ConfigError where no gateway or relay could listen on `endpoint`, which was configured."""
    if _port(endpoint) is None:
        hint = _hint(endpoint) or "such as tcp://0.0.0.0:5555; port 0 takes a free one"
        raise ConfigError(f"endpoint: {endpoint}: expected tcp://ADDRESS:PORT, {hint}")


def _port(endpoint: str) -> int | None:
    """None where it is not ``tcp://HOST:PORT``."""
    found = _TCP.fullmatch(endpoint)
    if found is None or int(found[2]) >= 1 << 16 or (found[1].startswith("[") and not _is_ipv6(found[1][1:-1])):
        return None
    return int(found[2])


def _hint(endpoint: str) -> str:
    return "an IPv6 address in brackets, such as tcp://[::1]:5555" if endpoint.count(":") > 2 else ""


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def local_endpoint(endpoint: str, public_key: str) -> str | None:
    """The Unix socket of the gateway with `public_key` that listens on TCP `endpoint`; None where it has none."""
    url = urlsplit(endpoint)
    if url.scheme != "tcp" or not url.port:
        return None
    name = hashlib.blake2b(public_key.encode(), digest_size=6).hexdigest()
    path = str(runtime_folder() / f"gateway-{url.port}-{name}.sock")
    return f"ipc://{path}" if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else None


def nearest(endpoint: str, public_key: str) -> str:
    """`endpoint`, or the Unix socket of its gateway when that is here and somebody listens."""
    if urlsplit(endpoint).hostname not in LOOPBACK:
        return endpoint
    local = local_endpoint(endpoint, public_key)
    return local if local is not None and _listens(local.removeprefix("ipc://")) else endpoint


def widen(descriptor: int) -> None:
    """Lets libzmq's Unix socket `descriptor` hold messages that its other end has not read yet; TCP does so by itself.

    Otherwise it holds a fifth of a megabyte: both ends then wait for each other several times a message. The kernel may
    allow less than `BUFFER_BYTES`.
    """
    connection = duplicate(descriptor)
    if connection is not None:
        with connection:
            if connection.family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def _listens(path: str) -> bool:
    """Whether a process of this user listens on `path`; a killed one leaves its socket behind.

    Asked of the kernel, because a connection that only looks would be a failed handshake to the gateway.
    """
    try:
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
            return False
        sockets = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return False
    return any(line.endswith(f" {path}") and line.split()[3] == _LISTENING for line in sockets)
