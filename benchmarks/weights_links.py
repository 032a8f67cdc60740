"""Weights over emulated links: long links, and a bad link among seven good ones.

The gateway has a process of its own, the robots share this one.
"""

from __future__ import annotations

import itertools
import statistics
from contextlib import ExitStack
from functools import partial
from urllib.parse import urlsplit

from benchmarks.harness import Row, compare
from benchmarks.weights_ends import pushing
from benchmarks.weights_models import unrelated
from sim.network_emulator import EmulatedLink, LinkConfig

FAST = tuple(f"fast-{n}" for n in range(7))
SLOW_LINK = LinkConfig(delay_ms=20.0, up_mbit_s=1.0, down_mbit_s=1.0)
FAR_SHAPES = {f"layer.{n}": (625, 500) for n in range(8)}  # 10 MB
FLEET_SHAPES = {f"layer.{n}": (125, 250) for n in range(8)}  # 1 MB
FAR = "far"
FAR_LINKS = (
    LinkConfig(delay_ms=50.0, up_mbit_s=100.0, down_mbit_s=100.0),  # another continent
    LinkConfig(delay_ms=300.0, up_mbit_s=20.0, down_mbit_s=20.0),  # a satellite
)


def far_rows() -> list[Row]:
    """Seconds of a full push over links with a long round trip."""
    return [_far_row(config) for config in FAR_LINKS]


def _far_row(config: LinkConfig) -> Row:
    with ExitStack() as stack:
        pushes = stack.enter_context(pushing(partial(unrelated, FAR_SHAPES)))
        link = stack.enter_context(EmulatedLink(urlsplit(pushes.endpoint).netloc, config))
        robot = stack.enter_context(pushes.robot(FAR, link.endpoint))
        seconds = [pushes.seconds([FAR], [robot]) for _ in range(9)][2:]  # the first two find out how fast the link is
    size_bytes, round_trip_ms = pushes.sizes.full_bytes, 2 * config.delay_ms
    ours, bound = statistics.median(seconds), 8e-6 * size_bytes / config.down_mbit_s + 1e-3 * config.delay_ms
    what = f"{size_bytes / 1e6:.0f} MB over {config.down_mbit_s:g} Mbit/s and a round trip of {round_trip_ms:g} ms"
    return Row(9, f"full push, {what}; bound: its bytes, and half of one", "s", ours, bound, bound / ours)


def fleet_row() -> Row:
    """Do robots with a good link wait for one with a bad link? Seven take a version with and without it in turn.

    Milliseconds until the last of the seven acts with a version of 1 MB.
    """
    with ExitStack() as stack:
        pushes = stack.enter_context(pushing(partial(unrelated, FLEET_SHAPES)))
        fast = [stack.enter_context(pushes.robot(name)) for name in FAST]
        numbers = itertools.count()
        link = stack.enter_context(EmulatedLink(urlsplit(pushes.endpoint).netloc, SLOW_LINK))

        def beside_the_slow_one() -> float:
            name = f"slow-{next(numbers)}"  # the session of the former one may last until its link is empty
            with pushes.robot(name, link.endpoint) as slow:
                seconds = pushes.seconds([name, *FAST], fast)
                assert slow.version < fast[0].version, "its link is no slower than theirs"
            return 1e3 * seconds

        return compare(
            "1 MB to seven robots, until the last acts, next to one at 1 Mbit/s; bound: without it",
            beside_the_slow_one,
            lambda: 1e3 * pushes.seconds(FAST, fast),
            goal=9,
            unit="ms",
            more_is_better=False,
        )
