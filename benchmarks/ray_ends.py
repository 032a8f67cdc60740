"""A peer for `benchmarks.tunnel`: Ray as distributed learners use it, an actor that is called, unencrypted.

A request is a call of the actor's method, whose answer is awaited. A stream is a call for each message, which Ray puts
into its object store, as it does with all large arguments; the last answer is awaited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEADLINE_S = 60.0
OBJECT_STORE_BYTES = 500_000_000
UNDER_WAY = 16
ABSENT = "not installed (the sim extra has it)"


class Sink:
    """The actor: takes messages."""

    def take(self, message: bytes) -> int:
        return len(message)


class RayPeer:
    """Calls to a `Sink`."""

    def __init__(self, ray: Any, sink: Any) -> None:
        self._ray, self._sink = ray, sink
        self.round_trip(b"warm")

    def round_trip(self, request: bytes) -> None:
        self._ray.get(self._sink.take.remote(request), timeout=DEADLINE_S)

    def stream(self, message: bytes, count: int) -> None:
        """`UNDER_WAY` messages at most are on their way, so that the object store never fills up."""
        calls: list[Any] = []
        for _ in range(count):
            calls.append(self._sink.take.remote(message))
            if len(calls) == UNDER_WAY:
                self._ray.get(calls.pop(0), timeout=DEADLINE_S)
        self._ray.get(calls, timeout=DEADLINE_S)


@contextmanager
def ray_peer() -> Iterator[RayPeer | None]:
    """A Ray of its own on this machine, with one actor; None if Ray is not installed."""
    try:
        import ray
    except ImportError:
        yield None
        return
    ray.init(
        address="local",  # not one that happens to run here
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        yield RayPeer(ray, ray.remote(Sink).remote())
    finally:
        ray.shutdown()
