"""Options and arguments that several verbs share. It imports nothing heavy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

Verb = TypeVar("Verb", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)
SOURCES = ("demo", "online", "evaluation")
DRIVEN = ("policy", "person", "both")  # values of `user_sys.interchange.episodes.ControlledBy`
SUCCESS = {"yes": True, "no": False, "unknown": None}  # values of --success
MISSPELT = 0.8  # similarity from which an unknown name is a misspelt option, and not a setting
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

json_option = click.option("--json", "as_json", is_flag=True, help="for other programs")
by_option = click.option("--by", metavar="NAME", help="name of the person (default: the logged-in user)")
reason_option = click.option("--reason", default="", metavar="TEXT", help="saved and logged")
connect_option = click.option("--connect", required=True, metavar="tcp://HOST:PORT", help="the gateway or a relay")
keys_option = click.option("--keys", type=PATH, default="keys", metavar="FOLDER", help="of keys (default: keys)")
config_argument = click.argument("config", type=PATH, metavar="CONFIG")
store_argument = click.argument("path", type=PATH, metavar="PATH")


class Number(click.FloatRange):
    """A finite number in a range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class ConfiguredVerb(click.Command):
    """A verb that takes any setting: other ``--key=value`` and ``--key value`` are its parameter `overrides`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for each in self.get_params(ctx) for name in each.opts}
        own, overrides, tokens = list[str](), list[str](), list(args)
        while tokens:
            token = tokens.pop(0)
            if not token.startswith("--") or token.partition("=")[0] in known:
                own.append(token)
                continue
            if near := get_close_matches(token.partition("=")[0], known, n=1, cutoff=MISSPELT):
                raise click.NoSuchOption(token.partition("=")[0], possibilities=near, ctx=ctx)
            overrides.append(token)
            if "=" not in token and tokens and not tokens[0].startswith("--"):
                overrides.append(tokens.pop(0))
        rest = super().parse_args(ctx, own)
        ctx.params["overrides"] = overrides
        return rest


def combined(*options: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
    """The decorator that adds all of these options and arguments, in this order."""

    def add(verb: Verb) -> Verb:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return add


episode_filter_options = combined(
    click.option("--episode", multiple=True, metavar="ID", help="only this one; repeatable"),
    click.option("--source", multiple=True, type=click.Choice(SOURCES), help="only of this source; repeatable"),
    click.option("--task", multiple=True, metavar="NAME", help="only this task; repeatable"),
    click.option(
        "--driven",
        multiple=True,
        type=click.Choice(DRIVEN),
        help="only episodes controlled by the policy, by a person (or scripted expert), or by both; repeatable",
    ),
    click.option("--success", type=click.Choice(("yes", "no")), help="only episodes that succeeded, or that failed"),
)
"""Filter episodes: `episode`, `source`, `task`, `driven` and `success`."""


def parse_size(text: str) -> int:
    """Bytes of a size such as ``20GB``."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([kmgt]?)b?", text.lower())
    if found is None:
        raise click.BadParameter(f"expected a size such as 20GB or 500MB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def parse_steps(text: str) -> range:
    """A range of steps such as ``10-19``, or one such as ``12``."""
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdigit() and last.isdigit()) or int(last) < int(first):
        raise click.BadParameter(f"expected steps such as 10-19, or one such as 12, got {text!r}")
    return range(int(first), int(last) + 1)


def parse_fingerprint(text: str) -> str:
    """The fingerprint of an embodiment."""
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise click.BadParameter(f"expected 16 hex digits as `user-sys store inspect` shows, got {text!r}")
    return text


def parse_duration_s(text: str) -> float:
    """Seconds of a time such as ``24h``."""
    found = re.fullmatch(r"(\d{1,9})(s|min|h|d)", text)
    if found is None:
        raise click.BadParameter(f"expected a time such as 30min, 24h or 7d, got {text!r}")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[found[2]]
