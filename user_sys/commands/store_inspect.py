"""``user-sys store inspect PATH``: contents of a store, for a person or, with ``--json``, for a program."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from user_sys.commands import episode_detail
from user_sys.commands.output import EXIT_DAMAGED, count_bar, print_json, print_line, size_text
from user_sys.episode import EpisodeSource
from user_sys.errors import StoreError
from user_sys.interchange.episodes import ControlledBy, EpisodeFilter, EpisodeReader, load_robot_specs
from user_sys.store.index import EpisodeSummary
from user_sys.store.maintenance import disk_bytes
from user_sys.store.record_format import Damage, segment_numbers
from user_sys.store.store import StoreReader

WIDE_COLUMNS = 120
LAST_EPISODES = 20
LAST_PICTURES = 5
EVERYTHING = EpisodeFilter(incomplete=True)


class StoreSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a store; `last` are the newest episodes, oldest first.

    `segments`, `size_bytes` and `damaged` describe the whole store, the other fields the filtered episodes.
    """

    path: str
    episodes: int
    complete: int
    successes: int
    failures: int
    steps: int
    intervention_steps: int
    chunks: int
    segments: int
    size_bytes: int
    sources: dict[str, int]
    embodiments: dict[str, int]
    damaged: list[Damage]
    last: list[EpisodeSummary]


def summarise_store(path: Path, last: int = LAST_EPISODES, episode_filter: EpisodeFilter = EVERYTHING) -> StoreSummary:
    """Summary of the store at `path`, which another process may be writing; `last` are the newest matching episodes.

    Raises:
        StoreError: there is no store at `path`, it cannot be read, or has no such episode.
    """
    with StoreReader.open(path) as reader:
        reader.refresh()
        episodes, damaged = reader.episodes(), reader.damaged
    _require_named(episodes, path, episode_filter)
    episodes = [episode for episode in episodes if episode_filter.matches(episode)]
    return StoreSummary(
        path=str(path),
        episodes=len(episodes),
        complete=sum(episode.complete for episode in episodes),
        successes=sum(episode.success is True for episode in episodes),
        failures=sum(episode.success is False for episode in episodes),
        steps=sum(episode.steps for episode in episodes),
        intervention_steps=sum(episode.intervention_steps for episode in episodes),
        chunks=sum(episode.chunks for episode in episodes),
        segments=len(segment_numbers(path)),
        size_bytes=disk_bytes(path),
        sources=_count([str(episode.source) for episode in episodes]),
        embodiments=_count([episode.embodiment for episode in episodes]),
        damaged=damaged,
        last=episodes[-last:] if last > 0 else [],
    )


def _count(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def _totals(summary: StoreSummary) -> Table:
    table = Table(show_header=False, box=None, title=Text(summary.path), title_justify="left")
    outcomes = f"{summary.successes} succeeded, {summary.failures} failed, {summary.complete} complete"
    table.add_row("episodes", f"{summary.episodes} ({outcomes})")
    table.add_row("steps", f"{summary.steps} ({summary.intervention_steps} by a person), in {summary.chunks} chunks")
    table.add_row("size", f"{size_text(summary.size_bytes)} in {summary.segments} segments")
    table.add_row("sources", ", ".join(f"{name} {n}" for name, n in summary.sources.items()) or "none")
    table.add_row(
        "embodiments", ", ".join(f"{name} ({n} episodes)" for name, n in summary.embodiments.items()) or "none"
    )
    table.add_row("damaged", f"{len(summary.damaged)} records" if summary.damaged else "none")
    return table


def _episodes(episodes: Sequence[EpisodeSummary], wide: bool) -> Table:
    """One row per episode; a narrow terminal gets fewer columns."""
    columns = ["episode", "source", "steps", "success", "by hand", "state"]
    columns += ["task", "return", "policy versions", "robot"] if wide else []
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, header_style="bold")
    for episode in episodes:
        row = _row(episode)
        table.add_row(*(Text(row[name]) for name in columns))
    return table


def _row(episode: EpisodeSummary) -> dict[str, str]:
    low, high = episode.policy_versions
    success = {None: "?", True: "yes", False: "no"}[episode.success]
    return {
        "episode": episode.episode,
        "source": str(episode.source),
        "steps": str(episode.steps),
        "success": success + (f" ({episode.labelled_by})" if episode.labelled_by else ""),
        "by hand": str(episode.intervention_steps),
        "state": "deleted" if episode.deleted else "complete" if episode.complete else "open",
        "task": episode.task,
        "return": f"{episode.episode_return:.2f}",
        "policy versions": "" if high < 0 else f"{low} to {high}",
        "robot": episode.robot,
    }


def _damage(damaged: Sequence[Damage]) -> Table:
    table = Table("segment", "offset", "bytes", "reason", title="damaged", title_justify="left")
    for each in damaged:
        table.add_row(str(each.segment), str(each.offset), str(each.length), Text(each.reason))
    return table


def _show(summary: StoreSummary, console: Console) -> None:
    parts = [_totals(summary)]
    parts += [_damage(summary.damaged)] if summary.damaged else []
    parts += [_episodes(summary.last, wide=console.width >= WIDE_COLUMNS)] if summary.last else []
    console.print(Group(*parts))


def inspect_main(args: argparse.Namespace) -> int:
    """Runs ``inspect``; status 1 if there is damage.

    Raises:
        StoreError: there is no store, it cannot be read, has no such episode, or the options conflict.
        DataSetError: a frame cannot be drawn.
    """
    if args.json and (args.pictures or args.video):
        raise StoreError("--json cannot be combined with --pictures or --video")
    episode_filter = filter_from_args(args, incomplete=True)
    if args.pictures or args.video:
        return _draw(args, episode_filter)
    if len(args.episode) == 1:
        return _detail(args, episode_filter)
    summary = summarise_store(args.path, args.last or LAST_EPISODES, episode_filter)
    if args.json:
        print_json(summary)
    else:
        _show(summary, Console())
    return EXIT_DAMAGED if summary.damaged else 0


def filter_from_args(args: argparse.Namespace, *, incomplete: bool) -> EpisodeFilter:
    """The filter of the options; `incomplete` includes episodes that never ended."""
    return EpisodeFilter(
        episodes=tuple(args.episode),
        sources=tuple(EpisodeSource(each) for each in args.source),
        tasks=tuple(args.task),
        driven=tuple(ControlledBy(each) for each in args.driven),
        success=None if args.success is None else args.success == "yes",
        incomplete=incomplete,
    )


def _matching(reader: StoreReader, path: Path, episode_filter: EpisodeFilter) -> list[EpisodeSummary]:
    """The filtered episodes. Raises StoreError: there are none, or a named one is unknown."""
    episodes = reader.episodes()
    _require_named(episodes, path, episode_filter)
    matching = [episode for episode in episodes if episode_filter.matches(episode)]
    if not matching:
        raise StoreError(f"none of the {len(episodes)} episodes of {path} matches; change the filters")
    return matching


def _require_named(episodes: Sequence[EpisodeSummary], path: Path, episode_filter: EpisodeFilter) -> None:
    missing = set(episode_filter.episodes) - {episode.episode for episode in episodes}
    if missing:
        raise StoreError(f"{path} has no episode {min(missing)!r}; `user-sys store inspect {path}` lists them")


def _detail(args: argparse.Namespace, episode_filter: EpisodeFilter) -> int:
    with StoreReader.open(args.path) as reader:
        reader.refresh()
        found = episode_detail.describe_episode(reader, _matching(reader, args.path, episode_filter)[0])
        damaged = bool(reader.damaged) or any(chunk.state == "damaged" for chunk in found.chunks)
    if args.json:
        print_json(found)
    else:
        episode_detail.show_episode(found)
    return EXIT_DAMAGED if damaged else 0


def _draw(args: argparse.Namespace, episode_filter: EpisodeFilter) -> int:
    from user_sys.commands.episode_pictures import draw_episode, draw_overview, write_episode_video

    specs = load_robot_specs(args.path)
    with StoreReader.open(args.path) as store:
        reader = EpisodeReader(store)
        matching = _matching(store, args.path, episode_filter)[-(args.last or LAST_PICTURES) :]
        episodes = [each for each in matching if reader.steps(each.episode)]
        with count_bar("drawing episodes", len(episodes)) as advance:
            for each in episodes:
                steps = reader.read(each.episode)
                if args.pictures:
                    draw_episode(each, steps, specs.get(each.embodiment), args.pictures)
                if args.video:
                    write_episode_video(each, steps, specs.get(each.embodiment), args.video)
                advance(1)
        if args.pictures and len(episodes) > 1:
            draw_overview([(each, reader.read(each.episode)) for each in episodes], args.pictures)
        damaged = bool(store.damaged)
    folders = " and ".join(str(folder) for folder in (args.pictures, args.video) if folder)
    print_line(f"{len(episodes)} episodes drawn into {folders}")
    return EXIT_DAMAGED if damaged else 0
