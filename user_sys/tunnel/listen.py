"""Opens a gateway's port: TCP, and beside it on loopback a Unix socket for peers on the same machine."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import zmq

from hal.errors import LeaseError
from hal.machine import make_runtime_folder
from user_sys.errors import RunError
from user_sys.tunnel.keys import KeyPair
from user_sys.tunnel.limits import TunnelLimits
from user_sys.tunnel.local import local_endpoint
from user_sys.tunnel.sockets import ZAP_DOMAIN, Socket, admit_ipv6, configure

logger = logging.getLogger(__name__)

BIND_PATIENCE_S = 3.0
BIND_RETRY_S = 0.1


def open_router(router: Socket, keys: KeyPair, limits: TunnelLimits) -> None:
    """Makes `router` a CURVE server that asks ZAP about every key.

    A connection with the routing id of a living one takes over from it: otherwise libzmq never reads it, and never
    frees what it has sent, not even when it is gone. Nobody can do that to a session, whose id is 16 random bytes.
    """
    configure(router, limits)
    router.curve_server = True
    router.curve_publickey = keys.public.encode()
    router.curve_secretkey = keys.secret.encode()
    router.zap_domain = ZAP_DOMAIN
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)


def bind(router: Socket, endpoint: str, public_key: str) -> str:
    """Listens on `endpoint` and returns it with the port that was chosen. Blocks for `BIND_PATIENCE_S` at most.

    Raises:
        RunError: the port is in use, or the address is not one of this machine.
    """
    admit_ipv6(router, endpoint)
    deadline = time.monotonic() + BIND_PATIENCE_S  # a predecessor that was killed may still be dying
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
    _bind_locally(router, endpoint, public_key)
    return endpoint


def remove_local_socket(endpoint: str, public_key: str) -> None:
    """Called while the port is bound still: afterwards the socket may be a successor's. libzmq leaves it behind."""
    if (local := local_endpoint(endpoint, public_key)) is not None:
        with contextlib.suppress(OSError):
            Path(local.removeprefix("ipc://")).unlink()


def _bind_locally(router: Socket, endpoint: str, public_key: str) -> None:
    local = local_endpoint(endpoint, public_key)
    if local is None:
        return
    try:
        make_runtime_folder()
        router.bind(local)
    except (OSError, LeaseError, zmq.ZMQError) as error:
        logger.warning("tunnel.no_local_socket path=%s: %s; local peers take TCP", local, error)
