"""A follower's process: ``python -m user_sys.learner.follower_process DESCRIPTOR``, started by `followers` alone.

It trains its share of a learner's policy, does what rank 0 does, and ends when that says so, or is no more.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import torch

from hal.errors import HalError
from hal.undecodable import UNDECODABLE
from user_sys.algorithms.ranks import Ranks
from user_sys.errors import RunError, UserSysError
from user_sys.learner.followers import Assignment
from user_sys.learner.share import Share
from user_sys.logs import configure_logging
from user_sys.store.store import StoreReader

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 200 << 10
TOLD_WITHIN_S = 30.0
STORE_DEADLINE_S = 60.0


def main(argv: list[str]) -> int:
    """Trains with the process at the other end of the socket `argv` names. The exit status is 0 once that has ended
    the training."""
    configure_logging()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; rank 0 says when to end
        signal.signal(number, signal.SIG_IGN)
    line = socket.socket(fileno=int(argv[0]))
    try:
        assignment = _assignment(line)
        threading.Thread(target=_end_with_it, args=(line,), name="learner", daemon=True).start()
        _train(assignment)
    except (UserSysError, HalError, OSError, RuntimeError) as error:  # the last: a collective that another has left
        log.error("follower.failed %s: %s", type(error).__name__, error)
        return 2
    return 0


def _assignment(line: socket.socket) -> Assignment:
    line.settimeout(TOLD_WITHIN_S)
    try:
        return msgspec.msgpack.decode(line.recv(MAX_RECORD_BYTES), type=Assignment)
    except (*UNDECODABLE, TimeoutError) as error:
        raise RunError(f"no learner said what to train; this process is started by one, not by hand: {error}") from None


def _end_with_it(line: socket.socket) -> None:
    """Ends the process at once when the learner's end of the line closes: by whatever end, also in a collective."""
    line.settimeout(None)  # for as long as the learner lives, whose end wakes this up
    try:
        line.recv(1)
    finally:
        os._exit(1)


def _train(told: Assignment) -> None:
    config = told.config
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # as in the learner's own process
    ranks = Ranks(told.rank, config.processes, told.device, Path(told.meeting), config.publish.collective_ctas)
    with StoreReader.open(Path(told.store), wait_s=STORE_DEADLINE_S) as reader:
        share = Share(
            config,
            told.spec,
            reader,
            features=told.features,
            seed=told.seed,
            device=str(ranks.device),
            ranks=ranks,
        )
        try:
            log.info("follower.started rank=%d", told.rank)
            share.obey(Path(told.checkpoints))
        finally:
            share.close()
    ranks.leave()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
