"""Scenarios of a store's writer, and checks of the state after a crash.

Each scenario runs on a `Disk` and notes acknowledged data on its trace. Each check opens the remaining files as the
next writer and a reader would, and raises `Violation` if a promise is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from disk_model import ROOT, Choice, CrashState, Dead, Disk, State
from store_kit import chunk

from user_sys.errors import StoreCorrupt, StoreError, StoreFull
from user_sys.store import manifest
from user_sys.store.index import Index
from user_sys.store.labels import DeleteLabel, Label, SuccessLabel
from user_sys.store.maintenance import reclaim_space
from user_sys.store.record_format import Damage
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.verify import QUARANTINE, quarantine_damage, verify_log

SEGMENT_BYTES = 4096
PROBE = "probe"
UNWRITTEN = "no whole record"  # a reader's reason for an append that a power cut interrupted


class Violation(AssertionError):
    """A broken promise."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Acknowledged(msgspec.Struct, frozen=True):
    """Data acknowledged at a moment: chunks by (episode, index), labels, deleted episodes, quarantined damage."""

    chunks: frozenset[tuple[str, int]] = frozenset()
    labels: tuple[Label, ...] = ()
    deleted: frozenset[str] = frozenset()
    quarantined: tuple[Damage, ...] = ()

    def and_also(self, other: Acknowledged) -> Acknowledged:
        return Acknowledged(
            self.chunks | other.chunks,
            self.labels + other.labels,
            self.deleted | other.deleted,
            self.quarantined + other.quarantined,
        )


def packet(episode: str, index: int) -> bytes:
    """The chunk stored under this name; its size depends on it."""
    return chunk(episode, index, steps=4 if index < 2 else 3, end=index == 2, width=40 + 30 * index).encode()


@dataclass
class Scenario:
    """A store's writer on a `Disk`; notes acknowledged data on the disk's trace."""

    disk: Disk
    acknowledged: Acknowledged = Acknowledged()
    pending: Acknowledged = Acknowledged()
    writer: StoreWriter = field(init=False)

    def open(self) -> None:
        self.writer = StoreWriter.open(ROOT, segment_bytes=SEGMENT_BYTES, files=self.disk.files())

    def append(self, episode: str, index: int) -> None:
        self.pending = self.pending.and_also(Acknowledged(frozenset({(episode, index)})))
        self.writer.append(packet(episode, index))

    def append_many(self, episode: str, indices: Iterable[int]) -> None:
        for index in indices:
            self.append(episode, index)

    def label(self, label: Label) -> None:
        deleted = frozenset({label.episode} if isinstance(label, DeleteLabel) else ())
        self.pending = self.pending.and_also(Acknowledged(labels=(label,), deleted=deleted))
        self.writer.append_label(label)

    def sync(self) -> None:
        self.writer.sync()
        self.acknowledged, self.pending = self.acknowledged.and_also(self.pending), Acknowledged()
        self.disk.note(self.acknowledged)

    def kill(self) -> None:
        self.disk.kill()
        self.pending = Acknowledged()

    def reclaim(self) -> None:
        with StoreReader.open(ROOT, files=self.disk.files()) as reader:
            reader.refresh()
            assert not [why for why in reclaim_space(self.writer, reader.index, min_dead_share=0.0) if why]

    def delete(self, *episodes: str) -> None:
        for name in episodes:
            self.label(DeleteLabel(episode=name, labeller="retention", at_unix_ns=2))
        self.sync()
        self.writer.rotate()


def appending(scenario: Scenario) -> None:
    """Groups of all sizes; rotation and sealing; a kill, then resending."""
    scenario.open()
    for number in range(5):
        for index in range(3):
            scenario.append(f"ep-{number}", index)
            if (number + index) % 2:
                scenario.sync()
    scenario.append("ep-5", 0)
    scenario.label(SuccessLabel(episode="ep-1", labeller="ada", at_unix_ns=1, success=False))
    scenario.sync()
    scenario.append("ep-6", 0)  # not acknowledged
    scenario.kill()
    scenario.open()
    scenario.append_many("ep-6", range(2))
    scenario.sync()
    scenario.writer.close()


def compacting(scenario: Scenario) -> None:
    """Deletion by labels and compaction, twice, with small segments joined."""
    scenario.open()
    for number in range(5):
        scenario.append_many(f"ep-{number}", range(3))
        scenario.sync()
    scenario.delete("ep-0", "ep-2", "ep-3")
    scenario.reclaim()
    scenario.append_many("ep-7", range(3))
    scenario.sync()
    scenario.append("ep-8", 0)
    scenario.kill()
    scenario.open()
    scenario.delete("ep-4")
    scenario.reclaim()
    scenario.append("ep-9", 0)
    scenario.sync()
    scenario.writer.close()


def filling(scenario: Scenario) -> None:
    """The disk fills up during an append and during a segment's creation; then space is freed."""
    scenario.open()
    for number in range(8):
        scenario.append(f"ep-{number}", 0)
        scenario.sync()
        scenario.disk.room_bytes = 700 * (number % 3)
        for index in (1, 2):
            try:
                scenario.append(f"ep-{number}", index)
                scenario.writer.sync()
            except StoreFull:
                scenario.disk.room_bytes = None
                scenario.writer.append(packet(f"ep-{number}", index))
        scenario.disk.room_bytes = None
        scenario.sync()
    scenario.writer.close()


def resume(scenario: Scenario) -> None:
    """After a kill: the next writer opens the store, and all unacknowledged data is sent again."""
    unsure, scenario.pending = scenario.pending, Acknowledged()
    scenario.open()
    for episode, index in sorted(unsure.chunks):
        scenario.append(episode, index)
        scenario.sync()
    scenario.append_many("later", range(2))
    scenario.sync()
    scenario.writer.close()


def _acknowledged_at(notes: Iterable[object]) -> Acknowledged:
    last = Acknowledged()
    for note in notes:
        assert isinstance(note, Acknowledged)
        last = note
    return last


def damaged_store() -> tuple[dict[str, bytes], Acknowledged]:
    """A store with two flipped bits, in a sealed segment and in a later one; the hit records count as deleted."""
    scenario = Scenario(Disk())
    compacting(scenario)
    content = current(scenario.disk)
    for name in sorted(name for name in content if name.endswith(".seg"))[:2]:
        raw = bytearray(content[name])
        raw[600] ^= 1
        content[name] = bytes(raw)
    with StoreReader.open(ROOT, files=Disk(content).files()) as reader:
        reader.refresh()
        left = whole_chunks(reader)
    lost = {episode for episode, index in scenario.acknowledged.chunks - left}
    return content, Acknowledged(
        scenario.acknowledged.chunks, scenario.acknowledged.labels, scenario.acknowledged.deleted | lost
    )


def whole_chunks(reader: StoreReader) -> set[tuple[str, int]]:
    """The readable chunks, all of which must be unchanged."""
    found = set()
    for row in range(len(reader.index.chunks)):
        try:
            chunk_read = reader.read_packed(row)
        except StoreCorrupt:
            continue
        key = (chunk_read.header.episode, chunk_read.header.index)
        require(bytes(chunk_read.packet.view) == packet(*key), f"{key} is not what was stored")
        found.add(key)
    return found


def repairing(disk: Disk, acknowledged: Acknowledged) -> None:
    """Quarantine of all damage, twice."""
    disk.note(acknowledged)
    for _ in range(2):
        files = disk.files()
        damaged = verify_log(ROOT, files=files)
        quarantine_damage(ROOT, damaged, files=files)
        acknowledged = acknowledged.and_also(Acknowledged(quarantined=tuple(damaged)))
        disk.note(acknowledged)
    assert acknowledged.quarantined and not verify_log(ROOT, files=disk.files())


# Checks


def check_store(state: CrashState, forget: str = "") -> None:
    """Acknowledged data is present once, before the next writer, after it, and after another power cut."""
    acknowledged = _acknowledged_at(state.notes)
    check_before(state, acknowledged)
    disk = Disk(state.content, forget=forget)
    scenario = Scenario(disk)
    scenario.open()
    check_content(disk, acknowledged, state.torn)
    scenario.append(PROBE, 0)
    scenario.sync()
    # The result of the next writer must survive another power cut at once.
    after = acknowledged.and_also(Acknowledged(frozenset({(PROBE, 0)})))
    again = Disk(durable(disk))
    Scenario(again).open()
    check_content(again, after, state.torn)


def check_before(state: CrashState, acknowledged: Acknowledged) -> None:
    """The check of a reader before the next writer."""
    if any(name.endswith(".seg") for name in state.content):
        check_content(Disk(state.content), acknowledged, state.torn)
    else:
        require(not acknowledged.chunks, "all segments are lost")


def check_content(disk: Disk, acknowledged: Acknowledged, torn: bool) -> None:
    with StoreReader.open(ROOT, files=disk.files()) as reader:
        reader.refresh()
        rows = Counter[tuple[str, int]]()
        for row in range(len(reader.index.chunks)):
            found = reader.read_packed(row)
            key = (found.header.episode, found.header.index)
            rows[key] += 1
            require(bytes(found.packet.view) == packet(*key), f"{key} is not what was stored")
        require(not rows or max(rows.values()) == 1, f"twice: {rows.most_common(1)}")
        lost = {key for key in acknowledged.chunks - rows.keys() if key[0] not in acknowledged.deleted}
        require(not lost, f"acknowledged and lost: {sorted(lost)}")
        for label in acknowledged.labels:
            require(label in reader.index.labels(label.episode), f"acknowledged and lost: {label}")
        check_drawable(reader.index)
        check_damage(reader.damaged, torn)


def check_drawable(index: Index) -> None:
    """No eligible step is followed by a step of another episode, or by one that is not the next."""
    rows = np.flatnonzero(index.steps.alive)
    after = index.successor(rows)
    rows, after = rows[after >= 0], after[after >= 0]
    follows = (index.episode_of(rows) == index.episode_of(after)) & (index.step_of(rows) + 1 == index.step_of(after))
    require(bool(follows.all()), "a torn episode can be sampled")


def check_damage(damaged: list[Damage], torn: bool) -> None:
    """No damage is reported, except an unacknowledged append that a power cut interrupted."""
    alarming = [damage for damage in damaged if not (torn and damage.reason.startswith(UNWRITTEN))]
    require(not alarming, f"called damaged: {alarming}")


def check_repair(state: CrashState, forget: str = "") -> None:
    """Quarantined damage stays quarantined with its bytes; each listed range has a copy."""
    acknowledged, disk = _acknowledged_at(state.notes), Disk(state.content)
    with StoreReader.open(ROOT, files=disk.files()) as reader:
        reader.refresh()
        lost = {key for key in acknowledged.chunks - whole_chunks(reader) if key[0] not in acknowledged.deleted}
        require(not lost, f"neighbours lost: {sorted(lost)}")
        require(all(damage.segment >= 0 for damage in reader.damaged), f"{reader.damaged}")
    found = manifest.load(disk.files(), ROOT)
    require(found is not None, "no manifest")
    listed = found.quarantined if found else ()
    for damage in acknowledged.quarantined:
        require(any(each.covers(damage) for each in listed), f"forgotten: {damage}")
    for each in listed:
        stem = next(name for name in state.content if name.startswith(f"{each.number:010d}") and name.endswith(".seg"))
        copy = f"{QUARANTINE}/{stem.removesuffix('.seg')}-{each.offset:012d}.bytes"
        original = state.content[stem][each.offset : each.offset + each.length]
        require(state.content.get(copy) == original, f"listed and not copied: {each}")


def durable(disk: Disk) -> dict[str, bytes]:
    """The content that is certainly on the disk."""
    state = State(dict(disk.start.durable), {}, dict(disk.start.names), [])
    for event in disk.trace:
        state.advance(event)
    return state.outcome(Choice(0.0, 0.0))


def current(disk: Disk) -> dict[str, bytes]:
    """The content that a process sees."""
    return {name: bytes(disk.files_by_number[file]) for name, file in disk.names.items()}


Check = Callable[[CrashState, str], None]


class Execution(NamedTuple):
    """A scenario executed on `disk`; crashes from event `first` on are checked by `check`."""

    disk: Disk
    check: Check
    first: int = 0


def execute(run: Callable[[Scenario], None], forget: str, kill_at: int = -1) -> Execution:
    """Executes a store's scenario; with `kill_at` the process is killed at that event, and another one continues."""
    disk = Disk(forget=forget, kill_at=kill_at)
    scenario = Scenario(disk)
    try:
        run(scenario)
    except (StoreError, Dead):
        if kill_at < 0:
            raise
        disk.room_bytes = None
        resume(scenario)
    return Execution(disk, check_store, max(0, kill_at))


def repair_story(forget: str) -> Execution:
    content, acknowledged = damaged_store()
    disk = Disk(content, forget=forget)
    repairing(disk, acknowledged)
    return Execution(disk, check_repair)
