"""Arguments of ``user-sys store``. It imports nothing heavy; the module of a verb is loaded when the verb runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

SOURCES = ("demo", "online", "evaluation")
INTERVENTIONS, NO_PROTECTION = "interventions", "nothing"  # values of `compact --keep` in addition to the sources
PHASES = ("policy", "teleop", "correction", "recovery")
DRIVEN = ("policy", "person", "both")  # values of `user_sys.interchange.episodes.ControlledBy`
MAX_REWARD = 3.4e38  # as in `user_sys.store.labels`, which is slow to import
MAX_RATE_HZ = 100_000
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_INSPECT, _STATS = "user_sys.commands.store_inspect", "user_sys.commands.store_stats"
_MAINTENANCE, _EXCHANGE = "user_sys.commands.store_maintenance", "user_sys.commands.store_exchange"


def add_store(verbs: Any) -> None:
    """Adds ``store`` and its verbs to the command line."""
    store = verbs.add_parser("store", help="inspect, repair, label, compact, export or import an experience store")
    subparsers = store.add_subparsers(metavar="VERB", required=True)
    for add in (_inspect, _stats, _verify, _repair, _label, _compact, _merge, _export, _import):
        add(subparsers)


def _add_verb(subparsers: Any, name: str, summary: str, description: str, module: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=description)
    parser.set_defaults(runs=(module, f"{name}_main"))
    return parser


def _store_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="store folder, such as runs/latest/store")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for other programs")


def _filter_options(parser: argparse.ArgumentParser) -> None:
    """Options that filter episodes."""
    parser.add_argument("--episode", action="append", default=[], metavar="ID", help="only this one; may be repeated")
    parser.add_argument(
        "--source", action="append", default=[], choices=SOURCES, help="only of this source; may be repeated"
    )
    parser.add_argument("--task", action="append", default=[], metavar="NAME", help="only this task; may be repeated")
    parser.add_argument(
        "--driven",
        action="append",
        default=[],
        choices=DRIVEN,
        help="only episodes controlled by the policy, by a person (or scripted expert), or by both; may be repeated",
    )
    outcome = parser.add_mutually_exclusive_group()
    outcome.add_argument("--success", choices=("yes", "no"), help="only episodes that succeeded, or that failed")
    outcome.add_argument("--failed", action="store_const", dest="success", const="no", help="the same as --success no")


def _inspect(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "inspect",
        "show episodes as a table, one in detail, or as pictures",
        "Shows the newest episodes of a store, or one of them (--episode ID) in detail. Another process may write "
        "at the same time. Exit status 1: damage found.",
        _INSPECT,
    )
    _store_path(parser)
    _filter_options(parser)
    parser.add_argument("--last", type=_count, metavar="N", help="number of newest episodes (default: 20; pictures: 5)")
    parser.add_argument(
        "--pictures", type=Path, metavar="DIR", help="draw each chosen episode into DIR: frames, rewards, actions"
    )
    parser.add_argument("--video", type=Path, metavar="DIR", help="write each chosen episode into DIR as a video")
    _json(parser)


def _stats(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "stats",
        "show counts, success rates, lengths, ranges of actions and observations, disk use",
        "Counts episodes by task, source and robot, and reads all chunks for the ranges of actions and observations. "
        "Exit status 1: damage found.",
        _STATS,
    )
    _store_path(parser)
    parser.add_argument("--no-ranges", action="store_true", help="skip statistics that need all chunks")
    _json(parser)


def _verify(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "verify",
        "read everything and list damage",
        "Reads each byte of a store and lists each damaged record. Changes nothing. Another process may write "
        "at the same time. Exit status 1: damage found.",
        _MAINTENANCE,
    )
    _store_path(parser)
    _json(parser)


def _repair(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "repair",
        "quarantine damage and list the lost steps",
        "Verifies a store, copies damaged bytes into its folder quarantine/, and lists them in the manifest. They are "
        "not reported again, and compaction can continue. Nothing is rewritten in place.",
        _MAINTENANCE,
    )
    _store_path(parser)
    parser.add_argument("--dry-run", action="store_true", help="change nothing, as verify")
    _json(parser)


def _label(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "label",
        "set success, reward or phase of recorded episodes",
        "Adds labels to episodes. Recorded data stays unchanged; of two labels on the same steps the later one "
        "counts. If a gateway writes the store, the gateway stores them.",
        _MAINTENANCE,
    )
    _store_path(parser)
    parser.add_argument("episodes", nargs="+", metavar="EPISODE", help="an id from `user-sys store inspect`")
    parser.add_argument(
        "--success",
        choices=("yes", "no", "unknown"),
        help="success of the episodes; the last reward becomes 1 or 0, or the recorded one for unknown",
    )
    parser.add_argument("--keep-reward", action="store_true", help="with --success: keep the last reward")
    parser.add_argument("--reward", type=_finite, metavar="R", help="the reward of each step of --steps")
    parser.add_argument("--phase", choices=PHASES, help="phase of --steps")
    parser.add_argument(
        "--steps", type=_steps, metavar="FIRST-LAST", help="range of steps from 0, such as 10-19 (default: all)"
    )
    deletion = parser.add_mutually_exclusive_group()
    deletion.add_argument("--delete", action="store_true", help="exclude the episodes; `compact` frees their space")
    deletion.add_argument("--restore", action="store_true", help="revert a deletion before `compact`")
    parser.add_argument("--undo", action="store_true", help="revert the newest `label` command of each episode")
    parser.add_argument("--note", default="", metavar="TEXT", help="a remark")
    parser.add_argument("--by", metavar="NAME", help="labeller (default: the user name)")


def _compact(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "compact",
        "free the space of deleted episodes, and keep within a size",
        "Frees the space of deleted episodes. With --max-bytes it first evicts the least useful episodes: "
        "evaluations, episodes that never ended, then autonomous ones, oldest first. A running gateway does this "
        "itself (gateway.retention).",
        _MAINTENANCE,
    )
    _store_path(parser)
    parser.add_argument("--max-bytes", type=_bytes, default=0, metavar="SIZE", help="such as 20GB (default: no limit)")
    parser.add_argument(
        "--keep",
        action="append",
        choices=(*SOURCES, INTERVENTIONS, NO_PROTECTION),
        help="never evict these; may be repeated (default: demo and interventions)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the episodes to evict, with reasons")
    _json(parser)


def _merge(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "merge",
        "copy several stores into one",
        "Copies episodes and labels of the stores into another one, which is created if needed. Skips existing chunks "
        "and deleted episodes, so the command can be repeated.",
        _MAINTENANCE,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="stores to copy from; they are not changed")
    parser.add_argument("--into", type=Path, required=True, metavar="STORE", help="store to add to")
    _json(parser)


def _export(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "export",
        "write episodes as LeRobot datasets or MCAP recordings",
        "Writes episodes in a standard format. After an interruption, the same command continues.",
        _EXCHANGE,
    )
    _store_path(parser)
    parser.add_argument("--format", required=True, choices=("lerobot", "mcap"), help="output format")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write into")
    _filter_options(parser)
    parser.add_argument("--incomplete", action="store_true", help="also episodes that never ended")
    lerobot = parser.add_argument_group("lerobot only")
    lerobot.add_argument("--cameras", choices=("images", "video"), help="images (default): as recorded, lossless")
    lerobot.add_argument("--codec", choices=("h264", "av1"), help="video codec (default: h264)")
    lerobot.add_argument("--fps", type=_rate, metavar="HZ", help="control rate (default: from the robot's spec)")


def _import(subparsers: Any) -> None:
    parser = _add_verb(
        subparsers,
        "import",
        "add a LeRobot dataset v3 to a store",
        "Adds the episodes of a LeRobot dataset to a store and skips existing episodes.",
        _EXCHANGE,
    )
    parser.add_argument("path", type=Path, metavar="DIR", help="dataset folder with meta/info.json")
    parser.add_argument("--output", type=Path, required=True, metavar="STORE", help="store to add to")
    parser.add_argument("--source", choices=SOURCES, help="source of the episodes (default: as recorded, or demo)")
    foreign = parser.add_argument_group("defaults for missing values")
    foreign.add_argument("--robot", default="", metavar="NAME", help="(default: the dataset's robot type)")
    foreign.add_argument("--task", default="", metavar="NAME", help="(default: from the task's sentence)")
    foreign.add_argument(
        "--embodiment", type=_fingerprint, metavar="HEX", help="(default: fingerprint of the features)"
    )
    foreign.add_argument("--success", choices=("yes", "no", "unknown"), default="yes", help="(default: yes)")
    parser.add_argument(
        "--frames",
        choices=("auto", "jpeg", "raw"),
        default="auto",
        help="auto (default): lossless images raw, video as JPEG",
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 20GB or 500MB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def _finite(text: str) -> float:
    number = _number(text)
    if not abs(number) <= MAX_REWARD:
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return number


def _rate(text: str) -> float:
    number = _number(text)
    if not 0 < number <= MAX_RATE_HZ:
        raise argparse.ArgumentTypeError(f"expected a rate in Hz, above 0 and at most {MAX_RATE_HZ:.0f}, got {text!r}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _fingerprint(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise argparse.ArgumentTypeError(f"expected 16 hex digits as `user-sys store inspect` shows, got {text!r}")
    return text


def _steps(text: str) -> range:
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdigit() and last.isdigit()) or int(last) < int(first):
        raise argparse.ArgumentTypeError(f"expected steps such as 10-19, or one such as 12, got {text!r}")
    return range(int(first), int(last) + 1)
