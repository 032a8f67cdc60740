"""``user-sys store export`` and ``user-sys store import``."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console

from user_sys.episode import EpisodeSource
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import ControlledBy, EpisodeFilter, EpisodeReader, load_robot_specs, step_bar
from user_sys.robot_records import (
    ROBOTS_FOLDER,
    copy_robot_records,
    read_robot_records,
    robot_records_of_store,
    save_robot_record,
)
from user_sys.store.store import StoreReader

META = "meta"  # the folder of a data set in which the robots' specs go along
_SUCCESS = {"yes": True, "no": False, "unknown": None}


def export_main(args: argparse.Namespace) -> int:
    """Runs ``export``. Raises DataSetError, StoreError and OSError, each with one line that says what to do."""
    selection = EpisodeFilter(
        episodes=tuple(args.episode),
        sources=tuple(EpisodeSource(each) for each in args.source),
        tasks=tuple(args.task),
        driven=tuple(ControlledBy(each) for each in args.driven),
        success=None if args.success is None else _SUCCESS[args.success],
        incomplete=args.incomplete,
    )
    export = _export_lerobot if args.format == "lerobot" else _export_mcap
    told, left_out = export(args, selection), _unended(args.path, selection)
    if left_out:
        told += f"\n{left_out} episodes that never ended are left out (--incomplete takes them)"
    _print_line(told)
    return 0


def _unended(store: Path, selection: EpisodeFilter) -> int:
    """How many episodes `selection` would take, had they ended."""
    with StoreReader.open(store) as reader:
        reader.refresh()
        known = reader.episodes()
    wanted = msgspec.structs.replace(selection, incomplete=True)
    return sum(not each.deleted and wanted.matches(each) and not selection.matches(each) for each in known)


def _export_lerobot(args: argparse.Namespace, selection: EpisodeFilter) -> str:
    from user_sys.interchange.lerobot_export import LerobotExportOptions, export_lerobot, open_plan

    if args.codec and args.cameras != "video":
        raise DataSetError("--codec is that of a video: give --cameras video too")
    codec = (args.codec or "h264") if args.cameras == "video" else None
    plan = open_plan(args.path, args.output, LerobotExportOptions(selection=selection, codec=codec, fps=args.fps))
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
        lines.append("unlike robots do not go into one LeRobot data set: there is one for each embodiment")
    if args.fps is None and not all(each.robot_type for each in plan.data_sets):
        lines.append("no robot's spec lies beside the store: the rate is that of the recorded times (--fps sets it)")
    return "\n".join(lines)


def _export_mcap(args: argparse.Namespace, selection: EpisodeFilter) -> str:
    from user_sys.interchange.mcap_export import export_mcap

    if args.cameras or args.codec or args.fps:
        raise DataSetError("--cameras, --codec and --fps go with --format lerobot only; MCAP takes frames as they are")
    with StoreReader.open(args.path) as store:
        reader = EpisodeReader(store)
        episodes = reader.select(selection)
        with step_bar("exporting", sum(episode.steps for episode in episodes)) as advance:
            written = export_mcap(reader, episodes, args.output, load_robot_specs(args.path), advance)
    there = len(episodes) - written
    return f"{args.output}: {written} recordings written" + (f", {there} were there already" if there else "")


def import_main(args: argparse.Namespace) -> int:
    """Runs ``import``. Raises as `export_main`."""
    from user_sys.interchange.lerobot_import import ImportOptions, LerobotDataset, import_lerobot

    if args.output.resolve() == args.path.resolve():
        raise DataSetError(f"{args.output} is the data set itself; give the store another folder")
    options = ImportOptions(
        source=None if args.source is None else EpisodeSource(args.source),
        robot=args.robot,
        task=args.task,
        embodiment=args.embodiment or "",
        success=_SUCCESS[args.success],
        frames=args.frames,
    )
    data_set = LerobotDataset.open(args.path)
    with step_bar("importing", data_set.info.total_frames) as advance:
        done = import_lerobot(data_set, args.path, Path(args.output), options, advance)
    copy_robot_records(read_robot_records(args.path / META / ROBOTS_FOLDER), args.output)
    known = f", {done.already_stored} were there already" if done.already_stored else ""
    left_out = f"; left out: {', '.join(done.skipped_features)}" if done.skipped_features else ""
    _print_line(f"{args.output}: {done.episodes} episodes added, {done.steps} steps{known}{left_out}")
    return 0


def _print_line(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)
