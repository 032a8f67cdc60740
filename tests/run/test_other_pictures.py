"""The control of `user-sys evaluate --other-pictures`: a policy sees the pictures of the episode before."""

from __future__ import annotations

import numpy as np
import pytest

from hal.spec import IMAGES, STATE
from user_sys.compose import PolicyConfig, RobotConfig
from user_sys.errors import ConfigError
from user_sys.policies.policy import ActionChunk, PolicyQuery
from user_sys.run.config import EvaluationConfig
from user_sys.run.evaluate import OtherPictures, evaluate

FRONT = IMAGES + "front"


class Watching:
    """A policy that keeps what it sees."""

    version, cameras = 3, ("front",)

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def act(self, query: PolicyQuery) -> ActionChunk:
        observation = query.observation
        self.seen.append((int(observation[STATE][0]), int(observation[FRONT][0])))
        return ActionChunk(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))


def test_each_step_shows_the_same_step_of_the_episode_before() -> None:
    watching = Watching()
    control = OtherPictures(watching)
    for first, steps in ((10, 2), (20, 3), (30, 1)):
        control.begin_episode()
        for number in range(first, first + steps):
            value = np.array([number])
            control.act(PolicyQuery({STATE: value, FRONT: value}, "", True))
    own_first = [(10, 10), (11, 11)]
    assert watching.seen == [*own_first, (20, 10), (21, 11), (22, 11), (30, 20)]
    assert control.version == 3 and control.cameras == ("front",)


def test_policy_without_pictures_is_refused() -> None:
    results = evaluate(RobotConfig(), PolicyConfig(), {}, EvaluationConfig(), lambda _: None, other_pictures=True)
    with pytest.raises(ConfigError, match="the policy mlp of robot panda-0 reads no pictures"):
        next(results)
