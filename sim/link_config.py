"""What an emulated link does, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

WayName = Literal["up", "down"]


@dataclass(frozen=True)
class LinkBreak:
    """The end of one connection once exactly `at_byte` bytes have passed in direction `way`.

    ``reset`` breaks it for both ends; ``silence`` leaves it open, and nothing passes any more in either direction;
    ``mute`` goes on taking what comes in direction `way`, delivers none of it, and lets the other direction pass.
    """

    at_byte: int
    way: WayName = "up"
    how: Literal["reset", "silence", "mute"] = "reset"


@dataclass(frozen=True)
class LinkEvent:
    """Something that happens to a link, `at_s` seconds after its first connection, and lasts `for_s`.

    Attributes:
        what: ``cut``: nothing passes in the direction `way`. ``reset``: every connection breaks, and so do new ones
            while it lasts. ``half-open``: the gateway's side of every connection breaks and the edge is not told; new
            ones are accepted and never answered.
    """

    at_s: float
    for_s: float = 0.0
    what: Literal["cut", "reset", "half-open"] = "cut"
    way: Literal["both", "up", "down"] = "both"


@dataclass(frozen=True)
class LinkConfig:
    """What a link does to what passes. ``up`` is from whoever dials to where the link leads.

    Attributes:
        delay_ms: one way; a round trip takes twice that.
        jitter_ms: up to so much more, drawn anew for each read; order is kept.
        up_mbit_s, down_mbit_s: shared by all connections; 0 does not limit.
        loss: share of packets that are lost, each a stall of its connection for `stall_ms`.
        resets_per_min: connections that break, on average, at random times.
        breaks: of the first connections, one each, in order.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    up_mbit_s: float = 0.0
    down_mbit_s: float = 0.0
    loss: float = 0.0
    stall_ms: float = 200.0
    resets_per_min: float = 0.0
    seed: int = 0
    events: tuple[LinkEvent, ...] = ()
    breaks: tuple[LinkBreak, ...] = ()

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms", "up_mbit_s", "down_mbit_s", "stall_ms", "resets_per_min"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"link: {name} must not be negative")
        if not 0 <= self.loss < 1:
            raise ValueError("link: loss is a share of packets, from 0 to below 1")


def link_config(settings: Mapping[str, Any]) -> LinkConfig:
    """The configuration with plain `settings`; raises ValueError for a key or value that it has not."""
    config = msgspec.convert(settings, LinkConfig)
    parts: list[tuple[Mapping[str, Any], type]] = [(settings, LinkConfig)]
    for key, part in (("events", LinkEvent), ("breaks", LinkBreak)):
        parts += [(given, part) for given in settings.get(key, ())]
    for given, kind in parts:
        if unknown := given.keys() - {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(f"{kind.__name__} has no {min(unknown)!r}")
    return config
