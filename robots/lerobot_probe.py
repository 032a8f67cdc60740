"""Discover the robots, cameras and input devices of LeRobot and its plugins, without importing them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from hal.resource import Kind, ResourceRecord, local_node

BUILT_IN = {"robots": "robot", "cameras": "camera", "teleoperators": "teleoperator"}
PLUGIN_PREFIX = "lerobot_"


def probe_plugins() -> Iterator[ResourceRecord]:
    """Yield one DRIVER record for each device package of LeRobot, and for each plugin that follows its naming rule.

    A package may define several types; a robot's option ``type`` names one, see docs/robots.md.
    """
    found = find_spec("lerobot")
    for folder in [] if found is None else map(Path, found.submodule_search_locations or ()):
        for group, sort in BUILT_IN.items():
            for package in sorted((folder / group).glob("*/__init__.py")):
                yield _record(package.parent.name, sort, "lerobot")
    for distribution in distributions():
        name = (distribution.name or "").lower().replace("-", "_")
        for sort in BUILT_IN.values():
            if name.startswith(f"{PLUGIN_PREFIX}{sort}_"):
                yield _record(name.removeprefix(f"{PLUGIN_PREFIX}{sort}_"), sort, f"{name} {distribution.version}")


def _record(name: str, sort: str, package: str) -> ResourceRecord:
    return ResourceRecord(
        kind=Kind.DRIVER,
        name=f"lerobot/{sort}/{name}",
        model=name,
        node=local_node(),
        capabilities=(sort,),
        labels={"package": package},
        found_by="lerobot",
    )
