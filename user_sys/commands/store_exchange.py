"""``user-sys store export`` and ``user-sys store import``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from user_sys.commands.options import (
    PATH,
    SOURCES,
    SUCCESS,
    Number,
    episode_filter_options,
    parse_fingerprint,
    store_argument,
)
from user_sys.commands.output import print_line, progress_bar
from user_sys.commands.store_inspect import make_filter
from user_sys.episode import EpisodeSource
from user_sys.errors import DataSetError
from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader, load_robot_specs
from user_sys.robot_records import (
    ROBOTS_FOLDER,
    copy_robot_records,
    read_robot_records,
    robot_records_of_store,
)
from user_sys.store.store import StoreReader

META = "meta"  # folder of the robot specs in a dataset
MAX_RATE_HZ = 100_000


@click.command()
@store_argument
@click.option("--format", "kind", required=True, type=click.Choice(("lerobot", "mcap")), help="output format")
@click.option("--output", required=True, type=PATH, metavar="DIR", help="folder to write into")
@episode_filter_options
@click.option("--incomplete", is_flag=True, help="also episodes that never ended")
@click.option("--cameras", type=click.Choice(("images", "video")), help="of lerobot; images (default): as recorded")
@click.option(
    "--fps",
    type=Number(0, MAX_RATE_HZ, min_open=True),
    metavar="HZ",
    help="control rate of lerobot (default: from the robot's spec)",
)
@click.option("--use-degrees", is_flag=True, help="of lerobot; angles in degrees, for arms that have them in LeRobot")
def export(
    path: Path,
    kind: str,
    output: Path,
    incomplete: bool,
    cameras: str | None,
    fps: float | None,
    use_degrees: bool,
    **chosen: Any,
) -> None:
    """Write episodes of the store PATH as LeRobot datasets or MCAP recordings.

    After an interruption, MCAP continues; remove a broken LeRobot dataset first.
    """
    episode_filter = make_filter(incomplete=incomplete, **chosen)
    if kind == "mcap" and (cameras or fps or use_degrees):
        raise DataSetError("--cameras, --fps and --use-degrees require --format lerobot")
    if kind == "mcap":
        text = _export_mcap(path, output, episode_filter)
    else:
        options = {"video": cameras == "video", "fps": fps, "use_degrees": use_degrees}
        text = _export_lerobot(path, output, episode_filter, options)
    if left_out := _count_unfinished(path, episode_filter):
        text += f"\n{left_out} episodes that never ended were skipped (--incomplete exports them)"
    print_line(text, error=True)


def _count_unfinished(store: Path, episode_filter: EpisodeFilter) -> int:
    """Number of episodes that `episode_filter` excludes only because they never ended."""
    with StoreReader.open(store) as reader:
        reader.refresh()
        episodes = reader.episodes()
    loosened = msgspec.structs.replace(episode_filter, incomplete=True)
    return sum(not each.deleted and loosened.matches(each) and not episode_filter.matches(each) for each in episodes)


def _export_lerobot(path: Path, output: Path, episode_filter: EpisodeFilter, options: dict[str, Any]) -> str:
    """`options` of `plan_export`."""
    from user_sys.interchange.lerobot_export import export_lerobot, plan_export

    with StoreReader.open(path) as store:
        reader = EpisodeReader(store, trimmed=True)
        plans = plan_export(reader, reader.select(episode_filter), load_robot_specs(path), **options)
        with progress_bar("exporting", sum(plan.steps for plan in plans)) as advance:
            export_lerobot(reader, plans, output, advance)
    records = robot_records_of_store(path)
    for each in plans:
        own = (record for record in records if each.embodiment in record.embodiments)
        copy_robot_records(own, output / each.folder / META)
    lines = [
        f"{output / each.folder}: {each.episodes} episodes, {each.steps} steps at {each.fps:g} Hz, "
        f"{each.robot_type or 'robot'} ({each.embodiment})"
        for each in plans
    ]
    if len(lines) > 1:
        lines.append("each embodiment has a LeRobot dataset of its own")
    if options["fps"] is None and not all(each.robot_type for each in plans):
        lines.append("the store has no robot specs: the rate comes from the recorded times (--fps sets it)")
    return "\n".join(lines)


def _export_mcap(path: Path, output: Path, episode_filter: EpisodeFilter) -> str:
    from user_sys.interchange.mcap_export import export_mcap

    with StoreReader.open(path) as store:
        reader = EpisodeReader(store, trimmed=True)
        episodes = reader.select(episode_filter)
        with progress_bar("exporting", sum(reader.steps(each.episode) for each in episodes)) as advance:
            written = export_mcap(reader, episodes, output, load_robot_specs(path), advance)
    existing = len(episodes) - written
    return f"{output}: {written} recordings written" + (f", {existing} already existed" if existing else "")


@click.command()
@click.argument("path", type=PATH, metavar="DIR")
@click.option("--output", required=True, type=PATH, metavar="STORE", help="store to add to")
@click.option("--source", type=click.Choice(SOURCES), help="of the episodes (default: as recorded, or demo)")
@click.option("--robot", default="", metavar="NAME", help="if missing (default: the dataset's robot type)")
@click.option("--task", default="", metavar="NAME", help="if missing (default: from the task's sentence)")
@click.option(
    "--embodiment",
    type=parse_fingerprint,
    default=None,
    metavar="HEX",
    help="if missing (default: fingerprint of the features)",
)
@click.option("--success", type=click.Choice(tuple(SUCCESS)), default="yes", help="if missing (default: yes)")
@click.option(
    "--frames",
    type=click.Choice(("auto", "jpeg", "raw")),
    default="auto",
    help="auto (default): lossless images raw, video as JPEG",
)
@click.option("--use-degrees", is_flag=True, help="the dataset has degrees where the robot's spec has rad")
def import_(
    path: Path,
    output: Path,
    source: str | None,
    robot: str,
    task: str,
    embodiment: str | None,
    success: str,
    frames: str,
    use_degrees: bool,
) -> None:
    """Add the episodes of the LeRobot dataset v3 in the folder DIR to a store; existing episodes are skipped."""
    from user_sys.interchange.lerobot_import import ImportOptions, LerobotDataset, import_lerobot

    if output.resolve() == path.resolve():
        raise DataSetError(f"{output} is the dataset itself; choose another folder for the store")
    options = ImportOptions(
        source=None if source is None else EpisodeSource(source),
        robot=robot,
        task=task,
        embodiment=embodiment or "",
        success=SUCCESS[success],
        frames=frames,
        use_degrees=use_degrees,
    )
    data_set = LerobotDataset.open(path)
    with progress_bar("importing", data_set.info.total_frames) as advance:
        done = import_lerobot(data_set, output, options, advance)
    copy_robot_records(read_robot_records(path / META / ROBOTS_FOLDER), output)
    existing = f", {done.already_stored} already existed" if done.already_stored else ""
    existing += f", {done.deleted} are deleted in this store" if done.deleted else ""
    left_out = f"; skipped features: {', '.join(done.skipped_features)}" if done.skipped_features else ""
    print_line(f"{output}: {done.episodes} episodes added, {done.steps} steps{existing}{left_out}", error=True)
