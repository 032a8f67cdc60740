"""The states of a tunnel at both of its ends, and every transition that is allowed; docs/tunnel.md draws them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from user_sys.errors import TunnelError


class TunnelState(enum.Enum):
    """A client's tunnel."""

    IDLE = "idle"  # not started
    CONNECTING = "connecting"  # dials, shows its key, says Hello on each channel
    OPEN = "open"  # welcome on all channels
    LOST = "lost"  # waits before it dials again
    REFUSED = "refused"  # the gateway will never have us; a person must act
    CLOSED = "closed"


class SessionState(enum.Enum):
    """A session as the gateway sees it."""

    GREETED = "greeted"  # Hello on the control channel was accepted; the other channels are awaited
    OPEN = "open"
    ENDED = "ended"


TUNNEL: Mapping[TunnelState, frozenset[TunnelState]] = {
    TunnelState.IDLE: frozenset({TunnelState.CONNECTING, TunnelState.CLOSED}),
    TunnelState.CONNECTING: frozenset({TunnelState.OPEN, TunnelState.LOST, TunnelState.REFUSED, TunnelState.CLOSED}),
    TunnelState.OPEN: frozenset({TunnelState.LOST, TunnelState.REFUSED, TunnelState.CLOSED}),
    TunnelState.LOST: frozenset({TunnelState.CONNECTING, TunnelState.CLOSED}),
    TunnelState.REFUSED: frozenset({TunnelState.CLOSED}),
    TunnelState.CLOSED: frozenset(),
}
SESSION: Mapping[SessionState, frozenset[SessionState]] = {
    SessionState.GREETED: frozenset({SessionState.OPEN, SessionState.ENDED}),
    SessionState.OPEN: frozenset({SessionState.ENDED}),
    SessionState.ENDED: frozenset(),
}

State = TypeVar("State", bound=enum.Enum)


class StateMachine(Generic[State]):
    """Holds a state and lets it change only as its table says. The caller sees to locking."""

    def __init__(self, name: str, initial: State, table: Mapping[State, frozenset[State]]) -> None:
        self.state = initial
        self._name, self._table = name, table

    def enter(self, state: State) -> None:
        """Raises TunnelError when the table knows no way from the present state to `state`."""
        if state not in self._table[self.state]:
            raise TunnelError(f"{self._name} cannot go from {self.state.value} to {state.value}")
        self.state = state
