"""The process that labels a run's episodes as they end: ``python -m user_sys.run.reward_process RUN``.

It reads the store's files and queues labels for the gateway, which stores them. What it has labelled is in the store,
so a restart continues. At the end of the run it labels the episodes until then.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from user_sys.errors import LinkDown, StoreError, WireError
from user_sys.interchange.episodes import EpisodeFilter
from user_sys.logs import run_process
from user_sys.plugins import load_reward
from user_sys.rewards.labelling import EpisodeLabeller
from user_sys.run.config import open_run_folder
from user_sys.store.labels import Label, queue_labels
from user_sys.store.store import StoreReader

log = logging.getLogger(__name__)

POLL_S = 0.5
STORE_TIMEOUT_S = 60.0


def main(argv: list[str]) -> int:
    """Labels until it is stopped. `argv`: the run's folder."""
    return run_process("reward", lambda stop: _label(Path(argv[0]), stop))


def _label(run: Path, stop: threading.Event) -> None:
    folder, config, _ = open_run_folder(run)
    reward = load_reward(config.rewards)
    with StoreReader.open(folder.store, wait_s=STORE_TIMEOUT_S) as store:
        selection = EpisodeFilter(sources=config.rewards.sources)
        labeller = EpisodeLabeller(store, reward, config.rewards.kind, selection)
        log.info("reward.started labeller=%s", labeller.labeller)
        waiting = list[Label]()
        while not stop.wait(POLL_S):
            label_new(labeller, folder.store, waiting)
        label_new(labeller, folder.store, waiting)


def label_new(labeller: EpisodeLabeller, store: Path, waiting: list[Label]) -> None:
    """Queues the labels of the episodes that have ended since the last call.

    Args:
        waiting: labels of an episode that a full disk has refused. They are queued first; no other episode is evaluated
            before.
    """
    if waiting and not _queue(store, waiting):
        return
    try:
        for episode, found, labels in labeller.new_labels():
            waiting += labels
            if not _queue(store, waiting):
                return
            log.info("reward.labelled episode=%s success=%s probability=%s", episode.episode, found.success,
                     found.probability)  # fmt: skip
    except LinkDown as error:
        log.warning("reward.waiting %s", error)


def _queue(store: Path, waiting: list[Label]) -> bool:
    """Queues labels of one episode and clears the list; False after a full disk. Too many labels are left out."""
    try:
        queue_labels(store, waiting)
    except (StoreError, WireError) as error:
        log.warning("reward.unusable episode=%s %s", waiting[0].episode, error)
    except OSError as error:
        log.warning("reward.waiting %s", error)
        return False
    waiting.clear()
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
