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
from user_sys.store.labels import queue_labels
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
        while not stop.wait(POLL_S):
            label_new(labeller, folder.store)
        label_new(labeller, folder.store)


def label_new(labeller: EpisodeLabeller, store: Path) -> None:
    """Queues the labels of the episodes that have ended since the last call.

    An episode whose labels are invalid stays as it is. After a full disk, the next call continues with this episode.
    """
    try:
        for episode, found, labels in labeller.new_labels():
            try:
                queue_labels(store, labels)
            except (StoreError, WireError) as error:
                log.warning("reward.unusable episode=%s %s", episode.episode, error)
                continue
            except OSError as error:
                labeller.repeat(episode.episode)
                log.warning("reward.waiting %s", error)
                return
            log.info("reward.labelled episode=%s success=%s probability=%s", episode.episode, found.success,
                     found.probability)  # fmt: skip
    except LinkDown as error:
        log.warning("reward.waiting %s", error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
