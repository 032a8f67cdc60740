"""Which control of an input device moves which element of an action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hal.errors import SpecError
from hal.spec import Array, RobotSpec


def motion_labels(spec: RobotSpec) -> tuple[str, ...]:
    """The labels of the action elements that are not the gripper's, in their order."""
    return tuple(label for index, label in enumerate(spec.action.labels) if index != spec.gripper)


def gripper_label(spec: RobotSpec) -> str:
    """The label of the gripper's element; empty where there is none."""
    return spec.action.labels[spec.gripper] if spec.gripper >= 0 else ""


def pair_in_order(controls: Sequence[str], elements: Sequence[str]) -> dict[str, str]:
    """One control for each element, as far as they go; a control that is empty is left out."""
    return {control: element for control, element in zip(controls, elements, strict=False) if control and element}


class InputBindings:
    """Controls by name to signed elements: ``-z`` is the element z, the other way round."""

    def __init__(self, element_from_control: Mapping[str, str], controls: Sequence[str], spec: RobotSpec) -> None:
        """Raises SpecError for a control that is not among `controls`, or an element that the action does not have."""
        self._size = len(spec.action.labels)
        self._bound: dict[str, tuple[int, float]] = {}
        for control, target in element_from_control.items():
            element = target.removeprefix("-")
            if control not in controls:
                raise SpecError(f"there is no control {control!r}; there are {list(controls)}")
            if element not in spec.action.labels:
                raise SpecError(f"{control}: {spec.model} has no element {element!r}; it has {spec.action.labels}")
            self._bound[control] = spec.action.labels.index(element), -1.0 if target.startswith("-") else 1.0

    def twist(self, values: Mapping[str, float], dead_zone: float = 0.0) -> Array:
        """float32 (a,), each in [-1, 1]: each element's controls added up. Values within the dead zone are 0."""
        twist = np.zeros(self._size, np.float32)
        for control, value in values.items():
            if control in self._bound and abs(value) > dead_zone:
                index, sign = self._bound[control]
                twist[index] += sign * value
        clipped: Array = np.clip(twist, -1, 1)
        return clipped
