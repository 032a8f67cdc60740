"""Fault injection on a store, counted in one table: ``python chaos.py`` (``make chaos-store``; ``--quick``).

Kills at random and at every file operation, failing and full disks, flipped bits, truncated, swapped and lost files,
and power cuts at every moment. Exits with 1 if acknowledged data was lost, repeated or torn, or damage unnoticed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crash_scenarios import Acknowledged, Scenario, Violation, compacting, current, require, resume, whole_chunks
from crash_states import SCENARIOS, judge
from disk_model import ROOT, Dead, Disk
from rich.console import Console
from rich.table import Table

from user_sys.errors import StoreError
from user_sys.store.manifest import MANIFEST
from user_sys.store.record_format import SEGMENT_HEADER_BYTES
from user_sys.store.store import StoreReader
from user_sys.store.verify import quarantine_damage, verify_log

LOOP = Path(__file__).with_name("kill_loop.py")
KILL_TIMEOUT_S = 600.0


@dataclass
class Row:
    """Attempts and failures of one kind of fault; `note` is the first failure, or the reason why it was skipped."""

    kind: str
    cases: int = 0
    lost: int = 0
    duplicated: int = 0
    torn: int = 0
    undetected: int = 0
    note: str = ""

    @property
    def failures(self) -> int:
        return self.lost + self.duplicated + self.torn + self.undetected

    def attempt(self, case: Callable[[], None], where: str) -> None:
        """Runs one case and counts a broken promise."""
        self.cases += 1
        try:
            case()
        except (Violation, StoreError) as error:
            self.fail(f"{where}: {error}")

    def fail(self, why: str) -> None:
        self.note = self.note or why
        if "twice" in why:
            self.duplicated += 1
        elif "not what was stored" in why:
            self.torn += 1
        elif "not noticed" in why:
            self.undetected += 1
        else:
            self.lost += 1


def random_kills(kills: int) -> Row:
    """``kill -9`` of a writer on a real disk, with a reader alive."""
    row = Row("kill -9 at random, a reader alive")
    for seed in range(0, kills, 100):
        count = min(100, kills - seed)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(LOOP), f"{folder}/store", str(count), str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=KILL_TIMEOUT_S, check=False)
        row.cases += count
        if done.returncode:
            row.fail(done.stderr.strip().splitlines()[-1])
    return row


def kills_at_operations(step: int) -> Row:
    """Kills after each change of a file or a name; the next writer is killed too."""
    row = Row("kill at each file operation, twice")
    for name, run in SCENARIOS.items():
        whole = Disk()
        run(Scenario(whole))
        for at in range(2, len(whole.trace), step):
            row.attempt(lambda run=run, at=at: killed_twice(run, at), f"{name} at {at}")  # type: ignore[misc]
    return row


def killed_twice(run: Callable[[Scenario], None], at: int) -> None:
    """Kills at an event, and kills the next writer during recovery; the third must find everything."""
    disk = Disk(kill_at=at)
    scenario = Scenario(disk)
    with contextlib.suppress(StoreError, Dead):
        run(scenario)
    disk.room_bytes, disk.kill_at = None, len(disk.trace) + 1 + at % 7
    with contextlib.suppress(StoreError, Dead):
        resume(scenario)
    disk.kill_at = -1
    resume(scenario)
    look(disk, scenario)


def look(disk: Disk, scenario: Scenario) -> None:
    with StoreReader.open(ROOT, files=disk.files()) as reader:
        reader.refresh()
        found = whole_chunks(reader)
        lost = {key for key in scenario.acknowledged.chunks - found if key[0] not in scenario.acknowledged.deleted}
        require(not lost, f"acknowledged and lost: {sorted(lost)}")
        require(len(found) == len(reader.index.chunks), "a chunk is there twice")
        require(not reader.damaged, f"called damaged: {reader.damaged}")


def errors_at_operations(code: int, step: int) -> Row:
    """One operation fails; the writer raises or continues, is used again, and the next one finds all acknowledged."""
    row = Row(f"{errno.errorcode[code]} at each file operation")
    for name, run in SCENARIOS.items():
        whole = Disk()
        run(Scenario(whole))
        for at in range(2, len(whole.trace), step):
            if whole.trace[at - 1].kind != "note":
                row.attempt(lambda run=run, at=at: failed(run, at, code), f"{name} at {at}")  # type: ignore[misc]
    return row


def failed(run: Callable[[Scenario], None], at: int, code: int) -> None:
    disk = Disk()
    disk.fail_at, disk.fail_with = at, code
    scenario = Scenario(disk)
    with contextlib.suppress(StoreError):
        run(scenario)
    require(disk.fail_at < 0, "no operation failed")
    disk.room_bytes = None
    if hasattr(scenario, "writer"):
        scenario.pending = Acknowledged()  # refused or not acknowledged
        with contextlib.suppress(StoreError):  # an unusable writer refuses this
            scenario.append("retried", 0)
            scenario.sync()
    disk.kill()
    resume(scenario)
    look(disk, scenario)


def held(content: dict[str, bytes]) -> set[tuple[str, int]]:
    """The readable chunks; each must be unchanged."""
    with StoreReader.open(ROOT, files=Disk(content).files()) as reader:
        reader.refresh()
        return whole_chunks(reader)


def damaged(content: dict[str, bytes], name: str, changed: bytes, most_lost: int) -> None:
    """The change is reported, costs at most `most_lost` chunks, and after quarantine the store is sound."""
    before, disk = held(content), Disk({**content, name: changed})
    found = verify_log(ROOT, files=disk.files())
    left = held(current(disk))
    require(len(before - left) <= most_lost, f"{sorted(before - left)} lost")
    require(bool(found) or (left == before and is_padding(content[name], changed)), "damage was not noticed")
    quarantine_damage(ROOT, found, files=disk.files())
    require(not verify_log(ROOT, files=disk.files()), "damage that is set aside is reported again")


def is_padding(raw: bytes, changed: bytes) -> bool:
    """Whether only padding bytes changed."""
    at = next((at for at, (old, new) in enumerate(zip(raw, changed, strict=False)) if old != new), 0)
    return not any(raw[at : at + 8 - at % 8])


def bit_flips(content: dict[str, bytes], payload_places: int, step: int = 1) -> Iterator[Row]:
    """In one of `step` bytes of segment headers, first record headers, trailers and the manifest, and at random."""
    manifest, frame, payload = (
        Row("bit flips: manifest"),
        Row("bit flips: headers, trailers"),
        Row("bit flips: records"),
    )
    segments = sorted(name for name in content if name.endswith(".seg"))
    for at in range(0, len(content[MANIFEST]), step):
        flip(manifest, content, MANIFEST, at)
    for name in segments:
        size = len(content[name])
        for at in sorted({*range(min(96, size)), *range(max(0, size - 64), size)})[::step]:
            flip(frame, content, name, at)
    rng = random.Random(0)
    for _ in range(payload_places):
        name = rng.choice(segments)
        flip(payload, content, name, rng.randrange(64, len(content[name])))
    yield from (manifest, frame, payload)


def flip(row: Row, content: dict[str, bytes], name: str, at: int) -> None:
    raw = content[name]
    changed = raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :]
    row.attempt(lambda: damaged(content, name, changed, 1), f"{name} {at}")


def zeroed_pages(content: dict[str, bytes]) -> Row:
    row = Row("512 bytes zeroed")
    for name, raw in content.items():
        for at in range(0, len(raw), 512) if name.endswith(".seg") else ():
            changed = raw[:at] + bytes(len(raw[at : at + 512])) + raw[at + 512 :]
            if changed != raw:
                row.attempt(lambda n=name, c=changed: damaged(content, n, c, 3), f"{name} {at}")  # type: ignore[misc]
    return row


def truncations(content: dict[str, bytes], step: int) -> Row:
    """The last segment truncated at each offset: earlier chunks remain, and the store continues."""
    row, name = Row("truncation of the tail"), max(name for name in content if name.endswith(".seg"))
    ends = chunk_ends(content, int(name[:10]))
    for at in range(SEGMENT_HEADER_BYTES, len(content[name]), step):
        row.attempt(lambda at=at: truncated(content, name, at, ends), f"{name} at {at}")  # type: ignore[misc]
    return row


def chunk_ends(content: dict[str, bytes], segment: int) -> dict[tuple[str, int], int]:
    """End of each chunk's record; 0 for those of other segments."""
    with StoreReader.open(ROOT, files=Disk(content).files()) as reader:
        reader.refresh()
        found = {}
        for at in range(len(reader.index.chunks)):
            header, ref = reader.read_packed(at).header, reader.index.record_ref(at)
            found[header.episode, header.index] = ref.offset + 32 + ref.length if ref.segment == segment else 0
        return found


def truncated(content: dict[str, bytes], name: str, at: int, ends: dict[tuple[str, int], int]) -> None:
    disk = Disk({**content, name: content[name][:at]})
    Scenario(disk).open()
    missing = {key for key, end in ends.items() if end <= at} - held(current(disk))
    require(not missing, f"lost: {sorted(missing)}")
    require(not verify_log(ROOT, files=disk.files()), "damage after a cut tail")


def exchanged_files(content: dict[str, bytes], other: dict[str, bytes]) -> Row:
    """Segments swapped, missing, foreign, truncated; the manifest missing."""
    row, segments = Row("files swapped, foreign, missing, cut"), sorted(n for n in content if n.endswith(".seg"))
    foreign = next(body for name, body in other.items() if name.endswith(".seg"))
    for name in segments[:-1]:
        following = segments[segments.index(name) + 1]
        for what, changed in (
            ("swapped", {name: content[following], following: content[name]}),
            ("foreign", {name: foreign}),
            ("cut", {name: content[name][:-8]}),
            ("missing", {}),
        ):
            files = {**{n: body for n, body in content.items() if what != "missing" or n != name}, **changed}
            row.attempt(lambda f=files: noticed(f), f"{name} {what}")  # type: ignore[misc]
    row.attempt(lambda: noticed({n: b for n, b in content.items() if n != MANIFEST}), "no manifest")
    return row


def noticed(content: dict[str, bytes]) -> None:
    disk = Disk(content)
    found = verify_log(ROOT, files=disk.files())
    require(bool(found), "damage was not noticed")
    held(content)  # readable chunks are unchanged
    Scenario(disk).open()  # a writer can continue


def sound_store() -> dict[str, bytes]:
    """Sealed, rewritten and active segments."""
    disk = Disk()
    scenario = Scenario(disk)
    compacting(scenario)
    scenario.open()
    scenario.append_many("more", range(3))
    scenario.writer.rotate()
    scenario.append_many("tail", range(3))
    scenario.sync()
    disk.kill()
    return current(disk)


def power_cuts(kill_every: int, chances: int) -> Iterator[Row]:
    verdict = judge(kill_every, chances)
    for name, result in verdict.scenarios.items():
        yield Row(f"power cut: {name}", result.states, lost=result.violations, note=result.first)
    missed = [site for site, how in verdict.caught.items() if not how]
    yield Row("one sync left out", len(verdict.caught), undetected=len(missed), note=" ".join(missed))


def rows(quick: bool) -> Iterator[Row]:
    content, step = sound_store(), 9 if quick else 1
    yield from bit_flips(content, 100 if quick else 1000)
    yield zeroed_pages(content)
    yield truncations(content, 29 if quick else 1)
    yield exchanged_files(content, sound_store())
    yield kills_at_operations(step)
    for code in (errno.EIO, errno.ENOSPC, errno.EMFILE):
        yield errors_at_operations(code, step)
    if not quick:
        yield random_kills(1000)
        yield from power_cuts(2, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part, without the random kills and power cuts")
    quick = parser.parse_args().quick
    logging.disable(logging.CRITICAL)
    console, failures = Console(width=150), 0
    table = Table("kind", *("cases", "lost", "duplicated", "torn", "undetected"), "note")
    for row in rows(quick):
        failures += row.failures
        counts = (row.cases, row.lost, row.duplicated, row.torn, row.undetected)
        table.add_row(row.kind, *map(str, counts), row.note[:300])
        console.print(f"{row.kind}: {row.cases} cases, {row.failures} failures {row.note[:300]}")
    console.print(table)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
