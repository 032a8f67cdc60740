"""The grammar of ``user-sys store``. It imports nothing heavy; a verb's module is loaded when the verb runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

SOURCES = ("demo", "online", "evaluation")
INTERVENTIONS, NOTHING = "interventions", "nothing"  # what `compact --keep` takes besides sources
PHASES = ("policy", "teleop", "correction", "recovery")
DRIVEN = ("policy", "person", "both")  # `user_sys.interchange.episodes.ControlledBy`
MAX_REWARD = 3.4e38  # that of `user_sys.store.labels`, which is not light
MAX_RATE_HZ = 100_000
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_COMMANDS = "user_sys.commands."


def add_store(verbs: Any) -> None:
    """Adds ``store`` and its orders to the command line's verbs."""
    store = verbs.add_parser("store", help="look into an experience store, mend it, label, export, import")
    orders = store.add_subparsers(metavar="ORDER", required=True)
    for add in (_inspect, _stats, _verify, _repair, _label, _compact, _merge, _export, _import):
        add(orders)


def _order(orders: Any, name: str, summary: str, description: str, module: str) -> argparse.ArgumentParser:
    order: argparse.ArgumentParser = orders.add_parser(name, help=summary, description=description)
    order.set_defaults(runs=(module, f"{name}_main"))
    return order


def _store_path(order: argparse.ArgumentParser) -> None:
    order.add_argument("path", type=Path, metavar="PATH", help="store folder, such as runs/latest/store")


def _json(order: argparse.ArgumentParser) -> None:
    order.add_argument("--json", action="store_true", help="for other programs")


def _choice(order: argparse.ArgumentParser) -> None:
    """The options that choose episodes."""
    order.add_argument("--episode", action="append", default=[], metavar="ID", help="only this one; may be repeated")
    order.add_argument(
        "--source", action="append", default=[], choices=SOURCES, help="only of this source; may be repeated"
    )
    order.add_argument("--task", action="append", default=[], metavar="NAME", help="only this task; may be repeated")
    order.add_argument(
        "--driven",
        action="append",
        default=[],
        choices=DRIVEN,
        help="only what the policy drove alone, a person (or the scripted expert) alone, or both; may be repeated",
    )
    outcome = order.add_mutually_exclusive_group()
    outcome.add_argument("--success", choices=("yes", "no"), help="only episodes that succeeded, or that failed")
    outcome.add_argument("--failed", action="store_const", dest="success", const="no", help="the same as --success no")


def _inspect(orders: Any) -> None:
    order = _order(
        orders,
        "inspect",
        "what a store holds: episodes as a table, one in detail, pictures",
        "Shows the newest episodes of a store, or one of them (--episode ID) in detail. Another process may write "
        "meanwhile. Exit status 1: some of it is damaged.",
        _COMMANDS + "store_inspect",
    )
    _store_path(order)
    _choice(order)
    order.add_argument("--last", type=_count, metavar="N", help="how many, the newest (default: 20; pictures: 5)")
    order.add_argument(
        "--pictures", type=Path, metavar="DIR", help="draw each chosen episode into DIR: frames, rewards, actions"
    )
    order.add_argument("--video", type=Path, metavar="DIR", help="write each chosen episode into DIR as a video")
    _json(order)


def _stats(orders: Any) -> None:
    order = _order(
        orders,
        "stats",
        "counts, success rates, lengths, ranges of actions and observations, disk",
        "Counts a store by task, source and robot, and reads all of it for the ranges of actions and observations. "
        "Exit status 1: some of it is damaged.",
        _COMMANDS + "store_stats",
    )
    _store_path(order)
    order.add_argument("--no-ranges", action="store_true", help="leave out what means reading all of it")
    _json(order)


def _verify(orders: Any) -> None:
    order = _order(
        orders,
        "verify",
        "read everything and name what is damaged",
        "Reads each byte of a store, changes nothing, and names each damaged record. Another process may write "
        "meanwhile. Exit status 1: something is damaged.",
        _COMMANDS + "store_maintenance",
    )
    _store_path(order)
    _json(order)


def _repair(orders: Any) -> None:
    order = _order(
        orders,
        "repair",
        "set aside what is damaged, and say what is lost",
        "Verifies a store, copies what is damaged into its folder quarantine/, and notes it there, so that it is not "
        "reported again and compaction can go on. Nothing is rewritten in place; its neighbours stay as they are.",
        _COMMANDS + "store_maintenance",
    )
    _store_path(order)
    order.add_argument("--dry-run", action="store_true", help="only say what would be done: the same as verify")
    _json(order)


def _label(orders: Any) -> None:
    order = _order(
        orders,
        "label",
        "say afterwards whether episodes succeeded, what they earned, who was in control",
        "Adds labels to episodes. What was recorded stays as it is; of two labels on the same thing the later one "
        "counts. While a gateway writes the store, it is asked to store them.",
        _COMMANDS + "store_maintenance",
    )
    _store_path(order)
    order.add_argument("episodes", nargs="+", metavar="EPISODE", help="as `user-sys store inspect` shows it")
    order.add_argument(
        "--success",
        choices=("yes", "no", "unknown"),
        help="whether they succeeded; the last reward becomes 1 or 0, with unknown as it was recorded",
    )
    order.add_argument("--keep-reward", action="store_true", help="with --success: leave the last reward as it is")
    order.add_argument("--reward", type=_finite, metavar="R", help="the reward of each step of --steps")
    order.add_argument("--phase", choices=PHASES, help="who was in control in --steps")
    order.add_argument(
        "--steps", type=_steps, metavar="FIRST-LAST", help="which steps, counted from 0 (default: all), such as 10-19"
    )
    deletion = order.add_mutually_exclusive_group()
    deletion.add_argument("--delete", action="store_true", help="not to be used; `compact` then takes the space")
    deletion.add_argument("--restore", action="store_true", help="take a deletion back, while the space is not taken")
    order.add_argument("--undo", action="store_true", help="take back what the newest `label` said of each")
    order.add_argument("--note", default="", metavar="TEXT", help="a remark; kept with the other labels")
    order.add_argument("--by", metavar="NAME", help="who says so (default: who is logged in)")


def _compact(orders: Any) -> None:
    order = _order(
        orders,
        "compact",
        "give back the space of deleted episodes, and keep within a size",
        "Gives back what deleted episodes take, after giving up, where --max-bytes says so, the least useful ones: "
        "evaluations, episodes that broke off, then autonomous ones, the oldest first. A running gateway does this by "
        "itself (gateway.retention).",
        _COMMANDS + "store_maintenance",
    )
    _store_path(order)
    order.add_argument("--max-bytes", type=_bytes, default=0, metavar="SIZE", help="such as 20GB (default: no bound)")
    order.add_argument(
        "--keep",
        action="append",
        choices=(*SOURCES, INTERVENTIONS, NOTHING),
        help="never give up these; may be repeated (default: demo and interventions)",
    )
    order.add_argument("--dry-run", action="store_true", help="only say what would go, and why")
    _json(order)


def _merge(orders: Any) -> None:
    order = _order(
        orders,
        "merge",
        "put several stores into one",
        "Copies what the stores hold, labels included, into another one, which is made if need be. What is there "
        "already, and what is deleted, is left out, so that the order may be repeated.",
        _COMMANDS + "store_maintenance",
    )
    order.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="stores to copy from; they are not changed")
    order.add_argument("--into", type=Path, required=True, metavar="STORE", help="store to add to")
    _json(order)


def _export(orders: Any) -> None:
    order = _order(
        orders,
        "export",
        "write episodes as LeRobot data sets or MCAP recordings",
        "Writes episodes in a format of other people's. Killed or interrupted, the same command goes on.",
        "user_sys.commands.store_exchange",
    )
    _store_path(order)
    order.add_argument("--format", required=True, choices=("lerobot", "mcap"), help="what to write")
    order.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write into")
    _choice(order)
    order.add_argument("--incomplete", action="store_true", help="also episodes that never ended")
    lerobot = order.add_argument_group("lerobot only")
    lerobot.add_argument("--cameras", choices=("images", "video"), help="images (default): as recorded, nothing lost")
    lerobot.add_argument("--codec", choices=("h264", "av1"), help="of the video (default: h264)")
    lerobot.add_argument("--fps", type=_rate, metavar="HZ", help="control rate (default: as the robot's spec says)")


def _import(orders: Any) -> None:
    order = _order(
        orders,
        "import",
        "add a LeRobot data set v3 to a store",
        "Adds the episodes of a LeRobot data set to a store; what the store has already stays as it is.",
        "user_sys.commands.store_exchange",
    )
    order.add_argument("path", type=Path, metavar="DIR", help="data set folder, the one that holds meta/info.json")
    order.add_argument("--output", type=Path, required=True, metavar="STORE", help="store to add to")
    order.add_argument("--source", choices=SOURCES, help="what the episodes count as (default: as recorded, or demo)")
    foreign = order.add_argument_group("where the data set does not say it")
    foreign.add_argument("--robot", default="", metavar="NAME", help="(default: the data set's robot type)")
    foreign.add_argument("--task", default="", metavar="NAME", help="(default: made of the task's sentence)")
    foreign.add_argument(
        "--embodiment", type=_fingerprint, metavar="HEX", help="(default: fingerprint of the features)"
    )
    foreign.add_argument("--success", choices=("yes", "no", "unknown"), default="yes", help="(default: yes)")
    order.add_argument(
        "--frames",
        choices=("auto", "jpeg", "raw"),
        default="auto",
        help="auto (default): lossless images stay so, video becomes JPEG",
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
