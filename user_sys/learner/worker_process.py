"""A worker process of a learner: ``python -m user_sys.learner.worker_process CHECKPOINTS RANK ADDRESS GPU``.

It joins the learner that writes to CHECKPOINTS and follows rank 0 until training ends. Then it waits for the next
learner, because that may be restarted. It ends with the learner's rank 0, or by SIGTERM; during training a SIGTERM
takes effect when rank 0 ends the training.
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
    """Trains with each learner in turn. Returns 0 if it was asked to end.

    The process exits with `EXIT_ORPHANED` if the learner has ended. `argv`: the learner's checkpoints; the rank;
    the address at which the other ranks reach it; and the index of its GPU among the visible ones.
    """
    configure_logging()
    checkpoints, rank, address, gpu = argv
    rank_address = RankAddress(address, int(gpu))
    while True:
        connection, spec = _receive_spec(Path(checkpoints), int(rank))
        with _deferred_signals() as received_signals, closing(connection):
            ended_well = _train(spec, int(rank), rank_address, connection)
        if received_signals or not ended_well:
            return 0 if ended_well else 2


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Records signals that would end the process, and defers them until the context ends."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _receive_spec(checkpoints: Path, rank: int) -> tuple[PeerConnection, TrainingSpec]:
    """Blocks until a learner with all its workers has sent the spec."""
    while True:
        connection = join_learner(checkpoints, rank)
        log.info("worker.joined rank=%d", rank)
        try:
            return connection, connection.receive(TrainingSpec, MAX_SPEC_BYTES)
        except (LinkDown, WireError) as error:
            connection.close()
            log.warning("worker.not_accepted %s", error)
            time.sleep(RETRY_INTERVAL_S)


def _exit_with_learner(connection: PeerConnection, done: threading.Event) -> None:
    """Ends the process at once when the learner closes the connection, also within a collective."""
    with suppress(LinkDown, WireError):
        connection.receive(WorkerExit, 0)  # no message ever arrives
    if not done.is_set():
        os._exit(EXIT_ORPHANED)


def _train(spec: TrainingSpec, rank: int, rank_address: RankAddress, connection: PeerConnection) -> bool:
    """Trains, and reports the end to the learner. Returns False after an error."""
    done = threading.Event()
    threading.Thread(target=_exit_with_learner, args=(connection, done), name="learner", daemon=True).start()

    def report_end(error: str) -> None:
        done.set()
        with suppress(LinkDown):  # the learner has ended too
            connection.send(WorkerExit(error[:MAX_ERROR_CHARS]))

    try:
        ranks = _run_rank(spec, rank, rank_address)
        report_end("")
        ranks.destroy()  # together with the others: NCCL waits for all processes of the computer
    except (UserSysError, HalError, OSError, RuntimeError) as error:
        if RuntimeError in (type(error), type(error.__cause__)):  # from a collective
            time.sleep(
                FAILURE_DETECTION_S
            )  # if the learner has left the collective, the end of its connection ends this process
        log.error("worker.failed %s: %s", type(error).__name__, error)
        report_end(f"{type(error).__name__}: {error}")
        return False
    return True


def _run_rank(spec: TrainingSpec, rank: int, rank_address: RankAddress) -> TrainingGroup:
    """Trains, and returns the group to destroy."""
    config = spec.config
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # as in the learner's process
    device = spec.device
    if device == "cuda":
        require_gpu(torch.cuda.device_count(), rank_address.gpu)
        device = f"cuda:{rank_address.gpu}"
    store = join_rendezvous(spec.host, spec.port, config.processes)
    ranks = TrainingGroup(rank, config.processes, device, store, rank_address.address, config.publish.collective_ctas)
    with StoreReader.open(Path(spec.store), wait_s=STORE_TIMEOUT_S) as reader:
        trainer = RankTrainer(
            config,
            spec.spec,
            reader,
            features=spec.features,
            seed=spec.seed,
            device=str(ranks.device),
            group=ranks,
        )
        try:
            log.info("worker.started rank=%d", rank)
            trainer.run_worker_loop(Path(spec.checkpoints))
        finally:
            trainer.close()
    return ranks


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)  # torch sometimes aborts a process with destroyed groups during Python's own clean-up
