"""The hardware layer's errors, grouped by the reaction of the caller.

HalError
├── SpecError            discard: a value does not fit the spec; the robot never received it
├── HardwareLost         reconnect: the device does not answer; nothing was commanded
│   └── StoppedAtRobot   latch the e-stop too: a person stopped or guides the robot at the robot itself
├── StaleObservation     retry: the newest reading is too old to act upon
├── LeaseError           yield: another session drives this robot
│   ├── LeaseHeld        retry later: names the holder
│   └── StaleToken       stop for good: a newer session has taken over
├── RegistryError        check the name and the health: no such resource, or the step is not allowed
├── StateError           free space, or repair the file: leases and overrides cannot be read or written
├── EmergencyStopped     stop the robot: latched until a person re-arms it
├── PlacementError       request less: explains the request, the resources and the difference
└── SupervisionError     read its log: a process cannot be started, or keeps exiting

This module imports neither msgspec nor numpy, so that the command line's ``--help`` stays fast.
"""

from __future__ import annotations


class HalError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(HalError):
    """A value does not fit its spec (name, shape, dtype or finiteness)."""


class HardwareLost(HalError):
    """The device stopped answering or was unplugged."""


class StoppedAtRobot(HardwareLost):
    """A person stopped or guides the robot at the robot itself, which ended the connection. The e-stop latches, so that
    the robot does not move by itself once it is connected again."""


class StaleObservation(HalError):
    """The newest observation is older than the spec's bound."""


class LeaseError(HalError):
    """The caller may not drive this robot."""


class LeaseHeld(LeaseError):
    """Another session holds the lease; the message names it."""


class StaleToken(LeaseError):
    """The caller's fencing token is older than one that the driver has seen."""


class RegistryError(HalError):
    """The registry has no such resource, or the resource's health does not allow the step."""


class StateError(HalError):
    """The database of leases, overrides and audit log cannot be read or written; nothing was changed."""


class EmergencyStopped(HalError):
    """The e-stop is latched; only a person can re-arm the robot."""


class PlacementError(HalError):
    """A request for resources cannot be met; the message explains why."""


class SupervisionError(HalError):
    """A supervised process cannot be started or kept running."""


def install_hint(extra: str) -> str:
    """How to install an optional dependency group, for error messages. The package is on no index: it is installed from
    a checkout or from a wheel file. Without ``-e`` a copy would replace the checkout of `make`."""
    return f"pip install -e '.[{extra}]' in a checkout, or with the wheel's name before [{extra}] (docs/deployment.md)"
