"""Weights brought to the host: equal to what the device holds, whatever it does meanwhile, and packed as elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from user_sys.weights.forms import narrow
from user_sys.weights.gpu.device import HostCopies, Unbounded, as_array
from user_sys.weights.gpu.packing import narrow_in_torch, narrow_tensor
from user_sys.weights.state import BF16

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
CORNERS = np.array(
    [
        0x0,
        0x80000000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x00008000,
        0x00018000,
        1,
    ],
    np.uint32,
).view(np.float32)


def values(count: int = 10_000) -> torch.Tensor:
    random = np.random.default_rng(0).integers(0, 1 << 32, count, np.uint64).astype(np.uint32).view(np.float32)
    return torch.from_numpy(np.concatenate((CORNERS, random[np.isfinite(random)])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ctas", [1, 3, 32])
def test_packing_rounds_as_the_learner_does_with_any_number_of_thread_blocks(device: str, ctas: int) -> None:
    source = values()
    packed = narrow_tensor(source.to(device), ctas).cpu()
    assert np.array_equal(as_array(packed).view(np.uint16), narrow(source.numpy()).view(np.uint16))
    assert torch.equal(narrow_in_torch(source).view(torch.int16), packed.view(torch.int16))


@pytest.mark.parametrize("device", DEVICES)
def test_a_snapshot_is_of_the_moment_at_which_it_was_taken(device: str) -> None:
    weights = {"w": torch.randn(300, 70, device=device), "b": torch.zeros(0, device=device)}
    weights["half"] = weights["w"].to(torch.bfloat16)[:, ::2]
    expected = {name: tensor.cpu().clone() for name, tensor in weights.items()}
    fetch = HostCopies(torch.device(device), Unbounded(ctas=2, chunk_bytes=4096)).snapshot(weights)
    for tensor in weights.values():
        tensor.add_(1.0)
    found = fetch()
    assert found["half"].dtype == BF16
    assert all(torch.equal(torch.from_numpy(found[n].view(np.int16)), expected[n].view(torch.int16)) for n in ["half"])
    assert all(np.array_equal(found[name], expected[name].numpy()) for name in ("w", "b"))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_packed_on_the_device_is_what_the_learner_would_have_published(device: str) -> None:
    weights = {"w": torch.randn(64, 33, device=device), "steps": torch.arange(3, device=device)}
    found = HostCopies(torch.device(device), pack="bf16").snapshot(weights)()
    assert found["w"].dtype == BF16 and found["w"].tobytes() == narrow(weights["w"].cpu().numpy()).tobytes()
    assert found["steps"].tolist() == [0, 1, 2], "what is no float32 stays as it is"
