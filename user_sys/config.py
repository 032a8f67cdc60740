"""Typed configuration: YAML differences and dotted overrides become frozen dataclasses.

Each default lives beside the class that it configures; a YAML file and the command line hold differences only. Anything
invalid raises a `ConfigError` of one line with the place, the problem and, for a name, the nearest known one. draccus
builds the dataclasses. The checks before it are stricter: the text 'False' is not False, 2.5 is not 2, and a partial
section keeps the other defaults of its parent.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import yaml
from draccus.choice_types import CHOICE_TYPE_KEY, ChoiceType
from draccus.parsers.decoding import decode
from draccus.parsers.encoding import encode
from draccus.utils import ParsingError

from user_sys.errors import ConfigError

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20
_MISSING = dataclasses.MISSING
_WORDS_FROM_BOOL = {False: ("off", "no"), True: ("on", "yes")}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


def load(kind: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """The configuration `kind` (a dataclass) with the differences in the YAML file `path`, then those in `overrides`.

    Overrides are ``--section.key=value`` or ``--section.key value``; values are YAML, and items of a list are
    reached by number (``--robots.0.name=left``). Overrides win over the file.

    Raises:
        ConfigError: one line with key and file: the file is missing or not YAML, a key is unknown or missing, a value
            has the wrong type, or a check in `__post_init__` failed.
    """
    return build_with_overrides(kind, {} if path is None else read_yaml(path), overrides, str(path or "defaults"))


def build_with_overrides(kind: type[T], differences: dict[str, Any], overrides: Sequence[str], source: str) -> T:
    """As `load`, of plain `differences` from `source`, which are modified."""
    changes = _parse_overrides(overrides)
    for key, text in changes.items():
        _put(differences, key, text)
    return _build(kind, differences, _Checker(source=source, overridden=frozenset(changes)))


def build(kind: type[T], differences: Mapping[str, Any], source: str = "options") -> T:
    """The configuration `kind` with plain `differences`, such as a section whose dataclass is known at run time only.

    Raises:
        ConfigError: as `load`; messages start with `source`.
    """
    return _build(kind, differences, _Checker(source=source, overridden=frozenset()))


def save(config: object, path: Path) -> None:
    """Writes every value of `config` (a dataclass) as YAML, atomically; `load` of the file gives an equal config."""
    # safe_dump escapes non-ASCII characters; YAML treats some of them, such as U+0085, as line ends.
    text = yaml.safe_dump(as_dict(config), sort_keys=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def as_dict(config: object) -> dict[str, Any]:
    """The values of `config` (a dataclass) as plain, nested YAML types."""
    plain: dict[str, Any] = _plain(encode(config))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_plain(k): _plain(item) for k, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


# Reading --------------------------------------------------------------------------------------------------------------


class _Text(str):
    """The raw value of an override: parsed as YAML for most fields, used as it is for text."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`. Raises ConfigError: no such file, not YAML, or not a mapping."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_FILE_BYTES} bytes, which no configuration is; give another file"
            )
        differences = _yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_nearest_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if differences is None:
        return {}
    if not isinstance(differences, dict):
        raise ConfigError(f"{path}: expected sections and keys, got {_quoted(differences)}")
    return differences


def _nearest_file(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _yaml(text: str, source: str) -> Any:
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        at = f":{error.problem_mark.line + 1}" if error.problem_mark and "\n" in text else ""
        raise ConfigError(f"{source}{at}: not valid YAML: {_one_line(error.problem)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {_one_line(error)}") from None


def _refuse_repeated_keys(node: yaml.Node | None) -> None:
    """Raises if a key is repeated; plain YAML would silently use the last one."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a name", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is repeated", problem_mark=key.start_mark)
            seen.add(str(key.value))
            _refuse_repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item)


def _parse_overrides(overrides: Sequence[str]) -> dict[str, _Text]:
    """``--a.b=v`` and ``--a.b v`` as {"a.b": "v"}; the last value of a repeated key counts."""
    changes: dict[str, _Text] = {}
    tokens = list(overrides)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--") or len(token) == 2:
            raise ConfigError(f"{token!r} is not an override; write --section.key=value")
        key, equals, text = token[2:].partition("=")
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                raise ConfigError(f"--{key} needs a value: write --{key}=VALUE")
            text = tokens.pop(0)
        changes[key] = _Text(text)
    return changes


def _put(tree: dict[str, Any], key: str, text: _Text) -> None:
    """Sets ``tree[a][b] = text`` for the key ``a.b``. `_Checker.items` handles items of a list
    that `tree` lacks.
    """
    *sections, last = key.split(".")
    place: Any = tree
    for depth, section in enumerate(sections):
        at = _place(place, section, ".".join(sections[: depth + 1]))
        if not isinstance(place[at] if isinstance(place, list) else place.get(at), (dict, list)):
            place[at] = {}
        place = place[at]
    place[_place(place, last, key)] = text


def _place(container: dict[str, Any] | list[Any], name: str, key: str) -> Any:
    if isinstance(container, dict):
        return name
    if not name.isdigit() or int(name) >= len(container):
        raise ConfigError(f"--{key}: no item {name}: the list has {len(container)} items")
    return int(name)


# Checking -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Checks values against annotations before draccus builds from them; `source` is the file's name, for messages."""

    source: str
    overridden: frozenset[str]

    def fail(self, key: str, problem: str) -> NoReturn:
        given = any(key == k or key.startswith(f"{k}.") or k.startswith(f"{key}.") for k in self.overridden)
        raise ConfigError(f"--{key}: {problem}" if given else f"{self.source}: {key or 'the file'}: {problem}")

    def value(self, kind: Any, value: Any, key: str, base: Any = _MISSING) -> Any:
        """`value` in the form that draccus decodes into `kind`; `base` is the default of the field."""
        origin = typing.get_origin(kind) or kind
        if origin in (typing.Union, types.UnionType):
            return self.union(typing.get_args(kind), value, key, base)
        if isinstance(value, _Text) and origin not in (str, Path):
            value = _yaml(value, f"--{key}")
        if dataclasses.is_dataclass(origin):
            return self.section(origin, value, key, base)
        if origin is Literal:
            return self.choice({str(a): a for a in typing.get_args(kind)}, value, key)
        if isinstance(origin, type) and issubclass(origin, enum.Enum):
            return self.choice({str(member.value): member for member in origin}, value, key)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self.mapping(typing.get_args(kind) or (Any, Any), value, key)
        if origin in (list, tuple, set, frozenset):
            return self.items(origin, typing.get_args(kind), value, key, base)
        return self.scalar(origin, value, key)

    def scalar(self, kind: Any, value: Any, key: str) -> Any:
        if kind not in _EXPECTED:
            return self.untyped(value, key)
        if kind is float and isinstance(value, str):  # YAML 1.1 parses 1e-3 as text
            value = _number(value)
        accepted = {float: (int, float), Path: (str,)}.get(kind, (kind,))
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            quoted = "; put it in quotes" if kind in (str, Path) and isinstance(value, (bool, int, float)) else ""
            self.fail(key, f"expected {_EXPECTED[kind]}, got {_quoted(value)}{quoted}")
        return str(value) if kind in (str, Path) else kind(value)

    def untyped(self, value: Any, key: str) -> Any:
        """Accepts any value, as for the options of a driver that is known at run time only; overrides are YAML."""
        if isinstance(value, _Text):
            return _yaml(value, f"--{key}")
        if isinstance(value, dict):
            return {name: self.untyped(item, f"{key}.{name}") for name, item in value.items()}
        return [self.untyped(item, key) for item in value] if isinstance(value, list) else value

    def section(self, kind: Any, value: Any, key: str, base: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(key, f"expected a section with keys such as {_names(kind)}, got {_quoted(value)}")
        if issubclass(kind, ChoiceType):
            kind, value, base = self.variant(kind, dict(value), key, base)
        hints, fields = typing.get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}
        fitted = dict(encode(base)) if isinstance(base, kind) else {}
        for name, item in value.items():
            path = f"{key}.{name}" if key else str(name)
            if name == CHOICE_TYPE_KEY and issubclass(kind, ChoiceType):
                fitted[name] = item
            elif name not in fields:
                self.fail(path, f"unknown key{_suggest(kind, str(name), key)}")
            else:
                fitted[name] = self.value(hints[name], item, path, _default(fields[name], base))
        return fitted

    def variant(self, kind: Any, value: dict[str, Any], key: str, base: Any) -> tuple[Any, dict[str, Any], Any]:
        """The class named by the section's ``type``, the section with its type, and the default."""
        known = dict(kind.get_known_choices())
        if kind in known.values():
            return kind, value, base
        of_base = base.get_choice_name(type(base)) if isinstance(base, kind) else kind.default_choice_name()
        name = str(value.get(CHOICE_TYPE_KEY, of_base))
        if name not in known:
            self.choice(known, name, f"{key}.{CHOICE_TYPE_KEY}")
        return known[name], {CHOICE_TYPE_KEY: name, **value}, base

    def union(self, kinds: tuple[Any, ...], value: Any, key: str, base: Any) -> Any:
        empty = value is None or (isinstance(value, _Text) and value.lower() in ("null", "~", "none"))
        if types.NoneType in kinds and empty:
            return None
        members = [k for k in kinds if k is not types.NoneType]
        problem: ConfigError | None = None
        for kind in members:
            try:
                return self.value(kind, value, key, base)
            except ConfigError as error:
                problem = problem or error
        assert problem is not None  # a union has a member
        raise problem

    def choice(self, known: Mapping[str, Any], value: Any, key: str) -> Any:
        if isinstance(value, bool):  # YAML 1.1 parses off, no, on and yes as booleans
            value = next((word for word in _WORDS_FROM_BOOL[value] if word in known), value)
        if str(value) in known and not isinstance(value, bool):
            return known[str(value)]
        near = difflib.get_close_matches(str(value), list(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        self.fail(key, f"expected one of {', '.join(sorted(known))}, got {_quoted(value)}{hint}")

    def mapping(self, kinds: tuple[Any, ...], value: Any, key: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            self.fail(key, f"expected names with values, got {_quoted(value)}")
        return {k: self.value(kinds[1], item, f"{key}.{k}") for k, item in value.items()}

    def items(self, origin: Any, kinds: tuple[Any, ...], value: Any, key: str, base: Any) -> list[Any]:
        """Items of a list or tuple. Overrides of single items are {"0": ...}; they replace items of the default."""
        below = [_MISSING] * len(value) if isinstance(value, (list, tuple)) else []
        if isinstance(value, dict) and value and all(str(k).isdigit() for k in value):
            below = list(base) if isinstance(base, (list, tuple)) else []
            value = self.numbered(value, below, key)
        if not isinstance(value, (list, tuple)):
            self.fail(key, f"expected a list, got {_quoted(value)}")
        fixed = origin is tuple and kinds and kinds[-1] is not Ellipsis
        if fixed and len(value) != len(kinds):
            self.fail(key, f"expected {len(kinds)} items, got {len(value)}")
        of = kinds if fixed else [kinds[0] if kinds else Any] * len(value)
        return [
            self.value(kind, item, f"{key}.{i}", below[i]) for i, (kind, item) in enumerate(zip(of, value, strict=True))
        ]

    def numbered(self, value: dict[str, Any], base: list[Any], key: str) -> list[Any]:
        for name in value:
            _place(base, name, f"{key}.{name}")
        return [value[str(i)] if str(i) in value else encode(item) for i, item in enumerate(base)]


def _default(field: dataclasses.Field[Any], base: Any) -> Any:
    """The default of `field`, so that a partial section keeps its other values."""
    if dataclasses.is_dataclass(base) and hasattr(base, field.name):
        return getattr(base, field.name)
    return field.default_factory() if field.default_factory is not _MISSING else field.default


def _suggest(kind: Any, name: str, section: str) -> str:
    """The nearest known key in the same section, else in a section below it."""
    here = f"{section}." if section else ""
    siblings = [f.name for f in dataclasses.fields(kind)]
    near = difflib.get_close_matches(name.replace("-", "_"), siblings, n=1)
    below = {k.rpartition(".")[2]: k for k in _keys(kind)}
    near = near or [below[n] for n in difflib.get_close_matches(name, list(below), n=1)]
    return f"; did you mean {here + near[0]!r}?" if near else f"; known are {_names(kind)}"


def _keys(kind: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a dataclass and of the dataclasses in it."""
    keys: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        keys.append(f"{prefix}{name}")
        if dataclasses.is_dataclass(hint):
            keys += _keys(hint, f"{prefix}{name}.")
    return keys


def _names(kind: Any) -> str:
    return ", ".join(f.name for f in dataclasses.fields(kind)) or "(none)"


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _quoted(value: object) -> str:
    return "nothing" if value is None else _one_line(repr(str(value) if isinstance(value, _Text) else value))[:80]


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


# Building -------------------------------------------------------------------------------------------------------------


def _literal(kind: Any, value: Any, path: Sequence[str]) -> Any:
    """draccus cannot decode `Literal`; `_Checker.choice` has checked the value."""
    return value


decode.register(Literal, _literal, include_subclasses=True)


def _build(kind: type[T], differences: Mapping[str, Any], fit: _Checker) -> T:
    tree = fit.value(kind, dict(differences), "")
    try:
        built: T = decode(kind, tree)
        return built
    except ConfigError as error:
        raise ConfigError(f"{fit.source}: {_one_line(error)}") from None
    except ParsingError as error:
        cause = error.__cause__ or error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        key = ".".join(getattr(error, "key_path", ()))
        message = getattr(cause, "message", str(cause)) if isinstance(cause, ParsingError) else str(cause)
        raise ConfigError(f"{fit.source}: {key + ': ' if key else ''}{_one_line(message)}") from None
