"""The settings of a learner, and the device that it trains on."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from hal.resource import local_node
from hal.settings import Amount, Count, Limit, Positive, Share
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
class ComputeConfig:
    """How the learner computes an update; for large policies.

    Attributes:
        precision: or bf16 (autocast). Weights and optimizers stay as they are.
        parts: a batch is computed in so many parts, one after the other, whose gradients are averaged.
        recompute: the activations of transformer blocks are computed again in the backward pass, and take no memory.
        divide: each of `processes` holds a part of the linear layers that train, of their gradients and of Adam's
            moments (FSDP2). For bc and hg_dagger with acting_rate 1.
    """

    precision: Literal["float32", "bf16"] = "float32"
    parts: Count = 1
    recompute: bool = False
    divide: bool = False


@dataclass(frozen=True)
class LearnerConfig:
    """The settings of a learner.

    Attributes:
        algorithm: see algorithms.md; or a package's.
        options: settings of the algorithm.
        initial_policy: folder of a run; training starts from the policy of its newest checkpoint.
        processes: that train together; see hardware.md. Each has its own GPU or threads; batch and cache are divided
            among them.
        batch_size: transitions per update.
        demo_fraction: of mixed batches; the share of demonstrations and interventions.
        sampler: which steps are sampled, and how.
        cache_bytes: memory of the replay buffer's cache; other steps are read from disk when they are sampled.
        batches_ahead: batches that threads prepare during an update; 0 needs no threads and suits state observations.
        warmup_updates: before online steps; on demonstrations.
        min_demonstrations: before the first update; finished episodes with steps of a person or a scripted expert, and
            imported ones; attempts by hand that failed do not count. null is 1 for a policy with `pretrain_updates`,
            and 0 for others.
        utd_max: updates per online step. The warm-up is added; it bounds how often the same data is used.
        staleness: versions acting may be behind; null is free-running. An algorithm
            that replays steps waits for slower robots. One that uses each step once drops older steps, and 0 makes it
            on-policy; `utd_max`, `warmup_updates`, `batches_ahead` and the conditions of `publish` do not apply to it.
        publish: when weights are published, and in which precisions.
        checkpoint_interval_s: seconds between checkpoints.
        checkpoints_kept: number of checkpoints on disk.
        report_interval_s: seconds between reports of scalars.
        device: cpu, cuda or auto. auto is a GPU if `resources` request one.
        compute: precision and memory of an update.
        threads: CPU threads of torch per process; 1 leaves the rest of a small computer to the robots.
        max_training_s: limit of training time. The time in which `staleness` or `utd_max` held it up is not counted.
        max_updates: limit of updates; 0 is unlimited.
    """

    algorithm: str = "rlpd"
    options: dict[str, Any] = field(default_factory=dict)
    initial_policy: str = ""
    processes: Count = 1
    batch_size: Count = 256
    demo_fraction: Share = DEMO_FRACTION
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    cache_bytes: Annotated[int, Meta(ge=MIN_CACHE_BYTES)] = 256 << 20
    batches_ahead: Limit = 0
    warmup_updates: Count = 500
    min_demonstrations: Limit | None = None
    utd_max: Positive = 8.0
    staleness: Limit | None = None
    publish: PublishConfig = field(default_factory=PublishConfig)
    checkpoint_interval_s: Amount = 20.0
    checkpoints_kept: Count = 3
    report_interval_s: Amount = 1.0
    device: TrainingDevice = "auto"
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    threads: Count = 1
    max_training_s: Positive = 300.0
    max_updates: Limit = 0

    def __post_init__(self) -> None:
        if self.publish.on_success_drop == "best" and self.staleness is not None:
            raise ConfigError(
                f"learner.publish.on_success_drop is best, which has robots act with an old version, and "
                f"learner.staleness {self.staleness} would hold training up: set one of them to its default"
            )
        if self.compute.divide and self.processes == 1:
            raise ConfigError("learner.compute.divide divides a policy among processes, and learner.processes is 1")
        if (why := self.sampler.replaced_by) and self.demo_fraction != DEMO_FRACTION:
            raise ConfigError(f"learner.demo_fraction has no effect with {why}: remove it")
        if self.batch_size % (self.processes * self.compute.parts):
            parts, times = "", ""
            if self.compute.parts > 1:
                parts, times = f" in {self.compute.parts} parts", " times compute.parts"
            raise ConfigError(
                f"learner: {self.processes} processes{parts} do not divide a batch of {self.batch_size} evenly; "
                f"set batch_size to a multiple of processes{times}"
            )
        if self.cache_bytes // self.processes < MIN_CACHE_BYTES:
            raise ConfigError(
                f"learner: cache_bytes {self.cache_bytes} is divided among {self.processes} processes, and each needs "
                f"{MIN_CACHE_BYTES}; raise it"
            )
