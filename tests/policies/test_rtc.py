"""RTC: the weights and the guidance of its paper, and the actions of LeRobot's RTC."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from user_sys.policies.rtc import ChunkPrefix, draw_prefix_lengths, guided_velocity

H, A = 8, 3
ROOT = Path(__file__).resolve().parents[2]
LEROBOT = Path(os.environ.get("USER_SYS_LEROBOT_PYTHON", ROOT / ".venv-lerobot/bin/python"))


def prefix_of(count: int, delay: int, seed: int = 0) -> ChunkPrefix:
    torch.manual_seed(seed)
    return ChunkPrefix.of(torch.rand(2, count, A) * 2 - 1, torch.full((2,), count), torch.full((2,), delay), H)


@pytest.mark.parametrize(("count", "delay"), [(6, 2), (8, 4), (3, 5), (5, 0), (0, 2)])
def test_weights_are_those_of_the_paper(count: int, delay: int) -> None:
    wanted = []
    for i in range(H):
        c = (count - i) / (count - min(delay, count) + 1)
        soft = c * (math.exp(c) - 1) / (math.e - 1)
        wanted.append(1.0 if i < min(delay, count) else soft if i < count else 0.0)
    np.testing.assert_allclose(prefix_of(count, delay).weights().numpy(), [wanted, wanted], rtol=1e-5)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 0.9])
def test_guidance_is_the_vector_jacobian_product_of_the_paper(t: float) -> None:
    prefix = prefix_of(6, 2)
    matrix, x = torch.randn(H * A, H * A) / 5, torch.randn(2, H, A)

    def velocity(at: Tensor) -> Tensor:
        return (at.flatten(1) @ matrix).view(at.shape)

    error = (prefix.weights()[..., None] * (prefix.actions - x - (1 - t) * velocity(x))).flatten(1)
    jacobian = torch.eye(H * A) + (1 - t) * matrix.T  # of x_1 by x
    r_squared = (1 - t) ** 2 / (t**2 + (1 - t) ** 2)
    strength = min(5.0, (1 - t) / (t * r_squared)) if t else 5.0
    wanted = velocity(x) + strength * (error @ jacobian).view(x.shape)
    np.testing.assert_allclose(guided_velocity(velocity, x, t, prefix, 5.0), wanted, rtol=1e-4, atol=1e-5)


def test_guidance_draws_a_chunk_to_its_promised_actions() -> None:
    prefix, free = prefix_of(6, 3), torch.randn(2, H, A)

    def velocity(x: Tensor, t: float) -> Tensor:
        return x * (2 * t - 1) / (t**2 + (1 - t) ** 2)  # of standard normal chunks

    guided = free
    for step in range(10):
        t = step / 10
        free = free + velocity(free, t) / 10
        guided = guided + guided_velocity(lambda at, t=t: velocity(at, t), guided, t, prefix, 5.0) / 10  # type: ignore[misc]
    off, before = ((each - prefix.actions).abs().mean((0, 2)) for each in (guided, free))
    assert off[:3].max() < 0.1 < before[:3].min(), "the first are kept"
    assert (off[3:6] < before[3:6]).all() and off[3] < off[5], "the next are drawn, less and less"
    torch.testing.assert_close(guided[:, 6:], free[:, 6:])


def test_drawn_delays_leave_an_action_to_learn() -> None:
    exists = torch.arange(H) < torch.tensor([[1], [2], [H]])
    drawn = torch.stack([draw_prefix_lengths(exists, 4) for _ in range(200)])
    assert drawn.min() == 0 and drawn.max(0).values.tolist() == [0, 1, 4]


@pytest.mark.lerobot
@pytest.mark.parametrize(("count", "delay", "guidance_max"), [(6, 2, 5.0), (8, 4, 10.0), (5, 0, 5.0), (3, 3, 10.0)])
def test_actions_are_those_of_lerobot(tmp_path: Path, count: int, delay: int, guidance_max: float) -> None:
    prefix, steps = prefix_of(count, delay, seed=count), 10
    matrix, x = torch.randn(A, A), torch.randn(2, H, A)
    assert LEROBOT.exists(), f"{LEROBOT} is missing: `make test-lerobot` sets it up"
    given = {"matrix": matrix, "x": x, "prefix": prefix.actions[:, :count]}
    numbers = {"delay": delay, "steps": steps, "guidance_max": guidance_max}
    np.savez(tmp_path / "in.npz", **{name: each.numpy() for name, each in given.items()}, **numbers)
    command = [str(LEROBOT), str(Path(__file__).with_name("rtc_peer.py")), "in.npz", "out.npz"]
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    for step in range(steps):
        t = step / steps
        velocity = guided_velocity(
            lambda at, t=t: torch.tanh(at @ matrix) * (1 + t) - at,  # type: ignore[misc]
            x,
            t,
            prefix,
            guidance_max,
            through_network=False,
        )
        x = x + velocity / steps
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(x.numpy(), found["x"], rtol=1e-4, atol=1e-5)
