"""The verbs ``user-sys reward train`` and ``reward audit``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
from rich.table import Table

from user_sys.commands.options import COUNT, PATH, ConfiguredVerb, json_option
from user_sys.commands.output import print_json, print_line, print_table, progress_bar
from user_sys.config import build
from user_sys.errors import DataSetError, StoreError
from user_sys.interchange.episodes import EpisodeReader, StoredEpisode
from user_sys.plugins import load_reward
from user_sys.rewards.audit import CLIPS_MAX, Audit, AuditedEpisode, ClipProgress, audit, audit_progress, draw_sheet
from user_sys.rewards.labelling import store_of
from user_sys.rewards.reward import RewardConfig, cameras_of, final_pictures, side_by_side
from user_sys.store.store import StoreReader

log = logging.getLogger(__name__)

SHEET = "false_positives.png"
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@click.command()
@click.argument("path", type=PATH, metavar="RUN|STORE")
@click.option("--kind", type=click.Choice(("classifier", "progress")), default="classifier", help="default: classifier")
@click.option("--output", type=PATH, default="reward.safetensors", metavar="FILE", help="default: reward.safetensors")
@click.option("--camera", "cameras", multiple=True, metavar="NAME", help="to read; repeatable (default: all)")
@click.option("--task", default="", metavar="NAME", help="only episodes of this task (default: all)")
@click.option("--updates", type=COUNT, default=400, metavar="N", help="of the network (default: 400)")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="default: 0")
def train(path: Path, kind: str, output: Path, cameras: tuple[str, ...], task: str, updates: int, seed: int) -> None:
    """Train a reward on the pictures of labelled episodes in RUN or STORE.

    The classifier of success reads the pictures at the end. The progress model compares pictures of successes by their
    order and the episode's sentence, for dense rewards and success.

    Two tenths of the episodes are kept for `reward audit`. Episodes that a reward has labelled are left out.
    """
    from user_sys.rewards.classifier import SuccessNet
    from user_sys.rewards.networks import read_labelled_clips, save_network, train_network
    from user_sys.rewards.progress import ProgressNet

    make = ProgressNet if kind == "progress" else SuccessNet
    with StoreReader.open(store_of(path)) as store:
        clips = read_labelled_clips(store, make.pictures, cameras, task)
    with progress_bar("training", updates) as advance:
        net, metadata = train_network(make, clips, updates, seed, advance)
    save_network(output, net, metadata)
    audit = "" if kind == "classifier" else f" --reward {kind}"
    print_line(
        f"{output}: trained on {metadata.successes} successes and {metadata.failures} failures of "
        f"{', '.join(metadata.tasks)}, cameras {', '.join(metadata.cameras)}{_unusable(clips.unusable)}; "
        f"next: user-sys reward audit {path}{audit} --options.model={output}"
    )


@click.command(cls=ConfiguredVerb)
@click.argument("path", type=PATH, metavar="RUN|STORE")
@click.option("--reward", "kind", default="classifier", metavar="NAME", help="default: classifier")
@click.option("--output", type=PATH, default=SHEET, metavar="FILE", help=f"pictures of the failures (default: {SHEET})")
@click.option("--all", "everything", is_flag=True, help="all episodes, also those that a classifier was trained on")
@json_option
def audit_(path: Path, kind: str, output: Path, everything: bool, as_json: bool, overrides: list[str]) -> None:
    """Compare a reward with the labels of RUN or STORE: calibration, false positives and negatives.

    Of a reward that estimates progress, it also shows the progress of successes as recorded, in reverse, and with the
    sentences of other tasks. Settings of the reward are --options.key=value.
    """
    from user_sys.rewards.networks import AUDIT_PARTS, labelled_episodes, part_of

    if output.exists() and not _is_png(output):
        raise DataSetError(f"{output} exists and is not a PNG, which the audit would replace; choose another --output")
    config = build(RewardConfig, {"kind": kind}, "rewards", overrides)
    reward, found, pictures = load_reward(config), list[AuditedEpisode](), dict[str, np.ndarray]()
    clips, unusable = list[StoredEpisode](), list[DataSetError | StoreError]()
    with StoreReader.open(store_of(path)) as store:
        reader = EpisodeReader(store, trimmed=True)
        known = labelled_episodes(reader)
        sentences = {episode.task: reader.sentence(episode.episode) for episode in known}
        labelled = [episode for episode in known if everything or part_of(episode.episode) in AUDIT_PARTS]
        if not labelled:
            raise DataSetError(f"{path} has no labelled episode to audit with; label some, or add --all")
        with progress_bar("auditing", len(labelled)) as advance:
            for summary in labelled:
                try:
                    episode = reader.read(summary.episode)
                    result = reward.evaluate(episode)
                except (DataSetError, StoreError) as error:
                    unusable.append(error)
                    log.warning("reward.unusable %s", error)
                    continue
                finally:
                    advance(1)
                success = bool(summary.success)
                found.append(AuditedEpisode(summary.episode, success, result.success, result.probability))
                if result.success and not success and (picture := _picture(episode)) is not None:
                    pictures[summary.episode] = picture
                if success and result.progress is not None and len(clips) < CLIPS_MAX:
                    clips.append(episode)
    if unusable and not found:
        raise unusable[0]
    progress = audit_progress(reward, clips, sentences)
    audited = audit(found)
    sheet = [(_title(each), pictures[each.episode]) for each in audited.false_positives if each.episode in pictures]
    output.unlink(missing_ok=True)
    if sheet:
        draw_sheet(output, sheet)
    _print(audited, progress, len(unusable), output if sheet else None, as_json)


def _unusable(episodes: int) -> str:
    return f", {episodes} could not be evaluated" if episodes else ""


def _is_png(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_PNG_SIGNATURE)) == _PNG_SIGNATURE


def _picture(episode: StoredEpisode) -> np.ndarray | None:
    """The newest pictures of all cameras side by side, at one height; None without any."""
    try:
        return side_by_side(final_pictures(episode, cameras_of(episode)))
    except DataSetError:
        return None


def _title(episode: AuditedEpisode) -> str:
    probability = "" if episode.probability is None else f"{episode.probability:.2f} "
    return f"{probability}{episode.episode}"


def _print(
    result: Audit, progress: Mapping[str, ClipProgress], unusable: int, sheet: Path | None, as_json: bool
) -> None:
    wrong, missed = len(result.false_positives), len(result.false_negatives)
    if as_json:
        print_json(
            {
                "episodes": len(result.episodes),
                "failures": result.failures,
                "false_positives": [each.episode for each in result.false_positives],
                "false_negatives": [each.episode for each in result.false_negatives],
                "unsure": result.unsure,
                "unusable": unusable,
                "calibration_error": result.calibration_error,
                "bins": [asdict(each) for each in result.bins],
                "progress": {kind: asdict(each) for kind, each in progress.items()},
                "sheet": str(sheet) if sheet else None,
            }
        )
        return
    table = Table("probability", "episodes", "mean probability", "share of successes", title="reliability")
    for each in result.bins:
        row = (f"{each.low:.1f}-{each.high:.1f}", str(each.episodes), f"{each.probability:.2f}", f"{each.success:.2f}")
        table.add_row(*row)
    if result.bins:
        print_table(table)
        print_line(f"expected calibration error {result.calibration_error:.3f}")
    if progress:
        table = Table(
            "successes", "clips", "rank correlation with time", "at the end", "found successful", title="progress"
        )
        for kind, clip in progress.items():
            correlation, at_end = f"{clip.rank_correlation:.2f}", f"{clip.at_end:.2f}"
            table.add_row(kind, str(clip.clips), correlation, at_end, f"{clip.success:.0%}")
        print_table(table)
    successes = len(result.episodes) - result.failures
    print_line(
        f"{len(result.episodes)} labelled episodes: false positives {wrong} of {result.failures} failures, "
        f"false negatives {missed} of {successes} successes, {result.unsure} left as they are{_unusable(unusable)}"
    )
    if sheet:
        print_line(f"the pictures of the false positives are in {sheet}")
