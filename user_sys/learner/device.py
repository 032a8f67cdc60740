"""Which processor a learner trains on."""

from __future__ import annotations

import logging
from typing import Literal

from hal.resource import local_node
from user_sys.errors import ConfigError

log = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"]
CPU: Literal["cpu"] = "cpu"


def training_device(wanted: Device, reserved: bool) -> str:
    """The name of torch's device for `wanted`.

    Args:
        reserved: the run has asked for a GPU (`needs`), which it is ``auto``'s to use.

    Raises:
        ConfigError: ``cuda`` is wanted, and torch finds no GPU here.
    """
    if wanted == CPU or (wanted == "auto" and not reserved):
        return CPU
    import torch  # seconds: who only reads the configuration need not wait for it

    if torch.cuda.is_available():
        return "cuda"
    why = f"torch {torch.__version__} finds no GPU on {local_node()}"
    if wanted == "cuda":
        raise ConfigError(f"learner.device is cuda, and {why}")
    log.warning("learner.no_gpu the run needs a GPU, and %s: it trains on the processor", why)
    return CPU
