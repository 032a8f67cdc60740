"""Which processor a learner trains on."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from hal.resource import local_node
from user_sys.errors import ConfigError

log = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"]
CPU: Literal["cpu"] = "cpu"
AHEAD = -1
"""Priority of the stream on which a GPU trains; the lower, the more urgent. Pushes of weights have 0, the lowest."""


def training_device(wanted: Device, reserved: bool, card: int = 0) -> str:
    """What `wanted` comes to on this computer: ``cpu`` or ``cuda``.

    Args:
        reserved: the run has asked for a GPU (`needs`), which it is ``auto``'s to use.
        card: which of the GPUs that it sees this process trains on.

    Raises:
        ConfigError: ``cuda`` is wanted, and torch finds no GPU here; or a GPU is to be used, and there are too few.
    """
    if wanted == CPU or (wanted == "auto" and not reserved):
        return CPU
    import torch  # seconds: who only reads the configuration need not wait for it

    if torch.cuda.is_available():
        require_gpu(torch.cuda.device_count(), card)
        return "cuda"
    why = f"torch {torch.__version__} finds no GPU on {local_node()}"
    if wanted == "cuda":
        raise ConfigError(f"learner.device is cuda, and {why}")
    log.warning("learner.no_gpu the run needs a GPU, and %s: it trains on the processor", why)
    return CPU


def ahead_of_pushes(device: str) -> AbstractContextManager[Any]:
    """What this thread has a GPU do inside of it goes ahead of pushes; on the processor it changes nothing."""
    if device == CPU:
        return nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream(device, AHEAD))  # type: ignore[no-untyped-call]


def require_gpu(found: int, card: int) -> None:
    """Raises ConfigError: `found` GPUs are too few for a learner's process whose own is the one of number `card`."""
    if found <= card:
        raise ConfigError(
            f"each of learner.processes trains on a GPU of its own, one on GPU {card} of {local_node()}, and torch "
            f"finds {found} there: set learner.processes to fewer, or have `needs` ask for as many GPUs as processes"
        )
