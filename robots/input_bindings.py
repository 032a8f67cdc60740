"""Map the controls of an input device to action elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hal.errors import SpecError
from hal.spec import Array, RobotSpec


def motion_labels(spec: RobotSpec) -> tuple[str, ...]:
    """The labels of the action elements except the gripper, in order."""
    return tuple(label for index, label in enumerate(spec.action.labels) if index != spec.gripper)


def gripper_label(spec: RobotSpec) -> str:
    """The label of the gripper element; empty if there is none."""
    return spec.action.labels[spec.gripper] if spec.gripper >= 0 else ""


def pair_in_order(controls: Sequence[str], elements: Sequence[str]) -> dict[str, str]:
    """Pair controls with elements in order; empty controls are left out."""
    return {control: element for control, element in zip(controls, elements, strict=False) if control and element}


class InputBindings:
    """A map from control names to signed action elements: ``-z`` is the element z, inverted."""

    def __init__(self, element_from_control: Mapping[str, str], controls: Sequence[str], spec: RobotSpec) -> None:
        """Raises SpecError for a control that is not in `controls`, or an element that is not in the action."""
        self._size = len(spec.action.labels)
        self._bound: dict[str, tuple[int, float]] = {}
        for control, target in element_from_control.items():
            element = target.removeprefix("-")
            if control not in controls:
                raise SpecError(f"there is no control {control!r}; choose one of {list(controls)}")
            if element not in spec.action.labels:
                raise SpecError(
                    f"{control}: {spec.model} has no element {element!r}; choose one of {spec.action.labels}"
                )
            self._bound[control] = spec.action.labels.index(element), -1.0 if target.startswith("-") else 1.0

    def twist(self, values: Mapping[str, float], dead_zone: float = 0.0) -> Array:
        """Sum each element's controls, clipped: float32 (a,) in [-1, 1]. Values within the dead zone count as 0."""
        twist = np.zeros(self._size, np.float32)
        for control, value in values.items():
            if control in self._bound and abs(value) > dead_zone:
                index, sign = self._bound[control]
                twist[index] += sign * value
        clipped: Array = np.clip(twist, -1, 1)
        return clipped
