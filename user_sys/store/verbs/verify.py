"""``user-sys store verify`` and ``repair``."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from user_sys.errors import StoreCorrupt
from user_sys.store import manifest
from user_sys.store.damage import QUARANTINE, quarantine, verify
from user_sys.store.files import REAL
from user_sys.store.frame import Damage
from user_sys.store.segments import choose, list_segments
from user_sys.store.store import StoreReader
from user_sys.store.upkeep import disk_bytes
from user_sys.store.verbs.losses import EpisodeLoss, Finding, Gap, episode_losses, gaps, name_losses
from user_sys.store.verbs.words import EXIT_DAMAGED, Advance, bytes_bar, size_text, tell, tell_json

MAX_LINES = 20


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What reading all of a store found.

    Attributes:
        episodes, chunks, steps: that can be read.
        findings: damage that is not quarantined, in order of place.
        episodes_hit: what the findings took from each episode.
        gaps: chunks that are missing in the middle of episodes, whether damage took them or they never came.
        copies: where `repair` put what it set aside.
    """

    path: str
    size_bytes: int
    seconds: float
    episodes: int
    chunks: int
    steps: int
    findings: tuple[Finding, ...]
    episodes_hit: tuple[EpisodeLoss, ...]
    gaps: tuple[Gap, ...]
    copies: tuple[str, ...] = ()


def examine(path: Path, advance: Advance) -> tuple[Verdict, list[Damage]]:
    """Reads all of the store at `path`, which another process may be writing; what it says, and the damage itself.

    Raises:
        StoreError: there is no store, or it cannot be read.
        StoreVersion: another format version wrote it.
    """
    started = time.monotonic()
    found = verify(path, advance=advance)
    seconds = time.monotonic() - started
    with StoreReader.open(path) as reader:
        reader.refresh()
        index = reader.index
        found += _meaningless(path, reader.damaged, found)
        findings = name_losses(path, index, found)
        hit = episode_losses(index, findings)
        lost = {chunk for each in findings if each.surely and each.length for chunk in each.chunks}
        verdict = Verdict(
            path=str(path),
            size_bytes=disk_bytes(path),
            seconds=seconds,
            episodes=len(index.episodes)
            - sum(each.what == "gone" and index.episodes.find(each.episode) >= 0 for each in hit),
            chunks=int((~index.chunks.gone).sum()) - len(lost),
            steps=int(index.chunks.steps[~index.chunks.gone].sum()) - sum(chunk.steps for chunk in lost),
            findings=tuple(findings),
            episodes_hit=tuple(hit),
            gaps=tuple(gaps(index)),
        )
    return verdict, found


def _meaningless(path: Path, damaged: Sequence[Damage], found: Sequence[Damage]) -> list[Damage]:
    """Records that are whole, as far as the log can tell, and do not decode; unless they are quarantined."""
    try:
        known = manifest.load(REAL, path)
    except StoreCorrupt:
        known = None  # `verify` has named it
    quarantined = known.quarantined if known is not None else ()
    generations = {name.number: name.generation for name in choose(list_segments(path))[0]}
    places = {(each.segment, each.offset) for each in found}
    left = []
    for each in damaged:
        if each.segment < 0 or (each.segment, each.offset) in places:
            continue
        placed = replace(each, generation=generations.get(each.segment, 0))
        if not any(range_.covers(placed) for range_ in quarantined):
            left.append(placed)
    return left


def verify_main(args: argparse.Namespace) -> int:
    """Runs ``verify``; status 1 where there is damage. Raises as `examine`."""
    verdict, _ = _examined(args.path)
    if args.json:
        tell_json(verdict)
    else:
        _show(verdict)
        if verdict.findings:
            tell(f"`user-sys store repair {args.path}` sets it aside; the records beside it stay as they are")
    return EXIT_DAMAGED if verdict.findings else 0


def _examined(path: Path) -> tuple[Verdict, list[Damage]]:
    logger = logging.getLogger("user_sys.store")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it would warn of is about to be told
    try:
        with bytes_bar("reading", disk_bytes(path)) as advance:
            return examine(path, advance)
    finally:
        logger.setLevel(level)


def repair_main(args: argparse.Namespace) -> int:
    """Runs ``repair``; status 1 only where a dry run found damage.

    Raises:
        StoreLocked: another process writes the store.
        StoreFull, StoreError: as `quarantine`.
    """
    if args.dry_run:
        return verify_main(args)
    verdict, found = _examined(args.path)
    if found:
        copies = quarantine(args.path, found)
        verdict = msgspec.structs.replace(verdict, copies=tuple(str(copy) for copy in copies))
    if args.json:
        tell_json(verdict)
        return 0
    _show(verdict)
    if found:
        tell(f"set aside: {len(found)} places, {len(verdict.copies)} copies in {args.path / QUARANTINE}")
    return 0


def _show(verdict: Verdict) -> None:
    speed = verdict.size_bytes / max(verdict.seconds, 1e-9)
    tell(
        f"{verdict.path}: {size_text(verdict.size_bytes)} read in {verdict.seconds:.3g} s ({speed / 1e9:.2f} GB/s): "
        f"{verdict.episodes} episodes, {verdict.chunks} chunks, {verdict.steps} steps"
    )
    if not verdict.findings:
        tell("nothing is damaged")
    else:
        Console().print(_table(verdict.findings))
        for line in _bounded([str(loss) for loss in verdict.episodes_hit], "episodes"):
            tell(line)
    named = {chunk.episode for finding in verdict.findings for chunk in finding.chunks}
    for gap in verdict.gaps:
        last = gap.first_step + gap.steps - 1
        cause = "" if gap.episode in named else " (never came, or lost before)"
        tell(f"{gap.episode} lacks steps {gap.first_step} to {last}{cause}")


def _table(findings: Sequence[Finding]) -> Table:
    columns = [Column(name, no_wrap=True) for name in ("segment", "offset", "bytes", "record")]
    table = Table(*columns, "what is wrong, and what it held", box=None, header_style="bold")
    for each in findings:
        held = [f"{chunk}{'' if each.surely else ' (by its own word)'}" for chunk in each.chunks]
        last = f" to {each.last_sequence}" if each.last_sequence > each.sequence else ""
        table.add_row(
            "manifest" if each.segment < 0 else str(each.segment),
            str(each.offset),
            str(each.length),
            "?" if each.sequence < 0 else f"{each.sequence}{last}",
            Text("\n".join([each.reason, *_bounded(held, "chunks")])),
        )
    return table


def _bounded(lines: list[str], what: str) -> list[str]:
    """The first `MAX_LINES`, and how many there are more."""
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"and {more} more {what}, which --json names"]
