"""How every process of a run logs: one line an event, to standard error, of which its supervisor keeps a file."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"


def configure_logging(verbose: bool = False) -> None:
    """Sets the root logger up once; later calls change its level only."""
    logging.basicConfig(format=FORMAT)
    logging.getLogger().setLevel(logging.DEBUG if verbose else logging.INFO)
