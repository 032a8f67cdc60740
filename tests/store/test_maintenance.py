"""Labels, retention, compaction and merging of a whole store on disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_kit import chunk, stored

from user_sys.episode import EpisodeSource
from user_sys.errors import StoreError, StoreRecordGone
from user_sys.store.files import Files
from user_sys.store.index_block import CHUNK_KIND
from user_sys.store.labels import (
    RETENTION_LABELLER,
    DeleteLabel,
    Label,
    NoteLabel,
    RewardLabel,
    SuccessLabel,
    queue_labels,
    queued_files,
)
from user_sys.store.log_writer import LogWriter
from user_sys.store.maintenance import (
    Retention,
    SegmentUsage,
    add_labels,
    compact_store,
    disk_bytes,
    merge_stores,
    plan_rewrites,
    reclaim_space,
)
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.verify import quarantine_damage, verify_log

SEGMENT_BYTES = 20_000


def fill(path: Path, episodes: range, *, source: EpisodeSource = EpisodeSource.ONLINE, chunks: int = 3) -> None:
    with StoreWriter.open(path, segment_bytes=SEGMENT_BYTES) as writer:
        for episode in episodes:
            for index in range(chunks):
                writer.append(
                    chunk(f"e{episode:02d}", index, source=source, end=index == chunks - 1, width=200).encode()
                )


def names(path: Path) -> list[str]:
    with StoreReader.open(path) as reader:
        reader.refresh()
        return sorted({episode for episode, _ in stored(reader)})


def delete(episode: str) -> Label:
    return DeleteLabel(episode=episode, labeller="ada", at_unix_ns=1)


def test_compaction_frees_deleted_episodes_and_keeps_their_labels(tmp_path: Path) -> None:
    fill(tmp_path, range(20))
    before = disk_bytes(tmp_path)
    add_labels(tmp_path, [delete(f"e{n:02d}") for n in range(0, 20, 2)])
    with StoreReader.open(tmp_path) as alive:
        alive.refresh()
        report = compact_store(tmp_path)
        assert report.size_bytes == disk_bytes(tmp_path) and report.freed_bytes > 0.4 * before
        assert not report.damaged and not report.dropped
        rows = np.flatnonzero(alive.index.chunks.alive).tolist()
        assert len(rows) == 30
        for row in rows:
            assert (alive.read(row).columns["observation.state"] == alive.index.chunks.index[row]).all()
        with pytest.raises(StoreRecordGone):
            alive.read(0)
        alive.refresh()
        assert alive.index.chunks.gone.sum() == 30 and not alive.damaged
    assert names(tmp_path) == [f"e{n:02d}" for n in range(1, 20, 2)]
    with StoreWriter.open(tmp_path) as writer:
        assert not writer.append(chunk("e00", 0, width=200).encode()) and not writer.append(chunk("e01", 0).encode())
        assert writer.chunks == 30
    assert compact_store(tmp_path).size_bytes <= report.size_bytes + 1000


def test_retention_keeps_demonstrations_within_limit(tmp_path: Path) -> None:
    fill(tmp_path, range(0, 5), source=EpisodeSource.DEMO)
    fill(tmp_path, range(5, 30))
    bound = disk_bytes(tmp_path) // 2
    report = compact_store(tmp_path, Retention(max_bytes=bound, keep_interventions=False))
    assert disk_bytes(tmp_path) == report.size_bytes <= bound and report.shortfall_bytes == 0
    left = names(tmp_path)
    assert left[:5] == [f"e{n:02d}" for n in range(5)] and len(left) + len(report.dropped) == 30
    tight = compact_store(tmp_path, Retention(max_bytes=bound // 10, keep_interventions=False))
    assert tight.shortfall_bytes == tight.size_bytes - bound // 10 > 0
    assert names(tmp_path) == left[:5]


def test_merge_with_labels_is_repeatable(tmp_path: Path) -> None:
    a, b, both = tmp_path / "a", tmp_path / "b", tmp_path / "both"
    fill(a, range(0, 6))
    fill(b, range(4, 10))
    add_labels(a, [SuccessLabel(episode="e00", success=False, labeller="ada", at_unix_ns=1), delete("e01")])
    add_labels(b, [RewardLabel(episode="e09", first_step=1, rewards=(9.0,), labeller="ada", at_unix_ns=1)])
    report = merge_stores([a, b], both)
    assert (report.chunks, report.duplicates, report.labels) == (27, 6, 2)
    again = merge_stores([a, b], both)
    assert (again.chunks, again.duplicates, again.labels) == (0, 33, 0)
    with StoreReader.open(both) as reader:
        reader.refresh()
        assert sorted({name for name, _ in stored(reader)}) == ["e00", *(f"e{n:02d}" for n in range(2, 10))]
        assert reader.episodes()[0].success is False and reader.index.steps.reward.max() == 9.0


def test_merge_skips_chunks_of_another_robots_episode(tmp_path: Path) -> None:
    with LogWriter.open(tmp_path / "a") as log:  # bypasses the store's check
        for each in (chunk("e"), chunk("e", 1, robot="panda-1"), chunk("f")):
            log.append_record(CHUNK_KIND, each.encode())
    report = merge_stores([tmp_path / "a"], tmp_path / "b")
    assert (report.chunks, report.damaged, report.duplicates) == (2, 1, 0)
    with StoreReader.open(tmp_path / "b") as reader:
        reader.refresh()
        assert stored(reader) == [("e", 0), ("f", 0)]


def test_queued_labels_precede_newer_ones(tmp_path: Path) -> None:
    fill(tmp_path, range(1))
    common = {"episode": "e00", "labeller": "ada", "at_unix_ns": 1}
    queue_labels(tmp_path, [SuccessLabel(success=True, **common), NoteLabel(note="waited", **common)])  # type: ignore[arg-type]
    (tmp_path / "inbox" / "00-nonsense.labels").write_bytes(b"\xc1")
    add_labels(tmp_path, [SuccessLabel(success=False, **common)])  # type: ignore[arg-type]
    with StoreReader.open(tmp_path) as reader:
        reader.refresh()
        assert [each.success for each in reader.index.labels("e00") if isinstance(each, SuccessLabel)] == [True, False]
        assert reader.episodes()[0].success is False
    assert [file.name for file in queued_files(tmp_path)] == ["00-nonsense.labels"], (
        "what is no post is left to a person"
    )


def success(at_unix_ns: int, success: bool) -> Label:
    return SuccessLabel(episode="e00", labeller="ada", at_unix_ns=at_unix_ns, success=success)


def restored(episode: str) -> Label:
    return DeleteLabel(episode=episode, labeller="ada", at_unix_ns=2, deleted=False)


def success_of(path: Path) -> bool | None:
    """The labelled success of the store's first episode."""
    with StoreReader.open(path) as reader:
        reader.refresh()
        return reader.episodes()[0].success


def test_queued_label_never_overrides_a_newer_one_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(1))
    queue_labels(tmp_path, [success(1, True)])

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("user_sys.store.maintenance.remove_queued", killed)
        add_labels(tmp_path, [success(2, False)])
    was_added = success_of(tmp_path) is False
    add_labels(tmp_path, [] if was_added else [success(2, False)])
    assert success_of(tmp_path) is False and not queued_files(tmp_path)


def test_queued_labels_keep_their_order_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, range(1))
    queue_labels(tmp_path, [SuccessLabel(episode="e00", labeller="first", at_unix_ns=1, success=True)])
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns - 2 * 10**9)
    queue_labels(tmp_path, [SuccessLabel(episode="e00", labeller="second", at_unix_ns=2, success=False)])
    add_labels(tmp_path, [])
    with StoreReader.open(tmp_path) as reader:
        reader.refresh()
        assert [label.labeller for label in reader.index.labels("e00")] == ["first", "second"]


def content(path: Path) -> list[tuple[str, int]]:
    """(episode, index) of the chunks that are neither deleted nor gone."""
    with StoreReader.open(path) as reader:
        reader.refresh()
        chunks = stored(reader)
        return [key for key, alive in zip(chunks, reader.index.chunks.alive, strict=True) if alive]


def test_compaction_goes_on_beside_a_lost_segment(tmp_path: Path) -> None:
    fill(tmp_path, range(12))
    sorted(tmp_path.glob("*.seg"))[1].unlink()
    quarantine_damage(tmp_path, verify_log(tmp_path))
    add_labels(tmp_path, [delete("e00"), delete("e11")])
    kept = content(tmp_path)
    report = compact_store(tmp_path)
    assert report.freed_bytes > 0 and not report.damaged
    assert content(tmp_path) == kept
    assert not verify_log(tmp_path), "the lost segment was reported before the repair"


class UnreadableSector(Files):
    """Reads across byte 5,000 of the second segment fail."""

    def __init__(self) -> None:
        self._hurt: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        (self._hurt.add if path.name.startswith("0000000001") else self._hurt.discard)(fd)
        return fd

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        if fd in self._hurt and offset <= 5000 < offset + count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, count, offset)


def test_compaction_of_an_unreadable_segment_leaves_the_writer_usable(tmp_path: Path) -> None:
    fill(tmp_path, range(12))
    add_labels(tmp_path, [delete("e00")])
    with StoreWriter.open(tmp_path, files=UnreadableSector()) as writer, StoreReader.open(tmp_path) as reader:
        writer.rotate()
        reader.refresh()
        (reason,) = reclaim_space(writer, reader.index, min_dead_share=0.0)
        assert "run `user-sys store repair` first" in reason
        writer.append(chunk("new", 0).encode())
        writer.sync()
    assert ("new", 0) in content(tmp_path)


def test_compaction_takes_queued_labels_first(tmp_path: Path) -> None:
    fill(tmp_path, range(2))
    add_labels(tmp_path, [delete("e00")])
    queue_labels(tmp_path, [restored("e00"), delete("e01")])
    compact_store(tmp_path)
    assert names(tmp_path) == ["e00"] and not queued_files(tmp_path)


def test_merge_counts_queued_labels_as_stored(tmp_path: Path) -> None:
    a, both = tmp_path / "a", tmp_path / "both"
    fill(a, range(2))
    add_labels(a, [delete("e00")])
    queue_labels(a, [restored("e00"), success(3, False), delete("e01")])
    merge_stores([a], both)
    assert names(both) == ["e00"] and success_of(both) is False and len(queued_files(a)) == 1
    queue_labels(both, [success(4, True)])
    merge_stores([a], both)
    assert success_of(both) is True and not queued_files(both)


def test_repeated_merge_keeps_the_newest_label(tmp_path: Path) -> None:
    a, both = tmp_path / "a", tmp_path / "both"
    fill(a, range(1))
    merge_stores([a], both)
    add_labels(a, [success(1, True)])
    add_labels(both, [success(2, False)])
    assert merge_stores([a], both).labels == 1 and success_of(both) is False
    assert merge_stores([a], both).labels == 0


def test_merge_keeps_the_order_of_labels_after_a_clock_was_set_back(tmp_path: Path) -> None:
    a, both = tmp_path / "a", tmp_path / "both"
    fill(a, range(1))
    merge_stores([a], both)
    add_labels(both, [success(2000, False), success(1500, True)])
    for at_unix_ns in (1000, 1700, 1800):
        add_labels(a, [success(at_unix_ns, False)])
        merge_stores([a], both)
        assert success_of(both) is True
    with StoreReader.open(both) as reader:
        reader.refresh()
        assert len(reader.index.labels("e00")) == 2 + 3 + 3 * 2, "no label is repeated twice in one merge"


@pytest.mark.parametrize("compacted", [False, True])
def test_deletion_by_a_person_follows_in_a_repeated_merge(tmp_path: Path, compacted: bool) -> None:
    a, both = tmp_path / "a", tmp_path / "both"
    fill(a, range(4))
    merge_stores([a], both)
    retained = DeleteLabel(episode="e01", labeller=RETENTION_LABELLER, at_unix_ns=1)
    add_labels(a, [delete("e00"), retained, delete("e02"), restored("e02")])
    add_labels(both, [NoteLabel(episode="e03", labeller="ada", at_unix_ns=1)])
    if compacted:
        compact_store(a)
    report = merge_stores([a], both)
    assert (report.chunks, report.labels) == (0, 3)
    assert sorted({name for name, _ in content(both)}) == ["e01", "e02", "e03"], "retention is each store's own"
    assert merge_stores([a], both).labels == 0
    add_labels(both, [restored("e00")])
    assert merge_stores([a], both).labels == 0 and ("e00", 0) in content(both), "the newer label stays"


def test_maintenance_never_creates_a_store(tmp_path: Path) -> None:
    for attempt in (
        compact_store,
        lambda path: add_labels(path, [NoteLabel(episode="a", labeller="ada", at_unix_ns=1)]),
    ):
        with pytest.raises(StoreError, match="is not a store"):
            attempt(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


LOADS = st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1)), max_size=30).map(
    lambda drawn: [SegmentUsage(n, size, int(size * share)) for n, (size, share) in enumerate(drawn)]
)


@settings(deadline=None)
@given(loads=LOADS, least=st.sampled_from([0.0, 0.25, 1.0]))
def test_rewrite_plan_joins_neighbours_and_covers_dead_segments(loads: list[SegmentUsage], least: float) -> None:
    groups = plan_rewrites(loads, 100, least)
    planned = [number for group in groups for number in group]
    assert planned == sorted(set(planned))
    for group in groups:
        assert group == list(range(group[0], group[-1] + 1))
        assert len(group) == 1 or sum(loads[n].size_bytes - loads[n].dead_bytes for n in group) <= 100
    for load in loads:
        if load.dead_bytes > 0 and load.dead_bytes >= least * load.size_bytes:
            assert load.number in planned
