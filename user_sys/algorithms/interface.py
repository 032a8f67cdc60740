"""Which network interface of this computer has an address: gloo and NCCL are told an interface, and listen on it."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Iterator

from hal.resource import local_node
from user_sys.errors import RunError

_SIOCGIFCONF = 0x8912  # linux/sockios.h: all IPv4 addresses, as pairs of a name of 16 bytes and a sockaddr of 24
_RECORD = struct.Struct("16s4x4s16x")
_MOST = 256
_LOOPBACK_NET = "127."


def interface_of(address: str) -> str:
    """The name of the interface with the IPv4 `address`. All of 127.0.0.0/8 is the loopback interface's.

    Raises:
        RunError: none of this computer has it.
    """
    has = list(_addresses())
    for name, own in has:
        if own == address or (address.startswith(_LOOPBACK_NET) and own.startswith(_LOOPBACK_NET)):
            return name
    there = ", ".join(sorted(own for _, own in has))
    raise RunError(f"no network interface of {local_node()} has the address {address}; there is {there}")


def _addresses() -> Iterator[tuple[str, str]]:
    """Names and addresses. A name that ends in ``:LABEL`` is the interface's before it."""
    room = array.array("B", bytes(_MOST * _RECORD.size))
    where, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", size, where))
    used, _ = struct.unpack("iP", answer)
    for name, address in _RECORD.iter_unpack(room.tobytes()[:used]):
        yield name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address)
