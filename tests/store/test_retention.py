"""Retention: order of eviction, protected episodes, and the shortfall."""

from __future__ import annotations

import numpy as np
from episode_kit import chunk_header

from user_sys.episode import Chunk, EpisodeEnd, EpisodeSource, Phase
from user_sys.store.index import Index
from user_sys.store.index_block import CHUNK_KIND, IndexBlockBuilder
from user_sys.store.labels import DeleteLabel, encode_label
from user_sys.store.maintenance import EvictionPlan, Retention, plan_eviction
from user_sys.store.record_format import RecordRef

STEPS, RECORD_BYTES = 5, 1000 + 32


class StoreModel:
    """An index whose episodes each take `RECORD_BYTES` in the log and start one second apart."""

    def __init__(self) -> None:
        self._builder, self._records = IndexBlockBuilder(), 0

    def put(
        self,
        episode: str,
        source: EpisodeSource = EpisodeSource.ONLINE,
        *,
        success: bool | None = True,
        by_hand: bool = False,
        ended: bool = True,
        robot: str = "panda-0",
        started_unix_ns: int = -1,
    ) -> StoreModel:
        header = chunk_header(
            episode,
            STEPS,
            robot=robot,
            sentence="lift",
            source=source,
            started_unix_ns=self._records if started_unix_ns < 0 else started_unix_ns,
            end=EpisodeEnd(steps=STEPS, success=success) if ended else None,
        )
        columns = {"phase": np.full(STEPS, Phase.CORRECTION if by_hand else Phase.POLICY, np.uint8)}
        return self._add(CHUNK_KIND, Chunk(header, columns, {}).encode())

    def delete(self, episode: str) -> StoreModel:
        return self._add(2, encode_label(DeleteLabel(episode=episode, labeller="ada", at_unix_ns=0)))

    def _add(self, kind: int, payload: bytes) -> StoreModel:
        self._builder.add(RecordRef(0, 0, 1000, kind, self._records), payload)
        self._records += 1
        return self

    def plan(self, records: float, **settings: object) -> EvictionPlan:
        """The eviction plan when only so many episodes fit."""
        index = Index()
        index.apply([self._builder.build()])
        retention = Retention(max_bytes=int(records * RECORD_BYTES), slack=0.0, **settings)  # type: ignore[arg-type]
        return plan_eviction(index, retention, disk_bytes=len(index.chunks) * RECORD_BYTES)


def test_no_eviction_below_the_limit() -> None:
    store = StoreModel().put("a").put("b")
    assert store.plan(2) == EvictionPlan((), 0, 0)
    assert store.plan(0) == EvictionPlan((), 0, 0)  # no limit


def test_eviction_order() -> None:
    store = (
        StoreModel()
        .put("demo", EpisodeSource.DEMO)
        .put("helped", by_hand=True)
        .put("broken", ended=False)
        .put("failed-1", success=False)
        .put("done-1")
        .put("test", EpisodeSource.EVALUATION)
        .put("failed-2", success=None)
        .put("done-2")
        .put("running", ended=False)
    )
    order = ("test", "broken", "failed-1", "done-1", "failed-2", "done-2")
    for gone in range(7):
        assert store.plan(9 - gone).episodes == order[:gone]


def test_protected_episodes_stay_and_shortfall_is_reported() -> None:
    store = StoreModel().put("demo", EpisodeSource.DEMO).put("helped", by_hand=True).put("done")
    assert store.plan(1) == EvictionPlan(("done",), RECORD_BYTES, RECORD_BYTES)
    assert store.plan(1, keep_interventions=False).episodes == ("helped", "done")
    assert store.plan(2, keep_sources=(), keep_interventions=False).episodes == ("demo",)


def test_running_episodes_are_not_evicted() -> None:
    store = StoreModel().put("left", ended=False, robot="left").put("right", ended=False, robot="right")
    assert store.plan(1) == EvictionPlan((), 0, RECORD_BYTES)
    assert store.put("next", robot="left").plan(2).episodes == ("left",)


def test_running_episode_stays_when_the_clock_was_set_back() -> None:
    store = StoreModel()
    for name, started in (("a", 100), ("b", 101)):
        store.put(name, started_unix_ns=started)
    assert store.put("running", ended=False, started_unix_ns=50).plan(1).episodes == ("a", "b")


def test_first_stored_episodes_go_first_when_the_clock_was_set_back() -> None:
    store = StoreModel()
    for name, started in (("a", 1000), ("b", 1001), ("c", 2), ("d", 3)):
        store.put(name, started_unix_ns=started)
    assert store.plan(2).episodes == ("a", "b")


def test_deleted_episodes_do_not_count() -> None:
    assert StoreModel().put("a").put("b").delete("a").plan(1) == EvictionPlan((), 0, 0)
