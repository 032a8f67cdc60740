"""A process that trains with a learner's own: ``python -m user_sys.learner.worker_process CHECKPOINTS RANK ADDRESS
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
from user_sys.algorithms.distributed import TrainingGroup, join_rendezvous
from user_sys.errors import LinkDown, UserSysError, WireError
from user_sys.learner.config import require_gpu
from user_sys.learner.trainer import RankTrainer
from user_sys.learner.workers import (
    MAX_SPEC_BYTES,
    RETRY_INTERVAL_S,
    PeerConnection,
    RankAddress,
    TrainingSpec,
    WorkerExit,
    join_learner,
)
from user_sys.logs import configure_logging
from user_sys.robot_records import EXIT_ORPHANED
from user_sys.store.store import StoreReader

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 60.0
FAILURE_DETECTION_S = 2.0
MAX_ERROR_CHARS = 2000


def main(argv: list[str]) -> int:
    """Trains with the learner, as often as there is one. The exit status is 0 where it was told to end while it did,
    `EXIT_ORPHANED` where the learner has ended.

    `argv`: the folder of the learner's checkpoints; this process's number; its address, where the others find it; and
    which of the GPUs that it sees is its own, where it trains on one.
    """
    configure_logging()
    checkpoints, rank, address, card = argv
    place = RankAddress(address, int(card))
    while True:
        line, told = _receive_spec(Path(checkpoints), int(rank))
        with _deferred_signals() as asked, closing(line):
            ended_well = _train(told, int(rank), place, line)
        if asked or not ended_well:
            return 0 if ended_well else 2


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
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


def _receive_spec(checkpoints: Path, rank: int) -> tuple[PeerConnection, TrainingSpec]:
    """Blocks until there is a learner and all of it has come."""
    while True:
        line = join_learner(checkpoints, rank)
        log.info("follower.came_in rank=%d", rank)
        try:
            return line, line.receive(TrainingSpec, MAX_SPEC_BYTES)
        except (LinkDown, WireError) as error:
            line.close()
            log.warning("follower.not_taken %s", error)
            time.sleep(RETRY_INTERVAL_S)


def _exit_with_learner(line: PeerConnection, done: threading.Event) -> None:
    """Ends the process at once when the learner's end of the line closes: by whatever end, also in a collective."""
    with suppress(LinkDown, WireError):
        line.receive(WorkerExit, 0)  # nothing ever comes
    if not done.is_set():
        os._exit(EXIT_ORPHANED)


def _train(told: TrainingSpec, rank: int, place: RankAddress, line: PeerConnection) -> bool:
    """Whether it ended as it was told; the learner hears of it either way."""
    done = threading.Event()
    threading.Thread(target=_exit_with_learner, args=(line, done), name="learner", daemon=True).start()

    def farewell(error: str) -> None:
        done.set()
        with suppress(LinkDown):  # the learner does not hear it, and ends too
            line.send(WorkerExit(error[:MAX_ERROR_CHARS]))

    try:
        ranks = _run_rank(told, rank, place)
        farewell("")
        ranks.destroy()  # with the others: NCCL lets go of none before all of its computer leave
    except (UserSysError, HalError, OSError, RuntimeError) as error:
        if RuntimeError in (type(error), type(error.__cause__)):  # of a collective
            time.sleep(FAILURE_DETECTION_S)  # where the learner has left it, the end of its line ends this process
        log.error("follower.failed %s: %s", type(error).__name__, error)
        farewell(f"{type(error).__name__}: {error}")
        return False
    return True


def _run_rank(told: TrainingSpec, rank: int, place: RankAddress) -> TrainingGroup:
    """Trains; what is left to leave."""
    config = told.config
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # as in the learner's own process
    device = told.device
    if device == "cuda":
        require_gpu(torch.cuda.device_count(), place.gpu)
        device = f"cuda:{place.gpu}"
    meeting = join_rendezvous(told.host, told.port, config.processes)
    ranks = TrainingGroup(rank, config.processes, device, meeting, place.address, config.publish.collective_ctas)
    with StoreReader.open(Path(told.store), wait_s=STORE_TIMEOUT_S) as reader:
        share = RankTrainer(
            config,
            told.spec,
            reader,
            features=told.features,
            seed=told.seed,
            device=str(ranks.device),
            group=ranks,
        )
        try:
            log.info("follower.started rank=%d", rank)
            share.run_worker_loop(Path(told.checkpoints))
        finally:
            share.close()
    return ranks


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)  # torch's groups, which have ended, now and then abort a process that ends as Python would have it
