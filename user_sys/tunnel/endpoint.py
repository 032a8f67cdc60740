"""Endpoints: validation, binding of a gateway's port, and the Unix socket for peers on the gateway's machine.

Both ends derive the path of the Unix socket from the port and the gateway's public key, so it needs no configuration.
An endpoint on another machine or behind a proxy has another path. CURVE and the keyring apply as on TCP.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
import re
import socket
import stat
import time
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from hal.errors import LeaseError
from hal.machine_folder import make_runtime_folder, runtime_folder
from user_sys.errors import ConfigError, RunError
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.sockets import ZAP_DOMAIN, ZmqSocket, configure_socket, duplicate_socket, enable_ipv6

logger = logging.getLogger(__name__)

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
BIND_TIMEOUT_S = 3.0
BIND_RETRY_S = 0.1
MAX_SOCKET_PATH_BYTES = 107
UNIX_SEND_BUFFER_BYTES = 4 << 20
_TCP = re.compile(r"tcp://(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):(\d{1,5})")
_LISTENING_FLAG = "00010000"  # __SO_ACCEPTCON in the flags of /proc/net/unix


def is_loopback(endpoint: str) -> bool:
    """Whether `endpoint` is reachable from this machine only."""
    return urlsplit(endpoint).hostname in LOOPBACK_HOSTS


def check_connect_endpoint(endpoint: str, given_as: str = "--connect") -> None:
    """Raises ConfigError unless a client can connect to `endpoint`."""
    if _port(endpoint) in (None, 0):
        raise ConfigError(
            f"{given_as} {endpoint}: expected tcp://HOST:PORT, {_hint(endpoint) or 'as the run prints at its start'}"
        )


def check_listen_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless a gateway or relay can listen on the configured `endpoint`."""
    if _port(endpoint) is None:
        hint = _hint(endpoint) or "such as tcp://0.0.0.0:5555; port 0 selects a free port"
        raise ConfigError(f"endpoint: {endpoint}: expected tcp://ADDRESS:PORT, {hint}")


def _port(endpoint: str) -> int | None:
    """The port of ``tcp://HOST:PORT``; None for another string."""
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


def unix_socket_endpoint(endpoint: str, public_key: str) -> str | None:
    """The Unix socket of the gateway with `public_key` on TCP `endpoint`; None if the endpoint has none."""
    url = urlsplit(endpoint)
    if url.scheme != "tcp" or not url.port:
        return None
    name = hashlib.blake2b(public_key.encode(), digest_size=6).hexdigest()
    path = str(runtime_folder() / f"gateway-{url.port}-{name}.sock")
    return f"ipc://{path}" if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else None


def prefer_unix_socket(endpoint: str, public_key: str) -> str:
    """The Unix socket of a gateway that listens on this machine; otherwise `endpoint`."""
    if not is_loopback(endpoint):
        return endpoint
    local = unix_socket_endpoint(endpoint, public_key)
    return local if local is not None and _is_listening(local.removeprefix("ipc://")) else endpoint


def enlarge_send_buffer(descriptor: int) -> None:
    """Enlarges the send buffer of libzmq's Unix socket `descriptor`; has no effect on TCP.

    The default of 0.2 MB makes both ends wait for each other several times in a message. The kernel may allow less than
    `UNIX_SEND_BUFFER_BYTES`.
    """
    connection = duplicate_socket(descriptor)
    if connection is not None:
        with connection:
            if connection.family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_BYTES)


def _is_listening(path: str) -> bool:
    """Whether a process of this user listens on `path`. A killed process leaves its socket file.

    This reads /proc, because a test connection would be a failed handshake at the gateway.
    """
    try:
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
            return False
        sockets = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return False
    return any(line.endswith(f" {path}") and line.split()[3] == _LISTENING_FLAG for line in sockets)


def configure_router(router: ZmqSocket, keys: KeyPair, limits: TunnelLimits) -> None:
    """Makes `router` a CURVE server that authenticates every key through ZAP.

    A new connection with the routing id of a live one replaces it. Without ROUTER_HANDOVER libzmq never reads the new
    one and never frees its bytes. A peer cannot replace a session this way: session ids are 16 random bytes.
    """
    configure_socket(router, limits)
    router.curve_server = True
    router.curve_publickey = keys.public.encode()
    router.curve_secretkey = keys.secret.encode()
    router.zap_domain = ZAP_DOMAIN
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)


def bind_endpoint(router: ZmqSocket, endpoint: str, public_key: str) -> str:
    """Listens on `endpoint` and returns it with the selected port. Blocks for at most `BIND_TIMEOUT_S`.

    Raises:
        RunError: the port is in use, or the address is not one of this machine.
    """
    enable_ipv6(router, endpoint)
    deadline = time.monotonic() + BIND_TIMEOUT_S  # a killed predecessor may hold the port a little longer
    while True:
        try:
            router.bind(endpoint)
            break
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                reason = error.strerror or str(error)
                raise RunError(
                    f"cannot listen on {endpoint} ({reason}); change --gateway.endpoint, or a relay's --endpoint"
                ) from None
        time.sleep(BIND_RETRY_S)
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    _bind_unix_socket(router, endpoint, public_key)
    return endpoint


def remove_unix_socket(endpoint: str, public_key: str) -> None:
    """Removes the socket file, which libzmq leaves. Call it while the port is bound: later it may be a successor's."""
    if (local := unix_socket_endpoint(endpoint, public_key)) is not None:
        with contextlib.suppress(OSError):
            Path(local.removeprefix("ipc://")).unlink()


def _bind_unix_socket(router: ZmqSocket, endpoint: str, public_key: str) -> None:
    local = unix_socket_endpoint(endpoint, public_key)
    if local is None:
        return
    try:
        make_runtime_folder()
        router.bind(local)
    except (OSError, LeaseError, zmq.ZMQError) as error:
        logger.warning("tunnel.unix_socket_failed path=%s: %s; local peers use TCP", local, error)
