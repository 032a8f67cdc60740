"""Which processor a learner trains on.

What can be set about a learner.
"""

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
"""Priority of the stream on which a GPU trains; the lower, the more urgent. Pushes of weights have 0, the lowest."""


def training_device(requested: TrainingDevice, reserved: bool, gpu: int = 0) -> str:
    """What `wanted` comes to on this computer: ``cpu`` or ``cuda``.

    Args:
        reserved: the run has asked for a GPU (`resources`), which it is ``auto``'s to use.
        card: which of the GPUs that it sees this process trains on.

    Raises:
        ConfigError: ``cuda`` is wanted, and torch finds no GPU here; or a GPU is to be used, and there are too few.
    """
    if requested == CPU or (requested == "auto" and not reserved):
        return CPU
    import torch  # seconds: who only reads the configuration need not wait for it

    if torch.cuda.is_available():
        require_gpu(torch.cuda.device_count(), gpu)
        return "cuda"
    why = f"torch {torch.__version__} finds no GPU on {local_node()}"
    if requested == "cuda":
        raise ConfigError(f"learner.device is cuda, and {why}")
    log.warning("learner.no_gpu the run needs a GPU, and %s: it trains on the processor", why)
    return CPU


def training_stream(device: str) -> AbstractContextManager[Any]:
    """What this thread has a GPU do inside of it goes ahead of pushes; on the processor it changes nothing."""
    if device == CPU:
        return nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream(device, TRAINING_STREAM_PRIORITY))  # type: ignore[no-untyped-call]


def require_gpu(found: int, gpu: int) -> None:
    """Raises ConfigError: `found` GPUs are too few for a learner's process whose own is the one of number `card`."""
    if found <= gpu:
        raise ConfigError(
            f"each of learner.processes trains on a GPU of its own, one on GPU {gpu} of {local_node()}, and torch "
            f"finds {found} there: set learner.processes to fewer, or let `resources` request as many GPUs as processes"
        )


MIN_CACHE_BYTES = 1 << 16
DEMO_FRACTION = 0.5


@dataclass(frozen=True)
class LearnerConfig:
    """The learner's settings.

    Attributes:
        algorithm: RLPD's own settings.
        processes: how many train it together, on one computer or several; each has a GPU of its own, or threads of its
            own. Batch and cache are divided among them.
        batch_size: transitions in an update.
        demo_fraction: share of demonstrations and interventions in a batch of the mixed sampler.
        sampler: what batches are drawn from, and how.
        cache_bytes: memory of the replay buffer's hot cache; what does not fit is read from the disk when it is drawn.
        batches_ahead: how many batches are got ready while one trains; 0 saves the threads, where states are all.
        warmup_updates: updates allowed on demonstrations alone, before the first online step.
        utd_max: the staleness bound: updates allowed for each online step, besides the warm-up.
        publish: when weights are published, and in which precisions.
        checkpoint_interval_s, checkpoints_kept: likewise, and how many stay on disk.
        report_interval_s: from one report of scalars to the next.
        device: of the networks: cpu, cuda, or auto: a GPU if `resources` requests one.
        threads: CPU threads of torch, in each process; one leaves the rest of a small machine to the robots.
        max_training_s: training ends then; time in which the staleness bound held it up does not count.
        max_updates: ... or after so many updates; 0 sets no such end.
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
            raise ConfigError("learner: batch_size, threads and checkpoints_kept must be at least 1")
        if self.cache_bytes < MIN_CACHE_BYTES or self.batches_ahead < 0 or not 0 <= self.demo_fraction <= 1:
            raise ConfigError(
                f"learner: cache_bytes must be at least {MIN_CACHE_BYTES}, batches_ahead not negative, "
                "and demo_fraction a share between 0 and 1"
            )
        if self.sampler.kind != "mixed" and self.demo_fraction != DEMO_FRACTION:
            raise ConfigError(f"demo_fraction means nothing to sampler.kind {self.sampler.kind!r}: leave it out")
        if self.processes < 1 or self.batch_size % self.processes:
            raise ConfigError(
                f"learner: {self.processes} processes do not divide a batch of {self.batch_size} evenly; "
                "processes must be at least 1, and batch_size a multiple of it"
            )
        if self.cache_bytes // self.processes < MIN_CACHE_BYTES:
            raise ConfigError(
                f"learner: cache_bytes {self.cache_bytes} is shared by {self.processes} processes, and each needs "
                f"{MIN_CACHE_BYTES}"
            )
        if self.processes > 1 and self.publish.green_sms:
            raise ConfigError("learner.publish: green_sms is for a learner of one process; set collective_ctas instead")
        if self.utd_max <= 0 or self.warmup_updates < 1:
            raise ConfigError("learner: utd_max must be above 0 and warmup_updates at least 1, or nothing is learned")
