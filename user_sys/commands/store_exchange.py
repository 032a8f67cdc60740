"""``user-sys store export`` and ``user-sys store import``."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console

from user_sys.commands.output import SUCCESS, step_bar
from user_sys.commands.store_inspect import filter_from_args
from user_sys.episode import EpisodeSource
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader, load_robot_specs
from user_sys.robot_records import (
    ROBOTS_FOLDER,
    copy_robot_records,
    read_robot_records,
    robot_records_of_store,
    save_robot_record,
)
from user_sys.store.store import StoreReader

META = "meta"  # folder of the robot specs in a dataset


def export_main(args: argparse.Namespace) -> int:
    """Runs ``export``. Raises DataSetError, StoreError and OSError."""
    episode_filter = filter_from_args(args, incomplete=args.incomplete)
    export = _export_lerobot if args.format == "lerobot" else _export_mcap
    text, left_out = export(args, episode_filter), _count_unfinished(args.path, episode_filter)
    if left_out:
        text += f"\n{left_out} episodes that never ended were skipped (--incomplete exports them)"
    _print_line(text)
    return 0


def _count_unfinished(store: Path, episode_filter: EpisodeFilter) -> int:
    """Number of episodes that `episode_filter` excludes only because they never ended."""
    with StoreReader.open(store) as reader:
        reader.refresh()
        episodes = reader.episodes()
    loosened = msgspec.structs.replace(episode_filter, incomplete=True)
    return sum(not each.deleted and loosened.matches(each) and not episode_filter.matches(each) for each in episodes)


def _export_lerobot(args: argparse.Namespace, episode_filter: EpisodeFilter) -> str:
    from user_sys.interchange.lerobot_export import LerobotExportOptions, export_lerobot, open_plan

    if args.codec and args.cameras != "video":
        raise DataSetError("--codec requires --cameras video")
    codec = (args.codec or "h264") if args.cameras == "video" else None
    plan = open_plan(args.path, args.output, LerobotExportOptions(selection=episode_filter, codec=codec, fps=args.fps))
    with step_bar("exporting", plan.steps) as advance:
        export_lerobot(plan, args.output, advance)
    for card in robot_records_of_store(args.path):
        for each in plan.data_sets:
            if each.embodiment == card.spec.embodiment:
                save_robot_record(args.output / each.folder / META / ROBOTS_FOLDER, card.robot, card.spec)
    lines = [
        f"{args.output / each.folder}: {each.episodes} episodes, {each.steps} steps at {each.fps:g} Hz, "
        f"{each.robot_type or 'robot'} ({each.embodiment})"
        for each in plan.data_sets
    ]
    if len(lines) > 1:
        lines.append("each embodiment has a LeRobot dataset of its own")
    if args.fps is None and not all(each.robot_type for each in plan.data_sets):
        lines.append("the store has no robot specs: the rate comes from the recorded times (--fps sets it)")
    return "\n".join(lines)


def _export_mcap(args: argparse.Namespace, episode_filter: EpisodeFilter) -> str:
    from user_sys.interchange.mcap_export import export_mcap

    if args.cameras or args.codec or args.fps:
        raise DataSetError("--cameras, --codec and --fps require --format lerobot")
    with StoreReader.open(args.path) as store:
        reader = EpisodeReader(store)
        episodes = reader.select(episode_filter)
        with step_bar("exporting", sum(episode.steps for episode in episodes)) as advance:
            written = export_mcap(reader, episodes, args.output, load_robot_specs(args.path), advance)
    existing = len(episodes) - written
    return f"{args.output}: {written} recordings written" + (f", {existing} already existed" if existing else "")


def import_main(args: argparse.Namespace) -> int:
    """Runs ``import``. Raises as `export_main`."""
    from user_sys.interchange.lerobot_import import ImportOptions, LerobotDataset, import_lerobot

    if args.output.resolve() == args.path.resolve():
        raise DataSetError(f"{args.output} is the dataset itself; choose another folder for the store")
    options = ImportOptions(
        source=None if args.source is None else EpisodeSource(args.source),
        robot=args.robot,
        task=args.task,
        embodiment=args.embodiment or "",
        success=SUCCESS[args.success],
        frames=args.frames,
    )
    data_set = LerobotDataset.open(args.path)
    with step_bar("importing", data_set.info.total_frames) as advance:
        done = import_lerobot(data_set, args.path, Path(args.output), options, advance)
    copy_robot_records(read_robot_records(args.path / META / ROBOTS_FOLDER), args.output)
    existing = f", {done.already_stored} already existed" if done.already_stored else ""
    left_out = f"; skipped features: {', '.join(done.skipped_features)}" if done.skipped_features else ""
    _print_line(f"{args.output}: {done.episodes} episodes added, {done.steps} steps{existing}{left_out}")
    return 0


def _print_line(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)
