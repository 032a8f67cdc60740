"""A point on a line that is to reach the origin: a task that algorithms learn within seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hal.spec import ACTION, STATE, ArraySpec, RobotSpec
from user_sys.algorithms.algorithm import TensorBatch
from user_sys.codec import Array
from user_sys.policies.policy import Policy

POINT = RobotSpec(
    model="point",
    rate_hz=10.0,
    observation=(ArraySpec(name=STATE, labels=("x",), units=("m",), low=(-1.0,), high=(1.0,)),),
    action=ArraySpec(name=ACTION, labels=("dx",), units=("m",), low=(-0.2,), high=(0.2,)),
)


def step_point(x: Array, action: Array) -> tuple[Array, Array]:
    """Moves a point on a line, which is to reach the origin: (next x, whether it is there), each (n, 1)."""
    x = np.clip(x + action, -1.0, 1.0)
    return x.astype(np.float32), np.abs(x) < 0.05


def success_rate(policy: Policy) -> float:
    reached = 0
    for start in np.linspace(-1.0, 1.0, 21, dtype=np.float32):
        x = np.array([start])
        actions: list[Array] = []
        for _ in range(10):
            actions = actions or list(policy.act({STATE: x}, "", deterministic=True).actions)
            x, done = step_point(x, actions.pop(0))
            if done[0]:
                reached += 1
                break
    return reached / 21


def windows(x: Array, actions: Array) -> TensorBatch:
    """Follows `actions` (n, H, 1) from `x` (n, 1): whole windows that end at the origin; as `BatchSpec.sequence`."""
    n, length = actions.shape[:2]
    observations, rewards, going = np.empty((n, length, 1), np.float32), np.zeros((n, length)), np.ones(n, bool)
    mask, done = np.zeros((n, length), bool), np.zeros(n, bool)
    for step in range(length):
        observations[:, step], mask[:, step] = x, going
        moved, there = step_point(x, actions[:, step])
        x = np.where(going[:, None], moved, x)
        rewards[:, step] = there[:, 0] & going
        done |= there[:, 0] & going
        going = going & ~there[:, 0]
    arrays = (observations, x, actions, rewards.astype(np.float32), mask, done)
    before, after, action, reward, exists, terminated = map(torch.from_numpy, arrays)
    return TensorBatch(
        observation={STATE: before},
        next_observation={STATE: after},
        action=action,
        reward=reward,
        discount=0.97 ** exists.sum(1),
        terminated=terminated,
        weight=torch.ones(n),
        mask=exists,
        phase=torch.zeros(n, length, dtype=torch.uint8),
        extras={ACTION: action, "safety": torch.zeros(n, length)},
    )


def chunks(x: Array, actions: Array) -> TensorBatch:
    """As `windows`, with the first observation and the discounted sum of rewards, as algorithms on chunks get them."""
    batch = windows(x, actions)
    discounts = 0.97 ** torch.arange(actions.shape[1])
    first = {name: value[:, 0].contiguous() for name, value in batch.observation.items()}
    return replace(batch, observation=first, reward=(batch.reward * discounts).sum(1))


def expert(x: Array, length: int) -> Array:
    """The actions (n, length, 1) that go straight to the origin."""
    actions = []
    for _ in range(length):
        actions.append(np.clip(-x, -0.2, 0.2).astype(np.float32))
        x, _ = step_point(x, actions[-1])
    return np.stack(actions, 1)
