"""What a store's writer does in a life, cut off by a power failure at every moment: ``python crash_states.py [N]``.

Not a test by itself; `test_crash_states.py` runs a part of it. N is the number of chance outcomes for each moment.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from disk_model import CrashState, Disk, Event, State, crash_states
from store_kit import chunk

from user_sys.errors import StoreError
from user_sys.store.block import CHUNK, summarise_records
from user_sys.store.files import Files
from user_sys.store.index import Index
from user_sys.store.known import KnownChunks
from user_sys.store.labels import DeleteLabel, Label, SuccessLabel
from user_sys.store.log import LogReader, LogWriter
from user_sys.store.store import StoreReader, StoreWriter
from user_sys.store.upkeep import reclaim

PATH = Path("/disk")
SEGMENT_BYTES = 4096
PROBE = "probe"


class Said(msgspec.Struct, frozen=True):
    """What was acknowledged by a moment: chunks by (episode, index), labels, and episodes that may be gone."""

    chunks: frozenset[tuple[str, int]] = frozenset()
    labels: tuple[Label, ...] = ()
    deleted: frozenset[str] = frozenset()


def packet(episode: str, index: int) -> bytes:
    """The chunk that the workload stores under this name; of a size that depends on it."""
    return chunk(episode, index, steps=2 + (len(episode) + index) % 3, end=index == 2, width=40 + 30 * index).encode()


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
            PATH, segment_bytes=SEGMENT_BYTES, summarise=summarise_records, background=False, files=files
        )
        self.writer = StoreWriter(PATH, log, known(files))

    def append(self, episode: str, index: int) -> None:
        self.writer.append(packet(episode, index))
        self.pending = msgspec.structs.replace(self.pending, chunks=self.pending.chunks | {(episode, index)})

    def label(self, label: Label) -> None:
        self.writer.append_label(label)
        deleted = self.pending.deleted | ({label.episode} if isinstance(label, DeleteLabel) else set())
        self.pending = msgspec.structs.replace(self.pending, labels=(*self.pending.labels, label), deleted=deleted)

    def sync(self) -> None:
        self.writer.sync()
        self.said = Said(
            self.said.chunks | self.pending.chunks,
            self.said.labels + self.pending.labels,
            self.said.deleted | self.pending.deleted,
        )
        self.pending = Said()
        self.disk.note(self.said)

    def kill(self) -> None:
        self.disk.kill()
        self.pending = Said()

    def reclaim(self) -> None:
        with StoreReader.open(PATH, files=self.disk.files()) as reader:
            reader.refresh()
            assert not [why for why in reclaim(self.writer, reader.index, least_share=0.0) if why]


def known(files: Files) -> KnownChunks:
    """What `StoreWriter.open` learns of a log; here, because the writer's log seals in the foreground."""
    with StoreReader.open(PATH, files=files) as reader:
        reader.refresh()
        return known_of(reader.index)


def known_of(index: Index) -> KnownChunks:
    known = KnownChunks()
    for row in range(len(index.chunks)):
        name = index.episodes.ids.names[int(index.chunks.episode[row])]
        known.add(chunk(name, int(index.chunks.index[row])).header)
    for name in index.episodes.ids.names:
        for label in index.labels(name):
            known.add_label(label)
    return known


def workload(disk: Disk) -> None:
    """Appends, commits, rotations, seals, kills, labels, deletion, compaction, and old segments that are dropped."""
    life = Life(disk)
    life.open()
    for number in range(6):
        for index in range(3):
            life.append(f"ep-{number}", index)
            if (number + index) % 2:
                life.sync()
    life.label(SuccessLabel(episode="ep-1", labeller="ada", at_unix_ns=1, success=False))
    life.sync()
    life.append("ep-6", 0)  # written, and perhaps seen, but never acknowledged by this writer
    life.writer.flush()
    life.kill()
    life.open()
    life.append("ep-6", 0)
    life.append("ep-6", 1)
    life.sync()
    for name in ("ep-0", "ep-2", "ep-3"):
        life.label(DeleteLabel(episode=name, labeller="retention", at_unix_ns=2))
    life.sync()
    life.writer.rotate()
    life.reclaim()
    for index in range(3):
        life.append("ep-7", index)
    life.sync()
    life.append("ep-8", 0)
    life.kill()
    life.open()
    life.label(DeleteLabel(episode="ep-4", labeller="retention", at_unix_ns=3))
    life.sync()
    life.writer.rotate()
    life.reclaim()
    life.append("ep-9", 0)
    life.sync()
    life.writer.close()


def workload_of_an_outbox(disk: Disk) -> None:
    """A log whose oldest segments are dropped, as an edge's outbox does; opened again in between."""
    said = Said()
    for first in range(0, 18, 6):
        files = disk.files()
        with LogWriter.open(PATH, segment_bytes=SEGMENT_BYTES, background=False, files=files) as log:
            for number in range(first, first + 6):
                ref = log.append(CHUNK, packet(f"ep-{number}", 0) + packet(f"ep-{number}", 1))
                log.sync()
                said = msgspec.structs.replace(said, chunks=said.chunks | {(f"ep-{number}", 0)})
                disk.note(said)
                if number % 4 == 3:
                    gone = frozenset(f"ep-{n}" for n in range(number - 2))
                    disk.note(said := msgspec.structs.replace(said, deleted=gone))
                    log.drop_before(ref.segment - 1)


class Violation(AssertionError):
    """A promise that was broken."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def check_store(state: CrashState, forget: str = "") -> None:
    """Opens what a power cut left, as the next writer would, and compares it with what was acknowledged."""
    said = state.notes[-1] if state.notes else Said()
    assert isinstance(said, Said)
    disk = Disk(state.content, forget=forget)
    life = Life(disk)
    life.open()
    check_content(disk, said)
    life.append(PROBE, 0)
    life.sync()
    check_content(disk, Said(said.chunks | {(PROBE, 0)}, said.labels, said.deleted))
    # What the next writer made of it must itself survive the next power cut, at once.
    after = durable(disk)
    Life(again := Disk(after)).open()
    check_content(again, Said(said.chunks | {(PROBE, 0)}, said.labels, said.deleted))


def durable(disk: Disk) -> dict[str, bytes]:
    """What is on the disk for certain."""
    state = State(dict(disk.start.durable), {}, dict(disk.start.names), [])
    for event in disk.trace:
        state.advance(event)
    return {name: state.durable.get(file, b"") for name, file in state.names.items()}


def check_content(disk: Disk, said: Said) -> None:
    with StoreReader.open(PATH, files=disk.files()) as reader:
        reader.refresh()
        rows = Counter[tuple[str, int]]()
        for row in range(len(reader.index.chunks)):
            found = reader.packed(row)
            key = (found.header.episode, found.header.index)
            rows[key] += 1
            require(bytes(found.packet.view) == packet(*key), f"{key} is not what was stored")
        require(not rows or max(rows.values()) == 1, f"twice: {rows.most_common(1)}")
        lost = {key for key in said.chunks - rows.keys() if key[0] not in said.deleted}
        require(not lost, f"acknowledged and lost: {sorted(lost)}")
        for label in said.labels:
            require(label in reader.index.labels(label.episode) or not _has(reader, label), f"lost: {label}")


def _has(reader: StoreReader, label: Label) -> bool:
    return reader.index.episodes.find(label.episode) >= 0


def check_log(state: CrashState, forget: str = "") -> None:
    """As `check_store`, for the outbox's log: nothing that is neither acknowledged nor dropped is lost."""
    said = state.notes[-1] if state.notes else Said()
    assert isinstance(said, Said)
    disk = Disk(state.content, forget=forget)
    with LogWriter.open(PATH, segment_bytes=SEGMENT_BYTES, background=False, files=disk.files()) as log:
        log.append(CHUNK, packet(PROBE, 0) + packet(PROBE, 1))
        log.sync()
        kept = {name for name, _ in said.chunks | {(PROBE, 0)}} - said.deleted
        want = {packet(name, 0) + packet(name, 1): name for name in kept}
        for view in (disk, Disk(durable(disk))):
            with LogReader.open(PATH, files=view.files()) as reader:
                found = [bytes(reader.read(ref)) for batch in reader.refresh() for ref in batch.records]
            lost = sorted(want[body] for body in want.keys() - set(found))
            require(not lost, f"acknowledged and lost: {lost}")
            require(len(found) == len(set(found)), "a record appears twice")


Check = Callable[[CrashState, str], None]
LIVES: dict[str, tuple[Callable[[Disk], None], Check]] = {
    "store": (workload, check_store),
    "outbox": (workload_of_an_outbox, check_log),
}


@dataclass
class Result:
    """`states`: different ones that were checked; `first`: the first violation, in words; `sites`: the syncs."""

    states: int = 0
    violations: int = 0
    first: str = ""
    sites: tuple[str, ...] = ()


def examine(name: str, *, per_moment: int, seed: int = 0, forget: str = "", stop: bool = False) -> Result:
    """Checks every crash state of one life; with `forget`, of a program that leaves out the sync at that site."""
    run, check = LIVES[name]
    disk = Disk()
    run(disk)
    trace = [event for event in disk.trace if event.site != forget or not forget]
    result = Result(sites=tuple(sorted({event.site for event in disk.trace if event.site})))
    seen: set[int] = set()
    for state in crash_states(disk.start, trace, random.Random(seed), per_moment):
        said = hash(state.notes[-1]) if state.notes else 0
        if (key := hash((said, frozenset(state.content.items())))) in seen:
            continue
        seen.add(key)
        result.states += 1
        if why := _broken(functools.partial(check, state, forget)):
            result.violations += 1
            result.first = result.first or f"event {state.at} ({trace[state.at].kind}): {why}"
            if stop:
                break
    return result


def _broken(check: Callable[[], None]) -> str:
    try:
        check()
    except (Violation, StoreError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def kinds(trace: list[Event]) -> Counter[str]:
    return Counter(event.kind for event in trace)


def main(per_moment: int) -> int:
    failed = 0
    for name in LIVES:
        whole = examine(name, per_moment=per_moment)
        print(f"{name}: {whole.states} crash states, {whole.violations} violations {whole.first}")
        failed += whole.violations
        for site in whole.sites:
            mutant = examine(name, per_moment=per_moment, forget=site, stop=True)
            print(f"  without {site}: {'caught: ' + mutant.first if mutant.violations else 'NOT CAUGHT'}")
            failed += not mutant.violations
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
