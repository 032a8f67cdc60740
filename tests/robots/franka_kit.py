"""Starts a simulated FR3 in a separate process and controls it."""

from __future__ import annotations

import json
from typing import Any

from peer_kit import PeerProcess, free_host


class FrankaSimulator(PeerProcess):
    def __init__(self) -> None:
        self.host = free_host()
        super().__init__("franka_peer.py", self.host)

    def set(self, name: str, value: Any) -> None:
        self.ask(f"set {name} {json.dumps(value)}")

    def angles(self) -> list[float]:
        """The joint angles (7,) of the arm, rad."""
        found: list[float] = self.ask("angles")
        return found
