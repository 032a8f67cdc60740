"""Access to LeRobot's registries and plugins.

LeRobot (0.4.4 or later; extra ``lerobot``) is imported when the first device is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal, TypeVar

from hal.errors import SpecError, install_hint

DeviceKind = Literal["robot", "camera", "teleoperator"]
MAX_ATTEMPTS = 3

log = logging.getLogger(__name__)

T = TypeVar("T")


@cache
def _registries() -> dict[DeviceKind, tuple[Any, Callable[[Any], Any]]]:
    """For each kind: LeRobot's config registry, with all plugins imported, and its factory function.

    Raises:
        SpecError: LeRobot is not installed, or fails to import.
    """
    try:
        from lerobot.cameras import CameraConfig
        from lerobot.cameras.utils import make_cameras_from_configs
        from lerobot.robots import RobotConfig, make_robot_from_config
        from lerobot.teleoperators import TeleoperatorConfig, make_teleoperator_from_config
        from lerobot.utils.import_utils import register_third_party_plugins
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision does not match torch
        raise SpecError(f"LeRobot cannot be imported: {error}; install it with: {install_hint('lerobot')}") from error
    for kind in ("robots", "teleoperators", "cameras"):
        _import_built_in(f"lerobot.{kind}")
    register_third_party_plugins()
    return {
        "robot": (RobotConfig, make_robot_from_config),
        "camera": (CameraConfig, lambda config: make_cameras_from_configs({"camera": config})["camera"]),
        "teleoperator": (TeleoperatorConfig, make_teleoperator_from_config),
    }


_import_errors: dict[str, str] = {}
"""The LeRobot devices that failed to import, with the error; usually a library is missing."""


def _import_built_in(package: str) -> None:
    """LeRobot's devices register themselves when their modules are imported; some need extra libraries."""
    for module in iter_modules(import_module(package).__path__, f"{package}."):
        try:
            if module.ispkg:
                import_module(module.name)
        except Exception as error:  # third-party modules raise any exception
            _import_errors[module.name.rpartition(".")[2]] = f"{type(error).__name__}: {error}"


def available_devices(kind: DeviceKind) -> list[str]:
    """The names of the devices of LeRobot and its installed plugins. Raises SpecError without LeRobot."""
    return sorted(_registries()[kind][0].get_known_choices())


def make_device(kind: DeviceKind, name: str, settings: Mapping[str, Any]) -> Any:
    """Make LeRobot's device of that name, not connected; `settings` are as on its command line.

    Raises:
        SpecError: no LeRobot, no such device (the message has the nearest name), or invalid settings.
    """
    registry, make = _registries()[kind]
    if name not in registry.get_known_choices():
        near = get_close_matches(name, available_devices(kind), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {available_devices(kind)}"
        missing = f"; these failed to import: {_import_errors}" if _import_errors else ""
        raise SpecError(f"LeRobot has no {kind} {name!r}; {hint}{missing}")
    try:
        return make(read_config(kind, name, settings))
    except Exception as error:  # plugins raise any exception
        raise SpecError(f"LeRobot's {kind} {name!r} cannot be made: {type(error).__name__}: {error}") from error


def read_config(kind: DeviceKind, name: str, settings: Mapping[str, Any]) -> Any:
    """Decode LeRobot's config of a device as its command line does. Raises any exception of the plugin."""
    from draccus.parsers.decoding import decode

    return decode(_registries()[kind][0], {"type": name, **settings})


def call_with_retries(name: str, call: Callable[[], T]) -> T:
    """Call up to `MAX_ATTEMPTS` times: a servo bus drops packets, and LeRobot raises at the first."""
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return call()
        except ConnectionError as error:
            log.info("lerobot.retry %s: %s", name, error)
    return call()


def has_setting(kind: DeviceKind, name: str, setting: str) -> bool:
    """Whether the device's config has the field `setting`."""
    choices = _registries()[kind][0].get_known_choices()
    return name in choices and setting in getattr(choices[name], "__dataclass_fields__", {})
