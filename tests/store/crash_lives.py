"""What a store's writer does in its life, and what must hold of whatever a crash leaves of it.

Each life runs on a `Disk` and notes on its trace what is acknowledged by then. Each check opens what a crash left, as
the next writer and a reader would, and raises `Violation` where a promise is broken.
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
from user_sys.store.files import Files
from user_sys.store.index import Index
from user_sys.store.index_block import CHUNK_KIND, summarise_records
from user_sys.store.labels import DeleteLabel, Label, SuccessLabel
from user_sys.store.log import LogReader, LogWriter
from user_sys.store.maintenance import reclaim_space
from user_sys.store.record_format import Damage
from user_sys.store.store import IngestedChunks, StoreReader, StoreWriter
from user_sys.store.verify import QUARANTINE, quarantine_damage, verify_log

SEGMENT_BYTES = 4096
PROBE = "probe"
UNWRITTEN = "no whole record"  # what a reader says of an append that a power cut tore


class Violation(AssertionError):
    """A promise that was broken."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Said(msgspec.Struct, frozen=True):
    """What was acknowledged by a moment: chunks by (episode, index), labels, episodes that may be gone, and damage
    that is set aside."""

    chunks: frozenset[tuple[str, int]] = frozenset()
    labels: tuple[Label, ...] = ()
    deleted: frozenset[str] = frozenset()
    quarantined: tuple[Damage, ...] = ()

    def and_also(self, other: Said) -> Said:
        return Said(
            self.chunks | other.chunks,
            self.labels + other.labels,
            self.deleted | other.deleted,
            self.quarantined + other.quarantined,
        )


def packet(episode: str, index: int) -> bytes:
    """The chunk that is stored under this name; of a size that depends on it."""
    return chunk(episode, index, steps=4 if index < 2 else 3, end=index == 2, width=40 + 30 * index).encode()


@dataclass
class Life:
    """A store's writer on a `Disk`; says on the disk's trace what is acknowledged."""

    disk: Disk
    said: Said = Said()
    pending: Said = Said()
    writer: StoreWriter = field(init=False)

    def open(self) -> None:
        files = self.disk.files()
        log = LogWriter.open(
            ROOT, segment_bytes=SEGMENT_BYTES, summarise=summarise_records, background=False, files=files
        )
        self.writer = StoreWriter(ROOT, log, known(files))

    def append(self, episode: str, index: int) -> None:
        self.pending = self.pending.and_also(Said(frozenset({(episode, index)})))
        self.writer.append(packet(episode, index))

    def append_many(self, episode: str, indices: Iterable[int]) -> None:
        for index in indices:
            self.append(episode, index)

    def label(self, label: Label) -> None:
        deleted = frozenset({label.episode} if isinstance(label, DeleteLabel) else ())
        self.pending = self.pending.and_also(Said(labels=(label,), deleted=deleted))
        self.writer.append_label(label)

    def sync(self) -> None:
        self.writer.sync()
        self.acknowledge(self.pending)

    def acknowledge(self, what: Said) -> None:
        self.said, self.pending = self.said.and_also(what), Said()
        self.disk.note(self.said)

    def kill(self) -> None:
        self.disk.kill()
        self.pending = Said()

    def reclaim(self) -> None:
        with StoreReader.open(ROOT, files=self.disk.files()) as reader:
            reader.refresh()
            assert not [why for why in reclaim_space(self.writer, reader.index, min_dead_share=0.0) if why]

    def delete(self, *episodes: str) -> None:
        for name in episodes:
            self.label(DeleteLabel(episode=name, labeller="retention", at_unix_ns=2))
        self.sync()
        self.writer.rotate()


def known(files: Files) -> IngestedChunks:
    """What `StoreWriter.open` learns of a log; here, because the writer's log seals in the foreground."""
    found = IngestedChunks()
    with StoreReader.open(ROOT, files=files) as reader:
        reader.refresh()
        for row in range(len(reader.index.chunks)):
            found.add(reader.read_packed(row).header)
        for name in reader.index.episodes.ids.names:
            for label in reader.index.labels(name):
                found.add_label(label)
    return found


def appending(life: Life) -> None:
    """Groups of all sizes, synced and pipelined; rotation and sealing; a kill, and what was sent is sent again."""
    life.open()
    for number in range(5):
        for index in range(3):
            life.append(f"ep-{number}", index)
            if (number + index) % 2:
                life.sync()
    life.append("ep-5", 0)
    ticket, flushed = life.writer.flush(), life.pending
    life.append("ep-5", 1)
    life.writer.sync(ticket)
    pending, life.pending = life.pending, Said()
    life.acknowledge(flushed)
    life.pending = pending
    life.label(SuccessLabel(episode="ep-1", labeller="ada", at_unix_ns=1, success=False))
    life.sync()
    life.append("ep-6", 0)  # written, and seen by readers, but not acknowledged by this writer
    life.writer.flush()
    life.kill()
    life.open()
    life.append_many("ep-6", range(2))
    life.sync()
    life.writer.close()


def compacting(life: Life) -> None:
    """Deletion by labels and compaction, twice, with small segments put together."""
    life.open()
    for number in range(5):
        life.append_many(f"ep-{number}", range(3))
        life.sync()
    life.delete("ep-0", "ep-2", "ep-3")
    life.reclaim()
    life.append_many("ep-7", range(3))
    life.sync()
    life.append("ep-8", 0)
    life.kill()
    life.open()
    life.delete("ep-4")
    life.reclaim()
    life.append("ep-9", 0)
    life.sync()
    life.writer.close()


def filling(life: Life) -> None:
    """The disk becomes full in the middle of an append, and of a segment's creation; then there is room again."""
    life.open()
    for number in range(8):
        life.append(f"ep-{number}", 0)
        life.sync()
        life.disk.room_bytes = 700 * (number % 3)
        for index in (1, 2):
            try:
                life.append(f"ep-{number}", index)
                life.writer.sync()
            except StoreFull:
                life.disk.room_bytes = None
                life.writer.append(packet(f"ep-{number}", index))
        life.disk.room_bytes = None
        life.sync()
    life.writer.close()


def resume(life: Life) -> None:
    """What follows a kill: the next writer opens the store, and all that was not acknowledged is sent again."""
    unsure, life.pending = life.pending, Said()
    life.open()
    for episode, index in sorted(unsure.chunks):
        life.append(episode, index)
        life.sync()
    life.append_many("later", range(2))
    life.sync()
    life.writer.close()


@dataclass
class OutboxLife:
    """A log whose oldest segments are dropped, as an edge's outbox does; opened again in between."""

    disk: Disk
    said: Said = Said()

    def session(self, first: int, last: int) -> None:
        files, homes = self.disk.files(), dict[str, int]()
        with LogWriter.open(ROOT, segment_bytes=SEGMENT_BYTES, background=False, files=files) as log:
            for number in range(first, last):
                name = f"ep-{number}"
                homes[name] = log.append(CHUNK_KIND, twofold(name)).segment
                log.sync()
                self._say(Said(frozenset({(name, 0)})))
                if number % 4 == 3:
                    upto = homes[name] - 1
                    earlier = {f"ep-{old}" for old in range(first)}
                    self._say(Said(deleted=frozenset(earlier | {each for each, at in homes.items() if at < upto})))
                    log.drop_before(upto)

    def _say(self, more: Said) -> None:
        self.said = self.said.and_also(more)
        self.disk.note(self.said)


def outbox(disk: Disk) -> None:
    for first in range(0, 18, 6):
        OutboxLife(disk, said_by(disk)).session(first, first + 6)


def said_by(disk: Disk) -> Said:
    notes = [event.note for event in disk.trace if event.kind == "note"]
    return _said(notes)


def _said(notes: Iterable[object]) -> Said:
    last = Said()
    for note in notes:
        assert isinstance(note, Said)
        last = note
    return last


def twofold(name: str) -> bytes:
    return packet(name, 0) + packet(name, 1)


def damaged_store() -> tuple[dict[str, bytes], Said]:
    """A store with two flipped bits, in a sealed segment and in a later one; the records hit count as deleted."""
    life = Life(Disk())
    compacting(life)
    content = current(life.disk)
    for name in sorted(name for name in content if name.endswith(".seg"))[:2]:
        raw = bytearray(content[name])
        raw[600] ^= 1
        content[name] = bytes(raw)
    with StoreReader.open(ROOT, files=Disk(content).files()) as reader:
        reader.refresh()
        left = whole_chunks(reader)
    lost = {episode for episode, index in life.said.chunks - left}
    return content, Said(life.said.chunks, life.said.labels, life.said.deleted | lost)


def whole_chunks(reader: StoreReader) -> set[tuple[str, int]]:
    """Those that can be read, all of which must be as they were stored."""
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


def repairing(disk: Disk, said: Said) -> None:
    """Quarantine of all damage, twice."""
    disk.note(said)
    for _ in range(2):
        files = disk.files()
        damaged = verify_log(ROOT, files=files)
        quarantine_damage(ROOT, damaged, files=files)
        said = said.and_also(Said(quarantined=tuple(damaged)))
        disk.note(said)
    assert said.quarantined and not verify_log(ROOT, files=disk.files())


# What must hold


def check_store(state: CrashState, forget: str = "") -> None:
    """What was acknowledged is there once and right, for a reader before and after the next writer, and for good."""
    said = _said(state.notes)
    check_before(state, said)
    disk = Disk(state.content, forget=forget)
    life = Life(disk)
    life.open()
    check_content(disk, said, state.torn)
    life.append(PROBE, 0)
    life.sync()
    # What the next writer made of it must itself survive the next power cut, at once.
    after = said.and_also(Said(frozenset({(PROBE, 0)})))
    again = Disk(durable(disk))
    Life(again).open()
    check_content(again, after, state.torn)


def check_before(state: CrashState, said: Said) -> None:
    """What a reader finds that comes before the next writer."""
    if any(name.endswith(".seg") for name in state.content):
        check_content(Disk(state.content), said, state.torn)
    else:
        require(not said.chunks, "all segments are lost")


def check_content(disk: Disk, said: Said, torn: bool) -> None:
    with StoreReader.open(ROOT, files=disk.files()) as reader:
        reader.refresh()
        rows = Counter[tuple[str, int]]()
        for row in range(len(reader.index.chunks)):
            found = reader.read_packed(row)
            key = (found.header.episode, found.header.index)
            rows[key] += 1
            require(bytes(found.packet.view) == packet(*key), f"{key} is not what was stored")
        require(not rows or max(rows.values()) == 1, f"twice: {rows.most_common(1)}")
        lost = {key for key in said.chunks - rows.keys() if key[0] not in said.deleted}
        require(not lost, f"acknowledged and lost: {sorted(lost)}")
        for label in said.labels:
            require(label in reader.index.labels(label.episode), f"acknowledged and lost: {label}")
        check_drawable(reader.index)
        check_damage(reader.damaged, torn)


def check_drawable(index: Index) -> None:
    """No step that can be sampled is followed by another episode's, or by one that is not the next."""
    rows = np.flatnonzero(index.steps.alive)
    after = index.successor(rows)
    rows, after = rows[after >= 0], after[after >= 0]
    follows = (index.episode_of(rows) == index.episode_of(after)) & (index.step_of(rows) + 1 == index.step_of(after))
    require(bool(follows.all()), "a torn episode can be sampled")


def check_damage(damaged: list[Damage], torn: bool) -> None:
    """Nothing is called damaged but, after a power cut in the middle of it, an append that was not acknowledged."""
    alarming = [damage for damage in damaged if not (torn and damage.reason.startswith(UNWRITTEN))]
    require(not alarming, f"called damaged: {alarming}")


def check_outbox(state: CrashState, forget: str = "") -> None:
    """As `check_store`, for the outbox's log: nothing that is neither acknowledged nor dropped is lost."""
    said = _said(state.notes)
    disk = Disk(state.content, forget=forget)
    with LogWriter.open(ROOT, segment_bytes=SEGMENT_BYTES, background=False, files=disk.files()) as log:
        log.append(CHUNK_KIND, twofold(PROBE))
        log.sync()
        kept = {name for name, _ in said.chunks | {(PROBE, 0)}} - said.deleted
        want = {twofold(name): name for name in kept}
        for view in (disk, Disk(durable(disk))):
            with LogReader.open(ROOT, files=view.files()) as reader:
                found = [bytes(reader.read(ref)) for batch in reader.refresh() for ref in batch.records]
            lost = sorted(want[body] for body in want.keys() - set(found))
            require(not lost, f"acknowledged and lost: {lost}")
            require(len(found) == len(set(found)), "a record appears twice")
            check_damage(reader.damaged, state.torn)


def check_repair(state: CrashState, forget: str = "") -> None:
    """What was set aside stays so, with its bytes; nothing is listed as set aside of which there is no copy."""
    said, disk = _said(state.notes), Disk(state.content)
    with StoreReader.open(ROOT, files=disk.files()) as reader:
        reader.refresh()
        lost = {key for key in said.chunks - whole_chunks(reader) if key[0] not in said.deleted}
        require(not lost, f"neighbours lost: {sorted(lost)}")
        require(all(damage.segment >= 0 for damage in reader.damaged), f"{reader.damaged}")
    found = manifest.load(disk.files(), ROOT)
    require(found is not None, "no manifest")
    listed = found.quarantined if found else ()
    for damage in said.quarantined:
        require(any(each.covers(damage) for each in listed), f"forgotten: {damage}")
    for each in listed:
        stem = next(name for name in state.content if name.startswith(f"{each.number:010d}") and name.endswith(".seg"))
        copy = f"{QUARANTINE}/{stem.removesuffix('.seg')}-{each.offset:012d}.bytes"
        original = state.content[stem][each.offset : each.offset + each.length]
        require(state.content.get(copy) == original, f"listed and not copied: {each}")


def durable(disk: Disk) -> dict[str, bytes]:
    """What is on the disk for certain."""
    state = State(dict(disk.start.durable), {}, dict(disk.start.names), [])
    for event in disk.trace:
        state.advance(event)
    return state.outcome(Choice(0.0, 0.0))


def current(disk: Disk) -> dict[str, bytes]:
    """What a process sees."""
    return {name: bytes(disk.files_by_number[file]) for name, file in disk.names.items()}


Check = Callable[[CrashState, str], None]


class Story(NamedTuple):
    """A life that was lived on `disk`; crashes from event `first` on are of interest, and judged by `check`."""

    disk: Disk
    check: Check
    first: int = 0


def story(run: Callable[[Life], None], forget: str, kill_at: int = -1) -> Story:
    """A store's life; with `kill_at` the process is killed at that event, and another one goes on."""
    disk = Disk(forget=forget, kill_at=kill_at)
    life = Life(disk)
    try:
        run(life)
    except (StoreError, Dead):
        if kill_at < 0:
            raise
        disk.room_bytes = None
        resume(life)
    return Story(disk, check_store, max(0, kill_at))


def outbox_story(forget: str) -> Story:
    disk = Disk(forget=forget)
    outbox(disk)
    return Story(disk, check_outbox)


def repair_story(forget: str) -> Story:
    content, said = damaged_store()
    disk = Disk(content, forget=forget)
    repairing(disk, said)
    return Story(disk, check_repair)
