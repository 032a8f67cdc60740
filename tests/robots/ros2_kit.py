"""Starts the simulated ros2_control peer on a separate domain and controls it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from peer_kit import PeerProcess

DOMAIN = random.SystemRandom().randrange(1, 100)  # so that several test runs on a machine do not interfere
OTHER_DOMAIN = DOMAIN + 1
HERE_ONLY = {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_DOMAIN_ID": str(DOMAIN)}


class Ros2Peer(PeerProcess):
    def __init__(self, domain: int, arm: str = "three", python: str = sys.executable) -> None:
        super().__init__("ros2_peer.py", str(domain), arm, env=HERE_ONLY, python=python)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("state")
        return found


@contextlib.contextmanager
def ros2_peer(domain: int = DOMAIN) -> Iterator[Ros2Peer]:
    peer = Ros2Peer(domain)
    try:
        yield peer
    finally:
        peer.kill()
