"""What policies read: checks of vectors and pictures, and vectors of a robot with another dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hal.errors import SpecError
from hal.spec import ENVIRONMENT_STATE, STATE, CameraSpec
from user_sys.algorithms.algorithm import policy_arrays
from user_sys.plugins import load_policy
from user_sys.policies.conformance import example_observation, example_spec
from user_sys.policies.flow import FlowPolicy, FlowSettings
from user_sys.policies.policy import AGE_SUFFIX
from user_sys.policies.scaling import require_pictures


def test_vectors_of_a_float64_robot_act_as_float32() -> None:
    spec, seen = example_spec(), example_observation(np.random.default_rng(0))
    wide = replace(spec, observation=tuple(replace(each, dtype="float64") for each in spec.observation))
    actions = []
    for each, dtype in ((spec, np.float32), (wide, np.float64)):
        policy = FlowPolicy(each, settings=FlowSettings(hidden=(8,)))
        policy.load(policy_arrays(policy.make_module(spec, settings=policy.options)))
        observation = {name: array.astype(dtype) for name, array in seen.items()}
        actions.append(policy.act(observation, "", deterministic=True).actions.shape)
    assert actions[0] == actions[1]


READING: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("cnn", {"cameras": ["front", "wrist"], "picture_size": 8}),
    ("flow", {"cameras": ["front", "wrist"], "picture_size": 8, "pictures": True}),
    ("vla", {"cameras": ["front", "wrist"], "width": 16, "heads": 2}),
]


@pytest.mark.parametrize(("kind", "options"), READING, ids=[kind for kind, _ in READING])
def test_list_in_another_order_than_the_robots_is_refused(kind: str, options: dict[str, Any]) -> None:
    features, advice = [STATE, ENVIRONMENT_STATE], "give the robot's order, .* another order cannot be used"
    for name, listed in (("features", features), ("options.cameras", options.get("cameras", []))):
        if not listed:
            continue
        given = options | ({"cameras": listed[::-1]} if name == "options.cameras" else {})
        made, settings = load_policy(kind, given)
        with pytest.raises(SpecError, match=rf"policy.{name} is \[{', '.join(listed[::-1])}\]: {advice}"):
            made(example_spec(), settings=settings, features=features[::-1] if name == "features" else features)


@pytest.mark.parametrize("age", [np.zeros(1), np.zeros(2, np.float32)])
def test_age_of_a_picture_that_is_not_one_float32_is_refused(age: np.ndarray) -> None:
    camera = CameraSpec(name="front", height=8, width=8, rate_hz=10.0)
    picture = {camera.feature: np.zeros((8, 8, 3), np.uint8)}
    require_pictures([camera], picture | {camera.feature + AGE_SUFFIX: np.zeros(1, np.float32)})
    with pytest.raises(SpecError, match=r"\.age is float.* it needs float32 \(1,\)"):
        require_pictures([camera], picture | {camera.feature + AGE_SUFFIX: age})
