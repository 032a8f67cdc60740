"""``HOST:PORT`` as people write it, an IPv6 address in brackets: ``[fd00::7]:30004``."""

from __future__ import annotations


def host_and_port(address: str) -> tuple[str, int] | None:
    """None where `address` is none; whether there are such a host and port is not looked at."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return (host, int(port)) if host and port.isdecimal() else None
