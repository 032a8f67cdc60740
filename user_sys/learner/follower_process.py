"""A process that trains with a learner's own: ``python -m user_sys.learner.follower_process CHECKPOINTS RANK ADDRESS
CARD``.

It comes in to the learner that writes to the folder CHECKPOINTS, trains its share of the policy and does what rank 0
does, until that says that training is over; then it waits for the next one, since the learner may be started again. It
ends when the learner's first process is no more, or by SIGTERM: while it trains, not before rank 0 says so.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch

from hal.errors import HalError
from user_sys.algorithms.ranks import Ranks, find_meeting
from user_sys.errors import LinkDown, UserSysError, WireError
from user_sys.learner.device import require_gpu
from user_sys.learner.followers import MAX_ASSIGNMENT_BYTES, Assignment, Farewell, Place
from user_sys.learner.line import TRY_EVERY_S, Line, come_in
from user_sys.learner.share import Share
from user_sys.learners import ORPHANED
from user_sys.logs import configure_logging
from user_sys.store.store import StoreReader

log = logging.getLogger(__name__)

STORE_DEADLINE_S = 60.0
NOTICE_S = 2.0
MOST_WORDS = 2000


def main(argv: list[str]) -> int:
    """Trains with the learner, as often as there is one. The exit status is 0 where it was told to end while it did,
    `ORPHANED` where the learner has ended.

    `argv`: the folder of the learner's checkpoints; this process's number; its address, where the others find it; and
    which of the GPUs that it sees is its own, where it trains on one.
    """
    configure_logging()
    checkpoints, rank, address, card = argv
    place = Place(address, int(card))
    while True:
        line, told = _assignment(Path(checkpoints), int(rank))
        with _in_its_time() as asked, closing(line):
            ended_well = _train(told, int(rank), place, line)
        if asked or not ended_well:
            return 0 if ended_well else 2


@contextmanager
def _in_its_time() -> Iterator[list[int]]:
    """Signals that would end the process are noted in the list, and come to nothing until the context is left."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _assignment(checkpoints: Path, rank: int) -> tuple[Line, Assignment]:
    """Blocks until there is a learner and all of it has come."""
    while True:
        line = come_in(checkpoints, rank)
        log.info("follower.came_in rank=%d", rank)
        try:
            return line, line.receive(Assignment, MAX_ASSIGNMENT_BYTES)
        except (LinkDown, WireError) as error:
            line.close()
            log.warning("follower.not_taken %s", error)
            time.sleep(TRY_EVERY_S)


def _end_with_it(line: Line, done: threading.Event) -> None:
    """Ends the process at once when the learner's end of the line closes: by whatever end, also in a collective."""
    with suppress(LinkDown, WireError):
        line.receive(Farewell, 0)  # nothing ever comes
    if not done.is_set():
        os._exit(ORPHANED)


def _train(told: Assignment, rank: int, place: Place, line: Line) -> bool:
    """Whether it ended as it was told; the learner hears of it either way."""
    done = threading.Event()
    threading.Thread(target=_end_with_it, args=(line, done), name="learner", daemon=True).start()

    def farewell(error: str) -> None:
        done.set()
        with suppress(LinkDown):  # the learner does not hear it, and ends too
            line.send(Farewell(error[:MOST_WORDS]))

    try:
        ranks = _take_part(told, rank, place)
        farewell("")
        ranks.leave()  # with the others: NCCL lets go of none before all of its computer leave
    except (UserSysError, HalError, OSError, RuntimeError) as error:
        if RuntimeError in (type(error), type(error.__cause__)):  # of a collective
            time.sleep(NOTICE_S)  # where the learner has left it, the end of its line ends this process
        log.error("follower.failed %s: %s", type(error).__name__, error)
        farewell(f"{type(error).__name__}: {error}")
        return False
    return True


def _take_part(told: Assignment, rank: int, place: Place) -> Ranks:
    """Trains; what is left to leave."""
    config = told.config
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # as in the learner's own process
    device = told.device
    if device == "cuda":
        require_gpu(torch.cuda.device_count(), place.card)
        device = f"cuda:{place.card}"
    meeting = find_meeting(told.host, told.port, config.processes)
    ranks = Ranks(rank, config.processes, device, meeting, place.address, config.publish.collective_ctas)
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
            log.info("follower.started rank=%d", rank)
            share.obey(Path(told.checkpoints))
        finally:
            share.close()
    return ranks


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)  # torch's groups, which have ended, now and then abort a process that ends as Python would have it
