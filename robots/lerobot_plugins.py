"""LeRobot's devices: its registries and plugins, a device on its own thread, and a probe for installed packages.

LeRobot (0.4.4 or later; extra ``lerobot``) is imported when the first device is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal, TypeVar

from hal.errors import HardwareLost, SpecError, install_hint
from hal.resource import Kind, ResourceRecord, local_node
from hal.robot import no_op
from robots.device import DeviceLock, DeviceThread

DeviceKind = Literal["robot", "teleoperator"]
PACKAGE_FROM_KIND: dict[DeviceKind, str] = {"robot": "robots", "teleoperator": "teleoperators"}
MAX_ATTEMPTS = 3
CONNECT_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)

T = TypeVar("T")


class PluginDevice:
    """A device of LeRobot; locked, and on a thread of its own, from `connect` to `disconnect`. One thread calls it.

    Attributes:
        device: LeRobot's object. The next connection starts with a new one.
    """

    def __init__(self, kind: DeviceKind, name: str, settings: Mapping[str, Any]) -> None:
        """Raises SpecError, see `make_device`."""
        self.name = name
        self._make = partial(make_device, kind, name, settings)
        self.device = self._make()
        self._lock = DeviceLock(*device_lock_names(settings))
        self._thread: DeviceThread | None = None

    @property
    def is_connected(self) -> bool:
        return self._thread is not None

    def connect(self, function: Callable[[], object], check_stop: Callable[[], None] = no_op) -> bool:
        """Call `function`, which connects LeRobot's object. Returns whether the device is calibrated.

        Raises:
            HardwareLost: it does not answer, or another process has locked it. `disconnect` must follow.
        """
        self._lock.acquire()
        self._thread = DeviceThread(f"LeRobot's {self.name}")
        self.call("connecting", function, CONNECT_TIMEOUT_S, check_stop)
        return bool(
            self.call("checking the calibration", lambda: self.device.is_calibrated, CONNECT_TIMEOUT_S, check_stop)
        )

    def call(
        self, operation: str, function: Callable[[], T], timeout_s: float, check_stop: Callable[[], None] = no_op
    ) -> T:
        """Call `function` on the thread, again if the bus drops a packet: LeRobot raises at the first."""
        if self._thread is None:
            raise HardwareLost(f"LeRobot's {self.name} is not connected")
        return self._thread.call(operation, partial(self._with_retries, function), timeout_s, check_stop)

    def disconnect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Disconnect each part, even if another fails. A call that hangs is followed by this once it returns."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        steps = [partial(_disconnect, part) for part in parts(self.device).values()]
        for step in steps:
            try:
                thread.call("disconnecting", step, timeout_s)
            except HardwareLost as error:
                log.warning("lerobot.disconnect %s", error)
        thread.close(*steps)
        self._lock.release()
        self.device = self._make()

    def _with_retries(self, function: Callable[[], T]) -> T:
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return function()
            except ConnectionError as error:
                log.info("lerobot.retry %s: %s", self.name, error)
        return function()


def parts(device: Any) -> dict[str, Any]:
    """The device, and those of its attributes that have a motor bus, as the arms of a bimanual robot.

    By the prefix of their features: ``left_`` for the attribute ``left_arm``.
    """
    found = {
        name.removesuffix("arm"): part
        for name, part in vars(device).items()
        if hasattr(getattr(part, "bus", None), "motors")
    }
    return {"": device, **found}


def _disconnect(part: Any) -> None:
    if getattr(part, "is_connected", False):
        part.disconnect()


def device_lock_names(settings: Mapping[str, Any]) -> Iterator[str]:
    """The devices in the settings of a LeRobot plugin, at any depth.

    They are strings whose key ends in ``port`` (``left_arm_port`` too), and paths below ``/dev``. A numeric port is a
    network port and is skipped.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from device_lock_names(value)
        elif isinstance(value, str) and (name.endswith("port") or value.startswith("/dev/")):
            yield value


@cache
def _registries() -> dict[DeviceKind, tuple[Any, Callable[[Any], Any]]]:
    """For each kind: LeRobot's config registry, with all plugins imported, and its factory function.

    Raises:
        SpecError: LeRobot is not installed, or fails to import.
    """
    try:
        from lerobot.robots import RobotConfig, make_robot_from_config
        from lerobot.teleoperators import TeleoperatorConfig, make_teleoperator_from_config
        from lerobot.utils.import_utils import register_third_party_plugins
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision does not match torch
        raise SpecError(f"LeRobot cannot be imported: {error}; install it with: {install_hint('lerobot')}") from error
    for package in (*PACKAGE_FROM_KIND.values(), "cameras"):
        _import_built_in(f"lerobot.{package}")
    register_third_party_plugins()
    return {
        "robot": (RobotConfig, make_robot_from_config),
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
        config = read_config(kind, name, settings)
        if hasattr(config, "cameras"):
            config.cameras = {}  # our own cameras replace LeRobot's, of which LeKiwi has two by default
        return make(config)
    except Exception as error:  # plugins raise any exception
        raise SpecError(f"LeRobot's {kind} {name!r} cannot be made: {type(error).__name__}: {error}") from error


def read_config(kind: DeviceKind, name: str, settings: Mapping[str, Any]) -> Any:
    """Decode LeRobot's config of a device as its command line does. Raises any exception of the plugin."""
    from draccus.parsers.decoding import decode

    return decode(_registries()[kind][0], {"type": name, **settings})


def probe_plugins() -> Iterator[ResourceRecord]:
    """Yield one DRIVER record for each device package of LeRobot, and for each plugin that follows its naming rule.
    Imports none of them.

    A package may define several types; a robot's option ``type`` names one, see docs/robots.md.
    """
    found = find_spec("lerobot")
    for folder in [] if found is None else map(Path, found.submodule_search_locations or ()):
        for kind, group in PACKAGE_FROM_KIND.items():
            for package in sorted((folder / group).glob("*/__init__.py")):
                yield _driver_record(package.parent.name, kind, "lerobot")
    for distribution in distributions():
        name = (distribution.name or "").lower().replace("-", "_")
        for kind in PACKAGE_FROM_KIND:
            if name.startswith(prefix := f"lerobot_{kind}_"):
                yield _driver_record(name.removeprefix(prefix), kind, f"{name} {distribution.version}")


def _driver_record(name: str, kind: str, package: str) -> ResourceRecord:
    return ResourceRecord(
        kind=Kind.DRIVER,
        name=f"lerobot/{kind}/{name}",
        model=name,
        node=local_node(),
        capabilities=(kind,),
        labels={"package": package},
        found_by="lerobot",
    )
