"""The hardware layer's errors, grouped by what the caller should do.

HalError
├── SpecError            discard: a value does not fit the spec; the robot never saw it
├── HardwareLost         reconnect: the device went away; nothing was commanded
├── StaleObservation     retry: the newest reading is too old to act upon
├── LeaseError           give way: someone else drives this robot
│   ├── LeaseHeld        retry later: names the holder
│   └── StaleToken       stop for good: a newer session has taken over
├── RegistryError        look again: no such resource, or its health does not allow that
├── EmergencyStopped     stop the robot: latched until a person re-arms it
├── PlacementError       ask for less: explains what was asked, what there is, what is missing
└── SupervisionError     look at its log: a node's process cannot be started, or ends again and again

How somebody comes by what a driver or a verb needs and this package does not bring by itself.
"""

from __future__ import annotations


class HalError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(HalError):
    """A value does not fit its spec (name, shape, dtype or finiteness)."""


class HardwareLost(HalError):
    """The device stopped answering or was unplugged."""


class StaleObservation(HalError):
    """The newest observation is older than the spec's bound."""


class LeaseError(HalError):
    """The caller may not drive this robot."""


class LeaseHeld(LeaseError):
    """Another session holds the lease; the message names it."""


class StaleToken(LeaseError):
    """The caller's fencing token is older than one that the driver has seen."""


class RegistryError(HalError):
    """A resource that the registry does not know, or a step that its health does not allow."""


class EmergencyStopped(HalError):
    """The e-stop is latched; only a person can re-arm the robot."""


class PlacementError(HalError):
    """A request for resources cannot be met; the message explains why."""


class SupervisionError(HalError):
    """A supervised process cannot be started or kept running."""


def install_hint(extra: str) -> str:
    """The command, in words. The package is on no index, where its name may be anybody's: it is a checkout or a wheel's
    file.
    """
    return f"pip install '.[{extra}]' in a checkout, or with the wheel's name before [{extra}] (docs/deployment.md)"
