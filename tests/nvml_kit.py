"""A driver library of GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace


def nvml_of(gpus: int) -> SimpleNamespace:
    """In place of ``pynvml``: so many GPUs of 24 GB, with the UUIDs ``GPU-0``, ``GPU-1`` and so on."""
    return SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetName=lambda device: "L4",
        nvmlDeviceGetUUID=lambda device: f"GPU-{device}",
        nvmlDeviceGetCudaComputeCapability=lambda device: (8, 9),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(total=24 * 10**9, used=0),
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=0),
        nvmlDeviceGetNumGpuCores=lambda device: 7424,
    )
