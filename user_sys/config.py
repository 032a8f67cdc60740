"""Configuration files: YAML differences and dotted overrides become typed settings (`hal.settings`).

Each default lives in the class that it configures; a YAML file and the command line hold differences only. Anything
invalid raises a `ConfigError` of one line with the place, the key, the value and the allowed ones.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from hal.durable import replace_durably, sync_folder
from hal.errors import SpecError
from hal.settings import CommandLineValue, SettingsError, read_settings
from user_sys.errors import ConfigError

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20


def load(kind: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """The configuration `kind` (a dataclass) with the differences in the YAML file `path`, then those in `overrides`.

    Overrides are ``--section.key=value`` or ``--section.key value``; values are YAML, and items of a list are
    reached by number (``--robots.0.name=left``). Overrides win over the file.

    Raises:
        ConfigError: one line with key and file: the file is missing or not YAML, a key is unknown or missing, a value
            is not allowed, or a check in `__post_init__` failed.
    """
    return build(kind, {} if path is None else read_yaml(path), str(path or "defaults"), overrides)


def build(kind: type[T], differences: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> T:
    """As `load`, of plain `differences` from `source`, which messages name."""
    changes = _parse_overrides(overrides)
    tree: Any = differences
    for key, change in changes.items():
        tree = _merged(tree, key.split("."), change, key)
    try:
        return read_settings(kind, tree)
    except SettingsError as error:
        key = error.key
        is_override = any(key == k or key.startswith(f"{k}.") or k.startswith(f"{key}.") for k in changes if key)
        raise ConfigError(f"--{error}" if is_override else f"{source}: {error}") from None
    except (ConfigError, SpecError) as error:
        where = f"{source} with {' '.join(f'--{key}' for key in changes)}" if changes else source
        raise ConfigError(f"{where}: {_one_line(error)}") from None


def save(config: object, path: Path) -> None:
    """Writes every value of `config` (a dataclass) as YAML, durably; `load` of the file gives an equal config.

    An equal file is only synced, which a full disk permits too. Raises OSError.
    """
    # Non-ASCII characters are escaped: YAML treats some of them, such as U+0085, as line ends.
    text = yaml.dump(as_dict(config), Dumper=_Dumper, sort_keys=False)
    if path.exists() and path.read_bytes() == text.encode():
        sync_folder(path.parent)
    else:
        replace_durably(path, text.encode())


def as_dict(config: object) -> dict[str, Any]:
    """The values of `config` (a dataclass) as plain, nested YAML types."""
    plain: dict[str, Any] = _with_lists(msgspec.to_builtins(config, enc_hook=str))
    return plain


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


# YAML -----------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """The scalars of YAML 1.2: `1e-3` is a number; `on`, `off`, `yes`, `no`, dates and `1:30` are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes the text that `_Loader` would take for another scalar."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_DIGITS = r"[-+]?(0|[1-9][0-9]*)"
for _tag, _pattern in (
    ("null", "~|null|Null|NULL|"),
    ("bool", "true|True|TRUE|false|False|FALSE"),
    ("int", _DIGITS),
    ("float", rf"{_DIGITS}(\.[0-9]*)?([eE][-+]?[0-9]+)?|[-+]?\.[0-9]+|[-+]?\.inf|\.nan"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`. Raises ConfigError: no such file, not YAML, or not a mapping."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_FILE_BYTES} bytes, which no configuration is; give another file"
            )
        differences = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_nearest_file(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it is not text in UTF-8; give a YAML file") from None
    if differences is None:
        return {}
    if not isinstance(differences, dict):
        raise ConfigError(f"{path}: expected sections and keys, got {_one_line(repr(differences))[:80]}")
    return differences


def _nearest_file(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def rewrite_yaml(text: str, change: Callable[[Any], Any]) -> str:
    """`text` with its content changed, without its comments. Raises ConfigError: it is not YAML."""
    changed: str = yaml.dump(change(_parse_yaml(text, "")), Dumper=_Dumper, sort_keys=False, width=sys.maxsize)
    return changed


def _parse_yaml(text: str, source: str) -> Any:
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=_Loader))
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader
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


# Overrides ------------------------------------------------------------------------------------------------------------


def _parse_overrides(overrides: Sequence[str]) -> dict[str, CommandLineValue]:
    """``--a.b=v`` and ``--a.b v`` by their key ``a.b``, in order; the last value of a repeated key counts."""
    changes: dict[str, CommandLineValue] = {}
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
        changes.pop(key, None)  # it takes effect after the overrides before it
        changes[key] = CommandLineValue(text, _value_of(text))
    return changes


def _value_of(text: str) -> Any:
    """The value of an override; text that is not YAML is itself."""
    try:
        return _parse_yaml(text, "")
    except ConfigError:
        return text


def _merged(tree: Any, path: Sequence[str], change: CommandLineValue, key: str) -> Any:
    """A copy of `tree` with the change at `path`; items of a list in `tree` are reached by number."""
    if not path:
        return change
    name, *rest = path
    if isinstance(tree, CommandLineValue):  # of an earlier override
        tree = tree.value
    if isinstance(tree, list):
        if not name.isdigit() or int(name) >= len(tree):
            at = key.removesuffix("." + ".".join(rest)) if rest else key
            raise ConfigError(f"--{at}: no item {name}: the list has {len(tree)} items")
        return [_merged(item, rest, change, key) if n == int(name) else item for n, item in enumerate(tree)]
    section = tree if isinstance(tree, Mapping) else {}
    return {**section, name: _merged(section.get(name), rest, change, key)}


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
