"""Typed settings: one mechanism for files, overrides, and the options of drivers and plug-ins.

A settings class is a frozen dataclass, and its defaults stay next to it. `read_settings` builds it from plain values. A
range is part of the type: ``Annotated[float, Meta(gt=0)]`` (`msgspec.Meta`). A check of several keys belongs in
`__post_init__` and raises ValueError or an error of its package.

A plug-in is named by a built-in name or by an entry point of an installed package (`load_plugin`).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hal.errors import SpecError

T = TypeVar("T")
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Limit = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(pattern=r"^[\w-]{1,64}\Z", description="1 to 64 letters, digits, '-' and '_'")]
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # of what is recorded with episodes

MAX_QUOTED_CHARS = 80
MAX_NAMED = 6
_WORDS = {"`int`": "a whole number", "`float`": "a number", "`bool`": "true or false", "`str`": "text"}


class SettingsError(SpecError):
    """A setting is invalid.

    Attributes:
        key: its dotted path; empty for the whole.
        problem: the value and the allowed ones, in one line.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key, self.problem = key, problem


@dataclass(frozen=True)
class CommandLineValue:
    """A value from a command line: `text` as it was given, and the `value` that it has in YAML.

    A setting that is text gets the former.
    """

    text: str
    value: Any


def read_settings(kind: type[T], value: object) -> T:
    """Builds `kind` from `value`, a mapping of plain values. A partial section keeps the other defaults of its parent.

    Raises:
        SettingsError: a key is unknown (the message has the nearest name) or missing, or a value is not allowed.
        Exception: a check in `__post_init__` raised an error other than ValueError.
    """
    settings: T = _section(kind, value, "", None)
    return settings


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: the nearest known name, or all of them."""
    names = sorted(known)
    near = get_close_matches(name.replace("-", "_"), names, n=1) or get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names) or 'none'}"


def is_plugin(group: str, name: str) -> bool:
    """Whether an installed package has this entry point."""
    return bool(entry_points(group=group, name=name))


def require_plugin(group: str, name: str, built_in: Mapping[str, str]) -> None:
    """Raises SpecError if no plug-in has this name; the message has the nearest one. It imports none."""
    if name in built_in:  # which needs no search through the installed packages
        return
    known = {*built_in, *(entry.name for entry in entry_points(group=group))}
    if name not in known:
        plural = group.rpartition(".")[2]
        noun = f"{plural[:-3]}y" if plural.endswith("ies") else plural.removesuffix("s")
        raise SpecError(f"no {noun} {name!r}; {suggest(name, known)}")


def load_plugin(group: str, name: str, built_in: Mapping[str, str]) -> Any:
    """The object that `name` refers to, imported now.

    Args:
        group: of entry points, such as ``user_sys.drivers``; its last word is in messages.
        built_in: ``module:attribute`` of each built-in name.

    Raises:
        SpecError: as `require_plugin`, or the module of an installed package cannot be imported.
        ModuleNotFoundError: a library that a built-in module needs is not installed.
    """
    require_plugin(group, name, built_in)
    if name in built_in:
        return resolve_name(built_in[name])
    entry = next(iter(entry_points(group=group, name=name)))
    try:
        return entry.load()
    except Exception as error:  # a foreign package may fail in any way
        problem = _one_line(f"{type(error).__name__}: {error}")
        raise SpecError(f"{name!r} ({entry.value}) cannot be imported: {problem}") from error


# Reading --------------------------------------------------------------------------------------------------------------


def _fail(key: str, problem: str) -> NoReturn:
    raise SettingsError(key, problem)


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _read(hint: Any, value: Any, key: str, base: Any) -> Any:
    """`value` as the type that `hint` describes; `base` is the default of the field, or None."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(args, value, key, base)
    if isinstance(value, CommandLineValue):
        value = value.text if origin in (str, Path, Literal) or _is_enum(origin) else value.value
    if origin is Any:
        return _plain(value)
    if origin is Literal or _is_enum(origin):
        return _choice(origin, args, value, key)
    if isinstance(origin, type) and (dataclasses.is_dataclass(origin) or issubclass(origin, msgspec.Struct)):
        return _section(origin, value, key, base if isinstance(base, origin) else None)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(args or (str, Any), value, key)
    if origin in (list, tuple, set, frozenset):
        return _items(origin, args, value, key)
    return _leaf(hint, origin, value, key)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _plain(value: Any) -> Any:
    """`value` of a setting without a type, such as the options of a driver, with the values of overrides."""
    if isinstance(value, CommandLineValue):
        return value.value
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fields(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of each field; the default is MISSING if the field is required."""
    hints = get_type_hints(kind, include_extras=True)
    if not dataclasses.is_dataclass(kind):
        for each in msgspec.structs.fields(kind):
            yield each.name, hints[each.name], MISSING if each.required else each.default
        return
    for field in dataclasses.fields(kind):
        made = field.default_factory() if field.default_factory is not MISSING else field.default
        yield field.name, hints[field.name], made


def _section(kind: Any, value: Any, key: str, base: Any) -> Any:
    fields = {name: (hint, default) for name, hint, default in _fields(kind)}
    if not isinstance(value, Mapping):
        _fail(key, f"expected a section with keys such as {', '.join(list(fields)[:MAX_NAMED])}, got {_quoted(value)}")
    given = {} if base is None else {name: getattr(base, name) for name in fields}
    for name, item in value.items():
        if name not in fields:
            _fail(_join(key, name), f"unknown key; {_suggest_key(kind, str(name), key)}")
        hint, default = fields[name]
        before = given.get(name, None if default is MISSING else default)
        given[name] = _read(hint, item, _join(key, name), before)
    for name, (_, default) in fields.items():
        if default is MISSING and name not in given:
            _fail(_join(key, name), "is missing, and has no default")
    try:
        return kind(**given)
    except (ValueError, TypeError) as error:
        _fail(key, _one_line(error))


def _suggest_key(kind: Any, name: str, section: str) -> str:
    """As `suggest`: the nearest key of the section, else of a section below it."""
    own = [each for each, _, _ in _fields(kind)]
    below = {path.rpartition(".")[2]: path for path in _keys(kind)}
    near = get_close_matches(name.replace("-", "_"), own, n=1)
    near = near or [below[each] for each in get_close_matches(name, below, n=1)]
    return f"did you mean {_join(section, near[0])!r}?" if near else f"known are {', '.join(own) or 'none'}"


def _keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a settings class and of the sections in it."""
    for name, hint, _ in _fields(kind):
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{name}.")


def _union(hints: tuple[Any, ...], value: Any, key: str, base: Any) -> Any:
    members = [hint for hint in hints if hint is not types.NoneType]
    empty = value is None or (isinstance(value, CommandLineValue) and value.value is None)
    if empty and len(members) < len(hints):
        return None
    if isinstance(value, CommandLineValue) and isinstance(value.value, (list, dict)):
        members = [hint for hint in members if hint is not str] or members
    problems: list[SettingsError] = []
    for hint in members:
        try:
            return _read(hint, value, key, base)
        except SettingsError as error:
            problems.append(error)
    raise max(problems, key=lambda problem: len(problem.key))  # the one that fits best, else the first


def _choice(kind: Any, args: tuple[Any, ...], value: Any, key: str) -> Any:
    known = {str(each): each for each in args} if kind is Literal else {str(each.value): each for each in kind}
    if isinstance(value, str) and value in known:
        return known[value]
    near = get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    _fail(key, f"expected one of {', '.join(sorted(known))}, got {_quoted(value)}{hint}")


def _mapping(args: tuple[Any, ...], value: Any, key: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        _fail(key, f"expected names with values, got {_quoted(value)}")
    return {name: _read(args[1], item, _join(key, name), None) for name, item in value.items()}


def _items(kind: Any, args: tuple[Any, ...], value: Any, key: str) -> Any:
    if not isinstance(value, (list, tuple)):
        _fail(key, f"expected a list, got {_quoted(value)}")
    is_fixed = kind is tuple and bool(args) and args[-1] is not Ellipsis
    hints = list(args) if is_fixed else [args[0] if args else Any] * len(value)
    if len(hints) != len(value):
        _fail(key, f"expected {len(hints)} items, got {len(value)}")
    return kind(_read(hint, item, _join(key, n), None) for n, (hint, item) in enumerate(zip(hints, value, strict=True)))


def _leaf(hint: Any, kind: Any, value: Any, key: str) -> Any:
    if kind is Path:
        return Path(_leaf(str, str, value, key))
    try:
        converted = msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError as error:
        allowed = str(error).partition(", got ")[0]
        described = [each.description for each in get_args(hint)[1:] if isinstance(each, Meta) and each.description]
        if described and isinstance(value, kind):
            allowed = f"expected {described[0]}"
        for word, meaning in _WORDS.items():
            allowed = allowed.replace(word, meaning)
        advice = "; put it in quotes" if kind is str and isinstance(value, (bool, int, float)) else ""
        _fail(key, f"{allowed[:1].lower()}{allowed[1:]}, got {_quoted(value)}{advice}")
    if isinstance(converted, float) and not math.isfinite(converted):
        _fail(key, f"expected a finite number, got {converted}")
    return converted


def _quoted(value: object) -> str:
    plain = _plain(value)
    return "nothing" if plain is None else _one_line(repr(plain))[:MAX_QUOTED_CHARS]


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
