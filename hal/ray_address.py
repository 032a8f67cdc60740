"""Whether a Ray cluster answers at an address, and takes this computer's token. Ray itself tries an address where none
does for many minutes, and of a token that is refused, or not there, it prints a page.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

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


def require_token(address: str, environment: Mapping[str, str]) -> None:
    """Asks with the token that `environment` names, as Ray documents it. Blocks for a second or two, at most for
    `ANSWER_WITHIN_S`. What it cannot tell is Ray's to judge, as is an address without a port.

    Ray's own client asks, in a process of its own: without a token it does not raise, but ends its process.

    Raises:
        HalError: the cluster refuses the token, or there is none.
    """
    if host_and_port(address) is None:
        return
    argv = [sys.executable, "-c", _ASK, address]
    try:
        asked = subprocess.run(argv, env=environment, capture_output=True, timeout=ANSWER_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        return
    said = asked.stderr.decode(errors="replace") if asked.returncode else ""
    named = "" if environment.get("RAY_AUTH_TOKEN") else environment.get("RAY_AUTH_TOKEN_PATH", "")
    if (why := next((text for sign, text in _REFUSALS.items() if sign in said), None)) is not None:
        raise HalError(f"the Ray cluster at {address} {why}{f' in {named}' if named else ''}: {_MEND}")


_ASK = """
import sys
from ray._raylet import AuthenticationTokenLoader, GcsClient
AuthenticationTokenLoader.instance().has_token()
GcsClient(address=sys.argv[1])
"""
_REFUSALS = {
    "couldn't find an authentication token": "wants a token, and none is given",
    "cannot be opened or is empty": "wants a token, and there is none",
    "AuthenticationError": "refuses the token",
}
"""By what is said of them; the first counts."""
_MEND = (
    "copy the file that `user-sys node head --token FILE` wrote, and give the copy as --token or RAY_AUTH_TOKEN_PATH"
)
