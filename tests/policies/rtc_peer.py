"""Integrates chunks with LeRobot's RTC, in LeRobot's environment: ``rtc_peer.py IN.npz OUT.npz``.

The flow is v(x, t) = tanh(x M) (1 + t) - x, from noise at t = 0 to the chunk at t = 1; LeRobot's time runs backwards.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from lerobot.configs.types import RTCAttentionSchedule
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor


def main(source: str, target: str) -> None:
    with np.load(source) as given:
        matrix, x, prefix = (torch.from_numpy(given[name]) for name in ("matrix", "x", "prefix"))
        delay, steps, guidance_max = (given[name].item() for name in ("delay", "steps", "guidance_max"))
    config = RTCConfig(
        prefix_attention_schedule=RTCAttentionSchedule.EXP,
        max_guidance_weight=guidance_max,
        execution_horizon=prefix.shape[1],
    )
    processor = RTCProcessor(config)
    for step in range(int(steps)):
        time = 1.0 - step / steps
        velocity = processor.denoise_step(
            x, prefix, int(delay), time, lambda at, t=1.0 - time: -(torch.tanh(at @ matrix) * (1 + t) - at)
        )
        x = x - velocity / steps
    np.savez(target, x=x.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
