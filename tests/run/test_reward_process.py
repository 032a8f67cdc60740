"""Labels of a run's episodes that cannot be queued."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from user_sys.rewards.labelling import EpisodeLabeller
from user_sys.rewards.reward import Reward
from user_sys.run import reward_process
from user_sys.run.reward_process import label_new
from user_sys.store.labels import Label, RewardLabel, queued_files
from user_sys.store.store import StoreReader


class Labeller(EpisodeLabeller):
    """Gives each of its episodes the reward of that name."""

    def __init__(self, rewards: dict[str, float]) -> None:
        super().__init__(cast(StoreReader, None), cast(Reward, None), "test")
        self._rewards = rewards
        self.evaluated = list[str]()

    def new_labels(self):  # type: ignore[no-untyped-def]
        for name, reward in self._rewards.items():
            if name not in self.evaluated:
                self.evaluated.append(name)
                label = RewardLabel(episode=name, labeller=self.labeller, first_step=0, rewards=(reward,), at_unix_ns=1)
                yield SimpleNamespace(episode=name), SimpleNamespace(success=None, probability=None), [label]


def test_invalid_reward_leaves_out_one_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    label_new(Labeller({"first": float("nan"), "second": 1.0}), tmp_path, [])
    assert len(queued_files(tmp_path)) == 1 and "reward.unusable episode=first" in caplog.text


def test_label_that_the_full_disk_refuses_is_queued_later_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labeller, queue = Labeller({"first": 0.0, "second": 1.0}), reward_process.queue_labels

    def refuse(store: Path, labels: Sequence[Label]) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reward_process, "queue_labels", refuse)
    waiting = list[Label]()
    for _ in range(5):
        label_new(labeller, tmp_path, waiting)
    monkeypatch.setattr(reward_process, "queue_labels", queue)
    label_new(labeller, tmp_path, waiting)
    assert len(queued_files(tmp_path)) == 2 and labeller.evaluated == ["first", "second"]
