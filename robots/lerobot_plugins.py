"""LeRobot's own side of the driver: its registries and plugins.

LeRobot (0.4.4 or later; the extra ``lerobot``) is imported when a device is built, not before.
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
    """Each kind's registry of configs, all plugins imported, and the function that builds a device from a config.

    Raises:
        SpecError: LeRobot is not installed, or fails to import.
    """
    try:
        from lerobot.cameras import CameraConfig
        from lerobot.cameras.utils import make_cameras_from_configs
        from lerobot.robots import RobotConfig, make_robot_from_config
        from lerobot.teleoperators import TeleoperatorConfig, make_teleoperator_from_config
        from lerobot.utils.import_utils import register_third_party_plugins
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit its torch raises RuntimeError
        raise SpecError(f"LeRobot cannot be used: {error}; it comes with: {install_hint('lerobot')}") from error
    for kind in ("robots", "teleoperators", "cameras"):
        _import_built_in(f"lerobot.{kind}")
    register_third_party_plugins()
    return {
        "robot": (RobotConfig, make_robot_from_config),
        "camera": (CameraConfig, lambda config: make_cameras_from_configs({"camera": config})["camera"]),
        "teleoperator": (TeleoperatorConfig, make_teleoperator_from_config),
    }


_import_errors: dict[str, str] = {}
"""LeRobot's devices that did not import, and why: a library of theirs is missing."""


def _import_built_in(package: str) -> None:
    """LeRobot's own devices register themselves when their modules are imported; some need libraries of their own."""
    for module in iter_modules(import_module(package).__path__, f"{package}."):
        try:
            if module.ispkg:
                import_module(module.name)
        except Exception as error:  # foreign modules fail in any way
            _import_errors[module.name.rpartition(".")[2]] = f"{type(error).__name__}: {error}"


def available_devices(kind: DeviceKind) -> list[str]:
    """The names of the devices that LeRobot and the installed plugins offer. Raises SpecError without LeRobot."""
    return sorted(_registries()[kind][0].get_known_choices())


def make_device(kind: DeviceKind, name: str, settings: Mapping[str, Any]) -> Any:
    """LeRobot's device of that name, not connected; `settings` are those of its command line.

    Raises:
        SpecError: no LeRobot, no such device (the message has the nearest name), settings that it refuses.
    """
    registry, make = _registries()[kind]
    if name not in registry.get_known_choices():
        near = get_close_matches(name, available_devices(kind), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {available_devices(kind)}"
        missing = f"; not importable: {_import_errors}" if _import_errors else ""
        raise SpecError(f"LeRobot has no {kind} {name!r}; {hint}{missing}")
    try:
        return make(read_config(kind, name, settings))
    except Exception as error:  # a plugin may fail in any way
        raise SpecError(f"LeRobot's {kind} {name!r} cannot be built: {type(error).__name__}: {error}") from error


def read_config(kind: DeviceKind, name: str, settings: Mapping[str, Any]) -> Any:
    """LeRobot's config of a device, decoded as its command line decodes it; raises what the plugin raises."""
    from draccus.parsers.decoding import decode

    return decode(_registries()[kind][0], {"type": name, **settings})


def call_with_retries(name: str, call: Callable[[], T]) -> T:
    """What `call` returns, at the last of `MAX_ATTEMPTS`: a bus of servos loses a packet now and then, and LeRobot
    gives up at the first."""
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return call()
        except ConnectionError as error:
            log.info("lerobot.retry %s: %s", name, error)
    return call()


def has_setting(kind: DeviceKind, name: str, setting: str) -> bool:
    """Whether the device's config has a field called `setting`."""
    choices = _registries()[kind][0].get_known_choices()
    return name in choices and setting in getattr(choices[name], "__dataclass_fields__", {})
