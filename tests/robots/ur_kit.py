"""Starts the simulated controller, each on an address of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from peer_kit import REPLY_S, PeerProcess, free_host


class SimulatedController(PeerProcess):
    def __init__(self) -> None:
        self.host = free_host()
        super().__init__("ur_peer.py", self.host)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("state")
        return found

    def begun(self, command: int) -> int:
        """The number of times that the control program received that command."""
        count: int = self.state["commands"].get(str(command), 0)
        return count

    def set(self, name: str, value: Any) -> None:
        self.ask(f"set {name} {json.dumps(value)}")

    def reset(self) -> None:
        self.ask("reset")

    def unplug(self) -> None:
        self.send("unplug")
        self.process.wait(REPLY_S)


@contextlib.contextmanager
def simulated_controller() -> Iterator[SimulatedController]:
    controller = SimulatedController()
    try:
        yield controller
    finally:
        controller.kill()
