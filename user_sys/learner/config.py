"""The settings of a learner, and the device that it trains on."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from hal.resource import local_node
from user_sys.algorithms.rlpd_config import RlpdConfig
from user_sys.errors import ConfigError
from user_sys.replay.sampler import SamplerConfig
from user_sys.weights.publisher import PublishConfig

log = logging.getLogger(__name__)

TrainingDevice = Literal["auto", "cpu", "cuda"]
CPU: Literal["cpu"] = "cpu"
TRAINING_STREAM_PRIORITY = -1
"""Priority of the CUDA stream that trains; a lower number is more urgent. Pushes of weights have 0, the lowest."""


def training_device(requested: TrainingDevice, reserved: bool, gpu: int = 0) -> str:
    """Resolves the setting `device` on this computer: ``cpu`` or ``cuda``.

    Args:
        reserved: the run has requested a GPU (`resources`), which ``auto`` then uses.
        gpu: index of this process's GPU among the visible ones.

    Raises:
        ConfigError: ``cuda`` is set and torch finds no GPU here, or there are too few GPUs.
    """
    if requested == CPU or (requested == "auto" and not reserved):
        return CPU
    import torch  # takes seconds, which readers of the configuration need not spend

    if torch.cuda.is_available():
        require_gpu(torch.cuda.device_count(), gpu)
        return "cuda"
    why = f"torch {torch.__version__} finds no GPU on {local_node()}"
    if requested == "cuda":
        raise ConfigError(f"learner.device is cuda, and {why}")
    log.warning("learner.no_gpu the run has requested a GPU, but %s: it trains on the CPU", why)
    return CPU


def training_stream(device: str) -> AbstractContextManager[Any]:
    """Runs this thread's GPU work ahead of pushes; it has no effect on the CPU."""
    if device == CPU:
        return nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream(device, TRAINING_STREAM_PRIORITY))  # type: ignore[no-untyped-call]


def require_gpu(found: int, gpu: int) -> None:
    """Raises ConfigError if there is no GPU of index `gpu` among the `found` ones."""
    if found <= gpu:
        raise ConfigError(
            f"each of learner.processes trains on its own GPU, one of them on GPU {gpu} of {local_node()}, but "
            f"torch finds {found} there: lower learner.processes, or request as many GPUs as processes in `resources`"
        )


MIN_CACHE_BYTES = 1 << 16
DEMO_FRACTION = 0.5


@dataclass(frozen=True)
class LearnerConfig:
    """The settings of a learner.

    Attributes:
        algorithm: settings of RLPD.
        processes: number of processes that train together, on one or several computers. Each has its own GPU or
            threads;
            batch and cache are divided among them.
        batch_size: transitions per update.
        demo_fraction: fraction of demonstrations and interventions in a batch of the mixed sampler.
        sampler: which steps are sampled, and how.
        cache_bytes: memory of the replay buffer's cache; other steps are read from disk when they are sampled.
        batches_ahead: batches that threads prepare during an update; 0 needs no threads and suits state observations.
        warmup_updates: updates on demonstrations before the first online step.
        utd_max: bound of staleness: updates per online step, in addition to the warm-up.
        publish: when weights are published, and in which precisions.
        checkpoint_interval_s: seconds between checkpoints.
        checkpoints_kept: number of checkpoints on disk.
        report_interval_s: seconds between reports of scalars.
        device: ``cpu``, ``cuda``, or ``auto``: a GPU if the run's `resources` request one.
        threads: CPU threads of torch per process; 1 leaves the rest of a small computer to the robots.
        max_training_s: limit of training time, without the time in which the staleness bound held it up.
        max_updates: limit of updates; 0 is unlimited.
    """

    algorithm: RlpdConfig = field(default_factory=RlpdConfig)
    processes: int = 1
    batch_size: int = 256
    demo_fraction: float = DEMO_FRACTION
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    cache_bytes: int = 256 << 20
    batches_ahead: int = 0
    warmup_updates: int = 500
    utd_max: float = 8.0
    publish: PublishConfig = field(default_factory=PublishConfig)
    checkpoint_interval_s: float = 20.0
    checkpoints_kept: int = 3
    report_interval_s: float = 1.0
    device: TrainingDevice = "auto"
    threads: int = 1
    max_training_s: float = 300.0
    max_updates: int = 0

    def __post_init__(self) -> None:
        if min(self.batch_size, self.threads, self.checkpoints_kept) < 1:
            raise ConfigError("learner: set batch_size, threads and checkpoints_kept to 1 or more")
        if self.cache_bytes < MIN_CACHE_BYTES or self.batches_ahead < 0 or not 0 <= self.demo_fraction <= 1:
            raise ConfigError(
                f"learner: set cache_bytes to {MIN_CACHE_BYTES} or more, batches_ahead to 0 or more, "
                "and demo_fraction between 0 and 1"
            )
        if self.sampler.kind != "mixed" and self.demo_fraction != DEMO_FRACTION:
            raise ConfigError(f"learner.demo_fraction has no effect with sampler.kind {self.sampler.kind!r}: remove it")
        if self.processes < 1 or self.batch_size % self.processes:
            raise ConfigError(
                f"learner: {self.processes} processes do not divide a batch of {self.batch_size} evenly; "
                "set processes to 1 or more, and batch_size to a multiple of it"
            )
        if self.cache_bytes // self.processes < MIN_CACHE_BYTES:
            raise ConfigError(
                f"learner: cache_bytes {self.cache_bytes} is divided among {self.processes} processes, and each needs "
                f"{MIN_CACHE_BYTES}; raise it"
            )
        if self.processes > 1 and self.publish.green_sms:
            raise ConfigError("learner.publish: green_sms works with one process only; set collective_ctas instead")
        if self.utd_max <= 0 or self.warmup_updates < 1:
            raise ConfigError(
                "learner: set utd_max above 0 and warmup_updates to 1 or more, otherwise no update is allowed"
            )
