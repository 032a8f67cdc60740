"""Do robots with a good link wait for one with a bad link? Seven take a version with and without the eighth in turn.

The eighth's link, an emulated one, lets a megabit a second pass. The gateway has a process of its own, the robots share
this one.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import partial
from urllib.parse import urlsplit

from benchmarks.harness import Row, compare
from benchmarks.weights_ends import floats, pushing
from sim.link import Link
from sim.link_config import LinkConfig

FAST = tuple(f"fast-{n}" for n in range(7))
SLOW_LINK = LinkConfig(delay_ms=20.0, up_mbit_s=1.0, down_mbit_s=1.0)


def fleet_row() -> Row:
    """Milliseconds until the last of seven robots acts with a version of 1 MB."""
    with ExitStack() as stack:
        pushes = stack.enter_context(pushing(partial(floats, 1, 8)))
        fast = [stack.enter_context(pushes.robot(name)) for name in FAST]
        numbers = itertools.count()
        link = stack.enter_context(Link(urlsplit(pushes.endpoint).netloc, SLOW_LINK))

        def beside_the_slow_one() -> float:
            name = f"slow-{next(numbers)}"  # the session of the former one may last until its link is empty
            with pushes.robot(name, link.endpoint) as slow:
                seconds = pushes.seconds([name, *FAST], fast)
                assert slow.version < fast[0].version, "its link is no slower than theirs"
            return 1e3 * seconds

        return compare(
            "1 MB to seven robots, until the last acts, beside one at 1 Mbit/s; bound: without it",
            beside_the_slow_one,
            lambda: 1e3 * pushes.seconds(FAST, fast),
            goal=9,
            unit="ms",
            more_is_better=False,
        )
